"""How good a model is: mean loss, perplexity and bits per byte on held-out tokens.

    found = held_out_loss(model, dataset, seq_len=1024, sequences=64, micro_batch=8, process=process)
    found.metrics()      # {"valid_loss": ..., "valid_perplexity": ..., "valid_bits_per_byte": ...}

Runs eagerly even when the model is compiled: a second graph for a few batches would take longer to compile than it saves.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.config.recipe import IGNORED
from redline.data.loader import valid_batches
from redline.data.shards import TokenDataset
from redline.model.transformer import Transformer
from redline.train.process import Process


@dataclass(frozen=True)
class HeldOut:
    loss: float
    """Nats per token."""
    tokens: int
    bytes_per_token: float

    def metrics(self) -> dict[str, float]:
        """Under the names of the record. Perplexity overflows to infinity, which JSON cannot hold, so it is capped at 1e300."""
        return {
            "valid_loss": self.loss,
            "valid_perplexity": min(1e300, math.exp(min(self.loss, 690.0))),
            "valid_bits_per_byte": self.loss / math.log(2) / self.bytes_per_token,
        }


@torch.no_grad()
def held_out_loss(
    model: Transformer, dataset: TokenDataset, *, seq_len: int, sequences: int, micro_batch: int, process: Process
) -> HeldOut:
    """Mean loss over the first `sequences` windows of the data set, each read once, over all processes."""
    total, count = torch.zeros((), dtype=torch.float64, device=process.device), 0
    batches = valid_batches(
        dataset, seq_len=seq_len, sequences=sequences, micro_batch=micro_batch, rank=process.rank, world_size=process.world_size
    )
    with torch.compiler.set_stance("force_eager"), _in_pieces(model):
        for inputs_BT, targets_BT in batches:
            total += model(inputs_BT.to(process.device), targets_BT.to(process.device))
            count += int((targets_BT != IGNORED).sum())
    tokens = process.sum(float(count))
    return HeldOut(process.sum(total.item()) / tokens, int(tokens), dataset.bytes_per_token)


class _in_pieces:
    """While it lasts, logits are computed in pieces: eager mode holds them in fp32, and validation must not need more than training."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.chunks = model, model.loss_chunks

    def __enter__(self) -> None:
        self.model.loss_chunks = max(8, self.chunks)

    def __exit__(self, *_: object) -> None:
        self.model.loss_chunks = self.chunks


def loss_of_tokens(model: Transformer, tokens: Tensor) -> float:
    """Mean loss of one sequence of tokens, each predicted from those before it."""
    with torch.no_grad():
        return model(tokens[None, :-1], tokens[None, 1:]).item() / (len(tokens) - 1)
