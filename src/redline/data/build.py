"""`redline data build`: documents -> tokenizer -> token shards with a manifest. And `prepare`: the data folder of a
recipe.

The output depends on the inputs alone, not on the number of workers or on how often the build was killed. Work
proceeds in units of about `shard_tokens` tokens: one train and one valid shard of whole documents, written under
temporary names and renamed. `building.json` then records the unit and where the next one starts, so the same command
resumes there. `manifest.json` comes last: a folder without it is unfinished.

Workers are threads: the tokenizer's Rust code releases the GIL. On two shared cores two threads, two processes and
the library's own thread pool were equally fast (3 to 5 MB/s); threads copy nothing between processes, and unlike the
pool their number can be set.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from redline.config.recipe import DataConfig
from redline.data.read import SPLITS, Corpus, Document, documents, encoded, find_sources, split_of, splits_of
from redline.data.remote import folder_at, is_remote, stored_manifest, upload
from redline.data.shards import (
    FORMAT,
    Inputs,
    Manifest,
    Shard,
    SourceFile,
    check_tokenizer,
    check_vocab,
    read_table,
)
from redline.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from redline.errors import DataError
from redline.record.files import cache_folder, storage_errors, sync_path, write_atomic

Progress = Callable[[int, int, int], None]
"""Called with the bytes of the source files read, their total, and the tokens written."""

BPE_SAMPLE_BYTES = 64 * 2**20
"""Text to train a BPE on; more changes few merges and costs minutes."""
SHARD_TOKENS = 50_000_000
STATE = "building.json"
SKIPPED_SHARE = 0.01
"""Share of rows without text (no JSON, no such field) that may be left out; more are an error."""
SKIPPED_EARLY = 10
"""Rows without text before the share is checked."""


def build(
    source: str | Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int | None = None,
    text_field: str = "text",
    valid_fraction: float = 0.01,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
) -> Manifest:
    """Build the data folder `out` from one or several sources, or finish or return the one there. `vocab_size`: of
    the BPE, or the most ids that a given tokenizer may have. For an object store, build in the cache and upload."""
    inputs, given = _inputs(source, tokenizer, vocab_size, text_field, valid_fraction, shard_tokens)
    if isinstance(out, str) and is_remote(out):
        stored_manifest(out)  # fails now, not after the work, if the store cannot be reached
        folder = cache_folder() / "data" / inputs.key
        manifest = _build_into(folder, inputs, given, workers, progress)
        upload(folder, out)
        return manifest
    return _build_into(Path(out), inputs, given, workers, progress)


def prepare(data: DataConfig, vocab_size: int, *, progress: Progress | None = None) -> Path:
    """The data folder of a recipe: the one it names, or one built once into the cache, keyed by all its inputs."""
    folder = folder_at(data.source)
    if os.path.isfile(folder / "manifest.json"):  # unlike Path.is_file, it takes names that are too long
        manifest = Manifest.load(folder)
        check_tokenizer(folder, manifest)
        if data.tokenizer != "bpe" and load_tokenizer(data.tokenizer).fingerprint != manifest.tokenizer:
            raise DataError(f"wrong tokenizer: {folder} was not built with {data.tokenizer}; build it again")
    elif os.path.isfile(folder / STATE):
        raise DataError(f"{folder} is an unfinished build: run the same `redline data build` again")
    else:
        inputs, given = _inputs(
            data.source, data.tokenizer, vocab_size, data.text_field, data.valid_fraction, SHARD_TOKENS
        )
        folder = cache_folder() / "data" / inputs.key
        manifest = _build_into(folder, inputs, given, None, progress)
    check_vocab(manifest.vocab_size, vocab_size)
    return folder


def tokenizer_for(data: DataConfig, vocab_size: int) -> Tokenizer:
    """The tokenizer of a recipe that streams: the one it names, or the BPE that a build would train."""
    if data.tokenizer != "bpe":
        return load_tokenizer(data.tokenizer)
    corpus = Corpus(tuple(find_sources(data.source)), data.text_field, data.valid_fraction)
    return train_bpe(_sample(corpus), vocab_size)


def _inputs(
    source: str | Sequence[str],
    tokenizer: str,
    vocab_size: int | None,
    text_field: str,
    valid_fraction: float,
    shard_tokens: int,
) -> tuple[Inputs, Tokenizer | None]:
    given = None if tokenizer == "bpe" else load_tokenizer(tokenizer)
    if given is None and vocab_size is None:
        raise DataError("training a BPE needs a vocabulary size: give one, or give a tokenizer.json")
    if given is not None and vocab_size is not None:
        check_vocab(given.vocab_size, vocab_size)
    if not 0 <= valid_fraction < 1:
        raise DataError(f"valid_fraction must be at least 0 and below 1, got {valid_fraction}")
    if shard_tokens < 1:
        raise DataError(f"shard_tokens must be at least 1, got {shard_tokens}")
    sources = [source] if isinstance(source, str) else source
    files = [(path.resolve(), path.stat()) for path in find_sources(*sources)]
    inputs = Inputs(
        sources=tuple(SourceFile(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files),
        tokenizer=given.fingerprint if given else "bpe",
        vocab_size=None if given else vocab_size,
        text_field=text_field,
        valid_fraction=valid_fraction,
        shard_tokens=shard_tokens,
    )
    return inputs, given


def _build_into(
    out: Path, inputs: Inputs, given: Tokenizer | None, workers: int | None, progress: Progress | None
) -> Manifest:
    if finished := _finished(out, inputs):
        return finished
    with storage_errors("the data folder", out):
        out.mkdir(parents=True, exist_ok=True)
        with _only_builder(out):
            # another process may have built it meanwhile
            return _finished(out, inputs) or _build(out, inputs, given, workers or _cores(), progress)


def _cores() -> int:
    """Cores that this process may use, if the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(out: Path, inputs: Inputs) -> Manifest | None:
    if not (out / "manifest.json").exists():
        return None
    manifest = Manifest.load(out)
    _same_inputs(out, manifest.inputs, inputs)
    return manifest


