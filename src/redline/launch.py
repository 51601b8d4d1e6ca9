"""The same program on several processes of this machine: `redline train --nproc 2` starts itself. No torch.

Every process gets the variables that torchrun would give it, so one that torchrun started does the same. They end with
the launcher, and if one fails the others are stopped and the reason is said once. Processes that run out of memory
together are started again with half the micro-batch; they resume from the last checkpoint, so no update is lost and
the batch stays the recipe's. Left out: several machines, SLURM and Ray.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.errors import MachineError, RedlineError
from redline.record.run import read_lines

LAUNCHER = "REDLINE_LAUNCHER"
"""Tells a process the number of the one it must end with."""
ERROR = "redline: "
"""How the command line begins the line of a user's error."""
LOOK_EVERY_S = 0.05
PATIENCE_S = 10.0
"""How long the others may take to notice that one has failed."""


def out_of_memory_override(events: Path) -> str | None:
    """The override that a run asks for if its last attempt ran out of memory. Processes write their events as
    they fail, in any order."""
    for event in reversed(read_lines(events)):
        if event["event"] == "out_of_memory":
            return f"plan.micro_batch={event['micro_batch']}"
        if event["event"] in ("start", "resume", "end"):
            return None
    return None


def under_torchrun() -> bool:
    """Whether this is one of several processes, whoever started them."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_processes(nproc: int, arguments: Sequence[str]) -> int:
    """Run `redline ARGUMENTS` on `nproc` processes; 0 if all of them ended well. The error that one ended with is
    raised here; what is none of ours is printed, and its exit code returned."""
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)),
        **os.environ,
        LAUNCHER: str(os.getpid()),
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    members = [_Member(rank, arguments, environment) for rank in range(nproc)]
    with _handing_on(members):
        while any(member.process.poll() is None for member in members):
            if any(member.process.returncode for member in members):
                _stop(members)
            time.sleep(LOOK_EVERY_S)
    for member in members:
        member.reader.join()
    failed = sorted((member for member in members if member.process.returncode), key=_Member.blame)
    return failed[0].tell() if failed else 0


class _Member:
    """One of the processes. What it says on standard error is passed on, but for how it failed: one failure makes all
    of them fail, and is said once."""

    def __init__(self, rank: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank = rank
        # In another session, so that Ctrl-C in the terminal reaches the launcher alone, which asks all to stop.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "redline.cli.main", *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.failure: list[str] = []
        self.stopped = False
        self.reader = threading.Thread(target=self._pass_on, daemon=True)
        self.reader.start()

    def blame(self) -> int:
        """Whoever was killed by somebody else, then errors of ours, then what came of losing another process."""
        if self.process.returncode < 0:
            return 3 if self.stopped else 0
        return 1 if self.failure and self.failure[0].startswith(ERROR) else 2

    def tell(self) -> int:
        code = self.process.returncode
        if code < 0:
            name = signal.Signals(-code).name
            memory = ", as the system does when its memory runs out" if code == -signal.SIGKILL else ""
            raise MachineError(
                f"process {self.rank} was ended by {name}{memory}, and the others were stopped; run the same command"
                " again and it resumes from the last checkpoint"
            )
        if self.failure and self.failure[0].startswith(ERROR):
            error = RedlineError(self.failure[0].removeprefix(ERROR).rstrip("\n"))
            error.exit_code = code
            raise error
        sys.stderr.write("".join(self.failure))
        return code

    def _pass_on(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace")
            if self.failure or line.startswith(ERROR) or "Traceback (most recent call last)" in line:
                self.failure.append(line)
            else:
                sys.stderr.write(line)
                sys.stderr.flush()


def _stop(members: Sequence[_Member]) -> None:
    """One has failed: the others notice, and end, or wait for it in a collective, and are killed."""
    until_s = time.monotonic() + PATIENCE_S
    while any(member.process.poll() is None for member in members) and time.monotonic() < until_s:
        time.sleep(LOOK_EVERY_S)
    for member in members:
        if member.process.poll() is None:
            member.stopped = True
            member.process.kill()


def _free_port() -> int:
    """A port on which the first process will listen, from below those that the system gives to outgoing connections:
    one of these might take it in the seconds until then."""
    while True:
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(tried.getsockname()[1])


@contextlib.contextmanager
def _handing_on(members: Sequence[_Member]) -> Iterator[None]:
    """While it lasts, a request to stop goes to the processes, which save and leave."""

    def handle(_number: int, _frame: Any) -> None:
        for member in members:
            if member.process.poll() is None:
                member.process.terminate()

    before = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_recovery(start: Callable[[Sequence[str]], int], smaller: Callable[[], str | None]) -> int:
    """Start, and start again with an override for as long as `smaller` knows a new one after a failure."""
    overrides: list[str] = []
    while True:
        error: RedlineError | None = None
        try:
            if (code := start(overrides)) == 0:
                return 0
        except RedlineError as raised:
            error, code = raised, raised.exit_code
        override = smaller()
        if override is None or override in overrides:
            if error is not None:
                raise error
            return code
        sys.stderr.write(f"{error or f'exit code {code}'}; starting again with {override}\n")
        overrides = ["--set", override]
