"""A trial measured alone, the result of a tuning, and the planner's arithmetic at another micro-batch."""

import contextlib
import time

from redline.config.recipe import Recipe
from redline.measure.process import Child
from redline.measure.trial import Measurement, Trial
from redline.measure.turns import Arm
from redline.plan.arithmetic import Memory
from redline.plan.plan import Plan
from redline.plan.predict import predicted_memory
from redline.tune.store import TuningResult

TUNED = TuningResult(
    tuned_at="2026-01-01T00:00:00Z", ratio=1.5, low=1.4, high=1.6, paired=True, tokens_per_s=1e3, trials=3, elapsed_s=1.0,
    untried=(), rows=(),
)  # fmt: skip


def measure(trial: Trial, child: Child | None = None) -> Measurement:
    """Run a trial's blocks in a new child, or in the one given."""
    with contextlib.ExitStack() as stack:
        arm = Arm(trial, child or stack.enter_context(Child(trial.allocator)), time.monotonic)
        arm.start()
        for _ in range(trial.timing.blocks):
            arm.block()
        return arm.end()


def arithmetic_memory(recipe: Recipe, plan: Plan, micro_batch: int) -> Memory:
    values = {**vars(plan), "micro_batch": micro_batch}
    return predicted_memory(recipe, plan.hardware, plan.world_size, values)
