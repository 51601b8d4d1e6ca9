"""From a recipe to a model that others load, by the commands that a user types: train, generate, evaluate,
export, plan.

One run is made by the installed command in a process of its own, with everything at its default; the rest
goes through the same command line in forks of a warm process. Truths from outside: `transformers` for the
exported weights, TensorBoard's own reader.
"""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pipeline import Nano, events, one_line, steps
from precision import CLOSE_FP32

from redline.config.load import load_recipe
from redline.data.build import prepare
from redline.data.shards import TokenDataset
from redline.launch.processes import PROGRAM
from redline.record.metrics import METRICS

ALWAYS = ("step", "loss", "tokens_per_s", "mfu", "data_wait_s", "memory_bytes")
SEQUENCES = 12
pytestmark = pytest.mark.numerics  # some are; the others share their run


@pytest.fixture(scope="module")
def recipe(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nano.recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def run(nano: Nano, recipe: Path) -> Path:
    """Made by the real command, with torch's own number of threads and the view that a pipe gets."""
    run = recipe.parent / "run"
    command = [*PROGRAM, "train", str(recipe), "--run", str(run), "--export", "tensorboard"]
    environment = {**os.environ, **nano.warm.environment}
    del environment["OMP_NUM_THREADS"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "step 40/40" in done.stdout
    assert f"run folder: {run}" in done.stdout
    return run


@pytest.fixture(scope="module")
def exported(nano: Nano, run: Path) -> Path:
    out = run.parent / "hf"
    done = nano.warm.run("export", run, out)
    assert done.code == 0, done.err
    return out


def answer(nano: Nano, *arguments: str | Path) -> Any:
    """What a command prints with `--json`: nothing but JSON."""
    done = nano.warm.run(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_every_line_says_what_it_must(run: Path) -> None:
    lines = steps(run)
    assert len(lines) == 40
    for line in lines:
        assert set(ALWAYS) <= set(line) <= set(METRICS)
        assert line["mfu"] is None, "a CPU has no datasheet peak"
        assert line["tokens"] == line["step"] * 8 * 32
        assert line["memory_bytes"] > 2**20
        assert line["tokens_per_s"] == pytest.approx(8 * 32 / line["step_s"])
    assert [line["step"] for line in lines if "valid_loss" in line] == [10, 20, 30, 40]
    assert lines[0]["loss"] == pytest.approx(math.log(512), rel=0.05), "an untrained model knows nothing"
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    elapsed_s = [line["elapsed_s"] for line in lines]
    assert elapsed_s == sorted(elapsed_s)


def test_the_run_folder_holds_the_three_nouns(nano: Nano, run: Path, recipe: Path) -> None:
    said = answer(nano, "recipes", recipe)
    plan = json.loads((run / "plan.json").read_text())
    assert answer(nano, "recipes", run / "recipe.toml") == said
    assert plan["work"] == load_recipe(str(run / "recipe.toml")).work
    assert plan["micro_batch"]["value"] * plan["accumulation"]["value"] == 8
    assert [event["event"] for event in events(run)][0 :: len(events(run)) - 1] == ["start", "end"]


def test_generate_is_fixed_by_its_seed(nano: Nano, run: Path, exported: Path) -> None:
    asked = ("--prompt", "ROMEO:", "--samples", "2", "--max-new-tokens", "24")
    texts = answer(nano, "generate", run, *asked, "--seed", "3")
    assert [(text["prompt"], text["sample"]) for text in texts] == [("ROMEO:", 0), ("ROMEO:", 1)]
    assert texts[0]["text"] != texts[1]["text"]
    assert answer(nano, "generate", run, *asked, "--seed", "3") == texts
    assert answer(nano, "generate", run, *asked, "--seed", "4") != texts
    assert answer(nano, "generate", exported, *asked, "--seed", "3") == texts


def test_evaluate_agrees_with_the_training(nano: Nano, run: Path, exported: Path) -> None:
    last = steps(run)[-1]
    found = answer(nano, "evaluate", run, "--sequences", str(SEQUENCES))
    assert found["tokens"] == SEQUENCES * 32
    assert found["valid_loss"] == pytest.approx(last["valid_loss"], rel=CLOSE_FP32)
    assert found["valid_perplexity"] == pytest.approx(math.exp(found["valid_loss"]))
    best = min((line for line in steps(run) if "valid_loss" in line), key=lambda line: line["valid_loss"])
    found = answer(nano, "evaluate", run, "--checkpoint", "best", "--sequences", str(SEQUENCES))
    assert found["valid_loss"] == pytest.approx(best["valid_loss"], rel=CLOSE_FP32)
    corpus = ("--data", nano.cache / "verses.jsonl", "--seq-len", "32", "--sequences", "5")
    assert (
        answer(nano, "evaluate", exported, *corpus)["valid_loss"]
        == answer(nano, "evaluate", run, *corpus)["valid_loss"]
    )


def test_transformers_finds_the_same_loss(nano: Nano, recipe: Path, run: Path, exported: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    rows = torch.from_numpy(valid_split(nano, recipe).read_windows(torch.arange(SEQUENCES).numpy(), 32))
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert loss.item() == pytest.approx(steps(run)[-1]["valid_loss"], rel=CLOSE_FP32)
    text = "But soft, what light"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_run_starts_from_the_exported_weights(
    nano: Nano, run: Path, exported: Path, tmp_path: Path
) -> None:
    still = (
        "train.steps=1",
        "train.lr=1e-12",
        "train.warmup_steps=0",
        "train.eval_every=1",
        "train.checkpoint_every=0",
    )
    recipe = nano.recipe(tmp_path, *still, f"model.init_from={exported}", f"data.tokenizer={exported}")
    line = nano.outcome(recipe, tmp_path / "run")["metrics"]
    assert line["valid_loss"] == pytest.approx(steps(run)[-1]["valid_loss"], rel=CLOSE_FP32)
    narrow = nano.recipe(tmp_path, *still, f"model.init_from={exported}", "model.hidden_size=64")
    done = nano.train(narrow, tmp_path / "narrow")
    assert done.code == 2
    assert "model.hidden_size is 64 and the weights" in one_line(done.err)


def test_tensorboard_gets_every_number(run: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    for tag, name in (
        ("train/loss", "loss"),
        ("train/tokens_per_s", "tokens_per_s"),
        ("valid/loss", "valid_loss"),
    ):
        expected = [(line["step"], line[name]) for line in steps(run) if name in line]
        found = [(scalar.step, scalar.value) for scalar in reader.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=2**-23)


def test_a_saved_plan_is_what_is_executed(nano: Nano, recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    said = answer(nano, "plan", recipe, "--set", "plan.micro_batch=2", "--save", file)
    assert said == json.loads(file.read_text())
    run, brief = tmp_path / "run", ("--set", "train.steps=4")
    done = nano.train(recipe, run, "--plan", str(file), "--set", "train.optimizer=muon")
    assert done.code == 2
    assert "the plan was made for another workload (recipe nano" in one_line(done.err)
    done = nano.train(recipe, run, "--plan", str(file), "--set", "plan.precision=bf16")
    assert done.code == 2
    assert "plan.precision has no effect beside --plan" in one_line(done.err)
    answer(nano, "plan", recipe, "--set", "plan.micro_batch=2", *brief, "--save", file)
    nano.outcome(recipe, run, "--plan", str(file), *brief)
    assert json.loads((run / "plan.json").read_text()) == json.loads(file.read_text())
    assert events(run, "start")[0]["micro_batch"] == 2
    answer(nano, "plan", recipe, *brief, "--nproc", "2", "--save", file)
    done = nano.train(recipe, tmp_path / "other", "--plan", str(file), *brief)
    assert done.code == 2
    assert "the plan is for 2 processes" in one_line(done.err)


def valid_split(nano: Nano, recipe: Path) -> TokenDataset:
    """The validation tokens that the run's data folder holds."""
    with patch.dict("os.environ", REDLINE_CACHE=str(nano.cache)):
        made = load_recipe(str(recipe))
        return TokenDataset.open(prepare(made.data, made.model.vocab_size), "valid")
