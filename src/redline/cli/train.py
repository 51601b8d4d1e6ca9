"""Train a recipe: pre-training, or fine-tuning (`redline finetune` is the short way). If the run is stopped or
killed, run the same command again and it resumes; Ctrl-C stops it with a checkpoint. More steps or hours extend a
finished run.

redline train nano
redline train gpt2-124m --set data.source=data/wiki --run runs/wiki --nproc 2
redline train nano --fork runs/nano --run runs/rescued --set train.lr=1e-3
redline train gpt2-124m --nproc 8 --nnodes 2 --rdzv node1:29400        on each of two machines that share the run folder
torchrun --nproc-per-node 2 --no-python -- redline train gpt2-124m     `--` keeps torchrun from reading our options
"""

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from redline.cli.live import make_view
from redline.cli.options import answer, byte_progress, ceilings_of, recipe_of, run_of, status
from redline.cli.plan import chosen, make
from redline.config.recipe import Recipe
from redline.data.read import find_source
from redline.errors import ConfigError, MachineError
from redline.launch import processes
from redline.machine.facts import read_facts, slow_import
from redline.machine.store import cached, forget_if_beaten
from redline.machine.wake import wake_gpu
from redline.plan.plan import Plan, from_json, to_json
from redline.record import startup
from redline.record.export import ExportedRun, check_names, make_exporters
from redline.record.observe import Observer
from redline.record.read import Run, read_run, values
from redline.record.run import RunFolder, failures_recorded
from redline.record.units import (
    counted,
    exact,
    format_bytes,
    format_count,
    format_duration,
    format_limit_share,
    format_share,
    visible,
)
from redline.record.words import told_validation
from redline.report.figures import Summary
from redline.report.grid import Output
from redline.train.open_run import changes
from redline.train.places import resolve

ARGUMENTS = """
@RECIPE
--steps N   updates in the run, like --set train.steps=N: 100 for a smoke test; the warm-up is shortened to fit
@RUN
@JSON
"""
RUNS = {
    "pretrain": ("redline.pretrain", "pretrain"),
    "finetune": ("redline.finetune", "finetune"),
    "rl": ("redline.rl.run", "reinforce"),
}
"""The function that trains a workload."""


def run(options: argparse.Namespace) -> int:
    with startup.watched():
        check_options(options)
        steps = [f"train.steps={options.steps}"] if options.steps else []
        return train(options, recipe_of(options, *steps, runs=("pretrain", "finetune")))


def check_options(options: argparse.Namespace) -> None:
    """Refuse what can be refused before torch is imported."""
    nodes_of(options)
    check_names(options.export)
    if options.fork is not None and options.run is None:
        raise ConfigError("--fork begins a new run: name its folder with --run")
    if options.fork is not None:
        resolve(options.fork)


def nodes_of(options: argparse.Namespace) -> tuple[int, int]:
    """The minimum and the maximum number of machines."""
    given = "1" if options.nnodes is None else options.nnodes
    least, _, most = given.partition(":")
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", given) or int(most or least) < int(least):
        raise ConfigError(f"--nnodes takes a number or MIN:MAX, like 2 or 1:4, got {given!r}")
    place = re.fullmatch(r"[^\s:]+:(\d{1,5})", options.rdzv or "")
    if options.nnodes is None and options.rdzv:  # a script for any number of machines may well say 1
        raise ConfigError(f"--rdzv {options.rdzv} is where several machines meet: add --nnodes, or omit it")
    if int(most or least) > 1 and (place is None or int(place[1]) >= 2**16):
        got = f"got {options.rdzv!r}" if options.rdzv else "it is missing"
        raise ConfigError(f"--nnodes {options.nnodes} needs --rdzv HOST:PORT, the same on each; {got}")
    return int(least), int(most or least)


def train(options: argparse.Namespace, recipe: Recipe, **how: Any) -> int:
    """Train the recipe here, or on several processes or machines; `how` is the workload's."""
    end_with_launcher()
    folder = run_of(options, recipe)
    changes(RunFolder(folder), recipe)
    if recipe.workload == "pretrain":
        find_source(recipe.data.source)
    least, most = nodes_of(options)
    if processes.under_torchrun() or (options.nproc == 1 and most == 1):
        return _train(options, recipe, folder, **how)
    _plan(options, recipe, options.nproc * most, most)  # measures the ceilings, so that all plan alike
    if most > 1:
        from redline.launch.agent import Nodes, run_on_nodes

        nodes = Nodes(least=least, most=most, endpoint=options.rdzv, job=recipe.identity)
        return run_on_nodes(nodes, options.nproc, options.arguments, folder)
    with failures_recorded(folder, "process_died", MachineError):  # one that was killed cannot record it
        return processes.with_recovery(
            lambda overrides: processes.start_processes(options.nproc, [*options.arguments, *overrides]),
            lambda: processes.out_of_memory_override(folder / "events.jsonl"),
        )


def end_with_launcher() -> None:
    """End this process when the one that started it (`--nproc`, `redline race`) ends."""
    if processes.LAUNCHER in os.environ:
        from redline.measure.process import end_with

        end_with(int(os.environ[processes.LAUNCHER]))


def _plan(options: argparse.Namespace, recipe: Recipe, world_size: int, nodes: int) -> Plan:
    """The plan, made with measured ceilings; on a new machine they are measured first."""
    facts, from_file = read_facts(), options.plan not in (None, "auto")
    if not from_file and not processes.under_torchrun() and cached(facts) is None:
        from redline.train.execution import set_allocator

        set_allocator(make(options, recipe, nproc=world_size, nodes=nodes))
        ceilings_of(facts)
    several = options.nproc > 1 or nodes_of(options)[1] > 1
    first = os.environ.get("RANK", "0") == "0" and (processes.under_torchrun() or not several)
    return chosen(options, recipe, world_size, nodes, say=status if first else lambda text: None)


