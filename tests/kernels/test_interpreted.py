"""What the kernels between the matrix products compute, on a machine without a GPU: Triton's interpreter runs them in fp32
(its bf16 is not to be trusted), in a process of its own, because it must be chosen before they are imported."""

import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="torch for CPUs comes without Triton; `make kernels` brings it")

from pretended_gpu import let_loops_run

from redline.config.recipe import IGNORED, CrossEntropy, LoraConfig, ModelConfig
from redline.model import cross_entropy, kernels, transformer
from redline.model.attention import heads
from redline.model.attention.softmax import rope_table, rotate
from redline.model.cross_entropy import Candidates, linear_cross_entropy
from redline.model.lora import adapters, add_lora
from redline.model.transformer import build_model

CONFIG = ModelConfig(vocab_size=32, num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, context_length=8)


@pytest.mark.parametrize(
    "case",
    [
        "norm",
        "last_norm",
        "first_norm",
        "swiglu",
        "relu_squared",
        "rotation",
        "loss",
        "fp8_gradient",
        "model",
    ],
)
def test_a_kernel_and_its_gradient(case: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__, case],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def norm() -> tuple[list[Tensor], list[Tensor]]:
    return with_gradients(slice(2))


def last_norm() -> tuple[list[Tensor], list[Tensor]]:
    """Nothing reads the sum."""
    return with_gradients(slice(1, 2))


def first_norm() -> tuple[list[Tensor], list[Tensor]]:
    """Nothing to add."""
    return with_gradients(slice(2), added=False)


