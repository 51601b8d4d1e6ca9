"""Logs of more than one run, lines that stand twice, and pauses that a log names: what belongs to an update
and what does not."""

import json
import re
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.pauses import period_of
from redline.diagnose.read import read
from redline.diagnose.rules import diagnose


def found(observed: Observed) -> dict[str, Finding]:
    return {finding.cause: finding for finding in diagnose(observed)}


def text_file(folder: Path, text: str, name: str = "log") -> Path:
    (folder / name).write_text(text)
    return folder / name


# ---- several runs in one log ----


def nanogpt(
    steps: range,
    *,
    slow: int = 0,
    every: int = 25,
    first_ms: float = 0.0,
    evaluated: int = 0,
    tokens: int = 16_384,
) -> str:
    """250 ms an iteration, 3 s every `every` where `slow` is its remainder plus one; evaluations of 5 s every
    `evaluated`."""
    lines = [f"tokens per iteration will be: {tokens:,}", "number of parameters: 10.65M"]
    for step in steps:
        paused = evaluated and step % evaluated == 0
        lines += [f"step {step}: train loss 3.1, val loss 3.2"] if paused else []
        ms = (
            250
            + (3000 if slow and step % every == slow - 1 else 0)
            + (5000 if paused else 0)
            + (first_ms if step == steps[0] else 0)
        )
        lines.append(f"iter {step}: loss 3.2000, time {ms:.2f}ms, mfu 13.50%")
    return "\n".join(lines) + "\n"


def test_of_several_runs_in_a_log_the_longest_is_read(tmp_path: Path) -> None:
    """The second starts lower than the first ends, and so did the counter: mixed together, no stall would be
    seen in either."""
    text = nanogpt(range(1000, 1600), slow=1) + nanogpt(range(100), tokens=99) + nanogpt(range(50))
    observed = read(text_file(tmp_path, text))
    assert "3 runs in this log; the longest, steps 1,000 to 1,599, is read" in observed.repairs
    assert observed.median("tokens") == 16_384
    assert found(observed)["stall"].title.startswith("Every 25 updates")


def test_of_runs_of_the_same_length_the_last_is_read_with_its_own_settings(tmp_path: Path) -> None:
    observed = read(
        text_file(tmp_path, nanogpt(range(100), tokens=99) + nanogpt(range(100), slow=1, every=20))
    )
    assert observed.median("tokens") == 16_384
    assert "stall" in found(observed)


def test_lines_that_stand_twice_count_once(tmp_path: Path) -> None:
    lines = nanogpt(range(600), slow=1).splitlines()
    observed = read(text_file(tmp_path, "\n".join(line for line in lines for _ in range(2))))
    assert len(observed.steps) == 600
    assert not any("runs in this log" in repair for repair in observed.repairs)
    assert "stall" in found(observed)


def test_the_warm_up_of_a_job_that_was_started_again_is_no_validation(tmp_path: Path) -> None:
    """Three starts of 60 s each, evaluations of 5 s every 250 of 1,000 iterations of 250 ms."""
    starts = [range(2000), range(1500, 4000), range(3500, 4500)]
    observed = read(
        text_file(tmp_path, "".join(nanogpt(steps, first_ms=60_000, evaluated=250) for steps in starts))
    )
    assert [event["step"] for event in observed.events] == list(range(1500, 4000, 250))
    assert all(event["took_s"] == pytest.approx(5.0, rel=0.01) for event in observed.events)


def test_a_log_of_one_step_has_no_period() -> None:
    assert period_of({5: 1.0}, [5, 5]) is None
    assert period_of({1599: 1.0, 99: 1.0, 5: 1.0}, [1000, 99]) is None


def test_evaluations_too_short_to_tell_are_not_taken_off(tmp_path: Path) -> None:
    """10 ms of 250: iterations without one differ by as much."""
    text = re.sub(r"time 5250", "time 260", nanogpt(range(400), evaluated=50))
    observed = read(text_file(tmp_path, text))
    assert [event for event in observed.events if "took_s" in event] == []
    assert sum(s.step_s == pytest.approx(0.26) for s in observed.steps) == 8


