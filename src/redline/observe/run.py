"""A user's own PyTorch loop under our instruments: three lines in the loop, a run folder out, and the
diagnosis at the end.

    with redline.watch("runs/mine", model=model) as run:
        for batch in run.batches(loader):                  # times the wait for data, counts tokens and
                                                           padding
            with run.phase("forward"):                     # optional: where the time of an update goes
                loss = model(**batch).loss
            ...
            run.step(loss=loss)                            # after each update

Nothing here waits for a GPU: moments are CUDA events, a loss is copied behind the update that made it, and
both are read when the GPU has passed them. Lines are written once a second, all but the newest. Of several
processes the first writes, and its own numbers stand for all. Left out: resuming (that is the loop's),
gradient norms, recomputation by hand.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from redline.diagnose.finding import Finding
from redline.diagnose.own import read_run
from redline.diagnose.rules import diagnose
from redline.diagnose.summary import nothing_found
from redline.errors import ConfigError, nearest
from redline.machine.telemetry import GpuTelemetry, process_rss_bytes
from redline.observe.batch import Number, Seen
from redline.observe.clock import Clock, Moment
from redline.observe.facts import Described, Told
from redline.observe.generation import Calls, CallTimes
from redline.observe.sync import SyncWatch
from redline.record.files import write_atomic
from redline.record.metrics import METRICS
from redline.record.observe import Observer, Observers
from redline.record.run import LineWriter, RunFolder, read_lines
from redline.record.units import format_duration, format_rate

Phase = Literal["generate", "copy", "forward", "backward", "optimizer"]
Pause = Literal["validation", "checkpoint"]
PHASES: tuple[Phase, ...] = ("generate", "copy", "forward", "backward", "optimizer")
WRITE_EVERY_S, MOST_HELD = 1.0, 64
"""Lines are written together, because the first of them finds every cache cold and costs ten times the
others."""
SYNCS_AFTER = 3
"""Updates behind the first before one is searched for waits: caches are full and compiling is done."""
GENERATING = "phase('generate')"
PAUSED = "paused_s"
"""Spans of this name are taken off the update; no line has it."""
MEASURED = (
    METRICS.keys()
    - {"loss", "lr", "grad_norm", "loss_scale", "skipped", "padding_share"}
    - {name for name in METRICS if name.startswith("valid_")}
)
"""Names whose values are this module's own."""
SHOWN = 3
"""Findings printed at the end; the rest stands in the report."""
Batch = TypeVar("Batch")


@dataclass(slots=True)
class _Update:
    """An update that was issued, and may still be running."""

    step: int
    begin: Moment
    end: Moment
    issue_s: float
    ended_at: float
    spans: list[tuple[str, Moment, Moment]]
    seen: Seen
    numbers: dict[str, Any]
    late: tuple[list[str], Tensor] | None
    """Numbers on their way from the GPU, with their names."""
    calls: Calls | None
    """What was generated, where it was looked at."""
    added: dict[str, float] = field(default_factory=dict)


class _Span:
    """Two moments around a piece of the update, under a metric's name."""

    def __init__(self, run: "WatchedRun", metric: str) -> None:
        self._run, self._metric = run, metric

    def __enter__(self) -> None:
        self._begin = self._run.clock.now()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.spans.append((self._metric, self._begin, self._run.clock.now()))


def watch(
    folder: str | Path,
    *,
    model: nn.Module,
    tokens_per_step: float | None = None,
    start_step: int = 0,
    quiet: bool = False,
    observers: Sequence[Observer] = (),
) -> "WatchedRun":
    """Instruments for the loop inside the `with` block. A folder that holds a run already is left alone: this one
    goes to FOLDER-2, and so on. `tokens_per_step` (of this process) is needed only where batches do not show it;
    `start_step` is the number of updates that a resumed loop has behind it, and goes on in the last of these
    folders; `quiet` prints nothing; `observers` are told every line and event (record/observe.py)."""
    return WatchedRun(
        Path(folder),
        model,
        tokens_per_step=tokens_per_step,
        start_step=start_step,
        quiet=quiet,
        observers=observers,
    )


