"""Rules on what was read, on paper: slow updates without a period, too few updates, where the time of an
update goes, advice."""

import json
import random
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.diagnose.finding import Evidence, Finding, Gain, ordered
from redline.diagnose.observed import Facts, Observed, Step
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.diagnose.summary import split, too_little
from redline.errors import DataError


def of(times_s: list[float], **values: float) -> Observed:
    steps = tuple(Step(step=i, step_s=step_s, **values) for i, step_s in enumerate(times_s, start=1))  # type: ignore[arg-type]
    return Observed(source="", format="jsonl", steps=steps)


# ---- slow updates at no fixed interval ----


def test_slow_updates_without_a_period_are_told_with_what_they_cost() -> None:
    """80 of 1,000 take five times as long: 0.32 of 1.32 of the time."""
    draw = random.Random(5)
    late = set(draw.sample(range(10, 1000), 80))
    (found,) = diagnose(of([1.25 if i in late else 0.25 for i in range(1000)]))
    assert found.cause == "slow-updates"
    assert found.title.startswith("24% of the time is lost in 80 slow updates")
    assert found.gain is not None
    assert (found.gain.low, found.gain.high) == pytest.approx((1.0, 1.32), rel=0.01)
    assert found.confidence < 0.5


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.4])
def test_updates_that_all_differ_are_not_called_slow(spread: float) -> None:
    """A busy machine: no two updates alike. Of 100 such runs none is told."""
    for seed in range(100):
        draw = random.Random(seed)
        assert diagnose(of([0.25 * draw.lognormvariate(0, spread) for _ in range(300)])) == []


def test_two_slow_updates_are_chance() -> None:
    assert diagnose(of([1.5 if i in (20, 33) else 0.25 for i in range(60)])) == []


def test_a_stall_is_not_told_twice() -> None:
    assert [f.cause for f in diagnose(of([1.25 if i % 20 == 7 else 0.25 for i in range(400)]))] == ["stall"]


def test_slow_updates_stand_behind_every_named_cause() -> None:
    def finding(cause: str, gain: float | None, confidence: float) -> Finding:
        gains = Gain(1.0, gain, "") if gain else None
        return Finding(
            cause=cause,
            kind="cause",
            title="",
            evidence=(Evidence("", 1, ""),),
            fix="",
            gain=gains,
            confidence=confidence,
        )

    given = [
        finding("nanogpt-mfu", None, 0.9),
        finding("slow-updates", 3.0, 0.3),
        finding("slow-loader", 1.06, 0.3),
    ]
    assert [f.cause for f in ordered(given)] == ["slow-loader", "slow-updates", "nanogpt-mfu"]


# ---- where the time goes ----


def test_the_parts_of_an_update_add_up_where_their_medians_would_not() -> None:
    """Forward is slow in one half of the updates and backward in the other: their medians leave a gap that is
    in no update."""
    steps = tuple(
        Step(
            step=i,
            step_s=1.0,
            forward_s=0.2 if i % 3 else 0.6,
            backward_s=0.4 if i % 3 == 1 else 0.2,
            optimizer_s=0.2 if i % 3 else 0.18,
        )
        for i in range(1, 66)
    )
    idle = [1.0 - (s.forward_s or 0) - (s.backward_s or 0) - (s.optimizer_s or 0) for s in steps[5:]]
    parts = split(Observed(source="", format="run", steps=steps))
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["idle"] == pytest.approx(sum(idle) / len(idle))


def test_a_wait_that_is_longer_than_what_is_left_is_counted_as_far_as_that() -> None:
    """The loader's 0.7 s passed beside the GPU's work but for 0.1."""
    steps = tuple(
        Step(step=i, step_s=1.0, forward_s=0.3, backward_s=0.6, data_wait_s=0.7) for i in range(1, 31)
    )
    parts = split(Observed(source="", format="run", steps=steps))
    assert parts["data wait"] == pytest.approx(0.1)
    assert parts["idle"] == pytest.approx(0.0)


