"""Learning-rate schedules: hand-computed values, and what holds for any of them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.config.recipe import TrainConfig
from redline.train.optimizer import lr_factor, progress
from redline.train.progress import Progress


def train(**changes) -> TrainConfig:
    return TrainConfig(**{"batch_size": 1, "steps": 100, "lr": 1.0, "min_lr_ratio": 0.1, **changes})


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        # 0.1 + 0.9 x (1 + cos(pi p)) / 2, with p = (step - 1) / 100
        ({"schedule": "cosine"}, {1: 1.0, 26: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 51: 0.55, 101: 0.1}),
        # warm-up over 20 of 100 steps, then p = ((step - 1) / 100 - 0.2) / 0.8
        (
            {"schedule": "cosine", "warmup_steps": 20},
            {1: 0.05, 10: 0.5, 20: 1.0, 21: 1.0, 61: 0.55, 101: 0.1},
        ),
        ({"schedule": "linear"}, {1: 1.0, 51: 0.55, 91: 0.19, 101: 0.1}),
        (
            {"schedule": "linear", "warmup_steps": 4, "min_lr_ratio": 0.0},
            {1: 0.25, 4: 1.0, 5: 1.0, 53: 0.5, 101: 0.0},
        ),
        # flat until the last fifth, then straight down
        (
            {"schedule": "wsd", "decay_fraction": 0.2, "min_lr_ratio": 0.0},
            {1: 1.0, 80: 1.0, 81: 1.0, 91: 0.5, 101: 0.0},
        ),
        # with a warm-up the fifth is of what follows it: p = 0.9 stands at progress 0.5 + 0.9 x 0.5
        (
            {"schedule": "wsd", "decay_fraction": 0.2, "warmup_steps": 50},
            {25: 0.5, 50: 1.0, 91: 1.0, 96: 0.55, 101: 0.1},
        ),
        ({"schedule": "wsd", "decay_fraction": 0.0}, {1: 1.0, 101: 1.0}),
        ({"schedule": "constant", "warmup_steps": 10}, {1: 0.1, 10: 1.0, 50: 1.0, 101: 1.0}),
        ({"schedule": "linear", "warmup_steps": 100}, {1: 0.01, 50: 0.5, 100: 1.0}),
    ],
)
def test_hand_computed_values(changes, values):
    for step, expected in values.items():
        assert lr_factor(train(**changes), step) == pytest.approx(expected, abs=1e-12), step


SHAPES = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["cosine", "linear", "wsd", "constant"]),
        "steps": st.integers(2, 500),
        "min_lr_ratio": st.floats(0.0, 1.0),
        "decay_fraction": st.floats(0.05, 1.0),
    }
)


@given(SHAPES, st.floats(0.0, 0.9))
def test_a_run_by_steps_is_bounded_smooth_and_falls(changes, warm_share):
    config = train(**changes, warmup_steps=int(warm_share * changes["steps"]))
    factors = [lr_factor(config, step) for step in range(1, config.steps + 2)]
    warm, after = factors[: config.warmup_steps], factors[config.warmup_steps :]
    assert warm == sorted(warm)
    assert all(config.min_lr_ratio - 1e-12 <= f <= 1.0 for f in after)
    assert after == sorted(after, reverse=True)
    if warm:
        assert warm[-1] == 1.0
    # No jump: the steepest shape falls by pi/2 x (cosine) or 1 / decay_fraction x (wsd) the share of a step.
    steepest = max(math.pi / 2, 1 / config.decay_fraction) / (config.steps - config.warmup_steps)
    assert all(abs(a - b) <= steepest + 1e-9 for a, b in itertools.pairwise(after))


@given(SHAPES, st.integers(0, 400), st.integers(1, 500))
def test_the_clock_ends_the_schedule_whatever_the_steps(changes, warmup_steps, step):
    config = train(**changes, warmup_steps=min(warmup_steps, changes["steps"]), max_hours=1.5)
    step = min(step, config.steps)
    at_the_end = lr_factor(config, step, elapsed_s=1.5 * 3600)
    if config.schedule == "constant":
        assert at_the_end == min(1.0, step / config.warmup_steps if config.warmup_steps else 1.0)
    else:
        assert at_the_end <= config.min_lr_ratio + 1e-12
        if step >= config.warmup_steps:
            assert at_the_end == pytest.approx(config.min_lr_ratio, abs=1e-12)


def test_the_further_of_steps_and_hours_counts():
    config = train(steps=100, max_hours=1.0)
    assert progress(config, 51, elapsed_s=360.0) == 0.5
    assert progress(config, 11, elapsed_s=2700.0) == 0.75
    assert progress(config, 11, elapsed_s=99999.0) == 1.0
    assert lr_factor(config, 11, elapsed_s=1800.0) == lr_factor(config, 51)


def test_a_clock_that_overtakes_the_warm_up_makes_no_jump():
    """A slow machine: 20 warm-up steps take half of the hour. The rate must bend, not fall off a cliff at
    step 21."""
    config = train(steps=100, warmup_steps=20, max_hours=1.0, schedule="linear")
    factors = [lr_factor(config, step, elapsed_s=(step - 1) * 90.0) for step in range(1, 42)]
    assert max(abs(a - b) for a, b in itertools.pairwise(factors)) <= 0.06
    assert factors[-1] == pytest.approx(0.1)


def test_a_run_ends_for_the_first_reason_that_holds() -> None:
    """At a target, a last step, a limit of time or too many validations without a gain, in that order."""
    config = train(target_loss=2.0, max_hours=1.0, early_stop_evals=2)
    stand = Progress(step=99)
    assert stand.ended(config, clock_s=3599.9) is None
    assert [stand.validated(loss) for loss in (3.0, 2.5, 2.5)] == [True, True, False]
    assert stand.ended(config, clock_s=0.0) is None
    assert not stand.validated(2.6)
    assert (stand.best_loss, stand.best_step) == (2.5, 99)
    assert stand.ended(config, clock_s=0.0) == "early stop: 2 validations without a better loss"
    assert stand.ended(config, clock_s=3600.0) == "time limit of 1 h"
    stand.step = 100
    assert stand.ended(config, clock_s=3600.0) == "finished"
    assert stand.validated(2.0)
    assert stand.ended(config, clock_s=3600.0) == "target loss of 2 reached (2.0000)"
    stand.forget_validations()
    assert stand.ended(config, clock_s=3600.0) == "finished"
    assert stand.validated(9.0)
