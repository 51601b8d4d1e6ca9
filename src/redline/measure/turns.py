"""Turn-taking: arms run block by block in rounds, so that a drift of the machine affects all of them. No torch.

    take_turns(arms, rounds=6, block_s=0.5, clock=time.monotonic)          # whatever has blocks
    with Turns(folder, Children.on(hardware), minutes=6, progress=print) as turns:
        naive = turns.alone("naive", trial)
        pair = turns.pair("bf16", trial, other)          # None when the time is up
        pair.comparison

An arm stays warm in its child as long as the next pair needs it, which saves its start, compiling included. A chance
failure says nothing: an arm that ran before, or that others are compared with, is started once more. If two arms do
not fit in memory together, each is measured alone, one after the other, and `paired` says so. A finished pair is in
the folder and is not repeated.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from redline.config.load import build
from redline.errors import Say
from redline.measure.process import Child, ChildFailed, Children
from redline.measure.statistics import NOISY_ROUNDS, noisy, plain
from redline.measure.trial import Measurement, Pair, PeakMemory, Trial, TrialFolder, trial_key
from redline.record.units import format_duration

T = TypeVar("T")

UNMOVED_S = 2.0
"""A step longer than this does not depend on what its process did before."""
SHORTEST_LIMIT_S = 5.0
"""A child gets at least this long to answer, even past the end of the time."""

Enough = Callable[[Sequence[float], Sequence[float]], bool]
"""Whether the blocks of two arms (seconds per token) settle it before the last round."""


class HasBlocks(Protocol):
    blocks_s: list[float]
    """Seconds per step, one per block."""

    @property
    def failed(self) -> object | None: ...
    def block(self) -> None: ...
    def forget(self) -> None:
        """Drop the blocks so far."""


def take_turns(
    arms: Sequence[HasBlocks],
    rounds: int,
    *,
    block_s: float,
    clock: Callable[[], float],
    enough: Callable[[], bool] = lambda: False,
    when_noisy: int = NOISY_ROUNDS,
) -> None:
    """A block of each arm in every round, in alternating order. On a noisy machine up to `when_noisy` times as many
    rounds, within the time meant for them; fewer once `enough` says so. Unless steps are long, a first round is not
    counted: an arm that waited has cold caches and a slow clock."""
    until_s = clock() + NOISY_ROUNDS * rounds * block_s * len(arms)
    for arm in arms:
        arm.forget()
        arm.block()
    counted = all(step_s > UNMOVED_S for arm in arms for step_s in arm.blocks_s)
    for arm in arms if not counted else ():
        arm.forget()
    for round_ in range(int(counted), rounds * when_noisy):
        if round_ == rounds and not any(noisy(arms[0].blocks_s, arm.blocks_s) for arm in arms[1:]):
            return
        if round_ > rounds and clock() > until_s:
            return
        for arm in arms if round_ % 2 == 0 else reversed(arms):
            arm.block()
        if enough() or all(arm.failed for arm in arms):
            return


class Arm:
    """A trial in progress in a child; a failure ends it and is remembered."""

    def __init__(self, trial: Trial, child: Child, clock: Callable[[], float]) -> None:
        self.trial, self.child, self.clock = trial, child, clock
        self.until_s = math.inf
        """A child that has not answered by then is not waited for."""
        self.started: dict[str, Any] = {}
        self.blocks_s: list[float] = []
        self.waited_s: list[float] = []
        self.memory: PeakMemory | None = None
        self.failed: ChildFailed | None = None
        self.began_s = clock()

    @property
    def tokens_per_step(self) -> int:
        return int(self.started["tokens_per_step"])

    def start(self) -> None:
        self._attempt(lambda: self.started.update(self.child.start(self.trial, self._limit_s())))

    def block(self) -> None:
        def run() -> None:
            reply = self.child.block(self._limit_s())
            self.blocks_s.append(reply["step_s"])
            self.waited_s.append(reply["data_wait_s"])

        self._attempt(run)

    def forget(self) -> None:
        self.blocks_s, self.waited_s = [], []

    def end(self) -> Measurement:
        """End the arm and return its measurement; the child stays alive."""
        self._attempt(lambda: setattr(self, "memory", self.child.memory(self._limit_s())))
        found = {
            "outcome": self.failed.outcome if self.failed else "ok",
            "error": self.failed.error if self.failed else None,
            "blocks_s": self.blocks_s,
            "memory": vars(self.memory) if self.memory else None,
            "data_wait_share": sum(self.waited_s) / sum(self.blocks_s) if self.blocks_s else 0.0,
            "elapsed_s": self.clock() - self.began_s,
        }
        return build(Measurement, {**found, **self.started}, where="trial")

    def _limit_s(self) -> float:
        return min(self.trial.timing.limit_s, max(SHORTEST_LIMIT_S, self.until_s - self.clock()))

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.failed is None:
            try:
                action()
            except ChildFailed as failed:
                self.failed = failed


class Turns:
    def __init__(self, folder: TrialFolder, children: Children, *, minutes: float, progress: Say) -> None:
        self.folder, self.children, self.clock = folder, children, children.clock
        self.began_s = self.clock()
        self.deadline_s = self.began_s + 60 * minutes
        self._progress = progress
        self._alive: dict[str, Arm] = {}
        self._spare: dict[str, Child] = {}
        """Children of arms no longer needed, by what else they can measure."""
        self._ran: set[str] = set()
        """Trials that ended well once, whose later failure is chance."""
        self._shortest_s: float | None = None
        self._longest_s = 0.0
        """The shortest and the longest pair decided so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._make_room()
        self.children.close()

    def aside(self, work: Callable[[], T]) -> T:
        """Something long that needs the machine to itself and is not part of the time given."""
        self._make_room()
        began_s = self.clock()
        found = work()
        self.deadline_s += self.clock() - began_s
        return found

    def fair_end_s(self) -> float:
        """The time by which one of several pairs must be decided, so that one that compiles for minutes leaves time for others."""
        now_s = self.clock()
        return min(self.deadline_s, now_s + max((self.deadline_s - now_s) / 2, 3 * self._longest_s))

    def say(self, text: str) -> None:
        elapsed_s = float(round(self.clock() - self.began_s))
        left_s = max(0.0, self.deadline_s - self.began_s - elapsed_s)
        self._progress(f"[{format_duration(elapsed_s)}, {format_duration(left_s)} left] {text}")

    def alone(
        self, name: str, trial: Trial, *, blocks: int | None = None, until_s: float | None = None
    ) -> Measurement | None:
        """A trial alone; None if there is no time. With fewer `blocks` it does not stand in for one of a pair."""
        key = trial_key(trial) + (f" {blocks} blocks" if blocks else "")
        until_s = self.deadline_s if until_s is None else until_s
        if (measured := self.folder.find(key)) is None:
            if not self._time_for(name, until_s):
                return None
            began_s = self.clock()
            self._make_room(trial)
            measured = self._by_itself(name, trial, blocks or trial.timing.blocks, until_s)
            self._spent(began_s)
            if measured.outcome == "timed_out" and self._over(until_s):
                return None
            self.folder.add(key, name, measured)
        self._remember((trial, measured))
        return measured

    def pair(
        self,
        name: str,
        before: Trial,
        after: Trial,
        *,
        enough: Enough = plain,
        together: bool = True,
        until_s: float | None = None,
        again: str = "",
    ) -> Pair | None:
        """Measure two trials in turns or, if they do not fit `together`, one after the other; None if time runs out before
        it is decided. `again` names a repetition."""
        key = _pair_key(before, after, again)
        until_s = self.deadline_s if until_s is None else until_s
        if (pair := self.folder.find_pair(key)) is None:
            if not self._time_for(name, until_s):
                return None
            began_s = self.clock()
            self._make_room(before, after)
            pair = self._in_turns(name, before, after, until_s, enough) if together else None
            # one that failed beside the other may not fail alone
            failed = pair is None or pair.before.outcome != "ok" or pair.after.lacked_memory
            if pair is None or (failed and not self._over(until_s)):
                self.say(f"{name}: {_why_apart(pair)}; measuring one after the other")
                pair = self._apart(name, before, after, until_s, enough)
            self._spent(began_s)
            done = pair.rounds >= after.timing.blocks or _enough(enough, pair.before, pair.after)
            if self._over(until_s) and not (pair.comparison and done):
                return None
            self._longest_s = max(self._longest_s, self.clock() - began_s)
            found = ((before, pair.before), (after, pair.after))
            if not any(m.outcome != "ok" and trial_key(trial) in self._ran for trial, m in found):
                self.folder.add(key, name, pair.after, beside=pair.before, paired=pair.paired)
        self._remember((before, pair.before), (after, pair.after))
        return pair

    def knows(self, before: Trial, after: Trial) -> bool:
        """Whether a pair is in the folder already."""
        return self.folder.find_pair(_pair_key(before, after)) is not None

    # ---- parts ----

    def _in_turns(self, name: str, before: Trial, after: Trial, until_s: float, enough: Enough) -> Pair:
        for last in (False, True):
            arms = [self._arm(before, self.deadline_s), self._arm(after, until_s)]
            self._rounds(arms, after.timing.blocks, until_s, partial(_enough, enough, *arms))
            pair = Pair(before=arms[0].end(), after=arms[1].end(), paired=True)
            ran = [pair.before] + [pair.after] * (trial_key(after) in self._ran)
            chance = next((m for m in ran if m.outcome not in ("ok", "out_of_memory")), None)
            if last or chance is None or self._over(until_s):
                break
            self.say(f"{name}: {chance.outcome}, though it has run before ({chance.error}); trying once more")
        return pair

    def _apart(self, name: str, before: Trial, after: Trial, until_s: float, enough: Enough) -> Pair:
        """One after the other: what failed beside the other may run alone."""
        self._make_room()
        first = self._by_itself(f"{name}: before", before, before.timing.blocks, until_s)
        self._make_room(after)

        settled = partial(_enough, enough, first) if first.outcome == "ok" else lambda arm: False
        second = self._by_itself(name, after, after.timing.blocks, until_s, settled)
        return Pair(before=first, after=second, paired=False)

    def _by_itself(
        self,
        name: str,
        trial: Trial,
        blocks: int,
        until_s: float,
        settled: Callable[[Arm], bool] = lambda arm: False,
    ) -> Measurement:
        """A trial alone; once more if it crashed."""
        for last in (False, True):
            arm = self._arm(trial, until_s)
            self._rounds([arm], blocks, until_s, partial(settled, arm))
            measured = arm.end()
            if last or measured.outcome != "crashed" or self._over(until_s):
                break
            self.say(f"{name}: crashed ({measured.error}); trying once more")
        return measured

    def _rounds(self, arms: list[Arm], rounds: int, until_s: float, enough: Callable[[], bool]) -> None:
        """Rounds of all arms until one fails, they are enough, or the time is up."""

        def over() -> bool:
            return any(arm.failed for arm in arms) or self._over(until_s) or enough()

        if not any(arm.failed for arm in arms):
            timing = arms[0].trial.timing
            take_turns(arms, rounds, block_s=timing.block_s, clock=self.clock, enough=over)

    def _arm(self, trial: Trial, until_s: float) -> Arm:
        """The trial's arm: the warm one, else one in a spare child, else (or if that crashed) in a new one."""
        arm = self._alive.get(trial_key(trial))
        if arm is None or arm.failed is not None:
            spare = self._spare.pop(trial.process, None)
            arm = self._start(trial, spare or self.children.take(trial.allocator), until_s)
            if spare is not None and arm.failed and arm.failed.outcome == "crashed":
                arm = self._start(trial, self.children.take(trial.allocator), until_s)
        arm.forget()
        arm.until_s = until_s
        return arm

    def _start(self, trial: Trial, child: Child, until_s: float) -> Arm:
        arm = self._alive[trial_key(trial)] = Arm(trial, child, self.clock)
        arm.until_s = until_s
        arm.start()
        return arm

    def _make_room(self, *needed: Trial) -> None:
        """End every arm but those of these trials; keep children that can measure a trial that is not warm."""
        keys = [trial_key(trial) for trial in needed]
        wanted = {t.process for t, key in zip(needed, keys, strict=True) if key not in self._alive} - {""}
        for key in [key for key in self._alive if key not in keys]:
            arm = self._alive.pop(key)
            if arm.failed is None and arm.trial.process in wanted - self._spare.keys():
                self._spare[arm.trial.process] = arm.child
            else:
                arm.child.close()
        for process in self._spare.keys() - wanted:
            self._spare.pop(process).close()

    def _remember(self, *found: tuple[Trial, Measurement]) -> None:
        self._ran |= {trial_key(trial) for trial, measured in found if measured.outcome == "ok"}

    def _time_for(self, name: str, until_s: float) -> bool:
        # by the shortest so far: an ablation's naive state is the slowest by far and says little about the next
        if until_s - self.clock() < max(1.0, self._shortest_s or 0.0):
            return False
        self.say(f"{name}: measuring")
        return True

    def _over(self, until_s: float) -> bool:
        return self.clock() >= until_s

    def _spent(self, began_s: float) -> None:
        self._shortest_s = min(self._shortest_s or math.inf, self.clock() - began_s)


def _pair_key(before: Trial, after: Trial, again: str = "") -> str:
    return f"{trial_key(before)}>{trial_key(after)}{again}"


def _why_apart(pair: Pair | None) -> str:
    if pair is None or "out_of_memory" in (pair.before.outcome, pair.after.outcome):
        return "both do not fit in memory together"
    failed = pair.before if pair.before.outcome != "ok" else pair.after
    how = "was killed, perhaps for lack of memory" if failed.was_killed else failed.outcome
    return f"one {how} beside the other"


def _enough(enough: Enough, *arms: Arm | Measurement) -> bool:
    each_s = [[block_s / arm.tokens_per_step for block_s in arm.blocks_s] for arm in arms]
    return all(each_s) and enough(*each_s)
