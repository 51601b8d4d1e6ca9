"""Datasheet figures of GPUs: for planning for a machine that is not here, and for refusing measurements that
cannot be true.

    spec = find_spec("rtx 4090")                                # a name as people write it
    spec = spec_of("memory=24GB,bf16=165,bandwidth=1008GB/s")   # what `--as` takes: a name, or the figures
    spec = spec_of("64xh100-80g,network=25GB/s")                # many of them, with a slower network
    spec = match_spec("NVIDIA H200", gpu.memory_bytes)          # the name that NVML reports; None: not in the table

Peaks are dense, with fp32 accumulation as torch computes by default (GeForce cards run that at half their
advertised rate). Left out: sparsity doubles, int8, fp4, and any board whose figures are not its namesake's
(laptop, D, Ti, NVL, MIG slices).
"""

import re
from ast import literal_eval
from dataclasses import dataclass, replace
from typing import Any

from redline.errors import ConfigError, nearest

_MEMORY_TOLERANCE = 0.06
"""Drivers and torch differ by up to 4 % in the total they report; variants of a board by far more."""


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One board. A peak of None: the hardware has no such arithmetic, or nobody gave the figure."""

    name: str
    title: str
    match: str
    """Regular expression for the whole name that NVML reports, without a leading `NVIDIA` or `Tesla`."""
    memory_bytes: int
    """What current drivers report: less than the name says if ECC or firmware takes a share."""
    compute_capability: tuple[int, int]
    bf16_tflops: float | None = None
    fp16_tflops: float
    tf32_tflops: float | None = None
    fp32_tflops: float | None = None
    fp8_tflops: float | None = None
    memory_bandwidth_bytes_per_s: float
    link_bytes_per_s: float = 32e9
    """From one GPU to the others in its node, each direction; PCIe 4 if nobody says."""
    network_bytes_per_s: float = 1.5625e9
    """From one GPU out of the node: the node's network cards shared among its GPUs."""
    node_gpus: int = 8
    count: int = 1
    """How many of them the user asked about."""
    source: str

    def peak_tflops(self, dtype: str) -> float | None:
        """Dense peak for one of bf16, fp16, tf32, fp32, fp8."""
        peak: float | None = getattr(self, f"{dtype}_tflops")
        return peak


# Bytes/s of a GPU in each direction, inside and out of a node of eight: half of what NVLink's datasheets add up for both
# directions, and the network cards of NVIDIA's own systems (DGX-1V: 4 x 100 Gbit/s; DGX A100: 8 x 200; DGX H100, H200
# and B200: 8 x 400). Boards without NVLink: 16 lanes of PCIe, and 100 Gbit/s per node.
_LINKS = {
    "dgx-v100": (150e9, 6.25e9), "dgx-a100": (300e9, 25e9), "dgx-h100": (450e9, 50e9), "dgx-b200": (900e9, 50e9),
    "pcie-3": (16e9, 1.5625e9), "pcie-4": (32e9, 1.5625e9), "pcie-5": (64e9, 1.5625e9),
}  # fmt: skip
PEAKS = ("bf16", "fp16", "tf32", "fp32", "fp8")

