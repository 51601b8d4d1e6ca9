"""The curves of a report, as columns of numbers for the browser: {"mean": [...], "low": [...], "high": [...]}.

A run with more updates than a screen has pixels is thinned: a point is the mean, the lowest and the highest of some
neighbouring updates, so that a spike stays visible. Validations are never thinned. A line without a number gives
None; `broken` says where on each axis the loss stops being a number for good.
"""

from typing import Any

from redline.record.metrics import METRICS
from redline.record.read import number, values
from redline.report.figures import without_number

AXES = ("step", "tokens", "elapsed_s")
CURVES = (
    "loss", "tokens_per_s", "rows_per_s", "memory_bytes", "lr", "grad_norm", "step_s", "data_wait_s", "mfu",
    "ceiling_share",
    "padding_share", "power_w", "sm_clock_mhz", "temperature_c",
)  # fmt: skip
POLICY_CURVES = (
    "reward", "accuracy", "response_tokens", "cut_share", "entropy", "kl", "clip_share", "logprob_gap",
)  # fmt: skip
"""Of reinforcement learning alone."""
DIAGNOSES = ("dfa_cosine", "dfa_error", "attention_similarity", "orthogonality_violation")
"""Of OKADFA alone."""
MOST_UPDATES = 800
"""Drawn one by one up to here."""
MOST_POINTS = 350
"""Of a thinned curve, which has three numbers a point."""
DIGITS = {"loss": 6}
"""The others show four at most; more would only make the page longer."""


def curves(lines: list[dict[str, Any]], most_points: int = MOST_POINTS) -> dict[str, Any]:
    """Axes and curves of a run's updates. `each`: how many updates a point stands for."""
    each = 1 if len(lines) <= MOST_UPDATES else max(1, -(-len(lines) // most_points))
    blocks = [lines[i : i + each] for i in range(0, len(lines), each)]
    found: dict[str, Any] = {
        "each": each,
        "axes": {axis: [_plain(number(block[-1].get(axis))) for block in blocks] for axis in AXES},
    }
    names = (*POLICY_CURVES, *DIAGNOSES, *CURVES, *own_names(lines))
    found["curves"] = {name: _curve(blocks, name) for name in names if values(lines, name)}
    tested = [line for line in lines if number(line.get("valid_loss")) is not None]
    found["broken"] = broken(lines)
    found["validation"] = {
        name: [_plain(number(line.get(name))) for line in tested] for name in (*AXES, "valid_loss")
    }
    return found


def own_names(lines: list[dict[str, Any]]) -> list[str]:
    """Names of the user's own metrics, logged by a watched loop (`run.log`), and the rewards of every domain. The other
    metrics of domains and their pairs are shown in tables."""
    some = lines[:: max(1, len(lines) // 200)]  # a name stands in more than one line
    kinds = {name.partition(".")[0] for name in METRICS if "." in name} - {"reward"}
    names = dict.fromkeys(
        name for line in some for name in line if name not in METRICS and name.partition(".")[0] not in kinds
    )
    return [name for name in names if values(some, name)]


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
