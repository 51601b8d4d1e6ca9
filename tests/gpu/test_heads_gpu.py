"""Queries and keys normalised and rotated by one kernel, against float64: values, and gradients of input and weights;
and in a model, compiled and not, whose heads it computes."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import ModelConfig
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
        angles = tuple(part.double() for part in table)
        theirs = (*(rotate(x.unflatten(0, (3, T)), angles).flatten(0, 1) for x in normed), v)
    expected = [*theirs, *torch.autograd.grad(theirs, given, [x.double() for x in out])]
    # one rounding to the dtype; sums over 231 tokens and 6 heads in fp32 for the weights
    rounding = torch.finfo(dtype).eps
    for one, true in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(one.double(), true, rtol=rounding, atol=2**-18)
    for one, true in zip(found[4:], expected[4:], strict=True):
        torch.testing.assert_close(one.double(), true, rtol=0.0, atol=2**-20 * 231 * 6)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_learns_the_same_with_it(compiled: bool) -> None:
    tokens = torch.randint(0, 512, (4, 128), device="cuda")
    gradients: list[dict[str, Tensor]] = []
    calls: list[int] = []
    for by_kernel in (lambda *_: None, softmax.by_kernel):
        model = build_model(config(), device="cuda", seed=0)
        model.compute_dtype = torch.bfloat16
        if compiled:
            torch._dynamo.reset()
            for block in model.blocks:
                block.compile(fullgraph=True)
        with patch.object(softmax, "by_kernel", by_kernel):
            loss = model(tokens, tokens.roll(-1, 1))
            loss.backward()
        calls.append(round(loss.item()))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert calls[0] == pytest.approx(calls[1], rel=1e-3)
    assert gradients[0].keys() == gradients[1].keys()
    for name, one in gradients[0].items():
        assert (one - gradients[1][name]).norm() < 3e-2 * one.norm(), name