class WatchedRun:
    def __init__(
        self,
        path: Path,
        model: nn.Module,
        *,
        tokens_per_step: float | None,
        start_step: int,
        quiet: bool,
        told: Told | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model must be one torch.nn.Module, got {type(model).__name__}: give the one that is trained"
            )
        self.path, self.quiet, self._tokens_per_step, self._told = path, quiet, tokens_per_step, told or {}
        self._observers = Observers(observers)
        self._logged: dict[str, Any] = {}
        """What the loop tells of the update in hand."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank, self._world_size = (
            (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
        )
        self._model, self._device, self.clock, self._described = (
            model,
            device,
            Clock(device),
            Described(model, device),
        )
        self._telemetry = GpuTelemetry(device.index or 0) if device.type == "cuda" else None
        self._folder, self._first_step, self._step = RunFolder(path, option=None), start_step, start_step
        self.watching = False
        """Inside the block, in every process; `_lines` is there in the first alone."""
        self._flying: deque[_Update] = deque()
        self.spans: list[tuple[str, Moment, Moment]] = []
        self._seen = Seen()
        self._waited_s = 0.0
        self._plan: dict[str, Any] = {}
        self._gauges: dict[str, float] = {}
        self._tokens = self._elapsed_s = 0.0
        self._lines: LineWriter | None = None
        self._waits: SyncWatch | None = None
        self._calls: Calls | None = None
        self._call_times = CallTimes(self.clock)
        self._generations = 0
        """Updates in which text was generated."""
        self._inside: str | None = None
        """The phase `generate` or the pause that is open, in the user's words: no update may end in it."""

    # ---- the block ----

    def __enter__(self) -> Self:
        if self._rank == 0:
            self._open()
        self._started_at = self._began_at = self._written_at = time.perf_counter()
        self._begin, self.watching = self.clock.now(), True
        return self

    def _open(self) -> None:
        asked, step = self.path, self._first_step
        self._folder = RunFolder.last(asked) if step else RunFolder.free(asked)
        self.path = self._folder.path
        if self.path != asked and not self.quiet:
            sys.stderr.write(f"redline: {asked} holds a run already; this one is recorded in {self.path}\n")
        before = read_lines(self._folder.metrics_path)
        dropped = self._folder.cut_metrics(step)
        if kept := before[: len(before) - dropped]:
            self._tokens, self._elapsed_s = kept[-1].get("tokens", 0.0), kept[-1].get("elapsed_s", 0.0)
        self._lines = LineWriter(self._folder.metrics_path)
        facts = {"loop": "watched", "world_size": self._world_size, "metrics_dropped": dropped}
        self.event("resume" if step else "start", **facts)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watching = False
        if self._lines is None:
            return
        try:
            self._look_for_waits(last=True)
            self._write(leave=0)
        except Exception as error:
            if kind is None:
                kind, value = type(error), error
                raise
            # else the loop's own error is the one to tell: a GPU that has failed fails the reading of its
            # events too
        finally:
            self._end(kind, value)
        if kind is None and not self.quiet:
            sys.stderr.write(f"\n{self.summary()}")  # a progress bar may have left the line half full

    def _end(self, kind: type[BaseException] | None, value: BaseException | None) -> None:
        """Record how it ended, and let go of the folder whatever happens."""
        assert self._lines is not None
        elapsed_s = round(self._elapsed_s + time.perf_counter() - self._started_at, 3)
        try:
            self._lines.close()
            if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit | GeneratorExit):
                why = "finished" if kind is None else f"stopped by {kind.__name__}"
                self.event("end", why=why, elapsed_s=elapsed_s)
            else:
                self.event("failed", error=f"{kind.__name__}: {value}", elapsed_s=elapsed_s)
            self._observers.close()
        finally:
            self._lines = None
            self._folder.__exit__(None, None, None)

    # ---- in the loop ----

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches. The wait for each counts as data wait; on a GPU only what the GPU stood idle
        for."""
        source: Iterator[Batch] | None = None
        while True:
            waiting_at = time.perf_counter()
            with _Span(self, "data_wait_s"):
                source = iter(loader) if source is None else source  # starting workers is part of the wait
                try:
                    batch = next(source)
                except StopIteration:
                    return
            self._waited_s += time.perf_counter() - waiting_at
            self._seen.add(batch)
            yield batch

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A part of the update, as a context manager; several of one name in an update add up."""
        if name not in PHASES:
            raise ConfigError(f"a phase is one of {', '.join(PHASES)}, got {name!r}{nearest(name, PHASES)}")
        return self._generate() if name == "generate" else _Span(self, f"{name}_s")

    @contextmanager
    def _generate(self) -> Iterator[None]:
        """Whoever generates must look at each token to know when to stop: these waits for the GPU are not the
        loop's. The model's calls are noted in updates 2 to 8 of those that generate, then in 16, 32 and so
        on: texts may grow."""
        number = self._generations + 1
        if (
            self._calls is None
            and self._lines is not None
            and (2 <= number <= 8 or (number > 8 and number.bit_count() == 1))
        ):
            self._calls = Calls(self._model, self.clock)
        with self._within(GENERATING), _Span(self, "generate_s"), self._calls or nullcontext():
            yield

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        """Inside it no update ends, and waits for the GPU are not looked for."""
        if self._inside == GENERATING:
            self._refuse(what)
        outer, self._inside = self._inside, what
        waits, self._waits = self._waits, None
        if waits is not None:
            waits.look_away()
        try:
            yield
        finally:
            self._inside, self._waits = outer, waits
            if waits is not None:
                waits.look_again()

    def _refuse(self, what: str) -> None:
        raise ConfigError(f"{what} inside {self._inside}: end the block of {self._inside} first")

    def step(
        self, *, loss: Number | None = None, tokens: Number | None = None, padding_share: Number | None = None
    ) -> None:
        """An update is done (on a GPU: issued). Tensors are not read back here. `tokens` and `padding_share`
        of this process are needed only where `batches` cannot see them in an `input_ids` and its
        `attention_mask`."""
        if not self.watching:
            raise ConfigError(
                "step() outside the block: nothing is recorded before or after `with redline.watch(...) as"
                " run:`"
            )
        if self._inside is not None:
            self._refuse("step()")
        seen = self._seen
        numbers = self._logged | {
            "loss": self._logged.get("loss") if loss is None else loss,
            "tokens": tokens,
            "padding_share": padding_share,
            "counted": seen.tokens if seen.positions else None,
        }
        late = _taken(numbers)  # before `end`: whoever has seen that pass may read the copies
        end, ended_at = self.clock.now(), time.perf_counter()
        self._step += 1
        if self._lines is not None:
            issue_s = ended_at - self._began_at - self._waited_s
            self._flying.append(
                _Update(
                    self._step,
                    self._begin,
                    end,
                    issue_s,
                    ended_at,
                    self.spans,
                    seen,
                    numbers,
                    late,
                    self._calls,
                )
            )
            if len(self._flying) > MOST_HELD or ended_at - self._written_at > WRITE_EVERY_S:
                self._write(leave=1)
        self._generations += any(metric == "generate_s" for metric, _, _ in self.spans)
        self.spans, self._calls, self._seen, self._waited_s, self._logged = [], None, Seen(), 0.0, {}
        self._begin, self._began_at = end, ended_at
        if not self._plan and self._lines is not None:
            self._plan = self._described.plan(seen, self._tokens_per_step, self._world_size, self._told)
            write_atomic(self._folder.plan_path, json.dumps(self._plan, indent=2) + "\n")
            # writing it is no part of the second update
            self._begin, self._began_at = self.clock.now(), time.perf_counter()
        if self._device.type == "cuda" and self._lines is not None:
            self._look_for_waits()

    def log(self, numbers: Mapping[str, Number]) -> None:
        """Any numbers of the update in hand, under names of your own; they stand in the line that the next `step`
        writes, and in the report. Tensors are not read back here."""
        for name in numbers:
            if not isinstance(name, str) or name in MEASURED:
                raise ConfigError(
                    f"log() takes names that Redline does not measure, got {name!r}: choose another name"
                )
        self._logged |= numbers

    def fetched(self) -> None:
        """The update has its batches. If `batches` did not give them, all since the last update or pause was
        the wait for them."""
        if not self._seen.batches:
            self.spans.append(("data_wait_s", self._begin, self.clock.now()))
            self._waited_s += time.perf_counter() - self._began_at

    def _look_for_waits(self, *, last: bool = False) -> None:
        """Begin or end the one update that is searched."""
        if self._waits is not None:
            found, self._waits = self._waits.stop(), None
            if found:
                self.event("waits_for_gpu", times=len(found), where=", ".join(dict.fromkeys(found)))
        elif self._step == self._first_step + SYNCS_AFTER and not last:
            self._waits = SyncWatch()

    @contextmanager
    def pause(self, kind: Pause) -> Iterator[None]:
        """Something between two updates, or in the middle of one, that is part of none."""
        with self._within(f"pause({kind!r})"):
            spans, calls, seen, waited_s = self.spans, self._calls, self._seen, self._waited_s
            self.spans, self._calls, self._seen, self._waited_s = [], None, Seen(), 0.0
            begin, began_at = self.clock.now(), time.perf_counter()
            try:
                yield
            finally:
                stalled_s = time.perf_counter() - began_at
                self.spans, self._calls, self._seen, self._waited_s = (
                    [*spans, (PAUSED, begin, self.clock.now())],
                    calls,
                    seen,
                    waited_s,
                )
                self._began_at += stalled_s
                self.event(kind, stalled_s=round(stalled_s, 6))

    def paused(self, kind: Pause, stalled_s: float, **found: float) -> None:
        """A pause behind an update that has just ended. What it found belongs to the line of that update."""
        self.add(**found)
        self.event(kind, stalled_s=round(stalled_s, 6), **found)
        if self._waits is not None:  # those in the pause are no part of an update either
            self._waits.stop()
            self._waits = SyncWatch()
        self.restart()

    def restart(self) -> None:
        """The next update begins now: what was done since the last is part of none, the wait for batches that
        it has already neither."""
        if self._inside is not None:
            self._refuse("restart()")
        self.spans, self._calls, self._waited_s = [], None, 0.0
        self._begin, self._began_at = self.clock.now(), time.perf_counter()

    def add(self, **found: float) -> None:
        """Metrics of the last update that came to be known after its `step`."""
        if self._flying:
            self._flying[-1].added |= found

    def event(self, kind: str, **facts: Any) -> None:
        if self._lines is not None:
            facts = {"step": self._step, **facts}
            self._folder.event(kind, **facts)
            self._observers.event(kind, facts)

    # ---- what came of it ----

    def findings(self) -> list[Finding]:
        """The diagnosis so far, most worth first; after the block, of the whole run."""
        if self._lines is not None:
            self._write(leave=1)
        return diagnose(read_run(self.path)) if self._rank == 0 and self._folder.metrics_path.exists() else []

    def summary(self) -> str:
        """The findings in a few lines."""
        observed = read_run(self.path)
        if not observed.steps:
            return f"redline: no update is recorded in {self.path}: call run.step() after each update\n"
        each = f", {format_duration(step_s)} an update" if (step_s := observed.median("step_s")) else ""
        speed = f", {format_rate(observed.tokens_per_s, 'tokens')}" if observed.tokens_per_s else ""
        lines = [f"redline: {len(observed.steps)} updates{each}{speed} (medians)"]
        for place, finding in enumerate(diagnose(observed)[:SHOWN], start=1):
            gain = (
                f" ({finding.gain.low:.2f} to {finding.gain.high:.2f} times as fast without it, predicted)"
                if finding.gain
                else ""
            )
            lines += [f"  {place}. {finding.title}{gain}", f"     fix: {finding.fix}"]
        if len(lines) == 1:
            lines.append(f"  {nothing_found(observed)}")
        return "\n".join([*lines, f"  more: redline report {self.path}", ""])

    def _write(self, *, leave: int) -> None:
        """Write the lines of updates that the device has finished, all but the newest `leave`."""
        assert self._lines is not None
        self._written_at = time.perf_counter()
        self._gauges = self._read_gauges()
        while len(self._flying) > leave and (leave == 0 or self.clock.passed(self._flying[0].end)):
            line = self._line(self._flying.popleft())
            self._lines.append(line)
            self._observers.metrics(line)

    def _line(self, update: _Update) -> dict[str, Any]:
        # first: it waits for the copies too
        whole_s, numbers = self.clock.seconds(update.begin, update.end), update.numbers
        if update.late is not None:
            numbers |= zip(update.late[0], update.late[1].tolist(), strict=True)
        found: dict[str, Any] = {
            "issue_s": update.issue_s,
            "elapsed_s": self._elapsed_s + update.ended_at - self._started_at,
        }
        for metric, begin, end in update.spans:
            found[metric] = found.get(metric, 0.0) + self.clock.seconds(begin, end)
        step_s = whole_s - found.pop(PAUSED, 0.0)
        if update.calls is not None and update.calls.made:
            made = update.calls.facts(found["generate_s"], self._call_times)
            self.event("generation", **{"step": update.step, **made})
        counted, tokens, padding_share = (
            numbers.pop("counted"),
            numbers.pop("tokens"),
            numbers.pop("padding_share"),
        )
        if padding_share is None and update.seen.masked:
            padding_share = 1 - counted / update.seen.positions
        if tokens is None:
            tokens = self._tokens_per_step if counted is None else counted
        if tokens is not None:
            tokens *= self._world_size
            self._tokens += tokens
            found |= {
                "tokens": round(self._tokens),
                "tokens_per_s": tokens / step_s,
                **self._shares(tokens / step_s),
            }
        for name, value in (numbers | {"padding_share": padding_share} | update.added).items():
            if value is not None:
                found[name] = value if math.isfinite(value) else None  # JSON has no word for nan
        return {"step": update.step, "step_s": step_s, **found, **self._gauges}

    def _shares(self, tokens_per_s: float) -> dict[str, float]:
        """Of the datasheet's peak and of the measured one, where they are known."""
        hardware, precision = self._plan["hardware"], self._plan["precision"]["value"]
        tflops = self._plan["flops_per_token"]["value"] * tokens_per_s / self._world_size / 1e12
        rates = {
            "mfu": hardware["peak_tflops"].get(precision),
            "ceiling_share": hardware["measured_tflops"].get(precision),
        }
        return {name: tflops / rate for name, rate in rates.items() if rate}

    def _read_gauges(self) -> dict[str, float]:
        """Memory and the GPU's counters, which take up to a part of a millisecond to answer."""
        if self._telemetry is None:
            return {"memory_bytes": process_rss_bytes()}
        return {"memory_bytes": torch.cuda.max_memory_allocated(self._device), **self._telemetry.read()}


def _taken(numbers: dict[str, Any]) -> tuple[list[str], Tensor] | None:
    """Put the plain value in the place of every number and every tensor on the CPU, which the loop may
    change; copy what is on a GPU behind the update, without waiting for it, and return that with its
    names."""
    late: dict[str, Tensor] = {}
    for name, value in numbers.items():
        if isinstance(value, Tensor) and not value.is_cpu:
            late[name] = _single(name, value).detach().reshape(()).double()
        elif value is not None:
            numbers[name] = _plain(name, value)
    if not late:
        return None
    target = torch.empty(len(late), dtype=torch.float64, pin_memory=True)
    return list(late), target.copy_(torch.stack(list(late.values())), non_blocking=True)


def _single(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ConfigError(
            f"{name} must be one number an update, got a tensor of shape {tuple(value.shape)}: give its mean"
            " or sum"
        )
    return value


def _plain(name: str, value: Any) -> float:
    """A number of Python, numpy or torch as one that JSON has a word for."""
    if isinstance(value, Tensor):
        return float(_single(name, value).item())
    try:
        if isinstance(value, str | bytes):  # "3" would pass
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} must be one number an update, got {value!r} ({type(value).__name__})"
        ) from error
