"""The transformer: one decoder for GPT-2, Llama, SmolLM2, Qwen2 and Qwen3 shapes, chosen by `ModelConfig`.

    model = build_model(config, device="cuda", seed=0)      # fp32 weights, initialised from the seed and each
                                                            weight's name
    logits_BTV = model(tokens_BT)                           # in model.compute_dtype
    loss_sum = model(tokens_BT, targets_BT)                 # summed over targets that are not IGNORED; the
                                                            caller divides
    loss_sum = model(tokens_1T, targets_1A, packing=packing)    # one row of several sequences; only the A
                                                                read positions reach the head

Weights stay in fp32; activations, the residual stream included, are in `compute_dtype`, and each layer casts
its weight where it is used (the casts cost under 1 % of a step; the blocks keep them for their backward, two
bytes a weight). Norms and the loss compute in fp32 inside. Query/key/value and the two halves of SwiGLU are
one matrix each: three small matrix products instead of one cost more, and so does adding up their gradients.
Left out: dropout, sliding windows, mixtures of experts.

Shapes: B batch, T tokens, D hidden, H query heads, K key/value heads, C head width, F feed-forward width, V
vocabulary. Of packed rows: S sequences, L the longest of them, A positions whose loss is wanted.
"""

import functools
import inspect
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from redline.config.recipe import CrossEntropy, ModelConfig, Recompute
from redline.errors import MachineError
from redline.machine.facts import memory_bytes
from redline.model import kernels
from redline.model.cross_entropy import linear_cross_entropy
from redline.plan.arithmetic import parameters
from redline.record.units import format_bytes


class Linear(nn.Linear):
    """A linear layer whose fp32 weight is cast to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with or without a bias; computes in fp32 and returns the dtype of its input."""

    def __init__(self, size: int, config: ModelConfig, *, kind: str | None = None) -> None:
        super().__init__()
        self.kind, self.eps = kind or config.norm, config.norm_eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if self.kind == "layernorm" and config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.kind == "rmsnorm":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(
            x, weight.shape, weight, None if self.bias is None else self.bias.to(x.dtype), self.eps
        )


class Packing(NamedTuple):
    """How one row holds several sequences: each attends to itself alone, and its positions count from 0."""

    positions_T: Tensor
    bounds_S: Tensor
    """int32: where each sequence begins, and the end of the last; the sequences cover the row, and some may
    be empty."""
    longest: int
    """No sequence is longer."""
    read_A: Tensor | None = None
    """Positions that a target follows; None: all."""
    grid_SL: Tensor | None = None
    """For attention over a padded grid: which position of the row stands in each place."""
    places_T: Tensor | None = None
    """And where in the flattened grid each position of the row stands."""
    short: bool = False
    """Short sequences on a GPU: the kernel that also rotates."""

    def with_grid(self) -> "Packing":
        starts_S, ends_S = self.bounds_S[:-1], self.bounds_S[1:]
        T, device = len(self.positions_T), self.bounds_S.device
        # Places behind the end of a sequence read what comes next in the row: no query of the sequence looks
        # so far ahead.
        grid_SL = (starts_S[:, None] + torch.arange(self.longest, device=device)).clamp(max=T - 1)
        sequence_T = torch.searchsorted(
            ends_S, torch.arange(T, device=device, dtype=ends_S.dtype), right=True
        )
        return self._replace(grid_SL=grid_SL, places_T=sequence_T * self.longest + self.positions_T)


_varlen: Callable[..., Any] | None = None


