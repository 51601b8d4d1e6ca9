"""This process among the others: rank, device, sharding. One process is world size one and takes the same path.

Under torchrun (its RANK and WORLD_SIZE are set) a process group is started: NCCL on GPUs, gloo on CPUs. Weights,
gradients and optimiser state are sharded by FSDP2, block by block; gradients are reduced in fp32 after every pass,
which costs communication that overlaps the backward and keeps them sharded.

Time spent waiting for the other processes is marked separately from the phases it happens in:

    if time_waits(model, instruments.mark):      # once, after `shard`: FSDP's waits are marked from then on
        learner.waiting = lambda: waiting(instruments.mark)

Only exposed waits count: on a GPU, when the computing stream stands still until a gather or a reduction is there, and
unpacks or packs it. FSDP has no public place for this, so a few methods of its parameter groups are wrapped, on this
model's objects alone (docs/decisions.md).
"""

import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.errors import MachineError
from redline.model.transformer import Transformer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Process:
    rank: int
    world_size: int
    device: torch.device
    replicas: int = 1
    """Groups of processes that each hold a copy of the weights."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sums(self, *values: float) -> tuple[float, ...]:
        """Sums over all processes in one host-side exchange, for numbers that are on the host anyway."""
        if self.world_size == 1:
            return values
        # on the host, so that gloo carries it and the GPU is not waited for
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def sum(self, value: float) -> float:
        return self.sums(value)[0]

    def any(self, flag: bool) -> bool:
        """True on every process if it is true on one: processes stop at the same step or hang."""
        return self.sum(float(flag)) > 0

    def hosts(self) -> dict[str, int]:
        """The machines in the order of their processes, and how many processes each has."""
        return dict(Counter(self.all_of(socket.gethostname())))

    def all_of(self, value: Any) -> list[Any]:
        """Every process's value, by rank, on all of them; plain JSON."""
        return exchange(value) if self.world_size > 1 else [value]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def join(kind: str) -> Iterator[Process]:
    """Take this process's place: alone, or in torchrun's group."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        threading.Thread(target=hash_triton, daemon=True).start()
        if not torch.cuda.is_available():
            raise MachineError(
                "the plan is for a GPU, but torch sees no CUDA device: plan again here, or check the driver"
            )
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Process(0, 1, device)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Process(rank, world_size, device)
    finally:
        dist.destroy_process_group()


def hash_triton() -> None:
    """Hash Triton in a thread while the GPU wakes up and the data is opened. Triton hashes itself before it looks up its
    first kernel (0.36 s, mostly one large library) and remembers the result."""
    # No Triton, or another one: what is broken fails again at the first kernel, which says why.
    with suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def exchange(message: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every message of the group, by rank. As JSON, because torch's object collectives un-pickle."""
    own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.cat([own, own.new_zeros(longest - len(own))]), group=group)
    return [json.loads(text[: int(size)].numpy().tobytes()) for size, text in zip(sizes, texts, strict=True)]


def is_spread(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether processes hold parts of it. A process alone does not import DTensor, which takes 0.9 s."""
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be spread over the processes; call it on all of them."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def shard(model: Transformer, process: Process, dtype: torch.dtype) -> None:
    """Spread every weight of a model that has no memory yet over the processes; reduces gradients in fp32. With replicas
    (HSDP) neighbours in rank, which torchrun puts on one node, hold a copy together, and gradients are reduced among
    them first.

    Numbers are those of one process: blocks gather their weights in `dtype`, to which each layer would cast
    them anyway; embedding, last norm and head gather fp32, because one process looks tokens up in fp32; and
    no input is cast (the rotation is in fp32).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sizes: tuple[int, ...] = (process.world_size,)
    if process.replicas > 1:
        sizes = (process.replicas, process.world_size // process.replicas)
    mesh = init_device_mesh(process.device.type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    in_dtype = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=in_dtype)
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
    )


# ---- waits ----

INTERRUPTED, COMMUNICATION = "", "communication_s"
"""The two marks around a wait."""
WAITS = {
    "cuda": ("wait_for_unshard", "post_backward"),
    "cpu": ("unshard", "wait_for_unshard", "post_backward"),
}
"""Where the computing process waits: for gathered weights, and for the reduction before its own."""
LAST_WAIT = "finalize_backward"
"""The root's waits for its own reduction, which comes after all others in their stream."""

Mark = Callable[[str], None]


@contextmanager
def waiting(mark: Mark) -> Iterator[None]:
    """What is done inside waits for the other processes."""
    mark(INTERRUPTED)
    try:
        yield
    finally:
        mark(COMMUNICATION)


def time_waits(model: nn.Module, mark: Mark) -> bool:
    """Mark every wait of a sharded model. False, with nothing changed, if this torch waits elsewhere."""
    from torch.distributed.fsdp import FSDPModule

    device = next(model.parameters()).device.type
    found = [
        (_group(module), module is model) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    methods = [
        (group, name)
        for group, is_root in found
        for name in (*WAITS[device], *([LAST_WAIT] if is_root else []))
    ]
    if not all(callable(getattr(group, name, None)) for group, name in methods):
        return False
    for group, name in methods:
        setattr(group, name, _marked(getattr(group, name), mark))
    return True


def _group(module: Any) -> Any:
    """FSDP's parameter group of one module."""
    try:
        return module._get_fsdp_state()._fsdp_param_group
    except AttributeError:
        return None


def _marked(method: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    @wraps(method)
    def marked(*given: Any, **named: Any) -> Any:
        with waiting(mark):
            return method(*given, **named)

    return marked
