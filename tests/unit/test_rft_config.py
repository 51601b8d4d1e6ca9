"""RFT recipes are read strictly; presets, profiles and the environment change what they say they change, and the
plan says why."""

from dataclasses import replace

import pytest

from redline.config.differences import differences
from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.config.rft import PRESETS
from redline.errors import ConfigError
from redline.machine.facts import read_facts
from redline.plan.bounds import Outside, bounded_slots, fewer_samples, find_profile
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan, Why
from redline.plan.planner import make_plan

MINIMAL = 'workload = "rft"\n[task]\nname = "units"\n[model]\ninit_from = "m"\n[lora]\n'


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "minimal.toml"
    path.write_text(MINIMAL)
    return str(path)


def test_the_seeds_recipe_is_what_the_seed_says():
    recipe = load_recipe("rft/seeds-000")
    s, t = recipe.sample, recipe.train
    assert (s.samples_per_question, s.temperature) == (30, 0.7)
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.alpha, t.batch_size, t.epochs, t.lr) == (16, 64, 32, 3, 2e-4)


@pytest.mark.parametrize(
    ("preset", "values"), [("quality", (50, 0.5)), ("balanced", (30, 0.7)), ("speed", (20, 0.9))]
)
def test_presets(minimal, preset, values):
    sample = load_recipe(minimal, preset=preset).sample
    assert (sample.samples_per_question, sample.temperature) == values
    # what is typed goes over it
    assert load_recipe(minimal, ["sample.temperature=0.1"], preset=preset).sample.temperature == 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sample.temperatur=1", "did you mean 'temperature'"),
        ("sample.temperature=0", "greater than 0"),
        ("sample.top_p=1.5", "top_p"),
        ("sample.max_factor=0.5", "max_factor"),
        ("lora.rank=0", "lora.rank must be at least 1"),
        ('lora.targets=["w"]', "lora.targets must be among"),
        ("train.warmup_fraction=2", "warmup_fraction"),
        ("train.epochs=0", "train.steps or train.epochs"),
        ("task.rows=0", "task.rows"),
        ("task=none", "give task.name"),
        ("model.init_from=none", "model.vocab_size must be greater than 0"),
        ("prompt.mode=chatty", "did you mean 'chat'"),
        ("sample.server_model=x", "needs sample.server"),
        ("data.source=x", r"workload 'rft' does not read \[data\]"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(minimal, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(minimal, [override])
    assert "\n" not in str(caught.value)


def test_a_preset_that_is_not_known(minimal):
    with pytest.raises(ConfigError, match="did you mean 'quality'"):
        load_recipe(minimal, preset="qualty")
    assert set(PRESETS) == {"quality", "balanced", "speed"}


def test_what_is_tested_may_change_in_a_run_and_nothing_else(minimal):
    before = load_recipe(minimal)
    assert differences(before, load_recipe(minimal, ["test.rows=0"])) == {}
    assert differences(before, load_recipe(minimal, ["train.lr=1"])) == {"train.lr": (0.0002, 1.0)}
    assert "lora.rank" in differences(before, load_recipe(minimal, ["lora=none"]))


# ---- bounds ----


def bounds(profile: str | None = None, **environment: int) -> Outside:
    return Outside(
        environment={name: str(value) for name, value in environment.items()},
        profile=find_profile(profile) if profile else None,
    )


def test_slots_are_bounded_from_outside():
    fitting = 1000, Why(reason="by hand", source="measurement")
    assert bounded_slots(fitting, bounds()) == fitting
    slots, why = bounded_slots(fitting, bounds(MICRO_BATCH_SIZE=256, CHUNK_SIZE=10))
    assert (slots, why.source) == (10, "environment")
    assert "CHUNK_SIZE=10" in why.reason
    slots, why = bounded_slots(fitting, bounds("a100-40g"))
    assert (slots, why.source) == (256, "profile")
    # the environment goes before a profile
    assert bounded_slots(fitting, bounds("a100-40g", MICRO_BATCH_SIZE=300))[0] == 300
    # a bound, not a wish
    few = 100, fitting[1]
    assert bounded_slots(few, bounds(MICRO_BATCH_SIZE=256)) == few


def plan_of(recipe: Recipe, outside: Outside) -> Plan:
    shape = replace(load_recipe("nano").model, init_from="m")
    hardware = hardware_here(replace(read_facts(), gpus=()), None)
    return make_plan(replace(recipe, model=shape), hardware, outside=outside)


def test_a_pass_is_bounded_and_the_batch_stays_the_recipes(minimal):
    recipe = load_recipe(minimal, ["train.batch_size=32"])
    for environment, examples in (
        ({"A100_BATCH_SIZE": 12}, 8),
        ({"A100_GRAD_ACCUM": 4}, 8),
        ({"A100_BATCH_SIZE": 16, "A100_GRAD_ACCUM": 8}, 4),
        ({"A100_GRAD_ACCUM": 100}, 1),
    ):
        plan = plan_of(recipe, bounds(**environment))
        assert (plan.micro_batch, plan.why["micro_batch"].source) == (examples, "environment")
        assert plan.micro_batch * plan.accumulation == 32
    assert plan_of(recipe, bounds("conservative")).micro_batch <= find_profile("conservative").micro_batch
    with pytest.raises(ConfigError, match="A100_BATCH_SIZE"):
        plan_of(recipe, bounds(A100_BATCH_SIZE=0))


def test_a_profile_lowers_the_samples_and_calls_it_another_recipe(minimal):
    recipe, said = load_recipe(minimal, preset="quality"), list[str]()
    lowered = fewer_samples(recipe, find_profile("v100-32g"), said.append)
    assert lowered.sample.samples_per_question == 20
    assert "another recipe" in said[0]
    assert fewer_samples(recipe, find_profile("a100-80g"), said.append) == recipe
    assert fewer_samples(recipe, None, said.append) == recipe
