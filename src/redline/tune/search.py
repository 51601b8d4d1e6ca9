"""The search for the fastest plan: one value at a time, the most promising first, each measured and kept only if it is
faster. No torch.

    with TrialFolder(path) as folder:
        plan, result = tune(recipe, rules_plan, folder, minutes=6, progress=print)

It starts from the rules' plan, walks the micro-batch down and up, tries the other candidates, walks the micro-batch
again if one of them was kept, and ends with the winner against the rules' plan. A candidate takes turns with the best
plan so far (measure/turns.py). It wins if its interval lies above 1, its numbers pass the guard, and the run is long
enough to earn back what it compiles. Trials run the recipe's real steps on its own data; long updates are cut to a few
passes. Left out: several processes, and values that only pay together.
"""

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from redline.config.load import to_toml
from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError, Say, TrainingError
from redline.measure.process import Children
from redline.measure.statistics import Comparison, hopeless
from redline.measure.trial import Measurement, Pair, PeakMemory, Timing, Trial, TrialFolder, train_trial
from redline.measure.turns import Turns
from redline.plan.plan import PLANNED, Plan, Why
from redline.plan.values import VALUES, effect_of
from redline.record.files import write_atomic
from redline.record.units import counted, format_duration
from redline.tune.candidates import WORTH, Candidate, candidates, changed, differing
from redline.tune.guard import doubted, guard
from redline.tune.memory import divisors, fit_memory
from redline.tune.quality import Judge
from redline.tune.store import TrialTable, TuningResult, keep, pinned

RULES = "the rules' plan"
FINAL = "the winner against"
STEP = 1.8
"""The micro-batch walks along divisors of the batch, each at least this many times the one before."""
LONG_STEP_S = 0.5
"""An update predicted longer than this is cut short in trials."""


def tune(
    recipe: Recipe,
    rules: Plan,
    folder: TrialFolder,
    *,
    minutes: float,
    progress: Say,
    timing: Timing | None = None,
    children: Children | None = None,
    judge: Judge | None = None,
) -> tuple[Plan, TuningResult]:
    """Find the fastest plan within the time, write it into the folder, and return it with the table of trials. A judge
    also trains it to the end (quality.py): the rules' plan stays unless that is shown to be as good."""
    if rules.world_size != 1:
        raise ConfigError(
            f"tuning works on one process, but this plan has {rules.world_size}: tune the same recipe with --nproc 1"
        )
    write_atomic(folder.path / "recipe.toml", to_toml(recipe))
    children = children or Children.on(rules.hardware)
    with Turns(folder, children, minutes=minutes, progress=progress) as turns:
        search = _Search(recipe, rules, turns, timing or Timing())
        search.begin()
        search.walk_micro_batch()
        walked = search.best
        search.try_candidates()
        if differing(walked, search.best):
            search.walk_micro_batch()
        return search.finish(judge)


