"""Examples for fine-tuning, from the files that people have: JSON, JSONL (.gz, .xz) or Parquet. No torch.

    chats = read_chats(Path("mine.jsonl"))

A row is one of
- {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
- {"prompt": ..., "completion": ...}; `instruction`, `question` or `input` may stand for the prompt, `response`,
  `output` or `answer` for the completion
- [question, answer], or [question, answer, reasoning] as `redline rft export` writes them: what is learned is the
  reasoning, which holds the answer

Every row becomes messages; each message of the assistant is an example with everything before it. Other rows are
counted and left out; too many of them are an error.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.data.read import decompressed, files_under, read_errors
from redline.errors import DataError, need

Message = dict[str, str]
PROMPTS = ("prompt", "instruction", "question", "input")
COMPLETIONS = ("completion", "response", "output", "answer")
LEFT_OUT_SHARE = 0.01
"""Rows that may be left out; with more, the file is probably something else."""
SUFFIXES = (".json", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")


@dataclass(frozen=True)
class Chats:
    """Rows as messages, each list ending with what the assistant said."""

    rows: list[list[Message]]
    left_out: int
    """Rows that could not be read."""


def find_examples(path: Path) -> list[Path]:
    """The file itself, or the files of a folder, in sorted order."""
    if os.path.isdir(path):
        return [p for p in files_under(path, SUFFIXES, "file of examples") if p.name != "dataset_infos.json"]
    if not os.path.exists(path):
        raise DataError(f"no such file: {path}; examples are one of {', '.join(SUFFIXES)} (docs/finetune.md)")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path} is not a file of examples: its name ends in none of {', '.join(SUFFIXES)}")
    return [path]


def read_chats(path: Path) -> Chats:
    rows, left_out, fault = list[list[Message]](), 0, ""
    for file in find_examples(path):
        for number, row in enumerate(rows_of(file), start=1):
            try:
                rows += _examples(row)
            except ValueError as error:
                left_out, fault = left_out + 1, fault or f"{file}, row {number}: {error}"
    if not rows or left_out > max(1, LEFT_OUT_SHARE * (len(rows) + left_out)):
        rows_read = left_out + len(rows)
        wrong = f"{left_out} of {rows_read} rows are not examples; the first: {fault}" if fault else "no rows"
        raise DataError(f"{path}: {wrong}. docs/finetune.md shows the forms")
    return Chats(rows, left_out)


def rows_of(path: Path) -> Iterator[Any]:
    """The rows of one file, read piece by piece except for JSON; for a line that is not JSON, the error."""
    with read_errors(path), open(path, "rb") as raw:
        if path.suffix == ".parquet":
            for batch in need("pyarrow.parquet", extra="parquet").ParquetFile(raw).iter_batches():
                yield from batch.to_pylist()
        elif path.suffix != ".json":
            yield from (_parsed(line) for line in decompressed(path, raw) if line.strip())
        elif isinstance(found := _parsed(raw.read()), list):
            yield from found
        else:
            got = found if isinstance(found, Exception) else type(found).__name__
            raise DataError(f"{path} must hold a list of rows, got {got}")


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return error


def _examples(row: Any) -> list[list[Message]]:
    """The examples of one row; ValueError says what is wrong with it."""
    if isinstance(row, Exception):
        raise ValueError(f"not JSON ({row})")
    plain = isinstance(row, list) and all(isinstance(part, str | int | float) for part in row)
    if plain and len(row) in (2, 3):
        return [[_message("user", row[0]), _message("assistant", row[-1])]]
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        if not all(isinstance(message, dict) for message in row["messages"]):
            raise ValueError(f"messages must be objects with role and content: {str(row['messages'])[:60]!r}")
        messages = [_message(message.get("role"), message.get("content")) for message in row["messages"]]
        ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not ends or ends[0] == 0:
            raise ValueError("messages need one from the assistant, with something before it")
        return [messages[: end + 1] for end in ends]
    if isinstance(row, dict):
        prompt = next((row[name] for name in PROMPTS if row.get(name)), None)
        completion = next((row[name] for name in COMPLETIONS if row.get(name)), None)
        if prompt is not None and completion is not None:
            return [[_message("user", prompt), _message("assistant", completion)]]
    raise ValueError(f"neither messages, prompt and completion, nor [question, answer]: {str(row)[:60]!r}")


def _message(role: Any, content: Any) -> Message:
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role must be system, user, assistant or tool, got {role!r}")
    if isinstance(content, int | float) and not isinstance(content, bool):
        content = f"{content}"
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"content of {role} must be text, got {str(content)[:40]!r}")
    content.encode()  # JSON can spell half a surrogate pair, which no tokenizer accepts
    return {"role": role, "content": content}
