"""Console lines to rows. Most consoles are a few line skeletons, repeated with other numbers: the skeleton gives the name of
each number, and is parsed once however often it comes.

    "step 5/100 | loss: 3.21 | dt: 410.25ms | 143631 tok/s"
    -> {"step": "5", "step total": "100", "loss": "3.21", "dt": "410.25" in ms, "tok/s": "143631"}

A number is named by the words before it, back to the last separator; if there are none, by its unit. Source code
printed on top of a log has no skeleton that comes again with a growing step, and so leaves no run.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from redline.diagnose.data import patterns
from redline.diagnose.readers.cells import SECONDS
from redline.diagnose.readers.columns import assign, is_held_out

_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
LINE = patterns("console")
_MARKS = {"%|": "bar", "% ━": "thin_bar", "% ╸": "thin_bar", "% ─": "thin_bar", ", Epoch": "notebook_bar"}
_COUNT = {"K": "e3", "k": "e3", "kit": "e3", "M": "e6", "B": "e9"}
"""1.23K tokens are 1.23e3."""


@dataclass
class Mined:
    """A line that holds numbers: what they are called, as text, with their units. The rows of tables are such lines too."""

    place: int
    cells: dict[str, Any]
    units: dict[str, str]
    stamp: str = ""
    bar: str = ""
    """Name and length of a progress bar: rows of one bar belong together."""


@dataclass(frozen=True)
class _Skeleton:
    columns: tuple[tuple[int, str, str], ...]
    """Place among the numbers, label, unit."""
    pause: str
    useful: bool


def mine(lines: Sequence[str], *, cut: bool = False) -> tuple[list[Mined], list[tuple[int, str]]]:
    """The rows of a console, and the lines that tell of a pause and hold no update. `cut` says that its last line has no
    end: then its last number may be half of one."""
    rows, pauses, known = list[Mined](), list[tuple[int, str]](), dict[str, _Skeleton]()
    for place, line in enumerate(lines):
        text = line
        if bar := next((name for mark, name in _MARKS.items() if mark in line), ""):
            text, bars = _bars(place, line, LINE[bar])
            rows += bars
        if not text:
            continue
        if (at := max(text.find("{'"), text.find('{"'))) >= 0 and (row := _dict(place, text, at)):
            rows.append(row)
            continue
        stamp = LINE["stamp"].search(text, 0, 120) or LINE["time"].match(text)
        if stamp:
            text = text[: stamp.start()] + text[stamp.end() :]
        pieces = LINE["token"].split(text)
        key = "\0".join(pieces[::2])
        if (skeleton := known.get(key)) is None:
            skeleton = known[key] = _understand(key)
        if skeleton.useful:
            tokens = pieces[1::2]
            cells = {label: tokens[at] + _COUNT.get(unit, "") for at, label, unit in skeleton.columns}
            units = {label: "" if unit in _COUNT else unit for _, label, unit in skeleton.columns}
            rows.append(Mined(place, cells, units, stamp[0].strip(" [") if stamp else ""))
        elif skeleton.pause:
            pauses.append((place, skeleton.pause))
    last = rows[-1] if rows else None
    if last and cut and last.place == len(lines) - 1 and not last.bar:
        last.cells.popitem()
        if not any(tuple(row.cells)[:-1] == tuple(last.cells) for row in rows[-20:-1]):
            rows.pop()
    return rows, pauses


def _bars(place: int, line: str, pattern: re.Pattern[str]) -> tuple[str, list[Mined]]:
    """The progress bars taken off a line (several where their carriage returns were lost), and what is left of it."""
    bars, left, at = list[Mined](), "", 0
    for found in pattern.finditer(line):
        parts, between = found.groupdict(), line[at : found.start()]
        cells = {"step": parts["step"], "step total": parts["total"], "elapsed": parts["elapsed"]}
        cells["remaining"] = parts["left"] or ""
        named = "{" not in between and "=" not in between
        pairs = LINE["postfix"].findall(parts.get("rest") or "")
        pairs += LINE["in_name"].findall(between) if named else []
        if epoch := LINE["epoch_of_bar"].search(between):
            cells["epoch"] = epoch[1] or epoch[2]
        cells |= {label: value for label, value in pairs if "step" not in assign({label: ""})}
        name = LINE["numbers"].sub("", between.strip(" :")[-80:]) if named else ""
        bars.append(Mined(place, cells, {}, bar=f"{name}/{parts['total']}"))
        left, at = left if named else f"{left} {between}", found.end()
    return (f"{left} {line[at:]}".strip() if bars else line), bars


def _dict(place: int, line: str, at: int) -> Mined | None:
    """A line that ends in a table of Python's or JSON's: `{'loss': 2.1, 'elapsed_time': '1m 9s'}`."""
    if not line.rstrip().endswith("}") or "{" in line[at + 1 :]:
        return None
    cells = {pair[1]: pair[2].strip(" '\"") for pair in LINE["pair"].finditer(line, at)}
    if not assign(dict.fromkeys(cells, "")).keys() & {"loss", "step_s", "validation_s", "elapsed_s"}:
        return None
    stamp, step = LINE["stamp"].search(line[:at]), re.search(r"\b[Ss]tep\W{1,3}(\d{1,12})\W{0,4}$", line[:at])
    if step:
        cells.setdefault("step", step[1])
    return Mined(place, cells, {}, stamp[0] if stamp else "")


def _understand(key: str) -> _Skeleton:
    """The names of a skeleton's numbers, and whether any of them is of interest."""
    parts = key.split("\0")
    columns = tuple(_columns(parts))
    names = {label: unit for _, label, unit in columns}
    chosen = assign(names)
    held = [label for label in names if is_held_out(label) and ("loss" in label.lower() or "step" in chosen)]
    # [step=10/5000], and its numbers on the lines that follow
    whole = [name for name in names if name.endswith(" total") and name != "fraction total"]
    useful = bool(chosen.keys() - {"epoch", "step", "remaining_s", "batch_size"} or held)
    useful |= "step" in chosen and len(columns) <= 6 and bool(whole)
    pause = next((kind for kind, pattern in patterns("pauses").items() if pattern.search(key[:400])), "")
    return _Skeleton(columns, pause, useful)


