"""The training loop: batches in, updates, lines out; validation, checkpoints, recovery and resumption around
them.

    with join(plan.hardware.kind) as process:
        outcome = Trainer(job, process).run()

Killed at any moment, the same job run again goes on from the last checkpoint to the same bits (on hardware
that computes the same bits twice, and unless `max_hours` ties the schedule to the clock): the order of the
data is a function of the seed, metrics are cut back to the checkpoint, and a checkpoint is committed only
after the metrics up to it are on the disk. The loop knows no terminal and no exporter: it calls observers.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.config.recipe import IGNORED, Recipe
from redline.data.loader import Batch, Loader
from redline.data.shards import TokenDataset
from redline.data.stream import TokenStream
from redline.errors import CheckpointError, TrainingError
from redline.model.transformer import Transformer
from redline.plan.plan import Plan
from redline.record.observe import Observer
from redline.record.run import LineWriter, RunFolder
from redline.train import execution
from redline.train.checkpoint import Checkpoints, load
from redline.train.checkpoint_files import step_name
from redline.train.communication import time_waits, waiting
from redline.train.instruments import Instruments, training_rates
from redline.train.optimizer import make_optimizers, state_tensors
from redline.train.process import Process
from redline.train.schedule import lr_factor
from redline.train.step import Learner, LossScale, Update, take_step

STOPPED = "stopped by signal"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs. `validate(model, micro_batch)` returns the `valid_*` metrics; it is handed in
    because it lives above."""

    recipe: Recipe
    plan: Plan
    source: TokenDataset | TokenStream
    data_fingerprint: str
    """Changes when the tokens do; a run goes on only with the data it began with."""
    run: Path
    """Where the run folder is; the same on every process."""
    folder: RunFolder | None
    """The run folder itself, on the first process; None on the others, which write only their checkpoint
    shards."""
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
    best_step: int | None = None
    evals_without_gain: int = 0


