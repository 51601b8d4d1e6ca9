"""Trials in turns within a time: the arm that others are compared with stays alive between them; finished
ones are not repeated. No torch.

    with Turns(folder, beside=hardware.title, deadline_s=time.monotonic() + 600, progress=print) as turns:
        naive = turns.alone("naive", trial)
        pair = turns.pair("bf16", trial, other)        # blocks of both by rounds; None when there is no time
                                                       left

Keeping the standing arm alive saves its start (compiling included) for every change. Where one fails beside
the other for want of memory, or the standing arm twice, both are measured alone, one after the other, and
`paired` says so.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from redline.tune.statistics import plain
from redline.tune.store import TuningFolder, trial_key
from redline.tune.trial import Arm, Children, Measured, Trial, lacked_memory, limit_s_of, take_turns


@dataclass(frozen=True)
class Pair:
    before: Measured
    after: Measured
    paired: bool
    """Whether they took turns."""


class Turns:
    def __init__(
        self,
        folder: TuningFolder,
        *,
        beside: str,
        deadline_s: float,
        progress: Callable[[str], None],
        children: Children | None = None,
    ) -> None:
        self.folder, self.beside, self.deadline_s, self.progress = folder, beside, deadline_s, progress
        self._children = children or Children(ahead=False)
        self._alive: dict[str, Arm] = {}
        self._shortest_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_all_but()
        self._children.close()

    def alone(self, name: str, trial: Trial, *, blocks: int | None = None) -> Measured | None:
        """A trial by itself; None when there is no time for it. With fewer `blocks` than it asks for it says
        how fast it is, and is not taken for one of a pair."""
        key = trial_key(trial, self.beside) + (f" {blocks} blocks" if blocks else "")
        if (before := self.folder.find(key)) is not None:
            return before
        if not self._time_for(name):
            return None
        began_s = time.monotonic()
        measured = self._by_itself(trial, blocks or trial.bounds.blocks)
        if measured.outcome == "crashed":
            self.progress(f"{name}: crashed ({measured.error}); once more")
            measured = self._by_itself(trial, blocks or trial.bounds.blocks)
        self._spent(began_s)
        if self._cut_short(measured):
            return None
        self.folder.add(key, name, measured)
        return measured

    def pair(self, name: str, before: Trial, after: Trial) -> Pair | None:
        """Two trials in turns; None when there is no time for them. What they are compared with failing says
        nothing about the change, nor does a want of memory that may come from the other: then once more, and
        alone."""
        keys = trial_key(before, self.beside), trial_key(after, self.beside)
        if (known := self._known(*keys)) is not None:
            return known
        if not self._time_for(name):
            return None
        began_s = time.monotonic()
        found = self._in_turns(keys, before, after)
        if found[0].outcome == "crashed":
            self.progress(f"{name}: what it is compared with crashed ({found[0].error}); both once more")
            self._close_all_but()
            found = self._in_turns(keys, before, after)
        self._spent(began_s)
        if any(self._cut_short(measured) for measured in found):
            return None
        if found[0].outcome != "ok" or lacked_memory(found[1]):
            return self._apart(name, before, after)
        for place, measured in zip(("before", "after"), found, strict=True):
            self.folder.add(
                f"{keys[0]}>{keys[1]} {place}",
                name if place == "after" else f"{name}: before",
                measured,
                paired=True,
            )
        return Pair(found[0], found[1], paired=True)

    # ---- parts ----

    def _known(self, before: str, after: str) -> Pair | None:
        found = [self.folder.find(f"{before}>{after} {place}") for place in ("before", "after")]
        if found[0] is not None and found[1] is not None and found[0].outcome == found[1].outcome == "ok":
            return Pair(found[0], found[1], paired=True)
        alone = self.folder.find(before), self.folder.find(after)
        return (
            Pair(alone[0], alone[1], paired=False) if alone[0] is not None and alone[1] is not None else None
        )

    def _by_itself(self, trial: Trial, blocks: int) -> Measured:
        key = trial_key(trial, self.beside)
        self._close_all_but(key)
        return _blocks([self._arm(key, trial)], blocks)[0]

    def _in_turns(self, keys: tuple[str, str], before: Trial, after: Trial) -> list[Measured]:
        self._close_all_but(keys[0])
        return _blocks([self._arm(keys[0], before), self._arm(keys[1], after)], after.bounds.blocks)

    def _apart(self, name: str, before: Trial, after: Trial) -> Pair | None:
        """One after the other: what failed beside the other may run by itself."""
        self.progress(f"{name}: one failed beside the other; measuring both alone")
        began_s = time.monotonic()
        self._close_all_but()
        first = self.alone(f"{name}: before", before)
        self._close_all_but()
        second = self.alone(name, after)
        self._spent(began_s)
        return Pair(first, second, paired=False) if first is not None and second is not None else None

    def _arm(self, key: str, trial: Trial) -> Arm:
        if key not in self._alive or self._alive[key].failed is not None:
            arm = Arm(trial, self._children.take(trial.allocator))
            arm.limit_s = limit_s_of(trial, self.deadline_s)
            self._alive[key] = arm
            arm.start()
        return self._alive[key]

    def _close_all_but(self, *kept: str) -> None:
        for key in [key for key in self._alive if key not in kept]:
            self._alive.pop(key).child.close()

    def _time_for(self, name: str) -> bool:
        left_s = self.deadline_s - time.monotonic()
        # the naive state is the slowest by far, so longer ones say little about the next
        if left_s < max(1.0, self._shortest_s):
            return False
        self.progress(f"{name}: measuring; {left_s / 60:.1f} minutes left")
        return True

    def _cut_short(self, measured: Measured) -> bool:
        """Whether the end of the time, and not a hang, ended it: another time it may answer."""
        return measured.outcome == "timed_out" and time.monotonic() > self.deadline_s

    def _spent(self, began_s: float) -> None:
        self._shortest_s = min(self._shortest_s or math.inf, time.monotonic() - began_s)


def _blocks(arms: list[Arm], count: int) -> list[Measured]:
    """So many fresh blocks of each, by rounds; fewer where the difference is plain."""

    def enough() -> bool:
        each_s = [
            [block_s / arm.started["tokens_per_step"] for block_s in arm.blocks_s]
            for arm in arms
            if arm.failed is None
        ]
        return len(each_s) == 2 and plain(*each_s)

    take_turns(arms, count, enough)
    return [arm.end() for arm in arms]
