"""What real files are like: sparse, cut, of several runs, with pauses in them, in odd units, with losses that are no
numbers. Readers get them right, ask, or refuse them in one line."""

import bz2
import contextlib
import gzip
import json
import lzma
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from redline.diagnose.answer import too_little, verdict
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.read import read
from redline.diagnose.readers.rows import Row, _apart
from redline.diagnose.rules import diagnose
from redline.errors import ConfigError, DataError, RedlineError

LOGS = Path(__file__).parents[1] / "data" / "logs"


def found(observed: Observed) -> dict[str, Finding]:
    return {finding.cause: finding for finding in diagnose(observed)}


def text_file(folder: Path, text: str, name: str = "log") -> Path:
    (folder / name).write_text(text)
    return folder / name


def console(folder: Path, lines: Iterable[str], name: str = "log") -> Observed:
    return read(text_file(folder, "\n".join(lines) + "\n", name))


def jsonl(folder: Path, rows: list[dict[str, object]]) -> Observed:
    return read(text_file(folder, "".join(json.dumps(row) + "\n" for row in rows), "log.jsonl"))


# ---- the logs in the repository ----


@pytest.mark.parametrize(
    ("name", "trainer", "steps"),
    [
        ("trainer_state.json", "huggingface", 6),
        ("nanogpt.log", "nanogpt", 26),
        ("torchtitan.log", "torchtitan", 20),
        ("verl.log", "verl", 20),
        ("verl.jsonl", "verl", 20),
        ("lightning.csv", "lightning", 30),
    ],
)
def test_the_trainer_is_recognised(name: str, trainer: str, steps: int) -> None:
    observed = read(LOGS / name)
    assert (observed.trainer.name, len(observed.steps)) == (trainer, steps)
    assert observed.tokens_per_s


def test_trainer_state_gives_the_time_of_each_update() -> None:
    """The file is a real Trainer's: 4 rows of 32 tokens, 0.1816 s between the second and the third line."""
    observed = read(LOGS / "trainer_state.json")
    assert observed.steps[1].tokens == 128
    assert observed.steps[1].step_s == pytest.approx((0.4556 - 0.274) / 2)
    assert observed.facts.total_flops


def test_a_folder_of_the_trainer_is_read_at_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    shutil.copy(LOGS / "trainer_state.json", tmp_path / "checkpoint-12")
    assert read(tmp_path).source.endswith("checkpoint-12/trainer_state.json")


def test_torchtitans_colours_and_its_memory() -> None:
    observed = read(LOGS / "torchtitan.log")
    assert (observed.facts.gpus, observed.tokens_per_s) == (8, pytest.approx(8 * 4100, rel=0.01))
    shown = {item.name: item.value for item in found(observed)["needless-recomputation"].evidence}
    assert shown["memory in use"] == pytest.approx(0.4186, rel=0.01)


def test_a_table_with_names_of_its_own(tmp_path: Path) -> None:
    columns = {"step": "iteration", "loss": "l", "data_wait_s": "loader_s"}
    observed = read(LOGS / "thrice.csv", columns=columns)
    assert observed.steps[0].step_s == pytest.approx(0.655, rel=0.02)
    assert observed.steps[0].loss == pytest.approx(8.9)


# ---- sparse logs and pauses ----


def nanogpt(
    steps: range,
    *,
    usual_ms: float = 250.0,
    slow_ms: float = 3000.0,
    slow_every: int = 0,
    evaluated: int = 0,
    first_ms: float = 0.0,
    tokens: int = 16_384,
) -> str:
    """Iterations, slow ones every so many, evaluations that are part of an iteration and print their own line."""
    lines = [f"tokens per iteration will be: {tokens:,}", "number of parameters: 10.65M"]
    for step in steps:
        paused = evaluated and step % evaluated == 0
        lines += [f"step {step}: train loss 3.1000, val loss 3.2000"] if paused else []
        slow = (slow_every and step % slow_every == 0) or paused
        ms = usual_ms + (slow_ms if slow else 0.0) + (first_ms if step == steps[0] else 0.0)
        lines.append(f"iter {step}: loss 3.2000, time {ms:.2f}ms, mfu 13.50%")
    return "\n".join(lines) + "\n"


def test_an_evaluation_inside_an_iteration_is_no_stall(tmp_path: Path) -> None:
    """20 evaluations of 2.9 s beside 5,001 iterations of 27.5 ms and 30 s of compiling; the 21st is in the first line."""
    text = nanogpt(range(0, 5001, 10), usual_ms=27.5, slow_ms=2900, evaluated=250, first_ms=30_000)
    findings = found(read(text_file(tmp_path, text)))
    assert "stall" not in findings
    pause = findings["validation-pause"]
    assert pause.evidence[0].value == 21
    assert pause.evidence[1].value == pytest.approx(2.9, rel=0.01)
    assert pause.evidence[2].value == pytest.approx(21 * 2.9 + 5001 * 0.0275 + 30, rel=0.01)
    assert "eval_interval" in pause.fix


def test_a_stall_in_a_log_of_every_tenth_update_counts_once_in_so_many(tmp_path: Path) -> None:
    """One update in 250 takes 2.9 s more than 27.5 ms: 39.1 ms on average, so 1.42 times as fast without."""
    text = nanogpt(range(0, 5001, 10), usual_ms=27.5, slow_ms=2900, slow_every=250)
    stall = found(read(text_file(tmp_path, text)))["stall"]
    assert stall.title.startswith("Every 250 updates")
    assert stall.gain is not None
    assert stall.gain.high == pytest.approx(1 + 2.9 / 250 / 0.0275, rel=0.02)


def test_evaluations_too_short_to_tell_are_not_taken_off(tmp_path: Path) -> None:
    """10 ms of 250: iterations without one differ by as much."""
    observed = read(text_file(tmp_path, nanogpt(range(400), slow_ms=10, evaluated=50)))
    assert [event for event in observed.events if "took_s" in event] == []
    assert sum(s.step_s == pytest.approx(0.26) for s in observed.steps) == 8


def trainer_state(tmp_path: Path, *, timed: bool = True, ended: bool = True, bad_from: int = 10_000) -> Path:
    """1.25 s an update, a line in ten, an evaluation of 31.2 s every 50."""
    history: list[dict[str, object]] = []
    clock_s = 0.0
    for step in range(10, 501, 10):
        clock_s += 12.5
        norm = float("nan") if step >= bad_from else 1.2
        times = {"train_runtime": clock_s, "num_input_tokens_seen": step * 32_768} if timed else {}
        history.append({"step": step, "loss": 2.5, "grad_norm": norm, **times})
        if step % 50 == 0:
            history.append({"step": step, "eval_loss": 2.4, "eval_runtime": 31.2})
            clock_s += 31.2
    if ended:
        rates = {"train_samples_per_second": 8.0, "train_steps_per_second": 500 / clock_s}
        history.append({"step": 500, "train_runtime": clock_s, **rates})
    return text_file(tmp_path, json.dumps({"global_step": 500, "log_history": history}), "trainer_state.json")


