"""The engine on this machine, with the trainer's own model: slots are refilled as soon as their sample ends.

    with LocalEngine(model, tokenizer, slots=1024, max_prompt_tokens=96, max_new_tokens=128, eos_ids=eos) as engine:
        for completion in engine.run(requests): ...

Each prompt is read once and its samples share it. The host looks at the slots only every STEPS tokens: it takes out
what has ended, refills the slots, launches the next round, and turns tokens into text while that runs. A GPU has
a further step to compute while the host looks, or the next prompts to read.

A sample's random numbers depend only on its seed and number. Its logits can differ in their last bits with the batch
size (cuBLAS takes another kernel for another size), and a near tie may then go the other way: rarely in fp32, often
in bf16. With `reproducible` every step has the full batch size and every prompt is read alone, so the same request
gives the same text whatever shares the batch; it costs time when few slots are in use. Adapters must be merged
(`redline.model.lora.merged`).
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from redline.data.tokenizer import Tokenizer
from redline.engine.decoder import Decoder, Round, Start, filters
from redline.engine.request import Completion, Engine, Finish, Request
from redline.engine.state import STOP_IDS
from redline.errors import ConfigError, MachineError, Say
from redline.model.attention.state import Room
from redline.model.lora import lora_layers
from redline.model.transformer import Transformer
from redline.plan.planner import GENERATION_SHARE, MOST_SLOTS

STEPS = 8
"""Tokens between two looks at the slots. A sample that ends is idle for half of them on average; a look takes the
host some 0.3 ms. Once nothing waits for a slot, looks are half as frequent."""
STREAM_STEPS = 2
"""The same for a stream."""
AHEAD = 8
"""Prompts for one in this many slots are read ahead, so that the GPU need not wait for their launch."""
PREFILL_TOKENS = 32_768
"""Most prompt tokens read in one pass: enough to fill a GPU, few enough to bound the activations."""
_IDLE_S = 0.001
_END: Any = object()


@dataclass
class Stats:
    requests: int = 0
    completions: int = 0
    prefill_tokens: int = 0
    """Prompt tokens read, without padding; each prompt once, whatever the number of its samples."""
    new_tokens: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    """Rows that the decode steps computed, including idle ones and padding."""
    open_steps: int = 0
    """Rows among them that produced a token that counts."""
    run_s: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of the computed rows that were useful."""
        return self.open_steps / self.slot_steps if self.slot_steps else 0.0


@dataclass(eq=False)
class _Asked:
    request: Request
    ids: tuple[int, ...]
    limit: int
    prompt: int
    """Its place in the pool."""
    started: int = 0
    running: int = 0


@dataclass(eq=False)
class _Sample:
    """A sample in a slot or just out of it; the arrays are filled when it ends."""

    asked: _Asked
    number: int
    tokens: np.ndarray = field(init=False)
    logprobs: np.ndarray = field(init=False)


