"""Our files, written durably and read strictly.

What is reported as written survives a crash, and nobody sees half a file. A reader gets a value of the right kind, or
one line that names the file, what is wrong and the way out: a file may be unreadable, a pipe, huge, random bytes,
nested 100,000 deep or hold numbers of 5,000 digits.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from redline.errors import DataError, RedlineError, StorageError

T = TypeVar("T")
# Far more than we write (a month of metrics, the largest tokenizer); far less than would fill a machine.
LARGEST_BYTES = 1 << 30
_LONG_NUMBER = re.compile(r"\d{19}")
WAY_OUT = "correct the file, or move it away"
_KINDS: dict[type, str] = {dict: "a table", list: "a list"}

REFUSALS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EFBIG, errno.EIO,
    errno.ENOENT,
}  # fmt: skip


@contextlib.contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write into one line that says what to do about it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = f"the disk is full: {what} could not be written to {path}"
            raise StorageError(f"{full}; free some space and run the same command again") from error
        if error.errno in REFUSALS:
            cached = cache_folder() in (path, *path.parents)
            way_out = "set REDLINE_CACHE to another folder" if cached else "choose another folder"
            raise StorageError(f"{what} cannot be written to {path}: {error.strerror}; {way_out}") from error
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to. When the block succeeds it takes the file's place (fsync, rename, fsync of the
    folder); if not, the file is unchanged and nothing is left beside it."""
    if path.is_dir():
        raise StorageError(f"{path} is a folder, and a file is to be written: give a file name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path.name, path.parent):
        try:
            yield temporary
            sync_path(temporary)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # report the first error
                temporary.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


def read_text(
    path: Path,
    *,
    error: type[RedlineError] = DataError,
    whole_lines: bool = False,
    missing: str | None = None,
) -> str:
    """The text of a plain file, or `error` in one line. `whole_lines` drops a torn last line (its writer died). A
    missing file gives `missing`, if that is not None."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer that may never come.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise error(f"{path} is not a plain file: move it away")
            if found.st_size > LARGEST_BYTES:
                raise error(f"{path} holds {found.st_size:,} bytes, which is more than we read: move it away")
            raw = file.read()
        return (raw[: raw.rfind(b"\n") + 1] if whole_lines else raw).decode("utf-8")
    except OSError as refusal:
        if missing is not None and isinstance(refusal, FileNotFoundError | NotADirectoryError):
            return missing
        raise error(f"{path} cannot be read: {refusal.strerror}") from refusal
    except UnicodeDecodeError as damage:
        raise error(f"{path} is damaged: it is not UTF-8 text (byte {damage.start}); {WAY_OUT}") from damage
    except ValueError as damage:
        raise error(f"{str(path)!r} cannot be the name of a file: {damage}") from damage


def parse_json(text: str, where: object, kind: type[T], *, error: type[RedlineError] = DataError) -> T:
    """JSON text as a value of `kind` (`dict`, `list`), or `error` in one line. Numbers fit in 64 bits and texts can
    be written as UTF-8, so nobody has to check them again."""
    try:
        value = json.loads(text, parse_int=_parse_int if _LONG_NUMBER.search(text) else None)
        if "\\u" in text:  # half a surrogate pair can be escaped, but not be written
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as damage:
        reason = "it is nested too deeply" if isinstance(damage, RecursionError) else damage
        raise error(f"{where} is damaged: {reason}; {WAY_OUT}") from damage
    if not isinstance(value, kind):
        raise error(f"{where} is damaged: it must hold {_KINDS[kind]}, not {text.strip()[:40]!r}; {WAY_OUT}")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError(f"a number of {len(digits)} digits, which does not fit in 64 bits")
    return value


def read_json(path: Path, kind: type[T], *, error: type[RedlineError] = DataError) -> T:
    """A JSON file as a value of `kind`, or `error` in one line."""
    return parse_json(read_text(path, error=error), path, kind, error=error)


def write_atomic(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_vacant(folder: Path, what: str) -> None:
    """Refuse a folder that is not empty, as the files would mix, and the one that the program was started in."""
    if folder.exists() and folder.samefile(os.curdir):  # which may have been removed: it has no name then
        raise StorageError(f"{what} needs a new folder, but {folder} is the one you are in: name another")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"{what} needs a new folder, but {folder} exists: remove it or choose another")


@contextlib.contextmanager
def new_folder(folder: Path, what: str) -> Iterator[Path]:
    """A temporary folder to write to, which becomes `folder` when the block succeeds: complete or not at all."""
    check_vacant(folder, what)
    temporary = folder.with_name(f".{folder.name}.tmp")
    with storage_errors(what, folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync_path(path)
        os.replace(temporary, folder)
        sync_path(folder.parent)


def sweep(folder: Path) -> None:
    """Remove what killed writers left in a folder under the temporary names above. Nobody may be writing there."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # it may be read-only
                path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@cache
def shipped(path: str) -> dict[str, Any]:
    """A TOML file of the package, such as `record/events.toml`."""
    import tomllib  # here, because `redline --help` reads none and would take a seventh longer
    from importlib.resources import files

    return tomllib.loads((files("redline") / path).read_text(encoding="utf-8"))


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock. The kernel frees the lock of a dead process."""
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path:
    """Where measured ceilings and built data sets are kept: $REDLINE_CACHE, else the user's cache folder."""
    if named := os.environ.get("REDLINE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redline"
