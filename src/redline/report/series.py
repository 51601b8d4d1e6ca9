"""The curves of a report, as columns of numbers for the browser: {"mean": [...], "low": [...], "high": [...]}.

A run with more updates than a screen has pixels is thinned: a point is the mean, the lowest and the highest of some
neighbouring updates, so that a spike stays visible. Validations are never thinned. A line without a number gives
None; `broken` says where on each axis the loss stops being a number for good.
"""

from dataclasses import dataclass
from typing import Any

from redline.record.files import shipped
from redline.record.metrics import METRICS
from redline.record.read import number, values
from redline.report.figures import without_number

AXES = ("step", "tokens", "elapsed_s")
MOST_UPDATES = 800
"""Most updates that are drawn one by one."""
MOST_POINTS = 350
"""Most points of a thinned curve, which has three numbers per point."""
DIGITS = {"loss": 6}
"""The others show four at most; more would only make the page longer."""


@dataclass(frozen=True)
class Chart:
    """How the curve of a metric is drawn (shown.toml)."""

    title: str
    format: str
    first: bool = False
    main: bool = False
    smooth: bool = False
    validation: bool = False
    from_zero: bool = True


CHARTS = {name: Chart(**about) for name, about in shipped("report/shown.toml")["charts"].items()}


def curves(lines: list[dict[str, Any]], most_points: int = MOST_POINTS) -> dict[str, Any]:
    """Axes and curves of a run's updates. `each`: how many updates a point stands for."""
    each = 1 if len(lines) <= MOST_UPDATES else max(1, -(-len(lines) // most_points))
    blocks = [lines[i : i + each] for i in range(0, len(lines), each)]
    names = [name for name in (*CHARTS, *own_names(lines)) if values(lines, name)]
    tested = [line for line in lines if number(line.get("valid_loss")) is not None]
    valid = {name: [_plain(number(line.get(name))) for line in tested] for name in (*AXES, "valid_loss")}
    return {
        "each": each,
        "axes": {axis: [_plain(number(block[-1].get(axis))) for block in blocks] for axis in AXES},
        "curves": {name: _curve(blocks, name) for name in names},
        "broken": broken(lines),
        "validation": valid,
    }


def own_names(lines: list[dict[str, Any]]) -> list[str]:
    """The user's own metrics (`run.log`) and the domains' rewards; tables show the rest of domains."""
    some = lines[:: max(1, len(lines) // 200)]  # a name is in more than one line
    kinds = {name.partition(".")[0] for name in METRICS if "." in name} - {"reward"}
    names = dict.fromkeys(name for line in some for name in line if name not in METRICS)
    return [name for name in names if name.partition(".")[0] not in kinds and values(some, name)]


def broken(lines: list[dict[str, Any]]) -> dict[str, float | None] | None:
    first = without_number(lines)[:1]
    return {axis: _plain(number(line.get(axis))) for line in first for axis in AXES} or None


def _curve(blocks: list[list[dict[str, Any]]], name: str) -> dict[str, list[float | None]]:
    known = [[value for line in block if (value := number(line.get(name))) is not None] for block in blocks]
    digits = DIGITS.get(name, 4)
    curve = {"mean": [_plain(sum(block) / len(block), digits) if block else None for block in known]}
    if any(len(block) > 1 for block in blocks):
        curve |= {
            "low": [_plain(min(block, default=None), digits) for block in known],
            "high": [_plain(max(block, default=None), digits) for block in known],
        }
    return curve


def _plain(value: float | None, digits: int = 6) -> float | None:
    """Rounded to the digits that can be seen."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