def _load_varlen() -> None:
    """torch's attention over sequences of several lengths; importing it takes a second, which only packed
    rows on a GPU need."""
    global _varlen
    if _varlen is None:
        from torch.nn.attention.varlen import varlen_attn

        # Before torch 2.13 it has no such argument and takes fewer key/value heads as they are.
        grouped: dict[str, Any] = (
            {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        )
        _varlen = functools.partial(varlen_attn, window_size=(-1, 0), **grouped)


def packed_attention(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, packing: Packing) -> Tensor:
    """Causal attention within each sequence of a row: one kernel on CUDA in half precision, elsewhere over a
    padded grid."""
    if packing.grid_SL is None or packing.places_T is None:
        bounds, longest = packing.bounds_S, packing.longest
        assert _varlen is not None
        y = _varlen(q_THC, k_TKC, v_TKC, bounds, bounds, longest, longest)
        assert isinstance(y, Tensor)
        return y
    S, L = packing.grid_SL.shape
    q, k, v = (
        x.index_select(0, packing.grid_SL.flatten()).unflatten(0, (S, L)).transpose(1, 2)
        for x in (q_THC, k_TKC, v_TKC)
    )
    y_SHLC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y_SHLC.transpose(1, 2).flatten(0, 1).index_select(0, packing.places_T)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        self.qkv = Linear(config.hidden_size, width + 2 * kv_width, bias=config.bias or config.qkv_bias)
        self.out = Linear(width, config.hidden_size, bias=config.bias)
        self.q_norm = Norm(self.head_size, config, kind="rmsnorm") if config.qk_norm else None
        self.k_norm = Norm(self.head_size, config, kind="rmsnorm") if config.qk_norm else None

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, packing: Packing | None) -> Tensor:
        B, T, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, self.heads + 2 * self.kv_heads, self.head_size)
        if packing is not None and packing.short and rope is not None:
            y = kernels.short_attention(
                qkv[0], *rope, packing.bounds_S, q_heads=self.heads, longest=packing.longest
            )
            return self.out(y[None])
        if packing is not None and rope is not None and self.q_norm is None:
            # Both in one rotation: without a compiler that halves its dozen small kernels.
            qk, v_BTKC = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            q_BTHC, k_BTKC = rotate(qk, rope).split([self.heads, self.kv_heads], dim=2)
        else:
            q_BTHC, k_BTKC, v_BTKC = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            if self.q_norm is not None and self.k_norm is not None:
                q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
            if rope is not None:
                q_BTHC, k_BTKC = rotate(q_BTHC, rope), rotate(k_BTKC, rope)
        if packing is not None:
            # Not [0], whose backward fills a tensor with zeros first.
            q, k, v = (x.flatten(0, 1) for x in (q_BTHC, k_BTKC, v_BTKC))
            return self.out(packed_attention(q, k, v, packing).reshape(B, T, -1))
        q, k, v = q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        inner = config.ffn_size * (2 if config.activation == "swiglu" else 1)
        self.up = Linear(config.hidden_size, inner, bias=config.bias)
        self.down = Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.activation == "swiglu":
            return self.down(_swiglu(h))
        return self.down(F.gelu(h, approximate="tanh") if self.activation == "gelu" else F.relu(h).square())


