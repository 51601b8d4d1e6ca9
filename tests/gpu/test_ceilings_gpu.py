"""Measured ceilings, facts and telemetry on a real GPU, against its datasheet."""

import time

import pytest

from redline.machine.facts import read_facts
from redline.machine.specs import match_spec
from redline.machine.telemetry import GpuTelemetry

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def measured():
    from redline.machine.ceilings import measure

    precision, seed = torch.backends.cuda.matmul.fp32_precision, torch.cuda.get_rng_state()
    started_s = time.perf_counter()
    ceilings = measure()
    elapsed_s = time.perf_counter() - started_s
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert torch.equal(torch.cuda.get_rng_state(), seed)
    print(f"{elapsed_s:.1f} s: {ceilings}")
    return ceilings, elapsed_s


@pytest.fixture(scope="module")
def spec():
    gpu = read_facts().gpus[0]
    found = match_spec(gpu.name, gpu.memory_bytes)
    if found is None:
        pytest.skip(f"no datasheet for {gpu.name}")
    return found


def test_facts_agree_with_torch():
    gpus = read_facts().gpus
    assert len(gpus) == torch.cuda.device_count()
    seen = torch.cuda.get_device_properties(0)
    assert gpus[0].name == seen.name
    assert gpus[0].compute_capability == (seen.major, seen.minor)
    assert 0.95 * gpus[0].memory_bytes <= seen.total_memory <= gpus[0].memory_bytes


@pytest.mark.parametrize(
    ("dtype", "least_share"), [("bf16", 0.4), ("fp16", 0.4), ("tf32", 0.4), ("fp32", 0.4), ("fp8", 0.35)]
)
def test_matmul_reaches_a_fair_share_of_the_datasheet(dtype, least_share, measured, spec):
    peak_tflops, best_tflops = spec.peak_tflops(dtype), measured[0].matmul_tflops(dtype)
    if peak_tflops is None:
        assert best_tflops is None
        return
    assert least_share * peak_tflops <= best_tflops <= peak_tflops


def test_lower_precision_is_faster(measured, spec):
    if spec.bf16_tflops is None:
        pytest.skip("the GPU has no bf16")
    ceilings = measured[0]
    assert ceilings.matmul_tflops("fp32") < ceilings.matmul_tflops("tf32") < ceilings.matmul_tflops("bf16")


def test_nothing_was_rejected_and_blocks_agree(measured):
    ceilings = measured[0]
    assert not [note for note in ceilings.notes if "rejected" in note]
    # smaller ones show the CPU's jitter
    assert all(point.spread < 0.25 for point in ceilings.matmul if point.m >= 4096)


def test_copies_and_launches_are_plausible(measured, spec):
    ceilings = measured[0]
    assert (
        0.6 * spec.memory_bandwidth_bytes_per_s
        < ceilings.copy_bytes_per_s
        <= spec.memory_bandwidth_bytes_per_s
    )
    for bytes_per_s in (ceilings.host_to_device_bytes_per_s, ceilings.device_to_host_bytes_per_s):
        assert 1e9 < bytes_per_s < ceilings.copy_bytes_per_s
    assert 0.1e-6 < ceilings.graph_launch_latency_s < ceilings.launch_latency_s < 50e-6


def test_measuring_takes_seconds_and_leaves_no_memory_behind(measured):
    assert measured[1] < 30
    assert torch.cuda.memory_allocated() < 64 * 2**20


def test_telemetry_sees_the_gpu_at_work():
    telemetry = GpuTelemetry(0)
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    until_s = time.monotonic() + 2
    while time.monotonic() < until_s:
        for _ in range(20):
            left @ left
        torch.cuda.synchronize()
    reading = telemetry.read()
    assert 0.5 < reading["gpu_util"] <= 1
    assert left.nbytes < reading["memory_used_bytes"] <= read_facts().gpus[0].memory_bytes
    assert reading["power_w"] > 20
    assert reading["sm_clock_mhz"] > 200
    assert 10 < reading["temperature_c"] < 110
