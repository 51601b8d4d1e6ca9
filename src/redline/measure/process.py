"""A trial's process, seen from its parent: a crash, running out of memory or a hang is a result. No torch.

    with Child() as child:
        child.start(trial, limit_s=60); child.block(limit_s=60); child.memory(limit_s=60)
        for row in child.rows("redline.bench.generate:redline", {"name": "full"}, limit_s=1800): ...

The child (`python -m redline.measure.process`, then child.py) reads requests as lines of JSON and does nothing between
two of them, so several can be alive and take turns. It ends when its standard input does and, on Linux, when its parent
is killed. A child that does not answer is killed with its process group, and what it wrote is removed. Left out: trials
on several processes or machines.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from redline.config.load import build
from redline.measure.trial import SCRATCH, PeakMemory, Trial, TrialOutcome
from redline.plan.plan import Hardware
from redline.plan.values import ALLOCATOR_VARIABLES

COMMAND = (sys.executable, "-m", "redline.measure.process")
"""Followed by the parent's process id."""
LEAVE_S = 5.0
"""How long a child may take to tidy up when told to end."""
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
"""What torch on a GPU, CUDA, torch on a CPU, and cuBLAS and cuDNN say when they run out of memory."""
MANY_CORES = 8
"""With fewer cores, starting a process would slow down the one being measured."""
LAST_WORDS = 6
"""Lines at the end of an error that are searched: CUDA puts advice after its own."""


class ChildFailed(Exception):
    """A child failed; callers turn this into a result."""

    def __init__(self, outcome: TrialOutcome, error: str) -> None:
        super().__init__(error)
        self.outcome, self.error = outcome, error


class Child:
    """A child process. It ends with the `with` block, whatever it is doing."""

    def __init__(self, allocator: str = "") -> None:
        environment = dict(os.environ)
        if allocator and not environment.keys() & set(ALLOCATOR_VARIABLES):
            environment[ALLOCATOR_VARIABLES[0]] = allocator
        self._scratch = tempfile.TemporaryDirectory(prefix="redline-trial-", ignore_cleanup_errors=True)
        environment[SCRATCH] = self._scratch.name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [*COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self._unread = b""
        self._busy = False
        self.alive = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, trial: Trial, limit_s: float) -> dict[str, Any]:
        """Make the subject, in place of an earlier one, and warm it up."""
        timing = {name: getattr(trial.timing, name) for name in ("block_s", "guard_steps", "warmup_s")}
        what = {"subject": trial.subject, "setting": trial.setting}
        return self.ask({"do": "start", **what, **timing}, limit_s)

    def block(self, limit_s: float) -> dict[str, Any]:
        """Run a block: its seconds per step, and how long it waited for data."""
        return self.ask({"do": "block"}, limit_s)

    def memory(self, limit_s: float) -> PeakMemory:
        return build(PeakMemory, self.ask({"do": "memory"}, limit_s), where="memory")

    def rows(self, function: str, setting: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        """What a function (`module:name`) yields in the child, as it comes; `limit_s` is for each row."""
        reply = self.ask({"do": "rows", "function": function, "setting": setting}, limit_s)
        while "row" in reply:
            yield reply["row"]
            reply = self._reply(limit_s)

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and return the reply; if the child fails, end it and raise ChildFailed."""
        assert self._process.stdin is not None
        self._busy = True
        with contextlib.suppress(BrokenPipeError):  # it is dead: reading will tell why
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._reply(limit_s)

    def close(self) -> None:
        """End it. An idle child tidies up and leaves; a busy one is killed with everything it started."""
        if not self.alive:
            return
        self.alive = False
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0 if self._busy else LEAVE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the whole group is gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        self._scratch.cleanup()

    def _reply(self, limit_s: float) -> dict[str, Any]:
        line = self._read_line(limit_s)
        if line is None:
            self.close()
            raise ChildFailed("timed_out", f"no answer within {limit_s:.0f} s; killed")
        if not line:
            raise self._died()
        reply: dict[str, Any] = json.loads(line)
        self._busy = "row" in reply
        if "failed" in reply:
            self.close()
            raise ChildFailed(reply["failed"], reply["error"])
        return reply

    def _read_line(self, limit_s: float) -> bytes | None:
        """The next line; empty if the child has closed its output, None if none came in time."""
        assert self._process.stdout is not None
        handle, deadline_s = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([handle], [], [], left_s)[0]:
                return None
            if not (more := os.read(handle, 65536)):
                return b""
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _died(self) -> ChildFailed:
        # it may have closed its output and still live: what it said so far counts
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.returncode
        self._errors.seek(0)
        said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        ended = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            ended += " (the system does so when memory runs out)"
        memory = [line for line in said[-LAST_WORDS:] if any(text in line for text in OUT_OF_MEMORY)]
        error = f"{ended}: {(memory or said)[-1].strip()[:300]}" if said else ended
        return ChildFailed("out_of_memory" if memory else "crashed", error)


class Children:
    """A search's children and its clock. `ahead`: the next imports torch while the one before compiles."""

    def __init__(self, *, ahead: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._ahead, self.clock = ahead, clock
        self._ready: dict[str, Child] = {}

    @classmethod
    def on(cls, hardware: Hardware) -> Self:
        return cls(ahead=hardware.kind == "cuda" and hardware.cores >= MANY_CORES)

    def take(self, allocator: str) -> Child:
        child = self._ready.pop(allocator, None) or Child(allocator)
        if self._ahead:
            self._ready[allocator] = Child(allocator)
        return child

    def close(self) -> None:
        while self._ready:
            self._ready.popitem()[1].close()


def end_with(parent: int) -> None:
    """End this process, whatever it is doing, when its parent is killed, or if it has ended already; on Linux."""
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """What runs in the child: arrange to end with the parent, and only then import torch, which takes seconds."""
    end_with(int(sys.argv[1]))
    from redline.measure.child import serve

    serve()


if __name__ == "__main__":
    main()
