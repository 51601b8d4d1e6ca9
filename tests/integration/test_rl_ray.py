"""RL with workers on a real Ray on this machine: the run on one machine where none is behind, though a worker is killed,
and the run of the stand-in (tests/unit/test_rl_workers.py) where one is."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from rft_model import tiny_model
from rl_model import letters_rl, run_rl, training
from test_rl_workers import BEHIND, Near, versions

from redline.engine.ray import OnRay, RayEngine
from redline.record.run import read_lines
from redline.rl import policy
from redline.rl.domains import Domains

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    return letters_rl(folder, tiny_model(folder / "model"))


@pytest.mark.numerics
def test_none_behind_is_the_run_on_one_machine_though_a_worker_is_killed(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[RayEngine] = []
    answered: list[Any] = []
    answers = Domains.answers

    class Seen(RayEngine):
        def __init__(self, *given: Any, **how: Any) -> None:
            super().__init__(*given, **how)
            engines.append(self)

    def killing(self: Domains, run: Any, asked: Any, **how: Any) -> Any:
        for key, samples in answers(self, run, asked, **how):
            answered.append(key)
            if len(answered) == 2:
                ray.kill(next(member.actor for member in engines[0]._members if member.joined))
            yield key, samples

    run_rl(recipe, tmp_path / "here", ["train.steps=3"])
    monkeypatch.setattr(policy, "RayEngine", Seen)
    monkeypatch.setattr(Domains, "answers", killing)
    run_rl(recipe, tmp_path / "there", ["train.steps=3", "rl.max_versions_behind=0"], on=OnRay(workers=1))
    assert training(tmp_path / "there") == training(tmp_path / "here")
    events = read_lines(tmp_path / "there" / "events.jsonl")
    assert "died" in [line["state"] for line in events if line["event"] == "worker"]


@pytest.mark.numerics
def test_one_behind_draws_beside_the_update(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [*BEHIND, "train.steps=3", "lora.rank=2"]
    run_rl(recipe, tmp_path / "there", sets, on=OnRay(workers=1))
    assert versions(tmp_path / "there", 3) == [{0}, {0}, {1}]
    assert "beside_s" in read_lines(tmp_path / "there" / "metrics.jsonl")[-1]
    monkeypatch.setattr(policy, "RayEngine", Near)
    run_rl(recipe, tmp_path / "near", sets, on=OnRay())
    assert training(tmp_path / "there") == training(tmp_path / "near")
