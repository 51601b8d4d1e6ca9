"""How far OKADFA is from what it stands in for, measured every few updates: the gradients of feedback alignment against
those of back-propagation, and kernel attention against exact attention.

    diagnosis = Diagnosis(recipe, plan)
    numbers = diagnosis.measure(learner, objective, batch)     # before the update, on the first rows of its batch

A diagnosis is one pass by each rule and one forward, each at most as long as a pass of training. `every` follows:
so many updates that three passes are 2% of theirs. The rows are so few that back-propagation, which holds all
blocks, takes no more memory than feedback alignment for a whole pass; the gradients are there twice.
"""

import copy
import functools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from redline.config.recipe import Recipe
from redline.model.attention import softmax
from redline.model.transformer import Transformer
from redline.plan.plan import Plan
from redline.train.execution import eagerly
from redline.train.feedback import FeedbackAlignment
from redline.train.objective import Objective, Sequences
from redline.train.process import is_spread
from redline.train.step import BackPropagation, Learner, Numbers, Rule

SHARE = 0.02
"""Share of the training time, at most."""
PASSES = 3
"""Passes of a diagnosis."""


class Diagnosis:
    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.feedback, self.kernel = recipe.feedback is not None, recipe.model.attention == "favor"
        given = recipe.train.diagnose_every
        self.every = math.ceil(PASSES / (SHARE * plan.accumulation)) if given is None else given

    def due(self, step: int) -> bool:
        return (self.feedback or self.kernel) and self.every > 0 and step % self.every == 0

    def measure(self, learner: Learner, objective: Objective, batch: Any) -> Numbers:
        """Leaves no gradient behind."""
        few: Any = copy.copy(objective)
        few.pass_size = max(1, objective.pass_size // learner.model.config.num_layers)
        # One more shape is not worth compiling.
        with eagerly():
            found = _alignment(learner, few, batch) if self.feedback else {}
            if self.kernel and isinstance(objective, Sequences):
                row_1T = batch.inputs_BT[:1].to(learner.process.device)
                found["attention_similarity"] = _similarity(learner.model, row_1T)
        return found


def _alignment(learner: Learner, objective: Objective, batch: Any) -> Numbers:
    """Cosine and relative error of the gradient of each block that learns from feedback, and of all together."""
    rule = learner.rule
    assert isinstance(rule, FeedbackAlignment)
    blocks = rule.below(learner.model)
    fed, true = (_gradients(learner, other, objective, batch) for other in (rule, BackPropagation()))
    sums_3L = torch.zeros(3, len(blocks), device=learner.process.device, dtype=torch.float64)
    for number, block in enumerate(blocks):
        for p in block.parameters():
            if (a := fed.get(p)) is not None and (b := true.get(p)) is not None:
                sums_3L[:, number] += torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()])
    if learner.process.world_size > 1:
        dist.all_reduce(sums_3L)
    told = {}
    for name, sums in [("", sums_3L.sum(1)), *((f".{n}", sums_3L[:, n]) for n in range(len(blocks)))]:
        dot, ours, theirs = sums.unbind()
        told[f"dfa_cosine{name}"] = dot / (ours * theirs).sqrt().clamp(min=1e-300)
        told[f"dfa_error{name}"] = ((ours - 2 * dot + theirs).clamp(min=0) / theirs.clamp(min=1e-300)).sqrt()
    return told


def _gradients(learner: Learner, rule: Rule, objective: Objective, batch: Any) -> dict[Tensor, Tensor]:
    """Gradients of one pass by a rule: for every parameter the part that this process holds."""
    other = replace(learner, rule=rule, mark=lambda phase: None)
    scale = learner.scale.value if learner.scale else 1.0
    next(iter(objective.passes(other, batch))).run(scale / max(1, batch.targets), lambda phase: None)
    kept: dict[Tensor, Tensor] = {}
    for p in learner.model.parameters():
        if p.grad is not None:
            kept[p] = p.grad.to_local() if is_spread(p.grad) else p.grad
            p.grad = None
    return kept


@torch.no_grad()
def _similarity(model: Transformer, tokens_1T: Tensor) -> Tensor:
    """Mean cosine, over tokens and blocks, of the outputs of kernel attention and exact attention for the same queries, keys
    and values."""
    found: list[Tensor] = []

    def through(x: Tensor, attend: Any) -> Tensor:
        exact = functools.partial(softmax.attend, rope=attend.keywords["rope"])

        def both(attn: Any, qkv: Tensor) -> Tensor:
            mixed = attend(attn, qkv)
            found.append(F.cosine_similarity(mixed.float(), exact(attn, qkv).float(), dim=-1).mean())
            return mixed

        for block in model.blocks:
            x = block(x, both)
        return model.norm(x)

    model(tokens_1T, tokens_1T, through=through)
    return torch.stack(found).mean()
