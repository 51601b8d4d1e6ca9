"""The machine room on a CPU: datasheets against hand-computed peaks, facts against /proc, the cache,
measuring against numpy."""

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pynvml
import pytest
import torch

from redline.errors import ConfigError
from redline.machine import ceilings as measuring
from redline.machine import cpu
from redline.machine import facts as facts_module
from redline.machine.facts import machine_key, read_facts
from redline.machine.nvml import GpuTelemetry, process_rss_bytes
from redline.machine.specs import SPECS, find_spec, match_spec, spec_of
from redline.machine.store import (
    NOISY_FOR_S,
    Ceilings,
    MatmulPoint,
    cache_path,
    cached,
    forget_if_beaten,
    save,
)

MIB = 2**20

# Name and memory (MiB) as seen in nvidia-smi or torch on real machines.
REAL_NAMES = [
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
    ("NVIDIA A100-SXM4-80GB", 81251, "a100-80g"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-80g"),
    ("NVIDIA A100-PCIE-40GB", 40960, "a100-40g"),
    ("A100-SXM4-40GB", 40536, "a100-40g"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie-80g"),
    ("NVIDIA H200", 143771, "h200-141g"),
    ("Tesla V100-SXM2-32GB", 32510, "v100-32g"),
    ("NVIDIA L4", 23034, "l4-24g"),
    ("NVIDIA L40S", 46068, "l40s-48g"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090-24g"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090-24g"),
    ("Tesla T4", 15360, "t4-16g"),
    ("NVIDIA B200", 183359, "b200-192g"),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090-32g"),
    ("NVIDIA A10G", 23028, "a10g-24g"),
    ("NVIDIA A10G", 22731, "a10g-24g"),
    ("NVIDIA H20", 97871, "h20-96g"),
    # Boards with other figures than their namesakes, and a MIG slice.
    ("NVIDIA H100 NVL", 95830, None),
    ("NVIDIA H200 NVL", 143771, None),
    ("NVIDIA L40", 46068, None),
    ("NVIDIA A10", 23028, None),
    ("NVIDIA GeForce RTX 5090 D", 32607, None),
    ("NVIDIA GeForce RTX 3090 Ti", 24564, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
    ("Tesla V100-SXM2-16GB", 16384, None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9856, None),
]

# Multiprocessors, dense half-precision FLOP per clock and multiprocessor, boost clock in MHz, from the
# architecture papers.
SILICON = {
    "v100-32g": (80, 1024, 1530),
    "a100-40g": (108, 2048, 1410),
    "a100-80g": (108, 2048, 1410),
    "h100-80g": (132, 4096, 1830),
    "h100-pcie-80g": (114, 4096, 1620),
    "h200-141g": (132, 4096, 1830),
    "b200-192g": (148, 8192, 1850),
    "l4-24g": (58, 1024, 2040),
    "l40s-48g": (142, 1024, 2490),
    "rtx-3090-24g": (82, 512, 1695),
    "rtx-4090-24g": (128, 512, 2520),
    "t4-16g": (40, 1024, 1590),
    "rtx-5090-32g": (170, 512, 2407),
    "a10g-24g": (80, 512, 1710),
}
UNKNOWN_SILICON = {"h20-96g"}  # NVIDIA publishes no clock of it


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def ceilings() -> Ceilings:
    return Ceilings(
        measured_at="2026-11-15T00:00:00+00:00",
        device="NVIDIA H200",
        matmul=(
            MatmulPoint(dtype="bf16", m=1024, n=1024, k=1024, tflops=310.5, spread=0.02),
            MatmulPoint(dtype="bf16", m=8192, n=8192, k=8192, tflops=770.25, spread=0.01),
            MatmulPoint(dtype="fp32", m=8192, n=8192, k=8192, tflops=50.5, spread=0.0),
        ),
        copy_bytes_per_s=4.17e12,
        host_to_device_bytes_per_s=55e9,
        device_to_host_bytes_per_s=54e9,
        launch_latency_s=3.1e-6,
        graph_launch_latency_s=1.1e-6,
        cpu_threads=16,
        cpu_matmul_gflops=900.0,
        cpu_copy_bytes_per_s=20e9,
        spread={"CPU matmul": 0.4, "CPU copy": 0.02, "GPU copy": 0.01},
        notes=("one was skipped",),
    )


@pytest.mark.parametrize(("name", "memory_mib", "expected"), REAL_NAMES)
def test_real_names_find_their_datasheet(name, memory_mib, expected):
    spec = match_spec(name, memory_mib * MIB)
    assert (spec and spec.name) == expected


@pytest.mark.parametrize("name", sorted(SPECS.keys() - UNKNOWN_SILICON))
def test_peaks_follow_from_the_silicon(name):
    spec = SPECS[name]
    multiprocessors, flop_per_clock, boost_mhz = SILICON[name]
    assert spec.fp16_tflops == pytest.approx(multiprocessors * flop_per_clock * boost_mhz / 1e6, rel=0.01)
    assert (spec.bf16_tflops is None) == (spec.tf32_tflops is None) == (spec.compute_capability < (8, 0))
    assert (spec.fp8_tflops is None) == (spec.compute_capability < (8, 9))
    if spec.bf16_tflops and spec.tf32_tflops:
        assert spec.bf16_tflops == spec.fp16_tflops == pytest.approx(2 * spec.tf32_tflops, rel=0.02)
    assert spec.peak_tflops("fp32") == spec.fp32_tflops


def test_unknown_spec_names_the_nearest_and_the_list():
    with pytest.raises(ConfigError, match=r"'h100-80gb'.*did you mean 'h100-80g'.*v100-32g.*b200-192g"):
        find_spec("h100-80gb")
    assert find_spec("t4-16g").title == "T4 16 GB"


@pytest.mark.parametrize(
    ("text", "name"),
    [("RTX 4090", "rtx-4090-24g"), ("rtx4090", "rtx-4090-24g"), ("3090", "rtx-3090-24g"), ("NVIDIA GeForce RTX 5090", "rtx-5090-32g"),
     ("L4", "l4-24g"), ("l40s", "l40s-48g"), ("T4", "t4-16g"), ("A10G", "a10g-24g"), ("H20", "h20-96g"),
     ("B200", "b200-192g"), ("a100 80g", "a100-80g"), ("H100 PCIe", "h100-pcie-80g")],
)  # fmt: skip
def test_names_as_people_write_them(text, name):
    assert find_spec(text).name == name


def test_a_name_that_is_two_boards_or_no_nvidia_gpu_is_refused():
    with pytest.raises(ConfigError, match="A100 matches more than one GPU: a100-40g or a100-80g"):
        find_spec("A100")
    for name in ("MI300X", "AMD Instinct mi300x", "Gaudi3", "tpu-v5e"):
        with pytest.raises(ConfigError, match="is not an NVIDIA GPU, and Redline runs on CUDA"):
            find_spec(name)


def test_a_gpu_may_be_given_by_its_figures():
    spec = spec_of("memory=24GB,bf16=165,bandwidth=1008GB/s")
    known = find_spec("rtx-4090")
    assert spec.memory_bytes == pytest.approx(known.memory_bytes, rel=0.001)
    assert (spec.bf16_tflops, spec.fp16_tflops, spec.compute_capability) == (165, 165, (8, 0))
    assert spec.memory_bandwidth_bytes_per_s == known.memory_bandwidth_bytes_per_s
    other = spec_of("memory=80 GiB, bandwidth=3.35TB/s, fp16=900TFLOP/s, bf16=989, fp8=1979")
    assert (other.bf16_tflops, other.fp16_tflops, other.fp8_tflops) == (989, 900, 1979)
    assert (other.memory_bytes, other.compute_capability) == (80 * 2**30, (8, 9))
    assert other.memory_bandwidth_bytes_per_s == find_spec("h100-80g").memory_bandwidth_bytes_per_s
    assert spec_of("memory=16GB,fp16=65,bandwidth=320GB/s").compute_capability < (8, 0)


@pytest.mark.parametrize(
    "text",
    ["memory=24GB", "memory=24,bf16=165,bandwidth=1TB/s", "memory=24GB,bf16=fast,bandwidth=1TB/s", "memory=",
     "memory=24GB,fp32=30,bandwidth=1TB/s", "memory=0GB,bf16=165,bandwidth=1TB/s", "cores=5,memory=24GB", "=,="],
)  # fmt: skip
def test_figures_that_do_not_suffice_show_an_example(text):
    with pytest.raises(ConfigError, match="memory=24GB,bf16=165,bandwidth=1008GB/s"):
        spec_of(text)


def test_facts_agree_with_proc():
    facts = read_facts()
    with open("/proc/meminfo") as file:
        total_bytes = int(file.readline().split()[1]) * 1024
    assert 0 < facts.memory_bytes <= total_bytes
    assert 1 <= facts.cpu_cores <= len(os.sched_getaffinity(0))
    with open("/proc/cpuinfo") as file:
        assert facts.cpu_name.removesuffix(" (AMX unusable)") in file.read()
    disk = os.statvfs(".")
    assert facts.disk_free_bytes == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.05)
    assert torch.__version__.startswith(
        facts.versions["torch"]
    )  # a wheel for CUDA adds "+cu130" to what it says of itself
    assert facts.versions["numpy"] == np.__version__
    assert facts.python == sys.version.split()[0]
    assert json.loads(json.dumps(dataclasses.asdict(facts)))["cpu_cores"] == facts.cpu_cores


@pytest.mark.parametrize(
    ("cpuinfo", "named", "isa"),
    [
        (
            "model name\t: Xeon\ncpuid level\t: 28\nflags\t\t: avx512f amx_tile",  # seen under Firecracker
            "Xeon (AMX unusable)",
            "AVX512_CORE_FP16",
        ),
        ("model name\t: Xeon\ncpuid level\t: 32\nflags\t\t: avx512f amx_tile", "Xeon", None),
        ("model name\t: EPYC\ncpuid level\t: 16\nflags\t\t: avx512f", "EPYC", None),
    ],
)
def test_amx_without_its_description_is_not_used(tmp_path, monkeypatch, cpuinfo, named, isa):
    (tmp_path / "cpuinfo").write_text(f"{cpuinfo}\n\nmodel name\t: a second processor\n")
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    chosen, users = {}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    cpu.avoid_broken_amx(chosen)
    cpu.avoid_broken_amx(users)
    assert cpu.cpu_name() == named
    assert chosen.get("ONEDNN_MAX_CPU_ISA") == isa
    assert users == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.parametrize(
    ("listing", "files", "cores", "memory_bytes"),
    [
        ("0::/job", {"job/cpu.max": "max 100000", "job/memory.max": "max"}, 8, 64 * MIB),
        (
            "0::/job/step",
            {"job/cpu.max": "250000 100000", "job/step/memory.max": "max", "job/memory.max": str(MIB)},
            2,
            MIB,
        ),
        ("0::/host/path/not/here", {"cpu.max": "50000 100000", "memory.max": str(2 * MIB)}, 1, 2 * MIB),
        (
            "4:memory:/a\n1:cpuacct,cpu:/a\n0::/",
            {
                "cpu/a/cpu.cfs_quota_us": "300000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
            },
            3,
            64 * MIB,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8, 64 * MIB),
    ],
)
def test_control_groups_limit_cores_and_memory(listing, files, cores, memory_bytes, tmp_path, monkeypatch):
    (tmp_path / "listing").write_text(listing + "\n")
    for name, content in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(content + "\n")
    monkeypatch.setattr(facts_module, "_CGROUP_LISTING", tmp_path / "listing")
    monkeypatch.setattr(facts_module, "_CGROUP_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * MIB))
    facts = read_facts()
    assert (facts.cpu_cores, facts.memory_bytes) == (cores, memory_bytes)


@pytest.fixture
def three_gpus(monkeypatch):
    """NVML as a machine with three GPUs answers; a handle is the GPU's UUID."""
    uuids, counted_mj = ["GPU-aa11", "GPU-aa22", "GPU-bb33"], iter((10**9, 10**9 + 2_500))

    def unsupported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: uuids[index],
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: f"NVIDIA {handle}",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 * MIB, free=79 * MIB, used=MIB),
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
        "nvmlDeviceGetMaxClockInfo": lambda *_: 1980,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": unsupported,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97, memory=40),
        "nvmlDeviceGetPowerUsage": lambda _: 651_500,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: next(counted_mj),
        "nvmlDeviceGetClockInfo": lambda *_: 1755,
        "nvmlDeviceGetTemperature": unsupported,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, ["GPU-aa11", "GPU-aa22", "GPU-bb33"]),
        ("2,0", ["GPU-bb33", "GPU-aa11"]),
        ("GPU-bb, 1", ["GPU-bb33", "GPU-aa22"]),
        ("", []),
        ("-1", []),
        ("1,7,0", ["GPU-aa22"]),  # what follows an entry that names no GPU is ignored
        ("GPU-aa", []),  # names two
        ("1,1", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(chosen, seen, three_gpus, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    facts = read_facts()
    assert [gpu.name.removeprefix("NVIDIA ") for gpu in facts.gpus] == seen
    assert [gpu.index for gpu in facts.gpus] == list(range(len(seen)))
    assert facts.cuda_driver == "13.1"
    for gpu in facts.gpus:
        assert (gpu.power_limit_w, gpu.pcie_generation, gpu.pcie_lanes, gpu.free_bytes) == (
            700.0,
            5,
            None,
            79 * MIB,
        )


def test_telemetry_leaves_out_what_the_board_does_not_answer(three_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    telemetry = GpuTelemetry(0)
    assert telemetry.read() == {
        "gpu_util": 0.97,
        "memory_used_bytes": MIB,
        "energy_j": 2.5,
        "power_w": 651.5,
        "sm_clock_mhz": 1755,
    }
    assert GpuTelemetry(1).read() == {}  # a run must not die of its instruments


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, True),
    ],
)
def test_without_nvml_there_are_no_gpus_and_no_readings(code, trouble, monkeypatch):
    def refuse():
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    facts = read_facts()
    assert facts.gpus == ()
    assert bool(facts.gpu_trouble) == trouble
    assert GpuTelemetry(0).read() == {}


def test_machine_key_names_hardware_and_software_and_nothing_that_drifts():
    facts = read_facts()
    key = machine_key(facts)
    assert key == machine_key(dataclasses.replace(facts, disk_free_bytes=1, os="other"))
    assert key != machine_key(dataclasses.replace(facts, versions=facts.versions | {"torch": "9.9"}))
    assert key != machine_key(dataclasses.replace(facts, cpu_cores=facts.cpu_cores + 1))


def test_rss_agrees_with_psutil():
    assert process_rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_cache_gives_back_what_was_kept(ceilings):
    facts = read_facts()
    assert cached(facts) is None
    save(facts, ceilings)
    assert cached(facts) == ceilings
    assert cached(dataclasses.replace(facts, cpu_name="another")) is None
    assert (ceilings.matmul_tflops("bf16"), ceilings.matmul_tflops("fp8")) == (770.25, None)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:100],
        lambda text: text.replace('"notes"', '"remarks"'),
        lambda text: text.replace("{", '{"format": 2, ', 1),
        lambda text: text.replace("310.5", '"fast"'),
        lambda text: text.replace("4170000000000.0", "NaN"),
    ],
    ids=["torn", "another field", "one more", "text for a number", "not a number"],
)
def test_a_broken_cache_file_is_measured_again_and_said(spoil, ceilings, monkeypatch):
    facts = read_facts()
    save(facts, ceilings)
    path = cache_path(facts)
    spoilt = spoil(path.read_text())
    assert spoilt != path.read_text()
    path.write_text(spoilt)
    fresh = dataclasses.replace(ceilings, device="measured again", notes=())
    monkeypatch.setattr(measuring, "measure", lambda progress: fresh)
    said: list[str] = []
    got = measuring.load_or_measure(facts, progress=said.append)
    assert got.device == "measured again"
    assert list(got.notes) == said
    assert str(path) in said[0]
    assert cached(facts) == got


