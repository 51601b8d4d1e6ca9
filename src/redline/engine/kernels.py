"""The engine's device operations as Triton kernels; `reference` says in PyTorch what each computes.

Decode attention reads every cached key and value once, from the prompt's place in the pool and from the slot:
samples of one prompt read the same bytes, which then come from the L2 cache. Rotation, the write to the cache
and the attention are one kernel, and so are the choice of a token and the bookkeeping of its slot: a decode
step of a small model is bound by the number of its kernels.

Shapes as in `reference`. The query heads of a key/value head make a tile of at least 16 rows, the least that
the tensor cores take.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.engine.reference import Rope
from redline.engine.state import STOP_IDS, Slots
from redline.model.kernels import swiglu as swiglu  # fine-tuning's, under the name that `reference` has

PASSES = 13
"""Looks at the logits in the search for a cut-off, each of which quarters the range: 40 nats over 4^13 is as
fine as fp32 logits are."""
RANGE_NATS = 40.0
"""Tokens this much less likely than the best have no weight in fp32 sums."""


def add_rms_norm(x_RD: Tensor, y_RD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    rows, width = x_RD.shape
    out = torch.empty_like(x_RD)
    y = x_RD if y_RD is None else y_RD
    _add_rms_norm[(rows,)](
        x_RD,
        y,
        weight_D,
        out,
        width,
        eps,
        ADD=y_RD is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out


@triton.jit
def _add_rms_norm(x_ptr, y_ptr, weight_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(y_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(x_ptr + row * width + at, x, mask=inside)
    full = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full) / width + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (full * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def store_prompt(
    slots: Slots, layer: int, qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor, rope: Rope | None
) -> tuple[Tensor, ...]:
    M, T, heads, width = qkv_MTHC.shape
    kv_heads, places = slots.kv.shape[3], slots.prompt_kv.shape[4]
    q_heads = heads - 2 * kv_heads
    qk = torch.empty((M, T, q_heads + kv_heads, width), dtype=qkv_MTHC.dtype, device=qkv_MTHC.device)
    cos, sin = rope or (qkv_MTHC, qkv_MTHC)
    _store_prompt[(M * T,)](
        qkv_MTHC,
        qk,
        slots.prompt_kv[layer, 0],
        slots.prompt_kv[layer, 1],
        prompts_M,
        lengths_M,
        cos,
        sin,
        T,
        q_heads,
        kv_heads,
        places,
        C=width,
        CP=triton.next_power_of_2(width),
        HEADS=triton.next_power_of_2(heads),
        ROPE=rope is not None,
        num_warps=4,
    )
    return qk[:, :, :q_heads], qk[:, :, q_heads:], qkv_MTHC[:, :, q_heads + kv_heads :]


@triton.jit
def _store_prompt(
    qkv_ptr,
    qk_ptr,
    keys_ptr,
    values_ptr,
    prompts_ptr,
    lengths_ptr,
    cos_ptr,
    sin_ptr,
    T,
    q_heads,
    kv_heads,
    places,
    C: tl.constexpr,
    CP: tl.constexpr,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
):
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


def attend(slots: Slots, layer: int, qkv_BHC: Tensor, rows_B: Tensor, rope: Rope | None) -> Tensor:
    rows, heads, width = qkv_BHC.shape
    kv_heads = slots.kv.shape[3]
    q_heads = heads - 2 * kv_heads
    out = torch.empty((rows, q_heads * width), dtype=qkv_BHC.dtype, device=qkv_BHC.device)
    cos, sin = rope or (qkv_BHC, qkv_BHC)
    _attend[(rows, kv_heads)](
        qkv_BHC,
        out,
        slots.prompt_kv[layer, 0],
        slots.prompt_kv[layer, 1],
        slots.kv[layer, 0],
        slots.kv[layer, 1],
        rows_B,
        slots.prompt,
        slots.prompt_len,
        slots.count,
        cos,
        sin,
        width**-0.5 * 1.4426950408889634,  # exp2 is the fast one
        slots.prompt_kv.shape[4],
        slots.kv.shape[4],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        C=width,
        CP=max(16, triton.next_power_of_2(width)),
        GROUP=max(16, triton.next_power_of_2(q_heads // kv_heads)),
        BLOCK=ATTEND_BLOCK,
        ROPE=rope is not None,
        num_warps=ATTEND_WARPS,
        num_stages=ATTEND_STAGES,
    )
    return out


ATTEND_BLOCK, ATTEND_WARPS, ATTEND_STAGES = 16, 1, 3
"""Positions at a time, warps and pipeline depth. Measured on an H200 at 2,048 rows of 96 + 64 positions: 69
us; 64/4/3 takes 124."""


@triton.jit
def _attend(
    qkv_ptr,
    out_ptr,
    prompt_keys_ptr,
    prompt_values_ptr,
    keys_ptr,
    values_ptr,
    rows_ptr,
    prompt_ptr,
    prompt_len_ptr,
    count_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    prompt_places,
    places,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    count, prompt_len = tl.load(count_ptr + slot), tl.load(prompt_len_ptr + slot)
    prompt = tl.load(prompt_ptr + slot).to(tl.int64)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    g, c = tl.arange(0, GROUP), tl.arange(0, CP)
    width = c < C
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
            q,
            prompt_keys_ptr + shared,
            prompt_values_ptr + shared,
            start,
            prompt_len,
            scale,
            best,
            total,
            mixed,
            C,
            CP,
            BLOCK,
        )
    for start in range(0, count - 1, BLOCK):
        best, total, mixed = _look(
            q, keys_ptr + own, values_ptr + own, start, count - 1, scale, best, total, mixed, C, CP, BLOCK
        )
    out_at = out_ptr + row * Q_HEADS * C + q_at + c[None, :]
    tl.store(out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_in)


@triton.jit
def _look(
    q,
    keys_ptr,
    values_ptr,
    start,
    end,
    scale,
    best,
    total,
    mixed,
    C: tl.constexpr,
    CP: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


def cutoff(logits_BV: Tensor, slots: Slots, rows_B: Tensor) -> Tensor:
    rows, vocab = logits_BV.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    _cutoff[(rows,)](
        logits_BV,
        rows_B,
        slots.temperature,
        slots.top_k,
        slots.top_p,
        out,
        vocab,
        RANGE_NATS,
        PASSES,
        BLOCK=4096,
        num_warps=8,
    )
    return out


@triton.jit
def _cutoff(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    out_ptr,
    vocab,
    nats,
    passes,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
    base = logits_ptr + row * vocab
    highest, lowest = -float("inf"), float("inf")
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocab, other=-float("inf"))
        highest = tl.maximum(highest, tl.max(x))
        lowest = tl.minimum(lowest, tl.min(tl.where(at < vocab, x, float("inf"))))
    cut = -float("inf")
    if temperature > 0:
        if top_k < vocab:  # the largest cut-off that leaves at least top_k tokens in
            low, width = lowest, highest - lowest
            for _ in range(passes):
                kept1, kept2, kept3 = 0, 0, 0
                for start in range(0, vocab, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    x = tl.load(base + at, mask=at < vocab, other=-float("inf"))
                    kept1 += tl.sum((x >= low + 0.25 * width).to(tl.int32))
                    kept2 += tl.sum((x >= low + 0.5 * width).to(tl.int32))
                    kept3 += tl.sum((x >= low + 0.75 * width).to(tl.int32))
                quarters = (
                    (kept1 >= top_k).to(tl.int32)
                    + (kept2 >= top_k).to(tl.int32)
                    + (kept3 >= top_k).to(tl.int32)
                )
                low, width = low + 0.25 * quarters * width, 0.25 * width
            cut = low
        if top_p < 1:  # the largest one that leaves at least the share top_p of what is left in
            total = 0.0
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(base + at, mask=at < vocab, other=-float("inf"))
                total += tl.sum(tl.where(x >= cut, tl.exp((x - highest) / temperature), 0.0))
            low = tl.maximum(tl.maximum(cut, lowest), highest - nats * temperature)
            width = highest - low
            for _ in range(passes):
                mass1, mass2, mass3 = 0.0, 0.0, 0.0
                for start in range(0, vocab, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    x = tl.load(base + at, mask=at < vocab, other=-float("inf"))
                    p = tl.exp((x - highest) / temperature)
                    mass1 += tl.sum(tl.where(x >= low + 0.25 * width, p, 0.0))
                    mass2 += tl.sum(tl.where(x >= low + 0.5 * width, p, 0.0))
                    mass3 += tl.sum(tl.where(x >= low + 0.75 * width, p, 0.0))
                wanted = top_p * total
                quarters = (
                    (mass1 >= wanted).to(tl.int32)
                    + (mass2 >= wanted).to(tl.int32)
                    + (mass3 >= wanted).to(tl.int32)
                )
                low, width = low + 0.25 * quarters * width, 0.25 * width
            cut = low
    tl.store(out_ptr + row, cut)


def pick(logits_BV: Tensor, slots: Slots, rows_B: Tensor, cutoff_B: Tensor | None) -> None:
    rows, vocab = logits_BV.shape
    block = 2048
    _pick[(rows,)](
        logits_BV,
        logits_BV if cutoff_B is None else cutoff_B,
        rows_B,
        slots.temperature,
        slots.uniform,
        slots.stop_ids,
        slots.limit,
        slots.count,
        slots.open,
        slots.last,
        slots.tokens,
        slots.logprobs,
        vocab,
        slots.tokens.shape[1],
        CUT=cutoff_B is not None,
        STOPS=STOP_IDS,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, block)),
        num_warps=8,
    )


@triton.jit
def _pick(
    logits_ptr,
    cutoff_ptr,
    rows_ptr,
    temperature_ptr,
    uniform_ptr,
    stop_ids_ptr,
    limit_ptr,
    count_ptr,
    open_ptr,
    last_ptr,
    tokens_ptr,
    logprobs_ptr,
    vocab,
    places,
    CUT: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    count = tl.load(count_ptr + slot)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    cut = -float("inf")
    if CUT:
        cut = tl.load(cutoff_ptr + row)
    base = logits_ptr + row * vocab
    at, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    # One pass: the sum for the log-probability, the best token, and the weight of each block for the choice.
    highest, greedy = -float("inf"), 0
    spread = 0.0
    peaks = tl.full((BLOCKS,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCKS,), tl.float32)
    for block in range((vocab + BLOCK - 1) // BLOCK):
        place = block * BLOCK + at
        x = tl.load(base + place, mask=place < vocab, other=-float("inf"))
        peak = tl.max(x)
        weight = tl.sum(tl.where(x >= cut, tl.exp((x - peak) * inverse), 0.0))
        peaks, sums = tl.where(blocks == block, peak, peaks), tl.where(blocks == block, weight, sums)
        above = tl.maximum(highest, peak)
        spread = spread * tl.exp(highest - above) + tl.sum(tl.exp(x - above))
        greedy = tl.where(peak > highest, block * BLOCK + tl.argmax(x, axis=0), greedy)
        highest = above
    weights = tl.where(sums > 0, sums * tl.exp((peaks - highest) * inverse), 0.0)
    reached = tl.cumsum(weights, axis=0)
    place_in = tl.minimum(count, places - 1)  # a closed slot computes on, and its number is not used
    target = tl.load(uniform_ptr + slot * places + place_in) * tl.sum(weights)
    last_block = tl.max(tl.where(weights > 0, blocks, 0))
    chosen = tl.minimum(tl.min(tl.where((reached > target) & (weights > 0), blocks, BLOCKS)), last_block)
    before = tl.sum(tl.where(blocks < chosen, weights, 0.0))
    place = chosen * BLOCK + at
    x = tl.load(base + place, mask=place < vocab, other=-float("inf"))
    p = tl.where(x >= cut, tl.exp((x - highest) * inverse), 0.0)
    passed = (before + tl.cumsum(p, axis=0) > target) & (p > 0)
    last_place = tl.max(tl.where(p > 0, at, 0))
    sampled = chosen * BLOCK + tl.minimum(tl.min(tl.where(passed, at, BLOCK)), last_place)
    token = tl.where(temperature > 0, sampled, greedy)
    logprob = tl.load(base + token) - highest - tl.log(spread)
    if tl.load(open_ptr + slot) != 0:
        tl.store(tokens_ptr + slot * places + count, token)
        tl.store(logprobs_ptr + slot * places + count, logprob)
        tl.store(last_ptr + slot, token)
        tl.store(count_ptr + slot, count + 1)
        stops = tl.load(stop_ids_ptr + slot * STOPS + tl.arange(0, STOPS))
        stopped = tl.max((stops == token).to(tl.int32))
        tl.store(open_ptr + slot, tl.where((stopped == 0) & (count + 1 < tl.load(limit_ptr + slot)), 1, 0))
