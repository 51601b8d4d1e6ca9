"""A file to rows of names and raw cells, whatever its form: JSON, JSON lines, CSV, TensorBoard events, the outputs of a
notebook, or the console that a terminal would have shown, which miner.py makes rows of.

    source = source_of(Path("train.log.xz"))

Compressed or not, UTF-8 or UTF-16; colours go, a progress bar that rewrites its line becomes one line each time. A line
that is not JSON among many that are is left out and counted; half a last line always is. Nothing is refused for a few
bytes that are not text, because console logs hold them.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from redline.diagnose.data import patterns
from redline.diagnose.readers.cells import finite
from redline.diagnose.readers.miner import Mined, mine
from redline.errors import DataError, need

MOST_BYTES = 512 * 2**20
"""A log is read whole; a larger one is refused before it fills the memory."""
HEAD = 200_000
"""Characters of a console in which its trainer and facts are looked for."""
MOST_CHARACTERS = 65_536
"""Most characters of a line: a longer one is a dump, not a line of numbers. JSON is read whole."""
_PACKED: dict[bytes, Any] = {b"\xfd7zXZ\0": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}
TEXT = patterns("text")


def text_of(path: Path) -> str:
    """The text of a file, or one line that says why there is none."""
    raw = bytes_of(path)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif len(raw) > 3 and raw[1:4096:2].count(0) > 0.4 * len(raw[1:4096:2]):  # PowerShell, no BOM
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
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as damage:
        raise DataError(f"{path} is compressed and damaged: {damage}") from damage
    except (OSError, ValueError) as refusal:
        why = getattr(refusal, "strerror", None) or refusal
        raise DataError(f"{path} cannot be read: {why}") from refusal
    if len(raw) > MOST_BYTES:
        raise DataError(f"{path} holds more than {MOST_BYTES >> 20} MiB: cut out a part of it")
    return raw


def lines_of(text: str) -> list[str]:
    """The lines as a terminal would have shown them, without colours and launchers' prefixes."""
    if "\x1b" in text:
        text = TEXT["escape"].sub("", text)
    lines = [line[:MOST_CHARACTERS] for line in io.StringIO(text, newline=None)]  # \r and \r\n end a line too
    lines = [line.rstrip() for line in lines]
    shown = [line for line in lines[:2000] if line]
    if sum(TEXT["numbered"].match(line) is not None for line in shown) > 0.5 * len(shown):
        lines = [TEXT["numbered"].sub("", line) for line in lines]
    launcher = TEXT["launcher"]
    return [launcher.sub("", launcher.sub("", line)) for line in lines]  # a launcher inside a launcher


@dataclass
class Source:
    """All rows of a file, and the text beside them."""

    format: str
    rows: list[Mined]
    text: str
    """Where facts may stand: a console, or what a table has besides its rows."""
    marks: str
    """The text by which its trainer is recognised."""
    notes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """The lines of a console."""
    pauses: list[tuple[int, str]] = field(default_factory=list)
    """Lines that tell of a validation or a checkpoint and hold no update."""


def source_of(path: Path) -> Source:
    if "tfevents" in path.name:
        return _table("tensorboard", _events(path))
    text, form, table = text_of(path), "console", None
    as_json = text.lstrip()[:1] in ("{", "[")
    value = _json(text) if as_json else None
    if isinstance(value, dict) and isinstance(value.get("cells"), list):
        text, form = _shown(value["cells"]), "notebook"
    elif value is not None:
        table = _whole(value, text, path)
    else:
        table = _json_lines(text) if as_json else _csv(text)
    if table is not None:
        return table
    lines = lines_of(text)
    rows, pauses = mine(lines, cut=form == "console" and not text.endswith("\n"))
    whole = "\n".join(lines)
    return Source(form, rows, whole, whole[:HEAD] + whole[-20_000:], lines=lines, pauses=pauses)


