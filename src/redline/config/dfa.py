"""The table `[dfa]` of a recipe: how direct feedback alignment learns. It counts if train.rule is "dfa"."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DfaConfig:
    """Each block (or layer) learns from the error of the output, carried to it by a fixed random matrix (or, with
    error `residual`, unchanged)."""

    error: Literal["logits", "hidden", "residual"] = "logits"
    """The error that is fed back: the loss's gradient at the logits (vocab_size numbers per token), or at the head's
    input (hidden_size numbers: far less work, but the head cannot align with the feedback, and the blocks learn
    less; docs/okadfa.md). `residual`: no random matrix; every block gets the gradient at the top of the residual
    stream unchanged, which is its own except for what the blocks above do with its output."""
    feedback: Literal["dense", "generated"] = "dense"
    """Keep the random matrices in memory, or draw them from the seed whenever they are needed."""
    shared: bool = False
    """Use one matrix for the embedding and all blocks (layer by layer: one set of matrices for all blocks): the error is
    multiplied once per pass instead of once per block."""
    depth: Literal["block", "layer"] = "block"
    """`block`: back-propagation inside a block, feedback between blocks (the hybrid). `layer`: feedback to each of
    a block's four matrices, and back-propagation through a nonlinearity at most."""
    top_blocks: int = 0
    """How many of the last blocks learn by back-propagation from the loss."""
