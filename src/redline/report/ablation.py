"""An ablation as a chart of claimed against measured, from the rows of ablation.json. What a row does not say is left
blank. No torch, no HTML."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from redline.config.load import build
from redline.errors import ConfigError
from redline.record.read import Line, number
from redline.record.units import DASH, exact, factor, format_bytes
from redline.tune.quality import Quality

TICKS = (0.1, 0.25, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100)
_STAGES = dict.fromkeys(
    ("baseline", "one by one", "second try"), "one by one, each on top of those kept before it"
) | {"leave one out": "left out of the best, one at a time", "all": "all kept together"}
_WORKLOADS = {"train": "pre-training", "generate": "generation", "finetune": "fine-tuning"}
Place = Callable[[float], float]
"""The place of a factor."""


class Tick(NamedTuple):
    at: float
    text: str


class Row:
    """A line of ablation.json as it is shown."""

    def __init__(self, row: Line, place: Place) -> None:
        def text(name: str) -> str:
            return str(row.get(name) or "")

        value, size = number(row.get("measured_ratio")), number(row.get("memory_bytes"))
        before, speed = number(row.get("before_tokens_per_s")), number(row.get("tokens_per_s"))
        interval, claim = _pair([row.get("low"), row.get("high")]), _pair(row.get("claimed"))
        outcome, stage = text("outcome") or "ok", row.get("stage")
        verdict = text("verdict") if outcome == "ok" else outcome.replace("_", " ")
        self.name, self.title = text("name") + (", again" if stage == "second try" else ""), text("title")
        self.claimed, self.source = _range(claim) if claim else DASH, text("source")
        self.measured = f"{factor(value)}×" if value else DASH
        self.interval = f"{factor(interval[0])} to {factor(interval[1])}×" if interval else ""
        self.judged = ", ".join(filter(None, (verdict, "kept" if row.get("kept") is True else "")))
        """The comparison's verdict, or why there is none; and whether the change was kept."""
        self.note = "; ".join(filter(None, (self.title if stage == "all" else "", text("note"))))
        self.speed = f"{f'{exact(before)} to ' if before else ''}{exact(speed)} tokens/s" if speed else ""
        self.memory, self.numerics = format_bytes(size) if size else "", text("numerics")
        self.quality = _quality(row.get("quality"))
        """`loss` or `accuracy`, and what both states train to; empty if that was not asked for."""
        self.at = place(value) if value and value > 0 else None
        self.interval_at, self.claimed_at = (
            (place(pair[0]), place(pair[1]) - place(pair[0])) if pair else None for pair in (interval, claim)
        )
        """Left edge and width."""

    @property
    def verdict(self) -> str:
        return ", ".join(filter(None, (self.judged, self.note)))

    @property
    def details(self) -> list[str]:
        by = f" by {self.source}" if self.source else ""
        claim = f"claimed {self.claimed}{by}" if self.claimed != DASH else ""
        interval = f"interval {self.interval}" if self.interval else ""
        numerics = f"numerics: {self.numerics}" if self.numerics else ""
        quality = " ".join(self.quality).strip()
        memory = f"peak memory {self.memory}" if self.memory else ""
        return [*filter(None, (claim, interval, self.speed, memory, quality, numerics))]


class Ablation:
    """One chart. Places are percentages of its width on a logarithmic scale."""

    def __init__(self, title: str, rows: list[Line], place: Place, ticks: list[Tick]) -> None:
        out = [row for row in rows if row.get("outcome") == "not applicable"]
        self.title, self.ticks, self.one = title, ticks, place(1.0)
        self.rows = [Row(row, place) for row in rows if row not in out]
        self.not_applicable = [(str(row.get("name", "")), str(row.get("note") or "")) for row in out]
        """What could not be tried here, and why."""


def ablation(rows: list[Line]) -> list[Ablation]:
    """The charts, one per workload and stage, all on one scale that holds every number and 1."""
    measured = [number(row.get(key)) for row in rows for key in ("measured_ratio", "low", "high")]
    factors = [value for value in measured if value and value > 0]
    factors += [value for row in rows for value in _pair(row.get("claimed")) or ()]
    low, high = min([1.0, *factors]), max([1.0, *factors])
    margin = 0.04 * math.log(high / low) or 0.1
    bottom, width = math.log(low) - margin, math.log(high / low) + 2 * margin

    def place(factor: float) -> float:
        return 100 * (math.log(factor) - bottom) / width

    groups: dict[str, list[Line]] = {}
    for row in rows:
        parts = _WORKLOADS.get(row.get("workload", "")), _STAGES.get(row.get("stage", ""))
        groups.setdefault(", ".join(filter(None, parts)), []).append(row)
    ticks = _apart([Tick(place(f), f"{f:g}×") for f in TICKS if low <= f <= high])
    return [Ablation(title, group, place, ticks) for title, group in groups.items()]


def _apart(ticks: list[Tick]) -> list[Tick]:
    """The ticks whose labels do not overlap; 1 always stays."""
    kept: list[Tick] = []
    for tick in sorted(ticks, key=lambda tick: tick.text != "1×"):
        if all(abs(tick.at - other.at) > 9 for other in kept):
            kept.append(tick)
    return kept


def _pair(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    low, high = number(value[0]), number(value[1])
    return (low, high) if low and high and 0 < low <= high else None


def _quality(value: Any) -> tuple[str, str]:
    try:
        found = build(Quality, value, where="quality")
    except ConfigError:  # none, or written by another version
        return "", ""
    return found.figure, str(found)


def _range(pair: tuple[float, float]) -> str:
    low, high = (f"{value:.3g}" for value in pair)
    return f"{low}×" if low == high else f"{low} to {high}×"
