"""Our own runs: planted faults in real ones on the CPU, and on paper those that only a GPU shows."""

import json
import random
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import redline
from redline.config.load import load_recipe, to_toml
from redline.diagnose.answer import too_little
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Facts, Observed, Step
from redline.diagnose.read import read
from redline.diagnose.readers.own import read_run
from redline.diagnose.rules import diagnose
from redline.diagnose.rules.pauses import period_of, stalls
from redline.diagnose.rules.plans import floor_s
from redline.plan.hardware import hardware_as
from redline.plan.plan import Plan, save
from redline.plan.planner import make_plan
from redline.record.metrics import PHASES

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted import FAULTS, plant, small_bench

ROOT = Path(__file__).parents[2]
PLANTED = [name for name, fault in FAULTS.items() if not fault.gpu_only]


@pytest.mark.parametrize("name", ["slow loader", "padding"])
def test_a_fault_can_be_planted(name: str) -> None:
    """Into our own training and into a user's loop; what comes of it takes a clock."""
    with small_bench() as bench:
        with bench.arm(name, FAULTS[name], 0.0, faulty=True) as arm:
            for _ in range(2):
                arm.turn()
            arm.drain()
        lines = (bench.folder / name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.timing
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_its_gain_is_predicted(name: str) -> None:
    """Within 25% of the wall clock."""
    with small_bench() as bench:
        found = plant(bench, name, blocks=3)
        lines = [
            json.loads(line) for line in (bench.folder / name / "metrics.jsonl").read_text().splitlines()
        ]
    assert found["right"], found
    assert abs(found["error"]) <= 0.25, found
    for line in lines:
        phases_s = sum(line.get(phase, 0.0) for phase in PHASES)
        assert 0.5 * line["issue_s"] < phases_s <= line["issue_s"], (
            "the phases are what the host spent on the update"
        )
        assert phases_s <= line["step_s"] + 1e-4


def test_the_diagnosis_knows_every_phase_that_a_run_records() -> None:
    """A phase that it does not know would be a gap between updates."""
    assert PHASES.keys() <= {field.name for field in fields(Step)}


# ---- on paper: a GPU that is not here ----


class Paper:
    """A run folder of a recipe on an H200, its lines written by hand."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self.recipe = folder, load_recipe("gpt2-124m", list(overrides))
        self.plan: Plan = make_plan(self.recipe, hardware_as("h200-141g", 16))
        floor = floor_s(self.recipe, self.plan)
        assert floor
        self.floor_s = floor

    def found(self, lines: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> list[Finding]:
        (self.folder / "recipe.toml").write_text(to_toml(self.recipe))
        save(self.plan, self.folder / "plan.json")
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (self.folder / "events.jsonl").write_text(
            "".join(json.dumps({"at": 0, **event}) + "\n" for event in events or [])
        )
        return diagnose(read(self.folder))

    def lines(self, step_s: float, count: int = 40, **values: float) -> list[dict[str, Any]]:
        each = self.recipe.tokens_per_step
        return [
            {
                "step": i,
                "step_s": step_s,
                "tokens": i * each,
                "data_wait_s": 0.0,
                "elapsed_s": i * step_s,
                "memory_bytes": 20 * 2**30,
                **values,
            }
            for i in range(1, count + 1)
        ]


def test_a_run_at_its_roofline_is_left_alone(tmp_path: Path) -> None:
    paper = Paper(tmp_path)
    assert paper.found(paper.lines(1.02 * paper.floor_s)) == []


def test_the_end_of_a_ramp_of_the_length_is_no_slowdown(tmp_path: Path) -> None:
    """Its updates have less attention to compute. Without it the same times are slow updates."""
    for ramp, causes in ((140, []), (0, ["slow-updates"])):
        paper = Paper(tmp_path, f"train.length_ramp_steps={ramp}")
        lines = paper.lines(1.02 * paper.floor_s, count=200)
        for line in lines[:140]:
            line["step_s"] *= 0.4
        assert [found.cause for found in paper.found(lines)] == causes


def test_a_run_that_ended_in_the_ramp_says_why_its_speed_is_not_judged(tmp_path: Path) -> None:
    paper = Paper(tmp_path, "train.length_ramp_steps=140")
    assert paper.found(paper.lines(1.02 * paper.floor_s, count=100)) == []
    assert "after the 140 updates of train.length_ramp_steps: 0," in (too_little(read(tmp_path)) or "")


def test_the_published_run_is_left_alone() -> None:
    (run,) = (ROOT / "benchmarks").glob("wikipedia_*")
    assert diagnose(read_run(run)) == []


def test_a_fine_tuning_has_no_length_for_the_roofline(tmp_path: Path) -> None:
    """Its recipe does not say the tokens of an update: with known rates that divided by zero."""
    paper = Paper(tmp_path)
    shaped = replace(
        load_recipe("finetune", ["plan.precision=fp32"]), model=replace(paper.recipe.model, init_from="model")
    )
    paper.recipe, paper.plan = shaped, make_plan(shaped, paper.plan.hardware)
    assert not paper.recipe.tokens_per_step
    assert "slow-precision" not in {found.cause for found in paper.found(paper.lines(0.2))}


def test_fp32_on_a_gpu_is_worth_what_the_floors_differ_by(tmp_path: Path) -> None:
    """An H200 does 67 TFLOP/s in fp32 and 989 in bf16: a step at its fp32 floor gets at least six times as
    fast."""
    paper = Paper(tmp_path, "plan.precision=fp32")
    top = paper.found(paper.lines(1.05 * paper.floor_s))[0]
    assert top.cause == "slow-precision"
    assert top.gain is not None
    assert 6 < top.gain.high < 15


def test_recomputation_is_a_quarter_of_the_step(tmp_path: Path) -> None:
    paper = Paper(tmp_path, "plan.recompute=full")
    step_s = 1.05 * paper.floor_s
    top = paper.found(
        paper.lines(
            step_s, forward_s=0.25 * step_s, backward_s=0.72 * step_s, optimizer_s=0.02 * step_s, copy_s=0.0
        )
    )[0]
    assert top.cause == "needless-recomputation"
    assert top.gain is not None
    assert 1.1 < top.gain.low < top.gain.high < 1.4


def test_passes_of_one_sequence(tmp_path: Path) -> None:
    paper = Paper(tmp_path, "plan.micro_batch=1")
    top = paper.found(paper.lines(3 * paper.floor_s))[0]
    assert top.cause == "small-passes"
    assert top.gain is not None
    assert top.gain.high == pytest.approx(3.0, rel=0.05)
    assert "plan.micro_batch=64" in top.fix


def test_validations_and_checkpoints_are_told_apart(tmp_path: Path) -> None:
    paper, lines, clock = Paper(tmp_path), [], 0.0
    step_s = 1.02 * paper.floor_s
    for line in paper.lines(step_s):
        clock += step_s
        lines.append({**line, "elapsed_s": clock})
        # two for the validation, one for the checkpoint
        clock += (2 * step_s + step_s) * (line["step"] % 4 == 0)
    events = [
        {"event": kind, "step": step} for step in range(4, 41, 4) for kind in ("validation", "checkpoint")
    ]
    findings = {
        f.cause: f
        for f in paper.found(
            lines, [{**e, "stalled_s": step_s} if e["event"] == "checkpoint" else e for e in events]
        )
    }
    assert set(findings) == {"validation-pause", "checkpoint-pause"}
    # 40 updates and nine pauses of three: 18 of 67 for validation, 9 for checkpoints. The tenth has no end
    # that would say how long it took.
    assert findings["validation-pause"].title.startswith("Validation takes 27%")
    assert findings["checkpoint-pause"].title.startswith("Saving checkpoints takes 13%")


def test_the_pause_after_the_last_update_counts(tmp_path: Path) -> None:
    """40 updates, and validations of four updates each after the 20th and the 40th: 8 of 48."""
    paper = Paper(tmp_path)
    step_s = 1.02 * paper.floor_s
    lines = [
        {**line, "elapsed_s": (line["step"] + (4 if line["step"] > 20 else 0)) * step_s}
        for line in paper.lines(step_s)
    ]
    events = [{"event": "validation", "step": step} for step in (20, 40)] + [
        {"event": "end", "step": 40, "elapsed_s": 48 * step_s}
    ]
    (found,) = paper.found(lines, events)
    assert found.title == "Validation takes 17% of the run"
    assert found.evidence[0].value == 2
    assert found.evidence[1].value == pytest.approx(4 * step_s)
    assert paper.found(paper.lines(step_s), events[1:]) == [], (
        "one that comes at the end cannot be made rarer"
    )


def test_pauses_of_a_fork_are_a_share_of_its_own_time(tmp_path: Path) -> None:
    """The same 8 of 48, though it counts on from its parent's 1,000 updates, which took as long as 2,000 of its own."""
    paper = Paper(tmp_path)
    step_s = 1.02 * paper.floor_s
    lines = [
        {**line, "step": step + 1000, "elapsed_s": (2000 + step + (4 if step > 20 else 0)) * step_s}
        for line in paper.lines(step_s)
        for step in [line["step"]]
    ]
    events = [
        {"event": "resume", "step": 1000},
        *({"event": "validation", "step": step} for step in (1020, 1040)),
        {"event": "end", "step": 1040, "elapsed_s": 2048 * step_s},
    ]
    (found,) = paper.found(lines, events)
    assert found.title == "Validation takes 17% of the run"


def test_a_wait_that_the_gpu_did_not_feel_is_no_cause(tmp_path: Path) -> None:
    """The host waited half of the time, but the GPU was busy with the update before."""
    paper = Paper(tmp_path)
    step_s = 1.02 * paper.floor_s
    busy = {
        "forward_s": 0.3 * step_s,
        "backward_s": 0.65 * step_s,
        "optimizer_s": 0.03 * step_s,
        "copy_s": 0.01 * step_s,
    }
    assert paper.found(paper.lines(step_s, **{**busy, "data_wait_s": 0.5 * step_s})) == []
    busy["backward_s"] = 0.35 * step_s
    assert [f.cause for f in paper.found(paper.lines(step_s, **{**busy, "data_wait_s": 0.5 * step_s}))] == [
        "slow-loader"
    ]


def test_running_out_of_memory_and_sampling_are_read_from_the_events(tmp_path: Path) -> None:
    paper = Paper(tmp_path)
    events: list[dict[str, Any]] = [
        {"event": "out_of_memory", "step": 3, "micro_batch_before": 64, "micro_batch": 32, "batch_size": 512},
        {
            "event": "sampling_end",
            "questions": 100,
            "solved": 50,
            "samples": 3000,
            "correct": 60,
            "elapsed_s": 9.0,
        },
    ]
    findings = {f.cause: f for f in paper.found(paper.lines(1.02 * paper.floor_s), events)}
    assert "plan.micro_batch=32" in findings["out-of-memory"].fix
    told = {row.name: row.value for row in findings["few-correct"].evidence}
    assert told == {"correct": 0.02, "samples a question": 30.0, "solved": 0.5}


def test_a_failed_run_says_what_it_failed_of(tmp_path: Path) -> None:
    paper = Paper(tmp_path)
    failed = {
        "event": "failed",
        "error": "grad_norm is nan at step 41: lower train.lr (now 1e+30)",
        "exit_code": 8,
    }
    (found,) = paper.found(paper.lines(1.02 * paper.floor_s), [failed])
    assert found.cause == "not-a-number"
    assert found.title.endswith("at update 41")
    failed["error"] = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
    assert [f.cause for f in paper.found(paper.lines(1.02 * paper.floor_s), [failed])] == ["out-of-memory"]


def test_a_watched_loop_whose_loss_is_null(tmp_path: Path) -> None:
    """JSON has no word for nan; an update that fp16's scaler skipped is none of those."""
    (tmp_path / "events.jsonl").write_text(json.dumps({"at": 0, "event": "start"}) + "\n")
    lines: list[dict[str, Any]] = [
        {"step": i, "step_s": 0.1, "loss": None if i > 6 else 1.0} for i in range(1, 21)
    ]
    lines[2] |= {"grad_norm": None, "skipped": 1}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = diagnose(read(tmp_path))
    assert found.title == "The loss or the gradient is not a number from update 7 on"


def test_a_watched_loop_of_one_update_is_not_called_fast(tmp_path: Path) -> None:
    with redline.watch(tmp_path / "run", model=nn.Linear(2, 2), quiet=True) as run:
        run.step()
    assert "too few to judge" in run.summary()


@pytest.mark.parametrize(("updates", "told"), [(1, False), (5, False), (8, True)])
def test_a_share_of_too_few_updates_is_not_told(updates: int, told: bool) -> None:
    times = {
        "step_s": 0.1,
        "data_wait_s": 0.03,
        "forward_s": 0.02,
        "backward_s": 0.02,
        "optimizer_s": 0.01,
        "padding_share": 0.6,
    }
    observed = Observed(source="", format="run", steps=steps_of(updates, **times))
    assert {f.cause for f in diagnose(observed)} == (
        {"slow-loader", "host-gap", "padding"} if told else set()
    )
    assert (too_little(observed) is None) == told


@pytest.mark.parametrize(("updates", "slow"), [(30, 3), (30, 4), (35, 3), (60, 4), (100, 5), (400, 10)])
def test_slow_updates_at_random_are_no_stall(updates: int, slow: int) -> None:
    """In 1% of the runs, or fewer: of 300 in 3, and in one of a hundred such tests in more than 8."""
    draw, wrong = random.Random(updates + slow), 0
    for _ in range(300):
        late = set(draw.sample(range(6, updates + 1), slow))
        times_s = [
            0.01
            * (
                draw.uniform(1.4, 2.6) * max(2.0, 0.2 * updates / slow)
                if i in late
                else draw.uniform(0.95, 1.05)
            )
            for i in range(1, updates + 1)
        ]
        steps = tuple(Step(step=i, step_s=step_s) for i, step_s in enumerate(times_s, start=1))
        wrong += bool(stalls(Observed(source="", format="run", steps=steps)))
    assert wrong <= 8


def test_slow_updates_in_step_are_a_stall_beside_some_that_are_not() -> None:
    """Every 10th of 60, and three others as on a busy machine."""
    times_s = {i: 0.03 if i % 10 == 0 else 0.016 if i in (13, 27, 44) else 0.01 for i in range(1, 61)}
    steps = tuple(Step(step=i, step_s=step_s) for i, step_s in times_s.items())
    (found,) = stalls(Observed(source="", format="run", steps=steps))
    assert found.title.startswith("Every 10 updates")


def test_the_comparisons_that_a_recipe_asks_for_are_no_stall() -> None:
    """`diagnose_s` says what every 10th update does; without it the same times are a stall."""
    for named, found in ((0.02, 0), (0.0, 1)):
        times = [(i, 0.03, named) if i % 10 == 0 else (i, 0.01, 0.0) for i in range(1, 61)]
        steps = tuple(Step(step=i, step_s=step_s, diagnose_s=within_s) for i, step_s, within_s in times)
        assert len(stalls(Observed(source="", format="run", steps=steps))) == found


def test_a_folder_of_rejection_sampling_is_read_without_its_plan(tmp_path: Path) -> None:
    (tmp_path / "train-samples").mkdir()
    lines = [
        {"step": i, "step_s": 0.1, "tokens": 100 * i, "data_wait_s": 0.0, "padding_share": 0.66}
        for i in range(1, 21)
    ]
    (tmp_path / "train-samples" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    (tmp_path / "events.jsonl").write_text(json.dumps({"at": 0, "event": "start"}) + "\n")
    observed = read(tmp_path)
    assert observed.notes[0] == "nothing is said about the plan of pre-training: there is no recipe.toml"
    top = diagnose(observed)[0]
    assert top.cause == "padding"
    assert top.gain is not None
    assert top.gain.high == pytest.approx(1 / 0.34)


def test_padding_is_worth_what_forward_and_backward_take(tmp_path: Path) -> None:
    """Half of the positions, in passes that are 80% of the update: two fifths of its time, or 15% less."""
    (tmp_path / "events.jsonl").write_text(json.dumps({"at": 0, "event": "start"}) + "\n")
    times = {
        "step_s": 0.1,
        "forward_s": 0.03,
        "backward_s": 0.05,
        "optimizer_s": 0.015,
        "data_wait_s": 0.0,
        "padding_share": 0.5,
    }
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, **times}) + "\n" for i in range(1, 21))
    )
    (found,) = [finding for finding in diagnose(read(tmp_path)) if finding.cause == "padding"]
    assert found.gain is not None
    assert (found.gain.low, found.gain.high) == pytest.approx((1 / (1 - 0.85 * 0.4), 1 / (1 - 0.4)))