def with_gradients(used: slice, *, added: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Of a frozen weight, a row a program; and of one that learns: two programs, neither of whose last tiles is full."""
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for rows, learns in ((5, False), (150, True)):
        x, y = (torch.randn(rows, 72, requires_grad=True) for _ in range(2))
        weight, out = torch.randn(72, requires_grad=learns), [torch.randn(rows, 72) for _ in range(2)]
        total = x + y if added else x
        ours = kernels.sum_rms_norm(x, y if added else None, weight, 1e-5)[used]
        theirs = (total, F.rms_norm(total, weight.shape, weight, 1e-5))[used]
        inputs = [x, *([y] if added else []), *([weight] if learns else [])]
        for found, result in zip(results, (ours, theirs), strict=True):
            found += [*result, *torch.autograd.grad(result, inputs, out[used])]
    return results


def rotation() -> tuple[list[Tensor], list[Tensor]]:
    """Two rows of 21 tokens, so that the last block of 8 is not full; heads narrower than a power of two, and so small
    that the norm's epsilon counts. As a function, which imports no compiler, and as the operation that a compiler sees."""
    q_heads, kv_heads, width, T = 3, 2, 24, 21
    config = replace(CONFIG, head_dim=width, context_length=T)
    cos, sin = rope_table(config)
    qkv = (3e-3 * torch.randn(2 * T, q_heads + 2 * kv_heads, width)).requires_grad_()
    weights = [torch.randn(width, requires_grad=True) for _ in range(2)]
    given = qkv, *weights, cos, sin, 1e-5, q_heads, kv_heads
    *qk, v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
    normed = (
        F.rms_norm(x, (width,), weight, 1e-5).unflatten(0, (2, T))
        for x, weight in zip(qk, weights, strict=True)
    )
    theirs = (*(rotate(x, (cos, sin)).flatten(0, 1) for x in normed), v)
    out = [torch.randn_like(x) for x in theirs]
    results = []
    for compute in (heads.normed_and_rotated, heads._operation, lambda *_: theirs):
        found = compute(*given)
        results.append([*found, *torch.autograd.grad(found, [qkv, *weights], out)])
        assert len(results) > 1 or "torch._dynamo" not in sys.modules
    once, again, expected = results
    return [*once, *again], expected * 2


def fp8_gradient() -> tuple[list[Tensor], list[Tensor]]:
    """Its scale, kept in fp32 here. A row that does not count has none, though its logits have overflowed; nor has a target
    that is no token, which must not be written elsewhere."""
    logits, targets = torch.randn(6, 300), torch.tensor([3, IGNORED, 299, 0, IGNORED, 7])
    logits[1], logits[4, 5] = float("inf"), float("nan")
    gradients = [torch.full((6, 300), 9.0) for _ in range(2)]
    with (
        patch.object(cross_entropy, "GRADIENT_SCALE", 2.0**14),
        patch.object(torch, "float8_e5m2", torch.float32),
    ):
        found = cross_entropy.losses_by_kernel(logits.clone(), targets, gradients[0])
        counted = targets != IGNORED
        expected = torch.zeros(6)
        expected[counted] = cross_entropy._losses_in_torch(
            logits[counted], targets[counted], part := torch.empty(4, 300), None
        )
    gradients[1].zero_()[counted] = part
    wild = torch.zeros(2, 300)
    cross_entropy.losses_by_kernel(torch.randn(1, 300), torch.tensor([305]), wild[:1])
    assert not wild[1].any()
    # scaled back, so that the bound of all cases holds
    return [found, gradients[0] / 2**14], [expected, gradients[1] / 2**14]


def loss() -> tuple[list[Tensor], list[Tensor]]:
    """Of the whole vocabulary and of candidates, beside torch's own."""
    # the kernel takes 2,048 columns at a time: the sample of `many` begins in the second piece and ends in the third
    many = Candidates(torch.randperm(5000)[:4600].sort().values, torch.tensor(2500, dtype=torch.int32))
    targets = torch.cat([torch.tensor([3, IGNORED, 0, 40, 3]), many.tokens_K[[2047, 2048, 2499]]])
    wanted = targets[targets != IGNORED].unique()
    some = Candidates(
        torch.cat([wanted, torch.tensor([7, 99])]), torch.tensor(len(wanted), dtype=torch.int32)
    )
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for candidates in (None, some, many):
        x, weight, out = torch.randn(8, 16), torch.randn(5000, 16), torch.randn(8)
        ways: tuple[CrossEntropy, ...] = ("fused", "torch")
        for how, found in zip(ways, results, strict=True):
            x_ND, weight_VD = (part.clone().requires_grad_() for part in (x, weight))
            losses = linear_cross_entropy(
                x_ND, weight_VD, targets, how=how, reduction="none", candidates=candidates
            )
            found += [losses, *torch.autograd.grad(losses, [x_ND, weight_VD], out)]
    return results


def swiglu() -> tuple[list[Tensor], list[Tensor]]:
    x = torch.randn(5, 2 * 72, requires_grad=True)
    out, (gate, up) = torch.randn(5, 72), x.chunk(2, dim=-1)
    results = ([y, *torch.autograd.grad(y, x, out)] for y in (kernels.swiglu(x), F.silu(gate) * up))
    return next(results), next(results)


def relu_squared() -> tuple[list[Tensor], list[Tensor]]:
    x, out = torch.randn(5, 600, requires_grad=True), torch.randn(5, 600)
    results = ([y, *torch.autograd.grad(y, x, out)] for y in (kernels.relu_squared(x), F.relu(x).square()))
    return next(results), next(results)


def model() -> tuple[list[Tensor], list[Tensor]]:
    """Blocks that leave the additions between them to the norms: with adapters, and where everything learns."""
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for activation in ("swiglu", "relu2"):
        made = build_model(replace(CONFIG, activation=activation), device="cpu", seed=0)
        if activation == "swiglu":
            add_lora(made, LoraConfig(rank=2), seed=0)
            for p in adapters(made).values():
                torch.nn.init.normal_(p, std=0.3)
        learned = [p for p in made.parameters() if p.requires_grad]
        tokens_BT = torch.randint(32, (2, 8))
        for ours, found in zip((True, False), results, strict=True):
            made.apart = ours
            with patch.object(transformer, "eager_on_gpu", return_value=ours):
                loss = made(tokens_BT, tokens_BT)
                found += [loss, *torch.autograd.grad(loss, learned)]
    assert "torch._dynamo" not in sys.modules, "a second of every start"
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    let_loops_run()
    for found, expected in zip(*globals()[sys.argv[1]](), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
