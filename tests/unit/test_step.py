"""One update: the same gradient from any split of a batch, torch's own clipping, fp16's loss scale, and the
instruments' lines."""

import copy
import gc
import math
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from precision import assert_close
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from redline.config.load import load_recipe
from redline.config.recipe import IGNORED, ModelConfig, TrainConfig
from redline.data.candidates import draw
from redline.data.loader import Batch
from redline.errors import CheckpointError, TrainingError
from redline.model import kernels, transformer
from redline.model.attention import softmax
from redline.model.transformer import Norm, Transformer, build_model, eager_on_gpu
from redline.plan.hardware import hardware_as
from redline.plan.plan import Hardware
from redline.plan.planner import make_plan
from redline.record.metrics import METRICS
from redline.train.execution import equip
from redline.train.graph import Captured
from redline.train.instruments import Instruments, Work, training_rates
from redline.train.loop import Trainer
from redline.train.objective import Eager, Job, Sequences
from redline.train.open_run import OpenRun
from redline.train.optimizer import Muon, make_optimizers, state_tensors, warm_momentum
from redline.train.process import Process
from redline.train.step import Learner, LossScale, Update

CONFIG = ModelConfig(vocab_size=61, num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, context_length=12)
ALONE = Process(0, 1, torch.device("cpu"))
BATCH = 8


def train(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"batch_size": BATCH, "steps": 10, "lr": 1e-2, "weight_decay": 0.0, **changes})


def learner_of(
    model: Transformer, *, clip_norm: float = 0.0, scale: LossScale | None = None, **changes: Any
) -> Learner:
    return Learner(model, make_optimizers(model, train(**changes)), ALONE, clip_norm, scale)


def take_step(
    learner: Learner,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    *,
    micro_batch: int,
    tokens: float,
    lr_factor: float,
) -> Update:
    executor = Eager(learner, Sequences(pass_size=micro_batch, share=len(inputs_BT)))
    return executor.take(Batch(inputs_BT, targets_BT, {}), targets=tokens, lr_factor=lr_factor)


def batch(ignored: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets; `uneven` leaves the rows 0 to 12 of their 12 targets, so that no two micro-batches
    count alike."""
    generator = torch.Generator().manual_seed(5)
    inputs_BT, targets_BT = (torch.randint(61, (BATCH, 12), generator=generator) for _ in range(2))
    if ignored == "uneven":
        for row, kept in enumerate([12, 1, 0, 7, 12, 3, 1, 5]):
            targets_BT[row, kept:] = IGNORED
    return inputs_BT, targets_BT


def plain_gradients(
    model: Transformer, inputs_BT: Tensor, targets_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole batch in one forward, the mean that torch's cross entropy takes, one backward."""
    model = copy.deepcopy(model)
    loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("ignored", ["none", "uneven"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8, 3])
def test_any_split_gives_the_gradient_of_the_whole_batch(micro_batch, ignored):
    model = build_model(CONFIG, device="cpu", seed=0)
    inputs_BT, targets_BT = batch(ignored)
    expected_loss, expected = plain_gradients(model, inputs_BT, targets_BT)
    learner, seen = learner_of(model), {}
    learner.before_update = lambda: seen.update(
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    )
    tokens = float((targets_BT != IGNORED).sum())
    update = take_step(learner, inputs_BT, targets_BT, micro_batch=micro_batch, tokens=tokens, lr_factor=1.0)
    assert_close(update.numbers["loss"], expected_loss)
    assert_close(update.numbers["grad_norm"], torch.stack([g.norm() for g in expected.values()]).norm())
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(seen[name], gradient, what=name)
    assert all(p.grad is None for p in model.parameters()), "the next update starts from nothing"


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_any_split_gives_the_same_weights_after_several_updates(optimizer):
    results = []
    for micro_batch in (8, 2):
        model = build_model(CONFIG, device="cpu", seed=0)
        learner = learner_of(model, clip_norm=1.0, optimizer=optimizer)
        inputs_BT, targets_BT = batch("uneven")
        for _ in range(3):
            take_step(learner, inputs_BT, targets_BT, micro_batch=micro_batch, tokens=41.0, lr_factor=0.5)
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, weights in results[0].items():
        assert_close(results[1][name], weights, what=name)
    assert int((batch("uneven")[1] != IGNORED).sum()) == 41


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("clip_norm", [0.05, 1e3, 0.0])
def test_clipping_equals_torchs(clip_norm):
    model = build_model(CONFIG, device="cpu", seed=0)
    reference = copy.deepcopy(model)
    inputs_BT, targets_BT = batch("none")
    update = take_step(
        learner_of(model, clip_norm=clip_norm),
        inputs_BT,
        targets_BT,
        micro_batch=4,
        tokens=96.0,
        lr_factor=1.0,
    )

    (optimizer,) = make_optimizers(reference, train())
    (reference(inputs_BT, targets_BT) / 96.0).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm or float("inf"))
    optimizer.step()
    assert_close(update.numbers["grad_norm"], norm)
    assert float(norm) > 0.05, "the smallest bound must bite"
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p, expected, what=name)


