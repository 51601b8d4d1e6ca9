"""Memory of larger passes from smaller ones: exact on straight lines, safe on bent ones."""

from dataclasses import replace

import pytest
from trials import arithmetic_memory

from redline.config.load import load_recipe
from redline.measure.trial import PeakMemory
from redline.plan.arithmetic import fuses, kept_bytes
from redline.plan.hardware import hardware_as
from redline.plan.planner import make_plan
from redline.tune.memory import fit_memory

GiB = 2**30


def reading(active: float, ratio: float = 1.0, other: float = 0.6 * GiB) -> PeakMemory:
    return PeakMemory(
        allocated_bytes=int(active),
        active_bytes=int(active),
        reserved_bytes=int(active * ratio),
        other_bytes=int(other),
    )


def test_a_straight_line_is_met_exactly() -> None:
    fit = fit_memory({b: reading(3 * GiB + 0.4 * GiB * b, 1.02) for b in (4, 1, 2)})
    assert fit.active_bytes(64) == pytest.approx((3 + 0.4 * 64) * GiB, rel=1e-6)
    assert fit.reserved_bytes(64) == pytest.approx(1.02 * (3 + 0.4 * 64) * GiB, rel=1e-6)
    assert fit.residual == pytest.approx(0, abs=1e-6)


def test_a_reading_on_the_floor_does_not_bend_the_line() -> None:
    """The update's own peak holds at micro-batch 1; the line begins above it."""
    fit = fit_memory({b: reading(max(5.0, 3 + 1.0 * b) * GiB) for b in (1, 4, 8)})
    assert fit.active_bytes(32) == pytest.approx(35 * GiB, rel=1e-6)
    assert fit.active_bytes(1) == pytest.approx(5 * GiB, rel=1e-6)


def test_a_bent_line_widens_the_margin() -> None:
    straight = fit_memory({b: reading((4 + b) * GiB) for b in (1, 2, 4)})
    bent = fit_memory({1: reading(4.6 * GiB), 2: reading(6 * GiB), 4: reading(8 * GiB)})
    assert straight.fits(64, int(72 * GiB))
    assert bent.active_bytes(64) == straight.active_bytes(64)
    assert not bent.fits(64, int(72 * GiB))


def test_other_bytes_count_against_the_device() -> None:
    fit = fit_memory({b: reading(b * GiB, other=2 * GiB) for b in (1, 2, 4)})
    assert fit.fits(16, int(18.6 * GiB))
    assert not fit.fits(16, int(18 * GiB))


def test_recorded_readings_agree_with_the_planners_arithmetic() -> None:
    """gpt2-124m on an H200, compiled bf16: peaks at passes of 32 and 64 (LOG.md, benchmarks/). The line
    through them must meet the arithmetic, which knows nothing of it, at half and at twice those sizes."""
    recipe = load_recipe("gpt2-124m")
    plan = make_plan(recipe, hardware_as("h200-141g", 16))
    fit = fit_memory({32: reading(15.53e9), 64: reading(28_775_878_144, 34_705_768_448 / 28_775_878_144)})
    for size in (16, 128):
        assert fit.active_bytes(size) == pytest.approx(arithmetic_memory(recipe, plan, size).total, rel=0.015)


def test_reserved_bytes_have_a_line_of_their_own() -> None:
    """gpt2-124m on an H200, eager, 1,024 tokens: 9.28, 17.01 and 32.46 GiB reserved at 16, 32 and 64
    sequences (LOG.md). By the ratio of the reading before it the last was 7% too low."""
    active, reserved = {16: 8.29, 32: 14.50, 64: 26.92}, {16: 9.28, 32: 17.01, 64: 32.46}
    fit = fit_memory({size: reading(active[size] * GiB, reserved[size] / active[size]) for size in (16, 32)})
    assert fit.reserved_bytes(64) == pytest.approx(reserved[64] * GiB, rel=0.01)


@pytest.mark.parametrize(("size", "gib"), [(8, 12.79), (16, 19.65), (32, 33.36)])
def test_recorded_peaks_without_a_compiler_agree_with_arithmetic(size: int, gib: float) -> None:
    """llama-350m on an H200, eager bf16, 1,024 tokens, two passes and more (LOG.md): RMSNorm and SwiGLU keep
    no copies."""
    recipe = load_recipe("llama-350m", ["plan.compile=off", "plan.recompute=none", "plan.loss_chunks=1"])
    plan = make_plan(recipe, hardware_as("h200-141g", 16))
    assert arithmetic_memory(recipe, plan, size).total == pytest.approx(gib * GiB, rel=0.002)


def test_on_a_cpu_eager_half_precision_keeps_more_than_on_a_gpu() -> None:
    """61,012 bytes a token in one block of llama-350m on a CPU, by saved-tensor hooks; on an H200 34,368."""
    model = load_recipe("llama-350m").model
    kept = [
        kept_bytes(model, "bf16", "none", fuses(compiled=False, cuda=cuda, precision="bf16"))
        for cuda in (False, True)
    ]
    assert kept == [pytest.approx(61_012, rel=0.15), pytest.approx(34_368, rel=0.01)]


def test_values_that_the_kernel_of_the_heads_copies_are_computed_again_with_queries_and_keys() -> None:
    """What it puts out is no product: recomputation does not keep it."""
    model = load_recipe("llama-350m").model
    plain, normed = (
        [kept_bytes(replace(model, qk_norm=qk_norm), "bf16", how, True) for how in ("none", "selective")]
        for qk_norm in (False, True)
    )
    assert normed == [plain[0] + 2 * model.kv_heads * model.head_size, plain[1]]
