"""`diagnose` on whatever a file may hold: an answer, or one line that names the file; never a traceback, and never long."""

import os
import tempfile
from pathlib import Path

import pytest
from hostile import CRAFTED, answer, contents, put
from hypothesis import example, given
from hypothesis import strategies as st

from redline.diagnose.answer import verdict, what_it_is
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose

MANY = 100_000
NAMES = (
    "train.log",
    "log.jsonl",
    "metrics.csv",
    "trainer_state.json",
    "page.md",
    "run.ipynb",
    "events.out.tfevents.1.a",
)
LONG = {
    "dashes": "-" * MANY,
    "digits": "9" * MANY,
    "dots": "." * MANY,
    "brackets": "(" * MANY,
    "equals": "a=" * MANY,
    "quotes": "'\"" * MANY,
    "spaces": " " * MANY + "x",
    "words": "loss " * MANY,
    "pairs": "{'loss': 1, " * (MANY // 10),
    "bars": "1%|" * MANY,
    "cells": "|" * MANY,
    "colons": "1:" * MANY,
    "commas": "1," * MANY,
    "options": "--a" * MANY,
    "rows": "<tr><td>" * (MANY // 10),
    "tracebacks": "Traceback (most recent call last)\n" * (MANY // 100),
}
LINES = (
    "step {n} | loss: {x} | dt: {y}ms | tok/sec: {z}",
    "iter {n}: loss {x}, time {y}ms, mfu {z}%",
    "{{'loss': {x}, 'epoch': {n}, 'step_time': {y}}}",
    "step:{n} - timing_s/step:{y} - perf/throughput:{z} - actor/pg_loss:np.float64({x})",
    " {n}%|##  | {n}/100 [{y}<{z}, {x}s/it]",
    "Epoch [{n}][{n}/{z}]  time: {y}  loss: {x}",
)
NUMBERS = st.one_of(
    st.integers(-3, 10**12).map(str),
    st.floats().map(repr),
    st.sampled_from(
        [
            "0",
            "0.0",
            "-0",
            "1e999",
            "nan",
            "inf",
            "-inf",
            "9" * 400,
            "1,000",
            "1:02:03",
            "",
            "-",
            "1e",
            "1..2",
        ]
    ),
)


def said(path: Path) -> None:
    """The whole way to the words."""
    observed = read(path)
    findings = diagnose(observed)
    assert all(0 <= finding.confidence <= 1 for finding in findings)
    what_it_is(observed)
    verdict(observed, findings)


@pytest.mark.parametrize("name", NAMES)
@given(raw=contents)
@example(raw=b"")
def test_any_bytes_get_an_answer_or_one_line(name: str, raw: bytes) -> None:
    for content in (raw, *CRAFTED[:2]):
        with tempfile.TemporaryDirectory() as folder:
            path = put(Path(folder) / name, content)
            answer(lambda path=path: said(path), names=path.name)


@given(
    line=st.sampled_from(LINES),
    cells=st.lists(st.tuples(*[NUMBERS] * 4), min_size=2, max_size=30),
    end=st.sampled_from("\n\r"),
)
def test_lines_with_any_numbers_get_an_answer_or_one_line(
    line: str, cells: list[tuple[str, ...]], end: str
) -> None:
    text = "".join(line.format(n=n, x=x, y=y, z=z) + end for n, x, y, z in cells)
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder) / "train.log", text.encode())
        answer(lambda: said(path), names=path.name)


@given(
    names=st.lists(
        st.sampled_from(["step", "loss", "time", "dt_ms", "tokens", "mfu", "epoch", "eval_loss", "x"]),
        min_size=1,
        unique=True,
    ),
    rows=st.lists(st.lists(NUMBERS, min_size=1, max_size=9), min_size=1, max_size=20),
)
def test_tables_with_any_cells_get_an_answer_or_one_line(names: list[str], rows: list[list[str]]) -> None:
    text = ",".join(names) + "\n" + "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder) / "log.csv", text.encode())
        answer(lambda: said(path), names=path.name)


@pytest.mark.parametrize("name", ["page.md", "train.log", "log.jsonl", "metrics.csv", "run.ipynb"])
@pytest.mark.parametrize("what", LONG)
@pytest.mark.timeout(60)
def test_no_pattern_is_quadratic(name: str, what: str, tmp_path: Path) -> None:
    """100,000 dashes took 98 s and as many digits 57. The limit is far over what any of these takes and far under that."""
    head = {
        "page.md": "# Faster\n\n| a | Before | After |\n|---|---|---|\n",
        "run.ipynb": '{"cells": [], "x": "',
    }.get(name, "")
    path = put(tmp_path / name, f"{head}{LONG[what]}\nstep 1 loss 2.0\n".encode())
    answer(lambda: said(path), names=path.name)


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    closed = put(tmp_path / "closed.log", b"step 1 loss 2\n")
    closed.chmod(0)
    os.mkfifo(tmp_path / "pipe.log")
    packed = put(tmp_path / "half.log.xz", b"\xfd7zXZ\0" + b"\0" * 20)
    for path in (closed, tmp_path / "pipe.log", packed, tmp_path / ("a" * 300), tmp_path / "nul\0"):
        if path is closed and os.geteuid() == 0:
            continue  # root reads everything
        answer(lambda path=path: said(path), names=path.name[:20].rstrip("\0"))
