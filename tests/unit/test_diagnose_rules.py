"""Rules on what was read, on paper: slow updates without a period, too few updates, where the time of an
update goes, advice."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from redline.cli.main import main
from redline.diagnose.answer import split, too_little
from redline.diagnose.finding import Evidence, Finding, Gain, causes, ordered, precision
from redline.diagnose.observed import Facts, Observed, Step
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose
from redline.diagnose.rules.memory import low_mfu
from redline.diagnose.trainers import named
from redline.errors import DataError


def log_of(
    times_s: list[float],
    trainer: str = "",
    facts: Facts | None = None,
    text: str = "",
    values: dict[str, float] | None = None,
    **more: float,
) -> Observed:
    timed = enumerate(times_s, start=1)
    steps = tuple(Step(step=i, step_s=s, more=more, **values or {}) for i, s in timed)  # type: ignore[arg-type]
    about = {"source": "", "format": "console", "updates": len(steps), "text": text}
    return Observed(**about, trainer=named(trainer), steps=steps, facts=facts or Facts())  # type: ignore[arg-type]


def found(observed: Observed) -> dict[str, Finding]:
    return {finding.cause: finding for finding in diagnose(observed)}


# ---- slow updates at no fixed interval ----


def test_slow_updates_without_a_period_are_told_with_what_they_cost() -> None:
    """80 of 1,000 take five times as long: 0.32 of 1.32 of the time."""
    draw = random.Random(5)
    late = set(draw.sample(range(10, 1000), 80))
    (found,) = diagnose(log_of([1.25 if i in late else 0.25 for i in range(1000)]))
    assert found.cause == "slow-updates"
    assert found.title.startswith("80 slow updates at irregular intervals cost 24%")
    assert found.gain is not None
    assert (found.gain.low, found.gain.high) == pytest.approx((1.0, 1.32), rel=0.01)
    assert found.confidence < 0.5


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.4])
def test_updates_that_all_differ_are_not_called_slow(spread: float) -> None:
    """A busy machine: no two updates alike. Of 100 such runs none is told."""
    for seed in range(100):
        draw = random.Random(seed)
        assert diagnose(log_of([0.25 * draw.lognormvariate(0, spread) for _ in range(300)])) == []


def test_two_slow_updates_are_chance() -> None:
    assert diagnose(log_of([1.5 if i in (20, 33) else 0.25 for i in range(60)])) == []


def test_a_stall_is_not_told_twice() -> None:
    assert [f.cause for f in diagnose(log_of([1.25 if i % 20 == 7 else 0.25 for i in range(400)]))] == [
        "stall"
    ]


def test_slow_updates_stand_behind_every_named_cause() -> None:
    def finding(cause: str, gain: float | None, confidence: float) -> Finding:
        about: dict[str, Any] = {"kind": "cause", "title": "", "evidence": (Evidence("", 1, ""),), "fix": ""}
        gains = Gain(1.0, gain, "") if gain else None
        return Finding(cause=cause, gain=gains, confidence=confidence, **about)

    given = [("nanogpt-mfu", None, 0.9), ("slow-updates", 3.0, 0.3), ("slow-loader", 1.06, 0.3)]
    assert [f.cause for f in ordered(finding(*each) for each in given)] == [
        "slow-loader",
        "slow-updates",
        "nanogpt-mfu",
    ]


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
            more={"timing s gen": 60.0, "timing s reward": 25.0},
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
    return Observed(
        source="", format="jsonl", trainer=named("verl"), steps=steps, facts=facts, lines_are_means=means
    )


SHARES = {"slow-reward", "uncached-generation", "long-tail", "communication", "small-passes"}


@pytest.mark.parametrize(("updates", "told"), [(2, False), (7, False), (8, True), (30, True)])
def test_two_updates_are_too_few_for_any_share(updates: int, told: bool) -> None:
    observed = few(updates)
    causes = found(observed).keys()
    assert causes & SHARES == (SHARES if told else set())
    assert (too_little(observed) is None) == told


@pytest.mark.parametrize(("updates", "told"), [(2, False), (9, True)])
def test_a_low_mfu_of_two_updates_is_not_told(updates: int, told: bool) -> None:
    observed = few(updates)
    foreign = Observed(source="", format="csv", steps=observed.steps, facts=observed.facts)
    assert bool(low_mfu(foreign)) == told


def test_a_low_mfu_that_a_named_cause_explains_is_left_out() -> None:
    """50 TFLOP/s are 5% of an H100's peak, and what it does in fp32: bf16 explains the rest. Where the log does not name
    the precision, nothing does."""

    def told(precision: str | None) -> list[str]:
        facts = Facts(gpu="h100-80g", gpus=1, parameters=1e9, precision=precision)
        tokens = {"tokens": 10 * 50e12 / 6e9}
        return [f.cause for f in diagnose(log_of([10.0] * 20, facts=facts, values=tokens))]

    assert told(None) == ["low-mfu"]
    assert told("fp32") == ["slow-precision"]


def test_lines_that_are_means_of_ten_count_ten_times() -> None:
    assert too_little(few(4, means=True, apart=10)) is None
    assert too_little(few(4, means=False, apart=10)) is not None


# ---- advice ----


@pytest.mark.parametrize(
    ("precision", "first", "fp16"),
    [
        ("fp16", "bf16 instead", True),
        ("fp32", "a smaller learning rate", False),
        (None, "a smaller learning rate", True),
    ],
)
def test_advice_against_nan_begins_with_what_the_run_can_change(
    precision: str | None, first: str, fp16: bool
) -> None:
    steps = tuple(Step(step=i, not_a_number=i > 5) for i in range(1, 20))
    (found,) = diagnose(Observed(source="", format="csv", steps=steps, facts=Facts(precision=precision)))
    assert found.fix.startswith(first)
    assert ("fp16" in found.fix) == fp16
    old = Facts(precision=precision, gpu="t4-16g")
    (found,) = diagnose(Observed(source="", format="csv", steps=steps, facts=old))
    assert "bf16" not in found.fix, "this GPU has none"


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


# ---- what an expert would say of a foreign log ----


def first(observed: Observed) -> Finding:
    return diagnose(observed)[0]


def shown(finding: Finding) -> dict[str, float | str]:
    return {item.name: item.value for item in finding.evidence}


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_run_with_two_speeds_is_told_with_what_the_slow_one_costs(slow_first: bool) -> None:
    """Two thirds of the lines at 2.4 times: 0.67 x 2.4 + 0.33 = 1.93 times the fast run; the median shows only the slow."""
    draw = random.Random(3)
    times = [1.46 * draw.uniform(0.98, 1.02) * (2.4 if i < 400 else 1.0) for i in range(600)]
    finding = first(log_of(times if slow_first else times[::-1]))
    assert finding.cause == "regime-change"
    assert "2.4 times" in finding.title or "2.3 times" in finding.title or "2.5 times" in finding.title
    assert finding.gain is not None
    assert finding.gain.high == pytest.approx(2 / 3 * 2.4 + 1 / 3, rel=0.05)


def test_longer_texts_and_a_slow_drift_are_no_second_speed() -> None:
    lengths = [40_000.0 if i < 300 else 17_000.0 for i in range(600)]
    steps = tuple(Step(step=i, step_s=tokens / 10_000, tokens=tokens) for i, tokens in enumerate(lengths))
    assert diagnose(Observed(source="", format="csv", steps=steps)) == []
    assert "regime-change" not in found(log_of([2.0 - i / 600 for i in range(600)]))


def test_updates_that_take_longer_and_longer_are_told() -> None:
    """Behind the warm-up the first eighth takes 1.15 s and the last 1.94."""
    draw = random.Random(2)
    times = [(1.0 + i / 100) * draw.uniform(0.98, 1.02) for i in range(100)]
    assert first(log_of(times)).title.startswith("Updates take longer and longer: at the end 1.7 times")
    assert diagnose(log_of(times, "modded-nanogpt")) == [], "its attention window grows by plan"
    assert "regime-change" not in found(log_of(times[::-1]))


def test_updates_that_take_turns_wait_for_their_loader() -> None:
    """0.4 and 1.0 s in turns; the same times at random are not told so."""
    draw = random.Random(1)
    times = [(0.4 if i % 2 else 1.0) * draw.uniform(0.9, 1.1) for i in range(300)]
    finding = first(log_of(times, "ultralytics"))
    assert finding.cause == "slow-loader"
    assert "workers=8" in finding.fix
    draw.shuffle(times)
    assert "slow-loader" not in found(log_of(times))


def test_generation_that_mostly_does_not_generate() -> None:
    parts = {"timing s gen": 27.0, "timing s generate sequences": 0.86, "timing s update actor": 4.0}
    facts = Facts(rollout="vllm", batch_size=2, response_length=18.0, longest_response=19.0, offload="on")
    findings = found(log_of([33.0] * 20, "verl", facts, **parts))
    nested = findings["nested-phases"]
    assert "97% of it is not generating" in nested.title
    assert shown(nested)["the rest"] == pytest.approx(26.14)
    assert "free_cache_engine=False" in nested.fix
    assert nested.gain is not None
    assert nested.gain.high == pytest.approx(1 / (1 - 26.14 / 33), rel=0.01)
    assert "param_offload=False" in findings["offload"].fix
    assert not {"uncached-generation", "long-tail", "slow-generation"} & findings.keys()


def test_offload_is_told_where_the_gpu_has_room_and_not_where_it_has_none() -> None:
    facts = Facts(offload="on", parameters=7e9, trained_parameters=20e6, memory_bytes=80e9)
    free, full = (
        log_of([5.0] * 20, "ms-swift", facts, values={"memory_bytes": used}) for used in (20e9, 70e9)
    )
    assert "while 75% of the GPU's memory is free" in found(free)["offload"].title
    assert "offload" not in found(full)


def test_real_tokens_far_below_the_positions_are_padding() -> None:
    """44k tokens in 256 rows of 4,096: the GPU computes 1.05M positions, unless rows are packed."""
    facts = Facts(batch_size=256, seq_len=4096, offload="on")
    padded = log_of([86.0] * 20, "ms-swift", facts, values={"tokens": 44_000.0})
    finding = found(padded)["padding"]
    assert shown(finding)["padding"] == pytest.approx(1 - 44_000 / (256 * 4096))
    assert "--packing true" in finding.fix
    packed = log_of(
        [86.0] * 20, "ms-swift", Facts(batch_size=256, seq_len=4096, packing="on"), values={"tokens": 44e3}
    )
    assert "padding" not in found(packed)


@pytest.mark.parametrize(
    ("micro", "advice", "not_said"), [(40, "mode none", "selective"), (640, "mode selective", "turn it off")]
)
def test_recomputation_is_turned_off_only_where_the_memory_suffices(
    micro: float, advice: str, not_said: str
) -> None:
    """14.8B parameters, rows of 128 tokens, on a GPU of 178 GiB: 5,120 tokens of activations fit, 81,920 need 600 GiB."""
    facts = Facts(
        parameters=14.8e9, micro_batch=micro, seq_len=128, memory_bytes=178 * 2**30, recompute="full", gpus=8
    )
    finding = first(
        log_of([2.4] * 20, "torchtitan", facts, values={"memory_bytes": 37.0 * 2**30, "mfu": 0.32})
    )
    assert finding.cause == "needless-recomputation"
    assert advice in finding.fix
    assert not_said not in finding.fix


def test_a_batch_of_very_few_tokens() -> None:
    facts = Facts(batch_size=2, gpus=1, parameters=7e9)
    finding = found(log_of([32.0] * 20, "verl", facts, values={"tokens": 1811.0}))["tiny-batch"]
    assert "1,811 tokens an update" in finding.title
    assert "data.train_batch_size" in finding.fix
    assert "tiny-batch" not in found(log_of([32.0], "verl", facts, values={"tokens": 1811.0}))


def test_bf16_on_a_gpu_that_has_none() -> None:
    """No option of the trainer is named: most of them are those that turn bf16 on."""
    finding = first(log_of([18.0] * 20, "megatron", Facts(gpu="v100-32g", precision="bf16", gpus=16)))
    assert finding.cause == "slow-precision"
    assert "fp16" in finding.fix
    assert "--bf16" not in finding.fix


def test_a_fact_that_the_log_does_not_hold_is_no_evidence() -> None:
    facts = Facts(memory_bytes=32e9, accumulation=8)
    finding = found(log_of([2.0] * 20, "fairseq", facts, values={"memory_bytes": 8e9}))["small-passes"]
    assert shown(finding).keys() == {"memory", "accumulation"}


def test_a_low_speed_is_told_where_nothing_else_is_known() -> None:
    """6 x 124M x 52,000 tokens/s are 39 of 989 TFLOP/s; without the GPU's name it is still little for any."""
    facts = Facts(parameters=124e6, gpu="h100-80g", gpus=1)
    known = first(log_of([1.0] * 20, facts=facts, values={"tokens": 52_000.0}))
    assert (known.cause, known.gain.low if known.gain else None) == ("low-mfu", 1.0)
    assert shown(known)["speed"] == pytest.approx(6 * 124e6 * 52_000 / 1e12, rel=0.01)
    unnamed = first(log_of([1.0] * 20, facts=Facts(parameters=124e6), values={"tokens": 52_000.0}))
    assert "for any training GPU" in unnamed.title
    assert unnamed.confidence < known.confidence


