"""Exporters: every line of metrics.jsonl also to TensorBoard, Weights & Biases or MLflow.

A line goes into a queue and a daemon thread sends it, so an exporter neither stops nor slows a run: if its thread
fails, `warn` says so once and the export ends. metrics.jsonl stays the record; events are not exported. To add a
target: a class with open, write and close, and a line in `_SINKS`.
"""

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redline.errors import ConfigError, Say, nearest, need
from redline.record.files import write_atomic

QUEUE_LINES = 10_000
"""Lines that may wait for a slow target (about 10 MB)."""
CLOSE_LIMIT_S = 10.0


@dataclass(frozen=True)
class ExportedRun:
    """What a sink may know about the run."""

    folder: Path
    name: str
    config: dict[str, Any]
    warn: Say
    resume_step: int = 0
    """The last step that stays: the checkpoint's, or 0 for a new run."""


def check_names(names: Sequence[str]) -> None:
    """Refuse an unknown exporter before a corpus is read."""
    for name in names:
        if name not in _SINKS:
            known = ", ".join(_SINKS)
            raise ConfigError(f"an exporter is one of {known}; got {name!r}{nearest(name, _SINKS)}")


def make_exporters(names: Sequence[str], run: ExportedRun) -> list["Exporter"]:
    check_names(names)
    return [Exporter(_SINKS[name](run), run.warn) for name in names]


def exported_name(name: str) -> str:
    """`loss` -> `train/loss`, `valid_loss` -> `valid/loss`; verl's names (`perf/throughput`) stay as they are."""
    if "/" in name:
        return name
    return f"valid/{name.removeprefix('valid_')}" if name.startswith("valid_") else f"train/{name}"


def exported_values(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics line under their exported names; `step` is the axis."""
    return {exported_name(n): float(v) for n, v in line.items() if n != "step" and v is not None}


class Sink(Protocol):
    """Where lines go. The methods run in the exporter's thread and may raise; the constructor only imports."""

    title: str

    def open(self) -> None: ...

    def write(self, at: float, line: dict[str, Any]) -> None:
        """One metrics line, and its time in Unix seconds."""

    def close(self) -> None: ...


class Exporter:
    """An observer that hands every line to a sink in its own thread; the line must not change any more."""

    def __init__(self, sink: Sink, warn: Say) -> None:
        self._sink, self._warn, self._said = sink, warn, False
        self._queue: queue.Queue[tuple[float, dict[str, Any]] | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._work, name=f"redline-export-{sink.title}", daemon=True)
        self._thread.start()

    def metrics(self, line: dict[str, Any]) -> None:
        if self._thread.is_alive() and "step" in line:  # the progress of sampling has no axis
            try:
                self._queue.put_nowait((time.time(), line))
            except queue.Full:
                self._say(f"is slower than the run: {QUEUE_LINES:,} lines are waiting, so some are left out")

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        """Events are not exported."""

    def close(self) -> None:
        """Write what is queued, for at most CLOSE_LIMIT_S."""
        end_s = time.monotonic() + CLOSE_LIMIT_S
        while self._thread.is_alive() and time.monotonic() < end_s:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=0.1)
                self._thread.join(end_s - time.monotonic())
        if self._thread.is_alive():
            self._say(f"did not finish within {CLOSE_LIMIT_S:.0f} s of the end")

    def _say(self, what: str) -> None:
        """Report only the first problem: the rest follows from it."""
        if not self._said:
            self._said = True
            self._warn(f"{self._sink.title} {what}; metrics.jsonl holds every line")

    def _work(self) -> None:
        try:
            self._sink.open()
            while (item := self._queue.get()) is not None:
                self._sink.write(*item)
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - whatever a library raises here, the run must continue
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._say(f"export stopped ({reason}): the run continues")


