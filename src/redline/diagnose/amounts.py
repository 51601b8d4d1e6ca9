"""Numbers as trainers and people write them: tolerant where a log is read, strict where an option is.

finite("1e") is None
amount("454M", COUNTS) == 454e6
"""

import math
import re
from collections.abc import Mapping
from typing import Any

COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
BYTES = {
    "": 1.0,
    "b": 1.0,
    **{
        f"{letter}{end}": base**power
        for end, base in (("b", 1e3), ("ib", 1024.0))
        for power, letter in enumerate("kmgt", 1)
    },
}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
SHARES = {"%": 0.01}
NUMBER = r"(?:[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))"
"""A whole number in a regular expression; what was cut in its middle may look like a shorter one."""

_AMOUNT = re.compile(
    r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z]*)", re.IGNORECASE
)


def number(raw: Any) -> float | None:
    """A value of a log as a number, nan and inf among them; None for what is none."""
    try:
        return float(raw)
    except (TypeError, ValueError, OverflowError):
        return None


def finite(raw: Any) -> float | None:
    value = number(raw)
    return value if value is not None and math.isfinite(value) else None


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """The whole of a text as a positive number with one of the units, large or small letters; None where
    anything else is in it."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or (factor := units.get(found[2].lower())) is None:
        return None
    value = float(found[1].replace(",", "")) * factor
    return value if 0 < value < math.inf else None
