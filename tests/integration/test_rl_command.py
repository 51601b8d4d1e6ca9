"""`redline rl` as a user runs it: the plan, a run that is killed and resumed, mistakes."""

import json
import sys
from pathlib import Path

import pytest
from warm import Fault, Warm

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from rft_model import tiny_model
from rl_model import letters_rl

from redline.record.run import read_lines
from redline.rl.samples import Samples
from redline.train.checkpoint import read_tensors
from redline.train.places import resolve


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    return letters_rl(folder, tiny_model(folder / "model"))


def test_killed_anywhere_it_resumes_to_the_same_bits(warm: Warm, recipe: Path, tmp_path: Path) -> None:
    done = warm.run("rl", "run", recipe, "--run", tmp_path / "whole", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["why"] == "finished"
    for call in (2, 7):
        killed = warm.run(
            "rl", "run", recipe, "--run", tmp_path / "run", "--quiet", fault=Fault("kill_at", call=call)
        )
        assert killed.code == -9
    done = warm.run("rl", "run", recipe, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    assert "reward" in done.out
    whole, resumed = (read_tensors(resolve(tmp_path / run), "model.") for run in ("whole", "run"))
    assert all(bool((whole[name] == resumed[name]).all()) for name in whole)
    for step in range(1, 7):
        assert sorted(group.key for group in Samples(tmp_path / "run").of(step)) == sorted(
            group.key for group in Samples(tmp_path / "whole").of(step)
        )
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 6


def test_the_plan_is_shown_and_nothing_runs(warm: Warm, recipe: Path, tmp_path: Path) -> None:
    done = warm.run("rl", "run", recipe, "--run", tmp_path / "run", "--dry-run")
    assert done.code == 0, done.err
    assert "slots" in done.out
    assert "generation" in done.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set=rl.domains=['nowhere']"], "no task 'nowhere'"),
        (["--set=rl.domains=[]"], "name tasks in rl.domains"),
        (
            ["--set=train.batch_size=3", "--set=rl.updates_per_rollout=2"],
            "a multiple of rl.updates_per_rollout",
        ),
        (["--set=rl.group_size=1"], "rl.group_size must be at least 2 for grpo"),
        (["--set=rl.max_prompt_tokens=200"], "must not exceed the model's context"),
        (["--set=rl.pcgrad=tensor"], "needs several rl.domains"),
        (["--workers", "2"], "add --on ray"),
        (["--on", "ray", "--nproc", "2"], "--on ray needs one training process"),
    ],
)
def test_mistakes_are_one_line(warm: Warm, recipe: Path, options: list[str], message: str) -> None:
    done = warm.run("rl", "run", recipe, *options)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.count("\n") == 1
