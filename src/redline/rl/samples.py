"""What a rollout draws, and where it is kept: RUN/samples/step-00000012.jsonl, one line per question with all of
its answers.

    kept = Samples(run)
    groups = kept.of(12)                   # what an attempt that was killed had drawn already
    kept.add(group)                        # appended as soon as its answers are scored

A line holds the texts with their rewards for people, and the tokens with the engine's log-probabilities (base64 of
int32 and float32, some 11 bytes a token) for a run that resumes before the next checkpoint.
"""

import base64
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redline.record.files import storage_errors, sync_path
from redline.record.run import LineWriter, cut_torn_line, read_lines
from redline.train.places import step_name

_ARRAYS = {"tokens": np.int32, "logprobs": np.float32}
Key = tuple[str, int]
"""A question of a step: its domain, and its number there."""


@dataclass(frozen=True)
class Sample:
    text: str
    reward: float
    """What the scorer gave; 0 where it failed."""
    correct: bool
    parsed: bool
    """An answer could be read from the text, right or wrong."""
    cut: bool
    """Its tokens ran out."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The engine's, of each token."""
    reason: str | None = None
    """Why the scorer failed."""


@dataclass(frozen=True)
class Group:
    """All answers to one question of a step."""

    step: int
    domain: str
    number: int
    """The question's number in its domain, in this step."""
    id: str
    """The question's id in its task."""
    question: str
    prompt: tuple[int, ...]
    version: int
    """Version of the weights that drew it: how many steps they had learnt from."""
    answers: tuple[Sample, ...]

    @property
    def key(self) -> Key:
        return self.domain, self.number


class Samples:
    """The folder of a run's samples; without a run nothing is kept."""

    def __init__(self, run: Path | None) -> None:
        self.folder = run / "samples" if run is not None else None
        if self.folder is not None:
            with storage_errors("samples", self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    def of(self, step: int) -> list[Group]:
        """What was drawn for a step, by this attempt or one before it."""
        if (path := self._path(step)) is None or not path.exists():
            return []
        cut_torn_line(path)
        return [read_group(line) for line in read_lines(path)]

    def add(self, groups: Sequence[Group]) -> None:
        if not groups or (path := self._path(groups[0].step)) is None:
            return
        with closing(LineWriter(path)) as lines:
            for group in groups:
                lines.append(write_group(group))

    def sync(self, step: int) -> None:
        """Have what was drawn survive a power cut."""
        if (path := self._path(step)) is not None and path.exists():
            with storage_errors("samples", path.parent):
                sync_path(path)

    def _path(self, step: int) -> Path | None:
        return self.folder / f"{step_name(step)}.jsonl" if self.folder is not None else None


def write_group(group: Group) -> dict[str, Any]:
    """The group as JSON. Not `asdict`, which copies every number: it took 3 ms per group of 16 answers."""
    answers = [
        vars(sample) | {name: _packed(getattr(sample, name), kind) for name, kind in _ARRAYS.items()}
        for sample in group.answers
    ]
    return vars(group) | {"prompt": _packed(group.prompt, np.int32), "answers": answers}


def read_group(line: dict[str, Any]) -> Group:
    answers = tuple(
        Sample(**sample | {name: _unpacked(sample[name], kind) for name, kind in _ARRAYS.items()})
        for sample in line["answers"]
    )
    return Group(**line | {"prompt": _unpacked(line["prompt"], np.int32), "answers": answers})


def _packed(numbers: Sequence[float], kind: type) -> str:
    return base64.b64encode(np.array(numbers, dtype=kind).tobytes()).decode()


def _unpacked(text: str, kind: type) -> tuple[Any, ...]:
    return tuple(np.frombuffer(base64.b64decode(text), dtype=kind).tolist())
