"""Two plans measured: the best one stays warm in its child, and every other takes turns with it from a child
of its own. No torch.

    duels = Duels(children, trial_of, deadline_s=..., say=print)
    duels.alone(rules)
    duel = duels.against(best, plan, together=True, final=False, until_s=...)
    duel.comparison                               # None where one of them failed or the time was over: then
                                                  nothing is known

A child that died between two duels, or in one, says nothing about the plans: it is started again, once. A
plan that does not fit beside the other may fit by itself: then both are measured alone, one after the other,
and only that is the result.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from redline.plan.plan import Plan
from redline.plan.values import VALUES
from redline.tune.candidates import differing
from redline.tune.statistics import Comparison, compare, hopeless
from redline.tune.store import trial_key
from redline.tune.trial import (
    Arm,
    Child,
    Children,
    Measured,
    Trial,
    lacked_memory,
    limit_s_of,
    measure,
    take_turns,
    was_killed,
)


@dataclass(frozen=True, kw_only=True)
class Duel:
    """A plan and the best one of its time."""

    measured: Measured
    best: Measured
    paired: bool
    """Whether they took turns."""
    cut: bool = False
    """Whether the time was over before it was known which is faster."""

    @property
    def comparison(self) -> Comparison | None:
        if self.cut or self.measured.outcome != "ok" or self.best.outcome != "ok":
            return None
        return compare(self.best.blocks_s, self.measured.blocks_s, paired=self.paired)

    @property
    def rounds(self) -> int:
        return min(len(self.best.blocks_s), len(self.measured.blocks_s))


class Duels:
    def __init__(
        self,
        children: Children,
        trial_of: Callable[[Plan], Trial],
        *,
        deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._children, self._trial_of, self._deadline_s, self._say = children, trial_of, deadline_s, say
        self._holder: Arm | None = None
        """The best plan, warm in a child; None where it was not needed yet."""
        self._spare: tuple[Child, Plan] | None = None
        """The child of the last loser, and its plan."""

    def close(self) -> None:
        """End the children."""
        if self._holder is not None:
            self._holder.child.close()
        if self._spare is not None:
            self._spare[0].close()
        self._holder = self._spare = None

    def alone(self, plan: Plan) -> Measured:
        """Measure a plan, in a child that stays; once more where it crashed or was killed. It takes the time
        that it takes."""
        for tries_left in (1, 0):
            holder = self._hold(plan, math.inf)
            for _ in range(holder.trial.bounds.blocks):
                holder.block()
            measured = holder.end()
            if measured.outcome != "crashed" or not tries_left:
                break
            self._say(f"  crashed ({measured.error}): once more")
        return measured

    def against(self, best: Plan, plan: Plan, *, together: bool, final: bool, until_s: float) -> Duel:
        """Measure a plan and the best one, in turns where both fit at once. The child of the faster one
        stays. Both plans of the `final` duel have run before: there either is started again, and no blocks
        are saved. From `until_s` on nothing new is begun."""
        lacking = None
        if together:
            duel, challenger = self._in_turns(best, plan, final, until_s)
            lacking = next(
                (measured for measured in (duel.measured, duel.best) if lacked_memory(measured)), None
            )
        if not together or (lacking is not None and not _over(until_s)):
            if lacking is not None:
                challenger.child.close()
            killed = lacking is not None and was_killed(lacking)
            why = (
                "one of the two plans was killed, perhaps for want of memory"
                if killed
                else "both plans at once do not fit in memory"
            )
            self._say(f"  {why}: one after the other")
            duel, challenger = self._apart(best, plan, final, until_s)
        duel = replace(
            duel, cut=_over(until_s) and not _complete(duel, challenger.trial.bounds.blocks, final)
        )
        if duel.comparison is not None and duel.comparison.verdict == "faster":
            self._spare = (self._holder.child, best) if self._holder is not None else None
            self._holder = challenger
        else:
            self._spare = (challenger.child, plan)
        return duel

    def _in_turns(self, best: Plan, plan: Plan, final: bool, until_s: float) -> tuple[Duel, Arm]:
        holder = self._hold(best, self._deadline_s)
        # where the challenger fails before its first block, those of another time would stand beside it
        holder.forget()
        challenger = self._challenger(plan, until_s)
        for tries_left in (1, 0):
            if challenger.failed is None:
                self._take_turns(holder, challenger, final, until_s)
            failed = holder.failed or (challenger.failed if final else None)
            if failed is None or failed.outcome == "out_of_memory" or not tries_left or _over(until_s):
                break
            self._say(f"  a plan that ran before {failed.outcome} ({failed.error}): once more")
            holder = self._hold(best, self._deadline_s)
            challenger = challenger if challenger.failed is None else self._challenger(plan, until_s)
        return Duel(measured=challenger.end(), best=holder.end(), paired=True), challenger

    def _take_turns(self, holder: Arm, challenger: Arm, final: bool, until_s: float) -> None:
        """Rounds of both, until one fails or cannot win any more, or the time is over."""

        def enough() -> bool:
            if holder.failed is not None or challenger.failed is not None or _over(until_s):
                return True
            holder.limit_s, challenger.limit_s = (
                limit_s_of(holder.trial, self._deadline_s),
                limit_s_of(challenger.trial, until_s),
            )
            return not final and hopeless(holder.blocks_s, challenger.blocks_s)

        take_turns([holder, challenger], holder.trial.bounds.blocks, enough)

    def _apart(self, best: Plan, plan: Plan, final: bool, until_s: float) -> tuple[Duel, Arm]:
        self.close()
        for tries_left in (1, 0):
            trial = self._trial_of(best)
            bounded = replace(trial, bounds=replace(trial.bounds, limit_s=limit_s_of(trial, until_s)))
            reference = measure(bounded, enough=lambda _: _over(until_s))
            if reference.outcome == "ok" or not tries_left or _over(until_s):
                break
            self._say(f"  a plan that ran before {reference.outcome} ({reference.error}): once more")
        for tries_left in (1, 0):
            challenger = self._challenger(plan, until_s)
            while len(challenger.blocks_s) < challenger.trial.bounds.blocks and challenger.failed is None:
                challenger.block()
                if _over(until_s) or (not final and hopeless(reference.blocks_s, challenger.blocks_s)):
                    break
            if challenger.failed is None or not final or not tries_left or _over(until_s):
                break
            self._say(
                f"  a plan that ran before {challenger.failed.outcome} ({challenger.failed.error}): once more"
            )
        return Duel(measured=challenger.end(), best=reference, paired=False), challenger

    def _challenger(self, plan: Plan, until_s: float) -> Arm:
        """The plan, started: in the child of the last loser where that can be, else, or where that one
        crashed, in a new one."""
        spare, self._spare = self._spare, None
        if (
            spare is not None
            and spare[0].alive
            and not any(VALUES[name].lasting for name in differing(spare[1], plan))
        ):
            arm = self._start(self._trial_of(plan), spare[0], until_s)
            if arm.failed is None or arm.failed.outcome != "crashed":
                return arm
        elif spare is not None:
            spare[0].close()
        return self._start(self._trial_of(plan), self._children.take(plan.allocator), until_s)

    def _hold(self, plan: Plan, until_s: float) -> Arm:
        """Have the plan warm in a child."""
        trial = self._trial_of(plan)
        if (
            self._holder is None
            or not self._holder.child.alive
            or trial_key(self._holder.trial) != trial_key(trial)
        ):
            self.close()
            self._holder = self._start(trial, self._children.take(trial.allocator), until_s)
        self._holder.limit_s = limit_s_of(trial, until_s)
        return self._holder

    def _start(self, trial: Trial, child: Child, until_s: float) -> Arm:
        arm = Arm(trial, child)
        arm.limit_s = limit_s_of(trial, until_s)
        arm.start()
        return arm


def _over(until_s: float) -> bool:
    return time.monotonic() > until_s


def _complete(duel: Duel, rounds: int, final: bool) -> bool:
    """Whether a duel has the rounds that it was meant to have, or was given up before for a reason other than
    the time."""
    if duel.comparison is None:
        return False
    return duel.rounds >= rounds or (not final and hopeless(duel.best.blocks_s, duel.measured.blocks_s))