def test_refresh_measures_again_and_a_full_cache_does_not(ceilings, monkeypatch):
    facts = read_facts()
    fresh = dataclasses.replace(ceilings, device="measured again")
    monkeypatch.setattr(measuring, "measure", lambda progress: fresh)
    save(facts, ceilings)
    assert measuring.load_or_measure(facts) == ceilings
    assert measuring.load_or_measure(facts, refresh=True) == fresh == cached(facts)


def test_a_cache_that_cannot_be_written_costs_only_the_caching(ceilings, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(measuring, "measure", lambda progress: ceilings)
    said: list[str] = []
    assert measuring.load_or_measure(read_facts(), progress=said.append) == ceilings
    assert "could not be saved" in said[0]


def test_impossible_values_are_rejected_with_a_note(ceilings):
    wrong = dataclasses.replace(ceilings.matmul[0], tflops=1500.0)
    unsupported = dataclasses.replace(ceilings.matmul[0], dtype="fp8")
    seen = dataclasses.replace(ceilings, matmul=(*ceilings.matmul, wrong), copy_bytes_per_s=9e12)
    checked = measuring.reject_impossible(seen, find_spec("h200-141g"))
    assert checked.matmul == ceilings.matmul
    assert checked.copy_bytes_per_s is None
    assert [note.split(":")[0] for note in checked.notes[1:]] == [
        "matmul bf16 1024x1024x1024 was rejected",
        "copy was rejected",
    ]
    a100 = measuring.reject_impossible(
        dataclasses.replace(ceilings, matmul=(unsupported,)), find_spec("a100-80g")
    )
    assert a100.matmul == ()
    assert measuring.reject_impossible(ceilings, find_spec("h200-141g")) == ceilings


def test_a_shape_that_does_not_fit_is_skipped_and_said(monkeypatch):
    def point(dtype, m, n, k, random, l2_bytes):
        if m == 8192:
            raise torch.OutOfMemoryError
        return MatmulPoint(dtype=dtype, m=m, n=n, k=k, tflops=1.0, spread=0.0)

    monkeypatch.setattr(measuring, "_matmul_point", point)
    turing = SimpleNamespace(name="Tesla T4", major=7, minor=5, L2_cache_size=4 * MIB)
    points, notes = measuring._matmul_points(turing, torch.Generator(), lambda _: None)
    assert {p.dtype for p in points} == {"fp16", "fp32"}
    assert [note[:27] for note in notes] == ["matmul fp16 8192x8192x8192 ", "matmul fp32 8192x8192x8192 "]


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
def test_matmul_point_counts_the_flops_it_times(dtype, monkeypatch):
    """The GPU's path with the CPU's clock: a known time per call must come back as the known FLOP/s."""
    times = []

    def tick(work, calls):
        for call in range(min(calls, 3)):
            assert work(call).shape == (64, 32)
        times.append(calls)
        return calls * 1e-3, 0.0

    # CPUs without AVX-512 have no product in fp8
    monkeypatch.setattr(torch, "_scaled_mm", lambda left, right, *_, **__: left.float() @ right.float())
    monkeypatch.setattr(measuring, "time_cuda_s", tick)
    point = measuring._matmul_point(dtype, 64, 32, 16, torch.Generator().manual_seed(0), l2_bytes=10_000)
    assert point.tflops == pytest.approx(2 * 64 * 32 * 16 / 1e-3 / 1e12)
    assert point.spread == pytest.approx(0.0, abs=1e-9)
    assert times == [1, 1] + [20] * 8


@pytest.mark.parametrize("before", ["ieee", "tf32"])
def test_measuring_leaves_precision_as_it_was(before):
    matmul = torch.backends.cuda.matmul
    original = matmul.fp32_precision
    matmul.fp32_precision = before
    try:
        with measuring._fp32_precision("tf32"):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = original


@pytest.mark.parametrize(("seconds", "flops"), [(0.1, 2 * 1024**3), (0.001, 2 * 4096**3)])
def test_cpu_rates_count_what_they_time(seconds, flops, monkeypatch):
    """With a clock that always says the same: a slow CPU keeps to the small product, a fast one is given the
    large one too."""
    monkeypatch.setattr(measuring, "_best_s", lambda work, time_s: (seconds, 0.25))
    assert measuring._cpu_matmul_gflops() == pytest.approx((flops / seconds / 1e9, 0.25))
    numbers = torch.zeros(256 * MIB // 4)
    assert measuring._copy_bytes_per_s(numbers, measuring.time_cpu_s) == pytest.approx(
        (2 * 256 * MIB / seconds, 0.25)
    )


def test_asking_how_long_threads_waited_is_not_timed(monkeypatch):
    """It reads a file for each thread: on a large CPU it would take longer than what `bench attention` times."""
    clock = itertools.count()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measuring, "_waited_s", lambda: next(clock))
    assert measuring.time_cpu_s(lambda call: None, 1) == (1, 3)


def _numpy_gflops() -> float:
    left, right = np.random.default_rng(0).standard_normal((2, 1024, 1024), dtype=np.float32)
    rates = []
    for _ in range(6):
        started_s = time.perf_counter()
        left @ right
        rates.append(2 * 1024**3 / (time.perf_counter() - started_s) / 1e9)
    return float(np.median(rates[1:]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU too; tests/gpu does that")
def test_measuring_a_cpu_leaves_no_trace_and_no_gpu_values():
    seed_before = torch.get_rng_state()
    measured = measuring.measure()
    assert (measured.device, measured.matmul, measured.copy_bytes_per_s) == ("cpu", (), None)
    assert measured.cpu_matmul_gflops > 0
    assert measured.cpu_copy_bytes_per_s > 0
    assert measured.spread.keys() == {"CPU matmul", "CPU copy"}
    assert torch.equal(seed_before, torch.get_rng_state())


@pytest.mark.timing
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU too; tests/gpu does that")
def test_cpu_ceilings_agree_with_numpy():
    assert measuring.measure().cpu_matmul_gflops == pytest.approx(_numpy_gflops(), rel=1.0)


# ---- a busy machine, by a clock that is made up ----


def blocks(*series):
    """A clock: what each block takes, and what of it is lost to other programs (7 blocks a series)."""
    told = iter([block if isinstance(block, tuple) else (block, 0.0) for one in series for block in one])
    return lambda: next(told)


STEADY, UNEVEN, LOST = [1.0, *[1.05] * 6], [1.0, *[3.0] * 6], [(1.0, 0.5), *[(1.05, 0.5)] * 6]


@pytest.mark.parametrize(
    ("series", "seconds", "spread"),
    [
        ([STEADY], 1.0, 0.05),
        ([UNEVEN, STEADY], 1.0, 0.05),  # again, because the first series was uneven
        ([LOST, STEADY], 1.0, 0.05),
        ([LOST, LOST, LOST], 1.0, 0.5),  # alike, and still wrong: others held the CPU for half of it
        ([UNEVEN, [2.0] * 7, [2.0] * 7], 1.0, 2.0),  # steady, but slower than what was seen
        ([UNEVEN, [0.5] * 7], 0.5, 0.0),
    ],
)
def test_the_best_of_several_blocks_with_its_spread(series, seconds, spread):
    clock = blocks(*series)
    assert measuring.best_of(clock) == pytest.approx((seconds, spread))
    with pytest.raises(StopIteration):  # no more and no fewer series than it takes
        clock()


def test_waiting_for_a_cpu_is_counted_by_the_kernel():
    """Two processes that never rest, on one CPU."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel keeps no count")
    if (first := os.fork()) == 0:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        parent, second = os.getpid(), os.fork()
        while second == 0 and os.getppid() == parent:
            pass
        before = measuring._waited_s()
        while second and measuring._waited_s() == before:
            pass
        os._exit(0)
    assert os.waitpid(first, 0)[1] == 0


def test_what_a_busy_machine_gave_holds_for_an_hour(ceilings, monkeypatch):
    facts, said = read_facts(), []
    cpu = dataclasses.replace(ceilings, device="cpu", matmul=(), spread={"CPU matmul": 0.4, "CPU copy": 0.02})
    monkeypatch.setattr(measuring, "measure", lambda progress: cpu)
    assert measuring.load_or_measure(facts, progress=said.append) == cpu == cached(facts)
    assert said == [
        "this machine was busy while its ceilings were measured: CPU matmul varied by 40%. They hold for an hour;"
        " `redline machine --refresh` measures them when the machine is quiet"
    ]
    an_hour_ago = cache_path(facts).stat().st_mtime - NOISY_FOR_S - 1
    os.utime(cache_path(facts), (an_hour_ago, an_hour_ago))
    assert cached(facts) is None
    save(facts, ceilings)  # a quiet machine's
    os.utime(cache_path(facts), (an_hour_ago, an_hour_ago))
    assert cached(facts) == ceilings


def test_a_gpu_is_judged_by_its_own_spread(ceilings):
    assert ceilings.noisy == ()  # the host was busy, which its GPU does not feel
    (small, large, fp32), copy = ceilings.matmul, {"GPU copy": 0.3}
    uneven = dataclasses.replace(small, spread=0.9), large, dataclasses.replace(fp32, spread=0.2)
    assert dataclasses.replace(ceilings, matmul=uneven, spread=copy).noisy == (
        "matmul fp32 varied by 20%",  # of bf16 only the best shape counts
        "GPU copy varied by 30%",
    )


def test_a_run_that_beats_the_ceiling_has_it_measured_again(ceilings):
    facts, said = read_facts(), []
    save(facts, ceilings)
    forget_if_beaten(facts, 1.0, said.append)
    assert cached(facts) == ceilings
    for _ in range(2):
        forget_if_beaten(facts, 2.0, said.append)
        assert cached(facts) is None
    assert said == [
        "the run reached 200% of the matmul rate measured for this machine, so that rate was measured too low:"
        " it will be measured again"
    ]


def test_everything_but_measuring_runs_without_torch():
    code = (
        "import sys, redline.machine.specs, redline.machine.store, redline.machine.nvml as t,"
        " redline.machine.facts as f;facts = f.read_facts(); redline.machine.store.cached(facts);"
        " t.GpuTelemetry(0).read() if not facts.gpus else None;sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bytecode_that_is_not_kept_is_said(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    kept = Path(importlib.util.cache_from_source(str(tmp_path / "torch" / "__init__.py")))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert f"compileall -q {tmp_path / 'torch'}`" in facts_module.slow_import()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert facts_module.slow_import() is None
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept.parent.mkdir()
    kept.touch()
    assert facts_module.slow_import() is None
