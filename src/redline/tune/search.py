"""The search for the fastest plan: one value at a time, the most promising first, each measured and kept only if it is faster. No torch.

    with TuningFolder(path) as folder:
        tuned = tune(recipe, rules_plan, folder, minutes=6, progress=print)

It starts from the rules' plan, walks the micro-batch down and up, tries the other candidates, walks the micro-batch again if one of them
was kept, and ends with the winner against the rules' plan. The best plan so far stays warm in its child, and every candidate takes turns
with it from a child of its own: on a machine whose speed drifts nothing else can be believed. A candidate wins when its interval lies
above 1, its numbers pass the guard, and, if it compiles, the run is long enough to earn that back. Trials use the recipe's own data and
step, with updates cut to a few passes where the recipe's are long: a plan changes the time of a pass, and the update's own cost is the
same for all. Left out: several processes, and values that interact in ways that a walk along the axes cannot see.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from redline.config.load import to_toml
from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError, TrainingError
from redline.plan.plan import Plan, Why
from redline.record.files import write_atomic
from redline.record.units import format_duration, format_rate
from redline.tune.candidates import AUTOTUNED, WORTH, Candidate, candidates, changed, differing
from redline.tune.guard import effect_of, guard
from redline.tune.memory import Probe, divisors, fit_memory, pick_micro_batch
from redline.tune.statistics import Comparison, compare, hopeless, interval
from redline.tune.store import Result, TuningFolder, pinned, trial_key
from redline.tune.trial import Arm, Bounds, Child, Children, Measured, Trial, measure, take_turns, train_trial

TRIAL_S = {"cuda": 30.0, "cpu": 12.0}
"""What a trial costs before any was seen: imports, a compilation, warm-up and six blocks."""
COMPILE_S = {"default": 40.0, AUTOTUNED: 200.0}
"""What a trial costs beyond that when it compiles in a way that was not compiled before (gpt2-124m on an H200: 203 s, LOG.md)."""
STEP = 1.8
"""The micro-batch walks from divisor to divisor of the batch, each at least this many times the one before."""
SHORTEST_LIMIT_S = 60.0
"""A candidate that does not answer is given up when the search's own time is, but not before this."""
LONG_STEP_S = 0.5
"""An update predicted longer than this is cut short in trials."""
SAME_PROCESS = {"micro_batch", "recompute", "cross_entropy", "loss_chunks", "loader_threads", "prefetch"}
"""Values that a process can change without leaving anything of the plan before it: a loser's child is used again, which saves imports."""
SHAPE = ("precision", "compile", "recompute", "attention", "cross_entropy", "loss_chunks")
"""Values on which memory depends, beside the micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the trial table."""

    name: str
    predicted: float | None
    measured: Measured | None
    """None: not tried."""
    comparison: Comparison | None
    """Against the best plan at that time."""
    note: str
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Tuned:
    plan: Plan
    result: Result
    rows: tuple[Row, ...]


def tune(
    recipe: Recipe, rules: Plan, folder: TuningFolder, *, minutes: float, progress: Callable[[str], None], bounds: Bounds | None = None
) -> Tuned:
    """Find the fastest plan within the time, write it into the folder, and return it with the table of trials."""
    if rules.world_size != 1:
        raise ConfigError(f"tuning works on one process, this plan has {rules.world_size}: tune with --nproc 1 and the same recipe")
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
        search.close()
        search.children.close()


