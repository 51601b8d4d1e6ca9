"""The planner: the batch is never changed, memory is respected, pins and the environment are honoured, every
value says why."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generated import recipes
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from redline.config.load import load_recipe, shipped
from redline.config.recipe import PlanPins, Recipe
from redline.config.rl import RlConfig
from redline.errors import ConfigError, MachineError
from redline.machine.specs import SPECS
from redline.plan import arithmetic
from redline.plan.bounds import PROFILES, Outside, bounded_slots, find_profile
from redline.plan.hardware import hardware_as
from redline.plan.plan import PLANNED, Hardware, Plan, Why, check_fit, load, save
from redline.plan.planner import FULL_PASS_TOKENS, THIN_PASS_TOKENS, make_plan
from redline.plan.predict import MEMORY_SHARE
from redline.plan.values import why_not

CPU = Hardware(
    title="a laptop, 8 cores", kind="cpu", memory_bytes=16 * 2**30, compute_capability=(), cores=8,
    peak_tflops={}, measured_tflops={"fp32": 0.5}, bandwidth_bytes_per_s=20e9, source="by hand",
)  # fmt: skip
WHY = Why(reason="by hand", source="rule")
GPT2 = load_recipe("gpt2-124m")


def shaped(name: str) -> Recipe:
    """The recipe, with the shape of a small Llama where it is read from weights that are not here."""
    recipe = load_recipe(name)
    if recipe.model.is_shaped:
        return recipe
    shape = load_recipe("llama-124m-muon").model
    return replace(recipe, model=replace(shape, init_from=recipe.model.init_from))


def gpu(name: str = "h100-80g", **changes: Any) -> Hardware:
    return replace(hardware_as(name, cores=8), **changes)


def pinned(recipe: Recipe, **pins: Any) -> Recipe:
    return replace(recipe, plan=PlanPins(**pins))


def in_environment(**variables: str) -> Outside:
    return Outside(environment=variables)


# ---- what holds for any recipe ----


@settings(max_examples=80)
@given(
    recipes(),
    st.sampled_from([*SPECS, "cpu"]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([None, *PROFILES]),
)
def test_the_batch_is_the_recipes_whatever_the_machine(recipe, name, world_size, profile):
    hardware = CPU if name == "cpu" else gpu(name)
    assume(recipe.train.batch_size % world_size == 0)
    share = recipe.train.batch_size // world_size
    assume(recipe.plan.precision not in ("bf16", "tf32") or name not in ("v100-32g", "t4-16g"))
    assume(recipe.plan.micro_batch is None or share % recipe.plan.micro_batch == 0)
    outside = Outside(environment={}, profile=PROFILES[profile] if profile else None)
    plan = make_plan(recipe, hardware, world_size=world_size, outside=outside)
    assert plan.micro_batch * plan.accumulation * plan.world_size == recipe.train.batch_size
    check_fit(plan, recipe, world_size)
    assert (
        plan.prediction.memory_bytes
        == sum(plan.prediction.memory_parts_bytes.values())
        <= MEMORY_SHARE * hardware.memory_bytes
    )
    assert set(plan.why) == set(PLANNED)
    assert all(why.reason.strip() for why in plan.why.values())
    if profile:
        assert plan.micro_batch <= PROFILES[profile].micro_batch
    for name in ("precision", "compile", "recompute", "loss_chunks", "prefetch"):
        if (pin := getattr(recipe.plan, name)) is not None:
            assert getattr(plan, name) == pin
            assert plan.why[name].source == "recipe"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_on_every_gpu_fits_by_its_own_prediction_or_is_refused_with_numbers(name, spec):
    recipe, hardware = shaped(name), gpu(spec)
    try:
        plan = make_plan(recipe, hardware)
    except MachineError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert hardware.title in refusal
        assert re.search(
            r"predicted \d+\.\d GiB .* of \d+\.\d GiB|needs compute capability \d\.\d, .* has \d\.\d", refusal
        )
        return
    assert plan.prediction.memory_bytes <= MEMORY_SHARE * hardware.memory_bytes
    assert plan.micro_batch * plan.accumulation == recipe.rows_per_step
    if recipe.workload == "pretrain":
        assert plan.prediction.ceiling_tokens_per_s >= plan.prediction.attainable_tokens_per_s > 0
    assert (plan.slots > 0) == (recipe.workload in ("rft", "rl"))
    if recipe.workload != "pretrain":
        assert plan.graph == (recipe.workload in ("finetune", "rft") and plan.precision != "fp16")
    elif plan.graph:
        assert plan.precision == "bf16"
        assert plan.prediction.memory_bytes <= hardware.memory_bytes / 2


def test_the_issue_s_gpus_all_take_gpt2_and_the_large_model_needs_more_than_a_t4():
    for name in ("a100-40g", "a100-80g", "v100-32g", "h100-80g", "h200-141g"):
        make_plan(GPT2, gpu(name))
    with pytest.raises(
        MachineError,
        match=r"gpt-1.3b does not fit T4 16 GB: predicted \d+\.\d GiB at micro-batch 1, recompute full",
    ):
        make_plan(load_recipe("gpt-1.3b"), gpu("t4-16g"))


# ---- rules ----


@pytest.mark.parametrize(
    ("name", "precision", "attention"),
    [
        ("v100-32g", "fp16", "auto"),
        ("t4-16g", "fp16", "auto"),
        ("a100-80g", "bf16", "auto"),
        ("h100-80g", "bf16", "cudnn"),
    ],
)
def test_precision_and_attention_follow_the_generation(name, precision, attention):
    plan = make_plan(GPT2, gpu(name))
    assert (plan.precision, plan.attention) == (precision, attention)
    assert (plan.cross_entropy, plan.compile, plan.allocator) == (
        "fused",
        "default",
        "expandable_segments:True",
    )


def test_a_cpu_computes_in_fp32_without_compiling():
    plan = make_plan(load_recipe("nano"), CPU)
    assert (plan.precision, plan.compile, plan.attention, plan.cross_entropy, plan.allocator) == (
        "fp32",
        "off",
        "auto",
        "torch",
        "",
    )
    assert plan.micro_batch * load_recipe("nano").data.seq_len <= FULL_PASS_TOKENS["cpu"]


def test_a_short_run_is_not_compiled():
    plan = make_plan(load_recipe("gpt2-124m", ["train.steps=20", "train.warmup_steps=0"]), gpu())
    assert plan.compile == "off"
    assert "s; compiling takes" in plan.why["compile"].reason
    assert "take 0 s" not in make_plan(load_recipe("nano"), gpu()).why["compile"].reason


def test_reinforcement_learning_is_compiled_where_its_updates_earn_it_back():
    short = shaped("rl/units-smollm2")
    long = replace(short, train=replace(short.train, steps=100 * short.train.steps))
    critic = replace(long, rl=replace(long.rl, algorithm="ppo"))
    pinned = replace(critic, plan=PlanPins(compile="default"))
    chosen = {name: make_plan(recipe, gpu("h100-80g")) for name, recipe in locals().items()}
    assert {name: plan.compile for name, plan in chosen.items()} == {
        "short": "off", "long": "default", "critic": "off", "pinned": "default",
    }  # fmt: skip
    assert "without a critic" in chosen["critic"].why["compile"].reason
    assert make_plan(long, gpu("h100-80g"), world_size=2).compile == "off"


def test_fp8_is_taken_where_the_gpu_has_it_and_refused_where_not():
    recipe = load_recipe("gpt-1.3b", ["plan.precision=fp8"])
    plan = make_plan(recipe, gpu("h100-80g"))
    assert (plan.precision, plan.why["precision"].source) == ("fp8", "recipe")
    assert (
        plan.prediction.ceiling_tokens_per_s
        > make_plan(load_recipe("gpt-1.3b"), gpu("h100-80g")).prediction.ceiling_tokens_per_s
    )
    with pytest.raises(MachineError, match=r"fp8 needs compute capability 8\.9, A100 80 GB has 8\.0"):
        make_plan(recipe, gpu("a100-80g"))
    with pytest.raises(MachineError, match=r"bf16 needs compute capability 8\.0, V100 SXM2 32 GB has 7\.0"):
        make_plan(load_recipe("gpt-1.3b", ["plan.precision=bf16"]), gpu("v100-32g"))


@pytest.mark.parametrize(
    ("board", "pins", "reason"),
    [
        ("v100-32g", {"attention": "flash"}, r"flash attention needs compute capability 8\.0, V100 SXM2 32 GB has 7\.0"),
        ("h100-80g", {"attention": "cudnn", "precision": "fp32"}, "needs half precision, this is fp32"),
        ("h100-80g", {"cross_entropy": "fused", "precision": "tf32"}, "needs half precision, this is tf32"),
    ],
)  # fmt: skip
def test_a_pinned_kernel_that_cannot_run_is_refused_before_the_run(board, pins, reason):
    recipe, name = load_recipe("gpt2-124m"), next(iter(pins))
    with pytest.raises(
        ConfigError, match=rf"plan\.{name} {pins[name]} is not possible: {reason}; leave it out"
    ):
        make_plan(pinned(recipe, **pins), gpu(board))
    assert getattr(make_plan(pinned(recipe, **{name: pins[name]}), gpu("h100-80g")), name) == pins[name]


def test_a_refusal_names_the_least_memory_that_the_pins_allow():
    with pytest.raises(MachineError, match="at micro-batch 32, recompute full") as caught:
        make_plan(pinned(load_recipe("gpt-1.3b"), micro_batch=32), gpu("t4-16g"))
    least = make_plan(
        pinned(load_recipe("gpt-1.3b"), micro_batch=32, recompute="full", loss_chunks=8, precision="fp16"),
        gpu("a100-80g"),
    )
    assert f"predicted {least.prediction.memory_bytes / 2**30:.1f} GiB" in str(caught.value)


@pytest.mark.parametrize("name", ["precision", "cross_entropy"])
def test_a_cpu_says_that_it_emulates_fp8(name):
    recipe = pinned(shaped("gpt2-124m"), **{name: "fp8"})
    assert "a CPU emulates it" in make_plan(recipe, CPU).why[name].reason
    assert "emulates" not in make_plan(recipe, gpu("h200-141g")).why[name].reason


def test_less_memory_costs_first_width_then_recomputation_and_loss_chunks():
    roomy = make_plan(GPT2, gpu(memory_bytes=80 * 2**30))
    tight = make_plan(GPT2, gpu(memory_bytes=8 * 2**30))
    tightest = make_plan(GPT2, gpu(memory_bytes=3 * 2**30))
    assert (roomy.micro_batch, roomy.recompute, roomy.loss_chunks) == (64, "none", 1)
    assert tight.micro_batch < 64
    assert tight.recompute == "none"
    assert "would not fit" in tight.why["micro_batch"].reason
    assert tightest.recompute != "none"
    assert tightest.loss_chunks > 1
    assert "do not fit" in tightest.why["recompute"].reason
    assert "pieces" in tightest.why["loss_chunks"].reason
    with pytest.raises(MachineError, match="does not fit"):
        make_plan(GPT2, gpu(memory_bytes=2**30))


def test_no_recomputation_can_be_asked_for_where_the_rules_would_recompute():
    """And then does not fit: with the pin, the pass of 32 sequences needs more than the GPU has."""
    assert make_plan(load_recipe("llama-350m", ["plan.micro_batch=32"]), gpu("l4-24g")).recompute == "full"
    with pytest.raises(MachineError, match="does not fit L4"):
        make_plan(load_recipe("llama-350m", ["plan.micro_batch=32", "plan.recompute=none"]), gpu("l4-24g"))
    asked = make_plan(load_recipe("llama-350m", ["plan.recompute=none"]), gpu("l4-24g"))
    assert (asked.recompute, asked.why["recompute"].source) == ("none", "recipe")


def test_more_processes_hold_less_each():
    alone, four = (make_plan(load_recipe("llama-1.3b"), gpu("a100-40g"), world_size=n) for n in (1, 4))
    parts = ("weights", "gradients", "optimizer")
    assert all(
        alone.prediction.memory_parts_bytes[part] // 4 == four.prediction.memory_parts_bytes[part]
        for part in parts
    )


@pytest.mark.parametrize("world_size", [0, -1, 3])
def test_a_number_of_processes_that_cannot_share_the_batch_is_refused(world_size):
    with pytest.raises(ConfigError, match=str(world_size)):
        make_plan(GPT2, gpu(), world_size=world_size)


def test_an_absurd_batch_is_refused_and_the_largest_is_planned_in_no_time():
    with pytest.raises(ConfigError, match=r"must not exceed 2\^27 tokens"):
        load_recipe("nano", ["train.batch_size=1000000000000"])
    plan = make_plan(load_recipe("nano", ["train.batch_size=1048576"]), CPU)
    assert plan.micro_batch * plan.accumulation == 2**20


# ---- several nodes ----


def test_every_node_has_a_copy_of_the_weights_where_half_of_its_memory_holds_it():
    """Weights, gradients and AdamW's two moments in fp32: 16 bytes a parameter."""
    model = load_recipe("gpt-1.3b", ["train.batch_size=512"])
    state_bytes = 16 * arithmetic.parameters(model.model).total / 8
    small, large = (int(f * state_bytes / 0.92 / 0.5) for f in (0.99, 1.01))
    apart, copied = (
        make_plan(model, replace(gpu(), memory_bytes=size), world_size=16, nodes=2) for size in (small, large)
    )
    assert (apart.shards, copied.shards) == (16, 8)
    assert apart.why["shards"].reason.startswith("one copy over all nodes")
    assert copied.why["shards"].reason.startswith("a copy in every node")
    parts, halves = copied.prediction.memory_parts_bytes, apart.prediction.memory_parts_bytes
    assert parts["weights"] == pytest.approx(2 * halves["weights"], abs=16)
    assert parts["optimizer"] == pytest.approx(2 * halves["optimizer"], abs=16)
    assert make_plan(model, gpu(), world_size=8).shards == 8
    assert make_plan(pinned(model, shards=4), gpu(), world_size=16, nodes=2).shards == 4


