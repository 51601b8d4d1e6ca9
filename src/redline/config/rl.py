"""The table `[rl]` of a recipe: reinforcement learning."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RlAlgorithm = Literal["grpo", "ppo", "imitation"]
Overlong = Literal["penalty", "mask", "none"]
PcGrad = Literal["off", "watch", "global", "tensor"]


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """Reinforcement learning: what is asked, what counts, and how the weights follow. A step of the run is one
    rollout: `train.batch_size` questions, `group_size` answers each, drawn at temperature 1 from all tokens (anything
    else would make the sampled policy another one than the trained one)."""

    domains: tuple[str, ...]
    """Tasks (`redline tasks`) whose questions are asked; every one of them has a part in each step."""
    weights: tuple[float, ...] = ()
    """Shares of the domains in a step, in their order; not given: equal ones."""
    data: str | None = None
    """Folder whose sub-folders, named after the domains, hold their files; without one a domain generates questions."""
    rows: int | None = None
    """The first rows of each domain's training split; not given: all."""
    algorithm: RlAlgorithm = "grpo"
    """`grpo`: an answer is as good as it is better than its group. `ppo`: a critic says what to expect. `imitation`:
    cross entropy on the correct answers, the baseline that the other two must beat."""
    group_size: int = 8
    """Answers to each question."""
    max_prompt_tokens: int = 256
    """Questions with longer prompts are left out."""
    max_new_tokens: int = 256
    updates_per_rollout: int = 1
    """Parts of a rollout that each get an update. With 1 the answers come from the very weights that learn."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """A token whose probability falls below 1 - clip_low or rises above 1 + clip_high times its old value has no gradient."""
    kl: float = 0.0
    """Weight of the divergence from the model that the run began with; 0: off, and no reference model is held."""
    overlong: Overlong = "penalty"
    """Answers cut off at max_new_tokens: `penalty` takes up to 1 off the reward over the last fifth of the tokens,
    `mask` does not learn from those that were cut, `none` takes the reward as it is."""
    importance_cap: float = 2.0
    """Highest factor that corrects a token for the difference between engine and trainer; 0: no correction."""
    refills: int = 2
    """Times that questions without a lesson (all answers equally good) are replaced by others in a step."""
    critic_lr: float = 1e-5
    """Peak learning rate of the critic (ppo)."""
    pcgrad: PcGrad = "off"
    """What becomes of domains whose gradients point against each other: `watch` reports them, `global` and `tensor`
    project them (PCGrad) over all weights or for each tensor. All three keep the domains' gradients apart, which takes
    memory for each domain but one."""

    @property
    def names(self) -> tuple[str, ...]:
        """The domains as metrics and samples name them."""
        return tuple(map(domain_name, self.domains))

    def data_of(self, name: str) -> str | None:
        """The folder of a domain's files, if there is one."""
        folder = Path(self.data).expanduser() / name if self.data is not None else None
        return str(folder) if folder is not None and folder.is_dir() else None


def domain_name(task: str) -> str:
    """`gym:chain_sum` is chain_sum; a user's own file goes by its stem."""
    before, _, last = task.rpartition(":")
    return Path(before).stem if before.endswith(".py") else last


REINFORCING: dict[str, Any] = {
    "batch_size": 32, "lr": 1e-6, "schedule": "constant", "weight_decay": 0.0, "beta2": 0.999,
    "checkpoint_every": 20, "keep_checkpoints": 1,
}  # fmt: skip
"""Where the defaults of `[train]` differ from those of pre-training."""
