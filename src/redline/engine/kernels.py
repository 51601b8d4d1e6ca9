"""The choice of tokens as Triton kernels; `reference` says in PyTorch what each computes.

The choice of a token and the bookkeeping of its slot are one kernel, because a decode step of a small model is
bound by the number of its kernels.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from redline.engine.state import STOP_IDS, Slots
from redline.model.kernels import overlap

PASSES = 13
"""Passes over the logits in the search for a cut-off; each quarters the range: 40 nats over 4^13 is as
fine as fp32 logits are."""
RANGE_NATS = 40.0
"""Tokens this much less likely than the best have no weight in fp32 sums."""
BLOCK = 2048
"""Tokens in a block of the vocabulary: the choice takes first a block, then a token in it."""


def cutoff(logits_BV: Tensor, slots: Slots, rows_B: Tensor) -> Tensor:
    rows, vocab = logits_BV.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    _cutoff[(rows,)](
        logits_BV, rows_B, slots.temperature, slots.top_k, slots.top_p, out, vocab, RANGE_NATS, PASSES,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _cutoff(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, out_ptr, vocab, nats, passes,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    """Choose in two kernels: with one program per row, fewer rows would take longer."""
    rows, vocab = logits_BV.shape
    blocks = triton.cdiv(vocab, BLOCK)
    seen = torch.empty((3, rows, blocks), dtype=torch.float32, device=logits_BV.device)
    sizes = {"vocab": vocab, "blocks": blocks, "CUT": cutoff_B is not None, "BLOCK": BLOCK}
    given = logits_BV, logits_BV if cutoff_B is None else cutoff_B, rows_B, slots.temperature
    _survey[(rows, blocks)](*given, *seen, **sizes, **overlap(logits_BV.device), num_warps=8)
    _choose[(rows,)](
        *given, *seen, slots.uniform, slots.stop_ids, slots.limit, slots.count, slots.open, slots.last,
        slots.tokens, slots.logprobs, slots.tokens.shape[1],
        **sizes, **overlap(logits_BV.device), STOPS=STOP_IDS, BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip


@triton.jit
def _survey(
    logits_ptr, cutoff_ptr, rows_ptr, temperature_ptr, peaks_ptr, sums_ptr, spreads_ptr, vocab, blocks,
    CUT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """For each block of the vocabulary: the best logit, its weight in the choice and in the log-probability."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    temperature = tl.load(temperature_ptr + tl.load(rows_ptr + row))
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    cut = -float("inf")
    if CUT:
        cut = tl.load(cutoff_ptr + row)
    place = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * vocab + place, mask=place < vocab, other=-float("inf"))
    peak = tl.max(x)
    tl.store(peaks_ptr + row * blocks + block, peak)
    weight = tl.sum(tl.where(x >= cut, tl.exp((x - peak) * inverse), 0.0))
    tl.store(sums_ptr + row * blocks + block, weight)
    tl.store(spreads_ptr + row * blocks + block, tl.sum(tl.exp(x - peak)))


@triton.jit
def _choose(
    logits_ptr, cutoff_ptr, rows_ptr, temperature_ptr, peaks_ptr, sums_ptr, spreads_ptr,
    uniform_ptr, stop_ids_ptr, limit_ptr, count_ptr, open_ptr, last_ptr, tokens_ptr, logprobs_ptr, places,
    vocab, blocks, CUT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, STOPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(rows_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    count = tl.load(count_ptr + slot)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    cut = -float("inf")
    if CUT:
        cut = tl.load(cutoff_ptr + row)
    at, block = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    known = block < blocks
    peaks = tl.load(peaks_ptr + row * blocks + block, mask=known, other=-float("inf"))
    sums = tl.load(sums_ptr + row * blocks + block, mask=known, other=0.0)
    spreads = tl.load(spreads_ptr + row * blocks + block, mask=known, other=0.0)
    highest = tl.max(peaks)
    spread = tl.sum(spreads * tl.exp(peaks - highest))
    weights = tl.where(sums > 0, sums * tl.exp((peaks - highest) * inverse), 0.0)
    reached = tl.cumsum(weights, axis=0)
    place_in = tl.minimum(count, places - 1)  # a closed slot keeps computing, but its number is not used
    target = tl.load(uniform_ptr + slot * places + place_in) * tl.sum(weights)
    last_block = tl.max(tl.where(weights > 0, block, 0))
    chosen = tl.minimum(tl.min(tl.where((reached > target) & (weights > 0), block, BLOCKS)), last_block)
    chosen = tl.where(temperature > 0, chosen, tl.min(tl.where(peaks == highest, block, BLOCKS - 1)))
    before = tl.sum(tl.where(block < chosen, weights, 0.0))
    base = logits_ptr + row * vocab
    place = chosen * BLOCK + at
    x = tl.load(base + place, mask=place < vocab, other=-float("inf"))
    p = tl.where(x >= cut, tl.exp((x - highest) * inverse), 0.0)
    passed = (before + tl.cumsum(p, axis=0) > target) & (p > 0)
    last_place = tl.max(tl.where(p > 0, at, 0))
    sampled = tl.minimum(tl.min(tl.where(passed, at, BLOCK)), last_place)
    token = chosen * BLOCK + tl.where(temperature > 0, sampled, tl.argmax(x, axis=0))
    logprob = tl.load(base + token) - highest - tl.log(spread)
    if tl.load(open_ptr + slot) != 0:
        tl.store(tokens_ptr + slot * places + count, token)
        tl.store(logprobs_ptr + slot * places + count, logprob)
        tl.store(last_ptr + slot, token)
        tl.store(count_ptr + slot, count + 1)
        stops = tl.load(stop_ids_ptr + slot * STOPS + tl.arange(0, STOPS))
        stopped = tl.max((stops == token).to(tl.int32))
        tl.store(open_ptr + slot, tl.where((stopped == 0) & (count + 1 < tl.load(limit_ptr + slot)), 1, 0))