@pytest.mark.parametrize("timed", [True, False])
def test_the_trainers_evaluations_are_taken_off_its_updates(tmp_path: Path, timed: bool) -> None:
    observed = read(trainer_state(tmp_path, timed=timed))
    assert observed.median("step_s") == pytest.approx(1.25)
    findings = found(observed)
    assert "stall" not in findings
    assert findings["validation-pause"].title == "Validation takes 33% of the run", "312 of 937 s"
    assert "eval_steps" in findings["validation-pause"].fix


def test_a_stall_between_lines_that_are_means_is_counted_whole(tmp_path: Path) -> None:
    """12.5 s more in every fifth line of ten updates of 1.25 s."""
    rows, clock_s = [], 0.0
    for line in range(1, 61):
        clock_s += 12.5 + (12.5 if line % 5 == 0 else 0.0)
        rows.append({"step": 10 * line, "loss": 2.0, "train_runtime": clock_s})
    stall = found(read(text_file(tmp_path, json.dumps({"log_history": rows}), "trainer_state.json")))["stall"]
    assert stall.title.startswith("Every 50 updates the mean of 10 takes 2.0 times")
    assert stall.gain is not None
    assert stall.gain.high == pytest.approx(1.2, rel=0.01)


class Titan:
    """A torchtitan log with its clock; 2.34 s an update, whatever else the clock sees."""

    def __init__(self) -> None:
        self.now, self.lines = datetime(2025, 6, 4, 10), [""]

    def say(self, text: str, after_s: float = 0.0, ranks: int = 1) -> None:
        self.now += timedelta(seconds=after_s)
        for rank in range(ranks):
            at = self.now + timedelta(milliseconds=rank)
            stamp = f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d}"
            self.lines.append(f"[rank{rank}]:[titan] {stamp} - root - INFO - {text}")

    def start(self) -> None:
        for line in ("Starting job: llama", "Building 1-D device mesh with ['dp_shard'], [8]"):
            self.say(line)
        self.say("Training starts at step 1")

    def train(self, steps: range, ranks: int = 1) -> None:
        told = "grad_norm: 1.2  memory: 78.2GiB(82.32%)  tps: 7,000  mfu: 40.99%"
        for step in steps:
            self.say(f"step: {step}  loss: 8.0  {told}", 2.34 * steps.step, ranks)

    def read(self, folder: Path, cut: str = "") -> Observed:
        return read(text_file(folder, "\n".join(self.lines).removesuffix(cut) + ("" if cut else "\n")))


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
    observed = log.read(tmp_path)
    assert len(observed.steps) == 30
    assert observed.median("step_s") == pytest.approx(2.34, rel=0.001)
    assert max(s.step_s for s in observed.steps[1:] if s.step_s) < 3
    findings = found(observed)
    assert not {"stall", "slow-updates"} & findings.keys()
    pauses = [
        findings[f"{kind}-pause"] for kind in ("validation", "checkpoint") if f"{kind}-pause" in findings
    ]
    assert sum(float(pause.evidence[1].value) * 5 for pause in pauses) == pytest.approx(5 * 220, rel=0.05)


def test_the_time_until_a_job_was_started_again_is_of_no_update(tmp_path: Path) -> None:
    log = Titan()
    for start in range(0, 500, 100):
        log.say("no machine", 1200)
        log.start()
        log.train(range(start + 10, start + 110, 10))
    observed = log.read(tmp_path)
    assert len(observed.steps) == 50
    assert max(s.step_s for s in observed.steps if s.step_s) == pytest.approx(2.34, rel=0.001)
    assert diagnose(observed) == []


def test_a_last_line_that_was_cut_in_a_number_is_left_out(tmp_path: Path) -> None:
    """tps: 7,000 cut to 7 would be a number too; so would 180.0 cut to 18."""
    log = Titan()
    log.start()
    log.train(range(10, 110, 10))
    assert [s.step for s in log.read(tmp_path, cut=",000  mfu: 40.99%").steps] == list(range(10, 100, 10))
    line = "step:{} - perf/mfu/actor:0.35 - timing_s/gen:100.0 - timing_s/step:{}"
    text = "\n".join(line.format(step, "180.0") for step in range(1, 20)) + "\n" + line.format(20, "18")
    assert [s.step_s for s in read(text_file(tmp_path, text)).steps if s.step == 20] in ([], [None])


@pytest.mark.parametrize(
    ("name", "cause"), [("testing", "validation-pause"), ("save_checkpoint", "checkpoint-pause")]
)
@pytest.mark.parametrize("form", ["console", "jsonl", "beside"])
def test_verl_names_its_pauses(tmp_path: Path, name: str, cause: str, form: str) -> None:
    """25 s a step and 60 s every fifth, inside the step's time or, in some versions, beside it."""
    lines = []
    for step in range(1, 61):
        paused = {f"timing_s/{name}": 60.0} if step % 5 == 0 else {}
        took = 25.0 + (60.0 if paused and form != "beside" else 0.0)
        data = {"perf/total_num_tokens": 409_600, "timing_s/gen": 5.0, "perf/time_per_step": took} | paused
        shown = " - ".join(f"{key}:{value}" for key, value in data.items())
        lines.append(
            json.dumps({"step": step, "data": data}) if form == "jsonl" else f"step:{step} - {shown}"
        )
    observed = console(tmp_path, lines)
    findings = found(observed)
    assert not {"stall", "slow-updates"} & findings.keys()
    assert "trainer." in findings[cause].fix
    assert findings[cause].evidence[2].value == pytest.approx(60 * 25 + 12 * 60)
    assert observed.mean("step_s") == pytest.approx(25.0)


def test_a_clock_that_a_logger_reads_late_still_shows_the_evaluations(tmp_path: Path) -> None:
    """W&B writes the row of a step when the next begins: the long row is the one before that with eval/loss."""
    rows, clock_s = ["_step,_runtime,train/loss,eval/loss"], 0.0
    for step in range(1, 61):
        clock_s += 30.0 + (190.0 if step % 5 == 4 else 0.0)
        rows.append(f"{step},{clock_s},0.2,{0.17 if step % 5 == 0 else ''}")
    observed = console(tmp_path, rows, "history.csv")
    findings = found(observed)
    assert "stall" not in findings
    assert findings["validation-pause"].evidence[1].value == pytest.approx(190, rel=0.02)


# ---- several runs, lines twice, counters that start again ----


def test_of_several_runs_in_a_log_the_longest_is_read_with_its_own_settings(tmp_path: Path) -> None:
    """The second starts lower than the first ends: mixed together, no stall would be seen in either."""
    text = nanogpt(range(1000, 1600), slow_every=25) + nanogpt(range(100), tokens=99) + nanogpt(range(50))
    observed = read(text_file(tmp_path, text))
    assert "3 runs in this log; reading the longest, steps 1,000 to 1,599" in observed.notes
    assert observed.median("tokens") == 16_384
    assert found(observed)["stall"].title.startswith("Every 25 updates")
    same = read(text_file(tmp_path, nanogpt(range(100), tokens=99) + nanogpt(range(100), slow_every=20)))
    assert same.median("tokens") == 16_384, "of runs of the same length the last"