# Memory is what `nvidia-smi` shows under drivers from 510 on; earlier ones show 32510 MiB (V100), 40536 (A100
# 40 GB), 81251 (A100 80 GB, and torch there today) and 15109 (T4). Of the 192 GB on a B200, 180 are enabled.
# A100 80 GB has the bandwidth of the SXM board (PCIe: 1935 GB/s). The L4 datasheet's tensor figures are
# sparse and halved here. GeForce cards: fp8 with the fast accumulation that fp8 training uses in the forward
# pass (half of it with full fp32 accumulation). Columns: id, title, name that NVML reports, MiB, compute
# capability, dense TFLOP/s in bf16, fp16, tf32, fp32 and fp8, GB/s, links, and which document of NVIDIA's says so.
_BOARDS = """
t4-16g        | T4 16 GB        | T4                          |  15360 |  7.5 |  None |    65 |  None |   8.1 |  None |  320 | pcie-3   | T4 datasheet
v100-32g      | V100 SXM2 32 GB | V100-SXM2-32GB              |  32768 |  7.0 |  None |   125 |  None |  15.7 |  None |  900 | dgx-v100 | V100 datasheet
a10g-24g      | A10G 24 GB      | A10G                        |  23028 |  8.6 |    70 |    70 |    35 |    35 |  None |  600 | pcie-4   | A10G datasheet
a100-40g      | A100 40 GB      | A100-(SXM4|PCIE)-40GB       |  40960 |  8.0 |   312 |   312 |   156 |  19.5 |  None | 1555 | dgx-a100 | A100 datasheet
a100-80g      | A100 80 GB      | A100(-SXM4-80GB| 80GB PCIe) |  81920 |  8.0 |   312 |   312 |   156 |  19.5 |  None | 2039 | dgx-a100 | A100 datasheet
rtx-3090-24g  | RTX 3090 24 GB  | GeForce RTX 3090            |  24576 |  8.6 |    71 |    71 |  35.6 |  35.6 |  None |  936 | pcie-4   | Ampere GA102 whitepaper
rtx-4090-24g  | RTX 4090 24 GB  | GeForce RTX 4090            |  24564 |  8.9 | 165.2 | 165.2 |  82.6 |  82.6 | 660.6 | 1008 | pcie-4   | Ada architecture whitepaper
rtx-5090-32g  | RTX 5090 32 GB  | GeForce RTX 5090            |  32607 | 12.0 | 209.5 | 209.5 | 104.8 | 104.8 |   838 | 1792 | pcie-5   | RTX Blackwell architecture whitepaper
l4-24g        | L4 24 GB        | L4                          |  23034 |  8.9 |   121 |   121 |    60 |  30.3 | 242.5 |  300 | pcie-4   | L4 datasheet
l40s-48g      | L40S 48 GB      | L40S                        |  46068 |  8.9 |   362 |   362 |   183 |  91.6 |   733 |  864 | pcie-4   | L40S datasheet
h20-96g       | H20 96 GB       | H20                         |  97871 |  9.0 |   148 |   148 |    74 |    44 |   296 | 4000 | dgx-h100 | H20 datasheet
h100-pcie-80g | H100 PCIe 80 GB | H100 PCIe                   |  81559 |  9.0 |   756 |   756 |   378 |    51 |  1513 | 2039 | pcie-5   | Hopper architecture whitepaper
h100-80g      | H100 SXM 80 GB  | H100 80GB HBM3              |  81559 |  9.0 |   989 |   989 |   494 |    67 |  1979 | 3350 | dgx-h100 | H100 datasheet
h200-141g     | H200 SXM 141 GB | H200                        | 143771 |  9.0 |   989 |   989 |   494 |    67 |  1979 | 4800 | dgx-h100 | H200 datasheet
b200-192g     | B200 192 GB     | B200                        | 183359 | 10.0 |  2250 |  2250 |  1125 |    75 |  4500 | 8000 | dgx-b200 | HGX B200 datasheet
"""


def _board(row: str) -> GpuSpec:
    name, title, match, mib, capability, *peaks, gb_per_s, links, source = map(str.strip, row.split(" | "))
    major, minor = map(int, capability.split("."))
    known = {f"{dtype}_tflops": literal_eval(peak) for dtype, peak in zip(PEAKS, peaks, strict=True)}
    return GpuSpec(
        name=name, title=title, match=match, memory_bytes=int(mib) * 2**20, compute_capability=(major, minor),
        memory_bandwidth_bytes_per_s=float(gb_per_s) * 1e9, link_bytes_per_s=_LINKS[links][0],
        network_bytes_per_s=_LINKS[links][1], source=f"NVIDIA {source}", **known,
    )  # fmt: skip


