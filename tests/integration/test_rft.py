"""`redline rft` as a user runs it: the whole loop killed at random moments equals an unbroken one, and every
verb says what it did."""

import json
import random
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
from pipeline import one_line
from warm import Fault, Warm

from redline.record.run import read_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from rft_model import letters_place

LONGER = (
    "--set",
    "sample.samples_per_question=120",
    "--set",
    "sample.max_new_tokens=12",
    "--set",
    "sample.keep_per_question=1",
)
"""Sampling that takes long enough to be killed in the middle."""
ASKED = ("--prompt", "Question: Write 3\nAnswer:", "--temperature", "0", "--max-new-tokens", "6", "--json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_place(tmp_path_factory)


@pytest.fixture(scope="module")
def unbroken(warm: Warm, place: Path) -> Path:
    done = warm.run("rft", "run", place / "letters.toml", "--run", place / "unbroken", "--json", *LONGER)
    assert done.code == 0, done.err
    return place / "unbroken"


def samples(run: Path) -> dict[tuple[str, int], str]:
    """Every sample's text by question and number, none twice, in a store that is whole."""
    db = sqlite3.connect(run / "samples.db")
    try:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = db.execute("SELECT question, sample, text FROM samples").fetchall()
    except sqlite3.OperationalError:  # killed before the tables were made
        return {}
    finally:
        db.close()
    found = {(question, sample): text for question, sample, text in rows}
    assert len(found) == len(rows)
    return found


def test_killed_at_random_moments_the_loop_ends_where_an_unbroken_one_does(
    warm: Warm, place: Path, unbroken: Path, tmp_path: Path
) -> None:
    """Four times while samples are drawn, then in the middle of the training on them."""
    rng = random.Random(1)
    run, seen = tmp_path / "run", dict[tuple[str, int], str]()
    arguments = ("rft", "run", place / "letters.toml", "--run", run, "--json", *LONGER)
    drawing = [
        Fault("kill_in_sampling", samples=rng.randint(1, 200), calls=int(10 ** rng.uniform(0, 4)))
        for _ in range(4)
    ]
    for fault in (*drawing, Fault("kill_after", update=1, calls=100)):
        assert warm.run(*arguments, fault=fault).code == -signal.SIGKILL
        found = samples(run)
        assert seen.items() <= found.items(), "what was stored is still there, unchanged"
        seen = found
    done = warm.run(*arguments)
    assert done.code == 0, done.err
    assert seen.items() <= samples(run).items()
    assert samples(run) == samples(unbroken)
    mine, reference = (
        safetensors.torch.load_file(path / "adapter" / "adapter_model.safetensors")
        for path in (run, unbroken)
    )
    assert all(mine[name].equal(reference[name]) for name in reference)
    tests = [
        [json.loads(line) for line in (path / "evaluations.jsonl").read_text().splitlines()]
        for path in (run, unbroken)
    ]
    assert [(line["weights"], line["accuracy"]) for line in tests[0]] == [
        (line["weights"], line["accuracy"]) for line in tests[1]
    ]
    assert json.loads(done.out)["why"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_keeps_what_is_there(
    warm: Warm, place: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    arguments = ("rft", "sample", place / "letters.toml", "--run", run, *LONGER)
    fault = Fault("signalled_in_sampling", samples=50, number=int(number))
    done = warm.run(*arguments, "--json", fault=fault)
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["why"] == "stopped by signal"
    assert said["samples"] == len(samples(run)) >= 50
    rest = warm.run(*arguments)
    assert rest.code == 0, rest.err
    assert "20/20 questions" in rest.out
    assert "questions solved" in rest.out


def test_a_run_has_one_owner_and_many_readers(warm: Warm, place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fault = Fault("signalled_in_sampling", samples=50, number=int(signal.SIGSTOP))
    command = warm.start(
        "rft", "sample", place / "letters.toml", "--run", run, "--json", *LONGER, fault=fault
    )
    while command.alive() and psutil.Process(command.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    second = warm.run("rft", "sample", place / "letters.toml", "--run", run, *LONGER)
    assert second.code == 5
    assert "in use by another process" in one_line(second.err)
    stats = warm.run("rft", "stats", run, "--json")
    assert stats.code == 0, stats.err
    assert json.loads(stats.out)["samples"] > 0
    command.kill()


def test_every_verb(warm: Warm, place: Path, unbroken: Path, tmp_path: Path) -> None:
    recipe = (place / "letters.toml", "--run", unbroken, *LONGER)

    def said(*arguments: Any) -> str:
        done = warm.run("rft", *arguments)
        assert done.code == 0, done.err
        return done.out

    exported = ("--export", "tensorboard")
    assert "training on answers: 20 examples" in said("train", *recipe, "--on", "answers", *exported)
    record = unbroken / "train-answers"
    steps = [(line["step"], pytest.approx(line["loss"])) for line in read_lines(record / "metrics.jsonl")]
    assert scalars(record)["train/loss"] == steps
    table = said("test", *recipe, "--rows", "10")
    assert table.count("after") == 2
    lines = json.loads(said("test", *recipe, "--rows", "all", "--json"))
    assert [(line["weights"], line["n"]) for line in lines] == [
        ("base", 20),
        ("answers", 20),
        ("samples", 20),
    ]
    loop = said("run", *recipe)
    assert "before" in loop
    assert "after RFT" in loop
    assert "test before" in loop
    figures = said("stats", unbroken)
    assert "pass@k" in figures
    assert "hardest" in figures
    assert said("export", unbroken, tmp_path / "rft.json").startswith(f"{tmp_path / 'rft.json'}: ")
    assert json.loads((tmp_path / "rft.json").read_text())[0][1] == "a"
    assert "rft/units-smollm2" in warm.run("recipes").out


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}


def test_a_failed_start_does_not_claim_the_folder(warm: Warm, place: Path, tmp_path: Path) -> None:
    arguments = ("rft", "test", place / "letters.toml", "--run", tmp_path / "run", "--json")
    assert warm.run(*arguments, "--set", "model.init_from=nowhere").code != 0
    done = warm.run(*arguments)
    assert done.code == 0, done.err
    refused = warm.run(*arguments, "--set", "train.lr=1")
    assert "train.lr (0.01 before, 1.0 now)" in one_line(refused.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "rft/no-such"), "no recipe 'rft/no-such'"),
        (("run", "rft/units-smollm2", "--set", "model.init_from=nowhere.gguf"), "nowhere.gguf"),
        (("run", "rft/units-smollm2", "--preset", "fast"), "no preset 'fast'"),
        (
            ("train", "rft/units-smollm2", "--export", "tensorbord"),
            "got 'tensorbord' (did you mean 'tensorboard'?)",
        ),
        (("run", "rft/units-smollm2", "--profile", "a100"), "no profile 'a100'"),
        (("test", "rft/units-smollm2", "--rows", "some"), "--rows takes a whole number"),
        (("stats", "nowhere"), "no samples at nowhere"),
        (("sample", "nano"), "nano is a recipe of workload pretrain: use `redline train nano`"),
    ],
)
def test_mistakes_are_one_line(warm: Warm, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    where = () if arguments[0] == "stats" else ("--run", tmp_path / "run", "--device", "cpu")
    done = warm.run("rft", *arguments, *where)
    assert done.code != 0
    assert message in one_line(done.err)


def test_a_run_is_a_model_for_generation_and_for_the_next_round(
    warm: Warm, place: Path, unbroken: Path, tmp_path: Path
) -> None:
    """What a run trained is opened from its folder, adapter merged; the same as by the adapter's own
    folder."""
    texts = [
        json.loads(warm.run("generate", model, *ASKED).out)
        for model in (unbroken, unbroken / "adapter", place / "model")
    ]
    assert texts[0] == texts[1] != texts[2]
    second_run = ("--run", tmp_path / "second", "--set", f'sample.sampler="{unbroken}"', *LONGER)
    done = warm.run("rft", "sample", place / "letters.toml", "--json", *second_run)
    assert done.code == 0, done.err
    first, second = (
        json.loads(warm.run("rft", "stats", run, "--json").out) for run in (unbroken, tmp_path / "second")
    )
    assert second["correct"] / second["samples"] > first["correct"] / first["samples"], (
        "a trained sampler is right more often"
    )


def test_rounds_are_sampled_by_what_the_last_one_trained(warm: Warm, place: Path, tmp_path: Path) -> None:
    arguments = (
        "rft",
        "run",
        place / "letters.toml",
        "--run",
        tmp_path / "run",
        "--rounds",
        "3",
        "--set",
        "sample.later_temperature=1.5",
    )
    done = warm.run(*arguments, "--json", "--export", "tensorboard")
    assert done.code == 0, done.err
    reports = json.loads(done.out)
    assert [Path(report["run"]).name for report in reports] == ["round-1", "round-2", "round-3"]
    assert ["before" in report for report in reports] == [True, False, False]
    assert all("train/loss" in scalars(Path(report["run"]) / "train-samples") for report in reports)
    rates = [report["sample"]["correct"] / report["sample"]["samples"] for report in reports]
    assert rates[1] > rates[0], "a trained sampler is right more often"
    recipe = (tmp_path / "run" / "round-2" / "recipe.toml").read_text()
    assert "round-1" in recipe
    assert "temperature = 1.5" in recipe
    again = warm.run(*arguments)
    assert again.code == 0, again.err
    assert again.out.count("after RFT") == 3
    assert "none drawn this time" in again.out, "a finished round is not repeated"
    wrong = warm.run("rft", "run", place / "letters.toml", "--run", tmp_path / "other", "--rounds", "0")
    assert wrong.code == 2
    assert "--rounds must be at least 1, got 0" in one_line(wrong.err)


def test_a_run_of_rounds_is_told_from_a_run_of_one(
    warm: Warm, place: Path, unbroken: Path, tmp_path: Path
) -> None:
    several = warm.run("rft", "run", place / "letters.toml", "--run", unbroken, "--rounds", "2", *LONGER)
    assert several.code == 2
    assert "holds a run of one round" in one_line(several.err)
    run = tmp_path / "run"
    assert warm.run("rft", "run", place / "letters.toml", "--run", run, "--rounds", "2", "--quiet").code == 0
    stats = warm.run("rft", "stats", run)
    assert stats.code == 3
    assert "name one of its 2 rounds" in one_line(stats.err)
    assert warm.run("generate", run, *ASKED).out == warm.run("generate", run / "round-2", *ASKED).out, (
        "the last round is the model"
    )


@pytest.mark.slow
def test_the_demo_really_gets_better_on_held_out_questions(warm: Warm, tmp_path: Path) -> None:
    """The shipped model and recipe, with a sixth of the questions: 0.20 to 0.98 when this was written."""
    small = ("--set", "task.rows=40", "--set", "test.rows=50", "--set", "train.seed=4")
    done = warm.run("rft", "run", "rft/demo", "--run", tmp_path / "run", "--json", *small)
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["before"]["accuracy"] < 0.4
    assert report["after"]["accuracy_low"] > report["before"]["accuracy_high"] + 0.2, (
        "a margin beyond both intervals"
    )
