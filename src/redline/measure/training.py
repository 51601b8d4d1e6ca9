"""Training as a trial: any recipe's real training loop under a plan, without validation and without end.

    train_trial(recipe, plan)            # trial.py makes the trial; this class runs in its child

Pre-training reads its corpus and fine-tuning its examples. RFT and RL, whose samples do not exist yet, and recipes
that start from RANDOM_WEIGHTS get random rows, because speed and the first losses depend on lengths and not on meaning.
Running out of memory ends a trial; the loop would otherwise recover with smaller passes.
"""

import contextlib
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redline import finetune, pretrain
from redline.config.load import from_toml
from redline.config.recipe import Recipe
from redline.measure.trial import ANSWER_SHARE, PROMPT_SHARE, RANDOM_ROWS, RANDOM_WEIGHTS, SCRATCH
from redline.model.transformer import Transformer, build_model
from redline.plan.plan import Plan, from_json
from redline.plan.predict import longest_row
from redline.record.run import RunFolder
from redline.rl import rehearsal
from redline.train.execution import COMPUTE_DTYPE, check_device, equip
from redline.train.loop import Trainer
from redline.train.objective import Job
from redline.train.open_run import OpenRun
from redline.train.packed import Example, ExampleBatch, Examples, Packed, Shape, Updates, exact
from redline.train.process import Process, join
from redline.train.restore import open_weights

ENDLESS = 10**9
ANSWER_WORDS = 64
"""Different tokens in random answers, so that there is something to learn."""


class TrainingSubject:
    """The training loop with loader, clipping, record and instruments; it validates and saves nothing."""

    def __init__(self, setting: dict[str, Any]) -> None:
        recipe, plan = from_toml(setting["recipe"], where="trial"), from_json(setting["plan"], where="trial")
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(join(plan.hardware.kind))
            check_device(plan)
            run = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get(SCRATCH))))
            opened = OpenRun(run, stack.enter_context(RunFolder(run)), [self])
            endless = _endless(recipe)
            if recipe.workload == "pretrain":
                job, self.tokens_per_step = _pretraining(endless, plan, process, opened)
            elif recipe.workload == "rl":
                job, self.tokens_per_step = _reinforcing(endless, plan, process, opened)
            else:
                job, self.tokens_per_step = _finetuning(endless, plan, process, opened)
                if setting.get("padded"):
                    _pad(job.objective, recipe)
            self.trainer = Trainer(replace(job, steps=ENDLESS, validate=None), process)
            stack.callback(self.trainer.close)
            self._stack = stack.pop_all()

    @property
    def waited_s(self) -> float:
        return self.trainer.source.waited_s

    def step(self) -> None:
        self.trainer.turn()

    def drain(self) -> None:
        self.trainer.drain()

    def close(self) -> None:
        self._stack.close()

    def metrics(self, line: dict[str, Any]) -> None:
        self.losses.append(line["loss"])
        self.grad_norms.append(line["grad_norm"])

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "out_of_memory":
            raise torch.OutOfMemoryError(f"out of memory with micro-batch {facts['micro_batch_before']}")


def _endless(recipe: Recipe) -> Recipe:
    never: dict[str, Any] = dict.fromkeys(("eval_every", "checkpoint_every", "early_stop_evals"), 0)
    never |= {"max_hours": None, "target_loss": None, "length_ramp_steps": 0}  # whole sequences are measured
    if recipe.workload != "pretrain":  # a rate that rises over a share of an endless run would stay at 0
        never |= {"schedule": "constant", "warmup_steps": 0, "warmup_fraction": 0.0}
        return replace(recipe, train=replace(recipe.train, **never))
    return replace(recipe, train=replace(recipe.train, steps=ENDLESS, **never))