class _Search:
    """One search: the best plan so far, the child that holds it, and what it was seen to do."""

    def __init__(
        self, recipe: Recipe, rules: Plan, folder: TuningFolder, minutes: float, progress: Callable[[str], None], bounds: Bounds
    ) -> None:
        self.recipe, self.rules, self.folder, self.bounds = recipe, rules, folder, bounds
        self.began_s, self.budget_s, self._progress = time.monotonic(), 60 * minutes, progress
        self.fixed = set(pinned(rules))
        self.best = rules
        self.best_measured = self.rules_measured = Measured(outcome="ok")
        self.children = Children.on(rules.hardware)
        self.holder: Arm | None = None
        """The best plan, warm in a child; None where it was not needed yet."""
        self.spare: tuple[Child, Plan] | None = None
        """The child of the last loser, and its plan."""
        self.rows: list[Row] = []
        self.untried: list[str] = []
        self.why: dict[str, Why] = {}
        self.probes: dict[tuple[Any, ...], dict[int, Probe]] = {}
        """Readings by what memory depends on, and by micro-batch."""
        self.tried: set[str] = set()
        self.trial_s = TRIAL_S[rules.hardware.kind]
        self.short = shorten(recipe, rules)

    # ---- the parts of a search ----

    def begin(self) -> None:
        """Measure the rules' plan; where it does not fit, smaller passes of it."""
        cut = f", updates cut to {self.short.train.batch_size} sequences" if self.short is not self.recipe else ""
        self.say(f"tuning {self.recipe.name} on {self.rules.hardware.title}: {format_duration(self.budget_s)} at most{cut}")
        while True:
            measured = self._measure_alone("the rules' plan", self.best)
            smaller = self._smaller_size() if measured.outcome == "out_of_memory" and "micro_batch" not in self.fixed else None
            if smaller is None:
                break
            self._row("the rules' plan", None, measured, None, f"out of memory with micro-batch {self.best.micro_batch}")
            self.best = changed(self.recipe, self.best, {"micro_batch": smaller})
        if measured.outcome != "ok":
            raise TrainingError(f"the rules' plan does not run here ({measured.outcome}): {measured.error}")
        if self.best is not self.rules:
            self.why["micro_batch"] = Why(reason=f"micro-batch {self.rules.micro_batch} ran out of memory", source="measurement")
        self.rules, self.best_measured, self.rules_measured = self.best, measured, measured
        self._row("the rules' plan", None, measured, None, "where the search starts", kept=True)

    def walk_micro_batch(self) -> None:
        """Down and up from the best size, further as long as it gets faster; down first, so that two readings show what up would take."""
        for up in (False, True):
            while "micro_batch" not in self.fixed and (size := self._next_size(up)) is not None:
                if not self._try(Candidate(change={"micro_batch": size}, predicted=1.0, reason="passes of another size")):
                    break

    def try_candidates(self) -> None:
        """Every candidate once against the best plan of its time; what was predicted is predicted anew when the best changes."""
        done: set[str] = set()
        while True:
            share = self.best_measured.data_wait_share
            todo = [c for c in candidates(self.recipe, self.best, fixed=self.fixed, data_wait_share=share) if c.name not in done]
            if not todo:
                return
            done.add(todo[0].name)
            self._try(todo[0])

    def finish(self) -> Tuned:
        """The winner once more against the rules' plan: a choice among many flatters the chosen, and this measurement had no part in it."""
        comparison = None
        if differing(self.rules, self.best):
            before, again, comparison = self._measure_against("the rules' plan, again", self.rules, final=True)
            if before.outcome != "ok" or again.outcome != "ok":
                raise TrainingError(f"a plan that ran before failed: {before.error or again.error}; run the same command again")
            comparison = compare(before.blocks_s, again.blocks_s, paired=comparison.paired)
            self._row("the winner against the rules' plan", None, again, comparison, "", kept=comparison.verdict == "faster")
            self.best_measured = again
            if comparison.verdict != "faster":
                self.say("the rules' plan stays")
                self.best, self.best_measured, self.why, comparison = self.rules, before, {}, None
        plan = self._explained()
        result = Result(
            tuned_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            ratio=comparison.ratio if comparison else 1.0,
            low=comparison.low if comparison else 1.0,
            high=comparison.high if comparison else 1.0,
            paired=comparison.paired if comparison else True,
            tokens_per_s=self.best_measured.tokens_per_step / interval(self.best_measured.blocks_s).median,
            trials=len(self.tried),
            elapsed_s=time.monotonic() - self.began_s,
            untried=tuple(self.untried),
        )
        self.folder.finish(plan, result)
        return Tuned(plan=plan, result=result, rows=tuple(self.rows))

    def close(self) -> None:
        """End the children."""
        if self.holder is not None:
            self.holder.child.close()
        if self.spare is not None:
            self.spare[0].close()
        self.holder = self.spare = None

    # ---- one candidate ----

    def _try(self, candidate: Candidate) -> bool:
        """Measure a candidate against the best plan; True if it is the best now."""
        refused = self._refusal(candidate)
        if refused is not None:
            self._row(candidate.name, candidate.predicted, None, None, refused)
            return False
        plan = changed(self.recipe, self.best, candidate.change)
        measured, best, comparison = self._measure_against(candidate.name, plan)
        if measured.outcome != "ok":
            self._row(candidate.name, candidate.predicted, measured, None, f"{measured.outcome}: {measured.error}")
            return False
        numbers = guard(self.rules_measured, measured, effect_of(self.rules, plan), precision=plan.precision)
        payback = self._payback_steps(candidate, measured, best)
        kept = comparison.verdict == "faster" and numbers.passed and payback <= self.recipe.train.steps
        note = str(numbers)
        if numbers.passed and comparison.verdict == "faster" and not kept:
            note = f"compiling pays back after {payback:,.0f} updates, the run has {self.recipe.train.steps:,}"
        self._row(candidate.name, candidate.predicted, measured, comparison, note, kept=kept)
        for name, value in candidate.change.items():
            before = self.why.get(name, self.rules.why[name]).reason
            reason = f"measured {comparison} against {getattr(self.best, name)}" if kept else f"{before}; {value} measured {comparison}"
            self.why[name] = Why(reason=reason, source="measurement")
        if kept:
            self.best, self.best_measured = plan, measured
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
        cost_s = self.trial_s + COMPILE_S.get(candidate.change.get("compile", ""), 0.0)
        reserve_s = self.trial_s if differing(self.rules, self.best) else 0.0
        if time.monotonic() - self.began_s + cost_s + reserve_s > self.budget_s:
            self.untried.append(candidate.name)
            left_s = max(0.0, self.budget_s - (time.monotonic() - self.began_s))
            return f"not tried: it takes about {format_duration(cost_s + reserve_s)}, and {format_duration(left_s)} are left"
        return None

    def _measure_alone(self, name: str, plan: Plan) -> Measured:
        """Measure a plan, in a child that stays."""
        key = trial_key(self._trial(plan))
        measured = self.folder.find(key)
        if measured is None:
            self._hold(plan)
            assert self.holder is not None
            for _ in range(self.bounds.blocks):
                self.holder.block()
            measured = self.holder.end()
            self._keep(key, name, plan, measured)
        self._note(plan, key, measured)
        return measured

    def _measure_against(self, name: str, plan: Plan, *, final: bool = False) -> tuple[Measured, Measured, Comparison]:
        """Measure a plan and the best one, in turns where both fit at once. The child of the one that is best afterwards stays. In the
        `final` one no blocks are saved."""
        key = self._pair_key(plan) + ("-final" if final else "")
        measured, best, paired = self.folder.find(key), self.folder.find_beside(key), self._fit_at_once(plan)
        if measured is None or best is None:
            began_s = time.monotonic()
            self.say(f"  measuring {name}, about {format_duration(self.trial_s)}")
            measured, best, challenger = self._duel(plan, paired, final)
            if not final or measured.outcome == "ok":  # a winner is not refused for ever by what went wrong once
                self._keep(key, name, plan, measured, best)
            if "compile" not in differing(self.best, plan):
                self.trial_s = time.monotonic() - began_s
            won = measured.outcome == best.outcome == "ok" and compare(best.blocks_s, measured.blocks_s, paired=paired).verdict == "faster"
            if won:
                self.spare = (self.holder.child, self.best) if self.holder is not None else None
                self.holder = challenger
            else:
                self.spare = (challenger.child, plan)
        self._note(plan, key, measured)
        failed = measured.outcome != "ok" or best.outcome != "ok"
        comparison = compare((1.0,), (1.0,), paired=paired) if failed else compare(best.blocks_s, measured.blocks_s, paired=paired)
        return measured, best, comparison

    def _duel(self, plan: Plan, paired: bool, final: bool) -> tuple[Measured, Measured, Arm]:
        if not paired:
            self.close()
            self.say("  both plans at once do not fit in memory: one after the other")
            best = measure(self._trial(self.best))
            challenger = self._challenger(plan)
            challenger.start()
            while len(challenger.blocks_s) < self.bounds.blocks and not (challenger.failed or hopeless(best.blocks_s, challenger.blocks_s)):
                challenger.block()
            return challenger.end(), best, challenger
        self._hold(self.best)
        assert self.holder is not None
        holder, challenger = self.holder, self._challenger(plan)
        challenger.start()
        if challenger.failed is None:
            take_turns([holder, challenger], self.bounds.blocks, lambda: not final and hopeless(holder.blocks_s, challenger.blocks_s))
        measured, best = challenger.end(), holder.end()
        holder.forget()
        return measured, best, challenger

    def _challenger(self, plan: Plan) -> Arm:
        """The plan in the child of the last loser where that can be, else in a new one."""
        spare, self.spare = self.spare, None
        if spare is not None and (not spare[0].alive or set(differing(spare[1], plan)) - SAME_PROCESS):
            spare[0].close()
            spare = None
        arm = Arm(self._trial(plan), spare[0] if spare is not None else self.children.take(plan.allocator))
        arm.limit_s = min(arm.limit_s, max(SHORTEST_LIMIT_S, self.began_s + self.budget_s - time.monotonic()))
        return arm

    def _hold(self, plan: Plan) -> None:
        """Have the plan warm in a child."""
        trial = self._trial(plan)
        if self.holder is not None and trial_key(self.holder.trial) == trial_key(trial) and self.holder.child.alive:
            return
        self.close()
        self.holder = Arm(trial, self.children.take(trial.allocator))
        self.holder.start()

    def _fit_at_once(self, plan: Plan) -> bool:
        """Whether a plan and the best one fit the device together, by the planner's arithmetic and what the best was seen to take."""
        if plan.hardware.kind == "cpu" or self.best_measured.memory is None:
            return True
        seen = self.best_measured.memory
        return seen.reserved_bytes + 2 * seen.other_bytes + 1.1 * plan.prediction.memory_bytes <= plan.hardware.memory_bytes

    # ---- small things ----

    def _smaller_size(self) -> int | None:
        """For a plan that ran out of memory: what small probes say that fits, or the next smaller divisor where they say nothing new."""
        now = self.best.micro_batch
        sizes = [size for size in divisors(now) if size < now]
        if not sizes or self.best is not self.rules:
            return sizes[-1] if sizes else None
        self.close()
        self.say(f"  micro-batch {now} ran out of memory: probing smaller ones")
        with Child(self.best.allocator) as child:
            pick = pick_micro_batch(self.recipe, self.best, child, capacity_bytes=self.best.hardware.memory_bytes)
        return max((size for size in sizes if pick and size <= pick.micro_batch), default=sizes[-1])

    def _next_size(self, up: bool) -> int | None:
        """The next micro-batch in a direction that is worth a trial: a divisor that was not measured and should fit."""
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
            needs = f"{(fit.reserved_bytes(size) + fit.other_bytes) / 2**30:.1f} of {capacity / 2**30:.1f} GiB"
            self._row(f"micro_batch {size}", None, None, None, f"not tried: it would take {needs}, by {len(probes)} probes")
            return None
        return size

    def _payback_steps(self, candidate: Candidate, measured: Measured, best: Measured) -> float:
        """Updates of the recipe after which a longer start has paid; 0 for what does not compile differently."""
        if "compile" not in candidate.change:
            return 0.0
        longer_s = (measured.first_step_s or 0.0) - (best.first_step_s or 0.0)
        scale = self.recipe.train.batch_size / self.short.train.batch_size
        won_s = scale * (interval(best.blocks_s).median - interval(measured.blocks_s).median)
        return max(0.0, longer_s) / won_s if won_s > 0 else float("inf")

    def _explained(self) -> Plan:
        """The best plan, with what was measured as the reason of each value that a trial decided."""
        why = {**self.rules.why, **self.why}
        if self.best.accumulation != self.rules.accumulation:
            batch = self.recipe.train.batch_size
            reason = f"{batch} sequences an update / ({self.best.micro_batch} a pass x {self.best.world_size} process(es))"
            why["accumulation"] = Why(reason=reason, source="rule")
        return replace(self.best, why=why)

    def _trial(self, plan: Plan) -> Trial:
        return train_trial(self.short, replace(plan, accumulation=self.short.train.batch_size // plan.micro_batch), self.bounds)

    def _pair_key(self, plan: Plan) -> str:
        return trial_key(self._trial(plan), trial_key(self._trial(self.best)))

    def _keep(self, key: str, name: str, plan: Plan, measured: Measured, best: Measured | None = None) -> None:
        self.folder.add(key, name, measured, beside=best, change=differing(self.rules, plan), best=differing(self.rules, self.best))

    def _note(self, plan: Plan, key: str, measured: Measured) -> None:
        """Remember that a plan was tried, and what it took."""
        self.tried.add(key)
        if measured.outcome == "ok" and measured.memory is not None:
            self.probes.setdefault(_shape(plan), {})[plan.micro_batch] = Probe(micro_batch=plan.micro_batch, memory=measured.memory)

    def _row(
        self, name: str, predicted: float | None, measured: Measured | None, comparison: Comparison | None, note: str, kept: bool = False
    ) -> None:
        self.rows.append(Row(name=name, predicted=predicted, measured=measured, comparison=comparison, note=note, kept=kept))
        speed = ""
        if measured is not None and measured.blocks_s:
            speed = f" {format_rate(measured.tokens_per_step / interval(measured.blocks_s).median, 'tokens')}"
        against = f" {comparison}" if comparison else ""
        self.say(f"{'+' if kept else ' '} {name}:{speed}{against}  {note}")

    def say(self, text: str) -> None:
        elapsed_s = float(round(time.monotonic() - self.began_s))
        self._progress(f"[{format_duration(elapsed_s)}, {format_duration(max(0.0, self.budget_s - elapsed_s))} left] {text}")


def shorten(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with an update of a few passes, where its own is predicted to take longer than LONG_STEP_S; else the recipe itself."""
    rate = plan.prediction.attainable_tokens_per_s
    if rate is None or recipe.tokens_per_step / rate < LONG_STEP_S:
        return recipe
    # Four passes of the rules' size: twice that size still runs in two passes, whose gradients accumulate as the recipe's do.
    batch = next(
        d
        for d in divisors(recipe.train.batch_size)
        if d >= min(4 * plan.micro_batch, recipe.train.batch_size) and d % plan.micro_batch == 0
    )
    return recipe if batch == recipe.train.batch_size else replace(recipe, train=replace(recipe.train, batch_size=batch))


def _shape(plan: Plan) -> tuple[Any, ...]:
    return tuple(getattr(plan, name) for name in SHAPE)
