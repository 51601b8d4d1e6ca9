"""Adapters in one piece of memory: updates equal those layer by layer, torch's AdamW and an unbroken run. On a CPU, where
everything but the second stream and the kernels is as in a captured update (tests/gpu has those)."""

import copy
import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from precision import assert_close
from test_finetune import CONFIG, Seen, examples, model_of, settings
from torch import Tensor, nn

from redline.config.recipe import LoraConfig, PlanPins, Recipe
from redline.finetune import job_of, train
from redline.machine.facts import read_facts
from redline.model.flat import as_one, joined, pieces, zeros_like
from redline.model.lora import adapters, add_lora, lora_layers
from redline.model.transformer import Transformer, build_model
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.record.run import RunFolder
from redline.train.graph import Captured
from redline.train.objective import Eager
from redline.train.open_run import OpenRun
from redline.train.optimizer import AdamW, make_optimizers, set_lr
from redline.train.packed import ExampleBatch, Packed, pack_row
from redline.train.process import Process
from redline.train.step import BackPropagation, Learner, Lesson, Update, update
from redline.train.workspace import HELD, Workspace, workspace_of

ALONE = Process(0, 1, torch.device("cpu"))


class InOnePiece(Eager):
    """A captured update without the capture."""

    @cached_property
    def workspace(self) -> Workspace:
        return made(self.learner)

    def take(self, batch: ExampleBatch, *, targets: float, lr_factor: float) -> Update:
        set_lr(self.learner.optimizers, lr_factor)
        learner = replace(self.learner, before_update=self.workspace.take_gradients)
        with self.workspace.in_use():
            return update(learner, self.objective.passes(learner, batch), targets=targets)


def made(learner: Learner) -> Workspace:
    workspace = workspace_of(learner)
    assert workspace is not None
    return workspace


def learner_of(model: Transformer) -> Learner:
    return Learner(model, make_optimizers(model, settings()), ALONE, 1.0)


def finetune(
    model: Transformer, executor: type[Eager], folder: RunFolder | None = None, at: int | None = None
) -> Seen:
    """Eight updates through the real loop; a signal stops it after update `at`."""
    pins, seen = PlanPins(precision="fp32", micro_batch=8), Seen(at)
    lora = next(layer.config for layer in lora_layers(model).values())
    recipe = Recipe(name="test", workload="finetune", model=CONFIG, train=settings(), lora=lora, plan=pins)
    plan = make_plan(recipe, hardware_here(replace(read_facts(), gpus=()), None))
    opened = OpenRun(folder.path if folder else None, folder, [seen])
    job = job_of(model, examples(), recipe, plan, ALONE, opened=opened)
    train(replace(job, executor=executor), ALONE)
    return seen


def kept(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in adapters(model).items()}


# ---- one piece of memory ----


def test_tensors_are_joined_only_where_each_follows_the_one_before() -> None:
    flat = torch.arange(24.0)
    parts = pieces(flat, [torch.empty(2, 3), torch.empty(()), torch.empty(17)])
    whole = joined(parts)
    assert whole is not None
    assert whole.data_ptr() == flat.data_ptr()
    assert torch.equal(whole, flat)
    assert [part.shape for part in parts] == [(2, 3), (), (17,)]
    assert torch.equal(joined(parts[1:]), flat[6:])
    assert joined([]) is None
    apart: list[list[Any]] = [
        parts[::-1],
        [parts[0], parts[2]],
        [parts[0], parts[1].clone()],
        [flat[:4].view(2, 2).T, flat[4:]],
        [flat[:4], flat.view(torch.int32)[4:]],
        [parts[0], None],
    ]
    assert [joined(tensors) for tensors in apart] == [None] * len(apart)
    assert joined(zeros_like(parts)) is not None
    assert joined(zeros_like(parts[::-1])) is None


