"""Every Triton kernel compiles, on a machine without a GPU (`make kernels`): the functions that launch them run on CPU
tensors, and each launch compiles for compute capability 9.0 (Hopper) and 8.0 (Ampere) instead. What the kernels compute
is for tests/gpu."""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="torch for CPUs comes without Triton; `make kernels` brings it")

from cross_compile import Compiled, compiling
from triton.runtime.jit import JITFunction

import redline
from redline.config.recipe import ModelConfig
from redline.engine import kernels as choice
from redline.engine import one_row
from redline.engine.state import make_slots
from redline.model import kernels
from redline.model.attention import cache_kernels, favor_kernels, favor_step, heads, short
from redline.model.attention.cache import KeysAndValues
from redline.model.attention.favor import Features
from redline.model.attention.softmax import Rope, rope_table
from redline.model.attention.state import Room, Rows
from redline.model.cross_entropy import linear_cross_entropy, losses_by_kernel, transposed_by_kernel
from redline.model.transformer import Transformer

SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}
"""What a program may take, by compute capability (CUDA C++ Programming Guide)."""
CPU, HALF = torch.device("cpu"), torch.bfloat16
ROOM = Room(slots=1, prompts=1, max_prompt_tokens=8, max_new_tokens=8)
CONFIG = ModelConfig(
    vocab_size=5000,
    num_layers=1,
    hidden_size=960,
    num_heads=15,
    num_kv_heads=5,
    ffn_size=2560,
    context_length=16,
)


