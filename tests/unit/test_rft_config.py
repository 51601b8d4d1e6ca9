"""RFT recipes are read strictly; presets, profiles and the environment change what they say they change, and
the plan says why."""

import pytest

from redline.config.load import shipped, to_toml
from redline.config.rft import PRESETS, load_rft, rft_differences, rft_from_toml
from redline.errors import ConfigError
from redline.plan.profiles import find_profile
from redline.rft.plan import Bounds, plan_pass, plan_samples, plan_slots

MINIMAL = '[task]\nname = "units"\n[model]\npath = "m"\n'


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "minimal.toml"
    path.write_text(MINIMAL)
    return str(path)


@pytest.mark.parametrize("name", shipped("rft"))
def test_every_shipped_recipe_loads_and_survives_a_round_trip(name):
    recipe = load_rft(name)
    assert recipe.about
    assert rft_from_toml(to_toml(recipe), where=name) == recipe
    assert not rft_differences(recipe, recipe)


def test_the_seeds_recipe_is_what_the_seed_says():
    recipe = load_rft("rft/seeds-000")
    s, t = recipe.sample, recipe.train
    assert (s.samples_per_question, s.temperature) == (30, 0.7)
    assert (t.method, t.rank, t.alpha, t.batch_size, t.epochs, t.lr) == ("lora", 16, 64, 32, 3, 2e-4)


@pytest.mark.parametrize(
    ("preset", "values"), [("quality", (50, 0.5)), ("balanced", (30, 0.7)), ("speed", (20, 0.9))]
)
def test_presets(minimal, preset, values):
    sample = load_rft(minimal, preset=preset).sample
    assert (sample.samples_per_question, sample.temperature) == values
    # what is typed goes over it
    assert load_rft(minimal, ["sample.temperature=0.1"], preset=preset).sample.temperature == 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sample.temperatur=1", "did you mean 'temperature'"),
        ("sample.temperature=0", "greater than 0"),
        ("sample.top_p=1.5", "top_p"),
        ("sample.max_factor=0.5", "max_factor"),
        ("train.method=qlora", "lora, full"),
        ("train.warmup_fraction=2", "warmup_fraction"),
        ("task.rows=0", "task.rows"),
        ("prompt.mode=chatty", "did you mean 'chat'"),
        ("model.server_model=x", "needs model.server"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(minimal, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_rft(minimal, [override])
    assert "\n" not in str(caught.value)


def test_a_preset_that_is_not_known(minimal):
    with pytest.raises(ConfigError, match="did you mean 'quality'"):
        load_rft(minimal, preset="qualty")
    assert set(PRESETS) == {"quality", "balanced", "speed"}


def test_what_is_tested_may_change_in_a_run_and_nothing_else(minimal):
    before = load_rft(minimal)
    assert rft_differences(before, load_rft(minimal, ["test.rows=0"])) == []
    assert rft_differences(before, load_rft(minimal, ["train.lr=1"])) == ["train.lr (0.0002 before, 1.0 now)"]
    assert rft_differences(before, load_rft(minimal, ["seed=1"])) == ["seed (0 before, 1 now)"]


# ---- bounds ----


def bounds(profile: str | None = None, **environment: int) -> Bounds:
    return Bounds(
        environment={name: str(value) for name, value in environment.items()},
        profile=find_profile(profile) if profile else None,
    )


def test_slots_follow_memory_and_demand_and_are_bounded_from_outside():
    assert plan_slots(1000, 5000, bounds())[0] == 1000
    assert plan_slots(1000, 50, bounds())[0] == 50
    slots, why = plan_slots(1000, 5000, bounds(MICRO_BATCH_SIZE=256, CHUNK_SIZE=10))
    assert (slots, why.source) == (10, "environment")
    assert "CHUNK_SIZE=10" in why.reason
    slots, why = plan_slots(1000, 5000, bounds("a100-40g"))
    assert (slots, why.source) == (256, "profile")
    # the environment goes before a profile
    assert plan_slots(1000, 5000, bounds("a100-40g", MICRO_BATCH_SIZE=300))[0] == 300
    # a bound, not a wish
    assert plan_slots(100, 5000, bounds(MICRO_BATCH_SIZE=256)) == plan_slots(100, 5000, bounds())


def test_a_pass_is_bounded_and_the_batch_stays_the_recipes(minimal):
    recipe = load_rft(minimal, ["train.batch_size=32"])
    assert plan_pass(recipe, bounds())[0] == 32
    for environment, examples in (
        ({"A100_BATCH_SIZE": 12}, 8),
        ({"A100_GRAD_ACCUM": 4}, 8),
        ({"A100_BATCH_SIZE": 16, "A100_GRAD_ACCUM": 8}, 4),
    ):
        found, why = plan_pass(recipe, bounds(**environment))
        assert (found, why.source) == (examples, "environment")
        assert 32 % found == 0
    assert plan_pass(recipe, bounds("conservative"))[1].source == "profile"
    assert plan_pass(recipe, bounds(A100_GRAD_ACCUM=100))[0] == 1
    with pytest.raises(ConfigError, match="A100_BATCH_SIZE"):
        plan_pass(recipe, bounds(A100_BATCH_SIZE=0))


def test_a_profile_lowers_the_samples_and_the_plan_calls_it_another_recipe(minimal):
    recipe = load_rft(minimal, preset="quality")
    assert plan_samples(recipe, bounds())[0] == 50
    samples, why = plan_samples(recipe, bounds("v100-32g"))
    assert (samples, why.source) == (20, "profile")
    assert "another recipe" in why.reason
    assert plan_samples(recipe, bounds("a100-80g")) == plan_samples(recipe, bounds())