def test_a_captured_update_is_for_one_gpu_and_keeps_torchs_allocator():
    plan = make_plan(pinned(GPT2, graph=True), gpu())
    assert (plan.graph, plan.allocator) == (True, "")
    for hardware, world_size in ((gpu(), 2), (CPU, 1)):
        with pytest.raises(ConfigError, match="captured updates need one process with a GPU"):
            make_plan(pinned(GPT2, graph=True), hardware, world_size=world_size)


H200 = gpu("h200-141g")


def captured(*sets: str, hardware: Hardware = H200, **given: Any) -> tuple[bool, str]:
    """Whether and why a speedrun of these values is captured: Muon, sequences of 1,024 tokens, all of the softmax."""
    recipe = load_recipe("speedrun/3min", ["train.softmax_candidates=none", *sets])
    plan = make_plan(recipe, hardware, **given)
    return plan.graph, plan.why["graph"].reason


def layers(count: int, width: int, rows: int) -> list[str]:
    sizes = {"num_layers": count, "hidden_size": width, "num_heads": width // 128, "ffn_size": 4 * width}
    return [*(f"model.{name}={size}" for name, size in sizes.items()), f"train.batch_size={rows}"]


@pytest.mark.parametrize(
    ("shape", "faster"),
    [((8, 512, 16), True), ((6, 768, 16), True), ((8, 512, 32), True), ((12, 768, 64), False)],
)
def test_an_update_is_captured_where_it_was_seen_to_pay(shape, faster):
    """On an H200 with the FP8 head, medians: 31.0 to 16.0 ms, 25.1 to 20.7, 30.4 to 28.3 (LOG.md)."""
    found, reason = captured(*layers(*shape), "plan.cross_entropy=fp8")
    assert found == faster, reason
    gpu_ms, host_ms = map(float, re.findall(r"([\d.]+) ms", reason))
    assert (gpu_ms < host_ms) == faster


def test_large_models_and_batches_are_not_captured():
    for name in ("gpt2-124m", "gpt-1.3b"):
        assert not make_plan(load_recipe(name), H200).graph


@pytest.mark.parametrize(
    ("sets", "given", "why"),
    [
        (["plan.graph=false"], {}, "pinned in the recipe"),
        ([], {"hardware": CPU}, "one process with a GPU"),
        ([], {"world_size": 2}, "one process with a GPU"),
        ([], {"hardware": replace(H200, peak_tflops={}, measured_tflops={})}, "not known"),
        ([], {"hardware": replace(H200, memory_bytes=8 * 2**30)}, r"keep the memory .*: \d\.\d of 8\.0 GiB"),
        ([], {"outside": Outside(environment={}, prefer="memory")}, "keep the memory"),
        (["plan.precision=fp32"], {}, "bf16"),
        (["plan.recompute=full"], {}, "without recomputation"),
        (["train.steps=20"], {}, "in 20 updates"),
        (["train.max_hours=0.001"], {}, r"in 1\d\d updates"),
        (["plan.micro_batch=1"], {}, "16 passes"),
    ],
)
def test_what_keeps_a_short_update_from_being_captured(sets, given, why):
    short = layers(8, 512, 16)
    assert captured(*short)[0]
    found, reason = captured(*short, *sets, **given)
    assert not found
    assert re.search(why, reason), reason


def test_a_slow_host_and_small_passes_are_captured_sooner():
    assert not captured(*layers(8, 512, 32))[0]
    assert captured(*layers(8, 512, 32), hardware=replace(H200, launch_latency_s=30e-6))[0]
    assert captured(*layers(8, 512, 32), outside=in_environment(A100_BATCH_SIZE="8"))[0]


def test_a_validation_beside_a_graph_is_in_the_prediction():
    """Its pieces of logits, in bf16 and twice in fp32; an eager run computes them in memory that is free then."""
    sets = [*layers(8, 512, 16), "plan.cross_entropy=torch", "train.eval_every=0"]
    need = {
        (graph, part): make_plan(
            load_recipe("speedrun/3min", [*sets, f"plan.graph={graph}", f"data.valid_fraction={part}"]), H200
        ).prediction.memory_bytes
        for graph in ("true", "false")
        for part in (0.0, 0.1)
    }
    assert need["false", 0.1] == need["false", 0.0] == need["true", 0.0]
    logits = 16 * 1024 // 8 * 50304 * (2 + 8)
    assert logits < need["true", 0.1] - need["true", 0.0] < 1.3 * logits


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("train.rule=dfa",), "feedback alignment"),
        (("train.orthogonality=1e-3", "train.orthogonality_warmup_steps=5"), "orthogonality_warmup_steps"),
    ],
)
def test_an_update_that_changes_is_not_captured(sets: tuple[str, ...], why: str) -> None:
    """`redline ablate` and the tuner ask here, and leave it out; in a recipe it is refused."""
    reason = why_not("graph", True, load_recipe("gpt2-124m", sets), gpu())
    assert reason is not None
    assert why in reason
    assert why_not("graph", True, load_recipe("gpt2-124m", ["train.orthogonality=1e-3"]), gpu()) is None
    with pytest.raises(ConfigError, match=r"plan\.graph"):
        load_recipe("gpt2-124m", [*sets, "plan.graph=true"])


