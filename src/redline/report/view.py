"""A run's figures as they are shown: tiles, bars with their lengths, parts of a stack, rows of tables. No torch,
no HTML.

The outcome comes first (losses, or accuracies before and after), then what explains it. Numbers become text here,
once, for the page and the terminal. `place` is the run's place among those shown and decides its colour.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redline.diagnose.answer import verdict
from redline.diagnose.finding import Finding
from redline.diagnose.readers import own
from redline.diagnose.rules import diagnose
from redline.record.files import shipped
from redline.record.read import Run, number, read_runs, table, time_left_s, values
from redline.record.units import (
    DASH,
    exact,
    format_bytes,
    format_count,
    format_duration,
    format_limit_share,
    format_share,
)
from redline.record.words import BAD, LOST, told, told_validation
from redline.report.ablation import ablation
from redline.report.compare import Comparable, ratio
from redline.report.crew import crew
from redline.report.figures import Summary
from redline.report.reinforcement import Reinforcement, reinforcement

TESTED = {"base": "before", "answers": "after fine-tuning on the answers", "samples": "after RFT"}
FIRST_EVENTS, LAST_EVENTS = 20, 80
RECENT = 60
"""Updates that the time left is estimated from."""
_COLOURS: dict[str, str] = shipped("report/shown.toml")["colours"]


class Tile(NamedTuple):
    label: str
    value: str
    note: str
    kind: str = ""


class Bar(NamedTuple):
    name: str
    text: str
    percent: float
    kind: str
    note: str


class Test(NamedTuple):
    name: str
    n: int
    split: str
    accuracy: float
    low: float
    high: float
    answer_rate: float


class RunView:
    """Everything that is shown of a run. Takes about 20 µs an update, so make it once for page and terminal."""

    def __init__(self, run: Run, place: int = 0) -> None:
        self.run, self.place = run, place
        self.summary = summary = Summary(run)
        memory, speed = summary.memory, summary.speed
        self.findings, self.remark = findings(run)
        self.tests, self.samples = accuracies(run.evaluations), samples_of(run.path)
        self.rl, self.crew = reinforcement(run), crew(run)
        self.ablation, self.plan, self.events = ablation(run.ablation), plan_rows(run), event_rows(run)
        self.progress = progress(run, summary, self.samples)
        self.tiles = _domain_tiles(self.rl) + _outcome_tiles(summary, self.tests) + _speed_tiles(summary)
        self.speed_bars = _speed_bars(summary)
        self.floor_s = speed.step_s * speed.attained_share if speed.step_s and speed.attained_share else None
        """Time of an update by roofline."""
        self.time_stack = _stack(summary.time, format_duration)
        held = [(name, size, "") for name, size in memory.predicted_parts_bytes.items()]
        self.memory_stack = _stack(held, format_bytes)
        device = f"the device holds {format_bytes(memory.device_bytes)}" if memory.device_bytes else ""
        seen = ("seen", memory.seen_bytes, "seen", memory.seen_note)
        self.memory_bars = _bars([seen, ("predicted", memory.predicted_bytes, "limit", device)], format_bytes)


def views(folders: list[Path]) -> list[RunView]:
    """The runs in these folders, to be shown together."""
    return [RunView(run, place) for place, run in enumerate(read_runs(folders))]


def findings(run: Run) -> tuple[list[Finding] | None, str]:
    """The findings, the most valuable first (None if there is nothing to diagnose), and what to say beside them."""
    if not run.metrics and not run.told("sampling_end"):
        return None, ""
    observed = own.observed(run)
    found = diagnose(observed)
    return (found, verdict(observed, found).text) if run.metrics else (found or None, "")


def samples_of(path: Path) -> dict[str, Any] | None:
    """What `redline rft stats --json` says of an RFT run; None before sampling has begun."""
    if not (path / "samples.db").is_file():
        return None
    from redline.rft.stats import stats
    from redline.rft.store import Store

    with Store(path / "samples.db", create=False) as store:
        begun = store.begun()
    return stats(path) if begun else None


def when(at: float) -> str:
    """Unix seconds as `2026-11-15 05:55:13 UTC`."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    except (ValueError, OverflowError, OSError):  # a clock that was wrong
        return DASH


def progress(run: Run, summary: Summary, samples: dict[str, Any] | None) -> tuple[float, str] | None:
    """How far a running run is, in percent and words: by updates or hours, whichever ends it first, or by questions
    asked. None if the run has ended or does not train, or if its end is not known."""
    if run.state.over or run.state.ending == "no training":
        return None
    stage = next(reversed(run.told("stage")), {})
    if questions := number(stage.get("questions")):
        asked = samples["asked"] if samples and stage.get("name") == "sample" else 0
        return 100 * asked / questions, f"{stage['title']}: {asked:,} of {questions:,.0f} asked"
    total = summary.planned_updates
    max_hours = number(table(run.recipe.get("train")).get("max_hours"))
    shares = [summary.updates / total] if total else []
    shares += [(summary.elapsed_s or 0.0) / (max_hours * 3600)] if max_hours else []
    if not shares:
        return None
    left_s = time_left_s(run.metrics[-RECENT:], total, max_hours)
    left = f", {format_duration(left_s)} left" if left_s is not None and run.state.ending == "running" else ""
    done = f"update {summary.updates:,}" + (f" of {total:,.0f}" if total else "")
    share = min(1.0, max(shares))
    return 100 * share, f"{format_share(share)}, {done}{left}"


