"""`redline data build`: documents -> tokenizer -> token shards with a manifest. And `prepare`: the data folder of a
recipe.

The output depends on the inputs alone, not on the number of workers, parts or machines, or on how often the build was
killed. The files of the corpus form segments, runs of whole files of at least 400 MB, which are built apart from each
other in the folder `.parts` (see `segment`), by one process or by many. When all are done, whoever finished last joins
them: the shards get their final names, and `manifest.json` comes last. A folder without it is unfinished.

Workers are threads: the tokenizer's Rust code releases the GIL. On two shared cores two threads, two processes and
the library's own thread pool were equally fast (3 to 5 MB/s); threads copy nothing between processes, and unlike the
pool their number can be set.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from redline.config.recipe import DataConfig
from redline.data.read import SPLITS, Corpus, Document, Split, documents, find_sources, split_of, splits_of
from redline.data.remote import folder_at, is_remote, stored_manifest, upload
from redline.data.segment import Segment, State
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
from redline.machine.facts import cpu_cores
from redline.record.files import alone, cache_folder, storage_errors, sweep, sync_path, write_atomic

Progress = Callable[[int, int, int], None]
"""Called with the bytes of the source files read, their total, and the tokens written."""

BPE_SAMPLE_BYTES = 64 * 2**20
"""Text to train a BPE on; more changes few merges and costs minutes."""
SHARD_TOKENS = 50_000_000
SEGMENT_BYTES_A_TOKEN = 8
"""Bytes of the (perhaps compressed) files of a segment, for each token of a shard."""
STATE = "building.json"
PARTS = ".parts"


def build(
    source: str | Sequence[str],
    out: str | Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> Manifest:
    """Build the data folder `out` from one or several sources, or finish or return the one there; `how` as `_inputs`
    takes it. For an object store, build in the cache and upload."""
    inputs, given = _inputs(source, **how)
    if not (isinstance(out, str) and is_remote(out)):
        return _build_all(Path(out), inputs, given, workers, progress)
    stored_manifest(out)  # fails now, not after the work, if the store cannot be reached
    folder = cache_folder() / "data" / inputs.key
    manifest = _build_all(folder, inputs, given, workers, progress)
    upload(folder, out)
    return manifest


def build_part(
    part: int,
    parts: int,
    source: str | Sequence[str],
    out: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> Manifest | None:
    """Do one part of what `build` does with the same arguments, along with processes on this and other machines that share
    the folder. The part that finishes last joins all of them and returns the manifest."""
    inputs, given = _inputs(source, **how)
    return _build_into(out, inputs, given, workers, progress, part, parts)


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
        inputs, given = _inputs(data.source, data.tokenizer, vocab_size, data.text_field, data.valid_fraction)
        folder = cache_folder() / "data" / inputs.key
        manifest = _build_all(folder, inputs, given, None, progress)
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
    tokenizer: str = "bpe",
    vocab_size: int | None = None,
    text_field: str = "text",
    valid_fraction: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
) -> tuple[Inputs, Tokenizer | None]:
    """The inputs of a data folder, and the tokenizer if one is given. `vocab_size`: the size of the BPE to train, or
    the most ids that the given tokenizer may have."""
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


def _build_all(*how: Any) -> Manifest:
    manifest = _build_into(*how)
    assert manifest is not None, "who builds all segments joins them"
    return manifest


def _build_into(
    out: Path,
    inputs: Inputs,
    given: Tokenizer | None,
    workers: int | None,
    progress: Progress | None,
    part: int = 1,
    parts: int = 1,
) -> Manifest | None:
    """Builders share the folder's lock; the one that joins holds it alone, so nothing is moved under a builder."""
    if finished := _finished(out, inputs):
        return finished
    with storage_errors("the data folder", out):
        out.mkdir(parents=True, exist_ok=True)
        with open(out / ".lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if finished := _finished(out, inputs):  # another process built it meanwhile
                return finished
            tokenizer = _claim(out, inputs, given)
            own = segments(out, inputs)[part - 1 :: parts]
            _write(own, inputs, tokenizer, workers or cpu_cores(), progress)
            # Release it before asking, so that of several that finish together the last one gets it.
            fcntl.flock(lock, fcntl.LOCK_UN)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if parts == 1 else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None  # others are still at work
            return _finished(out, inputs) or _join(out, inputs, tokenizer)


def segments(out: Path, inputs: Inputs) -> list[Segment]:
    found: list[Segment] = []
    first = size_bytes = 0
    for number, source in enumerate(inputs.sources, start=1):
        size_bytes += source.bytes
        if size_bytes >= SEGMENT_BYTES_A_TOKEN * inputs.shard_tokens or number == len(inputs.sources):
            found.append(Segment(out / PARTS / f"{len(found):05d}", range(first, number)))
            first, size_bytes = number, 0
    return found


def _finished(out: Path, inputs: Inputs) -> Manifest | None:
    if not (out / "manifest.json").exists():
        return None
    manifest = Manifest.load(out)
    _same_inputs(out, manifest.inputs, inputs)
    _clear(out)
    return manifest


def _clear(out: Path) -> None:
    """Remove what only an unfinished build needs, also what one that was killed was writing. Nobody builds in a folder
    with a manifest."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    with contextlib.suppress(OSError):  # a finished folder may be read-only
        (out / STATE).unlink(missing_ok=True)
    sweep(out)


def _same_inputs(out: Path, there: Inputs, asked: Inputs) -> None:
    if there != asked:
        before, now = asdict(there), asdict(asked)
        changed = ", ".join(name for name in now if now[name] != before[name])
        raise DataError(f"{out} was built from other inputs ({changed}): remove it, or choose another")


def _claim(out: Path, inputs: Inputs, given: Tokenizer | None) -> Tokenizer:
    """Say what is built here in `building.json`, and train or copy the tokenizer once for all parts."""
    (out / PARTS).mkdir(exist_ok=True)
    with alone(out / PARTS / ".lock"):
        claimed = read_table(Inputs, out / STATE) if (out / STATE).exists() else None
        if claimed is None and (foreign := [p.name for p in out.iterdir() if not p.name.startswith(".")]):
            raise DataError(f"{out} holds other files ({foreign[0]}): choose a new or empty folder")
        if claimed != inputs:
            states = [read_table(State, path) for path in (out / PARTS).glob("*.json")]
            if claimed is not None and any(state.tokens for state in states):
                _same_inputs(out, claimed, inputs)
            for path in (*(out / PARTS).glob("[0-9]*"), out / "tokenizer.json"):  # nothing to lose
                path.unlink(missing_ok=True)
            write_atomic(out / STATE, json.dumps(asdict(inputs)))
        if not (out / "tokenizer.json").exists():
            tokenizer = given or train_bpe(_sample(inputs.corpus), inputs.vocab_size or 0)
            tokenizer.save(out / "tokenizer.json")
    return load_tokenizer(out)


def _join(out: Path, inputs: Inputs, tokenizer: Tokenizer) -> Manifest | None:
    """Name the shards and write the manifest; nothing if a segment is missing. After a kill it is done again."""
    found = segments(out, inputs)
    states = [segment.state for segment in found]
    if any(state.file < segment.files.stop for state, segment in zip(states, found, strict=True)):
        return None
    if not any(shard.bytes_of_text for state in states for shard in (*state.train, *state.valid)):
        paths = [source.path for source in inputs.sources[:3]]
        raise DataError(f"the corpus is empty: there is no text in {', '.join(paths)}")
    named: dict[Split, list[Shard]] = {"train": [], "valid": []}
    units_before = accumulate((state.units for state in states), initial=0)
    for state, before in zip(states, units_before, strict=False):
        for split in SPLITS:
            for shard in state.train if split == "train" else state.valid:
                unit = int(shard.name.removesuffix(".bin").rpartition("-")[2])
                name = f"{split}-{before + unit:05d}.bin"
                if (out / PARTS / shard.name).exists():
                    os.replace(out / PARTS / shard.name, out / name)
                named[split].append(replace(shard, name=name))
    sync_path(out)
    manifest = Manifest(
        format=FORMAT,
        inputs=inputs,
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.dtype == np.uint16 else "uint32",
        train=tuple(named["train"]),
        valid=tuple(named["valid"]),
        skipped=sum(state.skipped for state in states),
    )
    write_atomic(out / "manifest.json", json.dumps(asdict(manifest), indent=1))
    _clear(out)
    return manifest


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


def _write(
    own: list[Segment], inputs: Inputs, tokenizer: Tokenizer, workers: int, progress: Progress | None
) -> None:
    """Write these segments; another process may be at one of them."""
    sizes = {file: inputs.sources[file].bytes for segment in own for file in segment.files}
    bytes_before = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    total_bytes, tokens = sum(sizes.values()), 0

    def tell(document: Document, tokens_of_segment: int) -> None:
        if progress:
            read_bytes = bytes_before[document.file] + document.row.offset_bytes
            progress(read_bytes, total_bytes, tokens + tokens_of_segment)

    for segment in own:
        with alone(segment.place.with_suffix(".lock")):
            state = segment.write(inputs, tokenizer, workers, tell)
        tokens += state.tokens
