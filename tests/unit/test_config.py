"""Recipes: strict reading, every rule with its own message, the fingerprint, and the frozen list of
options."""

import dataclasses
import tomllib
import typing
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from generated import recipes
from hypothesis import given, settings

from redline.config.dfa import DfaConfig
from redline.config.differences import differences, lasting
from redline.config.load import from_toml, load_recipe, shipped, to_toml
from redline.config.recipe import (
    CADENCE,
    ENDS,
    DataConfig,
    LoraConfig,
    ModelConfig,
    PlanPins,
    PromptConfig,
    Recipe,
    SampleConfig,
    TaskConfig,
    TestConfig,
    TrainConfig,
)
from redline.config.rl import RlConfig
from redline.config.rules import check
from redline.errors import ConfigError

MINIMAL = """
[model]
vocab_size = 512
num_layers = 2
hidden_size = 64
num_heads = 4
ffn_size = 128
context_length = 64
[data]
source = "tinyshakespeare"
seq_len = 32
[train]
batch_size = 8
steps = 100
lr = 1e-3
"""


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    path = tmp_path / "minimal.toml"
    path.write_text(MINIMAL)
    return str(path)


def test_every_range_is_of_a_field_and_no_field_has_two_kinds() -> None:
    """A name that no table has would be a rule that holds always."""
    allowed, kinds = (
        tomllib.loads((files("redline") / "config/ranges.toml").read_text()),
        typing.get_type_hints(Recipe),
    )
    named = [
        (table, name) for tables in allowed.values() for table, names in tables.items() for name in names
    ]
    for table, name in named:
        parts = (kinds[table], *typing.get_args(kinds[table]))
        assert any(name in getattr(part, "__dataclass_fields__", ()) for part in parts), (table, name)
    assert [both for both in set(named) if named.count(both) > 1] == [("plan", "prefetch")]


