"""Fine-tuning: PEFT and plain PyTorch on padded batches are the truth for every loss; resuming, memory and
errors are made to happen."""

import math
import os
import random
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from precision import CLOSE, assert_close
from torch import Tensor

from redline.config.recipe import (
    DEFAULTS,
    IGNORED,
    LoraConfig,
    ModelConfig,
    PlanPins,
    Precision,
    Recipe,
    TrainConfig,
)
from redline.errors import CheckpointError, DataError, TrainingError
from redline.finetune import job_of, train
from redline.machine.facts import read_facts
from redline.model.lora import adapters, add_lora, lora_layers
from redline.model.transformer import Transformer, build_model
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.record.metrics import METRICS
from redline.record.run import RunFolder, read_lines
from redline.train.loop import Outcome
from redline.train.open_run import OpenRun
from redline.train.optimizer import fixed, lr_factor
from redline.train.packed import Example
from redline.train.process import Process

CONFIG = ModelConfig(
    vocab_size=64, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=40, context_length=64
)
LORA = LoraConfig(rank=4, alpha=8)


def settings(**changes: Any) -> TrainConfig:
    given = {"epochs": 2, "batch_size": 8, "lr": 1e-2, "weight_decay": 0.1, "checkpoint_every": 3}
    return TrainConfig(**DEFAULTS["finetune"]["train"] | given | changes)


SETTINGS = settings()


def finetune(
    model: Transformer,
    data: list[Example],
    config: TrainConfig,
    *,
    folder: RunFolder | None = None,
    observers: list[Any] | None = None,
    precision: Precision = "fp32",
) -> Outcome:
    """Through the real job and loop, on this CPU."""
    lora = next((layer.config for layer in lora_layers(model).values()), None)
    pins = PlanPins(precision=precision)
    recipe = Recipe(name="test", workload="finetune", model=CONFIG, train=config, lora=lora, plan=pins)
    plan = make_plan(recipe, hardware_here(replace(read_facts(), gpus=()), None))
    process, run = Process(0, 1, torch.device("cpu")), folder.path if folder else None
    opened = OpenRun(run, folder, observers or ())
    return train(job_of(model, data, recipe, plan, process, opened=opened), process)


def examples(count: int = 27, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    return [
        Example(
            tuple(rng.randrange(64) for _ in range(rng.randint(2, 12))),
            tuple(rng.randrange(8) for _ in range(rng.randint(1, 9))),
        )
        for _ in range(count)
    ]


def test_mfu_counts_the_attention_of_the_rows_there_are(tmp_path: Path) -> None:
    """The plan can only assume rows as long as the context, which would be three times these products in attention."""
    data = examples()
    config = settings(batch_size=len(data))  # one update holds them all
    recipe = Recipe(name="test", workload="finetune", model=CONFIG, train=config)
    plan = make_plan(recipe, hardware_here(replace(read_facts(), gpus=()), None))
    model = model_of("full")
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))

    def flops(length: int) -> int:
        return length * (6 * weights + 12 * CONFIG.num_layers * CONFIG.hidden_size * length)

    job = job_of(model, data, recipe, plan, Process(0, 1, torch.device("cpu")))
    read = [len(one.prompt) + len(one.answer) - 1 for one in data]
    assumed = sum(read) * flops(CONFIG.context_length) / CONFIG.context_length
    for step in (1, 2, 7):  # a trial goes on after the last of the two epochs
        found = job.derived({"step": step, "mfu": 0.5, "ceiling_share": None})
        assert found == {"mfu": pytest.approx(0.5 * sum(map(flops, read)) / assumed)}


def model_of(method: str) -> Transformer:
    model = build_model(CONFIG, device="cpu", seed=0)
    if method == "lora":
        add_lora(model, LORA, seed=0)
    return model


