"""The tokens in the softmax of an update, where that is not the whole vocabulary.

    words = draw(targets, size=16_384, vocab_size=50_304, seed=0)

All targets of the update are candidates, and a uniform sample of the other tokens stands for the rest: with m of n others,
each stands for n / m, and log(n / m) is added to its logits (model/cross_entropy.py). So the sum of exponentials is that of
the whole vocabulary on average; its logarithm, the loss, is a little lower on average (Jensen's inequality).

Every process reads and draws for the whole update, not for its own part alone. So neither the number of processes nor the
size of a pass changes the training. The draw depends on the targets and the seed alone, so a resumed run repeats it.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from redline.errors import ConfigError

MOST = 16
"""Tokens that a sampled one may stand for. With 7.5 a 7M model lost 0.03 nats in 400 updates, with 20 it lost 0.10
(LOG.md)."""
Words = NDArray[np.int32]
"""The candidates, then how many of them are targets; these come first."""


def draw(targets: NDArray[np.int64], *, size: int, vocab_size: int, seed: int) -> Words:
    assert targets.min() >= 0, "an ignored target is not a target"
    present = np.zeros(vocab_size, dtype=bool)
    present[targets] = True
    wanted, others = np.flatnonzero(present), np.flatnonzero(~present)
    sampled = size - len(wanted)
    if sampled * MOST < len(others):
        raise ConfigError(
            f"train.softmax_candidates={size} is too few for an update with {len(wanted):,} different targets:"
            f" {max(0, sampled):,} would stand for {len(others):,} other tokens, and one may stand for {MOST} at"
            " most. Raise it; a run that has a checkpoint continues from there with --fork RUN --run NEW"
        )
    # The smallest of raw draws, which numpy keeps stable; `Generator.choice` may change with a version.
    keys = np.random.PCG64([seed, zlib.crc32(targets.tobytes())]).random_raw(len(others))
    chosen = others[np.sort(np.argpartition(keys, sampled - 1)[:sampled])]
    return np.concatenate([wanted, chosen, [len(wanted)]]).astype(np.int32)
