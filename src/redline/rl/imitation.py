"""Filtered imitation: cross entropy on the answers that are correct, drawn anew in every step. The baseline: what GRPO
gains over it is what wrong answers teach."""

from collections.abc import Sequence

from torch import Tensor

from redline.config.rl import RlConfig
from redline.rl.algorithm import Algorithm, Columns
from redline.rl.samples import Group
from redline.train.step import Numbers


def _correct(group: Group, rewards: Sequence[float]) -> list[float | None]:
    return [1.0 if sample.correct else None for sample in group.answers]


def _surprise(logprobs_A: Tensor, given: Columns, rl: RlConfig) -> Numbers:
    loss = -logprobs_A.sum()
    gap = (logprobs_A.detach() - given.sampled).abs().sum()
    return {"loss": loss, "entropy": loss.detach(), "logprob_gap": gap}


IMITATION = Algorithm(_correct, _surprise)
