"""Datasheet figures of GPUs, for planning on a machine that is not here and for refusing measurements that
cannot be true.

    spec = find_spec("a100-80g")                            # the id that `--as` takes
    spec = match_spec("NVIDIA H200", gpu.memory_bytes)     # the name that NVML reports; None when the table
                                                           lacks it

Peaks are dense, with fp32 accumulation as torch computes by default (GeForce cards run that at half their
advertised rate). Left out: sparsity doubles, int8, fp4, and any board whose figures are not its namesake's
(laptop, D, Ti, NVL, MIG slices).
"""

import re
from dataclasses import dataclass

from redline.errors import ConfigError, nearest

_MIB = 2**20
_MEMORY_TOLERANCE = 0.06
"""Drivers differ by 2 % in the total they report and torch sees up to 2 % less again; variants of a board
differ by far more."""


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One board. A peak of None means that the hardware has no such arithmetic."""

    name: str
    title: str
    match: str
    """Regular expression for the whole name that NVML reports, without a leading `NVIDIA` or `Tesla`."""
    memory_bytes: int
    """What current drivers report as the total: less than the name says wherever ECC or firmware takes a
    share."""
    compute_capability: tuple[int, int]
    bf16_tflops: float | None
    fp16_tflops: float
    tf32_tflops: float | None
    fp32_tflops: float
    fp8_tflops: float | None
    memory_bandwidth_bytes_per_s: float
    source: str

    def peak_tflops(self, dtype: str) -> float | None:
        """Dense peak for one of bf16, fp16, tf32, fp32, fp8."""
        peaks = {
            "bf16": self.bf16_tflops,
            "fp16": self.fp16_tflops,
            "tf32": self.tf32_tflops,
            "fp32": self.fp32_tflops,
            "fp8": self.fp8_tflops,
        }
        return peaks[dtype]


# Memory is what `nvidia-smi` shows under drivers from 510 on; earlier ones show 32510 MiB (V100), 40536 (A100
# 40 GB), 81251 (A100 80 GB, and torch there today) and 15109 (T4). Of the 192 GB on a B200, 180 are enabled.
# A100 80 GB has the bandwidth of the SXM board (PCIe: 1935 GB/s). The L4 datasheet's tensor figures are
# sparse and halved here. RTX 4090: fp8 with the fast accumulation that fp8 training uses in the forward pass
# (330.3 with full fp32 accumulation). fmt: off
_BOARDS = (
    GpuSpec(
        name="v100-32g",
        title="V100 SXM2 32 GB",
        match=r"V100-SXM2-32GB",
        memory_bytes=32768 * _MIB,
        bf16_tflops=None,
        fp16_tflops=125.0,
        tf32_tflops=None,
        fp32_tflops=15.7,
        fp8_tflops=None,
        compute_capability=(7, 0),
        memory_bandwidth_bytes_per_s=900e9,
        source="NVIDIA V100 datasheet",
    ),
    GpuSpec(
        name="a100-40g",
        title="A100 40 GB",
        match=r"A100-(SXM4|PCIE)-40GB",
        memory_bytes=40960 * _MIB,
        bf16_tflops=312.0,
        fp16_tflops=312.0,
        tf32_tflops=156.0,
        fp32_tflops=19.5,
        fp8_tflops=None,
        compute_capability=(8, 0),
        memory_bandwidth_bytes_per_s=1555e9,
        source="NVIDIA A100 datasheet",
    ),
    GpuSpec(
        name="a100-80g",
        title="A100 80 GB",
        match=r"A100(-SXM4-80GB| 80GB PCIe)",
        memory_bytes=81920 * _MIB,
        bf16_tflops=312.0,
        fp16_tflops=312.0,
        tf32_tflops=156.0,
        fp32_tflops=19.5,
        fp8_tflops=None,
        compute_capability=(8, 0),
        memory_bandwidth_bytes_per_s=2039e9,
        source="NVIDIA A100 datasheet",
    ),
    GpuSpec(
        name="h100-80g",
        title="H100 SXM 80 GB",
        match=r"H100 80GB HBM3",
        memory_bytes=81559 * _MIB,
        bf16_tflops=989.0,
        fp16_tflops=989.0,
        tf32_tflops=494.0,
        fp32_tflops=67.0,
        fp8_tflops=1979.0,
        compute_capability=(9, 0),
        memory_bandwidth_bytes_per_s=3350e9,
        source="NVIDIA H100 datasheet",
    ),
    GpuSpec(
        name="h100-pcie-80g",
        title="H100 PCIe 80 GB",
        match=r"H100 PCIe",
        memory_bytes=81559 * _MIB,
        bf16_tflops=756.0,
        fp16_tflops=756.0,
        tf32_tflops=378.0,
        fp32_tflops=51.0,
        fp8_tflops=1513.0,
        compute_capability=(9, 0),
        memory_bandwidth_bytes_per_s=2039e9,
        source="NVIDIA Hopper architecture whitepaper",
    ),
    GpuSpec(
        name="h200-141g",
        title="H200 SXM 141 GB",
        match=r"H200",
        memory_bytes=143771 * _MIB,
        bf16_tflops=989.0,
        fp16_tflops=989.0,
        tf32_tflops=494.0,
        fp32_tflops=67.0,
        fp8_tflops=1979.0,
        compute_capability=(9, 0),
        memory_bandwidth_bytes_per_s=4800e9,
        source="NVIDIA H200 datasheet",
    ),
    GpuSpec(
        name="b200-192g",
        title="B200 192 GB",
        match=r"B200",
        memory_bytes=183359 * _MIB,
        bf16_tflops=2250.0,
        fp16_tflops=2250.0,
        tf32_tflops=1125.0,
        fp32_tflops=75.0,
        fp8_tflops=4500.0,
        compute_capability=(10, 0),
        memory_bandwidth_bytes_per_s=8000e9,
        source="NVIDIA HGX B200 datasheet",
    ),
    GpuSpec(
        name="l4-24g",
        title="L4 24 GB",
        match=r"L4",
        memory_bytes=23034 * _MIB,
        bf16_tflops=121.0,
        fp16_tflops=121.0,
        tf32_tflops=60.0,
        fp32_tflops=30.3,
        fp8_tflops=242.5,
        compute_capability=(8, 9),
        memory_bandwidth_bytes_per_s=300e9,
        source="NVIDIA L4 datasheet",
    ),
    GpuSpec(
        name="l40s-48g",
        title="L40S 48 GB",
        match=r"L40S",
        memory_bytes=46068 * _MIB,
        bf16_tflops=362.0,
        fp16_tflops=362.0,
        tf32_tflops=183.0,
        fp32_tflops=91.6,
        fp8_tflops=733.0,
        compute_capability=(8, 9),
        memory_bandwidth_bytes_per_s=864e9,
        source="NVIDIA L40S datasheet",
    ),
    GpuSpec(
        name="rtx-3090-24g",
        title="RTX 3090 24 GB",
        match=r"GeForce RTX 3090",
        memory_bytes=24576 * _MIB,
        bf16_tflops=71.0,
        fp16_tflops=71.0,
        tf32_tflops=35.6,
        fp32_tflops=35.6,
        fp8_tflops=None,
        compute_capability=(8, 6),
        memory_bandwidth_bytes_per_s=936e9,
        source="NVIDIA Ampere GA102 whitepaper",
    ),
    GpuSpec(
        name="rtx-4090-24g",
        title="RTX 4090 24 GB",
        match=r"GeForce RTX 4090",
        memory_bytes=24564 * _MIB,
        bf16_tflops=165.2,
        fp16_tflops=165.2,
        tf32_tflops=82.6,
        fp32_tflops=82.6,
        fp8_tflops=660.6,
        compute_capability=(8, 9),
        memory_bandwidth_bytes_per_s=1008e9,
        source="NVIDIA Ada architecture whitepaper",
    ),
    GpuSpec(
        name="t4-16g",
        title="T4 16 GB",
        match=r"T4",
        memory_bytes=15360 * _MIB,
        bf16_tflops=None,
        fp16_tflops=65.0,
        tf32_tflops=None,
        fp32_tflops=8.1,
        fp8_tflops=None,
        compute_capability=(7, 5),
        memory_bandwidth_bytes_per_s=320e9,
        source="NVIDIA T4 datasheet",
    ),
)
# fmt: on
SPECS: dict[str, GpuSpec] = {spec.name: spec for spec in _BOARDS}


def find_spec(name: str) -> GpuSpec:
    """The board with this id."""
    if name in SPECS:
        return SPECS[name]
    raise ConfigError(
        f"no GPU {name!r} in the datasheet table{nearest(name.lower(), SPECS)}; known: {', '.join(SPECS)}"
    )


def match_spec(nvml_name: str, memory_bytes: int) -> GpuSpec | None:
    """The board that NVML reports under this name and memory, or None when the table has no figures for
    exactly that one."""
    bare = re.sub(r"^(NVIDIA |Tesla )*", "", nvml_name.strip())
    for spec in SPECS.values():
        near = abs(memory_bytes - spec.memory_bytes) <= _MEMORY_TOLERANCE * spec.memory_bytes
        if near and re.fullmatch(spec.match, bare, re.IGNORECASE):
            return spec
    return None
