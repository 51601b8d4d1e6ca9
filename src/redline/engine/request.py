"""What an engine takes and gives: a stream of requests in, a stream of completions out. Runs without torch.

    with LocalEngine(model, tokenizer, ...) as engine:
        for completion in engine.run(requests): ...

An engine asks for the next request only when it will soon have room for it, so a generator of requests can depend on
the completions so far (a budget that stops early). If it has nothing yet but may have later, it yields None and is
asked again.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from redline.errors import ConfigError

COLDEST = 1e-5
"""Below this temperature logits overflow in fp32, and the likeliest token is certain anyway."""

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_new_tokens: int = 128
    temperature: float = 0.8
    """0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Choose among the k likeliest tokens."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion and are removed from it."""

    def __post_init__(self) -> None:
        warm = COLDEST <= self.temperature < math.inf
        for name, holds, rule in (
            ("max_new_tokens", self.max_new_tokens > 0, "greater than 0"),
            ("temperature", warm or self.temperature == 0, f"0 (greedy) or a number from {COLDEST}"),
            ("top_k", self.top_k is None or self.top_k > 0, "greater than 0"),
            ("top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1"),
            ("stop_strings", all(self.stop_strings), "texts that are not empty"),
        ):
            if not holds:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how many samples of it. Seed and number fix a sample's text, whatever runs beside it."""

    prompt: str | tuple[int, ...]
    """Text in which special tokens are recognised (a rendered chat template), or token ids."""
    sampling: Sampling
    messages: tuple[Mapping[str, str], ...] = ()
    """The prompt as chat messages (role, content), for a chat server."""
    samples: int = 1
    first_sample: int = 0
    """Number of the first sample, so that samples of several requests differ as they would in one."""
    seed: int = 0
    tag: Any = None
    """Returned with every completion, to tell whose prompt it was."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.first_sample < 0:
            raise ConfigError(
                f"samples must be greater than 0 and numbered from 0, got {self.samples} from"
                f" {self.first_sample}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be a signed number of at most 64 bits, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    request: Request
    sample: int
    """`first_sample` .. `first_sample + samples - 1` of its request."""
    text: str
    """The text, without the token or the text that ended it."""
    tokens: tuple[int, ...]
    """New tokens, including the one that ended it; empty if a server does not return them."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the model itself (temperature 1, no filter); empty without tokens."""
    finish: Finish
    told_tokens: int = 0
    """How many new tokens a server reports without returning them."""
    version: int = 0
    """Version of the weights that wrote it, for an engine to which weights are published (engine/ray.py)."""

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) or self.told_tokens


def consecutive(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers of samples without gaps, as a request has them: (first, how many)."""
    runs = itertools.groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0])
    return [(run[0][1], len(run)) for run in (list(placed) for _, placed in runs)]


class Engine(Protocol):
    """Something that completes prompts. Completions come in the order they finish."""

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion]: ...
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
