"""The reader of run folders: one definition of a run's speed for everybody, holes in the record, and folders that
hold anything at all."""

import json
import math
import os
from pathlib import Path
from statistics import median

import pytest
from run_folders import EVENTS, jsonl, lines, write_rft, write_run

from redline.cli.main import main
from redline.diagnose.readers.own import read_run as observe
from redline.errors import DataError
from redline.record.follow import Followed
from redline.record.read import Ending, State, holes, number, read_run, rounds_of
from redline.report.figures import Summary


def numbered(*steps: int) -> list[dict[str, int]]:
    return [{"step": step} for step in steps]


class TestSpeed:
    def test_report_and_diagnosis_say_the_same_of_the_same_folder(self, tmp_path: Path) -> None:
        """Also where ignored targets make `tokens` grow by less than the update's tokens, after a resume, and in
        a run of a few updates: there the two once differed by a fifth."""
        for place, updates in enumerate((3, 7, 10, 40)):
            found = [line | {"tokens": 800 * line["step"]} for line in lines(updates)]
            events = [*EVENTS[:1], {"at": 2.0, "event": "resume", "step": updates // 2}]
            path = write_run(tmp_path / str(place), metrics=found, events=events)
            seen, observed = Summary(read_run(path)).speed, observe(path)
            assert seen.update is not None
            assert observed.tokens_per_s == pytest.approx(seen.update.value)
            assert observed.median("step_s") == seen.step_s

    def test_the_first_updates_of_each_attempt_count_in_no_speed(self, tmp_path: Path) -> None:
        events = [{"event": "start", "step": 0}, {"event": "resume", "step": 30}]
        run = read_run(write_run(tmp_path / "a", metrics=lines(40), events=events))
        assert [line["step"] for line in run.warm] == [*range(6, 31), *range(34, 41)], "a third of ten: three"

    def test_a_short_run_leaves_out_its_first_third(self, tmp_path: Path) -> None:
        run = read_run(write_run(tmp_path / "a", metrics=lines(9), events=EVENTS[:1]))
        assert [line["step"] for line in run.warm] == [4, 5, 6, 7, 8, 9]
        assert run.speed is not None
        assert run.speed.value == median(line["tokens_per_s"] for line in lines(9)[3:])

    def test_the_whole_run_counts_everything(self, tmp_path: Path) -> None:
        assert read_run(write_run(tmp_path / "a")).whole_run_speed == 40_000 / 27.75


class TestHoles:
    @pytest.mark.parametrize(
        ("steps", "end", "missing"),
        [
            ([*range(1, 11), 22, 23], None, [(11, 21)]),
            (range(1, 11), 21, [(11, 21)]),
            (range(1, 22), 21, []),
            ([], 21, [(1, 21)]),
            ([], None, []),
            ([22, 23, 24], None, [(1, 21)]),
            ([1, 2, 3, 6, 7, 10], None, [(4, 5), (8, 9)]),
            ([10, 20, 30, 35], None, []),
            ([10, 20, 50, 60], 60, [(21, 49)]),
        ],
    )
    def test_what_is_missing(self, steps, end, missing) -> None:
        assert holes(numbered(*steps), end) == missing

    def test_a_fork_and_a_resumed_loop_owe_nothing_of_what_was_before(self) -> None:
        assert holes(numbered(301, 302), begin=300) == []
        assert holes([], 300, begin=300) == []
        assert holes(numbered(301, 302, 303, 306), 310, begin=300) == [(304, 305), (307, 310)]

    def test_the_report_shows_it(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = write_run(tmp_path / "a", metrics=[line for line in lines() if not 10 < line["step"] < 22])
        assert main(["report", str(path)]) == 0
        told = "updates 11 to 21 are missing from metrics.jsonl"
        assert told in " ".join(capsys.readouterr().out.split())
        assert told in (path / "report.html").read_text()


class TestDamage:
    @pytest.mark.parametrize(
        ("name", "raw"),
        [
            ("metrics.jsonl", b'{"loss": 1.0}\n'),
            ("metrics.jsonl", b'{"step": "1"}\n'),
            ("metrics.jsonl", b'{"step": true}\n'),
            ("metrics.jsonl", b'{"step": 1.5}\n'),
            ("metrics.jsonl", b"[1]\n"),
            ("events.jsonl", b'{"at": 1.0}\n'),
            ("events.jsonl", b'{"event": 3}\n'),
            ("events.jsonl", b"\xff\xfe\n"),
            ("evaluations.jsonl", b"[" * 100_000 + b"\n"),
            ("evaluations.jsonl", b'{"n": ' + b"9" * 5000 + b"}\n"),
            ("recipe.toml", b"a = " + b"[" * 100_000),
            ("recipe.toml", b"\xff"),
            ("plan.json", b'{"a":' * 100_000),
            ("plan.json", b"[]"),
            ("ablation.json", b"{}"),
        ],
    )
    @pytest.mark.parametrize("verb", ["report", "diagnose", "watch"])
    def test_is_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb, name, raw) -> None:
        path = write_run(tmp_path / "a")
        (path / name).write_bytes(raw)
        if code := main([verb, str(path)]):
            told = capsys.readouterr().err
            assert (code, told.count("\n")) in ((2, 1), (3, 1))
            assert name in told
        else:
            assert (verb, name) == ("diagnose", "recipe.toml"), "it can do without a recipe"

    def test_a_number_that_no_training_reaches_is_not_one(self) -> None:
        assert [number(10**400), number(1e61), number(-1e308), number(math.inf), number(math.nan)] == [
            None
        ] * 5
        assert [number(1e60), number(-2e-60), number(1e-61), number(0)] == [1e60, -2e-60, 0.0, 0.0]

    @pytest.mark.parametrize("verb", ["report", "diagnose", "watch"])
    def test_empty_files_are_a_run_of_nothing(self, tmp_path: Path, capsys, verb) -> None:
        (tmp_path / "run").mkdir()
        for name in ("metrics.jsonl", "plan.json", "recipe.toml", "ablation.json", "evaluations.jsonl"):
            (tmp_path / "run" / name).touch()
        if verb == "watch":  # which waits for the run to begin
            assert Followed(tmp_path / "run").now()[0].state.ending == "no training"
        else:
            assert main([verb, str(tmp_path / "run")]) in (0, 3)
            assert capsys.readouterr().err.count("\n") <= 1

    @pytest.mark.parametrize("verb", ["report", "diagnose", "watch"])
    def test_what_may_not_be_read(self, tmp_path: Path, capsys, verb) -> None:
        path = write_run(tmp_path / "a")
        for place in (path / "metrics.jsonl", path):
            place.chmod(0)
            if os.access(path / "metrics.jsonl", os.R_OK):
                pytest.skip("root may read everything")
            assert main([verb, str(path)]) == 3
            assert "Permission denied" in capsys.readouterr().err
            place.chmod(0o700)

    @pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: None])
    def test_no_run_folder(self, tmp_path: Path, make) -> None:
        make(tmp_path / "a")
        with pytest.raises(DataError, match=r"a is not a run folder.*redline train"):
            read_run(tmp_path / "a")


