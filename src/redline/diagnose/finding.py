"""What a diagnosis says: a cause with its evidence in numbers, the fix, and what the fix should bring.

    share, wait_s = 0.31, 0.062
    return found("slow-loader", locals())

A rule gives the numbers, its locals; the words are in causes.toml. A gain is a factor on the speed of the whole step (or of the
whole run, where its reason says so). A finding about a claim or a unit has none: correcting a number makes nothing
faster, but what was believed because of it should not be. How sure a finding is comes from how often its cause was
right.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Literal

from redline.diagnose.data import table
from redline.diagnose.observed import Range
from redline.optimizations.catalogue import catalogue
from redline.record.units import format_amount, format_duration

WORTH_SAYING = 0.05
"""Shares of the step below this are left alone: two runs of the same thing differ by as much."""
UNNAMED = ("slow-updates", "low-mfu")
"""Causes that say that time is lost but not to what: they come after all that do."""
PRIOR = 3.0
"""How many real logs the planted faults weigh as much as, in the precision of a cause."""
UNCONFIRMED = 0.75
"""The most that planted faults alone are worth: what we plant is what we thought of. A failure that real logs have shown
is read off the log and not concluded, so there they count in full."""

Kind = Literal["failure", "cause", "claim", "unit"]
Rows = Iterable[tuple[str, float | str, str]]
Shown = Mapping[str, Any]


@dataclass(frozen=True)
class Gain(Range):
    """A predicted speed-up as a range, and the arithmetic behind it."""

    why: str

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}× predicted"


@dataclass(frozen=True)
class Evidence:
    name: str
    value: float | str
    unit: str

    @property
    def amount(self) -> str:
        return format_amount(self.value, self.unit)

    def __str__(self) -> str:
        return f"{self.name}: {self.amount}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    cause: str
    """A short fixed name; docs/diagnose.md lists them."""
    kind: Kind
    """`failure`: why it did not train; `cause`: why it is slow; `claim`: a statement that cannot hold; `unit`: a
    number that means something else than it seems to."""
    title: str
    evidence: tuple[Evidence, ...]
    fix: str
    gain: Gain | None
    confidence: float
    """0 to 1: how often this cause was right where it was found, times how good the evidence is here."""
    optimisation: str | None = None
    """The entry of the catalogue that applies the fix, or is wrongly blamed for its absence."""


def causes() -> dict[str, dict[str, Any]]:
    """Every cause: its kind, its words, and how often it was right."""
    return table("causes")


@cache
def _mended_by() -> dict[str, str]:
    """For each cause, the entry of the catalogue that fixes it."""
    return {cause: name for name, entry in catalogue().items() for cause in entry.mends}


def precision(cause: str) -> float:
    """How often a cause is right where it is found: on real logs, with the planted faults counted as a few of them."""
    entry = causes()[cause]
    (right, seen), (planted_right, planted) = entry["real"], entry["planted"]
    prior = (planted_right + 1) / (planted + 2)
    if not right or entry["kind"] != "failure":
        prior = min(UNCONFIRMED, prior)
    return float((right + PRIOR * prior) / (seen + PRIOR))


class _Values(dict[str, Any]):
    """The values that the words of a finding may name: seconds also in milliseconds, bytes also in GiB."""

    def __missing__(self, name: str) -> Any:
        for end, ours, factor in (("_ms", "_s", 1e3), ("_gib", "_bytes", 2.0**-30)):
            if name.endswith(end) and (value := self.get(name.removesuffix(end) + ours)) is not None:
                return value * factor
        return None


def found(
    cause: str, shown: Shown, variant: str = "", *, strength: float = 1.0, kind: Any = None
) -> list[Finding]:
    """One finding as a list, as rules return them; an empty list if the `share` of the time that it is about is below the
    cause's `least`. `shown` holds the rule's locals, which fill in the words of the cause. Among them are `observed` and,
    if there is something to gain, `gain`, a pair of factors, or `saves`, a pair of shares of the step that the fix removes
    (the cause may give both: its `saves` are parts of `share`). `evidence` holds rows that no template makes. `strength`
    says how good the evidence is here, 1 at best."""
    entry = causes()[cause] | (causes()[cause][variant] if variant else {})
    share, observed = shown.get("share"), shown["observed"]
    if "saves" in entry and share is not None and share < entry.get("least", WORTH_SAYING):
        return []
    mean_s = observed.mean("step_s")
    values = _Values(facts=observed.facts, update_s=mean_s or 0.0, speed=observed.tokens_per_s)
    values["option"] = observed.trainer.options
    values |= {name: observed.median(name) for name in ("step_s", "tokens")} | dict(shown)
    gain, predicted = shown.get("gain") or entry.get("gain"), None
    saves = shown.get("saves") or [part * share for part in entry.get("saves", ()) if share is not None]
    if gain or saves:
        low, high = gain or (1 / (1 - min(max(part, 0.0), 0.99)) for part in saves)
        takes = f" (an update takes {format_duration(mean_s)} on average)" if mean_s and not gain else ""
        predicted = Gain(low, high, entry["why"].format_map(values) + takes)
    rows = shown["evidence"] if "evidence" in shown else _rows(entry.get("evidence", ()), values)
    title, fix = (entry[name].format_map(values) for name in ("title", "fix"))
    sure, mended = round(precision(cause) * strength, 2), _mended_by().get(cause)
    what: dict[str, Any] = {"cause": cause, "kind": kind or entry["kind"], "title": title, "fix": fix}
    proof = tuple(Evidence(*row) for row in rows)
    return [Finding(**what, evidence=proof, gain=predicted, confidence=sure, optimisation=mended)]


def _rows(templates: Iterable[str], values: _Values) -> Rows:
    for template in templates:
        name, key, unit = (part.strip() for part in template.split("|", 2))
        first, *rest = key.split(".")
        if (value := reduce(lambda part, of: getattr(part, of, None), rest, values[first])) is not None:
            yield name.format_map(values), value, unit.format_map(values)


def worth(finding: Finding) -> float:
    """The order of findings: the time that the fix should save, times the confidence."""
    return (1 - 1 / finding.gain.middle) * finding.confidence if finding.gain else 0.0


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Failures first; then what is worth most; then what brings no speed, the surest first."""

    def place(finding: Finding) -> tuple[bool, bool, bool, float, float, str]:
        value, sure = worth(finding), finding.confidence
        return finding.kind != "failure", value == 0, finding.cause in UNNAMED, -value, -sure, finding.cause

    return sorted(findings, key=place)