def _swiglu(gate_up: Tensor) -> Tensor:
    if (
        gate_up.is_cuda
        and gate_up.dtype != torch.float32
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    ):
        # two kernels both ways instead of eight; a compiler does as well by itself
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm, self.attn = Norm(config.hidden_size, config), Attention(config)
        self.ffn_norm, self.ffn = Norm(config.hidden_size, config), FeedForward(config)
        self.recompute: Recompute = "none"

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, packing: Packing | None = None
    ) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._residuals(x, rope, packing)
        # Inside the block, so that a compiler that sees the block sees what may be recomputed.
        return checkpoint(self._residuals, x, rope, packing, use_reentrant=False, **_context(self.recompute))

    def _residuals(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, packing: Packing | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope, packing)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Embedding, blocks, final norm, head. Execution choices (`compute_dtype`, `cross_entropy`, ...) are
    attributes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.cross_entropy: CrossEntropy = "torch"
        self.loss_chunks = 1
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = (
            nn.Embedding(config.context_length, config.hidden_size) if config.positions == "learned" else None
        )
        self.blocks: list[Block] = nn.ModuleList(Block(config) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.norm = Norm(config.hidden_size, config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        self.rope_cos, self.rope_sin = (nn.Buffer(table, persistent=False) for table in rope_table(config))

    def tie(self) -> None:
        """Share the embedding with the head, if the config says so; to be repeated after `to_empty`, which
        gives each its own."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, packing: Packing | None = None
    ) -> Tensor:
        """Logits, or with targets the sum of the losses over the targets that are not IGNORED. With a packing
        the batch is one row."""
        x = self.hidden(tokens_BT, packing)
        if packing is not None and packing.read_A is not None:
            x = x.index_select(1, packing.read_A)
        if targets_BT is None:
            return self.head(x)
        x_ND, targets_N = x.flatten(0, 1), targets_BT.flatten()
        if self.loss_chunks == 1:
            return self._loss_sum(x_ND, targets_N)
        chunks = zip(x_ND.chunk(self.loss_chunks), targets_N.chunk(self.loss_chunks), strict=True)
        losses = [checkpoint(self._loss_sum, x, t, use_reentrant=False) for x, t in chunks]
        return torch.stack(losses).sum()

    def hidden(self, tokens_BT: Tensor, packing: Packing | None = None) -> Tensor:
        """What the head reads at every position: B x T x hidden size, normalised."""
        assert packing is None or len(tokens_BT) == 1, "a packed batch is one row"
        at = slice(tokens_BT.shape[1]) if packing is None else packing.positions_T
        x = self.embed(tokens_BT)
        rope = None
        if self.positions is not None:
            x = x + self.positions.weight[at]
        else:
            rope = self.rope_cos[at], self.rope_sin[at]
        x = x.to(self.compute_dtype)
        if packing is not None:
            packing = self._with_kernel(packing, x)
        for block in self.blocks:
            x = block(x, rope, packing)
        return self.norm(x)

    def _with_kernel(self, packing: Packing, x: Tensor) -> Packing:
        """The packing with what its attention needs: the kernels for sequences of several lengths are CUDA's,
        in half precision."""
        config = self.config
        if not x.is_cuda or x.dtype == torch.float32:
            return packing.with_grid()
        if (
            config.positions == "rope"
            and not config.qk_norm
            and kernels.fits(x.device, longest=packing.longest, head_size=config.head_size)
        ):
            return packing._replace(short=True)
        _load_varlen()
        return packing

    def _loss_sum(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        return linear_cross_entropy(x_ND, self.head.weight, targets_N, fused=self.cross_entropy == "fused")


def rope_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each (context_length, head_size): the half-rotation layout of
    Hugging Face."""
    half = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    angles = torch.outer(
        torch.arange(config.context_length, dtype=torch.float32), 1.0 / config.rope_theta**half
    )
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BTHC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + C/2) of a head by its position's angle; in fp32, since bf16 angles blur
    distant positions."""
    cos, sin = (table[:, None, :] for table in rope)
    a, b = x_BTHC.chunk(2, dim=-1)
    return (x_BTHC * cos + torch.cat([-b, a], dim=-1) * sin).to(x_BTHC.dtype)


def build_model(
    config: ModelConfig, *, device: torch.device | str, seed: int, shape: Callable[[Any], None] | None = None
) -> Transformer:
    """A model with fp32 weights on the device. Every weight is drawn from the seed and its own name, so
    neither the order nor the number of processes that hold it matters. `shape(model)` may shard or convert
    layers while the model has no memory yet."""
    _check_memory(config, torch.device(device))
    with torch.device("meta"):
        model = Transformer(config)
    if shape is not None:
        shape(model)
    model.to_empty(device=device)
    model.tie()
    fill(model, seed)
    return model


def _check_memory(config: ModelConfig, device: torch.device) -> None:
    """Refuse a model that this machine cannot hold, before anything is built: a million layers take minutes and two
    billion positions all memory."""
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    weights_bytes = 4 * parameters(config).total // processes
    table_bytes = 2 * 4 * config.context_length * config.head_size
    host_bytes = memory_bytes()
    there_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes
    # the table of positions is made on the host, with intermediate results as large again
    if weights_bytes + table_bytes > there_bytes or 2 * table_bytes > host_bytes:
        raise MachineError(
            f"a model of {config.num_layers:,} layers, {parameters(config).total:,} parameters and"
            f" {config.context_length:,} positions needs {format_bytes(weights_bytes + 2 * table_bytes)}, and this"
            f" machine has {format_bytes(min(there_bytes, host_bytes))}: make it smaller (num_layers, hidden_size,"
            " context_length)"
        )


@torch.no_grad()
def fill(model: Transformer, seed: int) -> None:
    """Initialise in place; a sharded parameter takes its own part of the value that an unsharded one would
    get."""
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, device=parameter.device)
        if "norm" in name or name.endswith("bias"):
            value.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            # One number of 32 bits: a CPU generator takes no more, and would drop a seed put above them.
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            value.normal_(0.0, _std(name, model.config), generator=generator)
        write_part(parameter, value)
    for buffer, table in zip((model.rope_cos, model.rope_sin), rope_table(model.config), strict=True):
        buffer.copy_(table)


def write_part(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole value into a parameter, or the part of it that this process holds."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def _std(name: str, config: ModelConfig) -> float:
    """GPT-2's rule: what is added to the residual stream shrinks with the number of additions."""
    residual = name.endswith(("attn.out.weight", "ffn.down.weight"))
    return config.init_std / math.sqrt(2 * config.num_layers) if residual else config.init_std


def _context(recompute: Recompute) -> dict[str, Any]:
    return (
        {}
        if recompute == "full"
        else {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_matmuls)}
    )


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_mm.default,
}


def _keep_matmuls(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Selective recomputation keeps what is dear to compute (matrix products, attention) and redoes what is
    cheap."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
