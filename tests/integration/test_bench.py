"""`redline bench train` really trains: the loop, the bare step and their table, at nano size on a CPU."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pipeline import Nano

from redline.bench import attention, finetune, generate, rl
from redline.bench import train as bench
from redline.bench.results import BenchRow
from redline.cli.bench import ARMS
from redline.config.load import load_recipe
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_as, hardware_here
from redline.plan.plan import to_json
from redline.plan.planner import make_plan
from redline.record.units import format_duration
from redline.train.process import join


@pytest.mark.slow
def test_the_loop_and_the_bare_step_are_measured_on_the_same_work(nano: Nano, tmp_path: Path) -> None:
    places = ["--recipe", str(nano.recipe(tmp_path)), "--out", str(tmp_path / "out")]
    how = "--data tinyshakespeare --arm loop --blocks 2 --steps-per-block 2"
    done = nano.warm.start("bench", "train", *places, *how.split()).wait()
    assert done.code == 0, done.err
    [path] = (tmp_path / "out").glob("train_*.json")
    [entry] = json.loads(path.read_text())["results"]
    loop = entry["arms"]["loop"]
    assert set(loop["speeds"]) == {"loop", "bare"}
    for speed in loop["speeds"].values():
        assert 0 < speed["low"] <= speed["tokens_per_s"] <= speed["high"]
        assert speed["blocks"] == 2
    assert loop["loss"] > 0
    table = path.with_suffix(".md").read_text()
    assert f"{loop['speeds']['loop']['tokens_per_s']:,.0f}" in table
    assert entry["plan"]["work"] in table


def test_the_arm_of_plain_pytorch_trains(tmp_path: Path, nano: Nano, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(nano.cache))
    recipe = load_recipe(str(nano.recipe(tmp_path, "plan.compile=off")))
    plan = make_plan(recipe, hardware_here(read_facts(), None))
    with join("cpu") as process:
        step = bench._plain_step(recipe, plan, process)
        losses = [float(step().numbers["loss"]) for _ in range(8)]
    assert losses[-1] < losses[0], "the same batch again and again is learned"


def test_peers_are_not_measured_beside_a_softmax_over_some_tokens(tmp_path: Path, nano: Nano) -> None:
    facts, said = read_facts(), list[str]()
    recipe = load_recipe(str(nano.recipe(tmp_path, "train.softmax_candidates=300")))
    path = bench.bench_train(
        [(recipe, ("plain", "hf"))], hardware_here(facts, None), facts, tmp_path / "out", blocks=1, steps_per_block=1,
        progress=said.append,
    )  # fmt: skip
    assert all(line.endswith("train.softmax_candidates=0 compares the same work") for line in said)
    assert path.read_text().count("| failed | not run: it would compute the whole softmax") == 2


def test_an_arm_says_beforehand_what_it_will_do() -> None:
    recipe = load_recipe("gpt2-124m")
    plan = make_plan(recipe, hardware_as("h100-80g", 8))
    rate, setting = plan.prediction.attainable_tokens_per_s, {"blocks": 6, "steps_per_block": 20}
    assert rate is not None
    told = bench._work("loop", recipe, plan, setting)
    assert told.startswith(
        f"281 updates of {recipe.tokens_per_step:,} tokens, half of them bare steps, at least"
    )
    assert f" {format_duration(281 * recipe.tokens_per_step / rate)}, " in told
    assert bench._work("plain", recipe, plan, setting).startswith("141 updates")


def test_an_arm_that_runs_out_of_memory_is_tried_with_smaller_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(load_recipe("nano"), hardware_here(read_facts(), None))
    tried = []

    def rows_of(function: str, setting: dict[str, Any], allocator: str) -> Iterator[BenchRow]:
        tried.append(tuple(setting["plan"][name]["value"] for name in ("micro_batch", "accumulation")))
        full = {"failed": "CUDA out of memory", "outcome": "out_of_memory"}
        yield full if tried[-1][0] > 4 else {"speeds": {}}

    monkeypatch.setattr(bench, "rows_of", rows_of)
    assert bench._run_fitting("hf", {}, plan) == {"speeds": {}, "micro_batch": 4}
    assert tried == [(16, 1), (8, 2), (4, 4)]


def test_the_page_of_results_whose_numbers_are_known() -> None:
    recipe, hardware = load_recipe("gpt2-124m"), hardware_as("h100-80g", 1)
    plan = to_json(make_plan(recipe, hardware))
    # a million tokens a second take half of the peak
    plan["prediction"]["flops_per_token"] = 0.5e6 * hardware.peak_tflops["bf16"]
    speeds = {name: {"tokens_per_s": rate, "low": rate - 1e3, "high": rate + 1e3} for name, rate in
              (("loop", 0.99e6), ("bare", 1e6))}  # fmt: skip
    seen = {"memory_bytes": 20 * 2**30, "first_step_s": 8.6, "micro_batch": plan["micro_batch"]["value"] // 2}
    arms = {
        "loop": {"speeds": speeds, "predicted_bytes": 21 * 2**30, **seen},
        "hf": {"failed": "CUDA out of memory"},
    }
    lines = bench.page(hardware, read_facts(), [{"recipe": asdict(recipe), "plan": plan, "arms": arms}])
    loop, bare, hf = (line.split(" | ") for line in lines[-3:])
    assert loop[0] == f"| redline, the real loop, passes of {seen['micro_batch']}: more ran out of memory"
    assert loop[1:] == [
        "990,000", "989,000 – 991,000", "20.0 GiB", "49.5%", "-1.00%", "21.0 GiB, +5.0%", "8.6 s |"
    ]  # fmt: skip
    assert (bare[4], bare[5], bare[-1]) == ("50.0%", "+0.00%", "– |"), "its first step is the loop's"
    assert hf[:3] == ["| HF Trainer (bf16, compile, fused AdamW)", "failed", "CUDA out of memory"]


def test_the_command_knows_every_arm() -> None:
    """It names them itself, so that a wrong one is refused before torch is imported."""
    labelled = {"finetune": finetune, "rl": rl, "attention": attention}
    assert all(ARMS[verb] == tuple(module.LABELS) for verb, module in labelled.items())
    assert all(hasattr(bench, arm) for arm in ARMS["train"])
    assert all(hasattr(generate, arm) for arm in ARMS["generate"])
