"""Samples out of the store: `rft.json` triples of what is kept, or every sample as JSONL or Parquet. Runs
without torch.

    export(run, Path("rft.json"), per_question=1)      # [[question, answer, reasoning], ...]
    export(run, Path("samples.parquet"))               # all samples with verdicts; `kept`: trained on
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redline.config.load import from_toml
from redline.errors import ConfigError, need
from redline.record.files import read_text, replacing, write_atomic
from redline.record.run import RunFolder
from redline.rft.store import Store

FORMATS = (".json", ".jsonl", ".parquet")


def export(run: Path, to: Path, *, per_question: int | None = None) -> int:
    """Write the samples in the format of the file's suffix; returns how many. `per_question`: how many to keep of each
    (0: all; default: the recipe's)."""
    if to.suffix not in FORMATS:
        raise ConfigError(
            f"samples are written as {', '.join(FORMATS)}, got {to.name!r}: use one of these suffixes"
        )
    if per_question is not None and per_question < 0:
        raise ConfigError(f"--per-question must not be negative (0: all), got {per_question}")
    with Store(run / "samples.db", create=False) as store:
        source, _ = store.latest()
        recipe = RunFolder(run).recipe_path
        if per_question is None:
            own = from_toml(read_text(recipe), str(recipe)) if recipe.is_file() else None
            per_question = own.sample.keep_per_question if own is not None else 0
        kept = store.kept(source, per_question)
        if to.suffix == ".json":
            triples = [[row.text, _number(row.answer), row.reasoning.strip()] for row in kept]
            write_atomic(to, json.dumps(triples, indent=1, ensure_ascii=False) + "\n")
            return len(triples)
        names = {(row.question, row.sample) for row in kept}
        rows = ({**row, "kept": (row["question"], row["sample"]) in names} for row in store.rows(source))
        return _write_lines(to, rows) if to.suffix == ".jsonl" else _write_parquet(to, list(rows))


def _number(answer: str) -> float | str:
    """A reference answer as a number if it is a finite one (JSON has no others), as in the public triples."""
    try:
        return float(answer) if math.isfinite(float(answer)) else answer
    except ValueError:
        return answer


def _write_lines(to: Path, rows: Iterator[dict[str, Any]]) -> int:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_atomic(to, "".join(f"{line}\n" for line in lines))
    return len(lines)


def _write_parquet(to: Path, rows: list[dict[str, Any]]) -> int:
    pyarrow, parquet = need("pyarrow", extra="parquet"), need("pyarrow.parquet", extra="parquet")
    with replacing(to) as temporary:
        parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
    return len(rows)