def test_generation_of_an_engine_ends_with_its_longest_response() -> None:
    """100 s for 8,192 tokens are 12 ms each; over the mean of 820 they would be 122, as if nothing was cached."""

    def causes(rollout: str | None, gen_s: float, longest: float) -> set[str]:
        facts = Facts(
            rollout=rollout, response_length=820.0, longest_response=longest, prompt_length=120.0, gpus=8
        )
        parts = {"timing s gen": gen_s, "timing s update actor": 50.0}
        return set(found(log_of([180.0] * 20, "verl", facts, **parts)))

    assert causes(None, 100.0, 8192.0) == {"long-tail"}
    assert "uncached-generation" in causes(None, 160.0, 1000.0)
    assert "uncached-generation" not in causes("vllm", 160.0, 1000.0)
    assert "uncached-generation" in causes("hf", 160.0, 1000.0)


def test_padding_that_verl_removes_is_not_told() -> None:
    def told(removed: str | None) -> bool:
        facts = Facts(
            remove_padding=removed, prompt_length=104, response_length=130, prompt_room=512, response_room=256
        )
        parts = {"timing s update actor": 5.0, "timing s gen": 1.0}
        return "padding" in found(log_of([10.5] * 20, "verl", facts, **parts))

    assert [told(removed) for removed in ("false", None, "true")] == [True, True, False]


