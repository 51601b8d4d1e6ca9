"""Compiles Triton kernels for a GPU that is not there.

    with compiling(90) as compiled:                   # compute capability 9.0
        kernels.swiglu(torch.empty(4, 64))            # a launch compiles its kernel, and nothing runs
    compiled.kernels[0].metadata.shared

Triton itself turns the arguments of a launch into a signature, constants and options, as it would on the GPU. Left out:
`ptxas`, which turns the PTX into machine code and takes a third of the time.
"""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from triton import AsyncCompileMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.code_generator import CodeGenerator
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass
class Compiled:
    """What launches came to, each distinct one once."""

    kernels: list[Any] = field(default_factory=list)
    errors: dict[JITFunction, Exception] = field(default_factory=dict)
    functions: set[JITFunction] = field(default_factory=set)
    """Kernels, and the functions that their code calls."""


class _Device:
    """A driver that only says what to compile for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return f"sm_{self.target.arch}"  # Triton keeps kernels by device: no real one has this name

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[Compiled]:
    """Inside, a launch of any kernel only compiles it, in another thread; the results are there at the end."""
    found, launched = Compiled(), {}
    run, call = JITFunction.run, CodeGenerator.call_JitFunction

    def compile_only(kernel: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
        launched[run(kernel, *args, warmup=True, **options)] = kernel

    def noted(generator: CodeGenerator, function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        found.functions.add(function)
        return call(generator, function, *args, **kwargs)

    with (
        tempfile.TemporaryDirectory() as cache,  # not the user's: kernels without machine code are no use there
        patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        patch.object(CUDABackend, "make_cubin", return_value=b""),
        patch.object(driver, "_active", _Device(capability)),
        patch.object(JITFunction, "run", compile_only),
        patch.object(CodeGenerator, "call_JitFunction", noted),
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):
        with AsyncCompileMode(threads, ignore_errors=True):
            yield found
        for future, kernel in launched.items():
            found.functions.add(kernel)
            try:
                found.kernels.append(future.result())
            except Exception as error:  # noqa: BLE001 (the test raises it)
                found.errors[kernel] = error
