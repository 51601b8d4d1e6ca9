"""Killed and resumed equals unbroken, to the last bit: every line, every tensor, nothing twice, nothing missing.

Kills come at random moments of a run and at every place of a checkpoint's commit; requests to stop come as Ctrl-C and SIGTERM.
Whatever stopped a run, the same command goes on with it, until it ends where a run that was left alone ends.
"""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from pipeline import Nano, assert_same_training, events, steps, training
from warm import Command, Fault

from redline.train.checkpoint import verify
from redline.train.checkpoint_files import step_folders

VARIANTS = {
    "adamw": (),
    "muon": ("train.optimizer=muon",),
    "stream": ("data.stream=true",),
    "fp16": ("plan.precision=fp16", "train.steps=20"),
    "accumulated": ("plan.micro_batch=2", "train.clip_norm=none", "train.schedule=wsd"),
}


@pytest.fixture(scope="module")
def references(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each variant its recipe and a run that nobody disturbed."""
    made = {}
    for name, overrides in VARIANTS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = (nano.recipe(folder, *overrides), folder / "run")
        nano.outcome(*made[name])
    return made


def lines_written(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(command: Command, run: Path, more: int) -> None:
    """Until the command has written this many lines more than there were, or has ended."""
    wanted = lines_written(run) + more
    while command.alive() and lines_written(run) < wanted:
        time.sleep(0.001)


def assert_record_is_true(run: Path) -> None:
    """Each attempt starts where a checkpoint was announced before it, and what is on the disk was announced and is whole."""
    announced = {0}
    for event in events(run):
        if event["event"] in ("start", "resume"):
            assert event["step"] in announced
            assert (event["event"] == "resume") == (event["step"] > 0)
        if event["event"] == "checkpoint":
            announced.add(event["step"])
    on_disk = step_folders(run / "checkpoints")
    assert set(on_disk) <= announced
    for folder in on_disk.values():
        verify(folder)
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_random_moments(nano: Nano, references: dict[str, tuple[Path, Path]], tmp_path: Path, variant: str) -> None:
    recipe, reference = references[variant]
    run = tmp_path / "run"
    rng = random.Random(variant)
    kills = 0
    for _ in range(4):
        command = nano.start(recipe, run)
        wait_for_lines(command, run, more=rng.randint(1, 12))
        time.sleep(rng.random() * 0.02)
        command.kill()
        kills += command.code == -signal.SIGKILL
    assert kills >= 2, "the run was over before it was killed"
    assert nano.outcome(recipe, run)["why"] == "finished"
    assert_same_training(run, reference)
    assert_record_is_true(run)


def test_killed_at_every_place_of_a_commit(nano: Nano, tmp_path: Path) -> None:
    """Every fsync and rename of a short run with three checkpoints and two validations is once the last thing it does."""
    recipe = nano.recipe(
        tmp_path, "train.steps=6", "train.checkpoint_every=2", "train.eval_every=4", "train.eval_sequences=4", "train.keep_checkpoints=1"
    )
    reference = tmp_path / "reference"
    nano.outcome(recipe, reference)
    killed, torn = 0, 0
    for call in range(1, 100):
        run = tmp_path / str(call)
        command = nano.start(recipe, run, fault=Fault("kill_at", call=call))
        if command.wait().code != -signal.SIGKILL:
            break
        killed += 1
        torn += any((run / "checkpoints").glob(".tmp-step-*"))
        nano.outcome(recipe, run)
        assert_same_training(run, reference)
        assert_record_is_true(run)
    assert killed > 20
    assert torn > 5
