"""A domain of reasoning as a task: questions drawn by a generator, or read from files.

    make = domain("tables", about="…", draw=draw, score=score, files=FILES, row=row, …)

One small file makes a domain (docs/tasks.md has an example): `draw` makes a question from a random generator,
`score` judges a completion, `row` turns a row of the domain's public files into a question. Files in GURU's
format are read by `guru.py`. A question belongs to one split whatever the seed, because a hash of what it asks
decides; where files are read, a training question that is a validation question as well is left out.
"""

import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from redline.errors import ConfigError, DataError, nearest
from redline.tasks.answers import END
from redline.tasks.guru import guru_files, guru_question
from redline.tasks.task import Question, Score, Task, at_most

SPLITS = ("train", "valid", "test")
UNBOUNDED = 1000
"""Questions of a generated split that count None gives: a generator has no last one."""
_PATIENCE = 20_000
"""Draws in a row that bring nothing new, after which a split counts as used up."""


class Drawn(NamedTuple):
    """One question as a generator draws it."""

    text: str
    answer: str
    solution: str
    """A completion that scores as correct."""
    split: str
    """`split_of` what is asked, whatever the words and their order."""
    kind: str


Draw = Callable[[random.Random], Drawn]
Row = Callable[[str, Mapping[str, Any]], Question | None]
"""(id, row of a file) -> question; None leaves the row out."""


def domain(
    name: str,
    *,
    about: str,
    draw: Draw,
    score: Score,
    instruction: str,
    examples: tuple[tuple[str, str], ...],
    files: Mapping[str, tuple[str, ...]],
    row: Row,
    open_files_score: Callable[[], Score] | None = None,
    **more: Any,
) -> Callable[[str | None], Task]:
    """The function that makes the task. `files`: patterns of file names by split; a file for training and another
    split is divided between them by a hash of its questions. `open_files_score` makes the score of questions from
    files, where it is another one. `more`: further fields of the Task."""

    def make(data: str | None) -> Task:
        guru = guru_files(Path(data), name) if data is not None else {}
        found, read = (guru, functools.partial(guru_question, name)) if guru else (files, row)

        def questions(split: str, count: int | None, seed: int) -> list[Question]:
            check_split(name, split)
            if data is None:
                return generate(name, draw, split, count, seed)
            return read_split_files(name, Path(data), split, found, read)[: at_most(count)]

        return Task(
            name=name,
            about=about,
            questions=questions,
            score=open_files_score() if data is not None and open_files_score else score,
            instruction="" if guru else instruction,  # its prompts say in which form to answer
            examples=examples if data is None else (),
            **{"end": END, **more},
        )

    return make


def check_split(task: str, split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"{task} has the splits {', '.join(SPLITS)}; got {split!r}{nearest(split, SPLITS)}")


def generate(name: str, draw: Draw, split: str, count: int | None, seed: int) -> list[Question]:
    """Distinct questions of one split, the same for the same seed; a larger count begins with a smaller one."""
    randomness = random.Random(seed)
    wanted = at_most(count) or UNBOUNDED
    found: dict[str, Question] = {}
    missed = 0
    while len(found) < wanted and missed < _PATIENCE:
        text, answer, solution, home, kind = draw(randomness)
        if text in found or home != split:
            missed += 1
            continue
        missed = 0
        number = hashlib.sha256(text.encode()).hexdigest()[:12]
        found[text] = Question(f"{split}-{number}", text, answer, solution, {"kind": kind})
    if count is not None and len(found) < count:
        raise ConfigError(
            f"the {split} split of {name} has about {len(found):,} questions; got a count of {count:,}"
        )
    return list(found.values())


def split_of(key: str) -> str:
    """Eight tenths of the keys to train on, one each to validate and to test."""
    return {0: "valid", 1: "test"}.get(int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10, "train")


def read_split_files(
    name: str, folder: Path, split: str, files: Mapping[str, tuple[str, ...]], row: Row
) -> list[Question]:
    """The questions of a split from the files of a folder, in their order."""
    questions = list(_read(folder, split, files, row))
    if not questions:
        wanted = ", ".join(files.get(split, ())) or "no file at all"
        raise DataError(f"task {name} reads {wanted} for split {split}; {folder} holds none with questions")
    if split != "train":
        return questions
    held_out = {_words(question) for question in _read(folder, "valid", files, row)}
    return [question for question in questions if _words(question) not in held_out]


def _words(question: Question) -> str:
    return " ".join(question.text.casefold().split())


def _read(folder: Path, split: str, files: Mapping[str, tuple[str, ...]], row: Row) -> Iterator[Question]:
    for pattern in files.get(split, ()):
        shared = pattern in files["train"] and any(pattern in files.get(other, ()) for other in SPLITS[1:])
        for path in sorted(folder.glob(pattern)):
            for number, fields in enumerate(_objects(path)):
                question = row(f"{path.name.partition('.')[0]}-{number}", fields)
                if question is None:
                    continue
                if not shared or question.meta.get("split", split_of(question.text)) == split:
                    yield question


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. A list of JSON may hold something else besides objects, a file of lines may not."""
    # Imported only here: it loads numpy and tokenizers, which would count against a scorer's memory limit.
    from redline.data.examples import rows_of

    for number, row in enumerate(rows_of(path), start=1):
        if isinstance(row, dict):
            yield row
        elif path.suffix != ".json":
            wrong = row if isinstance(row, Exception) else f"got {type(row).__name__}"
            raise DataError(f"{path}, row {number}: not a JSON object ({wrong})")
