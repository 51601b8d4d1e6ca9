"""The quality guard: does training with a change reach as good a result as without it? No torch.

    judge = Judge(folder, facts, seeds=3, seconds=60, margin=None, train=train_in_process, progress=print)
    judge.same_training((recipe, rules), (recipe, plan), tokens_per_s)     # another plan: the same updates
    judge.other_training((recipe, plan), (muon, plan), tokens_per_s)       # another recipe: the same time

Both arms train to the end of a short budget with the same seeds, as `redline race` does, in folders that a second call
finds again. Another plan must not be worse at the end by more than a margin: the validation loss, for RFT and RL the
accuracy. Another training has to win on time: to the loss that all seeds of the arm before it reached at the end. The
interval over the paired seeds has 90%, so a verdict is wrong once in 20 times at most; "worse" of another training, which
losses or times may show, once in 15 (simulated). Left out: generation, whose guard compares log-probabilities.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from redline.config.load import to_toml
from redline.config.recipe import PlanPins, Recipe, fingerprint_of
from redline.errors import Say
from redline.machine.facts import MachineFacts
from redline.measure.statistics import MarginVerdict, paired, pairs_to_tell, within
from redline.plan.plan import PLANNED, Plan, save
from redline.record.read import Run, values
from redline.tune.race import Arm, Train, race, trained

LOSS_MARGIN, ACCURACY_MARGIN = 0.01, 0.05
"""1% of the perplexity; about what a test of 300 questions cannot tell from chance."""
VALIDATIONS = 20
"""Validations of a timed run whose recipe asks for none: a time to a loss lies between two of them."""
WARM_UPS = ("warmup_steps", "muon_warmup_steps", "orthogonality_warmup_steps", "length_ramp_steps")
"""Numbers of initial updates that shrink with the run."""
HELD_OUT_NOTHING = (
    "the run held nothing out: give the recipe validation data (data.valid_fraction, for RFT test.rows, for RL"
    " train.eval_every)"
)
Figure = Literal["loss", "accuracy", "seconds to the loss"]
Trained = tuple[Recipe, Plan]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The result of training two arms to the end."""

    figure: Figure
    verdict: MarginVerdict
    before: tuple[float, ...] = ()
    """Figures of every seed that both arms finished."""
    after: tuple[float, ...] = ()
    worse_by: float | None = None
    """Mean over the seeds, positive if worse; of seconds, of their logarithm."""
    low: float | None = None
    high: float | None = None
    margin: float = 0.0
    seeds_to_tell: int | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict == "not worse"

    def __str__(self) -> str:
        """`3.412 → 3.415, +0.003 [-0.002, 0.008], not worse by more than 0.01`, with what would tell if this cannot."""
        if self.worse_by is None:
            return f"{self.verdict}: {self.note}"
        a, b, is_time = fmean(self.before), fmean(self.after), self.figure == "seconds to the loss"
        parts = [f"{a:.1f} → {b:.1f} s {self.note}" if is_time else f"{a:.4f} → {b:.4f}"]
        if self.low is not None and self.high is not None:
            parts.append(self._interval(self.worse_by, self.low, self.high))
        timed = {"not worse": "sooner", "worse": "later"}.get(self.verdict, self.verdict)
        unsure = self.verdict == "cannot tell"
        by = f" (margin {self.margin:g})" if unsure else f" by more than {self.margin:g}"
        parts.append(timed if is_time else self.verdict + by)
        if unsure:
            seeds = self.seeds_to_tell
            parts.append(f"about {seeds} seeds would tell" if seeds else "more seeds may tell")
        return ", ".join(parts)

    def _interval(self, worse_by: float, low: float, high: float) -> str:
        if self.figure == "seconds to the loss":
            faster = [math.exp(-value) for value in (worse_by, high, low)]
            return f"{faster[0]:.2f}x [{faster[1]:.2f}, {faster[2]:.2f}]"
        sign = 1 if self.figure == "loss" else -1  # more accuracy is better
        low, mean, high = sorted(sign * value + 0.0 for value in (low, worse_by, high))  # + 0.0: no -0.0
        return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


