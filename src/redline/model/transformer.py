"""The transformer: one decoder for GPT-2, Llama, SmolLM2, Qwen2 and Qwen3 shapes, chosen by `ModelConfig`.

    model = build_model(config, device="cuda", seed=0)                  # fp32 weights, drawn from the seed
    logits_BTV = model(tokens_BT)                                       # in model.compute_dtype
    loss_sum = model(tokens_BT, targets_BT)                             # over targets that are not IGNORED
    losses_BT = model(tokens_BT, targets_BT, reduction="none")          # one by one, with gradients
    loss_sum = model(tokens_1T, targets_1A, packing=packing)            # several sequences in one row

Weights stay in fp32; activations, the residual stream included, are in `compute_dtype`, and each layer casts its weight
where it is used. Norms and the loss compute in fp32 inside. Query/key/value and the two halves of SwiGLU are one matrix
each, which is faster than several. Left out: dropout, sliding windows, mixtures of experts.

Shapes: B batch, T tokens, N = B x T, D hidden, V vocabulary, A positions of a packed row whose loss is wanted.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from redline.config.recipe import CrossEntropy, ModelConfig, Recompute
from redline.errors import MachineError
from redline.machine.facts import memory_bytes
from redline.model import kernels
from redline.model.attention.packed import Packing, over_copies
from redline.model.attention.softmax import rope_table
from redline.model.attention.variants import VARIANTS, Attend
from redline.model.cross_entropy import Candidates, Reduction, linear_cross_entropy
from redline.plan.arithmetic import parameters
from redline.record.units import format_bytes


class Linear(nn.Linear):
    """A linear layer whose fp32 weight is cast to the dtype of its input."""

    def reset_parameters(self) -> None:
        """Nothing: `fill` draws the weights, or they are loaded."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing, as above. torch's own would import its compiler to fill tensors that hold no memory."""


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with or without a bias; computes in fp32 and returns the dtype of its input."""

    def __init__(self, size: int, config: ModelConfig, *, kind: str | None = None) -> None:
        super().__init__()
        self.kind, self.eps = kind or config.norm, config.norm_eps
        self.fused = False
        """Whether `add` may overwrite x, in generation on a GPU."""
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if self.kind == "layernorm" and config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.kind == "rmsnorm":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)

    def add(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y (None: x), and that normalised."""
        if self.kind == "rmsnorm" and torch.is_grad_enabled() and eager_on_gpu(x):
            return kernels.sum_rms_norm(x, y, self.weight, self.eps)
        if self.kind == "rmsnorm" and self.fused:
            return x, kernels.add_rms_norm(x, y, self.weight, self.eps)
        if y is not None:
            x = x + y
        return x, self(x)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        self.qkv = Linear(config.hidden_size, width + 2 * kv_width, bias=config.bias or config.qkv_bias)
        self.out = Linear(width, config.hidden_size, bias=config.bias)
        self.q_norm = Norm(self.head_size, config, kind="rmsnorm") if config.qk_norm else None
        self.k_norm = Norm(self.head_size, config, kind="rmsnorm") if config.qk_norm else None
        shape = (self.kv_heads, config.features, self.head_size)
        self.projection = nn.Buffer(torch.empty(shape)) if config.attention == "favor" else None
        """The random directions of kernel attention."""

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_size))
        return self.out(attend(self, qkv))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the fused projection; with qk_norm the first two are normalised."""
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        inner = config.ffn_size * (2 if config.activation == "swiglu" else 1)
        self.up = Linear(config.hidden_size, inner, bias=config.bias)
        self.down = Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_activated(self.up(x), self.activation))


def _activated(h: Tensor, activation: str) -> Tensor:
    match activation:
        case "gelu":
            return F.gelu(h, approximate="tanh")
        case "relu2":
            return kernels.relu_squared(h) if eager_on_gpu(h) else F.relu(h).square()
        case _:
            if eager_on_gpu(h):
                return kernels.swiglu(h)
            gate, up = h.chunk(2, dim=-1)
            return F.silu(gate) * up


def eager_on_gpu(x: Tensor) -> bool:
    """Whether one kernel of ours each way replaces several of torch's. A compiler does equally well. Not under autocast: we
    never train with it, so there the model is the plain one that `redline bench train` measures against ours."""
    largest = 2 if torch.is_grad_enabled() else 4
    ours = not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"))
    return ours and x.is_cuda and x.dtype.itemsize <= largest


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm, self.attn = Norm(config.hidden_size, config), Attention(config)
        self.ffn_norm, self.ffn = Norm(config.hidden_size, config), FeedForward(config)
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._whole(x, attend)
        # Inside the block, so that a compiler that sees the block sees what may be recomputed.
        return checkpoint(self._whole, x, attend, use_reentrant=False, **_context(self.recompute))

    def _whole(self, x: Tensor, attend: Attend) -> Tensor:
        x, y = self.parts(x, None, attend)
        return x + y

    def parts(self, x: Tensor, y: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor]:
        """The block for x + y, as two tensors to be summed: the next norm may add them in its kernel."""
        x, h = self.attn_norm.add(x, y)
        x, h = self.ffn_norm.add(x, self.attn(h, attend))
        return x, self.ffn(h)


Through = Callable[[Tensor, Attend], Tensor]
"""From what the first block reads to what the head reads."""


class Transformer(nn.Module):
    """Embedding, blocks, final norm, head. Execution choices (`compute_dtype`, ...) are attributes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.variant = config, VARIANTS[config.attention]()
        self.compute_dtype = torch.float32
        self.cross_entropy: CrossEntropy = "torch"
        self.loss_chunks = 1
        self.apart = False
        """Whether a block hands on two tensors, which the next norm adds in its kernel."""
        self.longest = 0
        """If given, the longest sequence that any packed row holds: compiled code must not depend on each row's own."""
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = Embedding(config.context_length, config.hidden_size) if learned else None
        self.blocks: list[Block] = nn.ModuleList(Block(config) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.norm = Norm(config.hidden_size, config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        table = (config.context_length, config.head_size)  # `fill` writes them, as it does the weights
        self.rope_cos = nn.Buffer(torch.empty(table), persistent=False)
        self.rope_sin = nn.Buffer(torch.empty(table), persistent=False)

    def tie(self) -> None:
        """Share the embedding with the head, if the config says so. `to_empty` undoes it."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        packing: Packing | None = None,
        candidates: Candidates | None = None,
        reduction: Reduction = "sum",
        through: Through | None = None,
    ) -> Tensor:
        """Logits; or, with targets, their losses in fp32, summed or (`reduction="none"`) shaped
        like the targets, 0 where the target is IGNORED. With a packing the batch is one row, and targets
        belong to the positions that it reads. `candidates`: the tokens of the softmax, if not all.
        `through`: a learning rule's way through the blocks."""
        x = self.hidden(tokens_BT, packing, through)
        if packing is not None and packing.read_A is not None:
            x = x.index_select(1, packing.read_A)
        if targets_BT is None:
            return self.head(x)
        work = [x.flatten(0, 1), targets_BT.flatten()]
        if self.loss_chunks == 1:
            losses = self._loss(reduction, candidates, *work)
        else:
            chunks = zip(*(part.chunk(self.loss_chunks) for part in work), strict=True)
            recomputed = functools.partial(checkpoint, self._loss, use_reentrant=False)
            loss = recomputed if torch.is_grad_enabled() else self._loss
            each = [loss(reduction, candidates, *chunk) for chunk in chunks]
            losses = torch.stack(each).sum() if reduction == "sum" else torch.cat(each)
        # FSDP2 must not get a view from a module: an operation in place on it would drop its hook
        return losses if reduction == "sum" else losses.view_as(targets_BT).clone()

    def hidden(
        self, tokens_BT: Tensor, packing: Packing | None = None, through: Through | None = None
    ) -> Tensor:
        """What the head reads at every position: B x T x hidden size, normalised."""
        assert packing is None or len(tokens_BT) == 1, "a packed batch is one row"
        if packing is not None and self.longest:
            packing = packing._replace(longest=self.longest)
        at = slice(tokens_BT.shape[1]) if packing is None else packing.positions_T
        x = self.embedded(tokens_BT, at)
        rope = None if self.positions is not None else (self.rope_cos[at], self.rope_sin[at])
        over = self.variant.over
        if packing is not None and packing.copies is not None:
            over = functools.partial(over_copies, over)
        attend = over(self.config, packing, rope, x)
        if through is not None:
            return through(x, attend)
        if self.apart:
            y = None
            for block in self.blocks:
                x, y = block.parts(x, y, attend)
            return self.norm.add(x, y)[1]
        for block in self.blocks:
            x = block(x, attend)
        return self.norm(x)

    def embedded(self, tokens: Tensor, at: slice | Tensor | None) -> Tensor:
        """What the first block reads, for tokens at these positions (not needed where they are rotated)."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[at]
        return x.to(self.compute_dtype)

    def _loss(
        self, reduction: Reduction, candidates: Candidates | None, x_ND: Tensor, targets_N: Tensor
    ) -> Tensor:
        return linear_cross_entropy(
            x_ND,
            self.head.weight,
            targets_N,
            how=self.cross_entropy,
            reduction=reduction,
            candidates=candidates,
        )


def build_model(
    config: ModelConfig, *, device: torch.device | str, seed: int, shape: Callable[[Any], None] | None = None
) -> Transformer:
    """A model with fp32 weights, each drawn from the seed and its name, whatever the number of processes.
    `shape(model)` may shard or convert layers while the model has no memory yet."""
    _check_memory(config, torch.device(device))
    with torch.device("meta"):
        model = Transformer(config)
    if shape is not None:
        shape(model)
    _give_memory(model, torch.device(device))
    model.tie()
    fill(model, seed)
    return model


def _give_memory(model: Transformer, device: torch.device) -> None:
    """Like `to_empty`, which imports SymPy (0.6 s) for layouts; a process alone needs only strides."""
    if torch.distributed.is_initialized():
        model.to_empty(device=device)
        return
    for module in model.modules():
        for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            there = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            learned = isinstance(t, nn.Parameter)
            setattr(module, name, nn.Parameter(there, requires_grad=t.requires_grad) if learned else there)


def _check_memory(config: ModelConfig, device: torch.device) -> None:
    """Refuse a model that this machine cannot hold before anything is built, which may take minutes."""
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    weights_bytes = 4 * parameters(config).total // processes
    table_bytes = 2 * 4 * config.context_length * config.head_size
    host_bytes = memory_bytes()
    there_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes
    # the table of positions is made on the host, with intermediate results as large again
    if weights_bytes + table_bytes > there_bytes or 2 * table_bytes > host_bytes:
        raise MachineError(
            f"a model of {config.num_layers:,} layers, {parameters(config).total:,} parameters and"
            f" {config.context_length:,} positions needs {format_bytes(weights_bytes + 2 * table_bytes)}, but this"
            f" machine has {format_bytes(min(there_bytes, host_bytes))}: make it smaller (num_layers, hidden_size,"
            " context_length)"
        )


@torch.no_grad()
def fill(model: Transformer, seed: int) -> None:
    """Initialise in place; a sharded parameter takes its part of the value that an unsharded one would get."""
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, device=parameter.device)
        if "norm" in name or name.endswith("bias"):
            value.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            # One number of 32 bits: a CPU generator takes no more, and would drop a seed put above them.
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            value.normal_(0.0, _std(name, model.config), generator=generator)
        write_part(parameter, value)
    redraw(model, seed, 0)
    for buffer, table in zip((model.rope_cos, model.rope_sin), rope_table(model.config), strict=True):
        buffer.copy_(table)


@torch.no_grad()
def redraw(model: Transformer, seed: int, number: int) -> None:
    """Draw the random features of kernel attention in place, from the seed, layer and number alone."""
    for layer, block in enumerate(model.blocks):
        if (projection := block.attn.projection) is not None:
            from redline.model.attention.favor import draw  # see `variants`

            layer_seed = zlib.crc32(f"{seed}/blocks.{layer}.attn.projection/{number}".encode())
            projection.copy_(draw(model.config, layer_seed))


def redraw_when_due(model: Transformer, seed: int, step: int, wait: Callable[[], None]) -> None:
    """Redraw every `redraw_every` updates, as a function of the step. `wait`: a checkpoint may be copying."""
    every = model.config.redraw_every
    if every and step and step % every == 0:
        wait()
        redraw(model, seed, step // every)


def weights_of(model: Transformer) -> dict[str, Tensor]:
    """What must be kept to compute the same again: all parameters, and the random features of kernel attention."""
    features = {f"blocks.{i}.attn.projection": block.attn.projection for i, block in enumerate(model.blocks)}
    drawn = {name: directions for name, directions in features.items() if directions is not None}
    return {**dict(model.named_parameters()), **drawn}


def write_part(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole value into a parameter, or the part of it that this process holds."""
    parameter.copy_(part_of(value, parameter))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that is spread like another."""
    if torch.distributed.is_initialized():
        # imported here: it takes seconds, which every engine and every worker on Ray would pay
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(like, DTensor):
            return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole


def _std(name: str, config: ModelConfig) -> float:
    """GPT-2's rule: what is added to the residual stream shrinks with the number of additions."""
    if not name.endswith(("attn.out.weight", "ffn.down.weight")):
        return config.init_std
    return 0.0 if config.zero_init else config.init_std / math.sqrt(2 * config.num_layers)


def _context(recompute: Recompute) -> dict[str, Any]:
    if recompute == "full":
        return {}
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products)}


_ATTENTION = ("flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu")
_KEPT = {
    f"aten.{name}.default"
    for name in ("mm", "addmm", "_scaled_mm", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
} | {"redline.favor.default"}


def _keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Selective recomputation keeps what is expensive (matrix products, attention) and repeats the rest."""
    return CheckpointPolicy.MUST_SAVE if str(op) in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