def refusal(source: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(source, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- reading ----


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_loads_and_survives_a_round_trip(name):
    recipe = load_recipe(name)
    assert recipe.about, "a shipped recipe says what it is"
    assert from_toml(to_toml(recipe), where=name) == recipe


@settings(max_examples=60)
@given(recipes())
def test_any_recipe_survives_a_round_trip(recipe):
    assert check(recipe) is recipe
    again = from_toml(to_toml(recipe), where="round trip")
    assert again == recipe
    assert again.fingerprint == recipe.fingerprint


def test_a_recipe_file_is_named_by_its_file_and_gets_the_written_defaults(minimal):
    recipe = load_recipe(minimal)
    assert recipe.name == "minimal"
    assert (recipe.model.kv_heads, recipe.model.head_size, recipe.tokens_per_step) == (4, 16, 256)
    assert recipe.train == TrainConfig(batch_size=8, steps=100, lr=1e-3)
    assert recipe.plan == PlanPins()


def test_a_name_that_is_not_known_gets_the_nearest():
    message = refusal("gpt2-125m")
    assert "did you mean 'gpt2-124m'?" in message
    assert message.endswith("`redline recipes` lists them")
    assert list(shipped()) == sorted(shipped())
    assert refusal("xyzzy").endswith(", ".join(shipped()))


def test_a_table_that_the_workload_does_not_read_is_refused(minimal):
    assert "workload 'pretrain' does not read [lora]" in refusal(minimal, "lora.rank=4")
    assert "workload must be one of pretrain, finetune, rft, rl" in refusal(minimal, "workload=sft")


def test_a_model_to_start_from_brings_its_own_shape(minimal):
    shape = [f"model.{name}=none" for name in ("vocab_size", "num_layers", "hidden_size", "num_heads")]
    assert "model.vocab_size must be greater than 0, got 0" in refusal(minimal, *shape)
    recipe = load_recipe(
        minimal,
        [
            "model.init_from=m",
            *shape,
            "model.ffn_size=none",
            "model.context_length=none",
            "train.softmax_candidates=9",
        ],
    )
    assert not recipe.model.is_shaped
    for name in ("ffn_size", "num_heads"):
        left_out = refusal(minimal, "model.init_from=m", f"model.{name}=none")
        assert f"model.{name} must be greater than 0, got 0" in left_out


def test_a_warm_up_longer_than_the_run_is_clipped_and_said(minimal):
    said: list[str] = []
    recipe = load_recipe(minimal, ["train.warmup_steps=200", "train.steps=50"], say=said.append)
    assert (recipe.train.warmup_steps, recipe.train.steps) == (5, 50)
    assert said == ["train.warmup_steps 200 exceeds the run's 50 steps: using 5"]
    assert load_recipe(minimal, ["train.warmup_steps=100"]).train.warmup_steps == 100


@pytest.mark.parametrize("steps", [1, 100])
@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_takes_any_number_of_steps(name, steps):
    said: list[str] = []
    before = load_recipe(name).train
    train = load_recipe(name, [f"train.steps={steps}"], say=said.append).train
    assert (train.steps, train.epochs) == (steps, 0)
    assert train.warmup_steps <= steps
    assert bool(said) == (train.warmup_steps != before.warmup_steps)


def test_steps_on_the_command_line_replace_the_epochs_of_the_file(minimal):
    assert load_recipe("finetune", ["train.steps=7"]).train.epochs == 0
    assert "not both" in refusal(minimal, "train.warmup_steps=2", "train.warmup_fraction=0.5")


def test_finetuning_has_its_own_defaults(minimal):
    start = ["workload=finetune", "model.init_from=m", "train.steps=none"]
    tuned = load_recipe(minimal, [*start, "train.batch_size=none", "train.lr=none"]).train
    assert (tuned.batch_size, tuned.lr, tuned.epochs) == (32, 2e-4, 3)
    assert (tuned.beta2, tuned.weight_decay) == (0.999, 0.0)
    by_steps = load_recipe(minimal, [*start[:2], "train.warmup_steps=7"]).train
    assert (by_steps.steps, by_steps.epochs) == (100, 0)
    assert (by_steps.warmup_steps, by_steps.warmup_fraction) == (7, 0.0)


@pytest.mark.parametrize(
    "line", ["[train]\nsteps = 'x", "[train]\nsteps = 1\nsteps = 2", "a = " + "9" * 5000]
)
def test_broken_toml_is_refused(tmp_path, line):
    path = tmp_path / "broken.toml"
    path.write_text(line)
    assert "not valid TOML" in refusal(str(path))
    with pytest.raises(ConfigError, match="not valid TOML"):
        from_toml(line, where="recipe.toml")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as text" in refusal(str(path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "unknown key 'step' (did you mean 'steps'?)"),
        ("model.hiden_size=3", "unknown key 'hiden_size' (did you mean 'hidden_size'?)"),
        ("lr=3", "unknown key 'lr' (did you mean train.lr?)"),
        ("trian.steps=3", "unknown key 'trian' (did you mean 'train'?)"),
        ("plan.microbatch=3", "unknown key 'microbatch' (did you mean 'micro_batch'?)"),
        ("train.steps=true", "steps must be a whole number, got True (bool)"),
        ("train.steps=3.0", "steps must be a whole number, got 3.0 (float)"),
        ("train.steps='3'", "steps must be a whole number, got '3' (str)"),
        ("train.steps=[3]", "steps must be a whole number, got [3] (list)"),
        ("train.lr=true", "lr must be a number, got True (bool)"),
        ("train.lr=fast", "lr must be a number, got 'fast' (str)"),
        ("model.bias=1", "bias must be true or false, got 1 (int)"),
        ("data.source=3", "source must be text, got 3 (int)"),
        ("model=3", "model must be a table, got 3"),
        ("train.steps.more=3", "'steps' is not a table"),
        ("model.norm=rms", "norm must be one of rmsnorm, layernorm; got 'rms' (did you mean 'rmsnorm'?)"),
        (
            "plan.precision=bf61",
            "precision must be one of fp32, tf32, bf16, fp16, fp8; got 'bf61' (did you mean 'bf16'?)",
        ),
        ("plan.micro_batch=1.5", "micro_batch must be a whole number, got 1.5 (float)"),
        ("train.lr=nan", "lr must be a finite number, got nan"),
        ("train.lr=inf", "lr must be a finite number, got inf"),
        ("train.lr=1" + "0" * 400, "lr must fit in 64 bits"),
        ("train.steps=1" + "0" * 400, "steps must fit in 64 bits"),
        ("model.vocab_size=none", "model.vocab_size must be greater than 0, got 0"),
        ("data.source=none", "data.source is missing"),
        ("steps", "--set takes table.key=value, got 'steps'"),
        ("=3", "--set takes table.key=value, got '=3'"),
    ],
)
def test_a_wrong_key_or_type_is_refused(minimal, override, message):
    assert message in refusal(minimal, override)


