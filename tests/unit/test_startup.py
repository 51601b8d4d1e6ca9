"""Where the time before the first update went, on a clock of the test's; and what a start need not import."""

import subprocess
import sys
from pathlib import Path

import pytest

from redline.record import startup


def test_parts_add_up_and_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_age_s", lambda: 2.0)
    monkeypatch.setattr(startup.time, "monotonic", iter((10.0, 11.0, 14.0, 20.0)).__next__)
    with startup.watched():
        startup.mark("plan")
        startup.mark("first_update")
        assert startup.taken() == {"python_s": 2.0, "plan_s": 1.0, "first_update_s": 3.0, "total_s": 6.0}
        assert not startup.underway(), "it is told once"
    with pytest.raises(KeyError), startup.watched():
        raise KeyError
    assert not startup.underway(), "a command that failed leaves nothing to the next run of the process"


TRAIN = """
import sys
from redline.cli.main import main
code = main(["train", "nano", "--steps", "1", "--set", "plan.compile=off", "--run", sys.argv[1]])
slow = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "redline.model.attention.favor"}
sys.exit(f"imported: {slow & set(sys.modules)}" if slow & set(sys.modules) else code)
"""


def test_a_run_on_one_process_imports_neither_the_compiler_nor_sharding(tmp_path: Path) -> None:
    """Each of them takes up to a second."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
