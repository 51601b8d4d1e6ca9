"""Readers against what was written: every format, order, skipping, bad input with its place, constant
memory."""

import gzip
import json
import lzma
import os
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data.examples import rows_of
from redline.data.read import (
    LONGEST_PIECE_BYTES,
    PIECE_BYTES,
    SHIPPED,
    documents,
    find_sources,
    scan,
    split_of,
    splits_of,
)
from redline.errors import DataError

ROWS = [f"row {i} — ünïcode \n\n {'x' * i}" for i in range(40)]


def jsonl(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def write_rows(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=7)
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress, ".jsonl": bytes}[path.suffix]
        path.write_bytes(pack(jsonl(texts)))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet"])
@pytest.mark.parametrize("skip", [0, 1, 7, 20, 40, 99])
def test_rows_come_back_in_order_from_any_offset(tmp_path: Path, name: str, skip: int) -> None:
    path = write_rows(tmp_path / name, ROWS)
    assert [row.text for row in scan(path, "text", skip)] == ROWS[skip:]
    offsets = [row.offset_bytes for row in scan(path, "text")]
    assert offsets == sorted(offsets)
    assert offsets[-1] == path.stat().st_size


def test_names_of_files_tell_the_split_where_all_of_them_do(tmp_path: Path) -> None:
    for name in ("train-0.txt", "train-1.txt", "validation.txt", "test.txt"):
        (tmp_path / name).write_text(name)
    found = splits_of(find_sources(str(tmp_path)))
    assert {path.name: split for path, split in found.items()} == {
        "train-0.txt": "train", "train-1.txt": "train", "validation.txt": "valid",
    }  # fmt: skip
    assert [path.name for path in find_sources(str(tmp_path))] == [
        "train-0.txt",
        "train-1.txt",
        "validation.txt",
    ]
    (tmp_path / "more.txt").write_text("more")
    assert len(find_sources(str(tmp_path))) == 5
    assert not splits_of(find_sources(str(tmp_path))), "one file says nothing, so all go by their text"
    assert not splits_of([tmp_path / "train-0.txt", tmp_path / "test.txt"]), "nothing to validate on"


def test_a_small_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"one\r\n\r\n\ntwo")
    assert list(documents(tmp_path / "a.md", "text")) == ["one\r\n\r\n\ntwo"]


def test_a_large_text_file_is_cut_at_blank_lines() -> None:
    path = SHIPPED["tinyshakespeare"]
    pieces = list(documents(path, "text"))
    assert "".join(pieces) == path.read_text(encoding="utf-8")
    assert len(pieces) == 68
    assert all(piece.endswith("\n\n") and len(piece) >= PIECE_BYTES for piece in pieces[:-1])
    assert [row.text for row in scan(path, "text", skip=30)] == pieces[30:]
    assert any(split_of(piece.encode(), 0.01) == "valid" for piece in pieces)


def test_text_without_line_ends_is_cut_between_characters(tmp_path: Path) -> None:
    text = "a" + "é世" * LONGEST_PIECE_BYTES
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = list(documents(tmp_path / "a.txt", "text"))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= LONGEST_PIECE_BYTES + 3


