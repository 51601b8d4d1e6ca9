"""The program as a whole, beside what it is given: a terminal that knows ASCII alone, an impatient finger."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.errors import DataError
from redline.record.run import RunFolder
from redline.rft.store import Sample, Store
from redline.tasks.task import Question

PROGRAM = [sys.executable, "-m", "redline"]


@pytest.mark.parametrize("arguments", [["optimizations"], ["recipes"], ["data", "info", "nö\udcffwhere"]])
def test_a_terminal_that_knows_ascii_alone(arguments):
    ended = subprocess.run(
        [*PROGRAM, *arguments], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert b"Traceback" not in ended.stderr
    assert ended.returncode in (0, DataError.exit_code)
    (ended.stdout + ended.stderr).decode("ascii")


def test_a_message_is_one_line_that_a_terminal_does_not_obey(capsys, tmp_path):
    (tmp_path / "manifest.json").write_text('{"\\u001b[2J\\n": 1}')
    assert main(["data", "info", str(tmp_path)]) == DataError.exit_code
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert said.count("\n") == 1


EVIL = "\x1b[2J\x1b]0;owned\x07[/red][bold]\r\u202e"


def test_what_a_model_or_a_run_says_is_shown_and_not_obeyed(capsys, tmp_path):
    run = tmp_path / EVIL.replace("/", "")
    run.mkdir()
    with Store(run / "samples.db") as store:
        source = store.open_source("weights", {})
        store.put_questions([Question(f"a{EVIL}", EVIL, EVIL, "", {"family": EVIL})])
        store.add(
            source,
            [
                Sample(
                    f"a{EVIL}", n, EVIL, 1, None, None, "stop", n == 0, True, 0.0, EVIL, EVIL, EVIL, 7, 0.0
                )
                for n in (0, 1)
            ],
        )
    folder = RunFolder(run)
    folder.event("note", text=EVIL)
    folder.event("failed", error=EVIL, exit_code=2)
    folder.metrics_path.write_text(json.dumps({"step": 1, "loss": 1.0, EVIL: 1.0}) + "\n")
    for arguments in (["rft", "stats"], ["report"], ["diagnose"], ["watch"], ["rft", "export"]):
        main([*arguments, str(run), *([str(run / "out.json")] if "export" in arguments else [])])
        said = "".join(capsys.readouterr())
        assert not set(EVIL[:1] + "\x07\r\u202e") & set(said), f"{arguments}: {said!r}"
        assert "Traceback" not in said


def test_ascii_reports(tmp_path):
    folder = RunFolder(tmp_path / "nö – x")
    folder.path.mkdir()
    folder.event("note", text="✓ – 你好")
    folder.metrics_path.write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    ended = subprocess.run(
        [*PROGRAM, "report", str(folder.path), "--out", str(tmp_path / "report.html")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stderr


SLOW = """
import signal, sys, threading
from redline.cli import data
from redline.cli.main import main

def slow(options):
    try:
        print("ready", flush=True)
        threading.Event().wait()
    finally:
        print("unwinding", flush=True)
        for line in sys.stdin:
            pass

data.run = slow
sys.argv[1:] = ["data", "info", "x"]
sys.exit(main())
"""


def test_five_quick_ctrl_c_give_no_traceback(tmp_path: Path):
    program = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"ready\n"
    program.send_signal(signal.SIGINT)
    assert program.stdout.readline() == b"unwinding\n"
    for _ in range(4):
        program.send_signal(signal.SIGINT)
    _, said = program.communicate()
    assert program.returncode == 130
    assert said == b"redline: interrupted\n"
