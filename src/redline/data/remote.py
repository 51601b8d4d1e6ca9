"""Data folders in an object store: `s3://bucket/corpus`, `gs://bucket/corpus`, or any other address that fsspec knows.

    folder = fetch_folder("s3://bucket/corpus")      # a local mirror: manifest.json and tokenizer.json, no shards yet
    shards = FetchedShards(folder, manifest.train)   # used like a list of arrays; each is fetched when it is needed

The mirrors lie under $REDLINE_CACHE/remote, and all processes of a node share them. Together their shards take at most
$REDLINE_SHARDS_GB (default 32); the least recently used are removed first. A shard is fetched under a temporary
name, compared with the manifest's hash and renamed, so a fetch that is killed leaves nothing that looks like a shard.

Lock files lie beside the shards; the kernel releases those of a dead process. A process that reads a shard, or waits
for it, shares its lock; one that removes it must hold that lock alone, without waiting. The process that fetches holds
the lock of the temporary name. A lock for the whole cache guards what is counted against the bound.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from redline.errors import ConfigError, DataError, need
from redline.record.files import alone, cache_folder, read_json, storage_errors, write_atomic
from redline.record.units import format_bytes

if TYPE_CHECKING:
    from redline.data.shards import Shard

BOUND = "REDLINE_SHARDS_GB"
BOUND_GB = 32.0
"""Five times what training holds at a time, two groups of MIXED_SHARDS (`shards`) with 2-byte tokens."""
ORIGIN = "origin.json"
BLOCK_BYTES = 16 * 2**20
FETCHES = 4
"""Shards that a process fetches at a time: one stream does not fill a fast link."""

# the package that reads an address, the extra that brings it, and where it takes its credentials from
_STORES = {
    "s3": ("s3fs", "s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    "gs": ("gcsfs", "gs", "GOOGLE_APPLICATION_CREDENTIALS"),
}
# what those packages raise besides OSError
_RAISED = {
    "s3": ("botocore.exceptions.BotoCoreError", "aiohttp.ClientError", "http.client.HTTPException"),
    "gs": ("gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError", "aiohttp.ClientError"),
}


def is_remote(place: str) -> bool:
    return "://" in place and not place.startswith("hf://")


def folder_at(place: str) -> Path:
    """The data folder on disk, or the mirror of one that is in a store."""
    return fetch_folder(place) if is_remote(place) else Path(os.path.expanduser(place))


def fetch_folder(url: str) -> Path:
    """The mirror of a data folder, with its current manifest and tokenizer. Another manifest makes
    another mirror, so the shards of a folder that was built again are never mixed."""
    manifest = _read(url := url.rstrip("/"), "manifest.json")
    folder = _mirrors() / hashlib.sha256(url.encode() + b"\n" + manifest).hexdigest()[:16]
    with storage_errors("the mirror of a data folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ORIGIN).exists():
            # whoever reads them says what is wrong with text that is not UTF-8
            tokenizer = _read(url, "tokenizer.json").decode(errors="replace")
            write_atomic(folder / "tokenizer.json", tokenizer)
            write_atomic(folder / "manifest.json", manifest.decode(errors="replace"))
            write_atomic(folder / ORIGIN, json.dumps({"url": url}))
    return folder


def is_mirror(folder: Path) -> bool:
    return (folder / ORIGIN).is_file()


def stored_manifest(url: str) -> bytes | None:
    with _store(url, "manifest.json") as (store, path):
        return store.cat_file(path) if store.exists(path) else None


def upload(folder: Path, url: str) -> None:
    """Copy a finished data folder to an address, the manifest last: without one it is unfinished."""
    if (there := stored_manifest(url)) == (folder / "manifest.json").read_bytes():
        return
    if there is not None:
        raise DataError(f"{url} holds another data folder: remove it, or choose another address")
    with _store(url) as (store, root):
        if url.partition("://")[0] not in _STORES:  # in a known store this would make a bucket
            store.makedirs(root, exist_ok=True)
        for path in (*sorted(folder.glob("*.bin")), folder / "tokenizer.json", folder / "manifest.json"):
            store.put_file(str(path), f"{root}/{path.name}")


class FetchedShards(Sequence[np.ndarray]):
    """The shards of one split, memory-mapped from the mirror. Threads may share it."""

    def __init__(self, folder: Path, shards: "Sequence[Shard]", dtype: np.dtype) -> None:
        self.lengths = [shard.tokens for shard in shards]
        self._folder = folder
        self._url = str(read_json(folder / ORIGIN, dict)["url"])
        self._shards = shards
        self._dtype = dtype
        self._bound_bytes = _bound_bytes()
        self._lock = threading.Lock()
        self._wanted: frozenset[int] = frozenset()
        self._fetching: dict[int, Future[None]] = {}
        self._open: dict[int, tuple[np.ndarray, IO[bytes]]] = {}
        self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: Any) -> Any:
        """The tokens of a shard, which is fetched if it is not in the mirror."""
        with self._lock:
            if (held := self._open.get(index)) is not None:
                return held[0]
            self._wanted |= {index}
            self._fetch_later(index)
            future = self._fetching[index]
        with contextlib.suppress(CancelledError):  # an earlier `want` cancelled it
            future.result()
        lock = self._hold(index)
        with self._lock:
            if index in self._open:  # another thread was faster
                lock.close()
            else:
                self._open[index] = np.memmap(self._folder / self._shards[index].name, self._dtype, "r"), lock
            return self._open[index][0]

    def want(self, now: list[int], ahead: list[int]) -> None:
        """Fetch `now`, then `ahead`, in the background, and release all others; with nothing wanted, fetches stop."""
        sizes = sorted(self._size_bytes(index) for index in range(len(self)))
        if (needed := sum(sizes[len(sizes) - len(now) - len(ahead) :])) > self._bound_bytes:
            raise DataError(
                f"training holds up to {format_bytes(needed)} of {self._url} in the cache at a time, but {BOUND}"
                f" allows {format_bytes(self._bound_bytes)}: set it to at least {needed / 1e9:.3g}"
            )
        with self._lock:
            self._wanted = frozenset((*now, *ahead))
            for index in self._open.keys() - set(now):
                self._open.pop(index)[1].close()
            for index in self._fetching.keys() - self._wanted:
                self._fetching.pop(index).cancel()
            for group in (now, ahead):
                turn = os.getpid() % max(1, len(group))  # the processes of a node begin at different shards
                for index in (*group[turn:], *group[:turn]):
                    if index not in self._open:
                        self._fetch_later(index)

    def verify(self) -> None:
        """Fetch every shard, and hash those that were here already."""
        for index, shard in enumerate(self._shards):
            self._wanted |= {index}
            with self._hold(index), open(self._folder / shard.name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise DataError(f"{file.name} was altered: remove it, and it is fetched again")

    def _size_bytes(self, index: int) -> int:
        return self.lengths[index] * self._dtype.itemsize

    def _fetch_later(self, index: int) -> None:
        """A fetch that failed ahead of time is tried again when the shard is needed."""
        before = self._fetching.get(index)
        if before is None or (before.done() and (before.cancelled() or before.exception() is not None)):
            self._fetching[index] = self._pool.submit(lambda: self._hold(index).close())

    def _hold(self, index: int) -> IO[bytes]:
        """The lock of a shard that is in the mirror, shared with other readers: nobody removes it meanwhile."""
        path = self._folder / self._shards[index].name
        temporary = path.with_name(f"{path.name}.tmp")
        with contextlib.ExitStack() as on_error:
            lock = on_error.enter_context(open(_lock_path(path), "wb"))
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not self._is_there(index):
                with alone(_lock_path(temporary)):
                    if not self._is_there(index):  # another process may have fetched it while we waited
                        self._fetch(index, path, temporary)
            os.utime(path)
            on_error.pop_all()
            return lock

    def _is_there(self, index: int) -> bool:
        path = self._folder / self._shards[index].name
        return path.exists() and path.stat().st_size == self._size_bytes(index)

    def _fetch(self, index: int, path: Path, temporary: Path) -> None:
        shard, size_bytes, digest = self._shards[index], self._size_bytes(index), hashlib.sha256()
        with storage_errors("a shard", path.parent):
            try:
                self._reserve(temporary, size_bytes)
                with open(temporary, "r+b") as file:
                    for block in _blocks(self._url, shard.name):
                        if not self._wanted:  # closed; else it is finished, perhaps for another process
                            raise CancelledError
                        digest.update(block)
                        file.write(block)
                        if file.tell() > size_bytes:
                            break
                    file.flush()
                    os.fsync(file.fileno())
                    if (found := file.tell()) != size_bytes:
                        raise self._wrong(shard, f"has {found} bytes and should have {size_bytes}")
                if digest.hexdigest() != shard.sha256:
                    raise self._wrong(shard, "was altered: its sha256 is not the manifest's")
                with _room():
                    os.replace(temporary, path)
            finally:
                with _room():
                    temporary.unlink(missing_ok=True)

    def _wrong(self, shard: "Shard", what: str) -> DataError:
        return DataError(f"shard {self._url}/{shard.name} {what}; upload it again, or build the folder again")

    def _reserve(self, temporary: Path, size_bytes: int) -> None:
        """Remove shards that nobody reads, and what killed fetches left, until a file of this size fits; make it."""
        with _room():
            temporary.unlink(missing_ok=True)
            files = [*_mirrors().glob("*/*.bin"), *_mirrors().glob("*/*.tmp")]
            found = sorted((file.stat().st_mtime_ns, str(file), file.stat().st_size) for file in files)
            free_bytes = self._bound_bytes - sum(size for _, _, size in found)
            for _, name, size in found:
                if free_bytes >= size_bytes:
                    break
                with open(_lock_path(Path(name)), "wb") as lock, contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name)
                    free_bytes += size
            if free_bytes < size_bytes:
                raise DataError(
                    f"the shard cache is full: shards in use leave {format_bytes(max(0, free_bytes))} of"
                    f" {format_bytes(self._bound_bytes)}, and a shard takes {format_bytes(size_bytes)}: raise {BOUND}"
                )
            with open(temporary, "wb") as file:
                file.truncate(size_bytes)


def _mirrors() -> Path:
    return cache_folder() / "remote"


def _bound_bytes() -> int:
    value = os.environ.get(BOUND) or str(BOUND_GB)
    try:
        if (bound := float(value)) > 0:
            return int(bound * 1e9)
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"{BOUND} must be a number of gigabytes above 0, got {value!r:.40}")


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _room() -> contextlib.AbstractContextManager[None]:
    """Lock out others while a file that counts against the bound is added, renamed or removed."""
    return alone(_lock_path(_mirrors() / "room"))


# ---- the store ----


def _read(url: str, name: str) -> bytes:
    with _store(url, name) as (store, path):
        return store.cat_file(path)


def _blocks(url: str, name: str) -> Iterator[bytes]:
    with _store(url, name) as (store, path), store.open(path, "rb", block_size=BLOCK_BYTES) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


@contextlib.contextmanager
def _store(url: str, name: str = "") -> Iterator[tuple[Any, str]]:
    """fsspec's file system and the path on it. An error, after the package's retries, becomes one line."""
    url = url.rstrip("/")
    address, protocol = f"{url}/{name}" if name else url, url.partition("://")[0]
    package, extra, credentials = _STORES.get(protocol, ("fsspec", "", "its settings in fsspec"))
    need(package, extra=extra)  # fsspec itself comes with torch
    names = [name.rpartition(".") for name in _RAISED.get(protocol, ())]
    raised = tuple(getattr(importlib.import_module(where), name) for where, _, name in names)
    core: Any = importlib.import_module("fsspec.core")
    try:
        store, path = core.url_to_fs(address)
    except (ValueError, ImportError) as error:
        raise DataError(f"{url} cannot be read: {error}; s3:// and gs:// can") from error
    try:
        yield store, path
    except FileNotFoundError as error:
        way_out = "check the bucket and the folder, which `redline data build` makes"
        raise DataError(f"{address} does not exist: {way_out}") from error
    except (OSError, *raised) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        if isinstance(error, PermissionError) or "credentials" in why.lower():
            raise DataError(f"{address} cannot be opened ({why}): check {credentials}") from error
        way_out = "run the same command again when the store can be reached, and it resumes"
        raise DataError(f"{address} cannot be reached ({why}): {way_out}") from error
