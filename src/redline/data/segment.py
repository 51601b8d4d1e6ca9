"""One segment of a build: the documents of some files -> token shards, resumable.

Work proceeds in units of about `shard_tokens` tokens: one train and one valid shard of whole documents, written under
temporary names and renamed. The segment's JSON then records the unit and where the next one starts, so a build that
was killed resumes there. Names begin with the segment's number; `build` gives shards their final names.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from redline.data.read import SPLITS, Document, encoded
from redline.data.shards import Inputs, Shard, read_table
from redline.data.tokenizer import Tokenizer
from redline.errors import DataError
from redline.record.files import sync_path, write_atomic

SKIPPED_SHARE = 0.01
"""Share of rows without text (no JSON, no such field) that may be left out; more are an error."""
SKIPPED_EARLY = 10
"""Rows without text before the share is checked."""


@dataclass(frozen=True)
class State:
    """The JSON of a segment: its finished units, and the file and document where the next one starts."""

    file: int
    document: int = 0
    units: int = 0
    train: tuple[Shard, ...] = ()
    valid: tuple[Shard, ...] = ()
    skipped: int = 0

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in (*self.train, *self.valid))

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in (*self.train, *self.valid))


@dataclass(frozen=True)
class Segment:
    place: Path
    """How the paths of its files begin."""
    files: range
    """The numbers of its files in the corpus."""

    @property
    def state(self) -> State:
        path = self.place.with_suffix(".json")
        return read_table(State, path) if path.exists() else State(self.files.start)

    def write(
        self, inputs: Inputs, tokenizer: Tokenizer, workers: int, tell: Callable[[Document, int], None]
    ) -> State:
        """Write what is missing. `tell` gets each document and the tokens of the segment so far."""
        if (state := self.state).file == self.files.stop:
            return state
        unit = _Unit(self.place, tokenizer.dtype)
        span = {"file": state.file, "document": state.document, "end_file": self.files.stop}
        reading = encoded(inputs.corpus, tokenizer, splits=SPLITS, workers=workers, **span)
        with _one_thread_a_call(), contextlib.closing(reading):
            for document in reading:
                unit.add(document)
                if document.row.wrong:
                    _check_skipped(state, unit, SKIPPED_EARLY)
                if unit.tokens >= inputs.shard_tokens:
                    state = unit.finish(state, document.file, document.number + 1)
                    unit = _Unit(self.place, tokenizer.dtype)
                tell(document, state.tokens + unit.tokens)
        _check_skipped(state, unit, 1 if state.documents + unit.documents else 0)
        return unit.finish(state, self.files.stop, 0)


def _check_skipped(state: State, unit: "_Unit", most: int) -> None:
    """Refuse more rows without text than `most` and SKIPPED_SHARE of all so far."""
    skipped = state.skipped + unit.skipped
    rows = skipped + state.documents + unit.documents
    if unit.wrong and skipped > max(most, SKIPPED_SHARE * rows):
        most_share = f"at most {SKIPPED_SHARE:.0%} may be left out"
        raise DataError(
            f"{skipped:,} of the first {rows:,} rows hold no text, {most_share}; the last: {unit.wrong}"
        )


class _Unit:
    """One shard of each split, being written."""

    def __init__(self, place: Path, dtype: np.dtype) -> None:
        self._place = place
        self._writers = {s: _ShardWriter(place.with_name(f"{place.name}-{s}.tmp"), dtype) for s in SPLITS}
        self.tokens = self.documents = self.skipped = 0
        self.wrong = ""

    def add(self, document: Document) -> None:
        if document.row.wrong:
            self.skipped, self.wrong = self.skipped + 1, document.row.wrong
            return
        self.documents += 1
        self._writers[document.split].add(document)
        self.tokens += len(document.tokens)

    def finish(self, state: State, file: int, document: int) -> State:
        """Give the shards their names and record them; only then are they part of the folder."""
        new = {
            split: writer.finish(f"{self._place.name}-{split}-{state.units:05d}.bin")
            for split, writer in self._writers.items()
        }
        sync_path(self._place.parent)
        state = State(
            file=file,
            document=document,
            units=state.units + bool(self.documents),
            train=state.train + new["train"],
            valid=state.valid + new["valid"],
            skipped=state.skipped + self.skipped,
        )
        write_atomic(self._place.with_suffix(".json"), json.dumps(asdict(state)))
        return state


class _ShardWriter:
    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path = path
        self._dtype = dtype.newbyteorder("<")
        self._file = open(path, "wb")  # noqa: SIM115  closed in finish; a build that fails leaves a temporary name
        self._hash = hashlib.sha256()
        self._tokens = self._documents = self._bytes_of_text = self._max_id = 0

    def add(self, document: Document) -> None:
        data = document.tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._tokens += len(document.tokens)
        self._documents += 1
        self._bytes_of_text += document.bytes_of_text
        self._max_id = max(self._max_id, int(document.tokens.max()))

    def finish(self, name: str) -> tuple[Shard, ...]:
        """The shard, durable and under its name; none if the unit had no document of this split."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        if not self._tokens:
            self._path.unlink()
            return ()
        os.replace(self._path, self._path.with_name(name))
        counts = (self._tokens, self._documents, self._bytes_of_text, self._max_id)
        return (Shard(name, *counts, self._hash.hexdigest()),)


@contextlib.contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Switch off the tokenizer's own thread pool: the workers are the parallelism."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
