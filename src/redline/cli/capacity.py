"""What `redline plan` prints for a recipe on many GPUs. The arithmetic is in plan/capacity.py."""

from math import ceil

from redline.config.recipe import Recipe
from redline.plan.capacity import LINK_SHARE, Capacity, efficiency, where_it_stops
from redline.plan.plan import Hardware
from redline.record.units import exact, format_bytes, format_count, format_duration, format_share
from redline.report.grid import Output, show

GUIDE_001, GUIDE_001_GPUS = ("guru-8gpu", "guru-8gpu-before"), 8
"""Recipes with the set-up of tuning guide 001 (docs/many-machines.md)."""


def print_capacity(rows: list[Capacity], recipe: Recipe, hardware: Hardware, *, price: float | None) -> None:
    console, steps, shares = Output(), recipe.train.steps, efficiency(rows)
    taken: list[tuple[str, ...]] = []
    given: list[tuple[str, ...]] = []
    for row in rows:
        if row.problem:
            taken.append((f"on {row.gpus:,}: {row.problem}",))
            continue
        hours, (low, high) = row.gpu_hours(steps), row.bounds_s
        taken.append((
            f"{row.gpus:,}", row.layout, format_bytes(row.memory_bytes), format_duration(row.compute_s),
            format_duration(row.communication_s), format_duration(row.step_s),
            f"{format_duration(low)} to {format_duration(high)}",
        ))  # fmt: skip
        given.append((
            f"{row.gpus:,}", exact(row.tokens_per_s / row.gpus), format_count(row.tokens_per_s),
            f"{shares[row.gpus]:.0%}", format_duration(row.step_s * steps), f"{hours:,.1f}",
            *([f"{hours * price:,.2f}"] if price else []),
        ))  # fmt: skip
    columns: tuple[str, ...] = ("GPUs", "layout", "memory", "compute", "comm.", "step", "all hidden to none")
    title = "\nAn update on many GPUs (arithmetic, not measured)"
    show(columns, taken, title=title, right=(0, *range(2, len(columns))))
    columns = ("GPUs", "tokens/s/GPU", "tokens/s", "efficiency", f"{steps:,} steps", "GPU-hours")
    columns += ("cost",) if price else ()
    show(columns, given, title="\nThroughput and cost", right=range(len(columns)))
    console.print(where_it_stops(recipe, rows))
    assert hardware.link_bytes_per_s is not None
    assert hardware.network_bytes_per_s is not None
    console.print(
        f"Assumed: {LINK_SHARE:.0%} of {hardware.link_bytes_per_s / 1e9:g} GB/s between the GPUs of a node of"
        f" {hardware.node_gpus} and of {hardware.network_bytes_per_s / 1e9:g} GB/s from each to other nodes; compute hides"
        " all communication except the first gather and the last reduction of a pass. Validations and checkpoints come"
        " on top."
    )
    if recipe.rl is not None and not rows[-1].problem:
        _print_step(rows[-1])
        if recipe.name in GUIDE_001 and rows[-1].gpus == GUIDE_001_GPUS:
            _print_guide(rows[-1])


def _print_step(row: Capacity) -> None:
    cells, began_s = [], 0.0
    for name, part_s in row.parts_s.items():
        before, long = (40 * seconds / row.step_s for seconds in (began_s, part_s))
        bar = " " * round(before) + "█" * max(1, ceil(long))
        note = bar if part_s else "runs during generation; the scorer's time is not known"
        cells.append((name, format_duration(part_s), format_share(part_s / row.step_s), note))
        began_s += part_s
    title = f"\nA step on {row.gpus:,} GPUs, all prompts and answers at full length"
    show(("",) * 4, cells, title=title, right=(1, 2))


def _print_guide(row: Capacity) -> None:
    """Tuning guide 001 saw 67 to 83 tokens/s, which verl counts per GPU."""
    cells = [
        ("tokens/s per GPU", "67 to 83", "1,000 (perf/throughput)", exact(row.tokens_per_s / row.gpus)),
        ("tokens/s in total", "536 to 664", "2,000", exact(row.tokens_per_s)),
        ("MFU of the actor", "1.7 to 4.3%", "40%", format_share(row.actor_mfu)),
        ("memory per GPU", "72 GB", "60 GB", format_bytes(row.memory_bytes)),
    ]
    columns = ("tuning guide 001, 8 GPUs", "it saw", "it aims at", "here by arithmetic")
    show(columns, cells, title="\nCompared with the guide's targets (docs/many-machines.md)", right=(1, 2, 3))
