"""The training loop: batches in, updates, lines out; validation, checkpoints, recovery and resumption around
them. Every workload that learns runs through it.

    with join(plan.hardware.kind) as process:
        outcome = Trainer(job, process).run()

You can kill it at any moment. The same job run again resumes from the last checkpoint to the same bits, on
hardware that computes the same bits twice and unless `max_hours` ties the schedule to the clock: the order of the
data is a function of the seed, metrics are cut back to the checkpoint, and a checkpoint is committed only after
the metrics up to it are on the disk. The loop knows no terminal and no exporter: it calls observers.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from redline.errors import CheckpointError, TrainingError
from redline.model.transformer import redraw_when_due
from redline.plan.values import NEEDED_CAPABILITY
from redline.record import startup
from redline.record.read import attempts, lost_updates
from redline.record.run import LineWriter, RunFolder, read_lines
from redline.train import execution
from redline.train.alignment import Diagnosis
from redline.train.checkpoint import Checkpoints, load
from redline.train.feedback import rule_of
from redline.train.graph import Captured
from redline.train.instruments import Instruments, Work, own_time, slowest, start_up_s, training_rates
from redline.train.objective import Batch, Executor, Job, Sequences
from redline.train.optimizer import fixed, lr_factor, make_optimizers, state_tensors, warm_momentum
from redline.train.orthogonality import penalty
from redline.train.packed import Packed
from redline.train.places import step_name
from redline.train.process import Process, time_waits, waiting
from redline.train.progress import Progress
from redline.train.step import Learner, LossScale, Numbers
from redline.train.stop import STOPPED, StopTraining, stop_on_signal


@dataclass(frozen=True)
class Outcome:
    step: int
    why: str
    metrics: dict[str, Any]
    """The last line written by this call; empty when there was nothing left to do."""

    @property
    def complete(self) -> bool:
        """The run reached its steps, its hours or an early stop; nobody interrupted it."""
        return self.why != STOPPED


class Trainer:
    def __init__(self, job: Job, process: Process) -> None:
        self.job, self.opened, self.process, self.objective = job, job.opened, process, job.objective
        self.plan, self.train = job.plan, fixed(job.recipe.train, job.steps)
        self.observers, self._event = job.opened.watching, job.opened.event
        self.progress = Progress()
        self.why: str | None = None
        """Why the run ends, once it does."""
        self.better = False
        """Whether the last validation was the best so far and its weights are not saved yet."""
        self.saving: dict[str, Any] | None = None
        """The checkpoint that is being written and has not been announced."""
        self.stop_requested = False
        scale = LossScale() if job.plan.precision == "fp16" else None
        optimizers = make_optimizers(job.model, self.train, job.plan.update, captured=job.plan.graph)
        rule = rule_of(job.recipe, job.model)
        self.learner = Learner(job.model, optimizers, process, self.train.clip_norm, scale, rule)
        if job.combine is not None:
            self.learner.combine = job.combine(self.learner, lambda: self.progress.step)
        self.learner.penalise = penalty(job.model, self.train, lambda: self.progress.step)
        self.tensors = {**state_tensors(job.model, optimizers), **job.state, "rng.cpu": torch.get_rng_state()}
        self.checkpoints: Checkpoints | None = None
        if job.opened.run is not None:
            folder = RunFolder(job.opened.run).checkpoints_path
            self.checkpoints = Checkpoints(folder, keep=self.train.keep_checkpoints)
            self.learner.before_update = self.checkpoints.copy_done
        self._resume()
        self.metrics = self._open_metrics()
        self.last_line: dict[str, Any] = {}
        self.source = job.source(self.progress.position, self.progress.step)
        self.waited_s = 0.0
        self.clock_started_s = time.monotonic()
        self.clock_s = self.progress.elapsed_s
        """The clock that all processes follow, as of the last update."""
        rates = training_rates(job.plan, rows=isinstance(job.objective, Packed))
        self.instruments = Instruments(process.device, rates)
        self.learner.mark = self.instruments.mark
        if process.world_size > 1:
            self._time_waits()
        self.executor = self._executor()
        self.diagnosis = Diagnosis(job.recipe, job.plan)
        startup.mark("build")
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
        try:
            batch = self.source.next()
        except StopTraining as reason:
            self.why = str(reason)
            self._checkpoint()
            return
        self._update(batch)
        if startup.underway():
            self._event("start_up", step=self.progress.step, **start_up_s(self.process.device))
        self.why = self._why_stop()
        if self._validation_due():
            self._validate()
        if self._checkpoint_due():
            self._checkpoint()
        self._write(self.instruments.ready())
        if self.checkpoints is not None and self.checkpoints.idle():
            self._announce_checkpoint()

    def drain(self) -> None:
        """Wait for every update so far, put its line into the record, and time the next one afresh."""
        self._write(self.instruments.ready(drain=True))
        self.instruments.restart()

    def close(self) -> None:
        """End the threads, after a checkpoint in progress is finished."""
        self._switches.close()
        self.source.close()
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.metrics is not None:
            self.metrics.close()

    # ---- the parts of a turn ----

    def _update(self, batch: Batch) -> None:
        """One update on one batch; running out of memory halves the passes and tries the same batch again."""
        done = self.progress
        # The first process's clock drives the schedule of all.
        clock_s = self._elapsed_s() if self.process.is_first else 0.0
        counts = (float(batch.targets), float(batch.tokens), float(batch.rows))
        exchanged = self.process.sums(*counts, clock_s, *own_time(self.process, self.last_line))
        targets, tokens, rows, self.clock_s, *busy_s = exchanged
        factor = lr_factor(self.train, done.step + 1, self.clock_s)
        warm_momentum(self.learner.optimizers, self.train, done.step + 1)
        redraw_when_due(self.learner.model, self.train.seed, done.step, self.learner.before_update)
        while True:
            try:
                self.instruments.begin()
                told: Numbers = {}
                if self.diagnosis.due(done.step + 1):
                    told = self.diagnosis.measure(self.learner, self.objective, batch)
                    self.instruments.mark("diagnose_s")
                update = self.executor.take(batch, targets=targets, lr_factor=factor)
                update = replace(update, numbers={**update.numbers, **told}) if told else update
                break
            except torch.OutOfMemoryError as error:
                self._shrink(error)
        done.step, done.tokens, done.position = done.step + 1, done.tokens + int(tokens), batch.position
        facts: dict[str, Any] = {
            "step": done.step,
            "lr": self.train.lr * factor,
            "tokens": done.tokens,
            "data_wait_s": self.source.waited_s - self.waited_s,
            **self.objective.facts(batch),
            **slowest(busy_s),
            "elapsed_s": self._elapsed_s(),
        }
        if self.learner.scale is not None:
            facts |= {"loss_scale": self.learner.scale.value, "skipped": int(update.skipped)}
        self.waited_s = self.source.waited_s
        self.instruments.push(facts, update, Work(int(tokens), int(rows)))

    def _executor(self) -> Executor:
        if self.plan.graph:
            assert isinstance(self.objective, Packed | Sequences)
            return Captured(self.learner, self.objective, self._event)
        return self.job.executor(self.learner, self.objective)

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        """Halve the passes (the batch stays what it was), or give up when there is nothing left to halve."""
        step, before = self.progress.step + 1, self.objective.pass_size
        if not self.objective.shrink():
            raise TrainingError(
                f"out of memory at step {step} with micro-batch 1: lower data.seq_len, set"
                " plan.recompute=full, or use more processes"
            ) from error
        smaller = self.objective.pass_size
        facts = {"micro_batch_before": before, "micro_batch": smaller, "batch_size": self.train.batch_size}
        if self.process.is_first:
            self._event("out_of_memory", step=step, **facts)
        elif self.opened.run is not None:
            # The first process may have had enough memory; the launcher must still learn of the failure.
            RunFolder(self.opened.run).event("out_of_memory", step=step, **facts)
        # The others wait in a collective; the launcher starts all of them again.
        if self.process.world_size > 1:
            raise TrainingError(
                f"out of memory at step {step} with micro-batch {before}: start again with --set"
                f" plan.micro_batch={smaller}"
            ) from error
        for optimizer in self.learner.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.learner.combine.restart()
        self.executor = self._executor()
        torch.cuda.empty_cache()

    def _write(self, lines: Sequence[dict[str, Any]], extra: dict[str, Any] | None = None) -> None:
        """Append finished lines to the record; `extra` belongs to the last of them."""
        for i, line in enumerate(lines):
            full = line | self.job.derived(line) | (extra or {} if i == len(lines) - 1 else {})
            lost = [
                name for name in ("loss", "grad_norm", "valid_loss") if not math.isfinite(full.get(name, 0.0))
            ]
            if lost and not (full.get("skipped") and full["loss_scale"] > 1.0):
                raise TrainingError(self._diverged(lost[0], full[lost[0]], full["step"]))
            self.last_line = full | dict.fromkeys(lost)  # JSON cannot hold nan
            if self.metrics is not None:
                self.metrics.append(self.last_line)
            self.observers.metrics(full)

    def _diverged(self, name: str, value: float, step: int) -> str:
        """The message for a number that is not finite any more. Computing the same again would give the same."""
        advice = [f"a lower train.lr (now {self.train.lr:g})"]
        advice += ["train.clip_norm (now off)"] if not self.train.clip_norm else []
        older = () < self.plan.hardware.compute_capability < NEEDED_CAPABILITY["bf16"]
        advice += [f"plan.precision={'fp32' if older else 'bf16'}"] if self.plan.precision == "fp16" else []
        saved = None
        if self.checkpoints is not None:
            self.checkpoints.wait()  # the last one may be on its way to the disk
            saved = self.checkpoints.latest()
        way = "start again"
        if saved is not None:
            way = f"continue from step {saved} (--fork {self.opened.run} --run NEW)"
        told = f"{name} is {value} at step {step}: {way} with {' or '.join(advice)}"
        return f"{told}, or look at the data of that step"

    def _validate(self) -> None:
        """Validate, put the result into this step's line, and remember whether it is the best so far."""
        lines = self.instruments.ready(drain=True)
        found = self._held_out()
        self._write(lines, found)
        # The share of wrong answers is to accuracy what the loss is to probability: lower is better.
        loss = found["valid_loss"] if "valid_loss" in found else 1.0 - found["valid_accuracy"]
        self.better = self.progress.validated(loss)
        self._event("validation", step=self.progress.step, **found, best=self.better)
        self.why = self._why_stop()
        self.instruments.restart()

    def _held_out(self) -> dict[str, float]:
        """The validation metrics. It runs eagerly; if it needs more memory than training, its own passes shrink."""
        assert self.job.validate is not None
        pass_size = self.objective.pass_size
        while True:
            try:
                return self.job.validate(self.learner.model, pass_size)
            except torch.OutOfMemoryError as error:
                if pass_size == 1 or self.process.world_size > 1:
                    raise TrainingError(
                        f"out of memory in the validation of step {self.progress.step}: lower"
                        " plan.micro_batch"
                    ) from error
                torch.cuda.empty_cache()
                pass_size //= 2
                at = {"step": self.progress.step, "validation_micro_batch": pass_size}
                self._event("validation_out_of_memory", **at)

    def _checkpoint(self) -> None:
        """Save in the background, after the lines so far: no checkpoint holds an update that went wrong."""
        self._write(self.instruments.ready(drain=True))
        if self.checkpoints is None:
            return
        started_s = time.perf_counter()
        self._announce_checkpoint()
        self.tensors["rng.cpu"] = torch.get_rng_state()
        self.progress.elapsed_s = self._elapsed_s()
        self.clock_started_s = time.monotonic()
        before_commit = self.opened.folder.sync if self.opened.folder is not None else None
        self.checkpoints.save(self.progress.step, self.tensors, self._state(), before_commit=before_commit)
        self.saving = {"step": self.progress.step, "stalled_s": round(time.perf_counter() - started_s, 6)}
        if self.better:
            assert self.progress.best_loss is not None
            self.checkpoints.mark_best(self.progress.step, self.progress.best_loss)
            self.better = False
        self.instruments.restart()

    def _state(self) -> dict[str, Any]:
        fits = self.objective.pass_size if self.objective.pass_size < self.plan.micro_batch else None
        state = {**vars(self.progress), "micro_batch_that_fits": fits}
        state |= {"identity": self.job.recipe.identity, "data_fingerprint": self.job.data_fingerprint}
        return state | ({"loss_scale": vars(self.learner.scale)} if self.learner.scale is not None else {})

    def _announce_checkpoint(self) -> None:
        """Record the last checkpoint once it is on the disk: a run can be resumed from what its events say."""
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if self.saving is not None:
            self._event("checkpoint", **self.saving)
            self.saving = None

    # ---- beginning and end ----

    def _open_metrics(self) -> LineWriter | None:
        """The record of the steps, cut back to where the run resumes; on the first process."""
        folder, step = self.opened.folder, self.progress.step
        dropped = folder.cut_metrics(step) if folder is not None else 0
        told = read_lines(folder.events_path) if folder is not None else []
        said = {(e["event"], e.get("step"), e.get("first"), e.get("last")) for e in told}
        for first, last in lost_updates(folder, step) if folder is not None else ():
            if ("updates_not_recorded", None, first, last) not in said:
                self._event("updates_not_recorded", first=first, last=last)
        saved = self.checkpoints.steps() if self.checkpoints is not None else []
        if step in saved and ("checkpoint", step, None, None) not in said:
            self._event("checkpoint", step=step)  # killed between the checkpoint and its announcement
        begun = attempts(told)
        if begun and (before := begun[-1]["world_size"]) != self.process.world_size:
            self._event("resized", step=step, world_size_before=before, world_size=self.process.world_size)
        self._event(
            "resume" if step else "start",
            step=step,
            recipe=self.job.recipe.name,
            data=self.job.data_fingerprint,
            updates=self.train.steps,
            world_size=self.process.world_size,
            hosts=self.process.hosts(),
            micro_batch=self.objective.pass_size,
            metrics_dropped=dropped,
        )
        return LineWriter(folder.metrics_path) if folder is not None else None

    def _time_waits(self) -> None:
        """Time communication waits separately from the phases, where this torch lets us."""
        if time_waits(self.learner.model, self.instruments.mark):
            self.learner.waiting = lambda: waiting(self.instruments.mark)
        else:
            self._event(
                "communication_not_timed",
                why=f"torch {torch.__version__} waits in other places; its time stays in forward and backward",
            )

    def _resume(self) -> None:
        """Resume from the last checkpoint; without one, from that of the run to fork, or the initial weights."""
        step = self.checkpoints.latest() if self.checkpoints is not None else None
        if step is None or self.checkpoints is None:
            if self.opened.fork is not None:
                self._take(load(self.opened.fork, self.tensors))
                self.opened.check_fork(self.progress.step, self.train.steps)
            elif self.job.initial_weights is not None:
                self.job.initial_weights(self.learner.model)
            return
        state = load(folder := self.checkpoints.folder / step_name(step), self.tensors)
        if state["identity"] != self.job.recipe.identity:
            way = f"start from its weights with --fork {self.opened.run} --run NEW"
            raise CheckpointError(f"{folder} is from another recipe or another version of Redline: {way}")
        if state["data_fingerprint"] != self.job.data_fingerprint:
            raise CheckpointError(
                f"the data has changed since {folder} was saved: restore it, or give another --run"
            )
        self._take(state)
        best = self.progress.best_step
        if best in self.checkpoints.steps() and best != self.checkpoints.best():
            assert best is not None
            assert self.progress.best_loss is not None
            self.checkpoints.mark_best(best, self.progress.best_loss)  # killed between checkpoint and mark

    def _take(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint stands. A fork reads other data from the beginning and validates anew."""
        torch.set_rng_state(self.tensors["rng.cpu"])
        self.progress = Progress(**{name: state[name] for name in vars(Progress())})
        if state["data_fingerprint"] != self.job.data_fingerprint:
            self.progress.position = None
        if state["identity"] != self.job.recipe.identity:
            self.progress.forget_validations()
        if self.learner.scale is not None and "loss_scale" in state:
            self.learner.scale = LossScale(**state["loss_scale"])
        fits = state["micro_batch_that_fits"]
        while self.process.world_size == 1 and fits and self.objective.pass_size > fits:
            self.objective.shrink()

    def _why_stop(self) -> str | None:
        if (ended := self.progress.ended(self.train, self.clock_s)) is not None:
            return ended
        return STOPPED if self.process.any(self.stop_requested) else None

    def _validation_due(self) -> bool:
        """Validate at the end of a run and every `eval_every` updates. Skip it when the user interrupts: they want out."""
        every = self.train.eval_every
        at_end = self.why is not None and self.why != STOPPED
        return self.job.validate is not None and (at_end or (every > 0 and self.progress.step % every == 0))

    def _checkpoint_due(self) -> bool:
        every = self.train.checkpoint_every
        return self.why is not None or self.better or (every > 0 and self.progress.step % every == 0)

    def _elapsed_s(self) -> float:
        """Training time of this attempt, and of those before it up to the checkpoint it resumed from."""
        return self.progress.elapsed_s + time.monotonic() - self.clock_started_s

    def _request_stop(self) -> None:
        self.stop_requested = True
