"""LoRA fine-tuning as a trial: the real updates of `train.finetune` on random rows of the unit-conversion
task's lengths, switch by switch.

A step is one update. Speed and the first losses depend on lengths and not on meaning, so no data set is
needed; every arm starts from the same weights and reads the same rows in the same order. Left out: the record
on the disk (`redline bench finetune` has it).
"""

import random
from typing import Any

import torch

from redline.config.load import from_toml
from redline.config.recipe import Recipe
from redline.model.lora import LoraConfig, add_lora
from redline.model.transformer import Transformer, build_model
from redline.optimizations.work import Finetuning
from redline.train.finetune import Example, FinetuneConfig, Finetuner
from redline.train.packing import Shape, exact

ROWS = 1000
PROMPT_SHARE, ANSWER_SHARE = (0.14, 0.28), (0.08, 0.20)
"""Tokens of a prompt and of an answer as shares of the padded row: 18-36 and 10-26 of 128, as in the seeds'
data."""
RANK, ALPHA = 16, 64
ANSWER_WORDS = 64
"""Different tokens in the answers, so that there is something to learn."""


class FinetuningSubject:
    def __init__(self, setting: dict[str, Any]) -> None:
        recipe, how = from_toml(setting["recipe"], where="trial"), Finetuning(**setting["how"])
        torch.set_float32_matmul_precision("high" if how.tf32 else "highest")
        model = _adapted(recipe, how, setting["device"])
        train = recipe.train
        config = FinetuneConfig(
            epochs=4, batch_size=train.batch_size, lr=train.lr, schedule="constant", warmup_fraction=0.0,
            graph=how.graph,
            compile=how.compile != "off",
        )  # fmt: skip
        rows = examples(recipe)
        self.tuner = Finetuner(model, rows, config, None, [self])
        # a short last one would be another step
        whole = [batch for batch in self.tuner.batches if len(batch) == train.batch_size]
        self.tuner.batches, self.tuner.shapes = whole, self.tuner.shapes[: len(whole)]
        if how.padded:
            self.tuner.shapes = [_padded(whole, train.batch_size, recipe.data.seq_len)] * len(whole)
        if config.compile:
            for block in model.blocks:
                block.compile(fullgraph=True, dynamic=False)
        self.tokens_per_step = round(sum(exact(batch).tokens for batch in whole) / len(whole))
        self.waited_s = 0.0
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def step(self) -> None:
        self.tuner.progress.step %= len(self.tuner.batches)  # round and round: a trial has no last update
        self.tuner.update()
        self.tuner.write_ready()

    def drain(self) -> None:
        self.tuner.drain()

    def close(self) -> None:
        self.tuner.close()

    def metrics(self, line: dict[str, Any]) -> None:
        self.losses.append(line["loss"])
        self.grad_norms.append(line["grad_norm"])

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "out_of_memory":  # it would go on with smaller passes; a trial is about these
            raise torch.OutOfMemoryError(
                f"out of memory with {facts['examples_per_pass_before']} examples a pass"
            )


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


def _adapted(recipe: Recipe, how: Finetuning, device: str) -> Transformer:
    model = build_model(recipe.model, device=device, seed=recipe.train.seed)
    model.compute_dtype = torch.bfloat16 if how.precision == "bf16" else torch.float32
    add_lora(model, LoraConfig(rank=RANK, alpha=ALPHA), seed=recipe.train.seed)
    for block in model.blocks:
        block.recompute = how.recompute
    return model


def _padded(batches: list[list[Example]], batch_size: int, length: int) -> Shape:
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
