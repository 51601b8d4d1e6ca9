"""`redline launch` starts runs: here one after another, and through SLURM's commands, which stand-ins play."""

import json
from pathlib import Path

from pipeline import Nano, steps
from warm import Fault

from redline.errors import StorageError


def test_two_experiments_here_and_a_page_that_compares_them(nano: Nano, tmp_path: Path) -> None:
    recipe = nano.recipe(tmp_path, "train.steps=2")
    options = ("launch", recipe, "--run", tmp_path / "grid", "--set", "train.lr=1e-3,2e-3")
    done = nano.warm.start(*options, "--json", fault=Fault("forked_members")).wait()
    assert done.code == 0, done.err
    first, second, page = json.loads(done.out)
    assert [first["run"], second["run"]] == [str(tmp_path / "grid-lr-1e-3"), str(tmp_path / "grid-lr-2e-3")]
    assert [first["why"], second["why"]] == ["finished", "finished"]
    assert [steps(Path(run["run"]))[-1]["lr"] for run in (first, second)] == [1e-3, 2e-3]
    shown = Path(page["report"]).read_text()
    assert "grid-lr-1e-3" in shown
    assert "grid-lr-2e-3" in shown


def test_an_experiment_that_fails_does_not_keep_the_next_from_running(nano: Nano, tmp_path: Path) -> None:
    recipe = nano.recipe(tmp_path, "train.steps=2")
    (there := tmp_path / "grid-steps-2").mkdir()
    (there / "other.txt").write_text("not a run")
    options = ("launch", recipe, "--run", tmp_path / "grid", "--set", "train.steps=2,3")
    done = nano.warm.start(*options, "--json", fault=Fault("forked_members")).wait()
    assert done.code == StorageError.exit_code
    first, second = json.loads(done.out)
    assert "holds files that are not a run's" in first["error"]
    assert second["why"] == "finished"
    assert len(steps(tmp_path / "grid-steps-3")) == 3