def test_lines_that_stand_twice_count_once(tmp_path: Path) -> None:
    lines = nanogpt(range(600), slow_every=25).splitlines()
    observed = read(text_file(tmp_path, "\n".join(line for line in lines for _ in range(2))))
    assert len(observed.steps) == 600
    assert not any("runs in this log" in note for note in observed.notes)
    assert "stall" in found(observed)


def test_the_warm_up_of_a_job_that_was_started_again_is_no_validation(tmp_path: Path) -> None:
    """Three starts of 60 s each, evaluations of 3 s every 250 of 1,000 iterations of 250 ms."""
    starts = [range(2000), range(1500, 4000), range(3500, 4500)]
    observed = read(
        text_file(tmp_path, "".join(nanogpt(steps, first_ms=60_000, evaluated=250) for steps in starts))
    )
    assert [event["step"] for event in observed.events] == list(range(1500, 4000, 250))
    assert all(event["took_s"] == pytest.approx(3.0, rel=0.01) for event in observed.events)


@pytest.mark.parametrize("epoch", ["epoch", "epochnum"])
@pytest.mark.parametrize(("first", "apart"), [(0, 1), (1, 1), (10, 10)])
def test_steps_that_start_again_with_each_epoch_are_counted_on(
    tmp_path: Path, epoch: str, first: int, apart: int
) -> None:
    """Ten epochs of 50 lines, whose values do not differ."""
    steps = [first + apart * at for at in range(50)]
    rows = [{epoch: e, "step": step, "loss": 2.5, "step_s": 0.25} for e in range(10) for step in steps]
    observed = jsonl(tmp_path, rows)
    assert [s.step for s in observed.steps] == [first + apart * at for at in range(500)]
    assert observed.notes == (f"the step restarts with each epoch: counted on to {first + apart * 499:,}",)


def test_lines_of_a_table_that_come_late_or_twice_or_of_two_processes_are_of_one_run(tmp_path: Path) -> None:
    rows = [(step, 0) for step in (1, 2, 4, 3, 5)] + [
        (step, rank) for step in (6, 7, 8) for rank in (0, 0, 1)
    ]
    observed = jsonl(tmp_path, [{"step": step, "step_s": 0.25 + rank / 100} for step, rank in rows])
    assert ([s.step for s in observed.steps], observed.notes) == (list(range(1, 9)), ())
    assert {s.step_s for s in observed.steps} == {0.25}


# ---- how many GPUs, and whose tokens/s ----


def test_nanogpt_on_several_gpus_is_not_above_the_peak(tmp_path: Path) -> None:
    """8 A100s, 43% MFU each: 491,520 tokens in 393.5 ms need 0.93 PFLOP/s and more, which one of them does not have."""
    lines = ["number of parameters: 123.59M", "tokens per iteration will be: 491,520", "batch_size = 12"]
    lines += ["block_size = 1024"] + [
        f"iter {10 * i}: loss 4.0000, time 393.50ms, mfu 42.90%" for i in range(1, 60)
    ]
    path = text_file(tmp_path, "\n".join(lines) + "\n")
    observed = read(path, facts={"gpu": "a100-80g"})
    assert observed.facts.gpus == 8
    assert any("8 GPUs" in note for note in observed.notes)
    assert found(observed) == {}
    shaped = read(text_file(tmp_path, "n_layer = 12\nn_embd = 768\n" + "\n".join(lines), "shaped"))
    assert shaped.facts.gpus == 8


def test_tokens_that_one_gpu_cannot_do_are_not_read_as_an_mfu(tmp_path: Path) -> None:
    """6 x 454M x 500,000 = 1.36 PFLOP/s on an H100 with 0.99: two of them, or nonsense."""
    rows = "".join(f"{i},0.5,500000,0.8\n" for i in range(1, 21))
    path = text_file(tmp_path, "step,step_s,tokens_per_s,mfu\n" + rows, "log.csv")
    facts = {"gpu": "h100-80g", "parameters": "454M"}
    assert read(path, facts=facts).facts.gpus == 2, "an MFU of 80% makes them two"
    assert list(found(read(path, facts={**facts, "gpus": "1"}))) == ["over-peak"]
    assert found(read(path, facts={**facts, "gpus": "2"})) == {}


@pytest.mark.parametrize("sep", ["/", "|"])
def test_lightnings_own_names(tmp_path: Path, sep: str) -> None:
    rates = f"train{sep}device{sep}items_per_sec,train{sep}device{sep}samples_per_sec,train{sep}time"
    rows = [f"0,{step},1000,2,{step * 0.5}" for step in range(9, 200, 10)]
    alone = read(text_file(tmp_path, f"epoch,step,{rates}\n" + "\n".join(rows) + "\n"), facts={"gpus": "1"})
    assert (alone.trainer.name, alone.tokens_per_s) == ("lightning", pytest.approx(1000))
    assert alone.median("step_s") == pytest.approx(0.5)
    several = f"epoch,step,{rates},train{sep}samples_per_sec"
    part = read(text_file(tmp_path, several + "\n" + "\n".join(f"{row},8" for row in rows) + "\n"))
    assert (part.facts.gpus, part.tokens_per_s) == (4, pytest.approx(4000))


def test_a_rate_of_one_gpu_among_an_unknown_number_is_asked_about(tmp_path: Path) -> None:
    lines = [f"step {i} | loss: 2.0 | dt: 500.0ms | tokens/s/gpu: 1000" for i in range(1, 20)]
    path = text_file(tmp_path, "\n".join(lines) + "\n")
    assert read(path).tokens_per_s is None
    assert any("--fact gpus=N" in note for note in read(path).notes)
    assert read(path, facts={"gpus": "8"}).tokens_per_s == pytest.approx(8000)


def test_a_printed_rate_that_batch_and_time_contradict_is_said(tmp_path: Path) -> None:
    """One pass of two, over the time of both: 32,768 tokens in half a second are printed as half as many a second."""
    head = "Total batch size 32,768 => gradient accumulation steps: 2\nDistributed world size: 4\n"
    lines = [
        f"step {i:05d}/00060 | loss: 2.0 | lrm: 1.00 | dt: 500.00ms | tok/sec: 32,768" for i in range(60)
    ]
    observed = read(text_file(tmp_path, head + "\n".join(lines) + "\n"))
    assert observed.tokens_per_s == pytest.approx(65_536)
    assert "65,536" in found(observed)["wrong-throughput"].title
    assert "one pass" in found(observed)["wrong-throughput"].title


# ---- losses that are no numbers ----


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("log.csv", "{i},{loss},0.5"),
        ("log.jsonl", '{{"step": {i}, "loss": {null}, "step_s": 0.5}}'),
        ("log.jsonl", '{{"step": {i}, "loss": {inf}}}'),
        ("log", "iter {i}: loss {loss}, time 10.00ms, mfu 1.00%"),
        ("log", "step:{i} - actor/grad_norm:{loss} - perf/time_per_step:1.0"),
    ],
)
def test_a_loss_that_is_not_a_number_is_told_with_its_update(tmp_path: Path, name: str, line: str) -> None:
    text = "step,loss,step_s\n" if name.endswith("csv") else ""
    for i in range(1, 41):
        bad = (
            {"loss": "nan", "null": "null", "inf": "Infinity"}
            if i > 20
            else dict.fromkeys(("loss", "null", "inf"), "1.0")
        )
        text += line.format(i=i, **bad) + "\n"
    assert found(read(text_file(tmp_path, text, name)))["not-a-number"].title.endswith("from update 21 on")


