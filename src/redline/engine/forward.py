"""The model's forward pass as generation needs it: whole prompts into the pool, or one new token for each
row.

    forward = Forward(model, slots)
    forward.prefill(tokens_MT, prompts_M, lengths_M)        # keys, values and last logits of M prompts
    logits_BV = forward.decode(rows_B)                      # in fp32; nothing here waits for the device

It computes with the trainer's own weights where they are in the compute dtype (a frozen bf16 base under
LoRA); fp32 weights under bf16 are cast once into a copy that `refresh` renews. Activations are in the compute
dtype, logits in fp32: a bf16 logit of 20 is wrong by up to 0.06, which a log-probability would show.

Shapes: M prompts, T tokens, B rows, R rows of activations, D hidden, H heads, C head width, V vocabulary.
"""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.engine import reference
from redline.engine.state import Slots
from redline.model.transformer import Block, Norm, Transformer


class Forward:
    def __init__(self, model: Transformer, slots: Slots) -> None:
        self.model, self.slots, self.config = model, slots, model.config
        self.device = slots.count.device
        self.ops = _operations(self.device)
        self.dtype = model.compute_dtype
        self.weights: dict[Tensor, Tensor] = {p: p.detach().to(self.dtype) for p in _computed_with(model)}
        self.rope = (model.rope_cos, model.rope_sin) if model.positions is None else None

    @property
    def copied_bytes(self) -> int:
        """Memory of the weights that had to be cast; 0 where the trainer's own are used."""
        return sum(
            own.numel() * own.element_size()
            for p, own in self.weights.items()
            if own.data_ptr() != p.data_ptr()
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Take up the weights as they are now; the addresses stay."""
        for parameter, own in self.weights.items():
            if own.data_ptr() != parameter.data_ptr():
                own.copy_(parameter.detach())

    @torch.no_grad()
    def prefill(self, tokens_MT: Tensor, prompts_M: Tensor, lengths_M: Tensor) -> None:
        """Read prompts, padded on the right. Padding comes after all that counts, and the causal mask keeps
        it out."""
        (M, T), K = tokens_MT.shape, self.config.kv_heads
        x_RD = self._embed(tokens_MT.flatten(), torch.arange(T, device=self.device).repeat(M))
        y_RD: Tensor | None = None
        for layer, block in enumerate(self.model.blocks):
            qkv = self._qkv(block, self._norm(block.attn_norm, x_RD, y_RD)).view(
                M, T, -1, self.config.head_size
            )
            q, k, v = self.ops.store_prompt(self.slots, layer, qkv, prompts_M, lengths_M, self.rope)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != K)
            y_RD = self._feed_forward(
                block, x_RD, self._linear(block.attn.out, y.transpose(1, 2).reshape(M * T, -1))
            )
        assert y_RD is not None
        last_M = torch.arange(M, device=self.device) * T + lengths_M.long() - 1
        x_MD, y_MD = x_RD[last_M], y_RD[last_M]
        self.slots.prompt_logits_PV[prompts_M.long()] = self._head(self._norm(self.model.norm, x_MD, y_MD))

    @torch.no_grad()
    def decode(self, rows_B: Tensor) -> Tensor:
        rows, slots = rows_B.long(), self.slots
        position = (slots.prompt_len[rows] + slots.count[rows] - 1).long() if self.rope is None else None
        x_BD = self._embed(slots.last[rows].long(), position)
        y_BD: Tensor | None = None
        for layer, block in enumerate(self.model.blocks):
            qkv = self._qkv(block, self._norm(block.attn_norm, x_BD, y_BD)).view(
                len(rows), -1, self.config.head_size
            )
            y = self.ops.attend(slots, layer, qkv, rows_B, self.rope)
            y_BD = self._feed_forward(block, x_BD, self._linear(block.attn.out, y))
        return self._head(self._norm(self.model.norm, x_BD, y_BD))

    def _embed(self, tokens_R: Tensor, position_R: Tensor | None) -> Tensor:
        model = self.model
        x_RD = F.embedding(tokens_R, model.embed.weight)
        if model.positions is not None:
            assert position_R is not None
            x_RD = x_RD + F.embedding(position_R, model.positions.weight)
        return x_RD.detach().to(self.dtype)

    def _norm(self, norm: Norm, x_RD: Tensor, y_RD: Tensor | None) -> Tensor:
        """Add what the last layer gave to the residual stream, in place, and normalise it."""
        if norm.kind == "rmsnorm":
            normed: Tensor = self.ops.add_rms_norm(x_RD, y_RD, self.weights[norm.weight], norm.eps)
            return normed
        if y_RD is not None:
            x_RD += y_RD
        bias = None if norm.bias is None else self.weights[norm.bias]
        return F.layer_norm(x_RD, norm.weight.shape, self.weights[norm.weight], bias, norm.eps)

    def _linear(self, layer: nn.Linear, x_RD: Tensor) -> Tensor:
        # A layer may be wrapped (LoRA): its own weight and bias are what is used, so adapters must be merged.
        return F.linear(
            x_RD, self.weights[layer.weight], None if layer.bias is None else self.weights[layer.bias]
        )

    def _qkv(self, block: Block, x_RD: Tensor) -> Tensor:
        attn = block.attn
        qkv = self._linear(attn.qkv, x_RD)
        if attn.q_norm is None or attn.k_norm is None:
            return qkv
        q, k, v = qkv.view(len(x_RD), -1, attn.head_size).split(
            [attn.heads, attn.kv_heads, attn.kv_heads], dim=1
        )
        q, k = (
            F.rms_norm(part, norm.weight.shape, self.weights[norm.weight], norm.eps)
            for part, norm in ((q, attn.q_norm), (k, attn.k_norm))
        )
        return torch.cat([q, k, v], dim=1)

    def _feed_forward(self, block: Block, x_RD: Tensor, attended_RD: Tensor) -> Tensor:
        """Add the attention's output to the residual stream and return the feed-forward part's, to be added
        next."""
        ffn = block.ffn
        h = self._linear(ffn.up, self._norm(block.ffn_norm, x_RD, attended_RD))
        if ffn.activation == "swiglu":
            h = self.ops.swiglu(h)
        else:
            h = F.gelu(h, approximate="tanh") if ffn.activation == "gelu" else F.relu(h).square()
        return self._linear(ffn.down, h)

    def _head(self, x_RD: Tensor) -> Tensor:
        weight = self.weights[self.model.head.weight]
        if self.device.type == "cuda" and self.dtype != torch.float32:
            return torch.mm(x_RD, weight.t(), out_dtype=torch.float32)
        return F.linear(x_RD, weight).float()


def _operations(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return reference
    from redline.engine import kernels  # Triton exists only where CUDA does

    return kernels


def _computed_with(model: Transformer) -> list[nn.Parameter]:
    """Every parameter of the base model but the tables of the embedding, which are read a row at a time in
    their own dtype."""
    modules: list[nn.Module] = [model.norm, model.head]
    for block in model.blocks:
        modules += [
            block.attn_norm,
            block.attn.qkv,
            block.attn.out,
            block.ffn_norm,
            block.ffn.up,
            block.ffn.down,
        ]
        modules += [norm for norm in (block.attn.q_norm, block.attn.k_norm) if norm is not None]
    found = [getattr(module, name, None) for module in modules for name in ("weight", "bias")]
    return [parameter for parameter in found if parameter is not None]
