"""The ablation: every optimisation of a study applied one by one from the study's first state, then left out
one by one from the best. No torch.

    rows = ablate(recipe, "gpt2-124m", hardware, folder, only=(), minutes=30, progress=print)
    # folder/ablation.json: the rows, written after each; folder/trials.jsonl: trials that need not run again

A change is kept if it is faster and the numerics guard passes it; one that is slower, not resolved, or another
training leaves the state as it was. So every row says what its change is worth on top of those kept before it.
With a judge (quality.py) a change that would be kept must also train equally well, and one that is another
training is kept if it reaches the loss sooner.
What was slower, or not possible, is tried once more at the end, because changes kept later may help it: bf16
costs time while attention is not one kernel. A change and the state before it take turns (measure/turns.py). One
that would take more than half of the time left (max-autotune compiles for minutes) is put off, so that the others are run.
Left out: interactions of more than two changes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from redline.config.load import to_toml
from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError, Say, StorageError
from redline.measure.process import Children
from redline.measure.trial import Measurement, Pair, Timing, TrialFolder, trial_key
from redline.measure.turns import Turns
from redline.optimizations import catalogue
from redline.plan.arithmetic import flops_per_token
from redline.plan.plan import Hardware
from redline.plan.predict import longest_row
from redline.record.files import read_json, write_atomic
from redline.tune.arms import CHANGES, Arms, Switches, UpdateArms, arms_for, changed, naive, samples_of
from redline.tune.candidates import differing
from redline.tune.guard import doubted, guard, guard_logprobs
from redline.tune.quality import Judge, Quality

Stage = Literal["baseline", "one by one", "second try", "all", "leave one out"]
OUT_OF_TIME = "out of time; run the same command again, or with more --minutes if that gets no further"
PUT_OFF = "its share of the time was too short to decide; run the same command again with more --minutes"
BASELINE_BLOCKS = 2
"""Blocks of the first state alone: every comparison measures it again."""
RUNS = "runs"
"""The verdict on a change that runs where the state before it never did."""
NOT_COMPARED = "not compared"
"""The verdict on a change if the state before it failed this time, though it had run."""


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """A line of ablation.json."""

    name: str
    stage: Stage
    workload: catalogue.WorkloadName
    title: str
    claimed: tuple[float, float] | None
    """Low and high, speed with the change over speed without it."""
    source: str
    """Who claims it."""
    measured_ratio: float | None = None
    low: float | None = None
    high: float | None = None
    """The ratio's interval: 95% confidence from six rounds on, 87.5% if four rounds were clear enough."""
    rounds: int | None = None
    verdict: str = ""
    before_tokens_per_s: float | None = None
    """Tokens/s without the change, in the same rounds. A state's speed differs from one comparison to the next."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Share of the GPU's dense bf16 peak, whatever the precision: one yardstick for all rows."""
    memory_bytes: int | None = None
    """Peak of the allocated bytes with the change; on a CPU, resident bytes."""
    numerics: str = ""
    quality: Quality | None = None
    """What both states train to, if that was asked for and decides whether the change is kept."""
    outcome: str = "ok"
    """ok, out_of_memory, crashed, timed_out, not applicable, no change, not run; or the entry's standing."""
    note: str = ""
    """Why, where the outcome is not ok."""
    kept: bool = False


def ablate(
    recipe: Recipe,
    name: str,
    hardware: Hardware,
    folder: Path,
    *,
    only: Sequence[str] = (),
    minutes: float,
    progress: Say,
    timing: Timing | None = None,
    samples: catalogue.Samples | None = None,
    machine: str = "",
    children: Children | None = None,
    judge: Judge | None = None,
) -> list[AblationRow]:
    """Run the study of the recipe `name`, or only the entries in `only`; this `machine` repeats no finished trial."""
    parts = chosen(catalogue.study(name, recipe.workload), only)
    rows: list[AblationRow] = []
    with TrialFolder(folder, machine) as trials:
        _check_list(folder / "ablation.json", parts)
        write_atomic(folder / "recipe.toml", to_toml(recipe))
        children = children or Children.on(hardware)
        with Turns(trials, children, minutes=minutes, progress=progress) as turns:
            waterfalls = []
            for part in parts:
                work, timed = samples or part.samples or samples_of(recipe), timing or Timing()
                arms = arms_for(part.workload, recipe, hardware, samples=work, timing=timed)
                judges = judge if judged(recipe, part) else None
                waterfalls.append(_Waterfall(name, part, arms, recipe, hardware, turns, judges))
            # all lists before anything is left out: there may not be time for everything
            for row in chain(*(w.apply() for w in waterfalls), *(w.leave_out() for w in waterfalls)):
                rows.append(row)
                text = json.dumps([asdict(row) for row in rows], indent=1)
                write_atomic(folder / "ablation.json", text + "\n")
                turns.say(brief(row))
    return rows


