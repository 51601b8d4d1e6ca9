"""What a task is: questions, a prompt, a score. A new one is a file of 30 lines with a function that returns
a `Task` (docs/tasks.md).

    task = load_task("units")                                  # redline.tasks.registry
    question = task.questions("valid", 1, 0)[0]                # split, how many (None: all), seed
    verdict = task.score(question, "... <answer>120</answer>")

`prompt_text` is for models that only continue text, `prompt_messages` for those with a chat template. Score
untrusted or slow scorers through `redline.tasks.pool`. Left out on purpose: tokens and templates (the
engine's).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from redline.errors import ConfigError, DataError
from redline.record.files import parse_json, read_text

STOP = "\n\nQuestion:"
"""Where a model that only continues text has finished its answer and turns to another question."""


class Question(NamedTuple):
    """One question. A plain tuple: hundreds of thousands travel to the scoring processes as JSON."""

    id: str
    """Unique within its split, and the same whatever the seed."""
    text: str
    answer: str
    """The reference answer, as the scorer reads it."""
    solution: str = ""
    """A completion that scores as correct: what plain supervised fine-tuning learns. Empty: none is known."""
    meta: Mapping[str, Any] = {}
    """Facts about the question (JSON values), for reports by kind."""


class Verdict(NamedTuple):
    """What the scorer says about one completion."""

    correct: bool
    parsed: bool
    """An answer could be read from the completion, right or wrong."""
    reward: float
    answer: str | None
    """The answer as it stood in the completion."""
    reason: str | None = None
    """Why the scorer itself failed; None: it did not."""


Score = Callable[[Question, str], Verdict]
"""A task's scorer: the verdict on a completion."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions and their scorer. The functions run in other processes: no global state."""

    name: str
    about: str
    questions: Callable[[str, int | None, int], list[Question]]
    """(split, count or None for all, seed) -> questions, the same for the same arguments; a larger count
    begins with a smaller one. Tasks that read files keep their order and take no notice of the seed."""
    score: Score
    instruction: str = ""
    """What to do, and the format of the answer."""
    examples: tuple[tuple[str, str], ...] = ()
    """Few-shot examples: a question and a good completion."""
    end: str = ""
    """Where an answer is complete, such as a closing tag; what follows is neither scored nor learnt. Empty: nowhere."""
    runs_code: bool = False
    """The scorer runs generated code in the sandbox, and so may start processes."""

    def answer_of(self, completion: str) -> str:
        """The completion up to where the answer is complete."""
        before, found, _ = completion.partition(self.end) if self.end else (completion, "", "")
        return before + found

    def finished(self, completion: str, finish: str) -> bool:
        """Whether the answer is whole: the model ended it, or it reached `end`, before its tokens ran out (finish
        `length`). What was cut may read as a correct answer and teaches a model never to end one."""
        return finish != "length" or bool(self.end and self.end in completion)


def prompt_text(task: Task, question: Question, shots: int | None = None) -> str:
    """The question for a model that continues text, after the first `shots` examples (None: all)."""
    parts = [task.instruction] if task.instruction else []
    parts += [f"Question: {asked}\nAnswer: {completion}" for asked, completion in task.examples[:shots]]
    return "\n\n".join([*parts, f"Question: {question.text}\nAnswer:"])


def prompt_messages(task: Task, question: Question, shots: int | None = None) -> list[dict[str, str]]:
    """The question as chat messages: the instruction as system, the examples as earlier turns."""
    messages = [{"role": "system", "content": task.instruction}] if task.instruction else []
    for asked, completion in task.examples[:shots]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": completion}]
    return [*messages, {"role": "user", "content": question.text}]


def shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Accuracy and answer rate (an answer could be read), each with the ends of its 95% interval."""
    n = len(verdicts)
    if not n:
        raise DataError("a share needs at least one verdict, got none: score some completions first")
    found: dict[str, float] = {"n": n}
    for name, count in (
        ("accuracy", sum(verdict.correct for verdict in verdicts)),
        ("answer_rate", sum(verdict.parsed for verdict in verdicts)),
    ):
        low, high = interval_95(count / n, n)
        found |= {name: count / n, f"{name}_low": low, f"{name}_high": high}
    return found


def interval_95(share: float, n: int) -> tuple[float, float]:
    """Wilson's interval for a share of n independent trials; unlike the plain one it holds near 0 and 1."""
    z = 1.959964
    centre, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def read_split(
    task: str,
    data: str | None,
    split: str,
    count: int | None,
    *,
    suffix: str,
    row: Callable[[str, Any], Question | None],
    needs: str,
) -> list[Question]:
    """The first questions of the split's file, JSON lines or one list, in the folder that the user named. `row` makes a
    question of an id and a row; one that it cannot read is refused, with what it needs."""
    if data is None:
        raise ConfigError(f"task {task} reads files: name the folder of train{suffix} with --data FOLDER")
    path = Path(data) / f"{split}{suffix}"
    try:
        text = read_text(path)
    except DataError as error:
        there = ", ".join(sorted(p.stem for p in Path(data).glob(f"*{suffix}"))) or f"no {suffix} file"
        raise DataError(f"task {task} has no split {split!r} here: {error}; {data} holds {there}") from error
    rows = json_lines(str(path), text) if suffix == ".jsonl" else parse_json(text, path, list)
    found = []
    for index, fields in enumerate(rows[: at_most(count)]):
        if (question := row(f"{split}-{index}", fields)) is None:
            raise DataError(f"{path}, row {index}: {needs}, got {json.dumps(fields)[:100]}")
        found.append(question)
    return found


def json_lines(name: str, text: str) -> list[dict[str, Any]]:
    """The objects of a JSONL text without its blank lines; a line that is not an object is refused."""
    lines = enumerate(text.split("\n"), start=1)
    return [parse_json(line, f"{name}, line {number}", dict) for number, line in lines if line.strip()]


def at_most(count: int | None) -> int | None:
    """A count of questions, checked: None for all, else at least 1."""
    if count is not None and count < 1:
        raise ConfigError(f"the number of questions must be at least 1, got {count}")
    return count
