"""The catalogue: every line of the seeds is in it, its switches are real, its arithmetic is right, and its
page is made from it."""

import inspect
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.config.load import from_toml, load_recipe, shipped, to_toml
from redline.config.recipe import ModelConfig, Recipe
from redline.config.rules import check
from redline.measure.trial import GenerationSwitches
from redline.optimizations.catalogue import (
    CONDITIONS,
    Optimization,
    catalogue,
    find,
    ratio,
    study,
    switched,
    value_words,
)
from redline.plan.arithmetic import parameters
from redline.plan.hardware import hardware_as
from redline.plan.plan import PLANNED, Hardware, Plan
from redline.plan.planner import make_plan
from redline.plan.values import VALUES, effect_of, why_not

ROOT = Path(__file__).parents[2]
NANO, GPT2 = load_recipe("nano"), load_recipe("gpt2-124m")
H200, A100, V100 = (hardware_as(name, 16) for name in ("h200-141g", "a100-40g", "v100-32g"))
CPU = Hardware(
    title="a CPU", kind="cpu", memory_bytes=2**34, compute_capability=(), cores=2, peak_tflops={},
    measured_tflops={},
    bandwidth_bytes_per_s=None, source="test",
)  # fmt: skip
CATALOGUE = catalogue()
STUDIES = [f"seeds/00{n}" for n in range(5)]
SWITCHES = {name: entry for name, entry in CATALOGUE.items() if entry.standing == "switch"}
KNOWN = {
    "train": set(PLANNED),
    "generate": {f.name for f in fields(GenerationSwitches)},
    "finetune": {*PLANNED, "tf32", "padded"},
}


def test_every_entry_has_a_source_for_what_it_claims() -> None:
    for entry in CATALOGUE.values():
        assert entry.title, entry.name
        assert entry.claims, entry.name
        assert set(entry.needs) <= set(CONDITIONS), entry.name
        for claim in entry.claims:
            assert claim.source, entry.name
            assert claim.words, entry.name
            assert (claim.low is None) == (claim.high is None), entry.name
            assert claim.low is None or 0 < claim.low <= (claim.high or 0), entry.name


def test_every_guide_is_quoted() -> None:
    sources = " ".join(claim.source for entry in CATALOGUE.values() for claim in entry.claims)
    for guide in (f"tuning guide 00{n}" for n in range(5)):
        assert guide in sources
    # The numbered sections of 003, each of which makes one promise.
    assert {f"tuning guide 003 §{n}" for n in range(1, 11)} <= {
        c.source for e in CATALOGUE.values() for c in e.claims
    }


@pytest.mark.parametrize("entry", SWITCHES.values(), ids=SWITCHES)
def test_a_switch_has_two_different_ends_and_turns_something_that_exists(entry: Optimization) -> None:
    if entry.effect == "changes-training":
        assert entry.change is not None
        assert not entry.on
        return
    assert entry.change is None
    assert entry.on
    assert entry.on.keys() == entry.off.keys()
    assert all(entry.on[name] != entry.off[name] for name in entry.on)
    for workload in entry.workloads:
        assert entry.on.keys() <= KNOWN[workload], workload


@pytest.mark.parametrize("entry", [e for e in SWITCHES.values() if e.on], ids=lambda e: e.name)
def test_the_ends_of_a_switch_and_what_the_tuner_tries_are_values_of_the_table(entry: Optimization) -> None:
    for name in entry.on:
        ends = [entry.off[name], entry.on[name]]
        ends += [end for attempt in entry.tries for end in (attempt.origin, attempt.to) if end != "twice"]
        allowed = VALUES[name].choices
        assert all(end is None or (end in allowed if allowed else end >= 1) for end in ends), name
    for attempt in entry.tries:
        assert len(entry.on) == 1, "an attempt is at one value"
        assert (attempt.gain is None) == bool(attempt.predicted_by)
        assert attempt.gain is None or attempt.seen


def test_a_cause_is_mended_by_one_entry() -> None:
    causes = [cause for entry in CATALOGUE.values() for cause in entry.mends]
    assert len(causes) == len(set(causes))


# ---- the table of plan values ----