SPECS: dict[str, GpuSpec] = {spec.name: spec for spec in map(_board, _BOARDS.strip().splitlines())}
_PER_S = {"gb/s": 1e9, "tb/s": 1e12, "gbit/s": 1e9 / 8}
_FIGURES: dict[str, tuple[str, dict[str, float]]] = {
    "memory": ("memory_bytes", {"gb": 2**30, "gib": 2**30}),
    "bandwidth": ("memory_bandwidth_bytes_per_s", _PER_S),
    "link": ("link_bytes_per_s", _PER_S),
    "network": ("network_bytes_per_s", _PER_S),
    "node": ("node_gpus", {"": 1.0}),
    **{name: (f"{name}_tflops", {"": 1.0, "tflop/s": 1.0, "tflops": 1.0}) for name in PEAKS},
}
"""The figures a user may give, and their units: GB of memory are binary on every datasheet, GB/s are not."""
_SPECIFICATION = (
    "a GPU is given by a name or by memory, bandwidth and dense TFLOP/s in bf16 or fp16 (more: tf32, fp32, fp8),"
    ' such as "memory=24GB,bf16=165,bandwidth=1008GB/s"; many by their number and an x before it, with the GB/s of'
    ' link and network and the GPUs of a node where they differ, such as "64xh100-80g,network=25GB/s,node=4"'
)


def spec_of(text: str) -> GpuSpec:
    """A board by its name, by figures (memory, bandwidth and dense TFLOP/s), or both; before it their number."""
    many = re.match(r"\s*(\d+)\s*x\s*(?=\S)", text)
    name, *pairs = (part.strip() for part in text[many.end() if many else 0 :].split(","))
    given: dict[str, float] = {}
    if "=" in name:
        name, pairs = "", [name, *pairs]
    for pair in pairs:
        key, _, raw = (part.strip().lower() for part in pair.partition("="))
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z/]*)", raw)
        unit = _FIGURES[key][1].get(found[2]) if found and key in _FIGURES else None
        if found is None or unit is None or not float(found[1]):
            raise ConfigError(f"{_SPECIFICATION}; got {pair!r}")
        given[key] = float(found[1]) * unit
    count = int(many[1]) if many else 1
    if not count or not float(given.get("node", 1)).is_integer():
        raise ConfigError(f"{_SPECIFICATION}; got {text!r}")
    figures: dict[str, Any] = {_FIGURES[key][0]: value for key, value in given.items()} | {"count": count}
    figures |= {key: int(figures[key]) for key in ("memory_bytes", "node_gpus") if key in figures}
    if name:
        spec = find_spec(name)
        source = f"{spec.source}; {', '.join(pairs)} as given" if pairs else spec.source
        return replace(spec, source=source, **figures)
    if not {"memory", "bandwidth"} <= set(given) or not {"bf16", "fp16"} & set(given):
        raise ConfigError(f"{_SPECIFICATION}; got {text!r}")
    capability = (8, 9) if "fp8" in given else (8, 0) if "bf16" in given else (7, 0)
    figures = {"fp16_tflops": given.get("bf16")} | figures
    title, source = f"a GPU with {', '.join(pairs)}", "as given with --as"
    return GpuSpec(
        name="given", title=title, match="", compute_capability=capability, source=source, **figures
    )


def find_spec(name: str) -> GpuSpec:
    """The board with this id, or the only one whose id holds all words of the name."""
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace("rtx", "rtx ")))
    words -= {"nvidia", "geforce", "tesla"}
    found = [spec for spec in SPECS.values() if words and words <= set(spec.name.split("-"))]
    if name in SPECS or len(found) == 1:
        return SPECS.get(name) or found[0]
    if found:
        raise ConfigError(f"{name} matches more than one GPU: {' or '.join(spec.name for spec in found)}")
    if any(re.fullmatch(r"mi\d{2,3}[a-z]?|radeon|gaudi\d?|tpu\w*", word) for word in words):
        raise ConfigError(f"{name} is not an NVIDIA GPU, and Redline runs on CUDA; known: {', '.join(SPECS)}")
    raise ConfigError(
        f"no GPU {name!r} in the datasheet table{nearest(name.lower(), SPECS)}; known: {', '.join(SPECS)}; or"
        " give its figures, as in `redline plan --help`"
    )


def match_spec(nvml_name: str, memory_bytes: int) -> GpuSpec | None:
    """The board of this NVML name and memory, or None if the table has no figures for exactly that one."""
    bare = re.sub(r"^(NVIDIA |Tesla )*", "", nvml_name.strip())
    for spec in SPECS.values():
        near = abs(memory_bytes - spec.memory_bytes) <= _MEMORY_TOLERANCE * spec.memory_bytes
        if near and re.fullmatch(spec.match, bare, re.IGNORECASE):
            return spec
    return None
