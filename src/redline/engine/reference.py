"""The choice of tokens in plain PyTorch: for CPUs, and as the reference of the Triton kernels.

`kernels` has the same functions under the same names. `rows_B` holds the slots of the rows.

Shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from redline.engine.state import Slots


def cutoff(logits_BV: Tensor, slots: Slots, rows_B: Tensor) -> Tensor:
    """For each row, the smallest logit that top-k and then top-p keep. Equal logits stay or go together."""
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
