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
from dataclasses import dataclass, replace
from typing import Any

from redline.errors import ConfigError, nearest
from redline.record.files import shipped

FILE = "machine/boards.toml"
_MEMORY_TOLERANCE = 0.06
"""Drivers and torch differ by up to 4% in the total they report; variants of a board by far more."""


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


PEAKS = ("bf16", "fp16", "tf32", "fp32", "fp8")


def _board(name: str, row: dict[str, Any]) -> GpuSpec:
    link, network = shipped(FILE)["links"][row["links"]]
    return GpuSpec(
        name=name, title=row["title"], match=row["match"], memory_bytes=row["memory_mib"] * 2**20,
        compute_capability=tuple(row["compute_capability"]), link_bytes_per_s=link * 1e9,
        memory_bandwidth_bytes_per_s=row["bandwidth"] * 1e9, network_bytes_per_s=network * 1e9,
        source=f"NVIDIA {row['source']}", **{f"{dtype}_tflops": peak for dtype, peak in row["tflops"].items()},
    )  # fmt: skip


SPECS: dict[str, GpuSpec] = {name: _board(name, row) for name, row in shipped(FILE)["boards"].items()}
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
