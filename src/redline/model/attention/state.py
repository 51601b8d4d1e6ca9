"""The state that generation keeps for the tokens so far: the interface that a variant of attention implements.

The engine has slots, one per sample, and a pool of prompts, each read once whatever the number of its samples. A slot and
the pool hold keys and values of every token (`cache`), or a recurrent state of constant size. The engine calls

    state = variant.state(config, rope, room, device=device, dtype=dtype)
    y_MTD = state.read(layer, attn, qkv_MTHC, prompts_M, lengths_M)      # in every layer: prompts into the pool
    state.start(slots_B, prompts_B)                                      # samples begin in these slots
    y_BD = state.step(layer, attn, qkv_BHC, rows)                        # in every layer: a new token for each row

All memory is allocated when the state is made. `step` runs inside a CUDA graph: it must not wait for the device.

Shapes: M prompts, T tokens, B rows, N slots, H query heads and twice the key/value heads, C head width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.attention.softmax import Rope

if TYPE_CHECKING:
    from redline.model.transformer import Attention


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much a state has to hold."""

    slots: int
    """Sequences at a time. There is one slot more, the last, which is no sample's: rows that pad a batch use it."""
    prompts: int
    max_prompt_tokens: int
    max_new_tokens: int
    whole: bool = False
    """A step reads all positions, so that a row's bits do not depend on how long the other rows are."""


class Rows(NamedTuple):
    """The rows of a decode step. All but the first are indexed by slot; all are int32."""

    slot_B: Tensor
    prompt_N: Tensor
    """The place of the slot's prompt in the pool."""
    prompt_len_N: Tensor
    count_N: Tensor
    """New tokens so far. The step reads the last of them, so its position is prompt_len + count - 1."""


class State(Protocol):
    def __init__(
        self, config: ModelConfig, rope: Rope | None, room: Room, *, device: torch.device, dtype: torch.dtype
    ) -> None: ...

    @staticmethod
    def sequence_bytes(config: ModelConfig, room: Room, dtype: torch.dtype) -> int:
        """Memory of one slot and one prompt."""

    def read(
        self, layer: int, attn: "Attention", qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor
    ) -> Tensor:
        """Attend within prompts, padded at the right to T tokens, and keep their state in the pool; (M, T, H * C)."""

    def start(self, slots_B: Tensor, prompts_B: Tensor) -> None:
        """Samples of these prompts begin in these slots: copy the prompts' states, unless `step` shares them."""

    def step(self, layer: int, attn: "Attention", qkv_BHC: Tensor, rows: Rows) -> Tensor:
        """Take one new token into each row's state and attend to everything before it; (B, H * C)."""
