"""Show what this machine is and what it can do. Ceilings are measured once, which takes seconds, and saved."""

import argparse
from dataclasses import asdict

from redline.cli.options import answer, ceilings_of
from redline.machine.facts import MachineFacts, read_facts, slow_import
from redline.machine.specs import PEAKS, match_spec
from redline.machine.store import Ceilings
from redline.record.units import DASH, format_bytes, format_iso, format_limit_share
from redline.report.grid import show

ARGUMENTS = """
--refresh   measure again instead of using the saved result
--facts     facts only: measure nothing, and do not load torch
@JSON
"""


def run(options: argparse.Namespace) -> None:
    facts = read_facts()
    ceilings = None if options.facts else ceilings_of(facts, refresh=options.refresh)
    found = {"facts": asdict(facts), "ceilings": asdict(ceilings) if ceilings else None}
    answer(options, found, lambda: print_machine(facts, ceilings))


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
    if trouble := slow_import():
        print(f"note: {trouble}")
    if ceilings is not None:
        _print_ceilings(facts, ceilings)


def _print_ceilings(facts: MachineFacts, ceilings: Ceilings) -> None:
    spec = match_spec(facts.gpus[0].name, facts.gpus[0].memory_bytes) if facts.gpus else None
    rows = []
    for dtype in PEAKS:
        if (best := ceilings.matmul_tflops(dtype)) is None:
            continue
        points = [p for p in ceilings.matmul if p.dtype == dtype]
        point = max(points, key=lambda p: p.tflops)
        peak = spec.peak_tflops(dtype) if spec else None
        datasheet, share = f"{peak:,.0f}" if peak else DASH, format_limit_share(best / peak if peak else None)
        shape, spread = f"best of {len(points)} shapes: {point.m}x{point.n}x{point.k}", f"{point.spread:.0%}"
        rows.append((f"matmul {dtype}", f"{best:,.0f} TFLOP/s", spread, datasheet, share, shape))
    within, tiny = "within its memory, read + written", "per tiny kernel, many queued"
    threads = f"fp32, threads: {ceilings.cpu_threads}"
    others = (
        ("GPU copy", ceilings.copy_bytes_per_s, "{:,.1f} GB/s", 1e-9, within),
        ("host to GPU", ceilings.host_to_device_bytes_per_s, "{:,.1f} GB/s", 1e-9, "page-locked memory"),
        ("GPU to host", ceilings.device_to_host_bytes_per_s, "{:,.1f} GB/s", 1e-9, "page-locked memory"),
        ("CPU copy", ceilings.cpu_copy_bytes_per_s, "{:,.1f} GB/s", 1e-9, within),
        ("kernel launch", ceilings.launch_latency_s, "{:.2f} µs", 1e6, tiny),
        ("same in a CUDA graph", ceilings.graph_launch_latency_s, "{:.2f} µs", 1e6, tiny),
        ("CPU matmul", ceilings.cpu_matmul_gflops, "{:,.0f} GFLOP/s", 1, threads),
    )
    for name, value, form, scale, note in others:
        if value is not None:
            spread = f"{ceilings.spread[name]:.0%}" if name in ceilings.spread else DASH
            rows.append((name, form.format(value * scale), spread, DASH, DASH, note))
    columns = ("what", "measured", "spread", "datasheet", "share", "on")
    show(columns, rows, title=f"\nCeilings, measured {format_iso(ceilings.measured_at)}", right=(1, 2, 3, 4))
    for note in ceilings.notes:
        print(f"note: {note}")