def test_every_plan_value_is_in_the_table() -> None:
    assert set(PLANNED) <= set(VALUES)
    assert set(VALUES) == set().union(*KNOWN.values())
    hints = inspect.get_annotations(Plan)
    for name in PLANNED:
        allowed = getattr(hints[name], "__args__", None)
        assert VALUES[name].choices == allowed or (allowed is None and name != "precision"), name
        assert set(VALUES[name].needs) <= set(VALUES[name].choices), name


def test_the_effect_of_a_change_is_the_strongest_of_its_values() -> None:
    plan = make_plan(GPT2, H200)
    assert effect_of(plan, plan) == "exact"
    assert effect_of(plan, replace(plan, micro_batch=32, accumulation=16, recompute="full")) == "exact"
    assert effect_of(plan, replace(plan, attention="flash")) == "rounding"
    assert effect_of(plan, replace(plan, micro_batch=32, precision="fp8")) == "rounding"


def test_a_kernel_for_half_precision_is_refused_beside_fp32() -> None:
    for name, value in (("cross_entropy", "fused"), ("attention", "cudnn"), ("attention", "flash")):
        assert why_not(name, value, GPT2, H200, {"precision": "bf16"}) is None
        assert "half precision" in str(why_not(name, value, GPT2, H200, {"precision": "tf32"}))
        assert "CPU" in str(why_not(name, value, GPT2, CPU))


def test_what_changes_the_training_changes_the_fingerprint_and_stays_a_recipe() -> None:
    recipe = load_recipe("seeds/002")
    changed = [e for e in SWITCHES.values() if e.effect == "changes-training"]
    assert len(changed) >= 3
    for entry in changed:
        assert entry.change is not None
        other: Recipe = check(entry.change(recipe))
        assert other.fingerprint != recipe.fingerprint, entry.name
    assert CATALOGUE["vocabulary-padding"].change(recipe).model.vocab_size == 50304  # type: ignore[misc]


# ---- where they apply ----


def test_precision_follows_the_compute_capability() -> None:
    where = {
        gpu.title: {n for n in ("tf32", "bf16", "fp16", "fp8") if CATALOGUE[n].why_not(GPT2, gpu) is None}
        for gpu in (H200, A100, V100)
    }
    assert where == {H200.title: {"tf32", "bf16", "fp8"}, A100.title: {"tf32", "bf16"}, V100.title: {"fp16"}}
    assert "8.9" in str(CATALOGUE["fp8"].why_not(GPT2, A100))
    assert "bf16" in str(CATALOGUE["fp16"].why_not(GPT2, H200))


def test_a_cpu_is_told_what_it_lacks() -> None:
    for name in ("tf32", "bf16", "fp8", "cudnn", "allocator", "cuda-graphs", "cuda-graphs-decode"):
        assert "CPU" in str(CATALOGUE[name].why_not(NANO, CPU)), name
    for name in ("sdpa", "compile", "micro-batch", "no-recompute", "fused-optimizer", "kv-cache", "packing"):
        assert CATALOGUE[name].why_not(NANO, CPU) is None, name


def test_shapes_decide_too() -> None:
    odd = load_recipe("nano", ["model.ffn_size=350"])
    assert "ffn_size 350" in str(CATALOGUE["fp8"].why_not(odd, H200))
    uneven = replace(NANO, data=replace(NANO.data, seq_len=30))
    assert CATALOGUE["length-ramp"].why_not(NANO, CPU) is None
    assert "a multiple of 4, got pretrain and 30" in str(CATALOGUE["length-ramp"].why_not(uneven, CPU))
    assert "50,304" in str(CATALOGUE["vocabulary-padding"].why_not(GPT2, H200))
    assert "muon already" in str(CATALOGUE["muon"].why_not(load_recipe("llama-124m-muon"), H200))
    assert "multiples of 8" in str(
        CATALOGUE["cudnn"].why_not(load_recipe("nano", ["model.head_dim=36"]), H200)
    )


# ---- the studies ----


def test_every_seed_has_its_study_in_an_order_that_undoes_nothing() -> None:
    assert set(STUDIES) <= set(shipped())
    assert all(study(name) != study("pretrain") for name in STUDIES)
    assert study("gpt2-124m") == study("pretrain")
    assert [part.workload for part in study("mine", "rft")] == ["generate", "finetune"]
    rank = ["fp32", "tf32", "fp16", "bf16", "fp8"]
    for name in (*STUDIES, "pretrain", "finetune", "rft"):
        for part in study(name, name if name not in STUDIES else "pretrain"):
            entries = [find(n) for n in part.names]
            assert len(set(part.names)) == len(entries)
            assert all(e.standing != "refuted" and part.workload in e.workloads for e in entries), name
            precisions = [e.on["precision"] for e in entries if "precision" in e.on and e.name != "fp16"]
            assert precisions == sorted(precisions, key=rank.index), name
            told = part.workload == "generate" and name in STUDIES
            assert (part.samples is not None) == told, name


