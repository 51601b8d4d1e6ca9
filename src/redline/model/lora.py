"""Low-rank adapters (LoRA) on the linear layers of a model, put there in place and merged for sampling.

    add_lora(model, LoraConfig(rank=16, alpha=64), seed=0)    # freezes the model; only `adapters(model)` learn
    with merged(model): ...                                   # weights are W + B A alpha/r, and then their old bits

Query/key/value and gate/up are one matrix here and separate modules in PEFT, so a layer stacks the A's of its parts and
holds their B's as the diagonal blocks of one matrix, whose other elements stay zero. Adapters are fp32 and cast where
they are used; frozen weights are held in the compute dtype. Left out: dropout, DoRA, adapters on embeddings.

Shapes: N tokens, D width in, O width out, R rank x parts.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from redline.config.recipe import LoraConfig, ModelConfig
from redline.errors import ConfigError
from redline.model.flat import pieces
from redline.model.transformer import Linear, Transformer

ALIGNED = 8
"""Elements: where a matrix in half precision begins, tensor cores want a multiple of 16 bytes."""


@dataclass(frozen=True)
class Part:
    """The rows of a fused matrix that are one module elsewhere."""

    target: str
    start: int
    end: int


def parts_of(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """The linear layers of a block, each with the modules that its rows are made of."""
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    rows = {
        "attn.qkv": {"q": q, "k": kv, "v": kv},
        "attn.out": {"o": config.hidden_size},
        "ffn.up": dict.fromkeys(
            ("gate", "up") if config.activation == "swiglu" else ("up",), config.ffn_size
        ),
        "ffn.down": {"down": config.hidden_size},
    }
    return {
        layer: tuple(
            Part(target, end - size, end)
            for (target, size), end in zip(sizes.items(), accumulate(sizes.values()), strict=True)
        )
        for layer, sizes in rows.items()
    }


class Place(Protocol):
    """Where a captured update keeps a layer's adapter (train/workspace.py)."""

    a_RD: Tensor
    b_OR: Tensor
    """Weights as they are multiplied: cast, and B scaled."""

    def learn(self, x_ND: Tensor, dy_NO: Tensor, h_NR: Tensor) -> Tensor:
        """Returns dh = dy B and takes the gradients, dh^T x of A and dy^T h of B, which then do not go through autograd.
        A second stream may still be computing all of this."""
        ...

    def wait(self) -> None:
        """Whatever is launched from here on finds dh there."""


class LoraLinear(Linear):
    """A frozen linear layer with an adapter: y = W x + b + scale * B A x."""

    def __init__(self, base: nn.Linear, parts: tuple[Part, ...], config: LoraConfig) -> None:
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.config, self.parts = config, parts
        self.original: Tensor | None = None
        """The weight as it was before the adapter was merged into it; None while it is not."""
        self.place: Place | None = None
        """Given while an update is captured."""
        device, width = base.weight.device, config.rank * len(parts)
        self.lora_a = nn.Parameter(torch.empty(width, base.in_features, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, width, device=device))
        # What B is multiplied by: alpha / rank, and 0 outside its diagonal blocks, which therefore never learn.
        self.scale_b = nn.Buffer(torch.zeros(base.out_features, width, device=device), persistent=False)
        for part, columns in self.blocks():
            self.scale_b[part.start : part.end, columns] = config.scale

    def blocks(self) -> Iterator[tuple[Part, slice]]:
        """Each part with its rows of A, which are its columns of B."""
        rank = self.config.rank
        return ((part, slice(i * rank, (i + 1) * rank)) for i, part in enumerate(self.parts))

    def forward(self, x: Tensor) -> Tensor:
        if self.original is not None:
            return super().forward(x)
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        y_NO = _Adapted.apply(
            x.flatten(0, -2), weight, bias, self.lora_a, self.lora_b, self.scale_b, self.place
        )
        return y_NO.unflatten(0, x.shape[:-1])

    def delta(self) -> Tensor:
        """What merging adds to the weight, in fp32."""
        return (self.lora_b.detach() @ self.lora_a.detach()) * self.config.scale