# ---- failures ----

OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 892.00 MiB. GPU 0 has a total capacity of 178.35 GiB of"
    " which 683.50 MiB is free. Process 7 has 616.00 MiB memory in use. Including non-PyTorch memory, this process has"
    " 176.95 GiB memory in use. Of the allocated memory 175.22 GiB is allocated by PyTorch, and {unused} is reserved by"
    " PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize(("unused", "told"), [("74.96 MiB", False), ("12.50 GiB", True)])
def test_an_allocation_that_failed_is_told_with_what_was_in_use(unused: str, told: bool) -> None:
    facts = Facts(micro_batch=6, seq_len=4096)
    finding = first(log_of([], "torchtitan", facts, text=f"[titan] starts\n{OUT.format(unused=unused)}\n"))
    assert (finding.cause, finding.kind) == ("out-of-memory", "failure")
    assert "before the first update" in finding.title
    seen = shown(finding)
    assert (seen["could not allocate"], seen["in use"], seen["of"]) == (
        "892.00 MiB",
        "176.95 GiB",
        "178.35 GiB",
    )
    assert seen["another process holds"] == "616.00 MiB"
    assert "--training.local_batch_size" in finding.fix
    assert ("expandable_segments" in finding.fix) == told


@pytest.mark.parametrize(
    "line",
    [
        "'ray_wait_register_center_timeout': 300,",
        "    except torch.cuda.OutOfMemoryError:  # CUDA out of memory",
        "ppo.ray_wait_register_center_timeout=600",
        "dist.init_process_group(timeout=1800)  # NCCL",
    ],
)
def test_settings_and_source_code_are_no_errors(line: str) -> None:
    assert diagnose(log_of([1.0] * 20, "verl", text=f"{line}\n" * 3)) == []


