"""Whole commands on run folders in which one file holds anything: they do their work, or end with one line."""

import shutil
import sys
from pathlib import Path

import pytest
from hostile import CRAFTED, contents, damaged, put
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import rft_model
import rl_model

from redline.cli.main import main

pytestmark = pytest.mark.skipif(
    settings.get_current_profile_name() == "test", reason="minutes: make fuzz runs it"
)

TRAIN = [
    "recipe.toml",
    "plan.json",
    "tokenizer.json",
    "metrics.jsonl",
    "events.jsonl",
    "checkpoints/best.json",
]
RFT = [
    "recipe.toml",
    "plan.json",
    "events.jsonl",
    "evaluations.jsonl",
    "samples.db",
    "train-samples/done.json",
    "train-samples/metrics.jsonl",
    "train-samples/events.jsonl",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
]
RL = [
    "recipe.toml",
    "plan.json",
    "metrics.jsonl",
    "events.jsonl",
    "checkpoints/best.json",
    "checkpoints/step-00000006/state.json",
    "samples/step-00000006.jsonl",
]
ON_TRAIN = [
    ["generate", "RUN", "--max-new-tokens", "2"],
    ["generate", "RUN", "--checkpoint", "best", "--max-new-tokens", "2"],
    ["evaluate", "RUN"],
    ["report", "RUN", "--out", "OUT.html"],
    ["diagnose", "RUN"],
    ["export", "RUN", "OUT"],
    ["plan", "nano", "--json"],
]
ON_RFT = [
    ["rft", "stats", "RUN"],
    ["rft", "export", "RUN", "OUT.json"],
    ["rft", "export", "RUN", "OUT.jsonl"],
    ["report", "RUN", "--out", "OUT.html"],
    ["diagnose", "RUN"],
    ["generate", "RUN", "--max-new-tokens", "2"],
]
ON_RL = [
    ["report", "RUN", "--out", "OUT.html"],
    ["diagnose", "RUN"],
    ["rl", "compare", "RUN", "RUN"],
    ["generate", "RUN", "--max-new-tokens", "2"],
    ["export", "RUN", "OUT"],
]
NANO = [
    "--set",
    "train.steps=3",
    "--set",
    "train.batch_size=4",
    "--set",
    "train.checkpoint_every=2",
    "--set",
    "model.num_layers=1",
    "--set",
    "train.eval_sequences=4",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "nano", "--run", str(run), *NANO]) == 0
    return run


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("fine_tuned")
    recipe = rft_model.letters_recipe(place, rft_model.tiny_model(place / "model"))
    assert main(["rft", "run", str(recipe), "--run", str(place / "run")]) == 0
    return place / "run"


@pytest.fixture(scope="module")
def reinforced(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("reinforced")
    recipe = rl_model.letters_rl(place, rft_model.tiny_model(place / "model"))
    assert main(["rl", "run", str(recipe), "--run", str(place / "run")]) == 0
    return place / "run"


def drawn(run: Path, file: str, data: st.DataObject) -> bytes:
    """Anything, or what the file holds with one thing wrong in it."""
    if file.endswith((".json", ".jsonl")) and "tokenizer" not in file and data.draw(st.integers(0, 3)):
        return damaged(run / file, data)
    return data.draw(contents | st.sampled_from(CRAFTED))


def attack(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, raw: bytes, command: list[str]
) -> None:
    there = tmp_path / "run"
    for left in (*tmp_path.glob("OUT*"), there):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    shutil.copytree(run, there)
    put(there / file, raw)
    names = {"RUN": str(there), "OUT": str(tmp_path / "OUT")}
    capsys.readouterr()
    code = main([names.get(part, part.replace("OUT", names["OUT"])) for part in command])
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("redline: ")]
    assert len(lines) == (code != 0), said
    assert len(said) < 5000


few = settings(max_examples=300)


@few
@given(data=st.data())
def test_a_training_run(trained, tmp_path, capsys, data):
    file, command = data.draw(st.sampled_from(TRAIN)), data.draw(st.sampled_from(ON_TRAIN))
    attack(trained, tmp_path, capsys, file, drawn(trained, file, data), command)


@few
@given(data=st.data())
def test_a_run_of_rejection_sampling(fine_tuned, tmp_path, capsys, data):
    file, command = data.draw(st.sampled_from(RFT)), data.draw(st.sampled_from(ON_RFT))
    attack(fine_tuned, tmp_path, capsys, file, drawn(fine_tuned, file, data), command)


@few
@given(data=st.data())
def test_a_run_of_reinforcement_learning(reinforced, tmp_path, capsys, data):
    file, command = data.draw(st.sampled_from(RL)), data.draw(st.sampled_from(ON_RL))
    attack(reinforced, tmp_path, capsys, file, drawn(reinforced, file, data), command)


@few
@given(data=st.data())
def test_a_run_that_is_resumed(trained, tmp_path, capsys, data):
    file = data.draw(st.sampled_from(TRAIN))
    attack(
        trained, tmp_path, capsys, file, drawn(trained, file, data), ["train", "nano", "--run", "RUN", *NANO]
    )
