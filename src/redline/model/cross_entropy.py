"""The output head and its loss in one differentiable step.

    loss_sum = linear_cross_entropy(x_ND, weight_VD, targets_N, how="fused")
    losses_N = linear_cross_entropy(x_ND, weight_VD, targets_N, how="fused", reduction="none")
    linear_cross_entropy(x_ND, weight_VD, targets_N, how="fused", candidates=candidates)   # a softmax over some tokens

`torch`: logits, then torch's cross entropy in fp32. `fused` (CUDA, half precision): logits by cuBLAS, then one Triton
kernel that reads each row, takes its loss and overwrites the row with its gradient, so the logits are held once. At
65,536 x 50,304 the compiler's kernels took three times as long as one read and one write (LOG.md). `fp8`: the same, but
all three products multiply FP8 numbers, and the gradient is written as FP8. On a CPU it computes the same roundings in fp32.
Left out: chunks (the caller's), label smoothing, z-loss.

Shapes: N tokens, D hidden, V vocabulary (or the candidates).
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import IGNORED, CrossEntropy

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it; the fused way needs CUDA anyway
    triton = None


Reduction = Literal["sum", "none"]
FP8_MULTIPLE = 16
"""Sides of FP8 products are multiples of it."""
FP8_TOP = 256.0
"""Weights and inputs are scaled to below it; e4m3 ends at 448."""
GRADIENT_SCALE = 2.0**14
"""Scale of the logits' gradient as e5m2 (2^-16 to 57,344). No entry is larger than 1, so the scale is the same for all: 1 becomes
16,384, with room above, and 2^-30 = 9e-10 is still seen. What vanishes of a row is at most 50,304 x 2^-31 = 2e-5."""


class Candidates(NamedTuple):
    """The tokens over which a softmax is taken in place of the vocabulary (data/candidates.py says which). On the device,
    so that a CUDA graph reads those of each update."""

    tokens_K: Tensor
    """Ids, none twice: all targets of the update, then a sample of the other tokens."""
    targets: Tensor
    """How many are targets. Every target must be one of these."""

    def places(self, targets_N: Tensor, vocab_size: int) -> Tensor:
        """Where the targets are among the candidates."""
        places_V = targets_N.new_zeros(vocab_size)
        places_V[self.tokens_K] = torch.arange(len(self.tokens_K), device=places_V.device)
        return torch.where(targets_N == IGNORED, IGNORED, places_V[targets_N.clamp_min(0)])

    def sample(self, vocab_size: int) -> "Sample":
        others, drawn = vocab_size - self.targets, len(self.tokens_K) - self.targets
        return self.targets, (others / drawn).log()


Sample = tuple[Tensor, Tensor]
"""The first row of the head that stands for other tokens too, and the logarithm of how many: the logits from there on are
raised by it."""


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    how: CrossEntropy,
    reduction: Reduction = "sum",
    candidates: Candidates | None = None,
) -> Tensor:
    """The cross entropies of `x @ weight.T` in fp32, or their sum; 0 where the target is IGNORED. With
    candidates the softmax is over their rows of the weight alone."""
    sample = None
    if candidates is not None:
        targets_N = candidates.places(targets_N, len(weight_VD))
        sample = candidates.sample(len(weight_VD))
        weight_VD = weight_VD.index_select(0, candidates.tokens_K)
    weight_VD, rest = weight_VD.to(x_ND.dtype), (reduction == "sum", sample)
    if how == "fused":
        fused: Tensor = _Fused.apply(x_ND, weight_VD, targets_N, *rest)
        return fused
    if how == "fp8":
        count, extra = len(x_ND), -len(x_ND) % FP8_MULTIPLE
        if extra:
            x_ND, targets_N = F.pad(x_ND, (0, 0, 0, extra)), F.pad(targets_N, (0, extra), value=IGNORED)
        loss: Tensor = _Fp8.apply(x_ND, weight_VD, targets_N, *rest)
        return loss[:count] if loss.ndim else loss
    logits_NV = _raised(F.linear(x_ND, weight_VD).float(), sample)
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction=reduction)


def _raised(logits_NV: Tensor, sample: Sample | None) -> Tensor:
    if sample is None:
        return logits_NV
    first, log_count = sample
    rows_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    return logits_NV + torch.where(rows_V < first, 0.0, log_count)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, summed: bool, sample: Sample | None
    ) -> Tensor:
        logits_NV = F.linear(x_ND, weight_VD)
        losses_N = losses_by_kernel(logits_NV, targets_N, logits_NV, sample)
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


class _Fp8(torch.autograd.Function):
    """Works in two halves of the rows: their bf16 logits with the whole gradient in FP8 take as much memory as the gradient and
    its transpose in the backward pass, and as all logits in bf16."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, summed: bool, sample: Sample | None
    ) -> Tensor:
        (x8_ND, x_unit), (w8_VD, w_unit) = to_fp8(x_ND), to_fp8(weight_VD)
        gradient_NV = torch.empty(len(x_ND), len(weight_VD), device=x_ND.device, dtype=torch.float8_e5m2)
        row_losses = losses_by_kernel if x_ND.is_cuda else _losses_in_torch
        half = -(-len(x_ND) // (2 * FP8_MULTIPLE)) * FP8_MULTIPLE
        halves = zip(*(part.split(half) for part in (x8_ND, targets_N, gradient_NV)), strict=True)
        losses_N = torch.cat([
            # Only this sum is short enough for the tensor cores to keep it in fewer bits than fp32, at a higher rate.
            row_losses(_product(x8, w8_VD, x_unit * w_unit, x_ND.dtype, fast=True), targets, gradient, sample)
            for x8, targets, gradient in halves
        ])  # fmt: skip
        ctx.dtype = x_ND.dtype
        ctx.save_for_backward(x8_ND if summed else x_ND, x_unit, w8_VD, w_unit, gradient_NV)
        return losses_N.sum() if summed else losses_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, x_unit, w8_VD, w_unit, gradient_NV = ctx.saved_tensors
        # One factor for all rows is part of a product's scale. One for each goes onto the small operand, as above.
        unit, factor_N1 = (1 / GRADIENT_SCALE, grad[:, None]) if grad.ndim else (grad / GRADIENT_SCALE, None)
        dx_ND = _product(gradient_NV, transposed(w8_VD), w_unit * unit, ctx.dtype)
        if factor_N1 is not None:
            dx_ND = (dx_ND * factor_N1).to(ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return dx_ND, None, None, None, None
        if factor_N1 is not None:
            x_ND, x_unit = to_fp8((x_ND * factor_N1).to(ctx.dtype))
        dw_VD = _product(transposed(gradient_NV), transposed(x_ND), x_unit * unit, ctx.dtype)
        return dx_ND, dw_VD, None, None, None


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as e4m3, and its unit: a power of two, so that only the cast rounds. Nothing waits for the GPU."""
    largest = torch.linalg.vector_norm(x, float("inf")).float().clamp_min(2.0**-100)
    unit = largest / torch.frexp(largest).mantissa / FP8_TOP
    return (x / unit).to(torch.float8_e4m3fn), unit


def _product(a8: Tensor, b8: Tensor, unit: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`unit * a @ b.T`: both lie row by row in memory, the only layout that the FP8 units of Ada and Hopper take."""
    if not a8.is_cuda:
        return ((a8.float() @ b8.float().t()) * unit).to(dtype)
    one = torch.ones_like(unit)
    return torch._scaled_mm(a8, b8.t(), unit, one, out_dtype=dtype, use_fast_accum=fast)


def transposed(x8: Tensor) -> Tensor:
    """Transposed in memory, too."""
    return transposed_by_kernel(x8) if x8.is_cuda else x8.t().contiguous()


def _losses_in_torch(
    logits_NV: Tensor, targets_N: Tensor, gradient_NV: Tensor, sample: Sample | None
) -> Tensor:
    """What `losses_by_kernel` computes."""
    counted_N1 = (targets_N != IGNORED)[:, None]
    logprobs_NV = _raised(logits_NV.float(), sample).log_softmax(-1)
    found_NV = logprobs_NV.exp()
    found_NV.scatter_add_(1, targets_N[:, None] * counted_N1, -torch.ones_like(found_NV[:, :1]))
    gradient_NV.copy_(found_NV * counted_N1 * GRADIENT_SCALE)
    return F.nll_loss(logprobs_NV, targets_N, ignore_index=IGNORED, reduction="none")


def losses_by_kernel(
    logits_NV: Tensor, targets_N: Tensor, gradient_NV: Tensor, sample: Sample | None = None
) -> Tensor:
    """The rows' losses. Writes their gradients, in FP8 times GRADIENT_SCALE; the logits may be the place for them."""
    N, V = logits_NV.shape
    losses_N = torch.empty(N, device=logits_NV.device, dtype=torch.float32)
    scale = GRADIENT_SCALE if gradient_NV.dtype == torch.float8_e5m2 else 1.0
    _loss_and_gradient[(N,)](
        logits_NV, targets_N, gradient_NV, losses_N, *(sample or (None, None)), V, logits_NV.stride(0), IGNORED,
        SCALE=scale, BLOCK=2048, num_warps=4,
    )  # fmt: skip
    return losses_N


def transposed_by_kernel(x8: Tensor) -> Tensor:
    rows, columns = x8.shape
    result = torch.empty(columns, rows, device=x8.device, dtype=x8.dtype)
    grid = (triton.cdiv(columns, 128), triton.cdiv(rows, 128))
    _transpose[grid](x8.view(torch.int8), result.view(torch.int8), rows, columns, BLOCK=128, num_warps=8)
    return result


if triton is not None:

    @triton.jit
    def _loss_and_gradient(  # type: ignore[no-untyped-def]
        logits_ptr, targets_ptr, gradient_ptr, losses_ptr, first_ptr, log_count_ptr, vocab_size, stride, ignored,
        SCALE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program per row: a running maximum and sum, then softmax minus one-hot, written over the row or elsewhere.
        It is bound by its instructions per logit, so whatever is the same for all goes into the exponents."""
        row = tl.program_id(0).to(tl.int64)
        row_ptr, to_ptr = logits_ptr + row * stride, gradient_ptr + row * stride
        target = tl.load(targets_ptr + row)
        counts = target != ignored
        # Read before any program writes the row; the reductions below are the barrier.
        there = counts & (target < vocab_size)
        target_logit = tl.load(row_ptr + target, mask=there, other=0.0).to(tl.float32)
        first, log_count = vocab_size, 0.0
        if first_ptr is not None:
            first, log_count = tl.load(first_ptr), tl.load(log_count_ptr)
        lanes = tl.arange(0, BLOCK)
        highest = -1e30
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            inside = start + lanes < vocab_size
            x = tl.load(row_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
            if start + BLOCK > first:
                x += tl.where(start + lanes < first, 0.0, log_count)
            if start + BLOCK > vocab_size:
                x = tl.where(inside, x, -1e30)
            higher = tl.maximum(highest, tl.max(x, axis=0))
            sums = sums * tl.exp(highest - higher) + tl.exp(x - higher)
            highest = higher
        log_sum = highest + tl.log(tl.sum(sums, axis=0))
        tl.store(losses_ptr + row, tl.where(counts, log_sum - target_logit, 0.0))
        dtype = gradient_ptr.dtype.element_ty
        less = log_sum - tl.log(SCALE)
        if counts:
            for start in range(0, vocab_size, BLOCK):
                inside = start + lanes < vocab_size
                x = tl.load(row_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
                if start + BLOCK > first:
                    x += tl.where(start + lanes < first, 0.0, log_count)
                tl.store(to_ptr + start + lanes, tl.exp(x - less).to(dtype), mask=inside)
        else:  # whatever its logits are, which may be infinite
            for start in range(0, vocab_size, BLOCK):
                zeros = tl.zeros([BLOCK], tl.float32).to(dtype)
                tl.store(to_ptr + start + lanes, zeros, mask=start + lanes < vocab_size)
        tl.debug_barrier()  # the target's is written twice; a target stands for itself alone
        at_target = tl.exp(target_logit - less) - SCALE
        tl.store(to_ptr + target, at_target.to(dtype), mask=there)

    @triton.jit
    def _transpose(from_ptr, to_ptr, rows, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Transpose bytes, one square per program, so that both sides are read and written in whole lines."""
        row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tile = tl.load(from_ptr + row[:, None] * columns + column[None, :], mask=inside)
        tl.store(to_ptr + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))