def test_how_a_run_ended() -> None:
    tail = "Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 'input_ids'\n"
    crashed = first(log_of([1.0] * 20, text="step 1\n" * 50 + tail))
    assert (crashed.cause, shown(crashed)["error"]) == ("crash", "KeyError: 'input_ids'")
    slurm = "slurmstepd: error: *** JOB 1 ON g084 CANCELLED AT 2024-10-10T02:20:29 DUE TO TIME LIMIT ***"
    assert first(log_of([1.0] * 20, text=f"step 1\n{slurm}\n")).cause == "time-limit"
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed."
    assert first(log_of([1.0] * 20, text=f"step 1\n{killed}\n")).cause == "host-memory"


def losses(values: list[float]) -> list[str]:
    steps = tuple(Step(step=i, step_s=1.0, loss=value) for i, value in enumerate(values, start=1))
    return [
        f.title
        for f in diagnose(Observed(source="", format="console", steps=steps))
        if f.cause == "loss-spike"
    ]


def test_a_loss_that_breaks_away_and_one_that_comes_back() -> None:
    falling = [2.0 + 8.0 / (1 + i / 10) for i in range(200)]
    (title,) = losses([*falling[:120], *(7.5 for _ in range(80))])
    assert 105 <= int(title.split("update ")[1].split()[0]) <= 125
    assert losses([*falling[:120], *([9.0] * 10), *falling[130:]]) == []
    assert losses([16.8, 9.0, *falling]) == [], "the start of training"


# ---- how sure a finding is ----


def test_every_cause_has_its_words_and_names_an_entry_of_the_catalogue() -> None:
    known = pytest.importorskip("redline.optimizations.catalogue").catalogue()
    for cause, entry in causes().items():
        assert {"kind", "title", "fix", "real", "planted"} <= entry.keys(), cause
        assert entry.get("optimisation") in {None, *known}, cause
        assert 0 < precision(cause) < 1


def test_a_cause_that_no_real_log_has_shown_is_never_sure() -> None:
    unseen = [cause for cause, entry in causes().items() if not entry["real"][0]]
    assert unseen
    assert all(precision(cause) <= 0.75 for cause in unseen)


def test_a_finding_says_no_more_than_its_cause_was_right() -> None:
    right, seen = causes()["validation-pause"]["real"]
    assert precision("validation-pause") <= (right + 3) / (seen + 3)
