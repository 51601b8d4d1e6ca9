"""The same program on several processes: `redline train --nproc 2` starts torchrun on itself. No torch.

Processes that run out of memory together are started again with half the micro-batch; they resume from the
last checkpoint, so no update is lost and the batch stays the recipe's. Left out: several machines, SLURM and
Ray.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from redline.errors import RedlineError
from redline.record.run import read_lines


def out_of_memory_override(events: Path) -> str | None:
    """The override that a run asks for if its last attempt ran out of memory. Processes write their events as
    they fail, in any order."""
    for event in reversed(read_lines(events)):
        if event["event"] == "out_of_memory":
            return f"plan.micro_batch={event['micro_batch']}"
        if event["event"] in ("start", "resume", "end"):
            return None
    return None


def failure(events: Path) -> RedlineError | None:
    """The first error that a process of the last attempt ended with; the others mostly died of it."""
    first = None
    for event in reversed(read_lines(events)):
        if event["event"] in ("start", "resume", "end"):
            break
        if event["event"] in ("failed", "refused"):
            first = event
    if first is None:
        return None
    error = RedlineError(first["error"])
    error.exit_code = first["exit_code"]
    return error


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun(nproc: int, arguments: Sequence[str]) -> int:
    """Run `redline ARGUMENTS` on `nproc` processes of this machine; return torchrun's exit code, 0 if all of
    them ended well."""
    # Without the lone `--` torchrun takes our `--run` for a short form of its `--run-path`.
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={nproc}",
        "--no-python",
        "--",
    ]
    command += [sys.executable, "-m", "redline.cli.main", *arguments]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **os.environ}
    # A session of its own, so that Ctrl-C in the terminal does not reach torchrun: it would kill the workers
    # after 30 s, saved or not.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    with _handing_on(process.pid):
        return process.wait()


@contextlib.contextmanager
def _handing_on(torchrun_pid: int) -> Iterator[None]:
    """While it lasts, a request to stop goes to the workers, which save and leave; torchrun sees them end
    well."""

    def handle(_number: int, _frame: Any) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself just now
            torchrun = psutil.Process(torchrun_pid)
            for process in torchrun.children() or [torchrun]:
                process.terminate()

    before = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_recovery(start: Callable[[Sequence[str]], int], smaller: Callable[[], str | None]) -> int:
    """Start, and start again with an override for as long as `smaller` knows a new one after an out-of-memory
    exit."""
    overrides: list[str] = []
    while (code := start(overrides)) != 0:
        override = smaller()
        if override is None or override in overrides:
            return code
        overrides = ["--set", override]
    return 0
