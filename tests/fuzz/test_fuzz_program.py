"""The program as a whole, beside what it is given: a terminal that knows ASCII alone, an impatient finger."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redline.cli.main import main
from redline.errors import DataError

PROGRAM = [sys.executable, "-m", "redline.cli.main"]


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
