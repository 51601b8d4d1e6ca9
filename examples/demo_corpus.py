"""The corpus of the demo's base model: what one might read about unit conversion, made from the grammar of
`tasks/units.py`.

    python examples/demo_corpus.py demo-corpus.jsonl        # 500,000 documents, some 70 MB, in half a minute

Three kinds of document: an exercise with somebody's answer, a few facts ("1 hour is 60 min."), a piece of a
multiplication table. The answers are what makes it a base model's corpus: some reason and some guess, some
are wrong, and most do not put the number in answer tags; how often depends on the wording of the question. A
model trained on it knows the facts and can multiply, yet seldom answers in the form that the task scores.
That gap is made on purpose, for rejection-sampling fine-tuning to close in a demonstration.

No question is taken from the valid or the test split, nor a product that only their questions need. What
remains is knowledge: that 1 hour is 60 min is a fact here, even where "1 hour to min" is a held-out question.
"""

import json
import random
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from redline.record.files import replacing
from redline.tasks.units import (
    FAMILIES,
    INSTRUCTION,
    NUMBERS,
    SPLITS,
    TEMPLATES,
    Conversion,
    conversions,
    convert,
)

DOCUMENTS = 500_000
KINDS = {"exercise": 0.6, "facts": 0.1, "table": 0.3}
"""Share of the documents of each kind."""
STYLES = {
    # How an answer is given: by those who seldom use the answer tags, and by those who often do.
    "reasoned, tagged": (0.18, 0.50),
    "reasoned": (0.42, 0.25),
    "guess, tagged": (0.15, 0.15),
    "guess": (0.25, 0.10),
}
OFTEN_TAGGED = range(0, len(TEMPLATES), 5)
"""Wordings of a question that are mostly answered with tags: 5 of 23."""
REASONS = (
    "1 {a} is {f} {b}. {n} * {f} =",
    "There are {f} {b} in 1 {a}. {n} * {f} =",
    "1 {a} equals {f} {b}, so {n} {a} is {n} * {f} =",
    "We know that 1 {a} = {f} {b}. So {n} * {f} =",
)
SLIPS = 0.1
"""Share of the reasoned answers that end in a wrong number."""
GOOD_GUESSES = 0.3
INSTRUCTED = 0.4
"""Share of the exercises that stand below the task's instruction."""


class Exercise(NamedTuple):
    """A conversion and its numbers as they are written: the factor to four digits, the product of what is
    written."""

    asked: Conversion
    factor: str
    product: str


def exercises(family: str, split: str) -> list[Exercise]:
    """Every conversion of the family in the split, with its numbers."""
    found = []
    for conversion in conversions(family, split):
        factor = written(Decimal(f"{convert(1, conversion.source, conversion.target):.4g}"))
        found.append(Exercise(conversion, factor, written(conversion.number * Decimal(factor))))
    return found


def written(number: Decimal) -> str:
    """Without exponent and without zeros at the end of its decimals."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def held_out_products() -> frozenset[tuple[int, str]]:
    """(number, factor) of every question in the valid and the test split."""
    held_out = (
        e for split in SPLITS if split != "train" for family in FAMILIES for e in exercises(family, split)
    )
    return frozenset((e.asked.number, e.factor) for e in held_out)


def documents(count: int, seed: int) -> Iterator[str]:
    """`count` documents, the same for the same seed; a larger count begins with a smaller one."""
    draw = random.Random(seed)
    train = [exercises(family, "train") for family in FAMILIES]
    held_out = held_out_products()
    for kind in _kinds(draw, count):
        if kind == "exercise":
            yield _exercise(draw, draw.choice(draw.choice(train)))
        elif kind == "facts":
            yield " ".join(_fact(draw, draw.choice(draw.choice(train))) for _ in range(draw.randint(3, 6)))
        else:
            yield "\n".join(_product(draw, held_out) for _ in range(draw.randint(4, 8)))


def _kinds(draw: random.Random, count: int) -> Iterator[str]:
    names, shares = list(KINDS), list(KINDS.values())
    return (draw.choices(names, shares)[0] for _ in range(count))


def _exercise(draw: random.Random, exercise: Exercise) -> str:
    template = draw.randrange(len(TEMPLATES))
    (number, source, target), _, _ = exercise
    question = TEMPLATES[template].format(n=number, a=source, b=target)
    style = draw.choices(list(STYLES), [shares[template in OFTEN_TAGGED] for shares in STYLES.values()])[0]
    head = f"{INSTRUCTION}\n\n" if draw.random() < INSTRUCTED else ""
    return f"{head}Question: {question}\nAnswer: {_answer(draw, exercise, style)}"


def _answer(draw: random.Random, exercise: Exercise, style: str) -> str:
    (number, source, target), factor, product = exercise
    if not style.startswith("reasoned"):
        guess = product if draw.random() < GOOD_GUESSES else _wrong(draw, product)
        return f"<answer>{guess}</answer>" if style.endswith("tagged") else f"{guess} {target}."
    if draw.random() < SLIPS:
        product = _wrong(draw, product)
    reason = draw.choice(REASONS).format(n=number, a=source, b=target, f=factor)
    return (
        f"{reason} <answer>{product}</answer>"
        if style.endswith("tagged")
        else f"{reason} {product} {target}."
    )


def _wrong(draw: random.Random, number: str) -> str:
    """A number that is wrong as people's are: the decimal point misplaced, or somewhere near."""
    times = draw.choice(
        ("10", "0.1", str(draw.randint(2, 9)), f"0.{draw.randint(2, 9)}", f"1.{draw.randint(1, 9)}")
    )
    return written(Decimal(f"{Decimal(number) * Decimal(times):.4g}"))


def _fact(draw: random.Random, exercise: Exercise) -> str:
    (_, source, target), factor, _ = exercise
    form = draw.choice(
        ("1 {a} is {f} {b}.", "There are {f} {b} in 1 {a}.", "1 {a} equals {f} {b}.", "1 {a} = {f} {b}.")
    )
    return form.format(a=source, b=target, f=factor)


def _product(draw: random.Random, held_out: frozenset[tuple[int, str]]) -> str:
    """A line of a multiplication table; the factor has one to four digits and lies between 0.1 and 9,999."""
    while True:
        number, digits = draw.choice(NUMBERS), draw.randint(1, 4)
        mantissa = draw.randrange(10 ** (digits - 1), 10**digits)
        factor = written(Decimal(mantissa).scaleb(draw.randint(-digits, 4 - digits)))
        if (number, factor) not in held_out:
            return f"{number} * {factor} = {written(number * Decimal(factor))}"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/demo_corpus.py OUT.jsonl")
    with replacing(Path(sys.argv[1])) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents(DOCUMENTS, seed=0))


if __name__ == "__main__":
    main()