def _same_inputs(out: Path, there: Inputs, asked: Inputs) -> None:
    if there != asked:
        before, now = asdict(there), asdict(asked)
        changed = ", ".join(name for name in now if now[name] != before[name])
        raise DataError(f"{out} was built from other inputs ({changed} differ): remove it, or choose another")


@contextlib.contextmanager
def _only_builder(out: Path) -> Iterator[None]:
    """Wait until no other process builds into the folder. The kernel frees the lock of a dead process."""
    with open(out / ".lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(
    out: Path, inputs: Inputs, given: Tokenizer | None, workers: int, progress: Progress | None
) -> Manifest:
    paths = tuple(Path(source.path) for source in inputs.sources)
    corpus = Corpus(paths, inputs.text_field, inputs.valid_fraction)
    state = _load_state(out, inputs)
    state.save(out)  # claims the folder: from now on a tokenizer.json in it is ours
    if state.units:
        tokenizer = load_tokenizer(out)
    else:
        tokenizer = given or train_bpe(_sample(corpus), inputs.vocab_size or 0)
        tokenizer.save(out / "tokenizer.json")
    state = _write_shards(out, state, corpus, tokenizer, workers, progress)
    if not any(shard.bytes_of_text for shard in (*state.train, *state.valid)):
        raise DataError(f"the corpus is empty: there is no text in {', '.join(map(str, paths[:3]))}")
    manifest = Manifest(
        format=FORMAT,
        inputs=inputs,
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.dtype == np.uint16 else "uint32",
        train=state.train,
        valid=state.valid,
        skipped=state.skipped,
    )
    write_atomic(out / "manifest.json", manifest.to_json())
    (out / STATE).unlink()
    return manifest


