"""`redline bench train`: every arm on every recipe in its own process, a page for people and JSON for
programs. No torch here.

    path = bench_train(cases, hardware, facts, Path("benchmarks"), ...)      # train_<hardware>_<date>.{json,md}

An arm that dies (out of memory, a missing package) is a row that says so, not the end of the benchmark.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from redline.bench.results import BenchRow, head, rows_of, table, write
from redline.config.load import to_toml
from redline.config.recipe import Recipe
from redline.machine.facts import MachineFacts
from redline.plan.plan import Hardware, Plan, to_json
from redline.plan.planner import make_plan
from redline.record.units import format_bytes, format_duration

ARMS = ("loop", "plain", "hf")
LABELS = {
    "loop": "redline, the real loop",
    "loop_without_instruments": "the same without instruments",
    "bare": "the same model, bare step",
    "plain": "plain PyTorch",
    "hf": "HF Trainer",
}
COLUMNS = ("arm", "tokens/s", "interval", "MFU", "against bare", "peak memory", "first step")


def bench_train(
    cases: Sequence[tuple[Recipe, Sequence[str]]],
    hardware: Hardware,
    facts: MachineFacts,
    out: Path,
    *,
    blocks: int,
    steps_per_block: int,
    progress: Callable[[str], None],
) -> Path:
    """Run the arms of each case and write the results; returns the path of the page."""
    results = []
    for recipe, arms in cases:
        plan = make_plan(recipe, hardware)
        entry: dict[str, Any] = {"recipe": asdict(recipe), "plan": to_json(plan), "arms": {}}
        for arm in arms:
            setting = {"recipe": to_toml(recipe), "blocks": blocks, "steps_per_block": steps_per_block}
            started_s = time.monotonic()
            found = entry["arms"][arm] = _run_fitting(arm, setting, plan)
            took_s = time.monotonic() - started_s
            progress(f"{recipe.name} {plan.precision} {arm}: {_brief(found)}  ({took_s:.0f} s)")
        results.append(entry)
    lines = page(hardware, facts, results)
    return write(out, "train", facts, {"results": results}, lines, title=hardware.title)


def _run_fitting(arm: str, setting: dict[str, Any], plan: Plan) -> BenchRow:
    """Run the arm with the plan's passes; if it runs out of memory, with passes half as large and the same batch."""
    micro = plan.micro_batch
    while True:
        accumulation = plan.micro_batch * plan.accumulation // micro
        smaller = to_json(replace(plan, micro_batch=micro, accumulation=accumulation))
        function = f"redline.bench.train_arms:{arm}"
        (found,) = rows_of(function, {**setting, "plan": smaller}, plan.allocator)
        if found.get("outcome") != "out_of_memory" or micro % 2:
            return {**found, "micro_batch": micro}
        micro //= 2


def _brief(found: BenchRow) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    speeds = found["speeds"].items()
    return ", ".join(f"{name} {speed['tokens_per_s']:,.0f} tokens/s" for name, speed in speeds)


def page(hardware: Hardware, facts: MachineFacts, results: Sequence[BenchRow]) -> list[str]:
    """Markdown: a section for each recipe, a row for each arm."""
    lines = [
        *head("train", f"Training on {hardware.title}", facts),
        "MFU: 6N + 12LdT per token over the dense bf16 datasheet peak. Median of the blocks; interval: slowest to"
        " fastest block.",
        "Rows of one loop are interleaved in one process; plain PyTorch and HF Trainer run in separate processes.",
    ]
    for entry in results:
        lines += ["", *_section(entry, hardware)]
    return lines


def _section(entry: BenchRow, hardware: Hardware) -> list[str]:
    recipe, plan = entry["recipe"], entry["plan"]
    names = ("precision", "micro_batch", "attention", "cross_entropy", "compile")
    precision, micro, attention, cross_entropy, compiled = (plan[name]["value"] for name in names)
    lines = [
        f"## {recipe['name']}, {precision}",
        "",
        f"{plan['prediction']['parameters']:,} parameters, T = {recipe['data']['seq_len']},"
        f" {recipe['train']['batch_size']} sequences an update in passes of {micro}; attention {attention}, cross"
        f" entropy {cross_entropy}, compile {compiled}; work {plan['work']}.",
        "",
        *table(
            COLUMNS,
            [cells for arm, row in entry["arms"].items() for cells in _cells(arm, row, entry, hardware)],
        ),
    ]
    loop = entry["arms"].get("loop", {})
    if loop.get("memory_bytes"):
        predicted, seen = loop["predicted_bytes"], loop["memory_bytes"]
        off = f"{predicted / seen - 1:+.1%}"
        lines += ["", f"Predicted peak {format_bytes(predicted)}, seen {format_bytes(seen)}: {off}."]
    return lines


def _label(name: str, plan: BenchRow) -> str:
    """Arms that follow the plan only in part say in which."""
    half, compiled = plan["precision"]["value"] != "fp32", plan["compile"]["value"] != "off"
    used = {
        "plain": ["autocast"] * half + ["compile"] * compiled,
        "hf": ["bf16"] * half + ["compile"] * compiled + ["fused AdamW"],
    }.get(name)
    return LABELS[name] + (f" ({', '.join(used)})" if used else "")


def _cells(arm: str, found: BenchRow, entry: BenchRow, hardware: Hardware) -> list[list[str]]:
    plan = entry["plan"]
    if "failed" in found:
        return [[_label(arm, plan), "failed", found["failed"]]]
    peak, flops = hardware.peak_tflops.get("bf16"), plan["prediction"]["flops_per_token"]
    bare = entry["arms"].get("loop", {}).get("speeds", {}).get("bare", {}).get("tokens_per_s")
    passes = found["micro_batch"]
    fewer = f", passes of {passes}: more ran out of memory" if passes != plan["micro_batch"]["value"] else ""
    rows = []
    for name, speed in found["speeds"].items():
        rate = speed["tokens_per_s"]
        rows.append([
            _label(name, plan) + fewer,
            f"{rate:,.0f}",
            f"{speed['low']:,.0f} – {speed['high']:,.0f}",
            f"{rate * flops / peak / 1e12:.1%}" if peak else "–",
            f"{rate / bare - 1:+.2%}" if bare else "–",
            format_bytes(found["memory_bytes"]) if found["memory_bytes"] else "–",
            format_duration(found["first_step_s"]) if name in ARMS else "",
        ])  # fmt: skip
    return rows
