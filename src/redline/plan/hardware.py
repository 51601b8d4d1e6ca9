"""From machine facts, a datasheet entry and measured ceilings to the one `Hardware` that the planner reads.
No torch."""

from collections.abc import Callable
from typing import Any

from redline.machine.facts import MachineFacts
from redline.machine.specs import PEAKS, GpuSpec, match_spec, spec_of
from redline.machine.store import Ceilings
from redline.plan.plan import Hardware
from redline.record.units import format_iso


def hardware_as(name: str, cores: int) -> Hardware:
    """A GPU that is not here, by its name or its figures; nothing of it is measured."""
    spec = spec_of(name)
    return _gpu(
        spec, None, title=spec.title, memory_bytes=spec.memory_bytes, cores=cores,
        compute_capability=spec.compute_capability, source=f"{spec.source}; nothing measured",
    )  # fmt: skip


def hardware_here(facts: MachineFacts, ceilings: Ceilings | None) -> Hardware:
    """The first GPU of this machine, or its CPU."""
    at = format_iso(ceilings.measured_at) if ceilings else ""
    measured = f"measured {at}" if at else "nothing measured yet (run `redline machine`)"
    if not facts.gpus:
        return Hardware(
            title=f"{facts.cpu_name}, {facts.cpu_cores} cores",
            kind="cpu",
            memory_bytes=facts.memory_bytes,
            compute_capability=(),
            cores=facts.cpu_cores,
            peak_tflops={},
            measured_tflops={"fp32": ceilings.cpu_matmul_gflops / 1e3} if ceilings else {},
            bandwidth_bytes_per_s=ceilings.cpu_copy_bytes_per_s if ceilings else None,
            source=measured,
        )
    gpu = facts.gpus[0]
    spec = match_spec(gpu.name, gpu.memory_bytes)
    sheet = f"{spec.source};" if spec else f"no datasheet entry for {gpu.name};"
    return _gpu(
        spec, ceilings, title=gpu.name, memory_bytes=gpu.memory_bytes, cores=facts.cpu_cores,
        compute_capability=spec.compute_capability if spec else gpu.compute_capability,
        source=f"{sheet} {measured}",
    )  # fmt: skip


def _gpu(spec: GpuSpec | None, ceilings: Ceilings | None, **about: Any) -> Hardware:
    """A GPU as its datasheet says and as it was measured; either may be missing."""
    bandwidth = ceilings.copy_bytes_per_s if ceilings else None
    return Hardware(
        **about,
        kind="cuda",
        peak_tflops=_by_dtype(spec.peak_tflops) if spec else {},
        measured_tflops=_by_dtype(ceilings.matmul_tflops) if ceilings else {},
        bandwidth_bytes_per_s=spec.memory_bandwidth_bytes_per_s if spec else bandwidth,
        launch_latency_s=ceilings.launch_latency_s if ceilings else None,
        link_bytes_per_s=spec.link_bytes_per_s if spec else None,
        network_bytes_per_s=spec.network_bytes_per_s if spec else None,
        node_gpus=spec.node_gpus if spec else 8,
    )


def _by_dtype(rate: Callable[[str], float | None]) -> dict[str, float]:
    return {dtype: tflops for dtype in PEAKS if (tflops := rate(dtype)) is not None}