def empty(*shape: int, dtype: torch.dtype = HALF, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def decoded(number: int) -> Rows:
    return Rows(integers(number), integers(2), integers(2) + 1, integers(2) + 1)


def rope_of(config: ModelConfig) -> Rope | None:
    return rope_table(config) if config.positions == "rope" else None


# ---- launches: every switch of every kernel, and the sizes that make it another program ----


def launch_loss() -> None:
    x, targets = empty(4, 64, grad=True), torch.zeros(4, dtype=torch.int64)
    linear_cross_entropy(x, empty(5000, 64), targets, how="fused").backward()
    for sample in (None, (integers(1)[0], empty(1, dtype=torch.float32)[0])):
        losses_by_kernel(empty(4, 5008), targets, empty(4, 5008, dtype=torch.float8_e5m2), sample)
    transposed_by_kernel(empty(64, 5008, dtype=torch.float8_e5m2))


def launch_between_products() -> None:
    x, weight = empty(4, 960), empty(960)
    for y in (None, x):
        kernels.add_rms_norm(x, y, weight, 1e-5)
    for learned in (weight, empty(960, dtype=torch.float32, grad=True)):
        for y, used in (
            (x, slice(2)),
            (x, slice(1, 2)),
            (None, slice(2)),
        ):  # both results, and the normalised one alone
            results = kernels.sum_rms_norm(empty(4, 960, grad=True), y, learned, 1e-5)[used]
            torch.autograd.backward(results, [x] * len(results))
    kernels.swiglu(empty(4, 2 * 2560, grad=True)).sum().backward()
    kernels.relu_squared(empty(4, 2560, grad=True)).sum().backward()


def launch_short_attention() -> None:
    for C, longest in ((128, 16), (64, 64), (64, 128), (32, 128)):
        qkv, table = empty(longest, 15 + 2 * 5, C, grad=True), empty(longest, C, dtype=torch.float32)
        short.attend(qkv, table, table, integers(3), q_heads=15, longest=longest).sum().backward()


def launch_rotation() -> None:
    for C in (128, 80):
        weight, table = empty(C, dtype=torch.float32, grad=True), empty(64, C, dtype=torch.float32)
        qkv = empty(64, 4 + 2 * 2, C, grad=True)
        torch.cat(
            heads.normed_and_rotated(qkv, weight, weight, table, table, 1e-5, 4, 2), dim=1
        ).sum().backward()


def launch_decode_attention() -> None:
    """Few rows and many, which take other blocks; a head whose width is no power of two; heads so wide that few rows take
    the small blocks too; many heads that share one key."""
    learned = replace(CONFIG, positions="learned", head_dim=80)
    wide = replace(CONFIG, num_heads=2, num_kv_heads=2, head_dim=256)
    many = replace(CONFIG, num_heads=64, num_kv_heads=1, head_dim=128)
    for config, rows, dtype in (
        (CONFIG, 1, HALF), (learned, 64, torch.float32), (wide, 1, torch.float32), (many, 1, HALF)
    ):  # fmt: skip
        cache = KeysAndValues(config, rope_of(config), ROOM, device=CPU, dtype=dtype)
        heads, C = config.num_heads + 2 * config.kv_heads, config.head_size
        cache_kernels.store_prompt(cache, 0, empty(1, 8, heads, C, dtype=dtype), integers(1), integers(1))
        cache_kernels.attend(cache, 0, empty(rows, heads, C, dtype=dtype), decoded(rows))


def launch_one_row() -> None:
    model = Transformer(CONFIG).to(HALF)
    model.compute_dtype = HALF
    state = KeysAndValues(CONFIG, rope_of(CONFIG), ROOM, device=CPU, dtype=HALF)
    one_row.decode(model, state, integers(2), decoded(1))


def launch_choice() -> None:
    slots, logits = make_slots(CONFIG, ROOM, CPU), empty(2, CONFIG.vocab_size, dtype=torch.float32)
    cutoff = choice.cutoff(logits, slots, integers(2))
    for cut in (None, cutoff):
        choice.pick(logits, slots, integers(2), cut)


def launch_kernel_attention() -> None:
    """Features in blocks of 64, and of 32 where heads are wide."""
    plain = replace(CONFIG, attention="favor", num_heads=4, num_kv_heads=2)
    for config in (
        replace(plain, features=256, head_dim=64),
        replace(plain, features=96, head_dim=128, positions="learned"),
    ):
        C, w = config.head_size, empty(2, config.features, config.head_size)
        q, k, v = empty(1, 100, 8, C, grad=True).split([4, 2, 2], dim=2)
        favor_kernels.attend(q, k, v, w)[0].sum().backward()
        state = Features(config, rope_of(config), ROOM, device=CPU, dtype=HALF)
        favor_step.step(state, 0, w, empty(3, 8, C), decoded(3))


CHEAP = (
    launch_loss, launch_between_products, launch_short_attention, launch_rotation, launch_decode_attention, launch_one_row, launch_choice,
)  # fmt: skip
LAUNCHES: dict[int, tuple[Callable[[], None], ...]] = {
    90: (*CHEAP, launch_kernel_attention),
    80: CHEAP,  # without the instructions of Hopper, kernel attention takes as long to compile as all the others
}


def compile_all(capability: int) -> Compiled:
    with patch("torch.cuda.get_device_capability", return_value=divmod(capability, 10)):
        overlap = kernels.overlap.__wrapped__(torch.device("cuda"))
    with pytest.MonkeyPatch.context() as monkeypatch, compiling(capability) as compiled:
        for module in (choice, one_row, cache_kernels, kernels):
            monkeypatch.setattr(module, "overlap", lambda device: overlap)
        monkeypatch.setattr(cache_kernels, "shared_bytes", lambda device: SHARED_BYTES[capability])
        for launch in LAUNCHES[capability]:
            launch()
    return compiled


@pytest.fixture(scope="module")
def compiled() -> dict[int, Compiled]:
    return {capability: compile_all(capability) for capability in LAUNCHES}


# ---- the kernels of the sources ----


def sources() -> dict[ModuleType, str]:
    folder = Path(redline.__file__).parent
    texts = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    return {
        importlib.import_module(".".join(path.relative_to(folder.parent).with_suffix("").parts)): text
        for path, text in texts.items()
        if "@triton." in text
    }


def functions_of(module: ModuleType) -> list[JITFunction]:
    return [f for f in vars(module).values() if isinstance(f, JITFunction) and f.module == module.__name__]


FUNCTIONS = {f"{f.module}.{f.__name__}": f for module in sources() for f in functions_of(module)}


def test_every_kernel_is_known_here() -> None:
    for module, text in sources().items():
        written = len(re.findall(r"^\s*@triton\.", text, re.MULTILINE))
        assert len(functions_of(module)) == written, f"{module.__name__}: a kernel inside a function?"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_compiles(name: str, compiled: dict[int, Compiled]) -> None:
    for found in compiled.values():
        if FUNCTIONS[name] in found.errors:
            raise found.errors[FUNCTIONS[name]]
    reached = set().union(*(found.functions for found in compiled.values()))
    assert FUNCTIONS[name] in reached, f"no launch in this file reaches {name}: add one"


def test_every_switch_is_compiled_on_and_off(compiled: dict[int, Compiled]) -> None:
    seen: dict[str, set[bool]] = {}
    for kernel in (kernel for found in compiled.values() for kernel in found.kernels):
        function = kernel.src.fn
        for (at,), value in kernel.src.constants.items():
            if isinstance(value, bool):
                seen.setdefault(f"{function.module}.{function.__name__} {function.arg_names[at]}", set()).add(
                    value
                )
    assert seen
    assert [switch for switch, values in seen.items() if values != {True, False}] == []


def test_programs_fit_into_shared_memory(compiled: dict[int, Compiled]) -> None:
    for capability, found in compiled.items():
        for kernel in found.kernels:
            assert kernel.metadata.shared <= SHARED_BYTES[capability], (kernel.src.fn, kernel.src.constants)


def test_short_attention_takes_no_more_than_it_says(compiled: dict[int, Compiled]) -> None:
    """`short.fits` decides by this whether a GPU has the room; a program that takes more does not start."""
    seen = 0
    for kernel in (kernel for found in compiled.values() for kernel in found.kernels):
        function = kernel.src.fn
        if function.module == short.__name__:
            sizes = {function.arg_names[at]: value for (at,), value in kernel.src.constants.items()}
            assert kernel.metadata.shared <= short.backward_bytes(sizes["L"], sizes["C"]), (function, sizes)
            seen += 1
    assert seen == 2 * 4 * len(LAUNCHES)


def test_decode_attention_takes_no_more_than_it_says(compiled: dict[int, Compiled]) -> None:
    """A GPU that has less (an RTX 5090 has 99 KiB) takes small blocks."""
    seen = 0
    for kernel in compiled[90].kernels:
        function = kernel.src.fn
        sizes = {function.arg_names[at]: value for (at,), value in kernel.src.constants.items()}
        if function is cache_kernels._attend and sizes["BLOCK"] == cache_kernels.LARGE:
            assert kernel.metadata.shared <= cache_kernels.large_bytes(sizes, HALF), sizes
            seen += 1
    assert seen == 2
