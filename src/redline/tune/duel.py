"""Two plans measured: the best one stays warm in its child, and every other takes turns with it from a child of its own. No torch.

    duels = Duels(children, trial_of, deadline_s=..., say=print)
    duels.alone(rules)
    duel = duels.against(best, plan, together=True, final=False)
    duel.comparison                               # None where one of them failed: then nothing is known

A child that died between two duels, or in one, says nothing about the plans: it is started again, once. A plan that does not fit beside
the other may fit by itself: then both are measured alone, one after the other, and only that is the result.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from redline.plan.plan import Plan
from redline.tune.candidates import differing
from redline.tune.statistics import Comparison, compare, hopeless
from redline.tune.store import trial_key
from redline.tune.trial import Arm, Child, Children, Measured, Trial, measure, take_turns

SHORTEST_LIMIT_S = 60.0
"""A candidate that does not answer is given up when the search's own time is, but not before this."""
SAME_PROCESS = {"micro_batch", "recompute", "cross_entropy", "loss_chunks", "loader_threads", "prefetch"}
"""Values that a process can change without leaving anything of the plan before it: a loser's child is used again, which saves imports."""
KILLED = f"killed by signal {signal.SIGKILL.value}"


@dataclass(frozen=True, kw_only=True)
class Duel:
    """A plan and the best one of its time."""

    measured: Measured
    best: Measured
    paired: bool
    """Whether they took turns."""

    @property
    def comparison(self) -> Comparison | None:
        if self.measured.outcome != "ok" or self.best.outcome != "ok":
            return None
        return compare(self.best.blocks_s, self.measured.blocks_s, paired=self.paired)

    @property
    def rounds(self) -> int:
        return min(len(self.best.blocks_s), len(self.measured.blocks_s))


def lacked_memory(measured: Measured) -> bool:
    """Whether memory was, or may have been, the reason: on a CPU the system kills who takes too much of it."""
    return measured.outcome == "out_of_memory" or (measured.outcome == "crashed" and KILLED in (measured.error or ""))


class Duels:
    def __init__(self, children: Children, trial_of: Callable[[Plan], Trial], *, deadline_s: float, say: Callable[[str], None]) -> None:
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
        """Measure a plan, in a child that stays; once more where it crashed."""
        for tries_left in (1, 0):
            holder = self._hold(plan)
            for _ in range(holder.trial.bounds.blocks):
                holder.block()
            measured = holder.end()
            if measured.outcome != "crashed" or lacked_memory(measured) or not tries_left:
                break
            self._say(f"  crashed ({measured.error}): once more")
        return measured

    def against(self, best: Plan, plan: Plan, *, together: bool, final: bool) -> Duel:
        """Measure a plan and the best one, in turns where both fit at once. The child of the faster one stays. Both plans of the `final`
        duel have run before: there either is started again, and no blocks are saved."""
        duel = None
        if together:
            duel, challenger = self._in_turns(best, plan, final)
            if lacked_memory(duel.measured) or lacked_memory(duel.best):
                challenger.child.close()
                duel = None
        if duel is None:
            self._say("  both plans at once do not fit in memory: one after the other")
            duel, challenger = self._apart(best, plan, final)
        if duel.comparison is not None and duel.comparison.verdict == "faster":
            self._spare = (self._holder.child, best) if self._holder is not None else None
            self._holder = challenger
        else:
            self._spare = (challenger.child, plan)
        return duel

    def _in_turns(self, best: Plan, plan: Plan, final: bool) -> tuple[Duel, Arm]:
        holder, challenger = self._hold(best), self._challenger(plan)
        for tries_left in (1, 0):
            if challenger.failed is None:
                _take_turns(holder, challenger, final)
            failed = holder.failed or (challenger.failed if final else None)
            if failed is None or failed.outcome == "out_of_memory" or not tries_left:
                break
            self._say(f"  a plan that ran before {failed.outcome} ({failed.error}): once more")
            holder = self._hold(best)
            challenger = challenger if challenger.failed is None else self._challenger(plan)
        duel = Duel(measured=challenger.end(), best=holder.end(), paired=True)
        holder.forget()
        return duel, challenger

    def _apart(self, best: Plan, plan: Plan, final: bool) -> tuple[Duel, Arm]:
        self.close()
        for tries_left in (1, 0):
            reference = measure(self._trial_of(best))
            if reference.outcome == "ok" or not tries_left:
                break
            self._say(f"  a plan that ran before {reference.outcome} ({reference.error}): once more")
        for tries_left in (1, 0):
            challenger = self._challenger(plan)
            while len(challenger.blocks_s) < challenger.trial.bounds.blocks and challenger.failed is None:
                challenger.block()
                if not final and hopeless(reference.blocks_s, challenger.blocks_s):
                    break
            if challenger.failed is None or not final or not tries_left:
                break
            self._say(f"  a plan that ran before {challenger.failed.outcome} ({challenger.failed.error}): once more")
        return Duel(measured=challenger.end(), best=reference, paired=False), challenger

    def _challenger(self, plan: Plan) -> Arm:
        """The plan, started: in the child of the last loser where that can be, else, or where that one crashed, in a new one."""
        spare, self._spare = self._spare, None
        if spare is not None and spare[0].alive and not set(differing(spare[1], plan)) - SAME_PROCESS:
            arm = self._start(plan, spare[0])
            if arm.failed is None or arm.failed.outcome != "crashed":
                return arm
        elif spare is not None:
            spare[0].close()
        return self._start(plan, self._children.take(plan.allocator))

    def _start(self, plan: Plan, child: Child) -> Arm:
        arm = Arm(self._trial_of(plan), child)
        arm.limit_s = min(arm.limit_s, max(SHORTEST_LIMIT_S, self._deadline_s - time.monotonic()))
        arm.start()
        return arm

    def _hold(self, plan: Plan) -> Arm:
        """Have the plan warm in a child."""
        trial = self._trial_of(plan)
        if self._holder is None or not self._holder.child.alive or trial_key(self._holder.trial) != trial_key(trial):
            self.close()
            self._holder = Arm(trial, self._children.take(trial.allocator))
            self._holder.start()
        return self._holder


def _take_turns(holder: Arm, challenger: Arm, final: bool) -> None:
    """Rounds of both, until one fails or cannot win any more."""

    def enough() -> bool:
        if holder.failed is not None or challenger.failed is not None:
            return True
        return not final and hopeless(holder.blocks_s, challenger.blocks_s)

    take_turns([holder, challenger], holder.trial.bounds.blocks, enough)
