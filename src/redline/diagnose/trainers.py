"""What is special about each trainer, from trainers.toml: who wrote a log, what its head says, what a fix is called
there.

    trainer = recognise(text)
    trainer.title, facts_of(trainer, head), trainer.option("micro_batch")
"""

import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from redline.diagnose.readers.cells import COUNTS, amount, finite

_NO_NUMBER = re.compile(r"\d{40,}")
"""Taken out before patterns look for numbers, which take long over a run of digits."""
_IS = r"""['"]? *[:=| ] *['"]?"""
_LISTED = r"(?:NVIDIA|Tesla|GeForce|Quadro)[ -](?:NVIDIA[ -]|Graphics )?"
_BOARDS = re.compile(
    _LISTED
    + r"((?:RTX )?(?:[ABHL]\d{1,3}S?|V100|P100|T4|GH200|RTX \d{4}|GeForce RTX \d{4})(?:[ -](?:\d+GB|HBM3e?|SXM\d?|PCIE|PCIe|NVL))*)"
)
_FAMILIES = {"H200": "h200-141g", "GH200": "h200-141g", "H100 PCIe": "h100-pcie-80g", "H100": "h100-80g"}
_FAMILIES |= {"A100": "a100-80g", "V100": "v100-32g", "B200": "b200-192g", "L40S": "l40s-48g", "L4": "l4-24g"}
_FAMILIES |= {"T4": "t4-16g", "RTX 3090": "rtx-3090-24g", "RTX 4090": "rtx-4090-24g"}
"""Name in a log: board of the datasheet table."""


@dataclass(frozen=True)
class Trainer:
    name: str
    title: str
    entry: dict[str, Any]

    @property
    def one_gpu(self) -> bool:
        return bool(self.entry.get("one_gpu"))

    @property
    def means(self) -> bool:
        return bool(self.entry.get("means"))

    @property
    def columns(self) -> dict[str, str]:
        return dict(self.entry.get("columns", {}))

    def option(self, fix: str, *, own: bool = False) -> str:
        """What a fix is called in this trainer's options; where it has no name for it, in general words, or nothing
        where only its `own` will do."""
        named = self.entry.get("options", {}).get(fix)
        return str(named or ("" if own else _table()["any"]["options"].get(fix, "")))


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("redline.diagnose") / "trainers.toml").read_text(encoding="utf-8"))


def named(name: str) -> Trainer:
    entry = _table().get(name) or _table()["any"]
    return Trainer(name if name in _table() else "", entry["title"], entry)


def recognise(text: str) -> Trainer:
    """The trainer whose marks a log bears; one without a name where it bears none."""
    text = _NO_NUMBER.sub(" ", text)
    for name, entry in _table().items():
        if any(_compiled(pattern).search(text) for pattern in entry["recognise"]):
            return Trainer(name, entry["title"], entry)
    return named("")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("<is>", _IS), re.MULTILINE | re.IGNORECASE)


def facts_of(trainer: Trainer, head: str) -> dict[str, Any]:
    """What stands beside the numbers of a log: by the trainer's own words, then by those that many use."""
    found: dict[str, Any] = {}
    told = [line for line in head.split("\n") if not line.lstrip().startswith("#")]  # comments of a recipe
    head = "\n".join(told)
    for entry in (trainer.entry, _table()["any"]):
        for name, patterns in entry.get("facts", {}).items():
            if name in found or (name == "batch_size" and "tokens" in found):
                continue
            if isinstance(patterns, dict):
                fits: Any = (word for word, pattern in patterns.items() if _compiled(pattern).search(head))
            else:
                fits = (each for pattern in patterns if (each := _last(name, pattern, head)) is not None)
            value = next(fits, None)
            if value is not None:
                found[name] = value
    if gpu := _gpu(head) or _gpu_by_name(head):
        found.setdefault("gpu", gpu)
    if listed := re.findall(r"^\|\s+(\d+)\s+NVIDIA .{5,30}\|", head, re.MULTILINE):  # nvidia-smi
        found["gpus"] = float(len(set(listed)))
    size = re.search(r"[-_/]([\d.]{1,5}[bm])\b", str(found.get("model", "")), re.IGNORECASE)
    if "parameters" not in found and size:
        found["parameters"] = amount(size[1], COUNTS)
    if "rank_parameters" in found:
        found["parameters"] = found.pop("rank_parameters") * found.get("model_parallel", 1.0)
    return _in_our_units(found)


def _last(name: str, pattern: str, head: str) -> float | str | None:
    matches = list(_compiled(pattern).finditer(head))
    if not matches:
        return None
    groups = [group for group in matches[-1].groups() if group]
    if name in ("rollout", "use_cache", "remove_padding", "eager_rollout", "model"):
        return groups[0] if name == "model" else groups[0].lower()
    # [4, 2] is a mesh; 123,650,000 is a number
    parts = [part for group in groups for part in (re.split(r", *", group) if name == "gpus" else [group])]
    values = [amount(part.strip().rstrip("."), COUNTS) or finite(part) for part in parts]
    return math.prod(value for value in values if value) if values and all(values) else None


def _in_our_units(found: dict[str, Any]) -> dict[str, Any]:
    for suffix, factor in (
        ("_gib", 2.0**30),
        ("_mib", 2.0**20),
        ("_tera", 1e-12),
        ("_million", 1e6),
        ("_billion", 1e9),
    ):
        for name in [name for name in found if name.endswith(suffix)]:
            base = name.removesuffix(suffix)
            renamed = {
                "memory": "memory_bytes",
                "memory_used": "memory_used_bytes",
                "mfu_peak": "mfu_peak_tflops",
            }
            ours = renamed.get(base, base)
            value = found.pop(name)
            found.setdefault(ours, value * factor if value * factor < 2.0**50 or factor < 1 else value)
    return found


def _gpu(head: str) -> str | None:
    """The board that a log names as a device: with the vendor in front, and not in a comment."""
    for line in head.splitlines():
        if (found := _BOARDS.search(line)) and not line.lstrip().startswith("#"):
            name = found[1].strip().removeprefix("GeForce ")
            board = next((board for family, board in _FAMILIES.items() if name.startswith(family)), None)
            if board == "a100-80g" and "40GB" in name:
                return "a100-40g"
            if board:
                return board
    return None


def _gpu_by_name(head: str) -> str | None:
    """The board in the name that a run was given."""
    named = r"(?:experiment|run|job)[_ ]?(?:name|id)\W{1,4}[\w.-]{0,60}?"
    found = re.search(named + r"(v100|a100|h100|h200|b200)(?![a-z0-9])", head, re.IGNORECASE)
    return _FAMILIES[found[1].upper()] if found else None
