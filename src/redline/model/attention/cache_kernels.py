"""Triton kernels for keys and values in slots; `cache` says in PyTorch what each computes.

Decode attention reads every cached key and value once, from the prompt's place in the pool and from the slot: samples
of one prompt read the same bytes, which then come from the L2 cache. Rotation, the write to the cache and the
attention are one kernel, because a decode step of a small model is bound by the number of its kernels.

Shapes as in `cache`. The query heads of a key/value head make a tile of at least 16 rows, the least that the tensor
cores take.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from redline.model.attention.state import Rows
from redline.model.kernels import overlap, shared_bytes

if TYPE_CHECKING:
    from redline.model.attention.cache import KeysAndValues


def store_prompt(
    cache: "KeysAndValues", layer: int, qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor
) -> tuple[Tensor, ...]:
    M, T, heads, width = qkv_MTHC.shape
    kv_heads, places = cache.kv.shape[3], cache.prompt_kv.shape[4]
    q_heads = heads - 2 * kv_heads
    qk = torch.empty((M, T, q_heads + kv_heads, width), dtype=qkv_MTHC.dtype, device=qkv_MTHC.device)
    keys, values = cache.prompt_kv[layer]
    cos, sin = cache.rope or (qkv_MTHC, qkv_MTHC)
    _store_prompt[(M * T,)](
        qkv_MTHC, qk, keys, values, prompts_M, lengths_M, cos, sin, T, q_heads, kv_heads, places,
        C=width, CP=triton.next_power_of_2(width), HEADS=triton.next_power_of_2(heads),
        ROPE=cache.rope is not None, num_warps=4,
    )  # fmt: skip
    return qk[:, :, :q_heads], qk[:, :, q_heads:], qkv_MTHC[:, :, q_heads + kv_heads :]


@triton.jit
def _store_prompt(
    qkv_ptr, qk_ptr, keys_ptr, values_ptr, prompts_ptr, lengths_ptr, cos_ptr, sin_ptr,
    T, q_heads, kv_heads, places,
    C: tl.constexpr, CP: tl.constexpr, HEADS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, at = token // T, token % T
    h, c = tl.arange(0, HEADS)[:, None], tl.arange(0, CP)[None, :]
    heads = q_heads + 2 * kv_heads
    inside = (h < heads) & (c < C)
    base = qkv_ptr + token * heads * C
    x = tl.load(base + h * C + c, mask=inside, other=0.0)
    if ROPE:
        other = tl.load(base + h * C + (c + C // 2) % C, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + at * C + c, mask=c < C, other=0.0)
        sin = tl.load(sin_ptr + at * C + c, mask=c < C, other=0.0)
        turned = x.to(tl.float32) * cos + tl.where(c < C // 2, -other, other) * sin
        x = tl.where(h < q_heads + kv_heads, turned, x.to(tl.float32)).to(x.dtype)
    tl.store(qk_ptr + token * (q_heads + kv_heads) * C + h * C + c, x, mask=inside & (h < q_heads + kv_heads))
    counts = at < tl.load(lengths_ptr + row)
    prompt = tl.load(prompts_ptr + row).to(tl.int64)
    key_head, value_head = h - q_heads, h - q_heads - kv_heads
    key_at = (prompt * kv_heads + key_head) * places * C + at * C + c
    value_at = (prompt * kv_heads + value_head) * places * C + at * C + c
    tl.store(keys_ptr + key_at, x, mask=inside & counts & (key_head >= 0) & (key_head < kv_heads))
    tl.store(values_ptr + value_at, x, mask=inside & counts & (value_head >= 0))


def attend(cache: "KeysAndValues", layer: int, qkv_BHC: Tensor, rows: Rows) -> Tensor:
    B, heads, width = qkv_BHC.shape
    kv_heads = cache.kv.shape[3]
    q_heads = heads - 2 * kv_heads
    out = torch.empty((B, q_heads * width), dtype=qkv_BHC.dtype, device=qkv_BHC.device)
    cos, sin = cache.rope or (qkv_BHC, qkv_BHC)
    overlapping = overlap(qkv_BHC.device)
    sizes = {
        "C": width,
        "CP": max(16, triton.next_power_of_2(width)),
        "GROUP": max(16, triton.next_power_of_2(q_heads // kv_heads)),
    }
    few = overlapping["OVERLAP"] and B * kv_heads <= FEW_PROGRAMS
    few = few and large_bytes(sizes, qkv_BHC.dtype) <= shared_bytes(qkv_BHC.device)
    block, warps, stages = (LARGE, 4, 2) if few else (16, 1, 3)
    _attend[(B, kv_heads)](
        qkv_BHC, out, *cache.prompt_kv[layer], *cache.kv[layer], *rows, cos, sin,
        width**-0.5 * 1.4426950408889634,  # exp2 is the fast one
        cache.prompt_kv.shape[4], cache.kv.shape[4],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, BLOCK=block, ROPE=cache.rope is not None,
        num_warps=warps, num_stages=stages, **sizes, **(overlapping if few else {"OVERLAP": False}),
    )  # fmt: skip
    return out


FEW_PROGRAMS, LARGE = 160, 128
"""A program is a row and a key/value head. On an H200, 96 + 128 positions: 1 row of 5 heads 3.6 us with blocks of 128,
four warps and overlap, 6.7 with blocks of 16 and one warp; 32 rows 6.7 and 9.0; 128 rows 14.3 and 11.9. GPUs before
Hopper keep the small blocks."""


def large_bytes(sizes: dict[str, int], dtype: torch.dtype) -> int:
    """Shared memory that a program with large blocks takes at most (tests/kernels compiles it)."""
    # from 64 rows on, Hopper fetches keys and values one block ahead
    blocks = 2 if sizes["GROUP"] < 64 else 4
    return (blocks * LARGE * sizes["CP"] + 2 * sizes["GROUP"] * (LARGE + sizes["CP"])) * dtype.itemsize


@triton.jit
def _attend(
    qkv_ptr, out_ptr, prompt_keys_ptr, prompt_values_ptr, keys_ptr, values_ptr,
    slot_ptr, prompt_ptr, prompt_len_ptr, count_ptr, cos_ptr, sin_ptr, scale, prompt_places, places,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    count, prompt_len = tl.load(count_ptr + slot), tl.load(prompt_len_ptr + slot)
    prompt = tl.load(prompt_ptr + slot).to(tl.int64)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    g, c = tl.arange(0, GROUP), tl.arange(0, CP)
    width = c < C
    if OVERLAP:
        gdc_wait()
    base = qkv_ptr + row * (Q_HEADS + 2 * KV_HEADS) * C
    q_at = (head * group + g)[:, None] * C
    q_in = (g < group)[:, None] & width[None, :]
    q = tl.load(base + q_at + c[None, :], mask=q_in, other=0.0)
    k_base = base + (Q_HEADS + head) * C
    k = tl.load(k_base + c, mask=width, other=0.0)
    v = tl.load(k_base + KV_HEADS * C + c, mask=width, other=0.0)
    if ROPE:
        position = prompt_len + count - 1
        cos = tl.load(cos_ptr + position * C + c, mask=width, other=0.0)
        sin = tl.load(sin_ptr + position * C + c, mask=width, other=0.0)
        sin = tl.where(c < C // 2, -sin, sin)
        half = (c + C // 2) % C
        q_half = tl.load(base + q_at + half[None, :], mask=q_in, other=0.0).to(tl.float32)
        k_half = tl.load(k_base + half, mask=width, other=0.0).to(tl.float32)
        q = (q.to(tl.float32) * cos[None, :] + q_half * sin[None, :]).to(q.dtype)
        k = (k.to(tl.float32) * cos + k_half * sin).to(k.dtype)
    own = (slot * KV_HEADS + head) * places * C
    tl.store(keys_ptr + own + (count - 1) * C + c, k, mask=width)
    tl.store(values_ptr + own + (count - 1) * C + c, v, mask=width)
    # The new token first, from registers: what was just stored need not be visible yet.
    best = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
    total = tl.full((GROUP,), 1.0, tl.float32)
    mixed = tl.zeros((GROUP, CP), tl.float32) + v.to(tl.float32)[None, :]
    shared = (prompt * KV_HEADS + head) * prompt_places * C
    for start in range(0, prompt_len, BLOCK):
        best, total, mixed = _look(
            q, prompt_keys_ptr + shared, prompt_values_ptr + shared,
            start, prompt_len, scale, best, total, mixed, C, CP, BLOCK,
        )  # fmt: skip
    for start in range(0, count - 1, BLOCK):
        best, total, mixed = _look(
            q, keys_ptr + own, values_ptr + own, start, count - 1, scale, best, total, mixed, C, CP, BLOCK
        )
    out_at = out_ptr + row * Q_HEADS * C + q_at + c[None, :]
    tl.store(out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_in)


@triton.jit
def _look(
    q, keys_ptr, values_ptr, start, end, scale, best, total, mixed,
    C: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take one block of keys and values into the running softmax."""
    s, c = start + tl.arange(0, BLOCK), tl.arange(0, CP)
    inside = (s < end)[:, None] & (c < C)[None, :]
    k = tl.load(keys_ptr + s[:, None] * C + c[None, :], mask=inside, other=0.0)
    v = tl.load(values_ptr + s[:, None] * C + c[None, :], mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where((s < end)[None, :], scores, -float("inf"))
    now = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - now[:, None])
    fade = tl.exp2(best - now)
    mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return now, total * fade + tl.sum(weights, axis=1), mixed
