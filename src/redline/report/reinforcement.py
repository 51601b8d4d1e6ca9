"""What a run of reinforcement learning shows: accuracy and reward by domain first, then lengths, exploration,
mismatch, conflicts and sample answers; and two runs compared. No torch.

    found = reinforcement(run)              # None for other workloads
    found.domains[0].accuracy, found.pairs, found.said
    Compared(read_run(baseline), read_run(pcgrad)).verdict

"Recent" means the last fifth of the updates. The difference of two accuracies has Newcombe's interval, computed from
the two recorded intervals. It ignores that both runs answer the same questions, so it errs on the wide side.
"""

import math
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from redline.config.rl import domain_name
from redline.errors import ConfigError, DataError
from redline.record.files import parse_json
from redline.record.read import Line, Run, number, table, values
from redline.record.units import DASH, factor, format_bytes, format_duration, format_share
from redline.report.compare import Comparable

FIGURES = {
    "response_tokens": ("tokens per answer", "{:.0f}".format),
    "cut_share": ("answers cut off", format_share),
    "entropy": ("entropy, nats/token", "{:.3f}".format),
    "kl": ("KL from the initial model, nats/token", "{:.4f}".format),
    "clip_share": ("tokens clipped", format_share),
    "logprob_gap": ("engine against trainer, nats/token", "{:.2g}".format),
    "versions_behind": ("versions behind", "{:.2g}".format),
    "beside_s": ("drawn during the update, s/step", "{:.2f}".format),
}
"""Metrics shown beside the rewards, in this order."""
READ = 64
"""Questions of the last step that sample answers are taken from."""


class Share(NamedTuple):
    """An accuracy with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{format_share(self.value)} ({format_share(self.low)} to {format_share(self.high)})"


class DomainFigures:
    def __init__(self, name: str, run: Run, recent: list[Line]) -> None:
        tested = [share for event in run.told("validation") if (share := _share(event, name)) is not None]
        rewards, correct = values(recent, f"reward.{name}"), values(recent, f"accuracy.{name}")
        self.name = name
        self.accuracy = tested[-1] if tested else None
        """Greedy, on held-out questions, at the last validation."""
        self.before = tested[0] if len(tested) > 1 else None
        """At the first validation (before training), if there was a later one."""
        self.reward = fmean(rewards) if rewards else None
        """Mean of recent answers."""
        self.sampled = fmean(correct) if correct else None
        """Share of recent answers that are correct."""


class Pair(NamedTuple):
    a: str
    b: str
    cosine: float
    """Mean over the updates."""
    rate: float
    """Share of the updates with a negative cosine."""
    tensors: float
    """Share of the weight tensors in conflict, averaged over the updates."""


class Said(NamedTuple):
    domain: str
    question: str
    text: str
    reward: float
    note: str


class Reinforcement:
    def __init__(self, run: Run) -> None:
        names, fifth = domains_of(run), max(1, len(run.metrics) // 5)
        recent, first = run.metrics[-fifth:], run.metrics[:fifth]
        self.domains = [DomainFigures(name, run, recent) for name in names]
        self.pairs, self.said = pairs(run), said(run.path, names)
        self.figures: list[tuple[str, str, str]] = []
        """Label, recent value, first value."""
        for name, (label, form) in FIGURES.items():
            if now := values(recent, name):
                began = values(first, name)
                before = form(fmean(began)) if began else DASH
                self.figures.append((label, form(fmean(now)), before))

    @property
    def heat(self) -> list[tuple[str, list[tuple[str, str, str]]]]:
        """The matrix of cosines: one row per domain; a cell is its text, background and tooltip."""
        names = [domain.name for domain in self.domains]
        cosines = {frozenset((pair.a, pair.b)): pair for pair in self.pairs}
        return [(a, [_cell(cosines.get(frozenset((a, b)))) for b in names]) for a in names]


def reinforcement(run: Run) -> Reinforcement | None:
    return Reinforcement(run) if run.workload == "rl" else None


def domains_of(run: Run) -> list[str]:
    tasks = table(run.recipe.get("rl")).get("domains")
    return [domain_name(str(task)) for task in tasks] if isinstance(tasks, list) else []


def _share(line: Line, name: str) -> Share | None:
    found = [number(line.get(f"valid_accuracy{part}.{name}")) for part in ("", "_low", "_high")]
    known = [value for value in found if value is not None]
    return Share(*known) if len(known) == len(found) else None


def pairs(run: Run) -> list[Pair]:
    """Conflicts of every pair of domains for which the run recorded them."""
    found = []
    for a, b in combinations(domains_of(run), 2):
        cosines, tensors = (values(run.metrics, f"{name}.{a}.{b}") for name in ("cosine", "conflict"))
        if cosines and tensors:
            rate = fmean(cosine < 0 for cosine in cosines)
            found.append(Pair(a, b, fmean(cosines), rate, fmean(tensors)))
    return found


def _cell(pair: Pair | None) -> tuple[str, str, str]:
    if pair is None:
        return "", "transparent", ""
    colour = "var(--accent)" if pair.cosine < 0 else "var(--good)"
    strength = round(80 * min(1, abs(pair.cosine)))
    meaning = f"negative in {format_share(pair.rate)} of the updates; {format_share(pair.tensors)} of the tensors in conflict"
    return f"{pair.cosine:+.2f}", f"color-mix(in srgb,{colour} {strength}%,transparent)", meaning


def said(path: Path, domains: list[str]) -> list[Said]:
    """The best and the worst answer of each domain in the last step that was sampled."""
    files = sorted((path / "samples").glob("step-*.jsonl"))
    if not files:
        return []
    groups: dict[str, list[Said]] = {name: [] for name in domains}
    for line in _first_lines(files[-1]):
        try:
            group = parse_json(line, files[-1], dict)
        except DataError:  # damaged, or being written: it costs this line only
            continue
        answers = group.get("answers")
        for answer in answers if isinstance(answers, list) else ():
            groups.setdefault(str(group.get("domain")), []).append(_said(group, table(answer)))
    found = []
    for texts in groups.values():
        ordered = sorted(texts, key=lambda one: -one.reward)
        found += ordered[:1] + (ordered[-1:] if len(ordered) > 1 else [])
    return found


def _first_lines(path: Path) -> list[str]:
    """Read leniently, not by `read_text`: these are examples, and bytes that are not UTF-8 need not cost the report."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return list(islice(lines, READ))
    except OSError as error:
        unread = f"{path} cannot be read ({error.strerror})"
        raise DataError(f"{unread}: move it away to see the rest of the run") from error


