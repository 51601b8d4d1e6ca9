"""Following a run folder while it is written: the run as it stands now, again and again.

    followed = Followed(Path("runs/nano"))
    run, generation = followed.now()      # a new generation: updates were taken back, so start over

Growing files are read from where the last read stopped, small ones again when they change. The caller decides how
often to look.
"""

import os
import threading
import time
from dataclasses import replace
from os.path import exists
from pathlib import Path

from redline.errors import DataError
from redline.record.files import WAY_OUT
from redline.record.read import Line, Run, metrics_path, read_run, silent_s
from redline.record.run import RunFolder, lost_owner, parse_lines

SMALL = ("recipe.toml", "plan.json", "evaluations.jsonl", "ablation.json")


class Tail:
    """The lines of one JSONL file that a resumed run may cut back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = 0
        """How often the file was replaced by another, whose lines take the place of those read before."""
        self._lines: list[Line] = []
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[Line]:
        """All whole lines, in a list of their own; half a line waits for its rest."""
        try:
            with open(self.path, "rb") as file:
                now = os.fstat(file.fileno())
                if self._inode is not None and (now.st_ino != self._inode or now.st_size < self._offset):
                    self.replaced += 1
                    self._lines, self._offset = [], 0
                self._inode = now.st_ino
                file.seek(self._offset)
                raw = file.read()
            whole = raw[: raw.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._lines = [*self._lines, *parse_lines(whole.decode("utf-8"), self.path)]
            return self._lines
        except FileNotFoundError:
            return self._lines
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path} is damaged: it is not UTF-8 text; {WAY_OUT}") from error


class Followed:
    """May be asked from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._run = read_run(path)
        self._stamps = self._stamp()
        self._metrics, self._events = Tail(metrics_path(path)), Tail(RunFolder(path).events_path)
        # Not 0: a page that outlives its server and finds another on the port must not mix the two.
        self._generation = time.time_ns() // 1_000_000

    def now(self) -> tuple[Run, int]:
        with self._lock:
            if (stamps := self._stamp()) != self._stamps:
                self._run, self._stamps = read_run(self.path), stamps
                if (place := metrics_path(self.path)) != self._metrics.path:
                    self._generation += self._metrics.replaced + 1
                    self._metrics = Tail(place)
            lost = lost_owner(self.path)  # before what it wrote is read
            metrics, events = self._metrics.read(), self._events.read()
            run = replace(self._run, metrics=metrics, events=events, silent_s=silent_s(self.path), lost=lost)
            return run, self._generation + self._metrics.replaced

    def _stamp(self) -> list[int]:
        paths = [*(self.path / name for name in SMALL), metrics_path(self.path).parent]
        return [path.stat().st_mtime_ns if exists(path) else 0 for path in paths]
