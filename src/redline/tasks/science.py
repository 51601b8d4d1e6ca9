"""Science: one formula of physics with small numbers, or multiple choice (`mmlu_stem.jsonl`: question, choices,
answer as an index).

A choice is right by its letter. Other answers are compared as numbers, as text, and with files as mathematics
by math-verify. GURU's web questions are judged by a language model there; here they are held to that stricter
rule, so a right answer in other words earns nothing.
"""

import functools
import random
import re
from collections.abc import Mapping
from typing import Any

from redline.tasks import answers
from redline.tasks.domain import SPLITS, Drawn, domain, split_of
from redline.tasks.maths import equal, verified
from redline.tasks.task import Question

FILES = dict.fromkeys(SPLITS, ("mmlu_stem.jsonl",))
EXAMPLES = (
    ("A car moves at 3 m/s for 5 s. How far does it go, in m?", "3 * 5 = <answer>15</answer>"),
    ("A force of 12 N acts on 4 kg. What is the acceleration, in m/s^2?", "12 / 4 = <answer>3</answer>"),
)
_FORMULAS = {
    # What is asked about a and b, and whether a * b or a (then a multiple of b) / b answers it.
    "distance": ("A car moves at {a} m/s for {b} s. How far does it go, in m?", "*"),
    "speed": ("A car goes {a} m in {b} s. How fast is it, in m/s?", "/"),
    "force": ("A mass of {a} kg is accelerated by {b} m/s^2. What is the force, in N?", "*"),
    "acceleration": ("A force of {a} N acts on {b} kg. What is the acceleration, in m/s^2?", "/"),
    "voltage": ("A current of {a} A flows through {b} ohm. What is the voltage, in V?", "*"),
    "resistance": ("At {a} V a current of {b} A flows. What is the resistance, in ohm?", "/"),
    "density": ("A body of {a} g fills {b} cm^3. What is its density, in g/cm^3?", "/"),
    "energy": ("A lamp of {a} W burns for {b} s. How much energy does it use, in J?", "*"),
}
_LETTER = re.compile(r"[A-J]")
_CHOICE = re.compile(r"\(?([A-Ja-j])\)?(?:[.:)\s].*)?", re.DOTALL)


def draw(randomness: random.Random) -> Drawn:
    kind = randomness.choice(list(_FORMULAS))
    form, sign = _FORMULAS[kind]
    a, b = randomness.randint(2, 20), randomness.randint(2, 20)
    first, result = (a, a * b) if sign == "*" else (a * b, a)
    solution = f"{first} {sign} {b} = <answer>{result}</answer>"
    return Drawn(form.format(a=first, b=b), str(result), solution, split_of(f"{kind} {a} {b}"), kind)


def right(answer: str, expected: str) -> bool:
    if _LETTER.fullmatch(expected):
        return (said := _CHOICE.fullmatch(answer.strip())) is not None and said[1].upper() == expected
    return answers.same(answer, expected)


def right_verified(answer: str, expected: str) -> bool:
    return right(answer, expected) or (not _LETTER.fullmatch(expected) and equal(answer, expected))


def row(name: str, fields: Mapping[str, Any]) -> Question | None:
    match fields:
        case {"question": str(text), "choices": [*choices], "answer": int(place)} if place < len(choices):
            lines = [f"{chr(65 + number)}. {choice}" for number, choice in enumerate(choices)]
            asked = "\n".join([text, *lines, "Answer with the letter."])
            letter = chr(65 + place)
            return Question(name, asked, letter, f"<answer>{letter}</answer>", {"kind": "choice"})
    return None


make = domain(
    "science",
    about="formulas of physics; or multiple choice (MMLU) and GURU files",
    draw=draw,
    score=answers.scored_by(right),
    instruction=answers.INSTRUCTION.format(42),
    examples=EXAMPLES,
    files=FILES,
    row=row,
    open_files_score=functools.partial(verified, right_verified),
)
