"""What a column means, from its name and its unit: synonyms, first match wins.

    assign({"tok/sec": "", "dt": "ms", "step": ""})
    == {"step": Column("step", 1), "step_s": Column("dt", 1e-3), "tokens_per_s": Column("tok/sec", 1)}

A name is brought to plain words first: `CurrSamplesPerSec`, `samples/s` and `samples_per_second` are all `samples per
s`. A time without a unit has the factor None: `updates.py` settles it by what else the log says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from redline.diagnose.readers.cells import BYTES, COUNTS, SECONDS, SHARES

_UNITS = SECONDS | {"%": 0.01, "percent": 0.01}
_UNITS |= {unit: size for unit, size in BYTES.items() if len(unit) > 1}
_LAST_UNIT = re.compile(r"(?<!per)(?: in)? (ms|us|s|sec|secs|seconds|minutes|mins|hours)$")
_INNER_UNIT = re.compile(r" (gib|gb|mib|mb)\b")
HELD_OUT = re.compile(
    r"\b(val|valid|validation|validate|eval|evaluation|test|testing|dev|predict|best|hellaswag)\b"
)
_ONE_GPU = re.compile(r"\b(gpu|device|chip|rank)\b")
_MODEL = r"(?:trainer |train |training |model |throughput |device |metrics |perf )*"
_STEP = "(?:step|iteration|iter|update|batch|it)"
_TEXTS = "(?:tok|toks|token|tokens|word|words)"
_ROWS = "(?:sample|samples|sequence|sequences|seq|seqs|example|examples|image|images|imgs)"
SYNONYMS: dict[str, tuple[str, ...]] = {
    "step": (
        f"{_MODEL}global steps?( max steps)?",
        f"{_MODEL}num updates",
        f"{_MODEL}(completed |current |cur |optimizer |optim |this )?(steps?|iterations?|iters?)( num| number| idx| train)?",
        "it|updates?|s|i|n|batch|batches|batch idx|progress on train",
        "fraction|bracketed",
    ),
    "epoch": (f"{_MODEL}(current )?epochs?( num| number| idx| train)?|epochnum",),
    "loss": (
        f"{_MODEL}loss",
        f"{_MODEL}loss step|{_MODEL}loss train( total)?|{_MODEL}step loss|trl",
        f"{_MODEL}(lm|total|reduced train|ce|xent|cross entropy|mlm|sft|dpo|policy|actor|actor pg|pg|nll) ?loss",
        f"{_MODEL}(\\w+ )?loss( mean| avg| epoch| step)?|{_MODEL}crossentropyloss|train",
    ),
    "grad_norm": (f"{_MODEL}(actor |optim |total )*(grad|gradient|grads) norm( total)?|(train )?gnorm|norm",),
    "step_s": (
        f"(perf )?(elapsed )?time per {_STEP}( time)?|timing s step",
        f"{_MODEL}(total )?{_STEP}s?( time| timing| duration| latency| dt)+",
        f"(ms|s|sec|secs|seconds) per {_STEP}|end to end latency",
        "dt( time)?|delta( time)?|seconds|ms|time|batch t",
        "total",
    ),
    "mean_step_s": ("step avg( time)?", f"(avg|average|mean) {_STEP} time", f"train speed s per {_STEP}"),
    "updates_per_s": (
        f"{_MODEL}(?:per device )?{_STEP[:-1]}|its|iters|iterations|steps|updates|batches) per s( speed| rate| throughput)?",
        "(train )?ups",
    ),
    "mean_updates_per_s": (f"train speed( {_STEP} per s)?",),
    "tokens_per_s": (
        f"{_MODEL}(curr |current |total )?{_TEXTS} per s( (per )?(gpu|device|chip))*",
        f"{_MODEL}items per s",
        f"{_MODEL}per device items per s|(train )?wps|tps|perf throughput",
        f".*\\b{_TEXTS}\\b.*\\bper s\\b.*|throughput",
    ),
    "samples_per_s": (
        f"{_MODEL}(curr|current) {_ROWS} per s",
        f"{_MODEL}{_ROWS} per s",
        f"{_MODEL}(per device )?{_ROWS} per s( per gpu)?",
        f"{_ROWS} per s.*",
    ),
    "tokens": (
        "perf total num tokens|(train )?wpb|(train )?ntokens",
        f"{_MODEL}(num |batch |total )*tokens( per {_STEP})?|toks?",
    ),
    "tokens_total": (
        "consumed tokens",
        "(train )?num (input )?tokens( seen)?",
        "(total |num )*tokens (seen|processed|consumed|trained)",
    ),
    "samples_total": ("consumed samples", "(num )?samples (seen|consumed)"),
    "batch_size": ("global batch size|(train )?bsz|(train )?nsentences",),
    "mfu": (f"{_MODEL}(perf |device |bf16 |% bf16 )*mfu( actor| %)?", ".*\\bmfu\\b.*"),
    "tflops": (
        f"{_MODEL}(throughput |approx )*(per gpu )?(tflops?|flops)( per s)?( per gpu)*",
        ".*\\btflops?\\b.*",
    ),
    "memory_bytes": (
        "(perf )?(max|peak)( gpu| cuda)? (mem|memory)( allocated| alloc| usage| used)?",
        "(gpu |cuda )*(mem|memory)( allocated| alloc| usage| used| log| max active)?",
    ),
    "data_wait_s": (
        "(time )?data( wait| load(ing|er)?| fetch)?( time| t)?|batch generator|dataload(er|ing)( time)?",
    ),
    "remaining_s": ("remaining( time)?|eta( time| seconds)?|time (left|remaining)",),
    "elapsed_s": (
        f"{_MODEL}(time )?(total )?elapsed( time)?",
        f"{_MODEL}runtime|total time|wall( time| clock)?|wallclock( time)?",
        "train(ing)? (time|wall( time)?)",
    ),
    "at_s": ("timestamp|time stamp",),
    "padding_share": ("padding( share| ratio| fraction)?",),
    "generate_s": (
        "(time )?(generate|generation|rollout|sampling) (time|latency)|t (rollout|generate|generation)",
    ),
    "forward_s": ("(time )?(forward|fwd)( compute| pass)?( time)?",),
    "backward_s": ("(time )?(backward|bwd)( compute| pass)?( time)?",),
    "optimizer_s": ("(time )?optim(izer)?( step)?( time)?",),
    "communication_s": ("(time )?(communication|comm|all grads sync)( time)?",),
    "validation_s": ("(eval|validation)( \\w+)? (runtime|time)|timing s testing",),
    "checkpoint_s": ("timing s save checkpoint",),
    "copy_s": ("copy time",),
    "issue_s": ("issue time",),
}
"""Quantity: whole names in plain words, the surest first. `--map` may name any of them."""
_COMPILED = {quantity: [re.compile(one) for one in patterns] for quantity, patterns in SYNONYMS.items()}


@dataclass(frozen=True)
class Column:
    label: str
    factor: float | None = 1.0
    """What a value is multiplied with; None where the unit is not known."""
    one_gpu: bool = False
    told: bool = False
    """Whether the user gave the unit."""


@lru_cache(maxsize=4096)
def plain(label: str) -> tuple[str, str]:
    """A label in plain words, and the unit that stands in it."""
    unit, name = "", label
    if bracket := re.search(r"\s*[(\[]([^()\[\]]{1,24})[)\]]\s*$", label):
        inside = bracket[1].strip().lower()
        unit, name = (inside, label[: bracket.start()]) if inside in _UNITS else ("", label)
    timing = name.lower().startswith(("timing_s", "timing s"))
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower().replace("_", " ")
    name = re.sub(r"/\s*(?:seconds?|secs?|s)(?![a-z])|(?<=\bper) se?c(?:ond)?s?(?![a-z])", " per s ", name)
    name = name.replace("per per s", "per s")
    if not timing:
        name = re.sub(rf"\b(ms|s|sec|seconds|time|tokens)\s*/\s*({_STEP[3:-1]})\b", r"\1 per \2", name)
    name = re.sub(r"[/|]\s*(gpu|device|chip)(?![a-z])", r" per \1", name)
    name = " ".join(re.sub(r"[^a-z0-9%]+", " ", name).split())
    if not unit and (found := _LAST_UNIT.search(f" {name}")) and f" {name}"[: found.start()].strip():
        unit, name = found[1], f" {name}"[: found.start()].strip()
        name += "" if re.search(r"\b(time|timing|dt|eta)\b", name) else " time"
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
    chosen: dict[str, Column] = {}
    taken: set[str] = set()
    for quantity, patterns in _COMPILED.items():
        exact = [label for label in labels if label == quantity and "_" in quantity]
        fits = exact or [
            label
            for pattern in patterns
            for label, (name, _) in names.items()
            if label not in taken
            and pattern.fullmatch(name)
            and (quantity in ("validation_s", "checkpoint_s") or not HELD_OUT.search(name))
        ]
        if fits:
            label = fits[0]
            taken.add(label)
            name, unit = names[label][0], names[label][1] or labels[label]
            factor = 1.0 if exact else _factor(quantity, name, unit)
            chosen[quantity] = Column(label, factor, bool(_ONE_GPU.search(name)))
    return chosen


def _factor(quantity: str, name: str, unit: str) -> float | None:
    units = units_of(quantity)
    if units is SECONDS and not unit:
        unit = "ms" if name.startswith("ms") else "s" if re.match(r"s(ec\w*)?( per|$)|timing s", name) else ""
    if quantity == "memory_bytes" and unit in ("M", "G"):
        unit += "iB"
    found = SECONDS["min"] if unit == "m" and units is SECONDS else units.get(unit.lower())
    if not unit and (units is SECONDS or units is BYTES or units is SHARES):
        return 1.0 if quantity in ("at_s",) else None
    return found if found is not None or units is SECONDS else 1.0


def is_held_out(label: str) -> bool:
    """Whether a column is of a validation and not of training."""
    return HELD_OUT.search(plain(label)[0]) is not None