def test_a_gradient_of_the_trainer_that_is_not_a_number(tmp_path: Path) -> None:
    """Its loss is filtered by default and looks well."""
    assert "from update 300 on" in found(read(trainer_state(tmp_path, bad_from=300)))["not-a-number"].title


def nulls(tmp_path: Path, losses: list[float | str | None]) -> dict[str, Finding]:
    rows = [{"step": step, "loss": loss, "step_s": 0.2} for step, loss in enumerate(losses, start=1)]
    return found(jsonl(tmp_path, rows))  # type: ignore[arg-type]


def test_a_loss_that_is_null_until_the_next_is_not_logged(tmp_path: Path) -> None:
    every_tenth = [2.5 if step % 10 == 0 else None for step in range(1, 96)]
    assert "not-a-number" not in nulls(tmp_path, every_tenth)
    assert "not-a-number" not in nulls(tmp_path, [2.5] * 30 + [None]), "a closing summary"
    lost = nulls(tmp_path, [*every_tenth[:90], *[None] * 30])["not-a-number"]
    assert lost.title.endswith("from update 91 on")
    once = nulls(tmp_path, [2.5, "nan", *every_tenth[9::10]])["not-a-number"]
    assert once.title.endswith("in 1 of the updates, the first 2")


def test_a_line_of_a_validation_is_no_failure(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"step": i, "loss": 1.0, "step_s": 0.5} for i in range(1, 20)]
    held_out = [
        {"step": 20, "loss": None, "val_loss": 1.0},
        {"step": 21, "bbox/APs": float("nan"), "loss": 1.0},
    ]
    assert "not-a-number" not in found(jsonl(tmp_path, rows + held_out))


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
    steps = range(10, 510, 10)
    history = [{"step": i, "loss": 2.0, "grad_norm": float("inf") if i in bad else 1.0} for i in steps]
    state = json.dumps({"global_step": 500, "log_history": history})
    findings = found(read(text_file(tmp_path, state, "trainer_state.json")))
    assert ("not-a-number" in findings) == (since is not None)
    if since:
        assert findings["not-a-number"].title.endswith(since)


# ---- times that are not there, and units ----


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        (
            "metrics.csv",
            "epoch,step,train_loss\n" + "".join(f"0,{i},1.0\n" for i in range(20)),
            "ThroughputMonitor",
        ),
        ("log.jsonl", "".join(f'{{"step": {i}, "loss": 1.0}}\n' for i in range(20)), "--map step_s=COLUMN"),
    ],
)
def test_a_log_without_times_is_not_called_fast(tmp_path: Path, name: str, text: str, hint: str) -> None:
    observed = read(text_file(tmp_path, text, name))
    said = verdict(observed, diagnose(observed))
    assert said.word == "not judged"
    assert "no times" in said.text
    assert hint in said.text


def test_a_trainer_that_was_killed_has_no_times(tmp_path: Path) -> None:
    observed = read(trainer_state(tmp_path, timed=False, ended=False))
    assert "include_num_input_tokens_seen" in (too_little(observed) or "")


def test_a_speed_that_was_not_judged_is_not_called_good(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 1.0, "step_s": 0.5} for i in range(1, 40)]
    observed = jsonl(tmp_path, rows)  # type: ignore[arg-type]
    said = verdict(observed, diagnose(observed))
    assert said.word == "not judged"
    assert any("--fact gpu=" in need for need in said.needs)
    assert any("--fact tokens=" in need for need in said.needs)


def test_a_time_without_a_unit_is_settled_by_the_clock_or_said(tmp_path: Path) -> None:
    path = text_file(tmp_path, "step,loss,dt\n" + "".join(f"{i},1.0,120\n" for i in range(20)), "log.csv")
    assert read(path).median("step_s") == pytest.approx(0.12)
    assert any("--map step_s=dt" in note for note in read(path).notes)
    seconds = [{"step": i, "time": 120.0, "_runtime": 120.0 * i} for i in range(1, 30)]
    assert jsonl(tmp_path, seconds).median("step_s") == pytest.approx(120.0)  # type: ignore[arg-type]


def test_a_column_called_time_that_only_grows_is_a_clock(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 1.0, "time": 3.0 * i} for i in range(1, 30)]
    assert jsonl(tmp_path, rows).median("step_s") == pytest.approx(3.0)  # type: ignore[arg-type]


def test_a_cell_of_zero_with_a_unit_is_a_zero(tmp_path: Path) -> None:
    waits = [300 if step % 10 == 0 else 0 for step in range(60)]
    rows = "".join(f"{step},1.0,{400 + wait}ms,{wait}ms\n" for step, wait in enumerate(waits))
    observed = read(text_file(tmp_path, "step,loss,step_time,data_time\n" + rows, "log.csv"))
    assert [step.data_wait_s for step in observed.steps] == pytest.approx([wait / 1000 for wait in waits])
    assert "slow-loader" in found(observed)


def test_columns_may_have_a_unit(tmp_path: Path) -> None:
    text = "i,dt,mem,mfu,speed\n" + "".join(f"{i},120,40,1.35,31\n" for i in range(1, 21))
    path = text_file(tmp_path, text, "log.csv")
    columns = {
        "step": "i",
        "step_s": "dt:ms",
        "memory_bytes": "mem:GB",
        "mfu": "mfu:%",
        "tokens_per_s": "speed:k",
    }
    first = read(path, columns=columns).steps[0]
    assert (first.step_s, first.memory_bytes, first.mfu) == pytest.approx((0.12, 40e9, 0.0135))
    assert first.tokens == pytest.approx(31_000 * 0.12)
    gib = read(path, columns={**columns, "memory_bytes": "mem:GiB"}).steps[0].memory_bytes
    assert gib == pytest.approx(40 * 2**30)
    with pytest.raises(ConfigError, match="has no unit 'kg'"):
        read(path, columns={"step": "i", "step_s": "dt:kg"})
    with pytest.raises(DataError, match="is -1, and step_s cannot be negative"):
        read(text_file(tmp_path, "step,t\n3,-1\n4,-1\n", "bad.csv"), columns={"step_s": "t"})


@pytest.mark.parametrize(("mfu", "percent"), [("1.35", 135), ("250", 250), ("43", 43), ("0.6", 60)])
def test_an_mfu_above_one_is_impossible(tmp_path: Path, mfu: str, percent: float) -> None:
    text = "step,step_s,mfu\n" + "".join(f"{i},0.5,{mfu}\n" for i in range(1, 21))
    observed = read(text_file(tmp_path, text, "log.csv"))
    assert observed.median("mfu") == pytest.approx(percent / 100)
    assert ("over-peak" in found(observed)) == (percent > 100)


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
    assert observed.mean("step_s") == pytest.approx(step_s)
    assert observed.tokens_per_s == pytest.approx(12_345.6)
    assert observed.mean("loss") == pytest.approx(2.5)


