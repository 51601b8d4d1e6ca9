"""The run folder: where a run's Recipe, Plan and Record live.

    runs/nano/
        recipe.toml        what was computed
        plan.json          how, every value with its reason
        metrics.jsonl      one line per update (names and units: metrics.py)
        events.jsonl       starts, resumes, checkpoints, validations, recoveries
        tokenizer.json     the tokenizer that made the tokens
        checkpoints/       step-N folders, best.json

Lines are appended whole. After a crash the metrics are cut back to the checkpoint that the run resumes from, so each
step appears once; events are never cut.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import time
from collections.abc import Iterator
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, Self

from redline.errors import DataError, RedlineError, StorageError
from redline.record.files import (
    WAY_OUT,
    parse_json,
    read_text,
    storage_errors,
    sweep,
    sync_path,
    write_atomic,
)

NEEDED: dict[str, tuple[str, type, str]] = {
    "metrics.jsonl": ("step", int, "a whole number"),
    "events.jsonl": ("event", str, "a word"),
}
"""What every line of a file must hold."""
_UNITS = ("_s", "_bytes", "_loss", "_norm", "_batch", "_low", "_high")
_COUNTS = (
    "at", "step", "loss", "lr", "n", "tokens", "samples", "questions", "solved", "correct", "cut", "drawn", "accuracy",
)  # fmt: skip
"""Endings and names under which a line holds a number or null."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of one of our JSONL files (none if there is no file), without a torn last line."""
    return parse_lines(read_text(path, whole_lines=True, missing=""), path)


def parse_lines(text: str, path: Path) -> list[dict[str, Any]]:
    """Lines of that file as tables. An error for a line that is no table, that lacks what is NEEDED, or that has
    anything but a number under a name with a unit."""
    key, kind, words = NEEDED.get(path.name, ("", object, ""))
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also cut at U+2028 inside a text
        if not line.strip():
            continue
        record = parse_json(line, f"{path} line {number}", dict)
        if key and (not isinstance(record.get(key), kind) or isinstance(record[key], bool)):
            raise DataError(f"{path} line {number} is damaged: it needs `{key}`, {words}; {WAY_OUT}")
        for name, value in record.items():
            if not isinstance(value, int | float | None) and (name in _COUNTS or name.endswith(_UNITS)):
                wrong = f"`{name}` is a number, not {value!r:.40}"
                raise DataError(f"{path} line {number} is damaged: {wrong}; {WAY_OUT}")
        found.append(record)
    return found


class LineWriter:
    """Appends JSON lines, each in one write, so that a reader never sees half a line of a living process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path.name, path.parent):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run

    def append(self, line: dict[str, Any]) -> None:
        with storage_errors(self.path.name, self.path.parent):
            data, written = (json.dumps(line) + "\n").encode(), 0
            try:
                while written < len(data):  # a nearly full disk may take only a part
                    written += self._file.write(data[written:])
            except OSError:
                self._take_back(written)
                raise

    def _take_back(self, written: int) -> None:
        """Cut off the part of a line that the disk still took, or the next line, which may say why the run failed, would
        continue it. Not if another process has appended behind it."""
        with contextlib.suppress(OSError):  # report the first error
            end = self._file.tell()
            if written and os.fstat(self._file.fileno()).st_size == end:
                self._file.truncate(end - written)

    def close(self) -> None:
        self._file.close()


def cut_torn_line(path: Path) -> None:
    """Cut off half a last line, so that the next one starts clean."""
    raw = path.read_bytes() if path.exists() else b""
    if raw and not raw.endswith(b"\n"):
        os.truncate(path, raw.rfind(b"\n") + 1)


@contextlib.contextmanager
def failures_recorded(
    path: Path, kind: str = "failed", of: type[RedlineError] = RedlineError
) -> Iterator[None]:
    """Record a user's error that ends the run, for the launcher of several processes to find."""
    try:
        yield
    except of as error:
        if path.is_dir():
            RunFolder(path).event(kind, error=str(error), exit_code=error.exit_code)
        raise


def lost_owner(path: Path) -> int | None:
    """The process that owned the run folder and ended without leaving it, if it ran on this machine."""
    found = re.fullmatch(r"(\d{1,9}) (.*)\n", read_text(path / ".lock", missing=""))
    if found is None or found[2] != platform.node():
        return None
    import psutil  # here: few commands look

    pid = int(found[1])
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        reused = process.create_time() > (path / ".lock").stat().st_mtime + 1
        return pid if reused or process.status() == psutil.STATUS_ZOMBIE else None
    return pid


