"""The search against a machine of known speeds: it finds the fastest plan, refuses what is wrong, and goes on
after a kill.

The child is a script without torch that computes its step time from the plan it is given: every trial is real
but for the training.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.cli.tune import _gain
from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.errors import ConfigError, TrainingError
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_as
from redline.plan.plan import Plan, check_fit
from redline.plan.planner import make_plan
from redline.tune import trial as room
from redline.tune.candidates import candidates
from redline.tune.search import FINAL, Tuned, shorten, tune
from redline.tune.statistics import Comparison
from redline.tune.store import Result, Row, TuningFolder, tuned_plan, tuning_folder
from redline.tune.trial import Bounds

CHILD = """
import glob, json, os, random, signal, sys, time
world = json.load(open(sys.argv[1]))
noise = random.Random(os.getpid())
own = f"{world['log']}.{os.getpid()}.bytes"
def reply(**values):
    print(json.dumps(values), flush=True)
def others_bytes():
    "What the other children that are alive have taken."
    pids = {path: int(path.split(".")[-2]) for path in glob.glob(world["log"] + ".*.bytes")}
    return sum(int(open(path).read() or 0) for path, pid in pids.items() if pid != os.getpid() and os.path.exists(f"/proc/{pid}"))
def perhaps_die():
    "The plan with cudnn dies in its blocks after flash was started, so many times."
    dead = len(glob.glob(world["log"] + ".dead-*"))
    if plan["attention"] == "cudnn" and dead < world.get("reference_dies", 0) and "flash" in open(world["log"]).read():
        open(f"{world['log']}.dead-{dead}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL) if world["how"] == "killed" else sys.exit("an illegal memory access")
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "start":
        plan = {k: v["value"] if isinstance(v, dict) and "value" in v else v for k, v in request["setting"]["plan"].items()}
        with open(world["log"], "a") as log:
            log.write(json.dumps(plan) + chr(10))
        tokens = 1024 * plan["micro_batch"] * plan["accumulation"]
        step_s = tokens / 5e5 * (1 + world["overhead"] / plan["micro_batch"] + max(0, plan["micro_batch"] - world["best"]) / 200)
        shift = 0.0
        for name, value, factor, loss in world["values"]:
            if plan[name] == value:
                step_s, shift = step_s * factor, shift + loss
        active = int((2e9 + 4e8 * plan["micro_batch"] * world["memory"]) * (world.get("flash", 1) if plan["attention"] == "flash" else 1))
        crash = next((w for n, v, w in world["failing"] if plan[n] == v), None)
        open(own, "w").close()
        if active + (others_bytes() if world.get("flash") else 0) > 140e9:
            crash = "out_of_memory"
        if plan["micro_batch"] > world.get("killed_above", 10**9) and len(open(world["log"]).readlines()) <= world.get("kills", 10**9):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000 if plan["attention"] == world.get("hangs") else 0)
        if world.get("dies_last") and plan["attention"] == "cudnn" and "flash" in open(world["log"]).read():
            crash = "crashed"
        if world.get("first_dies") and len(open(world["log"]).readlines()) == 1:
            crash = "dies"
        if crash == "dies":
            sys.exit("an illegal memory access was encountered")
        if crash:
            reply(failed=crash, error="planted")
            continue
        with open(own, "w") as taken:
            taken.write(str(active))
        losses = [10.0 * (1 + shift)] * 5
        reply(first_step_s=10.0 if plan["compile"] != "off" else 1.0, warmup_steps=5, steps_per_block=1, tokens_per_step=tokens,
              losses=losses, grad_norms=[1.0] * 5)
    elif request["do"] == "memory":
        reply(allocated_bytes=active, active_bytes=active, reserved_bytes=int(1.02 * active), other_bytes=10**9)
    else:
        perhaps_die()
        late = len(open(world["log"]).readlines()) > world["late_after"]
        time.sleep(world["late_block_takes_s"] if late else world["block_takes_s"])
        reply(step_s=step_s * (1 + noise.uniform(0, world["noise"])), data_wait_s=step_s * world["waits"] / plan["loader_threads"])
