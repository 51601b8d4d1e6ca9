"""Proof that direct feedback alignment is on: `redline verify` compares the gradients of a pass with those of the
rule in fp32 and with those of back-propagation.

    learning_rule(recipe.feedback, found, expected, backpropagated)
"""

import torch

from redline.config.dfa import DfaConfig
from redline.tune.checks import Numbers
from redline.tune.evidence import Check, checked

FAR = 0.9
"""Cosine with the gradient of back-propagation that random feedback does not reach: in n dimensions it begins at
about 1 / sqrt(n), and what training adds falls far short of this (docs/okadfa.md)."""


def learning_rule(dfa: DfaConfig, found: Numbers, expected: Numbers, backpropagated: Numbers) -> Check:
    """Whether the blocks below the top ones have the gradients of feedback alignment, and not those of
    back-propagation."""
    numbers = {int(name.split(".")[1]) for name in expected.gradients if name.startswith("blocks.")}
    below = sorted(numbers)[: max(0, len(numbers) - dfa.top_blocks)]
    prefixes = tuple(f"blocks.{number}." for number in below)
    names = [name for name in expected.gradients if name.startswith(prefixes)]
    rule, plain = _cosine(names, found, expected), _cosine(names, found, backpropagated)
    evidence = (
        f"gradients of {len(below)} of {len(numbers)} blocks have cosine {rule:.4f} with feedback alignment in fp32"
        f" and {plain:.4f} with back-propagation (at most {FAR})"
    )
    return checked("learning rule", not below or (rule > plain and plain <= FAR), evidence)


def _cosine(names: list[str], one: Numbers, other: Numbers) -> float:
    if not names:
        return 0.0
    a, b = (torch.cat([n.gradients[name].double().flatten() for name in names]) for n in (one, other))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
