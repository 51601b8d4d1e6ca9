"""The scoring processes: order, speed of batches, and scorers that hang, die, allocate, fork or talk
nonsense."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from processes import wait_until_gone

from redline.errors import ConfigError
from redline.tasks.pool import Pool
from redline.tasks.registry import load_task
from redline.tasks.task import Question, Verdict

SCORER = """
import ctypes, os, subprocess, sys, threading, time
from redline.tasks.task import Question, Task, Verdict

def score(question, completion):
    print("scorers may print")
    match completion:
        case "loop":
            open(question.text, "w").close()
            while True:
                pass
        case "stubborn":
            while True:
                try:
                    time.sleep(1)
                except BaseException:
                    pass
        case "native":
            ctypes.PyDLL(None).sleep(1000)  # holds the GIL
        case "memory":
            return bytearray(1 << 40)
        case "grow":
            hoard = []
            while True:
                hoard.append(bytearray(1 << 24))
        case "fork":
            return os.fork()
        case "shell":
            return os.system("true")
        case "child":
            return subprocess.run(["true"])
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(0)
        case "abort":
            os.abort()
        case "input":
            return input()
        case "none":
            return None
        case "nan":
            return Verdict(True, True, float("nan"), None)
        case "raise":
            raise RuntimeError("not today")
        case "unsendable":
            return Verdict(True, True, 1.0, "x", object)
        case "unprintable":
            class Odd(Exception):
                def __str__(self):
                    raise self
            raise Odd
        case "surrogate":
            return Verdict(False, False, 0.0, None, "\\ud800 is the reason")
        case "long":
            return Verdict(True, True, 1.0, "x" * 40_000_000)
        case "garbage":
            for fd in range(3, 32):
                try:
                    os.write(fd, b'[[1]]\\n\\xff{"half": ')
                except OSError:
                    pass
            return Verdict(False, False, 0.0, None, "garbage was written")
        case "slow":
            with open(question.text, "a") as file:
                file.write("x")
            time.sleep(0.05)
    correct = completion == question.answer
    return Verdict(correct, True, float(correct), completion)

def make(data):
    return Task(name="odd", about="", questions=lambda split, count, seed: [], score=score)
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "odd.py"
    path.write_text(SCORER)
    return f"{path}:make"


def question(answer: str, text: str = os.devnull) -> Question:
    return Question(answer, text, answer)


def wait_until(met: Callable[[], bool]) -> None:
    """Hangs, and is ended by pytest, where it is not met."""
    while not met():
        time.sleep(0.01)