# ---- too few updates ----


def few(updates: int, *, means: bool = False, apart: int = 1) -> Observed:
    """What makes verl's rules, a foreign log's and ours speak."""
    steps = tuple(
        Step(
            step=apart * i,
            step_s=100.0,
            tokens=1000.0,
            mfu=0.1,
            memory_bytes=8e9,
            communication_s=30.0,
            parts_s={"gen": 60.0, "reward": 25.0},
        )
        for i in range(1, updates + 1)
    )
    facts = Facts(
        memory_bytes=80e9,
        parameters=1e9,
        gpu="h100-80g",
        gpus=1,
        response_length=100.0,
        longest_response=1000.0,
    )
    return Observed(source="", format="verl", steps=steps, facts=facts, lines_are_means=means)


SHARES = {"slow-reward", "uncached-generation", "long-tail", "communication", "small-passes"}


@pytest.mark.parametrize(("updates", "told"), [(2, False), (7, False), (8, True), (30, True)])
def test_two_updates_are_too_few_for_any_share(updates: int, told: bool) -> None:
    observed = few(updates)
    causes = {f.cause for f in diagnose(observed)}
    assert causes & SHARES == (SHARES if told else set())
    assert (too_little(observed) is None) == told


@pytest.mark.parametrize(("updates", "told"), [(2, False), (9, True)])
def test_a_low_mfu_of_two_updates_is_not_told(updates: int, told: bool) -> None:
    observed = few(updates)
    assert (
        "low-mfu"
        in {
            f.cause
            for f in diagnose(Observed(source="", format="csv", steps=observed.steps, facts=observed.facts))
        }
    ) == told


def test_lines_that_are_means_of_ten_count_ten_times() -> None:
    assert too_little(few(4, means=True, apart=10)) is None
    assert too_little(few(4, means=False, apart=10)) is not None


# ---- advice ----


@pytest.mark.parametrize(
    ("precision", "first", "fp16"),
    [
        ("fp16", "bf16 instead", True),
        ("fp32", "a lower learning rate", False),
        (None, "a lower learning rate", True),
    ],
)
def test_advice_against_nan_begins_with_what_the_run_can_change(
    precision: str | None, first: str, fp16: bool
) -> None:
    steps = tuple(Step(step=i, not_a_number=i > 5) for i in range(1, 20))
    (found,) = diagnose(Observed(source="", format="csv", steps=steps, facts=Facts(precision=precision)))
    assert found.fix.startswith(first)
    assert ("fp16" in found.fix) == fp16


def test_what_a_failed_run_advises_itself_is_the_advice() -> None:
    event = {
        "event": "failed",
        "error": "loss is nan at step 41: lower train.lr (now 0.3), set train.clip_norm",
    }
    (found,) = diagnose(Observed(source="", format="run", events=(event,)))
    assert found.fix == "lower train.lr (now 0.3), set train.clip_norm"


def test_a_failure_that_passed_is_not_said_to_last() -> None:
    steps = tuple(Step(step=i, not_a_number=i in (5, 6)) for i in range(1, 20))
    (found,) = diagnose(Observed(source="", format="csv", steps=steps))
    assert found.title.endswith("in 2 of the updates, the first 5")


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"a": 1, "b": 1, "step_s": 0.2}) + "\n")
    assert main(["diagnose", str(tmp_path / "log.jsonl"), "--map", "step=a,step=b"]) == 2
    assert "--map names step twice: a and b" in " ".join(capsys.readouterr().err.split())


def test_a_folder_of_rounds_names_them(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"round-{number}").mkdir()
        (tmp_path / f"round-{number}" / "events.jsonl").write_text('{"event": "start"}\n')
    with pytest.raises(DataError, match=r"holds 2 rounds: name one of them, .*round-1 and so on"):
        read(tmp_path)
