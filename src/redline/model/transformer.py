"""The transformer: one decoder for GPT-2, Llama, SmolLM2, Qwen2 and Qwen3 shapes, chosen by `ModelConfig`.

    model = build_model(config, device="cuda", seed=0)      # fp32 weights, initialised from the seed and each weight's name
    logits_BTV = model(tokens_BT)                           # in model.compute_dtype
    loss_sum = model(tokens_BT, targets_BT)                 # summed over targets that are not IGNORED; the caller divides

Weights stay in fp32; activations, the residual stream included, are in `compute_dtype`, and each layer casts its weight where it
is used (the casts cost under 1 % of a step; the blocks keep them for their backward, two bytes a weight). Norms and the loss compute
in fp32 inside. Query/key/value and the two halves of SwiGLU are one matrix each: three small matrix products instead of one cost
more, and so does adding up their gradients. Left out: dropout, sliding windows, mixtures of experts.

Shapes: B batch, T tokens, D hidden, H query heads, K key/value heads, C head width, F feed-forward width, V vocabulary, S cache.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from redline.config.recipe import CrossEntropy, ModelConfig, Recompute
from redline.model.cross_entropy import linear_cross_entropy


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
        return F.layer_norm(x, weight.shape, weight, None if self.bias is None else self.bias.to(x.dtype), self.eps)


class KVCache:
    """Keys and values of the tokens read so far; every sequence in it has the same length."""

    def __init__(self, config: ModelConfig, batch_size: int, capacity: int, *, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, 2, batch_size, config.kv_heads, capacity, config.head_size)
        self.data = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def extend(self, layer: int, k_BKTC: Tensor, v_BKTC: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values of one layer and return all of them so far."""
        end = self.length + k_BKTC.shape[2]
        self.data[layer, 0, :, :, self.length : end] = k_BKTC
        self.data[layer, 1, :, :, self.length : end] = v_BKTC
        return self.data[layer, 0, :, :, :end], self.data[layer, 1, :, :, :end]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_size = layer, config.num_heads, config.kv_heads, config.head_size
        width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        self.qkv = Linear(config.hidden_size, width + 2 * kv_width, bias=config.bias or config.qkv_bias)
        self.out = Linear(width, config.hidden_size, bias=config.bias)
        self.q_norm = Norm(self.head_size, config, kind="rmsnorm") if config.qk_norm else None
        self.k_norm = Norm(self.head_size, config, kind="rmsnorm") if config.qk_norm else None

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KVCache | None) -> Tensor:
        B, T, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, self.heads + 2 * self.kv_heads, self.head_size)
        q_BTHC, k_BTKC, v_BTKC = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        if rope is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, rope), rotate(k_BTKC, rope)
        q, k, v = q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        # One new token sees all of the cache, so only a prompt needs the causal mask.
        causal = cache is None or T > 1
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.heads != self.kv_heads)
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
            gate, up = h.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(h, approximate="tanh") if self.activation == "gelu" else F.relu(h).square())


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = Norm(config.hidden_size, config), Attention(config, layer)
        self.ffn_norm, self.ffn = Norm(config.hidden_size, config), FeedForward(config)
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KVCache | None = None) -> Tensor:
        if self.recompute == "none" or cache is not None or not torch.is_grad_enabled():
            return self._residuals(x, rope, cache)
        # Inside the block, so that a compiler that sees the block sees what may be recomputed.
        return checkpoint(self._residuals, x, rope, None, use_reentrant=False, **_context(self.recompute))

    def _residuals(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope, cache)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Embedding, blocks, final norm, head. Execution choices (`compute_dtype`, `cross_entropy`, ...) are attributes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.cross_entropy: CrossEntropy = "torch"
        self.loss_chunks = 1
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.context_length, config.hidden_size) if config.positions == "learned" else None
        self.blocks: list[Block] = nn.ModuleList(Block(config, i) for i in range(config.num_layers))  # type: ignore[assignment]
        self.norm = Norm(config.hidden_size, config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        self.rope_cos, self.rope_sin = (nn.Buffer(table, persistent=False) for table in rope_table(config))

    def tie(self) -> None:
        """Share the embedding with the head, if the config says so; to be repeated after `to_empty`, which gives each its own."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, cache: KVCache | None = None) -> Tensor:
        """Logits, or with targets the sum of the losses over the targets that are not IGNORED."""
        x = self._hidden(tokens_BT, cache)
        if targets_BT is None:
            return self.head(x)
        x_ND, targets_N = x.flatten(0, 1), targets_BT.flatten()
        if self.loss_chunks == 1:
            return self._loss_sum(x_ND, targets_N)
        chunks = zip(x_ND.chunk(self.loss_chunks), targets_N.chunk(self.loss_chunks), strict=True)
        losses = [checkpoint(self._loss_sum, x, t, use_reentrant=False) for x, t in chunks]
        return torch.stack(losses).sum()

    def _hidden(self, tokens_BT: Tensor, cache: KVCache | None) -> Tensor:
        start, T = (cache.length if cache is not None else 0), tokens_BT.shape[1]
        assert start == 0 or T == 1, "the causal mask fits a whole prompt or one token, not a piece of a prompt"
        x = self.embed(tokens_BT)
        rope = None
        if self.positions is not None:
            x = x + self.positions.weight[start : start + T]
        else:
            rope = self.rope_cos[start : start + T], self.rope_sin[start : start + T]
        x = x.to(self.compute_dtype)
        for block in self.blocks:
            x = block(x, rope, cache)
        if cache is not None:
            cache.length += T
        return self.norm(x)

    def _loss_sum(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        return linear_cross_entropy(x_ND, self.head.weight, targets_N, fused=self.cross_entropy == "fused")


def rope_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each (context_length, head_size): the half-rotation layout of Hugging Face."""
    half = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), 1.0 / config.rope_theta**half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BTHC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + C/2) of a head by its position's angle; in fp32, since bf16 angles blur distant positions."""
    cos, sin = (table[:, None, :] for table in rope)
    a, b = x_BTHC.chunk(2, dim=-1)
    return (x_BTHC * cos + torch.cat([-b, a], dim=-1) * sin).to(x_BTHC.dtype)


def build_model(config: ModelConfig, *, device: torch.device | str, seed: int, shape: Callable[[Any], None] | None = None) -> Transformer:
    """A model with fp32 weights on the device. Every weight is drawn from the seed and its own name, so neither the order nor the
    number of processes that hold it matters. `shape(model)` may shard or convert layers while the model has no memory yet."""
    with torch.device("meta"):
        model = Transformer(config)
    if shape is not None:
        shape(model)
    model.to_empty(device=device)
    model.tie()
    fill(model, seed)
    return model


@torch.no_grad()
def fill(model: Transformer, seed: int) -> None:
    """Initialise in place; a sharded parameter takes its own part of the value that an unsharded one would get."""
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
    return {} if recompute == "full" else {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_matmuls)}


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
    """Selective recomputation keeps what is dear to compute (matrix products, attention) and redoes what is cheap."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
