"""The policy as an engine: the model that learns, asked for answers.

    with policy.speaking() as run:
        for completion in run(requests): ...

On one process the engine computes with the trainer's own weights: nothing is copied unless they are kept in another
dtype, and adapters are merged in place while it speaks. Spread over several processes, the weights are gathered into
a model that each process holds whole, because generation is its own business on each. The engine stays open between
the steps: its slots and CUDA graphs are made once.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from redline.config.rl import RlConfig
from redline.engine.local import LocalEngine
from redline.engine.prompt import stop_ids
from redline.engine.request import Completion, Request
from redline.errors import MachineError
from redline.model.lora import lora_layers, merged
from redline.model.transformer import Transformer, build_model
from redline.train.process import Process, full
from redline.train.restore import Opened

Run = Callable[[Iterable[Request | None]], Iterator[Completion]]
"""An engine's: completions as they finish."""
Voice = Callable[[], AbstractContextManager[Run]]
"""The policy at some version, for as long as the context lasts."""


class Policy:
    behind = 0
    """Steps that may be drawn before the updates that they follow: none, because the engine has the trainer's weights."""

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
    ) -> None:
        """`event` and `phase` are told what happens and which part of a step begins, here and by who draws from it."""
        self.model, self.process, self.rl, self.slots = model, process, rl, slots
        self.event, self.phase = event, phase
        self.tokenizer, self.stop_ids = opened.tokenizer, stop_ids(opened.loaded, opened.tokenizer)
        self.whole = model if process.world_size == 1 else self._copy()
        self.weights_s = 0.0
        """Spent on putting the weights into the engine, over its life."""
        self._engine: LocalEngine | None = None

    def voice(self) -> Voice:
        return self.speaking

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
        """Of an engine for this policy."""
        return {
            "slots": self.slots,
            "max_prompt_tokens": self.rl.max_prompt_tokens,
            "max_new_tokens": self.rl.max_new_tokens,
            "eos_ids": self.stop_ids,
            # On a CPU the same seed gives the same run: an answer may not depend on what is generated beside it.
            "reproducible": self.process.device.type == "cpu",
        }

    def fewer_slots(self, error: torch.OutOfMemoryError) -> None:
        """Memory ran out while generating: go on with half of the slots."""
        if self.slots == 1:
            raise MachineError(
                "out of memory while generating one answer at a time: use a smaller model"
            ) from error
        self.close()
        self.event("out_of_memory", stage="generate", slots_before=self.slots, slots=self.slots // 2)
        self.slots //= 2

    def stop(self) -> None:
        """Nothing is drawn in another thread."""

    def close(self) -> None:
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
