"""What a training prints before, during and after its run."""

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path

from redline.cli.live import make_view
from redline.cli.options import status
from redline.config.recipe import Recipe
from redline.plan.plan import Plan
from redline.record.export import ExportedRun, make_exporters
from redline.record.observe import Observer
from redline.record.read import Run, number, read_run
from redline.record.units import (
    exact,
    format_bytes,
    format_count,
    format_duration,
    format_limit_share,
    format_share,
    visible,
)


def describe(recipe: Recipe, plan: Plan, folder: Path) -> str:
    """A few lines: what is trained, and how."""
    p, t = plan.prediction, recipe.train
    count = f"{t.steps:,} steps" if t.steps else f"{t.epochs} epochs in steps"
    each = {
        "pretrain": f"{recipe.tokens_per_step:,} tokens",
        "rl": f"{t.batch_size} questions with {recipe.rl.group_size if recipe.rl else 0} answers each",
    }.get(recipe.workload, f"{t.batch_size} examples")
    return (
        f"{recipe.name}: {format_count(p.parameters)} parameters, {count} of {each}, run folder {folder}\n"
        f"plan (`redline plan` says why): {plan.precision}, {plan.micro_batch} x {plan.accumulation} passes x"
        f" {plan.world_size} process(es),\n  compile {plan.compile}, recompute {plan.recompute}; predicted peak"
        f" {format_bytes(p.memory_bytes)}"
    )


def mfu_note(plan: Plan) -> str:
    """The MFU's convention in words, or why there is none."""
    dtype = "bf16" if plan.precision == "fp8" else plan.precision
    peak = plan.hardware.peak_tflops.get(dtype)
    if peak is None:
        return f"no datasheet peak for {plan.hardware.title}"
    return f"6N+12LdT, of {peak:,.0f} TFLOP/s {dtype} datasheet"


def observers_for(
    options: argparse.Namespace, recipe: Recipe, plan: Plan, folder: Path, resume_step: int
) -> list[Observer]:
    """The live view and the exporters that were asked for."""
    size = format_count(plan.prediction.parameters)
    view = make_view(quiet=options.quiet or options.json)
    view.event(
        "stage",
        {
            "title": f"{recipe.name} · {size} parameters · {plan.hardware.title} · {plan.precision}",
            "total_steps": recipe.train.steps,
            "max_hours": recipe.train.max_hours,
            "mfu_note": mfu_note(plan),
            "device_bytes": plan.hardware.memory_bytes,
            "on_gpu": plan.hardware.kind == "cuda",
        },
    )
    config = {"recipe": asdict(recipe), "fingerprint": recipe.fingerprint}
    exported = ExportedRun(folder, recipe.name, config, status, resume_step)
    return [view, *make_exporters(options.export, exported)]


def print_outcome(why: str, step: int, folder: Path) -> None:
    """How a run ended: the outcome, its median speed, and what to do next."""
    run = read_run(folder)
    planned = run.planned_updates
    spent = f" after {format_duration(run.elapsed_s)}" if run.elapsed_s else ""
    print(f"\n{why} at step {step:,}{f' of {planned:,}' if planned else ''}{spent}")
    for line in (_loss(run), _speed(run)):
        if line:
            print(line)
    name = visible(shlex.quote(str(folder)))
    if why.startswith("stopped by"):
        print("To resume, run the same command again.")
    print(f"run folder: {name}")
    print(f"  redline report {name}      the outcome and where the time went, as one page")
    print(f"  redline diagnose {name}    what would make it faster")
    print(f"  redline chat {name}        use the model; or generate, evaluate, export")


def _loss(run: Run) -> str:
    names = ("valid_loss", "valid_accuracy")
    tested = [line for line in run.metrics if any(number(line.get(name)) is not None for name in names)]
    if not tested:
        return ""
    last = tested[-1]
    if "valid_loss" not in last:
        return f"held-out accuracy {format_share(last['valid_accuracy'])}"
    also = {
        "perplexity {:.2f} per token": "valid_perplexity",
        "{:,.1f} per word": "valid_word_perplexity",
        "{:.4f} bits/byte": "valid_bits_per_byte",
    }
    rest = [
        form.format(value) for form, name in also.items() if (value := number(last.get(name))) is not None
    ]
    return ", ".join([f"validation loss {last['valid_loss']:.4f} nats/token", *rest])


def _speed(run: Run) -> str:
    if run.speed is None:
        return ""
    unit = "tokens/s" if run.rate == "tokens_per_s" else "rows/s"
    mfu = run.typical("mfu")
    memory = max((number(line.get("memory_bytes")) or 0.0 for line in run.metrics), default=0.0)
    return f"median speed {exact(run.speed.value)} {unit}" + "".join([
        f", MFU {format_limit_share(mfu.value)}" if mfu else "",
        f", peak memory {format_bytes(memory)}" if memory else "",
    ])  # fmt: skip