# ---- tiles and bars ----


def _domain_tiles(rl: Reinforcement | None) -> list[Tile]:
    """Accuracy where a run of reinforcement learning validates, else what its own answers earned."""
    tiles = []
    for domain in rl.domains if rl else ():
        if (found := domain.accuracy) is not None:
            began = f"; at first {format_share(domain.before.value)}" if domain.before else ""
            note = f"95%: {100 * found.low:.1f} to {100 * found.high:.1f}%, held out{began}"
            tiles.append(Tile(f"accuracy, {domain.name}", format_share(found.value), note))
        elif domain.reward is not None:
            tiles.append(Tile(f"reward, {domain.name}", f"{domain.reward:.3f}", "mean of recent answers"))
    return tiles


def _outcome_tiles(summary: Summary, tests: list[Test]) -> list[Tile]:
    """What the run was for."""
    tiles, q = [], summary.quality
    for test in tests:
        interval = f"95%: {100 * test.low:.1f} to {100 * test.high:.1f}%, {test.n:,} questions"
        tiles.append(Tile(f"accuracy {test.name}", f"{100 * test.accuracy:.1f}%", interval))
    if q.nan_step is not None:
        last = f"; the last number was {q.last_loss:.4f}" if q.last_loss is not None else ""
        tiles.append(Tile("training loss", "not a number", f"from update {q.nan_step:,} on{last}", "bad"))
    if q.valid:
        notes = [f"nats/token at update {q.valid['step']:,}", *told_validation(q.valid)]
        if q.best != q.valid:
            notes.append(f"best {q.best['valid_loss']:.4f} at update {q.best['step']:,}")
        tiles.append(Tile("validation loss", f"{q.valid['valid_loss']:.4f}", ", ".join(notes)))
    elif q.last_loss is not None and q.nan_step is None and summary.workload != "rl":
        # the loss of a policy says nothing: its gradient does
        note = f"nats/token, last update; the first {q.first_loss:.4f}"
        tiles.append(Tile("training loss", f"{q.last_loss:.4f}", note))
    return tiles


def _speed_tiles(summary: Summary) -> list[Tile]:
    speed, memory, spent_s = summary.speed, summary.memory, summary.elapsed_s
    median = speed.update.value if speed.update else None
    limit = f"of the {exact(speed.attainable)} {speed.unit} that the roofline allows"
    spent = "fine-tuning time" if summary.workload == "rft" else "training time"
    tokens = f"{format_count(summary.tokens)} tokens" if summary.tokens else ""
    tiles = [
        Tile(f"speed, {speed.unit}", exact(median), f"median update{_interval(summary)}"),
        _limit_tile("of the attainable speed", speed.attained_share, limit),
        _limit_tile("MFU", speed.mfu, speed.mfu_note),
        _limit_tile("of the matmul ceiling", speed.ceiling_share, speed.ceiling_note),
        Tile("peak memory", format_bytes(memory.seen_bytes), memory.seen_note),
        Tile(spent, format_duration(spent_s), tokens),
    ]
    return [tile for tile in tiles if tile.value != DASH]


def _limit_tile(label: str, share: float | None, note: str) -> Tile:
    """A share of a limit. The words about a limit that must be wrong go into the note: a value is set in large type."""
    value, bracket, wrong = format_limit_share(share).partition(" (")
    return Tile(label, value, note + bracket + wrong)


def _interval(summary: Summary) -> str:
    update = summary.speed.update
    return f", {exact(update.low)} to {exact(update.high)}" if update and update.low else ""


def _speed_bars(summary: Summary) -> list[Bar]:
    speed = summary.speed
    rft = summary.workload == "rft"
    whole = ("fine-tuning", "without sampling and tests") if rft else ("whole run", "everything included")
    rows = [
        ("median update", speed.update.value if speed.update else None, "seen", _interval(summary)[2:]),
        (whole[0], speed.whole_run, "seen2", whole[1]),
        ("attainable", speed.attainable, "limit", "predicted: roofline"),
        ("matmul ceiling", speed.ceiling, "limit", "predicted: matrix products alone"),
    ]
    return _bars(rows, lambda value: f"{exact(value)} {speed.unit}")


def _bars(rows: list[tuple[str, float | None, str, str]], text: Callable[[float], str]) -> list[Bar]:
    known = [(name, value, kind, note) for name, value, kind, note in rows if value]
    most = max((value for _, value, *_ in known), default=1.0)
    return [Bar(name, text(value), 100 * value / most, kind, note) for name, value, kind, note in known]


