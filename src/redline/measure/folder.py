"""The folder of trials: finished ones are kept there, one a line, and are not run again. No torch.

    with TrialFolder(path, machine="...") as folder:
        folder.find(key), folder.find_pair(key)
        folder.add(key, "bf16", measured, beside=before, paired=True)

Every tuning and every ablation has one (trials.jsonl beside recipe.toml). Trials of another machine or other software
stay in the file but are not found.
"""

import fcntl
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from redline.config.load import build
from redline.errors import ConfigError, DataError, StorageError
from redline.measure.trial import Measurement, Pair
from redline.record.files import storage_errors, write_atomic
from redline.record.run import LineWriter, read_lines


class TrialFolder:
    """Trials in a folder that this process owns until it leaves the `with` block."""

    def __init__(self, path: Path, machine: str = "") -> None:
        self.path, self.machine = path, machine

    def __enter__(self) -> Self:
        with storage_errors("the trials", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{self.path} is in use by another process: wait for it, or give another folder with --out"
            ) from None
        path = self.path / "trials.jsonl"
        try:
            with storage_errors("the trials", path):
                known = [line for line in read_lines(path) if _stands(line, path)]
        except (DataError, StorageError):
            self._lock.close()
            raise
        self._done = {line["key"]: line for line in known if line.get("machine", "") == self.machine}
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in known))  # without a torn last line
        self._lines = LineWriter(path)
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._lock.close()

    def find(self, key: str) -> Measurement | None:
        """The trial of this key, if it was finished before."""
        if key not in self._done:
            return None
        return build(Measurement, self._done[key]["measured"], where="trials.jsonl")

    def find_pair(self, key: str) -> Pair | None:
        """The trial of this key with what it was compared with."""
        if (after := self.find(key)) is None:
            return None
        before = build(Measurement, self._done[key]["beside"], where="trials.jsonl")
        return Pair(before=before, after=after, paired=self._done[key]["paired"])

    def add(
        self,
        key: str,
        name: str,
        measured: Measurement,
        *,
        beside: Measurement | None = None,
        paired: bool | None = None,
    ) -> None:
        """Write a finished trial and what it was compared with in one line: both are there or neither."""
        about = {"key": key, "name": name, "machine": self.machine, "paired": paired}
        arms = {"measured": asdict(measured), "beside": asdict(beside) if beside else None}
        self._done[key] = {**about, **arms}
        self._lines.append(self._done[key])


def _stands(line: dict[str, Any], path: Path) -> bool:
    """Whether a trial need not run again: it ended well, or did not fit even alone. Crashes and timeouts may be
    chance."""
    try:
        if not isinstance(line.get("key"), str):
            raise ConfigError("a trial needs a key")
        paired, other = line.get("paired"), line.get("beside")
        measured = build(Measurement, line.get("measured"), where="measured")
        beside = build(Measurement, other, where="beside") if other is not None else None
        if isinstance(paired, bool) != (beside is not None):
            raise ConfigError("`paired` and `beside` come together")
        for arm in (measured, beside) if measured.outcome == "ok" else ():
            empty = arm and not (arm.blocks_s and min(*arm.blocks_s, arm.tokens_per_step) > 0)
            if arm and arm.outcome == "ok" and empty:
                raise ConfigError("a trial that ended well has tokens, and blocks longer than 0 s")
    except ConfigError as error:
        raise DataError(
            f"{path} is damaged: {json.dumps(line)[:100]}: {error}; delete that line, or move the file away"
        ) from error
    fits_nowhere = measured.outcome == "out_of_memory" and not paired
    return (measured.outcome == "ok" or fits_nowhere) and (beside is None or beside.outcome == "ok")