class _Adapted(torch.autograd.Function):
    """The layer with its adapter, in as few kernels as there are products: small passes are bound by launches."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale_b: Tensor,
        place: Place | None,
    ) -> Tensor:
        if place is not None:
            a_RD, b_OR = place.a_RD, place.b_OR
        else:  # The cast is needed anyway, and takes the factor and the zeros outside B's blocks with it.
            a_RD, b_OR = a.to(x_ND.dtype), _product(b, scale_b, x_ND.dtype)
        ctx.place = place
        h_NR = x_ND @ a_RD.T
        ctx.save_for_backward(x_ND, weight_OD, a_RD, b_OR, h_NR, scale_b)
        return _add_product(F.linear(x_ND, weight_OD, bias_O), h_NR, b_OR.T)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_OD, a_RD, b_OR, h_NR, scale_b = ctx.saved_tensors
        place, dx_ND, da_RD, db_OR = ctx.place, None, None, None
        dh_NR = place.learn(x_ND, dy_NO, h_NR) if place is not None else dy_NO @ b_OR
        if place is None:
            da_RD, db_OR = fp32_product(dh_NR.T, x_ND), fp32_product(dy_NO.T, h_NR) * scale_b
        if ctx.needs_input_grad[0]:
            dx_ND = dy_NO @ weight_OD
            if place is not None:
                place.wait()
            dx_ND = _add_product(dx_ND, dh_NR, a_RD)
        return dx_ND, None, None, da_RD, db_OR, None, None


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x * y, rounded once, in one kernel."""
    if torch.compiler.is_compiling():
        return (x * y).to(dtype)
    return torch.mul(x, y, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def fp32_product(left: Tensor, right: Tensor, **out: Tensor) -> Tensor:
    """left @ right with its sums in fp32, which is what the adapters' gradients are; in `out` if that is given."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32, **out)
    product = (left @ right).float()
    return out["out"].copy_(product) if out else product


def _add_product(y: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """y + left @ right, in y's memory unless a compiler may fuse it or selective recomputation has kept y."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return y + left @ right
    return y.addmm_(left, right)


def add_lora(model: Transformer, config: LoraConfig, seed: int, *, cast: bool = True) -> None:
    """Put adapters on the model's layers and freeze the rest. A is drawn as PEFT does, from the seed and its
    name; B is 0.

    The frozen weights are cast to the compute dtype, unless they will be spread over several processes, where all
    weights of a block must have one dtype. Capture CUDA graphs after this: weights that are cast move.
    """
    if lora_layers(model):
        raise ConfigError("this model has adapters already: merge them into a new model, or open it again")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if cast:
            parameter.data = parameter.data.to(model.compute_dtype)
    for i, block in enumerate(model.blocks):
        for name, parts in parts_of(model.config).items():
            if chosen := tuple(part for part in parts if part.target in config.targets):
                owner, leaf = block.get_submodule(name.split(".")[0]), name.split(".")[1]
                layer = LoraLinear(getattr(owner, leaf), chosen, config)
                setattr(owner, leaf, layer)
                _fill(layer, f"{seed}/blocks.{i}.{name}")
    if not lora_layers(model):
        raise ConfigError(f"lora.targets must name layers that the model has, got {list(config.targets)}")
    if cast:
        _join(model)


def _join(model: Transformer) -> None:
    """Put all adapters into one piece of memory, which a captured update treats as one tensor."""
    learned = list(adapters(model).values())
    if all(p.numel() % ALIGNED == 0 for p in learned):
        flat = torch.cat([p.detach().flatten() for p in learned])
        for p, piece in zip(learned, pieces(flat, learned), strict=True):
            p.data = piece


@torch.no_grad()
def _fill(layer: LoraLinear, name: str) -> None:
    bound = 1 / math.sqrt(layer.in_features)  # kaiming_uniform_(a=sqrt(5))
    for part, rows in layer.blocks():
        number = zlib.crc32(f"{name}.{part.target}".encode())
        generator = torch.Generator(layer.lora_a.device).manual_seed(number)
        layer.lora_a[rows].uniform_(-bound, bound, generator=generator)


def lora_layers(model: Transformer) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapters(model: Transformer) -> dict[str, nn.Parameter]:
    """The adapters' parameters by name; empty for a model without."""
    layers = lora_layers(model).items()
    return {f"{name}.{leaf}": getattr(layer, leaf) for name, layer in layers for leaf in ("lora_a", "lora_b")}


@torch.no_grad()
def merge(model: Transformer) -> None:
    """Add every adapter to its weight in place (CUDA graphs hold its address); layers then skip the adapter."""
    for layer in lora_layers(model).values():
        assert layer.original is None, "merged twice"
        layer.original = layer.weight.detach().clone()
        layer.weight.copy_(layer.weight.float() + layer.delta())


@torch.no_grad()
def unmerge(model: Transformer) -> None:
    """Restore the weights to the bits that they had before `merge`."""
    for layer in lora_layers(model).values():
        if layer.original is not None:  # memory may have run out half-way through `merge`
            layer.weight.copy_(layer.original)
            layer.original = None


@contextmanager
def merged(model: Transformer) -> Iterator[None]:
    """The model with its adapters merged into its weights; a model without any stays as it is."""
    try:
        merge(model)
        yield
    finally:
        unmerge(model)


@contextmanager
def without_adapters(model: Transformer) -> Iterator[None]:
    """The model without its adapters, which stay in place; for a forward pass without gradients."""
    layers = lora_layers(model).values()
    for layer in layers:
        layer.original = layer.weight.detach()  # the layer then takes its weight as it is
    try:
        yield
    finally:
        for layer in layers:
            layer.original = None


@torch.no_grad()
def merged_weights(model: Transformer) -> Mapping[str, Tensor]:
    """The weights of the equal model without adapters, by our names; sums in fp32, not yet rounded."""
    learned = adapters(model)
    weights = {name: p.detach() for name, p in model.named_parameters() if name not in learned}
    for name, layer in lora_layers(model).items():
        if layer.original is None:
            weights[f"{name}.weight"] = layer.weight.float() + layer.delta()
    return weights
