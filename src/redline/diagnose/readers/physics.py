"""Numbers that follow from others, and numbers that contradict each other.

    tokens per update = tokens/s x seconds per update      batch = micro-batch x accumulation x GPUs
    MFU = tokens/s of one GPU x FLOPs per token / peak

What a log does not state is solved for where only one whole number fits; what it states twice is compared. Nothing is
made up: a fact that no equation gives stays unknown.
"""

import math
import re
from dataclasses import fields
from statistics import median
from typing import Any

from redline.diagnose.data import table
from redline.diagnose.observed import Facts
from redline.diagnose.readers.updates import Timed
from redline.diagnose.trainers import Trainer
from redline.machine.specs import SPECS

NEAR = 0.06
"""How far a ratio may be from a whole number: printed figures are rounded, and a running mean lags."""
LEAST_MFU = 0.005
"""A smaller one has too few digits to derive a number of GPUs from it."""
VOCABULARY = 50_257
"""GPT-2's vocabulary, for a model size estimated from its shape."""
_ONE_GPU = re.compile(r"\s?\bper (?:gpu|device|chip)\b")
Known = dict[str, Any]


def whole(value: float) -> float | None:
    """The whole number that a ratio stands for."""
    rounded = float(round(value)) if 1 - NEAR <= value < 1e7 else 0.0
    return rounded if rounded and abs(value / rounded - 1) <= NEAR else None


def rows(value: float) -> float | None:
    """The rows of an update, from a rate and a time; if not whole, the round number near it (126.5 is 128)."""
    near = whole(value)
    if near is None or abs(value - near) <= 0.1:
        return near
    possible = range(math.ceil(0.97 * value), math.floor(1.03 * value) + 1)
    roundest = max(possible, key=lambda n: n & -n, default=1)
    return float(roundest) if roundest % 4 == 0 else near


def solve(known: Known, run: Timed, trainer: Trainer, *, one_gpu: bool, summary: dict[str, float]) -> Facts:
    """The facts and what follows from them (the run's notes say it); tokens go into the rows."""
    _model_and_memory(known, run, trainer, summary)
    step_s, rate = run.typical("step_s"), run.typical("tokens_per_s")
    _batch(known, run, step_s, summary)
    if rate and step_s and abs(rate * step_s / (known["batch_size"] or 1.0) - 1) < NEAR:
        rate = None  # a "throughput" of rows and not of tokens
    tokens = run.typical("tokens") or known.get("tokens")
    if tokens is None and known.get("row_tokens") and known.get("batch_size"):
        tokens = known["row_tokens"] * known["batch_size"]
    if rate and step_s:
        if not tokens and one_gpu and known["gpus"] is None:
            unknown = "tokens/s is for one GPU, and the log does not say how many there are (--fact gpus=N)"
            run.notes.append(unknown)
        elif not tokens:
            tokens = rate * step_s * (known["gpus"] if one_gpu else 1.0)
        _whose_rate(known, (tokens or 0.0) / (rate * step_s), rate, one_gpu, run.notes)
    if trainer.entry.get("frames") and known.get("frames"):
        tokens = None
        run.notes.append("its tokens are audio frames, so nothing is said about FLOPs")
    _gpus(known, run, trainer, tokens)
    tflops = run.typical("tflops")
    if tflops and "flops_per_token" not in known:
        if tokens and step_s and known.get("gpus"):
            known["flops_per_token"] = tflops * 1e12 * step_s * known["gpus"] / tokens
        elif rate and one_gpu:
            known["flops_per_token"] = tflops * 1e12 / rate
    for row in run.rows:
        row.values["tokens"] = row.values.get("tokens", 0.0) or tokens or 0.0 if tokens else 0.0
    known["mfu_peak_tflops"] = trainer.entry.get("mfu_tflops") or known.get("mfu_peak_tflops")
    known["mfu_scope"] = trainer.entry.get("mfu_scope", "the step")
    told = {field.name: known.get(field.name) for field in fields(Facts)}
    return Facts(**{name: value for name, value in told.items() if value is not None})


def _model_and_memory(known: Known, run: Timed, trainer: Trainer, summary: dict[str, float]) -> None:
    known.setdefault("total_flops", summary.get("total_flops"))
    rated = run.typical("tokens_per_s") or run.typical("samples_per_s")
    known["gpus"] = known.get("gpus") or _by_two_rates(run) or (trainer.entry.get("alone") if rated else None)
    for row in run.rows:
        if known.get("memory_bytes") and (free := row.more.get("gb free")):
            row.values.setdefault("memory_bytes", max(0.0, known["memory_bytes"] - free * 2**30))
    layers, width = known.get("num_layers"), known.get("hidden_size")
    if "parameters" not in known and layers and width and known.get("experts", 0) < 2:
        known["parameters"] = 12 * layers * width**2 + VOCABULARY * width
        size = f"{known['parameters'] / 1e6:,.0f}M parameters"
        run.notes.append(f"{size}, estimated from layers and width (--fact parameters=N overrides this)")
    for fact, names in table("columns")["lengths"].items():
        if values := [row.more[name] for row in run.rows for name in names if name in row.more]:
            known.setdefault(fact, median(values))