@pytest.mark.parametrize("shards", [3, 32])
def test_shards_divide_the_processes(shards):
    with pytest.raises(ConfigError, match=rf"plan.shards \({shards}\) must divide the 16 processes"):
        make_plan(pinned(GPT2, shards=shards), gpu(), world_size=16, nodes=2)


# ---- pins ----


def test_pins_keep_their_value_and_say_who_set_them():
    pins: dict[str, Any] = {
        "precision": "tf32", "micro_batch": 4, "compile": "off", "recompute": "full", "attention": "math",
        "cross_entropy": "torch",
        "update": "foreach", "loss_chunks": 3, "loader_threads": 5, "prefetch": 7, "graph": False,
        "shards": 1,
    }  # fmt: skip
    assert set(pins) == set(vars(PlanPins())) - {"slots"}, "a new pin belongs in this test"
    by_recipe = make_plan(pinned(GPT2, **pins), gpu())
    typed = make_plan(pinned(GPT2, **pins), gpu(), outside=Outside(environment={}, typed=frozenset(pins)))
    for name, value in pins.items():
        assert getattr(by_recipe, name) == getattr(typed, name) == value
        assert (by_recipe.why[name].source, by_recipe.why[name].reason) == (
            "recipe",
            "pinned in the recipe's [plan] table",
        )
        assert (typed.why[name].source, typed.why[name].reason) == ("user", f"--set plan.{name}")
    assert by_recipe.accumulation == 128


