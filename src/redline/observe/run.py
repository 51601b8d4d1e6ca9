"""A user's own PyTorch loop under our instruments: three lines in the loop give a run folder and a diagnosis.

    with redline.watch("runs/mine", model=model) as run:
        for batch in run.batches(loader):      # times the wait for data, counts tokens and padding
            with run.phase("forward"):         # optional: where the time of an update goes
                loss = model(**batch).loss
            ...
            run.step(loss=loss)                # after each update

Nothing here waits for a GPU: moments are CUDA events, the copy of a loss is queued behind its update, and both are
read once the GPU has passed them. Lines are written once a second, except the newest. Of several processes the first
writes, and its numbers stand for all. Left out: resuming (the loop does that), gradient norms, recomputation by hand.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from torch import nn

from redline.diagnose.answer import verdict
from redline.diagnose.finding import Finding
from redline.diagnose.readers.own import read_run
from redline.diagnose.rules import diagnose
from redline.errors import ConfigError, nearest
from redline.machine.nvml import GpuTelemetry, process_rss_bytes
from redline.observe.facts import Described, Told
from redline.observe.generation import Calls, CallTimes
from redline.observe.update import PAUSED, Lines, Number, SyncWatch, Update, taken
from redline.record.files import write_atomic
from redline.record.observe import Observer, Observers
from redline.record.run import LineWriter, RunFolder, read_lines
from redline.record.units import format_duration, format_rate
from redline.train.clock import Clock

Phase = Literal["generate", "copy", "forward", "backward", "optimizer"]
Pause = Literal["validation", "checkpoint"]
PHASES: tuple[Phase, ...] = ("generate", "copy", "forward", "backward", "optimizer")
WRITE_EVERY_S, MOST_HELD = 1.0, 64
"""Lines are written together: the first runs on cold caches and costs ten times as much as the others."""
SYNCS_AFTER = 3
"""Updates before one is searched for waits: by then caches are warm and compilation is done."""
GENERATING = "phase('generate')"
MEASURED = {
    "step", "step_s", "tokens", "tokens_per_s", "mfu", "ceiling_share", "elapsed_s", "issue_s", "data_wait_s",
    "memory_bytes", "gpu_util", "power_w", "sm_clock_mhz", "temperature_c", "memory_used_bytes",
    *(f"{phase}_s" for phase in PHASES),
}  # fmt: skip
"""Names that we measure: `log` does not take them."""
SHOWN = 3
"""Findings printed at the end; the report has the rest."""
Batch = TypeVar("Batch")


class WatchedRun:
    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        tokens_per_step: float | None = None,
        start_step: int = 0,
        quiet: bool = False,
        observers: Sequence[Observer] = (),
        told: Told | None = None,
    ) -> None:
        """Instruments for the loop inside the `with` block. A folder that already holds a run is left alone: this one
        goes to FOLDER-2, and so on. `tokens_per_step` (of this process) is needed only if batches do not show it;
        `start_step` is the number of updates a resumed loop has done, which continues the last of these folders;
        `quiet` prints nothing; `observers` get every line and event (record/observe.py); `told` is what a trainer
        knows about its execution."""
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model must be a torch.nn.Module, got {type(model).__name__}: give the trained one"
            )
        self.path, self.quiet = Path(folder), quiet
        self._told, self._observers = told or {}, Observers(observers)
        self._model, self._device = model, next((p.device for p in model.parameters()), torch.device("cpu"))
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        world_size = torch.distributed.get_world_size() if joined else 1
        self._is_first = not joined or torch.distributed.get_rank() == 0
        on_gpu = self._device.type == "cuda"
        self._telemetry = GpuTelemetry(self._device.index or 0) if on_gpu else None
        self.clock, self._described = Clock(self._device), Described(model, self._device)
        self._folder, self._first_step, self._step = RunFolder(self.path), start_step, start_step
        self.watching = False
        """Inside the block, in every process; only the first has a `_writer`."""
        self.update = Update(0.0, 0.0)
        """The current one."""
        self._flying: deque[Update] = deque()
        self._lines = Lines(self.clock, world_size, tokens_per_step)
        self._writer: LineWriter | None = None
        self._waits: SyncWatch | None = None
        self._call_times, self._generations = CallTimes(self.clock), 0
        """Times of the model's calls, and the number of updates that generated text."""
        self._inside: str | None = None
        """The open phase `generate` or pause, in the user's words: no update may end in it."""

    # ---- the block ----

    def __enter__(self) -> Self:
        if self._is_first:
            self._open()
        self._lines.started_at = self._written_at = time.perf_counter()
        self.update, self.watching = self._next(), True
        return self

    def _next(self) -> Update:
        return Update(self.clock.now(), time.perf_counter())

    def _open(self) -> None:
        asked, step = self.path, self._first_step
        self._folder = RunFolder.last(asked) if step else RunFolder.free(asked)
        self.path = self._folder.path
        if self.path != asked and not self.quiet:
            sys.stderr.write(f"redline: {asked} already holds a run; this one is recorded in {self.path}\n")
        dropped = self._folder.cut_metrics(step)
        for kept in read_lines(self._folder.metrics_path)[-1:]:
            self._lines.tokens, self._lines.elapsed_s = kept.get("tokens", 0.0), kept.get("elapsed_s", 0.0)
        self._writer = LineWriter(self._folder.metrics_path)
        facts = {"loop": "watched", "world_size": self._lines.world_size, "metrics_dropped": dropped}
        self.event("resume" if step else "start", **facts)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: object) -> None:
        self.watching = False
        if self._writer is None:
            return
        try:
            self._look_for_waits(last=True)
            self._write(leave=0)
        except Exception as error:
            if kind is None:
                kind, value = type(error), error
                raise
            # else report the loop's own error: after a GPU failure, reading its events fails too
        finally:
            self._end(kind, value)
        if kind is None and not self.quiet:
            sys.stderr.write(f"\n{self.summary()}")  # a progress bar may have left the line unfinished

    def _end(self, kind: type[BaseException] | None, value: BaseException | None) -> None:
        """Record how it ended, and release the folder whatever happens."""
        assert self._writer is not None
        elapsed_s = round(self._lines.elapsed_s + time.perf_counter() - self._lines.started_at, 3)
        try:
            self._writer.close()
            if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit | GeneratorExit):
                why = "finished" if kind is None else f"stopped by {kind.__name__}"
                self.event("end", why=why, elapsed_s=elapsed_s)
            else:
                self.event("failed", error=f"{kind.__name__}: {value}", elapsed_s=elapsed_s)
            self._observers.close()
        finally:
            self._writer = None
            self._folder.__exit__(None, None, None)

    # ---- in the loop ----

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches. The wait for each is data wait; on a GPU, only while the GPU was idle."""
        source: Iterator[Batch] | None = None
        while True:
            waiting_at = time.perf_counter()
            with self._span("data_wait_s"):
                source = iter(loader) if source is None else source  # starting workers is part of the wait
                try:
                    batch = next(source)
                except StopIteration:
                    return
            self.update.waited_s += time.perf_counter() - waiting_at
            self.update.seen.add(batch)
            yield batch

    @contextmanager
    def _span(self, metric: str) -> Iterator[None]:
        """Times a part of the current update, under a metric's name."""
        begin = self.clock.now()
        try:
            yield
        finally:
            self.update.spans.append((metric, begin, self.clock.now()))

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A part of the update, as a context manager; parts of one name add up."""
        if name not in PHASES:
            raise ConfigError(f"a phase is one of {', '.join(PHASES)}, got {name!r}{nearest(name, PHASES)}")
        return self._generate() if name == "generate" else self._span(f"{name}_s")

    @contextmanager
    def _generate(self) -> Iterator[None]:
        """Generation must read each token to know when to stop: its waits for the GPU are not the loop's. The model's
        calls are noted in generating updates 2 to 8, then 16, 32 and so on, because texts may grow."""
        number, update = self._generations + 1, self.update
        noted = 2 <= number <= 8 or (number > 8 and number.bit_count() == 1)
        if update.calls is None and self._writer is not None and noted:
            update.calls = Calls(self._model, self.clock)
        with self._within(GENERATING), self._span("generate_s"), update.calls or nullcontext():
            yield

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        """A block in which no update may end and waits for the GPU are ignored."""
        if self._inside == GENERATING:
            self._refuse(what)
        outer, self._inside = self._inside, what
        waits, self._waits = self._waits, None
        if waits is not None:
            waits.look(away=True)
        try:
            yield
        finally:
            self._inside, self._waits = outer, waits
            if waits is not None:
                waits.look(away=False)

    def _refuse(self, what: str) -> None:
        raise ConfigError(f"{what} inside {self._inside}: end the block of {self._inside} first")

    def step(
        self, *, loss: Number | None = None, tokens: Number | None = None, padding_share: Number | None = None
    ) -> None:
        """An update is done (on a GPU: issued). Tensors are not read back here. `tokens` and `padding_share` of this
        process are needed only if `batches` cannot see them in `input_ids` and `attention_mask`."""
        if not self.watching:
            raise ConfigError("step() outside the block: call it inside `with redline.watch(...) as run:`")
        if self._inside is not None:
            self._refuse("step()")
        update, seen = self.update, self.update.seen
        given = {"loss": loss, "padding_share": padding_share}
        told = {name: update.numbers.get(name) if value is None else value for name, value in given.items()}
        update.numbers |= told | {"tokens": tokens, "counted": seen.tokens if seen.positions else None}
        update.late = taken(update.numbers)  # before the end: once that has passed, the copies can be read
        update.end, update.ended_at = self.clock.now(), time.perf_counter()
        self._step = update.step = self._step + 1
        self._generations += any(metric == "generate_s" for metric, _, _ in update.spans)
        self.update = Update(update.end, update.ended_at)
        if self._writer is None:
            return
        self._flying.append(update)
        if len(self._flying) > MOST_HELD or update.ended_at - self._written_at > WRITE_EVERY_S:
            self._write(leave=1)
        if not self._lines.plan:
            lines = self._lines
            lines.plan = self._described.plan(seen, lines.tokens_per_step, lines.world_size, self._told)
            write_atomic(self._folder.plan_path, json.dumps(lines.plan, indent=2) + "\n")
            self.update = self._next()  # writing the plan is not part of the second update
        if self._device.type == "cuda":
            self._look_for_waits()

    def log(self, numbers: Mapping[str, Number]) -> None:
        """Numbers of your own for the line of the next `step` and the report. Tensors are not read back here."""
        for name in numbers:
            if not isinstance(name, str) or name in MEASURED:
                raise ConfigError(
                    f"log() takes names that Redline does not measure, got {name!r}: choose another"
                )
        self.update.numbers |= numbers

    def fetched(self) -> None:
        """The update has its batches. If `batches` did not yield them, all time since the last update was the wait."""
        if not self.update.seen.batches:
            self.update.spans.append(("data_wait_s", self.update.begin, self.clock.now()))
            self.update.waited_s += time.perf_counter() - self.update.began_at

    def _look_for_waits(self, *, last: bool = False) -> None:
        """Start or stop searching the one update."""
        if self._waits is not None:
            found, self._waits = self._waits.stop(), None
            if found:
                self.event("waits_for_gpu", times=len(found), where=", ".join(dict.fromkeys(found)))
        elif self._step == self._first_step + SYNCS_AFTER and not last:
            self._waits = SyncWatch()

    @contextmanager
    def pause(self, kind: Pause) -> Iterator[None]:
        """Something between two updates, or in the middle of one, that belongs to neither."""
        with self._within(f"pause({kind!r})"):
            outer, self.update = self.update, self._next()
            pause = self.update
            try:
                yield
            finally:
                stalled_s = time.perf_counter() - pause.began_at
                self.update = outer
                outer.spans.append((PAUSED, pause.begin, self.clock.now()))
                outer.began_at += stalled_s
                self.event(kind, stalled_s=round(stalled_s, 6))

    def paused(self, kind: Pause, stalled_s: float, **found: float) -> None:
        """A pause after an update that has just ended; what it found goes into that update's line."""
        self.add(**found)
        self.event(kind, stalled_s=round(stalled_s, 6), **found)
        if self._waits is not None:  # waits in the pause do not count
            self._waits.stop()
            self._waits = SyncWatch()
        self.restart()

    def restart(self) -> None:
        """The next update begins now: nothing since the last one counts, waits included."""
        if self._inside is not None:
            self._refuse("restart()")
        before, self.update = self.update, self._next()
        self.update.seen, self.update.numbers = before.seen, before.numbers

    def add(self, **found: float) -> None:
        """Metrics of the last update that are known only after its `step`."""
        if self._flying:
            self._flying[-1].added |= found

    def event(self, kind: str, **facts: Any) -> None:
        if self._writer is not None:
            facts = {"step": self._step, **facts}
            self._folder.event(kind, **facts)
            self._observers.event(kind, facts)

    def _write(self, *, leave: int) -> None:
        """Write the lines of updates that the device has finished, except the newest `leave`."""
        assert self._writer is not None
        self._written_at = time.perf_counter()
        gauges = self._gauges()
        while len(self._flying) > leave and (leave == 0 or self.clock.passed(self._flying[0].end)):
            update = self._flying.popleft()
            line = self._lines.line(update) | gauges
            if update.calls is not None and update.calls.made:
                made = update.calls.facts(line["generate_s"], self._call_times)
                self.event("generation", **{"step": update.step, **made})
            self._writer.append(line)
            self._observers.metrics(line)

    def _gauges(self) -> dict[str, float]:
        """Memory and the GPU's counters; reading them takes a fraction of a millisecond."""
        if self._telemetry is None:
            return {"memory_bytes": process_rss_bytes()}
        return {"memory_bytes": torch.cuda.max_memory_allocated(self._device), **self._telemetry.read()}

    # ---- what came of it ----

    def findings(self) -> list[Finding]:
        """The diagnosis so far, the most valuable finding first; after the block, of the whole run."""
        if self._writer is not None:
            self._write(leave=1)
        return diagnose(read_run(self.path)) if self._is_first and self._folder.metrics_path.exists() else []

    def summary(self) -> str:
        """The findings in a few lines."""
        observed = read_run(self.path)
        if not observed.steps:
            return f"redline: no update is recorded in {self.path}: call run.step() after each update\n"
        each = f", {format_duration(step_s)} per update" if (step_s := observed.median("step_s")) else ""
        speed = f", {format_rate(observed.tokens_per_s, 'tokens')}" if observed.tokens_per_s else ""
        lines = [f"redline: {len(observed.steps)} updates{each}{speed} (medians)"]
        found = diagnose(observed)
        for place, finding in enumerate(found[:SHOWN], start=1):
            gain = finding.gain
            told = f" ({gain.low:.2f} to {gain.high:.2f} times as fast without it, predicted)" if gain else ""
            lines += [f"  {place}. {finding.title}{told}", f"     fix: {finding.fix}"]
        if len(lines) == 1:
            lines.append(f"  {verdict(observed, found).text}")
        return "\n".join([*lines, f"  more: redline report {self.path}", ""])


watch = WatchedRun
