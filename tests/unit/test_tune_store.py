"""Folders of trials: whose they are, what stands in them after a crash or a hand's edit, and what the command says of them."""

import argparse
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.cli.options import check_positive
from redline.cli.tune import train_command
from redline.config.load import load_recipe, to_toml
from redline.errors import ConfigError, StorageError
from redline.plan.hardware import hardware_as
from redline.plan.plan import save
from redline.plan.planner import make_plan
from redline.tune.store import TuningFolder, check_folder

RECIPE = load_recipe("gpt2-124m")
PLAN = make_plan(RECIPE, hardware_as("h200-141g", 16))
OTHER = load_recipe("gpt2-124m", ["train.batch_size=64"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.db", "checkpoints/"])
def test_the_folder_of_a_run_is_refused_and_left_as_it_was(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).mkdir() if name.endswith("/") else (run / name).touch()
    for file in ("recipe.toml", "plan.json"):
        (run / file).write_text("the run's own")
    before = {path.name: path.read_bytes() if path.is_file() else None for path in run.iterdir()}
    assert main(["tune", "nano", "--minutes", "1", "--out", str(run)]) == StorageError.exit_code
    assert capsys.readouterr().err == (
        f"redline: {run} holds a run ({name.rstrip('/')}), whose recipe and plan trials would write over: give another folder with --out\n"
    )
    assert {path.name: path.read_bytes() if path.is_file() else None for path in run.iterdir()} == before


def test_trials_of_another_recipe_are_refused_and_those_of_the_same_go_on(tmp_path: Path) -> None:
    check_folder(tmp_path / "new", RECIPE)
    check_folder(tmp_path, RECIPE)
    save(PLAN, tmp_path / "plan.json")  # what tunings of earlier versions say of themselves
    check_folder(tmp_path, RECIPE)
    with pytest.raises(StorageError, match=f"another recipe .*fingerprint {RECIPE.fingerprint} before.*: give another folder with --out"):
        check_folder(tmp_path, OTHER)
    (tmp_path / "recipe.toml").write_text(to_toml(RECIPE))
    check_folder(tmp_path, RECIPE)
    check_folder(tmp_path, load_recipe("gpt2-124m", ["plan.micro_batch=4"]))  # a pin is part of a trial, not of what is trained
    with pytest.raises(StorageError, match=r"another recipe \(gpt2-124m: train.batch_size \(512 before, 64 now\)\)"):
        check_folder(tmp_path, OTHER)
    (tmp_path / "recipe.toml").write_text("[task]")
    with pytest.raises(StorageError, match="a recipe that cannot be read"):
        check_folder(tmp_path, RECIPE)


def test_what_both_commands_say_of_a_folder_speaks_of_trials(tmp_path: Path) -> None:
    with TuningFolder(tmp_path), pytest.raises(StorageError, match="is in use by another process"), TuningFolder(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="the trials cannot be written to"), TuningFolder(tmp_path / "file" / "below"):
        pass


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_is_finite_and_above_0(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    check_positive("--minutes", 1e-3)
    with pytest.raises(ConfigError, match=f"--block-seconds must be a finite number above 0, got {value:g}"):
        check_positive("--block-seconds", value)
    assert main(["tune", "nano", f"--minutes={value}"]) == ConfigError.exit_code
    assert capsys.readouterr().err == f"redline: --minutes must be a finite number above 0, got {value:g}\n"


def test_the_command_that_trains_can_be_pasted() -> None:
    options = argparse.Namespace(recipe="my recipe.toml", set=["data.source=a b", "plan.compile=off"], out=Path("c 1"))
    assert train_command(options) == "redline train 'my recipe.toml' --set 'data.source=a b' --plan 'c 1/plan.json'"
    options.out = None
    assert train_command(options).endswith("--set plan.compile=off --plan auto")
