"""The live view: what the panel says at 60 and 120 columns, and which plain lines come when, by a clock of
our own."""

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.cli.live import LiveView, PlainView, Seen, figures, live_panel, make_view, plain_line
from redline.record.words import WORDS, told

NOTE = "6N+12LdT, of 989 TFLOP/s bf16 datasheet"


def line(step: int, **more: Any) -> dict[str, Any]:
    known = {"step": step, "loss": 4.0 - step / 1000, "lr": 3e-4, "tokens_per_s": 41_234.0, "step_s": 0.148}
    known |= {"data_wait_s": 0.000444, "memory_bytes": int(1.2 * 2**30), "elapsed_s": step * 0.148}
    return {**known, "mfu": None, "ceiling_share": None, **more}


STAGE = {"title": "nano · cpu", "total_steps": 1000, "mfu_note": NOTE}
SAMPLED = {
    "questions": 1000,
    "questions_done": 120,
    "samples": 3400,
    "samples_left": 26_600,
    "correct": 1401,
    "tokens_per_s": 139_000.0,
    "elapsed_s": 3.0,
    "left_s": 20.0,
    "memory_bytes": 12 * 2**30,
}


def make_seen(**changes: Any) -> Seen:
    return Seen.of(STAGE | changes)


class PlainRun:
    """A plain view under a clock that the test moves."""

    def __init__(self, **options: Any) -> None:
        self.now_s, self.stream = 100.0, io.StringIO()
        self.view = PlainView(self.stream, clock=lambda: self.now_s)
        self.view.event("stage", STAGE | options)

    def steps(self, steps: range, step_s: float) -> None:
        for step in steps:
            self.now_s += step_s
            self.view.metrics(line(step, step_s=step_s))

    def shown(self) -> list[int]:
        return [int(step) for step in re.findall(r"^step (\d+)/", self.stream.getvalue(), re.MULTILINE)]


class TestPlain:
    def test_whole_output(self) -> None:
        run = PlainRun()
        run.view.metrics(line(120, loss=3.4123))
        run.view.event("checkpoint", {"step": 120, "stalled_s": 0.009})
        run.view.event(
            "end", {"step": 120, "why": "finished", "elapsed_s": 27.75}
        )  # the command says that itself
        run.view.close()
        assert run.stream.getvalue().splitlines() == [
            "nano · cpu",
            f"MFU: {NOTE}",
            "step 120/1000  loss 3.412  lr 3.0e-04  41.2k tok/s  mem 1.2 GiB  wait 0.3%  left 2 m 10 s",
            "checkpoint of update 120 saved; training paused for 9 ms",
        ]

    @pytest.mark.parametrize(
        ("steps", "step_s", "shown"),
        [(9, 0.5, [1, 5, 9]), (1000, 0.001, [1, 1000]), (7, 0.001, [1, 7])],
        ids=["every two seconds", "however many there are", "and the last, however early"],
    )
    def test_when_a_step_is_shown(self, steps: int, step_s: float, shown: list[int]) -> None:
        run = PlainRun()
        run.steps(range(1, steps + 1), step_s=step_s)
        assert run.shown() == shown[: None if step_s == 0.5 else -1]
        run.view.close()
        assert run.shown() == shown

    def test_an_event_comes_after_the_update_that_it_follows(self) -> None:
        run = PlainRun()
        run.steps(range(1, 8), step_s=0.001)
        run.view.event("validation", {"step": 7, "valid_loss": 3.5})
        told = run.stream.getvalue().splitlines()
        assert told[-2].startswith("step 7/1000")
        assert told[-1] == "validation loss 3.5000 at update 7"

    def test_missing_and_broken_numbers(self) -> None:
        run = PlainRun()
        run.view.metrics({"step": 1, "loss": math.nan})
        assert run.stream.getvalue().splitlines()[-1] == "step 1/1000  loss nan"

    def test_sampling_is_told_by_the_same_view_and_a_new_stage_ends_the_one_before(self) -> None:
        run = PlainRun(title="sampling", total_steps=None, mfu_note="", questions=1000)
        for number in range(1, 45):
            run.now_s += 0.125
            run.view.metrics(SAMPLED | {"samples": number})
        run.view.event("stage", STAGE | {"title": "training"})
        run.view.metrics(line(1))
        run.view.close()
        run.view.close()  # says nothing twice
        rows = run.stream.getvalue().splitlines()
        assert [row.split("  ")[1] for row in rows[1:5]] == [
            "1 sample",
            "17 samples",
            "33 samples",
            "44 samples",
        ]
        assert rows[0] == "sampling"
        assert rows[5:7] == ["training", f"MFU: {NOTE}"]
        assert rows[7].startswith("step 1/1000")
        assert len(rows) == 8

    def test_questions_that_are_all_done_leave_further_samples_to_the_clock(self) -> None:
        run = PlainRun(title="sampling", total_steps=None, mfu_note="", questions=1000)
        for number in range(1, 45):
            run.now_s += 0.125
            run.view.metrics(SAMPLED | {"samples": number, "questions_done": 1000})
        rows = run.stream.getvalue().splitlines()
        assert [row.split("  ")[1] for row in rows[1:]] == ["1 sample", "17 samples", "33 samples"]

    def test_a_line_of_sampling_says_everything_that_is_known(self) -> None:
        seen = Seen()
        seen.add(SAMPLED)
        assert plain_line(seen) == (
            "120/1,000 questions  3,400 samples  41.2% correct  139.0k tok/s  mem 12.0 GiB  left 20 s"
        )
        seen.add(SAMPLED | {"correct": None, "tokens_per_s": None})
        assert plain_line(seen) == "120/1,000 questions  3,400 samples  mem 12.0 GiB  left 20 s"

    def test_a_reader_that_went_away_does_not_stop_the_run(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w", buffering=1) as stream:
            view = make_view(stream=stream)
            view.event("stage", STAGE)
            view.metrics(line(1))
            view.event("checkpoint", {})
            view.close()
            with pytest.raises(BrokenPipeError):  # it really was broken, all the time
                stream.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)

    def test_a_stream_without_the_characters(self) -> None:
        raw = io.BytesIO()
        view = make_view(stream=io.TextIOWrapper(raw, encoding="ascii"))
        view.event("stage", STAGE | {"title": "nano · cpu"})
        assert b"nano ? cpu" in raw.getvalue()