def test_the_page_shows_what_was_measured_on_the_gpu() -> None:
    """Every planted fault with its range, and how many lie outside."""
    planted = json.loads((ROOT / "benchmarks" / "closed-loop_nvidia-h200_20261115.json").read_text())[
        "planted"
    ]
    page = (ROOT / "docs" / "diagnose.md").read_text()
    for row in planted:
        (low, high), measured = row["range"], row["measured"]
        outside = "below" if measured < low else "above" if measured > high else ""
        numbers = [f"{value:#.3g}" for value in (row["predicted"], low, high, measured)]
        told = f"`{row['found']}` | {numbers[0]}x | {numbers[1]} to {numbers[2]} | {numbers[3]}x | {outside} |".replace(
            "|  |", "| |"
        )
        assert told in page, row["fault"]
    outside_all = sum(not row["range"][0] <= row["measured"] <= row["range"][1] for row in planted)
    assert f"{outside_all} of {len(planted)} measurements lie outside" in page


def steps_of(count: int = 30, **values: float) -> tuple[Step, ...]:
    return tuple(Step(step=i, **values) for i in range(1, count + 1))


GPU = Facts(gpus=1, gpu="h200-141g")


def padding_of(steps: tuple[Step, ...], facts: Facts = GPU) -> Finding:
    (found,) = [
        f
        for f in diagnose(Observed(source="", format="run", steps=steps, facts=facts))
        if f.cause == "padding"
    ]
    assert found.gain is not None
    return found


