"""Durable files: what is reported as written survives a crash, and nobody ever sees half a file."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from redline.errors import StorageError

REFUSALS = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "EEXIST", "EFBIG", "EIO", "ENOENT")
}


@contextlib.contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write into one line that says what to do about it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"the disk is full: {what} could not be written to {path}; free some space and run the same"
                " command"
            ) from error
        if error.errno in REFUSALS:
            way_out = (
                "set REDLINE_CACHE to another folder"
                if cache_folder() in (path, *path.parents)
                else "choose another folder"
            )
            raise StorageError(f"{what} cannot be written to {path}: {error.strerror}; {way_out}") from error
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside the file to write to. When the block ends well it takes the file's place (fsync, rename,
    fsync of the folder); when not, the file is what it was and nothing is left beside it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path.name, path.parent):
        try:
            yield temporary
            sync_path(temporary)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


def write_atomic(path: Path, text: str) -> None:
    """Replace the file by `text`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_path(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Where measured ceilings and built data sets are kept: $REDLINE_CACHE, else the user's cache folder."""
    if named := os.environ.get("REDLINE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redline"