def judged(recipe: Recipe, part: catalogue.StudyPart) -> bool:
    """Whether a part trains what the recipe trains: not samples alone, and not the random rows of a rehearsal."""
    return part.workload == ("train" if recipe.workload == "pretrain" else "finetune")


def chosen(parts: Sequence[catalogue.StudyPart], only: Sequence[str]) -> list[catalogue.StudyPart]:
    """The parts with all their entries, or with those in `only`: first those listed, then other switches."""
    for name in only:
        if not any(_switches(part, name) for part in parts):
            workloads, standing = " or ".join(part.workload for part in parts), catalogue.find(name).standing
            why = f"it is {standing}" if standing != "switch" else f"it switches nothing in {workloads}"
            raise ConfigError(
                f"--only takes a switch of this recipe's study, got {name} ({why}): `redline optimizations` lists them"
            )
    if not only:
        return list(parts)
    narrowed = []
    for part in parts:
        listed = [name for name in part.names if name in only]
        added = [name for name in dict.fromkeys(only) if name not in part.names and _switches(part, name)]
        switched = {value for name in added for value in catalogue.find(name).off}
        start = {value: at for value, at in part.start.items() if value not in switched}
        if listed or added:
            narrowed.append(replace(part, names=(*listed, *added), start=start, quotes=()))
    return narrowed


def _check_list(path: Path, parts: Sequence[catalogue.StudyPart]) -> None:
    """Refuse a folder with the rows of another list, which these would overwrite."""
    if not path.exists():
        return
    rows = read_json(path, list, error=StorageError)
    try:
        known = [str(row["name"]) for row in rows if row["stage"] == "one by one"]
    except (TypeError, KeyError) as error:
        raise StorageError(f"{path} cannot be read ({error}): use another --out, or delete it") from error
    names = [name for part in parts for name in part.names]
    if known != names[: len(known)]:
        raise StorageError(
            f"{path.parent} holds the results of another list ({', '.join(known)}): give another folder with --out"
        )


def _switches(part: catalogue.StudyPart, name: str) -> bool:
    entry = catalogue.find(name)
    return name in part.names or (entry.standing == "switch" and part.workload in entry.workloads)


