"""The view of sampling: plain lines in a pipe, a panel in a terminal, and no error that could end a run."""

import io

from rich.console import Console

from redline.cli.sampling_view import PlainSampling, make_sampling_view, panel, plain_line

FACTS = {
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


def test_a_line_says_everything():
    assert (
        plain_line(FACTS)
        == "questions 120/1,000  samples 3,400  correct 41.2 %  139.0k tok/s  mem 12.0 GiB  left 20 s"
    )
    assert "correct –" in plain_line({**FACTS, "correct": None})
    assert "correct –  –" in plain_line({**FACTS, "samples": 0, "correct": 0, "tokens_per_s": None})


def test_lines_come_at_the_first_news_every_two_seconds_and_at_the_end():
    clock, stream = [0.0], io.StringIO()
    view = PlainSampling("title", stream, clock=lambda: clock[0])
    for number in range(1, 50):
        clock[0] += 0.1
        view.progress({**FACTS, "samples": number})
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "title"
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "samples 1",
        "samples 21",
        "samples 41",
        "samples 49",
    ]
    view.close()
    assert len(stream.getvalue().splitlines()) == len(lines), "nothing is said twice"


def test_a_reader_that_is_gone_does_not_matter():
    stream = io.StringIO()
    view = make_sampling_view("title", stream)
    stream.close()
    view.progress(FACTS)
    view.close()


def test_the_panel():
    shown = io.StringIO()
    Console(file=shown, width=80).print(panel("units · sampling", FACTS, 80))
    text = shown.getvalue()
    for part in (
        "units · sampling",
        "120/1,000 questions",
        "41.2 %",
        "139.0k tok/s",
        "12.0 GiB",
        "26,600",
        "20 s",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
    waiting = io.StringIO()
    Console(file=waiting, width=80).print(panel("units", None, 80))
    assert "waiting" in waiting.getvalue()


def test_a_terminal_gets_the_panel(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", "false")
    stream = Terminal()
    view = make_sampling_view("units · sampling", stream)
    view.progress(FACTS)
    view.close()
    assert "120/1,000 questions" in stream.getvalue()
