"""Tuning with real training in real child processes, at nano size on a CPU: planted slow values are found and
undone, a plan that changes the numbers is seen, and `redline train --plan auto` uses what was found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline import Nano, events
from trials import TUNED, measure

from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.machine.facts import read_facts
from redline.machine.store import cached
from redline.measure.process import Child
from redline.measure.trial import Measurement, Timing, TrialFolder, train_trial
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan, check_fit, save
from redline.plan.planner import make_plan
from redline.tune.guard import guard
from redline.tune.search import tune
from redline.tune.store import keep, tuned_plan, tuning_folder

SHORT = Timing(block_s=0.03, guard_steps=3, warmup_s=0.5, limit_s=100)


@pytest.fixture
def small(nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, Plan]:
    monkeypatch.setenv("REDLINE_CACHE", str(nano.cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = load_recipe(str(nano.recipe(tmp_path, "plan.compile=off")))
    facts = read_facts()
    return recipe, make_plan(recipe, hardware_here(facts, cached(facts)))


@pytest.mark.timing
@pytest.mark.slow
def test_a_planted_slow_plan_is_found_out(small: tuple[Recipe, Plan], tmp_path: Path) -> None:
    """Passes of half the batch with every block computed twice: several times slower than need be, and the
    same training."""
    recipe, rules = small
    planted = replace(rules, micro_batch=4, accumulation=2, recompute="full")
    with TrialFolder(tmp_path / "tuning") as folder:
        plan, result = tune(recipe, planted, folder, minutes=3, progress=print, timing=SHORT)
    assert plan.micro_batch == 8
    assert plan.recompute != "full"
    assert result.ratio > 1.5
    assert result.low > 1
    check_fit(plan, recipe, 1)
    assert tuned_plan(tmp_path / "tuning", recipe) == (plan, result)
    lines = [json.loads(line) for line in (tmp_path / "tuning" / "trials.jsonl").read_text().splitlines()]
    assert all(line["measured"]["outcome"] == "ok" for line in lines)
    assert len({tuple(round(loss, 3) for loss in line["measured"]["losses"]) for line in lines}) == 1, (
        "one training in all of them"
    )


@pytest.mark.slow
def test_the_search_runs_real_trials_that_are_one_training(
    small: tuple[Recipe, Plan], tmp_path: Path
) -> None:
    """Whatever is faster here today: every trial ends well, and all have the same losses."""
    recipe, rules = small
    pinned = replace(recipe, plan=replace(recipe.plan, micro_batch=4))
    rules = make_plan(pinned, rules.hardware)
    with TrialFolder(tmp_path) as folder:
        planted = replace(rules, recompute="full", why=rules.why)
        plan, _ = tune(pinned, planted, folder, minutes=3, progress=print, timing=SHORT)
    assert plan.micro_batch == 4
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert {"the rules' plan", "recompute none"} <= {line["name"] for line in lines}
    arms = [arm for line in lines for arm in (line["measured"], line["beside"]) if arm]
    assert all(arm["outcome"] == "ok" for arm in arms)
    assert len({tuple(round(loss, 3) for loss in arm["losses"]) for arm in arms}) == 1


@pytest.mark.slow
def test_one_child_measures_several_plans_and_the_guard_sees_numbers_that_differ(
    small: tuple[Recipe, Plan],
) -> None:
    recipe, plan = small
    with Child() as child:

        def measured(recipe: Recipe, plan: Plan) -> Measurement:
            return measure(train_trial(recipe, plan, SHORT), child)

        reference = measured(recipe, plan)
        assert reference.memory is not None
        assert reference.memory.reserved_bytes > 0
        assert reference.tokens_per_step == recipe.tokens_per_step
        again = measured(recipe, replace(plan, micro_batch=2, accumulation=4))
        assert guard(reference, again, "exact", precision="fp32").passed
        half = measured(recipe, replace(plan, precision="bf16"))
        assert not guard(reference, half, "exact", precision="fp32").passed
        assert guard(reference, half, "rounding", precision="bf16").passed
        wild = measured(replace(recipe, train=replace(recipe.train, lr=3.0, warmup_steps=0)), plan)
        assert wild.outcome == "crashed" or not guard(reference, wild, "rounding", precision="fp32").passed


def test_train_uses_a_tuned_plan_and_says_which(
    nano: Nano, small: tuple[Recipe, Plan], tmp_path: Path
) -> None:
    recipe, rules = small
    path = nano.recipe(tmp_path, "plan.compile=off")
    brief = ("--set", "train.steps=2", "--set", "train.warmup_steps=0")
    done = nano.train(path, tmp_path / "untuned", "--plan", "auto", *brief)
    assert done.code == 0, done.err
    assert "has not been tuned on this machine" in done.err
    recipe = load_recipe(str(path), [brief[1], brief[3]])
    facts = read_facts()
    rules = make_plan(recipe, hardware_here(facts, cached(facts)))
    found = replace(rules, micro_batch=2, accumulation=4)
    folder = tuning_folder(facts, rules)
    folder.mkdir(parents=True)
    keep(folder, found, TUNED)
    pins = nano.warm.start("tune", path, "--out", folder, "--set", "plan.micro_batch=4", *brief).wait()
    assert (pins.code, pins.out) == (5, "")
    assert "holds a tuning with other pins (micro_batch free before, 4 now)" in pins.err
    assert tuned_plan(folder, recipe) == (found, TUNED), "it stays as it was"
    done = nano.train(path, tmp_path / "tuned", "--plan", "auto", *brief)
    assert done.code == 0, done.err
    assert "tuned 2026-01-01 00:00:00 UTC, 1.50x the rules' plan" in done.err
    [start] = events(tmp_path / "tuned", "start")
    assert start["micro_batch"] == 2
    pinned = nano.train(path, tmp_path / "pinned", "--plan", "auto", "--set", "plan.micro_batch=4", *brief)
    assert "has not been tuned on this machine" in pinned.err, "other pins are another tuning"
    save(replace(found, work="0" * 16), folder / "plan.json")
    other = nano.train(path, tmp_path / "other", "--plan", "auto", *brief)
    assert (other.code, other.out) == (2, "")
    assert "work 0000000000000000" in other.err.splitlines()[-1]
    assert "run `redline tune` again" in other.err.splitlines()[-1]
