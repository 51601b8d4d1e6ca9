"""Generation with softmax attention: keys and values of every token, in slots and in a pool of prompts.

Samples of one prompt share its keys and values in the pool; a slot holds those of the new tokens only. The
two operations are here in plain PyTorch, for CPUs and as the reference of the Triton kernels in
`cache_kernels`, which have the same names.

Shapes: L layers, P prompts, N slots, S positions, M prompts read, T tokens, B rows, H query heads, K
key/value heads, C head width.
"""

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.model.attention import softmax
from redline.model.attention.softmax import Rope, rotate
from redline.model.attention.state import Room, Rows

if TYPE_CHECKING:
    from redline.model.transformer import Attention


class KeysAndValues:
    def __init__(
        self, config: ModelConfig, rope: Rope | None, room: Room, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        def empty(number: int, positions: int) -> Tensor:
            shape = (config.num_layers, 2, number, config.kv_heads, positions, config.head_size)
            return torch.zeros(shape, device=device, dtype=dtype)

        self.rope, self.whole = rope, room.whole
        self.prompt_kv = empty(room.prompts, room.max_prompt_tokens)
        """(L, 2, P, K, S, C)"""
        self.kv = empty(room.slots + 1, room.max_new_tokens)
        """(L, 2, N, K, S, C)"""
        self._kernels: ModuleType | None = None
        if device.type == "cuda":
            from redline.model.attention import cache_kernels  # Triton exists only where CUDA does

            self._kernels = cache_kernels

    @staticmethod
    def sequence_bytes(config: ModelConfig, room: Room, dtype: torch.dtype) -> int:
        token_bytes = config.num_layers * 2 * config.kv_heads * config.head_size * dtype.itemsize
        return (room.max_prompt_tokens + room.max_new_tokens) * token_bytes

    def read(
        self, layer: int, attn: "Attention", qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor
    ) -> Tensor:
        # Padding comes after all that counts, and the causal mask keeps it out.
        store = self._kernels.store_prompt if self._kernels else store_prompt
        return softmax.causal(*store(self, layer, _normed(attn, qkv_MTHC), prompts_M, lengths_M))

    def start(self, slots_B: Tensor, prompts_B: Tensor) -> None:
        """Nothing to do: a slot reads its prompt in the pool."""

    def step(self, layer: int, attn: "Attention", qkv_BHC: Tensor, rows: Rows) -> Tensor:
        look = self._kernels.attend if self._kernels else attend
        y_BD: Tensor = look(self, layer, _normed(attn, qkv_BHC), rows)
        return y_BD


def _normed(attn: "Attention", qkv: Tensor) -> Tensor:
    return qkv if attn.q_norm is None else torch.cat(attn.split(qkv), dim=-2)


def store_prompt(
    cache: KeysAndValues, layer: int, qkv_MTHC: Tensor, prompts_M: Tensor, lengths_M: Tensor
) -> tuple[Tensor, ...]:
    """Store the keys and values of prompts; returns queries, keys and values. The padding is never read."""
    K = cache.kv.shape[3]
    q, k, v = qkv_MTHC.split([qkv_MTHC.shape[2] - 2 * K, K, K], dim=2)
    T = q.shape[1]
    if cache.rope is not None:
        at = cache.rope[0][:T], cache.rope[1][:T]
        q, k = rotate(q, at), rotate(k, at)
    for part, value in ((0, k), (1, v)):
        cache.prompt_kv[layer, part, prompts_M.long(), :, :T] = value.transpose(1, 2)
    return q, k, v


def attend(cache: KeysAndValues, layer: int, qkv_BHC: Tensor, rows: Rows) -> Tensor:
    """Take one new token per row: its key and value go into the slot; its queries see the prompt and all new tokens."""
    K = cache.kv.shape[3]
    slots = rows.slot_B.long()
    q, k, v = qkv_BHC.split([qkv_BHC.shape[1] - 2 * K, K, K], dim=1)
    count, prompt_len = rows.count_N[slots].long(), rows.prompt_len_N[slots].long()
    if cache.rope is not None:
        position = prompt_len + count - 1
        at = cache.rope[0][position], cache.rope[1][position]
        q, k = rotate(q, at), rotate(k, at)
    for part, value in ((0, k), (1, v)):
        cache.kv[layer, part, slots, :, count - 1] = value
    prompts, own = cache.prompt_kv.shape[-2], cache.kv.shape[-2]
    if not cache.whole:
        prompts, own = int(prompt_len.max()), int(count.max())
    # Two parts, joined only by their scores: a copy of all keys and values would take longer than the
    # attention.
    caches = (
        cache.prompt_kv[layer][:, rows.prompt_N[slots].long(), :, :prompts],
        cache.kv[layer][:, slots, :, :own],
    )
    grouped = q.unflatten(1, (K, -1)) * q.shape[-1] ** -0.5
    scores = torch.cat([grouped @ keys.mT for keys, _ in caches], dim=-1).float()
    ends = ((prompts, prompt_len), (own, count))
    seen = torch.cat([torch.arange(size, device=q.device) < end[:, None] for size, end in ends], dim=1)
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1).to(q.dtype)
    y_prompt, y_own = (
        part @ values for part, (_, values) in zip(weights.split([prompts, own], dim=-1), caches, strict=True)
    )
    return (y_prompt + y_own).flatten(1)
