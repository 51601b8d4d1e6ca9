"""Hugging Face's Trainer under our instruments.

    Trainer(..., callbacks=[RedlineCallback("runs/mine")])

The Trainer fetches all batches of an update, runs it, then logs, evaluates and saves, and calls us between these; the gaps are what is
measured. Batches are seen by a subclass of the loader's class that is put in its place while training runs. Left out: the split into
forward and backward, and losses of updates that the Trainer does not log (it does not show them).
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redline.diagnose.finding import Finding
from redline.errors import need
from redline.observe.facts import Told
from redline.observe.run import Pause, WatchedRun

need("transformers", extra="hf")
from transformers import TrainerCallback  # noqa: E402 - after the error that names the extra

LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
"""The Trainer's names and ours."""


def told_by(args: Any) -> Told:
    """What TrainingArguments say of how the training is executed."""
    precision = next((name for name in ("bf16", "fp16") if getattr(args, name)), None)
    told: dict[str, tuple[Any, str]] = {
        "recompute": ("full" if args.gradient_checkpointing else "none", f"gradient_checkpointing={args.gradient_checkpointing}"),
        "accumulation": (args.gradient_accumulation_steps, f"gradient_accumulation_steps={args.gradient_accumulation_steps}"),
        "loader_workers": (args.dataloader_num_workers, f"dataloader_num_workers={args.dataloader_num_workers}"),
        "optimizer": (str(getattr(args.optim, "value", args.optim)), "optim"),
    }
    if args.torch_compile:
        told["compile"] = ("on", "torch_compile=True")
    if precision:
        told["precision"] = (precision, f"{precision}=True")
    return told


_SET_CLASS = object.__dict__["__class__"].__set__
"""accelerate's loaders hide `__class__` behind a property of their own, so the plain assignment is refused."""


def watch_loader(loader: Any, run: WatchedRun) -> type:
    """Let the run see the batches of this loader, and return the class that undoes it. `iter` asks the class, so the class it must be."""
    plain: type = type(loader)

    def __iter__(self: Any) -> Iterator[Any]:
        return run.batches(_Plain(plain, self))

    _SET_CLASS(loader, type(plain.__name__, (plain,), {"__iter__": __iter__}))
    return plain


class _Plain:
    """The loader's batches as its own class gives them."""

    def __init__(self, kind: type, loader: Any) -> None:
        self._kind, self._loader = kind, loader

    def __iter__(self) -> Iterator[Any]:
        return self._kind.__iter__(self._loader)  # type: ignore[attr-defined]


class RedlineCallback(TrainerCallback):
    def __init__(self, folder: str | Path, *, quiet: bool = False) -> None:
        self.folder, self.quiet = Path(folder), quiet
        self._run: WatchedRun | None = None
        """While training goes on."""
        self._ended: WatchedRun | None = None
        self._mark = 0.0
        """End of the last thing that was accounted for."""
        self._logs, self._logging_s = 0, 0.0

    def findings(self) -> list[Finding]:
        """The diagnosis of the training that has ended; nothing before."""
        return self._ended.findings() if self._ended is not None else []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **_: Any) -> None:
        run = WatchedRun(self.folder, model, tokens_per_step=None, start_step=state.global_step, quiet=self.quiet, told=told_by(args))
        self._run, self._loader = run.__enter__(), train_dataloader
        self._plain = None if train_dataloader is None else watch_loader(train_dataloader, run)
        self._mark = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All batches of the update have been fetched; from another loader than ours in an epoch that is resumed."""
        if self._run is not None:
            self._run.fetched()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._run is not None:
            self._run.step()
            self._mark = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self._run is None or logs is None or "loss" not in logs:
            return  # an evaluation's, or the summary of the end
        self._run.add(**{ours: float(logs[theirs]) for theirs, ours in LOGGED.items() if theirs in logs})
        now = time.perf_counter()
        self._logs, self._logging_s, self._mark = self._logs + 1, self._logging_s + now - self._mark, now

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._mark = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **_: Any) -> None:
        loss = (metrics or {}).get("eval_loss")
        found = {} if loss is None else {"valid_loss": float(loss), "valid_perplexity": math.exp(min(float(loss), 700.0))}
        self._paused("validation", found)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._paused("checkpoint", {})

    def _paused(self, kind: Pause, found: dict[str, float]) -> None:
        if self._run is not None:
            self._run.paused(kind, time.perf_counter() - self._mark, **found)
            self._mark = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._run is None:
            return
        if self._plain is not None:
            _SET_CLASS(self._loader, self._plain)
        if self._logs:
            self._run.event("logging", times=self._logs, stalled_s=round(self._logging_s, 6))
        self._ended, self._run = self._run, None
        self._ended.__exit__(None, None, None)