# ---- fp16 ----


@pytest.mark.numerics
@pytest.mark.usefixtures("double")
def test_the_loss_scale_does_not_change_the_update():
    plain, scaled = (build_model(CONFIG, device="cpu", seed=0) for _ in range(2))
    inputs_BT, targets_BT = batch("none")
    for model, scale in ((plain, None), (scaled, LossScale(value=1024.0))):
        take_step(
            learner_of(model, clip_norm=1.0, scale=scale),
            inputs_BT,
            targets_BT,
            micro_batch=4,
            tokens=96.0,
            lr_factor=1.0,
        )
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(("board", "better"), [("v100-32g", "fp32"), ("h100-80g", "bf16")])
def test_a_loss_lost_in_fp16_is_told_what_this_gpu_has(board, better):
    """A V100 was told to take bf16, which its next plan refuses."""
    plan = make_plan(load_recipe("gpt2-124m", ["plan.precision=fp16"]), hardware_as(board, 8))
    trainer = SimpleNamespace(train=train(), plan=plan, checkpoints=None)
    assert f" or plan.precision={better}, or look" in Trainer._diverged(trainer, "loss", math.nan, 3)


def test_a_real_fp16_overflow_skips_the_update_and_halves_the_scale():
    """A scale far too large: gradients in fp16 pass 65,504, become infinite, and nothing may move; halved
    often enough, it trains."""
    model = build_model(CONFIG, device="cpu", seed=0)
    model.compute_dtype = torch.float16
    scale = LossScale(value=2.0**30)
    learner = learner_of(model, clip_norm=1.0, scale=scale)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    inputs_BT, targets_BT = batch("none")
    update = take_step(learner, inputs_BT, targets_BT, micro_batch=4, tokens=96.0, lr_factor=1.0)
    assert update.skipped
    assert not bool(update.numbers["grad_norm"].isfinite())
    assert bool(update.numbers["loss"].isfinite()), "the forward itself is sound"
    assert scale.value == 2.0**29
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    state = [slot for o in learner.optimizers for slots in o.state.values() for slot in slots.values()]
    assert all(not slot.any() for slot in state), "the optimiser did not see the overflow"
    for _ in range(30):
        update = take_step(learner, inputs_BT, targets_BT, micro_batch=4, tokens=96.0, lr_factor=1.0)
        if not update.skipped:
            break
    assert not update.skipped
    assert 1.0 < scale.value < 2.0**29
    assert any(not torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_loss_scale_doubles_after_its_patience_and_never_falls_below_one():
    scale = LossScale(value=8.0, patience=3)
    for finite, expected in [
        (True, 8),
        (True, 8),
        (True, 16),
        (True, 16),
        (False, 8),
        (True, 8),
        (True, 8),
        (True, 16),
    ]:
        scale.update(finite)
        assert scale.value == expected
    for _ in range(10):
        scale.update(False)
    assert scale.value == 1.0


# ---- instruments ----

CPU = Hardware(
    title="a laptop", kind="cpu", memory_bytes=16 * 2**30, compute_capability=(), cores=2,
    peak_tflops={"fp32": 2.0}, measured_tflops={"fp32": 0.5}, bandwidth_bytes_per_s=20e9, source="by hand",
)  # fmt: skip


def test_instrument_lines_come_in_order_and_complete_and_their_numbers_agree(clock):
    recipe = load_recipe("nano")
    plan = make_plan(recipe, CPU)
    instruments = Instruments(torch.device("cpu"), training_rates(plan))
    lines = []
    for step in range(1, 6):
        time.sleep(0.002)
        numbers = {"loss": torch.tensor(float(step)), "grad_norm": torch.tensor(2.0 * step)}
        instruments.push({"step": step, "lr": 0.1 * step}, Update(numbers), Work(recipe.tokens_per_step, 16))
        if step == 3:
            lines += instruments.ready()
    lines += instruments.ready(drain=True)
    assert [line["step_s"] for line in lines] == pytest.approx([0.002] * 5, abs=1e-4)
    assert instruments.ready(drain=True) == []
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in lines] == [
        (s, float(s), 2.0 * s) for s in range(1, 6)
    ]
    assert [line["lr"] for line in lines] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    for line in lines:
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(recipe.tokens_per_step)
        flops = plan.prediction.flops_per_token * recipe.tokens_per_step
        assert line["mfu"] == pytest.approx(flops / line["step_s"] / 2.0e12)
        assert line["ceiling_share"] == pytest.approx(4 * line["mfu"])
        assert line["memory_bytes"] > 10 * 2**20
        assert set(line) <= set(METRICS), "every name is documented with its unit"