def _columns(parts: list[str]) -> Iterator[tuple[int, str, str]]:
    last, unit, seen = "", "", set[str]()
    for at, (before, after) in enumerate(itertools.pairwise(parts)):
        label = _label(before.removeprefix(unit) if unit else before, after, last)
        found = LINE["unit"].match(after)
        unit = found[0] if found else ""
        last = label.removesuffix(" total") or last
        written = found[1] if found else ""
        if label in seen and written in SECONDS:  # step 5/100 | step 600.0 ms
            label += " time"
        if label and label not in seen and len(label) <= 80:
            seen.add(label)
            yield at, label, f"{written}iB" if written in ("M", "G") and "mem" in label.lower() else written


def _label(before: str, after: str, last: str) -> str:
    if before.strip() == "/":
        return f"{last or 'fraction'} total"
    if not last and not before.strip(" [") and LINE["first"].match(after):
        return "step"
    if before.strip() == "|" and after.startswith("] loss"):  # [250 | 61.03] loss=5.91
        return "elapsed (s)"
    words = _words(LINE["split"].split(re.sub(r"\s{0,4}=>\s{0,4}", " ", before))[-1])
    if rate := LINE["rate"].match(after):
        return words if "/" in words or "per" in words else f"{rate[1]} {words}".strip()
    if words:
        return words
    if before.endswith("[") and after.startswith("]") and not before.endswith("]["):
        return "bracketed"
    found = LINE["unit"].match(after)
    if "(" in before and found and found[1] == "ms":
        return "ms"
    if "(" in before or ("[" in before[-2:] and last):
        # Epoch [1][ 10/500]: a fraction without a name of its own counts the steps
        return "fraction" if after.startswith("/") and not last.startswith("fraction") else f"{last} ()"
    if after.startswith("/\0") or after.strip() == "/":
        return "fraction"
    behind = LINE["split"].split(after[found.end() :] if found and found[1] in _COUNT else after)[0]
    behind = behind.split("(")[0].strip(" .:=")
    label = behind if re.fullmatch(r"[%A-Za-zµ][\w%/ ]{0,24}", behind) else found[1] if found else ""
    return "seconds" if label == "s" else label


def _words(text: str) -> str:
    """The words that name a number: quotes, signs and an open bracket taken off."""
    text = re.sub(r"np\.\w+\($|tensor\($", "", text.strip())
    open_at = max(text.rfind("(") if text.rfind("(") > text.rfind(")") else -1, text.rfind("["))
    if open_at >= 0:
        text = text[open_at + 1 :] if re.search(r"[A-Za-z]", text[open_at + 1 :]) else text[:open_at]
    text = LINE["level"].sub("", text.strip(" \"'`:=.,~#*>[]/-").removesuffix("("))
    if re.search(r"[A-Za-z]", text) is None:
        return ""
    quoted = len(text) > 60 or '"' in text or "'" in text
    return re.split(r"[\"'`]", text)[-1].strip(" :=") if quoted else text


def seconds_of(stamp: str) -> float | None:
    """A time stamp as seconds: only differences count, so the zone and a missing year do not matter."""
    digits, behind = re.findall(r"\d+", stamp), re.search(r"[.,](\d+)$", stamp)
    if stamp[:3] in _MONTHS:
        digits.insert(0, str(_MONTHS.index(stamp[:3]) + 1))
    elif stamp[:1] in "IWEF":  # I0519 22:01:03.123456
        digits = [digits[0][:2], digits[0][2:], *digits[1:4]]
    elif len(digits) < 5:  # a time of day
        digits = ["1", "1", *digits]
    if len(digits) > 5 and len(digits[2]) == 4:  # 03/01/2026 09:30:00
        digits = [digits[2], *digits[:2], *digits[3:]]
    numbers = [int(part) for part in (digits if len(digits[0]) == 4 else ["2024", *digits])[:6]]
    try:
        return datetime(*numbers).timestamp() + (float(f"0.{behind[1]}") if behind else 0.0)  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError, OSError):
        return None
