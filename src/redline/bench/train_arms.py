"""The arms of `redline bench train`, each a function that yields one row in a separate process.

`loop`   the real training loop (`Trainer`, with loader, clipping, logging and instruments). Taking turns with it in
         the same process, on the same compiled model: the loop without instruments, and the bare step (one batch on
         the GPU, no loader, no record).
`plain`  what plain PyTorch gives: the same model under autocast, compiled whole, with torch's choice of attention and
         its cross entropy.
`hf`     Hugging Face's Trainer on its own model of the same shape, with the same data, batch, passes and optimiser.

A block of steps is timed between two synchronisations.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redline.bench import theirs
from redline.bench.results import BenchRow, spread
from redline.config.load import from_toml
from redline.config.recipe import Recipe
from redline.data.loader import Batch
from redline.data.shards import TokenDataset
from redline.errors import need
from redline.measure.child import cuda_peaks, synchronize, timed
from redline.measure.training import TrainingSubject
from redline.measure.turns import take_turns
from redline.plan.plan import Plan, from_json
from redline.pretrain import open_corpus
from redline.train.execution import build
from redline.train.instruments import Work
from redline.train.objective import Eager, Sequences
from redline.train.optimizer import make_optimizers
from redline.train.process import Process, join
from redline.train.step import Learner, Update


def _given(setting: dict[str, Any]) -> tuple[Recipe, Plan]:
    return from_toml(setting["recipe"], where="bench"), from_json(setting["plan"], where="bench")


# ---- Redline's own loop ----


def loop(setting: dict[str, Any]) -> Iterator[BenchRow]:
    (recipe, plan), started_s = _given(setting), time.perf_counter()
    subject = TrainingSubject(setting)
    trainer = subject.trainer
    seeing, blind, device = trainer.instruments, _Blind(), trainer.process.device
    first = trainer.source.next()
    inputs, targets = (t.to(device) for t in (first.inputs_BT, first.targets_BT))
    batch = replace(first, inputs_BT=inputs, targets_BT=targets)

    def turn_blind() -> None:
        trainer.instruments = blind  # type: ignore[assignment]
        trainer.turn()
        trainer.instruments = seeing

    def bare_step() -> None:
        trainer.executor.take(batch, targets=float(recipe.tokens_per_step), lr_factor=1.0)

    trainer.turn()
    synchronize()
    first_step_s = time.perf_counter() - started_s
    arms = {
        # the last line of a block is written while its clock still runs
        "loop": _Steps(setting, trainer.turn, trainer.drain),
        "loop_without_instruments": _Steps(setting, turn_blind),
        "bare": _Steps(setting, bare_step),
    }
    yield _row(_speeds(arms, recipe, setting), first_step_s) | {
        "predicted_bytes": plan.prediction.memory_bytes,
        "data_wait_s_per_step": trainer.waited_s / max(1, trainer.progress.step),
        "loss": trainer.last_line.get("loss"),
    }
    subject.close()


class _Blind:
    """Instruments that measure nothing."""

    def begin(self) -> None:
        pass

    def mark(self, phase: str) -> None:
        pass

    def push(self, facts: dict[str, Any], update: Update, work: Work) -> None:
        pass

    def ready(self) -> list[dict[str, Any]]:
        return []


# ---- what plain PyTorch gives ----


def plain(setting: dict[str, Any]) -> Iterator[BenchRow]:
    (recipe, plan), started_s = _given(setting), time.perf_counter()
    with join(plan.hardware.kind) as process:
        step = _plain_step(recipe, plan, process)
        step()
        synchronize()
        first_step_s = time.perf_counter() - started_s
        speeds = _speeds({"plain": _Steps(setting, step)}, recipe, setting)
        yield _row(speeds, first_step_s)


def _plain_step(recipe: Recipe, plan: Plan, process: Process) -> Callable[[], object]:
    eager = replace(plan, precision="fp32", compile="off", attention="auto", cross_entropy="torch")
    model, device = build(recipe, eager, process), process.device
    forward = torch.compile(model) if plan.compile != "off" else model
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")

    def autocast_forward(*args: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=plan.precision != "fp32"):
            return forward(*args)

    learner = Learner(model, make_optimizers(model, recipe.train), process, recipe.train.clip_norm)
    learner.model = _Called(model, autocast_forward)  # type: ignore[assignment]
    shape, vocab = (recipe.train.batch_size, recipe.data.seq_len), recipe.model.vocab_size
    inputs, targets = (torch.randint(0, vocab, shape, device=device) for _ in range(2))
    executor = Eager(learner, Sequences(pass_size=plan.micro_batch, share=recipe.train.batch_size))
    batch, tokens = Batch(inputs, targets, {}), float(recipe.tokens_per_step)
    return lambda: executor.take(batch, targets=tokens, lr_factor=1.0)


class _Called:
    """A model whose forward is another function."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        self.parameters, self._forward = model.parameters, forward

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self._forward(*args)


