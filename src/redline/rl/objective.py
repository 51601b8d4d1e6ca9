"""A rollout becomes updates: rows packed into passes by a budget of tokens, the algorithm's loss on each.

The budget is the plan's micro-batch times the longest row, so short answers fill a pass as well as long ones.
Every process computes as many passes as the one that has the most, because a sharded model must run on all of them
together; a pass without rows counts for nothing. Within a pass the answers to a question share its prompt: everything
but attention reads it once (train.packed.pack_once).

Shapes: A answer tokens of a packed row.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from redline.config.recipe import Recipe
from redline.model.lora import lora_layers, without_adapters
from redline.model.transformer import Transformer
from redline.plan.predict import longest_row
from redline.rl.algorithm import Algorithm, Row, by_row, columns_of, packed, share_of, shared_tokens
from redline.rl.ppo import Critic
from redline.rl.rollout import Rollout
from redline.rl.speed import work_of
from redline.train.optimizer import set_lr
from redline.train.process import Process
from redline.train.step import Learner, Numbers, Pass, Update, backpropagated, update


class Policies:
    """The objective: what the rows of an update cost the policy."""

    def __init__(
        self,
        algorithm: Algorithm,
        recipe: Recipe,
        process: Process,
        *,
        pass_size: int,
        reference: Transformer | None = None,
    ) -> None:
        """`reference`: the model that the run began with, where it is needed and is not the model without its
        adapters."""
        assert recipe.rl is not None
        self.algorithm, self.recipe, self.process = algorithm, recipe, process
        self.pass_size, self.reference, self.rl = pass_size, reference, recipe.rl

    def passes(self, learner: Learner, rows: Sequence[Row]) -> Iterable[Pass]:
        """Domains are kept apart only where somebody compares their gradients: together they fill passes better."""
        for group, own in self._groups(rows):
            for part in self.split(own):
                yield backpropagated(partial(self._forward, learner, part), group)

    def split(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The passes of this process for the rows of all processes."""
        shares = self._shares(rows)
        own = shares[self.process.rank]
        return own + [[]] * (max(map(len, shares)) - len(own))

    def parts(self, batch: Rollout) -> list[list[Row]]:
        """The rows of each update, over all processes."""
        count = min(self.rl.updates_per_rollout, len(batch.all_rows))
        return [batch.all_rows[part::count] for part in range(count)]

    def shrink(self) -> bool:
        before, self.pass_size = self.pass_size, max(1, self.pass_size // 2)
        return self.pass_size < before

    def facts(self, batch: Rollout) -> dict[str, float]:
        groups = (own for rows in self.parts(batch) for _, own in self._groups(rows))
        passes = (part for rows in groups for parts in self._shares(rows) for part in parts)
        return {**batch.facts, **work_of(self.recipe, batch.all_rows, shared=sum(map(shared_tokens, passes)))}

    def _groups(self, rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
        names = self.rl.names if self.rl.pcgrad != "off" else ("",)
        return [(name, [row for row in rows if name in ("", row.domain)]) for name in names]

    def _shares(self, rows: Sequence[Row]) -> list[list[list[Row]]]:
        """The passes of every process."""
        budget = self.pass_size * longest_row(self.recipe)
        return [
            _within(share_of(rows, replace(self.process, rank=rank)), budget)
            for rank in range(self.process.world_size)
        ]

    def _forward(self, learner: Learner, rows: Sequence[Row]) -> Numbers:
        model, device = learner.model, learner.process.device
        given = columns_of(rows, device)
        if self.rl.kl > 0:
            with torch.no_grad(), without_adapters(model) if lora_layers(model) else nullcontext():
                given = replace(given, reference=logprobs(self.reference or model, rows))
            learner.mark("reference_s")
        return self.algorithm.loss(logprobs(model, rows), given, self.rl)


def logprobs(model: Transformer, rows: Sequence[Row]) -> Tensor:
    """The log-probability of every answer token of the rows, one after the other."""
    tokens_1T, targets_1A, packing = packed(rows, model.embed.weight.device)
    losses_1A: Tensor = model(tokens_1T, targets_1A, packing=packing, reduction="none")
    return -losses_1A[0]


def _within(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Rows in their order in as few passes as hold no more tokens than the budget."""
    parts: list[list[Row]] = []
    left = 0
    for row in rows:
        if row.example.length > left or not parts:
            parts.append([])
            left = budget
        parts[-1].append(row)
        left -= row.example.length
    return parts


class Updates:
    """The executor: the updates of one rollout, the policy's and then the critic's."""

    def __init__(self, learner: Learner, objective: Policies, critic: Critic | None = None) -> None:
        self.learner, self.objective, self.critic = learner, objective, critic
        if critic is not None:
            critic.follow(learner)

    def take(self, batch: Rollout, *, targets: float, lr_factor: float) -> Update:
        if not targets:
            nothing = torch.zeros((), device=self.learner.process.device)
            return Update({"loss": nothing, "grad_norm": nothing})
        set_lr(self.learner.optimizers, lr_factor)
        parts = self.objective.parts(batch)
        if not batch.prepared:
            self._prepare(parts)
            batch.prepared = True
        # What was done before memory ran out is not done again.
        for rows in parts[len(batch.updates) :]:
            passes = self.objective.passes(self.learner, rows)
            batch.updates.append(update(self.learner, passes, targets=_targets(rows)))
        numbers = _mean(batch.updates)
        if self.critic is not None:
            set_lr(self.critic.learner.optimizers, lr_factor)
            for rows in parts[len(batch.critic_updates) :]:
                batch.critic_updates.append(self.critic.improve(self.objective.split(rows), _targets(rows)))
            numbers |= {f"critic_{name}": value for name, value in _mean(batch.critic_updates).items()}
        return Update(numbers)

    def _prepare(self, parts: Sequence[Sequence[Row]]) -> None:
        """Note what this process's rows are before the first update: what the critic expects of them, and where
        several updates follow their log-probabilities."""
        if self.critic is not None:
            self.critic.expect(part for rows in parts for part in self.objective.split(rows))
        if len(parts) > 1:
            with torch.no_grad():
                for part in (part for rows in parts for part in self.objective.split(rows)):
                    for row, own in by_row(part, logprobs(self.learner.model, part)):
                        row.columns["old"] = own
            self.learner.mark("forward_s")


def _targets(rows: Sequence[Row]) -> float:
    return float(sum(len(row.example.answer) for row in rows))


def _mean(updates: Sequence[Update]) -> Numbers:
    return {name: torch.stack([one.numbers[name] for one in updates]).mean() for name in updates[0].numbers}
