"""The policy as an engine: the model that learns, asked for answers.

    with policy.speaking() as run:                # the weights as they are now, by this process's engine
        for completion in run(requests): ...
    voice = policy.voice()                        # the same; with workers (`on`) this version whenever it is used
    with voice() as run: ...                      # later, in another thread

On one process the engine computes with the trainer's own weights: nothing is copied unless they are kept in another
dtype, and adapters are merged in place while it speaks. Spread over several processes, the weights are gathered into
a model that each process holds whole, because generation is its own business on each. The engine stays open between
the steps: its slots and CUDA graphs are made once.

With workers apart from the trainer (engine/ray.py) answers can be drawn during an update. Validations stay with the
engine here: they need the newest weights, and workers continue with the next step.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from redline.config.rl import RlConfig
from redline.engine.local import LocalEngine
from redline.engine.prompt import stop_ids
from redline.engine.ray import OnRay, RayEngine
from redline.engine.request import Completion, Request
from redline.errors import ConfigError, MachineError
from redline.model.lora import lora_layers, merged
from redline.model.transformer import Transformer, build_model
from redline.train.process import Process, full
from redline.train.restore import Opened

Run = Callable[[Iterable[Request | None]], Iterator[Completion]]
"""An engine's: completions as they finish."""
Voice = Callable[[], AbstractContextManager[Run]]
"""The policy at some version, for as long as the context lasts."""


class Policy:
    def __init__(
        self,
        model: Transformer,
        opened: Opened,
        process: Process,
        rl: RlConfig,
        *,
        slots: int,
        event: Callable[..., None] = lambda kind, **facts: None,
        phase: Callable[[str | None], None] = lambda name: None,
        on: OnRay | None = None,
    ) -> None:
        """`event` and `phase` are told what happens and which part of a step begins. `on`: workers that answer."""
        if on is not None:
            _check_workers(process, rl)
        self.on, self.behind = on, rl.max_versions_behind if on is not None else 0
        """Steps that may be drawn before the updates that they follow: none where the engine has the trainer's weights."""
        self.model, self.process, self.rl, self.slots = model, process, rl, slots
        self.event, self.phase = event, phase
        self.tokenizer, self.stop_ids = opened.tokenizer, stop_ids(opened.loaded, opened.tokenizer)
        self.whole = model if process.world_size == 1 else self._copy()
        self.weights_s = 0.0
        """Time spent on putting the weights into the engine, over its life."""
        self._engine: LocalEngine | None = None
        self._workers: RayEngine | None = None

    def voice(self) -> Voice:
        """The weights as they are now; the first call starts the workers."""
        if self.on is None:
            return self.speaking
        if self._workers is None:
            how: dict[str, Any] = {"place": self.on, "event": self.event, **self.settings()}
            self._workers = RayEngine(self.model, self.tokenizer, **how)
        else:
            began_s = time.perf_counter()
            self._workers.publish(self.model)
            self.weights_s += time.perf_counter() - began_s
        run = partial(self._workers.run, version=self._workers.version)
        return lambda: nullcontext(run)

    @contextmanager
    def speaking(self) -> Iterator[Run]:
        """The engine has the weights as they are now; to be entered on all processes together."""
        with ExitStack() as stack:
            began_s = time.perf_counter()
            if self.process.world_size > 1:
                self._gather()
            else:
                stack.enter_context(merged(self.model))
            self.engine.refresh()
            if self.process.device.type == "cuda":
                torch.cuda.synchronize()
            self.weights_s += time.perf_counter() - began_s
            yield lambda requests: self.engine.run(requests)  # another engine once memory has run out

    @property
    def engine(self) -> LocalEngine:
        if self._engine is None:
            self._engine = LocalEngine(self.whole, self.tokenizer, **self.settings())
        return self._engine

    def settings(self) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "max_prompt_tokens": self.rl.max_prompt_tokens,
            "max_new_tokens": self.rl.max_new_tokens,
            "eos_ids": self.stop_ids,
            # On a CPU the same seed gives the same run: an answer may not depend on what is generated beside it.
            "reproducible": self.process.device.type == "cpu",
        }

    def fewer_slots(self, error: torch.OutOfMemoryError) -> None:
        """Memory ran out while generating: continue with half of the slots."""
        if self.on is not None:
            raise MachineError(
                f"a worker ran out of memory with {self.slots} slots: set plan.slots={self.slots // 2}"
            ) from error
        if self.slots == 1:
            raise MachineError("out of memory with one answer at a time: use a smaller model") from error
        self.close()
        self.event("out_of_memory", stage="generate", slots_before=self.slots, slots=self.slots // 2)
        self.slots //= 2

    def stop(self) -> None:
        """End what is being drawn in another thread."""
        if self._workers is not None:
            self._workers.stop()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _copy(self) -> Transformer:
        """A model of the whole weights without adapters, in the compute dtype; filled before every use."""
        whole = build_model(self.model.config, device=self.process.device, seed=0)
        whole.compute_dtype = self.model.compute_dtype
        for parameter in whole.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(whole.compute_dtype)
        return whole.eval()

    @torch.no_grad()
    def _gather(self) -> None:
        """Every process takes part; one parameter at a time is held twice."""
        adapted, own = lora_layers(self.model), dict(self.whole.named_parameters())
        for name, parameter in self.model.named_parameters():
            if name not in own:
                continue  # an adapter, merged below
            value: Tensor = full(parameter.detach())
            if (layer := adapted.get(name.removesuffix(".weight"))) is not None:
                value = (
                    value.float()
                    + full(layer.lora_b.detach()) @ full(layer.lora_a.detach()) * layer.config.scale
                )
            own[name].copy_(value)


def _check_workers(process: Process, rl: RlConfig) -> None:
    if process.world_size > 1:
        raise ConfigError(f"--on ray needs one training process, but there are {process.world_size}")
    if rl.max_versions_behind and not rl.importance_cap:
        raise ConfigError(
            f"with rl.max_versions_behind {rl.max_versions_behind} answers come from older weights, which"
            " rl.importance_cap corrects: set it above 0, or rl.max_versions_behind=0"
        )
