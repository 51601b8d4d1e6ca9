"""The orthogonality penalty against autograd on its formula: per head, once an update, with its warm-up."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from precision import assert_close, in_double
from torch import Tensor

from redline.config.load import load_recipe
from redline.config.recipe import ModelConfig, TrainConfig
from redline.data.loader import Batch
from redline.errors import ConfigError
from redline.model.transformer import Transformer, build_model
from redline.train.objective import Eager, Sequences
from redline.train.optimizer import make_optimizers
from redline.train.orthogonality import penalise, penalty
from redline.train.process import Process
from redline.train.step import Learner, LossScale

CONFIG = ModelConfig(
    vocab_size=31, num_layers=2, hidden_size=18, num_heads=6, num_kv_heads=2, head_dim=4, ffn_size=20,
    context_length=8, qkv_bias=True,
)  # fmt: skip
TRAIN = TrainConfig(batch_size=4, steps=10, lr=1e-2)


def formula(model: Transformer, *, values: bool) -> Tensor:
    """The sum over heads of |W W^T - I|^2, a head at a time."""
    total = torch.zeros(())
    for block in model.blocks:
        heads = block.attn.qkv.weight.split(block.attn.head_size)
        for weight in heads[: block.attn.heads + block.attn.kv_heads * (2 if values else 1)]:
            total = total + (weight @ weight.T - torch.eye(len(weight))).square().sum()
    return total


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("changes", [{}, {"num_heads": 3, "num_kv_heads": None}, {"num_kv_heads": 1}])
def test_its_gradient_is_that_of_the_formula(values: bool, changes: Any) -> None:
    with in_double():
        model = build_model(replace(CONFIG, **changes), device="cpu", seed=0)
        parameters = [block.attn.qkv.weight for block in model.blocks]
        total = formula(model, values=values)
        expected = torch.autograd.grad(total, parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        found = penalise(model, 0.3, values=values)
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert parameter.grad is not None
            assert_close(parameter.grad, 1 + 0.3 * gradient)
        attn = model.blocks[0].attn
        heads = 2 * (attn.heads + attn.kv_heads * (2 if values else 1))
        assert_close(found["orthogonality_violation"], (total / heads / attn.head_size).sqrt())


@pytest.mark.parametrize("scale", [None, LossScale(value=256.0)])
@pytest.mark.parametrize("passes", [1, 4])
def test_an_update_adds_it_once_whatever_its_passes_and_its_loss_scale(
    passes: int, scale: LossScale | None
) -> None:
    with in_double():
        changes, tokens = [], torch.arange(36).view(4, 9) % 31
        for weight in (0.0, 0.5):
            model = build_model(CONFIG, device="cpu", seed=0)
            train = replace(TRAIN, orthogonality=weight, orthogonality_warmup_steps=4)
            gradients: list[Tensor] = []
            learner = Learner(
                model, make_optimizers(model, train), Process(0, 1, torch.device("cpu")), 0.0, scale
            )
            learner.penalise = penalty(
                model, train, lambda: 2
            )  # the third of four: three quarters of the weight

            def keep(model: Transformer = model, gradients: list[Tensor] = gradients) -> None:
                gradients.extend(block.attn.qkv.weight.grad.clone() for block in model.blocks)  # type: ignore[union-attr]

            learner.before_update = keep
            batch = Batch(tokens[:, :-1], tokens[:, 1:], {})
            objective = Sequences(pass_size=4 // passes, share=4)
            found = Eager(learner, objective).take(batch, targets=32.0, lr_factor=1.0)
            assert ("orthogonality_violation" in found.numbers) == (weight > 0)
            changes.append(torch.stack(gradients))
        model = build_model(CONFIG, device="cpu", seed=0)
        expected = torch.autograd.grad(
            formula(model, values=False), [block.attn.qkv.weight for block in model.blocks]
        )
        factor = 0.5 * 0.75 * (scale.value if scale else 1.0)
        assert_close(changes[1] - changes[0], factor * torch.stack(expected))


def test_it_brings_heads_to_be_orthonormal() -> None:
    model = build_model(CONFIG, device="cpu", seed=0)
    parameters = [block.attn.qkv.weight for block in model.blocks]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    seen = []
    for _ in range(60):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        seen.append(float(penalise(model, 1.0, values=False)["orthogonality_violation"]))
        optimizer.step()
    assert seen[0] > 0.9
    assert seen[-1] < 0.01


def test_what_it_is_not_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.orthogonality is for workload pretrain and heads no wider"):
        load_recipe("nano", ["train.orthogonality=0.1", "model.head_dim=1000"])
