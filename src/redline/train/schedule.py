"""Learning-rate schedules: a factor on the peak rate, from how far the run has come.

Progress is the larger of steps/steps and hours/max_hours, so a run bounded by the clock decays to its end
whatever its speed.
"""

import math
from dataclasses import replace

from redline.config.recipe import TrainConfig


def fixed(train: TrainConfig, steps: int) -> TrainConfig:
    """The same for a run of so many updates: epochs and shares become numbers of updates."""
    warmup = train.warmup_steps or round(train.warmup_fraction * steps)
    return replace(train, steps=steps, epochs=0, warmup_steps=min(warmup, steps), warmup_fraction=0.0)


def progress(train: TrainConfig, step: int, elapsed_s: float) -> float:
    """How much of the run lies behind before update `step` (1 is the first), between 0 and 1."""
    by_steps = (step - 1) / train.steps
    by_clock = elapsed_s / (train.max_hours * 3600) if train.max_hours is not None else 0.0
    return min(1.0, max(by_steps, by_clock))


def lr_factor(train: TrainConfig, step: int, elapsed_s: float = 0.0) -> float:
    """Warm-up, then the schedule's shape down to `min_lr_ratio`; the lower of the two if the clock runs out early."""
    ramp = min(1.0, step / train.warmup_steps) if train.warmup_steps else 1.0
    warm, now = train.warmup_steps / train.steps, progress(train, step, elapsed_s)
    behind = max(0.0, (now - warm) / (1.0 - warm)) if warm < 1.0 else float(now == 1.0)
    return min(ramp, train.min_lr_ratio + (1.0 - train.min_lr_ratio) * _shape(train, behind))


def _shape(train: TrainConfig, behind: float) -> float:
    match train.schedule:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * behind))
        case "linear":
            return 1.0 - behind
        case "wsd":
            return min(1.0, (1.0 - behind) / train.decay_fraction) if train.decay_fraction > 0 else 1.0
        case "constant":
            return 1.0