def test_a_missing_table_is_refused(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text(MINIMAL.partition("[train]")[0])
    assert "'train' is missing" in refusal(str(path))


def test_overrides(minimal):
    changed = load_recipe(
        minimal,
        [
            "train.steps=7",
            "train.lr=1",
            "model.num_kv_heads=2",
            "data.source=a=b c",
            'about="quoted = text"',
            "plan.precision=bf16",
        ],
    )
    assert (changed.train.steps, changed.train.lr, changed.model.kv_heads) == (7, 1.0, 2)
    assert type(changed.train.lr) is float
    assert (changed.data.source, changed.about, changed.plan.precision) == ("a=b c", "quoted = text", "bf16")
    again = load_recipe(minimal, ["model.num_kv_heads=2", "model.num_kv_heads=none", "train.max_hours=none"])
    assert again == load_recipe(minimal)
    assert load_recipe(minimal, ["train.steps=1", "train.steps=2"]).train.steps == 2


def test_none_is_a_value_where_the_field_has_it_and_takes_back_everywhere_else(minimal):
    assert load_recipe(minimal, ["plan.recompute=full", "plan.recompute=none"]).plan.recompute == "none"
    taken_back = load_recipe(
        minimal,
        ["plan.precision=bf16", "plan.precision=none", "plan.micro_batch=1", "plan.micro_batch= none"],
    )
    assert taken_back.plan == PlanPins()
    assert "unknown key 'recomputed'" in refusal(minimal, "plan.recomputed=none")


def test_clipping_can_be_turned_off_and_stays_off_after_a_round_trip(minimal):
    recipe = load_recipe(minimal, ["train.clip_norm=0"])
    assert from_toml(to_toml(recipe), where="x").train.clip_norm == 0.0


# ---- rules ----

POSITIVE = {
    "model": (
        "vocab_size num_layers hidden_size num_heads num_kv_heads head_dim ffn_size context_length norm_eps"
        " rope_theta init_std"
    ),
    "train": "batch_size lr muon_lr eps max_hours eval_sequences keep_checkpoints target_loss",
    "plan": "micro_batch loss_chunks loader_threads prefetch",
}
NOT_NEGATIVE = (
    "weight_decay clip_norm warmup_steps eval_every early_stop_evals checkpoint_every length_ramp_steps seed"
)


@pytest.mark.parametrize(
    "name", [f"{table}.{key}" for table, keys in POSITIVE.items() for key in keys.split()]
)
@pytest.mark.parametrize("value", ["0", "-5"])
def test_what_must_be_positive_refuses_zero_and_less(minimal, name, value):
    assert f"{name} must be greater than 0, got {value}" in refusal(minimal, f"{name}={value}")


@pytest.mark.parametrize("name", NOT_NEGATIVE.split())
def test_what_must_not_be_negative_takes_zero_and_refuses_less(minimal, name):
    load_recipe(minimal, [f"train.{name}=0"])
    assert f"train.{name} must not be negative, got -1" in refusal(minimal, f"train.{name}=-1")


def test_a_ramp_of_the_length_cuts_sequences_into_four(minimal):
    ramp = "train.length_ramp_steps=3"
    assert load_recipe(minimal, [ramp, "data.seq_len=32"]).train.length_ramp_steps == 3
    assert "a multiple of 4, got pretrain and 30: leave it out" in refusal(minimal, ramp, "data.seq_len=30")
    with pytest.raises(
        ConfigError, match=r"length_ramp_steps needs workload pretrain .*, got finetune and 64"
    ):
        load_recipe("finetune", [ramp, "data.seq_len=64"])


@pytest.mark.parametrize("name", ["data.seq_len", "train.steps"])
def test_what_pre_training_needs_is_greater_than_zero(minimal, name):
    assert f"{name} must be greater than 0, got 0" in refusal(minimal, f"{name}=0")
    assert f"{name} must not be negative, got -1" in refusal(minimal, f"{name}=-1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.beta1", 1.5),
        ("train.beta2", -0.1),
        ("train.min_lr_ratio", 1.1),
        ("train.decay_fraction", 2.0),
        ("data.valid_fraction", 0.95),
    ],
)
def test_shares_stay_in_range(minimal, name, value):
    assert f"{name} must be between" in refusal(minimal, f"{name}={value}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.beta1=1.0"], "train.beta1 must be less than 1, got 1.0"),
        (["train.beta2=1.0"], "train.beta2 must be less than 1, got 1.0"),
        (["model.num_kv_heads=3"], "model.num_heads (4) must be a multiple of model.num_kv_heads (3)"),
        (
            ["model.hidden_size=66"],
            "model.hidden_size (66) must be a multiple of model.num_heads (4); or give model.head_dim",
        ),
        (["model.head_dim=15"], "model.head_dim must be even for rope, got 15"),
        (["data.seq_len=65"], "data.seq_len (65) must not exceed model.context_length (64)"),
        (["train.epochs=2"], "pre-training counts train.steps, not train.epochs"),
        (
            ["train.warmup_steps=2", "train.warmup_fraction=0.5"],
            "give train.warmup_steps or train.warmup_fraction, not both",
        ),
        (["plan.prefetch=65"], "plan.prefetch must be between 1 and 64, got 65"),
        (["train.target_loss=2"], "train.target_loss (2.0) is a validation loss: it needs train.eval_every"),
        (["train.early_stop_evals=2"], "train.early_stop_evals (2) needs train.eval_every greater than 0"),
        (["train.eval_every=5", "data.valid_fraction=0"], "train.eval_every needs a validation split"),
        (["plan.micro_batch=3"], "train.batch_size (8) must be a multiple of plan.micro_batch (3)"),
        (
            ["plan.precision=fp8", "model.ffn_size=130"],
            "plan.precision fp8 needs matrix sides that are multiples of 16",
        ),
        (["model.vocab_size=2147483648"], "model.vocab_size must be below 2^31, got 2147483648"),
    ],
)
def test_an_impossible_combination_is_refused_by_its_own_rule(minimal, overrides, message):
    assert f"recipe minimal: {message}" in refusal(minimal, *overrides)