def test_a_log_of_many_evaluations_is_read_at_once(tmp_path: Path) -> None:
    """Every other iteration evaluates, 30,000 of them: looking each up in a list takes half a minute of the
    processor, a set none."""
    path, before_s = text_file(tmp_path, nanogpt(range(60_000), evaluated=2)), time.process_time()
    assert len(read(path).events) == 30_000
    assert time.process_time() - before_s < 10


# ---- torchtitan ----

HEAD = "Starting job: llama", "Building 1-D device mesh with ['dp_shard'], [8]", "Training starts at step 1"


class Titan:
    """A log with its clock."""

    def __init__(self) -> None:
        self.now, self.lines = datetime(2025, 6, 4, 10), [""]

    def say(self, text: str, after_s: float = 0.0, ranks: int = 1) -> None:
        self.now += timedelta(seconds=after_s)
        for rank in range(ranks):
            at = self.now + timedelta(milliseconds=rank)
            self.lines.append(
                f"[rank{rank}]:[titan] {at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d} - root - INFO -"
                f" {text}"
            )

    def start(self) -> None:
        for line in HEAD:
            self.say(line)

    def train(self, steps: range, ranks: int = 1) -> None:
        """2.34 s an update."""
        for step in steps:
            self.say(
                f"step: {step}  loss: 8.0  grad_norm: 1.2  memory: 78.2GiB(82.32%)  tps: 7,000  mfu: 40.99%",
                2.34 * steps.step,
                ranks,
            )

    def text(self, end: str = "\n") -> str:
        return "\n".join(self.lines) + end


@pytest.mark.parametrize("ranks", [1, 3])
def test_torchtitans_validations_and_checkpoints_are_no_updates(tmp_path: Path, ranks: int) -> None:
    log = Titan()
    log.start()
    for start in range(0, 300, 50):
        log.train(range(start + 10, start + 60, 10), ranks)
        log.say(
            "Finished saving the checkpoint (or staging if async is enabled)in 120.00 seconds.", 120, ranks
        )
        log.say(f"validate step: {start + 50}  loss:  6.1  memory: 70.1GiB(75.00%)  tps: 21,000", 100, ranks)
    observed = read(text_file(tmp_path, log.text()))
    assert len(observed.steps) == 30
    assert [s.step_s for s in observed.steps[1:]] == pytest.approx([2.34] * 29, rel=0.001)
    findings = found(observed)
    assert {"validation-pause", "checkpoint-pause"} <= findings.keys()
    assert not {"stall", "slow-updates", "mfu-mismatch"} & findings.keys()
    assert (
        findings["validation-pause"].evidence[0].value == findings["checkpoint-pause"].evidence[0].value == 6
    )
    assert findings["validation-pause"].evidence[1].value == pytest.approx(100, abs=0.01)
    assert findings["checkpoint-pause"].evidence[1].value == pytest.approx(120)
    assert "validation.freq" in findings["validation-pause"].fix
    assert "checkpoint.interval" in findings["checkpoint-pause"].fix


def test_a_validation_some_updates_behind_a_line_leaves_the_next_line_without_a_time(tmp_path: Path) -> None:
    log = Titan()
    log.start()
    log.train(range(10, 110, 10))
    log.say("validate step: 105  loss:  6.1  memory: 70.1GiB(75.00%)  tps: 21,000", 111.7)
    log.train(range(110, 210, 10))
    observed = read(text_file(tmp_path, log.text()))
    assert observed.events == ({"event": "validation", "step": 105},)
    assert [s.step for s in observed.steps if not s.step_s] == [10, 110]


def test_the_time_until_a_job_was_started_again_is_of_no_update(tmp_path: Path) -> None:
    log = Titan()
    for start in range(0, 500, 100):
        log.say("no machine", 1200)
        log.start()
        log.train(range(start + 10, start + 110, 10))
    observed = read(text_file(tmp_path, log.text()))
    assert len(observed.steps) == 50
    assert max(s.step_s for s in observed.steps if s.step_s) == pytest.approx(2.34, rel=0.001)
    assert diagnose(observed) == []


