"""The switches of generation and fine-tuning, as values: what `plan.Plan` is to pre-training. The defaults
are all on.

    Generating(**{**entry.off})      # the switch of one entry off, all others on

Left out: how each is carried out, which is `redline.measure.generation` and `finetuning`.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self


@dataclass(frozen=True, kw_only=True)
class Generating:
    """How prompts are completed."""

    precision: Literal["fp32", "bf16"] = "bf16"
    cached: bool = True
    """Off: every token is a pass over all tokens before it."""
    merged: bool = True
    """Adapters merged into the weights. Off: computed beside them, which only the way without a cache can."""
    sequences: int | None = None
    """At once; None: all of the work, as far as memory holds them."""
    refilled: bool = True
    """A slot takes the next sample when its own ends. Off: a batch runs until its longest sample has
    ended."""
    shared: bool = True
    """Samples of a prompt share its keys and values."""
    graphs: bool = True
    """A decode step is a CUDA graph."""
    clear_cache: bool = False
    """torch.cuda.empty_cache() after every batch; only without slots that are refilled, which know no
    batches."""

    def in_force(self) -> Self:
        """The same with every switch that nothing turns on here at one value, so that equal work has equal
        settings."""
        if not self.cached:
            return replace(self, refilled=False, shared=False, graphs=False)
        return replace(self, merged=True, clear_cache=self.clear_cache and not self.refilled)


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """How LoRA fine-tuning on short rows is computed."""

    precision: Literal["fp32", "bf16"] = "bf16"
    tf32: bool = True
    """For what fp32 products are left."""
    recompute: Literal["none", "full"] = "none"
    padded: bool = False
    """Rows filled up to the recipe's sequence length."""
    rows: int | None = None
    """In a pass; None: all of an update."""
    graph: bool = True
    compile: Literal["off", "default"] = "off"
    """Blocks compiled. Off by default: 20 s that a run of seconds does not earn back."""

    def in_force(self) -> Self:
        return self
