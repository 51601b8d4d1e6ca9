"""Where the answer of a completion stands, and when two answers are the same. Every domain reads answers with
this file, so that "no answer" means the same everywhere.

    answer = find(completion)            # None: a format failure, which is not a wrong answer
    same(answer, question.answer)

`find` looks behind the last `</think>` for the last `<answer>…</answer>`, else the last `[ANSWER]…[/ANSWER]`,
else the last `\\boxed{…}`, else a last line that says "#### …", "Answer: …" or "The answer is …". Anything else
is not an answer. Unit conversion and GSM8K read answers as those tasks are specified, in their own files.
"""

import ast
import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from redline.tasks.task import Question, Score, Verdict

INSTRUCTION = "End with the answer in answer tags, like <answer>{}</answer>."
END = "</answer>"
LONGEST_ANSWER = 20_000
"""Characters. A longer text is not an answer, and could keep a parser busy for minutes."""

_TAGS = (
    re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL),
    re.compile(r"\[ANSWER\](.*?)(?:\[/ANSWER\]|\Z)", re.DOTALL),
)
_LAST_LINE = re.compile(r"(?:####|(?:.*\s)?answer(?:\s+is)?\s*[:=]|(?:.*\s)?answer\s+is)\s*(\S.*)", re.I)
_FENCE = re.compile(r"```[ \t]*(?:python|py|json)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.I)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d{1,3})?")


def find(completion: str) -> str | None:
    text = completion.rpartition("</think>")[2]
    for pattern in _TAGS:
        if found := pattern.findall(text):
            return _short(found[-1])
    if (boxed := _boxed(text)) is not None:
        return _short(boxed)
    lines = text.strip().splitlines()
    last = _LAST_LINE.fullmatch(lines[-1].strip(" *")) if lines else None
    return _short(last[1]) if last else None


def find_block(completion: str) -> str | None:
    """The last fenced block of a completion (a model may sketch before it writes), or None."""
    blocks = _FENCE.findall(completion.rpartition("</think>")[2])
    return blocks[-1].strip("\n") or None if blocks else None


def scored_by(earns: Callable[[str, str], float], read: Callable[[str], str | None] = find) -> Score:
    """A task's `score`: `read` takes the answer out of a completion, and `earns` compares it with the expected one and
    gives a reward from 0 to 1."""

    def score(question: Question, completion: str) -> Verdict:
        if (answer := read(completion)) is None:
            return Verdict(correct=False, parsed=False, reward=0.0, answer=None)
        reward = earns(answer, question.answer)
        return Verdict(correct=reward == 1, parsed=True, reward=float(reward), answer=answer)

    return score


def same(answer: str, expected: str, *, fold: bool = True) -> bool:
    """Whether both say the same: as numbers, as Python or JSON values, or as text, where quotes, spaces and a
    final dot do not matter, nor capitals if `fold`."""
    return bool(value_of(answer, fold=fold) == value_of(expected, fold=fold))


def value_of(text: str, *, fold: bool = True) -> Any:
    """A value that compares as the text is meant: a Decimal, a list, a dict, … or the plain text."""
    plain = text.strip().strip("`").strip()
    if (number := number_of(plain)) is not None:
        return number
    for read in (json.loads, ast.literal_eval):
        try:
            return _comparable(read(plain), fold)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return _text(plain, fold)


def number_of(text: str) -> Decimal | None:
    """The number that the text is, without thousands commas, a currency or a percent sign."""
    plain = text.strip().strip("$£€%").rstrip(".").replace("−", "-").strip()
    if not _NUMBER.fullmatch(plain):
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:  # a lone sign or dot
        return None


def _boxed(text: str) -> str | None:
    """What the last `\\boxed{` holds, up to the brace that closes it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def _short(text: str) -> str | None:
    plain = text.strip()
    return plain if 0 < len(plain) <= LONGEST_ANSWER else None


def _comparable(value: Any, fold: bool) -> Any:
    """Numbers as Decimals and texts as `_text` all the way down; True stays apart from 1, a tuple from a list."""
    match value:
        case bool() | None:
            return str(value).casefold()
        case int() | float():
            return Decimal(repr(value))
        case str():
            return _text(value, fold)
        case list():
            return [_comparable(item, fold) for item in value]
        case tuple():
            return tuple(_comparable(item, fold) for item in value)
        case dict():
            return {str(_comparable(key, fold)): _comparable(item, fold) for key, item in value.items()}
        case set():
            return frozenset(repr(_comparable(item, fold)) for item in value)
    return value


def _text(text: str, fold: bool) -> str:
    plain = " ".join(text.strip().strip("\"'").rstrip(".").split())
    return plain.casefold() if fold else plain
