"""LoRA fine-tuning as a trial: the real updates of `redline.finetune` on random rows of the unit-conversion
task's lengths, switch by switch.

A step is one update. Speed and the first losses depend on lengths and not on meaning, so no data set is
needed; every arm starts from the same weights and reads the same rows in the same order. Left out: the record
on the disk (`redline bench finetune` has it).
"""

import random
from dataclasses import replace
from typing import Any

import torch

from redline.config.load import from_toml
from redline.config.recipe import LoraConfig, PlanPins, Recipe
from redline.finetune import job_of, prepare
from redline.machine.facts import read_facts
from redline.model.transformer import build_model
from redline.optimizations.work import Finetuning
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.train.execution import COMPUTE_DTYPE
from redline.train.loop import Trainer
from redline.train.packed import ExampleBatch, Examples, Packed, Updates
from redline.train.packing import Example, Shape, exact
from redline.train.process import Process

ROWS = 1000
PROMPT_SHARE, ANSWER_SHARE = (0.14, 0.28), (0.08, 0.20)
"""Tokens of a prompt and of an answer as shares of the padded row: 18-36 and 10-26 of 128, as in the data of
tuning guides 000 and 003."""
RANK, ALPHA = 16, 64
ANSWER_WORDS = 64
"""Different tokens in the answers, so that there is something to learn."""


class FinetuningSubject:
    def __init__(self, setting: dict[str, Any]) -> None:
        recipe, how = from_toml(setting["recipe"], where="trial"), Finetuning(**setting["how"])
        size = recipe.train.batch_size
        # A constant rate, and no short last batch: it would be another step.
        train = replace(recipe.train, steps=0, epochs=4, schedule="constant", warmup_steps=0)
        recipe = replace(recipe, workload="finetune", lora=LoraConfig(rank=RANK, alpha=ALPHA), train=train)
        rows = examples(recipe)[: ROWS // size * size]
        facts = read_facts()
        hardware = hardware_here(facts if setting["device"] == "cuda" else replace(facts, gpus=()), None)
        plan = make_plan(replace(recipe, plan=PlanPins()), hardware)
        rows_a_pass = how.rows or plan.micro_batch
        plan = replace(
            plan,
            micro_batch=rows_a_pass,
            accumulation=-(-size // rows_a_pass),
            precision="tf32" if how.tf32 and how.precision == "fp32" else how.precision,
            recompute=how.recompute,
            graph=how.graph and setting["device"] == "cuda",
            compile=how.compile,
        )
        process = Process(0, 1, torch.device(setting["device"]))
        model = build_model(recipe.model, device=process.device, seed=train.seed)
        model.compute_dtype = COMPUTE_DTYPE[plan.precision]
        prepare(model, recipe, process)
        job = job_of(model, rows, recipe, plan, process, observers=[self])
        objective = job.objective
        assert isinstance(objective, Packed)
        updates = objective.updates
        if how.padded:
            objective.static = objective.even = True
            passes = [
                update[at : at + rows_a_pass]
                for update in updates
                for at in range(0, len(update), rows_a_pass)
            ]
            objective.shapes = [_padded(passes, rows_a_pass, recipe.data.seq_len)] * len(updates)
        self.trainer = Trainer(replace(job, steps=10**9, source=lambda position: _Endless(updates)), process)
        self.tokens_per_step = round(sum(exact(batch).tokens for batch in updates) / len(updates))
        self.waited_s = 0.0
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def step(self) -> None:
        self.trainer.turn()

    def drain(self) -> None:
        self.trainer.drain()

    def close(self) -> None:
        self.trainer.close()

    def metrics(self, line: dict[str, Any]) -> None:
        self.losses.append(line["loss"])
        self.grad_norms.append(line["grad_norm"])

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "out_of_memory":  # it would go on with smaller passes; a trial is about these
            raise torch.OutOfMemoryError(f"out of memory with {facts['micro_batch_before']} examples a pass")


class _Endless(Examples):
    """Round and round: a trial has no last update."""

    def next(self) -> ExampleBatch:
        self.done %= len(self.updates)
        return super().next()


def examples(recipe: Recipe) -> list[Example]:
    draw, vocab_size, length = random.Random(0), recipe.model.vocab_size, recipe.data.seq_len

    def between(share: tuple[float, float]) -> int:
        return max(1, draw.randint(round(share[0] * length), round(share[1] * length)))

    return [
        Example(
            tuple(draw.randrange(vocab_size) for _ in range(between(PROMPT_SHARE))),
            tuple(draw.randrange(min(ANSWER_WORDS, vocab_size)) for _ in range(between(ANSWER_SHARE))),
        )
        for _ in range(ROWS)
    ]


def _padded(batches: Updates, batch_size: int, length: int) -> Shape:
    """A shape that computes as many positions as rows of `length` would: what is left is filled with
    sequences that nobody reads."""
    exacts = [exact(batch) for batch in batches]
    tokens = batch_size * length
    fillers = -(-(tokens - min(shape.tokens for shape in exacts)) // length)
    return Shape(
        tokens=tokens,
        answers=max(shape.answers for shape in exacts),
        sequences=batch_size + fillers,
        longest=length,
    )
