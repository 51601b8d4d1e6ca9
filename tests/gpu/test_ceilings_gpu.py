"""Measured ceilings, facts and telemetry on a real GPU, against its datasheet."""

import time

import pytest

from redline.machine.ceilings import BOOST_MARGIN
from redline.machine.facts import read_facts
from redline.machine.nvml import GpuTelemetry
from redline.machine.specs import match_spec

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def measured():
    from redline.machine.ceilings import measure

    precision, seed = torch.backends.cuda.matmul.fp32_precision, torch.cuda.get_rng_state()
    before_bytes = torch.cuda.memory_allocated()  # tests before may have left something
    ceilings = measure()
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert torch.equal(torch.cuda.get_rng_state(), seed)
    assert torch.cuda.memory_allocated() - before_bytes < 64 * 2**20
    print(ceilings)
    return ceilings


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


def test_everything_is_measured_and_nothing_beats_the_datasheet(measured, spec):
    """What a busy host can only lower stays below the board's limits; how near it comes is `timing`."""
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8"):
        peak_tflops, best_tflops = spec.peak_tflops(dtype), measured.matmul_tflops(dtype)
        assert (best_tflops is None) == (peak_tflops is None), dtype
        assert best_tflops is None or 0 < best_tflops <= BOOST_MARGIN * peak_tflops, dtype
    assert 0 < measured.copy_bytes_per_s <= spec.memory_bandwidth_bytes_per_s
    for bytes_per_s in (measured.host_to_device_bytes_per_s, measured.device_to_host_bytes_per_s):
        assert 0 < bytes_per_s < spec.memory_bandwidth_bytes_per_s
    assert measured.graph_launch_latency_s > 0
    assert measured.launch_latency_s > 0
    assert not [note for note in measured.notes if "rejected" in note]


@pytest.mark.timing
def test_a_quiet_machine_comes_near_its_datasheet(measured, spec):
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8"):
        if peak_tflops := spec.peak_tflops(dtype):
            assert measured.matmul_tflops(dtype) > 0.35 * peak_tflops, dtype
    assert measured.matmul_tflops("fp32") < measured.matmul_tflops("tf32") < measured.matmul_tflops("bf16")
    assert measured.copy_bytes_per_s > 0.6 * spec.memory_bandwidth_bytes_per_s
    assert measured.graph_launch_latency_s < measured.launch_latency_s < 50e-6
    assert measured.noisy == ()


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
