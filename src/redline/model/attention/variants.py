"""The seam: what a block asks of attention, and the variants that answer.

A block hands over its fused projection, (..., H + 2K, C), neither normalised nor rotated, and gets
(..., H * C) back. Who computes that is decided once for each pass, and the block does not know: it calls an
`Attend`. In training a variant makes one for a batch or a packed row; in generation the engine makes one for
each layer from the variant's state. Rotation is behind the seam, so that a kernel may fuse it.

To add a variant: one file with the two things that `Variant` names, and a line in VARIANTS.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.attention import packed, softmax
from redline.model.attention.cache import KeysAndValues
from redline.model.attention.packed import Packing
from redline.model.attention.softmax import Rope
from redline.model.attention.state import State

if TYPE_CHECKING:
    from redline.model.transformer import Attention

Attend = Callable[["Attention", Tensor], Tensor]
"""From a block's attention module and the fused projection to the mixed values."""


@dataclass(frozen=True)
class Variant:
    over: Callable[[ModelConfig, Packing | None, Rope | None, Tensor], Attend]
    """Attention in training: in the rows of a batch or the sequences of a packed row, rotated by these angles."""
    state: type[State]
    """The state that generation keeps for the tokens so far."""


def _softmax(config: ModelConfig, packing: Packing | None, rope: Rope | None, x: Tensor) -> Attend:
    if packing is not None:
        return packed.attention(config, packing, rope, x)
    if softmax.older(x):
        return functools.partial(softmax.attend, rope=rope, copied=True)
    return functools.partial(softmax.attend, rope=rope)


def _favor() -> Variant:
    from redline.model.attention import favor  # here: defining its kernels takes 0.3 s

    return Variant(favor.attention, favor.Features)


VARIANTS = {"softmax": lambda: Variant(_softmax, KeysAndValues), "favor": _favor}
