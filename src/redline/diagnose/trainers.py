"""What is special about each trainer, from trainers.toml: who wrote a log, what its head says, what a fix is called
there.

    trainer = recognise(text)
    trainer.title, facts_of(trainer, head), trainer.options["micro_batch"]
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from redline.diagnose.data import compiled, patterns, table
from redline.diagnose.readers.cells import COUNTS, amount, finite
from redline.machine.specs import SPECS

HEAD = patterns("head")
FAMILIES = {name.rpartition("-")[0].replace("-", " "): name for name in SPECS} | {"gh200": "h200-141g"}
"""Name in a log: board of the datasheet table, of several the largest."""
_WORDS = ("rollout", "use_cache", "remove_padding", "eager_rollout", "model")
"""Facts that are words of the log."""
_UNITS = {"memory_gib": ("memory_bytes", 2.0**30), "memory_mib": ("memory_bytes", 2.0**20)}
_UNITS |= {"memory_used_mib": ("memory_used_bytes", 2.0**20), "mfu_peak_tera": ("mfu_peak_tflops", 1e-12)}
_UNITS |= {"parameters_million": ("parameters", 1e6), "parameters_billion": ("parameters", 1e9)}
"""Facts that trainers print in another unit than ours."""


@dataclass(frozen=True)
class Trainer:
    name: str
    title: str
    entry: dict[str, Any]

    @property
    def options(self) -> dict[str, str]:
        """What each fix is called in this trainer's options; in general words where it has no name for one."""
        known = {**table("trainers")["any"]["options"], **self.entry.get("options", {})}
        return {**known, "size_of_a_pass": known["micro_batch"].removeprefix("a larger ")}


def named(name: str) -> Trainer:
    known = table("trainers")
    entry = known.get(name) or known["any"]
    if "like" in entry:
        base = named(entry["like"]).entry
        entry = entry | {part: base.get(part, {}) | entry.get(part, {}) for part in ("facts", "options")}
    return Trainer(name if name in known else "", entry["title"], entry)


def recognise(text: str) -> Trainer:
    """The trainer whose marks a log bears; one without a name where it bears none."""
    text = HEAD["no_number"].sub(" ", text)
    for name, entry in table("trainers").items():
        if any(compiled(f"(?im){mark}").search(text) for mark in entry["recognise"]):
            return named(name)
    return named("")


def facts_of(trainer: Trainer, head: str) -> dict[str, Any]:
    """The facts beside the numbers of a log: by the trainer's own words, then by those that many use."""
    found: dict[str, Any] = {}
    head = HEAD["comment"].sub("", head)
    for entry in (trainer.entry, table("trainers")["any"]):
        for name, ways in entry.get("facts", {}).items():
            if name in found or (name == "batch_size" and "tokens" in found):
                continue
            if isinstance(ways, dict):
                fits: Any = (word for word, form in ways.items() if compiled(f"(?im){form}").search(head))
            else:
                fits = (each for pattern in ways if (each := _last(name, pattern, head)) is not None)
            if (value := next(fits, None)) is not None:
                found[name] = value
    if gpu := _gpu(head):
        found.setdefault("gpu", gpu)
    if listed := HEAD["nvidia_smi"].findall(head):
        found["gpus"] = float(len(set(listed)))
    size = HEAD["size"].search(str(found.get("model", "")))
    if "parameters" not in found and size:
        found["parameters"] = amount(size[1], COUNTS) or None
    if "rank_parameters" in found:
        found["parameters"] = found.pop("rank_parameters") * found.get("model_parallel", 1.0)
    for name, (ours, factor) in _UNITS.items():
        # Megatron prints bytes where its older versions print MiB
        if (value := found.pop(name, None)) is not None:
            found.setdefault(ours, value * factor if value * factor < 2.0**50 else value)
    return found


def _last(name: str, pattern: str, head: str) -> float | str | None:
    fraction, every = HEAD["fraction"], compiled(f"(?im){pattern}").finditer(head)
    matches = [each for each in every if not fraction.match(head, each.end())]
    groups = [group for group in matches[-1].groups() if group] if matches else []
    if name in _WORDS and groups:
        return groups[0] if name == "model" else groups[0].lower()
    # [4, 2] is a mesh; 123,650,000 is a number
    parts = [part for group in groups for part in (re.split(r", *", group) if name == "gpus" else [group])]
    values = [amount(part.strip().rstrip("."), COUNTS) or finite(part) for part in parts]
    return math.prod(value for value in values if value) if values and all(values) else None


def _gpu(head: str) -> str | None:
    """The board that a log names as a device, with the vendor in front, or in the name that the run was given."""
    for found in HEAD["board"].finditer(head):
        name = found[1].lower().replace("-", " ").removeprefix("geforce ")
        fits = [family for family in FAMILIES if re.match(rf"{family}\b", name)]
        if fits:
            board = FAMILIES[max(fits, key=len)]
            return "a100-40g" if board == "a100-80g" and "40gb" in name else board
    named = HEAD["run_name"].search(head)
    return FAMILIES[named[1].lower()] if named else None
