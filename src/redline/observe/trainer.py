"""Hugging Face's Trainer under our instruments.

    Trainer(..., callbacks=[RedlineCallback("runs/mine")])

The Trainer fetches all batches of an update, runs it, then logs, evaluates and saves, and calls us in between; we
measure the gaps. To see batches, the loader's class is replaced by a subclass while training runs. The Trainer does
not tell callbacks about an error: it is recorded when the next training begins, or when the callback or the process
ends. Left out: the split into forward and backward, and losses of updates that the Trainer does not log.
"""

import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from redline.diagnose.finding import Finding
from redline.errors import need
from redline.observe.facts import Told
from redline.observe.run import Pause, WatchedRun

need("transformers", extra="hf")
from transformers import TrainerCallback  # noqa: E402 - after the error that names the extra

LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
"""The Trainer's names and ours."""


def told_by(args: Any) -> Told:
    def given(name: str) -> str:
        return f"{name}={getattr(args, name)}"

    told: dict[str, tuple[Any, str]] = {
        "recompute": ("full" if args.gradient_checkpointing else "none", given("gradient_checkpointing")),
        "accumulation": (args.gradient_accumulation_steps, given("gradient_accumulation_steps")),
        "loader_workers": (args.dataloader_num_workers, given("dataloader_num_workers")),
        "optimizer": (str(getattr(args.optim, "value", args.optim)), "optim"),
    }
    if args.torch_compile:
        told["compile"] = ("on", given("torch_compile"))
    if precision := next((name for name in ("bf16", "fp16") if getattr(args, name)), None):
        told["precision"] = (precision, given(precision))
    return told


_SET_CLASS = object.__dict__["__class__"].__set__
"""accelerate's loaders hide `__class__` behind a property, so plain assignment fails."""


class Training:
    """One training and its loader. Does not refer to the callback, which may be dropped first."""

    def __init__(self, run: WatchedRun, loader: Any) -> None:
        self.run, self._loader, self._plain = run.__enter__(), loader, type(loader)
        self.logs, self.logging_s = 0, 0.0
        self._log_goes_on_at: float | None = None
        """The moment since which callbacks after ours have been logging."""
        if loader is None:
            return
        training, plain = self, self._plain

        def __iter__(self: Any) -> Iterator[Any]:
            for batch in training.run.batches(plain.__iter__(self)):
                yield batch
                training.logged()

        # `iter` looks up `__iter__` on the class, so the class must change
        _SET_CLASS(loader, type(plain.__name__, (plain,), {"__iter__": __iter__}))

    def log(self, since: float) -> float:
        """Our turn in a log; it continues in callbacks after ours. Returns the time."""
        now = time.perf_counter()
        self.logs, self.logging_s, self._log_goes_on_at = self.logs + 1, self.logging_s + now - since, now
        return now

    def logged(self, *, counted: bool = True) -> None:
        """Something else has begun; the time until now was the log's, unless a pause has counted it."""
        if self._log_goes_on_at is not None and counted:
            self.logging_s += time.perf_counter() - self._log_goes_on_at
        self._log_goes_on_at = None

    def end(self, error: BaseException | None = None) -> None:
        """End the run, once."""
        if not self.run.watching:
            return
        if self._loader is not None:
            _SET_CLASS(self._loader, self._plain)
        self.logged()
        if self.logs:
            self.run.event("logging", times=self.logs, stalled_s=round(self.logging_s, 6))
        self.run.__exit__(None if error is None else type(error), error, None)

    def abandon(self) -> None:
        """For when the callback or the process ends, or another training begins: the Trainer has not said that this
        one is over, so an error ended it, most likely the last that Python knows of."""
        known = sys.exc_info()[1] or getattr(sys, "last_value", None)
        self.end(known or RuntimeError("training ended without on_train_end; the Trainer does not say why"))


class RedlineCallback(TrainerCallback):
    def __init__(self, folder: str | Path, *, quiet: bool = False) -> None:
        self.folder, self.quiet = Path(folder), quiet
        self._training: Training | None = None
        """The last one, even after it has ended."""
        self._mark = 0.0
        """The moment up to which time has been accounted for."""
        self._leave: Callable[[], object] = lambda: None
        """Ends the last training if nothing else has; also runs when this object or the process ends."""

    def findings(self) -> list[Finding]:
        """The diagnosis of the finished training; empty before."""
        return self._training.run.findings() if self._training is not None and self._run is None else []

    @property
    def _run(self) -> WatchedRun | None:
        """None unless training is under way."""
        return self._training.run if self._training is not None and self._training.run.watching else None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **_: Any
    ) -> None:
        self._leave()
        options = {"start_step": state.global_step, "quiet": self.quiet, "told": told_by(args)}
        run = WatchedRun(self.folder, model=model, **options)
        self._training = Training(run, train_dataloader)
        self._leave = weakref.finalize(self, self._training.abandon)
        self._mark = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All batches of the update have been fetched; in a resumed epoch, from another loader than ours."""
        if self._run is not None:
            self._run.fetched()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._run is not None:
            self._run.step()
            self._mark = self._computed(control)

    def _computed(self, control: Any) -> float:
        """The time, after the GPU is done: the Trainer waits for it before it logs, and that wait is not logging."""
        if control.should_log and self._run is not None and self._run.clock.is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._training is None or self._run is None or logs is None or "loss" not in logs:
            return  # an evaluation's, or the summary of the end
        self._run.add(**{ours: float(logs[theirs]) for theirs, ours in LOGGED.items() if theirs in logs})
        self._mark = self._training.log(self._mark)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._training is not None:
            self._training.logged()
        self._mark = self._computed(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        found: dict[str, float] = {}
        if (loss := (metrics or {}).get("eval_loss")) is not None:
            found = {"valid_loss": float(loss), "valid_perplexity": math.exp(min(float(loss), 700.0))}
        self._paused("validation", found)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._paused("checkpoint", {})

    def _paused(self, kind: Pause, found: dict[str, float]) -> None:
        if self._training is not None and self._run is not None:
            self._training.logged(counted=False)
            self._run.paused(kind, time.perf_counter() - self._mark, **found)
            self._mark = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._training is not None:
            self._training.end()
            self._leave()  # releases the model
