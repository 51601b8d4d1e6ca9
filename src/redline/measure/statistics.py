"""What block times say: medians with distribution-free intervals, and whether one arm is faster than another. No torch.

    interval([0.51, 0.50, 0.52, 0.50, 0.51, 0.53])            # the median and its 95% interval
    compare(before.blocks_s, after.blocks_s, paired=True)     # Comparison(ratio=1.08, low=1.05, high=1.11, ...)

An interval lies between two order statistics of the blocks, so outliers widen it but do not move it. Blocks of arms that
took turns are compared round by round, which cancels drifting clocks. Two processes of the same code differ by a little
that no block shows (memory layout, clocks): that spread is added to every interval. Of whole runs there are only a few: they have
`difference` and, if the seeds of both arms are the same, `paired` with a verdict that allows for a margin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Literal

CONFIDENCE = 0.95
FEWEST_BLOCKS = 6
"""From fastest to slowest, six blocks hold the median with 96.9% confidence; five do not reach 95%."""
TOGETHER_SPREAD, APART_SPREAD = 0.01, 0.02
"""How much two processes of the same code differ, in turns and one after the other (others report 1 to 3%)."""
STATIONARY_SPREAD, STATIONARY_TREND = 0.03, 0.02
"""Warm-up is over when the last three steps are this close, or no longer this much faster than those before."""
LONG_S = 1.0
"""Or after two steps this long, which launch as much as dozens of short ones."""
NOISY, NOISY_ROUNDS = 0.1, 4
"""If a ratio is not known to within NOISY after its rounds, there are up to NOISY_ROUNDS times as many. The noise
decides how many, not the verdict."""
HOPELESS = 0.03
"""An arm whose fastest block is slower by this much than the best arm's slowest is not worth more blocks."""
PLAIN = 1.2
"""Arms whose blocks differ by this factor need no more of them."""

SpeedVerdict = Literal["faster", "slower", "not resolved"]
MarginVerdict = Literal["not worse", "worse", "cannot tell"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and the two blocks between which it lies."""

    median: float
    low: float
    high: float
    confidence: float
    """Confidence that the true median lies between `low` and `high`; below CONFIDENCE if there are fewer than FEWEST_BLOCKS."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How much faster the second arm is than the first: 1.08 is 8% more steps in a second."""

    ratio: float
    low: float
    high: float
    verdict: SpeedVerdict
    paired: bool
    """Whether the arms took turns."""

    def __str__(self) -> str:
        return f"{self.ratio:.3f}x [{self.low:.3f}, {self.high:.3f}] {self.verdict}"


T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Student's t that 5% exceed, for 1 to 10 degrees of freedom; beyond, the last, which is on the safe side."""


@dataclass(frozen=True)
class Difference:
    """Between the means of two sets of runs, with a 90% interval: each end is wrong once in 20 times."""

    mean: float
    low: float
    high: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """How much larger the second mean is (Welch). Seeds are too few for order statistics, and what varies from seed to
    seed (a final loss, the logarithm of a time) is near enough to normal. Infinite with one run on either side."""
    mean = fmean(second) - fmean(first)
    if min(len(first), len(second)) < 2:
        return Difference(mean, -math.inf, math.inf)
    parts = [variance(side) / len(side) for side in (first, second)]
    error = math.sqrt(sum(parts))
    if not error:
        return Difference(mean, mean, mean)
    pairs = zip(parts, (first, second), strict=True)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in pairs)
    half = _t_95(max(1, math.floor(freedom + 1e-9))) * error
    return Difference(mean, mean - half, mean + half)


def paired(differences: Sequence[float]) -> Difference:
    """The mean of differences between runs of the same seed (Student), in which what the seed does to both cancels."""
    mean, n = fmean(differences), len(differences)
    if n < 2:
        return Difference(mean, -math.inf, math.inf)
    half = _t_95(n - 1) * math.sqrt(variance(differences) / n)
    return Difference(mean, mean - half, mean + half)


def within(worse_by: Difference, margin: float) -> MarginVerdict:
    """Whether something is worse by more than a margin: two one-sided tests, each wrong once in 20 times at most."""
    return "not worse" if worse_by.high <= margin else "worse" if worse_by.low > margin else "cannot tell"