def test_a_micro_batch_pin_must_divide_each_process_s_share():
    with pytest.raises(ConfigError, match=r"plan.micro_batch \(512\) must divide the 256 sequences"):
        make_plan(pinned(GPT2, micro_batch=512), gpu(), world_size=2)


def test_a_pin_that_does_not_fit_is_refused_not_lowered():
    with pytest.raises(MachineError, match="at micro-batch 512"):
        make_plan(pinned(GPT2, micro_batch=512), gpu("t4-16g"))


# ---- environment and profiles ----


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"A100_BATCH_SIZE": "16"}, (16, 32)),
        ({"A100_GRAD_ACCUM": "16"}, (32, 16)),
        ({"A100_BATCH_SIZE": "8", "A100_GRAD_ACCUM": "64"}, (8, 64)),
    ],
)
def test_the_environment_sets_micro_batch_and_accumulation(variables, expected):
    plan = make_plan(pinned(GPT2, micro_batch=4), gpu(), outside=in_environment(**variables))
    assert (plan.micro_batch, plan.accumulation) == expected
    for name in ("micro_batch", "accumulation"):
        assert plan.why[name].source == "environment"
    for name, value in variables.items():
        assert f"{name}={value}" in plan.why["micro_batch"].reason


@pytest.mark.parametrize(
    "variables",
    [
        {"A100_BATCH_SIZE": "7"},
        {"A100_GRAD_ACCUM": "7"},
        {"A100_BATCH_SIZE": "8", "A100_GRAD_ACCUM": "8"},
        {"A100_BATCH_SIZE": "1024"},
    ],
)
def test_an_environment_that_would_change_the_batch_is_refused(variables):
    with pytest.raises(ConfigError, match=r"must keep the recipe's batch.*must be 512") as caught:
        make_plan(GPT2, gpu(), outside=in_environment(**variables))
    assert all(f"{name}={value}" in str(caught.value) for name, value in variables.items())


