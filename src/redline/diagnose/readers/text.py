"""Bytes to lines: compressed or not, UTF-8 or UTF-16, with colours, carriage returns and the prefixes of launchers.

    lines_of(text_of(Path("train.log.xz")))

What a terminal would have shown is what is read: colours go, a progress bar that rewrites its line becomes one line
each time. Nothing is refused for a few bytes that are not text, because console logs hold them.
"""

import bz2
import codecs
import gzip
import io
import lzma
import re
import stat
from pathlib import Path
from typing import IO, Any

from redline.errors import DataError

MOST_BYTES = 512 * 2**20
"""A log is read whole; a larger one is refused before it fills the memory."""
MOST_CHARACTERS = 65_536
"""Of a line: what is longer is a dump and not a line of numbers. JSON is read whole."""
_PACKED: dict[bytes, Any] = {b"\xfd7zXZ\0": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?|[@-Z\\-_])")
_LAUNCHER = re.compile(
    r"\s*(?:\[(?:default|\w*rank)?[ _]?\d{1,5}\]:|\[\d+,\d+\]<std\w+>:|\((?:\w+) pid=\d+(?:, ip=[\d.]+)?\)|[\w.-]+: (?=\[?rank))\s?"
)
"""torchrun's [rank0]: and [default0]:, mpirun's [1,0]<stdout>:, Ray's (TaskRunner pid=1)."""
_NUMBERED = re.compile(r" {0,5}\d{1,5}: ")
"""`srun -l`; taken off only where most lines begin so, for a trainer may number its own lines."""


def text_of(path: Path) -> str:
    """The text of a file, or one line that says why there is none."""
    raw = bytes_of(path)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif len(raw) > 3 and raw[1:4096:2].count(0) > 0.4 * len(raw[1:4096:2]):  # PowerShell, without a mark
        encoding = "utf-16-le"
    else:
        encoding = "utf-8-sig"
        if raw[:4096].count(0) > 0.1 * len(raw[:4096]):
            raise DataError(f"{path} is not text: give the log, not a checkpoint or an archive")
    text = raw.decode(encoding, errors="replace").replace("\0", "")
    if not text.strip():
        raise DataError(f"{path} is empty: the trainer has not written anything to it yet")
    return text


def bytes_of(path: Path) -> bytes:
    """The bytes of a file, unpacked."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path} is not a plain file: give a log")
        with open(path, "rb") as file:
            head = file.read(6)
            file.seek(0)
            opened: IO[bytes] = file
            for magic, unpacks in _PACKED.items():
                if head.startswith(magic):
                    opened = unpacks(file)
            raw = opened.read(MOST_BYTES + 1)
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as damage:
        raise DataError(f"{path} is compressed and damaged: {damage}") from damage
    except (OSError, ValueError) as refusal:
        raise DataError(
            f"{path} cannot be read: {getattr(refusal, 'strerror', None) or refusal}"
        ) from refusal
    if len(raw) > MOST_BYTES:
        raise DataError(f"{path} holds more than {MOST_BYTES >> 20} MiB: cut out a part of it")
    return raw


def lines_of(text: str) -> list[str]:
    """The lines as a terminal would have shown them, without colours and launchers' prefixes."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    lines = [line[:MOST_CHARACTERS] for line in io.StringIO(text, newline=None)]  # \r and \r\n end a line too
    lines = [line.rstrip() for line in lines]
    shown = [line for line in lines[:2000] if line]
    if sum(_NUMBERED.match(line) is not None for line in shown) > 0.5 * len(shown):
        lines = [_without(_NUMBERED, line) for line in lines]
    return [_without(_LAUNCHER, _without(_LAUNCHER, line)) for line in lines]  # a launcher inside a launcher


def _without(prefix: re.Pattern[str], line: str) -> str:
    found = prefix.match(line)
    return line[found.end() :] if found else line