def _stack(parts: Sequence[tuple[str, float, str]], text: Callable[[float], str]) -> list[Bar]:
    whole = sum(value for _, value, _ in parts)
    return [
        Bar(name, text(value), 100 * value / whole, _COLOURS.get(name, f"p{i % 7}"), note)
        for i, (name, value, note) in enumerate(parts)
    ]


# ---- tables ----


def plan_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Every value of the plan that has a reason: name, value, source and reason."""
    rows = []
    for name, entry in run.plan.items():
        if "value" in table(entry):
            given = entry["value"]
            large = isinstance(given, int) and abs(given) >= 10_000  # flops_per_token: read by its groups
            value = DASH if given in ("", None) else f"{given:,}" if large else str(given)
            rows.append((name, value, str(entry.get("source", "")), str(entry.get("reason", ""))))
    return rows


def event_rows(run: Run) -> list[tuple[str, str, str]]:
    """When, what, and `bad` for what went wrong; of many events the first and the last, so that the page stays short."""
    rows = []
    for event in (*run.events[:FIRST_EVENTS], *run.events[FIRST_EVENTS:][-LAST_EVENTS:]):
        bad = event["event"] in BAD or (event["event"] == "worker" and event.get("state") in LOST)
        at = when(number(event.get("at")) or math.inf)
        rows.append((at, told(event["event"], event), "bad" if bad else ""))
    if left_out := len(run.events) - len(rows):
        rows.insert(FIRST_EVENTS, ("", f"{left_out:,} more in events.jsonl", ""))
    return rows


def accuracies(evaluations: list[dict[str, Any]]) -> list[Test]:
    """The accuracies of an RFT run, in the order of the record."""
    names = ("n", "accuracy", "accuracy_low", "accuracy_high", "answer_rate")
    found = []
    for line in evaluations:
        known = [value for name in names for value in values([line], name)]
        if len(known) == len(names):
            weights, split = str(line.get("weights")), str(line.get("split", ""))
            found.append(Test(TESTED.get(weights, weights), int(known[0]), split, *known[1:]))
    return found


def side_by_side(runs: list[RunView]) -> list[tuple[str, list[str]]]:
    """A row per figure, a cell per run; comparable speeds also as a factor of the first run's."""
    all_ = [run.summary for run in runs]
    rft = all(s.workload == "rft" for s in all_)
    speeds = Comparable([run.run for run in runs]).level in ("yes", "speed only")
    covered, whole = ("fine-tuning", "all of fine-tuning") if rft else ("training", "whole run")
    rows: list[tuple[str, list[str]]] = [
        *_domain_rows(runs),
        ("accuracy after RFT", [next((f"{100 * t.accuracy:.1f}%" for t in run.tests if t.name == "after RFT"), DASH) for run in runs]),
        ("last training loss", [last_loss(s) for s in all_]),
        ("last validation loss", [_loss(s.quality.valid.get("valid_loss")) for s in all_]),
        ("best validation loss", [_loss(s.quality.best.get("valid_loss")) for s in all_]),
        ("speed, median update", [f"{exact(s.speed.update.value)} {s.speed.unit}" if s.speed.update else DASH for s in all_]),
        ("against the first", ["1×", *(str(ratio(all_[0], s) or DASH) for s in all_[1:])] if speeds else [DASH] * len(all_)),
        (f"speed, {whole}", [f"{exact(s.speed.whole_run)} tokens/s" if s.speed.whole_run else DASH for s in all_]),
        ("of the attainable", [format_limit_share(s.speed.attained_share) for s in all_]),
        ("MFU", [format_limit_share(s.speed.mfu) for s in all_]),
        ("of the matmul ceiling", [format_limit_share(s.speed.ceiling_share) for s in all_]),
        ("peak memory", [format_bytes(s.memory.seen_bytes) for s in all_]),
        (f"{covered} time", [format_duration(s.elapsed_s) for s in all_]),
        ("tokens", [format_count(s.tokens) for s in all_]),
        ("updates", [f"{s.updates:,}" for s in all_]),
        ("state", [s.state.ending for s in all_]),
        ("recipe", [s.recipe for s in all_]),
        ("fingerprint", [s.fingerprint or DASH for s in all_]),
        ("machine", [s.hardware or DASH for s in all_]),
    ]  # fmt: skip
    return [(name, cells) for name, cells in rows if any(cell != DASH for cell in cells)]


def _domain_rows(runs: list[RunView]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(domain.name for run in runs if run.rl for domain in run.rl.domains)
    found = [{d.name: str(d.accuracy or DASH) for d in run.rl.domains} if run.rl else {} for run in runs]
    return [(f"accuracy, {name}", [cells.get(name, DASH) for cells in found]) for name in names]


def last_loss(summary: Summary) -> str:
    """The last loss, or since when it is not a number."""
    lost = summary.quality.nan_step
    return _loss(summary.quality.last_loss) if lost is None else f"not a number from update {lost:,}"


def _loss(value: float | None) -> str:
    return DASH if value is None else f"{value:.4f} nats/token"
