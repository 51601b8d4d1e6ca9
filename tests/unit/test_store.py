"""The sample store: nothing reported is lost, nothing is there twice, whatever kills the writer; and what it
says of its samples."""

import errno
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.errors import ConfigError, DataError, StorageError
from redline.record.run import RunFolder
from redline.rft.stats import export, pass_at_k, stats
from redline.rft.store import Kept, Sample, Store, reasoning_key
from redline.tasks.task import Question

QUESTIONS = [
    Question("a", "How many min is 2 h?", "120.0", "<answer>120</answer>", {"family": "time"}),
    Question("b", "How many gram is 3 kg?", "3000.0", "<answer>3000</answer>", {"family": "mass"}),
    Question("c", "How many bit is 1 B?", "8.0", "<answer>8</answer>", {"family": "data"}),
]


def made(question: str, number: int, text: str, correct: bool) -> Sample:
    return Sample(
        question=question,
        sample=number,
        text=text,
        tokens=10,
        logprob_sum=-5.0,
        logprob_min=-2.0,
        finish="stop",
        correct=correct,
        parsed=True,
        reward=float(correct),
        answer="1",
        reason=None,
        reasoning_key=reasoning_key(text) if correct else None,
        seed=7,
        at=0.0,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with samples of two of three questions."""
    with Store(tmp_path / "samples.db") as store:
        source = store.open_source("weights", {"temperature": 0.7})
        store.put_questions(QUESTIONS)
        texts = [" 2 * 60 = 120", "2 * 60 = 120.0.", "wrong", "60 + 60 = 120"]
        store.add(source, [made("a", i, text, text != "wrong") for i, text in enumerate(texts)])
        store.add(source, [made("b", i, "wrong", False) for i in range(4)])
        store.add(source, [made("b", 4, "3 kg is 3,000", True), made("b", 5, "3 KG  is 3000", True)])
    return tmp_path


# ---- sameness ----


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 kg = 1,000 g", "1 KG  =\n1000 g."),
        ("12,345,678.50 m", "12345678.5 m"),
        ("Answer: 1000.0", " answer: 1000"),
        ("0.50 !", "0.5"),
        ("so <answer>91.440</answer>", "so <answer>91.44</answer>"),
    ],
)
def test_the_same_reasoning_in_other_spelling(one, other):
    assert reasoning_key(one) == reasoning_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("6 * 10", "10 * 6"), ("100", "1000"), ("1,00", "100"), ("1.05", "1.5"), ("2 h", "2 m"), ("10", "1")],
)
def test_other_reasoning(one, other):
    assert reasoning_key(one) != reasoning_key(other)


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False).map(lambda x: round(x, 3)))
def test_numbers_are_the_same_however_they_are_written(number):
    spellings = {reasoning_key(text) for text in (f"= {number:.3f}", f"= {number:,.3f}", f"= {number:.6f}")}
    assert len(spellings) == 1


# ---- what it holds ----


def test_kept_are_the_first_distinct_correct_ones_in_the_order_of_the_questions(run):
    with Store(run / "samples.db", create=False) as store:
        source, settings = store.latest()
        assert settings == {"temperature": 0.7}
        assert [(k.question, k.sample) for k in store.kept(source, 0)] == [("a", 0), ("a", 3), ("b", 4)]
        assert store.kept(source, 1) == [
            Kept("a", QUESTIONS[0].text, "120.0", " 2 * 60 = 120", 0),
            Kept("b", QUESTIONS[1].text, "3000.0", "3 kg is 3,000", 4),
        ]


def test_samples_of_other_weights_or_settings_stand_apart(run):
    with Store(run / "samples.db") as store:
        before, _ = store.latest()
        for weights, settings in (("other weights", {"temperature": 0.7}), ("weights", {"temperature": 0.9})):
            other = store.open_source(weights, settings)
            assert store.verdicts(other) == []
            store.add(other, [made("a", 0, "x", True)])
            assert store.latest()[0] == other
        assert len(store.verdicts(before)) == 10


def test_a_sample_cannot_be_stored_twice_and_a_transaction_is_all_or_nothing(run):
    with Store(run / "samples.db") as store:
        source, _ = store.latest()
        with pytest.raises(sqlite3.IntegrityError):
            store.add(source, [made("c", 0, "x", True), made("a", 0, "x", True)])
        assert len(store.verdicts(source)) == 10


def test_questions_that_changed_are_refused(run):
    with Store(run / "samples.db") as store:
        store.put_questions(QUESTIONS)
        with pytest.raises(DataError, match="another question under the id a"):
            store.put_questions([QUESTIONS[0]._replace(answer="7")])
        with pytest.raises(DataError, match="its own id"):
            store.put_questions([QUESTIONS[0], QUESTIONS[0]])


def test_what_is_no_store_is_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match="no samples at"):
        Store(tmp_path / "samples.db", create=False)
    (tmp_path / "samples.db").write_text("something else" * 100)
    with pytest.raises(DataError, match="not a sample store"):
        Store(tmp_path / "samples.db")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot be"):
        Store(tmp_path / "folder")


# ---- statistics and exports ----


def test_the_database_of_another_program_is_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / "samples.db") as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(DataError, match="another program"):
        stats(tmp_path)
    assert sqlite3.connect(tmp_path / "samples.db").execute("SELECT name FROM sqlite_master").fetchall() == [
        ("theirs",)
    ]


def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_correct_one():
    from itertools import combinations

    for n, correct, k in [(5, 2, 2), (6, 1, 3), (4, 0, 2), (4, 4, 1), (7, 3, 7)]:
        draws = list(combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_statistics(run):
    RunFolder(run).event("sampling_end", elapsed_s=2.0, tokens=60)
    RunFolder(run).event("sampling_end", elapsed_s=0.5, tokens=40)
    found = stats(run)
    assert (found["questions"], found["asked"], found["solved"]) == (3, 2, 2)
    assert (found["samples"], found["correct"], found["distinct_correct"], found["tokens"]) == (10, 5, 3, 100)
    assert found["tokens_per_s"] == 40.0
    # The first four of each: a has 3 of 4 right, b none; b's later ones were drawn because of that.
    assert found["pass_at"] == {1: 0.375, 2: 0.5, 4: 0.5}
    assert found["families"]["mass"] == {
        "questions": 1,
        "solved_share": 1.0,
        "success_rate": pytest.approx(1 / 3),
    }
    assert [hard["id"] for hard in found["hardest"]] == ["b", "a"]


def test_samples_behind_one_that_is_missing_do_not_count_in_pass_at_k(tmp_path):
    with Store(tmp_path / "samples.db") as store:
        source = store.open_source("weights", {})
        store.put_questions(QUESTIONS)
        store.add(source, [made("a", 0, "right", True), made("a", 2, "short", True)])
        store.add(source, [made("b", 0, "wrong", False), made("b", 1, "r", True)])
    found = stats(tmp_path)
    assert found["pass_at"] == {1: 0.5}
    assert found["tokens_per_s"] is None, "nobody has said how long it took"


def test_pass_at_k_counts_only_what_is_drawn_whatever_the_verdicts(tmp_path):
    settings = (
        'workload = "rft"\n[task]\nname = "units"\n[model]\ninit_from = "m"\n[sample]\nsamples_per_question = 8\ndistinct_correct'
        " = 1\n"
    )
    (tmp_path / "recipe.toml").write_text(f'name = "x"\n{settings}')
    with Store(tmp_path / "samples.db") as store:
        source = store.open_source("weights", {})
        store.put_questions(QUESTIONS)
        # a second round, because the first brought nothing
        store.add(source, [made("a", i, "text", i == 3) for i in range(4)])
    assert stats(tmp_path)["pass_at"] == {1: 0.0, 2: 0.0}


def test_exports(run, tmp_path):
    assert export(run, tmp_path / "rft.json", per_question=1) == 2
    assert json.loads((tmp_path / "rft.json").read_text()) == [
        [QUESTIONS[0].text, 120.0, "2 * 60 = 120"],
        [QUESTIONS[1].text, 3000.0, "3 kg is 3,000"],
    ]
    assert export(run, tmp_path / "all.jsonl") == 10
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert sum(row["kept"] for row in rows) == 3
    assert rows[0]["logprob_mean"] == -0.5
    assert rows[0]["question_text"] == QUESTIONS[0].text
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export(run, tmp_path / "all.parquet") == 10
    assert parquet.read_table(tmp_path / "all.parquet").to_pylist() == rows
    with pytest.raises(ConfigError, match=r"\.parquet"):
        export(run, tmp_path / "all.csv")
    with pytest.raises(ConfigError, match="must not be negative"):
        export(run, tmp_path / "none.json", per_question=-1)
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("name", ["rft.json", "all.jsonl", "all.parquet"])
def test_an_export_that_fails_half_way_leaves_the_last_one_as_it_was(run, tmp_path, monkeypatch, name):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out" / name
    out.parent.mkdir()
    export(run, out)
    before = out.read_bytes()

    def half(table, where, *_, **__):
        Path(where).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", half)
    monkeypatch.setattr(Path, "write_text", lambda path, text, **_: half(text, path))
    with pytest.raises(StorageError, match="the disk is full"):
        export(run, out)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out], "nothing is left beside it"


# ---- killed writers ----

WRITER = """
import sys
from test_store import QUESTIONS, made
from redline.record.run import RunFolder
from redline.rft.store import Store
from pathlib import Path
with RunFolder(Path(sys.argv[1])) as folder, Store(folder.path / "samples.db") as store:
    store.put_questions(QUESTIONS)
    source = store.open_source("weights", {})
    have = {(question, sample) for question, sample, _, _ in store.verdicts(source)}
    todo = [(q.id, i) for i in range(7000) for q in QUESTIONS if (q.id, i) not in have]
    print("ready", flush=True)
    for at in range(0, len(todo), 7):
        store.add(source, [made(question, sample, "text " * 40, True) for question, sample in todo[at : at + 7]])
        print(*(f"{question}/{sample}" for question, sample in todo[at : at + 7]), flush=True)
"""


def start(run: Path) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_a_writer_killed_at_any_moment_loses_nothing_it_reported_and_doubles_nothing(tmp_path):
    rng = random.Random(0)
    reported: set[str] = set()
    for _ in range(6):
        writer = start(tmp_path / "run")
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        said = [writer.stdout.readline() for _ in range(rng.randrange(100))]
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.read().splitlines()
        writer.wait()
        reported |= {name for line in said for name in line.split()}
        with Store(tmp_path / "run" / "samples.db", create=False) as store:
            stored = [f"{question}/{sample}" for question, sample, _, _ in store.verdicts(store.latest()[0])]
            assert tuple(store._db.execute("PRAGMA integrity_check").fetchone()) == ("ok",)
        assert len(stored) == len(set(stored))
        assert reported <= set(stored)
        assert len(stored) % 7 == 0, "half a transaction"
    assert len(reported) > 100


def test_two_processes_cannot_own_a_store(tmp_path):
    writer = start(tmp_path / "run")
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        with pytest.raises(StorageError, match="in use by another process"), RunFolder(tmp_path / "run"):
            pass
        with Store(tmp_path / "run" / "samples.db", create=False) as store:  # reading is free
            store.verdicts(store.latest()[0])
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
