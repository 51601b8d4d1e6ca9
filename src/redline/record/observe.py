"""The protocol for watching a run: the live view, the exporters and a user's own code.

    class Printing:
        def metrics(self, line): print(line["loss"])
        def event(self, kind, facts): print(kind, facts)
        def close(self): ...

`metrics` gets every line of metrics.jsonl; during sampling, lines without a step (SAMPLING names their keys).
`event` gets what events.jsonl gets, and two more kinds:

- `stage` when a run with several parts (RFT: test, sample, train, test) begins one: `name`, `title`, and the size
  of the part as `total_steps` or `questions`;
- `note`, with `text`: something a person should know and the record need not keep.

The loop makes one call at a time, but not always from the same thread. A call must return immediately and must not
raise: watching must not cost the run.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

SAMPLING = (
    "questions", "questions_done", "samples", "samples_left", "correct", "cut", "tokens_per_s", "elapsed_s", "left_s",
    "memory_bytes", "workers",
)  # fmt: skip
"""Keys of a line about the progress of sampling; None for what is not known yet. `workers`: the samples a second of each,
by name, if they are drawn on several machines."""


class Observer(Protocol):
    def metrics(self, line: dict[str, Any]) -> None: ...

    def event(self, kind: str, facts: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Observers:
    """Several observers as one, called in their order, by one thread at a time."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.observers = tuple(observers)
        self._lock = threading.RLock()

    def metrics(self, line: dict[str, Any]) -> None:
        with self._lock:
            for observer in self.observers:
                observer.metrics(line)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        with self._lock:
            for observer in self.observers:
                observer.event(kind, facts)

    def close(self) -> None:
        with ExitStack() as stack:  # one that fails to close does not keep the others open
            for observer in self.observers:
                stack.callback(observer.close)
