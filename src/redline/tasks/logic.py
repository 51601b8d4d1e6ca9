"""Logic: who is the tallest, does it follow; or knights and knaves (`kk_*_train.parquet`: quiz,
solution_text_format) and FOLIO (`folio-train.jsonl`: premises, conclusion, label).

An answer is right if it says the same; the people of an island in any order, the names of a list with or
without quotes. A table of a zebra puzzle (an object with header and rows, as in GURU) earns the share of its
cells that are right.
"""

import itertools
import random
import re
from collections.abc import Mapping
from typing import Any

from redline.tasks import answers
from redline.tasks.domain import Drawn, domain, split_of
from redline.tasks.task import Question

NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = (("cat", "red"), ("dog", "big"), ("bird", "shy"), ("fish", "old"), ("frog", "wet"), ("goat", "calm"))
FILES = {
    "train": ("kk_*_train.parquet", "folio-train.jsonl"),
    "valid": ("kk_*_test.parquet", "folio-validation.jsonl"),
}
EXAMPLES = (
    ("Ann is taller than Bob. Who is the tallest?", "<answer>Ann</answer>"),
    ("All cats are red. Dan is a cat. Is Dan red? Answer yes, no or unknown.", "<answer>yes</answer>"),
)
_ROLE = re.compile(r"(\w+) is an? (knight|knave)", re.IGNORECASE)


def draw(randomness: random.Random) -> Drawn:
    names = randomness.sample(NAMES, randomness.randint(2, 4))
    if randomness.random() < 0.5:
        facts = [f"{a} is taller than {b}." for a, b in itertools.pairwise(names)]
        randomness.shuffle(facts)
        asked, answer = randomness.choice((("tallest", names[0]), ("shortest", names[-1])))
        text, split, kind = f"{' '.join(facts)} Who is the {asked}?", split_of(" ".join(names)), "order"
    else:
        (animal, trait), (other, _) = randomness.sample(THINGS, 2)
        rule, fact, answer = randomness.choice(
            (
                (f"All {animal}s are {trait}.", f"{names[0]} is a {animal}.", "yes"),
                (f"No {animal} is {trait}.", f"{names[0]} is a {animal}.", "no"),
                (f"All {animal}s are {trait}.", f"{names[0]} is a {other}.", "unknown"),
            )
        )
        text = f"{rule} {fact} Is {names[0]} {trait}? Answer yes, no or unknown."
        split, kind = split_of(f"{rule} {fact}"), "syllogism"
    return Drawn(text, answer, f"<answer>{answer}</answer>", split, kind)


def reward(answer: str, expected: str) -> float:
    """What the answer earns, from 0 to 1."""
    if people := _people(expected):
        return float(_people(answer) == people)
    match answers.value_of(expected):
        case {"rows": [*rows]}:
            return _share(answers.value_of(answer), rows)
        case [*wanted]:
            names = [part.strip(" \t\n'\"").casefold() for part in answer.strip().strip("[]").split(",")]
            return float(names == wanted or answers.same(answer, expected))
    return float(answers.same(answer, expected))


def _people(text: str) -> dict[str, str]:
    return {name.casefold(): role.casefold() for name, role in _ROLE.findall(text)}


def _share(found: Any, rows: list[list[Any]]) -> float:
    """Share of the cells that are right, in their places."""
    said = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(said, list):
        return 0.0
    pairs = [
        (cell, said[r][c] if r < len(said) and isinstance(said[r], list) and c < len(said[r]) else None)
        for r, line in enumerate(rows)
        for c, cell in enumerate(line)
    ]
    return sum(cell == there for cell, there in pairs) / len(pairs) if pairs else 0.0


def row(name: str, fields: Mapping[str, Any]) -> Question | None:
    match fields:
        case {"quiz": str(text), "solution_text_format": str(answer)}:
            return Question(name, text, answer, f"<answer>{answer}</answer>", {"kind": "knights"})
        case {"premises": [*premises], "conclusion": str(conclusion), "label": str(answer)}:
            text = "\n".join([*map(str, premises), f"Is this True, False or Uncertain: {conclusion}"])
            return Question(name, text, answer, f"<answer>{answer}</answer>", {"kind": "folio"})
    return None


make = domain(
    "logic",
    about="orders and syllogisms; or knights and knaves, FOLIO and GURU files",
    draw=draw,
    score=answers.scored_by(reward),
    instruction=answers.INSTRUCTION.format("Ann"),
    examples=EXAMPLES,
    files=FILES,
    row=row,
)
