"""RL on two processes: the same answers, losses and weights as on one, but for the order of additions."""

import json
import sys
from pathlib import Path

import pytest
import torch
from pipeline import on_two
from precision import CLOSE
from warm import Warm

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from rft_model import tiny_model
from rl_model import letters_rl

from redline.record.run import read_lines
from redline.rl.samples import Samples

STEPS = 3
EXACT = "rl.importance_cap=0"
"""The engine's log-probabilities travel in fp32: without the correction by them the rest compares in double."""
DOUBLE = {"IN_DOUBLE": "1"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    return letters_rl(folder, tiny_model(folder / "model", dtype=torch.float64))


@pytest.mark.numerics
@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.rank=2", "rl.kl=0.1", "rl.updates_per_rollout=2"),
        ("rl.algorithm=ppo", "rl.critic_lr=1e-3", "rl.kl=0.1"),
        ("rl.domains={two}", "rl.pcgrad=tensor", "rl.group_size=16"),
    ],
    ids=["adapters-kl-two-updates", "ppo-kl", "pcgrad"],
)
def test_two_processes_do_what_one_does(
    warm: Warm, recipe: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    other = recipe.with_name("others.py")
    other.write_text((recipe.with_name("letters.py")).read_text())
    two_domains = str([f"{recipe.with_name('letters.py')}:make", f"{other}:make"])
    arguments = [
        "rl",
        "run",
        recipe,
        "--json",
        *(
            f"--set={one.replace('{two}', two_domains)}"
            for one in (f"train.steps={STEPS}", EXACT, *overrides)
        ),
    ]
    alone = warm.start(*arguments, "--run", tmp_path / "one", environment=DOUBLE).wait()
    assert alone.code == 0, alone.err
    first, second = on_two(warm, *arguments, "--run", tmp_path / "two", environment=DOUBLE)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["why"] == "finished"
    assert second.out == ""
    for step in range(1, STEPS + 1):
        one, two = (
            {group.key: group for group in Samples(tmp_path / run).of(step)} for run in ("one", "two")
        )
        assert one.keys() == two.keys()
        for key, group in one.items():
            assert [answer.tokens for answer in two[key].answers] == [
                answer.tokens for answer in group.answers
            ]
    lines = [read_lines(tmp_path / run / "metrics.jsonl") for run in ("one", "two")]
    for one, two in zip(*lines, strict=True):
        assert two["reward"] == one["reward"]
        for name in {
            "loss",
            "grad_norm",
            "tokens",
            "entropy",
            "clip_share",
            "kl",
            "valid_accuracy",
        } & one.keys():
            assert two[name] == pytest.approx(one[name], rel=CLOSE, abs=CLOSE), name