@pytest.mark.parametrize("value", ["many", "0", "-4", "1.5", "²", "9" * 5000])
def test_an_environment_value_that_is_no_number_is_refused(value):
    for name in ("A100_BATCH_SIZE", "A100_GRAD_ACCUM"):
        with pytest.raises(ConfigError, match=rf"{name} in the environment must be a whole number"):
            make_plan(GPT2, gpu(), outside=in_environment(**{name: value}))
    for name in ("MICRO_BATCH_SIZE", "CHUNK_SIZE"):
        with pytest.raises(ConfigError, match=rf"{name} in the environment must be a whole number"):
            bounded_slots((100, WHY), Outside(environment={name: value}))


def test_generation_is_bounded_from_above_by_the_environment():
    slots, why = bounded_slots((100, WHY), Outside(environment={"MICRO_BATCH_SIZE": "48", "CHUNK_SIZE": "9"}))
    assert (slots, why.source) == (9, "environment")
    assert bounded_slots((100, WHY), Outside(environment={"MICRO_BATCH_SIZE": ""})) == (100, WHY)


@pytest.mark.parametrize("name", ["finetune", "rft/units-smollm2"])
@pytest.mark.parametrize("board", ["v100-32g", "t4-16g"])
def test_without_bf16_fine_tuning_takes_fp16_and_its_scaler(name, board):
    model = replace(
        load_recipe("nano").model,
        vocab_size=49152,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        init_from="m",
    )
    recipe = replace(load_recipe(name), model=model)
    plan = make_plan(recipe, gpu(board))
    assert (plan.precision, plan.graph) == ("fp16", False)
    assert "has no bf16; fp16 with a loss scaler" in plan.why["precision"].reason
    assert "loss scaler" in plan.why["graph"].reason
    assert make_plan(recipe, gpu("a100-80g")).graph
    with pytest.raises(ConfigError, match=r"plan\.graph True is not possible: fp16's loss scaler"):
        make_plan(pinned(recipe, graph=True), gpu(board))
    scaled = make_plan(replace(recipe, workload="rl", rl=RlConfig(domains=("units",))), gpu(board))
    assert (scaled.precision, "reinforcement learning" in scaled.why["precision"].reason) == ("fp32", True)
    with pytest.raises(ConfigError, match=r"plan\.precision fp16 needs scaled losses"):
        load_recipe("rl/demo", ["plan.precision=fp16"])


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_a_profile_only_lowers(profile):
    outside = Outside(environment={}, profile=profile)
    for hardware in (gpu("h200-141g"), gpu("t4-16g")):
        free, bounded = make_plan(GPT2, hardware), make_plan(GPT2, hardware, outside=outside)
        assert bounded.micro_batch <= min(profile.micro_batch, free.micro_batch)
    bounded = make_plan(pinned(GPT2, micro_batch=128), gpu("h200-141g"), outside=outside)
    assert bounded.micro_batch == min(64, profile.micro_batch)
    if profile.micro_batch < 64:
        assert bounded.why["micro_batch"].source == "profile"
        assert profile.name in bounded.why["micro_batch"].reason


