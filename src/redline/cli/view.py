"""What `redline train` says before, during and after a run."""

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redline.cli.live import make_view
from redline.cli.options import status
from redline.config.recipe import Recipe
from redline.plan.plan import Plan
from redline.record.export import make_exporters
from redline.record.units import format_bytes, format_count, format_rate


def describe(recipe: Recipe, plan: Plan, folder: Path) -> str:
    """Two lines: what is trained, and how."""
    p = plan.prediction
    return (
        f"{recipe.name}: {format_count(p.parameters)} parameters, {recipe.train.steps:,} steps of"
        f" {recipe.tokens_per_step:,} tokens, run folder {folder}\nplan: {plan.hardware.title};"
        f" {plan.precision}, {plan.micro_batch} x {plan.accumulation} passes x {plan.world_size} process(es),"
        f" compile {plan.compile}, recompute {plan.recompute}; predicted peak {format_bytes(p.memory_bytes)}"
        " (why: redline plan)"
    )


def peak_note(plan: Plan) -> str:
    """The MFU's convention in words, or why there is none."""
    dtype = "bf16" if plan.precision == "fp8" else plan.precision
    peak = plan.hardware.peak_tflops.get(dtype)
    if peak is None:
        return f"no datasheet peak for {plan.hardware.title}"
    return f"6N+12LdT, of {peak:,.0f} TFLOP/s {dtype} datasheet"


def observers_for(
    options: argparse.Namespace, recipe: Recipe, plan: Plan, folder: Path, resume_step: int
) -> list[Any]:
    """The live view and the exporters that were asked for."""
    title = (
        f"{recipe.name} · {format_count(plan.prediction.parameters)} parameters · {plan.hardware.title} ·"
        f" {plan.precision}"
    )
    view = make_view(
        title=title,
        total_steps=recipe.train.steps,
        max_hours=recipe.train.max_hours,
        peak_note=peak_note(plan),
        memory_total_bytes=plan.hardware.memory_bytes,
        quiet=options.quiet or options.json,
    )
    config = {"recipe": asdict(recipe), "fingerprint": recipe.fingerprint}
    exporters = make_exporters(
        options.export, folder, run_name=recipe.name, config=config, warn=status, resume_step=resume_step
    )
    return [view, *exporters]


def print_outcome(outcome: Any, recipe: Recipe, folder: Path) -> None:
    from redline.train.loop import STOPPED

    line = outcome.metrics
    print(f"\n{outcome.why} at step {outcome.step:,} of {recipe.train.steps:,}")
    if "valid_loss" in line:
        print(
            f"validation loss {line['valid_loss']:.4f} nats/token, perplexity {line['valid_perplexity']:.2f},"
            f" {line['valid_bits_per_byte']:.4f} bits/byte"
        )
    if "tokens_per_s" in line:
        print(
            f"last step {format_rate(line['tokens_per_s'], 'tokens')}, memory"
            f" {format_bytes(line['memory_bytes'])}"
        )
    if outcome.why == STOPPED:
        print("the same command goes on from here")
    name = shlex.quote(str(folder))
    print(
        f"run folder: {name}   (redline generate {name}, redline evaluate {name}, redline export {name} OUT)"
    )