@dataclass(frozen=True, kw_only=True)
class Judge:
    folder: Path
    facts: MachineFacts
    seeds: int
    seconds: float
    """Seconds of a pre-training run without the change; other workloads train to their end."""
    margin: float | None
    """None: LOSS_MARGIN or ACCURACY_MARGIN."""
    train: Train
    progress: Say

    def same_training(self, before: Trained, after: Trained, tokens_per_s: float) -> Quality:
        """Compare the same updates under both plans. `tokens_per_s` of the first says how many fit the time."""
        arms = [self._arm(self._cut(recipe, tokens_per_s), plan) for recipe, plan in (before, after)]
        figure: Figure = "accuracy" if before[0].workload in ("rft", "rl") else "loss"
        margin = self.margin or (ACCURACY_MARGIN if figure == "accuracy" else LOSS_MARGIN)
        pairs: list[tuple[float, float]] = []
        for seed in range(self.seeds):
            first, second = (
                self._final(arm, seed, which) for arm, which in zip(arms, ("before", "after"), strict=True)
            )
            if isinstance(first, str):
                note = f"seed {seed} before the change: {first}"
                return Quality(figure=figure, verdict="cannot tell", margin=margin, note=note)
            if isinstance(second, str):
                note = f"seed {seed} failed: {second}"
                return Quality(figure=figure, verdict="worse", margin=margin, note=note)
            pairs.append((first, second))
        if figure == "accuracy" and not any(first for first, _ in pairs):
            note = "no answer was correct before the change, so none can be lost"
            return Quality(figure=figure, verdict="cannot tell", margin=margin, note=note)
        return _judged(figure, pairs, margin)

    def other_training(self, before: Trained, after: Trained, tokens_per_s: float) -> Quality:
        """Compare both recipes over the same time; refuse those whose losses are not comparable."""
        arms = [self._arm(self._timed(recipe, tokens_per_s), plan) for recipe, plan in (before, after)]

        def say(text: str) -> None:
            named = text.replace(arms[0].name, "before the change")
            self.progress(named.replace(arms[1].name, "with the change"))

        lanes = race(arms, self.folder, self.facts, seeds=self.seeds, train=self.train, progress=say).lanes
        for arm in arms:
            self._forget_weights(arm)
        failed = lanes[0].failed + lanes[1].failed
        figure: Figure = "seconds to the loss"
        if failed:
            verdict: MarginVerdict = "worse" if lanes[1].failed else "cannot tell"
            return Quality(figure=figure, verdict=verdict, note=f"a run failed: {failed[-1]}")
        loss = max(lanes[0].lowest)
        there = [lane.at(loss) for lane in lanes]
        if len(there[1]) < self.seeds:
            ends = [b - a for a, b in zip(lanes[0].lowest, lanes[1].lowest, strict=True)]
            worse = paired(ends).low > 0  # one seed of a few may well end higher
            note = f"{len(there[1])} of {self.seeds} seeds reached a loss of {loss:.4f}"
            return Quality(figure=figure, verdict="worse" if worse else "cannot tell", note=note)
        pairs = [(a.seconds, b.seconds) for a, b in zip(*there, strict=True)]
        return replace(_judged(figure, pairs, 0.0), note=f"to a loss of {loss:.4f}")

    def _cut(self, recipe: Recipe, tokens_per_s: float) -> Recipe:
        """A shorter run with a schedule of the same form, warm-ups included. Its number of updates ends it, whatever the
        recipe does: a clock would give a slower plan fewer of them."""
        if recipe.workload != "pretrain":
            return recipe
        train, updates_per_s = recipe.train, tokens_per_s / recipe.tokens_per_step
        by_clock = math.inf if train.max_hours is None else train.max_hours * 3600 * updates_per_s
        whole = max(1, int(min(train.steps, by_clock)))
        steps = max(1, min(whole, int(self.seconds * updates_per_s)))
        warm = {name: min(steps, math.ceil(getattr(train, name) * steps / whole)) for name in WARM_UPS}
        return replace(recipe, train=replace(train, steps=steps, max_hours=None, early_stop_evals=0, **warm))

    def _timed(self, recipe: Recipe, tokens_per_s: float) -> Recipe:
        """A run that ends after this time, and validates often enough to say when it reached a loss."""
        short, every = self._cut(recipe, tokens_per_s).train, recipe.train.eval_every
        train = replace(
            recipe.train, max_hours=self.seconds / 3600, **{name: getattr(short, name) for name in WARM_UPS},
            eval_every=min(every or short.steps, max(1, short.steps // VALIDATIONS)),
        )  # fmt: skip
        return replace(recipe, train=train)

    def _arm(self, recipe: Recipe, plan: Plan) -> Arm:
        """Named by what it computes and how, so that no arm trains twice; the plan holds the pins. Runs that end at a loss
        would all end equal."""
        recipe = replace(recipe, plan=PlanPins(), train=replace(recipe.train, target_loss=None))
        what = [to_toml(recipe), {name: getattr(plan, name) for name in PLANNED}]
        name = fingerprint_of(what)[:12]
        path = self.folder / f"{name}.plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        save(plan, path)
        return Arm(name, recipe, path)

    def _final(self, arm: Arm, seed: int, which: str) -> float | str:
        self.progress(f"quality, {which} the change, seed {seed + 1} of {self.seeds}")
        found = trained(arm, arm.place(self.folder, seed), seed, self.train, resume=True)
        if isinstance(found, str):
            return found
        self._forget_weights(arm)
        value = final(found)
        return HELD_OUT_NOTHING if value is None else value

    def _forget_weights(self, arm: Arm) -> None:
        """Delete the checkpoints: gigabytes that nobody needs once a run has its figure."""
        for seed in range(self.seeds):
            for path in arm.place(self.folder, seed).rglob("checkpoints"):
                shutil.rmtree(path)


def final(run: Run) -> float | None:
    """The last validation loss of a run; for RFT and RL the accuracy at the end."""
    if run.workload == "rft":
        tested = [line for line in run.evaluations if line.get("weights") == "samples"]
        return next(iter(values(tested[-1:], "accuracy")), None)
    name = "valid_accuracy" if run.workload == "rl" else "valid_loss"
    return next(reversed(values(run.metrics, name)), None)


def _judged(figure: Figure, pairs: Sequence[tuple[float, float]], margin: float) -> Quality:
    worse_by = [_worse_by(figure, before, after) for before, after in pairs]
    found = paired(worse_by)
    ends = (found.low, found.high) if len(pairs) > 1 else (None, None)
    return Quality(
        figure=figure, verdict=within(found, margin), before=tuple(a for a, _ in pairs),
        after=tuple(b for _, b in pairs), worse_by=found.mean, low=ends[0], high=ends[1], margin=margin,
        seeds_to_tell=pairs_to_tell(worse_by, margin),
    )  # fmt: skip


def _worse_by(figure: Figure, before: float, after: float) -> float:
    if figure == "seconds to the loss":
        return math.log(after / before)
    return after - before if figure == "loss" else before - after
