"""Show how a recipe would be executed: every value with its reason and source, predicted memory and speed.
Needs no GPU and no torch.

redline plan gpt2-124m --as a100-40g        for another GPU; if it is not in the table, give its figures:
            --as "memory=24GB,bf16=165,bandwidth=1008GB/s" (dense TFLOP/s; also fp16, tf32, fp32, fp8)
redline plan gpt-1.3b --as 64xh100-80g      for many: communication, tokens/s, GPU-hours and where more GPUs stop paying, for 1,
            8, 16, 32 and 64 of them; "64xh100-80g,network=25GB/s,node=4" for other links (GB/s of one GPU, each way)
redline plan gpt2-124m --save plan.json     then: redline train gpt2-124m --plan plan.json, with the same
                                            --set values

The environment is honoured and shown: A100_BATCH_SIZE and A100_GRAD_ACCUM set micro-batch and accumulation
(their product must keep the recipe's batch).
"""

import argparse
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

from rich.markup import escape

from redline.cli.capacity import print_capacity
from redline.cli.options import answer, recipe_of, status, typed_pins
from redline.config.recipe import Recipe
from redline.errors import ConfigError, MachineError, Say
from redline.machine.facts import read_facts
from redline.machine.specs import SPECS, spec_of
from redline.machine.store import cached
from redline.plan.bounds import Outside, find_profile
from redline.plan.capacity import capacity, nodes_of
from redline.plan.hardware import hardware_as, hardware_here
from redline.plan.plan import PLANNED, Hardware, Plan, load_for, save, to_json
from redline.plan.planner import make_plan
from redline.plan.roofline import launch_bound
from redline.plan.values import why_not
from redline.record.units import (
    DASH,
    counted,
    format_bytes,
    format_count,
    format_duration,
    format_iso,
    format_rate,
)
from redline.report.grid import Output, show

ARGUMENTS = f"""
@RECIPE
--as GPU         plan for this GPU: {", ".join(SPECS)}, or its figures; 8xGPU for eight
--nproc N        processes, one per GPU (default: as many as --as says, else 1)
--price NUMBER   price of a GPU-hour, to show what the run costs on many GPUs
--profile NAME   upper bounds of a named profile: a100-80g, a100-40g, v100-32g, conservative
@PREFER
--save FILE      write the plan as JSON
@JSON
"""


def run(options: argparse.Namespace) -> None:
    recipe = recipe_of(options)
    named = spec_of(options.as_).count if options.as_ else 1
    nproc = named if options.nproc is None else options.nproc
    if nproc != named > 1:
        raise ConfigError(f"--as {options.as_} has {named} GPUs, one for each process; got --nproc {nproc}")
    hardware, price = _hardware(options), options.price
    many = nproc > 1 or price is not None
    known = hardware.link_bytes_per_s and recipe.workload in ("pretrain", "rl")  # the links, and all lengths
    if price is not None and not known:
        where = f"{hardware.title} and workload {recipe.workload}"
        raise ConfigError(f"--price needs a GPU of the table (--as) and workload pretrain or rl, got {where}")
    rows = capacity(recipe, hardware, nproc, outside_of(options)) if many and known else []
    found = {"capacity": [asdict(row) for row in rows]} if rows else {}
    try:
        plan = make(options, recipe, nproc=nproc)
    except ConfigError as error:
        if options.save or named == 1 or all(row.problem for row in rows):
            raise
        # It does not fit on so many: show on how many it runs.
        problem = found | {"problem": str(error)}
        answer(options, problem, lambda: print_capacity(rows, recipe, hardware, price=price))
        return
    if options.save:
        save(plan, options.save)
        status(f"plan written to {options.save}")

    def print_all() -> None:
        print_plan(plan, recipe, speed=not (rows and recipe.rl))
        if rows:
            print_capacity(rows, recipe, hardware, price=price)

    answer(options, to_json(plan) | found, print_all)


def outside_of(options: argparse.Namespace) -> Outside:
    """What bounds the plan from outside the recipe: the environment, a profile, what the user typed."""
    profile = getattr(options, "profile", None)
    return Outside(
        environment=os.environ,
        profile=find_profile(profile) if profile else None,
        typed=typed_pins(options),
        prefer=getattr(options, "prefer", None) or "speed",
    )


def make(options: argparse.Namespace, recipe: Recipe, *, nproc: int, nodes: int = 1) -> Plan:
    hardware = _hardware(options)
    if getattr(options, "as_", None):
        nodes = nodes_of(nproc, hardware.node_gpus)
    return make_plan(recipe, hardware, world_size=nproc, nodes=nodes, outside=outside_of(options))


def _hardware(options: argparse.Namespace) -> Hardware:
    facts, as_gpu, device = read_facts(), getattr(options, "as_", None), getattr(options, "device", None)
    if device == "cuda" and not facts.gpus:
        raise MachineError("--device cuda: this machine shows no GPU; use --device cpu, or check the driver")
    if as_gpu:
        return hardware_as(as_gpu, facts.cpu_cores)
    here = replace(facts, gpus=()) if device == "cpu" else facts
    return hardware_here(here, cached(facts, progress=status))


