"""A worker of the engine on Ray (ray.py): an engine in a thread of its process, and how weights travel to it."""

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.config.recipe import ModelConfig
from redline.data.tokenizer import Tokenizer
from redline.engine.local import LocalEngine
from redline.engine.request import Request, Sampling
from redline.errors import need
from redline.model.transformer import Transformer, build_model

_OF_ADAPTERS = ("lora_a", "lora_b", "scale_b")


def plain(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the model without its adapters."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.rpartition(".")[2] not in _OF_ADAPTERS:
            yield name, tensor


def packed(tensor: Tensor) -> tuple[str, tuple[int, ...], np.ndarray]:
    """A tensor as bytes, which every process of a machine reads in place; NumPy knows no bf16."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()


def _unpacked(given: tuple[str, tuple[int, ...], np.ndarray], device: torch.device) -> Tensor:
    dtype, shape, array = given
    return torch.from_numpy(array.copy()).view(getattr(torch, dtype)).view(shape).to(device)


class Worker:
    """A worker's process: an engine in a thread. The driver calls `step` to give work and take what is done."""

    def __init__(self, how: Mapping[str, Any]) -> None:
        self._how = how
        self._changed = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._ready: list[tuple[Any, ...]] = []
        self._held = 0
        self._weights: dict[int, tuple[Any, Any]] = {}
        self._failed: tuple[str, str] | None = None
        self._engine: LocalEngine | None = None
        self._model: Transformer | None = None
        threading.Thread(target=self._work, name="redline-engine", daemon=True).start()

    def step(self, work: Sequence[dict[str, Any]], weights: dict[int, Any], wait_s: float) -> dict[str, Any]:
        """Take work and the weights it is for; answer with what is finished, as soon as something is."""
        with self._changed:
            for one in work:
                self._inbox.append(Request(**{**one, "sampling": Sampling(**one["sampling"])}))
                self._held += one["samples"]
            self._weights |= weights
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._failed, wait_s)
            ready, self._ready = self._ready, []
            stats = asdict(self._engine.stats) if self._engine else {}
            return {"ready": ready, "failed": self._failed, "stats": stats}

    def _work(self) -> None:
        """The thread: one version of the weights after the other."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._inbox)
                    _, version = self._inbox[0].tag
                    weights = self._weights[version]
                    asked = {request.tag[1] for request in self._inbox}
                    self._weights = {
                        number: refs for number, refs in self._weights.items() if number in asked
                    }
                for completion in self._load(*weights).run(self._feed(version)):
                    number, _ = completion.request.tag
                    told = completion.text, completion.tokens, completion.logprobs, completion.finish
                    with self._changed:
                        self._ready.append((number, completion.sample, *told))
                        self._held -= 1
                        self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - the driver decides what becomes of it
            with self._changed:
                self._failed = type(error).__name__, str(error)
                self._changed.notify_all()

    def _feed(self, version: int) -> Iterator[Request | None]:
        """Requests of this version, until there is one of another; waits only if nothing is in progress."""
        while True:
            with self._changed:
                if not self._held:
                    self._changed.wait_for(lambda: self._inbox)
                if self._inbox and self._inbox[0].tag[1] != version:
                    return
                request = self._inbox.popleft() if self._inbox else None
            yield request

    @torch.no_grad()
    def _load(self, base: Any, adapters: Any) -> LocalEngine:
        ray = need("ray", extra="ray")
        on_gpu = bool(ray.get_gpu_ids())
        device = torch.device("cuda" if on_gpu else "cpu")
        if self._model is None:
            if not on_gpu:
                torch.set_num_threads(1)  # its share; and sums must not depend on the machine's size
            self._model = build_model(ModelConfig(**self._how["model"]), device=device, seed=0)
            self._model.compute_dtype = getattr(torch, self._how["dtype"])
            self._model.requires_grad_(False).eval()
        own = dict(plain(self._model))
        for name, given in ray.get(base).items():
            value = _unpacked(given, device)
            if own[name].dtype != value.dtype:
                own[name].data = own[name].data.to(value.dtype)
            own[name].copy_(value)
        for name, (a, b, scale) in (ray.get(adapters) if adapters else {}).items():
            delta = (_unpacked(b, device) @ _unpacked(a, device)) * scale
            own[name].copy_(own[name].float() + delta)
        if self._engine is None:
            tokenizer = Tokenizer(self._how["tokenizer"], "the driver's tokenizer")
            settings = dict(self._how["engine"])
            settings["reproducible"] |= not on_gpu
            self._engine = LocalEngine(self._model, tokenizer, **settings)
        else:
            self._engine.refresh()
        return self._engine