def test_parameters_are_one_only_with_their_gradients() -> None:
    like = [torch.empty(2, 3), torch.empty(5)]
    parameters = [nn.Parameter(piece) for piece in pieces(torch.ones(11), like)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert as_one(parameters) is parameters
    gradient = torch.arange(11.0)
    for p, piece in zip(parameters, pieces(gradient, like), strict=True):
        p.grad = piece
    (one,) = as_one(parameters)
    assert one.grad is not None
    one.grad.mul_(2)
    assert torch.equal(gradient, 2 * torch.arange(11.0))


def test_adapters_lie_in_one_piece_and_a_copy_s_do_not() -> None:
    model = model_of("lora")
    flat = joined(list(adapters(model).values()))
    assert flat is not None
    assert flat.numel() == sum(p.numel() for p in adapters(model).values())
    assert workspace_of(learner_of(copy.deepcopy(model))) is None
    odd = build_model(replace(CONFIG, ffn_size=41), device="cpu", seed=0)
    add_lora(odd, LoraConfig(rank=1), seed=0)  # half precision would begin between two multiples of 16 bytes
    assert joined(list(adapters(odd).values())) is None
    spread = build_model(CONFIG, device="cpu", seed=0)
    add_lora(spread, LoraConfig(rank=4), seed=0, cast=False)
    assert joined(list(adapters(spread).values())) is None


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_adamw_on_one_piece_equals_torchs_on_many(monkeypatch: pytest.MonkeyPatch) -> None:
    like = [torch.empty(3, 8), torch.empty(5, 7), torch.empty(1)]
    start = torch.randn(60)
    ours = [nn.Parameter(piece) for piece in pieces(start.clone(), like)]
    theirs = [nn.Parameter(piece.clone()) for piece in pieces(start, like)]
    model = nn.ParameterList(ours)
    (optimizer,) = make_optimizers(model, settings(eps=1e-6))
    assert isinstance(optimizer, AdamW)
    reference = torch.optim.AdamW(
        [{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.0}],
        **{name: optimizer.defaults[name] for name in ("lr", "betas", "eps")}, weight_decay=0.1, foreach=True,
    )  # fmt: skip
    fused, sizes = torch._fused_adamw_, []

    def noted(parameters: list[Tensor], *given: Any, **named: Any) -> None:
        sizes.append([p.numel() for p in parameters])
        fused(parameters, *given, **named)

    monkeypatch.setattr(torch, "_fused_adamw_", noted)
    for _ in range(10):
        gradient = torch.randn(60)
        for p, other, piece in zip(ours, theirs, pieces(gradient, like), strict=True):
            p.grad, other.grad = piece, piece.clone()
        optimizer.step()
        reference.step()
    assert sizes == [[59], [1]] * 10
    for p, other in zip(ours, theirs, strict=True):
        assert_close(p, other)
        for slot in ("step", "exp_avg", "exp_avg_sq"):
            assert_close(optimizer.state[p][slot], reference.state[other][slot].to(torch.float32), what=slot)


# ---- updates ----


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_updates_in_one_piece_equal_those_layer_by_layer() -> None:
    apart, together = model_of("lora"), model_of("lora")
    expected, found = finetune(apart, Eager), finetune(together, InOnePiece)
    assert len(found.lines) == 8
    for line, other in zip(found.lines, expected.lines, strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-9)
    for name, p in kept(together).items():
        assert_close(p, kept(apart)[name], what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_autograd_s_to_the_last_bit(dtype: torch.dtype) -> None:
    model = build_model(CONFIG, device="cpu", seed=0)
    model.compute_dtype = dtype
    add_lora(model, LoraConfig(rank=4, alpha=8, targets=("q", "v", "o", "up", "down")), seed=0)
    for p in adapters(model).values():
        torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    tokens_1T, targets_1A, packing = pack_row(examples(), ALONE.device)
    expected = torch.autograd.grad(
        model(tokens_1T, targets_1A, packing=packing), list(adapters(model).values())
    )
    workspace = made(learner_of(model))
    for _ in range(2):  # and nothing stays of the first
        with workspace.in_use():
            model(tokens_1T, targets_1A, packing=packing).backward()
            workspace.take_gradients()
        assert joined([p.grad for p in adapters(model).values()]) is not None
        for (name, p), gradient in zip(adapters(model).items(), expected, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, gradient), name
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("before", [Eager, InOnePiece])
def test_a_stopped_run_resumes_to_the_same_bits(before: type[Eager], tmp_path: Path) -> None:
    """Whichever way wrote the checkpoint: it is the same one."""

    class Switching(InOnePiece):
        def take(self, batch: ExampleBatch, **given: float) -> Update:
            return (before if batch.position <= 5 else InOnePiece).take(self, batch, **given)

    unbroken, again = model_of("lora"), model_of("lora")
    whole = finetune(unbroken, Switching)
    with RunFolder(tmp_path) as folder:
        finetune(model_of("lora"), before, folder, at=4)  # whose line comes after the fifth
        with patch.object(torch, "_fused_adamw_", side_effect=torch._fused_adamw_) as changed:
            rest = finetune(again, InOnePiece, folder)
    assert [len(call.args[0]) for call in changed.mock_calls] == [1, 1, 1], (
        "the moments were read into other memory"
    )
    assert [line["step"] for line in rest.lines] == [6, 7, 8]
    assert [line["loss"] for line in rest.lines] == [line["loss"] for line in whole.lines[5:]]
    assert joined(list(adapters(again).values())) is not None
    for name, p in kept(again).items():
        assert torch.equal(p, kept(unbroken)[name]), name


# ---- where it does not fit ----


def test_layers_are_on_their_own_where_one_piece_does_not_fit() -> None:
    model = model_of("lora")
    learner = learner_of(model)
    assert workspace_of(learner) is not None
    assert workspace_of(replace(learner, rule=type("Other", (BackPropagation,), {})())) is None
    model.blocks[1].recompute = "full"
    assert workspace_of(learner) is None
    assert workspace_of(learner_of(model_of("full"))) is None


def test_what_goes_wrong_inside_leaves_the_model_as_it_was() -> None:
    model = model_of("lora")
    workspace = made(learner_of(model))
    with workspace.in_use():
        assert all(layer.place is not None for layer in lora_layers(model).values())
    with pytest.raises(IndexError), workspace.in_use():
        model(torch.tensor([[CONFIG.vocab_size]]))
    assert all(layer.place is None for layer in lora_layers(model).values())


# ---- the second stream ----


class Stream:
    """Writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: int) -> None:
        self.log.append(f"{self.name} waits for product {event}")

    def record_event(self) -> int:
        self.events += 1
        return self.events


def with_second_stream(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What both streams are told."""
    log: list[str] = []
    first, second = Stream("first", log), Stream("second", log)
    monkeypatch.setattr(workspace, "stream", second)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: first)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(log.append(f"on {stream.name}")))
    return log


