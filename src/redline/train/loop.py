"""The training loop: batches in, updates, lines out; validation, checkpoints, recovery and resumption around them.

    with join(plan.hardware.kind) as process:
        outcome = Trainer(job, process).run()

Killed at any moment, the same job run again goes on from the last checkpoint to the same bits (on hardware that computes the same
bits twice): the order of the data is a function of the seed, metrics are cut back to the checkpoint, and a checkpoint is committed only
after the metrics up to it are on the disk. The loop knows no terminal and no exporter: it calls observers.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from redline.config.recipe import IGNORED, Recipe
from redline.data.loader import Batch, Loader
from redline.data.shards import TokenDataset
from redline.data.stream import TokenStream
from redline.errors import CheckpointError, TrainingError
from redline.model.transformer import Transformer
from redline.plan.plan import Plan
from redline.record.run import LineWriter, RunFolder
from redline.train import execution
from redline.train.checkpoint import Checkpoints, load
from redline.train.checkpoint_files import step_name
from redline.train.instruments import Instruments
from redline.train.optimizer import make_optimizers, state_tensors
from redline.train.process import Process
from redline.train.schedule import lr_factor
from redline.train.step import Learner, LossScale, Update, take_step


class Observer(Protocol):
    """Somebody who watches a run: the live view, an exporter. Calls stand in the loop and must return at once."""

    def metrics(self, line: dict[str, Any]) -> None: ...
    def event(self, kind: str, facts: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class OutOfMemory(TrainingError):
    """A GPU of several ran out of memory. The others wait in a collective, so the launcher starts all of them again."""

    exit_code = 75


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs. `validate(model, micro_batch)` returns the `valid_*` metrics; it is handed in because it lives above."""

    recipe: Recipe
    plan: Plan
    source: TokenDataset | TokenStream
    run: Path
    """Where the run folder is; the same on every process."""
    folder: RunFolder | None
    """The run folder itself, on the first process; None on the others, which write only their checkpoint shards."""
    validate: Callable[[Transformer, int], dict[str, float]] | None = None
    initial_weights: Callable[[Transformer], None] | None = None
    observers: Sequence[Observer] = ()


@dataclass(frozen=True)
class Outcome:
    step: int
    why: str
    metrics: dict[str, Any]
    """The last line written by this call; empty when there was nothing left to do."""


