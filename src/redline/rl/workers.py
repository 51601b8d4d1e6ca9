"""The policy on workers apart from the trainer (engine/ray.py), where its answers can be drawn beside an update.

    policy = Workers(local, OnRay(workers=8))
    voice = policy.voice()                     # publishes the weights as they are now
    with voice() as run:                       # later, in another thread: that version, whatever has been published since
        for completion in run(requests): ...

Validations stay with the trainer's own engine: they need the newest weights, and workers go on with the next step.
"""

import time
from collections import deque
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import OutOfMemoryError

from redline.engine.ray import OnRay, RayEngine
from redline.errors import ConfigError, MachineError
from redline.rl.policy import Policy, Voice


class Workers:
    def __init__(self, local: Policy, place: OnRay) -> None:
        self.local, self.place, self.behind = local, place, local.rl.max_versions_behind
        self.process, self.rl = local.process, local.rl
        self.event, self.phase = local.event, local.phase
        self.weights_s = 0.0
        if local.process.world_size > 1:
            raise ConfigError(
                f"--on ray needs one training process, and there are {local.process.world_size}"
            )
        if self.behind and not self.rl.importance_cap:
            raise ConfigError(
                f"with rl.max_versions_behind {self.behind} answers come from older weights, which rl.importance_cap"
                " corrects: set it above 0, or rl.max_versions_behind=0"
            )
        self._engine: RayEngine | None = None
        self._told: deque[tuple[str, dict[str, Any]]] = deque()
        """Events of a thread that draws, until the one that trains passes them on."""

    def voice(self) -> Voice:
        """The weights as they are now; the first call starts the workers."""
        self._tell()
        if self._engine is None:
            self._engine = RayEngine(
                self.local.model,
                self.local.tokenizer,
                place=self.place,
                event=lambda kind, **facts: self._told.append((kind, facts)),
                **self.local.settings(),
            )
        else:
            began_s = time.perf_counter()
            self._engine.publish(self.local.model)
            self.weights_s += time.perf_counter() - began_s
        run = partial(self._engine.run, version=self._engine.version)
        return lambda: nullcontext(run)

    def fewer_slots(self, error: OutOfMemoryError) -> None:
        raise MachineError(
            f"a worker ran out of memory with {self.local.slots} slots: set plan.slots={self.local.slots // 2}"
        ) from error

    def stop(self) -> None:
        """End what is being drawn in another thread."""
        if self._engine is not None:
            self._engine.stop()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._tell()
        self.local.close()

    def _tell(self) -> None:
        while self._told:
            kind, facts = self._told.popleft()
            self.event(kind, **facts)
