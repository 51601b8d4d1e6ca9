"""Training on a real GPU: precisions agree with fp32, memory is as predicted, out-of-memory recovers, runs
resume."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.config.load import load_recipe
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.pretrain import pretrain
from redline.record.run import read_lines
from redline.train.execution import build
from redline.train.process import join

SMALL = [
    "model.vocab_size=2048",
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.ffn_size=704",
    "train.batch_size=32",
    "train.steps=30",
    "train.eval_every=15",
    "train.checkpoint_every=10",
    "data.seq_len=256",
    "train.lr=5e-4",  # a smooth run: near the edge of stability any rounding grows
    "train.warmup_steps=0",
    "plan.graph=false",  # longer runs of this size are captured; tests that want it say so
]


def train(run: Path, *overrides: str) -> list[dict[str, Any]]:
    recipe = load_recipe("nano", [*SMALL, *overrides])
    plan = make_plan(recipe, hardware_here(read_facts(), None))
    with join("cuda") as process:
        pretrain(recipe, plan, run, process)
    return read_lines(run / "metrics.jsonl")


def forget_the_end(run: Path) -> None:
    """As if it had been killed after its first checkpoint. A run of fewer steps would have another schedule."""
    _, *later = sorted((run / "checkpoints").glob("step-*"))
    assert later
    for folder in later:
        shutil.rmtree(folder)
    (run / "checkpoints" / "best.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("fp32"), "plan.precision=fp32", "plan.compile=off")


@pytest.mark.parametrize(
    ("overrides", "band"),
    [
        (("plan.precision=tf32", "plan.compile=off"), 2e-3),
        (("plan.precision=bf16", "plan.compile=off"), 1e-2),
        (("plan.precision=bf16", "plan.compile=default", "plan.micro_batch=16"), 1e-2),
        (("plan.precision=bf16", "plan.compile=default", "plan.recompute=selective"), 1e-2),
        (("plan.precision=fp16", "plan.compile=off"), 1e-2),
    ],
)
def test_losses_stay_in_the_band_of_fp32(
    reference: list[dict[str, Any]], tmp_path: Path, overrides: tuple[str, ...], band: float
) -> None:
    lines = train(tmp_path, *overrides)
    assert [line["step"] for line in lines] == [line["step"] for line in reference]
    for ours, theirs in zip(lines, reference, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=band)
    assert lines[-1]["valid_loss"] == pytest.approx(reference[-1]["valid_loss"], rel=band)


@pytest.mark.parametrize("compile", ["off", "default"])
@pytest.mark.parametrize(
    "how",
    [
        ("train.optimizer=adamw",),
        ("train.optimizer=muon", "train.muon_warmup_steps=10", "plan.micro_batch=16"),
        ("train.optimizer=muon", "plan.cross_entropy=fp8"),
        ("train.optimizer=muon", "plan.cross_entropy=fp8", "train.softmax_candidates=1984"),
        ("plan.update=foreach", "plan.recompute=full", "plan.loss_chunks=4"),
        ("train.optimizer=muon", "train.length_ramp_steps=5", "plan.micro_batch=16"),
    ],
    ids=[
        "adamw",
        "muon, two passes",
        "muon, fp8 head",
        "candidates",
        "foreach, recomputed",
        "a ramp of the length",
    ],
)
def test_a_captured_run_trains_like_an_eager_one(tmp_path: Path, how: tuple[str, ...], compile: str) -> None:
    """Validations, checkpoints and an end by resuming among them."""
    if "plan.cross_entropy=fp8" in how and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    how = (*how, f"plan.compile={compile}")
    eager = train(tmp_path / "eager", *how)
    whole = train(tmp_path / "whole", *how, "plan.graph=true")
    train(tmp_path / "parts", *how, "plan.graph=true")
    forget_the_end(tmp_path / "parts")
    parts = train(tmp_path / "parts", *how, "plan.graph=true")
    for lines in (whole, parts):
        assert [line["step"] for line in lines] == list(range(1, 31))
        for ours, theirs in zip(lines, eager, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert lines[-1]["valid_loss"] == pytest.approx(eager[-1]["valid_loss"], rel=1e-2)
    events = read_lines(tmp_path / "whole" / "events.jsonl")
    graphs = [event["graphs"] for event in events if event["event"] == "captured"]
    assert graphs == [1] * (2 if "train.length_ramp_steps=5" in how else 1)


def test_a_run_of_short_updates_is_captured_by_rule(tmp_path: Path) -> None:
    """With the phases of an update inside the graph, and the validation beside it."""
    how = ("plan.compile=off", "train.steps=300", "train.eval_every=150", "train.checkpoint_every=0")
    eager = train(tmp_path / "eager", *how)
    lines = train(tmp_path / "rule", *how, "plan.graph=none")
    events = [event["event"] for event in read_lines(tmp_path / "rule" / "events.jsonl")]
    assert events.count("captured") == 1
    assert "validation_out_of_memory" not in events
    assert not [line for line in lines if "forward_s" in line]
    assert lines[-1]["valid_loss"] == pytest.approx(eager[-1]["valid_loss"], rel=2e-2)


def test_fp8_trains_like_bf16(reference: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    lines = train(tmp_path, "plan.precision=fp8", "plan.compile=default")
    assert lines[-1]["loss"] == pytest.approx(reference[-1]["loss"], rel=3e-2)


def test_stopped_and_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "plan.compile=off")
    part = tmp_path / "part"
    train(part, "plan.compile=off")
    forget_the_end(part)
    resumed = train(part, "plan.compile=off")
    assert [line["step"] for line in resumed] == list(range(1, 31))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)


@pytest.mark.parametrize("graph", [False, True])
def test_out_of_memory_shrinks_the_pass_and_keeps_the_batch(tmp_path: Path, graph: bool) -> None:
    how = ["plan.micro_batch=512", "plan.compile=off", *(["plan.graph=true"] if graph else [])]
    recipe = load_recipe("nano", [*SMALL, "train.steps=4", "train.batch_size=512", *how])
    hardware = hardware_here(read_facts(), None)
    plan = make_plan(recipe, hardware)
    needed = plan.prediction.memory_bytes
    gc.collect()  # the graphs of the tests before keep their memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        0.5 * needed / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with join("cuda") as process:
            pretrain(recipe, plan, tmp_path, process)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    shrunk = [event for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "out_of_memory"]
    assert shrunk
    assert shrunk[-1]["micro_batch"] < 512
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["tokens"] == 4 * recipe.tokens_per_step


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt2-124m", ("plan.micro_batch=32",)),
        ("llama-350m", ("plan.micro_batch=16",)),
        ("llama-350m", ("plan.micro_batch=16", "plan.recompute=selective")),
        ("llama-124m-muon", ("plan.micro_batch=32",)),
        ("gpt2-124m", ("plan.micro_batch=32", "train.softmax_candidates=24576")),
        # one pass: gradients and activations do not meet
        ("gpt2-124m", ("plan.micro_batch=32", "train.batch_size=32")),
    ],
)
def test_peak_memory_is_within_three_percent_of_the_prediction(
    tmp_path: Path, name: str, overrides: tuple[str, ...]
) -> None:
    predicted, seen = peak_bytes(tmp_path, name, *overrides)
    assert predicted == pytest.approx(seen, rel=0.03)


def test_peak_memory_of_full_recomputation_is_not_underestimated(tmp_path: Path) -> None:
    """One reading was 17% below the prediction and its cause is not known (LOG.md): too high is safe, too
    low is not."""
    predicted, seen = peak_bytes(tmp_path, "llama-350m", "plan.micro_batch=16", "plan.recompute=full")
    assert 0.97 * seen < predicted < 1.25 * seen


def peak_bytes(run: Path, name: str, *overrides: str) -> tuple[int, int]:
    """Peak memory as predicted and as seen over three updates, of two passes unless an override says
    otherwise."""
    micro = int(overrides[0].partition("=")[2])
    common = ["data.source=tinyshakespeare", "data.valid_fraction=0", "train.eval_every=0", "train.steps=3"]
    common += [f"train.batch_size={2 * micro}", "train.warmup_steps=0", "plan.compile=default"]
    common += ["plan.graph=false"]
    recipe = load_recipe(name, [*common, *overrides])
    plan = make_plan(recipe, hardware_here(read_facts(), None))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with join("cuda") as process:
        pretrain(recipe, plan, run, process)
    seen = torch.cuda.max_memory_allocated() - before
    print(
        json.dumps(
            {"recipe": name, "plan": overrides, "predicted": plan.prediction.memory_bytes, "seen": seen}
        )
    )
    return plan.prediction.memory_bytes, seen


def test_no_position_of_the_compiled_speedrun_sees_a_later_one() -> None:
    """With every choice on, as it is trained: half precision, compiled blocks."""
    overrides = ("model.zero_init=false", "plan.precision=bf16", "plan.compile=default")
    recipe = load_recipe("speedrun/nano", overrides)
    with join("cuda") as process:
        model = build(recipe, make_plan(recipe, hardware_here(read_facts(), None)), process)
        tokens = torch.arange(128, device="cuda").view(1, 128)
        changed = tokens.clone()
        changed[:, 64:] += 100
        before, after = model(tokens).detach(), model(changed).detach()
    assert torch.equal(before[:, :64], after[:, :64])
    assert not torch.equal(before[:, 64:], after[:, 64:])
