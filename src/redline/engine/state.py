"""What an engine keeps on the device: keys and values, and where every slot stands.

A prompt is kept once in a pool and shared by all of its samples; a slot keeps only the new tokens of one
sample. One slot more than asked for, the last, is nobody's: rows that pad a batch read and write it.

Shapes: L layers, P prompts, N slots, K key/value heads, S positions, C head width, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.config.recipe import ModelConfig

STOP_IDS = 8
"""Stop tokens that a slot can hold, the engine's own included."""


@dataclass(frozen=True)
class Slots:
    """Tensors of fixed address, changed in place: CUDA graphs read and write them."""

    prompt_kv: Tensor
    """(L, 2, P, K, S, C)"""
    prompt_logits_PV: Tensor
    """Logits after the last token of each prompt, in fp32: further samples of it can start at any time."""
    kv: Tensor
    """(L, 2, N, K, S, C)"""
    prompt: Tensor
    """The slot's prompt in the pool."""
    prompt_len: Tensor
    count: Tensor
    """New tokens so far; the last of them is not in the cache yet."""
    limit: Tensor
    last: Tensor
    """The last new token, which the next step reads."""
    open: Tensor
    """1 while the sample goes on."""
    temperature: Tensor
    top_k: Tensor
    """V: all."""
    top_p: Tensor
    stop_ids: Tensor
    """(N, STOP_IDS), -1 where there is none."""
    uniform: Tensor
    """(N, new tokens): the random number that chooses each token, drawn when the sample starts."""
    tokens: Tensor
    """(N, new tokens)"""
    logprobs: Tensor

    @property
    def spare(self) -> int:
        return self.count.shape[0] - 1


def make_slots(
    config: ModelConfig,
    *,
    slots: int,
    prompts: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Slots:
    heads, width = config.kv_heads, config.head_size
    n = slots + 1

    def integers(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    def floats(*shape: int, value: float = 0.0) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=device)

    return Slots(
        prompt_kv=torch.zeros(
            (config.num_layers, 2, prompts, heads, max_prompt_tokens, width), device=device, dtype=dtype
        ),
        prompt_logits_PV=floats(prompts, config.vocab_size),
        kv=torch.zeros((config.num_layers, 2, n, heads, max_new_tokens, width), device=device, dtype=dtype),
        prompt=integers(n),
        prompt_len=integers(n),
        count=integers(n, value=1),
        limit=integers(n, value=1),
        last=integers(n),
        open=integers(n),
        temperature=floats(n),
        top_k=integers(n, value=config.vocab_size),
        top_p=floats(n, value=1.0),
        stop_ids=integers(n, STOP_IDS, value=-1),
        uniform=floats(n, max_new_tokens),
        tokens=integers(n, max_new_tokens),
        logprobs=floats(n, max_new_tokens),
    )


def slot_bytes(
    config: ModelConfig, *, max_prompt_tokens: int, max_new_tokens: int, dtype: torch.dtype
) -> int:
    """What one more slot with a prompt of its own takes, the logits of its row included (twice: the pool's
    and the step's)."""
    token_bytes = config.num_layers * 2 * config.kv_heads * config.head_size * dtype.itemsize
    return (max_prompt_tokens + max_new_tokens) * token_bytes + 2 * config.vocab_size * 4
