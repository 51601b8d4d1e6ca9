"""Intervals hold what they promise, real differences are found, and the same code against itself shows none:
by simulation."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from redline.measure.statistics import CONFIDENCE, compare, hopeless, interval, plain, stationary

SIMULATIONS = 3000


def machine(generator: np.random.Generator, steps: int) -> np.ndarray:
    """Slowness of a machine over time: a drift that remembers (2%), noise (1%), and a block in twenty up to
    30% slower."""
    drift = np.zeros(steps)
    for i in range(1, steps):
        drift[i] = 0.9 * drift[i - 1] + generator.normal(0, 0.02 * math.sqrt(1 - 0.9**2))
    outliers = np.where(generator.random(steps) < 0.05, generator.uniform(0, 0.3, steps), 0)
    return np.exp(drift + generator.normal(0, 0.01, steps) + outliers)


def in_turns(
    generator: np.random.Generator, speedup: float, rounds: int = 6
) -> tuple[list[float], list[float]]:
    """Blocks of two arms that take turns (A B, B A, ...), each process with a slowness of its own of 0.3
    %."""
    slow = machine(generator, 2 * rounds)
    own = np.exp(generator.normal(0, 0.003, 2))
    first, second = [], []
    for round_ in range(rounds):
        a, b = (2 * round_, 2 * round_ + 1) if round_ % 2 == 0 else (2 * round_ + 1, 2 * round_)
        first.append(float(slow[a] * own[0]))
        second.append(float(slow[b] * own[1] / speedup))
    return first, second


def one_after_the_other(generator: np.random.Generator, speedup: float) -> tuple[list[float], list[float]]:
    """Each arm on a machine of its own time, each process with a slowness of its own of 1%; no drift between
    the two."""
    own = np.exp(generator.normal(0, 0.01, 2))
    noise = np.exp(generator.normal(0, 0.01, (2, 6)))
    return (noise[0] * own[0]).tolist(), (noise[1] * own[1] / speedup).tolist()


@pytest.mark.parametrize(("arms", "paired"), [(in_turns, True), (one_after_the_other, False)])
def test_the_same_code_against_itself_shows_no_change(arms: Callable, paired: bool) -> None:
    generator = np.random.default_rng(0)
    verdicts = [compare(*arms(generator, 1.0), paired=paired).verdict for _ in range(SIMULATIONS)]
    assert verdicts.count("not resolved") / SIMULATIONS >= 0.95


def test_a_real_difference_is_found_and_its_interval_holds_it() -> None:
    generator = np.random.default_rng(1)
    found = [compare(*in_turns(generator, 1.15), paired=True) for _ in range(SIMULATIONS)]
    assert sum(c.verdict == "faster" for c in found) / SIMULATIONS > 0.8
    assert not any(c.verdict == "slower" for c in found)
    assert sum(c.low <= 1.15 <= c.high for c in found) / SIMULATIONS >= 0.95
    assert np.median([c.ratio for c in found]) == pytest.approx(1.15, rel=0.01)


def test_slower_is_the_mirror_of_faster() -> None:
    first, second = in_turns(np.random.default_rng(2), 1.3)
    faster, slower = compare(first, second, paired=True), compare(second, first, paired=True)
    assert (faster.verdict, slower.verdict) == ("faster", "slower")
    assert faster.ratio == pytest.approx(1 / slower.ratio, rel=1e-2)


@pytest.mark.parametrize("n", [6, 9, 15, 40])
def test_an_interval_holds_the_median_as_often_as_it_says(n: int) -> None:
    generator = np.random.default_rng(n)
    skewed = generator.exponential(1.0, (SIMULATIONS, n))  # its median is log 2, far from its mean
    held = [(i := interval(row.tolist())).low <= math.log(2) <= i.high for row in skewed]
    said = interval(skewed[0].tolist()).confidence
    assert said >= CONFIDENCE
    assert np.mean(held) == pytest.approx(said, abs=0.012)


def test_more_blocks_narrow_an_interval_that_is_not_all_of_them() -> None:
    values = list(range(20))
    # ranks 6 and 15 of 20: the textbook's sign interval
    assert (interval(values).low, interval(values).high) == (5, 14)
    assert (interval(values[:6]).low, interval(values[:6]).high) == (0, 5)
    assert interval(values[:6]).confidence == pytest.approx(1 - 2 / 2**6)


def test_five_blocks_resolve_nothing_unless_the_arms_lie_apart() -> None:
    near = [1.0, 1.1, 1.0, 1.1, 1.0]
    assert compare(near, [x / 1.05 for x in near], paired=True).verdict == "not resolved"
    assert compare(near, [x / 2 for x in near], paired=True).verdict == "faster"
    assert compare(near[:3], [x / 2 for x in near[:3]], paired=False).verdict == "not resolved"


def test_warm_up_ends_when_steps_stop_getting_faster() -> None:
    settling = [0.9, 0.3, 0.2, 0.15, 0.12, 0.11, 0.105, 0.102, 0.101, 0.1]
    ends = [n for n in range(len(settling) + 1) if stationary(settling[:n])]
    assert ends == [10]  # the last three lie within 3%
    noisy = [0.1, 0.12, 0.09, 0.11, 0.1, 0.12]
    assert not stationary(noisy[:5])
    assert stationary(noisy)
    assert [stationary([3.0]), stationary([3.0, 0.2]), stationary([3.0, 2.0])] == [False, False, True]


def test_a_hopeless_arm_is_given_up_and_a_close_one_is_not() -> None:
    best = [1.0, 1.02, 1.01, 1.0]
    assert not hopeless(best, [2.0, 2.0, 2.0])
    assert hopeless(best, [2.0, 2.0, 2.0, 2.0])
    assert not hopeless(best, [2.0, 2.0, 2.0, 1.04])
    assert not hopeless([], [2.0, 2.0, 2.0, 2.0]), "nothing is known of the best"


def test_a_plain_difference_needs_four_blocks_of_each_and_a_fifth_between_them() -> None:
    assert plain([1.0] * 4, [1.3] * 4)
    assert plain([1.3] * 4, [1.0] * 4)
    assert not plain([1.0] * 4, [1.3] * 3)
    assert not plain([1.0, 1.0, 1.0, 1.1], [1.3] * 4)


def test_long_series_are_compared_by_medians_of_neighbours() -> None:
    """What slows four rounds in a row is one disturbance: of six medians one says the contrary, of 24 rounds
    four would not count."""
    disturbed = [1.1 if place // 4 == 2 else 1 / 1.2 for place in range(24)]
    assert compare([1.0] * 24, disturbed, paired=True).verdict == "not resolved"
    scattered = [1.1 if place % 6 == 2 else 1 / 1.2 for place in range(24)]
    assert compare([1.0] * 24, scattered, paired=True).verdict == "faster"