@dataclass(frozen=True)
class _State:
    """`building.json`: the finished units, and the file and document where the next one starts."""

    inputs: Inputs
    file: int = 0
    document: int = 0
    units: int = 0
    train: tuple[Shard, ...] = ()
    valid: tuple[Shard, ...] = ()
    skipped: int = 0

    def save(self, out: Path) -> None:
        write_atomic(out / STATE, json.dumps(asdict(self)))

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in (*self.train, *self.valid))

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in (*self.train, *self.valid))


def _load_state(out: Path, inputs: Inputs) -> _State:
    path = out / STATE
    if not path.exists():
        if foreign := [p.name for p in out.iterdir() if not p.name.startswith(".")]:
            raise DataError(f"{out} holds other files ({foreign[0]}): choose a new or empty folder")
        return _State(inputs)
    state: _State = read_table(_State, path)
    if not state.tokens:
        return _State(inputs)  # nothing to lose, so other inputs are fine
    _same_inputs(out, state.inputs, inputs)
    return state


def _sample(corpus: Corpus) -> Iterator[str]:
    """Training documents for the BPE, an even share from each file."""
    left_bytes, named = BPE_SAMPLE_BYTES, splits_of(corpus.paths)
    for number, path in enumerate(corpus.paths):
        share_bytes = left_bytes // (len(corpus.paths) - number)
        for text in documents(path, corpus.text_field):
            if share_bytes <= 0:
                break
            utf8 = text.encode()
            if (named.get(path) or split_of(utf8, corpus.valid_fraction)) == "train":
                share_bytes -= len(utf8)
                left_bytes -= len(utf8)
                yield text


def _write_shards(
    out: Path, state: _State, corpus: Corpus, tokenizer: Tokenizer, workers: int, progress: Progress | None
) -> _State:
    inputs, sizes = state.inputs, [source.bytes for source in state.inputs.sources]
    bytes_before = list(accumulate(sizes, initial=0))
    unit, tokens_before = _Unit(out, tokenizer.dtype), state.tokens
    start = {"file": state.file, "document": state.document}
    reading = encoded(corpus, tokenizer, splits=SPLITS, workers=workers, **start)
    with _one_thread_a_call(), contextlib.closing(reading):
        for document in reading:
            unit.add(document)
            if document.wrong:
                _check_skipped(state, unit, SKIPPED_EARLY)
            if unit.tokens >= inputs.shard_tokens:
                state = unit.finish(state, document.file, document.number + 1)
                unit, tokens_before = _Unit(out, tokenizer.dtype), state.tokens
            if progress:
                read_bytes = bytes_before[document.file] + document.offset_bytes
                progress(read_bytes, bytes_before[-1], tokens_before + unit.tokens)
    _check_skipped(state, unit, 1 if state.documents + unit.documents else 0)
    return unit.finish(state, len(corpus.paths), 0)


def _check_skipped(state: _State, unit: "_Unit", most: int) -> None:
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

    def __init__(self, out: Path, dtype: np.dtype) -> None:
        self._out = out
        self._writers = {split: _ShardWriter(out / f".{split}.tmp", dtype) for split in SPLITS}
        self.tokens = self.documents = self.skipped = 0
        self.wrong = ""

    def add(self, document: Document) -> None:
        if document.wrong:
            self.skipped, self.wrong = self.skipped + 1, document.wrong
            return
        self.documents += 1
        self._writers[document.split].add(document)
        self.tokens += len(document.tokens)

    def finish(self, state: _State, file: int, document: int) -> _State:
        """Give the shards their names and record them; only then are they part of the folder."""
        new = {s: writer.finish(f"{s}-{state.units:05d}.bin") for s, writer in self._writers.items()}
        sync_path(self._out)
        state = replace(
            state,
            file=file,
            document=document,
            units=state.units + 1,
            train=state.train + new["train"],
            valid=state.valid + new["valid"],
            skipped=state.skipped + self.skipped,
        )
        state.save(self._out)
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
