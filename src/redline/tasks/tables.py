"""Tables: look a value up or find the largest, or WikiTableQuestions files (`wtq_train.jsonl.gz`: question,
answer, table as rows).

Answers are compared as numbers or as text. Several answers are separated by `|` (in the files of a user's own
too), and their order does not matter.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from redline.tasks import answers
from redline.tasks.domain import Drawn, domain, split_of
from redline.tasks.task import Question
from redline.tasks.units import whole_conversions

NAMES = ("pen", "cup", "hat", "map", "box", "key", "toy", "bag")
FILES = {"train": ("wtq_train.jsonl*",), "valid": ("wtq_test.jsonl*",)}
EXAMPLES = (
    ("| item | price |\n| pen | 4 |\n| hat | 9 |\nWhat is the price of hat?", "<answer>9</answer>"),
    ("| item | price |\n| box | 8 |\n| cup | 3 |\nWhich item has the highest price?", "<answer>box</answer>"),
)


def draw(randomness: random.Random) -> Drawn:
    """Two conversions to look one up, or two or three items with different prices from 1 to 9. The conversions suit
    models that know little else, the shipped one for example."""
    if randomness.random() < 0.5:
        picked = randomness.sample(whole_conversions(), 2)
        lines = [(f"{c.number} {c.source}", f"{result} {c.target}") for c, result, _ in picked]
        (asked, result, split), _ = picked
        randomness.shuffle(lines)
        text = f"{markdown(lines)}\nWhat is {asked.number} {asked.source} in {asked.target}?"
        return Drawn(text, str(result), f"<answer>{result}</answer>", split, "conversion")
    count = randomness.randint(2, 3)
    names, prices = randomness.sample(NAMES, count), randomness.sample(range(1, 10), count)
    table = markdown([("item", "price"), *zip(names, map(str, prices), strict=True)])
    split = split_of(str(sorted(zip(names, prices, strict=True))))
    if randomness.random() < 0.5:
        place = randomness.randrange(count)
        what, answer, kind = f"What is the price of {names[place]}?", str(prices[place]), "look-up"
    else:
        what, answer = "Which item has the highest price?", names[prices.index(max(prices))]
        kind = "largest"
    return Drawn(f"{table}\n{what}", answer, f"<answer>{answer}</answer>", split, kind)


def equal(answer: str, expected: str) -> bool:
    """Whether both hold the same values, in any order."""
    said, wanted = (
        sorted((answers.value_of(part) for part in text.split("|")), key=repr) for text in (answer, expected)
    )
    return said == wanted


def markdown(table: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def row(name: str, fields: Mapping[str, Any]) -> Question | None:
    match fields:
        case {"question": str(asked), "answer": [str(), *_] as values, "table": [[*_], *_] as table}:
            cells = [[str(cell).replace("|", "/") for cell in line] for line in table]
            answer = "|".join(str(value).replace("|", "/") for value in values)
            return Question(name, f"{markdown(cells)}\n{asked}", answer, f"<answer>{answer}</answer>")
    return None


make = domain(
    "tables",
    about="questions about a table: look-ups, or WikiTableQuestions and GURU files",
    draw=draw,
    score=answers.scored_by(equal),
    instruction=answers.INSTRUCTION.format(7) + " Part several answers with |.",
    examples=EXAMPLES,
    files=FILES,
    row=row,
)
