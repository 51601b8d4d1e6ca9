"""Numbers as people read them: bytes, rates, durations, shares, facts whose names end in their unit, sparklines.

None (not known) is shown as `–`; a nan is shown as it is, because hiding it would hide a fault. Nothing here parses:
records hold plain numbers.
"""

import math
import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

DASH = "–"
# What a terminal obeys instead of showing: controls (except tab and newline) and changes of the writing direction;
# and halves of surrogate pairs, which cannot be written.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BLOCKS = "▁▂▃▄▅▆▇█"


def visible(text: object) -> str:
    """Text from outside (a model, a file, a name) made safe for a terminal: control characters are spelt out."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def format_bytes(count: float | None) -> str:
    """`1.2 GiB`: powers of 1024, one decimal from KiB on."""
    if count is None:
        return DASH
    value, unit = _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), largest=1023.95)
    return f"{value:.0f} {unit}" if unit == "B" else f"{_decimal(value)} {unit}"


def format_count(count: float | None) -> str:
    """`41.2k`: powers of 1000, one decimal from a thousand on."""
    if count is None:
        return DASH
    value, unit = _scaled(count, 1000, ("", "k", "M", "B", "T"), largest=999.95)
    return f"{value:.3g}" if unit == "" else f"{_decimal(value)}{unit}"


def counted(count: int, one: str, several: str = "") -> str:
    """`1 pass`, `2 passes`, `12,000 steps`: a number with its noun in the singular or the plural."""
    if count == 1:
        return f"1 {one}"
    return f"{count:,} {several or one + ('es' if one.endswith(('s', 'x', 'tch')) else 's')}"


def format_rate(per_s: float | None, what: str) -> str:
    """`41.2k tok/s`."""
    return DASH if per_s is None else f"{format_count(per_s)} {what}/s"


def format_share(share: float | None) -> str:
    """`46.8%`."""
    return DASH if share is None else f"{_decimal(share * 100)}%"


def format_limit_share(share: float | None, of: str = "") -> str:
    """`46.8% of the ceiling`: a share of what the hardware can do. Over 100%, the limit must be wrong."""
    text = f"{format_share(share)} {of}".rstrip()
    return f"{text} (so the limit is too low)" if share is not None and share > 1 else text


def format_duration(duration_s: float | None) -> str:
    """`210 ms`, `3.4 s`, `42 s`, `2 m 10 s`, `3 h 5 m`, `2 d 4 h`: two units at most, rounded, then split."""
    if duration_s is None:
        return DASH
    if not math.isfinite(duration_s):
        return f"{duration_s} s"
    sign, length_s = ("-" if duration_s < 0 else ""), abs(duration_s)
    if length_s == 0:
        return "0 s"
    if length_s < 0.9995:
        return f"{sign}{length_s * 1000:.3g} ms"
    if length_s < 9.95:
        return f"{sign}{length_s:.1f} s"
    if (seconds := round(length_s)) < 60:
        return f"{sign}{seconds} s"
    if seconds < 3600:
        return f"{sign}{seconds // 60} m {seconds % 60} s"
    if (minutes := round(length_s / 60)) < 24 * 60:
        return f"{sign}{minutes // 60} h {minutes % 60} m"
    hours = round(length_s / 3600)
    return f"{sign}{hours // 24} d {hours % 24} h"


def format_iso(at: str) -> str:
    """`2026-11-19 20:33:18 UTC`, of the ISO time `2026-11-19T20:33:18+00:00` or `2026-11-19T20:33:18Z`."""
    return at.replace("T", " ").replace("+00:00", " UTC").replace("Z", " UTC")


def format_amount(value: float | str, unit: str) -> str:
    """`1.6% of 24 GiB`, `2,048 tokens`: a number and its unit; a share if the unit says of what."""
    if isinstance(value, str):
        text = value
    elif unit == "s" and abs(value) >= 60:
        return format_duration(value)
    elif abs(value) >= 1e6:
        text = format_count(value)
    elif unit.startswith(("of ", "share")):
        text = f"{value:.1%}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"
    noun, *rest = unit.split(" ")
    if text == "1" and noun in _NOUNS:
        noun = _NOUNS[noun]
    return " ".join([text, noun, *rest]).strip()


_NOUNS = {"sequences": "sequence", "rows": "row", "passes": "pass", "updates": "update", "samples": "sample"}


def exact(value: float | None) -> str:
    """`41,234`: all digits before the point, at least three."""
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return name.replace("_", " "), {"True": "yes", "False": "no"}.get(str(value), str(value))
    for ending, form in _ENDINGS.items():
        if name.endswith(ending):
            return name.removesuffix(ending).replace("_", " "), form(value)
    return name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


_ENDINGS: dict[str, Callable[[float], str]] = {
    "_per_s": lambda rate: f"{exact(rate)}/s",
    "_bytes": format_bytes,
    "_share": format_share,
    "_s": format_duration,
}


def sparkline(values: Sequence[float], most: int | None = None) -> str:
    """One block a value, lowest to highest; `×` for a value that is not finite, middle blocks if all are equal. More
    than `most` values are averaged in groups."""
    if most and len(values) > most:
        each = -(-len(values) // most)
        values = [fmean(values[i : i + each]) for i in range(0, len(values), each)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "×" * len(values)
    low, high = min(finite), max(finite)
    return "".join(_block(value, low, high) if math.isfinite(value) else "×" for value in values)


def _block(value: float, low: float, high: float) -> str:
    if low == high:
        return _BLOCKS[3]
    # Halved first: high - low overflows for the largest floats.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]


def _scaled(value: float, base: int, units: tuple[str, ...], *, largest: float) -> tuple[float, str]:
    """Divide until the value, as it will be rounded, stays below the base."""
    place = 0
    while math.isfinite(value) and abs(value) >= largest and place < len(units) - 1:
        value, place = value / base, place + 1
    return value, units[place]


def _decimal(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 1e6 or not math.isfinite(value) else f"{value:.1e}"
