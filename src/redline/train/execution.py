"""Applies a plan: dtype, matmul precision, attention kernel, FP8, recomputation, compilation, allocator.

Everything here changes how the same training is computed, never what is computed.
"""

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.config.recipe import Recipe, fingerprint_of
from redline.errors import MachineError, need
from redline.model import transformer
from redline.model.transformer import Transformer, build_model
from redline.plan.plan import Plan
from redline.plan.values import ALLOCATOR_VARIABLES, NEEDED_CAPABILITY
from redline.record import startup
from redline.record.files import cache_folder
from redline.train.process import Process, shard

COMPUTE_DTYPE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_TRACED = Path(transformer.__file__).parent
"""The source of what is compiled."""
_compiled_for: str | None = None
"""The attention kernel of what this process has compiled."""


def set_allocator(plan: Plan) -> None:
    """Must run before CUDA is first touched; a user's own setting wins."""
    if plan.allocator and not os.environ.keys() & set(ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = plan.allocator


def check_device(plan: Plan) -> None:
    """A plan may have been made elsewhere: this GPU must have what it asks for."""
    needs = NEEDED_CAPABILITY.get(plan.coarsest, ())
    if plan.hardware.kind == "cuda" and (has := torch.cuda.get_device_capability()) < needs:
        needed, found = (".".join(map(str, version)) for version in (needs, has))
        raise MachineError(
            f"{plan.coarsest} needs compute capability {needed}, but this GPU has {found}: plan again here"
        )


def build(recipe: Recipe, plan: Plan, process: Process) -> Transformer:
    """The recipe's model on this device, sharded and converted as planned; it compiles at the first call."""
    dtype = COMPUTE_DTYPE[plan.precision]

    def shape(model: Transformer) -> None:
        if plan.precision == "fp8":
            _convert_to_fp8(model, plan)
        if process.world_size > 1:
            shard(model, process, dtype)

    model = build_model(recipe.model, device=process.device, seed=recipe.train.seed, shape=shape)
    equip(model, plan)
    return model


def keep_kernels() -> None:
    """Keep what torch and Triton compile in our cache folder: torch's default, /tmp, may not outlive the machine. Its cache
    key ignores ATEN_CPU_CAPABILITY. A user's own setting wins; if the folder cannot be made or written to, kernels are
    just not kept."""
    folder = cache_folder() / f"kernels{os.environ.get('ATEN_CPU_CAPABILITY', '')}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
        os.environ.setdefault("TRITON_CACHE_DIR", f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}/triton")


def equip(model: Transformer, plan: Plan, *, longest: int = 0) -> None:
    """Make the model compute as the plan says. `longest`: passes are packed rows that differ in length, with sequences of
    no more than this many tokens."""
    if plan.compile != "off" or plan.hardware.kind == "cuda":
        keep_kernels()
    model.compute_dtype, model.cross_entropy = COMPUTE_DTYPE[plan.precision], plan.cross_entropy
    model.loss_chunks = plan.loss_chunks
    model.longest = longest if plan.compile != "off" else 0
    # compilers, recomputation and FSDP's hooks take a whole block
    model.apart = plan.compile == "off" and plan.recompute == "none" and plan.world_size == 1
    if plan.compile != "off":
        with startup.importing():
            import_module("torch._inductor.compile_fx")  # otherwise the first update would
    for block in model.blocks:
        block.recompute = plan.recompute
        if plan.compile != "off":
            # One graph for all blocks, compiled once: as fast as the whole model in one graph, in half the
            # time to the first step, and it leaves FSDP's hooks, which stand between the blocks, alone.
            mode = None if plan.compile == "default" else plan.compile
            block.compile(mode=mode, fullgraph=True, dynamic=longest > 0)


def strip_compiled(model: Transformer) -> None:
    """Compute eagerly again: each shape that training did not use would be compiled."""
    for block in model.blocks:
        block._compiled_call_impl = None


def eagerly() -> AbstractContextManager[None]:
    """Inside, compiled blocks compute eagerly. Where nothing is compiled, torch's compiler is not imported for it."""
    compiling = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiling else contextlib.nullcontext()


@contextmanager
def in_force(plan: Plan) -> Iterator[None]:
    """The plan's process-wide switches, restored at the end: another model may need another attention kernel."""
    kernels = list(_KERNELS.values()) if plan.attention == "auto" else [_KERNELS[plan.attention]]
    compiled_apart = _compiled_apart(plan.attention) if plan.compile != "off" else contextlib.nullcontext()
    with compiled_apart, _switched("high" if plan.precision == "tf32" else "highest", kernels):
        yield


def plain_fp32(*, explicit_attention: bool = True) -> AbstractContextManager[None]:
    """No TF32, and explicit attention or any kernel that takes fp32, whatever plan is in force."""
    return _switched("highest", [SDPBackend.MATH] if explicit_attention else list(_KERNELS.values()))


@contextmanager
def _compiled_apart(attention: str) -> Iterator[None]:
    """Inside, compiled code is made for this attention kernel and from this source. A compiler decides on the kernel while
    it traces, and takes in the backward of our own operations. But torch checks neither when it reuses what this process
    or, from its cache on disk, an earlier one has compiled: what came first would stay."""
    config: Any = torch.compiler.config
    before, tag = _compiled_for, config.cache_key_tag
    _drop_compiled(attention)
    source = fingerprint_of([path.read_text(encoding="utf-8") for path in sorted(_TRACED.rglob("*.py"))])
    # Not by config.patch: since torch 2.13 it must end in the context (of a thread, of a notebook's cell) where it began.
    config.cache_key_tag = f"{tag} attention {attention} source {source}"
    try:
        yield
    finally:
        config.cache_key_tag = tag
        if before is not None:  # which may still be in force
            _drop_compiled(before)


def _drop_compiled(attention: str) -> None:
    """Drop what this process has compiled for any other attention kernel."""
    global _compiled_for
    if "torch._dynamo" in sys.modules and _compiled_for not in (None, attention):
        torch._dynamo.reset()
    _compiled_for = attention


@contextmanager
def _switched(matmul_precision: str, kernels: list[SDPBackend]) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul_precision)
    try:
        with sdpa_kernel(kernels):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _convert_to_fp8(model: Transformer, plan: Plan) -> None:
    """FP8 for the matrices inside the blocks, tensor-wise scales; the head stays in bf16."""
    with warnings.catch_warnings():
        # torchao warns about kernels for other hardware that it could not load
        warnings.simplefilter("ignore")
        float8 = need("torchao.float8", extra="fp8")
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    if plan.hardware.kind == "cpu":
        recipe = float8.Float8LinearConfig(emulate=True)

    def inside_blocks(module: nn.Module, name: str) -> bool:
        return name.startswith("blocks.") and isinstance(module, nn.Linear)

    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=inside_blocks)
