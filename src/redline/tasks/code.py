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
from redline.tasks.domain import SPLITS, Drawn, domain, split_of
from redline.tasks.sandbox import run
from redline.tasks.task import Question, Verdict

MOST_INPUTS = 16
"""Inputs that are tried of a problem with more: each is a run, and a run costs about 50 ms of processor time."""
TOLERANCE = 1e-6
"""By which numbers in a program's output may differ, as GURU has it."""
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


def score(question: Question, completion: str) -> Verdict:
    program = answers.find_block(completion)
    if program is None:
        return answers.judged(None, 0)
    tests = json.loads(question.answer)
    passed = _calls_pass(program, tests) if "calls" in tests else _inputs_pass(program, tests)
    return answers.judged(program, passed)


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


def from_asserts(source: str, setup: str = "") -> str | None:
    """The reference answer that a test program of asserts stands for, top-level or in a `check(candidate)` that
    is called at the end; None where a test does more than compare a call with a value."""
    try:
        return _from_asserts(ast.parse(source).body, setup)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _from_asserts(body: list[ast.stmt], setup: str) -> str:
    calls: list[str] = []
    values: list[str] = []
    candidate = "_"
    for statement in body:
        match statement:
            case ast.Assert(test=test):
                call, value = _halves(test)
                calls.append(ast.unparse(call))
                values.append(repr(value_of(value)))
            case ast.FunctionDef(args=ast.arguments(args=names), body=inner) if len(names) < 2:
                inside = json.loads(_from_asserts(inner, ""))
                calls, values = calls + inside["calls"], values + inside["values"]
                candidate = names[0].arg if names else "_"
            case ast.Expr(value=ast.Call(args=[tested])) if calls:
                calls = [f"(lambda {candidate}: {call})({ast.unparse(tested)})" for call in calls]
            case (
                ast.Expr(value=ast.Call(args=[]))
                | ast.Import()
                | ast.ImportFrom()
                | ast.Expr(value=ast.Constant())
            ):
                pass
            case ast.Assign(targets=[ast.Name(id="METADATA")]):
                pass
            case _:
                raise ValueError(f"not a plain test: {ast.unparse(statement)[:80]}")
    return json.dumps({"setup": setup, "calls": calls, "values": values})


def _halves(test: ast.expr) -> tuple[ast.expr, ast.expr]:
    """What a test runs, and the value that it wants."""
    match test:
        case ast.Compare(left=call, ops=[ast.Eq() | ast.Is()], comparators=[value]):
            return call, value
        case ast.Call() | ast.UnaryOp(op=ast.Not()):
            return ast.Call(ast.Name("bool"), [test], []), ast.Constant(True)
    raise ValueError(f"not a comparison: {ast.unparse(test)[:80]}")


def value_of(expression: ast.expr) -> Any:
    """The value of a literal, or of a set, tuple or list made from one."""
    match expression:
        case ast.Call(func=ast.Name(id="set" | "tuple" | "list" as kind), args=[inner], keywords=[]):
            return {"set": set, "tuple": tuple, "list": list}[kind](value_of(inner))
    return ast.literal_eval(expression)


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
