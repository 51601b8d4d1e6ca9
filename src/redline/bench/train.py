"""`redline bench train`: every arm on every recipe in its own process, a page for people and JSON for programs.

    path = bench_train(cases, hardware, facts, Path("benchmarks"), ...)      # train_<hardware>_<date>.{json,md}

`loop`   the real training loop (`Trainer`, with loader, clipping, logging and instruments). Taking turns with it in
         the same process, on the same compiled model: the bare step (one batch on the GPU, no loader, no record).
`plain`  what plain PyTorch gives: the same model under autocast, compiled whole, with torch's choice of attention and
         its cross entropy.
`hf`     Hugging Face's Trainer on its own model of the same shape, with the same data, batch, passes and optimiser.

An arm that dies (out of memory, a missing package) is a row that says so, not the end of the benchmark.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redline.bench import theirs
from redline.bench.results import MEASURED, BenchRow, Column, brief, head, rows_of, spread, table, write
from redline.config.load import from_toml, to_toml
from redline.config.recipe import Recipe
from redline.data.loader import Batch
from redline.data.shards import TokenDataset
from redline.errors import Say, need
from redline.machine.facts import MachineFacts
from redline.measure.child import peak_bytes, synchronize, timed
from redline.measure.training import TrainingSubject
from redline.measure.turns import take_turns
from redline.plan.plan import Hardware, Plan, from_json, to_json
from redline.plan.planner import make_plan
from redline.pretrain import open_corpus
from redline.record.units import format_bytes, format_duration
from redline.train.execution import build
from redline.train.objective import Eager, Sequences
from redline.train.optimizer import make_optimizers
from redline.train.process import Process, join
from redline.train.step import BackPropagation, Learner, Lesson, Pass, backpropagated

LABELS = {
    "loop": "redline, the real loop",
    "bare": "the same model, bare step",
    "plain": "plain PyTorch",
    "hf": "HF Trainer",
}
WHOLE_SOFTMAX = (
    "not run: it would compute the whole softmax; train.softmax_candidates=0 compares the same work"
)
COLUMNS: tuple[Column, ...] = (
    ("arm", str, "label"),
    *MEASURED,
    ("MFU", "{:.1%}".format, "mfu_share"),
    ("against bare", lambda ratio: f"{ratio - 1:+.2%}", "against"),
    ("predicted", lambda p, was: f"{format_bytes(p)}, {p / was - 1:+.1%}", "predicted_bytes", "memory_bytes"),
    ("first step", format_duration, "first_step_s"),
)


def bench_train(
    cases: Sequence[tuple[Recipe, Sequence[str]]],
    hardware: Hardware,
    facts: MachineFacts,
    out: Path,
    *,
    blocks: int,
    steps_per_block: int,
    progress: Say,
) -> Path:
    """Run the arms of each case and write the results after each case; returns the path of the page."""
    results, path = [], out
    for recipe, arms in cases:
        plan = make_plan(recipe, hardware)
        entry: dict[str, Any] = {"recipe": asdict(recipe), "plan": to_json(plan), "arms": {}}
        for arm in arms:
            setting = {"recipe": to_toml(recipe), "blocks": blocks, "steps_per_block": steps_per_block}
            if arm != "loop" and recipe.train.softmax_candidates:
                found = {"failed": WHOLE_SOFTMAX}
            else:
                progress(f"{recipe.name} {plan.precision} {arm}: {_work(arm, recipe, plan, setting)}")
                found = _run_fitting(arm, setting, plan)
            entry["arms"][arm] = found
            for row in _rows({arm: found}, entry["plan"], hardware):
                progress(f"{recipe.name} {plan.precision} {brief(COLUMNS, row)}")
        results.append(entry)
        path = write(out, "train", facts, {"results": results}, page(hardware, facts, results))
    return path


def _work(arm: str, recipe: Recipe, plan: Plan, setting: dict[str, Any]) -> str:
    """What an arm is about to do, and the least time it takes, where the plan knows a rate."""
    timed = 2 if arm == "loop" else 1  # the loop, and the bare step beside it
    updates = 1 + timed * (1 + setting["blocks"]) * setting["steps_per_block"]
    rate = plan.prediction.attainable_tokens_per_s
    least = f", at least {format_duration(updates * recipe.tokens_per_step / rate)}" if rate else ""
    beside = ", half of them bare steps" if timed > 1 else ""
    return f"{updates:,} updates of {recipe.tokens_per_step:,} tokens{beside}{least}, plus start-up"


def _run_fitting(arm: str, setting: dict[str, Any], plan: Plan) -> BenchRow:
    """Run the arm with the plan's passes; if it runs out of memory, with passes half as large and the same batch."""
    micro = plan.micro_batch
    while True:
        accumulation = plan.micro_batch * plan.accumulation // micro
        smaller = to_json(replace(plan, micro_batch=micro, accumulation=accumulation))
        function = f"redline.bench.train:{arm}"
        (found,) = rows_of(function, {**setting, "plan": smaller}, plan.allocator)
        if found.get("outcome") != "out_of_memory" or micro % 2:
            return {**found, "micro_batch": micro}
        micro //= 2


