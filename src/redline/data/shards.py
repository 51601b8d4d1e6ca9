"""Token shards: what `redline data build` leaves on disk or in an object store, and how training reads it.

A data folder holds `manifest.json`, `tokenizer.json` and per split `train-00000.bin`, `valid-00000.bin`, ...: bare
little-endian token ids, whole documents, each followed by the end-of-text token. A split is the concatenation of its
shards; training reads windows of `seq_len` tokens and one more (the last target) across shard borders.

    dataset = TokenDataset.open(folder, "train")
    tokens = dataset.read_windows(np.array([0, 7]), seq_len=1024)        # (2, 1025), int64
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, Self, TypeVar

import numpy as np

from redline.config.load import build
from redline.config.recipe import fingerprint_of
from redline.data.read import Corpus, Split
from redline.data.remote import FetchedShards, is_mirror
from redline.data.tokenizer import load_tokenizer
from redline.errors import ConfigError, DataError
from redline.record.files import read_json

T = TypeVar("T")

FORMAT = 1
MIXED_SHARDS = 32
"""Shards whose windows training mixes: 1.6 billion tokens, or all of a smaller data set. Mixing more would make a node
keep, or fetch again and again, a data set that does not fit on its disk."""

Position = dict[str, int]
"""Where the next batch starts; goes into a checkpoint as JSON."""
Job = Callable[[], tuple[np.ndarray, Position]]
"""Prepares a batch, perhaps in another thread: its rows, and the position after them."""


@dataclass(frozen=True)
class SourceFile:
    """A source file of the shards, as it was then."""

    path: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Inputs:
    """Everything that determines a data folder; equal inputs give equal bytes."""

    sources: tuple[SourceFile, ...]
    tokenizer: str
    """`bpe`, or the fingerprint of the given tokenizer."""
    vocab_size: int | None
    """Size of the BPE to train; None if a tokenizer is given."""
    text_field: str
    valid_fraction: float
    shard_tokens: int

    @property
    def key(self) -> str:
        return fingerprint_of(asdict(self))

    @property
    def corpus(self) -> Corpus:
        paths = tuple(Path(source.path) for source in self.sources)
        return Corpus(paths, self.text_field, self.valid_fraction)


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    documents: int
    bytes_of_text: int
    """UTF-8 bytes of the documents, for bits per byte."""
    max_id: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`. It is written last: a folder that has one is complete."""

    format: int
    inputs: Inputs
    tokenizer: str
    """Fingerprint of the folder's tokenizer.json."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    train: tuple[Shard, ...]
    valid: tuple[Shard, ...]
    skipped: int = 0
    """Rows without text, left out."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / "manifest.json"
        if not path.exists():
            raise DataError(f"{folder} is not a data folder (no {path.name}): run `redline data build`")
        manifest = read_table(cls, path)
        if manifest.format != FORMAT:
            wrong = f"{path} has format {manifest.format}, but this version reads {FORMAT}"
            raise DataError(f"{wrong}: remove {folder} and build it again")
        return manifest

    def shards(self, split: Split) -> tuple[Shard, ...]:
        return self.train if split == "train" else self.valid

    @property
    def fingerprint(self) -> str:
        """Names the tokens themselves, wherever they were built from."""
        hashes = [self.tokenizer, *(shard.sha256 for shard in (*self.train, *self.valid))]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:16]


def check_vocab(tokenizer_vocab_size: int, model_vocab_size: int) -> None:
    if tokenizer_vocab_size > model_vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer_vocab_size} ids and model.vocab_size is {model_vocab_size}: "
            f"set model.vocab_size to at least {tokenizer_vocab_size}, or use another tokenizer"
        )