def chosen(options: argparse.Namespace, recipe: Recipe, world_size: int, nodes: int = 1, *, say: Say) -> Plan:
    """The plan that --plan names: a file, `auto`, or without it the one that is made now."""
    if options.plan is not None and getattr(options, "prefer", None) == "memory":
        raise ConfigError(f"--prefer memory has no effect with --plan {options.plan}: leave out one of them")
    if options.plan not in (None, "auto"):
        return load_for(Path(options.plan), recipe, world_size, typed=typed_pins(options))
    plan = make(options, recipe, nproc=world_size, nodes=nodes)
    return plan if options.plan is None else _tuned(options, recipe, plan, say)


def _tuned(options: argparse.Namespace, recipe: Recipe, rules: Plan, say: Say) -> Plan:
    """The plan that tuning found for the same work, else the rules' plan; says which."""
    # Imported here because it adds a tenth to the start-up before torch.
    from redline.tune.store import tuned_plan, tuning_folder

    folder = tuning_folder(read_facts(), rules)
    if rules.world_size > 1:
        say(f"--plan auto: tuning covers one process, this run has {rules.world_size}; using the rules' plan")
        return rules
    if (found := tuned_plan(folder, recipe)) is None:
        untuned = "this recipe with these pins has not been tuned on this machine"
        say(f"--plan auto: {untuned} (redline tune {options.recipe}); using the rules' plan")
        return rules
    tuned, result = found
    say(
        f"--plan auto: tuned {format_iso(result.tuned_at)}, {result.ratio:.2f}x {result.against},"
        f" {format_rate(result.tokens_per_s, 'tokens')} in its trials ({folder / 'plan.json'})"
    )
    return tuned


def print_plan(plan: Plan, recipe: Recipe, *, speed: bool = True) -> None:
    """`speed`: also what the roofline says of it, unless a table of it follows."""
    console = Output()
    p = plan.prediction
    where = f"{plan.hardware.title}, {counted(plan.world_size, 'process')}"
    console.print(f"[bold]{escape(plan.recipe)}[/bold] on {where}; work {plan.work}")
    console.print(f"hardware figures: {plan.hardware.source}")
    names = [name for name in PLANNED if name != "slots" or plan.slots]
    why = plan.why
    rows = [(name, str(getattr(plan, name)) or DASH, why[name].source, why[name].reason) for name in names]
    show(("", "value", "source", "reason"), rows)
    some = recipe.train.softmax_candidates
    head = f", the softmax over {some:,} tokens" if some else ""
    console.print(
        f"\n[bold]predicted[/bold] (arithmetic, not measured): {format_count(p.parameters)} parameters, "
        f"{p.flops_per_token / 1e6:,.1f} MFLOP per token (6N + attention{head})"
    )
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in p.memory_parts_bytes.items() if size)
    there = plan.hardware.memory_bytes
    share = f"{p.memory_bytes / there:.0%} of {format_bytes(there)}"
    console.print(f"peak memory {format_bytes(p.memory_bytes)} ({share}): {parts}")
    if p.attainable_tokens_per_s and p.ceiling_tokens_per_s:
        limit_s = 3600 * recipe.train.max_hours if recipe.train.max_hours is not None else math.inf
        run_s = min(limit_s, recipe.tokens_per_step * recipe.train.steps / p.attainable_tokens_per_s)
        label = "speed" if plan.world_size == 1 else "speed without communication"
        console.print(
            f"{label}: attainable {format_rate(p.attainable_tokens_per_s, 'tokens')} by roofline, "
            f"{format_rate(p.ceiling_tokens_per_s, 'tokens')} if only matrix products took time; "
            f"at the attainable speed the run takes {format_duration(run_s)}"
        )
        if launch_bound(recipe, plan):
            console.print(
                f"passes of {plan.micro_batch * recipe.data.seq_len:,} tokens are so small that the host's"
                f" kernel launches limit the speed: use {_larger_passes(plan, recipe)}"
            )
    elif speed:
        console.print(
            "speed: no measured or datasheet rate is known for this hardware; run `redline machine`"
            if recipe.workload == "pretrain"
            else "speed: depends on the lengths of the examples, known only once they are read"
        )


def _larger_passes(plan: Plan, recipe: Recipe) -> str:
    """What makes the passes larger, or does without launches."""
    ways = ["a larger plan.micro_batch"]
    if plan.accumulation == 1:  # a pass already holds all that this process has of the batch
        ways = ["fewer GPUs"] if plan.world_size > 1 else []
        ways.append("a larger train.batch_size, which makes it another training")
    if plan.world_size == 1 and not why_not("graph", True, recipe, plan.hardware, vars(plan)):
        ways.append("plan.graph=true")
    return ", or ".join(ways)