def page(hardware: Hardware, facts: MachineFacts, results: Sequence[BenchRow]) -> list[str]:
    """Markdown: a section for each recipe, a row for each arm."""
    lines = [
        *head("train", "Training", facts),
        "MFU: 6N + 12LdT per token over the dense bf16 datasheet peak. Median of the blocks; interval: slowest to"
        " fastest block.",
        "Rows of one loop are interleaved in one process; plain PyTorch and HF Trainer run in separate processes.",
    ]
    for entry in results:
        recipe, plan = entry["recipe"], entry["plan"]
        names = ("precision", "micro_batch", "attention", "cross_entropy", "compile")
        precision, micro, attention, cross_entropy, compiled = (plan[name]["value"] for name in names)
        lines += [
            "",
            f"## {recipe['name']}, {precision}",
            "",
            f"{plan['prediction']['parameters']:,} parameters, T = {recipe['data']['seq_len']},"
            f" {recipe['train']['batch_size']} sequences per update in passes of {micro}; attention {attention}, cross"
            f" entropy {cross_entropy}, compile {compiled}; work {plan['work']}.",
            "",
            *table(COLUMNS, _rows(entry["arms"], plan, hardware), lambda other, _: other["row"] == "bare"),
        ]
    return lines


def _label(name: str, plan: BenchRow) -> str:
    """Arms that follow the plan only in part say in which."""
    half, compiled = plan["precision"]["value"] != "fp32", plan["compile"]["value"] != "off"
    used = {
        "plain": ["autocast"] * half + ["compile"] * compiled,
        "hf": ["bf16"] * half + ["compile"] * compiled + ["fused AdamW"],
    }.get(name)
    return LABELS[name] + (f" ({', '.join(used)})" if used else "")


def _rows(arms: BenchRow, plan: BenchRow, hardware: Hardware) -> list[BenchRow]:
    """A row for each speed of an arm, or for its failure."""
    peak, passes, rows = hardware.peak_tflops.get("bf16"), plan["micro_batch"]["value"], []
    for arm, found in arms.items():
        smaller = found.get("micro_batch", passes)
        fewer = f", passes of {smaller}: more ran out of memory" if smaller != passes else ""
        for name, speed in found.get("speeds", {arm: {}}).items():
            row = {**found, **speed, "row": name, "label": _label(name, plan) + fewer}
            if speed and peak:
                row["mfu_share"] = speed["tokens_per_s"] * plan["prediction"]["flops_per_token"] / peak / 1e12
            rows.append(row | ({"first_step_s": None} if name == "bare" else {}))
    return rows


# ---- the arms, each in its process ----


def _given(setting: dict[str, Any]) -> tuple[Recipe, Plan]:
    return from_toml(setting["recipe"], where="bench"), from_json(setting["plan"], where="bench")


def loop(setting: dict[str, Any]) -> Iterator[BenchRow]:
    (recipe, plan), started_s = _given(setting), time.perf_counter()
    subject = TrainingSubject(setting)
    trainer = subject.trainer
    device = trainer.process.device
    first = trainer.source.next()
    # a captured update copies its rows from the host in any case
    batch = first if plan.graph else first.moved(lambda part: part.to(device))
    tokens = float(recipe.tokens_per_step)
    trainer.turn()
    synchronize()
    first_step_s = time.perf_counter() - started_s
    arms = {
        # the last line of a block is written while its clock still runs
        "loop": _Steps(setting, trainer.turn, trainer.drain),
        "bare": _Steps(setting, partial(trainer.executor.take, batch, targets=tokens, lr_factor=1.0)),
    }
    yield _row(_speeds(arms, recipe, setting), first_step_s) | {
        "predicted_bytes": plan.prediction.memory_bytes,
        "data_wait_s_per_step": trainer.waited_s / max(1, trainer.progress.step),
        "loss": trainer.last_line.get("loss"),
    }
    subject.close()


def plain(setting: dict[str, Any]) -> Iterator[BenchRow]:
    (recipe, plan), started_s = _given(setting), time.perf_counter()
    with join(plan.hardware.kind) as process:
        step = _plain_step(recipe, plan, process)
        step()
        synchronize()
        first_step_s = time.perf_counter() - started_s
        yield _row(_speeds({"plain": _Steps(setting, step)}, recipe, setting), first_step_s)


def _plain_step(recipe: Recipe, plan: Plan, process: Process) -> Callable[[], object]:
    eager = replace(plan, precision="fp32", compile="off", attention="auto", cross_entropy="torch")
    model, device = build(recipe, eager, process), process.device
    forward = torch.compile(model) if plan.compile != "off" else model
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")

    class Autocast(BackPropagation):
        def learn(self, _model: Any, lesson: Lesson) -> Pass:
            def loss() -> torch.Tensor:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=plan.precision != "fp32"):
                    return forward(lesson.tokens, lesson.targets)

            return backpropagated(loss)

    optimizers, clip_norm = make_optimizers(model, recipe.train), recipe.train.clip_norm
    learner = Learner(model, optimizers, process, clip_norm, rule=Autocast())
    shape, vocab = (recipe.train.batch_size, recipe.data.seq_len), recipe.model.vocab_size
    inputs, targets = (torch.randint(0, vocab, shape, device=device) for _ in range(2))
    executor = Eager(learner, Sequences(pass_size=plan.micro_batch, share=recipe.train.batch_size))
    tokens = float(recipe.tokens_per_step)
    return partial(executor.take, Batch(inputs, targets, {}), targets=tokens, lr_factor=1.0)


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
    return {"speeds": speeds, "first_step_s": first_step_s, "memory_bytes": peak_bytes()}
