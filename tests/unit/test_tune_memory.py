"""Memory from small probes: exact on straight lines, safe on bent ones, and no pick runs out of a synthetic
allocator's memory."""

import math

import numpy as np
import pytest

from redline.config.load import from_toml, load_recipe
from redline.measure.trial import Measurement, PeakMemory, Trial
from redline.plan.arithmetic import fuses, kept_bytes
from redline.plan.hardware import hardware_as
from redline.plan.plan import from_json
from redline.plan.planner import make_plan
from redline.tune import memory as room
from redline.tune.memory import Probe, arithmetic_memory, fit_memory, pick_micro_batch

GiB = 2**30


def probe(micro_batch: int, active: float, ratio: float = 1.0, other: float = 0.6 * GiB) -> Probe:
    memory = PeakMemory(
        allocated_bytes=int(active),
        active_bytes=int(active),
        reserved_bytes=int(active * ratio),
        other_bytes=int(other),
    )
    return Probe(micro_batch=micro_batch, memory=memory)


def test_a_straight_line_is_met_exactly() -> None:
    fit = fit_memory([probe(b, 3 * GiB + 0.4 * GiB * b, 1.02) for b in (4, 1, 2)])
    assert fit.active_bytes(64) == pytest.approx((3 + 0.4 * 64) * GiB, rel=1e-6)
    assert fit.reserved_bytes(64) == pytest.approx(1.02 * (3 + 0.4 * 64) * GiB, rel=1e-6)
    assert fit.residual == pytest.approx(0, abs=1e-6)


def test_a_probe_on_the_floor_does_not_bend_the_line() -> None:
    """The update's own peak holds at micro-batch 1; the line begins above it."""
    fit = fit_memory([probe(b, max(5.0, 3 + 1.0 * b) * GiB) for b in (1, 4, 8)])
    assert fit.active_bytes(32) == pytest.approx(35 * GiB, rel=1e-6)
    assert fit.active_bytes(1) == pytest.approx(5 * GiB, rel=1e-6)


def test_a_bent_line_widens_the_margin() -> None:
    straight = fit_memory([probe(b, (4 + b) * GiB) for b in (1, 2, 4)])
    bent = fit_memory([probe(1, 4.6 * GiB), probe(2, 6 * GiB), probe(4, 8 * GiB)])
    assert straight.fits(64, int(72 * GiB))
    assert bent.active_bytes(64) == straight.active_bytes(64)
    assert not bent.fits(64, int(72 * GiB))


def test_other_bytes_count_against_the_device() -> None:
    probes = [probe(b, b * GiB, other=2 * GiB) for b in (1, 2, 4)]
    assert fit_memory(probes).fits(16, int(18.6 * GiB))
    assert not fit_memory(probes).fits(16, int(18 * GiB))


def test_recorded_readings_agree_with_the_planners_arithmetic() -> None:
    """gpt2-124m on an H200, compiled bf16: peaks at passes of 32 and 64 (LOG.md, benchmarks/). The line
    through them must meet the arithmetic, which knows nothing of it, at half and at twice those sizes."""
    recipe = load_recipe("gpt2-124m")
    plan = make_plan(recipe, hardware_as("h200-141g", 16))
    fit = fit_memory([probe(32, 15.53e9), probe(64, 28_775_878_144, ratio=34_705_768_448 / 28_775_878_144)])
    for size in (16, 128):
        assert fit.active_bytes(size) == pytest.approx(arithmetic_memory(recipe, plan, size).total, rel=0.015)


def test_reserved_bytes_have_a_line_of_their_own() -> None:
    """gpt2-124m on an H200, eager, 1,024 tokens: 9.28, 17.01 and 32.46 GiB reserved at 16, 32 and 64
    sequences (LOG.md). By the ratio of the probe before it the last was 7 % too low."""
    active, reserved = {16: 8.29, 32: 14.50, 64: 26.92}, {16: 9.28, 32: 17.01, 64: 32.46}
    fit = fit_memory(
        [probe(size, active[size] * GiB, ratio=reserved[size] / active[size]) for size in (16, 32)]
    )
    assert fit.reserved_bytes(64) == pytest.approx(reserved[64] * GiB, rel=0.01)


@pytest.mark.parametrize(("size", "gib"), [(8, 12.79), (16, 19.65), (32, 33.36)])
def test_recorded_peaks_without_a_compiler_agree_with_arithmetic(size: int, gib: float) -> None:
    """llama-350m on an H200, eager bf16, 1,024 tokens, two passes and more (LOG.md): RMSNorm and SwiGLU keep
    no copies."""
    recipe = load_recipe("llama-350m", ["plan.compile=off", "plan.recompute=none", "plan.loss_chunks=1"])
    plan = make_plan(recipe, hardware_as("h200-141g", 16))
    assert arithmetic_memory(recipe, plan, size).total == pytest.approx(gib * GiB, rel=0.002)