def test_a_job_that_was_started_again_at_its_last_step_is_timed_from_there(tmp_path: Path) -> None:
    log = Titan()
    for steps in (range(10, 110, 10), range(100, 210, 10)):
        log.say("no machine", 1200)
        log.start()
        log.train(steps)
    observed = read(text_file(tmp_path, log.text()))
    assert [s.step for s in observed.steps if not s.step_s] == [10]
    assert max(s.step_s for s in observed.steps if s.step_s) == pytest.approx(2.34, rel=0.001)


def test_a_last_line_of_torchtitan_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """tps: 7,000 cut to 7 would be a number too."""
    log = Titan()
    log.start()
    log.train(range(10, 110, 10))
    cut = log.text(end="").removesuffix(",000  mfu: 40.99%")
    assert [s.step for s in read(text_file(tmp_path, cut)).steps] == list(range(10, 100, 10))


# ---- verl ----


def verl(steps: range, every: int = 5, **paused: float) -> list[dict[str, float]]:
    """25 s a step, and what comes every so many on top of it."""
    data = {"perf/total_num_tokens": 409_600, "timing_s/gen": 5.0, "timing_s/update_actor": 8.0}
    rows = []
    for step in steps:
        extra = {f"timing_s/{name}": value for name, value in paused.items() if step % every == 0}
        rows.append(data | {"perf/time_per_step": 25.0 + sum(extra.values())} | extra)
    return rows


@pytest.mark.parametrize(
    ("name", "cause", "setting"),
    [
        ("testing", "validation-pause", "trainer.test_freq"),
        ("save_checkpoint", "checkpoint-pause", "trainer.save_freq"),
    ],
)
@pytest.mark.parametrize("console", [True, False])
def test_verl_names_its_pauses(tmp_path: Path, name: str, cause: str, setting: str, console: bool) -> None:
    rows = enumerate(verl(range(1, 61), **{name: 60.0}), start=1)
    lines = [
        (
            f"step:{step} - " + " - ".join(f"{key}:{value}" for key, value in data.items())
            if console
            else json.dumps({"step": step, "data": data})
        )
        for step, data in rows
    ]
    observed = read(text_file(tmp_path, "\n".join(lines) + "\n"))
    findings = found(observed)
    assert not {"stall", "slow-updates"} & findings.keys()
    assert setting in findings[cause].fix
    assert findings[cause].evidence[2].value == pytest.approx(60 * 25 + 12 * 60)
    assert observed.mean("step_s") == pytest.approx(25.0)


def test_the_last_value_of_a_line_of_verl_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """timing_s/step:18 may be the start of 180."""
    line = "step:{} - perf/mfu/actor:0.35 - timing_s/gen:100.0 - timing_s/step:{}"
    text = "\n".join(line.format(step, "180.0") for step in range(1, 20)) + "\n" + line.format(20, "18")
    last = read(text_file(tmp_path, text)).steps[-1]
    assert (last.step, last.step_s, last.parts_s) == (20, None, {"gen": 100.0})


# ---- gradient norms that a loss scaler skips ----


def norms(tmp_path: Path, bad: set[int]) -> Path:
    history = [
        {"step": step, "loss": 2.0, "grad_norm": float("inf") if step in bad else 1.0}
        for step in range(10, 510, 10)
    ]
    return text_file(tmp_path, json.dumps({"global_step": 500, "log_history": history}), "trainer_state.json")


@pytest.mark.parametrize(
    ("bad", "since"),
    [
        ({10, 300}, None),
        ({490, 500}, " from update 490 on"),
        (set(range(10, 200, 10)), " in 19 of the updates, the first 10"),
    ],
)
def test_a_few_gradients_that_are_infinite_are_a_loss_scalers(
    tmp_path: Path, bad: set[int], since: str | None
) -> None:
    findings = found(read(norms(tmp_path, bad)))
    assert ("not-a-number" in findings) == (since is not None)
    if since:
        assert findings["not-a-number"].title.endswith(since)


# ---- tables ----


def table(tmp_path: Path, rows: list[dict[str, float | str | None]]) -> Observed:
    return read(text_file(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "log.jsonl"))


