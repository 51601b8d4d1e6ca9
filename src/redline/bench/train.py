"""`redline bench train`: every arm on every recipe in its own process, a table for people and JSON for
programs. No torch here.

    results = bench_train(recipes, hardware, out=Path("benchmarks"))    # writes
                                                                        train_<hardware>_<date>.{json,md}

An arm that dies (out of memory, a missing package) is a row that says so, not the end of the benchmark.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from redline.config.load import to_toml
from redline.config.recipe import Recipe
from redline.machine.facts import MachineFacts
from redline.plan.plan import Hardware, Plan, save, to_json
from redline.plan.planner import make_plan
from redline.record.files import write_atomic
from redline.record.units import format_bytes, format_duration, format_limit_share

ARMS = ("loop", "plain", "hf")
ARM_LIMIT_S = 1800
LABELS = {
    "loop": "redline, the real loop",
    "loop_without_instruments": "the same without instruments",
    "bare": "the same model, bare step",
    "plain": "plain PyTorch",
    "hf": "HF Trainer",
}


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
    """Run the arms of each case and write the results; returns the path of the table."""
    results = []
    for recipe, arms in cases:
        plan = make_plan(recipe, hardware)
        entry: dict[str, Any] = {"recipe": asdict(recipe), "plan": to_json(plan), "arms": {}}
        with tempfile.TemporaryDirectory() as folder:
            for arm in arms:
                task = {
                    "arm": arm,
                    "recipe": to_toml(recipe),
                    "blocks": blocks,
                    "steps_per_block": steps_per_block,
                }
                started_s = time.monotonic()
                entry["arms"][arm] = _run_fitting(task, plan, Path(folder) / f"{arm}.json")
                progress(
                    f"{recipe.name} {plan.precision} {arm}: {_brief(entry['arms'][arm])} "
                    f" ({time.monotonic() - started_s:.0f} s)"
                )
        results.append(entry)
    name = re.sub(r"[^a-z0-9]+", "-", hardware.title.lower()).strip("-")
    base = out / f"train_{name}_{time.strftime('%Y%m%d')}"
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(
        base.with_suffix(".json"), json.dumps({"machine": asdict(facts), "results": results}, indent=1) + "\n"
    )
    write_atomic(base.with_suffix(".md"), table(hardware, facts, results))
    return base.with_suffix(".md")


def _run_fitting(task: dict[str, Any], plan: Plan, path: Path) -> dict[str, Any]:
    """Run the arm with the plan's passes; where it runs out of memory, with half of them, and say so: the
    batch stays the same."""
    micro = plan.micro_batch
    while True:
        save(
            replace(plan, micro_batch=micro, accumulation=plan.micro_batch * plan.accumulation // micro), path
        )
        result = _run({**task, "plan": str(path)})
        if "OutOfMemoryError" not in result.get("failed", "") or micro % 2:
            return {**result, "micro_batch": micro}
        micro //= 2


def _run(task: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "redline.bench.arms", json.dumps(task)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ARM_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {ARM_LIMIT_S} s"}
    if process.returncode == 0:
        return dict(json.loads(process.stdout.strip().splitlines()[-1]))
    lines = [line for line in process.stderr.strip().splitlines() if line.strip()]
    return {"failed": lines[-1][:300] if lines else f"exit code {process.returncode}"}


def _brief(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    return ", ".join(
        f"{name} {speed['tokens_per_s']:,.0f} tokens/s" for name, speed in result["speeds"].items()
    )


def table(hardware: Hardware, facts: MachineFacts, results: Sequence[dict[str, Any]]) -> str:
    """The Markdown table: one section a recipe, one row an arm."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    lines = [
        f"# Training on {hardware.title}",
        "",
        f"Made by `redline bench train` on {time.strftime('%Y-%m-%d')}; {versions}; Python {facts.python}.",
        (
            "MFU: 6N + 12LdT per token over the dense bf16 datasheet peak. Median of the blocks; interval:"
            " slowest to fastest block."
        ),
        (
            "Rows of one loop are interleaved in one process; plain PyTorch and HF Trainer run in processes"
            " of their own."
        ),
    ]
    for entry in results:
        lines += ["", *_section(entry, hardware)]
    return "\n".join(lines) + "\n"


def _section(entry: dict[str, Any], hardware: Hardware) -> list[str]:
    recipe, plan = entry["recipe"], entry["plan"]
    value = {
        name: plan[name]["value"]
        for name in ("precision", "micro_batch", "attention", "cross_entropy", "compile")
    }
    lines = [
        f"## {recipe['name']}, {value['precision']}",
        "",
        (
            f"{plan['prediction']['parameters']:,} parameters, T = {recipe['data']['seq_len']},"
            f" {recipe['train']['batch_size']} sequences an update in passes of {value['micro_batch']};"
            f" attention {value['attention']}, cross entropy {value['cross_entropy']}, compile"
            f" {value['compile']}; work {plan['work']}."
        ),
        "",
        "| arm | tokens/s | interval | MFU | against bare | peak memory | first step |",
        "|---|---|---|---|---|---|---|",
        *_rows(entry, hardware),
    ]
    loop = entry["arms"].get("loop", {})
    if loop.get("memory"):
        predicted, seen = loop["predicted_bytes"], loop["memory"]["allocated_peak_bytes"]
        lines += [
            "",
            (
                f"Predicted peak {format_bytes(predicted)}, seen {format_bytes(seen)}:"
                f" {predicted / seen - 1:+.1%}."
            ),
        ]
    return lines


def _label(name: str, plan: dict[str, Any]) -> str:
    """The arms that do not follow the plan in everything say what they took of it."""
    half, compiled = plan["precision"]["value"] != "fp32", plan["compile"]["value"] != "off"
    used = {
        "plain": ["autocast"] * half + ["compile"] * compiled,
        "hf": ["bf16"] * half + ["compile"] * compiled + ["fused AdamW"],
    }.get(name)
    return LABELS[name] + (f" ({', '.join(used)})" if used else "")


def _rows(entry: dict[str, Any], hardware: Hardware) -> list[str]:
    peak, flops = hardware.peak_tflops.get("bf16"), entry["plan"]["prediction"]["flops_per_token"]
    bare = entry["arms"].get("loop", {}).get("speeds", {}).get("bare", {}).get("tokens_per_s")
    rows = []
    for arm, result in entry["arms"].items():
        if "failed" in result:
            rows.append(f"| {_label(arm, entry['plan'])} | failed | {result['failed']} | | | | |")
            continue
        for name, speed in result["speeds"].items():
            rate = speed["tokens_per_s"]
            own = entry["plan"]["micro_batch"]["value"]
            fewer = (
                f", passes of {result['micro_batch']}: more ran out of memory"
                if result.get("micro_batch", own) != own
                else ""
            )
            cells = [
                _label(name, entry["plan"]) + fewer,
                f"{rate:,.0f}",
                f"{speed['low']:,.0f} – {speed['high']:,.0f}",
                format_limit_share(rate * flops / peak / 1e12 if peak else None),
                f"{rate / bare - 1:+.2%}" if bare else "–",
                format_bytes(result["memory"]["allocated_peak_bytes"]) if result["memory"] else "–",
                format_duration(result["first_step_s"]) if name in ARMS else "",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows
