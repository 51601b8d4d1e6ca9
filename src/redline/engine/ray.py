"""Generation by workers on any number of machines, through Ray, as an `Engine`: they generate for the one process that
asks, which owns the samples.

    with RayEngine(model, tokenizer, place=OnRay(workers=8), slots=1024, max_prompt_tokens=96, max_new_tokens=128,
                   eos_ids=eos) as engine:
        for completion in engine.run(requests): ...      # completion.version: the weights that wrote it
        version = engine.publish(model)                  # new weights; also from another thread, during a run

**Workers.** Each is a Ray actor with a `LocalEngine` and one GPU of the cluster; without GPUs, one CPU and one thread. A
worker that dies is replaced under its name, one for which the cluster has no room yet joins when it has, and its
share of the work is whatever it has slots for. The driver keeps a list of what each worker holds. If a worker dies, or
is silent for `timeout_s` and therefore killed, the samples it has not delivered go back to the head of the queue; what
it delivers afterwards is never read. So no sample is lost or comes twice. A sample's seed and number fix its random
numbers, and workers on CPUs compute reproducibly (engine/local.py): the same requests give the same texts from any
number of workers. On GPUs that holds with `reproducible` only, as in the local engine.

**Weights.** `publish` puts them into Ray's object store once, and every worker fetches them from there: a model's
adapters alone if it has any that are not merged, else all weights. A request is drawn from the version that was newest
when it was taken from `requests` (or from `run(requests, version=...)`), in every worker that works on it; a worker
finishes one version before it begins another. Versions that nothing asks for any more are dropped.

**Events.** `event("worker", name=, state=, samples=, seconds=, why=)`, with the state joined, died, hung or ended, the
samples it has delivered since it joined, and the seconds since then. `event("workers", workers=, samples_per_s=,
delivered=)` once a minute: the same two numbers of every worker, by name.

Ray moves calls between its processes with pickle. These belong to one user on one cluster, whose members have to show
its token; no file is read that way. What we pass is plain: numbers, texts, arrays. Left out: streams, and splitting a
model over several GPUs.
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from redline.data.tokenizer import Tokenizer
from redline.engine.calls import shown
from redline.engine.local import AHEAD, Stats
from redline.engine.ray_worker import Worker, packed, plain
from redline.engine.request import Completion, Engine, Request, consecutive
from redline.errors import ConfigError, MachineError, RedlineError, need
from redline.model.lora import lora_layers
from redline.model.transformer import Transformer

SILENCE_S = 600.0
"""A worker that has work and makes no progress for so long is killed; opening the model counts as none."""
WAIT_S = 0.2
"""How long a worker without a finished sample keeps a call open."""
IDLE_S = 0.01
TELL_EVERY_S = 60.0
MOST_LOSSES = 8
"""Workers that may die over the same samples before these are blamed."""
_END: Any = object()


@dataclass(frozen=True, kw_only=True)
class OnRay:
    workers: int | None = None
    """None: one for each GPU of the cluster, or for each CPU if it has no GPU."""
    address: str | None = None
    """None: RAY_ADDRESS, a cluster that was started on this machine, or else a local one for as long as it is used."""


def connect(address: str | None, **how: Any) -> bool:
    """Make this process a driver; True if it was not one, so that `ray.shutdown` is the caller's to call."""
    ray = need("ray", extra="ray")
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR", **how)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or os.environ.get("RAY_ADDRESS") or "this machine"
        raise MachineError(
            f"no Ray cluster at {where} ({shown(str(error))}): start one with `ray start --head`, or set RAY_ADDRESS"
        ) from error
    return True


@dataclass(eq=False)
class _Owed:
    """A sample that was asked for and has not been delivered."""

    number: int
    """The number of its request, because requests may be equal."""
    request: Request
    sample: int
    version: int
    losses: int = 0


@dataclass(eq=False)
class _Member:
    """A worker as the driver sees it; all but the name is new when it comes back."""

    name: str
    actor: Any = None
    call: Any = None
    joined: bool = False
    held: dict[tuple[int, int], _Owed] = field(default_factory=dict)
    """What it owes, by the numbers of request and sample."""
    fresh: list[_Owed] = field(default_factory=list)
    """What it was not yet told of that."""
    samples: int = 0
    joined_s: float = 0.0
    heard_s: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)


class RayEngine(Engine):
    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        slots: int,
        eos_ids: Sequence[int] = (),
        reproducible: bool = False,
        place: OnRay | None = None,
        timeout_s: float = SILENCE_S,
        event: Callable[..., None] = lambda kind, **facts: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` are each worker's; the weights of `model` are version 0."""
        place = place or OnRay()
        if place.workers is not None and place.workers < 1:
            raise ConfigError(f"workers must be at least 1, got {place.workers}")
        self._started = connect(place.address)
        self._ray = need("ray", extra="ray")
        self._timeout_s, self._event, self._clock = timeout_s, event, clock
        # what fills the slots again while a call is under way
        self._most = slots + 2 * max(1, slots // AHEAD)
        has = self._ray.cluster_resources()
        gpus, cpus = int(has.get("GPU", 0)), int(has.get("CPU", 1))
        self._share = {"num_cpus": 1, "num_gpus": 1 if gpus else 0, "max_restarts": 0}
        longest = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
        engine = {**longest, "slots": slots, "eos_ids": tuple(eos_ids), "reproducible": reproducible}
        dtype = str(model.compute_dtype).removeprefix("torch.")
        self._how = self._ray.put(
            {"model": asdict(model.config), "dtype": dtype, "tokenizer": tokenizer.text, "engine": engine}
        )
        self._stopped = False
        self.version = -1
        """The newest weights."""
        self._weights: dict[int, tuple[Any, Any]] = {}
        """References by version: to the weights and to adapters on them, or None."""
        self._base: Any = None
        self.publish(model)
        count = place.workers or gpus or max(1, cpus)
        self._members = [_Member(f"worker-{number}") for number in range(1, count + 1)]
        self._queue: deque[_Owed] = deque()
        self._numbers = itertools.count()
        self._losses, self._alone_s, self._told_s = 0, clock(), clock()

    def close(self) -> None:
        """End the workers, and Ray if it was started for them."""
        for member in self._members:
            self._end(member, "ended")
        if self._started:
            self._started = False
            self._ray.shutdown()

    def stop(self) -> None:
        """End a run in another thread with an error, within a second or so."""
        self._stopped = True

    def publish(self, model: Transformer) -> int:
        """Make the model's weights, as they are now, the newest version; returns its number."""
        apart = {name: layer for name, layer in lora_layers(model).items() if layer.original is None}
        if not apart:
            self._base = None
        if self._base is None:
            self._base = self._ray.put({name: packed(tensor) for name, tensor in plain(model)})
        adapters = {
            f"{name}.weight": (packed(layer.lora_a), packed(layer.lora_b), layer.config.scale)
            for name, layer in apart.items()
        }
        # The version counts once its weights are there, because a run in another thread may ask for it.
        self._weights[self.version + 1] = self._base, self._ray.put(adapters) if adapters else None
        self.version += 1
        return self.version

    @property
    def stats(self) -> Stats:
        """The sums of what the workers that are there have done."""
        told = [member.stats for member in self._members if member.stats]
        return Stats(**{one.name: sum(stats[one.name] for stats in told) for one in fields(Stats)})  # type: ignore[arg-type]

    def rates(self) -> dict[str, float]:
        """Samples a second of each worker that is there, since it joined."""
        now_s = self._clock()
        return {m.name: m.samples / max(1e-9, now_s - m.joined_s) for m in self._members if m.joined}

    def run(self, requests: Iterable[Request | None], *, version: int | None = None) -> Iterator[Completion]:
        """Completions as they come in; one run at a time. Ending the iteration early drops what is in progress."""
        if version is not None and version not in self._weights:
            raise ConfigError(f"weights {version} are not there (any more); the newest are {self.version}")
        feed, more = iter(requests), True
        self._alone_s = self._clock()
        try:
            while True:
                if self._stopped:
                    raise MachineError("the workers were dismissed before they had written all samples")
                more = more and self._take(feed, version)
                busy = [member for member in self._members if member.held]
                if not (more or self._queue or busy):
                    return
                self._forget(self.version if version is None else version)
                self._hand_out()
                yield from self._collect()
        finally:
            self._queue.clear()
            for member in self._members:
                if member.held:  # its slots are full of work nobody wants any more
                    self._end(member, "ended")

    # ---- from the requests to the workers ----

    def _take(self, feed: Iterator[Request | None], version: int | None) -> bool:
        """Take requests as far as there is room for them. False once there are no more."""
        room = max(1, sum(self._most - len(member.held) for member in self._members if member.joined))
        room -= len(self._queue)
        while room > 0:
            request = next(feed, _END)
            if request is None or request is _END:
                return request is None
            number, drawn_from = next(self._numbers), self.version if version is None else version
            samples = range(request.first_sample, request.first_sample + request.samples)
            self._queue.extend(_Owed(number, request, sample, drawn_from) for sample in samples)
            room -= request.samples
        return True

    def _hand_out(self) -> None:
        """Start workers that are missing, and give the next samples to whoever has the least to do."""
        for member in self._members:
            if member.actor is None:
                member.actor = self._ray.remote(Worker).options(**self._share).remote(self._how)
                member.call = member.actor.step.remote([], {}, 0.0)
        while self._queue:
            there = [member for member in self._members if member.joined]
            least = min(there, key=lambda member: len(member.held), default=None)
            if least is None or len(least.held) >= self._most:
                break
            if not least.held:
                least.heard_s = self._clock()
            number = self._queue[0].number
            while self._queue and self._queue[0].number == number and len(least.held) < self._most:
                owed = self._queue.popleft()  # the samples of a request together: they share its prompt
                least.held[number, owed.sample] = owed
                least.fresh.append(owed)
        for member in self._members:
            if member.held and member.call is None:
                weights = {owed.version: self._weights[owed.version] for owed in member.fresh}
                work, member.fresh = list(_work_of(member.fresh)), []
                member.call = member.actor.step.remote(work, weights, WAIT_S)

    def _forget(self, asked: int) -> None:
        """Drop the versions before `asked` that no sample needs any more."""
        owed = itertools.chain(self._queue, *(member.held.values() for member in self._members))
        oldest = min([asked, *(one.version for one in owed)])
        for version in [known for known in list(self._weights) if known < oldest]:
            del self._weights[version]

    # ---- from the workers to the completions ----

    def _collect(self) -> list[Completion]:
        """Wait for news, and look for workers that are gone or silent."""
        calls = {member.call: member for member in self._members if member.call is not None}
        if not calls:
            time.sleep(IDLE_S)  # everybody waits for the next request
            return []
        found: list[Completion] = []
        if self._ray.wait(list(calls), timeout=1.0)[0]:
            for call in self._ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]:
                member, calls[call].call = calls[call], None
                try:
                    found += self._heard(member, self._ray.get(call))
                except self._ray.exceptions.RayError as error:
                    self._lose(member, "died", shown(str(error)))
        now_s = self._clock()
        for member in self._members:
            if member.held and now_s - member.heard_s > self._timeout_s:
                self._lose(member, "hung", f"no progress for {self._timeout_s:g} s")
        if any(member.joined for member in self._members):
            self._alone_s = now_s
            if now_s - self._told_s >= TELL_EVERY_S:
                self._told_s, rates = now_s, self.rates()
                delivered = {m.name: self._delivered(m) for m in self._members if m.joined}
                facts = {"workers": len(rates), "samples_per_s": sum(rates.values())}
                self._event("workers", **facts, delivered=delivered)
        elif now_s - self._alone_s > self._timeout_s:
            has = ", ".join(f"{n:g} {name}" for name, n in self._ray.cluster_resources().items())
            raise MachineError(
                f"no worker has joined in {self._timeout_s:g} s: each needs {self._share}, and the cluster has {has}"
            )
        return found

    def _heard(self, member: _Member, told: Mapping[str, Any]) -> list[Completion]:
        """A worker's answer to a call."""
        now_s = self._clock()
        if not member.joined:
            member.joined, member.joined_s = True, now_s
            self._tell(member, "joined")
        if told["ready"] or told["stats"] != member.stats:
            member.heard_s, member.stats = now_s, told["stats"]
        found = []
        for number, sample, text, tokens, logprobs, finish in told["ready"]:
            owed = member.held.pop((number, sample))
            found.append(
                Completion(
                    request=owed.request, sample=sample, text=text, tokens=tokens, logprobs=logprobs,
                    finish=finish, version=owed.version,
                )
            )  # fmt: skip
        member.samples += len(found)
        self._losses = 0 if found else self._losses
        if told["failed"] is not None:
            kind, why = told["failed"]
            known: dict[str, type[Exception]] = {one.__name__: one for one in RedlineError.__subclasses__()}
            known["OutOfMemoryError"] = torch.OutOfMemoryError
            if kind in known:
                raise known[kind](why)
            self._lose(member, "died", f"{kind}: {shown(why)}")
        return found

    def _lose(self, member: _Member, state: str, why: str) -> None:
        """A worker is gone, or is to go: what it still owes goes back to the head of the queue."""
        owed = list(member.held.values())
        self._queue.extendleft(reversed(owed))
        for one in owed:
            one.losses += 1
            if one.losses >= MOST_LOSSES:
                prompt = shown(str(one.request.prompt))
                raise MachineError(f"{MOST_LOSSES} workers were lost on the same prompt ({why}): {prompt}")
        self._end(member, state, why)
        self._losses, self._alone_s = self._losses + 1, self._clock()
        if self._losses > 3 * len(self._members):
            raise MachineError(
                f"{self._losses} workers in a row were lost before a sample came from any; the last one: {why}"
            )

    def _end(self, member: _Member, state: str, why: str = "") -> None:
        """Kill a worker's process; what it held is forgotten."""
        if member.actor is None:
            return
        self._ray.kill(member.actor)
        if member.joined or why:
            self._tell(member, state, why)
        self._members[self._members.index(member)] = _Member(member.name)

    def _tell(self, member: _Member, state: str, why: str = "") -> None:
        facts = self._delivered(member) | ({"why": why} if why else {})
        self._event("worker", name=member.name, state=state, **facts)

    def _delivered(self, member: _Member) -> dict[str, Any]:
        seconds = round(self._clock() - member.joined_s, 3) if member.joined else 0.0
        return {"samples": member.samples, "seconds": seconds}


def _work_of(fresh: Sequence[_Owed]) -> Iterator[dict[str, Any]]:
    """Samples as requests for a worker, each without gaps, which a worker that died may have left."""
    for number, same in itertools.groupby(fresh, key=lambda owed: owed.number):
        first, *_ = owed = list(same)
        told = vars(first.request) | {"sampling": vars(first.request.sampling), "messages": ()}
        for start, samples in consecutive(one.sample for one in owed):
            tag = number, first.version
            yield told | {"tag": tag, "samples": samples, "first_sample": start}
