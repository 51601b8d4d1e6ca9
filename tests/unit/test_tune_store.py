"""Where a tuning lives: whose folder it is, and what the command says."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from trials import TUNED

from redline.cli.main import main
from redline.cli.tune import print_result, train_command
from redline.config.load import load_recipe, to_toml
from redline.errors import ConfigError, StorageError
from redline.measure.statistics import Comparison
from redline.plan.hardware import hardware_as
from redline.plan.plan import save
from redline.plan.planner import make_plan
from redline.tune.store import TrialRow, check_folder, keep, tuned_plan

RECIPE = load_recipe("gpt2-124m")
PLAN = make_plan(RECIPE, hardware_as("h200-141g", 16))
OTHER = load_recipe("gpt2-124m", ["train.batch_size=64"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.db", "checkpoints/"])
def test_the_folder_of_a_run_is_refused_and_left_as_it_was(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).mkdir() if name.endswith("/") else (run / name).touch()
    for file in ("recipe.toml", "plan.json"):
        (run / file).write_text("the run's own")
    before = {path.name: path.read_bytes() if path.is_file() else None for path in run.iterdir()}
    assert main(["tune", "nano", "--minutes", "1", "--out", str(run)]) == StorageError.exit_code
    assert (
        capsys.readouterr().err
        == f"redline: {run} holds a run ({name.rstrip('/')}), which the trials would overwrite:"
        " give another folder with --out\n"
    )
    assert {path.name: path.read_bytes() if path.is_file() else None for path in run.iterdir()} == before


def test_a_second_tuning_killed_while_it_is_kept_never_shows_the_first_result_beside_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = replace(PLAN, micro_batch=8, accumulation=64)
    keep(tmp_path, PLAN, TUNED)
    with monkeypatch.context() as killed:
        killed.setattr("redline.tune.store.write_atomic", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            keep(tmp_path, rules, replace(TUNED, ratio=9.0))
    assert tuned_plan(tmp_path, RECIPE) is None
    keep(tmp_path, rules, replace(TUNED, ratio=9.0))
    plan, result = tuned_plan(tmp_path, RECIPE) or pytest.fail("nothing is kept")
    assert (plan.micro_batch, result.ratio) == (8, 9.0)


def test_trials_of_another_recipe_are_refused_and_those_of_the_same_go_on(tmp_path: Path) -> None:
    check_folder(tmp_path / "new", RECIPE)
    check_folder(tmp_path, RECIPE)
    save(PLAN, tmp_path / "plan.json")
    check_folder(tmp_path, RECIPE)
    with pytest.raises(
        StorageError, match=f"another workload .*work {RECIPE.work}, not.*: give another folder with --out"
    ):
        check_folder(tmp_path, OTHER)
    (tmp_path / "recipe.toml").write_text(to_toml(RECIPE))
    check_folder(tmp_path, RECIPE)
    # a pin is part of a trial, not of what is trained
    check_folder(tmp_path, load_recipe("gpt2-124m", ["plan.micro_batch=4"]))
    with pytest.raises(StorageError, match=r"another workload \(recipe gpt2-124m"):
        check_folder(tmp_path, OTHER)
    (tmp_path / "recipe.toml").write_text("[task]")
    with pytest.raises(StorageError, match="a recipe that cannot be read"):
        check_folder(tmp_path, RECIPE)


def test_the_table_has_a_star_where_the_interval_has_less_than_95_per_cent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    slower = Comparison(ratio=0.8, low=0.75, high=0.85, verdict="slower", paired=True)
    row = TrialRow(name="whole", predicted=1.0, outcome="ok", tokens_per_s=800.0, verdict="slower")
    whole = replace(row, comparison=slower, rounds=6)
    lost = replace(row, name="lost", tokens_per_s=None, verdict="not compared")
    others = (
        replace(row, name="the rules' plan", predicted=None, verdict="kept", kept=True),
        whole,
        replace(lost, note="the plan it is compared with crashed: [/x]"),
        TrialRow(name="left", predicted=0.5, verdict="not tried", note="not tried: predicted 0.50x"),
    )
    for shown, star in (((*others, replace(whole, name="brief", rounds=4)), True), (others, False)):
        result = replace(TUNED, ratio=1.0, low=1.0, high=1.0, rows=shown)
        print_result(PLAN, result, Path("folder"))
        said = " ".join(capsys.readouterr().out.split())
        assert "0.800x [0.750, 0.850] slower 1.00x" in said
        assert ("0.800x [0.750, 0.850]* slower" in said) == ("* stopped after fewer rounds" in said) == star
        assert "lost – – not compared 1.00x" in said
        assert "lost: the plan it is compared with crashed: [/x]" in said
        assert "left: not tried: predicted 0.50x" in said


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_is_finite_and_above_0(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    for command, option in (("tune", "--minutes"), ("ablate", "--block-seconds")):
        assert main([command, "nano", f"{option}={value}"]) == ConfigError.exit_code
        rule = f"{option} must be a finite number above 0"
        assert capsys.readouterr().err == f"redline: {rule}, got {value:g}\n"


def test_the_command_that_trains_can_be_pasted() -> None:
    options = argparse.Namespace(
        recipe="my recipe.toml", set=["data.source=a b", "plan.compile=off"], out=Path("c 1")
    )
    assert (
        train_command(options)
        == "redline train 'my recipe.toml' --set 'data.source=a b' --plan 'c 1/plan.json'"
    )
    options.out = None
    assert train_command(options).endswith("--set plan.compile=off --plan auto")
