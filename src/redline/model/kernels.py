"""Triton kernels for what stands between the matrix products of a block, where no compiler fuses it.

    y = swiglu(gate_up)                                # silu(gate) * up, with its backward
    normed = add_rms_norm(x, y, weight, eps)           # x += y, in place, and x normalised; no backward
    total, normed = sum_rms_norm(x, y, weight, eps)    # x + y, and that normalised, with a backward for x and y

A fine-tuning update on some 1,500 tokens, and a decode step of a small model, are bound by the number of their
kernels. CUDA only.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait
except ImportError:  # torch for CPUs comes without it
    triton = None


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """How to launch kernels that call `gdc_wait` before they touch what others write: with programmatic dependent
    launch, which Hopper brought, they begin while the kernel before still runs."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


def add_rms_norm(x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add y to x in place (None: nothing), and return x normalised. The weight is read while the kernel before may still
    run (`overlap`): that kernel must not write it."""
    width, out = x.shape[-1], torch.empty_like(x)
    _add_rms_norm[(x.numel() // width,)](
        x, x if y is None else y, x, weight_D, out, width, eps,
        ADD=y is not None, BLOCK=triton.next_power_of_2(width), num_warps=4, **overlap(x.device),
    )  # fmt: skip
    return out


def sum_rms_norm(x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and that normalised. The weight gets no gradient: it is for layers that are frozen."""
    assert not weight_D.requires_grad
    return _SumRmsNorm.apply(x, y, weight_D, eps)


class _SumRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, y, width = x.contiguous(), y.contiguous(), x.shape[-1]
        total, out = torch.empty_like(x), torch.empty_like(x)
        _add_rms_norm[(x.numel() // width,)](
            x, y, total, weight_D, out, width, eps,
            ADD=True, BLOCK=triton.next_power_of_2(width), num_warps=4, OVERLAP=False,
        )  # fmt: skip
        ctx.save_for_backward(total, weight_D)
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # nothing reads the sum that the last norm makes
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor) -> tuple[Tensor | None, ...]:
        total, weight_D = ctx.saved_tensors
        dx, width, dout = torch.empty_like(total), total.shape[-1], dout.contiguous()
        _add_rms_norm_backward[(total.numel() // width,)](
            total, weight_D, dout, dout if dtotal is None else dtotal.contiguous(), dx, width, ctx.eps,
            ADD=dtotal is not None, BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
        return dx, dx, None, None


def swiglu(gate_up: Tensor) -> Tensor:
    """silu of the first half of the columns times the second."""
    return _SwiGlu.apply(gate_up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1] // 2
        y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
        _swiglu[(y.numel() // width, triton.cdiv(width, 1024))](gate_up, y, width, BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        dx, width = torch.empty_like(gate_up), gate_up.shape[-1] // 2
        _swiglu_backward[(gate_up.numel() // (2 * width), triton.cdiv(width, 1024))](
            gate_up, dy.contiguous(), dx, width, BLOCK=1024
        )
        return dx


if triton is not None:

    @triton.jit
    def _add_rms_norm(
        x_ptr, y_ptr, sum_ptr, weight_ptr, out_ptr, width, eps,
        ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < width
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if OVERLAP:
            gdc_wait()
        x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0)
        if ADD:
            y = tl.load(y_ptr + row * width + at, mask=inside, other=0.0)
            x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + row * width + at, x, mask=inside)
        full = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(full * full) / width + eps)
        tl.store(
            out_ptr + row * width + at, (full * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
        )

    @triton.jit
    def _add_rms_norm_backward(
        x_ptr, weight_ptr, dout_ptr, dx_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dout_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32) * weight
        scale = tl.rsqrt(tl.sum(x * x) / width + eps)
        dx = scale * (g - x * (scale * scale * tl.sum(g * x) / width))
        if ADD:
            dx += tl.load(dx_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + at, dx.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu(in_ptr, out_ptr, width, BLOCK: tl.constexpr):
        row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        gate = tl.load(in_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(in_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            out_ptr + row * width + at,
            (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty),
            mask=inside,
        )

    @triton.jit
    def _swiglu_backward(in_ptr, dy_ptr, dx_ptr, width, BLOCK: tl.constexpr):
        row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        gate = tl.load(in_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(in_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        dtype = dx_ptr.dtype.element_ty
        tl.store(dx_ptr + row * 2 * width + at, (dy * up * s * (1 + gate * (1 - s))).to(dtype), mask=inside)
        tl.store(dx_ptr + row * 2 * width + width + at, (dy * gate * s).to(dtype), mask=inside)
