"""What a column means, from its name and its unit: synonyms, first match wins.

    assign({"tok/sec": "", "dt": "ms", "step": ""})
    == {"step": Column("step", 1), "step_s": Column("dt", 1e-3), "tokens_per_s": Column("tok/sec", 1)}

A name is brought to plain words first: `CurrSamplesPerSec`, `samples/s` and `samples_per_second` are all `samples per
s`. A time without a unit has the factor None: `updates.py` settles it by what else the log says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from redline.diagnose.data import compiled, table
from redline.diagnose.readers.cells import BYTES, COUNTS, SECONDS, SHARES

_UNITS = SECONDS | {"%": 0.01, "percent": 0.01}
_UNITS |= {unit: size for unit, size in BYTES.items() if len(unit) > 1}
_LAST_UNIT = re.compile(r"(?<!per)(?: in)? (ms|us|s|sec|secs|seconds|minutes|mins|hours)$")
_INNER_UNIT = re.compile(r" (gib|gb|mib|mb)\b")
HELD_OUT = re.compile(r"\b(val(id(ation|ate)?)?|eval(uation)?|test(ing)?|dev|predict|best|hellaswag)\b")
_EACH = re.compile(r"\b(ms|s|sec|seconds|time|tokens)\s*/\s*(step|iteration|iter|update|batch|it)\b")
_ONE_GPU = re.compile(r"\b(gpu|device|chip|rank)\b")


@cache
def synonyms() -> dict[str, list[re.Pattern[str]]]:
    """The names that each quantity goes by, the surest first. `--map` may name any of them."""
    known = table("columns")["quantities"]
    return {quantity: [compiled(name, "columns") for name in names] for quantity, names in known.items()}


@dataclass(frozen=True)
class Column:
    label: str
    factor: float | None = 1.0
    """The factor for values; None where the unit is not known."""
    one_gpu: bool = False
    told: bool = False
    """Whether the user gave the unit."""


@lru_cache(maxsize=4096)
def plain(label: str) -> tuple[str, str]:
    """A label in plain words, and the unit in it."""
    unit, name = "", label.rpartition(" - ")[2]  # W&B: lively-tree-3 - train/loss
    if bracket := re.search(r"\s*[(\[]([^()\[\]]{1,24})[)\]]\s*$", name):
        inside = bracket[1].strip().lower()
        unit, name = (inside, name[: bracket.start()]) if inside in _UNITS else ("", name)
    timing = name.lower().startswith(("timing_s", "timing s"))
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower().replace("_", " ")
    name = re.sub(r"/\s*(?:seconds?|secs?|s)(?![a-z])|(?<=\bper) se?c(?:ond)?s?(?![a-z])", " per s ", name)
    name = name.replace("per per s", "per s")
    if not timing:
        name = _EACH.sub(r"\1 per \2", name)
    name = re.sub(r"[/|]\s*(gpu|device|chip)(?![a-z])", r" per \1", name)
    name = " ".join(re.sub(r"[^a-z0-9%]+", " ", name).split())
    if not unit and (found := _LAST_UNIT.search(f" {name}")) and f" {name}"[: found.start()].strip():
        unit, name = found[1], f" {name}"[: found.start()].strip()
        name += "" if re.search(r"\b(time|timing|dt|eta)\b", name) else " time"
    if name.endswith(" in billions"):
        unit = "b"
    if not unit and (found := _INNER_UNIT.search(name)):
        unit, name = found[1], (name[: found.start()] + name[found.end() :]).strip()
    return name, unit


def units_of(quantity: str) -> Mapping[str, float]:
    """The units that a quantity may have, and what they are in ours."""
    if quantity in ("tokens", "tokens_per_s", "tokens_total", "samples_per_s"):
        return COUNTS
    if quantity == "memory_bytes":
        return BYTES
    if quantity in ("mfu", "padding_share"):
        return SHARES
    return SECONDS if quantity.endswith("_s") and "per_s" not in quantity else {"": 1.0}


def assign(labels: Mapping[str, str]) -> dict[str, Column]:
    """The columns of our quantities among labels with the units that their cells showed."""
    names = {label: plain(label) for label in labels}
    held = {label for label, (name, _) in names.items() if HELD_OUT.search(name)}
    chosen, taken = dict[str, Column](), set[str]()
    for quantity, patterns in synonyms().items():
        exact = [label for label in labels if label == quantity and "_" in quantity]
        pauses = quantity in ("validation_s", "checkpoint_s")
        free = {n: name for n, (name, _) in names.items() if n not in taken and (pauses or n not in held)}
        fits = exact or [n for pattern in patterns for n, name in free.items() if pattern.fullmatch(name)]
        if fits:
            label = fits[0]
            taken.add(label)
            name, unit = names[label][0], names[label][1] or labels[label]
            factor = 1.0 if exact else _factor(quantity, name, unit)
            chosen[quantity] = Column(label, factor, bool(_ONE_GPU.search(name)))
    return chosen


def _factor(quantity: str, name: str, unit: str) -> float | None:
    units = units_of(quantity)
    unit = unit.partition("/")[0] if units is SECONDS else unit  # 6ms/step
    if units is SECONDS and not unit:
        unit = "ms" if name.startswith("ms") else "s" if re.match(r"s(ec\w*)?( per|$)|timing s", name) else ""
    found = SECONDS["min"] if unit == "m" and units is SECONDS else units.get(unit.lower())
    if not unit and (units is SECONDS or units is BYTES or units is SHARES):
        return 1.0 if quantity == "at_s" else None
    return found if found is not None or units is SECONDS else 1.0


def is_held_out(label: str) -> bool:
    return HELD_OUT.search(plain(label)[0]) is not None
