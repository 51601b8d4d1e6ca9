"""Generation as a trial: sampled completions of random prompts, switch by switch from one pass over everything for
each token to the engine.

If slots are refilled, a step is all of the work; else it is one batch, which runs until its longest sample has
ended. Lengths are spread evenly from 1 to the limit in both, and only tokens within them count, so speeds compare.
`losses` holds what the guard needs: the mean absolute difference of each checked completion's log-probabilities from
those of the same weights in fp32.

Shapes: B sequences, T tokens, V vocabulary.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from redline.config.load import from_toml
from redline.config.recipe import LoraConfig
from redline.data.tokenizer import END_OF_TEXT, Tokenizer
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.measure.trial import GenerationSwitches
from redline.model.lora import add_lora, merge
from redline.model.transformer import Transformer, build_model
from redline.optimizations.catalogue import Samples
from redline.train.execution import plain_fp32

TEMPERATURE = 0.8
MOST_UNCACHED = 64
"""Sequences generated together without a cache: more are no faster, and all of them would take minutes."""
CHECKED, CHECKED_TOKENS = 4, 8
"""Completions whose log-probabilities are compared with the reference's, and tokens of each."""


class GenerationSubject:
    def __init__(self, setting: dict[str, Any]) -> None:
        recipe = from_toml(setting["recipe"], where="trial")
        self.how, self.work = GenerationSwitches(**setting["how"]), Samples(**setting["samples"])
        self.model = build_model(recipe.model, device=setting["device"], seed=recipe.train.seed).eval()
        self.device = self.model.embed.weight.device
        self.prompts = np.random.default_rng(0).integers(
            0, recipe.model.vocab_size, (self.work.prompts, self.work.prompt_tokens)
        )
        self.waited_s = 0.0
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.model.compute_dtype = torch.bfloat16 if self.how.precision == "bf16" else torch.float32
        # casts the weights, as rejection sampling does
        add_lora(self.model, LoraConfig(), seed=recipe.train.seed)
        if self.how.merged:
            merge(self.model)
        total = self.work.prompts * self.work.samples
        self.sequences = min(total, self.how.slots or total, total if self.how.cached else MOST_UNCACHED)
        self.engine = self._engine() if self.how.cached else None
        count = self.work.prompts if self.how.refilled else self.sequences
        self.lengths = spread(count, self.work.new_tokens)
        self.tokens_per_step = sum(self.lengths) * (self.work.samples if self.how.refilled else 1)

    def step(self) -> None:
        if not self.losses:
            self.losses = self._differences()
        if self.engine is None:
            rows = np.arange(self.sequences) % len(self.prompts)
            prompts_BT = torch.from_numpy(self.prompts[rows]).to(self.device)
            self._uncached(prompts_BT, self.work.new_tokens, greedy=False)
        else:
            for _ in self.engine.run(self._requests()):
                pass
        if self.how.clear_cache and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def drain(self) -> None: ...

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    # ---- the ways to generate ----

    @torch.no_grad()
    def _uncached(self, tokens_BT: Tensor, new_tokens: int, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """A pass over all tokens so far for each new one; returns the new tokens and their log-probabilities."""
        logprobs, start = [], tokens_BT.shape[1]
        for _ in range(new_tokens):
            # of the last position only: all of them would take gigabytes
            logits_BV = self.model.head(self.model.hidden(tokens_BT)[:, -1]).float()
            if greedy:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                next_B1 = (logits_BV / TEMPERATURE).softmax(-1).multinomial(1)
            logprobs.append(logits_BV.log_softmax(-1).gather(-1, next_B1))
            tokens_BT = torch.cat([tokens_BT, next_B1], dim=1)
        return tokens_BT[:, start:], torch.cat(logprobs, dim=1)

    def _engine(self) -> LocalEngine:
        room = max(self.work.new_tokens, CHECKED_TOKENS)
        tokenizer, prompt_tokens = words_tokenizer(self.model.config.vocab_size), self.work.prompt_tokens
        engine = LocalEngine(
            self.model, tokenizer, slots=self.sequences, max_prompt_tokens=prompt_tokens, max_new_tokens=room
        )
        engine.decoder.graphs = engine.decoder.graphs and self.how.graphs
        return engine

    def _requests(self) -> list[Request]:
        """All of the work, each prompt with its length; or one batch, as long as its longest sequence."""
        if self.how.refilled:
            asked = [(number, self.work.samples, length) for number, length in enumerate(self.lengths)]
        else:
            most, sequences = self.work.samples, self.sequences
            counts = [min(most, sequences - start) for start in range(0, sequences, most)]
            asked = [(number, count, self.work.new_tokens) for number, count in enumerate(counts)]
        return [request for each in asked for request in self._request(*each, TEMPERATURE)]

    def _request(self, number: int, samples: int, length: int, temperature: float) -> list[Request]:
        """One request for all samples, or, if they do not share their prompt, one for each."""
        sampling = Sampling(max_new_tokens=length, temperature=temperature)
        prompt = tuple(self.prompts[number].tolist())
        one = Request(prompt=prompt, sampling=sampling, samples=samples, tag=number)
        if self.how.shared:
            return [one]
        return [replace(one, samples=1, first_sample=first) for first in range(samples)]

    def _differences(self) -> list[float]:
        count = min(CHECKED, len(self.prompts))
        prompts_BT = torch.from_numpy(self.prompts[:count]).to(self.device)
        if self.engine is None:
            chosen_BT, logprobs_BT = self._uncached(prompts_BT, CHECKED_TOKENS, greedy=True)
        else:
            requests = [self._request(number, 1, CHECKED_TOKENS, 0.0)[0] for number in range(count)]
            found = sorted(self.engine.run(requests), key=lambda completion: completion.request.tag)
            chosen_BT = torch.tensor([completion.tokens for completion in found], device=self.device)
            logprobs_BT = torch.tensor([completion.logprobs for completion in found], device=self.device)
        reference_BT = reference_logprobs(self.model, prompts_BT, chosen_BT)
        return [float(row) for row in (reference_BT - logprobs_BT).abs().mean(dim=1)]


def spread(count: int, most: int) -> list[int]:
    """`count` lengths, evenly from 1 to `most`."""
    return [-(-most * (place + 1) // count) for place in range(count)]


@torch.no_grad()
def reference_logprobs(model: Transformer, prompts_BT: Tensor, chosen_BT: Tensor) -> Tensor:
    """Log-probabilities of the chosen tokens with the same weights in fp32."""
    kept, model.compute_dtype = model.compute_dtype, torch.float32
    try:
        with plain_fp32(explicit_attention=False):  # whose scores may not fit beside the engine's slots
            hidden_BTD = model.hidden(torch.cat([prompts_BT, chosen_BT], dim=1))
            logits_BTV = model.head(hidden_BTD[:, prompts_BT.shape[1] - 1 : -1])
    finally:
        model.compute_dtype = kept
    return logits_BTV.log_softmax(-1).gather(-1, chosen_BT[..., None])[..., 0]


@cache
def words_tokenizer(vocab_size: int) -> Tokenizer:
    """A word for every id: turning tokens into text is part of generating, and peers read the same text."""
    ids = {END_OF_TEXT: 0, **{f"w{number}": number for number in range(1, vocab_size)}}
    inner = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=END_OF_TEXT))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    return Tokenizer(inner.to_str(), "the trial's tokenizer")