def _pretraining(recipe: Recipe, plan: Plan, process: Process, opened: OpenRun) -> tuple[Job, int]:
    assert opened.run is not None
    corpus = pretrain.open_corpus(recipe, opened.run, process, None)
    job = pretrain.job_of(recipe, plan, corpus, process, opened)
    return replace(job, initial_weights=None), recipe.tokens_per_step


def _reinforcing(recipe: Recipe, plan: Plan, process: Process, opened: OpenRun) -> tuple[Job, int]:
    """The update alone."""
    base = open_weights(Path(recipe.model.init_from or ""))
    model = base.build(process.device, COMPUTE_DTYPE[plan.precision])
    finetune.prepare(model, recipe, process)
    equip(model, plan, longest=longest_row(recipe))
    rows = rehearsal.random_rows(recipe)
    job = rehearsal.job_of(recipe, plan, model, rows, process)
    return replace(job, opened=opened), sum(row.example.length for row in rows)


class _RoundAndRound(Examples):
    """Begins again after the last update."""

    def next(self) -> ExampleBatch:
        self.done %= len(self.updates)
        return super().next()


def _finetuning(recipe: Recipe, plan: Plan, process: Process, opened: OpenRun) -> tuple[Job, int]:
    model, rows = _model_and_rows(recipe, plan, process)
    rows = whole_batches(rows, recipe.train.batch_size)
    finetune.prepare(model, recipe, process)
    job = finetune.job_of(model, rows, recipe, plan, process, opened=opened)
    assert isinstance(job.objective, Packed)
    updates = job.objective.updates
    tokens = sum(exact(update).tokens for update in updates) / len(updates)
    return replace(job, source=lambda position, _done: _RoundAndRound(updates)), round(tokens)


def _model_and_rows(recipe: Recipe, plan: Plan, process: Process) -> tuple[Transformer, Sequence[Example]]:
    dtype, origin = COMPUTE_DTYPE[plan.precision], recipe.model.init_from or ""
    if origin == RANDOM_WEIGHTS:
        model = build_model(recipe.model, device=process.device, seed=recipe.train.seed)
        model.compute_dtype = dtype
    else:
        base = open_weights(Path(origin))
        model = base.build(process.device, dtype)
        if recipe.workload == "finetune":
            return model, finetune.read_split(recipe, base).train
    return model, random_rows(model.config.vocab_size, longest_row(recipe))


def whole_batches(rows: Sequence[Example], size: int) -> list[Example]:
    """Drop the remainder: a short last batch would be a different step."""
    return list(rows[: max(1, len(rows) // size) * size])


def random_rows(vocab_size: int, length: int) -> list[Example]:
    """Random rows, the same ones every time."""
    draw = random.Random(0)

    def tokens(share: tuple[float, float], words: int) -> tuple[int, ...]:
        count = max(1, draw.randint(round(share[0] * length), round(share[1] * length)))
        return tuple(draw.randrange(words) for _ in range(count))

    few = min(ANSWER_WORDS, vocab_size)
    return [Example(tokens(PROMPT_SHARE, vocab_size), tokens(ANSWER_SHARE, few)) for _ in range(RANDOM_ROWS)]


def _pad(objective: Any, recipe: Recipe) -> None:
    """Have every update compute as many positions as rows padded to the longest would."""
    assert isinstance(objective, Packed)
    size = objective.pass_size
    passes = [update[at : at + size] for update in objective.updates for at in range(0, len(update), size)]
    shape = padded(passes, size, longest_row(recipe))
    objective.static = objective.even = True
    objective.shapes = [shape] * len(objective.updates)


def padded(passes: Updates, size: int, length: int) -> Shape:
    """The positions of `size` rows of `length`; what examples leave free is filled with unread sequences."""
    exacts = [exact(examples) for examples in passes]
    fillers = -(-(size * length - min(shape.tokens for shape in exacts)) // length)
    answers = max(shape.answers for shape in exacts)
    return Shape(tokens=size * length, answers=answers, sequences=size + fillers, longest=length)
