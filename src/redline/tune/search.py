"""The search for the fastest plan: one value at a time, the most promising first, each measured and kept only
if it is faster. No torch.

    with TuningFolder(path) as folder:
        tuned = tune(recipe, rules_plan, folder, minutes=6, progress=print)

It starts from the rules' plan, walks the micro-batch down and up, tries the other candidates, walks the
micro-batch again if one of them was kept, and ends with the winner against the rules' plan. Every candidate
takes turns with the best plan so far (duel.py): on a machine whose speed drifts nothing else can be believed.
A candidate wins when its interval lies above 1, its numbers pass the guard, and, if it compiles, the run is
long enough to earn that back. Trials use the recipe's own data and step, with updates cut to a few passes
where the recipe's are long: a plan changes the time of a pass, and the update's own cost is the same for all.
The rules' plan is measured whatever it takes; everything after it keeps to the time, that of the last
comparison set aside. Left out: several processes, and values that interact in ways that a walk along the axes
cannot see.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from redline.config.load import to_toml
from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError, TrainingError
from redline.plan.plan import PLANNED, Plan, Why
from redline.plan.values import VALUES, effect_of
from redline.record.files import write_atomic
from redline.record.units import format_duration, format_rate
from redline.tune.candidates import WORTH, Candidate, candidates, changed, differing
from redline.tune.duel import Duel, Duels
from redline.tune.guard import guard
from redline.tune.memory import Probe, divisors, fit_memory, pick_micro_batch
from redline.tune.statistics import interval
from redline.tune.store import Result, Row, TuningFolder, pinned, trial_key
from redline.tune.trial import (
    Bounds,
    Child,
    Children,
    Measured,
    Trial,
    lacked_memory,
    train_trial,
    was_killed,
)

RULES = "the rules' plan"
FINAL = "the winner against"
STEP = 1.8
"""The micro-batch walks from divisor to divisor of the batch, each at least this many times the one
before."""
LONG_STEP_S = 0.5
"""An update predicted longer than this is cut short in trials."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    plan: Plan
    result: Result


def tune(
    recipe: Recipe,
    rules: Plan,
    folder: TuningFolder,
    *,
    minutes: float,
    progress: Callable[[str], None],
    bounds: Bounds | None = None,
) -> Tuned:
    """Find the fastest plan within the time, write it into the folder, and return it with the table of
    trials."""
    if rules.world_size != 1:
        raise ConfigError(
            f"tuning works on one process, this plan has {rules.world_size}: tune with --nproc 1 and the same"
            " recipe"
        )
    write_atomic(folder.path / "recipe.toml", to_toml(recipe))
    search = _Search(recipe, rules, folder, minutes, progress, bounds or Bounds())
    try:
        search.begin()
        search.walk_micro_batch()
        walked = search.best
        search.try_candidates()
        if differing(walked, search.best):
            search.walk_micro_batch()
        return search.finish()
    finally:
        search.duels.close()
        search.children.close()


