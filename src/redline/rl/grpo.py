"""GRPO: the advantage of an answer is how far its reward lies above its group's mean, in standard deviations. The loss is PPO's clipped
one, averaged over all tokens of the update, as DAPO and TRL (`loss_type="dapo"`) have it.

    advantages(group, [1.0, 0.0, 0.0, 0.0])      # [1.5, -0.5, -0.5, -0.5], nearly
    policy_loss(logprobs_A, columns, rl)         # {"loss": ..., "clip_share": ..., ...}, sums over the tokens

With one update per rollout the old log-probabilities are the forward's own, detached: the ratio is 1 and only its
gradient counts. What the engine computes differently is corrected by a truncated importance weight on each token.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

from torch import Tensor

from redline.config.rl import RlConfig
from redline.rl.algorithm import Algorithm, Columns
from redline.rl.samples import Group
from redline.train.step import Numbers

SMALLEST_STD = 1e-4
"""Added to the standard deviation, as TRL does."""


def advantages(group: Group, rewards: Sequence[float]) -> list[float] | list[None]:
    """How far each reward lies above its group's mean, in sample deviations; None if all are equal."""
    if max(rewards) == min(rewards):
        return [None] * len(rewards)
    mean, scale = fmean(rewards), stdev(rewards) + SMALLEST_STD
    return [(reward - mean) / scale for reward in rewards]


def policy_loss(logprobs_A: Tensor, given: Columns, rl: RlConfig) -> Numbers:
    """The clipped surrogate, with the penalty for leaving the reference; sums over the tokens."""
    old_A = logprobs_A.detach() if given.old is None else given.old
    ratio_A, advantage_A = (logprobs_A - old_A).exp(), given.advantage
    clipped_A = ratio_A.clamp(1 - rl.clip_low, 1 + rl.clip_high)
    loss_A = -(ratio_A * advantage_A).minimum(clipped_A * advantage_A)
    if rl.importance_cap:
        loss_A = loss_A * (old_A - given.sampled).exp().clamp(max=rl.importance_cap)
    numbers: Numbers = {}
    if given.reference is not None:
        kl_A = divergence(logprobs_A, given.reference)
        loss_A = loss_A + rl.kl * kl_A
        numbers["kl"] = kl_A.sum()
    bound_A = ((advantage_A > 0) & (ratio_A > clipped_A)) | ((advantage_A < 0) & (ratio_A < clipped_A))
    return {
        "loss": loss_A.sum(),
        "clip_share": bound_A.float().sum(),
        "entropy": -logprobs_A.detach().sum(),
        "logprob_gap": (old_A - given.sampled).abs().sum(),
        **numbers,
    }


def divergence(logprobs_A: Tensor, reference_A: Tensor) -> Tensor:
    """Schulman's k3 estimate of the KL divergence from the reference: not negative, and unbiased for sampled tokens."""
    away_A = reference_A - logprobs_A
    return away_A.exp() - away_A - 1


GRPO = Algorithm(advantages, policy_loss)
