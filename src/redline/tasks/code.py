"""Code: write a small Python function, or the problems of MBPP (`mbpp.jsonl`: text, test_list, task_id).

The program is the last fenced block of a completion. It is right if it passes all tests, and runs in the sandbox
(`sandbox.py`) without ever meeting an expected result: from `assert f(2) == 4` the sandbox gets `f(2)`, and what
it prints is compared with 4 out here. A reference answer is JSON, of one of two forms:

    {"setup": "", "calls": ["f(2)"], "values": ["4"]}         # Python expressions and their values
    {"inputs": ["2\n"], "outputs": ["4\n"]}                   # standard input and output
"""

import ast
import json
import random
from collections.abc import Mapping
from typing import Any

from redline.tasks import answers
from redline.tasks.asserts import from_asserts, value_of
from redline.tasks.domain import SPLITS, Drawn, domain, split_of
from redline.tasks.sandbox import run
from redline.tasks.task import Question

MOST_INPUTS = 16
"""Inputs to try from a problem that has more: each is a run, and a run costs about 50 ms of processor time."""
TOLERANCE = 1e-6
"""How much numbers in a program's output may differ, as GURU has it."""
FILES = dict.fromkeys(SPLITS, ("mbpp.jsonl",))
EXAMPLES = (
    ("Write a Python function f(x) that returns x plus 3.", "```python\ndef f(x):\n    return x + 3\n```"),
    ("Write a Python function f(x) that returns x times 5.", "```python\ndef f(x):\n    return x * 5\n```"),
)
_KINDS = {
    "add": ("x plus {n}", "x + {n}"),
    "multiply": ("x times {n}", "x * {n}"),
    "subtract": ("{n} minus x", "{n} - x"),
    "remainder": ("the remainder of x divided by {n}", "x % {n}"),
    "list": ("a list with {n} copies of x", "[x] * {n}"),
    "larger": ("the larger of x and {n}", "max(x, {n})"),
}
_SEPARATOR = "\x1e"


def draw(randomness: random.Random) -> Drawn:
    kind, number = randomness.choice(list(_KINDS)), randomness.randint(2, 50)
    words, expression = (text.format(n=number) for text in _KINDS[kind])
    calls = sorted(randomness.sample(range(100), 4))
    values = [repr(eval(expression, {"x": x, "max": max})) for x in calls]
    answer = json.dumps({"setup": "", "calls": [f"f({x})" for x in calls], "values": values})
    solution = f"```python\ndef f(x):\n    return {expression}\n```"
    text = f"Write a Python function f(x) that returns {words}."
    return Drawn(text, answer, solution, split_of(f"{kind} {number}"), kind)


def passes(program: str, expected: str) -> bool:
    tests = json.loads(expected)
    return _calls_pass(program, tests) if "calls" in tests else _inputs_pass(program, tests)


score = answers.scored_by(passes, answers.find_block)


def _calls_pass(program: str, tests: Mapping[str, Any]) -> bool:
    """All calls in one run; their values are written at its end, behind separators, after all that it printed."""
    values = ", ".join(f"repr({call})" for call in tests["calls"])
    write = f"_values = [{values}]\nprint({_SEPARATOR!r} + {_SEPARATOR!r}.join(_values))"
    ran = run(f"{tests['setup']}\n{program}\n{write}")
    if ran.reason is not None:
        return False
    said = ran.output.split(_SEPARATOR)[-len(tests["values"]) :]
    try:
        found = [ast.literal_eval(text.strip()) for text in said]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return found == [value_of(ast.parse(text, mode="eval").body) for text in tests["values"]]


def _inputs_pass(program: str, tests: Mapping[str, Any]) -> bool:
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))[:MOST_INPUTS]
    for given, wanted in pairs:
        ran = run(program, given)
        if ran.reason is not None or not _same_output(ran.output, wanted):
            return False
    return True


def _same_output(output: str, wanted: str) -> bool:
    """Line by line and word by word; numbers may differ a little, and yes is YES."""
    lines, wanted_lines = ([line.split() for line in text.strip().splitlines()] for text in (output, wanted))
    return [len(line) for line in lines] == [len(line) for line in wanted_lines] and all(
        a.casefold() == b.casefold() or _close(a, b)
        for line, wanted_line in zip(lines, wanted_lines, strict=True)
        for a, b in zip(line, wanted_line, strict=True)
    )


def _close(a: str, b: str) -> bool:
    try:
        return abs(float(a) - float(b)) <= TOLERANCE
    except ValueError:
        return False


def row(name: str, fields: Mapping[str, Any]) -> Question | None:
    match fields:
        case {"text": str(text), "test_list": [str(), *_] as tests, "task_id": int(number)}:
            setup = str(fields.get("test_setup_code", ""))
            if (answer := from_asserts("\n".join(tests), setup)) is None:
                return None
            read = json.loads(answer)
            # The name and the shape of the arguments have to be known; the other tests stay unseen.
            example = f"For example, {read['calls'][0]} is {read['values'][0]}."
            split = "valid" if 510 < number <= 600 else "test" if 10 < number <= 510 else "train"
            solution = f"```python\n{fields['code']}\n```".replace("\r", "") if "code" in fields else ""
            return Question(name, f"{text}\n{example}", answer, solution, {"split": split})
    return None


make = domain(
    "code",
    about="write a Python function, tested in a sandbox: small ones, or MBPP and GURU files",
    draw=draw,
    score=score,
    instruction="Answer with one block of Python, like ```python\ndef f(x):\n    return x\n```",
    examples=EXAMPLES,
    files=FILES,
    row=row,
    end="",
    runs_code=True,
)