def test_an_unknown_profile_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"no profile 'conservativ' \(did you mean 'conservative'\?\)"):
        find_profile("conservativ")


# ---- plan.json ----


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Plan, Path]:
    plan = make_plan(GPT2, gpu(), world_size=2)
    save(plan, tmp_path / "plan.json")
    return plan, tmp_path / "plan.json"


def test_a_plan_survives_a_round_trip(saved, tmp_path):
    plan, path = saved
    assert load(path) == plan
    on_cpu = make_plan(load_recipe("nano"), CPU)
    save(on_cpu, tmp_path / "cpu.json")
    assert load(tmp_path / "cpu.json") == on_cpu


def test_a_saved_plan_holds_each_value_beside_its_reason(saved):
    plan, path = saved
    table = json.loads(path.read_text())
    for name in PLANNED:
        assert table[name] == {
            "value": getattr(plan, name),
            "reason": plan.why[name].reason,
            "source": plan.why[name].source,
        }


@pytest.mark.parametrize(
    "record",
    sorted(Path(__file__).parents[2].glob("benchmarks/*/plan.json")),
    ids=lambda path: path.parent.name,
)
def test_the_plans_of_measured_runs_stay_readable(record):
    assert load(record).micro_batch > 0


def _drop(table: dict[str, Any], name: str) -> None:
    del table[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(micro_bach=3), "unknown key 'micro_bach' (did you mean 'micro_batch'?)"),
        (lambda t: _drop(t, "micro_batch"), "micro_batch must hold value, reason and source, got None"),
        (lambda t: _drop(t, "work"), "'work' is missing"),
        (lambda t: _drop(t["hardware"], "cores"), "'cores' is missing"),
        (lambda t: t.update(micro_batch=64), "micro_batch must hold value, reason and source, got 64"),
        (lambda t: t["micro_batch"].update(value="64"), "micro_batch must be a whole number, got '64'"),
        (lambda t: t["micro_batch"].update(value=True), "micro_batch must be a whole number, got True"),
        (lambda t: t["micro_batch"].update(value=-64), "micro_batch must be greater than 0, got -64"),
        (lambda t: t["loss_chunks"].update(value=0), "loss_chunks must be greater than 0, got 0"),
        (lambda t: t["precision"].update(value="bf17"), "precision must be one of"),
        (lambda t: t["precision"].update(source="guess"), "source must be one of"),
        (
            lambda t: t["hardware"].update(memory_bytes=1e10),
            "memory_bytes must be a whole number, got 10000000000.0",
        ),
        (lambda t: t["hardware"].update(peak_tflops=[1]), "peak_tflops must be a table, got [1]"),
        (lambda t: t["hardware"].update(compute_capability={}), "compute_capability must be a list, got {}"),
        (
            lambda t: t["hardware"]["peak_tflops"].update(bf16=float("nan")),
            "bf16 must be a finite number, got nan",
        ),
    ],
)
def test_a_plan_with_anything_wrong_is_refused_in_one_line(saved, change, message):
    _, path = saved
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"9" * 5000])
def test_what_is_no_plan_is_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"plan\.json is damaged"):
        load(path)


