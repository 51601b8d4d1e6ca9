"""Generation from a model in memory: the prompt is read once, its samples share it, and every new token reads the cached keys.

    for tokens in generate(model, prompt_ids, settings): ...    # one list of new tokens per sample, the stop token left out

A seed fixes the text of every sample whatever the number of samples. All samples of a call have one prompt; slots that are refilled,
CUDA graphs and log-probabilities come with the engine's own issue.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.model.transformer import KVCache, Transformer

COLDEST = 1e-5
"""Below this temperature logits overflow in fp32, and the likeliest token is certain anyway."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_new_tokens: int = 128
    samples: int = 1
    temperature: float = 0.8
    """0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    first_sample: int = 0
    """Number of the first sample, so that samples generated in several calls differ as they would in one."""

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("max_new_tokens", self.max_new_tokens > 0, "greater than 0"),
            ("samples", self.samples > 0, "greater than 0"),
            ("temperature", self.temperature == 0 or COLDEST <= self.temperature < math.inf, f"0 (greedy) or a number from {COLDEST}"),
            ("top_k", self.top_k is None or self.top_k > 0, "greater than 0"),
            ("top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1"),
        ):
            if not holds:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)}")


@torch.no_grad()
def generate(model: Transformer, prompt: Sequence[int], sampling: Sampling) -> list[list[int]]:
    """New tokens of each sample, the stop token left out."""
    room = model.config.context_length - len(prompt)
    if not prompt:
        raise ConfigError("the prompt must hold at least one token")
    if room <= 0:
        raise ConfigError(f"the prompt has {len(prompt)} tokens, and the model's context holds {model.config.context_length}: shorten it")
    device, rows = model.embed.weight.device, sampling.samples
    generators = [_generator(device, sampling.seed, sampling.first_sample + row) for row in range(rows)]
    length = min(sampling.max_new_tokens, room)
    cache = KVCache(model.config, rows, len(prompt) + length, device=device, dtype=model.compute_dtype)
    logits_BV = _prefill(model, prompt, cache)
    texts: list[list[int]] = [[] for _ in range(rows)]
    open_rows = set(range(rows))
    for step in range(length):
        tokens_B = _sample(logits_BV, sampling, generators)
        for row, token in enumerate(tokens_B.tolist()):
            if row in open_rows and token in sampling.stop_ids:
                open_rows.remove(row)
            elif row in open_rows:
                texts[row].append(token)
        if not open_rows or step == length - 1:
            break
        logits_BV = model(tokens_B[:, None], cache=cache)[:, -1].float()
    return texts


def _generator(device: torch.device, seed: int, sample: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{sample}".encode()))


def _prefill(model: Transformer, prompt: Sequence[int], cache: KVCache) -> Tensor:
    """Read the prompt once and give its keys and values to every row."""
    one = KVCache(model.config, 1, len(prompt), device=cache.data.device, dtype=cache.data.dtype)
    logits_1V = model(torch.tensor([list(prompt)], device=cache.data.device), cache=one)[:, -1].float()
    cache.data[:, :, :, :, : len(prompt)] = one.data
    cache.length = len(prompt)
    return logits_1V.expand(cache.data.shape[2], -1)


def _sample(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        lowest = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < lowest, -torch.inf)
    probabilities = logits_BV.softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_, order = probabilities.sort(dim=-1, descending=True)
        before = sorted_.cumsum(dim=-1) - sorted_  # mass of the likelier tokens: the first is always kept
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, sorted_.masked_fill(before >= sampling.top_p, 0.0))
    rows = [torch.multinomial(row, 1, generator=generator) for row, generator in zip(probabilities, generators, strict=True)]
    return torch.cat(rows)


def generate_all(model: Transformer, tokenizer: Any, prompt: str, sampling: Sampling, *, at_once: int | None) -> Iterator[str]:
    """Texts of every sample of a prompt, at most `at_once` sequences in memory; an empty prompt begins a new document."""
    ids = tokenizer.encode([prompt])[0] or [tokenizer.eot_id]
    stops = sampling.stop_ids or (tokenizer.eot_id,)
    size = min(sampling.samples, at_once or sampling.samples)
    for first in range(0, sampling.samples, size):
        part = replace(sampling, samples=min(size, sampling.samples - first), first_sample=first, stop_ids=stops)
        yield from (tokenizer.decode(tokens) for tokens in generate(model, ids, part))