def pairs_to_tell(differences: Sequence[float], margin: float) -> int | None:
    """How many pairs would tell, if mean and spread stay as they are; None if no number would, or nothing is known."""
    if len(differences) < 2 or not (gap := abs(margin - fmean(differences))):
        return None
    spread = math.sqrt(variance(differences))
    few = (n for n in range(2, len(T_95) + 2) if _t_95(n - 1) * spread <= gap * math.sqrt(n))
    return next(few, math.ceil((T_95[-1] * spread / gap) ** 2))


def _t_95(freedom: int) -> float:
    return T_95[min(freedom, len(T_95)) - 1]


def interval(values: Sequence[float]) -> Interval:
    """The median, and the narrowest pair of order statistics that holds it with CONFIDENCE, or the outermost."""
    assert values, "an interval needs at least one value"
    ordered, n = sorted(values), len(values)
    outside = [2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range((n + 1) // 2)]
    cut = max((k for k, share in enumerate(outside) if 1 - share >= CONFIDENCE), default=0)
    return Interval(
        median=median(ordered),
        low=ordered[cut],
        high=ordered[n - 1 - cut],
        confidence=max(0.0, 1 - outside[cut]),
    )


def compare(first_s: Sequence[float], second_s: Sequence[float], *, paired: bool) -> Comparison:
    """How much faster the second arm is, from seconds per step. `paired`: the arms took turns, block by block; only
    rounds that both have count."""
    if paired:
        rounds = interval(_batched([a / b for a, b in zip(first_s, second_s, strict=False)]))
        ratio, low, high = rounds.median, rounds.low, rounds.high
        sure = rounds.confidence >= CONFIDENCE or _apart(first_s, second_s)
    else:
        a, b = interval(first_s), interval(second_s)
        ratio, low, high = a.median / b.median, a.low / b.high, a.high / b.low
        sure = _apart(first_s, second_s)
    spread = TOGETHER_SPREAD if paired else APART_SPREAD
    low, high = low * (1 - spread), high * (1 + spread)
    verdict: SpeedVerdict = "not resolved"
    if sure and low > 1:
        verdict = "faster"
    elif sure and high < 1:
        verdict = "slower"
    return Comparison(ratio=ratio, low=low, high=high, verdict=verdict, paired=paired)


def _batched(ratios: Sequence[float]) -> list[float]:
    """Many rounds as FEWEST_BLOCKS medians of neighbours, which are not independent."""
    size = len(ratios) // FEWEST_BLOCKS
    if size < 2:
        return list(ratios)
    return [median(ratios[i * size : (i + 1) * size]) for i in range(FEWEST_BLOCKS)]


def _apart(first_s: Sequence[float], second_s: Sequence[float]) -> bool:
    """Whether all blocks of one arm are faster than all of the other's, and too many for chance."""
    separate = max(first_s) < min(second_s) or max(second_s) < min(first_s)
    return separate and 2 / math.comb(len(first_s) + len(second_s), len(first_s)) <= 1 - CONFIDENCE


def noisy(first_s: Sequence[float], second_s: Sequence[float]) -> bool:
    """Whether arms in turns need more rounds to be told apart."""
    rounds = interval(_batched([a / b for a, b in zip(first_s, second_s, strict=False)] or [1.0]))
    return rounds.high - rounds.low > NOISY * rounds.median


def stationary(steps_s: Sequence[float]) -> bool:
    """Whether steps have stopped getting faster: the last three agree or are no faster than those before, or two are
    long."""
    if len(steps_s) >= 2 and min(steps_s[-2:]) > LONG_S:
        return True
    if len(steps_s) < 3:
        return False
    last = steps_s[-3:]
    if max(last) <= (1 + STATIONARY_SPREAD) * min(last):
        return True
    return len(steps_s) >= 6 and median(last) >= (1 - STATIONARY_TREND) * median(steps_s[-6:-3])


def hopeless(best_s: Sequence[float], blocks_s: Sequence[float]) -> bool:
    """Whether an arm can be given up early: four blocks, each slower than all of the best arm's by HOPELESS."""
    return len(blocks_s) >= 4 and len(best_s) > 0 and min(blocks_s) > (1 + HOPELESS) * max(best_s)


def plain(first_s: Sequence[float], second_s: Sequence[float]) -> bool:
    """Whether four blocks of each are enough: all of one arm's are faster than all of the other's by PLAIN."""
    if min(len(first_s), len(second_s)) < 4:
        return False
    return min(second_s) > PLAIN * max(first_s) or min(first_s) > PLAIN * max(second_s)
