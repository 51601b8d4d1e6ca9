"""Training as a trial: the real loop of a recipe under a plan, without validation and checkpoints.

    train_trial(recipe, plan)            # trials.py makes the trial; this class runs in its child

Starts from the recipe's weights. Running out of memory, from which the loop would recover with smaller passes,
ends it: a trial is about these.
"""

import contextlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redline.config.load import from_toml
from redline.measure.scratch import SCRATCH
from redline.plan.plan import from_json
from redline.pretrain import job_of, open_corpus
from redline.record.run import RunFolder
from redline.train.execution import check_device
from redline.train.loop import Trainer
from redline.train.open_run import OpenRun
from redline.train.process import join


class TrainingSubject:
    """The real training loop: loader, clipping, record and instruments. Starts from random weights, validates
    and saves nothing."""

    def __init__(self, setting: dict[str, Any]) -> None:
        recipe, plan = from_toml(setting["recipe"], where="trial"), from_json(setting["plan"], where="trial")
        endless = replace(
            recipe.train, steps=10**9, max_hours=None, eval_every=0, checkpoint_every=0, early_stop_evals=0
        )
        self.tokens_per_step = recipe.tokens_per_step
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(join(plan.hardware.kind))
            check_device(plan)
            run = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get(SCRATCH))))
            folder = stack.enter_context(RunFolder(run))
            corpus = open_corpus(recipe, run, process, None)
            opened = OpenRun(folder, [self], None)
            job = job_of(replace(recipe, train=endless), plan, corpus, process, run=run, opened=opened)
            self.trainer = Trainer(replace(job, validate=None, initial_weights=None), process)
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
        if kind == "out_of_memory":  # the loop would go on with smaller passes; a trial is about these
            raise torch.OutOfMemoryError(f"out of memory with micro-batch {facts['micro_batch_before']}")