def test_updates_of_fine_tuning_are_those_on_the_samples(tmp_path: Path) -> None:
    path = write_rft(tmp_path / "a")
    (path / "train-answers").mkdir()
    jsonl(path / "train-answers" / "metrics.jsonl", numbered(1))
    stages = [("train-samples", 40), ("train-answers", 8)]
    told = [{"event": "stage", "name": name, "title": name, "total_steps": steps} for name, steps in stages]
    jsonl(path / "events.jsonl", told)
    run = read_run(path)
    assert (len(run.metrics), run.planned_updates) == (40, 40)
    assert len(observe(path).steps) == 40


def test_an_rft_run_that_trains_on_the_answers_is_not_silent(tmp_path: Path) -> None:
    path = write_rft(tmp_path / "a")
    (path / "train-answers").mkdir()
    jsonl(path / "train-answers" / "metrics.jsonl", numbered(1))
    for place in path.rglob("*"):
        os.utime(place, (1.0, 1.0))
    assert read_run(path).silent_s > 0
    os.utime(path / "train-answers" / "metrics.jsonl", (4e9, 4e9))  # ahead of any clock
    assert read_run(path).silent_s == 0


def test_rounds_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("round-10", "round-2", "round-x", "round-3"):
        (tmp_path / name).mkdir()
        if name != "round-3":
            (tmp_path / name / "recipe.toml").touch()
    assert [path.name for path in rounds_of(tmp_path)] == ["round-2", "round-10"]


def test_following_begins_afresh_where_the_record_was_cut_back(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", metrics=numbered(1, 2, 3), events=EVENTS[:1])
    followed = Followed(path)
    run, generation = followed.now()
    assert len(run.metrics) == 3
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4}) + '\n{"step": ')
    run, same = followed.now()
    assert ([line["step"] for line in run.metrics], same) == ([1, 2, 3, 4], generation)
    (path / "metrics.jsonl").unlink()
    jsonl(path / "metrics.jsonl", numbered(1, 2))
    run, other = followed.now()
    assert len(run.metrics) == 2
    assert other > generation


@pytest.mark.parametrize(
    ("ending", "text", "told"),
    [
        ("finished", "finished", "finished"),
        ("stopped", "stopped by signal", "stopped by signal"),
        ("finished", "time limit of 1 h", "finished: time limit of 1 h"),
    ],
)
def test_a_state_is_told_once(ending: Ending, text: str, told: str) -> None:
    assert str(State(ending, text)) == told
