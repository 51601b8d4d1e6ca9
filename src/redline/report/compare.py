"""Whether runs may be compared, and what the comparison gives. No torch.

    verdict = comparable(runs)          # level: yes | loss only | accuracy only | no, with the reasons in
                                        words
    ratio(slow, fast)                   # speed of one over the other, with its interval and "not resolved"
                                        where it spans 1

Two speeds compare under the same fingerprint on the same hardware; on other hardware only the losses do. What
the plans do differently is not a reason against: it is what is being compared. Nor is how often a run
validates or saves, beside its median speed.
"""

from dataclasses import dataclass
from typing import Any, Literal

from redline.record.read import Run, table
from redline.report.figures import Summary

CADENCE = ("train.eval_every", "train.checkpoint_every", "train.keep_checkpoints")
"""What is done between the updates, and changes none of them; but for a run that stops early by its
validations."""


@dataclass(frozen=True)
class Verdict:
    level: Literal["yes", "loss only", "accuracy only", "no"]
    title: str
    text: str
    differences: list[str]
    """Where the recipes differ, as `table.key: value | value`."""
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
    plans = [
        {name: entry["value"] for name, entry in run.plan.items() if "value" in table(entry)} for run in runs
    ]
    machines = [
        {"hardware": table(run.plan.get("hardware")).get("title"), "processes": run.plan.get("world_size")}
        for run in runs
    ]
    changed, elsewhere = _differences(recipes), _differences(machines)
    plan_changed = _differences(plans)
    prints = {run.fingerprint for run in runs}
    if None in prints:
        return Verdict(
            "no",
            "Not comparable",
            "a run without a recipe does not say what it computed",
            changed,
            plan_changed,
        )
    cadence = len(prints) > 1 and _only_cadence(changed, recipes)
    if len(prints) > 1 and not cadence:
        if _tested_alike(runs):
            text = (
                "the runs are tested in the same way but train on different samples (their fingerprints"
                " differ)"
            )
            return Verdict(
                "accuracy only", "Accuracies compare, speeds and losses do not", text, changed, plan_changed
            )
        text = (
            "the runs compute different things (their fingerprints differ): neither speeds nor losses say"
            " which is better"
        )
        return Verdict("no", "Not comparable", text, changed, plan_changed)
    if elsewhere:
        text = f"the same training ran on different hardware ({'; '.join(elsewhere)})"
        return Verdict(
            "loss only", "Losses compare, speeds do not", text, changed if cadence else [], plan_changed
        )
    if cadence:
        text = (
            "the same training on the same hardware; only validation and checkpoint cadence differ: "
            "median speeds and losses compare, whole-run speed does not"
        )
        return Verdict("yes", "Comparable", text, changed, plan_changed)
    text = "the same training (one fingerprint) on the same hardware; what differs is how it was executed"
    return Verdict("yes", "Comparable", text, [], plan_changed)


def _only_cadence(changed: list[str], recipes: list[dict[str, Any]]) -> bool:
    stops_early = any(table(recipe.get("train")).get("early_stop_evals") for recipe in recipes)
    return bool(changed) and not stops_early and all(line.partition(":")[0] in CADENCE for line in changed)


def _tested_alike(runs: list[Run]) -> bool:
    """Whether these are RFT runs, say the rounds of one, that answer the same held-out questions."""
    tests = [(run.recipe.get("task"), run.recipe.get("test")) for run in runs]
    return all(run.workload == "rft" for run in runs) and all(test == tests[0] for test in tests)


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
    """Speed of `other` over that of `base`; the widest interval that the two allow, since the runs did not
    take turns."""
    a, b = base.speed.update, other.speed.update
    if a is None or b is None or base.speed.unit != other.speed.unit:
        return None
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Ratio(b.value / a.value, None, None)
    return Ratio(b.value / a.value, b.low / a.high, b.high / a.low)