# ---- the arithmetic of what cannot hold ----


def test_the_arithmetic_of_the_refuted_claims() -> None:
    notes = {name: entry.note for name, entry in CATALOGUE.items() if entry.standing == "refuted"}
    factors = [(2, 3), (1.2, 1.3), (1.5, 2), (1.2, 1.5), (1.2, 1.5)]
    product = [math.prod(bounds) for bounds in zip(*factors, strict=True)]
    assert f"{product[0]:.1f}-{product[1]:.1f}x" in notes["guide-003-product"]
    size = parameters(load_recipe("seeds/002").model).total
    assert f"{size / 1e6:.0f}M" in notes["guide-002-500k"]
    assert f"{6 * size * 500e3 / 1e15:.2f} PFLOP/s" in notes["guide-002-500k"]
    assert A100.peak_tflops["bf16"] / A100.peak_tflops["fp32"] == pytest.approx(16)
    assert f"{8 * 67}-{8 * 83}" in notes["guide-001-units"]
    for d_model, layers, heads in ((768, 12, 12), (1024, 12, 16), (1024, 24, 16), (1280, 36, 20)):
        shape = ModelConfig(
            vocab_size=50257, num_layers=layers, hidden_size=d_model, num_heads=heads, ffn_size=3072,
            context_length=1, norm="layernorm",
            positions="learned", activation="gelu", bias=True,
        )  # fmt: skip
        assert f"{parameters(shape).total / 1e6:.1f}M" in notes["guide-004-parameters"]


def test_the_arguments_that_seed_003_names_do_not_exist() -> None:
    transformers = pytest.importorskip("transformers")
    known = set(inspect.signature(transformers.TrainingArguments.__init__).parameters)
    assert not {"fp16_opt_level", "gradient_clip_norm"} & known
    assert "max_grad_norm" in known


# ---- what people see ----


def document() -> str:
    """Every entry and every plan value, for docs/optimizations.md: print it there after a change."""
    entries, tables = CATALOGUE.values(), []
    for family in dict.fromkeys(entry.family for entry in entries):
        rows = [
            (
                f"`{entry.name}`", entry.title, ", ".join(entry.workloads), switched(entry), entry.effect,
                ratio(entry.claimed), "; ".join(f"{claim.source}: {claim.words}" for claim in entry.claims), entry.note,
            )
            for entry in entries if entry.family == family
        ]  # fmt: skip
        columns = ("name", "what", "for", "switch", "numbers", "claimed", "by", "note")
        tables.append((family.capitalize(), columns, rows))
    values = [
        (
            f"`{name}`", ", ".join(map(value_words, value.choices)) or "a whole number", value.effect,
            ", ".join(f"`{entry.name}`" for entry in entries if name in entry.on) or "–",
            ", ".join(value.proof) or "its speed",
        )
        for name, value in VALUES.items()
    ]  # fmt: skip
    tables.append(("Plan values", ("value", "may be", "numbers", "switched by", "proved by"), values))
    lines = []
    for title, columns, rows in tables:
        first, *others = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
        lines += [f"## {title}", "", first, "|" + "---|" * len(columns), *others, ""]
    return "\n".join(lines)


def test_the_page_is_made_from_the_catalogue() -> None:
    assert (ROOT / "docs" / "optimizations.md").read_text(encoding="utf-8").endswith(document())


def test_words() -> None:
    assert ratio((2.0, 3.0)) == "2-3x"
    assert ratio((1.25, 1.25)) == "1.25x"
    assert ratio(None) == "–"
    assert switched(CATALOGUE["micro-batch"]) == "micro_batch: 8 to the planner's"
    assert switched(CATALOGUE["memory-map"]) == "built in"


