"""Generation by an OpenAI-compatible completion server (vLLM, SGLang, llama.cpp, `transformers serve`), as an
`Engine`. No torch.

    with ServerEngine("http://localhost:8000", "SmolLM2-135M-Instruct") as engine:      # the key: REDLINE_API_KEY
        for completion in engine.run(requests): ...

Every sample is one call, with a seed made from the request's seed and the sample's number: no server promises the same
text for the same sample of an `n`, and those that cache prefixes (vLLM, SGLang, llama.cpp) read the prompt once anyway.
What a server would otherwise take from the model's settings (top-k, penalties) is sent with neutral values, so that
`Sampling` means what it says. An option that the server does not support is refused; ignoring it silently would make a
different experiment.

vLLM and llama.cpp return tokens and log-probabilities; the others at most the number of tokens. `transformers serve`
seeds a generator that all its requests share, so its samples repeat only with concurrency=1. If the URL ends in
/chat/completions, that endpoint gets the request's messages, or its text as one user message: for servers that have no
other endpoint, and models whose template is not known here. Left out: streamed answers, redirects and proxies.
"""

import json
import queue
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redline.engine.calls import Line, shown
from redline.engine.request import Completion, Engine, Finish, Request
from redline.errors import ConfigError, Say, nearest

CHECK_S = 30.0
"""How long the list of models may take."""
IDLE_S = 0.01
CHAT = "/chat/completions"
_END: Any = object()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one kind of server takes besides the fields that OpenAI documents."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every call."""
    no_top_k: int | None = None
    """The value of top_k that keeps all tokens; None: the server takes no top_k."""
    takes_ids: bool = True
    """Takes prompts of token ids."""


_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0}  # or else those of the model's generation_config.json
DIALECTS = {
    "vllm": Dialect(
        name="vLLM",
        # as in the local engine, a prompt brings its own special tokens
        fields={**_NEUTRAL, "add_special_tokens": False, "return_token_ids": True, "logprobs": 1},
        no_top_k=-1,
    ),
    "sglang": Dialect(name="SGLang", fields=_NEUTRAL, no_top_k=-1),
    "llamacpp": Dialect(
        name="llama.cpp", fields={"min_p": 0.0, "repeat_penalty": 1.0, "logprobs": 1}, no_top_k=0
    ),
}
"""Dialects by the `owned_by` of the server's models."""
TRANSFORMERS = Dialect(name="transformers serve", no_top_k=0, takes_ids=False)
OTHER = Dialect(name="an OpenAI-compatible server of unknown kind")