def check_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Refuse a data folder whose tokenizer.json did not make its tokens."""
    if load_tokenizer(folder).fingerprint != manifest.tokenizer:
        wrong = f"{folder / 'tokenizer.json'} is not the tokenizer that made the shards"
        raise DataError(f"{wrong}: put that one back, or remove {folder} and build it again")


def read_table(kind: type[T], path: Path) -> T:
    """A dataclass from a JSON file with exactly its fields and types."""
    try:
        return build(kind, read_json(path, dict), where="its content")
    except ConfigError as error:
        raise DataError(f"{path} is damaged: {error}; remove {path.parent} and build it again") from error


class TokenDataset:
    """One split, as the concatenation of memory-mapped shards (or of arrays in memory)."""

    def __init__(
        self, name: str, arrays: Sequence[np.ndarray], *, vocab_size: int, bytes_of_text: int
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.bytes_of_text = bytes_of_text
        self._arrays = arrays
        lengths = arrays.lengths if isinstance(arrays, FetchedShards) else map(len, arrays)
        self._starts = np.cumsum([0, *lengths])
        self.tokens = int(self._starts[-1])

    @classmethod
    def open(cls, folder: str | Path, split: Split, *, verify: bool = False) -> Self:
        """Map the shards of a data folder; those of a mirror are fetched and hashed as they are needed. Sizes and ids
        are always checked, hashes (a full read) if `verify`."""
        folder = Path(folder)
        manifest = Manifest.load(folder)
        shards = manifest.shards(split)
        arrays: Sequence[np.ndarray]
        if is_mirror(folder):
            arrays = FetchedShards(folder, shards, np.dtype(manifest.dtype).newbyteorder("<"))
            if verify:
                arrays.verify()
        else:
            arrays = [_map(folder / shard.name, shard, manifest, verify) for shard in shards]
        size, name = sum(shard.bytes_of_text for shard in shards), f"{split} split of {folder}"
        return cls(name, arrays, vocab_size=manifest.vocab_size, bytes_of_text=size)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token: turns nats per token into bits per byte."""
        return self.bytes_of_text / self.tokens

    def windows(self, seq_len: int) -> int:
        """How many non-overlapping windows there are; each needs one token more for its last target."""
        return max(0, self.tokens - 1) // seq_len

    def windows_inside(self, seq_len: int) -> np.ndarray:
        """For each shard, the first window that lies wholly in it, and the first after those: (shards, 2)."""
        first = -(-self._starts[:-1] // seq_len)
        return np.stack([first, np.maximum(first, (self._starts[1:] - 1) // seq_len)], axis=1)

    def want(self, now: set[int], ahead: set[int]) -> None:
        """Fetch shards before they are read, and let go of all others; shards on disk need neither."""
        if isinstance(self._arrays, FetchedShards):
            self._arrays.want(sorted(now), sorted(ahead))

    def need_window(self, seq_len: int, or_else: str = "give more text, or a smaller data.seq_len") -> None:
        """Refuse a split too short for a single sequence; call it at the start, not at the first validation."""
        if not self.windows(seq_len):
            short = f"{self.name} has {self.tokens} tokens and one sequence needs {seq_len + 1}"
            raise DataError(f"{short}: {or_else}")

    def read_windows(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
        """The windows as (len(indices), seq_len + 1) int64; window i starts at token i * seq_len."""
        rows = np.empty((len(indices), seq_len + 1), dtype=np.int64)
        starts = np.asarray(indices, dtype=np.int64) * seq_len
        first_shards = np.searchsorted(self._starts, starts, side="right") - 1
        for row, start, shard in zip(rows, starts.tolist(), first_shards.tolist(), strict=True):
            filled = 0
            while filled < len(row):
                offset = start + filled - int(self._starts[shard])
                part = self._arrays[shard][offset : offset + len(row) - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
                shard += 1
        if rows.size and (highest := int(rows.max())) >= self.vocab_size:
            beyond = f"token {highest}, beyond the vocabulary of {self.vocab_size}"
            raise DataError(f"{self.name} holds {beyond}: build it again")
        return rows

    def order(
        self, *, seq_len: int, seed: int, position: Position | None, threads: int = 1
    ) -> "ShuffledWindows":
        del threads  # the loader's threads read
        return ShuffledWindows(self, seq_len=seq_len, seed=seed, position=position)


def _map(path: Path, shard: Shard, manifest: Manifest, verify: bool) -> np.ndarray:
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    expected_bytes = shard.tokens * dtype.itemsize
    wrong = None
    try:
        if (size_bytes := path.stat().st_size) != expected_bytes:
            wrong = f"has {size_bytes} bytes and should have {expected_bytes}"
        elif shard.max_id >= manifest.vocab_size:
            wrong = f"holds token {shard.max_id}, beyond the vocabulary of {manifest.vocab_size}"
        elif verify:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    wrong = "was altered: its sha256 is not the manifest's"
        if wrong is None:
            return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        wrong = f"cannot be read ({error})"
    raise DataError(f"shard {path} {wrong}: remove {path.parent} and build it again")


class ShuffledWindows:
    """The order of training: in each epoch a seeded permutation of all windows, each exactly once.

    A split of more than MIXED_SHARDS is read in groups: each epoch shuffles the shards, deals them into groups of that
    size and permutes the windows of one group after the other. Windows that cross from one shard into the next, one
    in tens of thousands, are left out then. The n-th sequence of a run depends only on n and the seed, so the position
    is one number and a batch is the same on any number of processes. A batch may span groups and epochs."""

    def __init__(self, dataset: TokenDataset, *, seq_len: int, seed: int, position: Position | None) -> None:
        dataset.need_window(seq_len)
        self._dataset = dataset
        self._seq_len = seq_len
        self._seed = seed
        self._inside = dataset.windows_inside(seq_len)
        self._grouped = len(self._inside) > MIXED_SHARDS
        self._windows = int(np.diff(self._inside).sum()) if self._grouped else dataset.windows(seq_len)
        if not self._windows:
            raise DataError(f"no shard of {dataset.name} holds a whole sequence: use a smaller data.seq_len")
        self._next = position["sequence"] if position else 0
        self._groups = lru_cache(maxsize=3)(self._deal)
        self._permutation = lru_cache(maxsize=2)(self._shuffle)
        self._unread: Counter[tuple[int, int]] = Counter()
        self._wanted: tuple[set[int], set[int]] | None = None
        self._lock = threading.Lock()

    def claim(self, count: int, rows: slice) -> Job:
        """Move past the next `count` sequences; the job reads those that `rows` selects."""
        sequences = np.arange(self._next, self._next + count)[rows]
        self._next += count
        with self._lock:
            groups = Counter(list(self._places(sequences)))
            self._unread += groups
            self._want()
        return partial(self._read, sequences, groups, {"sequence": self._next})

    def close(self) -> None:
        """Let go of shards that were fetched."""
        self._dataset.want(set(), set())

    def _want(self) -> None:
        """Hold the shards of all batches that are not read yet, and fetch those of the group that comes next; at the
        border of two groups both are held, and the third waits until the first is done."""
        epoch, group = max(self._unread)
        following = (epoch, group + 1) if group + 1 < len(self._groups(epoch)[0]) else (epoch + 1, 0)
        now = {int(shard) for e, g in self._unread for shard in self._groups(e)[0][g]}
        ahead = self._groups(following[0])[0][following[1]].tolist() if len(self._unread) == 1 else []
        wanted = now, set(ahead) - now
        if wanted != self._wanted:
            self._dataset.want(*wanted)
            self._wanted = wanted

    def _read(
        self, sequences: np.ndarray, groups: Counter[tuple[int, int]], position_after: Position
    ) -> tuple[np.ndarray, Position]:
        indices = np.empty_like(sequences)
        with self._lock:
            for (epoch, group), (here, places) in self._places(sequences).items():
                indices[here] = self._permutation(epoch, group)[places]
        rows = self._dataset.read_windows(indices, self._seq_len)
        with self._lock:
            self._unread -= groups
        return rows, position_after

    def _places(self, sequences: np.ndarray) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        """For each epoch and group that they fall into: which sequences, and their places in the group."""
        found = {}
        epochs, places = np.divmod(sequences, self._windows)
        for epoch in np.unique(epochs).tolist():
            _, ends = self._groups(epoch)
            groups = np.searchsorted(ends, places, side="right")
            for group in np.unique(groups[epochs == epoch]).tolist():
                here = (epochs == epoch) & (groups == group)
                found[epoch, group] = here, places[here] - (ends[group - 1] if group else 0)
        return found

    def _deal(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The shards of each group, and the number of windows up to its end."""
        shards = len(self._inside)
        if not self._grouped:
            return [np.arange(shards)], np.array([self._windows])
        groups = np.split(_shuffled(shards, self._seed, epoch), range(MIXED_SHARDS, shards, MIXED_SHARDS))
        return groups, np.cumsum([np.diff(self._inside[group]).sum() for group in groups])

    def _shuffle(self, epoch: int, group: int) -> np.ndarray:
        if self._grouped:
            inside = self._inside[self._groups(epoch)[0][group]]
            windows = np.concatenate([np.arange(first, end) for first, end in inside])
            windows = windows[_shuffled(len(windows), self._seed, epoch, group)]
        else:
            windows = _shuffled(self._windows, self._seed, epoch)
        return windows.astype(np.uint32 if self._dataset.tokens < 2**32 else np.uint64)


def _shuffled(count: int, *seed: int) -> np.ndarray:
    """Sorts raw draws, which numpy keeps stable; `Generator.permutation` may change with a version."""
    return np.argsort(np.random.PCG64(list(seed)).random_raw(count), kind="stable")
