"""The guard passes what rounds and refuses what trains differently."""

from dataclasses import replace

import pytest

from redline.measure.trial import Measurement
from redline.tune.guard import guard

REFERENCE = Measurement(outcome="ok", losses=(10.0, 9.0, 8.0), grad_norms=(2.0, 1.5, 1.0))


def moved(loss: float, norm: float = 0.0) -> Measurement:
    """The reference with its last loss and gradient norm off by a share."""
    losses = (*REFERENCE.losses[:-1], REFERENCE.losses[-1] * (1 + loss))
    return replace(
        REFERENCE,
        losses=losses,
        grad_norms=(*REFERENCE.grad_norms[:-1], REFERENCE.grad_norms[-1] * (1 + norm)),
    )


@pytest.mark.parametrize(
    ("loss", "norm", "effect", "precision", "passed"),
    [
        (0.0, 0.0, "exact", "fp32", True),
        (3e-6, 0.0, "exact", "fp32", True),
        (3e-5, 0.0, "exact", "fp32", False),
        (-3e-5, 0.0, "exact", "fp32", False),
        (1e-3, 0.0, "exact", "bf16", True),
        (5e-3, 0.0, "exact", "bf16", False),
        (5e-3, 0.0, "rounding", "bf16", True),
        (2e-2, 0.0, "rounding", "bf16", False),
        (0.0, 0.05, "rounding", "bf16", True),
        (0.0, 0.5, "rounding", "bf16", False),
    ],
)
def test_bands(loss: float, norm: float, effect: str, precision: str, passed: bool) -> None:
    verdict = guard(REFERENCE, moved(loss, norm), effect, precision=precision)  # type: ignore[arg-type]
    assert verdict.passed is passed
    assert ("refused" in verdict.words) is not passed
    assert f"loss {abs(loss):.0e}, gradient norm {abs(norm):.0e} over 3 steps" in verdict.words


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loss_that_is_no_number_is_refused_wherever_it_stands(place: int) -> None:
    losses = [None if i == place else loss for i, loss in enumerate(REFERENCE.losses)]
    norms = [None if i == place else norm for i, norm in enumerate(REFERENCE.grad_norms)]
    assert not guard(REFERENCE, replace(REFERENCE, losses=tuple(losses)), "rounding", precision="bf16").passed
    assert not guard(
        REFERENCE, replace(REFERENCE, grad_norms=tuple(norms)), "rounding", precision="bf16"
    ).passed


def test_an_update_that_fp16_skips_in_both_is_no_difference() -> None:
    skipped = replace(REFERENCE, grad_norms=(None, 1.5, 1.0))
    assert guard(skipped, skipped, "exact", precision="fp16").passed
    assert not guard(skipped, REFERENCE, "exact", precision="fp16").passed


def test_nothing_to_compare_says_so() -> None:
    found = guard(REFERENCE, Measurement(outcome="ok"), "exact", precision="fp32")
    assert found == (True, "not checked: no losses")
