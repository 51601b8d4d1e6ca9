"""The budget: which samples to ask for, given the verdicts on those so far. Runs without torch.

    budget = Budget(questions, settings, seed=0, done=store.verdicts(source))     # each a request, its id the tag
    for completion in engine.run(budget.requests()): ...      # the engine's thread
    budget.record(question_id, sample, correct, key)          # any thread, when a verdict is in the store

Every question is asked in rounds, until it has `distinct_correct` different correct answers. When all questions have
had their own samples, what was saved goes in waves to those without a correct answer. Rounds and waves are decided
only when the one before is complete, so which (question, number) are drawn depends on the verdicts and not on the
order in which completions arrive, and a killed run draws exactly the rest. Only texts can differ: if an engine's
rounding depends on what shares its batch, a resumed run may write other texts than an unbroken one.
"""

import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from redline.config.rft import SampleConfig
from redline.engine.request import Request, consecutive

ROUNDS = 4
"""Rounds in which a question gets its own samples: fewer waste samples on easy questions, more leave slots empty."""
IDLE_S = 0.02
"""How long an idle engine waits for verdicts before it is told that there is nothing yet."""


@dataclass
class _State:
    """Where a question stands."""

    asked: int = 0
    """Samples 0 .. asked - 1 have been asked for."""
    open: int = 0
    """How many of these have no verdict yet."""
    correct: int = 0
    keys: set[str] = field(default_factory=set)
    known: dict[int, tuple[bool, str | None]] = field(default_factory=dict)
    """Verdicts of an earlier attempt on samples not asked for yet."""


class Budget:
    def __init__(
        self,
        questions: Sequence[Request],
        settings: SampleConfig,
        *,
        seed: int,
        done: Iterable[tuple[str, int, bool, str | None]] = (),
    ) -> None:
        self._questions = {question.tag: question for question in questions}
        self._settings, self._seed = settings, seed
        self._states = {question.tag: _State() for question in questions}
        self._changed = threading.Condition()
        self._ready: deque[Request] = deque()
        self._in_engine = 0
        self._waiting = len(questions)
        """Questions that are not done with the present phase."""
        self._saved = 0
        self._own = True
        """Whether this is the phase in which every question gets its own samples; the waves come after it."""
        self.stopped = False
        for question, sample, correct, key in done:
            if question in self._states:
                self._states[question].known[sample] = (correct, key)
        with self._changed:
            for question in self._states:
                self._go_on(question)

    # ---- the engine's side ----

    def requests(self) -> Iterator[Request | None]:
        """Requests until the budget is spent; None while it waits for verdicts."""
        while True:
            with self._changed:
                if not self._ready and not self.finished and not self._in_engine:
                    self._changed.wait(IDLE_S)
                if self.finished:
                    return
                request = self._ready.popleft() if self._ready else None
                if request is not None:
                    self._in_engine += request.samples
            yield request

    def arrived(self) -> None:
        """A completion has left the engine; its verdict will follow."""
        with self._changed:
            self._in_engine -= 1

    # ---- the scorer's side ----

    def record(self, verdicts: Iterable[tuple[str, int, bool, str | None]]) -> None:
        """Take in verdicts that are in the store: (question, number, correct, reasoning key)."""
        with self._changed:
            for question, _, correct, key in verdicts:
                state = self._states[question]
                self._count(state, correct, key)
                state.open -= 1
                if state.open == 0:
                    self._go_on(question)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    @property
    def finished(self) -> bool:
        return self.stopped or self._waiting == 0

    @property
    def questions_done(self) -> int:
        """Questions that have had their own samples."""
        return len(self._states) - self._waiting if self._own else len(self._states)

    def samples_left(self) -> int:
        """The most samples that may still be drawn."""
        own = self._settings.samples_per_question
        with self._changed:
            open_ = sum(state.open for state in self._states.values())
            if self._own:
                saved = self._saved if self._settings.spend_rest else 0
                return open_ + saved + sum(own - state.asked for state in self._states.values() if state.open)
            return open_ + (self._saved if self._waiting else 0)

    # ---- decisions; all with the lock held ----

    def _go_on(self, question: str) -> None:
        """All of the question's samples have verdicts: ask for its next round, or count it as done."""
        state, own = self._states[question], self._settings.samples_per_question
        if self._own:
            enough = self._settings.distinct_correct
            size = own if enough is None else -(-own // ROUNDS)
            while state.open == 0 and state.asked < own and (enough is None or len(state.keys) < enough):
                self._ask(question, min(size, own - state.asked))
            if state.open > 0:
                return
            self._saved += own - state.asked
        self._waiting -= 1
        if self._waiting == 0:
            self._own = False
            self._wave()

    def _wave(self) -> None:
        """Share half of what is left among the questions without a correct answer, until there is something to draw."""
        settings = self._settings
        most = int(settings.max_factor * settings.samples_per_question)
        while settings.spend_rest and self._saved > 0 and self._waiting == 0:
            hard = [id_ for id_, state in self._states.items() if not state.correct and state.asked < most]
            if not hard:
                return
            share = max(-(-settings.samples_per_question // ROUNDS), self._saved // (2 * len(hard)))
            for question in hard:
                state = self._states[question]
                count = min(share, most - state.asked, self._saved)
                if count > 0:
                    self._saved -= count
                    self._ask(question, count)
                    self._waiting += state.open > 0

    def _ask(self, question: str, count: int) -> None:
        """Count the verdicts of an earlier attempt on the next `count` samples, and request the others."""
        state = self._states[question]
        first, state.asked = state.asked, state.asked + count
        missing = []
        for sample in range(first, state.asked):
            if (known := state.known.pop(sample, None)) is not None:
                self._count(state, *known)
            else:
                missing.append(sample)
        state.open += len(missing)
        asked = replace(self._questions[question], seed=zlib.crc32(f"{self._seed}/{question}".encode()))
        for start, samples in consecutive(missing):
            self._ready.append(replace(asked, samples=samples, first_sample=start))

    @staticmethod
    def _count(state: _State, correct: bool, key: str | None) -> None:
        state.correct += correct
        if correct and key is not None:
            state.keys.add(key)
