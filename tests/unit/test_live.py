"""The live view: what the panel says at 60 and 120 columns, and which plain lines come when, by a clock of
our own."""

import io
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline.cli.live import LiveView, PlainView, Seen, event_text, make_view, panel

NOTE = "6N+12LdT, of 989 TFLOP/s bf16 datasheet"


def line(step: int, **more: Any) -> dict[str, Any]:
    known = {
        "step": step,
        "loss": 4.0 - step / 1000,
        "lr": 3e-4,
        "tokens_per_s": 41_234.0,
        "step_s": 0.148,
        "data_wait_s": 0.000444,
    }
    return (
        known
        | {"mfu": None, "ceiling_share": None, "memory_bytes": int(1.2 * 2**30), "elapsed_s": step * 0.148}
        | more
    )


def make_seen(
    total_steps: int = 1000, max_hours: float | None = None, memory_total_bytes: int | None = None
) -> Seen:
    return Seen("nano · cpu", total_steps, max_hours, NOTE, memory_total_bytes)


class PlainRun:
    """A plain view under a clock that the test moves."""

    def __init__(self, **options: Any) -> None:
        self.now_s, self.stream = 100.0, io.StringIO()
        self.view = PlainView(make_seen(**options), self.stream, clock=lambda: self.now_s)

    def steps(self, steps: range, step_s: float) -> None:
        for step in steps:
            self.now_s += step_s
            self.view.metrics(line(step, step_s=step_s))

    def shown(self) -> list[int]:
        return [
            int(row.split()[1].split("/")[0])
            for row in self.stream.getvalue().splitlines()
            if row.startswith("step ")
        ]


class TestPlain:
    def test_whole_output(self) -> None:
        run = PlainRun()
        run.view.metrics(line(120, loss=3.4123))
        run.view.event("checkpoint", {"step": 120, "took_s": 1.31, "size_bytes": 3 * 2**20})
        run.view.close()
        assert run.stream.getvalue().splitlines() == [
            "nano · cpu",
            f"MFU: {NOTE}",
            (
                "step 120/1000  loss 3.412  lr 3.0e-04  41.2k tok/s  MFU –  mem 1.2 GiB  wait 0.3 %  left 2 m"
                " 10 s"
            ),
            "event checkpoint  step 120  took 1.3 s  size 3.0 MiB",
        ]

    def test_slow_steps_come_every_two_seconds(self) -> None:
        run = PlainRun()
        run.steps(range(1, 10), step_s=0.5)
        assert run.shown() == [1, 5, 9]

    def test_fast_steps_come_every_tenth_and_the_first_and_last_always(self) -> None:
        run = PlainRun(total_steps=1000)
        run.steps(range(1, 1001), step_s=0.001)
        run.view.close()
        assert run.shown() == [1, *range(100, 1001, 100)]

    def test_a_run_that_ends_early_still_shows_its_last_step(self) -> None:
        run = PlainRun()
        run.steps(range(1, 8), step_s=0.001)
        run.view.close()
        assert run.shown() == [1, 7]

    def test_missing_and_broken_numbers(self) -> None:
        run = PlainRun()
        run.view.metrics({"step": 1, "loss": math.nan})
        assert (
            run.stream.getvalue().splitlines()[-1]
            == "step 1/1000  loss nan  lr –  –  MFU –  mem –  wait –  left –"
        )

    def test_a_reader_that_went_away_does_not_stop_the_run(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w", buffering=1) as stream:
            view = make_view(title="t", total_steps=2, max_hours=None, peak_note=NOTE, stream=stream)
            view.metrics(line(1))
            view.event("checkpoint", {})
            view.close()
            with pytest.raises(BrokenPipeError):  # it really was broken, all the time
                stream.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)

    def test_a_stream_without_the_characters(self) -> None:
        raw = io.BytesIO()
        view = make_view(
            title="t",
            total_steps=2,
            max_hours=None,
            peak_note="–",
            stream=io.TextIOWrapper(raw, encoding="ascii"),
        )
        view.metrics(line(1))
        assert b"MFU ?" in raw.getvalue()


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
    console.print(panel(seen, events, columns))
    return console.export_text()


@pytest.mark.parametrize("columns", [60, 120])
class TestPanel:
    def test_content(self, columns: int) -> None:
        seen = make_seen(max_hours=2.0, memory_total_bytes=12 * 2**30)
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
            "50.2 % step 502/1000 0.02/2 h",
            "loss 3.498 smoothed 3.517 · lr 3.0e-04",
            "validation 3.510 perplexity 33.45 · 1.210 bits/byte · step 501",
            "speed 41.2k tok/s median 40.0k · 148 ms a step",
            f"MFU 46.8 % ({NOTE})",
            "ceiling 60.1 % of the measured matmul rate",
            "memory 1.2 GiB peak, 10.0 % of 12.0 GiB",
            "data wait 0.3 % of the step",
            "time left 1 m 14 s after 1 m 14 s",
            "12:00:00 checkpoint path [a] xyyy",
        ):
            assert part in words
        assert len([c for c in words if c in "▁▂▃▄▅▆▇█"]) == min(60, columns - 15)

    def test_before_the_first_step(self, columns: int) -> None:
        assert "waiting for the first step" in render(make_seen(), columns)

    def test_nothing_known_and_not_a_number(self, columns: int) -> None:
        seen = make_seen()
        seen.add({"step": 1, "loss": math.nan})
        text = render(seen, columns)
        assert "nan  smoothed –" in text
        assert "×" in text
        assert "validation" not in text


class TestLive:
    def test_draws_and_leaves_the_last_state(self) -> None:
        out = io.StringIO()
        view = LiveView(make_seen(), Console(file=out, width=80, force_terminal=True))
        view.metrics(line(1))
        view.event("oom_recovery", {"micro_batch": 4})
        view.close()
        end = out.getvalue()[out.getvalue().rindex("╭") :]
        assert "step 1/1000" in end
        assert "oom recovery  micro batch 4" in end

    def test_metrics_returns_in_microseconds(self) -> None:
        view = LiveView(make_seen(), Console(file=io.StringIO(), width=80, force_terminal=True))
        took_s = []
        for step in range(1, 501):
            given = line(step)
            started = time.perf_counter()
            view.metrics(given)
            took_s.append(time.perf_counter() - started)
        view.close()
        assert statistics.median(took_s) < 50e-6


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
            view = make_view(title="t", total_steps=2, max_hours=None, peak_note=NOTE, stream=stream)
            view.close()
        os.close(ours)
        assert isinstance(view, LiveView if live else PlainView)

    def test_quiet_says_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        view = make_view(title="t", total_steps=2, max_hours=None, peak_note=NOTE, quiet=True)
        view.metrics(line(1))
        view.event("checkpoint", {})
        view.close()
        assert capsys.readouterr() == ("", "")


def test_event_text() -> None:
    facts = {
        "step": 500,
        "valid_loss": 3.412345,
        "wait_s": 0.21,
        "path": "step-500",
        "note": None,
        "micro_batch": 8,
    }
    assert (
        event_text("validation", facts)
        == "validation  step 500  valid loss 3.412  wait 210 ms  path step-500  micro batch 8"
    )


def test_no_torch_is_loaded() -> None:
    code = "import sys, redline.cli.live, redline.record.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent).returncode == 0