class Trainer:
    def __init__(self, job: Job, process: Process) -> None:
        self.job, self.process = job, process
        self.recipe, self.plan, self.train = job.recipe, job.plan, job.recipe.train
        self.micro_batch = job.plan.micro_batch
        self.progress = Progress()
        self.why: str | None = None
        """Why the run ends, once it does."""
        self.better = False
        """Whether the last validation was the best so far and its weights are not saved yet."""
        self.saving: dict[str, Any] | None = None
        """The checkpoint that is being written and has not been announced."""
        self.stop_requested = False
        model = execution.build(job.recipe, job.plan, process)
        scale = LossScale() if job.plan.precision == "fp16" else None
        self.learner = Learner(
            model, make_optimizers(model, self.train, job.plan.update), process, self.train.clip_norm, scale
        )
        self.tensors = {**state_tensors(model, self.learner.optimizers), "rng.cpu": torch.get_rng_state()}
        self.checkpoints = Checkpoints(RunFolder(job.run).checkpoints_path, keep=self.train.keep_checkpoints)
        self.learner.before_update = self.checkpoints.copy_done
        self._resume()
        self.metrics = self._open_metrics()
        self.last_line: dict[str, Any] = {}
        self.loader = Loader(
            job.source,
            batch_size=self.train.batch_size,
            seq_len=job.recipe.data.seq_len,
            seed=self.train.seed,
            rank=process.rank,
            world_size=process.world_size,
            position=self.progress.position,
            threads=job.plan.loader_threads,
            prefetch=job.plan.prefetch,
            pin_memory=process.device.type == "cuda",
        )
        self.waited_s = 0.0
        self.clock_started_s = time.monotonic()
        self.clock_s = self.progress.elapsed_s
        """The clock that all processes go by, as of the last update."""
        self.instruments = Instruments(process.device, training_rates(job.recipe, job.plan))
        self.learner.mark = self.instruments.mark
        if process.world_size > 1:
            self._time_waits()
        self._switches = ExitStack()
        self._switches.enter_context(execution.in_force(job.plan))  # last: what fails above leaves none set

    def run(self) -> Outcome:
        """Train to the end, to the time limit, or to a request to stop; always leaves a checkpoint behind."""
        try:
            with stop_on_signal(self._request_stop):
                self.why = self._why_stop()
                while self.why is None:
                    self.turn()
            self._announce_checkpoint()
            self._event("end", step=self.progress.step, why=self.why, elapsed_s=round(self._elapsed_s(), 3))
            return Outcome(self.progress.step, self.why, self.last_line)
        finally:
            self.close()

    def turn(self) -> None:
        """One turn of the loop: an update, and what is due after it."""
        self._update(self.loader.next())
        self.why = self._why_stop()
        if self._validation_due():
            self._validate()
        if self._checkpoint_due():
            self._checkpoint()
        self._write(self.instruments.ready())
        if self.checkpoints.idle():
            self._announce_checkpoint()

    def drain(self) -> None:
        """Wait for every update so far, put its line into the record, and time the next one afresh."""
        self._write(self.instruments.ready(drain=True))
        self.instruments.restart()

    def close(self) -> None:
        """End the threads. A checkpoint that is being written is finished first: the folder is not given up
        half-written."""
        self._switches.close()
        self.loader.close()
        self.checkpoints.close()
        if self.metrics is not None:
            self.metrics.close()

    # ---- the parts of a turn ----

    def _update(self, batch: Batch) -> None:
        """One update on one batch; running out of memory halves the pass and tries the same batch again."""
        done = self.progress
        # the first one's clock rules the schedule of all
        clock_s = self._elapsed_s() if self.process.is_first else 0.0
        tokens, self.clock_s = self.process.sums(float((batch.targets_BT != IGNORED).sum()), clock_s)
        factor = lr_factor(self.train, done.step + 1, self.clock_s)
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
            "data_wait_s": self.loader.waited_s - self.waited_s,
            "elapsed_s": self._elapsed_s(),
        }
        if self.learner.scale is not None:
            facts |= {"loss_scale": self.learner.scale.value, "skipped": int(update.skipped)}
        self.waited_s = self.loader.waited_s
        self.instruments.push(facts, update)

    def _attempt(self, batch: Batch, tokens: float, factor: float) -> Update:
        self.instruments.begin()
        inputs, targets = (
            t.to(self.process.device, non_blocking=True) for t in (batch.inputs_BT, batch.targets_BT)
        )
        self.instruments.mark("copy_s")
        return take_step(
            self.learner, inputs, targets, micro_batch=self.micro_batch, tokens=tokens, lr_factor=factor
        )

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Halve the micro-batch (the batch stays what it was), or give up when there is nothing left to
        halve."""
        share = self.train.batch_size // self.process.world_size
        smaller = max(
            (d for d in range(1, self.micro_batch) if share % d == 0 and d <= max(1, self.micro_batch // 2)),
            default=0,
        )
        step = self.progress.step + 1
        advice = "lower data.seq_len, set plan.recompute=full, or use more processes"
        if smaller == 0:
            raise TrainingError(f"out of memory at step {step} with micro-batch 1: {advice}") from error
        facts = {
            "micro_batch_before": self.micro_batch,
            "micro_batch": smaller,
            "batch_size": self.train.batch_size,
        }
        if self.process.is_first:
            self._event("out_of_memory", step=step, **facts)
        else:  # the first may have had memory enough, and the launcher must learn of it
            RunFolder(self.job.run).event("out_of_memory", step=step, **facts)
        # the others wait in a collective; the launcher starts all of them again
        if self.process.world_size > 1:
            raise TrainingError(
                f"out of memory at step {step} with micro-batch {self.micro_batch}: start again with --set"
                f" plan.micro_batch={smaller}"
            ) from error
        for optimizer in self.learner.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.micro_batch = smaller

    def _write(self, lines: Sequence[dict[str, Any]], extra: dict[str, Any] | None = None) -> None:
        """Append finished lines to the record; `extra` belongs to the last of them."""
        for i, line in enumerate(lines):
            full = line | (extra or {}) if i == len(lines) - 1 else line
            lost = [
                name for name in ("loss", "grad_norm", "valid_loss") if not math.isfinite(full.get(name, 0.0))
            ]
            if lost and not (full.get("skipped") and full["loss_scale"] > 1.0):
                raise TrainingError(
                    f"{lost[0]} is {full[lost[0]]} at step {full['step']}: lower train.lr (now"
                    f" {self.train.lr}), set train.clip_norm, or look at the data; nothing after the last"
                    " checkpoint was saved, and the same command goes on from there"
                )
            self.last_line = full | dict.fromkeys(lost)  # JSON has no word for nan
            if self.metrics is not None:
                self.metrics.append(self.last_line)
            for observer in self.job.observers:
                observer.metrics(full)

    def _validate(self) -> None:
        """Validate, put the result into this step's line, and remember whether it is the best so far."""
        lines = self.instruments.ready(drain=True)
        found = self._held_out()
        self._write(lines, found)
        done = self.progress
        self.better = done.best_loss is None or found["valid_loss"] < done.best_loss
        done.evals_without_gain = 0 if self.better else done.evals_without_gain + 1
        if self.better:
            done.best_loss, done.best_step = found["valid_loss"], done.step
        self._event("validation", step=done.step, **found, best=self.better)
        if (
            self.why is None
            and self.train.early_stop_evals
            and done.evals_without_gain >= self.train.early_stop_evals
        ):
            self.why = f"early stop: {done.evals_without_gain} validations without a better loss"
        self.instruments.restart()

    def _held_out(self) -> dict[str, float]:
        """The validation metrics; it runs eagerly, so where it needs more memory than training its passes
        shrink, not the training's."""
        assert self.job.validate is not None
        micro_batch = self.micro_batch
        while True:
            try:
                return self.job.validate(self.learner.model, micro_batch)
            except torch.OutOfMemoryError as error:
                if micro_batch == 1 or self.process.world_size > 1:
                    raise TrainingError(
                        f"out of memory in the validation of step {self.progress.step}: lower"
                        " plan.micro_batch"
                    ) from error
                torch.cuda.empty_cache()
                micro_batch //= 2
                self._event(
                    "validation_out_of_memory", step=self.progress.step, validation_micro_batch=micro_batch
                )

    def _checkpoint(self) -> None:
        """Save without waiting for the disk; the copy overlaps the next step's passes."""
        self._write(self.instruments.ready(drain=True))
        started_s = time.perf_counter()
        self._announce_checkpoint()
        self.tensors["rng.cpu"] = torch.get_rng_state()
        self.progress.elapsed_s = self._elapsed_s()
        self.clock_started_s = time.monotonic()
        state = {
            **vars(self.progress),
            "fingerprint": self.recipe.fingerprint,
            "data_fingerprint": self.job.data_fingerprint,
        }
        state["micro_batch_that_fits"] = (
            self.micro_batch if self.micro_batch < self.plan.micro_batch else None
        )
        if self.learner.scale is not None:
            state["loss_scale"] = vars(self.learner.scale)
        before_commit = self.job.folder.sync if self.job.folder is not None else None
        self.checkpoints.save(self.progress.step, self.tensors, state, before_commit=before_commit)
        self.saving = {"step": self.progress.step, "stalled_s": round(time.perf_counter() - started_s, 6)}
        if self.better:
            assert self.progress.best_loss is not None
            self.checkpoints.mark_best(self.progress.step, self.progress.best_loss)
            self.better = False
        self.instruments.restart()

    def _announce_checkpoint(self) -> None:
        """Record the last checkpoint when it is on the disk, and not before: a run can be resumed from what
        its events say."""
        self.checkpoints.wait()
        if self.saving is not None:
            self._event("checkpoint", **self.saving)
            self.saving = None

    # ---- beginning and end ----

    def _open_metrics(self) -> LineWriter | None:
        """The record of the steps, cut back to where the run resumes; on the first process."""
        folder, step = self.job.folder, self.progress.step
        if folder is None:
            return None
        dropped = folder.cut_metrics(step)
        kind = "resume" if step else "start"
        facts = {
            "world_size": self.process.world_size,
            "micro_batch": self.micro_batch,
            "metrics_dropped": dropped,
        }
        self._event(kind, step=step, recipe=self.recipe.name, **facts)
        return LineWriter(folder.metrics_path)

    def _time_waits(self) -> None:
        """Tell the waits for other processes from the phases, where this torch lets us."""
        if time_waits(self.learner.model, self.instruments.mark):
            self.learner.waiting = lambda: waiting(self.instruments.mark)
        else:
            self._event(
                "communication_not_timed",
                why=f"torch {torch.__version__} waits elsewhere; it stays in forward and backward",
            )

    def _resume(self) -> None:
        """Take up the last checkpoint, or the initial weights where the recipe names some and there is no
        checkpoint yet."""
        step = self.checkpoints.latest()
        if step is None:
            if self.job.initial_weights is not None:
                self.job.initial_weights(self.learner.model)
            return
        folder = self.checkpoints.folder / step_name(step)
        state = load(folder, self.tensors)
        if state["fingerprint"] != self.recipe.fingerprint:
            raise CheckpointError(
                f"{folder} was made by another recipe ({state['fingerprint']}, not {self.recipe.fingerprint})"
            )
        if state["data_fingerprint"] != self.job.data_fingerprint:
            raise CheckpointError(
                f"{folder} was trained on other tokens than {self.job.source.name} now holds: restore them,"
                " or give another --run"
            )
        torch.set_rng_state(self.tensors["rng.cpu"])
        self.progress = Progress(**{name: state[name] for name in vars(Progress())})
        if self.learner.scale is not None:
            self.learner.scale = LossScale(**state["loss_scale"])
        if self.process.world_size == 1:
            self.micro_batch = min(self.micro_batch, state["micro_batch_that_fits"] or self.micro_batch)
        best = self.progress.best_step
        if best in self.checkpoints.steps() and best != self.checkpoints.best():
            assert best is not None
            assert self.progress.best_loss is not None
            # killed between the checkpoint and its mark
            self.checkpoints.mark_best(best, self.progress.best_loss)

    def _why_stop(self) -> str | None:
        if self.progress.step >= self.train.steps:
            return "finished"
        if self.train.max_hours is not None and self.clock_s >= self.train.max_hours * 3600:
            return f"time limit of {self.train.max_hours} h"
        if self.train.early_stop_evals and self.progress.evals_without_gain >= self.train.early_stop_evals:
            return "stopped early before"
        return STOPPED if self.process.any(self.stop_requested) else None

    def _validation_due(self) -> bool:
        """At the end of a run and every `eval_every` updates; who stops a run with a signal does not want to
        wait for it."""
        every = self.train.eval_every
        at_end = self.why is not None and self.why != STOPPED
        return self.job.validate is not None and (at_end or (every > 0 and self.progress.step % every == 0))

    def _checkpoint_due(self) -> bool:
        every = self.train.checkpoint_every
        return self.why is not None or self.better or (every > 0 and self.progress.step % every == 0)

    def _elapsed_s(self) -> float:
        """Training time of this run: of this attempt, and of those before up to the checkpoint it resumed
        from."""
        return self.progress.elapsed_s + time.monotonic() - self.clock_started_s

    def _request_stop(self) -> None:
        self.stop_requested = True

    def _event(self, kind: str, **facts: Any) -> None:
        if self.job.folder is not None:
            self.job.folder.event(kind, **facts)
        for observer in self.job.observers:
            observer.event(kind, facts)


@contextmanager
def stop_on_signal(request: Callable[[], None]) -> Iterator[None]:
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