@pytest.mark.parametrize("wps", ["{running:.0f}", "57.3"])
def test_a_rate_that_contradicts_the_clock_is_not_that_of_an_update(tmp_path: Path, wps: str) -> None:
    """fairseq of 2019 printed words/s since the start, fairseq on a TPU those of one update in a hundred."""
    line = "| epoch 001: {n} / 12603 loss=9.1, wps={wps}, wpb=82900.0, num_updates={n}, wall={wall}, train_wall=1\n"
    walls = [(n, 785 + 83 * n // 100) for n in range(100, 4100, 100)]
    rows = [(n, wall, wps.format(running=82_900 * n / wall)) for n, wall in walls]
    text = "".join(line.format(n=n, wall=wall, wps=rate) for n, wall, rate in rows)
    observed = read(text_file(tmp_path, text))
    assert observed.median("step_s") == pytest.approx(0.83, rel=0.02)
    assert ("wrong-throughput" in found(observed)) == (wps == "57.3"), "no factor makes a mean a speed"


def test_a_printed_mfu_is_judged(tmp_path: Path) -> None:
    """How many GPUs there were is not said, so tokens/s say nothing: the MFU does."""
    line = "[titan] 2026-02-24 19:46:{:02},508 - root - INFO - step: {:2}  loss: 7.6  memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: {}%\n"
    for mfu, word in ((13.99, "found"), (32.5, "not judged"), (45.0, "fast enough")):
        text = "".join(line.format(step, step, mfu) for step in range(1, 40))
        observed = read(text_file(tmp_path, text))
        assert verdict(observed, diagnose(observed)).word == word


@pytest.mark.parametrize(("rate", "batch"), [(83.5, 128), (8.009, 12), (66.0, 99), (6.9, 10)])
def test_a_batch_from_a_rate_is_the_round_number_near_it(tmp_path: Path, rate: float, batch: float) -> None:
    """Updates of 1.5 s: 125.25 rows are 128, 12.01 are 12, 99.0 are 99, and 10.35 are 10."""
    lines = [f"step {n} | loss: 2.1 | dt: 1500.0ms | samples/s: {rate}" for n in range(1, 20)]
    assert console(tmp_path, lines).facts.batch_size == batch


@pytest.mark.parametrize(("mfu", "low"), [("16.60", True), ("28.90", False)])
def test_an_mfu_against_an_a100s_peak_on_an_unknown_gpu(tmp_path: Path, mfu: str, low: bool) -> None:
    """nanoGPT's 28.9% are 90 TFLOP/s: little for an A100, and more than half of what a 4090 has."""
    lines = [f"iter {10 * i}: loss 4.0000, time 4620.50ms, mfu {mfu}%" for i in range(1, 30)]
    observed = console(tmp_path, lines)
    assert ("low-mfu" in found(observed)) == low


def test_the_error_of_the_program_and_not_that_of_its_launcher(tmp_path: Path) -> None:
    text = """Traceback (most recent call last):
  File "/home/me/torch/train.py", line 1, in <module>
RuntimeError: CUDA is required
Traceback (most recent call last):
  File "/home/me/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    assert (
        found(read(text_file(tmp_path, text)))["crash"].evidence[0].value == "RuntimeError: CUDA is required"
    )


# ---- what the user says ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"stepp": "x"}}, "did you mean 'step'"),
        ({"columns": {"step": "iter"}}, "did you mean 'iteration'"),
        ({"facts": {"parameter": "8"}}, "did you mean 'parameters'"),
        ({"facts": {"gpu": "h100"}}, "h100-80g"),
        ({"facts": {"parameters": "many"}}, "needs one number"),
    ],
)
def test_a_mistake_gets_one_clear_line(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(LOGS / "thrice.csv", **options)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        (("parameters", "7b"), 7e9),
        (("parameters", "1.24e8"), 1.24e8),
        (("parameters", "123,590,000"), 123.59e6),
        (("memory_bytes", "80GB"), 80e9),
        (("memory_bytes", "80GiB"), 80 * 2**30),
        (("precision", "bf16"), "bf16"),
        (("offload", "on"), "on"),
        (("parameters", "-5"), None),
        (("parameters", "0"), None),
        (("parameters", "7 bananas"), None),
        (("parameters", "nan"), None),
        (("memory_bytes", "80 parsec"), None),
        (("gpus", "1.5"), None),
        (("precision", "qq"), None),
    ],
)
def test_a_fact_is_read_whole_or_refused(fact: tuple[str, str], value: float | str | None) -> None:
    if value is None:
        with pytest.raises(ConfigError, match=f"--fact {fact[0]}"):
            read(LOGS / "thrice.csv", facts=dict([fact]))
    else:
        assert getattr(read(LOGS / "thrice.csv", facts=dict([fact])).facts, fact[0]) == value


# ---- files that are damaged, or no logs ----


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.iterdir() if path.suffix != ".toml"))
def test_a_log_cut_anywhere_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """At bytes of its last two lines, as a trainer that is still writing, or a full disk, leaves it."""
    raw = (LOGS / name).read_bytes()
    start = raw.rstrip().rfind(b"\n", 0, raw.rstrip().rfind(b"\n"))
    path, ends = tmp_path / name, range(max(start, 1), len(raw), max(1, (len(raw) - start) // 8))
    for end in ends:
        path.write_bytes(raw[:end])
        with contextlib.suppress(RedlineError):  # one line, and no traceback
            diagnose(read(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"log_history": [{"loss": "a", "step": "b"}]}'),
        ("c.json", '{"log_history": "x"}'),
        ("g.log", "iter 1: loss naninf.., time 1..2ms, mfu 3%\n"),
        ("h.log", "step:1 - perf/throughput:1e - a:--3 - b:e\n"),
        ("binary", "\0\1\2"),
        ("words", "nothing here\nat all"),
        ("empty", ""),
        ("blank", " \n\n"),
    ],
)
def test_nonsense_gets_one_line(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match=name):
        read(text_file(tmp_path, text, name))
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "missing")


def test_a_running_mean_is_that_of_all_updates_so_far(tmp_path: Path) -> None:
    """The first update takes 2 s, the others 0.1 s: after 60 the mean is 7.9 / 60."""
    means = [(2.0 + 0.1 * (step - 1)) / step for step in range(1, 61)]
    lines = [
        f"step:{step}/600 train_loss:{5 - step / 30:.4f} step_avg:{1e3 * mean_s:.2f}ms"
        for step, mean_s in enumerate(means, start=1)
    ]
    observed = console(tmp_path, lines)
    assert observed.median("step_s") == pytest.approx(7.9 / 60, rel=1e-3)
    assert "the time of an update is taken from the running mean" in observed.notes


def test_the_trainers_table_in_a_notebook_gives_its_losses(tmp_path: Path) -> None:
    """Ten lines without a time, which the closing summary gives; a bar that shows its end alone adds nothing."""
    text = (LOGS / "trainer.ipynb").read_text()
    observed = read(text_file(tmp_path, text, "whole.ipynb"))
    assert [(s.step, s.loss) for s in observed.steps[:2]] == [(50, 2.99328), (100, 2.889242)]
    assert (len(observed.steps), observed.updates) == (10, 500)
    assert observed.median("step_s") == pytest.approx(325.7 / 500, rel=1e-3)
    lost = re.sub(r"(<td>\d+</td><td>)[\d.]+", r"\1nan", text)
    assert set(found(read(text_file(tmp_path, lost, "lost.ipynb")))) == {"not-a-number"}


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_log_with_a_byte_changed_is_refused(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    whole, path = pack((LOGS / "nanogpt.log").read_bytes()), tmp_path / "log"
    for place in range(12, len(whole) - 12, max(1, len(whole) // 40)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(
            DataError
        ):  # one line, and no traceback; gzip's header holds bytes that do not matter
            read(path)


@pytest.mark.parametrize("beyond", ["1e308", "1e61", "-1e300"])
def test_figures_that_no_training_reaches_are_not_there(beyond: str, tmp_path: Path) -> None:
    """Their squares are infinite, and one over them squared is 0: means and spreads would end in a traceback."""
    usual, huge = '"loss": 3.0, "step_time": 0.5, "tokens": 1000', f'"loss": {beyond}, "step_time": {beyond}'
    tiny = '"loss": 3.0, "step_time": 1e-300, "tokens": 1e-300'
    lines = [f'{{"step": {step}, {(usual, huge, tiny)[step % 3]}}}' for step in range(1, 31)]
    observed = read(text_file(tmp_path, "\n".join(lines), "log.jsonl"), columns={"step_s": "step_time:s"})
    diagnose(observed)
    assert {s.step_s for s in observed.steps} == {0.5, None}
    assert observed.median("step_s") == 0.5


def test_half_a_last_line_and_a_broken_one_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = (LOGS / "verl.jsonl").read_text()
    assert len(read(text_file(tmp_path, whole[:-200], "live.jsonl")).steps) == 19
    lines = whole.splitlines()
    lines[3] = "not json"
    observed = console(tmp_path, lines, "broken.jsonl")
    assert len(observed.steps) == 19
    assert "lines that are not JSON and are left out: 1, the first is line 4" in observed.notes


def test_a_table_of_runs_is_not_read_as_a_history(tmp_path: Path) -> None:
    head = "Name,State,Notes,Created,Runtime,iter,batch_size,block_size,eval_iters,eval_interval,train/loss\n"
    rows = "".join(f"run{i},finished,-,2026,{700 + i},5000,64,256,200,250,1.1\n" for i in range(20))
    observed = read(text_file(tmp_path, head + rows, "runs.csv"))
    assert (observed.format, observed.updates, observed.median("step_s")) == ("runs", 5000, None)
    assert "give the history of one run" in observed.notes[0]
    assert set(found(observed)) == {"validation-pause"}, "400 forward passes beside 250 updates"
    assert verdict(observed, diagnose(observed)).word == "found"
    chosen = "Name,Runtime,End Time,Hostname,Tags,global_batch_size\nrun1,300,2026,a,-,240\nrun2,374,2026,b,-,240\n"
    assert read(text_file(tmp_path, chosen, "chosen.csv")).format == "runs", (
        "its columns are the user's choice"
    )


# ---- consoles as they lie about ----


def test_bars_whose_carriage_returns_were_lost_and_losses_between_them(tmp_path: Path) -> None:
    """1.5 s an update; every tenth a dict with the tokens so far, all in one line."""
    text = ""
    for step in range(1, 401):
        at = f"{int(1.5 * step) // 60:02d}:{int(1.5 * step) % 60:02d}"
        text += f"  {step // 4}%|#         | {step}/400 [{at}<10:00,  1.50s/it]"
        if step % 10 == 0:
            text += f"{{'loss': 1.{step}, 'grad_norm': 0.2, 'num_tokens': {step * 5200.0}, 'epoch': {step / 400:.2f}}}\n"
    observed = read(text_file(tmp_path, text))
    assert observed.updates == 400
    assert observed.median("step_s") == pytest.approx(1.5, rel=0.05)
    assert observed.tokens_per_s == pytest.approx(5200 / 1.5, rel=0.05)
    assert sum(s.loss is not None for s in observed.steps) == 40


def test_a_bar_gives_its_clock_to_lines_that_have_none(tmp_path: Path) -> None:
    lines = []
    for step in range(601):
        at = f"{2 * step // 60:02d}:{2 * step % 60:02d}"
        lines.append(f"  {step // 6}%|#         | {step}/600 [{at}<10:00,  2.00s/it]")
        lines += [f"step={step} | loss=2.{step} | lr=1e-5"] if step % 10 == 0 else []
    observed = read(text_file(tmp_path, "\r".join(lines) + "\n"))
    assert observed.median("step_s") == pytest.approx(2.0, rel=0.05)
    assert sum(s.loss is not None for s in observed.steps) == 61


def test_a_closing_summary_alone_gives_the_mean(tmp_path: Path) -> None:
    rates = "'train_samples_per_second': 6.336, 'train_steps_per_second': 0.428"
    text = f"trainable params: 2,293,760 || all params: 598,343,680\n{{'train_runtime': 11.68, {rates}, 'epoch': 1.0}}\n"
    observed = read(text_file(tmp_path, text))
    assert (observed.updates, observed.facts.parameters) == (5, 598_343_680)
    assert observed.median("step_s") == pytest.approx(11.68 / 5)


def test_a_logger_in_front_of_the_step_and_lines_of_bare_numbers(tmp_path: Path) -> None:
    line = "2026-01-14 09:{:02d}:{:02d},325 INFO train_cfm: train step={}/6000 loss=5.2 addr=5.5 step_s=0.090 avg_s=0.092"
    text = "".join(line.format(i // 60, i % 60, 20 * i) + "\n" for i in range(1, 60))
    observed = read(text_file(tmp_path, text))
    assert (observed.median("step_s"), observed.planned) == (pytest.approx(0.09), 6000)
    bare = "".join(
        f"{i} train {10 - i / 50:.6f}\n" + (f"{i} val 9.1\n" if i % 50 == 0 else "") for i in range(200)
    )
    observed = read(text_file(tmp_path, bare, "log.txt"))
    assert (observed.updates, observed.steps[-1].loss) == (200, pytest.approx(6.02))


@pytest.mark.parametrize("losses", [True, False], ids=["a line every ten updates", "checkpoints alone"])
def test_the_running_log_of_hugging_face_has_stamps_and_no_steps(tmp_path: Path, losses: bool) -> None:
    """768 updates of 7.79 s; a line tells its epoch, and the head how many updates an epoch has."""

    def stamp(seconds: float) -> str:
        return f"{datetime(2026, 3, 1, 9, 30) + timedelta(seconds=round(seconds)):%Y-%m-%d %H:%M:%S}"

    head = ("***** Running training *****", "Num Epochs = 3", "Total optimization steps = 768")
    head += ("Total train batch size (w. parallel, distributed & accumulation) = 112",)
    lines = [f"[INFO|trainer.py:2414] {stamp(0)},100 >>   {line}" for line in head]
    for step in range(1, 769):
        if losses and step % 10 == 0:
            table = {"loss": round(3 - step / 768, 4), "learning_rate": 5e-05, "epoch": round(step / 256, 2)}
            lines.append(f"[INFO|{stamp(7.79 * step)}] llamafactory.train.callbacks:143 >> {table}")
        if step % 200 == 0 or step == 768:
            lines.append(
                f"[INFO|trainer.py:3948] {stamp(7.79 * step)},200 >> Saving to saves/x/checkpoint-{step}"
            )
    observed = console(tmp_path, lines, "running_log.txt")
    assert observed.updates == (760 if losses else 768)
    assert observed.median("step_s") == pytest.approx(7.79, rel=0.02)
    assert observed.facts.batch_size == 112


def test_a_console_of_the_trainer_that_is_still_running(tmp_path: Path) -> None:
    """The bar's total is not where the last line stands: tokens of an update follow from the steps done."""
    lines = []
    for step in range(1, 401):
        lines.append(
            f"\r{step / 16:3.0f}%|███   | {step}/1600 [{step // 30:02d}:{2 * step % 60:02d}<59:00,  2.00s/it]"
        )
        if step % 10 == 0:
            cells = {"loss": 2.0 - step / 1000, "num_tokens": 5000.0 * step, "epoch": round(step / 800, 2)}
            lines.append(f"{cells}\n")
    observed = read(text_file(tmp_path, "".join(lines), "train.log"))
    assert observed.updates == 400
    assert observed.median("step_s") == pytest.approx(2.0, rel=0.02)
    assert observed.median("tokens") == pytest.approx(5000, rel=0.02)


@pytest.mark.parametrize(("start_s", "end"), [(0, 20_000), (40, 8_000)])
def test_an_estimate_in_whole_minutes_is_told_by_how_it_falls(tmp_path: Path, start_s: int, end: int) -> None:
    """It is the mean of all updates so far, of which a slow start is worn off."""
    step_s, steps = 0.0755, 60_000
    lines = []
    for step in range(0, end, 100):
        spent_s = start_s + step_s * (step + 1)
        left = spent_s / (step + 1) * steps // 60 - spent_s // 60
        lines.append(
            f"Epoch:[0/3]({step}/{steps}) loss:{2.0 - step / 4e4:.3f} lr:0.0001 epoch_Time:{left}min:"
        )
    observed = console(tmp_path, ["LLM总参数量：26.878 百万", *lines])
    assert observed.median("step_s") == pytest.approx(step_s, rel=0.02)
    assert observed.facts.parameters == pytest.approx(26.878e6)


def test_an_accuracy_between_the_updates_tells_of_a_validation(tmp_path: Path) -> None:
    now, lines = datetime(2026, 3, 1), []
    for step in range(1, 121):
        now += timedelta(seconds=2)
        lines.append(f"{now:%Y-%m-%d %H:%M:%S},000 - train - INFO - Step {step} loss: {8 - step / 40:.4f}")
        if step % 20 == 0:
            now += timedelta(seconds=30)
            lines.append(f"{now:%Y-%m-%d %H:%M:%S},000 - train - INFO - Step {step} eval_acc: 0.4")
    observed = console(tmp_path, lines)
    assert observed.median("step_s") == pytest.approx(2.0)
    causes = found(observed)
    assert "validation-pause" in causes
    assert "stall" not in causes


@pytest.mark.parametrize(("time_s", "note"), [(8.0, "that of 20 updates"), (3.0, "time is not read")])
def test_a_time_that_the_clock_contradicts(tmp_path: Path, time_s: float, note: str) -> None:
    """That of the 20 updates between two lines, or of nobody knows what."""
    lines = [
        f"2026-03-01 09:{step * 8 // 1200:02d}:{step * 8 // 20 % 60:02d},000 batch: {step}, time: {time_s}, loss: {9 - step / 999:.3f}"
        for step in range(20, 2000, 20)
    ]
    observed = console(tmp_path, lines)
    assert observed.median("step_s") == pytest.approx(0.4, rel=0.02)
    assert any(note in each for each in observed.notes)


def test_a_crash_before_the_first_update_is_told_whoever_trained(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/venv/site-packages/transformers/trainer.py", line 1, in train\n'
        "ImportError: flash_attn_2_cuda.so: undefined symbol\n"
    )
    causes = found(read(text_file(tmp_path, f"loading the model\n{text}", "train.log")))
    assert causes["crash"].kind == "failure"
    with pytest.raises(DataError, match="shows no training"):
        read(text_file(tmp_path, text.replace("transformers", "requests"), "other.log"))


def test_a_run_that_says_it_stops_at_a_loss_that_is_none(tmp_path: Path) -> None:
    lines = [f"Epoch: [0]  [{n:5d}/13000]  closs: 1.5  time: 0.61  data: 0.0001" for n in range(10, 200, 10)]
    assert found(console(tmp_path, lines)) == {}
    lines.append("Loss is nan, stopping training")
    assert list(found(console(tmp_path, lines))) == ["not-a-number"]


def test_a_loss_that_was_lost_once_is_no_failure(tmp_path: Path) -> None:
    losses = [f"{8 - step / 40:.4f}" if step != 57 else "nan" for step in range(1, 201)]
    lines = [f"step {step} | loss: {loss} | dt: 400.0ms" for step, loss in enumerate(losses, 1)]
    observed = console(tmp_path, lines)
    finding = found(observed)["not-a-number"]
    assert finding.kind == "cause"
    assert finding.confidence < 0.8
    assert verdict(observed, [finding]).word != "failed"


def test_deepspeeds_lines_of_2020_count_an_epoch_and_a_step(tmp_path: Path) -> None:
    """50 steps in 15 s at 13.3 samples/s: four samples an update."""
    lines = [
        f"[INFO 2020-06-08 05:{step * 3 // 600:02d}:{step * 3 // 10 % 60:02d}] 0/{step}, SamplesPerSec=13.33"
        for step in range(50, 3000, 50)
    ]
    observed = console(tmp_path, lines)
    assert (observed.trainer.name, observed.updates, observed.facts.batch_size) == ("deepspeed", 2950, 4)
    assert observed.median("step_s") == pytest.approx(0.3, rel=0.02)


def test_megatrons_progress_file(tmp_path: Path) -> None:
    """A line every 100 iterations of 2 s and a million tokens each, on eight GPUs."""
    job = "Job ID: 7\t# GPUs: 8"
    lines = [
        f"2025-02-24 {17 + n // 18}:{n * 200 // 60 % 60:02d}:{n * 200 % 60:02d}\t{job}\tSaving async checkpoint\tIteration: {100 * n}"
        f"\tJob throughput: 364.8 TFLOP/s/GPU\tCumulative throughput: 387.0 TFLOP/s/GPU\tTokens (in billions): {0.1 * n:.2f}"
        for n in range(1, 18)
    ]
    start = f"2025-02-24 17:00:00\t{job}\tStarting job"
    observed = console(tmp_path, [start, *lines], "progress.txt")
    assert (observed.trainer.name, observed.updates, observed.facts.gpus) == ("megatron", 1700, 8)
    assert observed.median("step_s") == pytest.approx(2.0, rel=0.01)
    assert observed.tokens_per_s == pytest.approx(0.5e6, rel=0.02)


def test_bars_that_name_their_epoch_count_on(tmp_path: Path) -> None:
    bar = "Epoch {}: {:3d}%|█████     | {}/60 [00:{:02d}<00:10, 2.0it/s, loss=2.1]"
    bars = [bar.format(epoch, step, step, step // 2) for epoch in range(4) for step in range(1, 61)]
    observed = console(tmp_path, bars)
    assert (observed.updates, observed.median("step_s")) == (240, pytest.approx(0.5, rel=0.03))


def test_tokens_trained_so_far_give_those_of_an_update(tmp_path: Path) -> None:
    rows = [
        {"step": n, "loss": 2.0, "tokens_per_second": 1e5, "trained_tokens": n * 8192}
        for n in range(20, 400, 20)
    ]
    assert jsonl(tmp_path, rows).median("step_s") == pytest.approx(0.08192)


def test_the_parameters_of_a_mixture_of_experts_do_not_tell_its_flops(tmp_path: Path) -> None:
    """16B parameters x 6 x 98,000 tokens/s are more than 8 H100s can do, and a token passes a sixth of them."""
    shape = "moe_args=MoEArgs(num_experts=64, top_k=6), n_layers=27, dim=2048"
    size = "number of parameters: 15.7B"
    line = "step: {}  loss: 3.1  tps: 12,250  step_time: 1.337\n"
    facts = {"gpu": "h100-80g", "gpus": "8", "tokens": "131072"}
    for head, causes in ((size, ["over-peak"]), (f"{shape}\n{size}", []), (f"{shape}, hidden_size=2048", [])):
        rows = "".join(line.format(n) for n in range(1, 30))
        observed = read(text_file(tmp_path, f"{head}\n{rows}"), facts=facts)
        assert list(found(observed)) == causes
    assert observed.facts.parameters is None, "not estimated from layers and width"


@pytest.mark.parametrize(("line", "step_s"), [
    ("{n}00/{n}00 [=====] - 1s 6ms/step - loss: 2.1\n", 0.006),
    ("        iters: {n}00, epoch: 1 | loss: 2.1\n        speed: 0.0583s/iter; left time: 740.3973s\n", 0.0583),
])  # fmt: skip
def test_the_unit_behind_a_number_is_read(tmp_path: Path, line: str, step_s: float) -> None:
    observed = read(text_file(tmp_path, "".join(line.format(n=n) for n in range(1, 12))))
    assert observed.median("step_s") == pytest.approx(step_s)


@pytest.mark.parametrize("step", [True, False], ids=["with steps", "with epochs alone"])
def test_the_time_of_an_epoch_is_a_clock_where_steps_are_told(tmp_path: Path, step: bool) -> None:
    rows = [{"epoch": n, "train_loss": 2.0, "epoch_time": 37.5} | {"step": 300 * n - 1} for n in range(1, 9)]
    if not step:
        rows = [{name: row[name] for name in row if name != "step"} for row in rows]
    assert jsonl(tmp_path, rows).median("step_s") == (pytest.approx(0.125) if step else None)


def test_the_bars_of_an_engine_that_warms_up_are_no_training(tmp_path: Path) -> None:
    bar = "Capturing CUDA graphs (decode, FULL): {:3d}%|███| {}/35 [00:{:02d}<00:01, 9.7it/s]\n"
    text = "".join(bar.format(n * 3, n, n // 2) for n in range(1, 36))
    with pytest.raises(RedlineError, match="shows no training"):
        read(text_file(tmp_path, text))


@pytest.mark.parametrize(
    "bars",
    [
        ("  2%|▏         | 1/60 [00:00<00:30, 2.0it/s]", "100%|██████████| 60/60 [00:30<00:00, 2.0it/s]"),
        ("2% ──────────── 1/60 2.0it/s 0.5s<29.5s", "100% ━━━━━━━━━━━━ 60/60 2.0it/s 30.0s"),
        ("100% ━━━━━━━━━━━━ 60/60 2.0it/s 30.0s",),
    ],
)
def test_bars_of_several_epochs_count_on(tmp_path: Path, bars: tuple[str, ...]) -> None:
    """Ultralytics: each epoch is 60 updates of half a second, and a validation with a bar of its own. A notebook keeps only
    the end of each bar."""
    row = "      {}/9      2.34G      1.238      2.345      1.123         45        640: {}"
    test = f"                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): {bars[-1].replace('60', '7')}"
    each = ["\n".join([*(row.format(epoch, bar) for bar in bars), test]) for epoch in range(1, 10)]
    observed = console(tmp_path, ["Ultralytics 8.3.203", *each])
    assert observed.updates == 540
    assert observed.median("step_s") == pytest.approx(0.5, rel=0.02)


def test_a_closing_line_alone_is_of_the_whole_run(tmp_path: Path) -> None:
    """768 updates in 5,979 s with 24,689,312 tokens."""
    told = {"current_steps": 768, "total_steps": 768, "elapsed_time": "1:39:39", "throughput": 4129.18}
    observed = jsonl(tmp_path, [{**told, "total_tokens": 24_689_312}])
    assert (observed.updates, observed.median("step_s")) == (768, pytest.approx(5979 / 768))
    assert observed.tokens_per_s == pytest.approx(24_689_312 / 5979)


def test_reading_takes_as_long_as_there_are_lines(tmp_path: Path) -> None:
    """Twice the bars and losses of a Trainer are twice the calls, give or take what does not grow."""

    def calls(count: int) -> int:
        bar = "{}%|██ | {}/{} [{:02d}:{:02d}<09:00,  2.00s/it]\n{{'loss': 2.1, 'epoch': {:.4f}}}\n"
        lines = (
            bar.format(100 * n // count, n, count, n // 30, n * 2 % 60, n / count) for n in range(1, count)
        )
        path, seen = text_file(tmp_path, "".join(lines)), 0

        def count_one(*_: object) -> None:
            nonlocal seen
            seen += 1

        sys.setprofile(count_one)
        try:
            read(path)
        finally:
            sys.setprofile(None)
        return seen

    calls(20)  # fills what is kept from one log to the next
    assert calls(400) < 2.1 * calls(200)


def test_the_last_lines_of_a_run_are_read_off_its_end() -> None:
    class Run(dict[int, Row]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("every line of a long log would go through all lines before it")

    assert _apart(Run({step: Row(step) for step in (10, 20, 25)})) == 5
    assert _apart(Run({10: Row(10)})) == 1


def test_a_page_with_tables_of_losses_is_no_log_without_steps(tmp_path: Path) -> None:
    rows = "".join(f"| change {n} | 1.{n}x | loss +0.000{n} |\n" for n in range(1, 9))
    page = f"# What it brings\n\n| change | speed | what else |\n|---|---|---|\n{rows}"
    assert read(text_file(tmp_path, page, "page.md")).format == "document"
    lines = "".join(f"loss {3 / n:.3f}\n" for n in range(1, 9))
    assert read(text_file(tmp_path, lines)).updates == 8