class _Search:
    """One search: the best plan so far, and what it was seen to do."""

    def __init__(self, recipe: Recipe, rules: Plan, turns: Turns, timing: Timing) -> None:
        self.recipe, self.asked, self.turns, self.timing = recipe, rules, turns, timing
        self.rules = self.best = rules
        """The plan that gains are measured against (if need be with smaller passes), and the best so far."""
        self.fixed = set(pinned(rules))
        self.best_measured = self.rules_measured = self.alone = Measurement(outcome="ok")
        """What the best plan gave; what the rules' plan gave; and what the latter gave alone, at the start."""
        self.gains: list[Comparison] = []
        """Comparisons of the changes that were kept: what the best plan is worth is their product."""
        self.table = TrialTable(turns.say)
        self.untried: list[str] = []
        self.why: dict[str, Why] = {}
        self.seen: dict[tuple[Any, ...], dict[int, PeakMemory]] = {}
        """Memory by what it depends on, and by micro-batch."""
        self.short = shorten(recipe, rules)

    # ---- the parts of a search ----

    def begin(self) -> None:
        """Measure the rules' plan; where it does not fit, smaller passes of it."""
        title = f"tuning {self.recipe.name} on {self.rules.hardware.title}"
        if self.short is not self.recipe:
            title += f", updates cut to {self.short.rows_per_update} sequences"
        self.turns.say(f"{title}; the rules' plan is measured however long it takes")
        failures: list[str] = []
        while True:
            measured = self.turns.alone(RULES, self._trial(self.best), until_s=math.inf)
            assert measured is not None, "no time bounds it"
            if not measured.lacked_memory or "micro_batch" in self.fixed:
                break
            killed = "was killed twice, maybe for lack of memory"
            what = killed if measured.was_killed else "ran out of memory"
            failures.append(f"micro-batch {self.best.micro_batch} {what}")
            if (smaller := self._neighbour(up=False)) is None:
                break
            self.table.add(RULES, measured=measured, note=f"{failures[-1]}: {measured.error}")
            self.best = changed(self.recipe, self.best, {"micro_batch": smaller})
        if measured.outcome != "ok":
            raise TrainingError(f"the rules' plan does not run here ({measured.outcome}): {measured.error}")
        if failures:
            why = {"micro_batch": Why(reason="; ".join(failures), source="measurement")}
            self.best = replace(self.best, why=self.best.why | why | self._accumulation(self.best))
        self.rules, self.best_measured, self.rules_measured, self.alone = self.best, *[measured] * 3
        self._remember_memory(self.best, measured)
        self.table.add(self.against, measured=measured, note="where the search starts", kept=True)

    def walk_micro_batch(self) -> None:
        """Down, then up, for as long as it gets faster; the readings below show what larger passes would take."""
        for up in (False, True):
            while "micro_batch" not in self.fixed and (size := self._next_size(up)) is not None:
                change = {"micro_batch": size}
                if not self._try(Candidate(change=change, predicted=1.0, reason="passes of another size")):
                    break

    def try_candidates(self) -> None:
        """Every candidate once against the best plan of its time; predictions are made again when that changes."""
        done: set[str] = set()
        while True:
            share = self.best_measured.data_wait_share
            found = candidates(self.recipe, self.best, fixed=self.fixed, data_wait_share=share)
            todo = [candidate for candidate in found if candidate.name not in done]
            if not todo:
                return
            done.add(todo[0].name)
            self._try(todo[0])

    def finish(self, judge: Judge | None) -> tuple[Plan, TuningResult]:
        """The winner against the rules' plan once more: a choice among many flatters the chosen one."""
        unconfirmed, quality = "", None
        if differing(self.rules, self.best):
            pair, name = self._last_pair(), f"{FINAL} {self.against}"
            if pair is None or (comparison := pair.comparison) is None:
                unconfirmed = str(pair.before.error or pair.after.error) if pair else "time ran out"
                note = f"failed: {unconfirmed}; run the same command again to repeat it"
                after = pair.after if pair else None
                self.table.add(name, measured=after, note=note, verdict="not compared")
            elif comparison.verdict == "faster":
                self.table.add(name, pair=pair, kept=True)
                self.best_measured, self.gains = pair.after, [comparison]
            else:
                self.table.add(name, pair=pair)
                self.turns.say(f"{self.against} stays")
                self._stay(pair.before)
        if judge is not None and differing(self.rules, self.best):
            both = (self.recipe, self.rules), (self.recipe, self.best)
            train = partial(judge.same_training, *both, self.rules_measured.tokens_per_s)
            quality = self.turns.aside(train)
            if not quality.passed:
                unconfirmed = ""
                self._stay(self.rules_measured)
        plan, gains = self._explained(), self.gains if differing(self.rules, self.best) else []
        result = TuningResult(
            tuned_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            against=self.against,
            ratio=math.prod((gain.ratio for gain in gains), start=1.0),
            low=math.prod((gain.low for gain in gains), start=1.0),
            high=math.prod((gain.high for gain in gains), start=1.0),
            paired=bool(unconfirmed) or all(gain.paired for gain in gains),
            tokens_per_s=self.best_measured.tokens_per_s,
            trials=sum(row.outcome is not None for row in self.table.rows),
            elapsed_s=self.turns.clock() - self.turns.began_s,
            untried=tuple(dict.fromkeys(self.untried)),
            unconfirmed=unconfirmed,
            quality=quality,
            rows=tuple(self.table.rows),
        )
        keep(self.turns.folder.path, plan, result)
        return plan, result

    def _stay(self, measured: Measurement) -> None:
        """Go back to the rules' plan, which gave this."""
        self.best, self.best_measured, self.why = self.rules, measured, {}

    # ---- one candidate ----

    def _try(self, candidate: Candidate) -> bool:
        """Measure a candidate against the best plan; True if it is the best now."""
        name, predicted = candidate.name, candidate.predicted
        if (refused := self._refusal(candidate)) is not None:
            self.table.add(name, predicted, note=refused)
            return False
        plan = changed(self.recipe, self.best, candidate.change)
        pair = self.turns.pair(
            name, self._trial(self.best), self._trial(plan), enough=hopeless,
            together=self._fit_at_once(plan), until_s=self._until_s(),
        )  # fmt: skip
        if pair is None:
            self.untried.append(name)
            self.table.add(name, predicted, note="not finished: time ran out")
            return False
        self._remember_memory(plan, pair.after)
        if pair.comparison is None:
            who = "" if pair.after.outcome != "ok" else "the plan it is compared with "
            failed = pair.after if pair.after.outcome != "ok" else pair.before
            self.table.add(name, predicted, pair=pair, note=f"{who}{failed.outcome}: {failed.error}")
            return False
        kept, note, same_training = self._judge(candidate, plan, pair)
        self.table.add(name, predicted, pair=pair, note=note, kept=kept)
        self._explain(candidate, pair, kept)
        if kept:
            self.best, self.best_measured = plan, pair.after
            self.gains.append(pair.comparison)
        if same_training and differing(self.asked, self.rules) and not differing(self.asked, plan):
            self.turns.say("the rules' plan runs after all: gains are measured against it from now on")
            self.rules, self.rules_measured = self.asked, pair.after
            turned = Pair(before=pair.after, after=pair.before, paired=pair.paired).comparison
            self.gains = [turned] if turned and not kept else []
        return kept

    def _judge(self, candidate: Candidate, plan: Plan, pair: Pair) -> tuple[bool, str, bool]:
        """Whether it is kept, what to say about it, and whether it is the same training."""
        assert pair.comparison is not None
        effect = effect_of(self.rules, plan)
        numbers = guard(self.rules_measured, pair.after, effect, precision=plan.coarsest)
        wins = pair.comparison.verdict == "faster" and numbers.passed
        payback, steps = self._payback_steps(candidate, pair), self.recipe.train.steps
        if wins and payback > steps:
            epochs = "the recipe counts epochs: pin plan.compile for a long run"
            run = f"the run has {steps:,}" if steps else epochs
            return False, f"compiling pays back after {payback:,.0f} updates; {run}", True
        return wins, numbers.words + doubted(effect_of(self.best, plan), pair), numbers.passed

    def _explain(self, candidate: Candidate, pair: Pair, kept: bool) -> None:
        """Make what was measured the reason for the value that was tried."""
        for name, value in candidate.change.items():
            before = self.why.get(name, self.rules.why[name]).reason
            won = f"measured {pair.comparison} against {getattr(self.best, name)}"
            lost = f"{before}; {value} measured {pair.comparison}"
            self.why[name] = Why(reason=won if kept else lost, source="measurement")

    def _refusal(self, candidate: Candidate) -> str | None:
        """Why a candidate is not tried: it cannot pay, it cannot fit, or there is no time; None: try it."""
        if candidate.predicted < WORTH:
            return f"not tried: predicted {candidate.predicted:.2f}x ({candidate.reason})"
        try:
            plan = changed(self.recipe, self.best, candidate.change)
        except (MachineError, ConfigError) as error:
            return f"not tried: {error}"
        if self.turns.knows(self._trial(self.best), self._trial(plan)):
            return None
        cost_s = self._pair_s(plan) + candidate.compile_s
        left_s = max(0.0, self._until_s() - self.turns.clock())
        if cost_s <= left_s:
            return None
        self.untried.append(candidate.name)
        needs, left = format_duration(cost_s), format_duration(left_s)
        return f"not tried: it takes about {needs}, but only {left} remain before the last comparison"

    def _last_pair(self) -> Pair | None:
        """The rules' plan and the best one, with all blocks: both are known to run."""
        pair = self.turns.pair(
            f"{self.against}, again", self._trial(self.best), self._trial(self.rules),
            enough=lambda first_s, second_s: False, together=self._fit_at_once(self.rules), again=" final",
        )  # fmt: skip
        return pair and Pair(before=pair.after, after=pair.before, paired=pair.paired)

    # ---- time and memory ----

    def _pair_s(self, plan: Plan) -> float:
        """A pair's time, by the rules' plan: a start and both rounds, or two starts if both do not fit together."""
        alone = self.alone
        step_s = alone.tokens_per_step / alone.tokens_per_s
        rounds_s = (self.timing.blocks + 1) * alone.steps_per_block * step_s
        return alone.elapsed_s + (rounds_s if self._fit_at_once(plan) else alone.elapsed_s)

    def _until_s(self) -> float:
        """When a candidate's pair has to end: the last comparison's time is set aside."""
        return self.turns.deadline_s - self._pair_s(self.rules)

    def _fit_at_once(self, plan: Plan) -> bool:
        """Whether a plan fits beside the best: arithmetic, corrected by how far it was off for the best."""
        seen = self.best_measured.memory
        if plan.hardware.kind == "cpu" or seen is None:
            return True
        needed = 1.1 * plan.prediction.memory_bytes * seen.reserved_bytes / self.best.prediction.memory_bytes
        return seen.reserved_bytes + 2 * seen.other_bytes + needed <= plan.hardware.memory_bytes

    def _neighbour(self, up: bool) -> int | None:
        """The next divisor of the batch in that direction."""
        now, batch = self.best.micro_batch, self.short.rows_per_update
        sizes = [size for size in divisors(batch) if size < batch or self.short is self.recipe]
        if up:
            return next((size for size in sizes if size >= STEP * now), None)
        return next((size for size in reversed(sizes) if size * STEP <= now), None)

    def _next_size(self, up: bool) -> int | None:
        """The next micro-batch in that direction worth a trial: one not measured yet that should fit."""
        size, seen = self._neighbour(up), self.seen.get(_shape(self.best), {})
        if size is None or size in seen:
            return None
        if up and self.best.hardware.kind == "cuda" and len(seen) > 1:
            fit, capacity = fit_memory(seen), self.best.hardware.memory_bytes
            if not fit.fits(size, capacity):
                needs = (fit.reserved_bytes(size) + fit.other_bytes) / 2**30
                note = f"it would take {needs:.1f} of {capacity / 2**30:.1f} GiB, extrapolated from {len(seen)} readings"
                self.table.add(f"micro_batch {size}", note=f"not tried: {note}")
                return None
        return size

    def _remember_memory(self, plan: Plan, measured: Measurement) -> None:
        if measured.outcome == "ok" and measured.memory is not None:
            self.seen.setdefault(_shape(plan), {})[plan.micro_batch] = measured.memory

    def _payback_steps(self, candidate: Candidate, pair: Pair) -> float:
        """Updates after which a longer start has paid for itself; 0 for what does not compile differently."""
        if "compile" not in candidate.change:
            return 0.0
        longer_s = (pair.after.first_step_s or 0.0) - (pair.before.first_step_s or 0.0)
        tokens = pair.before.tokens_per_step * self.recipe.rows_per_update / self.short.rows_per_update
        won_s = tokens / pair.before.tokens_per_s - tokens / pair.after.tokens_per_s
        return max(0.0, longer_s) / won_s if won_s > 0 else math.inf

    # ---- what is said ----

    @property
    def against(self) -> str:
        """What gains are measured against, in words."""
        cut = f"{RULES} cut to micro-batch {self.rules.micro_batch}"
        return cut if differing(self.asked, self.rules) else RULES

    def _explained(self) -> Plan:
        """The best plan, with what was measured as the reason for each value that a trial decided."""
        moved = self.best.accumulation != self.rules.accumulation
        why = self.rules.why | self.why | (self._accumulation(self.best) if moved else {})
        return replace(self.best, why=why)

    def _accumulation(self, plan: Plan) -> dict[str, Why]:
        passes = f"({plan.micro_batch} per pass x {counted(plan.world_size, 'process')})"
        rows = "sequences" if self.recipe.workload == "pretrain" else "examples"
        reason = f"{self.recipe.rows_per_update} {rows} per update / {passes}"
        return {"accumulation": Why(reason=reason, source="rule")}

    def _trial(self, plan: Plan) -> Trial:
        accumulation = self.short.rows_per_update // plan.micro_batch
        return train_trial(self.short, replace(plan, accumulation=accumulation), self.timing)


def shorten(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with updates of a few passes if its own should take longer than LONG_STEP_S; else itself."""
    rate, batch, micro = plan.prediction.attainable_tokens_per_s, recipe.rows_per_update, plan.micro_batch
    # packed examples have no predicted rate, and their updates are short
    if rate is None or recipe.tokens_per_step / rate < LONG_STEP_S:
        return recipe
    # Four passes of the rules' size: twice that size still runs in two passes, whose gradients accumulate as
    # the recipe's do.
    few = next(d for d in divisors(batch) if d >= min(4 * micro, batch) and d % micro == 0)
    return recipe if few == batch else recipe.with_rows(few)


def _shape(plan: Plan) -> tuple[Any, ...]:
    """The values other than the micro-batch on which the memory of a pass depends."""
    return tuple(getattr(plan, name) for name in PLANNED if VALUES[name].shapes_memory)
