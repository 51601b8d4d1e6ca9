"""Waits for other processes as a part of their own: what a slow network costs is seen, named and predicted;
without it the parts add up."""

import json
import math
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from pipeline import Nano, events, steps
from warm import Fault

from redline.config.load import load_recipe
from redline.diagnose.observed import PHASES
from redline.diagnose.readers.own import read_run
from redline.diagnose.rules import diagnose
from redline.plan.arithmetic import traffic
from redline.plan.capacity import LINK_SHARE, on
from redline.plan.plan import Hardware
from redline.plan.planner import make_plan
from redline.record.read import read_run as read_own
from redline.report.crew import crew

COLLECTIVES = 2 + 3 * 2
"""Of a pass: one gather and one reduction of the embedding and head, two gathers and one reduction of each of
two blocks."""
SLOWER = 1.5
"""What the network is made to cost, in updates without it."""
BLOCK = 5
CPU = Hardware(
    title="two cores", kind="cpu", memory_bytes=16 * 2**30, compute_capability=(), cores=2, peak_tflops={},
    measured_tflops={"fp32": 0.05}, bandwidth_bytes_per_s=10e9, source="by hand",
)  # fmt: skip
ENOUGH = (
    "model.hidden_size=64",
    "model.ffn_size=256",
    "train.batch_size=16",
    "train.eval_every=0",
    "train.checkpoint_every=0",
)
"""To compute that two processes do not only wait for each other."""


def run_on_two(
    nano: Nano, recipe: Path, run: Path, delay_s: float, bytes_per_s: float = math.inf
) -> list[dict[str, Any]]:
    """The lines of a run on two processes whose network is slow in every second block of updates."""
    slow = {"delay_s": delay_s, "bytes_per_s": bytes_per_s}
    fault = Fault("slow_network", block=BLOCK, tally=str(run.with_suffix(".json")), **slow)
    for done in nano.train_on_two(recipe, run, faults=(fault, fault)):
        assert done.code == 0, done.err
    return steps(run)


def only(run: Path, lines: list[dict[str, Any]]) -> Path:
    """A run folder that holds some of the lines of another."""
    folder = run.with_name(f"{run.name} in part")
    folder.mkdir()
    for name in ("recipe.toml", "plan.json", "events.jsonl"):
        shutil.copy(run / name, folder)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line | {"step": i}) + "\n" for i, line in enumerate(lines, 1))
    )
    return folder