def test_a_folder_mixes_formats_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b/x.jsonl", "a.txt", "b/c.jsonl.gz", "z.parquet", ".git/h.txt", "picture.png", "b.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in find_sources(str(tmp_path))]
    assert found == ["a.txt", "b/c.jsonl.gz", "b/x.jsonl", "b.md", "z.parquet"]
    assert find_sources("tinyshakespeare") == [SHIPPED["tinyshakespeare"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"text": ', "line 3: not a JSON row"),
        (b'{"body": "x"}', "line 3: no field 'text'; the row has body"),
        (b'["x"]', "line 3: a row must be a JSON object, got list"),
        (b'{"text": 3}', "line 3: field 'text' must be text, got int"),
        (b'{"text": "\\ud800"}', "line 3: field 'text' is not Unicode"),
        (b'{"text": "\xff"}', "line 3: not a JSON row"),
        (b"[" * 100_000, "line 3: not a JSON row"),
        (b'{"text": ' + b"9" * 5000 + b"}", "line 3: not a JSON row"),
    ],
)
def test_a_row_without_text_keeps_its_place_and_says_why(tmp_path: Path, row: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n\n' + row + b'\n{"text": "last"}\n')
    assert [each.text for each in scan(path, "text")] == ["first", "", "last"]
    assert message in next(scan(path, "text", skip=1)).wrong
    assert list(documents(path, "text")) == ["first", "last"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nbad \xff\n", "a.txt, line 2: not UTF-8"),
        ("a.txt", b"fine\ncut \xe4\xb8", "a.txt, line 2: not UTF-8"),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS))[:-20], "a.jsonl.gz cannot be read.*truncated"),
        ("a.jsonl.gz", jsonl(ROWS), "a.jsonl.gz cannot be read"),
        ("a.jsonl.xz", lzma.compress(jsonl(ROWS))[:-20], "a.jsonl.xz cannot be read"),
        ("a.parquet", b"PAR1 no", "a.parquet cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(documents(tmp_path / name, "text"))


def test_parquet_columns_are_checked(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", ROWS)
    with pytest.raises(DataError, match="no column 'body'; it has id, text"):
        list(documents(path, "body"))
    assert "row 1: field 'id' must be text, got int" in next(scan(path, "id")).wrong


def test_parquet_values_that_python_cannot_hold_are_refused_in_one_line(tmp_path: Path) -> None:
    """Corpora and examples read the same rows; neither error is Arrow's own."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    latin = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())
    far = pa.array([8 * 10**12], pa.timestamp("s"))
    path = tmp_path / "a.parquet"
    for values, why in ((latin, "can't decode byte 0xe9"), (far, "date value out of range")):
        pq.write_table(pa.table({"text": values}), path)
        for read in (partial(documents, path, "text"), partial(rows_of, path)):
            with pytest.raises(DataError, match=rf"a\.parquet cannot be read: .*{why}"):
                list(read())


def test_parquet_rows_are_skipped_a_row_group_at_a_time(tmp_path: Path) -> None:
    """A resumed build does not decode what it has read: it passes a damaged group of seven rows."""
    path = write_rows(tmp_path / "a.parquet", ROWS)
    column = pytest.importorskip("pyarrow.parquet").read_metadata(path).row_group(0).column(1)
    start, content = column.dictionary_page_offset, bytearray(path.read_bytes())
    content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(content)
    assert [row.text for row in scan(path, "text", 9)] == ROWS[9:]
    with pytest.raises(DataError, match="cannot be read"):
        next(scan(path, "text", 6))


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such corpus: /nowhere.txt; .*tinyshakespeare"):
        find_sources("/nowhere.txt")
    (tmp_path / "a.docx").touch()
    with pytest.raises(DataError, match=r"must end in one of \.txt, "):
        find_sources(str(tmp_path / "a.docx"))
    with pytest.raises(DataError, match="holds no file"):
        find_sources(str(tmp_path))
    for name in ("a\0b", "~nobody-of-that-name/a.txt"):
        with pytest.raises(DataError, match="no such corpus"):
            find_sources(name)
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        find_sources("a" * 5000)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"gone\.txt is not a readable file"):
        find_sources(str(tmp_path))


def test_several_sources_make_one_corpus_and_no_file_comes_twice(tmp_path: Path) -> None:
    for name in ("a/1.txt", "b/2.txt", "3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    named = [str(tmp_path / name) for name in ("b", "3.txt", "a")]
    assert [path.name for path in find_sources(*named)] == ["2.txt", "3.txt", "1.txt"]
    with pytest.raises(DataError, match=r"1\.txt 2 times"):
        find_sources(*named, str(tmp_path / "b" / ".." / "a"))


@given(st.text(), st.floats(0, 0.9))
def test_the_split_hangs_on_the_text_alone(text: str, fraction: float) -> None:
    split = split_of(text.encode(), fraction)
    assert split == split_of(text.encode(), fraction)
    if split == "valid":  # a larger fraction only adds to the validation split
        assert split_of(text.encode(), min(0.95, fraction + 0.05)) == "valid"
    assert split_of(text.encode(), 0) == "train"


def test_the_split_has_the_size_that_was_asked_for() -> None:
    held_out = sum(split_of(str(i).encode(), 0.1) == "valid" for i in range(10_000))
    assert 900 < held_out < 1100  # three standard deviations


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    row = json.dumps({"text": "word " * 200}) + "\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((row * 20_000).encode(), 1))  # 20 MB of text
    (tmp_path / "a.txt").write_text("line of text\n" * 400_000)
    tracemalloc.start()
    try:
        for name in ("a.jsonl.gz", "a.txt"):
            assert sum(1 for _ in documents(tmp_path / name, "text")) > 70
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2_000_000


def test_memory_does_not_grow_with_a_parquet_file(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, texts = tmp_path / "a.parquet", [os.urandom(5000).hex() for _ in range(2000)]  # 20 MB
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100)
    before_bytes = pa.total_allocated_bytes()
    peak_bytes = max(pa.total_allocated_bytes() for _ in scan(path, "text")) - before_bytes
    assert peak_bytes < path.stat().st_size / 2


def test_the_text_side_needs_no_torch() -> None:
    code = "import sys, redline.data.build, redline.data.stream; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
