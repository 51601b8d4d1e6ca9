"""Rollouts by workers apart from the trainer: how far behind they are, what corrects it, and what a kill costs. The
workers here are engines of this process, one for each version of the weights; tests/integration/test_rl_ray.py has real
ones."""

import copy
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from precision import CLOSE_FP32
from rft_model import planned, tiny_model
from rl_model import kill_after, letters_rl, run_rl, training

from redline.engine.local import LocalEngine
from redline.engine.ray import OnRay
from redline.engine.request import Completion, Request
from redline.errors import ConfigError
from redline.model.lora import merge
from redline.record.run import read_lines
from redline.rl import policy
from redline.rl.samples import Samples
from redline.train.checkpoint import read_tensors
from redline.train.places import resolve
from redline.train.restore import open_weights

BEHIND = ["rl.max_versions_behind=1", "rl.refills=0"]
CAP = 1.02


class Near:
    """What a policy needs of a RayEngine."""

    def __init__(self, model: Any, tokenizer: Any, *, place: OnRay, event: Any, **settings: Any) -> None:
        self.tokenizer, self.settings, self.version = tokenizer, settings, -1
        self.weights: dict[int, Any] = {}
        self.publish(model)
        event("worker", name="worker-1", state="joined", samples=0, seconds=0.0)

    def publish(self, model: Any) -> None:
        self.version += 1
        self.weights[self.version] = own = copy.deepcopy(model)
        merge(own)

    def run(self, requests: Iterable[Request | None], *, version: int) -> Iterator[Completion]:
        with LocalEngine(self.weights[version], self.tokenizer, **self.settings) as engine:
            yield from engine.run(requests)

    def stop(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RayEngine", Near)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    return letters_rl(folder, tiny_model(folder / "model"))


def versions(run: Path, steps: int) -> list[set[int]]:
    return [{group.version for group in Samples(run).of(step)} for step in range(1, steps + 1)]


def test_none_behind_is_the_run_on_one_machine(recipe: Path, tmp_path: Path) -> None:
    run_rl(recipe, tmp_path / "here", ["train.steps=3"])
    run_rl(recipe, tmp_path / "there", ["train.steps=3", "rl.max_versions_behind=0"], on=OnRay())
    assert training(tmp_path / "there") == training(tmp_path / "here")
    assert versions(tmp_path / "there", 3) == versions(tmp_path / "here", 3) == [{0}, {1}, {2}]
    events = [line["event"] for line in read_lines(tmp_path / "there" / "events.jsonl")]
    assert events.count("worker") == 1, "what another thread says is passed on"


@pytest.mark.parametrize("behind", [1, 2])
def test_every_step_has_the_version_that_it_should_and_says_so(
    recipe: Path, tmp_path: Path, behind: int
) -> None:
    sets = ["train.steps=5", f"rl.max_versions_behind={behind}"]
    run_rl(recipe, tmp_path / "run", sets, on=OnRay())
    expected = [max(0, step - 1 - behind) for step in range(1, 6)]
    assert versions(tmp_path / "run", 5) == [{version} for version in expected]
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["versions_behind"] for line in lines] == [
        step - version for step, version in enumerate(expected)
    ]
    assert ["beside_s" in line for line in lines] == [False, True, True, True, True]
    assert not list((tmp_path / "run" / "samples").glob("step-00000006*")), "nobody draws what nobody learns"
    run_rl(recipe, tmp_path / "again", sets, on=OnRay())
    assert training(tmp_path / "again") == training(tmp_path / "run"), "whoever is first"


def test_the_correction_of_older_answers_by_hand(recipe: Path, tmp_path: Path) -> None:
    """The loss of step 2 from its samples, drawn by version 0, and the weights of version 1."""
    kept = [
        "train.steps=2",
        "train.checkpoint_every=1",
        "train.keep_checkpoints=9",
        f"rl.importance_cap={CAP}",
    ]
    run_rl(recipe, tmp_path / "run", [*BEHIND, *kept], on=OnRay())
    shaped, _, _ = planned(recipe, ())
    model = open_weights(Path(shaped.model.init_from)).build("cpu")
    model.load_state_dict(
        read_tensors(tmp_path / "run" / "checkpoints" / "step-00000001", "model."), strict=False
    )
    total, tokens, cut = 0.0, 0, 0
    for group in Samples(tmp_path / "run").of(2):
        rewards = [answer.reward for answer in group.answers]
        if min(rewards) == max(rewards):
            continue
        for answer in group.answers:
            good = (answer.reward - fmean(rewards)) / (stdev(rewards) + 1e-4)
            read = torch.tensor([[*group.prompt, *answer.tokens[:-1]]])
            with torch.no_grad():
                now = model(read)[0, -len(answer.tokens) :].double().log_softmax(-1)
            for place, (token, sampled) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
                ratio = math.exp(float(now[place, token]) - sampled)
                cut += ratio > CAP
                total, tokens = total - min(ratio, CAP) * good, tokens + 1
    assert 0 < cut < tokens
    line = read_lines(tmp_path / "run" / "metrics.jsonl")[1]
    assert line["loss"] == pytest.approx(total / tokens, rel=CLOSE_FP32, abs=CLOSE_FP32)


@pytest.mark.parametrize("drawn", [6, 14])
def test_what_was_drawn_ahead_of_a_kill_is_neither_lost_nor_drawn_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: int
) -> None:
    """Killed while the thread that draws ahead has so many groups, 4 in a step."""
    found = kill_after(monkeypatch, drawn)
    sets = [*BEHIND, "train.steps=5", "train.checkpoint_every=1"]
    with pytest.raises(KeyboardInterrupt):
        run_rl(recipe, tmp_path / "run", sets, on=OnRay())
    before = {path.name: path.read_bytes() for path in (tmp_path / "run" / "samples").iterdir()}
    resumed_from = int(resolve(tmp_path / "run").name.removeprefix("step-"))
    run_rl(recipe, tmp_path / "run", sets, on=OnRay())
    assert sorted(found) == [(step, ("letters", n)) for step in range(1, 6) for n in range(4)]
    for name, lines in before.items():
        assert (tmp_path / "run" / "samples" / name).read_bytes().startswith(lines)
    # in flight: partly from before, the rest from the weights of the attempt that resumes
    first = {0, resumed_from}
    assert all(
        behind <= {max(0, step - 2), *first} for step, behind in enumerate(versions(tmp_path / "run", 5), 1)
    )


def test_older_answers_need_the_correction(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_versions_behind 1 answers come from older weights"):
        run_rl(recipe, tmp_path / "run", ["rl.importance_cap=0"], on=OnRay())
