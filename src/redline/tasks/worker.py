"""The scoring process behind `redline.tasks.pool`: reads batches of (question, completion) as JSON lines, and writes back
a line for each verdict.

    python -m redline.tasks.worker SPEC DATA BUDGET_S MEMORY_BYTES MARK

Every reply begins with MARK, so that the pool knows it from what a scorer writes to the same pipe. Its memory is
limited, each item's processor time too (a backstop in case the pool dies), and it may start no processes, except for
the sandbox of a task that runs code. This guards against accidents in scorers that somebody wrote in good faith;
hostile code belongs in `sandbox.py`.
"""

import json
import math
import os
import queue
import resource
import sys
import threading
import time
from typing import Any, BinaryIO

from redline.errors import RedlineError
from redline.tasks import sandbox
from redline.tasks.registry import load_task
from redline.tasks.task import Question, Score, Verdict

PROCESS_EVENTS = frozenset(
    {"os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
)

LONGEST_ANSWER = 100_000
"""Characters of an answer; a longer text is not an answer, and is not sent."""


def main(spec: str, data: str, budget_s: float, memory_bytes: int, mark: str) -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # A scorer that prints or asks for input must not touch the two pipes.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _limit(resource.RLIMIT_AS, memory_bytes)

    def send(message: Any) -> None:
        replies.write(mark.encode() + json.dumps(message).encode() + b"\n")
        replies.flush()

    try:
        task = load_task(spec, data or None)
        weakness = sandbox.weakness() if task.runs_code else None
    except RedlineError as error:
        send({"error": str(error)})
        return
    if not task.runs_code:
        sys.addaudithook(_forbid_processes)
    send({"weakness": weakness})
    batches: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, batches), daemon=True).start()
    while True:
        for question, completion in json.loads(batches.get()):
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + budget_s) + 2)
            send(_score_one(task.score, Question(*question), completion))


def _score_one(score: Score, question: Question, completion: str) -> Verdict:
    """The scorer's verdict with its types made right, or a verdict that says how the scorer failed."""
    try:
        found: Any = score(question, completion)
        if not isinstance(found, Verdict):
            return failed(f"the scorer returned {type(found).__name__}, not a Verdict")
        correct, parsed, reward, answer, reason = found
        if not math.isfinite(reward):
            return failed(f"the scorer gave a reward of {reward}, not a finite number")
        said = None if answer is None else _text(answer)
        if said is not None and len(said) > LONGEST_ANSWER:
            return failed(f"the scorer gave an answer of {len(said):,} characters, over {LONGEST_ANSWER:,}")
        why = None if reason is None else _text(reason)[:200]
        return Verdict(bool(correct), bool(parsed), float(reward), said, why)
    except BaseException as error:  # noqa: BLE001 - whatever foreign code raises, sys.exit() too, the run must go on
        return failed(f"the scorer raised {type(error).__name__}: {_text(error)[:200]}")


def _text(value: object) -> str:
    """Text that can be sent and stored: half a surrogate pair can not."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - a foreign object may raise anything when it is printed
        return f"a {type(value).__name__} that cannot be printed"


def failed(reason: str) -> Verdict:
    """The verdict on a completion whose scorer did not come to one."""
    return Verdict(correct=False, parsed=False, reward=0.0, answer=None, reason=reason)


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _forbid_processes(event: str, _: Any) -> None:
    if event in PROCESS_EVENTS:
        raise PermissionError(f"a scorer may not start processes ({event})")


def _receive(requests: BinaryIO, batches: "queue.SimpleQueue[bytes]") -> None:
    """Hand lines on; when the pool is gone end the process, in the middle of a scorer too."""
    for line in requests:
        batches.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