def _table(
    form: str, rows: Sequence[Mapping[str, Any]], text: str = "", head: str = "", note: str = ""
) -> Source:
    """All rows with all names, the most frequent first, so that each names the same columns."""
    counts = Counter(str(key) for row in rows for key, cell in row.items() if cell not in (None, ""))
    names = [name for name, _ in counts.most_common()]
    mined = [Mined(place, {name: row.get(name) for name in names}, {}) for place, row in enumerate(rows)]
    labels = ",".join(str(key) for row in rows[:50] for key in row)
    return Source(form, mined, head, f"{text[:20_000]}\n{head}\n{labels}", [note] if note else [])


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=float if len(text) > 4000 else None)
    except (ValueError, RecursionError):
        return None


def _whole(value: Any, text: str, source: Path) -> Source | None:
    """A file that is one JSON value: the Trainer's state, a list of lines, parallel lists, or one line."""
    if isinstance(value, dict) and isinstance(value.get("log_history"), list):
        rows = [row for row in value["log_history"] if isinstance(row, dict)]
        state = {key: item for key, item in value.items() if not isinstance(item, dict | list)}
        return _table("trainer_state", rows, text, json.dumps(state, indent=0))
    if isinstance(value, dict):
        lists = {key: item for key, item in value.items() if isinstance(item, list) and len(item) > 1}
        if len({len(item) for item in lists.values()}) == 1:
            lines = zip(*lists.values(), strict=True)
            return _table("json", [dict(zip(lists, cells, strict=True)) for cells in lines], text)
        return _table("jsonl", [_flat(value)], text) if "\n" not in text.strip() else None
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return _table("json", [_flat(row) for row in value], text)
    raise DataError(f"{source} is JSON, but neither a table nor a list of tables: give the trainer's log")


