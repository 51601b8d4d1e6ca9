"""PPO with a critic: a second model of the same size, with a value instead of a vocabulary, predicts at every token what
the answer will earn; what it earns beyond that is the token's advantage (GAE).

    critic = make_critic(base, recipe, plan, process)
    critic.expect(passes)            # values, advantages and returns into the rows' columns
    critic.improve(part)             # the critic's own update

Discount 1 and lambda 0.95, the value loss clipped at 0.2 around the old value: TRL's defaults. The reward is at
the last token. Advantages are whitened over the rollout, on all processes together.

Shapes: A answer tokens of a packed row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redline.config.recipe import Recipe
from redline.model.transformer import Linear, Transformer
from redline.plan.plan import Plan
from redline.plan.predict import longest_row
from redline.rl.algorithm import Algorithm, Columns, Part, Row, by_row, columns_of, packed
from redline.rl.grpo import policy_loss
from redline.train.execution import COMPUTE_DTYPE, equip
from redline.train.optimizer import make_optimizers, state_tensors
from redline.train.process import Process, shard
from redline.train.restore import Opened
from redline.train.step import Learner, Update, backpropagated, update

LAMBDA = 0.95
VALUE_CLIP = 0.2


PPO = Algorithm(lambda group, rewards: [0.0] * len(rewards), policy_loss)
"""The critic learns from every answer, and sets the advantages."""


def generalised_advantages(
    reward: float, values: NDArray[np.floating]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Advantages and returns of an answer whose reward is at its last token."""
    advantages = np.zeros(len(values))
    after, value_after = 0.0, 0.0
    for t in reversed(range(len(values))):
        earned = reward if t == len(values) - 1 else 0.0
        after = earned + value_after - values[t] + LAMBDA * after
        advantages[t], value_after = after, float(values[t])
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def value_loss(values_A: Tensor, given: Columns) -> Tensor:
    """Half the squared error of the values, or of what clipping leaves of their change, whichever is larger; summed."""
    assert given.value is not None
    assert given.returned is not None
    clipped_A = given.value + (values_A - given.value).clamp(-VALUE_CLIP, VALUE_CLIP)
    errors_A = (values_A - given.returned).square().maximum((clipped_A - given.returned).square())
    return 0.5 * errors_A.sum()


@dataclass
class Critic:
    learner: Learner

    @property
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it."""
        found = state_tensors(self.learner.model, self.learner.optimizers)
        return {f"critic.{name}": tensor for name, tensor in found.items()}

    def follow(self, actor: Learner) -> None:
        """Take time, waits and checkpoints from the actor's learner."""
        self.learner.mark = lambda phase: actor.mark("critic_s")
        self.learner.waiting, self.learner.before_update = actor.waiting, actor.before_update

    @torch.no_grad()
    def expect(self, passes: Iterable[Sequence[Row]]) -> None:
        """Predict what every token of this process's rows should earn, and from that how good it was."""
        own = []
        for rows in passes:
            for row, value in by_row(rows, self._values(rows)):
                advantage, returned = generalised_advantages(row.reward, value)
                row.columns |= {"value": value, "advantage": advantage, "returned": returned}
                own.append(row)
        self._whiten(own)
        self.learner.mark("")

    def improve(self, part: Part) -> Update:

        def forward(rows: Sequence[Row]) -> Tensor:
            given = columns_of(rows, self.learner.process.device)
            return value_loss(self._values(rows), given) if rows else 0.0 * self._values(rows).sum()

        passes = [backpropagated(partial(forward, rows)) for _, rows in part.passes]
        return update(self.learner, passes, targets=part.targets)

    def _values(self, rows: Sequence[Row]) -> Tensor:
        tokens_1T, _, packing = packed(rows, self.learner.process.device)
        values_1A1: Tensor = self.learner.model(tokens_1T, packing=packing)
        return values_1A1[0, :, 0].float()

    def _whiten(self, rows: Sequence[Row]) -> None:
        """Mean 0 and deviation 1 over the tokens of all processes."""
        whole = np.concatenate(
            [row.columns["advantage"] for row in rows] or [np.zeros(0, np.float32)]
        ).astype(np.float64)
        own = float(len(whole)), float(whole.sum()), float((whole**2).sum())
        count, total, squares = self.learner.process.sums(*own)
        mean = total / max(1.0, count)
        deviation = math.sqrt(max(0.0, squares / max(1.0, count) - mean**2)) + 1e-8
        for row in rows:
            exact = row.columns["advantage"].astype(np.float64)
            row.columns["advantage"] = ((exact - mean) / deviation).astype(np.float32)


def make_critic(base: Opened, recipe: Recipe, plan: Plan, process: Process) -> Critic:
    """The model that the run starts from, with a head of one output that begins at 0."""
    assert recipe.rl is not None
    model: Transformer = base.build(process.device, COMPUTE_DTYPE[plan.precision])
    model.head = Linear(model.config.hidden_size, 1, bias=False, device=process.device)
    torch.nn.init.zeros_(model.head.weight)
    model.train()
    if process.world_size > 1:
        shard(model, process, model.compute_dtype)
    equip(model, plan, longest=longest_row(recipe))
    train = replace(recipe.train, lr=recipe.rl.critic_lr, optimizer="adamw")
    return Critic(Learner(model, make_optimizers(model, train, plan.update), process, train.clip_norm))
