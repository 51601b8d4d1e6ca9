"""A rollout becomes updates: rows packed into passes by a budget of tokens, the algorithm's loss on each.

The budget is the plan's micro-batch times the longest row, so short answers fill a pass just like long ones.
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
from redline.rl.algorithm import Algorithm, Part, Row, by_row, columns_of, packed, shared_tokens, shares_of
from redline.rl.ppo import Critic
from redline.rl.rollout import Rollout
from redline.rl.speed import work_of
from redline.train.optimizer import set_lr
from redline.train.process import Process
from redline.train.step import Learner, Numbers, Pass, Update, backpropagated, update


class Policies:
    """The objective: what the rows of an update cost the policy. `reference`: the model that the run began with, where
    it is needed and is not the model without its adapters."""

    def __init__(
        self,
        algorithm: Algorithm,
        recipe: Recipe,
        process: Process,
        *,
        pass_size: int,
        reference: Transformer | None = None,
    ) -> None:
        assert recipe.rl is not None
        self.algorithm, self.recipe, self.process = algorithm, recipe, process
        self.pass_size, self.reference, self.rl = pass_size, reference, recipe.rl

    def parts(self, batch: Rollout) -> list[Part]:
        """The updates of a rollout. Domains are mixed, which fills passes better, unless gradients are compared."""
        count = min(self.rl.updates_per_rollout, len(batch.all_rows))
        names = self.rl.names if self.rl.pcgrad != "off" else ("",)
        budget, found = self.pass_size * longest_row(self.recipe), list[Part]()
        for number in range(count):
            rows, passes, shared = batch.all_rows[number::count], list[tuple[str, list[Row]]](), 0
            for name in names:
                own = [row for row in rows if name in ("", row.domain)]
                split = [_within(share, budget) for share in shares_of(own, self.process.world_size)]
                mine, most = split[self.process.rank], max(map(len, split))
                passes += [(name, part) for part in mine + [[]] * (most - len(mine))]
                shared += sum(shared_tokens(part) for parts in split for part in parts)
            targets = float(sum(len(row.example.answer) for row in rows))
            found.append(Part(passes, targets, shared))
        return found

    def passes(self, learner: Learner, part: Part) -> Iterable[Pass]:
        return (backpropagated(partial(self._forward, learner, rows), name) for name, rows in part.passes)

    def shrink(self) -> bool:
        before, self.pass_size = self.pass_size, max(1, self.pass_size // 2)
        return self.pass_size < before

    def facts(self, batch: Rollout) -> dict[str, float]:
        shared = sum(part.shared_tokens for part in batch.parts)
        return {**batch.facts, **work_of(self.recipe, batch.all_rows, shared=shared)}

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
        batch.parts = self.objective.parts(batch)
        if not batch.prepared:
            self._prepare(batch.parts)
            batch.prepared = True
        # What was done before memory ran out is not done again.
        for part in batch.parts[len(batch.updates) :]:
            passes = self.objective.passes(self.learner, part)
            batch.updates.append(update(self.learner, passes, targets=part.targets))
        numbers = _mean(batch.updates)
        if self.critic is not None:
            set_lr(self.critic.learner.optimizers, lr_factor)
            for part in batch.parts[len(batch.critic_updates) :]:
                batch.critic_updates.append(self.critic.improve(part))
            numbers |= {f"critic_{name}": value for name, value in _mean(batch.critic_updates).items()}
        return Update(numbers)

    def _prepare(self, parts: Sequence[Part]) -> None:
        """Annotate this process's rows before the first update: with the critic's values and, if
        several updates follow, with their log-probabilities."""
        passes = [rows for part in parts for _, rows in part.passes]
        if self.critic is not None:
            self.critic.expect(passes)
        if len(parts) > 1:
            with torch.no_grad():
                for rows in passes:
                    for row, own in by_row(rows, logprobs(self.learner.model, rows)):
                        row.columns["old"] = own
            self.learner.mark("forward_s")


def _mean(updates: Sequence[Update]) -> Numbers:
    return {name: torch.stack([one.numbers[name] for one in updates]).mean() for name in updates[0].numbers}
