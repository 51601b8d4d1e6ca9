"""The update of RL without its rollouts: random answers, the same at every step, so that two steps do the same work.
`tune`, `ablate` and `bench rl` measure it. What it leaves out: generation, rewards, PPO's critic.
"""

import numpy as np

from redline.config.recipe import Recipe
from redline.model.transformer import Transformer
from redline.plan.plan import Plan
from redline.rl.algorithm import Row
from redline.rl.grpo import GRPO
from redline.rl.objective import Policies, Updates
from redline.rl.rollout import Rollout
from redline.rl.speed import make_derived
from redline.train.objective import Job
from redline.train.packed import Example
from redline.train.process import Process

SHORTEST = 0.25
"""Shortest length as a share of the longest prompt and answer; lengths are spread evenly from there."""


class Again:
    """The same rows in every step, as a source of batches."""

    waited_s = 0.0

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.done = rows, 0

    def next(self) -> Rollout:
        self.done += 1
        return Rollout(self.done, self.rows, {})

    def close(self) -> None:
        pass


def random_rows(recipe: Recipe, *, shortest: float = SHORTEST) -> list[Row]:
    """A rollout of the recipe's size; half of the answers earned more than the others."""
    rl = recipe.rl
    assert rl is not None
    draw, V = np.random.default_rng(0), recipe.model.vocab_size

    def tokens(longest: int) -> tuple[int, ...]:
        length = draw.integers(max(1, round(shortest * longest)), longest, endpoint=True)
        return tuple(draw.integers(0, V, length).tolist())

    rows = []
    prompt: tuple[int, ...] = ()
    for place in range(recipe.rows_per_step):
        prompt = prompt if place % rl.group_size else tokens(rl.max_prompt_tokens)
        example = Example(prompt, tokens(rl.max_new_tokens))
        size, better = len(example.answer), (-1.0) ** place
        columns = {
            "sampled": np.full(size, -np.log(V), np.float32),
            "advantage": np.full(size, better, np.float32),
        }
        rows.append(Row(rl.names[place // rl.group_size % len(rl.names)], example, False, better, columns))
    return rows


def job_of(recipe: Recipe, plan: Plan, model: Transformer, rows: list[Row], process: Process) -> Job:
    return Job(
        recipe=recipe,
        plan=plan,
        steps=recipe.train.steps,
        model=model,
        source=lambda _position, _done: Again(rows),
        objective=Policies(GRPO, recipe, process, pass_size=plan.micro_batch),
        executor=Updates,  # type: ignore[arg-type]  # as in rl.run
        data_fingerprint="",
        derived=make_derived(plan),
    )
