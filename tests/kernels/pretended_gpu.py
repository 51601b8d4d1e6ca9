"""A GPU that is pretended: tensors stay on the CPU, Triton's interpreter runs the kernels (so TRITON_INTERPRET=1 must be set
before Triton is imported), and code that asks whether a tensor is on a GPU hears yes.

    with pretending():
        executor = Captured(learner, objective, event)     # records an update, and replays it

A graph records every operation on tensors, and every launch, with its arguments. A replay runs them again and writes their
results where the first ones are: whatever else the host would have computed anew is as it was during the capture, as on a
GPU. Recording leaves no trace in tensors that exist already, and refuses what would wait for the GPU. Left out: streams
(everything runs in the order of its launch), memory, bfloat16 (the interpreter's is not to be trusted: use float16).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from redline.engine import kernels as choice
from redline.engine import one_row
from redline.model import kernels, lora
from redline.model.attention import cache_kernels

WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "masked_select"}
"""Operations whose results the host reads."""


def _tensors(given: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


class Graph(TorchDispatchMode):
    """Stands for torch.cuda.CUDAGraph, and for its capture."""

    capturing: "Graph | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        """What the capture writes to: by the address of its memory, all of that, and how it was."""
        self.made: set[int] = set()

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():  # they were recorded there
            for step in self.steps:
                step()

    def keep(self, written: list[Tensor]) -> None:
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.made | self.before.keys():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.before[storage.data_ptr()] = whole, whole.clone()

    def undo(self) -> None:
        for whole, before in self.before.values():
            whole.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        assert name not in WAITS, f"a capture cannot wait for {name}"
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        writes = [
            a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        self.keep(_tensors([named[one] for one in writes if one in named]))
        found = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [tensor.untyped_storage().data_ptr() not in known for tensor in _tensors(found)]
        places = [tensor for tensor, new in zip(_tensors(found), fresh, strict=True) if new]
        self.made |= {place.untyped_storage().data_ptr() for place in places}

        def again() -> None:
            results = [t for t, new in zip(_tensors(func(*args, **kwargs)), fresh, strict=True) if new]
            for place, result in zip(places, results, strict=True):
                place.copy_(result)

        self.steps.append(again)
        return found


@contextmanager
def _capture(graph: Graph, **_: Any) -> Iterator[None]:
    assert Graph.capturing is None
    Graph.capturing = graph
    try:
        with graph:
            yield
    finally:
        Graph.capturing = None
        graph.undo()


_launch = interpreter.GridExecutor.__call__


def _run(kernel: Any, *args: Any, **options: Any) -> None:
    with _disable_current_modes():
        if (graph := Graph.capturing) is not None:
            graph.keep(_tensors(args))
            graph.steps.append(lambda: _launch(kernel, *args, **options))
        _launch(kernel, *args, **options)


_mm = torch.mm


def _product(left: Tensor, right: Tensor, *, out_dtype: Any = None, out: Tensor | None = None) -> Tensor:
    """Only CUDA's takes `out_dtype`, and adds up in it."""
    if out_dtype is None:
        return _mm(left, right) if out is None else _mm(left, right, out=out)
    product = _mm(left.to(out_dtype), right.to(out_dtype))
    return product if out is None else out.copy_(product)


_empty = torch.empty


def _unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    return _empty(*size, **options)


class _Stream:
    """Of streams and events nothing is left: everything runs in the order of its launch."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> "_Event":
        return _Event()


class _Event:
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


@contextmanager
def pretending() -> Iterator[None]:
    """Inside, tensors say that they are on an H200."""
    here = _Stream()
    cuda = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda *_: here,
        "set_stream": lambda stream: None,
        "CUDAGraph": Graph,
        "graph": _capture,
        "graph_pool_handle": lambda: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(shared_memory_per_block_optin=227 * 1024),
    }
    with ExitStack() as stack:
        for name, stands_for in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, stands_for))
        stack.enter_context(patch.object(Tensor, "is_cuda", property(lambda tensor: True)))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: tensor.clone()))
        stack.enter_context(patch.object(torch, "mm", _product))
        stack.enter_context(patch.object(torch, "empty", _unpinned))
        stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", _run))
        # the mode that records an update is not that of selective recomputation
        stack.enter_context(patch.object(lora, "is_in_torch_dispatch_mode", lambda: False))
        for module in (kernels, choice, one_row, cache_kernels):  # launches do not overlap here
            stack.enter_context(patch.object(module, "overlap", lambda device: {"OVERLAP": False}))
        yield


def let_loops_run() -> None:
    """Triton 3.6's interpreter takes `int` of an array of one element, which numpy 2.4 refuses."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