# ---- Hugging Face's Trainer ----


def hf(setting: dict[str, Any]) -> Iterator[BenchRow]:
    (recipe, plan), per_block = _given(setting), setting["steps_per_block"]
    # the first block is warm-up too
    clock = theirs.clock(warm_up=1 + per_block, per_block=per_block)
    with join(plan.hardware.kind) as process, tempfile.TemporaryDirectory() as scratch:
        corpus = open_corpus(recipe, Path(scratch), process, None)
        assert isinstance(corpus.train, TokenDataset)
        steps, cuda = 1 + (setting["blocks"] + 1) * per_block, process.device.type == "cuda"
        arguments = theirs.arguments(
            scratch,
            per_device_train_batch_size=plan.micro_batch,
            gradient_accumulation_steps=plan.accumulation,
            max_steps=steps,
            learning_rate=recipe.train.lr,
            weight_decay=recipe.train.weight_decay,
            max_grad_norm=recipe.train.clip_norm or 0.0,
            bf16=plan.precision in ("bf16", "fp8"),
            tf32=cuda,
            torch_compile=plan.compile != "off",
            optim="adamw_torch_fused",
            dataloader_num_workers=4 if cuda else 0,
        )
        need("transformers", extra="hf").Trainer(
            model=theirs.model_of(recipe.model, device=process.device),
            args=arguments,
            train_dataset=_Windows(corpus.train, recipe, steps),
            callbacks=[clock],
        ).train()
    steps_s = [block_s / per_block for block_s in clock.blocks_s]
    yield _row({"hf": _speed(steps_s, recipe, setting)}, clock.first_step_s)


class _Windows(torch.utils.data.Dataset):
    """The training windows as Hugging Face's Trainer expects them."""

    def __init__(self, dataset: TokenDataset, recipe: Recipe, steps: int) -> None:
        self.dataset, self.seq_len = dataset, recipe.data.seq_len
        self.length = steps * recipe.train.batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        place = np.array([index % self.dataset.windows(self.seq_len)])
        tokens = torch.from_numpy(self.dataset.read_windows(place, self.seq_len)[0][:-1].copy())
        return {"input_ids": tokens, "labels": tokens}  # its models shift the labels themselves


# ---- timing ----


class _Steps:
    """Blocks of steps of this process, for `take_turns`."""

    failed = None

    def __init__(
        self, setting: dict[str, Any], step: Callable[[], object], drain: Callable[[], None] = lambda: None
    ) -> None:
        self.steps, self.step, self.drain = setting["steps_per_block"], step, drain
        self.blocks_s: list[float] = []

    def block(self) -> None:
        self.drain()
        self.blocks_s.append(timed(self.steps, self.step, self.drain) / self.steps)

    def forget(self) -> None:
        self.blocks_s = []


def _speeds(arms: dict[str, _Steps], recipe: Recipe, setting: dict[str, Any]) -> dict[str, BenchRow]:
    take_turns([*arms.values()], setting["blocks"], block_s=0.0, clock=time.monotonic, when_noisy=1)
    return {name: _speed(arm.blocks_s, recipe, setting) for name, arm in arms.items()}


def _speed(steps_s: Sequence[float], recipe: Recipe, setting: dict[str, Any]) -> BenchRow:
    rates = spread([recipe.tokens_per_step / step_s for step_s in steps_s], "tokens_per_s")
    step_s = recipe.tokens_per_step / rates["tokens_per_s"]
    return {**rates, "step_s": step_s, "blocks": len(steps_s), "steps_per_block": setting["steps_per_block"]}


def _row(speeds: dict[str, BenchRow], first_step_s: float) -> BenchRow:
    cuda = torch.cuda.is_available()
    memory_bytes = cuda_peaks()["allocated_bytes"] if cuda else None
    return {"speeds": speeds, "first_step_s": first_step_s, "memory_bytes": memory_bytes}
