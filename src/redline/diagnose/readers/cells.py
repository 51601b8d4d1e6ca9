"""Numbers as trainers and people write them: tolerant where a log is read, strict where an option is.

number("1e") is None
duration_s("4 days, 7:04:09") == 371_049
amount("454M", COUNTS) == 454e6
"""

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

from redline.record.read import number as plain_number

COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
BYTES = {"": 1.0, "b": 1.0} | {f"{letter}b": 1e3**power for power, letter in enumerate("kmgt", 1)}
BYTES |= {f"{letter}ib": 1024.0**power for power, letter in enumerate("kmgt", 1)}
SECONDS = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
SECONDS |= dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0)
SECONDS |= dict.fromkeys(("min", "mins", "minutes"), 60.0) | dict.fromkeys(("h", "hours"), 3600.0)
SHARES = {"": 1.0, "%": 0.01}

PARTS_S = (86400, 3600, 60, 1)
_AMOUNT = re.compile(
    r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?:\d++\.?\d*+|\.\d++)(?:e[-+]?\d+)?)\s*([a-zµ%]*)", re.IGNORECASE
)
_CLOCK = re.compile(r"(?:(\d{1,6}) days?,? *)?(\d{1,6}):(\d\d)(?::(\d\d(?:[.,]\d+)?))?")
_SPELT = re.compile(
    r"(?:(\d{1,6}) ?d(?:ays?)? *)?(?:(\d{1,6}) ?h\w* *)?(?:(\d{1,6}) ?m(?:in\w*)? *)?(?:(\d{1,9}(?:\.\d+)?) ?s\w*)?"
)


def number(raw: Any) -> float | None:
    """A value of a log as a number, nan and inf included; None if it is not one."""
    if isinstance(raw, bool):
        return None
    try:
        value = float(raw.replace("nan.0", "nan") if isinstance(raw, str) else raw)  # NeMo's bar
    except (TypeError, ValueError, OverflowError):
        return None
    if math.isfinite(value):
        return plain_number(value)
    # 400 digits are neither a number of a trainer nor infinity
    return None if math.isinf(value) and isinstance(raw, str) and raw.lstrip("+-")[:1].isdigit() else value


def finite(raw: Any) -> float | None:
    value = number(raw)
    return value if value is not None and math.isfinite(value) else None


def duration_s(text: str) -> float | None:
    """`H:MM:SS`, `MM:SS`, `4 days, 7:04:09`, `1m 42s`, `2h 3m`: the seconds; None for anything else."""
    text, parts = text.strip(), tuple[str | None, ...]()
    if found := _CLOCK.fullmatch(text):
        days, first, second, third = found.groups()
        parts = (days, first, second, third) if third is not None else (days, None, first, second)
    elif text[:1].isdigit() and (found := _SPELT.fullmatch(text)):
        parts = found.groups()
    else:
        return None
    given = [float((part or "0").replace(",", ".")) for part in parts]
    return sum(map(operator.mul, given, PARTS_S))


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """A whole text as a number from 0 on with one of the units, in any case; None for anything else."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or (factor := units.get(found[2].lower())) is None:
        return None
    value = float(found[1].replace(",", "")) * factor
    return plain_number(value)