class ServerEngine(Engine):
    """Completes prompts by calls to a server, at most `concurrency` at a time."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        concurrency: int = 64,
        timeout_s: float = 600.0,
        tokenizer: Any = None,
        progress: Say = lambda _: None,
    ) -> None:
        """`url`: http://host:port, or with its path (…/v1). `model`: needed if the server has several. `tokenizer` turns
        prompts of token ids into text, for servers that only take text. `progress` hears of retries."""
        if concurrency < 1 or timeout_s <= 0:
            got = f"got {concurrency} and {timeout_s}"
            raise ConfigError(f"concurrency must be at least 1 and timeout_s greater than 0, {got}")
        self.tokenizer, self.concurrency = tokenizer, concurrency
        self.path = CHAT if url.rstrip("/").endswith(CHAT) else "/completions"
        base = url.rstrip("/").removesuffix(CHAT)
        self._line = Line(base, connections=concurrency, timeout_s=timeout_s, progress=progress)
        try:
            self.dialect = self._recognise()
            self.model = self._choose(model)
        except BaseException:
            self.close()
            raise

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Completions in the order the server finishes them."""
        source, asked = _samples(requests), None
        done: queue.SimpleQueue[Future[dict[str, Any]]] = queue.SimpleQueue()
        flying: dict[Future[dict[str, Any]], tuple[Request, int]] = {}
        try:
            while asked is not _END or flying:
                while len(flying) < self.concurrency and (asked := next(source, _END)) not in (None, _END):
                    call = self._line.submit(self.path, self._body(*asked))
                    flying[call] = asked
                    call.add_done_callback(done.put)
                if flying:
                    call = done.get()
                    yield self._read(call.result(), *flying.pop(call))
                elif asked is None:
                    time.sleep(IDLE_S)
        finally:
            # a reader that stops early must not wait for texts that nobody wants
            for call in flying:
                call.cancel()

    def close(self) -> None:
        self._line.close()

    def _body(self, request: Request, sample: int) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            **self._prompt(request),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # 31 bits: some servers read a signed number, and llama.cpp reads the largest of 32 bits as "any seed"
            "seed": zlib.crc32(f"{request.seed}/{sample}".encode()) >> 1,
            **self.dialect.fields,
        }
        if self.path == CHAT and "logprobs" in body:
            body["logprobs"] = True  # a switch there, a number here
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        if sampling.top_k is not None and self.dialect.no_top_k is None:
            raise self._refusal("top_k", "leave it out")
        top_k = self.dialect.no_top_k if sampling.top_k is None else sampling.top_k
        if self.dialect is TRANSFORMERS:
            # it samples only if the model's settings say so, and takes the switch and top_k only in this field
            body["generation_config"] = json.dumps({"do_sample": sampling.temperature > 0, "top_k": top_k})
        elif top_k is not None:
            body["top_k"] = top_k
        return body

    def _prompt(self, request: Request) -> dict[str, Any]:
        prompt: Any = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        if not isinstance(prompt, str) and (self.path == CHAT or not self.dialect.takes_ids):
            if self.tokenizer is None:
                raise self._refusal("a prompt of token ids", "give it as text, or the engine a tokenizer")
            prompt = str(self.tokenizer.decode(prompt))
        if self.path != CHAT:
            return {"prompt": prompt}
        return {"messages": list(request.messages) or [{"role": "user", "content": prompt}]}

    def _refusal(self, what: str, way_out: str) -> ConfigError:
        name = self.dialect.name
        return ConfigError(f"{self._line.url} is {name}, which does not take {what}: {way_out}")

    def _read(self, answer: Any, request: Request, sample: int) -> Completion:
        try:
            [choice] = answer["choices"]
            text = choice["message"]["content"] if self.path == CHAT else choice["text"]
            reason = choice["finish_reason"]
            tokens, logprobs = _tokens(choice)
            if not isinstance(text, str):
                raise TypeError("the text is none")
            known: dict[str, Finish] = {"stop": "stop", "length": "length"}
            finish = known[reason]
            told_tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
            if not 0 <= told_tokens < 2**31:
                raise ValueError("no number of tokens")
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{self._line.url} must answer with one completion that ended by stop or length, got"
                f" {shown(json.dumps(answer))}"
            ) from error
        ends = [text.index(stop) for stop in request.sampling.stop_strings if stop in text]
        if ends:  # some servers leave the text that ended it in place
            text, finish = text[: min(ends)], "stop"
        return Completion(
            request=request, sample=sample, text=text, tokens=tokens, logprobs=logprobs, finish=finish,
            told_tokens=told_tokens,
        )  # fmt: skip

    def _recognise(self) -> Dialect:
        try:
            # `transformers serve` has a path that no other server has. Its list of models would not do: it names
            # their authors as owners, and without a cache of models it is an error.
            root = urlsplit(self._line.url)._replace(path="/openapi.json").geturl()
            if "/load_model" in self._line.look(root, CHECK_S).get("paths", {}):
                return TRANSFORMERS
        except ConfigError:
            pass  # not every server describes itself; a missing one is noticed next
        owners = [str(card.get("owned_by")) for card in self._cards()]
        return next((DIALECTS[owner] for owner in owners if owner in DIALECTS), OTHER)

    def _choose(self, model: str | None) -> str:
        if model is not None and self.dialect not in (DIALECTS["vllm"], DIALECTS["sglang"]):
            return model  # the others also serve models that they do not list; `transformers serve` lists its cache
        known = [card["id"] for card in self._cards()]
        listed = ", ".join(known[:8]) or "none"
        if model is None and len(known) != 1:
            raise ConfigError(f"name one of the models of {self._line.url}: it has {listed}")
        if model is not None and model not in known:
            raise ConfigError(
                f"{self._line.url} has no model {model!r}{nearest(model, known)}; it has {listed}"
            )
        return model or known[0]

    def _cards(self) -> list[dict[str, Any]]:
        answer = self._line.look(f"{self._line.url}/models", CHECK_S)
        cards = answer.get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise ConfigError(
                f"{self._line.url}/models must list models as OpenAI does, got {shown(json.dumps(answer))}"
            )
        return cards


def _samples(requests: Iterable[Request | None]) -> Iterator[tuple[Request, int] | None]:
    """Every sample of every request; None where the next request may come later."""
    for request in requests:
        if request is None:
            yield None
        else:
            first = request.first_sample
            yield from ((request, sample) for sample in range(first, first + request.samples))


def _tokens(choice: dict[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and log-probabilities as vLLM or llama.cpp return them; empty for other servers."""
    told = choice.get("logprobs") or {}
    parts = told.get("content") or []
    ids = choice.get("token_ids") or [part["id"] for part in parts if "id" in part]
    logprobs = told.get("token_logprobs") or [part["logprob"] for part in parts]
    if not ids or not logprobs:
        return (), ()
    if len(ids) != len(logprobs) or not all(isinstance(each, int | float) for each in logprobs):
        raise ValueError(f"{len(ids)} tokens and {len(logprobs)} log-probabilities")
    if not all(type(each) is int and 0 <= each < 2**31 for each in ids):
        raise ValueError("no token ids")
    return tuple(ids), tuple(logprobs)
