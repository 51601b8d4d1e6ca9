"""The same program on several processes of this machine: `redline train --nproc 2` starts itself. No torch.

Every process gets the variables that torchrun would set. All end with the launcher; if one fails the others are
stopped and the reason is printed once. Processes that run out of memory start again with half the micro-batch and
resume from the last checkpoint, so no update is lost and the batch stays the recipe's. Several machines: agent.py.
"""

import contextlib
import os
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
from redline.train.stop import handled_by

PROGRAM = (sys.executable, "-m", "redline")
LAUNCHER = "REDLINE_LAUNCHER"
"""The process id that a process must end with."""
UNDER_AGENT = "REDLINE_AGENT"
"""Set where an agent (agent.py) watches: it must tell a run that was stopped from one that has finished."""
STOPPED_CODE = 75
"""The exit code of the first kind there: try again later, by the system's convention."""
ERROR = "redline: "
"""How the command line begins a user's error."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Requests to stop."""
LOOK_EVERY_S = 0.05
PATIENCE_S = 10.0
"""How long the others have to notice that one has failed."""


def out_of_memory_override(events: Path) -> str | None:
    """The override that a run needs if its last attempt ran out of memory; processes fail in any order."""
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
    """Run `redline ARGUMENTS` on `nproc` processes; 0 if all succeeded. A user's error is raised, any other printed."""
    with reserved_port() as port:
        sizes = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
        place = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return _watched([
            Member(rank, arguments, environment_of(nproc, RANK=rank, LOCAL_RANK=rank, **place))
            for rank in range(nproc)
        ])  # fmt: skip


def run_alone(arguments: Sequence[str]) -> int:
    """Run `redline ARGUMENTS` as a process that ends with this one and prints to standard error; it fails as above."""
    return _watched([Member(0, arguments, environment_of(1), stdout=2)])


def environment_of(nproc: int, **place: object) -> dict[str, str]:
    """The environment of one of `nproc` processes on this machine: the variables that torchrun would set."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc))} if nproc > 1 else {}
    return {**threads, **os.environ, LAUNCHER: str(os.getpid())} | {n: str(v) for n, v in place.items()}


def _watched(members: Sequence["Member"]) -> int:
    def hand_on(_number: int, _frame: Any) -> None:
        """A request to stop goes to the processes, which save and leave."""
        for member in members:
            if member.process.poll() is None:
                member.stopped = True
                member.process.terminate()

    with handled_by(hand_on, *STOPS):
        while None in (codes := [member.process.poll() for member in members]):
            if any(codes):
                stop(members)
            time.sleep(LOOK_EVERY_S)
    failed = failures(members)
    return failed[0].tell() if failed else 0


def failures(members: Sequence["Member"]) -> list["Member"]:
    """The ended processes that failed, first the one whose failure explains the others'."""
    for member in members:
        member.reader.join()
    return sorted((member for member in members if member.process.returncode), key=Member.blame)


class Member:
    """One of the processes. Its standard error is passed on, but how it failed is printed once for all of them."""

    def __init__(
        self, rank: int, arguments: Sequence[str], environment: Mapping[str, str], stdout: int | None = None
    ) -> None:
        self.rank = rank
        # In its own session, so that Ctrl-C reaches only the launcher, which asks all to stop.
        how: dict[str, Any] = {"stdout": stdout, "stderr": subprocess.PIPE, "start_new_session": True}
        self.process = subprocess.Popen([*PROGRAM, *arguments], env=environment, **how)
        self.failure: list[str] = []
        self.stopped = False
        self.reader = threading.Thread(target=self._pass_on, daemon=True)
        self.reader.start()

    @property
    def has_said_why(self) -> bool:
        """Whether it ended with a user's error."""
        return self.process.returncode > 0 and bool(self.failure) and self.failure[0].startswith(ERROR)

    @property
    def summary(self) -> str:
        """How it failed, in a few words."""
        code = self.process.returncode
        if code < 0:
            memory = " (the system does that when memory runs out)" if code == -signal.SIGKILL else ""
            return f"process {self.rank} was killed by {signal.Signals(-code).name}{memory}"
        said = self.failure[-1].removeprefix(ERROR).strip() if self.failure else f"exit code {code}"
        return f"process {self.rank} failed: {said}"

    def blame(self) -> int:
        """First a process killed from outside, then users' errors, then the consequences of losing a process."""
        if self.process.returncode < 0:
            return 3 if self.stopped else 0
        return 1 if self.has_said_why else 2

    def tell(self) -> int:
        code = self.process.returncode
        if code == -signal.SIGTERM and self.stopped:
            raise KeyboardInterrupt  # asked to stop when it could not yet, or again and again
        if code < 0:
            again = "run the same command again and it resumes from the last checkpoint"
            raise MachineError(f"{self.summary} and the others were stopped; {again}")
        if self.has_said_why:
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


def stop(members: Sequence[Member]) -> None:
    """Stop the others after a failure: they notice and end, or wait in a collective and are killed."""
    until_s = time.monotonic() + PATIENCE_S
    while any(member.process.poll() is None for member in members) and time.monotonic() < until_s:
        time.sleep(LOOK_EVERY_S)
    for member in members:
        if member.process.poll() is None:
            member.stopped = True
            member.process.kill()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port for the first process to listen on. It stays bound here: nobody else gets it before that process does, and
    no connection leaves from it. That process can share it because it sets SO_REUSEADDR too, as servers do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def with_recovery(start: Callable[[Sequence[str]], int], smaller: Callable[[], str | None]) -> int:
    """Start, and after a failure start again with an override, as long as `smaller` knows a new one."""
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
