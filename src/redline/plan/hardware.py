"""From machine facts, a datasheet entry and measured ceilings to the one `Hardware` that the planner reads.
No torch."""

from redline.machine.facts import MachineFacts
from redline.machine.specs import PEAKS, GpuSpec, match_spec, spec_of
from redline.machine.store import Ceilings
from redline.plan.plan import Hardware


def hardware_as(name: str, cores: int) -> Hardware:
    """A GPU that is not here, by its name or its figures; nothing of it is measured."""
    spec = spec_of(name)
    source = f"datasheet ({spec.source}); nothing measured"
    return _gpu(spec.title, spec.memory_bytes, spec.compute_capability, cores, spec, None, source)


def hardware_here(facts: MachineFacts, ceilings: Ceilings | None) -> Hardware:
    """The first GPU of this machine, or its CPU."""
    measured = f"measured {ceilings.measured_at}" if ceilings else "nothing measured: run `redline machine`"
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
    sheet = f"datasheet ({spec.source}) and" if spec else f"no datasheet entry for {gpu.name};"
    capability = spec.compute_capability if spec else gpu.compute_capability
    source = f"{sheet} {measured}"
    return _gpu(gpu.name, gpu.memory_bytes, capability, facts.cpu_cores, spec, ceilings, source)


def _gpu(
    title: str,
    memory_bytes: int,
    capability: tuple[int, int],
    cores: int,
    spec: GpuSpec | None,
    ceilings: Ceilings | None,
    source: str,
) -> Hardware:
    bandwidth = ceilings.copy_bytes_per_s if ceilings else None
    peaks = {dtype: spec.peak_tflops(dtype) for dtype in PEAKS} if spec else {}
    return Hardware(
        title=title,
        kind="cuda",
        memory_bytes=memory_bytes,
        compute_capability=capability,
        cores=cores,
        peak_tflops={dtype: peak for dtype, peak in peaks.items() if peak is not None},
        measured_tflops=_measured(ceilings),
        bandwidth_bytes_per_s=spec.memory_bandwidth_bytes_per_s if spec else bandwidth,
        launch_latency_s=ceilings.launch_latency_s if ceilings else None,
        link_bytes_per_s=spec.link_bytes_per_s if spec else None,
        network_bytes_per_s=spec.network_bytes_per_s if spec else None,
        node_gpus=spec.node_gpus if spec else 8,
        source=source,
    )


def _measured(ceilings: Ceilings | None) -> dict[str, float]:
    if ceilings is None:
        return {}
    return {dtype: tflops for dtype in PEAKS if (tflops := ceilings.matmul_tflops(dtype)) is not None}
