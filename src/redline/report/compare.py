"""Whether runs can be compared, and the ratio of their speeds. No torch.

Losses are comparable if the trainings are the same (one fingerprint, the same tokens); validation losses of different
recipes, if data, tokenizer and validation set are the same. Speeds are comparable if the work of an update is the same,
on the same hardware. Different plans are no obstacle: they are what is being compared.
"""

from dataclasses import dataclass
from typing import Any, Literal

from redline.config.differences import flat, unlike_data
from redline.measure.statistics import APART_SPREAD
from redline.record.read import Run, table, values
from redline.record.units import factor
from redline.report.figures import Summary

Level = Literal["yes", "speed only", "loss only", "accuracy only", "no"]
TITLES: dict[Level, str] = {
    "yes": "Comparable",
    "speed only": "Speeds are comparable, losses are not",
    "loss only": "Losses are comparable, speeds are not",
    "accuracy only": "Accuracies are comparable, speeds and losses are not",
    "no": "Not comparable",
}


class Comparable:
    """What can be compared between these runs, and why; where their recipes and plans differ, as `table.key: value | value`."""

    def __init__(self, runs: list[Run]) -> None:
        titles = ("name", "about", "plan")
        recipes = [{k: v for k, v in run.recipe.items() if k not in titles} for run in runs]
        plans = [{k: v["value"] for k, v in run.plan.items() if "value" in table(v)} for run in runs]
        self.level, self.text = _level(runs)
        self.title = TITLES[self.level]
        self.differences, self.plan_differences = _differences(recipes), _differences(plans)


@dataclass(frozen=True)
class Ratio:
    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{factor(self.value)}× (too few updates for an interval)"
        resolved = ", not resolved" if self.low <= 1 <= self.high else ""
        return f"{factor(self.value)}× ({factor(self.low)} to {factor(self.high)}{resolved})"


def _level(runs: list[Run]) -> tuple[Level, str]:
    trainings, works = {run.fingerprint for run in runs}, {run.work for run in runs}
    elsewhere = _differences([
        {"hardware": run.hardware.get("title"), "processes": run.plan.get("world_size")}
        for run in runs
    ])  # fmt: skip
    same_data = len({event.get("data") for run in runs for event in run.told("start")} - {None}) < 2
    if None in trainings:
        return "no", "a run without a recipe does not say what it computes"
    if len(trainings) == 1 and same_data and elsewhere:
        return "loss only", f"the same training ran on different hardware ({'; '.join(elsewhere)})"
    if len(trainings) == 1 and same_data:
        return "yes", "the same training (one fingerprint) on the same hardware"
    tests = [(run.recipe.get("task"), run.recipe.get("test")) for run in runs]
    if all(run.workload == "rft" for run in runs) and all(test == tests[0] for test in tests):
        return "accuracy only", "the runs are tested in the same way but train on different samples"
    same_work = len(works) == 1 and None not in works and not elsewhere
    same = "the work of an update is the same, on the same hardware"
    if same_data and _validated_alike(runs):
        across = (
            "the recipes differ, but data, tokenizer and validation set are the same: this compares the validation losses"
            " of different recipes, at equal time or tokens"
        )
        if silent := [run.label for run in runs if not values(run.metrics, "valid_loss")]:
            across += f"; without a validation, so not compared: {', '.join(silent)}"
        other = "an update is different work in each, so compare the times to a loss and not tokens/s"
        return ("yes", f"{across}; {same}") if same_work else ("loss only", f"{across}; {other}")
    if same_work:
        return "speed only", f"{same}; {'the trainings differ' if same_data else 'they read different data'}"
    return "no", "the runs compute different things: neither speeds nor losses say which is better"


def _validated_alike(runs: list[Run]) -> bool:
    """Whether these are pre-training runs whose recipes name the same data and validation set, and two or more validated."""
    first, *others = [run.typed for run in runs]
    return (
        sum(bool(values(run.metrics, "valid_loss")) for run in runs) > 1
        and first is not None
        and first.workload == "pretrain"
        and all(other is not None and not unlike_data(first, other) for other in others)
    )


def _differences(tables: list[dict[str, Any]]) -> list[str]:
    """`key: a | b` for every value that differs between the tables; nested tables by dotted keys."""
    all_ = [flat(entry) for entry in tables]
    keys = dict.fromkeys(key for entry in all_ for key in entry)
    return [
        f"{key}: {' | '.join(str(entry.get(key, 'not given')) for entry in all_)}"
        for key in keys
        if any(entry.get(key) != all_[0].get(key) for entry in all_)
    ]


def ratio(base: Summary, other: Summary) -> Ratio | None:
    """Speed of `other` over that of `base`; the widest interval the two allow, since they did not take turns, and what two
    processes of the same code differ by."""
    a, b = base.speed.update, other.speed.update
    if a is None or b is None or not a.value or base.speed.unit != other.speed.unit:
        return None
    if not a.low or not a.high or b.low is None or b.high is None:
        return Ratio(b.value / a.value, None, None)
    low, high = b.low / a.high * (1 - APART_SPREAD), b.high / a.low * (1 + APART_SPREAD)
    return Ratio(b.value / a.value, low, high)