"""
FACTS = read_facts()
ONLY_ATTENTION = (
    "plan.micro_batch=64", "plan.compile=default", "plan.cross_entropy=fused", "plan.recompute=none",
    "plan.precision=bf16",
)  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the machine is like; a test changes it before it tunes."""
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", CHILD, str(tmp_path / "world")))
    given: dict[str, Any] = {
        "log": str(tmp_path / "log"), "overhead": 4.0, "best": 64, "memory": 1.0, "values": [], "failing": [],
        "waits": 0.0,
        "noise": 0.004, "block_takes_s": 0, "late_block_takes_s": 0, "late_after": 2,
    }  # fmt: skip
    return given


def search(
    world: dict[str, Any], tmp_path: Path, *overrides: str, minutes: float = 5.0
) -> tuple[Tuned, Recipe, Plan]:
    recipe = load_recipe("gpt2-124m", overrides)
    rules = make_plan(recipe, hardware_as("h200-141g", 16))
    (tmp_path / "world").write_text(json.dumps(world))
    said: list[str] = []
    with TuningFolder(tmp_path / "tuning") as folder:
        tuned = tune(recipe, rules, folder, minutes=minutes, progress=said.append, bounds=Bounds(limit_s=20))
    assert all("left]" in line for line in said)
    check_fit(tuned.plan, recipe, 1)
    return tuned, recipe, rules


def started(world: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(world["log"]).read_text().splitlines()]


