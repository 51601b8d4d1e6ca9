"""Tables for people: a machine, a plan. Every number with its unit and where it comes from."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from redline.config.recipe import Recipe
from redline.machine.facts import MachineFacts
from redline.machine.specs import match_spec
from redline.machine.store import Ceilings
from redline.plan.plan import PLANNED, Plan
from redline.plan.roofline import launch_bound
from redline.record.units import (
    DASH,
    format_bytes,
    format_count,
    format_duration,
    format_limit_share,
    format_rate,
)


def print_machine(facts: MachineFacts, ceilings: Ceilings | None) -> None:
    console = Console()
    table = Table(title="Facts", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for gpu in facts.gpus:
        pcie = f", PCIe {gpu.pcie_generation} x{gpu.pcie_lanes}" if gpu.pcie_generation else ""
        limit = f", {gpu.power_limit_w:.0f} W limit" if gpu.power_limit_w else ""
        text = (
            f"{gpu.name}, {format_bytes(gpu.memory_bytes)} ({format_bytes(gpu.free_bytes)} free), driver"
            f" {gpu.driver}{limit}{pcie}"
        )
        table.add_row(f"GPU {gpu.index}", text)
    if not facts.gpus:
        table.add_row("GPU", facts.gpu_trouble or "none")
    table.add_row(
        "CPU", f"{facts.cpu_name}, {facts.cpu_cores} cores usable, {format_bytes(facts.memory_bytes)} memory"
    )
    table.add_row("disk", f"{format_bytes(facts.disk_free_bytes)} free in this folder")
    table.add_row("system", f"{facts.os}, Python {facts.python}")
    table.add_row(
        "packages", ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    )
    console.print(table)
    if ceilings is not None:
        _print_ceilings(console, facts, ceilings)


def _print_ceilings(console: Console, facts: MachineFacts, ceilings: Ceilings) -> None:
    spec = match_spec(facts.gpus[0].name, facts.gpus[0].memory_bytes) if facts.gpus else None
    table = Table(
        title=f"\nCeilings, measured {ceilings.measured_at}", title_justify="left", box=None, padding=(0, 2)
    )
    for column in ("what", "measured", "spread", "datasheet", "share", "on"):
        table.add_column(column, justify="left" if column in ("what", "on") else "right")
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8"):
        if (best := ceilings.matmul_tflops(dtype)) is None:
            continue
        point = max((p for p in ceilings.matmul if p.dtype == dtype), key=lambda p: p.tflops)
        peak = spec.peak_tflops(dtype) if spec else None
        shape = (
            f"best of {sum(p.dtype == dtype for p in ceilings.matmul)} shapes: {point.m}x{point.n}x{point.k}"
        )
        table.add_row(
            f"matmul {dtype}",
            f"{best:,.0f} TFLOP/s",
            f"{point.spread:.0%}",
            f"{peak:,.0f}" if peak else DASH,
            format_limit_share(best / peak if peak else None),
            shape,
        )
    rows = (
        ("GPU copy", ceilings.copy_bytes_per_s, "within its memory, read + written"),
        ("host to GPU", ceilings.host_to_device_bytes_per_s, "page-locked memory"),
        ("GPU to host", ceilings.device_to_host_bytes_per_s, "page-locked memory"),
        ("CPU copy", ceilings.cpu_copy_bytes_per_s, "within its memory, read + written"),
    )
    for name, rate, note in rows:
        if rate is not None:
            table.add_row(name, f"{rate / 1e9:,.1f} GB/s", _spread(ceilings, name), DASH, DASH, note)
    for name, latency in (
        ("kernel launch", ceilings.launch_latency_s),
        ("same in a CUDA graph", ceilings.graph_launch_latency_s),
    ):
        if latency is not None:
            note = "per tiny kernel, many queued"
            table.add_row(name, f"{latency * 1e6:.2f} µs", DASH, DASH, DASH, note)
    table.add_row(
        "CPU matmul",
        f"{ceilings.cpu_matmul_gflops:,.0f} GFLOP/s",
        _spread(ceilings, "CPU matmul"),
        DASH,
        DASH,
        f"fp32, threads: {ceilings.cpu_threads}",
    )
    console.print(table)
    for note in ceilings.notes:
        console.print(f"note: {note}")


def _spread(ceilings: Ceilings, name: str) -> str:
    return f"{ceilings.spread[name]:.0%}" if name in ceilings.spread else DASH


def print_plan(plan: Plan, recipe: Recipe) -> None:
    console = Console()
    p = plan.prediction
    console.print(
        f"[bold]{escape(plan.recipe)}[/bold] on {plan.hardware.title}, {plan.world_size} process(es);"
        f" work {plan.work}"
    )
    console.print(f"hardware figures: {plan.hardware.source}", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("value", "", "source", "reason"):
        table.add_column(column)
    for name in PLANNED:
        why = plan.why[name]
        if name == "slots" and not plan.slots:
            continue
        table.add_row(name, str(getattr(plan, name)), why.source, escape(why.reason))
    console.print(table)
    console.print(
        f"\n[bold]predicted[/bold] (arithmetic, not measured): {format_count(p.parameters)} parameters, "
        f"{p.flops_per_token / 1e6:,.1f} MFLOP/token (6N + 12LdT)"
    )
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in p.memory_parts_bytes.items() if size)
    share = p.memory_bytes / plan.hardware.memory_bytes
    console.print(
        f"peak memory {format_bytes(p.memory_bytes)} ({share:.0%} of"
        f" {format_bytes(plan.hardware.memory_bytes)}): {parts}",
        highlight=False,
    )
    if p.attainable_tokens_per_s and p.ceiling_tokens_per_s:
        run_s = recipe.tokens_per_step * recipe.train.steps / p.attainable_tokens_per_s
        console.print(
            f"speed: attainable {format_rate(p.attainable_tokens_per_s, 'tokens')} by roofline, "
            f"{format_rate(p.ceiling_tokens_per_s, 'tokens')} if only matrix products took time; "
            f"at the attainable speed the run takes {format_duration(run_s)}",
            highlight=False,
        )
        if launch_bound(recipe, plan):
            console.print(
                f"passes of {plan.micro_batch * recipe.data.seq_len:,} tokens are so small that the host's"
                " kernel launches limit the speed: a larger plan.micro_batch is faster",
                highlight=False,
            )
    else:
        console.print(
            "speed: no measured or datasheet rate is known for this hardware; run `redline machine`"
            if recipe.workload == "pretrain"
            else "speed: depends on the lengths of the examples, which are known when they are read"
        )
