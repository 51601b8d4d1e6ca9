"""samples.db with damage anywhere in it: statistics and exports give figures or one line. And without the right to
write, they give the same figures as with it."""

import sqlite3
import tempfile
from pathlib import Path

import pytest
from hostile import answer, without_root
from hypothesis import given
from hypothesis import strategies as st

from redline.errors import DataError, StorageError
from redline.rft.stats import export, stats
from redline.rft.store import Sample, Store
from redline.tasks.task import Question


def write_store(folder: Path) -> Path:
    with Store(folder / "samples.db") as store:
        source = store.open_source("weights", {"temperature": 0.7})
        store.put_questions([Question(name, f"Is {name}?", name, "", {"family": name}) for name in "abc"])
        store.add(
            source,
            [
                Sample(
                    name, n, f"text {n}", 10, -5.0, -2.0, "stop", True, True, 1.0, "1", None, f"{n}", 7, 0.0
                )
                for name in "ab"
                for n in range(20)
            ],
        )
    return folder / "samples.db"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_store(tmp_path_factory.mktemp("whole"))


def read_all(run: Path) -> None:
    answer(lambda: stats(run))
    for name in ("rft.json", "all.jsonl"):
        answer(lambda name=name: export(run, run / name))


@given(data=st.data())
def test_random_bytes_in_a_store(whole, tmp_path, data):
    raw = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(raw) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=64))
        raw[at : at + len(patch)] = patch
    raw = raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2, 100, 1]))]
    (tmp_path / "samples.db").write_bytes(raw)
    read_all(tmp_path)


WRONG = [None, b"\xff\xfe", "text", 1.5, "[1]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize(
    "place",
    [
        "sources.settings",
        "questions.meta",
        "questions.text",
        "samples.text",
        "samples.correct",
        "samples.tokens",
    ],
)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
def test_values_of_the_wrong_kind(tmp_path, place, value):
    path = write_store(tmp_path)
    table, column = place.split(".")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        definition = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
        db.execute("PRAGMA writable_schema = ON")
        db.execute(
            "UPDATE sqlite_master SET sql = ? WHERE name = ?", (definition.replace(" NOT NULL", ""), table)
        )
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE {table} SET {column} = ?", (value,))
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (definition, table))
    read_all(tmp_path)


def test_text_that_is_not_utf_8_is_damage_and_not_a_full_disk(tmp_path):
    path = write_store(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE samples SET text = CAST(x'fffe' AS TEXT)")
    with pytest.raises(DataError, match="damaged"):
        export(tmp_path, tmp_path / "all.jsonl")


def test_a_store_that_cannot_be_written_is_read():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        run = Path(folder)
        path = write_store(run)
        path.chmod(0o444)
        run.chmod(0o555)
        with without_root():
            assert stats(run)["correct"] == 40
            assert [file.name for file in run.iterdir()] == ["samples.db"], "reading leaves nothing behind"
        path.chmod(0o000)
        with without_root(), pytest.raises(StorageError, match="cannot be read or written"):
            stats(run)