def _flat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nesting opened, down to the third level: verl writes {"step": 1, "data": {...}}."""
    for _ in range(3):
        inner = {key: item for key, item in row.items() if isinstance(item, dict)}
        flat = {key: item for key, item in row.items() if key not in inner}
        for key, item in inner.items():
            flat |= {name if key == "data" else f"{key}/{name}": cell for name, cell in item.items()}
        row = flat
    return row


def _json_lines(text: str) -> Source | None:
    rows, bad, head = [], [], ""
    lines = [(place, line) for place, line in enumerate(re.split(r"\r\n?|\n", text), start=1) if line.strip()]
    for place, line in lines:
        row = _json(line)
        if not isinstance(row, dict):
            bad.append(place)
        elif isinstance(row.get("log_history"), list):  # ms-swift's last line holds all others again
            head = json.dumps({key: item for key, item in row.items() if key != "log_history"})
        else:
            rows.append(_flat(row))
    if bad and bad[-1] == lines[-1][0] and len(lines) > 1 and not text.endswith("\n"):
        bad.pop()
    if len(bad) > 0.2 * len(lines):
        return None
    said = f"lines that are not JSON and are left out: {len(bad)}, the first is line {bad[0]}" if bad else ""
    return _table("jsonl", rows, text, head, said)


def _csv(text: str) -> Source | None:
    lines = text.split("\n", 2)
    mark = max(",;\t", key=lines[0].count)
    if len(lines) < 2 or mark not in lines[0] or lines[0].lstrip().startswith(("#", "|", "-")):
        return None
    reader = csv.DictReader(io.StringIO(text), delimiter=mark)
    try:
        rows = list(reader)
    except csv.Error:
        return None
    names = [name for name in reader.fieldnames or [] if name]
    full = sum(None not in row and None not in row.values() for row in rows)
    if len(names) < 2 or full < 0.7 * len(rows) or not any(re.search(r"[A-Za-z]", name) for name in names):
        return None
    if any(re.search(r"[:=] ?[-+\d.]", name) for name in names):  # a line of a console, not a header
        return None
    if not any(finite(str(cell).replace(",", ".")) is not None for row in rows[:20] for cell in row.values()):
        return None
    if len(rows) > 1 and not text.endswith("\n") and None in rows[-1].values():
        rows.pop()  # a line that was cut
    cells = [str(row[name]) for row in rows for name in names if "," in str(row[name])]
    decimal = any(TEXT["commas"].fullmatch(cell) and not TEXT["thousands"].fullmatch(cell) for cell in cells)
    plain = [{name: _plain(row[name], decimal) if cells else row[name] for name in names} for row in rows]
    return _table("csv", plain, text)


def _plain(cell: Any, decimal: bool) -> Any:
    """A number as Python writes it, where its commas are decimal points or part thousands."""
    if not isinstance(cell, str) or not TEXT["commas"].fullmatch(cell):
        return cell
    return cell.replace(".", "").replace(",", ".") if decimal else cell.replace(",", "")


def _events(path: Path) -> list[dict[str, Any]]:
    """The rows of a TensorBoard event file. A record is its length, a checksum, the event, a checksum."""
    event_of = need("tensorboard.compat.proto.event_pb2", extra="tensorboard").Event.FromString
    raw, rows, at = bytes_of(path), list[dict[str, Any]](), 0
    while at + 12 <= len(raw) and (size := int.from_bytes(raw[at : at + 8], "little")) <= len(raw) - at - 12:
        try:
            event = event_of(raw[at + 12 : at + 12 + size])
        except (ValueError, RuntimeError, TypeError, AttributeError) as damage:
            raise DataError(f"{path} is not a readable TensorBoard event file: {damage}") from damage
        at += 16 + size
        for value in event.summary.value:
            if (number := _scalar(value)) is None:
                continue
            if not rows or rows[-1]["step"] != event.step or value.tag in rows[-1]:
                rows.append({"step": event.step, "timestamp": event.wall_time})
            rows[-1][value.tag] = number
    if not rows:
        raise DataError(f"{path} holds no scalars: give the event file of the training run")
    return rows


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.tensor.float_val:
        return float(value.tensor.float_val[0])
    content = value.tensor.tensor_content
    kind = {4: "<f", 8: "<d"}.get(len(content))
    return float(struct.unpack(kind, content)[0]) if kind else None


def _shown(cells: list[Any]) -> str:
    """The output of a notebook's cells, as one console."""
    shown: list[str] = []
    lists = [cell.get("outputs") for cell in cells if isinstance(cell, dict)]
    outputs = [one for each in lists if isinstance(each, list) for one in each if isinstance(one, dict)]
    for output in outputs:
        data = output["data"] if isinstance(output.get("data"), dict) else {}
        page = _html_text(_joined(data.get("text/html")))
        shown += [_joined(output.get("text")), page or _joined(data.get("text/plain"))]
        shown += [_joined(output.get("traceback")), str(output.get("evalue") or "")]
    return "\n".join(filter(None, shown))


def _joined(part: Any) -> str:
    return "".join(map(str, part)) if isinstance(part, list) else part if isinstance(part, str) else ""


def _html_text(html: str) -> str:
    """A table that the Trainer shows in a notebook, as lines `Step 10 | Training Loss 2.1`."""

    def cells_of(part: str, kind: str) -> list[str]:
        cells = re.findall(rf"<{kind}[^>]*>(.{{0,400}}?)</{kind}>", part, re.DOTALL)
        return [re.sub(r"<[^>]*>", "", cell).strip() for cell in cells]

    heads = cells_of(html, "th")
    lines = [re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html.partition("<table")[0])).strip()]
    for row in re.findall(r"<tr[^>]*>(.{0,4000}?)</tr>", html, re.DOTALL):
        cells = cells_of(row, "td")
        if cells and len(cells) == len(heads):
            lines.append(" | ".join(f"{head}: {cell}" for head, cell in zip(heads, cells, strict=True)))
    return "\n".join(line for line in lines if line)
