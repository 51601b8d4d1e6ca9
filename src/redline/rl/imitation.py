"""Filtered imitation: cross entropy on the answers that are correct, drawn anew in every step. The baseline: what GRPO
gains over it is what wrong answers teach."""

from collections.abc import Sequence

from torch import Tensor

from redline.config.rl import RlConfig
from redline.rl.algorithm import Columns, Row, row_of
from redline.rl.samples import Group
from redline.train.step import Numbers


class Imitation:
    def __init__(self, rl: RlConfig) -> None:
        self.rl = rl

    def teaches(self, group: Group, rewards: Sequence[float]) -> bool:
        return any(sample.correct for sample in group.answers)

    def rows(self, group: Group, rewards: Sequence[float]) -> list[Row]:
        found = zip(group.answers, rewards, strict=True)
        return [row_of(group, sample, reward, 1.0) for sample, reward in found if sample.correct]

    def loss(self, logprobs_A: Tensor, given: Columns) -> Numbers:
        surprise = -logprobs_A.sum()
        gap = (logprobs_A.detach() - given.sampled).abs().sum()
        return {"loss": surprise, "entropy": surprise.detach(), "logprob_gap": gap}
