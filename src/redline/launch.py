"""The same program on several processes: `redline train --nproc 2` starts torchrun on itself. No torch.

Processes that run out of memory together are started again with half the micro-batch; they resume from the last checkpoint, so no
update is lost and the batch stays the recipe's. Left out: several machines, SLURM and Ray.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from redline.record.run import read_lines


def out_of_memory_override(events: Path) -> str | None:
    """The override that the last out-of-memory event of a run asks for, if that event ended the attempt."""
    last = next((event for event in reversed(read_lines(events)) if event["event"] != "end"), None)
    if last is None or last["event"] != "out_of_memory":
        return None
    return f"plan.micro_batch={last['micro_batch']}"


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun(nproc: int, arguments: Sequence[str]) -> int:
    """Run `redline ARGUMENTS` on `nproc` processes of this machine; return the exit code of the first that failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "--no-python"]
    command += [sys.executable, "-m", "redline.cli.main", *arguments]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **os.environ}
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal sent it to the workers as well; they save and leave
            continue


def with_recovery(start: Callable[[Sequence[str]], int], smaller: Callable[[], str | None]) -> int:
    """Start, and start again with one more override for as long as `smaller` knows one after an out-of-memory exit."""
    overrides: list[str] = []
    while (code := start(overrides)) != 0:
        override = smaller()
        if override is None:
            return code
        overrides = ["--set", override]
    return 0
