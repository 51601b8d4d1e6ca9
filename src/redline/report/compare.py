"""Whether runs may be compared, and what the comparison gives. No torch.

    verdict = comparable(runs)          # level: yes | loss only | no, with the reasons in words
    ratio(slow, fast)                   # speed of one over the other, with its interval and "not resolved" where it spans 1

Two speeds compare under the same fingerprint on the same hardware; on other hardware only the losses do. What the plans do differently
is not a reason against: it is what is being compared.
"""

from dataclasses import dataclass
from typing import Any, Literal

from redline.report.figures import Summary
from redline.report.runs import Run, table


@dataclass(frozen=True)
class Verdict:
    level: Literal["yes", "loss only", "no"]
    title: str
    text: str
    differences: list[str]
    """What is computed differently, as `table.key: value | value`."""
    plan_differences: list[str]


@dataclass(frozen=True)
class Ratio:
    value: float
    low: float | None
    high: float | None

    @property
    def resolved(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def comparable(runs: list[Run]) -> Verdict:
    """The verdict on several runs."""
    recipes = [{k: v for k, v in run.recipe.items() if k not in ("name", "about", "plan")} for run in runs]
    plans = [{name: entry["value"] for name, entry in run.plan.items() if "value" in table(entry)} for run in runs]
    machines = [{"hardware": table(run.plan.get("hardware")).get("title"), "processes": run.plan.get("world_size")} for run in runs]
    changed, elsewhere = _differences(recipes), _differences(machines)
    plan_changed = _differences(plans)
    prints = {run.fingerprint for run in runs}
    if None in prints:
        return Verdict("no", "Not comparable", "a run without a recipe does not say what it computed", changed, plan_changed)
    if len(prints) > 1:
        text = "the runs compute different things (their fingerprints differ): neither speeds nor losses say which is better"
        return Verdict("no", "Not comparable", text, changed, plan_changed)
    if elsewhere:
        text = f"the same training ran on different hardware ({'; '.join(elsewhere)})"
        return Verdict("loss only", "Losses compare, speeds do not", text, [], plan_changed)
    text = "the same training (one fingerprint) on the same hardware; what differs is how it was executed"
    return Verdict("yes", "Comparable", text, [], plan_changed)


def _differences(tables: list[dict[str, Any]]) -> list[str]:
    """`key: a | b` for every value that is not the same in all tables; nested tables by dotted keys."""
    flat = [_flat(entry) for entry in tables]
    keys = dict.fromkeys(key for entry in flat for key in entry)
    return [
        f"{key}: {' | '.join(str(entry.get(key, 'not given')) for entry in flat)}"
        for key in keys
        if any(entry.get(key) != flat[0].get(key) for entry in flat)
    ]


def _flat(entry: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in entry.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def ratio(base: Summary, other: Summary) -> Ratio | None:
    """Speed of `other` over that of `base`; the widest interval that the two allow, since the runs did not take turns."""
    a, b = base.speed.update, other.speed.update
    if a is None or b is None or base.speed.unit != other.speed.unit:
        return None
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Ratio(b.value / a.value, None, None)
    return Ratio(b.value / a.value, b.low / a.high, b.high / a.low)