class LocalEngine(Engine):
    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
        reproducible: bool = False,
    ) -> None:
        """`slots`: sequences generated together (`fitting_slots`: what the free memory holds)."""
        if min(max_prompt_tokens, max_new_tokens, slots) < 1:
            raise ConfigError(f"an engine needs room: got {max_prompt_tokens=}, {max_new_tokens=}, {slots=}")
        self.model, self.tokenizer = model, tokenizer
        self.eos_ids, self.reproducible = tuple(dict.fromkeys(eos_ids)), reproducible
        if len(self.eos_ids) > STOP_IDS:
            raise ConfigError(f"a model has at most {STOP_IDS} tokens that end a text, got {self.eos_ids}")
        self._ahead = max(1, slots // AHEAD)
        """Samples whose prompts are read before there is a slot for them."""
        longest = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
        self.room = Room(slots=slots, prompts=slots + self._ahead, whole=reproducible, **longest)
        self.decoder = Decoder(model, self.room, whole_batch=reproducible)
        self.stats = Stats()
        self._free: list[int] = []
        self._free_prompts: list[int] = []
        self._open: dict[int, _Sample] = {}
        """Samples by slot."""
        self._waiting: deque[_Asked] = deque()
        """Prompts that were read and have samples to start."""
        self._ended: list[_Sample] = []
        self._beginnings: dict[frozenset[str], np.ndarray] = {}
        self._cut: list[int] = []
        """Slots whose sample ended with a stop string, which the device does not know yet."""
        # arrays: at 2,048 slots a Python loop per round would take longer than a decode step
        self._known = np.zeros((4, slots), np.int64)
        self._prompt_of, self._left, self._filtered, self._watched = self._known
        self._abandon()

    def close(self) -> None:
        del self.decoder
        if self.model.embed.weight.is_cuda:
            torch.cuda.empty_cache()

    def refresh(self) -> None:
        """Take over weights that training has changed, if they had to be copied."""
        self.decoder.forward.refresh()

    def stream(self, request: Request, say: Say) -> Completion:
        """The sample of a request without stop strings; `say` gets its text in pieces of whole characters."""
        assert request.samples == 1
        assert not request.sampling.stop_strings
        said = ""

        def tell(tokens: list[int]) -> None:
            nonlocal said
            spoken = tokens[:-1] if tokens[-1] in self.eos_ids else tokens
            text = self.tokenizer.decode(spoken).rstrip("\ufffd")
            say(text[len(said) :])
            said = text

        (completion,) = self.run([request], tell=tell)
        say(completion.text[len(said) :])
        return completion

    def run(
        self, requests: Iterable[Request | None], *, tell: Callable[[list[int]], None] | None = None
    ) -> Iterator[Completion]:
        """Completions as they finish. Ending the iteration early drops what is in progress. `tell` gets the first
        slot's tokens so far, every few tokens."""
        usual = STEPS if tell is None else STREAM_STEPS
        if any(layer.original is None for layer in lora_layers(self.model).values()):
            raise ConfigError(
                "the model's adapters are not merged into its weights: generate inside `with"
                " redline.model.lora.merged(model)`"
            )
        feed, more = iter(requests), True
        began_s = time.perf_counter()
        try:
            while True:
                more = more and self._admit(feed, len(self._free))
                self._start()
                if self._open:
                    slots, round_ = self._launch(usual if more or self._waiting else 2 * usual)
                    asked = self.stats.requests
                    more = more and self._admit(feed, self._ahead)  # prompts are read while the round runs
                    if self.stats.requests == asked:
                        self._go_on(slots)
                    yield from self._completions()
                    tokens = self._take_out(slots, round_)
                    if tell is not None:
                        tell(tokens)
                elif self._ended:
                    yield from self._completions()
                elif more:
                    time.sleep(_IDLE_S)
                else:
                    return
        finally:
            self._abandon()
            self.stats.run_s += time.perf_counter() - began_s

    # ---- filling the slots ----

    def _admit(self, feed: Iterator[Request | None], samples: int) -> bool:
        """Ask for requests and read their prompts until `samples` of them wait. False once there are no more."""
        fresh: list[_Asked] = []
        wanted, more = samples - sum(asked.request.samples - asked.started for asked in self._waiting), True
        while wanted > 0 and self._free_prompts:
            request = next(feed, _END)
            if request is None or request is _END:
                more = request is None
                break
            fresh.append(self._asked(request))
            wanted -= request.samples
        self._read(fresh)
        return more

    def _asked(self, request: Request) -> _Asked:
        """The request as the device will see it, or why it cannot."""
        given, sampling, room = request.prompt, request.sampling, self.room
        ids = tuple(self.tokenizer.encode_prompt(given)) if isinstance(given, str) else given
        n, context = len(ids), self.model.config.context_length
        wanted, most, new = sampling.max_new_tokens, room.max_prompt_tokens, room.max_new_tokens
        for holds, rule in (
            (n > 0, "a prompt must hold at least one token, but this one is empty"),
            (n < context, f"a prompt has {n} tokens, and the model's context holds {context}: shorten it"),
            (n <= most, f"a prompt has {n} tokens, but the engine was made for {most}"),
            (wanted <= new, f"a request wants {wanted} new tokens, but the engine was made for {new}"),
        ):
            if not holds:
                raise ConfigError(rule)
        self.stats.requests += 1
        return _Asked(request, ids, min(wanted, context - n), self._free_prompts.pop())

    def _read(self, fresh: Sequence[_Asked]) -> None:
        """Read new prompts, those of similar length together."""
        batch: list[_Asked] = []
        for asked in sorted(fresh, key=lambda asked: len(asked.ids)):
            if batch and (self.reproducible or (len(batch) + 1) * len(asked.ids) > PREFILL_TOKENS):
                self._read_batch(batch)
                batch = []
            batch.append(asked)
        if batch:
            self._read_batch(batch)
        self._waiting += fresh

    def _read_batch(self, batch: Sequence[_Asked]) -> None:
        self.decoder.read([asked.ids for asked in batch], [asked.prompt for asked in batch])
        self.stats.prefill_tokens += sum(len(asked.ids) for asked in batch)

    def _start(self) -> None:
        """Give free slots to waiting samples."""
        if self._cut:
            self.decoder.stop(self._cut)
            self._cut = []
        starts, at, known = [], [], []
        while self._free and self._waiting:
            asked = self._waiting[0]
            request, sampling = asked.request, asked.request.sampling
            first, watched = request.first_sample + asked.started, bool(sampling.stop_strings)
            slots = [self._free.pop() for _ in range(min(len(self._free), request.samples - asked.started))]
            facts = asked.prompt, len(asked.ids), asked.limit, sampling, self.eos_ids
            starts.append(Start(slots, *facts, request.seed, first))
            for number, slot in enumerate(slots, first):
                self._open[slot] = _Sample(asked, number)
            at += slots
            known += [(asked.prompt, asked.limit - 1, filters(sampling), watched)] * len(slots)
            asked.started += len(slots)
            asked.running += len(slots)
            if asked.started == request.samples:
                self._waiting.popleft()
        if starts:
            self.decoder.start(starts)
            self._known[:, at] = np.transpose(known)

    # ---- a round ----

    def _launch(self, most_steps: int) -> tuple[np.ndarray, Round]:
        slots = np.fromiter(self._open, np.int64, len(self._open))
        # samples side by side share their prompt's keys and values
        slots = slots[np.argsort(self._prompt_of[slots], kind="stable")]
        steps, filtered = min(most_steps, int(self._left[slots].max())), bool(self._filtered[slots].any())
        self._count(slots, steps)
        return slots, self.decoder.launch(slots, steps=steps, filtered=filtered)

    def _go_on(self, slots: np.ndarray) -> None:
        """A further step if any sample may need it: else the device is idle while the host looks at the round."""
        if self.decoder.goes_on and self._left[slots].max() > 0:
            self._count(slots, 1)
            self.decoder.go_on()

    def _count(self, slots: np.ndarray, steps: int) -> None:
        self._left[slots] -= steps
        self.stats.decode_steps += steps
        self.stats.slot_steps += steps * self.decoder.batch_size(len(slots))

    def _take_out(self, slots: np.ndarray, round_: Round) -> list[int]:
        """Wait for the round and free the slots of the samples that have ended; returns the first one's tokens."""
        counts, going, tokens, logprobs = round_.wait()
        cut = self._holds_stop_string(slots, counts, going, tokens)
        self._cut += slots[cut].tolist()
        ended = np.flatnonzero((going == 0) | cut)
        for row, slot, count in zip(*(a.tolist() for a in (ended, slots[ended], counts[ended])), strict=True):
            sample = self._open.pop(slot)
            sample.tokens, sample.logprobs = tokens[row, :count], logprobs[row, :count]
            self._ended.append(sample)
            self._free.append(slot)
            sample.asked.running -= 1
            if sample.asked.running == 0 and sample.asked.started == sample.asked.request.samples:
                self._free_prompts.append(sample.asked.prompt)
        new_tokens = int(counts[ended].sum())
        self.stats.new_tokens += new_tokens
        self.stats.open_steps += new_tokens - len(ended)  # the first came from the prompt
        first: list[int] = tokens[0, : counts[0]].tolist()
        return first

    def _holds_stop_string(
        self, slots: np.ndarray, counts: np.ndarray, going: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Which samples' newest text holds one of their stop strings."""
        found = np.zeros(len(slots), dtype=bool)
        rows = np.flatnonzero(self._watched[slots] & (going != 0))
        if not len(rows):
            return found
        stops = [self._open[slot].asked.request.sampling.stop_strings for slot in slots[rows].tolist()]
        # a token has at least one byte, and 2 * STEPS + 1 came since the last look: the text before was searched
        width = 2 * STEPS + max(len(stop.encode()) for own in set(stops) for stop in own)
        begin = np.maximum(0, counts[rows] - width)
        places = begin[:, None] + np.arange(width)
        newest = tokens[rows[:, None], np.minimum(places, tokens.shape[1] - 1)]
        begins = self._may_begin(frozenset(stop[0] for own in set(stops) for stop in own))
        likely = np.flatnonzero((begins[newest] & (places < counts[rows][:, None])).any(axis=1))
        lengths = counts[rows] - begin
        texts = self.tokenizer.decode_batch([newest[i, : lengths[i]].tolist() for i in likely])
        found[rows[likely]] = [
            any(stop in text for stop in stops[i]) for i, text in zip(likely.tolist(), texts, strict=True)
        ]
        return found

    def _may_begin(self, characters: frozenset[str]) -> np.ndarray:
        """Tokens that hold one of the characters, or part of one: decoding every slot would hold up the GPU."""
        if characters not in self._beginnings:
            texts = self.tokenizer.decode_batch([[token] for token in range(self.model.config.vocab_size)])
            wanted = (*characters, "\ufffd")
            self._beginnings[characters] = np.array([any(c in text for c in wanted) for text in texts])
        return self._beginnings[characters]

    # ---- what has ended ----

    def _completions(self) -> Iterator[Completion]:
        ended, self._ended = self._ended, []
        # tuples early: the garbage collector visits lists of numbers again and again
        tokens = [tuple(sample.tokens.tolist()) for sample in ended]
        stopped = [own[-1] in self.eos_ids for own in tokens]
        spoken = [own[:-1] if stop else own for own, stop in zip(tokens, stopped, strict=True)]
        texts = self.tokenizer.decode_batch(spoken) if ended else []
        for sample, own, stop, text in zip(ended, tokens, stopped, texts, strict=True):
            self.stats.completions += 1
            yield self._completion(sample, own, "stop" if stop else "length", text)

    def _completion(self, sample: _Sample, tokens: tuple[int, ...], finish: Finish, text: str) -> Completion:
        request, logprobs = sample.asked.request, tuple(sample.logprobs.tolist())
        places = [at for stop in request.sampling.stop_strings if (at := text.find(stop)) >= 0]
        if places:
            kept = self._tokens_to_stop(sample)
            text, tokens, logprobs, finish = text[: min(places)], tokens[:kept], logprobs[:kept], "stop"
        return Completion(
            request=request, sample=sample.number, text=text, tokens=tokens, logprobs=logprobs, finish=finish
        )

    def _tokens_to_stop(self, sample: _Sample) -> int:
        """How many tokens it took until a stop string was complete."""
        stops, ids = sample.asked.request.sampling.stop_strings, sample.tokens.tolist()

        def complete(count: int) -> bool:
            text = self.tokenizer.decode(ids[:count])
            return any(stop in text for stop in stops)

        return bisect_left(range(len(ids)), True, lo=1, key=complete)

    def _abandon(self) -> None:
        """Forget what is in progress and free its slots and prompts."""
        self._cut += list(self._open)
        self._free = list(range(self.decoder.capacity))
        self._free_prompts = list(range(self.decoder.capacity + self._ahead))
        self._open.clear()
        self._waiting.clear()
        self._ended.clear()


def fitting_slots(model: Transformer, *, max_prompt_tokens: int, max_new_tokens: int) -> int:
    """How many sequences the free memory holds if no two share a prompt."""
    device = model.embed.weight.device
    room = Room(slots=1, prompts=1, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens)
    kept = model.variant.state.sequence_bytes(model.config, room, model.compute_dtype)
    each = kept + 2 * model.config.vocab_size * 4  # with the logits of a row: the pool's and the step's
    if device.type == "cuda":
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free_bytes = torch.cuda.mem_get_info(device)[0] + cached_bytes
    else:
        free_bytes = psutil.virtual_memory().available  # includes the page cache, which makes room
    fitting = int(free_bytes * GENERATION_SHARE) // each
    if fitting < 1:
        raise MachineError(
            f"a sequence needs {each / 2**30:.1f} GiB, but {free_bytes / 2**30:.1f} GiB are free: shorten it"
        )
    return min(MOST_SLOTS[device.type], fitting)