def test_a_rules_plan_that_is_best_stays_and_says_what_was_tried(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world["values"] = [["attention", "flash", 1.05, 0], ["cross_entropy", "torch", 1.08, 0]]
    tuned, _, rules = search(world, tmp_path)
    assert tuned.plan.micro_batch == rules.micro_batch == 64
    assert (tuned.plan.attention, tuned.plan.cross_entropy) == ("cudnn", "fused")
    assert tuned.result.ratio == 1.0
    assert tuned.plan.why["attention"].source == "measurement"
    assert "flash measured 0.95" in tuned.plan.why["attention"].reason
    tried = {row.name for row in tuned.result.rows if row.outcome}
    assert {
        "the rules' plan",
        "micro_batch 32",
        "micro_batch 128",
        "attention flash",
        "cross_entropy torch",
    } <= tried


def test_the_fastest_micro_batch_is_found_not_the_largest(world: dict[str, Any], tmp_path: Path) -> None:
    world.update(best=16, overhead=1.0)
    tuned, recipe, rules = search(world, tmp_path)
    assert tuned.plan.micro_batch == 16
    assert tuned.plan.accumulation == recipe.train.batch_size // 16
    assert tuned.result.ratio > 1.1
    assert tuned.result.low > 1
    assert tuned.plan.why["micro_batch"].source == "measurement"
    assert tuned.plan.prediction.memory_bytes < rules.prediction.memory_bytes


def test_better_values_are_kept_together_with_a_micro_batch_that_suits_them(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world["values"] = [["attention", "flash", 0.9, 0], ["cross_entropy", "torch", 0.93, 0]]
    tuned, _, _ = search(world, tmp_path)
    assert (tuned.plan.attention, tuned.plan.cross_entropy) == ("flash", "torch")
    assert tuned.result.ratio == pytest.approx(1 / (0.9 * 0.93), rel=0.02)
    assert tuned.result.rows[-1].name == "the winner against the rules' plan"


def test_a_faster_plan_that_trains_differently_is_never_chosen(world: dict[str, Any], tmp_path: Path) -> None:
    world["values"] = [["attention", "flash", 0.5, 0.05]]
    tuned, _, _ = search(world, tmp_path)
    assert tuned.plan.attention == "cudnn"
    [row] = [row for row in tuned.result.rows if row.name == "attention flash"]
    assert row.comparison is not None
    assert row.comparison.verdict == "faster"
    assert row.note.startswith("refused")


@pytest.mark.parametrize("how", ["crashed", "dies", "out_of_memory"])
def test_a_candidate_that_fails_is_a_row_and_the_search_goes_on(
    world: dict[str, Any], tmp_path: Path, how: str
) -> None:
    world["failing"] = [["compile", "max-autotune-no-cudagraphs", how]]
    world["values"] = [["attention", "flash", 0.9, 0]]
    tuned, _, _ = search(world, tmp_path)
    [row] = [row for row in tuned.result.rows if row.name.startswith("compile max")]
    assert row.outcome == ("crashed" if how == "dies" else how)
    assert tuned.plan.attention == "flash"


def test_pins_are_left_alone(world: dict[str, Any], tmp_path: Path) -> None:
    world.update(best=16, values=[["attention", "flash", 0.5, 0]])
    tuned, _, _ = search(world, tmp_path, "plan.micro_batch=64", "plan.attention=cudnn")
    assert (tuned.plan.micro_batch, tuned.plan.attention) == (64, "cudnn")
    assert {plan["micro_batch"] for plan in started(world)} == {64}


def test_larger_passes_are_not_tried_where_the_probes_say_they_do_not_fit(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world.update(memory=4.0, best=1000)  # 128 would take 207 GB; the planner's arithmetic thinks 53
    tuned, _, _ = search(world, tmp_path)
    assert max(plan["micro_batch"] for plan in started(world)) == 64
    [row] = [row for row in tuned.result.rows if row.name == "micro_batch 128"]
    assert "by 2 probes" in row.note


def test_a_rules_plan_that_does_not_fit_is_tried_with_smaller_passes(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world["memory"] = 8.0
    tuned, _, _ = search(world, tmp_path)
    assert tuned.result.rows[0].outcome == "out_of_memory"
    assert tuned.plan.micro_batch == 32
    assert tuned.plan.why["micro_batch"].reason == "micro-batch 64 ran out of memory; 16 measured " + str(
        tuned.result.rows[2].comparison
    )
    assert tuned.plan.why["accumulation"].reason == "512 sequences an update / (32 a pass x 1 process(es))"
    assert (tuned.result.ratio, tuned.result.against) == (1.0, "the rules' plan cut to micro-batch 32")


def test_after_running_out_of_memory_small_probes_say_what_fits(
    world: dict[str, Any], tmp_path: Path
) -> None:
    """Sixteen times what arithmetic says: 64, 32 and 16 do not fit. Halving would run out of memory three
    times."""
    world["memory"] = 40.0
    tuned, _, _ = search(world, tmp_path)
    outcomes = [
        (row.name, row.outcome) for row in tuned.result.rows if row.name.startswith("the rules' plan")
    ]
    assert outcomes == [("the rules' plan", "out_of_memory"), ("the rules' plan cut to micro-batch 8", "ok")]
    assert tuned.plan.micro_batch == 8


def test_a_rules_plan_that_crashes_once_is_started_again(world: dict[str, Any], tmp_path: Path) -> None:
    world["first_dies"] = True
    assert search(world, tmp_path, minutes=0.01)[0].result.rows[0].kept


def test_a_rules_plan_that_crashes_is_one_clear_line(world: dict[str, Any], tmp_path: Path) -> None:
    world["failing"] = [["attention", "cudnn", "crashed"]]
    with pytest.raises(TrainingError, match=r"does not run here \(crashed\): planted"):
        search(world, tmp_path)


def test_compiling_is_refused_where_the_run_is_too_short_to_earn_it_back(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world["values"] = [["compile", "default", 0.5, 0]]
    pay = [
        "train.steps=10",
        "train.warmup_steps=0",
        "plan.attention=cudnn",
        "plan.cross_entropy=fused",
        "plan.micro_batch=64",
    ]
    tuned, _, _ = search(world, tmp_path, *pay, "train.batch_size=64")
    [row] = [row for row in tuned.result.rows if row.name == "compile default"]
    assert "pays back after" in row.note
    assert tuned.plan.compile == "off"


def test_compiling_is_paid_back_by_whole_updates_not_by_those_of_a_trial(
    world: dict[str, Any], tmp_path: Path
) -> None:
    """Nine seconds of compiling. Of an update of 512, 0.55 s are gained, of a trial's of 256 half that: 17
    updates pay, not 33."""
    world["values"] = [["compile", "default", 0.5, 0]]
    pay = [
        "train.steps=25",
        "train.warmup_steps=0",
        "plan.attention=cudnn",
        "plan.cross_entropy=fused",
        "plan.micro_batch=64",
    ]
    tuned, recipe, rules = search(world, tmp_path, *pay)
    assert shorten(recipe, rules).train.batch_size == recipe.train.batch_size / 2
    assert tuned.plan.compile == "default"


def test_a_step_that_waits_for_data_gets_more_threads(world: dict[str, Any], tmp_path: Path) -> None:
    world["waits"] = 0.2
    world["values"] = [["loader_threads", 2, 0.85, 0]]
    tuned, _, _ = search(world, tmp_path)
    assert tuned.plan.loader_threads == 2


def test_the_time_is_kept_and_what_was_left_out_is_said(world: dict[str, Any], tmp_path: Path) -> None:
    tuned, _, _ = search(world, tmp_path, minutes=0.0001)
    assert len(started(world)) == 1
    assert "attention flash" in tuned.result.untried


def test_time_for_the_last_comparison_is_always_set_aside(world: dict[str, Any], tmp_path: Path) -> None:
    """By its blocks of 0.55 s a comparison takes four seconds: of six the one at the end, and none before
    it."""
    tuned, _, _ = search(world, tmp_path, *ONLY_ATTENTION, minutes=0.1)
    assert tuned.result.untried == ("attention flash",)
    assert "are left before the last comparison" in tuned.result.rows[1].note
    assert len(started(world)) == 1


SMALL = (*ONLY_ATTENTION, "train.batch_size=64")
"""Blocks of 0.13 s."""


def test_noisy_rounds_end_with_the_time(world: dict[str, Any], tmp_path: Path) -> None:
    """All 24 rounds of both comparisons would take eight seconds."""
    world.update(
        noise=0.5, block_takes_s=0.08, late_block_takes_s=0.08, values=[["attention", "flash", 0.4, 0]]
    )
    tuned, _, _ = search(world, tmp_path, *SMALL, minutes=0.09)
    assert tuned.result.elapsed_s < 6.5
    assert [row.rounds is not None and 6 <= row.rounds < 24 for row in tuned.result.rows[1:]] == [True, True]
    assert (tuned.plan.attention, tuned.result.unconfirmed) == ("flash", "")


@pytest.mark.parametrize("slow", [{"hangs": "flash"}, {"late_block_takes_s": 0.5, "late_after": 1}])
def test_a_candidate_that_is_not_done_in_time_is_tried_by_the_next_command(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: dict[str, Any]
) -> None:
    monkeypatch.setattr(room, "SHORTEST_LIMIT_S", 1.0)
    world.update(slow, values=[["attention", "flash", 0.9, 0]])
    tuned, _, _ = search(world, tmp_path, *SMALL, minutes=0.06)
    assert tuned.result.elapsed_s < 5
    assert tuned.result.untried == ("attention flash",)
    assert (tuned.result.rows[1].outcome, tuned.result.rows[1].verdict) == (None, "not tried")
    world.update(hangs=None, late_block_takes_s=0)
    assert search(world, tmp_path, *SMALL)[0].plan.attention == "flash"


def test_a_last_comparison_for_which_the_time_was_over_is_said(world: dict[str, Any], tmp_path: Path) -> None:
    """Once flash has won everything takes a second: fewer than six rounds are left."""
    world.update(late_block_takes_s=1.0, values=[["attention", "flash", 0.9, 0]])
    tuned, _, _ = search(world, tmp_path, *SMALL, minutes=0.06)
    assert tuned.result.elapsed_s < 7
    assert (tuned.plan.attention, tuned.result.unconfirmed) == ("flash", "the time was over")
    assert tuned.result.ratio == pytest.approx(1 / 0.9, rel=0.01)


def test_finished_trials_are_not_repeated_and_a_torn_line_is_no_trouble(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world["values"] = [["attention", "flash", 0.9, 0]]
    first, _, _ = search(world, tmp_path)
    trials = tmp_path / "tuning" / "trials.jsonl"
    runs = len(started(world))
    again, _, _ = search(world, tmp_path)
    assert len(started(world)) == runs, "everything was known"
    assert again.plan == first.plan
    lines = trials.read_text().splitlines(keepends=True)
    trials.write_text("".join(lines[:-4]) + lines[-4][:30])  # killed while a line was being written
    third, _, _ = search(world, tmp_path)
    assert runs < len(started(world)) < 2 * runs
    assert third.plan.attention == first.plan.attention == "flash"


def test_a_crash_is_tried_again_by_the_next_command(world: dict[str, Any], tmp_path: Path) -> None:
    world["failing"] = [["attention", "cudnn", "crashed"]]
    with pytest.raises(TrainingError, match="does not run here"):
        search(world, tmp_path)
    world["failing"] = []
    assert search(world, tmp_path)[0].result.rows[0].kept


def test_a_last_comparison_that_failed_is_said_and_made_again_by_the_next_command(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world["values"] = [["attention", "flash", 0.9, 0]]
    world["dies_last"] = True  # once flash has won, cudnn is started again only for the last comparison
    tuned, recipe, _ = search(world, tmp_path, *ONLY_ATTENTION)
    assert tuned_plan(tmp_path / "tuning", recipe) == (tuned.plan, tuned.result)
    assert (tuned.plan.attention, tuned.result.unconfirmed) == ("flash", "planted")
    assert tuned.result.ratio == pytest.approx(1 / 0.9, rel=0.01), "that of the duel which it won"
    assert 1 < tuned.result.low < tuned.result.ratio < tuned.result.high
    last = tuned.result.rows[-1]
    assert (last.name, last.verdict, last.comparison) == (
        "the winner against the rules' plan",
        "not compared",
        None,
    )
    assert last.note.startswith("failed: planted")
    cudnn = [plan for plan in started(world) if plan["attention"] == "cudnn"]
    assert len(cudnn) == 4, "alone; in the last comparison in the child that had it, and in two new ones"
    world["dies_last"] = False
    again, _, _ = search(world, tmp_path, *ONLY_ATTENTION)
    assert (again.plan.attention, again.result.unconfirmed) == ("flash", "")
    assert again.result.rows[-1].kept


def test_a_gain_that_was_not_confirmed_is_the_product_of_all_that_were_kept(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world.update(dies_last=True, values=[["attention", "flash", 0.9, 0], ["cross_entropy", "torch", 0.8, 0]])
    tuned, _, _ = search(
        world, tmp_path, "plan.micro_batch=64", "plan.compile=default", "plan.precision=bf16"
    )
    assert (tuned.plan.attention, tuned.plan.cross_entropy, tuned.result.unconfirmed) == (
        "flash",
        "torch",
        "planted",
    )
    assert tuned.result.ratio == pytest.approx(1 / (0.9 * 0.8), rel=0.01)
    kept = [row.comparison for row in tuned.result.rows if row.comparison and row.kept]
    assert tuned.result.low == pytest.approx(kept[0].low * kept[1].low)
    assert tuned.result.high == pytest.approx(kept[0].high * kept[1].high)


@pytest.mark.parametrize("how", ["crashed", "killed"])
def test_a_reference_that_dies_in_a_duel_is_started_again(
    world: dict[str, Any], tmp_path: Path, how: str
) -> None:
    world.update(values=[["attention", "flash", 0.9, 0]], reference_dies=1, how=how)
    tuned, _, _ = search(world, tmp_path, *ONLY_ATTENTION)
    assert tuned.plan.attention == "flash"
    [row] = [row for row in tuned.result.rows if row.name == "attention flash"]
    assert row.comparison is not None
    assert row.comparison.paired
    assert row.comparison.ratio == pytest.approx(1 / 0.9, rel=0.01)
    flash = [plan for plan in started(world) if plan["attention"] == "flash"]
    assert len(flash) == 1, "it stayed warm while the other was started again"


@pytest.mark.parametrize("how", ["crashed", "killed"])
def test_without_a_reference_nothing_is_said_about_a_candidate(
    world: dict[str, Any], tmp_path: Path, how: str
) -> None:
    world.update(values=[["attention", "flash", 0.9, 0]], reference_dies=99, how=how)
    tuned, _, rules = search(world, tmp_path, *ONLY_ATTENTION)
    [row] = [row for row in tuned.result.rows if row.name == "attention flash"]
    assert (row.outcome, row.comparison, row.verdict) == ("ok", None, "not compared")
    assert row.note.startswith("the plan it is compared with crashed: ")
    assert tuned.plan.why["attention"] == rules.why["attention"]
    assert tuned.result.ratio == 1.0
    world["reference_dies"] = 0
    assert search(world, tmp_path, *ONLY_ATTENTION)[0].plan.attention == "flash", "and it is tried again"


def test_a_plan_that_does_not_fit_beside_the_best_is_measured_by_itself(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world.update(values=[["attention", "flash", 0.9, 0]], flash=4.5)  # 124 of 140 GB, beside 28
    tuned, _, _ = search(world, tmp_path, *ONLY_ATTENTION)
    [row] = [row for row in tuned.result.rows if row.name == "attention flash"]
    assert row.outcome == "ok"
    assert row.comparison is not None
    assert not row.comparison.paired
    assert tuned.plan.attention == "flash"
    assert not tuned.result.paired
    lines = [json.loads(line) for line in (tmp_path / "tuning" / "trials.jsonl").read_text().splitlines()]
    assert [(line["measured"]["outcome"], line.get("paired")) for line in lines] == [
        ("ok", None),
        ("ok", False),
        ("ok", False),
    ]
    runs = len(started(world))
    again, _, _ = search(world, tmp_path, *ONLY_ATTENTION)
    assert len(started(world)) == runs
    assert [row.comparison for row in again.result.rows] == [row.comparison for row in tuned.result.rows]


def test_a_plan_that_does_not_fit_by_itself_is_not_tried_again(world: dict[str, Any], tmp_path: Path) -> None:
    world.update(values=[["attention", "flash", 0.9, 0]], flash=6)
    for runs in (1, 2):
        tuned, _, _ = search(world, tmp_path, *ONLY_ATTENTION)
        [row] = [row for row in tuned.result.rows if row.name == "attention flash"]
        assert (row.outcome, row.verdict) == ("out_of_memory", "out_of_memory"), runs
    flash = [plan for plan in started(world) if plan["attention"] == "flash"]
    assert len(flash) == 2, "beside the best and alone"


def test_two_plans_known_not_to_fit_at_once_are_not_started_at_once(
    world: dict[str, Any], tmp_path: Path
) -> None:
    """Arithmetic says 27 GB for each; the best was seen to take three times that."""
    world.update(memory=3.0, flash=1.0, values=[["attention", "flash", 0.9, 0]])
    tuned, _, _ = search(world, tmp_path, *ONLY_ATTENTION)
    assert tuned.plan.attention == "flash"
    assert len([plan for plan in started(world) if plan["attention"] == "flash"]) == 2, (
        "once in its duel, once in the last comparison"
    )


def test_a_rules_plan_that_the_system_kills_is_tried_with_smaller_passes(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world.update(killed_above=32, values=[["attention", "flash", 0.9, 0]])
    tuned, _, _ = search(world, tmp_path)
    note = "micro-batch 64 was killed twice, perhaps for want of memory: killed by signal 9"
    assert tuned.result.rows[0].note.startswith(note)
    assert len([plan for plan in started(world)[:3] if plan["micro_batch"] == 64]) == 2, (
        "once more before it is cut"
    )
    assert (tuned.plan.micro_batch, tuned.plan.attention) == (32, "flash")
    assert (tuned.result.rows[1].name, tuned.result.rows[1].kept) == (
        "the rules' plan cut to micro-batch 32",
        True,
    )
    assert tuned.result.rows[-1].name == "the winner against the rules' plan cut to micro-batch 32"
    assert tuned.result.ratio == pytest.approx(1 / 0.9, rel=0.02)
    assert tuned.plan.why["micro_batch"].reason.startswith(note.split(":")[0])
    assert "(32 a pass" in tuned.plan.why["accumulation"].reason


def test_a_rules_plan_that_is_killed_once_stays_what_the_search_starts_from(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world.update(killed_above=32, kills=1)
    tuned, _, rules = search(world, tmp_path)
    assert [plan["micro_batch"] for plan in started(world)[:2]] == [64, 64]
    assert (tuned.result.rows[0].name, tuned.result.rows[0].kept) == ("the rules' plan", True)
    assert (tuned.plan.micro_batch, tuned.result.ratio, tuned.result.against) == (
        rules.micro_batch,
        1.0,
        "the rules' plan",
    )


@pytest.mark.parametrize(("flash", "ratio"), [(1.05, 1.0), (0.9, 1 / 0.9)])
def test_a_rules_plan_that_runs_after_all_is_no_gain_over_itself(
    world: dict[str, Any], tmp_path: Path, flash: float, ratio: float
) -> None:
    """Killed twice by chance, it is tried again by the walk upwards: what is found is held against it, not
    against what it was cut to."""
    world.update(
        killed_above=32,
        kills=2,
        values=[["attention", "flash", flash, 0], ["cross_entropy", "torch", 1.1, 0]],
    )
    tuned, _, _ = search(world, tmp_path)
    assert tuned.result.rows[1].name == "the rules' plan cut to micro-batch 32"
    assert (tuned.plan.micro_batch, tuned.result.against) == (64, "the rules' plan")
    assert tuned.result.ratio == pytest.approx(ratio, rel=0.02)


def test_a_tuned_plan_is_found_by_machine_fingerprint_and_pins(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    rules = make_plan(load_recipe("gpt2-124m"), hardware_as("h200-141g", 16))
    other = make_plan(load_recipe("gpt2-124m", ["train.lr=1e-3"]), hardware_as("h200-141g", 16))
    pins = make_plan(load_recipe("gpt2-124m", ["plan.compile=off"]), hardware_as("h200-141g", 16))
    assert len({tuning_folder(FACTS, plan) for plan in (rules, other, pins)}) == 3
    tuned, recipe, _ = search(world, tmp_path)
    found = tuned_plan(tmp_path / "tuning", recipe)
    assert found is not None
    assert found[0] == tuned.plan
    assert found[1] == tuned.result
    assert found[1].rows[0].name == "the rules' plan"
    assert tuned_plan(tmp_path / "nothing", recipe) is None
    with pytest.raises(ConfigError, match=r"made for recipe gpt2-124m .*run `redline tune` again"):
        tuned_plan(tmp_path / "tuning", load_recipe("gpt2-124m", ["train.lr=1e-3"]))
    result = tmp_path / "tuning" / "result.json"
    table = json.loads(result.read_text())
    result.write_text(
        json.dumps({name: value for name, value in table.items() if name not in ("rows", "unconfirmed")})
    )
    assert tuned_plan(tmp_path / "tuning", recipe) == (tuned.plan, replace(tuned.result, rows=())), (
        "results of earlier versions"
    )
    (tmp_path / "tuning" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="run `redline tune` again"):
        tuned_plan(tmp_path / "tuning", recipe)


def test_long_updates_are_cut_to_whole_passes_and_short_ones_are_not() -> None:
    recipe = load_recipe("gpt2-124m")
    rules = make_plan(recipe, hardware_as("h200-141g", 16))
    assert shorten(recipe, rules).train.batch_size == 256
    small = load_recipe("gpt2-124m", ["train.batch_size=64"])
    assert shorten(small, make_plan(small, hardware_as("h200-141g", 16))) is small


def test_several_processes_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("gpt2-124m")
    with TuningFolder(tmp_path) as folder, pytest.raises(ConfigError, match="one process"):
        tune(
            recipe,
            make_plan(recipe, hardware_as("h200-141g", 16), world_size=2),
            folder,
            minutes=1,
            progress=print,
        )


@pytest.mark.parametrize(
    ("recompute", "tried"),
    [("none", []), ("selective", ["recompute none"]), ("full", ["recompute none", "recompute selective"])],
)
def test_only_less_recomputation_is_tried(recompute: str, tried: list[str]) -> None:
    recipe = load_recipe("gpt2-124m")
    plan = replace(make_plan(recipe, hardware_as("h200-141g", 16)), recompute=recompute)
    found = candidates(recipe, plan, fixed=(), data_wait_share=0.0)
    assert sorted(candidate.name for candidate in found if "recompute" in candidate.change) == tried


def test_what_is_printed_says_against_what_and_how_the_speed_was_measured() -> None:
    slower = Comparison(ratio=0.98, low=0.9, high=1.05, verdict="not resolved", paired=True)
    start = Row(
        name="the rules' plan", predicted=None, outcome="ok", tokens_per_s=1e3, verdict="kept", kept=True
    )
    last = Row(
        name=f"{FINAL} the rules' plan",
        predicted=None,
        outcome="ok",
        comparison=slower,
        verdict="not resolved",
    )
    same = Result(
        tuned_at="2026-01-01T00:00:00Z", ratio=1.0, low=1.0, high=1.0, paired=True, tokens_per_s=1e3,
        trials=3, elapsed_s=1.0, untried=(),
        rows=(start,),
    )  # fmt: skip
    assert _gain(same) == "the rules' plan is the fastest found: 1.0k tokens/s measured alone"
    assert _gain(replace(same, rows=(start, last))).endswith("1.0k tokens/s measured in turns with another")
    apart = replace(last, comparison=replace(slower, paired=False))
    assert _gain(replace(same, rows=(start, replace(last, name="attention flash"), apart))).endswith(
        "measured alone"
    )
    cut = replace(same, against="the rules' plan cut to micro-batch 2")
    assert _gain(cut).startswith("the rules' plan cut to micro-batch 2 is the fastest found")
    assert "x [1.100, 1.300] the rules' plan cut to micro-batch 2, in turns" in _gain(
        replace(cut, ratio=1.2, low=1.1, high=1.3)
    )


DRIVER = """
import subprocess
import sys
import time
from pathlib import Path
from redline.config.load import load_recipe
from redline.plan.hardware import hardware_as
from redline.plan.planner import make_plan
from redline.tune import trial as room
from redline.tune.search import tune
from redline.tune.store import TuningFolder
from redline.tune.trial import Bounds

room.COMMAND = (sys.executable, "-c", sys.argv[1], sys.argv[2])
recipe = load_recipe("gpt2-124m")
with TuningFolder(Path(sys.argv[3])) as folder:
    tune(recipe, make_plan(recipe, hardware_as("h200-141g", 16)), folder, minutes=5, progress=print, bounds=Bounds(limit_s=20))
"""


def test_killed_and_started_again_it_goes_on(world: dict[str, Any], tmp_path: Path) -> None:
    """A real SIGKILL after the third line; what stood there is not run again, and the result is that of a
    search nobody killed."""
    world["values"] = [["attention", "flash", 0.9, 0]]
    (tmp_path / "world").write_text(json.dumps(world))
    trials = tmp_path / "tuning" / "trials.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, CHILD, str(tmp_path / "world"), str(trials.parent)]
    ) as process:
        while not trials.exists() or trials.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        process.kill()
    before = trials.read_bytes()
    kept = before[: before.rfind(b"\n") + 1].splitlines()
    tuned, _, _ = search(world, tmp_path)
    after = trials.read_bytes().splitlines()
    assert after[: len(kept)] == kept
    keys = [json.loads(line)["key"] for line in after]
    assert len(keys) == len(set(keys)), "no trial was run twice"
    assert tuned.plan.attention == "flash"
