"""The fused head-and-loss kernel against a float64 reference: values and gradients, ignored targets, odd
vocabularies. The FP8 head within the bounds that the CPU's keeps (head_rounding.py)."""

import head_rounding
import pytest
import torch
import torch.nn.functional as F

from redline.config.recipe import IGNORED
from redline.model import cross_entropy
from redline.model.cross_entropy import Reduction, linear_cross_entropy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab"), [(64, 128, 1000), (257, 64, 50257), (33, 256, 4096), (5, 64, 7)]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_gradients_equal_the_reference(
    dtype: torch.dtype, tokens: int, hidden: int, vocab: int, weighted: bool
) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda") * 0.1).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    targets[::7] = IGNORED
    weights = torch.randn(tokens, device="cuda") if weighted else None
    reduction: Reduction = "none" if weighted else "sum"
    losses = linear_cross_entropy(x, weight, targets, how="fused", reduction=reduction)
    loss = losses if weights is None else (losses * weights).sum()
    (loss * 0.37).backward()

    x64, w64 = x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    logits = x64 @ w64.T
    each = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    reference = (each if weights is None else each * weights).sum()
    (reference * 0.37).backward()
    assert loss.dtype == torch.float32
    # The logits are rounded to the dtype; signed weights make the sum small beside its parts.
    assert abs(loss.item() - reference.item()) < 2e-3 * float(
        (each * (1 if weights is None else weights)).abs().sum()
    )
    found = linear_cross_entropy(x, weight, targets, how="fused", reduction="none")
    torch.testing.assert_close(found.double(), each, rtol=2e-2, atol=2e-2)
    assert not found[::7].any()
    for ours, theirs in ((x.grad, x64.grad), (weight.grad, w64.grad)):
        assert ours is not None
        assert theirs is not None
        assert (ours.double() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("candidates", [4608, 5008])
def test_a_softmax_over_candidates_is_its_definition(candidates: int) -> None:
    """As the CPU's is in float64; here the logits are rounded to bf16. More targets than the kernel's block of columns."""
    its = head_rounding.work(tokens=4000, vocab=5008, candidates=candidates)
    x = its.x.cuda().bfloat16().requires_grad_()
    weight = its.weight.cuda().float().requires_grad_()
    losses = linear_cross_entropy(
        x, weight, its.targets.cuda(), how="fused", reduction="none", candidates=its.some("cuda")
    )
    losses.backward(its.factors.cuda().float())
    x64, w64 = its.x.clone().requires_grad_(), its.weight.clone().requires_grad_()
    reference = its.losses(x64 @ w64.T)
    reference.backward(its.factors)
    torch.testing.assert_close(losses.cpu().double(), reference, rtol=2e-2, atol=2e-2)
    for ours, theirs in ((x.grad, x64.grad), (weight.grad, w64.grad)):
        assert ours is not None
        assert theirs is not None
        assert (ours.cpu().double() - theirs).norm() / theirs.norm() < 1e-2


def test_all_targets_ignored_gives_zero_and_zero_gradient() -> None:
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(100, 64, device="cuda").requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.full((16,), IGNORED, device="cuda"), how="fused")
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_huge_logits_do_not_overflow() -> None:
    x = torch.full((4, 64), 30.0, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(5000, 64, device="cuda").requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.arange(4, device="cuda"), how="fused")
    loss.backward()
    assert loss.isfinite()
    assert x.grad is not None
    assert x.grad.isfinite().all()


# ---- FP8 ----


@pytest.fixture
def fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")


@pytest.mark.usefixtures("fp8")
@pytest.mark.parametrize("candidates", [0, 256])
def test_the_fp8_head_rounds_as_derived(candidates: int) -> None:
    head_rounding.check_losses("cuda", torch.bfloat16, candidates)
    for reduction in ("sum", "none"):
        head_rounding.check_gradients("cuda", torch.bfloat16, reduction, candidates)
    head_rounding.check_every_entry("cuda", torch.bfloat16)


@pytest.mark.usefixtures("fp8")
def test_the_fp8_gradient_of_a_whole_vocabulary_is_the_cpus() -> None:
    """The same logits: the last bits of an exponential may decide a tie, and then it is the number next to it."""
    torch.manual_seed(0)
    logits, targets = (4 * torch.randn(40, 50304)).bfloat16(), torch.randint(0, 50304, (40,))
    targets[::7] = IGNORED
    gradients = [torch.empty(40, 50304, device=device, dtype=torch.float8_e5m2) for device in ("cpu", "cuda")]
    expected = cross_entropy._losses_in_torch(logits, targets, gradients[0], None)
    found = cross_entropy.losses_by_kernel(logits.cuda(), targets.cuda(), gradients[1])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    theirs, ours = gradients[0].float(), gradients[1].cpu().float()
    assert ((ours - theirs).abs() <= 2**-2 * torch.maximum(ours.abs(), theirs.abs()) + 2**-16).all()
    assert (ours != theirs).float().mean() < 1e-3  # a step is an eighth to a quarter, the errors 1e-6
    assert not ours[::7].any()


@pytest.mark.parametrize("shape", [(50304, 768), (48, 4112), (16, 16), (1, 130)])
def test_bytes_are_transposed(shape: tuple[int, int]) -> None:
    x = torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
    found = cross_entropy.transposed_by_kernel(x.view(torch.float8_e5m2))
    assert torch.equal(found.view(torch.int8), x.T)


@pytest.mark.usefixtures("fp8")
def test_the_fp8_head_takes_no_more_memory_than_the_fused() -> None:
    """At least while logits outweigh everything else: the prediction is the same (plan/arithmetic.py)."""
    peaks = []
    for how in ("fused", "fp8"):
        x = torch.randn(16384, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(50304, 256, device="cuda").requires_grad_()
        targets = torch.zeros(16384, device="cuda", dtype=torch.int64)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, targets, how=how).backward()  # type: ignore[arg-type]
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del x, weight, targets
    assert peaks[1] <= 1.02 * peaks[0]