def test_the_limits_themselves_are_allowed(minimal):
    load_recipe(minimal, ["model.hidden_size=66", "model.head_dim=16"])
    load_recipe(minimal, ["model.head_dim=15", "model.positions=learned"])
    load_recipe(
        minimal, ["data.seq_len=64", "train.warmup_steps=100", "plan.micro_batch=8", "plan.precision=fp8"]
    )
    load_recipe(minimal, ["train.eval_every=5", "train.early_stop_evals=2"])


# ---- fingerprint ----


def _changed(value: Any) -> Any:
    """Another value of the same kind; which one does not matter, since the fingerprint looks at nothing
    else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    return 3 if value is None else value + 1


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (table, f.name)
        for table, kind in (("model", ModelConfig), ("data", DataConfig), ("train", TrainConfig))
        for f in dataclasses.fields(kind)
        if f.name not in CADENCE
    ],
)
def test_the_fingerprint_changes_with_everything_that_defines_the_training(minimal, table, key):
    recipe = load_recipe(minimal)
    part = getattr(recipe, table)
    other = dataclasses.replace(
        recipe, **{table: dataclasses.replace(part, **{key: _changed(getattr(part, key))})}
    )
    assert other.fingerprint != recipe.fingerprint
    assert (other.identity != recipe.identity) == (key not in ENDS)
    assert (not lasting(differences(recipe, other))) == (key in ENDS)


@pytest.mark.parametrize("key", CADENCE)
def test_a_cadence_is_no_part_of_the_training(minimal, key):
    often = "train.eval_every=5"
    recipe, other = load_recipe(minimal, [often]), load_recipe(minimal, [often, f"train.{key}=9"])
    for name in ("fingerprint", "identity", "work"):
        assert getattr(other, name) == getattr(recipe, name)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("train.steps=7", True), ("train.seed=3", True), ("train.lr=2", True), ("train.checkpoint_every=3", True),
        ("train.batch_size=16", False), ("data.seq_len=16", False), ("model.num_layers=3", False),
        ("train.optimizer=muon", False),
        ("train.softmax_candidates=32", False), ("train.clip_norm=0", False), ("data.stream=true", False),
        ("train.rule=dfa", False), ("dfa.depth=layer", True), ("train.orthogonality_warmup_steps=9", True),
    ],
)  # fmt: skip
def test_the_work_is_what_an_update_computes(minimal, override, same):
    assert (load_recipe(minimal, [override]).work == load_recipe(minimal).work) == same


def test_the_fingerprint_ignores_how_a_run_is_named_and_executed(minimal):
    recipe = load_recipe(minimal)
    pins = PlanPins(
        precision="fp16", micro_batch=2, compile="off", recompute="full", attention="math",
        cross_entropy="torch", update="loop",
        loss_chunks=2, loader_threads=3, prefetch=4, graph=True, shards=6, slots=5,
    )  # fmt: skip
    assert None not in dataclasses.asdict(pins).values(), "a new pin belongs in this test"
    assert (
        dataclasses.replace(recipe, name="other", about="other", plan=pins).fingerprint == recipe.fingerprint
    )


# ---- the list of options ----

OPTIONS = {
    Recipe: "name about workload model data train dfa lora task prompt sample test rl plan",
    ModelConfig: (
        "vocab_size num_layers hidden_size num_heads ffn_size context_length num_kv_heads head_dim norm"
        " norm_eps positions rope_theta activation bias qkv_bias qk_norm tie_embeddings attention features"
        " redraw_every init_std zero_init init_from"
    ),
    DataConfig: "source seq_len tokenizer text_field valid_fraction stream",
    TrainConfig: (
        "batch_size lr length_ramp_steps steps epochs max_hours rule optimizer muon_lr muon_warmup_steps muon_normalize softmax_candidates weight_decay beta1 beta2 eps schedule warmup_steps"
        " warmup_fraction decay_fraction min_lr_ratio orthogonality"
        " orthogonality_warmup_steps orthogonality_values clip_norm seed eval_every eval_sequences early_stop_evals"
        " target_loss diagnose_every checkpoint_every keep_checkpoints"
    ),
    DfaConfig: "error feedback shared depth top_blocks",
    LoraConfig: "rank alpha targets",
    TaskConfig: "name data split rows",
    PromptConfig: "mode shots trained_shots",
    SampleConfig: (
        "sampler server server_model samples_per_question temperature later_temperature top_p top_k"
        " max_new_tokens distinct_correct spend_rest max_factor keep_per_question"
    ),
    TestConfig: "split rows",
    RlConfig: (
        "domains weights data rows algorithm group_size max_prompt_tokens max_new_tokens updates_per_rollout clip_low"
        " clip_high kl overlong importance_cap max_versions_behind refills critic_lr pcgrad"
    ),
    PlanPins: (
        "precision micro_batch compile graph recompute attention cross_entropy update loss_chunks loader_threads"
        " prefetch shards slots"
    ),
}


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_the_options_are_these_and_a_new_one_is_a_conscious_act(kind):
    assert [f.name for f in dataclasses.fields(kind)] == OPTIONS[kind].split()


def test_recipes_are_frozen(minimal):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_recipe(minimal).train.steps = 3  # type: ignore[misc]
