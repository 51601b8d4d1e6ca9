"""The arms of `redline bench train`, each run in a process of its own: `python -m redline.bench.arms '{"arm":
"loop", ...}'`.

`loop`   the real training loop (turns of `Trainer`: loader, clipping, logging, instruments), and interleaved
         with it in the same
         process, on the same compiled model: the loop without instruments, and the bare step (one batch on the GPU, no loader, no record).
`plain`  what plain PyTorch gives: the same model under autocast, compiled whole, torch's own attention choice
         and cross entropy.
`hf`     Hugging Face's Trainer on its own model of the same shape, with the same data, batch, passes and
         optimiser.

A block of steps is timed between two synchronisations; a result is the median over blocks with the interval
of all of them (six blocks: 97 % confidence for the median). The last line printed is the result as JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from redline.config.load import from_toml
from redline.config.recipe import Recipe
from redline.data.loader import Batch
from redline.data.shards import TokenDataset
from redline.errors import need
from redline.measure.child import cuda_peaks, synchronize, timed
from redline.plan.plan import Plan, load
from redline.pretrain import job_of, open_corpus
from redline.record.run import RunFolder
from redline.train.execution import build, set_allocator
from redline.train.instruments import Work
from redline.train.loop import Trainer
from redline.train.objective import Eager, Sequences
from redline.train.open_run import OpenRun
from redline.train.optimizer import make_optimizers
from redline.train.process import Process, join
from redline.train.step import Learner, Update


@dataclass(frozen=True, kw_only=True)
class Task:
    """One arm on one recipe."""

    arm: str
    recipe: str
    """The recipe as TOML."""
    plan: str
    """Path of the plan."""
    blocks: int
    steps_per_block: int


def main(text: str) -> None:
    task = Task(**json.loads(text))
    recipe, plan = from_toml(task.recipe, where="bench"), load(Path(task.plan))
    set_allocator(plan)
    with join(plan.hardware.kind) as process:
        result = {"loop": _loop, "plain": _plain, "hf": _hf}[task.arm](task, recipe, plan, process)
    sys.stdout.write(json.dumps(result) + "\n")


# ---- Redline's own loop ----


def _loop(task: Task, recipe: Recipe, plan: Plan, process: Process) -> dict[str, Any]:
    started_s = time.perf_counter()
    endless = replace(recipe, train=replace(recipe.train, steps=10**9, eval_every=0, checkpoint_every=0))
    with tempfile.TemporaryDirectory() as run, RunFolder(Path(run)) as folder:
        corpus = open_corpus(recipe, Path(run), process, None)
        job = job_of(endless, plan, corpus, process, run=Path(run), opened=OpenRun(folder, (), None))
        trainer = Trainer(replace(job, validate=None, initial_weights=None), process)
        seeing, blind = trainer.instruments, _Blind()
        first = trainer.source.next()
        inputs, targets = (t.to(process.device) for t in (first.inputs_BT, first.targets_BT))
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
        arms = {"loop": trainer.turn, "loop_without_instruments": turn_blind, "bare": bare_step}
        # The last line of a block is written while its clock still runs, and timing begins afresh before the
        # next block.
        speeds = _interleave(arms, task, recipe, first={"loop": trainer.drain}, last={"loop": trainer.drain})
        trainer.close()
        return {
            "speeds": speeds,
            "first_step_s": first_step_s,
            "memory": _memory(process),
            "predicted_bytes": plan.prediction.memory_bytes,
            "data_wait_s_per_step": trainer.waited_s / max(1, trainer.progress.step),
            "loss": trainer.last_line.get("loss"),
        }


class _Blind:
    """Instruments that look at nothing."""

    def begin(self) -> None:
        pass

    def mark(self, phase: str) -> None:
        pass

    def push(self, facts: dict[str, Any], update: Update, work: Work) -> None:
        pass

    def ready(self) -> list[dict[str, Any]]:
        return []


# ---- what plain PyTorch gives ----


def _plain(task: Task, recipe: Recipe, plan: Plan, process: Process) -> dict[str, Any]:
    started_s = time.perf_counter()
    plain = replace(plan, precision="fp32", compile="off", attention="auto", cross_entropy="torch")
    model = build(recipe, plain, process)
    forward = torch.compile(model) if plan.compile != "off" else model
    if process.device.type == "cuda":
        torch.set_float32_matmul_precision("high")

    def autocast_forward(*args: torch.Tensor) -> torch.Tensor:
        with torch.autocast(process.device.type, dtype=torch.bfloat16, enabled=plan.precision != "fp32"):
            return forward(*args)

    learner = Learner(model, make_optimizers(model, recipe.train), process, recipe.train.clip_norm)
    learner.model = _Called(model, autocast_forward)  # type: ignore[assignment]
    shape = (recipe.train.batch_size, recipe.data.seq_len)
    inputs, targets = (
        torch.randint(0, recipe.model.vocab_size, shape, device=process.device) for _ in range(2)
    )

    executor = Eager(learner, Sequences(pass_size=plan.micro_batch, share=recipe.train.batch_size))
    batch = Batch(inputs, targets, {})

    def step() -> None:
        executor.take(batch, targets=float(recipe.tokens_per_step), lr_factor=1.0)

    step()
    synchronize()
    first_step_s = time.perf_counter() - started_s
    return {
        "speeds": _interleave({"plain": step}, task, recipe, {}, {}),
        "first_step_s": first_step_s,
        "memory": _memory(process),
    }


class _Called:
    """A model whose forward is another function."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        self.parameters, self._forward = model.parameters, forward

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self._forward(*args)