class Allocator:
    """A synthetic caching allocator: arithmetic's bytes off by a constant error, rounded to 2 MiB blocks,
    reserved by a noisy ratio."""

    def __init__(self, limit_bytes: int, seed: int) -> None:
        self.limit_bytes, self.generator = limit_bytes, np.random.default_rng(seed)
        self.scale, self.ratio = self.generator.uniform(0.8, 1.25), self.generator.uniform(1.0, 1.08)
        self.runs: list[tuple[int, str]] = []

    def __call__(self, trial: Trial) -> Measurement:
        recipe, plan = (
            from_toml(trial.setting["recipe"], where="t"),
            from_json(trial.setting["plan"], where="t"),
        )
        parts = arithmetic_memory(recipe, plan, plan.micro_batch)
        growing = self.scale * (parts.activations + parts.logits)
        active = 2**21 * math.ceil((parts.total - parts.activations - parts.logits + growing) / 2**21)
        reserved = int(active * self.ratio * self.generator.uniform(0.99, 1.01))
        other = 600 * 2**20
        outcome = "ok" if reserved + other <= self.limit_bytes else "out_of_memory"
        self.runs.append((plan.micro_batch, outcome))
        if outcome != "ok":
            return Measurement(outcome="out_of_memory")
        return Measurement(
            outcome="ok",
            memory=PeakMemory(
                allocated_bytes=active, active_bytes=active, reserved_bytes=reserved, other_bytes=other
            ),
        )


CASES = [
    (name, length, gigabytes)
    for name in ("gpt2-124m", "llama-350m", "gpt-1.3b")
    for length in (256, 512, 1024, 2048)
    for gigabytes in (40, 80, 140)
]


@pytest.mark.parametrize(("name", "length", "gigabytes"), CASES)
def test_picks_do_not_run_out_of_memory_and_are_predicted(name: str, length: int, gigabytes: int) -> None:
    recipe = load_recipe(
        name, [f"data.seq_len={length}", f"model.context_length={max(length, 1024)}", "train.batch_size=4096"]
    )
    plan = make_plan(recipe, hardware_as("h200-141g", 16))
    limit_bytes = gigabytes * GiB
    allocator = Allocator(limit_bytes, seed=length + gigabytes)
    pick = pick_micro_batch(recipe, plan, allocator, capacity_bytes=limit_bytes)
    assert pick is not None
    sizes = [size for size, _ in allocator.runs]
    assert sizes == sorted(set(sizes)), "probes grow"
    assert all(outcome == "ok" for _, outcome in allocator.runs), "no probe runs out of memory"
    seen = room.probe(recipe, plan, pick.micro_batch, allocator)
    assert seen.outcome == "ok"
    assert seen.memory is not None
    assert pick.fit.active_bytes(pick.micro_batch) == pytest.approx(seen.memory.active_bytes, rel=0.015)
    assert pick.fit.reserved_bytes(pick.micro_batch) == pytest.approx(seen.memory.reserved_bytes, rel=0.05)
    # not timid either: twice as many would fill more than 93 %
    if 2 * pick.micro_batch <= recipe.train.batch_size // 2:
        twice = room.probe(recipe, plan, 2 * pick.micro_batch, allocator).memory
        assert twice is None or twice.reserved_bytes + twice.other_bytes > 0.93 * limit_bytes


@pytest.mark.parametrize("batch", [27, 45, 75, 125, 225])
def test_divisors_that_lie_far_apart_do_not_make_the_pick_timid(batch: int) -> None:
    recipe = load_recipe("gpt2-124m", [f"train.batch_size={batch}", "data.seq_len=256"])
    plan = make_plan(recipe, hardware_as("h200-141g", 16))
    allocator = Allocator(140 * GiB, seed=batch)
    pick = pick_micro_batch(recipe, plan, allocator, capacity_bytes=140 * GiB)
    assert pick is not None
    assert pick.micro_batch == batch
    assert all(outcome == "ok" for _, outcome in allocator.runs)


def test_on_a_cpu_eager_half_precision_keeps_more_than_on_a_gpu() -> None:
    """61,012 bytes a token in one block of llama-350m on a CPU, by saved-tensor hooks; on an H200 34,368."""
    model = load_recipe("llama-350m").model
    kept = [
        kept_bytes(model, "bf16", "none", fuses(compiled=False, cuda=cuda, precision="bf16"))
        for cuda in (False, True)
    ]
    assert kept == [pytest.approx(61_012, rel=0.15), pytest.approx(34_368, rel=0.01)]


def test_a_device_too_small_for_the_first_probe_gives_no_pick() -> None:
    recipe = load_recipe("gpt-1.3b", ["train.batch_size=64"])
    plan = make_plan(recipe, hardware_as("h200-141g", 16))
    assert pick_micro_batch(recipe, plan, Allocator(8 * GiB, seed=0), capacity_bytes=8 * GiB) is None
