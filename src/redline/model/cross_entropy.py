"""The output head and its loss in one differentiable step.

    loss_sum = linear_cross_entropy(x_ND, weight_VD, targets_N, fused=True)
    losses_N = linear_cross_entropy(x_ND, weight_VD, targets_N, fused=True, reduction="none")
    capped(logits, 30.0)                                       # cap x tanh(logits / cap), which the loss takes too

`torch`: logits, then torch's cross entropy in fp32. `fused` (CUDA, half precision): logits by cuBLAS, then one Triton
kernel that reads each row, takes its loss and overwrites the row with its gradient, so the logits are held once. At
65,536 x 50,304 the compiler's kernels took three times as long as one read and one write (LOG.md). Left out: chunks (the
caller's), label smoothing, z-loss.

Shapes: N tokens, D hidden, V vocabulary.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import IGNORED

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it; the fused way needs CUDA anyway
    triton = None


Reduction = Literal["sum", "none"]


def capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    fused: bool,
    reduction: Reduction = "sum",
    cap: float = 0.0,
) -> Tensor:
    """The cross entropies of `x @ weight.T` (capped) in fp32, or their sum; 0 where the target is IGNORED."""
    weight_VD = weight_VD.to(x_ND.dtype)
    if fused:
        loss: Tensor = _Fused.apply(x_ND, weight_VD, targets_N, reduction == "sum", cap)
        return loss
    logits_NV = capped(F.linear(x_ND, weight_VD).float(), cap)
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction=reduction)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, summed: bool, cap: float
    ) -> Tensor:
        logits_NV = F.linear(x_ND, weight_VD)
        losses_N = torch.empty(len(x_ND), device=x_ND.device, dtype=torch.float32)
        vocab_size = logits_NV.shape[1]
        _loss_and_gradient[(len(x_ND),)](
            logits_NV, targets_N, losses_N, vocab_size, logits_NV.stride(0), IGNORED, CAP=cap, BLOCK=4096,
            num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(x_ND, weight_VD, logits_NV)
        return losses_N.sum() if summed else losses_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, dlogits_NV = ctx.saved_tensors
        factor = grad[:, None] if grad.ndim else grad
        dx_ND = ((dlogits_NV @ weight_VD) * factor).to(x_ND.dtype)
        if not ctx.needs_input_grad[1]:  # a frozen head: a third of the head's work
            return dx_ND, None, None, None, None
        # The factor goes onto the small operand before the sum over tokens, which could overflow fp16 without it.
        return dx_ND, dlogits_NV.T @ (x_ND * factor).to(x_ND.dtype), None, None, None


if triton is not None:

    @triton.jit
    def _capped(x, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
        return CAP - 2 * CAP / (tl.exp(2 * x / CAP) + 1) if CAP != 0.0 else x  # CAP x tanh(x / CAP)

    @triton.jit
    def _loss_and_gradient(  # type: ignore[no-untyped-def]
        logits_ptr, targets_ptr, losses_ptr, vocab_size, stride, ignored, CAP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program a row: a running maximum and sum, then softmax minus one-hot, written over the row."""
        row = tl.program_id(0).to(tl.int64)
        row_ptr = logits_ptr + row * stride
        target = tl.load(targets_ptr + row)
        counts = target != ignored
        # Read before any program writes the row; the reductions below are the barrier.
        target_logit = _capped(tl.load(row_ptr + tl.where(counts, target, 0)).to(tl.float32), CAP)
        lanes = tl.arange(0, BLOCK)
        highest = -1e30
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            inside = start + lanes < vocab_size
            x = _capped(tl.load(row_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32), CAP)
            x = tl.where(inside, x, -1e30)
            higher = tl.maximum(highest, tl.max(x, axis=0))
            sums = sums * tl.exp(highest - higher) + tl.exp(x - higher)
            highest = higher
        log_sum = highest + tl.log(tl.sum(sums, axis=0))
        tl.store(losses_ptr + row, tl.where(counts, log_sum - target_logit, 0.0))
        for start in range(0, vocab_size, BLOCK):
            inside = start + lanes < vocab_size
            x = _capped(tl.load(row_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32), CAP)
            gradient = tl.exp(x - log_sum) - tl.where(start + lanes == target, 1.0, 0.0)
            gradient = gradient * (1 - (x / CAP) * (x / CAP)) if CAP != 0.0 else gradient
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(row_ptr + start + lanes, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