class _Search:
    """One search: the best plan so far, and what it was seen to do."""

    def __init__(
        self,
        recipe: Recipe,
        rules: Plan,
        folder: TuningFolder,
        minutes: float,
        progress: Callable[[str], None],
        bounds: Bounds,
    ) -> None:
        self.recipe, self.asked, self.folder, self.bounds = recipe, rules, folder, bounds
        self.rules = rules
        """What the search starts from, and what its gain is against: the plan that was asked for, or that one
        with smaller passes."""
        self.began_s, self.budget_s, self._progress = time.monotonic(), 60 * minutes, progress
        self.fixed = set(pinned(rules))
        self.best = rules
        self.best_measured = self.rules_measured = self.alone = Measured(outcome="ok")
        """What the best plan gave, what the rules' plan gave, and what that gave when it was measured by
        itself at the start."""
        self.children = Children.on(rules.hardware)
        self.duels = Duels(self.children, self._trial, deadline_s=self.began_s + self.budget_s, say=self.say)
        self.gain = (1.0, 1.0, 1.0)
        """What the duels say the best plan is worth, with the ends of its interval: the product of those that
        were kept."""
        self.rows: list[Row] = []
        self.untried: list[str] = []
        self.why: dict[str, Why] = {}
        self.probes: dict[tuple[Any, ...], dict[int, Probe]] = {}
        """Readings by what memory depends on, and by micro-batch."""
        self.tried: set[str] = set()
        self.short = shorten(recipe, rules)

    # ---- the parts of a search ----

    def begin(self) -> None:
        """Measure the rules' plan; where it does not fit, smaller passes of it."""
        cut = (
            f", updates cut to {self.short.train.batch_size} sequences"
            if self.short is not self.recipe
            else ""
        )
        most = f"{format_duration(self.budget_s)} at most, or what the rules' plan takes"
        self.say(f"tuning {self.recipe.name} on {self.rules.hardware.title}: {most}{cut}")
        failures: list[str] = []
        while True:
            measured = self._measure_alone(RULES, self.best)
            if not lacked_memory(measured) or "micro_batch" in self.fixed:
                break
            what = (
                "was killed twice, perhaps for want of memory"
                if was_killed(measured)
                else "ran out of memory"
            )
            failures.append(f"micro-batch {self.best.micro_batch} {what}")
            smaller = self._smaller_size(failures[-1])
            if smaller is None:
                break
            self._row(RULES, None, measured, note=f"{failures[-1]}: {measured.error}")
            self.best = changed(self.recipe, self.best, {"micro_batch": smaller})
        if measured.outcome != "ok":
            raise TrainingError(f"the rules' plan does not run here ({measured.outcome}): {measured.error}")
        if failures:
            why = {
                "micro_batch": Why(reason="; ".join(failures), source="measurement"),
                "accumulation": self._accumulation(self.best),
            }
            self.best = replace(self.best, why={**self.best.why, **why})
        self.rules, self.best_measured, self.rules_measured, self.alone = (
            self.best,
            measured,
            measured,
            measured,
        )
        self._row(self.against, None, measured, note="where the search starts", kept=True)

    def walk_micro_batch(self) -> None:
        """Down and up from the best size, further as long as it gets faster; down first, so that two readings
        show what up would take."""
        for up in (False, True):
            while "micro_batch" not in self.fixed and (size := self._next_size(up)) is not None:
                if not self._try(
                    Candidate(change={"micro_batch": size}, predicted=1.0, reason="passes of another size")
                ):
                    break

    def try_candidates(self) -> None:
        """Every candidate once against the best plan of its time; what was predicted is predicted anew when
        the best changes."""
        done: set[str] = set()
        while True:
            share = self.best_measured.data_wait_share
            todo = [
                c
                for c in candidates(self.recipe, self.best, fixed=self.fixed, data_wait_share=share)
                if c.name not in done
            ]
            if not todo:
                return
            done.add(todo[0].name)
            self._try(todo[0])

    def finish(self) -> Tuned:
        """The winner once more against the rules' plan: a choice among many flatters the chosen, and this
        measurement had no part in it."""
        ratio, low, high, paired, unconfirmed = 1.0, 1.0, 1.0, True, ""
        if differing(self.rules, self.best):
            name = f"{FINAL} {self.against}"
            found = self._measure_against(f"{self.against}, again", self.rules, final=True)
            duel = replace(found, measured=found.best, best=found.measured)  # what was best is what is judged
            if (comparison := duel.comparison) is None:
                unconfirmed = (
                    "the time was over" if found.cut else str(found.measured.error or found.best.error)
                )
                self._row(
                    name, None, duel.measured, note=f"failed: {unconfirmed}; the same command makes it again"
                )
                ratio, low, high = self.gain
            else:
                self._row(name, None, duel.measured, duel, kept=comparison.verdict == "faster")
                if comparison.verdict == "faster":
                    self.best_measured = duel.measured
                    ratio, low, high, paired = (
                        comparison.ratio,
                        comparison.low,
                        comparison.high,
                        comparison.paired,
                    )
                else:
                    self.say(f"{self.against} stays")
                    self.best, self.best_measured, self.why = self.rules, duel.best, {}
        plan = self._explained()
        result = Result(
            tuned_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            against=self.against,
            ratio=ratio,
            low=low,
            high=high,
            paired=paired,
            tokens_per_s=_tokens_per_s(self.best_measured),
            trials=len(self.tried),
            elapsed_s=time.monotonic() - self.began_s,
            untried=tuple(dict.fromkeys(self.untried)),
            unconfirmed=unconfirmed,
            rows=tuple(self.rows),
        )
        self.folder.finish(plan, result)
        return Tuned(plan=plan, result=result)

    # ---- one candidate ----

    def _try(self, candidate: Candidate) -> bool:
        """Measure a candidate against the best plan; True if it is the best now."""
        refused = self._refusal(candidate)
        if refused is not None:
            self._row(candidate.name, candidate.predicted, note=refused)
            return False
        plan = changed(self.recipe, self.best, candidate.change)
        duel = self._measure_against(candidate.name, plan)
        measured, comparison = duel.measured, duel.comparison
        if duel.cut:
            self.untried.append(candidate.name)
            self._row(candidate.name, candidate.predicted, note="not tried to its end: the time was over")
            return False
        if comparison is None:
            failed, who = (
                (measured, "") if measured.outcome != "ok" else (duel.best, "the plan it is compared with ")
            )
            self._row(
                candidate.name, candidate.predicted, measured, note=f"{who}{failed.outcome}: {failed.error}"
            )
            return False
        numbers = guard(self.rules_measured, measured, effect_of(self.rules, plan), precision=plan.precision)
        payback = self._payback_steps(candidate, duel)
        kept = comparison.verdict == "faster" and numbers.passed and payback <= self.recipe.train.steps
        note = str(numbers)
        if numbers.passed and comparison.verdict == "faster" and not kept:
            note = (
                f"compiling pays back after {payback:,.0f} updates, the run has {self.recipe.train.steps:,}"
            )
        self._row(candidate.name, candidate.predicted, measured, duel, note, kept=kept)
        for name, value in candidate.change.items():
            before = self.why.get(name, self.rules.why[name]).reason
            reason = (
                f"measured {comparison} against {getattr(self.best, name)}"
                if kept
                else f"{before}; {value} measured {comparison}"
            )
            self.why[name] = Why(reason=reason, source="measurement")
        if kept:
            self.best, self.best_measured = plan, measured
            ratio, low, high = self.gain
            self.gain = ratio * comparison.ratio, low * comparison.low, high * comparison.high
        if numbers.passed and differing(self.asked, self.rules) and not differing(self.asked, plan):
            self.say("the rules' plan runs after all: what is found is held against that")
            self.rules, self.rules_measured = self.asked, measured
            self.gain = (
                (1.0, 1.0, 1.0) if kept else (1 / comparison.ratio, 1 / comparison.high, 1 / comparison.low)
            )
        return kept

    def _refusal(self, candidate: Candidate) -> str | None:
        """Why a candidate is not tried: it cannot pay, cannot fit, or there is no time for it."""
        if candidate.predicted < WORTH:
            return f"not tried: predicted {candidate.predicted:.2f}x ({candidate.reason})"
        try:
            plan = changed(self.recipe, self.best, candidate.change)
        except (MachineError, ConfigError) as error:
            return f"not tried: {error}"
        if self.folder.find(self._pair_key(plan)) is not None:
            return None
        cost_s = self._duel_s(plan) + candidate.compile_s
        left_s = max(0.0, self._until_s(final=False) - time.monotonic())
        if cost_s > left_s:
            self.untried.append(candidate.name)
            return (
                f"not tried: it takes about {format_duration(cost_s)}, and {format_duration(left_s)} are left"
                " before the last comparison"
            )
        return None

    def _duel_s(self, plan: Plan) -> float:
        """What a duel takes, by what the rules' plan took: a start and the rounds of two, or two starts where
        both do not fit at once."""
        rounds_s = (
            (self.bounds.blocks + 1) * self.alone.steps_per_block * interval(self.alone.blocks_s).median
        )
        return self.alone.elapsed_s + (rounds_s if self._fit_at_once(plan) else self.alone.elapsed_s)

    def _until_s(self, *, final: bool) -> float:
        """When a duel has to end: the time of the last one is set aside for it."""
        return self.began_s + self.budget_s - (0.0 if final else self._duel_s(self.rules))

    def _measure_alone(self, name: str, plan: Plan) -> Measured:
        """Measure a plan by itself."""
        key = trial_key(self._trial(plan))
        measured = self.folder.find(key)
        if measured is None:
            measured = self.duels.alone(plan)
            self._keep(key, name, plan, measured)
        self._note(plan, key, measured)
        return measured

    def _measure_against(self, name: str, plan: Plan, *, final: bool = False) -> Duel:
        """Measure a plan and the best one, in turns where both fit at once."""
        key = self._pair_key(plan) + ("-final" if final else "")
        duel = self._known(key, plan)
        if duel is None:
            self.say(f"  measuring {name}, about {format_duration(self._duel_s(plan))}")
            together, until_s = self._fit_at_once(plan), self._until_s(final=final)
            duel = self.duels.against(self.best, plan, together=together, final=final, until_s=until_s)
            # a winner is not refused for ever by what went wrong once
            if not duel.cut and (not final or duel.comparison is not None):
                self._keep(key, name, plan, duel.measured, beside=duel.best, paired=duel.paired)
        self._note(plan, key, duel.measured)
        return duel

    def _known(self, key: str, plan: Plan) -> Duel | None:
        """A duel that was finished before."""
        measured, best, paired = (
            self.folder.find(key),
            self.folder.find_beside(key),
            self.folder.find_paired(key),
        )
        if measured is None or best is None:
            return None
        return Duel(
            measured=measured, best=best, paired=self._fit_at_once(plan) if paired is None else paired
        )

    def _fit_at_once(self, plan: Plan) -> bool:
        """Whether a plan and the best one fit the device together, by what the best was seen to take, and the
        planner's arithmetic scaled by how far it was off there."""
        if plan.hardware.kind == "cpu" or self.best_measured.memory is None:
            return True
        seen = self.best_measured.memory
        needed = 1.1 * plan.prediction.memory_bytes * seen.reserved_bytes / self.best.prediction.memory_bytes
        return seen.reserved_bytes + 2 * seen.other_bytes + needed <= plan.hardware.memory_bytes

    # ---- small things ----

    @property
    def against(self) -> str:
        """What the gain is against, in words."""
        return (
            f"{RULES} cut to micro-batch {self.rules.micro_batch}"
            if differing(self.asked, self.rules)
            else RULES
        )

    def _smaller_size(self, failure: str) -> int | None:
        """For a plan that ran out of memory: what small probes say that fits, or the next smaller divisor
        where they say nothing new."""
        now = self.best.micro_batch
        sizes = [size for size in divisors(now) if size < now]
        if not sizes or self.best is not self.rules:
            return sizes[-1] if sizes else None
        self.duels.close()
        self.say(f"  {failure}: probing smaller ones")
        with Child(self.best.allocator) as child:
            pick = pick_micro_batch(
                self.recipe, self.best, child, capacity_bytes=self.best.hardware.memory_bytes
            )
        return max((size for size in sizes if pick and size <= pick.micro_batch), default=sizes[-1])

    def _next_size(self, up: bool) -> int | None:
        """The next micro-batch in a direction that is worth a trial: a divisor that was not measured and
        should fit."""
        now, batch = self.best.micro_batch, self.short.train.batch_size
        sizes = [size for size in divisors(batch) if size < batch or self.short is self.recipe]
        if up:
            size = next((size for size in sizes if size >= STEP * now), None)
        else:
            size = next((size for size in reversed(sizes) if size * STEP <= now), None)
        probes, capacity = self.probes.get(_shape(self.best), {}), self.best.hardware.memory_bytes
        if size is None or size in probes:
            return None
        if (
            up
            and self.best.hardware.kind == "cuda"
            and len(probes) > 1
            and not (fit := fit_memory([*probes.values()])).fits(size, capacity)
        ):
            needs = (
                f"{(fit.reserved_bytes(size) + fit.other_bytes) / 2**30:.1f} of {capacity / 2**30:.1f} GiB"
            )
            self._row(
                f"micro_batch {size}", None, note=f"not tried: it would take {needs}, by {len(probes)} probes"
            )
            return None
        return size

    def _payback_steps(self, candidate: Candidate, duel: Duel) -> float:
        """Updates of the recipe after which a longer start has paid; 0 for what does not compile
        differently."""
        if "compile" not in candidate.change:
            return 0.0
        longer_s = (duel.measured.first_step_s or 0.0) - (duel.best.first_step_s or 0.0)
        scale = self.recipe.train.batch_size / self.short.train.batch_size
        won_s = scale * (interval(duel.best.blocks_s).median - interval(duel.measured.blocks_s).median)
        return max(0.0, longer_s) / won_s if won_s > 0 else float("inf")

    def _explained(self) -> Plan:
        """The best plan, with what was measured as the reason of each value that a trial decided."""
        why = {**self.rules.why, **self.why}
        if self.best.accumulation != self.rules.accumulation:
            why["accumulation"] = self._accumulation(self.best)
        return replace(self.best, why=why)

    def _accumulation(self, plan: Plan) -> Why:
        reason = (
            f"{self.recipe.train.batch_size} sequences an update / ({plan.micro_batch} a pass x"
            f" {plan.world_size} process(es))"
        )
        return Why(reason=reason, source="rule")

    def _trial(self, plan: Plan) -> Trial:
        return train_trial(
            self.short,
            replace(plan, accumulation=self.short.train.batch_size // plan.micro_batch),
            self.bounds,
        )

    def _pair_key(self, plan: Plan) -> str:
        return trial_key(self._trial(plan), trial_key(self._trial(self.best)))

    def _keep(self, key: str, name: str, plan: Plan, measured: Measured, **facts: Any) -> None:
        self.folder.add(
            key,
            name,
            measured,
            change=differing(self.rules, plan),
            best=differing(self.rules, self.best),
            **facts,
        )

    def _note(self, plan: Plan, key: str, measured: Measured) -> None:
        """Remember that a plan was tried, and what it took."""
        self.tried.add(key)
        if measured.outcome == "ok" and measured.memory is not None:
            self.probes.setdefault(_shape(plan), {})[plan.micro_batch] = Probe(
                micro_batch=plan.micro_batch, memory=measured.memory
            )

    def _row(
        self,
        name: str,
        predicted: float | None,
        measured: Measured | None = None,
        duel: Duel | None = None,
        note: str = "",
        kept: bool = False,
    ) -> None:
        """Add a line to the table and say it; one without a duel has nothing to compare with, one that was
        not measured was not tried."""
        row = Row(
            name=name,
            predicted=predicted,
            outcome=measured.outcome if measured else None,
            tokens_per_s=_tokens_per_s(measured) if measured and measured.blocks_s else None,
            memory_bytes=measured.memory.reserved_bytes if measured and measured.memory else None,
            comparison=duel.comparison if duel else None,
            rounds=duel.rounds if duel else None,
            verdict="kept" if kept else _verdict(measured, duel),
            note=note,
            kept=kept,
        )
        self.rows.append(row)
        speed = f" {format_rate(row.tokens_per_s, 'tokens')}" if row.tokens_per_s is not None else ""
        against = f" {row.comparison}" if row.comparison else ""
        self.say(f"{'+' if kept else ' '} {name}:{speed}{against}  {note}")

    def say(self, text: str) -> None:
        elapsed_s = float(round(time.monotonic() - self.began_s))
        self._progress(
            f"[{format_duration(elapsed_s)}, {format_duration(max(0.0, self.budget_s - elapsed_s))} left]"
            f" {text}"
        )


def shorten(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with an update of a few passes, where its own is predicted to take longer than LONG_STEP_S;
    else the recipe itself."""
    rate = plan.prediction.attainable_tokens_per_s
    if rate is None or recipe.tokens_per_step / rate < LONG_STEP_S:
        return recipe
    # Four passes of the rules' size: twice that size still runs in two passes, whose gradients accumulate as
    # the recipe's do.
    batch = next(
        d
        for d in divisors(recipe.train.batch_size)
        if d >= min(4 * plan.micro_batch, recipe.train.batch_size) and d % plan.micro_batch == 0
    )
    return (
        recipe
        if batch == recipe.train.batch_size
        else replace(recipe, train=replace(recipe.train, batch_size=batch))
    )


def _tokens_per_s(measured: Measured) -> float:
    return measured.tokens_per_step / interval(measured.blocks_s).median


def _verdict(measured: Measured | None, duel: Duel | None) -> str:
    if measured is None or measured.outcome != "ok":
        return measured.outcome if measured else "not tried"
    return duel.comparison.verdict if duel and duel.comparison else "not compared"


def _shape(plan: Plan) -> tuple[Any, ...]:
    """The values on which the memory of a pass depends, beside the micro-batch."""
    return tuple(getattr(plan, name) for name in PLANNED if VALUES[name].shapes_memory)
