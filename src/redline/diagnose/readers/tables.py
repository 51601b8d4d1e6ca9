"""Files that are tables already: JSON, JSON lines, CSV, TensorBoard events, a notebook's outputs. All end as rows of
names and raw cells.

    table = as_table(text, "metrics.csv")      # None where the text is no table

A line that is not JSON among many that are is left out and counted; half a last line always is.
"""

import csv
import io
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.diagnose.readers.cells import finite
from redline.diagnose.readers.text import bytes_of
from redline.errors import DataError, need

_COMMAS = re.compile(r"[-+]?\d{1,15}(?:[.,]\d{1,20}){1,6}(?:[eE][-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_LIST_OF_RUNS = {"Name", "State", "Runtime", "Created"}
"""Columns of a table that W&B exports of a project: a line is a run, and not an update."""


@dataclass
class Table:
    format: str
    rows: Sequence[Mapping[str, Any]]
    notes: list[str] = field(default_factory=list)
    head: str = ""
    """Text beside the rows in which facts may stand."""

    @property
    def lists_runs(self) -> bool:
        return self.format == "csv" and bool(self.rows) and self.rows[0].keys() >= _LIST_OF_RUNS


def as_table(text: str, source: str) -> Table | None:
    start = text.lstrip()[:1]
    if start in "{[" and start:
        if (whole := _json(text)) is not None:
            return _whole(whole, text, source)
        return _json_lines(text)
    return _csv(text, source)


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=float if len(text) > 4000 else None)
    except (ValueError, RecursionError):
        return None


def _whole(value: Any, text: str, source: str) -> Table | None:
    """A file that is one JSON value: the Trainer's state, a list of lines, lists beside each other, or one line."""
    if isinstance(value, dict) and isinstance(value.get("log_history"), list):
        rows = [row for row in value["log_history"] if isinstance(row, dict)]
        state = {key: item for key, item in value.items() if not isinstance(item, dict | list)}
        return Table("trainer_state", rows, head=json.dumps(state, indent=0))
    if isinstance(value, dict):
        lists = {key: item for key, item in value.items() if isinstance(item, list) and len(item) > 1}
        lengths = {len(item) for item in lists.values()}
        if lists and len(lengths) == 1:
            lines = zip(*lists.values(), strict=True)
            return Table("json", [dict(zip(lists, cells, strict=True)) for cells in lines])
        return Table("jsonl", [_flat(value)]) if "\n" not in text.strip() else None
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return Table("json", [_flat(row) for row in value])
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


def _json_lines(text: str) -> Table | None:
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
    left_out = (
        f"lines that are not JSON and are left out: {len(bad)}, the first is line {bad[0]}" if bad else ""
    )
    return Table("jsonl", rows, [left_out] if bad else [], head)


def _csv(text: str, source: str) -> Table | None:
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
    decimal = any(_COMMAS.fullmatch(cell) and not _THOUSANDS.fullmatch(cell) for cell in cells)
    return Table(
        "csv", [{name: _plain(row[name], decimal) if cells else row[name] for name in names} for row in rows]
    )


def _plain(cell: Any, decimal: bool) -> Any:
    """A number as Python writes it, where its commas are decimal points or part thousands."""
    if not isinstance(cell, str) or not _COMMAS.fullmatch(cell):
        return cell
    return cell.replace(".", "").replace(",", ".") if decimal else cell.replace(",", "")


def events_table(path: Path) -> Table:
    """A TensorBoard event file: one row for the values that were written together. A record is its length, a checksum,
    the event and another checksum."""
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
    return Table("tensorboard", list(rows))


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.tensor.float_val:
        return float(value.tensor.float_val[0])
    content = value.tensor.tensor_content
    kind = {4: "<f", 8: "<d"}.get(len(content))
    return float(struct.unpack(kind, content)[0]) if kind else None


def notebook_text(text: str) -> str | None:
    """What the cells of a notebook put out, as one console; None where the text is no notebook."""
    book = _json(text) if '"cells"' in text else None
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        return None
    shown: list[str] = []
    cells = [cell.get("outputs") for cell in book["cells"] if isinstance(cell, dict)]
    outputs = [one for each in cells if isinstance(each, list) for one in each if isinstance(one, dict)]
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
