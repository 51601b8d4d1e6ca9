"""Triton kernels for kernel attention, forward and backward; `favor` says in PyTorch what each computes.

    y_BTHC, norm_BHT = torch.ops.redline.favor(q_BTHC, k_BTKC, v_BTKC, w_KMC)      # with its backward

Three kernels forward: the sums of each chunk (`_own`), a scan over the chunks (`_scan`), and what every query reads of
the sums before its chunk and of the chunk itself (`_read`). Nothing of the size T x M is ever written: features are
computed where they are used, from queries, keys and directions, and the backward keeps nothing but the inputs, y and
one number a query and head. That is `norm`, the logarithm of what y was divided by with the query's shift in it, as in
flash attention. The backward computes the sums again, for the gradients of the queries, and sums over the queries
after each chunk, scanned from the end, for those of keys and values.

Exponents are in base 2, whose exponential is one instruction. The model uses the kernels in bf16, which multiplies in
bf16 and adds up in fp32; fp16 lacks the range for features. Autograd reaches them through custom operations, which
a compiler takes as they are.

Shapes as in `favor`; the features go in blocks of BM.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

from redline.plan.arithmetic import FAVOR_CHUNK, favor_fits

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

SCAN_ROWS = 16
"""Features that a program of a scan takes."""


def fits(x: Tensor, w_KMC: Tensor) -> bool:
    """Whether the kernels take activations like x with these directions."""
    _, M, C = w_KMC.shape
    return triton is not None and x.is_cuda and x.dtype == torch.bfloat16 and favor_fits(C, M)


def _sizes(q: Tensor, k: Tensor, w: Tensor) -> dict[str, Any]:
    M = w.shape[1]
    return {
        "T": q.shape[1], "N": triton.cdiv(q.shape[1], FAVOR_CHUNK), "H": q.shape[2], "K": k.shape[2], "M": M,
        "C": q.shape[3], "L": FAVOR_CHUNK, "BM": 64 if M % 64 == 0 and q.shape[3] <= 64 else 32, "SCALE": q.shape[3] ** -0.25,
    }  # fmt: skip


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    assert all(t.stride(3) == 1 for t in tensors)
    return tuple(t.stride(dim) for t in tensors for dim in range(3))


def _sums(k: Tensor, v: Tensor, w: Tensor, sizes: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The sums before each chunk, relative to `top`."""
    B, K, N, M, C = k.shape[0], *(sizes[name] for name in ("K", "N", "M", "C"))
    mix = torch.empty((B, K, N, M, C), dtype=v.dtype, device=v.device)
    total, top = (torch.empty((B, K, N, M), dtype=torch.float32, device=v.device) for _ in range(2))
    _own[(N, B * K, M // sizes["BM"])](k, v, w, mix, total, top, *_strides(k, v), **sizes, num_warps=4)
    _scan[(B * K, M // SCAN_ROWS)](mix, total, top, N=N, M=M, C=C, ROWS=SCAN_ROWS, num_warps=2)
    return mix, total, top


@torch.library.custom_op("redline::favor", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed values like the queries, and their norms, (B, H, T) in fp32."""
    sizes = _sizes(q, k, w)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    norm = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    sums = _sums(k, v, w, sizes)
    grid = (sizes["N"], q.shape[0] * sizes["H"])
    _read[grid](q, k, v, w, *sums, y, norm, *_strides(q, k, v), **sizes, num_warps=4)
    return y, norm


@torch.library.custom_op("redline::favor_backward", mutates_args=())
def attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, y: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, dy = _sizes(q, k, w), dy.contiguous()
    B, H, K, N, M, C = q.shape[0], *(sizes[name] for name in ("H", "K", "N", "M", "C"))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(norm)
    mix, total, top = _sums(k, v, w, sizes)
    grad_mix = torch.empty((B, H, N, M, C), dtype=q.dtype, device=q.device)
    grad_total = torch.empty((B, H, N, M), dtype=torch.float32, device=q.device)
    _back_queries[(N, B * H)](
        q, k, v, w, mix, total, top, y, dy, norm, dq, delta, grad_mix, grad_total, *_strides(q, k, v), **sizes,
        num_warps=4,
    )  # fmt: skip
    _scan_back[(B * K, M // SCAN_ROWS)](
        grad_mix, grad_total, top, N=N, M=M, C=C, H=H, K=K, ROWS=SCAN_ROWS, num_warps=2
    )
    _back_keys[(N, B * K)](
        q, k, v, w, top, dy, norm, delta, grad_mix, grad_total, dk, dv, *_strides(q, k, v), **sizes, num_warps=4
    )  # fmt: skip
    return dq, dk, dv


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    norm = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), norm


@attend_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, y: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, dy: Tensor, _dnorm: Any) -> tuple[Tensor | None, ...]:
    q, k, v, w, y, norm = ctx.saved_tensors
    return *attend_backward(dy, q, k, v, w, y, norm), None


attend.register_autograd(_backward, setup_context=_keep)


if triton is not None:

    @triton.jit
    def _tile(ptr, rows, columns, inside):
        return tl.load(ptr + rows[:, None] + columns[None, :], mask=inside[:, None], other=0.0)

    @triton.jit
    def directions(w_ptr, head, block, M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
        m, c = block * BM + tl.arange(0, BM), tl.arange(0, C)
        return tl.load(w_ptr + (head * M + m)[:, None] * C + c[None, :])

    @triton.jit
    def _exponents(x, w, SCALE: tl.constexpr):
        """w.x', in base 2."""
        return tl.dot(x, tl.trans(w), input_precision="ieee") * (SCALE * 1.4426950408889634)

    @triton.jit
    def _half_square(k, SCALE: tl.constexpr):
        """|k'|^2 / 2, in base 2."""
        wide = k.to(tl.float32)
        return tl.sum(wide * wide, axis=1) * (0.5 * SCALE * SCALE * 1.4426950408889634)

    @triton.jit
    def _key_features(k, square, w, top, SCALE: tl.constexpr):
        """Relative to the chunk's top, and not below e^-80."""
        a = _exponents(k, w, SCALE) - square[:, None] - top[None, :]
        return tl.exp2(tl.maximum(a, -115.4156)).to(k.dtype)

    @triton.jit
    def _own(
        k_ptr, v_ptr, w_ptr, mix_ptr, total_ptr, top_ptr, k_b, k_t, k_h, v_b, v_t, v_h,
        T, N, H, K, SCALE: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    ):  # fmt: skip
        """The sums of one chunk, relative to its own largest exponents, which go where `top` will stand."""
        chunk, row, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
        batch, head = row // K, row % K
        t, c, m = chunk * L + tl.arange(0, L), tl.arange(0, C), block * BM + tl.arange(0, BM)
        k = _tile(k_ptr + batch * k_b + head * k_h, t * k_t, c, t < T)
        v = _tile(v_ptr + batch * v_b + head * v_h, t * v_t, c, t < T)
        w = directions(w_ptr, head, block, M, C, BM)
        a = _exponents(k, w, SCALE) - _half_square(k, SCALE)[:, None]
        a = tl.where((t < T)[:, None], a, -float("inf"))
        peak = tl.max(a, axis=0)
        phi = tl.exp2(a - peak[None, :])
        at = (row * N + chunk) * M + m
        tl.store(top_ptr + at, peak)
        tl.store(total_ptr + at, tl.sum(phi, axis=0))
        mix = tl.dot(tl.trans(phi.to(v.dtype)), v, input_precision="ieee")
        tl.store(mix_ptr + at[:, None] * C + c[None, :], mix.to(mix_ptr.dtype.element_ty))

    @triton.jit
    def _scan(mix_ptr, total_ptr, top_ptr, N, M: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
        """In place: the sums of each chunk become those before it, its peaks the top so far."""
        row, m = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, C)
        mix, total = tl.zeros((ROWS, C), tl.float32), tl.zeros((ROWS,), tl.float32)
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        at = row * N * M + m
        own, count, peak = _chunk_sums(mix_ptr, total_ptr, top_ptr, at, c, True, C)
        for chunk in range(N):
            # The next chunk's are on their way while this one's are taken in.
            more, more_count, more_peak = _chunk_sums(
                mix_ptr, total_ptr, top_ptr, at + M, c, chunk + 1 < N, C
            )
            higher = tl.maximum(top, peak)
            fade, part = tl.exp2(top - higher), tl.exp2(peak - higher)
            mix, total, top = mix * fade[:, None], total * fade, higher
            tl.store(mix_ptr + at[:, None] * C + c[None, :], mix.to(mix_ptr.dtype.element_ty))
            tl.store(total_ptr + at, total)
            tl.store(top_ptr + at, top)
            mix, total = mix + own * part[:, None], total + count * part
            own, count, peak, at = more, more_count, more_peak, at + M

    @triton.jit
    def _chunk_sums(mix_ptr, total_ptr, top_ptr, at, c, there, C: tl.constexpr):
        mix = tl.load(mix_ptr + at[:, None] * C + c[None, :], mask=(at >= 0)[:, None] & there, other=0.0)
        total = tl.load(total_ptr + at, mask=(at >= 0) & there, other=0.0)
        return mix.to(tl.float32), total, tl.load(top_ptr + at, mask=(at >= 0) & there, other=0.0)

    @triton.jit
    def _read(
        q_ptr, k_ptr, v_ptr, w_ptr, mix_ptr, total_ptr, top_ptr, y_ptr, norm_ptr,
        q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
        T, N, H, K, SCALE: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    ):  # fmt: skip
        chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
        batch, head = row // H, row % H
        kv = head // (H // K)
        t, c, i = chunk * L + tl.arange(0, L), tl.arange(0, C), tl.arange(0, BM)
        q = _tile(q_ptr + batch * q_b + head * q_h, t * q_t, c, t < T)
        k = _tile(k_ptr + batch * k_b + kv * k_h, t * k_t, c, t < T)
        v = _tile(v_ptr + batch * v_b + kv * v_h, t * v_t, c, t < T)
        square = _half_square(k, SCALE)
        at = ((batch * K + kv) * N + chunk) * M + i
        shift = tl.full((L,), -float("inf"), tl.float32)
        for block in range(M // BM):
            b = _exponents(q, directions(w_ptr, kv, block, M, C, BM), SCALE)
            b += tl.load(top_ptr + at + block * BM)[None, :]
            shift = tl.maximum(shift, tl.max(b, axis=1))
        scores, y, total = (
            tl.zeros((L, L), tl.float32),
            tl.zeros((L, C), tl.float32),
            tl.zeros((L,), tl.float32),
        )
        for block in range(M // BM):
            w, here = directions(w_ptr, kv, block, M, C, BM), at + block * BM
            top = tl.load(top_ptr + here)
            phi_q = tl.exp2(_exponents(q, w, SCALE) + top[None, :] - shift[:, None])
            total += tl.sum(phi_q * tl.load(total_ptr + here)[None, :], axis=1)
            phi_q = phi_q.to(q.dtype)
            mix = tl.load(mix_ptr + here[:, None] * C + c[None, :])
            y += tl.dot(phi_q, mix, input_precision="ieee")
            scores += tl.dot(phi_q, tl.trans(_key_features(k, square, w, top, SCALE)), input_precision="ieee")
        scores = tl.where((t[:, None] >= t[None, :]) & (t < T)[None, :], scores, 0.0)
        total += tl.sum(scores, axis=1)
        y += tl.dot(scores.to(v.dtype), v, input_precision="ieee")
        y_at = y_ptr + ((batch * T + t)[:, None] * H + head) * C + c[None, :]
        tl.store(y_at, (y / total[:, None]).to(y_ptr.dtype.element_ty), mask=(t < T)[:, None])
        tl.store(norm_ptr + row * T + t, shift + tl.log2(total), mask=t < T)

    @triton.jit
    def _query_features(q, w, top, norm, SCALE: tl.constexpr):
        """Divided by what y was divided by; 0 beyond the end, where the norm is infinite."""
        return tl.exp2(_exponents(q, w, SCALE) + top[None, :] - norm[:, None]).to(q.dtype)

    @triton.jit
    def _back_queries(
        q_ptr, k_ptr, v_ptr, w_ptr, mix_ptr, total_ptr, top_ptr, y_ptr, dy_ptr, norm_ptr, dq_ptr, delta_ptr,
        grad_mix_ptr, grad_total_ptr, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
        T, N, H, K, SCALE: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    ):  # fmt: skip
        """The gradient of the queries, and of the sums that they read."""
        chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
        batch, head = row // H, row % H
        kv = head // (H // K)
        t, c, i = chunk * L + tl.arange(0, L), tl.arange(0, C), tl.arange(0, BM)
        q = _tile(q_ptr + batch * q_b + head * q_h, t * q_t, c, t < T)
        k = _tile(k_ptr + batch * k_b + kv * k_h, t * k_t, c, t < T)
        v = _tile(v_ptr + batch * v_b + kv * v_h, t * v_t, c, t < T)
        own = ((batch * T + t) * H + head) * C
        dy = _tile(dy_ptr, own, c, t < T)
        delta = tl.sum(dy.to(tl.float32) * _tile(y_ptr, own, c, t < T).to(tl.float32), axis=1)
        tl.store(delta_ptr + row * T + t, delta, mask=t < T)
        norm = tl.load(norm_ptr + row * T + t, mask=t < T, other=float("inf"))
        square = _half_square(k, SCALE)
        seen = (t[:, None] >= t[None, :]) & (t < T)[None, :]
        dp = tl.dot(dy, tl.trans(v), input_precision="ieee") - delta[:, None]
        dp = tl.where(seen, dp, 0.0).to(q.dtype)
        dq = tl.zeros((L, C), tl.float32)
        at, out = ((batch * K + kv) * N + chunk) * M + i, (row * N + chunk) * M + i
        for block in range(M // BM):
            w, here = directions(w_ptr, kv, block, M, C, BM), at + block * BM
            top = tl.load(top_ptr + here)
            phi_q = _query_features(q, w, top, norm, SCALE)
            mix = tl.load(mix_ptr + here[:, None] * C + c[None, :])
            dphi = tl.dot(dp, _key_features(k, square, w, top, SCALE), input_precision="ieee")
            dphi += tl.dot(dy, tl.trans(mix), input_precision="ieee")
            dphi -= delta[:, None] * tl.load(total_ptr + here)[None, :]
            db = (dphi * phi_q.to(tl.float32)).to(q.dtype)
            dq += tl.dot(db, w, input_precision="ieee")
            there = out + block * BM
            grad_mix = tl.dot(tl.trans(phi_q), dy, input_precision="ieee")
            tl.store(
                grad_mix_ptr + there[:, None] * C + c[None, :], grad_mix.to(grad_mix_ptr.dtype.element_ty)
            )
            tl.store(grad_total_ptr + there, -tl.sum(phi_q.to(tl.float32) * delta[:, None], axis=0))
        tl.store(
            dq_ptr + own[:, None] + c[None, :],
            (dq * SCALE).to(dq_ptr.dtype.element_ty),
            mask=(t < T)[:, None],
        )

    @triton.jit
    def _scan_back(
        mix_ptr, total_ptr, top_ptr, N,
        M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """In place, in the first query head of each group: the gradients of the sums after each chunk, relative to its
        top."""
        row, m = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        group: tl.constexpr = H // K
        c = tl.arange(0, C)
        mix, total = tl.zeros((ROWS, C), tl.float32), tl.zeros((ROWS,), tl.float32)
        for back in range(N):
            chunk = N - 1 - back
            own, count = tl.zeros((ROWS, C), tl.float32), tl.zeros((ROWS,), tl.float32)
            for g in range(group):
                at = ((row * group + g) * N + chunk) * M + m
                own += tl.load(mix_ptr + at[:, None] * C + c[None, :]).to(tl.float32)
                count += tl.load(total_ptr + at)
            at = (row * group * N + chunk) * M + m
            tl.store(mix_ptr + at[:, None] * C + c[None, :], mix.to(mix_ptr.dtype.element_ty))
            tl.store(total_ptr + at, total)
            top = tl.load(top_ptr + (row * N + chunk) * M + m)
            lower = tl.load(top_ptr + (row * N + chunk - 1) * M + m, mask=(m >= 0) & (chunk > 0), other=0.0)
            fade = tl.exp2(tl.minimum(lower - top, 0.0))
            mix, total = (mix + own) * fade[:, None], (total + count) * fade

    @triton.jit
    def _back_keys(
        q_ptr, k_ptr, v_ptr, w_ptr, top_ptr, dy_ptr, norm_ptr, delta_ptr, grad_mix_ptr, grad_total_ptr, dk_ptr, dv_ptr,
        q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
        T, N, H, K, SCALE: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    ):  # fmt: skip
        """The gradients of keys and values: from the queries after the chunk through the sums, and from its own."""
        chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
        batch, head = row // K, row % K
        group = H // K
        t, c, i = chunk * L + tl.arange(0, L), tl.arange(0, C), tl.arange(0, BM)
        k = _tile(k_ptr + batch * k_b + head * k_h, t * k_t, c, t < T)
        v = _tile(v_ptr + batch * v_b + head * v_h, t * v_t, c, t < T)
        square = _half_square(k, SCALE)
        dk, dv = tl.zeros((L, C), tl.float32), tl.zeros((L, C), tl.float32)
        dsquare = tl.zeros((L,), tl.float32)
        at, after = (row * N + chunk) * M + i, (row * group * N + chunk) * M + i
        for block in range(M // BM):
            w, there = directions(w_ptr, head, block, M, C, BM), after + block * BM
            phi_k = _key_features(k, square, w, tl.load(top_ptr + at + block * BM), SCALE)
            mix = tl.load(grad_mix_ptr + there[:, None] * C + c[None, :])
            dphi = tl.dot(v, tl.trans(mix), input_precision="ieee") + tl.load(grad_total_ptr + there)[None, :]
            da = dphi * phi_k.to(tl.float32)
            dsquare += tl.sum(da, axis=1)
            dk += tl.dot(da.to(k.dtype), w, input_precision="ieee")
            dv += tl.dot(phi_k, mix, input_precision="ieee")
        seen = (t[:, None] >= t[None, :]) & (t < T)[:, None]
        for g in range(group):
            q_head = head * group + g
            q = _tile(q_ptr + batch * q_b + q_head * q_h, t * q_t, c, t < T)
            dy = _tile(dy_ptr, ((batch * T + t) * H + q_head) * C, c, t < T)
            numbers = (batch * H + q_head) * T + t
            norm = tl.load(norm_ptr + numbers, mask=t < T, other=float("inf"))
            delta = tl.load(delta_ptr + numbers, mask=t < T, other=0.0)
            dp = tl.dot(dy, tl.trans(v), input_precision="ieee") - delta[:, None]
            dp = tl.where(seen, dp, 0.0).to(q.dtype)
            p = tl.zeros((L, L), tl.float32)
            for block in range(M // BM):
                w = directions(w_ptr, head, block, M, C, BM)
                top = tl.load(top_ptr + at + block * BM)
                phi_q = _query_features(q, w, top, norm, SCALE)
                phi_k = _key_features(k, square, w, top, SCALE)
                p += tl.dot(phi_q, tl.trans(phi_k), input_precision="ieee")
                da = tl.dot(tl.trans(dp), phi_q, input_precision="ieee") * phi_k.to(tl.float32)
                dsquare += tl.sum(da, axis=1)
                dk += tl.dot(da.to(k.dtype), w, input_precision="ieee")
            dv += tl.dot(tl.trans(tl.where(seen, p, 0.0).to(v.dtype)), dy, input_precision="ieee")
        dk = dk * SCALE - k.to(tl.float32) * (SCALE * SCALE) * dsquare[:, None]
        to = ((batch * T + t) * K + head)[:, None] * C + c[None, :]
        tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=(t < T)[:, None])
        tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=(t < T)[:, None])