class TestSeen:
    def test_time_left_is_not_moved_by_outliers(self) -> None:
        seen = make_seen(total_steps=100)
        for step in range(1, 11):
            seen.add(line(step, step_s=30.0 if step in (1, 7) else 2.0))
        assert seen.left_s() == 180.0

    def test_hours_bound_progress_and_time_left(self) -> None:
        seen = make_seen(total_steps=1000, max_hours=1.0)
        seen.add(line(100, step_s=10.0, elapsed_s=2700.0))
        assert seen.share_done() == 0.75
        assert seen.left_s() == 900.0
        seen.add(line(101, step_s=10.0, elapsed_s=3700.0))
        assert (seen.share_done(), seen.left_s()) == (1.0, 0.0)

    def test_smoothed_loss_starts_as_the_mean_and_outlives_a_nan(self) -> None:
        seen = make_seen()
        for step, loss in enumerate([4.0, 2.0, 3.0, 7.0], start=1):
            seen.add(line(step, loss=loss))
        assert seen.smoothed_loss == pytest.approx(4.0)
        seen.add(line(5, loss=math.nan))
        assert seen.smoothed_loss == pytest.approx(4.0)

    def test_wait_is_a_share_of_recent_time(self) -> None:
        seen = make_seen()
        seen.add(line(1, step_s=3.0, data_wait_s=0.0))
        seen.add(line(2, step_s=1.0, data_wait_s=1.0))
        assert seen.wait_share() == 0.25


def render(seen: Seen, columns: int, events: tuple[str, ...] = ()) -> str:
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(live_panel(seen, events, columns))
    return console.export_text()


@pytest.mark.parametrize("columns", range(1, 24))
def test_a_terminal_of_a_few_columns_ends_no_run(columns: int) -> None:
    """Below sixteen it raised, in the thread that draws and at the end of the run."""
    seen = Seen.of({"title": "nano", "total_steps": 100})
    seen.add({"step": 1, "loss": 3.0, "tokens_per_s": 1e4, "step_s": 0.1})
    assert render(seen, columns, ("12:00:00  checkpoint at step 100",))


