"""The output head in FP8, computed on a CPU with the same roundings: losses, gradients, and where it is allowed."""

from dataclasses import replace

import head_rounding
import pytest
import torch
from torch import Tensor

from redline.config.load import load_recipe
from redline.config.recipe import IGNORED, ModelConfig, PlanPins
from redline.errors import ConfigError
from redline.model import cross_entropy
from redline.model.cross_entropy import Reduction, linear_cross_entropy, to_fp8
from redline.model.transformer import build_model
from redline.plan.hardware import hardware_as
from redline.plan.planner import make_plan
from redline.plan.values import effect_of, why_not
from redline.tune.candidates import candidates
from redline.tune.checks import Numbers, agreement

GPT2, H200 = load_recipe("gpt2-124m"), hardware_as("h200-141g", 16)
CANDIDATES = pytest.mark.parametrize("candidates", [0, 256])
REDUCTIONS = pytest.mark.parametrize("reduction", ["sum", "none"])


@pytest.mark.numerics
@CANDIDATES
def test_losses_are_as_far_off_as_e4m3_is_coarse(candidates: int) -> None:
    head_rounding.check_losses("cpu", torch.float32, candidates)


@pytest.mark.numerics
@CANDIDATES
@REDUCTIONS
def test_gradients_are_as_far_off_as_their_two_formats(reduction: Reduction, candidates: int) -> None:
    head_rounding.check_gradients("cpu", torch.float32, reduction, candidates)


@pytest.mark.numerics
def test_every_entry_of_the_gradient_is_the_nearest_number_of_e5m2() -> None:
    head_rounding.check_every_entry("cpu", torch.float32)


def run(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, how="fp8")
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def test_sizes_do_not_matter() -> None:
    """Scales are powers of two, so that other units of the inputs change nothing but the units of the gradients."""
    its = head_rounding.work(tokens=32)
    x, weight = its.x.float(), its.weight.float()
    loss, dx, dweight = run(x, weight, its.targets)
    assert dx is not None
    assert dweight is not None
    for unit in (2.0**12, 2.0**-12):
        other = run(x * unit, weight / unit, its.targets)
        for found, expected in zip(other, (loss, dx / unit, dweight * unit), strict=True):
            assert torch.equal(found, expected)


def test_zeros_and_ignored_targets_have_no_gradient_and_what_is_not_a_number_shows() -> None:
    its = head_rounding.work(tokens=32)
    x, weight = its.x.float(), its.weight.float()
    loss, *gradients = run(x, weight, torch.full((32,), IGNORED))
    assert not loss
    assert not any(gradient.any() for gradient in gradients)
    loss, dx, _ = run(torch.zeros_like(x), torch.zeros_like(weight), torch.zeros(32, dtype=torch.int64))
    torch.testing.assert_close(loss, 32 * torch.tensor(512.0).log())
    assert dx is not None
    assert not dx.any()
    x[3, 5] = torch.inf
    assert run(x, weight, its.targets)[0].isnan()


def test_the_largest_fits_into_e4m3() -> None:
    for largest in (1.0, 1.999, 2.0, 3.7e4, 1e-20):
        values, unit = to_fp8(torch.tensor([largest, -largest / 3]))
        assert values.float().abs().max() <= cross_entropy.FP8_TOP
        assert float(values[0].float() * unit) == pytest.approx(largest, rel=2**-4)


def test_a_frozen_head_is_not_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    its, shapes = head_rounding.work(tokens=32), []
    plain = cross_entropy.transposed
    monkeypatch.setattr(
        cross_entropy, "transposed", lambda x8: (shapes.append(tuple(x8.shape)), plain(x8))[1]
    )
    x = its.x.float().requires_grad_()
    linear_cross_entropy(x, its.weight.float(), its.targets, how="fp8").backward()
    assert shapes == [(512, 64)], "only the weights'"


@pytest.mark.parametrize("tokens", [1, 16, 17, 40, 100])
def test_all_sides_of_all_products_are_multiples_of_16(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the rows of half a batch: cuBLAS has refused odd ones (pytorch#167882)."""
    sides: list[int] = []
    plain = cross_entropy._product
    monkeypatch.setattr(
        cross_entropy,
        "_product",
        lambda a8, b8, *rest, **named: (sides.extend([*a8.shape, *b8.shape]), plain(a8, b8, *rest, **named))[
            1
        ],
    )
    its = head_rounding.work(tokens=tokens)
    run(its.x.float(), its.weight.float(), its.targets)
    assert sides
    assert all(side and side % 16 == 0 for side in sides), sides


@pytest.mark.numerics
def test_a_model_stays_within_the_band_of_fp8() -> None:
    """Tied weights, the head in pieces of a number of tokens that is no multiple of 16."""
    config = ModelConfig(
        vocab_size=512, num_layers=2, hidden_size=64, num_heads=4, ffn_size=128, context_length=32, tie_embeddings=True
    )  # fmt: skip
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (6, 25), generator=made)
    numbers = []
    for how in ("fp8", "torch"):
        model = build_model(config, device="cpu", seed=0)
        model.cross_entropy, model.loss_chunks = how, 2 if how == "fp8" else 1
        loss = model(tokens, tokens.roll(-1, 1)) / tokens.numel()
        loss.backward()
        numbers.append(
            Numbers(loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    assert agreement("fp8", *numbers)[0], agreement("fp8", *numbers)[1]
    assert not agreement("fp32", *numbers)[0], "it rounds nothing"


# ---- in a plan ----


def test_a_plan_has_it_only_if_asked() -> None:
    plan = make_plan(GPT2, H200)
    assert (plan.cross_entropy, plan.coarsest) == ("fused", "bf16")
    pinned = make_plan(replace(GPT2, plan=PlanPins(cross_entropy="fp8")), H200)
    assert (pinned.precision, pinned.cross_entropy, pinned.coarsest) == ("bf16", "fp8", "fp8")
    assert pinned.prediction.memory_parts_bytes == plan.prediction.memory_parts_bytes
    assert effect_of(plan, pinned) == "rounding"
    speeds = [p.prediction.attainable_tokens_per_s or 0 for p in (plan, pinned)]
    # 31% of the matrix FLOPs at no more than twice the rate
    assert 1 < speeds[1] / speeds[0] < 1.18


def test_it_says_where_it_cannot_be() -> None:
    beside = {"precision": "bf16"}
    assert why_not("cross_entropy", "fp8", GPT2, H200, beside) is None
    odd = replace(GPT2, model=replace(GPT2.model, vocab_size=50257))
    assert "vocab_size 50257" in str(why_not("cross_entropy", "fp8", odd, H200, beside))
    assert "this is fp16" in str(why_not("cross_entropy", "fp8", GPT2, H200, {"precision": "fp16"}))
    a100 = hardware_as("a100-80g", 16)
    assert "needs compute capability 8.9" in str(why_not("cross_entropy", "fp8", GPT2, a100, beside))
    with pytest.raises(ConfigError, match="an FP8 head needs compute capability"):
        make_plan(replace(GPT2, plan=PlanPins(cross_entropy="fp8")), a100)


def test_the_tuner_tries_it_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = candidates(GPT2, make_plan(GPT2, H200), fixed=(), data_wait_share=0.0)
    names = {candidate.name: candidate.predicted for candidate in found}
    assert names["cross_entropy fp8"] > 1
    assert "precision fp8" not in names
