"""Score many completions in other processes; a scorer that hangs or dies costs its own completion a 0, and
nothing else.

    with Pool("units") as pool:
        verdicts = pool.score([(question, completion), ...])     # in that order, from any thread
        verdict = pool.submit(question, completion)              # a future, to score during generation

Each worker is a fresh Python process that loads the task by name or path (no fork of a process that holds a
GPU, no pickle). A completion has `budget_s` of wall clock; past it the worker and all of its children are
killed, the completion is scored 0 with the reason, and a new worker takes the rest. Generated code runs
in the sandbox of the worker (`sandbox.py`), and dies with it; a weak sandbox raises a warning.
"""

import contextlib
import json
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from redline.errors import ConfigError, MachineError, RedlineError
from redline.machine.facts import cpu_cores
from redline.tasks.task import Question, Verdict
from redline.tasks.worker import failed

BATCH = 256
"""Completions in one message, at most."""
SHARE = 4
"""A message holds this fraction of a worker's share of what waits: larger ones would leave workers idle at the end, and
1,024 messages of one completion cost 80 ms of CPU time, 64 of sixteen 12 ms."""
START_S = 60.0
"""How long a worker may take to load its task."""

CLOSED = "the scoring pool was closed while it scored"

Item = tuple[Question, str]


class Pool:
    """Worker processes that score completions for one task. Close it, or use it in a `with`."""

    def __init__(
        self,
        spec: str,
        data: str | None = None,
        *,
        workers: int | None = None,
        budget_s: float = 5.0,
        memory_bytes: int = 2 << 30,
    ) -> None:
        """`workers`: default one per core; `budget_s`: wall clock per completion; `memory_bytes`: address space per process."""
        count = workers if workers is not None else cpu_cores()
        if count < 1 or not budget_s > 0:
            raise ConfigError(
                f"a scoring pool needs at least 1 worker and a budget above 0 s, got {count} and {budget_s}"
            )
        self._children: list[_Child] = []
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._waiting: deque[tuple[Item, Future[Verdict]]] = deque()
        self._lock = threading.Lock()  # between threads that take from the queue
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="redline-score")
        self._closed = False
        try:
            for _ in range(count):
                self._children.append(_Child([spec, data or "", str(budget_s), str(memory_bytes)], budget_s))
            for child in self._children:  # after all were started: they load their task side by side
                child.wait_ready()
                self._idle.put(child)
            if weakness := self._children[0].weakness:
                warnings.warn(weakness, stacklevel=2)
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[Item]) -> list[Verdict]:
        """A verdict for each (question, completion), in their order."""
        return [verdict.result() for verdict in self._ask(items)]

    def submit(self, question: Question, completion: str) -> Future[Verdict]:
        """The verdict on one completion, once a worker has come to it."""
        return self._ask([(question, completion)])[0]

    def close(self) -> None:
        """Kill the workers. A `score` that is under way in another thread ends with an error."""
        self._closed = True
        for child in self._children:
            child.stop()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:  # no thread uses their pipes any more
            child.close_pipes()
        for _, verdict in self._waiting:
            verdict.set_exception(ConfigError(CLOSED))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, items: Sequence[Item]) -> list[Future[Verdict]]:
        if self._closed:
            raise ConfigError("the scoring pool is closed: score inside its `with`")
        verdicts = [Future[Verdict]() for _ in items]
        self._waiting.extend(zip(items, verdicts, strict=True))
        for _ in range(min(len(items), len(self._children))):
            self._threads.submit(self._serve)
        return verdicts

    def _serve(self) -> None:
        """Have a worker score what waits, until nothing does."""
        while taken := self._take():
            child = self._idle.get()
            try:
                found = child.score([item for item, _ in taken])
                for (_, verdict), one in zip(taken, found, strict=True):
                    verdict.set_result(one)
            except RedlineError as error:
                for _, verdict in taken:
                    verdict.set_exception(error)
            finally:
                self._idle.put(child)
                for _, verdict in taken:
                    verdict.cancel()  # those without a result, so that nobody waits forever

    def _take(self) -> list[tuple[Item, Future[Verdict]]]:
        """The next message: few completions while few wait, so that all workers have some."""
        with self._lock:
            size = min(BATCH, -(-len(self._waiting) // (SHARE * len(self._children))))
            return [self._waiting.popleft() for _ in range(size)]


class _Child:
    """One worker process and the pipes to it. Used by one thread at a time, except for `stop`."""

    def __init__(self, arguments: list[str], budget_s: float) -> None:
        self._arguments, self._budget_s = arguments, budget_s
        self._lock, self._stopped = threading.Lock(), False  # between `stop` and the thread that scores
        self._half, self._mark = b"", b""
        self._start()

    def score(self, items: Sequence[Item]) -> list[Verdict]:
        """Verdicts for all items, with as many new processes as it takes."""
        verdicts: list[Verdict] = []
        if self._process.poll() is not None:  # died while idle: no item's fault
            self._restart()
        while len(verdicts) < len(items):
            found, reason = self._exchange(items[len(verdicts) :])
            verdicts += found
            if reason is not None:
                self._restart()
                verdicts.append(failed(reason))
        return verdicts

    def wait_ready(self) -> None:
        """Wait for the worker's first line: it has its task, or says why not."""
        replies: list[Any] = []
        end_s = time.monotonic() + START_S
        while not replies:
            if not (data := self._read(max(0.0, end_s - time.monotonic()))):
                raise MachineError(
                    f"a scoring process for task {self._arguments[0]} did not get ready (limit {START_S:.0f}"
                    f" s): {self._end()}"
                )
            replies = self._replies(data)
        if error := replies[0].get("error"):
            raise ConfigError(error)
        self.weakness: str | None = replies[0]["weakness"]

    def stop(self) -> None:
        self._stopped = True
        self._end()

    def close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _exchange(self, items: Sequence[Item]) -> tuple[list[Verdict], str | None]:
        """The verdicts; and if the process ended before the last, the reason: it is the next item's fault."""
        assert self._process.stdin is not None
        verdicts: list[Verdict] = []
        with contextlib.suppress(BrokenPipeError):  # the other pipe shows that it ended
            # The worker reads the whole line before it scores, so this does not block.
            message = memoryview(json.dumps(items).encode() + b"\n")
            while message:
                message = message[self._process.stdin.write(message) :]
        while len(verdicts) < len(items):
            data = self._read(self._budget_s)
            if data is None:
                self._end()
                return verdicts, f"the scorer took more than {self._budget_s:g} s and was killed"
            if not data:
                return verdicts, self._end()
            verdicts += [Verdict(*fields) for fields in self._replies(data)]
        return verdicts, None

    def _read(self, most_s: float) -> bytes | None:
        """What the process wrote: empty if it has ended, None if it wrote nothing in this time."""
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        return os.read(self._out, 1 << 20) if poller.poll(most_s * 1000) else None

    def _replies(self, data: bytes) -> list[Any]:
        """The replies that are complete with this piece. A line without the mark was written by a scorer."""
        *lines, self._half = (self._half + data).split(b"\n")
        marked = (line.rpartition(self._mark) for line in lines)
        return [json.loads(reply) for _, mark, reply in marked if mark]

    def _start(self) -> None:
        self._half, self._mark = b"", secrets.token_hex(8).encode()
        command = [sys.executable, "-P", "-m", "redline.tasks.worker", *self._arguments, self._mark.decode()]
        # The same modules as here, also where sys.path was changed by hand; one core per worker, so no threads
        # in numeric libraries.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()

    def _restart(self) -> None:
        self._end()
        with self._lock:
            if self._stopped:
                raise ConfigError(CLOSED)
            self.close_pipes()
            self._start()
        self.wait_ready()

    def _end(self) -> str:
        """Kill the process with all it started, and say how it ended; it may have been dead before."""
        with self._lock:
            if self._process.returncode is None:  # once waited for, its number may be somebody else's
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            code = self._process.returncode
        if code >= 0:
            return f"the scorer ended its process with exit code {code}"
        return f"the scorer's process was ended by {signal.Signals(-code).name}"
