"""Unit conversion: "How many min are there per 2 hour?", generated from its grammar or read from `[question,
answer]` JSON files.

Six families, 74 spellings, 23 templates, whole numbers from 1 to 10. Conventions: "ton" is metric, data units
are decimal, a year has 365.24219878 days and a month is a twelfth of it; "ounce" is mass beside mass units
and a US fluid ounce beside volume units. A pair of units is asked for when one of the first is 1/8 to 10,000
of the second, so that answers stay numbers that one can write.

The splits are disjoint by (unit, unit, number) whatever the seed and however the units are spelt: "2 h" and
"2 hours" to minutes are in the same split. An answer is right within 5%, after rounding both to three
decimals; 'nan' is not an answer, 'inf' is a wrong one.
"""

import functools
import hashlib
import math
import random
import re
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from redline.errors import ConfigError
from redline.record.files import shipped
from redline.tasks.answers import END, scored_by
from redline.tasks.domain import SPLITS, check_split
from redline.tasks.task import Question, Task, at_most, read_split

_DATA = shipped("tasks/units.toml")
FAMILIES: dict[str, list[tuple[Fraction, str]]] = {
    name: [(Fraction(size), spellings) for size, spellings in units]
    for name, units in _DATA["families"].items()
}
"""The size of a unit in one common measure, and its spellings, separated by commas."""
TEMPLATES: list[str] = _DATA["questions"]["templates"]
EXAMPLES = tuple((asked, completion) for asked, completion in _DATA["questions"]["examples"])
NUMBERS = range(1, 11)
INSTRUCTION = (
    "Convert the units. Reason in one short line and end with the number in answer tags, like"
    " <answer>12.5</answer>."
)


class Conversion(NamedTuple):
    """What a question asks, in its own spelling."""

    number: int
    source: str
    target: str


def convert(number: int | Fraction, source: str, target: str) -> float:
    """The number in target units, exact but for the one rounding to a float."""
    family = _family(source, target)
    if family is None:
        raise ConfigError(f"units must belong to one of {', '.join(FAMILIES)}; got {source!r} and {target!r}")
    return float(number * (_sizes(family)[source] / _sizes(family)[target]))


def parse_answer(completion: str) -> str | None:
    """What the first answer tag holds, if that is a number, as the task's specification has it."""
    try:
        written = completion.split("<answer>")[1].split("</answer>")[0].strip()
        return None if math.isnan(float(written)) else written
    except (IndexError, ValueError):
        return None


def is_correct(answer: float, reference: float) -> bool:
    """Within 5% of the reference, both rounded to three decimals; never for NaN, infinity or a reference of 0."""
    return abs(round(answer, 3) - round(reference, 3)) < 0.05 * abs(round(reference, 3))


score = scored_by(lambda answer, expected: is_correct(float(answer), float(expected)), parse_answer)


def parse_question(text: str) -> Conversion | None:
    """What a question of the grammar asks, or None for any other text."""
    for pattern in _patterns():
        if (found := pattern.fullmatch(text)) and _family(found["a"], found["b"]):
            return Conversion(int(found["n"]), found["a"], found["b"])
    return None


def generate(split: str, count: int | None, seed: int) -> list[Question]:
    """Distinct questions of one split, families in equal shares until one of them is used up."""
    check_split("units", split)
    draw = random.Random(seed)
    left = {
        family: [(asked, t) for asked in conversions(family, split) for t in range(len(TEMPLATES))]
        for family in FAMILIES
    }
    total = sum(map(len, left.values()))
    if (at_most(count) or 0) > total:
        raise ConfigError(
            f"the {split} split of units has {total:,} distinct questions; got a count of {count:,}"
        )
    for questions in left.values():
        draw.shuffle(questions)
    found: list[Question] = []
    while len(found) < (total if count is None else count):
        family = draw.choice([name for name, questions in left.items() if questions])
        asked, template = left[family].pop()
        text = TEMPLATES[template].format(n=asked.number, a=asked.source, b=asked.target)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        found.append(_question(f"units-{key}", text, convert(*asked), asked))
    return found


def row(name: str, fields: Any) -> Question | None:
    match fields:
        case [str(text), int() | float() as answer] if math.isfinite(answer) and not isinstance(answer, bool):
            return _question(name, text, float(answer), parse_question(text))
    return None


def make(data: str | None) -> Task:
    def questions(split: str, count: int | None, seed: int) -> list[Question]:
        if data is None:
            return generate(split, count, seed)
        needs = "[question, finite number] is needed"
        return read_split("units", data, split, count, suffix=".json", row=row, needs=needs)

    return Task(
        name="units",
        about="unit conversion, right within 5%: generated, or [question, answer] JSON files",
        questions=questions,
        score=score,
        instruction=INSTRUCTION,
        examples=EXAMPLES,
        end=END,
    )


def _question(name: str, text: str, answer: float, asked: Conversion | None) -> Question:
    # three decimals, which is all that scoring looks at; never 0
    solution, meta = f"<answer>{f'{answer:.3f}'.rstrip('0').rstrip('.')}</answer>", {}
    if asked is not None:
        number, source, target = asked
        meta = {"family": _family(source, target), "from": source, "to": target, "number": number}
    return Question(name, text, repr(answer), solution, meta)


def conversions(family: str, split: str) -> Iterator[Conversion]:
    """Every conversion of a family whose units and number fall into the split."""
    for a_size, a_spellings in FAMILIES[family]:
        for b_size, b_spellings in FAMILIES[family]:
            if a_spellings == b_spellings or not Fraction(1, 8) <= a_size / b_size <= 10_000:
                continue
            for number in NUMBERS:
                if _split(f"{family} {a_spellings} {b_spellings} {number}") == split:
                    yield from (
                        Conversion(number, a, b)
                        for a in a_spellings.split(",")
                        for b in b_spellings.split(",")
                    )


@functools.cache
def whole_conversions() -> list[tuple[Conversion, int, str]]:
    """Conversions of at least 2 whose result is whole and below 10,000, with the result and their split: other
    domains make questions of them without asking what is held out here."""
    found = ((asked, split) for split in SPLITS for kind in FAMILIES for asked in conversions(kind, split))
    results = ((asked, convert(*asked), split) for asked, split in found if asked.number > 1)
    return [(asked, int(r), split) for asked, r, split in results if r.is_integer() and r < 10_000]


def _split(key: str) -> str:
    """Eight tenths of the keys to train on, one each to validate and to test; no seed moves a key."""
    return {0: "valid", 1: "test"}.get(zlib.crc32(key.encode()) % 10, "train")


@functools.cache
def _sizes(family: str) -> dict[str, Fraction]:
    """Size by spelling, for one family: "ounce" is in two of them."""
    return {word: size for size, spellings in FAMILIES[family] for word in spellings.split(",")}


@functools.cache
def _family(source: str, target: str) -> str | None:
    return next(
        (family for family in FAMILIES if source in _sizes(family) and target in _sizes(family)), None
    )


@functools.cache
def _patterns() -> list[re.Pattern[str]]:
    groups = {"n": r"(?P<n>\d{1,9})", "a": "(?P<a>.+?)", "b": "(?P<b>.+?)"}
    escaped = (re.escape(template).replace(r"\{", "{").replace(r"\}", "}") for template in TEMPLATES)
    return [re.compile(text.format(**groups)) for text in escaped]
