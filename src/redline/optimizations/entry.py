"""What an entry of the catalogue is. Families (precision.py, memory.py, ...) hold the entries, catalogue.py
lists them.

    entry = CATALOGUE["bf16"]
    entry.why_not(recipe, hardware)         # None where it applies, else the reason in words
    entry.off, entry.on                     # values of the switch before and after; None: what the planner
                                            decides

The switches of `train` are plan values (`plan.PLANNED`), those of `generate` and `finetune` the fields of
`work.Generating` and `work.Finetuning`. An entry never measures anything: that is `redline.tune.ablate`'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from redline.config.recipe import Recipe
from redline.plan.plan import Hardware

Workload = Literal["train", "generate", "finetune"]
Effect = Literal["exact", "rounding", "changes-training"]
"""`exact`: the same numbers up to the order of sums. `rounding`: another precision or kernel, within a stated
band of the reference. `changes-training`: another training; its speed says nothing about the first one's."""
Standing = Literal["switch", "built in", "recipe", "refuted"]
"""`switch`: `redline ablate` turns it off and on. `built in`: always on, at no cost that a switch could save.
`recipe`: said in the recipe, not by a switch. `refuted`: the claim is impossible, or names something that
does not exist; the note holds the arithmetic."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What somebody promises: speed with the change over speed without it; an "up to" starts at 1. Without
    `low` and `high`: no number was given."""

    source: str
    words: str
    """As the source has it, shortened."""
    low: float | None = None
    high: float | None = None


def always(_recipe: Recipe, _hardware: Hardware) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Optimization:
    name: str
    title: str
    workloads: tuple[Workload, ...]
    effect: Effect
    claims: tuple[Claim, ...]
    standing: Standing = "switch"
    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Recipe], Recipe] | None = None
    """How the recipe changes, where `effect` is changes-training."""
    why_not: Callable[[Recipe, Hardware], str | None] = always
    note: str = ""
    """What to know beside the numbers; of a refuted claim the arithmetic."""

    @property
    def claimed(self) -> tuple[float, float] | None:
        """The range that all its claims span; None where none gave a number."""
        lows = [claim.low for claim in self.claims if claim.low is not None]
        highs = [claim.high for claim in self.claims if claim.high is not None]
        return (min(lows), max(highs)) if lows and highs else None


def needs_cuda(_recipe: Recipe, hardware: Hardware) -> str | None:
    return None if hardware.kind == "cuda" else "needs a CUDA device, and this is a CPU"


def needs_capability(needed: tuple[int, int], what: str) -> Callable[[Recipe, Hardware], str | None]:
    """Applies from a CUDA compute capability on."""

    def why_not(recipe: Recipe, hardware: Hardware) -> str | None:
        if reason := needs_cuda(recipe, hardware):
            return reason
        has = hardware.compute_capability
        dotted = ".".join(map(str, has))
        return (
            None
            if has >= needed
            else f"{what} needs compute capability {needed[0]}.{needed[1]}, {hardware.title} has {dotted}"
        )

    return why_not
