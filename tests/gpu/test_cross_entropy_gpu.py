"""The fused head-and-loss kernel against a float64 reference: values and gradients, ignored targets, odd
vocabularies."""

import pytest
import torch
import torch.nn.functional as F

from redline.config.recipe import IGNORED
from redline.model.cross_entropy import Reduction, linear_cross_entropy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab"), [(64, 128, 1000), (257, 64, 50257), (33, 256, 4096), (5, 64, 7)]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_values_and_gradients_equal_the_reference(
    dtype: torch.dtype, tokens: int, hidden: int, vocab: int, weighted: bool, cap: float
) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda") * 0.1).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    targets[::7] = IGNORED
    weights = torch.randn(tokens, device="cuda") if weighted else None
    reduction: Reduction = "none" if weighted else "sum"
    losses = linear_cross_entropy(x, weight, targets, fused=True, reduction=reduction, cap=cap)
    loss = losses if weights is None else (losses * weights).sum()
    (loss * 0.37).backward()

    x64, w64 = x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    logits = x64 @ w64.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    each = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    reference = (each if weights is None else each * weights).sum()
    (reference * 0.37).backward()
    assert loss.dtype == torch.float32
    # The logits are rounded to the dtype; signed weights make the sum small beside its parts.
    assert abs(loss.item() - reference.item()) < 2e-3 * float(
        (each * (1 if weights is None else weights)).abs().sum()
    )
    found = linear_cross_entropy(x, weight, targets, fused=True, reduction="none", cap=cap)
    torch.testing.assert_close(found.double(), each, rtol=2e-2, atol=2e-2)
    assert not found[::7].any()
    for ours, theirs in ((x.grad, x64.grad), (weight.grad, w64.grad)):
        assert ours is not None
        assert (ours.double() - theirs).norm() / theirs.norm() < 1e-2


def test_all_targets_ignored_gives_zero_and_zero_gradient() -> None:
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(100, 64, device="cuda").requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.full((16,), IGNORED, device="cuda"), fused=True)
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_huge_logits_do_not_overflow() -> None:
    x = torch.full((4, 64), 30.0, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(5000, 64, device="cuda").requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.arange(4, device="cuda"), fused=True)
    loss.backward()
    assert loss.isfinite()
    assert x.grad is not None
    assert x.grad.isfinite().all()