@pytest.mark.timing
def test_a_slow_network_is_seen_named_and_predicted(nano: Nano, tmp_path: Path) -> None:
    """Each within 25%."""
    usual = run_on_two(nano, nano.recipe(tmp_path, *ENOUGH, "train.steps=15"), tmp_path / "usual", 0.0)
    planted_s = SLOWER * mean(line["step_s"] for line in usual[BLOCK:])
    run, recipe = tmp_path / "slow", nano.recipe(tmp_path, *ENOUGH, "train.steps=70")
    lines = run_on_two(nano, recipe, run, planted_s / COLLECTIVES)[2 * BLOCK :]
    clean, slow = ([line for line in lines if (line["step"] - 1) // BLOCK % 2 == odd] for odd in (0, 1))
    seen_s = mean(line["communication_s"] for line in slow) - mean(line["communication_s"] for line in clean)
    measured = mean(line["step_s"] for line in slow) / mean(line["step_s"] for line in clean)
    top = diagnose(read_run(only(run, slow)))[0]
    assert top.gain is not None
    assert seen_s == pytest.approx(planted_s, rel=0.25)
    assert top.cause == "communication"
    assert top.gain.middle == pytest.approx(measured, rel=0.25)
    for of in (clean, slow):
        assert median(sum(line.get(phase, 0.0) for phase in PHASES) / line["issue_s"] for line in of) > 0.9


@pytest.mark.timing
def test_a_link_of_a_known_bandwidth_takes_the_time_that_the_plan_predicts(
    nano: Nano, tmp_path: Path
) -> None:
    """gloo hides nothing, so the upper bound holds: compute, and the whole of the communication."""
    recipe = nano.recipe(tmp_path, *ENOUGH, "train.steps=15")
    usual = run_on_two(nano, recipe, tmp_path / "usual", 0.0)
    loaded = load_recipe(str(recipe))
    received = traffic(loaded.model, precision="fp32", accumulation=1, shards=2).total
    bytes_per_s = received / (SLOWER * mean(line["step_s"] for line in usual[BLOCK:]))
    hardware = replace(
        CPU, link_bytes_per_s=bytes_per_s / LINK_SHARE, network_bytes_per_s=bytes_per_s / LINK_SHARE
    )
    predicted = on(loaded, make_plan(loaded, hardware, world_size=2))
    recipe = nano.recipe(tmp_path, *ENOUGH, "train.steps=70")
    lines = run_on_two(nano, recipe, tmp_path / "slow", 0.0, bytes_per_s)[2 * BLOCK :]
    clean, slow = ([line for line in lines if (line["step"] - 1) // BLOCK % 2 == odd] for odd in (0, 1))
    seen_s = mean(line["step_s"] for line in slow) - mean(line["step_s"] for line in clean)
    print(
        f"{received:,} bytes an update over {bytes_per_s / 1e6:.2f} MB/s: predicted {predicted.communication_s:.4f} s, seen {seen_s:.4f} s"
    )
    assert predicted.received_bytes == received
    assert seen_s == pytest.approx(predicted.communication_s, rel=0.25)


def test_waits_are_a_part_of_every_update_and_a_slow_network_makes_them_longer(
    nano: Nano, tmp_path: Path
) -> None:
    """A sleep is never shorter than it was meant to be, whatever else the machine does."""
    delay_s = 0.01
    recipe = nano.recipe(tmp_path, "train.steps=10", "train.eval_every=0", "train.checkpoint_every=0")
    lines = run_on_two(nano, recipe, tmp_path / "run", delay_s)
    for line in lines:
        assert {"forward_s", "backward_s", "optimizer_s", "communication_s"} <= line.keys()
        assert sum(line.get(phase, 0.0) for phase in PHASES) <= line["issue_s"] <= line["step_s"] + 1e-4
    assert all(line["communication_s"] >= COLLECTIVES * delay_s for line in lines[BLOCK:])


@pytest.mark.parametrize("shards", [2, 1])
def test_what_a_process_receives_is_what_the_arithmetic_says(nano: Nano, tmp_path: Path, shards: int) -> None:
    """Counted in FSDP's own collectives: two passes an update, bf16 in the blocks, fp32 elsewhere. Once with the weights
    spread over both processes, once with a copy on each."""
    overrides = ("train.steps=4", "train.eval_every=0", "plan.precision=bf16", "plan.micro_batch=2")
    recipe = nano.recipe(tmp_path, *overrides, f"plan.shards={shards}")
    run_on_two(nano, recipe, tmp_path / "run", 0.0)
    counted = json.loads((tmp_path / "run.json").read_text())
    model = load_recipe(str(recipe)).model
    t = traffic(model, precision="bf16", accumulation=2, shards=shards, replicas=2 // shards)
    assert t.total > 0
    expected = [t.gathered, t.gathers, t.scattered, t.scatters, t.reduced, t.reductions]
    assert counted == [expected] * 4


def test_one_process_has_no_such_part(nano: Nano, tmp_path: Path) -> None:
    nano.outcome(nano.recipe(tmp_path, "train.steps=6"), tmp_path / "run")
    assert not any("communication_s" in line for line in steps(tmp_path / "run"))


def test_a_torch_that_waits_elsewhere_leaves_it_in_the_phases_and_says_so_once(
    nano: Nano, tmp_path: Path
) -> None:
    recipe, run = nano.recipe(tmp_path, "train.steps=6"), tmp_path / "run"
    fault = Fault("waits_elsewhere")
    for done in nano.train_on_two(recipe, run, faults=(fault, fault)):
        assert done.code == 0, done.err
    assert not any("communication_s" in line for line in steps(run))
    (said,) = events(run, "communication_not_timed")
    assert "forward and backward" in said["why"]


def test_a_slow_process_is_named_in_every_update_but_the_first(nano: Nano, tmp_path: Path) -> None:
    """By a clock that counts: process 1 takes ten times as long over the same marks."""
    recipe, run = nano.recipe(tmp_path, "train.steps=8", "train.eval_every=0"), tmp_path / "run"
    fault = Fault("counted_time", slow_rank=1, times=10)
    for done in nano.train_on_two(recipe, run, faults=(fault, fault)):
        assert done.code == 0, done.err
    first, *rest = steps(run)
    assert "slowest_rank" not in first
    assert [line["slowest_rank"] for line in rest] == [1] * 7
    assert all(line["slowest_s"] > line["others_s"] > 0 for line in rest)
    (begun,) = events(run, "start")
    assert begun["hosts"] == {socket.gethostname(): 2}
    assert "process 1 is slow" in " ".join(found.said if (found := crew(read_own(run))) else ())