class _Waterfall:
    def __init__(
        self,
        name: str,
        part: catalogue.StudyPart,
        arms: Arms,
        recipe: Recipe,
        hardware: Hardware,
        turns: Turns,
        judge: Judge | None,
    ) -> None:
        self.name, self.part, self.workload, self.judge = name, part, part.workload, judge
        self.arms, self.recipe, self.hardware, self.turns = arms, recipe, hardware, turns
        self.entries = [catalogue.find(name) for name in part.names]
        start = {**naive(self.entries, hardware), **part.start}
        self.start = ", ".join(f"{name} {catalogue.value_words(value)}" for name, value in start.items())
        self.state = self.first = arms.held(start)
        self.reference: Measurement | None = None
        """The reference for numbers with other roundings: the first state that ran."""
        self.sound: tuple[Switches, float] | None = None
        """The reference for how well a change trains, and its tokens/s: the first state that ran, or with another training."""
        self.runs = self.naive_runs = False
        """Whether the present state, and the naive one, ever ran."""
        self.kept: list[tuple[catalogue.Optimization, Switches]] = []
        """Entries that were kept, each with the values it replaced."""
        self.refused: list[tuple[catalogue.Optimization, Switches]] = []
        """Entries that were slower or not possible, each with the state it was tried on."""

    def apply(self) -> Iterator[AblationRow]:
        """One by one; once more those that were refused; then everything kept together."""
        yield self._baseline()
        for entry in self.entries:
            yield self._one(entry, "one by one")
        for entry, before in list(self.refused):
            # changes that have taken the same switch since
            rivals = [name for name in entry.on if self.state[name] != before[name]]
            if self.state != before and not rivals:
                yield self._one(entry, "second try")
        if len(self.kept) > 1:  # one alone has its row already
            yield self._all()

    def leave_out(self) -> Iterator[AblationRow]:
        """Each of those kept, left out of the best."""
        for entry, before in self.kept:  # not before it is asked for: `apply` has to have filled it
            yield self._without(entry, before)

    # ---- a row ----

    def _baseline(self) -> AblationRow:
        row = AblationRow(
            name="start", stage="baseline", workload=self.workload, title=self.start, claimed=None, source=""
        )  # fmt: skip
        try:
            trial = self.arms.trial(self.state)
        except MachineError as error:  # by arithmetic alone it does not fit
            return replace(row, outcome="out_of_memory", note=str(error))
        measured = self.turns.alone(f"{self.workload} naive", trial, blocks=BASELINE_BLOCKS)
        if measured is None:
            return replace(row, outcome="not run", note=OUT_OF_TIME)
        if measured.outcome != "ok":
            return replace(row, outcome=measured.outcome, note=measured.error or "")
        self.reference, self.runs, self.naive_runs = measured, True, True
        self.sound = self.state, measured.tokens_per_s
        return self._with_speed(row, measured, self.state)

    def _one(self, entry: catalogue.Optimization, stage: Stage) -> AblationRow:
        """Apply an entry to the state, and keep it if it pays."""
        row = self._row(entry, stage)
        if entry.standing != "switch":
            return replace(row, outcome=entry.standing, note=entry.note)
        if (why_not := entry.why_not(self.recipe, self.hardware)) is not None:
            return replace(row, outcome="not applicable", note=why_not)
        candidate = {**self.state, **self._on(entry)}
        try:
            trials = self.arms.trial(self.state), self.arms.trial(candidate)
        except (ConfigError, MachineError) as error:
            self.refused.append((entry, self.state))
            return replace(row, outcome="not applicable", note=str(error))
        if trial_key(trials[0]) == trial_key(trials[1]):
            return replace(row, outcome="no change", note="it makes no difference to the state before it")
        until_s = self.turns.fair_end_s()
        pair = self.turns.pair(f"{self.workload} {entry.name}", *trials, until_s=until_s)
        if pair is None:
            put_off = until_s <= self.turns.clock() < self.turns.deadline_s
            return replace(row, outcome="not run", note=PUT_OFF if put_off else OUT_OF_TIME)
        if pair.before.outcome == "ok":
            self.reference, self.runs = self.reference or pair.before, True
            self.naive_runs = self.naive_runs or not self.kept
            self.sound = self.sound or (self.state, pair.before.tokens_per_s)
        passed, numerics = self._numerics(entry.effect, candidate, pair)
        row = replace(self._compared(row, pair, candidate, runs=self.runs), numerics=numerics)
        wins = passed and row.verdict in ("faster", RUNS)
        if self.judge and row.outcome == "ok" and (wins or entry.change):
            row = replace(row, quality=self._quality(self.judge, entry, candidate, pair.before))
            wins = row.quality.passed if row.quality else wins
        if not wins:
            if row.verdict == "slower" or row.outcome != "ok":
                self.refused.append((entry, self.state))
            return row
        self.kept.append((entry, {name: self.state.get(name) for name in self._on(entry)}))
        self.state, self.reference, self.runs = candidate, self.reference or pair.after, True
        if entry.change or self.sound is None:  # later changes are compared with this training
            self.reference, self.sound = pair.after, (candidate, pair.after.tokens_per_s)
        return replace(row, kept=True)

    def _on(self, entry: catalogue.Optimization) -> Switches:
        if entry.change is None:
            return dict(entry.on)
        return {CHANGES: (*self.state.get(CHANGES, ()), entry.name)}

    def _quality(
        self, judge: Judge, entry: catalogue.Optimization, candidate: Switches, now: Measurement
    ) -> Quality | None:
        """What the state before (as fast as `now`) and the candidate train to; None if no plan value differs."""
        if self.sound is None:
            return None
        assert isinstance(self.arms, UpdateArms), "generation is no training"
        state, tokens_per_s = self.sound
        if entry.change:
            state, tokens_per_s = self.state, now.tokens_per_s if now.outcome == "ok" else tokens_per_s
        before, after = self.arms.plan(state), self.arms.plan(candidate)
        try:
            if entry.change:
                return self.turns.aside(lambda: judge.other_training(before, after, tokens_per_s))
            if differing(before[1], after[1]):
                return self.turns.aside(lambda: judge.same_training(before, after, tokens_per_s))
        except ConfigError as error:
            return Quality(figure="loss", verdict="cannot tell", note=str(error))
        return None

    def _without(self, entry: catalogue.Optimization, before: Switches) -> AblationRow:
        """The best state against the same without one entry."""
        row = self._row(entry, "leave one out")
        if any(self.state[name] != value for name, value in entry.on.items()):
            return replace(row, outcome="no change", note="a later change took its place")
        if entry.change:
            before = {CHANGES: tuple(name for name in self.state[CHANGES] if name != entry.name)}
        try:
            best, without = self.arms.trial(self.state), self.arms.trial({**self.state, **before})
        except (ConfigError, MachineError) as error:
            return replace(row, outcome="not applicable", note=f"without it: {error}")
        if trial_key(best) == trial_key(without):
            return replace(row, outcome="no change", note="nothing depends on it in the best state")
        pair = self.turns.pair(f"{self.workload} without {entry.name}", best, without)
        if pair is None:
            return replace(row, outcome="not run", note=OUT_OF_TIME)
        if pair.after.outcome != "ok":
            return replace(row, outcome=pair.after.outcome, note=f"without it: {pair.after.error}")
        turned = Pair(before=pair.after, after=pair.before, paired=pair.paired)
        numerics = self._numerics(entry.effect, self.state, turned)[1]
        return replace(self._compared(row, turned, self.state, runs=True), numerics=numerics)

    def _all(self) -> AblationRow:
        """Everything kept against the first state, with what the guide claims for all its changes together."""
        overall = [quote for quote in self.part.quotes if quote.of == "all"]
        row = AblationRow(
            name="all kept", stage="all", workload=self.workload,
            title=", ".join(entry.name for entry, _ in self.kept), claimed=catalogue.span(overall),
            source="; ".join(quote.words for quote in overall),
        )  # fmt: skip
        trials = self.arms.trial(self.first), self.arms.trial(self.state)
        pair = self.turns.pair(f"{self.workload} all", *trials)
        if pair is None:
            return replace(row, outcome="not run", note=OUT_OF_TIME)
        effect: catalogue.EntryEffect = "changes-training" if self.state.get(CHANGES) else "rounding"
        numerics = self._numerics(effect, self.state, pair)[1]
        return replace(self._compared(row, pair, self.state, runs=self.naive_runs), numerics=numerics)

    def _row(self, entry: catalogue.Optimization, stage: Stage) -> AblationRow:
        claims = catalogue.claims_for(entry, self.name)
        return AblationRow(
            name=entry.name, stage=stage, workload=self.workload, title=entry.title, claimed=catalogue.span(claims),
            source="; ".join(claim.source for claim in claims),
        )  # fmt: skip

    def _with_speed(self, row: AblationRow, measured: Measurement, state: Switches) -> AblationRow:
        memory_bytes = measured.memory.allocated_bytes if measured.memory else None
        row = replace(row, tokens_per_s=measured.tokens_per_s, memory_bytes=memory_bytes)
        recipe = changed(self.arms.recipe, state)
        length = longest_row(recipe)
        if self.workload != "generate" and recipe.workload != "pretrain":  # a row is as long as its text
            length = round(measured.tokens_per_step / recipe.rows_per_step)
        return replace(row, mfu=mfu(row, recipe, self.hardware, length))

    def _compared(self, row: AblationRow, pair: Pair, after: Switches, *, runs: bool) -> AblationRow:
        """The row with what the pair says. `runs`: the state before is known to run, so its failure now is chance."""
        if pair.after.outcome != "ok":
            return replace(row, outcome=pair.after.outcome, note=pair.after.error or "")
        row = self._with_speed(row, pair.after, after)
        if (found := pair.comparison) is None:
            why = f"the state before it did not run: {pair.before.outcome}"
            return replace(row, verdict=NOT_COMPARED if runs else RUNS, note=why)
        return replace(
            row,
            before_tokens_per_s=pair.before.tokens_per_s,
            measured_ratio=found.ratio,
            low=found.low,
            high=found.high,
            verdict=found.verdict,
            rounds=pair.rounds,
        )

    def _numerics(self, effect: catalogue.EntryEffect, state: Switches, pair: Pair) -> tuple[bool, str]:
        """Whether the training is the same: `exact` against the state before, `rounding` against the naive one."""
        if effect == "changes-training":
            return False, "another training: its tokens/s are not comparable"
        if pair.after.outcome != "ok":
            return False, ""
        precision = self.arms.precision(state)
        if self.workload == "generate":
            return guard_logprobs(pair.after, precision)
        against = pair.before if effect == "exact" or self.reference is None else self.reference
        if against.outcome != "ok":
            return True, "no reference ran"
        passed, words = guard(against, pair.after, effect, precision=precision)
        return passed, words + doubted(effect, pair)


def mfu(row: AblationRow, recipe: Recipe, hardware: Hardware, length: int) -> float | None:
    """The MFU of a row's speed in sequences of this length."""
    peak = hardware.peak_tflops.get("bf16")
    if row.tokens_per_s is None or peak is None:
        return None
    if row.workload == "generate":  # the forward pass is a third of training
        a_token = flops_per_token(recipe.model, length) / 3
    else:  # as a plan and a run's record count it
        how = (recipe.lora, recipe.feedback, recipe.train.softmax_candidates)
        a_token = flops_per_token(recipe.model, length, *how)
    return row.tokens_per_s * a_token / (peak * 1e12)


def brief(row: AblationRow) -> str:
    if row.measured_ratio is None:
        said = f"{row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s else f"{row.outcome}: {row.note}"
        return f"{row.stage}, {row.name}: {said}"
    quality = f"; {row.quality.figure} {row.quality}" if row.quality else ""
    return (
        f"{row.stage}, {row.name}: {row.measured_ratio:.2f}x [{row.low:.2f}, {row.high:.2f}]"
        f" {row.verdict}{quality}{', kept' if row.kept else ''}"
    )