@dataclass
class Progress:
    """Where the run stands; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    position: dict[str, Any] | None = None
    best_loss: float | None = None
    evals_without_gain: int = 0


class Trainer:
    def __init__(self, job: Job, process: Process) -> None:
        self.job, self.process = job, process
        self.recipe, self.plan, self.train = job.recipe, job.plan, job.recipe.train
        self.micro_batch = job.plan.micro_batch
        self.progress = Progress()
        self.stop_requested = False
        model = execution.build(job.recipe, job.plan, process)
        if job.initial_weights is not None:
            job.initial_weights(model)
        scale = LossScale() if job.plan.precision == "fp16" else None
        self.learner = Learner(model, make_optimizers(model, self.train), process, self.train.clip_norm, scale)
        self.tensors = {**state_tensors(model, self.learner.optimizers), "rng.cpu": torch.get_rng_state()}

    def run(self) -> Outcome:
        """Train to the end, to the time limit, or to a request to stop; always leaves a checkpoint behind."""
        self._open()
        try:
            with _stop_on_signal(self._request_stop):
                while (why := self._why_stop()) is None:
                    batch = self.loader.next()
                    self._update(batch)
                    self._write(self.instruments.ready())
                    if self._due(self.train.eval_every):
                        self._validate()
                    elif self._due(self.train.checkpoint_every):
                        self._checkpoint()
                return self._finish(why)
        finally:
            self._close()

    # ---- the parts of a step ----

    def _update(self, batch: Batch) -> None:
        """One update on one batch; running out of memory halves the pass and tries the same batch again."""
        done = self.progress
        tokens = self.process.sum(float((batch.targets_BT != IGNORED).sum()))
        factor = lr_factor(self.train, done.step + 1, self._elapsed_s())
        while True:
            try:
                update = self._attempt(batch, tokens, factor)
                break
            except torch.OutOfMemoryError as error:
                self._shrink(error)
        done.step, done.tokens, done.position = done.step + 1, done.tokens + int(tokens), batch.position
        facts: dict[str, Any] = {
            "step": done.step,
            "lr": self.train.lr * factor,
            "tokens": done.tokens,
            "data_wait_s": self.loader.waited_s - self._waited_s,
            "elapsed_s": self._elapsed_s(),
        }
        if self.learner.scale is not None:
            facts |= {"loss_scale": self.learner.scale.value, "skipped": int(update.skipped)}
        self._waited_s = self.loader.waited_s
        self.instruments.push(facts, update)

    def _attempt(self, batch: Batch, tokens: float, factor: float) -> Update:
        inputs, targets = (t.to(self.process.device, non_blocking=True) for t in (batch.inputs_BT, batch.targets_BT))
        return take_step(self.learner, inputs, targets, micro_batch=self.micro_batch, tokens=tokens, lr_factor=factor)

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Halve the micro-batch (the batch stays what it was), or give up when there is nothing left to halve."""
        share = self.train.batch_size // self.process.world_size
        smaller = max((d for d in range(1, self.micro_batch) if share % d == 0 and d <= max(1, self.micro_batch // 2)), default=0)
        step = self.progress.step + 1
        advice = "lower data.seq_len, set plan.recompute=full, or use more processes"
        if smaller == 0:
            raise TrainingError(f"out of memory at step {step} with micro-batch 1: {advice}") from error
        if self.process.world_size > 1:
            raise OutOfMemory(
                f"out of memory at step {step} with micro-batch {self.micro_batch}: start again with --set plan.micro_batch={smaller}"
            ) from error
        for optimizer in self.learner.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self._event("out_of_memory", step=step, micro_batch_before=self.micro_batch, micro_batch=smaller, batch_size=self.train.batch_size)
        self.micro_batch = smaller

    def _write(self, lines: Sequence[dict[str, Any]], extra: dict[str, Any] | None = None) -> None:
        """Append finished lines to the record; `extra` belongs to the last of them."""
        for i, line in enumerate(lines):
            full = line | (extra or {}) if i == len(lines) - 1 else line
            lost = not math.isfinite(full["loss"])
            if lost and not (full.get("skipped") and full["loss_scale"] > 1.0):
                raise TrainingError(
                    f"the loss is {full['loss']} at step {full['step']}: lower train.lr (now {self.train.lr}), set train.clip_norm, or look at the "
                    "data; nothing after the last checkpoint was saved, and the same command goes on from there"
                )
            self._last_line = full
            if self._metrics is not None:
                self._metrics.append(full)
            for observer in self.job.observers:
                observer.metrics(full)

    def _validate(self) -> None:
        """Validate, put the result into this step's line, and keep the checkpoint if it is the best so far."""
        lines = self.instruments.ready(drain=True)
        if self.job.validate is None:
            self._write(lines)
            self._checkpoint()
            return
        found = self.job.validate(self.learner.model, self.micro_batch)
        self._write(lines, found)
        loss, done = found["valid_loss"], self.progress
        better = done.best_loss is None or loss < done.best_loss
        done.evals_without_gain = 0 if better else done.evals_without_gain + 1
        if better:
            done.best_loss = loss
        self._event("validation", step=done.step, **found, best=better)
        if better or self._due(self.train.checkpoint_every):
            self._checkpoint()
        if better:
            self.checkpoints.mark_best(done.step, loss)
        self.instruments.restart()

    def _checkpoint(self) -> None:
        """Save without waiting for the disk; the copy overlaps the next step's passes."""
        self._write(self.instruments.ready(drain=True))
        self.tensors["rng.cpu"] = torch.get_rng_state()
        self.progress.elapsed_s = self._elapsed_s()
        self._clock_started = time.monotonic()
        state = {**vars(self.progress), "fingerprint": self.recipe.fingerprint, "micro_batch": self.micro_batch}
        if self.learner.scale is not None:
            state["loss_scale"] = vars(self.learner.scale)
        before_commit = self._metrics.sync if self._metrics is not None else None
        stalled_s = self.checkpoints.save(self.progress.step, self.tensors, state, before_commit=before_commit)
        self._saved_step = self.progress.step
        self._event("checkpoint", step=self.progress.step, stalled_s=round(stalled_s, 6))
        self.instruments.restart()

    # ---- beginning and end ----

    def _open(self) -> None:
        folder = self.job.folder
        self.checkpoints = Checkpoints(RunFolder(self.job.run).checkpoints_path, keep=self.train.keep_checkpoints)
        self._saved_step = self._resume()
        self.learner.before_update = self.checkpoints.copy_done
        self._metrics = None
        if folder is not None:
            dropped = folder.cut_metrics(self.progress.step)
            self._metrics = LineWriter(folder.metrics_path)
            kind = "resume" if self.progress.step else "start"
            self._event(kind, step=self.progress.step, world_size=self.process.world_size, metrics_dropped=dropped, recipe=self.recipe.name)
        self.loader = Loader(
            self.job.source,
            batch_size=self.train.batch_size,
            seq_len=self.recipe.data.seq_len,
            seed=self.train.seed,
            rank=self.process.rank,
            world_size=self.process.world_size,
            position=self.progress.position,
            threads=self.plan.loader_threads,
            prefetch=self.plan.prefetch,
            pin_memory=self.process.device.type == "cuda",
        )
        self._waited_s = self.loader.waited_s
        self._last_line: dict[str, Any] = {}
        self._clock_started = time.monotonic()
        self.instruments = Instruments(self.recipe, self.plan, self.process.device)

    def _resume(self) -> int | None:
        step = self.checkpoints.latest()
        if step is None:
            return None
        folder = self.checkpoints.folder / step_name(step)
        state = load(folder, self.tensors)
        if state["fingerprint"] != self.recipe.fingerprint:
            raise CheckpointError(f"{folder} was made by another recipe ({state['fingerprint']}, not {self.recipe.fingerprint})")
        torch.set_rng_state(self.tensors["rng.cpu"])
        self.progress = Progress(**{name: state[name] for name in vars(Progress())})
        if self.learner.scale is not None:
            self.learner.scale = LossScale(**state["loss_scale"])
        if self.process.world_size == 1:
            self.micro_batch = min(self.micro_batch, state["micro_batch"])  # it ran out of memory with more
        return step

    def _why_stop(self) -> str | None:
        done, train = self.progress, self.train
        if done.step >= train.steps:
            return "finished"
        if train.early_stop_evals and done.evals_without_gain >= train.early_stop_evals:
            return f"early stop: {done.evals_without_gain} validations without a better loss"
        if train.max_hours is not None and self._elapsed_s() >= train.max_hours * 3600:
            return f"time limit of {train.max_hours} h"
        if self.process.any(self.stop_requested):
            return "stopped by signal"
        return None

    def _finish(self, why: str) -> Outcome:
        """The last validation and checkpoint, unless this step already has them."""
        if self._saved_step != self.progress.step:
            if why != "stopped by signal" and self.job.validate is not None and "valid_loss" not in self._last_line:
                self._validate()
            if self._saved_step != self.progress.step:
                self._checkpoint()
        self.checkpoints.wait()
        self._event("end", step=self.progress.step, why=why, elapsed_s=round(self._elapsed_s(), 3))
        return Outcome(self.progress.step, why, self._last_line)

    def _close(self) -> None:
        for part in ("loader", "_metrics"):
            if getattr(self, part, None) is not None:
                getattr(self, part).close()

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0 and self.progress.step < self.train.steps

    def _elapsed_s(self) -> float:
        """Training time over all attempts. With several processes the first one's clock counts where the schedule depends on it."""
        elapsed_s = self.progress.elapsed_s + time.monotonic() - self._clock_started
        if self.train.max_hours is None or self.process.world_size == 1:
            return elapsed_s
        return self.process.sum(elapsed_s if self.process.is_first else 0.0)

    def _request_stop(self) -> None:
        self.stop_requested = True

    def _event(self, kind: str, **facts: Any) -> None:
        if self.job.folder is not None:
            self.job.folder.event(kind, **facts)
        for observer in self.job.observers:
            observer.event(kind, facts)


@contextmanager
def _stop_on_signal(request: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C or SIGTERM asks for a stop after the step in hand; a second one interrupts at once."""

    def handle(number: int, _frame: Any) -> None:
        request()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread: whoever runs the loop there handles signals
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
