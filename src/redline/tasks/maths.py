"""Maths: rates, short sums, differences and products, or competition problems from JSONL files with `problem` (or
`question`) and `answer`, such as MATH.

Numbers are compared as numbers. Anything else (fractions, roots, intervals, sets, LaTeX) is compared by
math-verify, an extra; files therefore need it, generated questions do not. Its own time limits are switched
off: they use a signal that only reaches a main thread, and the scoring pool kills what takes too long.
"""

import functools
import logging
import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from redline.errors import need
from redline.tasks import answers
from redline.tasks.domain import Drawn, domain, split_of
from redline.tasks.task import Question, Score
from redline.tasks.units import whole_conversions

FILES = {"train": ("train.jsonl",), "valid": ("validation.jsonl",), "test": ("test.jsonl", "math500.jsonl")}
EXAMPLES = (
    ("1 week is 7 days. How many days is 3 week?", "3 * 7 = <answer>21</answer>"),
    ("What is 6 * 15?", "6 * 15 = <answer>90</answer>"),
    ("What is 41 + 7?", "41 + 7 = <answer>48</answer>"),
)


def draw(randomness: random.Random) -> Drawn:
    """A rate ("1 hour is 60 min. How many min is 7 hour?"), a product of 2 to 10 with up to 20, a sum or a
    difference of two numbers up to 40. The rates suit models that know little else, the shipped one for example."""
    if randomness.random() < 0.5:
        (number, source, target), result, split = randomness.choice(whole_conversions())
        factor = f"{result / number:g}"
        text = f"1 {source} is {factor} {target}. How many {target} is {number} {source}?"
        return Drawn(text, str(result), f"{number} * {factor} = <answer>{result}</answer>", split, "rate")
    sign, kind = randomness.choice((("*", "product"), ("+", "sum"), ("-", "difference")))
    a, b = (randomness.randint(2, most) for most in ((10, 20) if sign == "*" else (40, 40)))
    if sign == "-" and a < b:
        a, b = b, a
    result = {"*": a * b, "+": a + b, "-": a - b}[sign]
    solution = f"{a} {sign} {b} = <answer>{result}</answer>"
    split = split_of(f"{sign} {min(a, b)} {max(a, b)}")
    return Drawn(f"What is {a} {sign} {b}?", str(result), solution, split, kind)


def equal(answer: str, expected: str) -> bool:
    """Whether both are the same piece of mathematics."""
    if answers.same(answer, expected):
        return True
    if None not in (answers.number_of(answer), answers.number_of(expected)):
        return False
    verifier = open_verifier()
    gold, found = (verifier.parse(f"${text}$", parsing_timeout=None) for text in (expected, answer))
    return bool(verifier.verify(gold, found, timeout_seconds=None))


def open_verifier() -> ModuleType:
    """math-verify. Importing it takes a second or two, so tasks do it before the first completion's time begins."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits that are off
    return need("math_verify", extra="rl")


def verified(same: Callable[[str, str], float]) -> Score:
    """A score by an equality that asks math-verify."""
    open_verifier()
    return answers.scored_by(same)


def row(name: str, fields: Mapping[str, Any]) -> Question | None:
    match fields:
        case {"problem": str(text), "answer": str(answer)}:
            kinds = {"kind": str(fields.get("subject", "")), "level": str(fields.get("level", ""))}
            return Question(name, text, answer, f"<answer>{answer}</answer>", kinds)
        case {"question": str(text), "answer": str(worked)} if answer := answers.find(worked) or "":
            return Question(name, text, answer, worked)
    return None


make = domain(
    "math",
    about="maths: short sums and products, or problems from files (MATH, GURU), compared by math-verify",
    draw=draw,
    score=answers.scored_by(answers.same),
    instruction=answers.INSTRUCTION.format(42),
    examples=EXAMPLES,
    files=FILES,
    row=row,
    open_files_score=functools.partial(verified, equal),
)