@pytest.mark.parametrize("columns", [60, 120])
class TestPanel:
    def test_content(self, columns: int) -> None:
        seen = make_seen(max_hours=2.0, device_bytes=12 * 2**30, on_gpu=True)
        for step in range(1, 501):
            seen.add(
                line(step, mfu=0.468, ceiling_share=0.601, tokens_per_s=41_234.0 if step == 500 else 40_000.0)
            )
        seen.add(line(501, valid_loss=3.51, valid_perplexity=33.448, valid_bits_per_byte=1.21))
        seen.add(line(502, mfu=0.468, ceiling_share=0.601))
        text = render(seen, columns, ("12:00:00  checkpoint  path [a] x" + "y" * 200,))
        rows = text.splitlines()
        assert all(len(row) == columns for row in rows)
        assert rows[0][0] + rows[0][-1] + rows[-1][0] + rows[-1][-1] == "╭╮╰╯"
        words = " ".join(text.replace("│", " ").split())
        for part in (
            "nano · cpu",
            "50.2% step 502/1000 0.02/2 h",
            "loss 3.498 smoothed 3.517",
            "validation 3.510 perplexity 33.45 per token",
            "speed 41.2k tok/s median 40.0k · 148 ms a step",
            f"MFU 46.8% ({NOTE[:30]}",
            "ceiling 60.1% of the measured matmul rate",
            "memory 1.2 GiB peak, 10.0% of 12.0 GiB",
            "data wait 0.3% of the step",
            "time left 1 m 14 s after 1 m 14 s",
            "12:00:00 checkpoint path [a] xyyy",
        ):
            assert part in words
        assert len([c for c in words if c in "▁▂▃▄▅▆▇█"]) == min(60, columns - 15)

    def test_before_the_first_step(self, columns: int) -> None:
        assert "waiting for the first numbers" in render(make_seen(), columns)

    def test_sampling(self, columns: int) -> None:
        seen = Seen.of({"title": "units · sampling", "questions": 1000, "on_gpu": False})
        seen.add(SAMPLED)
        words = " ".join(render(seen, columns).replace("│", " ").split())
        for part in (
            "12.0% 120/1,000 questions",
            "samples 3,400 at most 26,600 to come",
            "correct 41.2%",
            "speed 139.0k tok/s new tokens",
            "memory 12.0 GiB of this process",
            "time left 20 s after 3.0 s",
        ):
            assert part in words
        assert "loss" not in words

    def test_nothing_known_and_not_a_number(self, columns: int) -> None:
        seen = make_seen()
        seen.add({"step": 1, "loss": math.nan})
        text = render(seen, columns)
        assert "nan" in text
        assert "×" in text
        assert "validation" not in text


class TestLive:
    def test_draws_and_leaves_the_last_state(self) -> None:
        out = io.StringIO()
        view = LiveView(Console(file=out, width=80, force_terminal=True))
        view.event("note", {"text": "opening the model"})
        view.event("stage", STAGE)
        view.metrics(line(1))
        view.event("odd_event", {"micro_batch": 4})
        view.close()
        end = out.getvalue()[out.getvalue().rindex("╭") :]
        assert "step 1/1000" in end
        assert "odd event; micro batch 4" in end
        assert "opening the model" in out.getvalue()[: out.getvalue().index("╭")]


class TestChoice:
    @pytest.mark.parametrize(
        ("env", "live"),
        [({}, True), ({"TERM": "dumb"}, False), ({"CI": "true"}, False), ({"CI": "false"}, True)],
    )
    def test_terminal(self, env: dict[str, str], live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CI", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        ours, theirs = os.openpty()
        with open(theirs, "w") as stream:
            view = make_view(stream=stream)
        os.close(ours)
        assert isinstance(view, LiveView if live else PlainView)

    def test_quiet_says_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        view = make_view(quiet=True)
        view.event("stage", STAGE)
        view.metrics(line(1))
        view.event("checkpoint", {})
        view.close()
        assert capsys.readouterr() == ("", "")


class TestWords:
    @pytest.mark.parametrize(
        ("kind", "facts", "words"),
        [
            ("validation", {"step": 500, "valid_loss": 3.412345, "best": True}, "validation loss 3.4123 at update 500, the best so far"),
            ("validation", {"step": 5, "valid_accuracy": 0.991}, "held-out accuracy 99.1% at update 5"),
            ("validation", {"step": 500, "stalled_s": 0.21}, "validation at update 500 took 210 ms"),
            ("end", {"step": 40, "why": "finished", "elapsed_s": 27.75}, "finished at update 40 after 28 s"),
            ("failed", {"error": "the disk is full", "exit_code": 5}, "failed: the disk is full"),
            ("strange_thing", {"step": 5, "wait_s": 0.21, "path": "a", "note": None}, "strange thing; step 5; wait 210 ms; path a"),
            ("checkpoint", {}, "checkpoint"),
        ],
    )  # fmt: skip
    def test_what_is_said(self, kind: str, facts: dict[str, Any], words: str) -> None:
        assert told(kind, facts) == words

    @pytest.mark.parametrize("kind", WORDS)
    def test_every_kind_has_a_fallback_for_facts_that_are_missing(self, kind: str) -> None:
        assert "{" not in told(kind, {})


def test_no_torch_is_loaded() -> None:
    code = "import sys, redline.cli.live, redline.record.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent).returncode == 0


def test_workers_are_counted_and_the_slowest_and_fastest_named():
    line = {"samples": 10, "questions_done": 2, "questions": 4}
    seen = Seen.of({"questions": 4})
    seen.add(line | {"workers": {"worker-1": 2.0, "worker-2": 4.0}})
    assert next(row[:3] for row in figures(seen) if row[0] == "workers") == (
        "workers",
        "2",
        "worker-1 2 to worker-2 4 samples/s",
    )
    assert "2 workers, 3 samples/s each" in plain_line(seen)
    seen.add(line | {"workers": {"worker-1": 2.0}})
    assert "1 worker, 2 samples/s" in plain_line(seen)
    seen.add(line | {"workers": None})
    assert "worker" not in plain_line(seen)
