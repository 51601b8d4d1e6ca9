"""Tables of a machine and a plan; every number has its unit and its source."""

from rich.markup import escape

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
from redline.report.grid import Output, show


def print_machine(facts: MachineFacts, ceilings: Ceilings | None) -> None:
    rows = []
    for gpu in facts.gpus:
        pcie = f", PCIe {gpu.pcie_generation} x{gpu.pcie_lanes}" if gpu.pcie_generation else ""
        limit = f", {gpu.power_limit_w:.0f} W limit" if gpu.power_limit_w else ""
        memory = f"{format_bytes(gpu.memory_bytes)} ({format_bytes(gpu.free_bytes)} free)"
        rows.append((f"GPU {gpu.index}", f"{gpu.name}, {memory}, driver {gpu.driver}{limit}{pcie}"))
    if not facts.gpus:
        rows.append(("GPU", facts.gpu_trouble or "none"))
    memory = format_bytes(facts.memory_bytes)
    packages = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    rows += [
        ("CPU", f"{facts.cpu_name}, {facts.cpu_cores} cores usable, {memory} memory"),
        ("disk", f"{format_bytes(facts.disk_free_bytes)} free in this folder"),
        ("system", f"{facts.os}, Python {facts.python}"),
        ("packages", packages),
    ]
    show(("", ""), rows, title="Facts")
    if ceilings is not None:
        _print_ceilings(facts, ceilings)


def _print_ceilings(facts: MachineFacts, ceilings: Ceilings) -> None:
    spec = match_spec(facts.gpus[0].name, facts.gpus[0].memory_bytes) if facts.gpus else None
    rows = []
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8"):
        if (best := ceilings.matmul_tflops(dtype)) is None:
            continue
        points = [p for p in ceilings.matmul if p.dtype == dtype]
        point = max(points, key=lambda p: p.tflops)
        peak = spec.peak_tflops(dtype) if spec else None
        datasheet, share = f"{peak:,.0f}" if peak else DASH, format_limit_share(best / peak if peak else None)
        shape, spread = f"best of {len(points)} shapes: {point.m}x{point.n}x{point.k}", f"{point.spread:.0%}"
        rows.append((f"matmul {dtype}", f"{best:,.0f} TFLOP/s", spread, datasheet, share, shape))
    within, tiny = "within its memory, read + written", "per tiny kernel, many queued"
    others = (
        ("GPU copy", ceilings.copy_bytes_per_s, "{:,.1f} GB/s", 1e-9, within),
        ("host to GPU", ceilings.host_to_device_bytes_per_s, "{:,.1f} GB/s", 1e-9, "page-locked memory"),
        ("GPU to host", ceilings.device_to_host_bytes_per_s, "{:,.1f} GB/s", 1e-9, "page-locked memory"),
        ("CPU copy", ceilings.cpu_copy_bytes_per_s, "{:,.1f} GB/s", 1e-9, within),
        ("kernel launch", ceilings.launch_latency_s, "{:.2f} µs", 1e6, tiny),
        ("same in a CUDA graph", ceilings.graph_launch_latency_s, "{:.2f} µs", 1e6, tiny),
        (
            "CPU matmul",
            ceilings.cpu_matmul_gflops,
            "{:,.0f} GFLOP/s",
            1,
            f"fp32, threads: {ceilings.cpu_threads}",
        ),
    )
    for name, value, form, scale, note in others:
        if value is not None:
            spread = f"{ceilings.spread[name]:.0%}" if name in ceilings.spread else DASH
            rows.append((name, form.format(value * scale), spread, DASH, DASH, note))
    columns = ("what", "measured", "spread", "datasheet", "share", "on")
    show(columns, rows, title=f"\nCeilings, measured {ceilings.measured_at}", right=(1, 2, 3, 4))
    for note in ceilings.notes:
        print(f"note: {note}")


def print_plan(plan: Plan, recipe: Recipe) -> None:
    console = Output()
    p = plan.prediction
    console.print(
        f"[bold]{escape(plan.recipe)}[/bold] on {plan.hardware.title}, {plan.world_size} process(es);"
        f" work {plan.work}"
    )
    console.print(f"hardware figures: {plan.hardware.source}")
    names = [name for name in PLANNED if name != "slots" or plan.slots]
    why = plan.why
    rows = [(name, str(getattr(plan, name)), why[name].source, why[name].reason) for name in names]
    show(("value", "", "source", "reason"), rows)
    console.print(
        f"\n[bold]predicted[/bold] (arithmetic, not measured): {format_count(p.parameters)} parameters, "
        f"{p.flops_per_token / 1e6:,.1f} MFLOP/token (6N + attention)"
    )
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in p.memory_parts_bytes.items() if size)
    share = p.memory_bytes / plan.hardware.memory_bytes
    console.print(
        f"peak memory {format_bytes(p.memory_bytes)} ({share:.0%} of"
        f" {format_bytes(plan.hardware.memory_bytes)}): {parts}"
    )
    if p.attainable_tokens_per_s and p.ceiling_tokens_per_s:
        run_s = recipe.tokens_per_step * recipe.train.steps / p.attainable_tokens_per_s
        console.print(
            f"speed: attainable {format_rate(p.attainable_tokens_per_s, 'tokens')} by roofline, "
            f"{format_rate(p.ceiling_tokens_per_s, 'tokens')} if only matrix products took time; "
            f"at the attainable speed the run takes {format_duration(run_s)}"
        )
        if launch_bound(recipe, plan):
            console.print(
                f"passes of {plan.micro_batch * recipe.data.seq_len:,} tokens are so small that the host's"
                " kernel launches limit the speed: use a larger plan.micro_batch"
            )
    else:
        console.print(
            "speed: no measured or datasheet rate is known for this hardware; run `redline machine`"
            if recipe.workload == "pretrain"
            else "speed: depends on the lengths of the examples, which are known when they are read"
        )
