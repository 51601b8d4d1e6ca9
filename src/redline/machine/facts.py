"""What this machine is: GPUs, cores, memory, disk and library versions, read from NVML, /proc and package metadata.
No torch.

    facts = read_facts()
    facts.gpus[0].memory_bytes, facts.cpu_cores, facts.versions["torch"]

Cores and memory are what this process may use (affinity and control-group limits), not what the board holds. Left
out: host name, user and serial numbers, so that a record can be shared; anything that must be measured (ceilings.py).
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from redline import __version__
from redline.config.recipe import fingerprint_of
from redline.machine.cpu import cpu_name
from redline.machine.nvml import ask, visible_handles

_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "transformers", "torchao")
_CGROUP_LISTING = Path("/proc/self/cgroup")
_CGROUP_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU that this process may use. None: the board or its driver does not say."""

    index: int
    """Position among the visible GPUs, as in torch's `cuda:0`."""
    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    driver: str
    power_limit_w: float | None
    sm_clock_max_mhz: int | None
    pcie_generation: int | None
    pcie_lanes: int | None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine as this process may use it."""

    gpus: tuple[GpuFacts, ...]
    gpu_trouble: str | None
    """What NVML said when a driver is there but does not answer; None on a machine without one."""
    cuda_driver: str | None
    """Newest CUDA version that the driver can run."""
    cpu_name: str
    cpu_cores: int
    memory_bytes: int
    disk_free_bytes: int
    """Free bytes on the current folder's disk."""
    os: str
    python: str
    versions: dict[str, str | None]
    """Installed version of each library that matters to speed; None: not installed."""


def read_facts() -> MachineFacts:
    """Read everything afresh; takes some milliseconds."""
    gpus, trouble, cuda_driver = _read_gpus()
    return MachineFacts(
        gpus=gpus,
        gpu_trouble=trouble,
        cuda_driver=cuda_driver,
        cpu_name=cpu_name(),
        cpu_cores=cpu_cores(),
        memory_bytes=memory_bytes(),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES} | {"redline": __version__},
    )


def slow_import() -> str | None:
    """Why `import torch` takes long every time, and what to do; None where Python keeps what it compiles."""
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.origin is None:
        return None
    if torch.cached is None or os.path.exists(torch.cached):
        return None
    return (
        "PYTHONDONTWRITEBYTECODE is set and torch has no bytecode, so every start compiles its sources again (6 s on the"
        f" host of an H200): unset it, or run `python -m compileall -q {Path(torch.origin).parent}` once"
    )


def machine_key(facts: MachineFacts) -> str:
    """Short stable name of this kind of machine with its software; ceilings hold wherever it is equal."""
    what = {
        "gpus": [(gpu.name, gpu.memory_bytes, gpu.driver) for gpu in facts.gpus],
        "cpu": (facts.cpu_name, facts.cpu_cores),
        "torch": facts.versions["torch"],
    }
    return fingerprint_of(what)[:12]


def same_kind(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two recorded facts are of the same kind of machine: the same GPUs, or the same CPU where there is none."""

    def kind(facts: dict[str, Any]) -> Any:
        return [gpu["name"] for gpu in facts["gpus"]] or [facts["cpu_name"], facts["cpu_cores"]]

    return bool(kind(first) == kind(second))


def software_key(facts: MachineFacts) -> str:
    """The machine and every package that decides how fast a program runs on it; trials with the same key are comparable."""
    versions = {name: version for name, version in facts.versions.items() if version}
    return f"{machine_key(facts)}-{fingerprint_of(versions)[:12]}"


def _read_gpus() -> tuple[tuple[GpuFacts, ...], str | None, str | None]:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return (), None, None
    except pynvml.NVMLError as error:
        return (), str(error), None
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = tuple(_read_gpu(index, handle, driver) for index, handle in enumerate(visible_handles()))
        return gpus, None, f"{cuda // 1000}.{cuda % 1000 // 10}"
    except pynvml.NVMLError as error:
        return (), str(error), None
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(index: int, handle: Any, driver: str) -> GpuFacts:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    power_limit_mw = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuFacts(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=pynvml.nvmlDeviceGetCudaComputeCapability(handle),
        driver=driver,
        power_limit_w=None if power_limit_mw is None else power_limit_mw / 1000,
        sm_clock_max_mhz=ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        # The largest, not the current one: an idle link drops to generation 1.
        pcie_generation=ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_lanes=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )


def cpu_cores() -> int:
    """Processors this process may keep busy. A fractional quota is rounded down: threads beyond it are throttled."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_cpu_quotas()])))


def _cpu_quotas() -> Iterator[float]:
    for folder in _cgroup_folders("cpu"):
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        elif (file := folder / "cpu.cfs_quota_us").exists():
            quota, period = file.read_text().strip(), (folder / "cpu.cfs_period_us").read_text()
        else:
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's."""
    total = psutil.virtual_memory().total
    names = ("memory.max", "memory.limit_in_bytes")
    files = [folder / name for folder in _cgroup_folders("memory") for name in names]
    limits = [text for file in files if file.exists() and (text := file.read_text().strip()) != "max"]
    return min([total, *map(int, limits)])  # an unlimited group of version 1 reports nearly 2^63


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Folders whose limits bind this process: its control group (version 1 or 2) and all above it."""
    if not _CGROUP_LISTING.exists():
        return
    for line in _CGROUP_LISTING.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_MOUNT / controller if controllers else _CGROUP_MOUNT
        folder = root / group.lstrip("/")
        # In a container the listing may give the host's path, which does not exist here; the folders above it
        # still count.
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(root))


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
