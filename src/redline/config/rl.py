"""The table `[rl]` of a recipe: reinforcement learning."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """What is asked, what is rewarded and how the weights learn. A step is one rollout: `train.batch_size` questions with
    `group_size` answers each, sampled at temperature 1 from all tokens (anything else would sample another policy than
    the one that is trained)."""

    domains: tuple[str, ...]
    """Tasks (`redline tasks`) whose questions are asked; every step asks some of each."""
    weights: tuple[float, ...] = ()
    """Each domain's share of a step, in their order; not given: equal shares."""
    data: str | None = None
    """Folder whose sub-folders, named after the domains, hold their files; without one a domain generates questions."""
    rows: int | None = None
    """The first rows of each domain's training split; not given: all."""
    algorithm: Literal["grpo", "ppo", "imitation"] = "grpo"
    """`grpo` compares an answer with its group, `ppo` with what a critic expects. `imitation` is cross entropy on the
    correct answers, the baseline that the other two must beat."""
    group_size: int = 8
    """Answers to each question."""
    max_prompt_tokens: int = 256
    """Questions with longer prompts are left out."""
    max_new_tokens: int = 256
    updates_per_rollout: int = 1
    """Updates per rollout, each on a part of it. With 1, the answers come from the very weights that learn."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """A token whose probability falls below 1 - clip_low or rises above 1 + clip_high times its old value has no gradient."""
    kl: float = 0.0
    """Weight of the divergence from the initial model; 0: off, and no reference model is held."""
    overlong: Literal["penalty", "mask", "none"] = "penalty"
    """Long answers: `penalty` takes up to 1 off the reward over the last fifth of max_new_tokens, `mask` does not learn
    from answers that were cut off, `none` changes nothing."""
    importance_cap: float = 2.0
    """Highest factor that corrects a token for the difference between engine and trainer; 0: no correction."""
    max_versions_behind: int = 1
    """With separate workers (`--on ray`): how many updates the weights behind an answer may lack. 1 draws the next step's
    answers while the trainer learns from this step's; 0 waits for the newest weights, as a run on one machine does."""
    refills: int = 2
    """Times per step that questions whose answers all earned the same reward are replaced by others."""
    critic_lr: float = 1e-5
    """Peak learning rate of the critic (ppo)."""
    pcgrad: Literal["off", "watch", "global", "tensor"] = "off"
    """What to do if the gradients of domains point against each other: `watch` reports it; `global` and `tensor`
    project them (PCGrad), over all weights or tensor by tensor. All three keep the domains' gradients apart, which takes
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
