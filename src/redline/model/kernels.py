"""Triton kernels for what is between the matrix products of a block, where no compiler fuses it.

    y = swiglu(gate_up)                                # silu(gate) * up, with its backward
    y = relu_squared(x)                                # with its backward
    normed = add_rms_norm(x, y, weight, eps)           # x += y, in place, and x normalised; no backward
    total, normed = sum_rms_norm(x, y, weight, eps)    # x + y, and that normalised, with its backward

A fine-tuning update on some 1,500 tokens, and a decode step of a small model, are bound by the number of their
kernels. In pre-training they move the same bytes as a compiler's, and nothing has to be compiled at the start. CUDA only.
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
    launch, which Hopper brought, they begin while the previous kernel still runs."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory that a program can have."""
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return found


def add_rms_norm(x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add y to x in place (None: nothing), and return x normalised. The weight is read while the kernel before may still
    run (`overlap`): that kernel must not write it."""
    return _normed(x, y, x, weight_D, eps, rows=1, **overlap(x.device))


def sum_rms_norm(x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (None: x), and that normalised."""
    return _SumRmsNorm.apply(x, y, weight_D, eps)


TILE, TILES = 2048, 4
"""Elements that a program takes at a time where many rows are normalised, and how often: a weight's gradient is summed over
the rows of each program here, and over the programs by torch."""


def _normed(
    x: Tensor, y: Tensor | None, total: Tensor, weight_D: Tensor, eps: float, *, rows: int, **how: bool
) -> Tensor:
    """x + y into `total`, and that normalised, by programs of so many rows."""
    width, out = x.shape[-1], torch.empty_like(x)
    count = x.numel() // width
    _add_rms_norm[(triton.cdiv(count, rows),)](
        x, x if y is None else y, total, weight_D, out, count, width, eps,
        ADD=y is not None, ROWS=rows, BLOCK=triton.next_power_of_2(width), num_warps=4, **how,
    )  # fmt: skip
    return out


def _rows(width: int, learning: bool) -> int:
    return max(1, TILE // triton.next_power_of_2(width)) if learning else 1


class _SumRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, y = x.contiguous(), None if y is None else y.contiguous()
        total = x if y is None else torch.empty_like(x)
        ctx.rows, ctx.eps, ctx.summed = _rows(x.shape[-1], ctx.needs_input_grad[2]), eps, y is not None
        out = _normed(x, y, total, weight_D, eps, rows=ctx.rows, OVERLAP=False)
        ctx.save_for_backward(total, weight_D)
        ctx.set_materialize_grads(False)  # nothing reads the sum that the last norm makes
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor) -> tuple[Tensor | None, ...]:
        (total, weight_D), learns = ctx.saved_tensors, ctx.needs_input_grad[2]
        dx, dout, tiles = torch.empty_like(total), dout.contiguous(), TILES if learns else 1
        width = total.shape[-1]
        count = total.numel() // width
        programs = triton.cdiv(count, ctx.rows * tiles)
        sums_PD = torch.empty(programs, width, dtype=torch.float32, device=dx.device) if learns else dx
        _add_rms_norm_backward[(programs,)](
            total, weight_D, dout, dout if dtotal is None else dtotal.contiguous(), dx, sums_PD, count, width, ctx.eps,
            ADD=dtotal is not None, LEARNS=learns, TILES=tiles, ROWS=ctx.rows,
            BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
        return dx, dx if ctx.summed else None, sums_PD.sum(0).to(weight_D.dtype) if learns else None, None


def relu_squared(x: Tensor) -> Tensor:
    return _ReluSquared.apply(x)


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _ReluSquared.launch(x, x, backward=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _ReluSquared.launch(x, dy.contiguous(), backward=True)

    @staticmethod
    def launch(x: Tensor, dy: Tensor, *, backward: bool) -> Tensor:
        out, count = torch.empty_like(x), x.numel()
        _relu_squared[(triton.cdiv(count, 2048),)](x, dy, out, count, BACKWARD=backward, BLOCK=2048)
        return out


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

    @triton.jit(do_not_specialize=["rows"])
    def _add_rms_norm(
        x_ptr, y_ptr, sum_ptr, weight_ptr, out_ptr, rows, width, eps,
        ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, BLOCK)[None, :]
        row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        at, inside = row * width + column, (row < rows) & (column < width)
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        if OVERLAP:
            gdc_wait()
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        if ADD:
            y = tl.load(y_ptr + at, mask=inside, other=0.0)
            x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
            tl.store(sum_ptr + at, x, mask=inside)
        full = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(full * full, axis=1) / width + eps)[:, None]
        tl.store(out_ptr + at, (full * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["rows"])
    def _add_rms_norm_backward(
        x_ptr, weight_ptr, dout_ptr, dx_ptr, out_ptr, sums_ptr, rows, width, eps,
        ADD: tl.constexpr, LEARNS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, BLOCK)[None, :]
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for tile in range(TILES):
            row = ((tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS))[:, None]
            at, inside = row * width + column, (row < rows) & (column < width)
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
            if LEARNS:
                sums += dout * x * scale
            g = dout * weight
            dx = scale * (g - x * (scale * scale * (tl.sum(g * x, axis=1) / width)[:, None]))
            if ADD:
                dx += tl.load(dx_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + at, dx.to(out_ptr.dtype.element_ty), mask=inside)
        if LEARNS:
            to = sums_ptr + tl.program_id(0) * width + column
            tl.store(to, tl.sum(sums, axis=0)[None, :], mask=column < width)

    @triton.jit
    def _relu_squared(x_ptr, dy_ptr, out_ptr, count, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        positive = tl.maximum(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
        if BACKWARD:
            out = 2 * positive * tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        else:
            out = positive * positive
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)

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