def test_the_command_lists_and_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizations", "gpt2-124m", "--as", "a100-40g", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == CATALOGUE.keys()
    assert rows["bf16"]["applies"]
    assert not rows["fp8"]["applies"]
    assert "8.9" in rows["fp8"]["why_not"]
    assert rows["bf16"]["claimed"] == [2.0, 3.0]
    assert all(row["applies"] == (row["why_not"] is None) for row in rows.values())
    assert "generate" in rows["kv-cache"]["why_not"]
    assert main(["optimizations", "seeds/001", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["kv-cache"]["applies"]
    assert "train" in rows["bf16"]["why_not"]
    assert main(["optimizations"]) == 0
    text = capsys.readouterr().out
    assert "bf16" in text
    assert "nothing here was measured" in text


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("arguments", [(), ("gpt2-124m", "--as", "v100-32g")])
def test_the_list_can_be_read_in_a_terminal(
    columns: int,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No line is longer than the terminal, no word is cut in two, and no text stands in a column of its own
    width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["optimizations", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    words = {word for line in lines for word in line.split()}
    for entry in CATALOGUE.values():
        said = [entry.name, *(word for claim in entry.claims for word in claim.source.split())]
        if entry.standing == "refuted":
            said += entry.note.split()
        elif not arguments:
            said += switched(entry).split()
        assert {word.rstrip(";") for word in said} <= {word.rstrip(";") for word in words}, entry.name
    assert len(lines) < 4 * len(CATALOGUE)
    if arguments:
        gpu = hardware_as(arguments[2], 16)
        reasons = [reason for entry in SWITCHES.values() if (reason := entry.why_not(GPT2, gpu)) is not None]
        assert {word for reason in reasons for word in reason.split()} <= words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--as", "h200-141g"], "need a recipe"), (["nope"], "no recipe 'nope'"), (["nano", "--as", "x"], "x")],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizations", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(Exception, match="did you mean 'bf16'"):
        find("bf61")


def test_what_kernel_attention_and_feedback_alignment_leave_nothing_to_is_not_tried() -> None:
    recipe, here = load_recipe("okadfa/nano"), H200
    assert find("sdpa").why_not(recipe, here) == "the model's attention is favor"
    for name in ("no-recompute", "recompute", "selective-recompute"):
        kept = "feedback alignment keeps the activations of one block anyway"
        assert find(name).why_not(recipe, here) == kept, name
    assert find("sdpa").why_not(GPT2, here) is None


def test_what_rows_of_answers_and_examples_have_no_use_for_is_not_tried() -> None:
    rl, finetune = load_recipe("rl/demo"), load_recipe("finetune")
    assert find("packing").why_not(rl, H200) == "reinforcement learning never pads its rows"
    assert find("packing").why_not(finetune, H200) is None
    own = "packed rows in half precision have kernels of their own"
    for kernel in ("math", "flash", "cudnn", "efficient"):
        assert why_not("attention", kernel, finetune, H200, {"precision": "bf16"}) == own
    assert why_not("attention", "math", rl, H200, {"precision": "bf16"}) is None, "it reads the prompts"
    assert why_not("attention", "math", finetune, H200, {"precision": "fp32"}) is None


def test_every_change_of_the_training_makes_another_recipe_that_keeps_the_rules() -> None:
    """`ablate` applies them to a recipe that is not theirs: a value of the wrong type, or one that breaks a rule, would
    show only then."""
    recipe = load_recipe("llama-124m-muon")
    changes = {name: entry.change for name, entry in catalogue().items() if entry.change is not None}
    named = "muon normuon length-ramp zero-init untied-head sampled-softmax"
    assert set(named.split()) <= changes.keys()
    for name, change in changes.items():
        if find(name).why_not(recipe, H200) is None:
            changed = change(recipe)
            assert from_toml(to_toml(changed), where=name) == changed
            assert changed.fingerprint != recipe.fingerprint, name
    few = replace(recipe, train=replace(recipe.train, batch_size=64))
    assert find("sampled-softmax").why_not(few, H200) is None
    assert changes["sampled-softmax"](few).train.softmax_candidates == 24_576
    assert "too many different targets" in (find("sampled-softmax").why_not(recipe, H200) or "")
    assert "more than half of the vocabulary" in (
        find("sampled-softmax").why_not(load_recipe("nano"), H200) or ""
    )
    assert "train.optimizer is adamw" in (find("normuon").why_not(load_recipe("nano"), H200) or "")