class Seen:
    """An observer that remembers."""

    def __init__(self, at: int | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.at = at

    def metrics(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if line["step"] == self.at:
            os.kill(os.getpid(), signal.SIGINT)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        self.events.append((kind, facts))

    def close(self) -> None: ...


def padded_losses(model: Transformer, config: TrainConfig, data: list[Example]) -> list[float]:
    """The truth: batches in the stated order, each example padded at the right, torch's own AdamW and
    clipping."""
    learning = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in learning if p.ndim > 1], [p for p in learning if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), weight_decay=config.weight_decay)
    steps = config.epochs * math.ceil(len(data) / config.batch_size)
    losses: list[float] = []
    for epoch in range(config.epochs):
        order = torch.randperm(
            len(data), generator=torch.Generator().manual_seed(config.seed + epoch)
        ).tolist()
        for start in range(0, len(data), config.batch_size):
            tokens_BT, targets_BT = padded([data[i] for i in order[start : start + config.batch_size]])
            loss = torch.nn.functional.cross_entropy(
                model(tokens_BT).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learning, config.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.lr * lr_factor(fixed(config, steps), len(losses) + 1)
            optimizer.step()
            losses.append(loss.item())
    return losses


def padded(batch: list[Example]) -> tuple[Tensor, Tensor]:
    tokens_BT, targets_BT = torch.full((len(batch), 24), 3), torch.full((len(batch), 24), IGNORED)
    for i, example in enumerate(batch):
        whole = torch.tensor((*example.prompt, *example.answer))
        tokens_BT[i, : len(whole)] = whole
        targets_BT[i, len(example.prompt) - 1 : len(whole) - 1] = whole[len(example.prompt) :]
    return tokens_BT, targets_BT


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_losses_are_those_of_padded_batches_in_plain_pytorch(method: str, schedule: Any) -> None:
    config = settings(schedule=schedule, seed=3)
    seen, model, reference = Seen(), model_of(method), model_of(method)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    outcome = finetune(model, examples(), config, observers=[seen])
    truth = padded_losses(reference, config, examples())
    assert [line["loss"] for line in seen.lines] == pytest.approx(truth, rel=CLOSE)
    assert truth[-1] < truth[0] - 0.1
    assert (outcome.step, outcome.why) == (8, "finished")
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == (adapters(model).keys() if method == "lora" else before.keys())
    for name, p in reference.named_parameters():
        assert_close(model.get_parameter(name), p, what=name)


def test_muon_takes_adapters_which_leave_adamw_nothing() -> None:
    seen, model = Seen(), model_of("lora")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    finetune(model, examples(), settings(optimizer="muon", muon_normalize=True), observers=[seen])
    assert seen.lines[-1]["loss"] < seen.lines[0]["loss"] - 0.1
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == adapters(model).keys()


def test_the_record_has_a_whole_line_for_every_update(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        finetune(model_of("lora"), examples(), SETTINGS, folder=folder)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert set(lines[0]) <= METRICS.keys()
    read = sum(example.length for example in examples())
    assert lines[3]["tokens"] == read
    assert lines[7]["tokens"] == 2 * read
    for line in lines:
        assert line["rows_per_s"] * line["step_s"] == pytest.approx(3 if line["step"] % 4 == 0 else 8)
        assert line["padding_share"] == 0.0
        assert line["grad_norm"] > 0
    events = read_lines(tmp_path / "run" / "events.jsonl")
    assert [event["event"] for event in events] == ["start", "checkpoint", "checkpoint", "checkpoint", "end"]
    assert [event["step"] for event in events] == [0, 3, 6, 8, 8]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_fp16_scales_its_losses_skips_what_overflows_and_learns_the_same(method: str) -> None:
    """The first scale is too large for this loss and is halved until the gradients are finite; from there on losses are
    those of fp32 but for the rounding of fp16, whose unit is 2^-11: a few hundred products each of which rounds."""
    seen, exact = Seen(), Seen()
    model = model_of(method)
    model.compute_dtype = torch.float16
    finetune(model, examples(), SETTINGS, observers=[seen], precision="fp16")
    finetune(model_of(method), examples(), SETTINGS, observers=[exact])
    scales = [line["loss_scale"] for line in seen.lines]
    assert [line["skipped"] for line in seen.lines] == [int(b < a) for a, b in pairwise([65536.0, *scales])]
    first, plain = seen.lines[0]["loss"], exact.lines[0]["loss"]
    assert first == pytest.approx(plain, rel=100 * 2**-11)
    assert min(line["loss"] for line in seen.lines) < first


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_running_out_of_memory_halves_the_passes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = Seen(), Seen()
    model = model_of("lora")
    finetune(model, examples(), SETTINGS, observers=[whole])
    forward = Transformer.forward

    def limited(self: Transformer, *given: Any, **named: Any) -> Tensor:
        if len(named["packing"].bounds_S) - 1 > 3:
            raise torch.OutOfMemoryError("injected")
        return forward(self, *given, **named)

    monkeypatch.setattr(Transformer, "forward", limited)
    again = model_of("lora")
    finetune(again, examples(), SETTINGS, observers=[split])
    halvings = [facts for kind, facts in split.events if kind == "out_of_memory"]
    assert [(facts["step"], facts["micro_batch"]) for facts in halvings] == [(1, 4), (1, 2)]
    assert [line["loss"] for line in split.lines] == pytest.approx(
        [line["loss"] for line in whole.lines], rel=CLOSE
    )
    for name, p in adapters(model).items():
        assert_close(adapters(again)[name], p, what=name)
    monkeypatch.setattr(
        Transformer,
        "forward",
        lambda *_given, **_named: (_ for _ in ()).throw(torch.OutOfMemoryError("injected")),
    )
    with pytest.raises(TrainingError, match="out of memory at step 1 with micro-batch 1"):
        finetune(model_of("lora"), examples(), SETTINGS)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_request_to_stop_saves_and_the_same_call_goes_on_to_the_same_bits(
    method: str, tmp_path: Path
) -> None:
    unbroken, parts = Seen(), Seen(at=5)
    reference, model = model_of(method), model_of(method)
    finetune(reference, examples(), SETTINGS, observers=[unbroken])
    with RunFolder(tmp_path) as folder:
        assert (
            finetune(model, examples(), SETTINGS, folder=folder, observers=[parts]).why == "stopped by signal"
        )
        resumed = model_of(method)
        assert finetune(resumed, examples(), SETTINGS, folder=folder).step == 8
        done = model_of(method)
        assert finetune(done, examples(), SETTINGS, folder=folder).metrics == {}, "nothing left to do"
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"], line["lr"]) for line in lines] == [
        (line["step"], line["loss"], line["lr"]) for line in unbroken.lines
    ]
    for name, p in reference.named_parameters():
        assert torch.equal(resumed.get_parameter(name), p), name
        assert torch.equal(done.get_parameter(name), p), name


def test_a_run_goes_on_only_with_what_it_began_with(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        finetune(model_of("lora"), examples(), SETTINGS, folder=folder)
        for data, config, said in (
            (examples(seed=1), SETTINGS, "the data has changed"),
            (examples(), settings(lr=2e-2), "another recipe"),
        ):
            with pytest.raises(CheckpointError, match=said):
                finetune(model_of("lora"), data, config, folder=folder)
        model = build_model(CONFIG, device="cpu", seed=0)
        add_lora(model, LoraConfig(rank=4, alpha=16), seed=0)
        with pytest.raises(CheckpointError, match="another recipe"):
            finetune(model, examples(), SETTINGS, folder=folder)


def test_a_run_is_extended_and_its_cadence_may_change(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert finetune(model_of("lora"), examples(), SETTINGS, folder=folder).step == 8
        longer = finetune(model_of("lora"), examples(), settings(epochs=3, checkpoint_every=2), folder=folder)
    assert (longer.step, longer.why) == (12, "finished")
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 13))


def test_a_loss_that_is_not_a_number_stops_the_run_and_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Transformer.forward, 0

    def broken(self: Transformer, *given: Any, **named: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return forward(self, *given, **named) * (math.nan if calls == 6 else 1.0)

    monkeypatch.setattr(Transformer, "forward", broken)
    with RunFolder(tmp_path) as folder:
        with pytest.raises(TrainingError, match=r"loss is nan at step 6: continue from step 3 \(--fork"):
            finetune(model_of("lora"), examples(), SETTINGS, folder=folder)
        assert [line["step"] for line in read_lines(folder.metrics_path)] == [1, 2, 3, 4, 5]
        assert [path.name for path in folder.checkpoints_path.glob("step-*")] == ["step-00000003"]
        assert finetune(model_of("lora"), examples(), SETTINGS, folder=folder).step == 8


def test_no_examples_is_one_clear_line() -> None:
    with pytest.raises(DataError, match="at least one example"):
        finetune(model_of("lora"), [], SETTINGS)
