"""The engine's device operations in plain PyTorch: what runs on a CPU, and what the Triton kernels are tested
against.

`kernels` has the same functions under the same names. Each works on rows, one a sequence; `rows_B` holds
their slots.

Shapes: B rows, R rows of activations (B, or prompts x tokens), D hidden, H query heads, K key/value heads, C
head width, V vocabulary, M prompts, T tokens, S positions in a cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.engine.state import Slots
from redline.model.transformer import rotate

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of every position; None where positions are learned."""


def add_rms_norm(x_RD: Tensor, y_RD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add y to x in place (None: nothing), and return x normalised."""
    if y_RD is not None:
        x_RD += y_RD
    return F.rms_norm(x_RD, weight_D.shape, weight_D, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_prompt(
    slots: Slots, layer: int, qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor, rope: Rope | None
) -> tuple[Tensor, ...]:
    """Put the keys and values of prompts into the pool; returns queries, keys and values with their positions
    in them."""
    K = slots.kv.shape[3]
    q, k, v = qkv_MTHC.split([qkv_MTHC.shape[2] - 2 * K, K, K], dim=2)
    T = q.shape[1]
    if rope is not None:
        at = rope[0][:T], rope[1][:T]
        q, k = rotate(q, at), rotate(k, at)
    for part, value in ((0, k), (1, v)):
        slots.prompt_kv[layer, part, prompts_M.long(), :, :T] = value.transpose(1, 2)
    return q, k, v


def attend(slots: Slots, layer: int, qkv_BHC: Tensor, rows_B: Tensor, rope: Rope | None) -> Tensor:
    """One new token a row: its keys and values go into the slot, its queries see the prompt and all new
    tokens. (B, H*C)"""
    K = slots.kv.shape[3]
    rows = rows_B.long()
    q, k, v = qkv_BHC.split([qkv_BHC.shape[1] - 2 * K, K, K], dim=1)
    count, prompt_len = slots.count[rows].long(), slots.prompt_len[rows].long()
    if rope is not None:
        position = prompt_len + count - 1
        at = rope[0][position], rope[1][position]
        q, k = rotate(q, at), rotate(k, at)
    for part, value in ((0, k), (1, v)):
        slots.kv[layer, part, rows, :, count - 1] = value
    prompts, own = int(prompt_len.max()), int(count.max())
    # Two parts, whose scores alone are put together: a copy of all keys and values would take longer than the
    # attention.
    caches = (
        slots.prompt_kv[layer][:, slots.prompt[rows].long(), :, :prompts],
        slots.kv[layer][:, rows, :, :own],
    )
    grouped = q.unflatten(1, (K, -1)) * q.shape[-1] ** -0.5
    scores = torch.cat([grouped @ keys.mT for keys, _ in caches], dim=-1).float()
    ends = ((prompts, prompt_len), (own, count))
    seen = torch.cat([torch.arange(size, device=q.device) < end[:, None] for size, end in ends], dim=1)
    weights = (
        scores.masked_fill(~seen[:, None, None], -torch.inf)
        .softmax(dim=-1)
        .to(q.dtype)
        .split([prompts, own], dim=-1)
    )
    y_prompt, y_own = (part @ values for part, (_, values) in zip(weights, caches, strict=True))
    return (y_prompt + y_own).flatten(1)


def cutoff(logits_BV: Tensor, slots: Slots, rows_B: Tensor) -> Tensor:
    """The smallest logit that top-k and then top-p leave in, a row. Equal logits stay or go together."""
    rows = rows_B.long()
    temperature = slots.temperature[rows].clamp(min=1e-20)[:, None]
    ordered = logits_BV.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, (slots.top_k[rows].long() - 1)[:, None])
    mass = ((ordered - ordered[:, :1]) / temperature).exp().masked_fill(ordered < kth, 0.0)
    before = mass.cumsum(dim=-1) - mass  # of the likelier tokens: the first is always kept
    kept = (before < slots.top_p[rows][:, None] * mass.sum(dim=-1, keepdim=True)) & (mass > 0)
    lowest: Tensor = ordered.masked_fill(~kept, torch.inf).min(dim=-1).values
    return lowest


def pick(logits_BV: Tensor, slots: Slots, rows_B: Tensor, cutoff_B: Tensor | None) -> None:
    """Choose the next token of each row, with its log-probability, and move its slot on.

    The token is the first whose cumulative probability, in the order of the vocabulary, passes the sample's
    uniform number.
    """
    rows = rows_B.long()
    raw = logits_BV.float()
    count, temperature = slots.count[rows].long(), slots.temperature[rows]
    tempered = raw / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if cutoff_B is not None:
        tempered = tempered.masked_fill(raw < cutoff_B[:, None], -torch.inf)
    reached = tempered.softmax(dim=-1).cumsum(dim=-1)
    uniform = slots.uniform[rows, count.clamp(max=slots.uniform.shape[1] - 1)]
    sampled = torch.searchsorted(reached, (uniform * reached[:, -1])[:, None], right=True)[:, 0]
    last_possible = raw.shape[1] - 1 - (tempered > -torch.inf).flip(1).int().argmax(dim=1)
    token = torch.where(temperature > 0, torch.minimum(sampled, last_possible), raw.argmax(dim=-1))
    logprob = raw.gather(1, token[:, None])[:, 0] - raw.logsumexp(dim=-1)
    _advance(slots, rows, token.int(), logprob)


def _advance(slots: Slots, rows: Tensor, token: Tensor, logprob: Tensor) -> None:
    going = slots.open[rows].bool()
    rows, token, logprob = rows[going], token[going], logprob[going]
    count = slots.count[rows].long()
    slots.tokens[rows, count], slots.logprobs[rows, count] = token, logprob
    slots.last[rows], slots.count[rows] = token, (count + 1).int()
    stopped = (slots.stop_ids[rows] == token[:, None]).any(dim=1)
    slots.open[rows] = (~stopped & (count + 1 < slots.limit[rows])).int()
