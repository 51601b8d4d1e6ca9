"""Commands at the cost of a fork: one process imports torch and the command line once, and every command is a
fork of it.

    with Warm(environment) as warm:
        command = warm.start("train", recipe, "--run", run, fault=Fault("kill_at", call=7))
        command.kill()
        done = warm.run("train", recipe, "--run", run)      # done.code, done.out, done.err

A command is a process of its own, with its own signals, exit code and output; only `import torch` (four
seconds on this project's machine, under a second of work in a test) is shared. The process that forks has run
no tensor operation, so there are no OpenMP threads to lose. A fault is a function of `faults.py` that the
child calls first. Left out: a terminal.
"""

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LIMIT_S = 300.0
"""After this a command counts as hung and the test fails."""


IMPORTED_ONCE = (
    "torch._dynamo",
    "torch._inductor.config",
    "redline.cli.train",
    "redline.evaluate",
    "redline.engine.local",
    "redline.pretrain",
)
"""What commands import; torch loads the first two late, in two seconds."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a command: a function of `faults.py` and its arguments."""

    name: str
    given: dict[str, Any]

    def __init__(self, name: str, **given: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "given", given)


@dataclass(frozen=True)
class Done:
    code: int
    """Exit code, or minus the signal that ended it."""
    out: str
    err: str


@dataclass
class Command:
    """A command that was started."""

    warm: "Warm"
    pid: int
    folder: Path
    code: int | None = field(default=None)

    def alive(self) -> bool:
        if self.code is None:
            self.code = self.warm.ask({"poll": self.pid})["code"]
        return self.code is None

    def send(self, number: signal.Signals) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> Done:
        deadline_s = time.monotonic() + LIMIT_S
        while self.alive():
            if time.monotonic() > deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"a command did not end within {LIMIT_S:.0f} s: {self._text('err')}")
            time.sleep(0.005)
        assert self.code is not None
        return Done(self.code, self._text("out"), self._text("err"))

    def said(self) -> str:
        """Its standard error so far."""
        return self._text("err") if (self.folder / "err").exists() else ""

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")


class Warm:
    """The process that forks; `environment` is added to this one's for every command."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)

    def __enter__(self) -> Self:
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=LIMIT_S)

    def start(
        self, *arguments: str | Path, fault: Fault | None = None, environment: Mapping[str, str] | None = None
    ) -> Command:
        folder = Path(tempfile.mkdtemp(prefix="command-", dir=self.environment["REDLINE_CACHE"]))
        request = {
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(environment or {}),
            "folder": str(folder),
            "fault": [fault.name, fault.given] if fault else None,
        }
        return Command(self, self.ask(request)["pid"], folder)

    def run(self, *arguments: str | Path, fault: Fault | None = None) -> Done:
        return self.start(*arguments, fault=fault).wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


def serve() -> None:
    """Fork for every request; returns in the server when the tests are done, and never in a child."""
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    from redline.cli.main import main

    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            print(json.dumps({"code": _code_of(request["poll"])}), flush=True)
        elif pid := os.fork():
            print(json.dumps({"pid": pid}), flush=True)
        else:
            _become(request)
            leave(main(request["arguments"]))


def _become(request: dict[str, Any]) -> None:
    import faults

    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(request["folder"]) / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    sys.argv = ["redline", *request["arguments"]]
    if "IN_DOUBLE" in os.environ:
        sys.path.append(str(Path(__file__).parents[1]))
        from precision import in_double

        request["held"] = in_double()  # as long as the command lives
        request["held"].__enter__()
    if request["fault"] is not None:
        name, given = request["fault"]
        getattr(faults, name)(**given)


def leave(code: int) -> None:
    """Leave as an interpreter does: threads end their work, exit handlers run. But do not tear down torch,
    which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


if __name__ == "__main__":
    serve()
    os._exit(0)  # without tearing down torch
