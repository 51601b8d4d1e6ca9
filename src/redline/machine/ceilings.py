"""Measured ceilings: the fastest this machine was seen to multiply, copy and launch. Needs torch.

    ceilings = load_or_measure(read_facts(), progress=print)    # seconds the first time, then from the cache

Method: random data (zeros draw less power), inputs rotated so that they do not stay in the L2 cache, warm-up, then the
best of seven blocks timed by CUDA events. If the median block is much slower than the best, or other programs held the
CPU, up to three series are taken; what is still noisy is marked so, and holds for an hour. Left out: sustained clocks over minutes,
several GPUs (the current one is measured), NVLink and disk.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from redline.errors import MachineError, Say, StorageError
from redline.machine.facts import MachineFacts
from redline.machine.specs import GpuSpec, match_spec
from redline.machine.store import NOISY, Ceilings, MatmulPoint, cached, save

_SHAPES_MNK = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (65536, 3072, 768),  # feed-forward of a 124M model over 64 sequences of 1024 tokens
    (16384, 8192, 2048),  # feed-forward of a 1.3B model over 16 of them
)
_DTYPES = {  # torch's type, and the least compute capability with hardware for it
    "bf16": (torch.bfloat16, (8, 0)),
    "fp16": (torch.float16, (7, 0)),
    "tf32": (torch.float32, (8, 0)),
    "fp32": (torch.float32, (0, 0)),
    "fp8": (torch.float8_e4m3fn, (8, 9)),
}
_BLOCKS, _SERIES = 7, 3
_BLOCK_S = 0.02
BOOST_MARGIN = 1.15
"""Boards go up to 15% beyond the datasheet's boost clock; timing mistakes go much further."""
_COPY_BYTES = 2**30
_TRANSFER_BYTES = 2**28
_LEAST_FREE_BYTES = 3 * 2**30  # two copy buffers, and some room for the libraries
_TINY_KERNELS = 1000

Work = Callable[[int], object]
"""Does the measured thing once; takes the number of the call, to rotate its inputs."""
Clock = Callable[[Work, int], tuple[float, float]]
"""Seconds that so many calls take, and how many of them went to other programs."""


def load_or_measure(facts: MachineFacts, refresh: bool = False, progress: Say = lambda _: None) -> Ceilings:
    """The ceilings kept for this kind of machine; measured if there are none or `refresh` asks for it."""
    unusable: list[str] = []
    if not refresh and (kept := cached(facts, unusable.append)) is not None:
        return kept
    for line in unusable:
        progress(line)
    ceilings = measure(progress)
    ceilings = dataclasses.replace(ceilings, notes=(*unusable, *ceilings.notes))
    if ceilings.noisy:
        progress(
            f"this machine was busy while its ceilings were measured: {', '.join(ceilings.noisy)}. They hold for an hour;"
            " `redline machine --refresh` measures them when the machine is quiet"
        )
    try:
        save(facts, ceilings)
    except StorageError as error:
        # An unwritable home costs one measurement per process, not the run.
        progress(f"the ceilings could not be saved and will be measured again next time: {error}")
    return ceilings