@pytest.mark.parametrize("epoch", ["epoch", "epochnum"])
@pytest.mark.parametrize(("first", "apart"), [(0, 1), (1, 1), (10, 10)])
def test_steps_that_start_again_with_each_epoch_are_counted_on(
    tmp_path: Path, epoch: str, first: int, apart: int
) -> None:
    """Ten epochs of 50 lines, whose values do not differ."""
    steps = [first + apart * at for at in range(50)]
    observed = table(
        tmp_path, [{epoch: e, "step": step, "loss": 2.5, "step_s": 0.25} for e in range(10) for step in steps]
    )
    assert [s.step for s in observed.steps] == [first + apart * at for at in range(500)]
    assert observed.repairs == (
        f"the step starts again with each epoch: counted on to {first + apart * 499:,}",
    )


def test_a_table_of_several_runs_is_split_where_they_contradict_each_other(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3.0, "step_s": 2.0} for step in range(100)] + [
        {"step": step, "loss": 2.0, "step_s": 3.25 if step % 25 == 0 else 0.25} for step in range(80, 480)
    ]
    observed = table(tmp_path, rows)
    assert observed.repairs == ("2 runs in this log; the longest, steps 80 to 479, is read",)
    assert len(observed.steps) == 400
    assert found(observed)["stall"].title.startswith("Every 25 updates")


def test_lines_of_a_table_that_come_late_or_twice_or_of_two_processes_are_of_one_run(tmp_path: Path) -> None:
    rows = [(step, 0) for step in (1, 2, 4, 3, 5)] + [
        (step, rank) for step in (6, 7, 8) for rank in (0, 0, 1)
    ]
    observed = table(tmp_path, [{"step": step, "step_s": 0.25 + rank / 100} for step, rank in rows])
    assert ([s.step for s in observed.steps], observed.repairs) == (list(range(1, 9)), ())
    assert {s.step_s for s in observed.steps} == {0.25}


def nulls(tmp_path: Path, losses: list[float | str | None]) -> dict[str, Finding]:
    return found(
        table(
            tmp_path,
            [{"step": step, "loss": loss, "step_s": 0.2} for step, loss in enumerate(losses, start=1)],
        )
    )


def test_a_loss_that_is_null_until_the_next_is_not_logged(tmp_path: Path) -> None:
    every_tenth = [2.5 if step % 10 == 0 else None for step in range(1, 96)]
    assert "not-a-number" not in nulls(tmp_path, every_tenth)
    lost = nulls(tmp_path, [*every_tenth[:90], *[None] * 30])["not-a-number"]
    assert lost.title.endswith("from update 91 on")
    once = nulls(tmp_path, [2.5, "nan", *every_tenth[9::10]])["not-a-number"]
    assert once.title.endswith("in 1 of the updates, the first 2")


@pytest.mark.parametrize(
    ("head", "line", "step_s"),
    [
        ("step;loss;tokens_per_s;step_s", "{};2,5;12.345,6;0,25", 0.25),
        ("step;loss;tokens_per_s;step_s", "{};2,5;12345,6;1,250", 1.25),
        ("step\tloss\ttokens_per_s\tstep_s", "{}\t2,5\t12.345,6\t0,25", 0.25),
        ("step,loss,tokens_per_s,step_s", '{},2.5,"12,345.6",0.25', 0.25),
        ("step,loss,tokens_per_s,step_s", '{},"2,5","12345,6","0,25"', 0.25),
        ("epoch;step;train_loss;tps;step_s", "0;{};2,5;12345,6;0,25", 0.25),
    ],
)
def test_commas_of_a_spreadsheet(tmp_path: Path, head: str, line: str, step_s: float) -> None:
    observed = read(text_file(tmp_path, "\n".join([head, *(line.format(step) for step in range(20))]) + "\n"))
    assert observed.format == ("lightning" if head.startswith("epoch") else "csv")
    assert observed.mean("step_s") == pytest.approx(step_s)
    assert observed.tokens_per_s == pytest.approx(12_345.6)
    assert observed.mean("loss") == pytest.approx(2.5)
