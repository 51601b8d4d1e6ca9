"""Numbers of a record as a report writes them: a fact whose name ends in its unit, a count with all its
digits. No torch."""

from typing import Any

from redline.record.read import number
from redline.record.units import DASH, format_bytes, format_duration, format_share


def exact(value: float | None) -> str:
    """`41,234`: all digits before the point; three digits where that would be nothing much."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def factor(value: float) -> str:
    """`1.00`, `0.978`, `768`: what was measured, to three digits."""
    return f"{value:#.3g}".rstrip(".")


def fact(name: str, value: Any) -> str:
    """`stalled 8.95 ms`: the end of a name gives the unit."""
    return " ".join(named(name, value))


def named(name: str, value: Any) -> tuple[str, str]:
    """A name without its unit, and the value with it."""
    known, words = number(value), name.replace("_", " ")
    if isinstance(value, bool):
        return words, "yes" if value else "no"
    if known is None:
        return words, str(value)
    if name.endswith("_per_s"):
        return words.removesuffix(" per s"), f"{exact(known)}/s"
    for ending, form in (("_bytes", format_bytes), ("_share", format_share), ("_s", format_duration)):
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " "), form(known)
    return words, f"{value:,}" if isinstance(value, int) else f"{known:.4g}"
