"""The tokens over which the softmax of an update is taken, where that is not the whole vocabulary.

    words = draw(targets, size=16_384, vocab_size=50_304, seed=0)

All targets of the update are candidates, and a uniform sample of the other tokens stands for the rest: with m of n others,
each stands for n / m, so that log(n / m) added to its logits (model/cross_entropy.py) keeps the expected sum of
exponentials that of the whole vocabulary. Every process draws from the targets of the whole update, not from its own part: then neither the number of
processes nor the size of a pass changes the training. The draw depends on the targets and the seed alone, so a
resumed run repeats it.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from redline.errors import DataError

Words = NDArray[np.int32]
"""The candidates, then how many of them are targets; these come first."""


def draw(targets: NDArray[np.int64], *, size: int, vocab_size: int, seed: int) -> Words:
    present = np.zeros(vocab_size, dtype=bool)
    present[targets] = True
    wanted, others = np.flatnonzero(present), np.flatnonzero(~present)
    sampled = size - len(wanted)
    if sampled <= 0:
        raise DataError(
            f"an update has {len(wanted):,} different targets and needs more candidates than that, got"
            f" train.softmax_candidates={size}: raise it"
        )
    # The smallest of raw draws, which numpy keeps stable; `Generator.choice` may change with a version.
    keys = np.random.PCG64([seed, zlib.crc32(targets.tobytes())]).random_raw(len(others))
    chosen = others[np.sort(np.argpartition(keys, sampled - 1)[:sampled])]
    return np.concatenate([wanted, chosen, [len(wanted)]]).astype(np.int32)