def test_a_restart_leaves_the_pause_out_of_the_next_step(clock):
    recipe = load_recipe("nano")
    instruments = Instruments(torch.device("cpu"), training_rates(make_plan(recipe, CPU)))
    time.sleep(0.2)
    instruments.restart()
    instruments.push({"step": 1}, Update({"loss": torch.tensor(1.0)}), Work(1, 1))
    with pytest.raises(AssertionError, match="in flight"):
        instruments.restart()
    assert instruments.ready()[0]["step_s"] < 1e-4


# ---- a captured update ----


class Replayed:
    """Stands for a CUDA graph: runs what was captured again, with the tensors that optimisers read then."""

    def __init__(self, executor: Captured, shape: Any) -> None:
        self.executor, self.shape = executor, shape
        self.momenta = [group.get("momentum") for group in executor.groups]
        self.outcome = Update({"loss": torch.zeros(()), "grad_norm": torch.zeros(())})

    def pool(self) -> None:
        pass

    def replay(self) -> None:
        told = [group.get("momentum") for group in self.executor.groups]
        self._momenta(self.momenta)
        for name, value in self.executor._update(self.executor.learner, self.shape).numbers.items():
            self.outcome.numbers[name].copy_(value)
        self._momenta(told)

    def _momenta(self, values: list[Any]) -> None:
        for group, value in zip(self.executor.groups, values, strict=True):
            if value is not None:
                group["momentum"] = value


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("micro_batch", [8, 2])
def test_a_captured_update_reads_what_the_eager_one_is_given(
    optimizer: str, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, targets, every group's learning rate, and a momentum that warms up, through the buffer of a replay; in several
    passes also the candidates of the softmax, and sequences that are cut at first."""

    def capture(executor: Captured, shape: Any, pool: Any) -> tuple[Replayed, Update]:
        assert not executor.graphs, "those of another length would keep their memory"
        graph = Replayed(executor, shape)
        return graph, graph.outcome

    monkeypatch.setattr(Captured, "_capture", capture)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    how = {"optimizer": optimizer, "muon_warmup_steps": 3, "weight_decay": 0.1}
    eager, captured = (
        learner_of(build_model(CONFIG, device="cpu", seed=3), clip_norm=1.0, **how) for _ in range(2)
    )
    objective, events = Sequences(pass_size=micro_batch, share=BATCH), []
    plain = Eager(eager, objective)
    executor = Captured(
        captured, objective, lambda kind, **facts: events.append((kind, facts["rows_tokens"]))
    )
    inputs_BT, targets_BT = batch("uneven")
    words = draw(targets_BT[targets_BT != IGNORED].numpy(), size=60, vocab_size=61, seed=0)
    some = torch.from_numpy(words) if micro_batch < BATCH else None
    lengths = [3, 12, 12] if micro_batch < BATCH else [12] * 3
    for step, (factor, length) in enumerate(zip([1.0, 0.5, 0.25], lengths, strict=True), start=1):
        ours, theirs = (state_tensors(learner.model, learner.optimizers) for learner in (captured, eager))
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])
        told = []
        for learner, one in ((eager, plain), (captured, executor)):
            warm_momentum(learner.optimizers, train(**how), step)
            part = Batch(inputs_BT.reshape(-1, length), targets_BT.reshape(-1, length), {}, some)
            told.append(one.take(part, targets=64.0, lr_factor=factor).numbers)
        assert len(list(objective.passes(eager, part))) == BATCH // micro_batch
        assert told[0].keys() == told[1].keys()
        for name in told[0]:
            assert torch.equal(told[0][name], told[1][name]), name
        for name, tensor in state_tensors(captured.model, captured.optimizers).items():
            # Muon rounds to bf16, which may turn one bit of fp32 in a rate into 2^-8 of an element; its lr is 0.02
            atol = 0.02 * 2**-6 if name.startswith("model.blocks") and optimizer == "muon" else 1e-7
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=atol, msg=name)
        inputs_BT, targets_BT = inputs_BT.roll(1, 0), targets_BT.roll(1, 0)
    assert events == [("captured", [micro_batch * 12])] * len(set(lengths)), "one for each length"
    assert all(isinstance(group.get("momentum", 0.0), float) for group in executor.groups)


def test_a_capture_waits_for_the_copy_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come between updates, and its warm-up writes to the weights."""
    order: list[str] = []

    def capture(executor: Captured, shape: Any, pool: Any) -> tuple[Replayed, Update]:
        order.append("captured")
        graph = Replayed(executor, shape)
        return graph, graph.outcome

    monkeypatch.setattr(Captured, "_capture", capture)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    learner = learner_of(build_model(CONFIG, device="cpu", seed=3))
    learner.before_update = lambda: order.append("waited")
    executor = Captured(learner, Sequences(pass_size=BATCH, share=BATCH), lambda kind, **facts: None)
    executor.take(Batch(*batch("uneven"), {}), targets=64.0, lr_factor=1.0)
    assert order == ["waited", "captured"]


OUT_OF_MEMORY = {
    "a pass": torch.OutOfMemoryError("injected"),
    "the optimiser": TrainingError("out of memory while the weights were being changed"),
    "the driver": torch.AcceleratorError("CUDA error: out of memory"),
    "a pass, hidden by the capture's end": torch.AcceleratorError("CUDA error: previous error"),
}


def out_of_memory(where: str) -> Exception:
    """Not made where it is raised: a frame that holds its own error is a cycle."""
    error, lack = copy.copy(OUT_OF_MEMORY[where]), torch.OutOfMemoryError("injected")
    error.__cause__ = lack if where == "the optimiser" else None
    error.__context__ = lack if where == "a pass, hidden by the capture's end" else None
    return error


@pytest.mark.parametrize("where", OUT_OF_MEMORY)
def test_memory_that_runs_out_in_a_capture_halves_the_passes(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lacked it, and what the failed capture held is free before the next one: a cycle would keep it."""
    held: list[weakref.ref[Tensor]] = []

    def capture(executor: Captured, shape: Any, pool: Any) -> tuple[Replayed, Update]:
        assert not [one for one in held if one() is not None], "the last try's memory"
        if shape.rows > 2:
            activations = torch.zeros(1)
            held.append(weakref.ref(activations))
            raise out_of_memory(where)
        graph = Replayed(executor, shape)
        return graph, graph.outcome

    monkeypatch.setattr(Captured, "_capture", capture)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    gc.collect()
    gc.disable()
    try:
        (eager, _), (captured, events) = trained(graph=False), trained(graph=True)
    finally:
        gc.enable()
    assert len(held) == 2
    assert [facts["micro_batch"] for kind, facts in events if kind == "out_of_memory"] == [4, 2]
    assert captured == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TrainingError("no"), "^no$"),
        (torch.AcceleratorError("CUDA error: not permitted\nmore"), r"not permitted\): plan.graph=false"),
    ],
)
def test_another_failure_of_a_capture_is_not_taken_for_a_lack_of_memory(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Captured, "_capture", capture)
    with pytest.raises(TrainingError, match=said):
        trained(graph=True)


def trained(*, graph: bool) -> tuple[list[float], list[tuple[str, dict[str, Any]]]]:
    """Losses of three updates in the real loop, one batch over and over, and its events."""
    seen = SimpleNamespace(lines=[], events=[], close=lambda: None)
    seen.metrics, seen.event = seen.lines.append, lambda kind, facts: seen.events.append((kind, facts))
    one = Batch(*batch("uneven"), {})
    recipe = load_recipe("nano", [f"train.batch_size={BATCH}", "train.steps=3", "train.warmup_steps=0"])
    job = Job(
        recipe=recipe,
        plan=replace(make_plan(recipe, CPU), graph=graph),
        steps=3,
        model=build_model(CONFIG, device="cpu", seed=3),
        source=lambda position, done: SimpleNamespace(waited_s=0.0, next=lambda: one, close=lambda: None),
        objective=Sequences(pass_size=BATCH, share=BATCH),
        data_fingerprint="",
        opened=OpenRun(None, None, [seen]),
    )
    Trainer(job, ALONE).run()
    return [line["loss"] for line in seen.lines], seen.events


@pytest.mark.parametrize("candidates", [None, torch.zeros(41, dtype=torch.int32)])
def test_a_blank_pass_counts_for_nothing(candidates: Tensor | None) -> None:
    objective = Sequences(pass_size=2, share=BATCH)
    (shape,) = objective.shapes_from(Batch(*batch("none"), {}, candidates))
    learner = learner_of(build_model(CONFIG, device="cpu", seed=3))
    blank = torch.from_numpy(objective.blank(shape))
    assert objective.row_pass(learner, blank, shape).run(1.0, lambda phase: None)["loss"] == 0.0
    assert all(not p.grad.any() for p in learner.model.parameters() if p.grad is not None)


def test_a_checkpoint_of_another_version_says_how_to_go_on(monkeypatch):
    """A recipe that gained a field is another one to a checkpoint made before."""
    monkeypatch.setattr("redline.train.loop.load", lambda *_: {"identity": "before"})
    trainer = SimpleNamespace(
        checkpoints=SimpleNamespace(latest=lambda: 5, folder=Path("runs/nano/checkpoints")),
        tensors={},
        job=SimpleNamespace(recipe=load_recipe("nano")),
        opened=SimpleNamespace(run=Path("runs/nano")),
    )
    with pytest.raises(CheckpointError, match=r"step-00000005 is from .* --fork runs/nano --run NEW"):
        Trainer._resume(trainer)


# ---- Muon's kernels ----


class Called(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def test_muon_takes_up_the_gradients_of_all_matrices_of_one_shape_together() -> None:
    """Also after a checkpoint was loaded into its state. Hundreds of small kernels leave a GPU idle."""
    learner = learner_of(build_model(CONFIG, device="cpu", seed=0), optimizer="muon", muon_normalize=True)
    _, muon = learner.optimizers
    for tensor in state_tensors(learner.model, [muon]).values():
        tensor.copy_(torch.rand_like(tensor))
    for p in learner.model.parameters():
        p.grad = torch.rand_like(p)
    with Called() as called:
        muon.step()
    kinds = 4  # queries, keys and values; what attention puts out; both matrices of SwiGLU
    assert (called.times["lerp_"], called.times["lerp"]) == (2 * kinds, kinds), (
        "averages; Nesterov's step ahead"
    )


def test_muon_counts_the_sizes_of_rows_in_fp32() -> None:
    """Its matrices are in bf16. A sum of 16 squares, their root, its square and three products round 20 times."""
    update = torch.rand(1, 48, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = torch.nn.Parameter(torch.zeros(48, 16))
    muon, p.grad = Muon([p], lr=1.0, weight_decay=0.0, normalize=True), torch.ones(48, 16)
    with patch("redline.train.optimizer.orthogonalize", return_value=update):
        muon.step()
    expected = 0.05 * (48 / 16) * update[0].double().square().mean(1)
    torch.testing.assert_close(
        muon.state[p]["row_mean_square"].double(), expected, rtol=20 * 2**-24, atol=0.0
    )


# ---- whose kernels run ----


def test_blocks_run_whole_where_the_plan_hooks_onto_them() -> None:
    """A compiler, recomputation and FSDP stand around a block: they would be left out, and nothing would say so."""
    pins = ["plan.compile=off", "plan.recompute=none"]
    plan = make_plan(load_recipe("nano", pins), hardware_as("h200-141g", 16))
    others: list[dict[str, Any]] = [{"recompute": "selective"}, {"recompute": "full"}, {"world_size": 2}]
    for change, apart in (({}, True), *((change, False) for change in [*others, {"compile": "default"}])):
        model = build_model(CONFIG, device="cpu", seed=0)
        equip(model, replace(plan, **change))
        assert model.apart == apart, change


def test_our_kernels_stand_in_for_torchs_in_half_precision_where_nothing_fuses_those() -> None:
    """In fp32 too if there is no gradient, as in generation; not in the plain PyTorch that bench measures under autocast."""

    def stand_in(dtype: torch.dtype, *, is_cuda: bool = True) -> bool:
        x: Any = SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
        return eager_on_gpu(x)

    assert stand_in(torch.bfloat16)
    assert not stand_in(torch.bfloat16, is_cuda=False)
    assert not stand_in(torch.float32)
    with torch.no_grad():
        assert stand_in(torch.float32)
        assert not stand_in(torch.float64)
    for what in ("torch.is_autocast_enabled", "torch.compiler.is_compiling"):
        with patch(what, return_value=True):
            assert not stand_in(torch.bfloat16)


def test_only_generation_may_overwrite_what_a_norm_adds_to() -> None:
    """Validation computes with the training's model, and generation with one of its own."""
    norm, x = Norm(4, CONFIG), torch.ones(2, 4)
    torch.nn.init.ones_(norm.weight)
    found = []
    with (
        patch.object(transformer, "eager_on_gpu", return_value=True),
        patch.object(kernels, "sum_rms_norm", return_value="both ways"),
        patch.object(kernels, "add_rms_norm", return_value="overwritten"),
    ):
        found.append(norm.add(x, x))
        for norm.fused in (False, True):
            with torch.no_grad():
                found.append(norm.add(x, x))
    training, validation, generation = found
    assert training == "both ways"
    assert torch.equal(validation[0], 2 * x)
    assert generation == (x, "overwritten")


def test_the_kernel_of_the_heads_computes_a_batch_within_the_context_on_a_gpu() -> None:
    """Its angles would begin again behind the context."""
    model = build_model(replace(CONFIG, qk_norm=True, num_kv_heads=1), device="cpu", seed=0)
    attn, (inputs_BT, _), times = model.blocks[0].attn, batch("none"), Counter[str]()
    qkv_BTHC = attn.qkv(model.embed(inputs_BT)).unflatten(-1, (4, 8))
    rope = model.rope_cos, model.rope_sin

    def by_torch(attn: Any, qkv_NHC: Tensor, rope: Any) -> tuple[Tensor, ...]:
        times["kernel"] += 1
        q, k, v = attn.split(qkv_NHC.unflatten(0, (-1, len(rope[0]))))
        return tuple(x.flatten(0, 1) for x in (softmax.rotate(q, rope), softmax.rotate(k, rope), v))

    expected = softmax.attend(attn, qkv_BTHC, rope=rope)
    with patch.object(softmax, "by_kernel", by_torch):
        assert torch.equal(softmax.attend(attn, qkv_BTHC, rope=rope), expected)
        assert times["kernel"] == 1
        assert torch.equal(softmax.attend(attn, qkv_BTHC, rope=rope, copied=True), expected)
        with pytest.raises(RuntimeError, match="size of tensor"):
            softmax.attend(attn, torch.cat([qkv_BTHC, qkv_BTHC], dim=1), rope=rope)
        assert times["kernel"] == 1
    with patch.object(softmax.heads, "able", True):
        assert softmax.by_kernel(attn, qkv_BTHC.flatten(0, 1).bfloat16(), rope) is None
