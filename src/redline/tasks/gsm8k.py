"""Maths word problems in the files of GSM8K: JSONL with `question` and an `answer` that ends in `#### 42`;
exact numeric match.

The answer of a completion is the first number after the last mark of `<answer>`, `\\boxed{` and `####`;
without a mark, its last number. Thousands commas, currency signs and a trailing dot do not matter: $1,234.50.
and 1234.5 are the same. Fractions and words are not read. The data are not shipped: `--data` names a folder
with train.jsonl and test.jsonl.
"""

import re
from decimal import Decimal
from typing import Any

from redline.tasks.answers import scored_by
from redline.tasks.task import Question, Task, read_split

# A minus is a sign only if no operand precedes it: "10-5" ends in 5. Exponents are bounded because
# Decimal's are.
_SIGN = r"(?:(?<![\w.)])-[$£€]?|[$£€]-?)?"
_NUMBER = re.compile(_SIGN + r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.?\d+)(?:[eE][+-]?\d{1,4}(?!\d))?")
_MARKS = {"<answer>": "</answer>", "\\boxed{": "\n", "####": "\n"}
"""What opens an answer, and what ends it. A box may hold braces, so it lasts to the end of the line."""
_CALCULATOR = re.compile(r"<<.*?>>")
INSTRUCTION = (
    "Solve the problem step by step and end with the number in answer tags, like <answer>42</answer>."
)
EXAMPLES = (
    (
        "A baker fills 4 trays with 12 rolls each and sells 30 rolls. How many rolls are left?",
        "4 * 12 = 48 rolls were baked. 48 - 30 = 18 are left. <answer>18</answer>",
    ),
    (
        (
            "Ann earns $15 an hour and works 6 hours a day for 5 days. She spends a third of it on rent. How"
            " much money has she left?"
        ),
        (
            "6 * 5 = 30 hours. 30 * 15 = 450 dollars. The rent is 450 / 3 = 150. 450 - 150 = 300."
            " <answer>300</answer>"
        ),
    ),
)


def parse_number(completion: str) -> Decimal | None:
    """The number that the completion gives as its answer, or None."""
    text = completion.replace("{,}", ",").replace("\\$", "$").replace("−", "-")
    place, mark = max((text.rfind(mark), mark) for mark in _MARKS)
    if place >= 0:
        numbers = _NUMBER.findall(text[place + len(mark) :].split(_MARKS[mark])[0])[:1]
    else:
        numbers = _NUMBER.findall(text)[-1:]
    return Decimal(re.sub("[$£€,]", "", numbers[0])) if numbers else None


def read(completion: str) -> str | None:
    return None if (number := parse_number(completion)) is None else str(number)


score = scored_by(lambda answer, expected: Decimal(answer) == Decimal(expected), read)


def row(name: str, fields: Any) -> Question | None:
    match fields:
        case {"question": str(text), "answer": str(worked)} if (
            "####" in worked and (number := parse_number(worked)) is not None
        ):
            steps = _CALCULATOR.sub("", worked.rpartition("####")[0]).strip()
            return Question(name, text, str(number), f"{steps}\n<answer>{number}</answer>")
    return None


def make(data: str | None) -> Task:
    def questions(split: str, count: int | None, seed: int) -> list[Question]:
        needs = "a question and an answer that ends in '#### number' are needed"
        return read_split("gsm8k", data, split, count, suffix=".jsonl", row=row, needs=needs)

    return Task(
        name="gsm8k",
        about="maths word problems, exact numeric match: JSONL files of GSM8K",
        questions=questions,
        score=score,
        instruction=INSTRUCTION,
        examples=EXAMPLES,
    )
