"""Kernels of a training block, against float64: queries and keys normalised and rotated, a sum normalised, ReLU squared, with
the gradients of inputs and weights; and all of them in a model, compiled and not."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model import kernels, transformer
from redline.model.attention import heads, softmax
from redline.model.attention.softmax import rope_table, rotate
from redline.model.transformer import build_model


def config(**given: Any) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 512}
    return ModelConfig(**{"vocab_size": 512, "context_length": 128, "qk_norm": True, **shape, **given})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [128, 64, 80])
def test_values_and_gradients_equal_the_reference(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    q_heads, kv_heads, T = 6, 2, 77
    table = [part.cuda() for part in rope_table(config(head_dim=width, context_length=T))]
    qkv = torch.randn(3 * T, q_heads + 2 * kv_heads, width, device="cuda", dtype=dtype).requires_grad_()
    weights = [(1 + 0.3 * torch.randn(width, device="cuda")).requires_grad_() for _ in range(2)]
    ours = heads.normed_and_rotated(qkv, *weights, *table, 1e-5, q_heads, kv_heads)
    out = [torch.randn_like(x) for x in ours]
    found = [*ours, *torch.autograd.grad(ours, [qkv, *weights], out)]

    given = [x.detach().double().requires_grad_() for x in (qkv, *weights)]
    with patch.object(Tensor, "float", Tensor.double):
        *qk, v = given[0].split([q_heads, kv_heads, kv_heads], dim=1)
        normed = (F.rms_norm(x, (width,), w, 1e-5) for x, w in zip(qk, given[1:], strict=True))
        angles = table[0].double(), table[1].double()
        theirs = (*(rotate(x.unflatten(0, (3, T)), angles).flatten(0, 1) for x in normed), v)
    expected = [*theirs, *torch.autograd.grad(theirs, given, [x.double() for x in out])]
    # one rounding to the dtype; sums over 231 tokens and 6 heads in fp32 for the weights
    rounding = torch.finfo(dtype).eps
    for one, true in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(one.double(), true, rtol=rounding, atol=2**-18)
    for one, true in zip(found[4:], expected[4:], strict=True):
        torch.testing.assert_close(one.double(), true, rtol=0.0, atol=2**-20 * 231 * 6)


@pytest.mark.parametrize("width", [512, 960, 2048])
@pytest.mark.parametrize("added", [True, False])
def test_a_sum_normalised_equals_the_reference(added: bool, width: int) -> None:
    """With the gradient of the weight, whose last program does not fill its tiles."""
    torch.manual_seed(width)
    x, y = (torch.randn(1037, width, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    weight = (1 + 0.3 * torch.randn(width, device="cuda")).requires_grad_()
    inputs = [x, *([y] if added else []), weight]
    ours = kernels.sum_rms_norm(x, y if added else None, weight, 1e-5)
    out = [torch.randn_like(part) for part in ours]
    found = [*ours, *torch.autograd.grad(ours, inputs, out)]

    given = [part.detach().double().requires_grad_() for part in inputs]
    # the sum is kept in bf16, and normalised as it is kept
    total = ours[0].detach().double().requires_grad_()
    normed = F.rms_norm(total, (width,), given[-1], 1e-5)
    dx, dweight = torch.autograd.grad(
        (total * 1, normed), (total, given[-1]), [part.double() for part in out]
    )
    expected = [sum(given[:-1]), normed, *[dx] * (len(inputs) - 1), dweight]
    rounding = torch.finfo(torch.bfloat16).eps
    for one, true in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one.double(), true, rtol=rounding, atol=2**-18)
    # of 1,037 rows in fp32, each below 2**6
    torch.testing.assert_close(found[-1].double(), dweight, rtol=0.0, atol=2**-24 * 1037 * 2**6)


def test_relu_squared_equals_the_reference() -> None:
    torch.manual_seed(0)
    x = torch.randn(1037, 96, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y, out = kernels.relu_squared(x), torch.randn_like(x)
    given = x.detach().double().requires_grad_()
    true = F.relu(given).square()
    (dx,), (true_dx,) = torch.autograd.grad(y, x, out), torch.autograd.grad(true, given, out.double())
    for one, two in ((y, true), (dx, true_dx)):
        torch.testing.assert_close(one.double(), two, rtol=torch.finfo(torch.bfloat16).eps, atol=0.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_learns_the_same_with_them(compiled: bool) -> None:
    """With all of these kernels; under a compiler with that of the heads alone."""
    tokens = torch.randint(0, 512, (4, 128), device="cuda")
    gradients: list[dict[str, Tensor]] = []
    losses: list[float] = []
    for ours in (False, True):
        model = build_model(config(activation="relu2"), device="cuda", seed=0)
        model.compute_dtype, model.apart = torch.bfloat16, not compiled
        if compiled:
            torch._dynamo.reset()
            for block in model.blocks:
                block.compile(fullgraph=True)
        theirs: list[Any] = [
            patch.object(softmax, "by_kernel", lambda *_: None),
            patch.object(transformer, "eager_on_gpu", lambda _: False),
        ]
        with ExitStack() as stack:
            for plain in theirs if not ours else ():
                stack.enter_context(plain)
            launched = stack.enter_context(patch.object(heads, "launch", wraps=heads.launch))
            loss = model(tokens, tokens.roll(-1, 1))
            loss.backward()
        assert launched.called == (ours and not compiled), "a compiler sees an operation"
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert gradients[0].keys() == gradients[1].keys()
    for name, one in gradients[0].items():
        assert (one - gradients[1][name]).norm() < 3e-2 * one.norm(), name