class TensorBoard:
    """Event files under <run>/tensorboard, framed by tensorboard's RecordWriter: its EventFileWriter imports
    tensorflow if there is one, and on a full disk prints a traceback from a second thread."""

    title = "TensorBoard"

    def __init__(self, run: ExportedRun) -> None:
        self._folder = run.folder / "tensorboard"
        self._resume_step = run.resume_step
        places = ("compat.proto.event_pb2", "compat.proto.summary_pb2", "summary.writer.record_writer")
        self._event, summary, writer = (need(f"tensorboard.{p}", extra="tensorboard") for p in places)
        self._summary, self._record_writer = summary.Summary, writer.RecordWriter

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, so a resumed run must sort after the one before.
        path = self._folder / f"events.out.tfevents.{time.time_ns():020d}"
        self._file = self._record_writer(open(path, "xb"))  # noqa: SIM115 - lives as long as the run
        self._write(wall_time=time.time(), file_version="brain.Event:2")
        # START makes TensorBoard discard every point from this step on that an earlier attempt left.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(wall_time=time.time(), step=self._resume_step + 1, session_log=start)

    def write(self, at: float, line: dict[str, Any]) -> None:
        found = exported_values(line).items()
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in found]
        self._write(wall_time=at, step=line["step"], summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        try:
            self._file.write(self._event.Event(**fields).SerializeToString())
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # otherwise the garbage collector flushes again and complains
                self._file.close()
            raise


class WandB:
    """A Weights & Biases run; its id is in <run>/wandb_id, so a resumed run continues it. Honours W&B's settings.

    Without an API key it writes offline and says so. W&B cannot take points back: steps from before a crash keep
    their first values and are not logged again."""

    title = "W&B"

    def __init__(self, run: ExportedRun) -> None:
        self._run = run
        self._wandb = need("wandb", extra="wandb")

    def open(self) -> None:
        run, id_path = self._run, self._run.folder / "wandb_id"
        if not id_path.exists():
            write_atomic(id_path, secrets.token_hex(4))
        # Its messages and its capture of stdout would tear the live view. With W&B's own limits (90 s and none)
        # a server that is gone would hold up the exit of the program.
        limits = {"init_timeout": 30.0, "finish_timeout": CLOSE_LIMIT_S}
        self._log = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "redline"),
            name=run.name,
            dir=str(run.folder),
            config=run.config,
            id=id_path.read_text(encoding="utf-8"),
            resume="allow",
            mode=self._mode(),
            settings=self._wandb.Settings(silent=True, console="off", **limits),
        )
        if (held := self._log.starting_step - 1) > run.resume_step:
            steps = f"steps {run.resume_step + 1} to {held}"
            run.warn(f"W&B has {steps} from before the resume: they are not logged again")

    def write(self, at: float, line: dict[str, Any]) -> None:
        if line["step"] >= self._log.starting_step:
            self._log.log(exported_values(line), step=line["step"])

    def close(self) -> None:
        self._log.finish()

    def _mode(self) -> str:
        """W&B's own mode, but offline if going online would ask for an API key."""
        mode: str = self._wandb.setup(self._wandb.Settings(silent=True)).settings.mode
        if mode == "online" and not self._wandb.login(prompt=False, verify=False):
            where = self._run.folder / "wandb"
            self._run.warn(
                f"W&B has no API key: writing offline to {where}; `wandb login`, then `wandb sync` it"
            )
            return "offline"
        return mode


class MLflow:
    """An MLflow run on the server MLFLOW_TRACKING_URI; its id is in <run>/mlflow_id, so a resumed run continues it.
    MLflow keeps every value of a step: those from before a crash stay beside the new ones."""

    title = "MLflow"

    def __init__(self, run: ExportedRun) -> None:
        self._run, self._mlflow = run, need("mlflow", extra="mlflow")

    def open(self) -> None:
        client, id_path = self._mlflow.MlflowClient(), self._run.folder / "mlflow_id"
        if id_path.exists():
            self._id = id_path.read_text(encoding="utf-8")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "redline")
            known = client.get_experiment_by_name(name)
            place = known.experiment_id if known else client.create_experiment(name)
            self._id = client.create_run(place, run_name=self._run.name).info.run_id
            client.log_dict(self._id, self._run.config, "config.json")
            write_atomic(id_path, self._id)
        client.update_run(self._id, status="RUNNING")
        self._client = client

    def write(self, at: float, line: dict[str, Any]) -> None:
        metric, at_ms = self._mlflow.entities.Metric, round(at * 1000)
        values = [metric(name, value, at_ms, line["step"]) for name, value in exported_values(line).items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


_SINKS: dict[str, Callable[[ExportedRun], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