def _train(options: argparse.Namespace, recipe: Recipe, folder: Path, **how: Any) -> int:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    nodes = max(1, world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    plan = _plan(options, recipe, world_size, nodes if world_size % nodes == 0 else 1)
    startup.mark("plan")
    if plan.hardware.kind == "cuda":
        wake_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    module, name = RUNS[recipe.workload]
    with startup.importing():
        from redline.train.execution import set_allocator
        from redline.train.process import join

        run = getattr(import_module(module), name)  # each imports what only it needs
    startup.mark("import")
    set_allocator(plan)
    with join(plan.hardware.kind) as alone:
        if nodes > 1:  # nodes may have measured different ceilings
            plan = from_json(alone.all_of(to_json(plan))[0], where="the plan of the first node")
        process = replace(alone, replicas=plan.world_size // plan.shards)
        startup.mark("device")
        if process.is_first:
            status(describe(recipe, plan, folder))
            if trouble := slow_import():
                status(f"note: {trouble}")
        watching = partial(observers_for, options, recipe, plan, folder)
        if recipe.workload == "pretrain" and process.is_first:
            how["progress"] = byte_progress("tokenising")
        outcome = run(recipe, plan, folder, process, observers=watching, fork=options.fork, **how)
    code = processes.STOPPED_CODE if processes.UNDER_AGENT in os.environ and not outcome.complete else 0
    if not process.is_first:
        return code
    forget_if_beaten(read_facts(), read_run(folder).typical("ceiling_share") or 0.0, status)
    found = {"run": str(folder), "step": outcome.step, "why": outcome.why, "metrics": outcome.metrics}
    answer(options, found, lambda: print_outcome(outcome.why, outcome.step, folder))
    return code


def describe(recipe: Recipe, plan: Plan, folder: Path) -> str:
    p, t = plan.prediction, recipe.train
    count = counted(t.steps, "step") if t.steps else f"{counted(t.epochs, 'epoch')} in steps"
    each = {
        "pretrain": f"{recipe.tokens_per_step:,} tokens",
        "rl": f"{t.batch_size} questions with {recipe.rl.group_size if recipe.rl else 0} answers each",
    }.get(recipe.workload, f"{t.batch_size} examples")
    each_process = f" on each of {plan.world_size} processes" if plan.world_size > 1 else ""
    speed = p.attainable_tokens_per_s
    best = f",\n  at best {format_duration(recipe.tokens_per_step / speed)} per update" if speed else ""
    what = "the tensors" if plan.hardware.kind == "cpu" else "GPU memory"
    return (
        f"{recipe.name}: {format_count(p.parameters)} parameters, {count} of {each}, run folder {folder}\n"
        f"plan (`redline plan` says why): {plan.precision}, {counted(plan.accumulation, 'pass')} of"
        f" {counted(plan.micro_batch, 'sequence')}{each_process},\n  compile {plan.compile}, recompute"
        f" {plan.recompute}; predicted peak of {what} {format_bytes(p.memory_bytes)}{best}"
    )


def mfu_note(plan: Plan) -> str:
    """The MFU's convention in words, or why there is none."""
    dtype = "bf16" if plan.precision == "fp8" else plan.precision
    peak = plan.hardware.peak_tflops.get(dtype)
    if peak is None:
        return f"not known, because there is no datasheet peak for {plan.hardware.title}"
    return f"6N+12LdT, of {peak:,.0f} TFLOP/s {dtype} datasheet"


def observers_for(
    options: argparse.Namespace, recipe: Recipe, plan: Plan, folder: Path, resume_step: int
) -> list[Observer]:
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
    return [view, *exporters_for(options.export, recipe, folder, resume_step, name=recipe.name)]


def exporters_for(
    names: Sequence[str], recipe: Recipe, folder: Path, resume_step: int, *, name: str
) -> Sequence[Observer]:
    config = {"recipe": asdict(recipe), "fingerprint": recipe.fingerprint}
    return make_exporters(names, ExportedRun(folder, name, config, status, resume_step))


def print_outcome(why: str, step: int, folder: Path) -> None:
    run = read_run(folder)
    planned = run.planned_updates
    spent = f" after {format_duration(run.elapsed_s)}" if run.elapsed_s else ""
    print(f"\n{why} at step {step:,}{f' of {planned:,}' if planned else ''}{spent}")
    for line in _figures(run):
        Output(markup=False).print(line)
    name = visible(shlex.quote(str(folder)))
    if why.startswith("stopped by"):
        print("To resume, run the same command again.")
    print(f"run folder: {name}")
    print(f"  redline report {name}      the outcome and where the time went, as one page")
    print(f"  redline diagnose {name}    what would make it faster")
    more = "generate, evaluate, export" if run.workload == "pretrain" else "generate, export"
    print(f"  redline chat {name}        use the model; or {more}")


def _figures(run: Run) -> Iterator[str]:
    summary, accuracies = Summary(run), values(run.metrics, "valid_accuracy")
    speed, valid, memory = summary.speed, summary.quality.valid, summary.memory.seen_bytes
    if valid:
        yield ", ".join([f"validation loss {valid['valid_loss']:.4f} nats/token", *told_validation(valid)])
    elif accuracies:
        yield f"held-out accuracy {format_share(accuracies[-1])}"
    if speed.update:
        mfu = f", MFU {format_limit_share(speed.mfu)}" if speed.mfu is not None else ""
        peak = f", peak memory {format_bytes(memory)}" if memory else ""
        yield f"median speed {exact(speed.update.value)} {speed.unit}{mfu}{peak}"