def _batch(known: Known, run: Timed, step_s: float | None, summary: dict[str, float]) -> None:
    """Sequences and tokens of an update: a column, a rate, the closing summary, or micro-batch x accumulation x GPUs."""
    sizes = [run.typical("batch_size")]
    samples_per_s, runtime_s = run.typical("samples_per_s"), summary.get("runtime_s")
    if samples_per_s and step_s and "tokens" not in known:
        sizes.append(rows(samples_per_s * step_s))
    if step_s and runtime_s and summary.get("samples_per_s"):
        updates = summary.get("updates") or runtime_s / step_s
        sizes.append(rows(summary["samples_per_s"] * runtime_s / updates))
    if known.get("micro_batch") and known.get("gpus") and "tokens" not in known:
        sizes.append(known["micro_batch"] * known["gpus"] * known.get("accumulation", 1.0))
    known.setdefault("batch_size", next(filter(None, sizes), None))
    seq_len, tokens = known.get("seq_len"), known.get("tokens")
    if seq_len and not known.get("trained_parameters"):  # fine-tuning rows are shorter than the limit
        known["batch_size"] = known["batch_size"] or (tokens / seq_len if tokens else None)
        known["tokens"] = tokens or (known["batch_size"] * seq_len if known["batch_size"] else None)


def _whose_rate(known: Known, ratio: float, rate: float, one_gpu: bool, notes: list[str]) -> None:
    """Whose tokens/s the log prints: `ratio` is the tokens of an update over those that the rate gives."""
    factor = whole(ratio)
    if one_gpu and factor:
        known["gpus"] = known.get("gpus") or factor
    gpus = known.get("gpus")
    if factor and factor == gpus and factor > 1:
        one = f"the printed {rate:,.0f} tokens/s are for one GPU"
        notes.append(f"{one}; all {gpus:.0f} together make {rate * gpus:,.0f}")


def _gpus(known: Known, run: Timed, trainer: Trainer, tokens: float | None) -> None:
    """How many GPUs: from the batch, or from an MFU against a peak that is known."""
    sizes = [known.get(name) for name in ("batch_size", "micro_batch", "accumulation")]
    if known.get("gpus") is None and all(sizes):
        known["gpus"] = whole(sizes[0] / sizes[1] / sizes[2])  # type: ignore[operator]
    spec, mfu, step_s = SPECS.get(known.get("gpu", "")), run.typical("mfu"), run.typical("step_s")
    asked = known.get("gpus") is None and not trainer.entry.get("mfu_scope")
    peak = trainer.entry.get("mfu_tflops") or (spec.bf16_tflops if spec and asked else None)
    dense = known.get("parameters") and known.get("experts", 0) < 2
    if not (peak and tokens and step_s and mfu and mfu > LEAST_MFU and dense):
        return
    shape = [known.get(name) for name in ("num_layers", "hidden_size", "seq_len")]
    attention = 12 * shape[0] * shape[1] * shape[2] if all(shape) else 0.0  # type: ignore[operator]
    found = tokens / step_s * (6 * known["parameters"] + attention) / (mfu * peak * 1e12)
    one_pass = (known.get("micro_batch") or 0) * (known.get("seq_len") or 0)
    rows = round(tokens / one_pass) if one_pass else 0
    possible = [n for n in range(1, rows + 1) if rows % n == 0] or [2**power for power in range(14)]
    # Attention adds up to half of 6 per parameter where its shape is not printed.
    most = (1.1 if attention else 1.5) * found
    number = next((float(n) for n in possible if 0.93 * found <= n <= most), None)
    if number and number != known.get("gpus"):
        known["gpus"] = number
        many = f"{number:.0f} GPU{'s' if number > 1 else ''}"
        run.notes.append(f"{many}, from its tokens/s, parameters and MFU (--fact gpus=N overrides this)")


def _by_two_rates(run: Timed) -> float | None:
    """`tokens_per_sec` beside `tokens_per_sec_per_gpu`."""
    ratios = []
    for row in run.rows:
        rates = {f"{of} per s": row.values.get(f"{of}_per_s") for of in ("tokens", "samples")}
        for name, one in row.more.items():
            same = _ONE_GPU.sub("", name, count=1)
            if same != name and " per s" in name and one:
                both = row.more.get(same) or next((r for of, r in rates.items() if same.endswith(of)), None)
                ratios += [both / one] if both else []
    return whole(median(ratios)) if ratios else None
