"""List the tasks, print questions of one with their reference answers, or score completions.

redline tasks units --split valid --count 5
redline tasks gsm8k --data gsm8k/ --split test --count 5 --json
redline tasks units --score answers.jsonl
redline tasks my_task.py:make --count 3

Answers are JSON lines with `completion` and either `id` or `question`. A path runs the code in that file.
"""

import argparse
from typing import Any

from redline.cli.options import answer, print_json
from redline.errors import ConfigError, DataError
from redline.machine.facts import cpu_cores
from redline.record.files import read_text
from redline.record.units import format_share, visible
from redline.report.grid import show
from redline.tasks.pool import Pool
from redline.tasks.registry import TASKS, load_task
from redline.tasks.task import Question, Task, json_lines, prompt_text, shares

ARGUMENTS = """
[TASK]          a task's name, or a file of your own and its function: my_task.py:make
--data FOLDER   read the questions from files in this folder, one a split
--split SPLIT   train, valid or test (default valid)
--count N       the first N questions (default: 10, or all when scoring)
--seed N        another draw of generated questions (default: 0); files keep their order
--score FILE    score the completions in this .jsonl file: accuracy and answer rate
@JSON
"""


def run(options: argparse.Namespace) -> None:
    if options.task is None:
        for name in ("data", "count", "seed", "score"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name} needs a task: one of {', '.join(TASKS)}, or my_task.py:make")
        about = {name: make(None).about for name, make in TASKS.items()}
        rows = [{"name": name, "about": text} for name, text in about.items()]
        answer(options, rows, lambda: show(("", ""), list(about.items())))
        return
    if options.seed is not None and options.data is not None:
        raise ConfigError("--seed draws generated questions, but files keep their order: leave out one")
    task = load_task(options.task, options.data)
    count = 10 if options.count is None and options.score is None else options.count
    questions = task.questions(options.split, count, options.seed or 0)
    if options.score is not None:
        _score(options, task, questions)
    elif options.json:
        print_json([_shown(question, prompt_text(task, question)) for question in questions])
    else:
        show(("id", "answer", "question"), [(q.id, q.answer, q.text) for q in questions])


def _shown(question: Question, prompt: str) -> dict[str, Any]:
    named = question._asdict()
    return {"id": named.pop("id"), "question": named.pop("text"), **named, "prompt": prompt}


def _score(options: argparse.Namespace, task: Task, questions: list[Question]) -> None:
    items = [(question, task.answer_of(said)) for question, said in _answers(options, questions)]
    # starting a worker costs as much as thousands of cheap verdicts
    workers = min(cpu_cores(), 1 + len(items) // 1000)
    with Pool(options.task, options.data, workers=workers) as pool:
        verdicts = pool.score(items)
    failures = [verdict.reason for verdict in verdicts if verdict.reason is not None]
    known, asked = shares(verdicts), len({question.id for question, _ in items})
    found: dict[str, Any] = {"completions": len(items), "questions": asked}
    found |= {name: known[name] for name in ("accuracy", "answer_rate")} | {"failures": failures}
    if options.json:
        print_json(found)
        return
    print(f"accuracy     {format_share(known['accuracy'])}")
    print(f"answer rate  {format_share(known['answer_rate'])}")
    print(f"{len(items):,} completions of {asked:,} questions, {options.split} split")
    if failures:
        first = visible(failures[0])
        print(f"the scorer failed on {len(failures):,} of them, which count as wrong; the first: {first}")


def _answers(options: argparse.Namespace, questions: list[Question]) -> list[tuple[Question, str]]:
    """The completions of the answers file, each with its question."""
    rows = json_lines(str(options.score), read_text(options.score))
    by = {"id": {q.id: q for q in questions}, "question": {q.text: q for q in questions}}
    items = []
    for place, row in enumerate(rows, start=1):
        where, key = f"{options.score}, answer {place}", "id" if "id" in row else "question"
        if not isinstance(row.get("completion"), str) or not isinstance(row.get(key), str):
            raise DataError(
                f"{where}: needs `completion` and either `id` or `question` as text, got {list(row)}"
            )
        if (question := by[key].get(row[key])) is None:
            among = f"the {len(questions):,} questions of the {options.split} split"
            raise DataError(f"{where}: no {key} {row[key]!r} among {among}")
        items.append((question, row["completion"]))
    if not items:
        raise DataError(f"{options.score} is empty: it needs JSON lines with completion and id or question")
    return items
