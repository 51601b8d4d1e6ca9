"""The random numbers of a sample: a function of its seed, its number and the position of the token, and of
nothing else.

Counter-based (SplitMix64 over the position), so a sample's numbers are the same on every device and in every
batch, and thousands of samples are drawn at once.
"""

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2^64 over the golden ratio
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, samples: np.ndarray, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) for each (seed, sample), as float32 with all of its 24 bits."""
    with np.errstate(over="ignore"):  # wrapping is intended
        stream = _mixed(
            _mixed(seeds.astype(np.int64).view(np.uint64) + _STEP) + samples.astype(np.uint64) * _STEP + _STEP
        )
        steps = np.arange(1, count + 1, dtype=np.uint64) * _STEP
        bits = _mixed(stream[:, None] + steps[None, :])
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
