"""Where every slot of an engine stands: its prompt, its tokens so far, and how the next one is chosen.

What attention keeps of the tokens is apart from this (`model.attention.state`).

Shapes: P prompts, N slots, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.attention.state import Room

STOP_IDS = 8
"""Stop tokens that a slot can hold, the engine's own included."""


@dataclass(frozen=True)
class Slots:
    """Tensors of fixed address, changed in place: CUDA graphs read and write them."""

    prompt_logits_PV: Tensor
    """Logits after the last token of each prompt, in fp32: further samples of it can start at any time."""
    prompt: Tensor
    """The slot's prompt in the pool."""
    prompt_len: Tensor
    count: Tensor
    """New tokens so far; the last of them is not in the cache yet."""
    limit: Tensor
    last: Tensor
    """The last new token, which the next step reads."""
    open: Tensor
    """1 while the sample continues."""
    temperature: Tensor
    top_k: Tensor
    """V: all."""
    top_p: Tensor
    stop_ids: Tensor
    """(N, STOP_IDS), -1 where there is none."""
    uniform: Tensor
    """(N, new tokens): the random number that chooses each token, drawn when the sample starts."""
    tokens: Tensor
    """(N, new tokens)"""
    logprobs: Tensor

    @property
    def spare(self) -> int:
        return self.count.shape[0] - 1


def make_slots(config: ModelConfig, room: Room, device: torch.device) -> Slots:
    n, new = room.slots + 1, room.max_new_tokens

    def integers(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    def floats(*shape: int, value: float = 0.0) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=device)

    return Slots(
        prompt_logits_PV=floats(room.prompts, config.vocab_size),
        prompt=integers(n),
        prompt_len=integers(n),
        count=integers(n, value=1),
        limit=integers(n, value=1),
        last=integers(n),
        open=integers(n),
        temperature=floats(n),
        top_k=integers(n, value=config.vocab_size),
        top_p=floats(n, value=1.0),
        stop_ids=integers(n, STOP_IDS, value=-1),
        uniform=floats(n, new),
        tokens=integers(n, new),
        logprobs=floats(n, new),
    )