def _numbered(path: Path) -> Iterator[Path]:
    """PATH-2, PATH-3, and so on."""
    return (path.with_name(f"{path.name}-{number}") for number in count(2))


class FolderInUse(StorageError):
    """Another run owns the folder."""


class RunFolder:
    """A run folder that this process owns inside the `with` block; a second owner is refused. `option` is the
    command line's name for the folder, for messages."""

    def __init__(self, path: Path, *, option: str | None = "--run") -> None:
        self.path, self._option = path, option
        self.recipe_path = path / "recipe.toml"
        self.plan_path = path / "plan.json"
        self.metrics_path = path / "metrics.jsonl"
        self.events_path = path / "events.jsonl"
        self.tokenizer_path = path / "tokenizer.json"
        self.checkpoints_path = path / "checkpoints"

    def __enter__(self) -> Self:
        named = f" with {self._option}" if self._option else ""
        ours = (self.path / ".lock", self.recipe_path, self.metrics_path)
        if self.path.is_dir() and any(self.path.iterdir()) and not any(path.exists() for path in ours):
            raise StorageError(f"{self.path} holds files that are not a run's: give an empty folder{named}")
        with storage_errors("the run folder", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # the first name in a new folder: by it the run that was killed next is told from other files
            self._lock = open(self.path / ".lock", "a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            wait = f"wait for it, or give another folder{named}"
            raise FolderInUse(f"{self.path} is in use by another process: {wait}") from None
        with storage_errors("the run folder", self.path):
            self._lock.truncate(0)
            print(os.getpid(), platform.node(), file=self._lock, flush=True)
            self.checkpoints_path.mkdir(exist_ok=True)
            self._tidy()
        return self

    @classmethod
    def free(cls, path: Path) -> "RunFolder":
        """The folder, opened; if it holds a run, the first free one of PATH-2, PATH-3, ..."""
        places = chain([path], _numbered(path))
        while True:
            folder = cls(next(places), option=None)
            with contextlib.suppress(FolderInUse):
                folder.__enter__()
                if not folder.has_begun():
                    return folder
                folder.__exit__(None, None, None)

    @classmethod
    def last(cls, path: Path) -> "RunFolder":
        """The folder that `free` returned last, opened again."""
        *_, last = path, *takewhile(Path.is_dir, _numbered(path))
        folder = cls(last, option=None)
        folder.__enter__()
        return folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._lock.truncate(0)
        self._lock.close()

    def _tidy(self) -> None:
        """Clean up after a killed process: half lines, and the temporary files and folders of `files`."""
        for path in (self.metrics_path, self.events_path):
            cut_torn_line(path)
        for folder in (self.path, self.checkpoints_path):
            sweep(folder)

    def event(self, kind: str, **facts: Any) -> None:
        """Append one event; a process that does not own the folder may do so too. It survives the process, but a
        power cut only from the next checkpoint on: waiting for a busy disk here would hold up the training."""
        with contextlib.closing(LineWriter(self.events_path)) as events:
            events.append({"at": round(time.time(), 3), "event": kind, **facts})

    def event_once(self, kind: str, **facts: Any) -> None:
        """Append an event, unless the last of its kind says the same: an attempt that was killed since has said it."""
        told = [event for event in read_lines(self.events_path) if event["event"] == kind]
        if not told or told[-1] | json.loads(json.dumps(facts)) != told[-1]:
            self.event(kind, **facts)

    def sync(self) -> None:
        """Make all metrics and events so far survive a power cut."""
        for path in (self.metrics_path, self.events_path):
            if path.exists():
                with storage_errors(path.name, self.path):
                    sync_path(path)

    def has_begun(self) -> bool:
        """Whether there is anything to lose: a line of metrics, a checkpoint, samples, tests. Until then the folder
        is not tied to its recipe."""
        made = ("samples.db", "evaluations.jsonl", "train-samples", "train-answers")
        saved = any(self.checkpoints_path.glob("step-*")) or any((self.path / name).exists() for name in made)
        return saved or bool(read_lines(self.metrics_path))

    def cut_metrics(self, step: int) -> int:
        """Drop the metrics after `step`, which will be computed again; return how many were dropped."""
        lines = read_lines(self.metrics_path)
        kept = [line for line in lines if line["step"] <= step]
        if len(kept) < len(lines):
            write_atomic(self.metrics_path, "".join(json.dumps(line) + "\n" for line in kept))
        return len(lines) - len(kept)