# ---- Hugging Face's Trainer ----


def _hf(task: Task, recipe: Recipe, plan: Plan, process: Process) -> dict[str, Any]:
    transformers = need("transformers", extra="hf")
    from redline.model.huggingface import config_json

    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        corpus = open_corpus(recipe, Path(scratch), process, None)
        assert isinstance(corpus.train, TokenDataset)
        (Path(scratch) / "config.json").write_text(json.dumps(config_json(recipe.model)), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(scratch)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        steps = 1 + task.blocks * task.steps_per_block + task.steps_per_block
        arguments = transformers.TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=plan.micro_batch,
            gradient_accumulation_steps=plan.accumulation,
            max_steps=steps,
            learning_rate=recipe.train.lr,
            weight_decay=recipe.train.weight_decay,
            max_grad_norm=recipe.train.clip_norm or 0.0,
            bf16=plan.precision in ("bf16", "fp8"),
            tf32=process.device.type == "cuda",
            torch_compile=plan.compile != "off",
            optim="adamw_torch_fused",
            dataloader_num_workers=4 if process.device.type == "cuda" else 0,
            logging_steps=task.steps_per_block,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=process.device.type == "cpu",
        )
        clock = _clock(transformers, task, started_s)
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=_Windows(corpus.train, recipe, steps),
            callbacks=[clock],
        )
        trainer.train()
    return {
        "speeds": {"hf": _summary(clock.blocks, recipe, task)},
        "first_step_s": clock.first_step_s,
        "memory": _memory(process),
    }


class _Windows(torch.utils.data.Dataset):
    """The training windows as Hugging Face's Trainer wants them."""

    def __init__(self, dataset: TokenDataset, recipe: Recipe, steps: int) -> None:
        self.dataset, self.seq_len = dataset, recipe.data.seq_len
        self.length = steps * recipe.train.batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.dataset.read_windows(np.array([index % self.dataset.windows(self.seq_len)]), self.seq_len)[
            0
        ]
        tokens = torch.from_numpy(row[:-1].copy())
        return {"input_ids": tokens, "labels": tokens}  # its models shift the labels themselves


def _clock(transformers: Any, task: Task, started_s: float) -> Any:
    class Clock(transformers.TrainerCallback):
        """Times blocks of steps, the first block left out as warm-up."""

        def __init__(self) -> None:
            self.blocks: list[float] = []
            self.first_step_s = 0.0
            self.last_s = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step = state.global_step
            if step == 1:
                synchronize()
                self.first_step_s = time.perf_counter() - started_s
            if step > 1 and (step - 1) % task.steps_per_block == 0:
                synchronize()
                now_s = time.perf_counter()
                if step - 1 > task.steps_per_block:
                    self.blocks.append(now_s - self.last_s)
                self.last_s = now_s

    return Clock()


# ---- timing ----


def _interleave(
    arms: dict[str, Callable[[], None]],
    task: Task,
    recipe: Recipe,
    first: dict[str, Callable[[], Any]],
    last: dict[str, Callable[[], Any]],
) -> dict[str, Any]:
    """Blocks of each arm in turn, so that a drift of the clocks falls on all of them; the first round is
    warm-up. `first` runs before an arm's block and `last` at its end, inside its time."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(task.blocks + 1):
        for name, step in arms.items():
            first.get(name, lambda: None)()
            block_s = timed(task.steps_per_block, step, last.get(name, lambda: None))
            if round_ > 0:
                times[name].append(block_s)
    return {name: _summary(seconds, recipe, task) for name, seconds in times.items()}


def _summary(block_s: list[float], recipe: Recipe, task: Task) -> dict[str, Any]:
    tokens = recipe.tokens_per_step * task.steps_per_block
    return {
        "tokens_per_s": tokens / median(block_s),
        "low": tokens / max(block_s),
        "high": tokens / min(block_s),
        "step_s": median(block_s) / task.steps_per_block,
        "blocks": len(block_s),
        "steps_per_block": task.steps_per_block,
    }


def _memory(process: Process) -> dict[str, int]:
    if process.device.type != "cuda":
        return {}
    peaks = cuda_peaks()
    return {"allocated_peak_bytes": peaks["allocated_bytes"], "reserved_peak_bytes": peaks["reserved_bytes"]}


if __name__ == "__main__":
    main(sys.argv[1])