def test_a_plan_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"no plan at .*redline plan RECIPE --save"):
        load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_a_plan_fits_only_its_recipe_batch_and_number_of_processes(saved):
    plan, _ = saved
    check_fit(plan, GPT2, 2)
    with pytest.raises(ConfigError, match="another workload"):
        check_fit(plan, replace(GPT2, train=replace(GPT2.train, optimizer="muon")), 2)
    check_fit(plan, replace(GPT2, train=replace(GPT2.train, steps=7, seed=3, lr=1.0)), 2)
    steady, warming = (replace(GPT2.train, orthogonality=1e-4, orthogonality_warmup_steps=n) for n in (0, 9))
    captured_penalty = replace(plan, work=replace(GPT2, train=steady).work)
    with pytest.raises(ConfigError, match="another workload"):
        check_fit(captured_penalty, replace(GPT2, train=warming), 2)
    with pytest.raises(ConfigError, match=r"the plan is for 2 processes, but this run has 1"):
        check_fit(plan, GPT2, 1)
    with pytest.raises(ConfigError, match="a plan never changes the batch"):
        check_fit(replace(plan, micro_batch=plan.micro_batch // 2), GPT2, 2)


@pytest.mark.parametrize("name", ["gpt2-124m", "okadfa/fast"])
def test_a_plan_that_prefers_memory_takes_less_and_says_so(name):
    """And keeps passes that do not starve the device; what the user pins stays."""
    recipe, hardware = load_recipe(name), hardware_as("a100-40g", 8)
    fast = make_plan(recipe, hardware)
    lean = make_plan(recipe, hardware, outside=Outside(environment={}, prefer="memory"))
    assert lean.prediction.memory_bytes < fast.prediction.memory_bytes
    assert lean.micro_batch * lean.accumulation == recipe.train.batch_size
    assert lean.micro_batch * recipe.data.seq_len >= THIN_PASS_TOKENS
    assert "--prefer memory" in lean.why["micro_batch"].reason
    pinned = replace(recipe, plan=replace(recipe.plan, micro_batch=fast.micro_batch))
    kept = make_plan(pinned, hardware, outside=Outside(environment={}, prefer="memory"))
    assert kept.micro_batch == fast.micro_batch