def test_a_gpu_that_waits_for_launches_may_gain_nothing_from_less_padding() -> None:
    """It takes as long to launch short rows. A host that is slow only since CUDA's queue is full was quick in
    the first updates; on a CPU the host computes, and its time says nothing."""
    times = {"step_s": 0.1, "forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.015, "padding_share": 0.5}
    launching, computing = steps_of(**times, issue_s=0.097), steps_of(**times, issue_s=0.02)
    ahead = (*computing[:3], *launching[3:])
    for steps, facts, share in (
        (launching, GPU, 0.0),
        (computing, GPU, 0.34),
        (ahead, GPU, 0.34),
        (launching, Facts(), 0.34),
    ):
        gain = padding_of(steps, facts).gain
        assert gain is not None
        assert (gain.low, gain.high) == pytest.approx((1 / (1 - share), 1 / (1 - 0.4)))
    assert "waits for the host" in padding_of(launching).evidence[-1].unit
    waited = steps_of(**times | {"step_s": 0.2}, issue_s=0.097, data_wait_s=0.1)
    assert padding_of(waited).gain.low == 1.0, "a wait for data is no time of the GPU's"  # type: ignore[union-attr]


def test_a_loop_that_marks_some_phases_is_not_told_that_it_marks_none() -> None:
    plain = padding_of(steps_of(step_s=0.1, padding_share=0.5))
    assert "no phases are recorded" in plain.evidence[-1].unit
    some = padding_of(steps_of(step_s=0.1, padding_share=0.5, forward_s=0.03, optimizer_s=0.02))
    assert "no phases" not in some.evidence[-1].unit
    assert "not both marked" in some.evidence[-1].unit
    assert some.evidence[-1].value == pytest.approx(0.8), "the optimiser's update does not shrink"
    assert some.gain is not None
    assert (some.gain.low, some.gain.high) == pytest.approx((1 / (1 - 0.6 * 0.4), 1 / (1 - 0.4)))


@pytest.mark.parametrize(
    ("gpu_s", "gap_s", "generate_s", "hidden_s"),
    [
        (0.05, 0.1, 0.0, 0.05),  # the host's work is longer: half of it hides
        (0.1, 0.05, 0.0, 0.05),  # all of it hides
        (0.05, 0.1, 0.1, 0.05),  # whoever generates looks at every token: nothing hides behind that
    ],
)
def test_a_wait_costs_what_would_hide_behind_the_gpu(
    gpu_s: float, gap_s: float, generate_s: float, hidden_s: float
) -> None:
    """Without the wait the longer of the two is left. What does not hide stays time in which nothing is
    computed."""
    step_s = gpu_s + gap_s + generate_s
    phases = {"forward_s": 0.3 * gpu_s, "backward_s": 0.6 * gpu_s, "optimizer_s": 0.1 * gpu_s} | (
        {"generate_s": generate_s} if generate_s else {}
    )
    events = ({"event": "waits_for_gpu", "times": 1, "where": "train.py:42", "step": 4},)
    found = diagnose(
        Observed(source="", format="run", steps=steps_of(step_s=step_s, **phases), facts=GPU, events=events)
    )
    gains = {finding.cause: finding.gain for finding in found}
    assert gains["sync"] is not None
    assert gains["sync"].high == pytest.approx(step_s / (step_s - hidden_s))
    left_s = gap_s - hidden_s
    assert ("host-gap" in gains) == (left_s > 0)
    if left_s:
        assert gains["host-gap"] is not None
        assert gains["host-gap"].high == pytest.approx(step_s / (step_s - left_s))


def test_compiling_is_promised_what_was_measured(tmp_path: Path) -> None:
    """1.07 times at 1.17 times the floor (H200, gpt2-124m): inside the range; far from the floor no more than
    1.3."""
    paper = Paper(tmp_path, "plan.compile=off")
    for times_floor, most in ((1.167, 1.167), (3.0, 1.3)):
        (found,) = [
            f for f in paper.found(paper.lines(times_floor * paper.floor_s)) if f.cause == "not-compiled"
        ]
        assert found.gain is not None
        assert found.gain.low < 1.07 < found.gain.high or times_floor > 2
        assert found.gain.high == pytest.approx(most)


@pytest.mark.parametrize(
    ("rows", "high"), [(None, 1.25), (4, 1.25), (16, 1.25), (32, 1.135), (64, None), (512, None)]
)
def test_passes_are_small_where_larger_ones_were_measured_to_be_faster(
    rows: float | None, high: float | None
) -> None:
    """8k tokens give 80% of the speed of 64k, 32k 98%: rows of 512."""
    facts = Facts(memory_bytes=140e9, micro_batch=rows, seq_len=512)
    found = diagnose(
        Observed(
            source="", format="run", steps=steps_of(step_s=0.1, mfu=0.35, memory_bytes=10e9), facts=facts
        )
    )
    assert [f.cause for f in found] == (["small-passes"] if high else [])
    if high:
        assert found[0].gain is not None
        assert found[0].gain.high == pytest.approx(high)
        assert rows is None or f"passes of {rows * 512:,.0f} tokens" in found[0].title


def test_a_period_is_looked_for_in_a_long_run_too() -> None:
    """20,000 updates with slow ones at random take no minutes, and a period in them is still found."""
    draw, steps = random.Random(0), list(range(1, 20_001))
    noise = {step: draw.random() for step in steps if draw.random() < 0.02}
    began_s = time.process_time()
    assert period_of(noise, steps) is None
    found = period_of(noise | {step: 5.0 for step in steps if step % 250 == 7}, steps)
    assert found is not None
    assert found[:2] == (250, 7)
    assert time.process_time() - began_s < 5