def test_what_the_second_stream_reads_is_kept_until_the_first_has_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workspace = made(learner_of(model_of("lora")))
    log = with_second_stream(workspace, monkeypatch)
    inputs = [torch.zeros(()) for _ in range(2 * HELD)]
    waited = 0
    for number, tensor in enumerate(inputs, start=1):
        log.clear()
        with workspace.beside(tensor):
            pass
        assert log[:2] == ["second waits for first", "on second"]
        for line in log[2:]:
            waited = int(line.removeprefix("first waits for product "))
        held = [read.data_ptr() for _, (read,) in workspace.read]
        assert held == [read.data_ptr() for read in inputs[waited:number]]
        assert len(held) < HELD
    log.clear()
    workspace.take_gradients()
    assert log == [f"first waits for product {2 * HELD}"]
    assert not workspace.read


def test_an_update_that_is_broken_off_leaves_no_work_on_the_second_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture ends with an error of its own, in place of the one that broke it off, if a stream has not come back."""
    workspace = made(learner_of(model_of("lora")))
    log = with_second_stream(workspace, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError), workspace.in_use():
        raise torch.OutOfMemoryError("before any product")
    assert log == []  # a stream that is not being captured must not be waited for in a capture
    with pytest.raises(torch.OutOfMemoryError), workspace.in_use(), workspace.beside(torch.zeros(())):
        raise torch.OutOfMemoryError("in a product")
    assert log[-1] == "first waits for product 1"
    assert not workspace.read


def test_nothing_of_autograd_s_graph_outlives_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take their gradients past autograd, whose leaves then have none. A leaf that was left from the warm-up, on a
    stream of its own, would be waited for at the end of a captured backward, which CUDA refuses (pytorch#189977)."""
    learner = learner_of(model_of("lora"))
    workspace, row = made(learner), pack_row(examples(), ALONE.device)
    with_second_stream(workspace, monkeypatch)
    gc.collect()
    gc.disable()
    try:
        with workspace.in_use():
            update(
                replace(learner, before_update=workspace.take_gradients),
                [learner.rule.learn(learner.model, Lesson(*row))],
                targets=10.0,
            )
        assert not [node for node in gc.get_objects() if type(node).__name__ == "_AdaptedBackward"]
    finally:
        gc.enable()


def test_a_captured_update_that_nothing_refers_to_is_freed_at_once() -> None:
    """With its graphs' memory, which a smaller pass or an engine needs next; a cycle would wait for the collector."""
    data, learner = examples(), learner_of(model_of("lora"))
    objective = Packed([data], pass_size=8, batch_size=8, context_length=CONFIG.context_length, static=True)
    executor = Captured(learner, objective, event=lambda kind, **facts: None)
    executor.workspace = made(executor.learner)
    gone = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert gone() is None
    finally:
        gc.enable()