def measure(progress: Say = lambda _: None) -> Ceilings:
    """Measure the CPU and, if there is one, the current GPU. Torch's random state and precision are kept."""
    progress("measuring the CPU")
    cpu_matmul_gflops, matmul_spread = _cpu_matmul_gflops()
    # repeated, because drawing so many numbers would take seconds
    numbers = _randn(torch.Generator().manual_seed(0), 2**20).repeat(_TRANSFER_BYTES // 2**22)
    cpu_copy_bytes_per_s, copy_spread = _copy_bytes_per_s(numbers, time_cpu_s)
    ceilings = Ceilings(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device="cpu",
        matmul=(),
        copy_bytes_per_s=None,
        host_to_device_bytes_per_s=None,
        device_to_host_bytes_per_s=None,
        launch_latency_s=None,
        graph_launch_latency_s=None,
        cpu_threads=torch.get_num_threads(),
        cpu_matmul_gflops=cpu_matmul_gflops,
        cpu_copy_bytes_per_s=cpu_copy_bytes_per_s,
        spread={"CPU matmul": matmul_spread, "CPU copy": copy_spread},
        notes=(),
    )
    return _measure_gpu(ceilings, progress) if torch.cuda.is_available() else ceilings


def _measure_gpu(ceilings: Ceilings, tell: Say) -> Ceilings:
    """The ceilings with the current GPU's values filled in."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if free_bytes < _LEAST_FREE_BYTES:
        raise MachineError(
            f"measuring {properties.name} needs {_LEAST_FREE_BYTES / 2**30:.0f} GiB of free GPU memory, "
            f"{free_bytes / 2**30:.1f} are free: end what else runs on it"
        )
    random = torch.Generator(device).manual_seed(0)
    found: dict[str, Any] = {"device": properties.name}
    found["matmul"], found["notes"] = _matmul_points(properties, random, tell)
    tell(f"measuring copies and launches on {properties.name}")
    found["copy_bytes_per_s"], spread = _copy_bytes_per_s(_randn(random, _COPY_BYTES // 4), time_cuda_s)
    found["host_to_device_bytes_per_s"], found["device_to_host_bytes_per_s"] = _transfer_bytes_per_s(random)
    found["launch_latency_s"], found["graph_launch_latency_s"] = _launch_latencies_s(random)
    torch.cuda.empty_cache()
    measured = dataclasses.replace(ceilings, **found, spread={**ceilings.spread, "GPU copy": spread})
    spec = match_spec(properties.name, properties.total_memory)
    return measured if spec is None else reject_impossible(measured, spec)


def _matmul_points(
    properties: Any, random: torch.Generator, tell: Say
) -> tuple[tuple[MatmulPoint, ...], tuple[str, ...]]:
    """Every shape in every type that the GPU has hardware for, and a note for each that did not fit."""
    points, notes = [], []
    for dtype, (_, least_capability) in _DTYPES.items():
        if (properties.major, properties.minor) < least_capability:
            continue
        tell(f"measuring matmul in {dtype} on {properties.name}")
        for m, n, k in _SHAPES_MNK:
            try:
                with _fp32_precision("tf32" if dtype == "tf32" else "ieee"):
                    points.append(_matmul_point(dtype, m, n, k, random, properties.L2_cache_size))
            except torch.OutOfMemoryError:
                notes.append(f"matmul {dtype} {m}x{n}x{k} was skipped: not enough free GPU memory")
            torch.cuda.empty_cache()
    return tuple(points), tuple(notes)


def reject_impossible(ceilings: Ceilings, spec: GpuSpec) -> Ceilings:
    """The ceilings without values above what the board can reach: their measurement went wrong, as the notes say."""
    possible, notes = [], list(ceilings.notes)
    for point in ceilings.matmul:
        peak_tflops = spec.peak_tflops(point.dtype)
        if peak_tflops is None or point.tflops > BOOST_MARGIN * peak_tflops:
            shape = f"{point.m}x{point.n}x{point.k}"
            notes.append(
                f"matmul {point.dtype} {shape} was rejected: {point.tflops:.0f} TFLOP/s, the datasheet says"
                f" {peak_tflops}"
            )
        else:
            possible.append(point)
    copied, bandwidth = ceilings.copy_bytes_per_s, spec.memory_bandwidth_bytes_per_s
    if copied is not None and copied > bandwidth:
        notes.append(f"copy was rejected: {copied / 1e9:.0f} GB/s, the datasheet says {bandwidth / 1e9:.0f}")
        copied = None
    return dataclasses.replace(ceilings, matmul=tuple(possible), copy_bytes_per_s=copied, notes=tuple(notes))


def _matmul_point(dtype: str, m: int, n: int, k: int, random: torch.Generator, l2_bytes: int) -> MatmulPoint:
    torch_dtype = _DTYPES[dtype][0]
    set_bytes = (m * k + k * n) * torch_dtype.itemsize
    num_sets = max(1, math.ceil(2 * l2_bytes / set_bytes))
    lefts = [_randn(random, m, k).to(torch_dtype) for _ in range(num_sets)]
    # column-major: fp8 takes no other
    rights = [_randn(random, n, k).to(torch_dtype).t() for _ in range(num_sets)]
    scale = torch.ones((), device=random.device)

    def work(call: int) -> object:
        left, right = lefts[call % num_sets], rights[call % num_sets]
        if dtype != "fp8":
            return torch.mm(left, right)
        # Fast accumulation is what fp8 training uses in the forward pass, and the only way to the full rate
        # on Hopper.
        return torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    seconds, spread = _best_s(work, time_cuda_s)
    return MatmulPoint(dtype=dtype, m=m, n=n, k=k, tflops=2 * m * n * k / seconds / 1e12, spread=spread)


def _copy_bytes_per_s(source: torch.Tensor, clock: Clock) -> tuple[float, float]:
    target = torch.empty_like(source)
    seconds, spread = _best_s(lambda _: target.copy_(source), clock)
    return 2 * source.nbytes / seconds, spread


def _transfer_bytes_per_s(random: torch.Generator) -> tuple[float, float]:
    """Host to device and device to host."""
    on_device = _randn(random, _TRANSFER_BYTES // 4)
    pinned = torch.empty(on_device.shape, pin_memory=True)
    to_host_s, _ = _best_s(lambda _: pinned.copy_(on_device, non_blocking=True), time_cuda_s)
    to_device_s, _ = _best_s(lambda _: on_device.copy_(pinned, non_blocking=True), time_cuda_s)
    return on_device.nbytes / to_device_s, on_device.nbytes / to_host_s


def _launch_latencies_s(random: torch.Generator) -> tuple[float, float]:
    """Seconds per tiny kernel: queued by torch one by one, and replayed in one CUDA graph."""
    tiny = _randn(random, 1)

    def burst(_: int) -> None:
        for _ in range(_TINY_KERNELS):
            tiny.mul_(-1.0)

    queued_s, _ = _best_s(burst, time_cuda_s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        burst(0)
    replayed_s, _ = _best_s(lambda _: graph.replay(), time_cuda_s)
    return queued_s / _TINY_KERNELS, replayed_s / _TINY_KERNELS


def _cpu_matmul_gflops() -> tuple[float, float]:
    """The better of a small and, if it takes less than a quarter of a second, a large product."""
    random = torch.Generator().manual_seed(0)
    best_gflops, best_spread = 0.0, 0.0
    for size in (1024, 4096):
        flops = 2 * size**3
        if best_gflops and flops / (best_gflops * 1e9) > 0.25:
            break
        left, right = _randn(random, size, size), _randn(random, size, size)
        seconds, spread = _best_s(lambda _, a=left, b=right: a @ b, time_cpu_s)  # type: ignore[misc]
        best_gflops, best_spread = max((best_gflops, best_spread), (flops / seconds / 1e9, spread))
    return best_gflops, best_spread


def _best_s(work: Work, time_s: Clock) -> tuple[float, float]:
    """Seconds per call in the best block, and the spread."""
    time_s(work, 1)  # loads kernels and lets the library choose among them
    calls = max(1, round(_BLOCK_S / time_s(work, 1)[0]))
    time_s(work, calls)  # lets the clocks settle
    seconds, spread = best_of(lambda: time_s(work, calls))
    return seconds / calls, spread


def best_of(block: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Seconds of the best block, and the spread: how much slower its series' median was, or the share lost to other
    programs. `block` gives its seconds and those lost. Ends with the first steady series."""
    best = math.inf, math.inf
    for _ in range(_SERIES):
        blocks = [block() for _ in range(_BLOCKS)]
        seconds, lost_s = min(blocks)
        usual_s = median(taken_s for taken_s, _ in blocks)
        best = min(best, (seconds, max(usual_s / seconds - 1, lost_s / seconds)))
        if best[1] <= NOISY:
            break
    return best


def time_cuda_s(work: Work, calls: int) -> tuple[float, float]:
    """A Clock of CUDA events: of the host's work only what keeps the GPU waiting counts."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in range(calls):
        work(call)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000, 0.0


def time_cpu_s(work: Work, calls: int) -> tuple[float, float]:
    """A Clock for work on the CPU."""
    waited_s = _waited_s()  # first: it reads a file for each thread
    started_s = time.perf_counter()
    for call in range(calls):
        work(call)
    return time.perf_counter() - started_s, _waited_s() - waited_s


def _waited_s() -> float:
    """Seconds that this process's threads were ready to run and had no CPU; 0 if the kernel does not count them."""
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9


@contextlib.contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """How fp32 matrices are multiplied on the GPU. Torch raises if this is mixed with `allow_tf32`."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _randn(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal values from a separate generator, so that a measurement does not move the seed of a run."""
    return torch.randn(shape, device=random.device, generator=random)