def workers() -> set[int]:
    """Scoring processes of this process and whatever they started."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "redline.tasks.worker" in child.cmdline():
                found |= {child.pid, *(grandchild.pid for grandchild in child.children(recursive=True))}
    return found


@pytest.fixture(scope="module")
def pool(odd: str) -> Pool:
    """One whose limit a busy machine does not reach."""
    with Pool(odd, workers=1, budget_s=300, memory_bytes=1 << 28) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty(odd: str) -> Pool:
    with Pool(odd, workers=1, budget_s=2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("memory", "MemoryError"),
        ("grow", "MemoryError"),
        ("fork", "may not start processes (os.fork)"),
        ("shell", "may not start processes (os.system)"),
        ("child", "may not start processes (subprocess.Popen)"),
        ("exit", "exit code 3"),
        ("sys.exit", "SystemExit"),
        ("abort", "SIGABRT"),
        ("input", "EOFError"),
        ("none", "returned NoneType, not a Verdict"),
        ("nan", "reward of nan"),
        ("raise", "RuntimeError: not today"),
        ("unprintable", "a Odd that cannot be printed"),
        ("surrogate", "? is the reason"),
        ("long", "40,000,000 characters"),
        ("garbage", "garbage was written"),
    ],
)
def test_a_bad_scorer_costs_its_own_completion_and_nothing_else(pool, completion, reason):
    costs_its_own_completion(pool, completion, reason)


@pytest.mark.parametrize("completion", ["loop", "stubborn", "native"])
def test_a_scorer_that_does_not_end_is_killed(hasty, completion):
    costs_its_own_completion(hasty, completion, "took more than 2 s and was killed")


def costs_its_own_completion(pool: Pool, completion: str, reason: str) -> None:
    before = workers()
    items = [(question(str(i)), str(i) if i % 3 else "wrong") for i in range(40)]
    items[17] = (question("x"), completion)
    verdicts = pool.score(items)
    bad = verdicts.pop(17)
    assert (bad.correct, bad.parsed, bad.reward, bad.answer) == (False, False, 0.0, None)
    assert reason in bad.reason
    items.pop(17)
    assert verdicts == [Verdict(said == q.answer, True, float(said == q.answer), said) for q, said in items]
    assert len(workers()) == len(before), "a process that ended has one successor"


def test_what_a_verdict_may_not_hold_becomes_text(pool):
    assert pool.score([(question("x"), "unsendable")]) == [Verdict(True, True, 1.0, "x", "<class 'object'>")]


def test_slow_but_honest_scorers_are_left_alone_and_hardly_scored_twice(pool, tmp_path):
    """What was sent back before a death stays."""
    slow = (Question("slow", str(tmp_path / "calls"), "slow"), "slow")
    verdicts = pool.score([slow] * 30 + [(question("x"), "exit"), slow])
    assert [v.correct for v in verdicts] == [True] * 30 + [False, True]
    assert 31 <= (tmp_path / "calls").stat().st_size <= 33, "only what had not been sent is scored again"


def test_verdicts_equal_those_of_the_scorer_itself_and_come_in_order():
    task = load_task("units")
    items = [
        (q, q.solution if i % 2 else "<answer>-1</answer>" * (i % 3))
        for i, q in enumerate(task.questions("train", 3000, 0))
    ]
    expected = [task.score(q, said) for q, said in items]
    with Pool("units", workers=2) as pool:
        assert pool.score(items) == expected
        assert pool.score(items[:1]) == expected[:1]
        assert pool.score([]) == []
        found: dict[int, list[Verdict]] = {}
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: pool.score(items[n::4])})) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {n: expected[n::4] for n in range(4)}


@pytest.mark.timing
def test_cheap_scorers_are_fast():
    """20,000 a second and core, counted in processor time of both sides."""
    items = [(question("1"), "so it is <answer>1</answer>")] * 20_000
    with Pool("units", workers=1) as pool:
        worker = psutil.Process(pool._children[0]._process.pid)
        before_s = time.process_time() + sum(worker.cpu_times()[:2])
        assert all(verdict.correct for verdict in pool.score(items))
        assert len(items) / (time.process_time() + sum(worker.cpu_times()[:2]) - before_s) > 20_000


def test_large_completions_do_not_block():
    text = "x" * 300_000
    with Pool("units", workers=1) as pool:
        verdicts = pool.score([(question("1.0"), text + "<answer>1</answer>")] * 8)
    assert all(v.correct for v in verdicts)


def test_nothing_is_left_when_the_pool_closes_in_the_middle(odd, tmp_path):
    gc.collect()  # or what other tests have left is closed meanwhile
    before, files = workers(), len(os.listdir("/proc/self/fd"))
    pool = Pool(odd, workers=2, budget_s=60)
    verdicts = [pool.submit(question("x", str(tmp_path / "begun")), "loop") for _ in range(8)]
    wait_until((tmp_path / "begun").exists)
    pool.close()
    assert [str(verdict.exception()) for verdict in verdicts] == [
        "the scoring pool was closed while it scored"
    ] * 8
    assert workers() == before
    assert len(os.listdir("/proc/self/fd")) == files
    with pytest.raises(ConfigError, match="is closed"):
        pool.score([(question("x"), "x")])


def test_a_worker_that_died_while_idle_is_no_items_fault(odd):
    before = workers()
    with Pool(odd, workers=1) as pool:
        os.kill(worker := pool._children[0]._process.pid, signal.SIGKILL)
        os.waitid(
            os.P_PID, worker, os.WEXITED | os.WNOWAIT
        )  # all its threads have ended; the pool will see it
        assert [v.reason for v in pool.score([(question("x"), "x")])] == [None]
    assert workers() == before


def test_workers_end_with_the_process_that_started_them(odd, tmp_path):
    """Killed, the parent cannot tell them; a scorer in the middle of a loop must not outlive it."""
    program = (
        "import sys, threading; from redline.tasks.pool import Pool; from redline.tasks.task import"
        " Question\npool = Pool(sys.argv[1], workers=1, budget_s=60)\nprint(pool._children[0]._process.pid,"
        " flush=True)\npool.score([(Question('x', sys.argv[2], 'x'), 'loop')])"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, odd, str(tmp_path / "begun")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    wait_until((tmp_path / "begun").exists)
    parent.kill()
    parent.communicate()
    wait_until_gone(worker)


def test_a_task_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path):
    before = workers()
    with pytest.raises(ConfigError, match="no task 'unitz'"):
        Pool("unitz", workers=2)
    for code in ("import sys\nsys.exit(0)", "import sys\ndef make(data):\n    sys.exit(0)"):
        (tmp_path / "ends.py").write_text(code)
        for load in (load_task, Pool):
            with pytest.raises(ConfigError, match=r"it ends the program \(sys\.exit\(0\)\)"):
                load(f"{tmp_path / 'ends.py'}:make")
    with pytest.raises(ConfigError, match="at least 1 worker"):
        Pool("units", workers=0)
    assert workers() == before


def test_there_is_a_worker_for_every_core_that_the_quota_leaves(monkeypatch):
    monkeypatch.setattr("redline.machine.facts._cpu_quotas", lambda: iter([1.5]))
    with Pool("units") as pool:
        assert len(pool._children) == 1