def _said(group: Line, answer: Line) -> Said:
    word = "correct" if answer.get("correct") else "wrong" if answer.get("parsed") else "no answer found"
    notes = (word, "cut off" if answer.get("cut") else "", str(answer.get("reason") or ""))
    return Said(
        domain=str(group.get("domain")),
        question=str(group.get("question", "")),
        text=str(answer.get("text", "")),
        reward=number(answer.get("reward")) or 0.0,
        note=", ".join(filter(None, notes)),
    )


# ---- two runs ----


class Difference(NamedTuple):
    domain: str
    base: Share
    other: Share
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.other.value - self.base.value

    @property
    def word(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "not resolved"


class Compared:
    """The second run against the first, on the questions that both were tested on."""

    def __init__(self, base: Run, other: Run) -> None:
        first, second = (
            {d.name: d.accuracy for d in _of(run).domains if d.accuracy} for run in (base, other)
        )
        self.differences = [_difference(name, first[name], second[name]) for name in first if name in second]
        self.costs = _costs(base, other)
        """Label, cost of the first run, cost of the second."""
        self.pairs = {run.label: found for run in (base, other) if (found := pairs(run))}
        """Conflicts by run label."""
        self.verdict = _verdict(other.label, self.differences)
        self.caveats = _caveats(base, other, len(self.differences))


def _of(run: Run) -> Reinforcement:
    if (found := reinforcement(run)) is None:
        needs = "`redline rl compare` needs two runs of `redline rl run`"
        raise ConfigError(f"{run.path} is a run of {run.workload}: {needs}")
    return found


def _difference(name: str, base: Share, other: Share) -> Difference:
    value = other.value - base.value
    below = math.hypot(other.value - other.low, base.high - base.value)
    above = math.hypot(other.high - other.value, base.value - base.low)
    return Difference(name, base, other, value - below, value + above)


def _verdict(label: str, differences: list[Difference]) -> str:
    if not differences:
        return "Nothing to compare: no domain was validated in both runs (set train.eval_every)."
    better, worse = ([one.domain for one in differences if one.word == word] for word in ("better", "worse"))
    parts = [f"better on {', '.join(better)}"] * bool(better) + [f"worse on {', '.join(worse)}"] * bool(worse)
    mean = fmean(one.value for one in differences)
    if not parts:
        return f"No difference is resolved: every interval contains 0. {label} is {100 * mean:+.1f} points on average."
    return f"{label} is {' and '.join(parts)}; {100 * mean:+.1f} points on average over {len(differences)} domains."


def _costs(base: Run, other: Run) -> list[tuple[str, str, str]]:
    first, second = _cost(base), _cost(other)
    rows = [(name, first[name], second[name]) for name in first if {first[name], second[name]} != {DASH}]
    steps = [run.typical("step_s") for run in (base, other)]
    if steps[0] and steps[1]:
        rows.insert(1, ("relative to the first", "1×", f"{factor(steps[1] / steps[0])}×"))
    return rows


def _cost(run: Run) -> dict[str, str]:
    step_s, combine_s = run.typical("step_s"), run.typical("combine_s")
    combining = combine_s / step_s if combine_s is not None and step_s else None
    return {
        "time per step": format_duration(step_s),
        "spent combining gradients": format_share(combining),
        "peak memory": format_bytes(max(values(run.metrics, "memory_bytes"), default=None)),
        "training time": format_duration(run.elapsed_s),
        "steps": f"{run.metrics[-1]['step']:,}" if run.metrics else DASH,
    }


def _caveats(base: Run, other: Run, intervals: int) -> list[str]:
    """What the numbers do not say."""
    found = ["One run each: with another seed a small difference may reverse. Repeat both with other seeds."]
    if intervals > 1:
        found.append(f"{intervals} intervals at 95%: on average one in twenty misses by chance.")
    asked = ("rl.pcgrad", "train.seed")
    others = [line for line in Comparable([base, other]).differences if not line.startswith(asked)]
    if others:
        found.append(f"The recipes differ in more than PCGrad: {'; '.join(others)}.")
    steps = sorted({run.metrics[-1]["step"] for run in (base, other) if run.metrics})
    if len(steps) > 1:
        found.append(f"The runs have {' and '.join(f'{step:,}' for step in steps)} steps.")
    return found
