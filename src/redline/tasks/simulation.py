"""Simulation: follow steps in the head. Count, sort and update a variable, or say what a function of CRUXEval
returns (`cruxeval.jsonl`: code, input, output).

An answer is right if it is the same Python or JSON value; capitals matter, spaces between values do not. In
GURU's CodeI/O the answer is a fenced JSON block, so a completion without a marked answer may end with one.
"""

import functools
import json
import random
from collections.abc import Mapping
from typing import Any

from redline.tasks import answers
from redline.tasks.domain import Drawn, domain, split_of
from redline.tasks.task import Question

FILES = dict.fromkeys(("train", "valid", "test"), ("cruxeval.jsonl",))
EXAMPLES = (
    ("x is 3. Add 4 to x. What is x?", "3 + 4 = <answer>7</answer>"),
    ("How many times is 2 in 2 5 2?", "<answer>2</answer>"),
    ("Sort 7 1 4.", "<answer>1 4 7</answer>"),
)


def draw(randomness: random.Random) -> Drawn:
    kind = randomness.choice(("update", "count", "sort"))
    if kind == "update":
        x, y = randomness.randint(1, 20), randomness.randint(1, 9)
        add = x <= y or randomness.random() < 0.5
        text = f"x is {x}. {f'Add {y} to x' if add else f'Take {y} from x'}. What is x?"
        result = str(x + y if add else x - y)
        solution = f"{x} {'+' if add else '-'} {y} = <answer>{result}</answer>"
        return Drawn(text, result, solution, split_of(text), kind)
    numbers = [randomness.randint(1, 9) for _ in range(randomness.randint(3, 5))]
    listed = " ".join(map(str, numbers))
    if kind == "count":
        digit = randomness.choice(numbers)
        text, result = f"How many times is {digit} in {listed}?", str(numbers.count(digit))
    else:
        text, result = f"Sort {listed}.", " ".join(map(str, sorted(numbers)))
    # Orders of the same numbers are the same question to a counter and nearly so to a sorter.
    return Drawn(text, result, f"<answer>{result}</answer>", split_of(f"{kind} {sorted(numbers)}"), kind)


def find(completion: str) -> str | None:
    """The marked answer, or what a last JSON block gives as `output` or `input` (the block if it has neither)."""
    if (answer := answers.find(completion)) is not None:
        return answer
    try:
        found = json.loads(answers.find_block(completion) or "")
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        found = found.get("output", found.get("input", found))
    return json.dumps(found)


def row(name: str, fields: Mapping[str, Any]) -> Question | None:
    match fields:
        case {"code": str(code), "input": str(given), "output": str(result)}:
            text = f"{code}\n\nWhat does f({given}) return? Answer with a Python value."
            return Question(name, text, result, f"<answer>{result}</answer>")
    return None


make = domain(
    "simulation",
    about="follow steps: count, sort, update a variable; or CRUXEval and GURU files",
    draw=draw,
    score=answers.scored_by(functools.partial(answers.same, fold=False), find),
    instruction=answers.INSTRUCTION.format(7),
    examples=EXAMPLES,
    files=FILES,
    row=row,
)
