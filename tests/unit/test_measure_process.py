"""Whatever a child does is a result: it answers, says that it failed, dies, is killed, hangs, or prints what
it likes. And what runs inside it."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import wait_until_gone
from trials import measure

from redline.config.load import build, load_recipe
from redline.errors import ConfigError
from redline.machine.facts import read_facts
from redline.measure import child as inside
from redline.measure import process as room
from redline.measure.process import Child, ChildFailed, Children
from redline.measure.trial import SCRATCH, Measurement, Timing, Trial, train_trial
from redline.plan.hardware import hardware_as, hardware_here
from redline.plan.planner import make_plan

SCRIPT = """
import json, os, signal, sys, time
behaviour = None
def reply(**values):
    print(json.dumps(values), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "start":
        behaviour = request["setting"]
        blocks = 0
        if behaviour["kind"] == "dies in start":
            raise RuntimeError(behaviour.get("words", "no kernel image is available"))
        if behaviour["kind"] == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if (below := os.fork()) == 0:
                time.sleep(600)
            with open(behaviour["pid_file"], "w") as file:
                file.write(str(below))
        if behaviour["kind"] == "says":
            reply(failed=behaviour["failed"], error="said so")
            continue
        reply(first_step_s=0.1, warmup_steps=5, steps_per_block=1, tokens_per_step=100, losses=[2.0, 1.0], grad_norms=[1.0, 1.0])
    elif request["do"] == "memory":
        reply(allocated_bytes=1, active_bytes=2, reserved_bytes=3, other_bytes=4)
    else:
        blocks += 1
        if blocks == behaviour.get("at"):
            if behaviour["kind"] == "dies":
                sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
            if behaviour["kind"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour["kind"] == "hangs":
                time.sleep(600)
        with open(behaviour["log"], "a") as log:
            log.write(behaviour["name"])
        reply(step_s=behaviour.get("step_s", 1.0) * (1 + behaviour.get("noise", 0) * (blocks // 2% 2)), data_wait_s=0.25)
"""


CUDA_MEMORY = """CUDA error: out of memory
Search for `cudaErrorMemoryAllocation' in the CUDA documentation for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""
"""What CUDA itself says, with torch's advice behind it."""
CUBLAS_MEMORY = "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", SCRIPT))


def trial(tmp_path: Path, kind: str = "well", name: str = "a", limit_s: float = 300.0, **more: Any) -> Trial:
    setting = {"kind": kind, "name": name, "log": str(tmp_path / "log"), **more}
    return Trial(subject="", setting=setting, timing=Timing(blocks=6, limit_s=limit_s))


def test_a_trial_that_ends_well_gives_all_it_measured(tmp_path: Path) -> None:
    measured = measure(trial(tmp_path, step_s=0.5))
    assert measured.outcome == "ok"
    assert measured.blocks_s == (0.5,) * 6
    assert measured.losses == (2.0, 1.0)
    assert measured.data_wait_share == pytest.approx(0.5)
    assert measured.memory is not None
    assert measured.memory.active_bytes == 2


@pytest.mark.parametrize(
    ("behaviour", "outcome", "words", "blocks"),
    [
        ({"kind": "says", "failed": "out_of_memory"}, "out_of_memory", "said so", 0),
        ({"kind": "says", "failed": "crashed"}, "crashed", "said so", 0),
        ({"kind": "dies in start"}, "crashed", "no kernel image", 0),
        ({"kind": "dies in start", "words": CUDA_MEMORY}, "out_of_memory", "CUDA error: out of memory", 0),
        ({"kind": "dies in start", "words": CUBLAS_MEMORY}, "out_of_memory", "CUBLAS", 0),
        ({"kind": "dies", "at": 3}, "out_of_memory", "Tried to allocate", 2),
        ({"kind": "killed", "at": 2}, "crashed", "killed by signal 9 (the system does so when memory", 1),
    ],
)
def test_a_failure_is_a_result_with_what_came_before_it(
    tmp_path: Path, behaviour: dict[str, Any], outcome: str, words: str, blocks: int
) -> None:
    measured = measure(trial(tmp_path, **behaviour))
    assert measured.outcome == outcome
    assert words in (measured.error or "")
    assert len(measured.blocks_s) == blocks


def test_a_hang_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with Child() as child:
        child.start(trial(tmp_path, "hangs", at=1, pid_file=str(pid_file)), limit_s=60)
        with pytest.raises(ChildFailed, match="no answer within 2 s; killed") as caught:
            child.block(limit_s=2)
        assert caught.value.outcome == "timed_out"
    wait_until_gone(int(pid_file.read_text()))


def test_one_child_measures_several_settings_and_dies_with_its_parent_block(tmp_path: Path) -> None:
    with Child() as child:
        results = [measure(trial(tmp_path, name=name), child) for name in "ab"]
        assert [measured.outcome for measured in results] == ["ok", "ok"]
        pid = child._process.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_the_next_child_is_ready_before_it_is_asked_for_and_leaves_with_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    children = Children(ahead=True)
    with children.take("a") as first:
        (ready,) = children._ready.values()
        assert ready is not first
        with children.take("a") as second:
            assert second is ready
        (left,) = children._ready.values()
        children.close()
        assert not left.alive
        assert not psutil.pid_exists(left._process.pid)


def test_nothing_is_started_ahead_where_it_would_be_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    for cores, ahead in ((16, True), (4, False)):
        children = Children.on(hardware_as("h200-141g", cores))
        with children.take(""):
            assert bool(children._ready) == ahead
        children.close()


def test_the_allocator_is_set_before_the_child_starts_and_a_users_own_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show = (
        "import os, sys, json; sys.stdin.readline(); print(json.dumps({'conf':"
        " os.environ.get('PYTORCH_CUDA_ALLOC_CONF')}), flush=True)"
    )
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", show))
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with Child("expandable_segments:True") as child:
        assert child.ask({}, 300)["conf"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    with Child("expandable_segments:True") as child:
        assert child.ask({}, 300)["conf"] == "backend:native"


IDLE = "child = room.Child(); print(child._process.pid, flush=True); time.sleep(600)"
BUSY = """room.Child().ask({"do": "start", "subject": "builtins:exec", "setting": sys.argv[2]}, 600)"""
AT_WORK = "import os; open({path!r}, 'w').write(str(os.getpid()))\nwhile True: pass"


def _wait_for(path: Path) -> str:
    while not (text := path.read_text() if path.exists() else ""):
        time.sleep(0.02)
    return text


def _parent(then: str, *arguments: str) -> list[str]:
    begin = (
        "import sys, time\nfrom redline.measure import process as room\nroom.COMMAND = (sys.executable,"
        " *sys.argv[1].split(' ', 1))\n"
    )
    return [sys.executable, "-c", begin + then, *arguments]


def test_a_child_that_waits_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(_parent(IDLE, f"-c {SCRIPT}"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until_gone(pid)


def test_a_child_at_work_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with subprocess.Popen(
        _parent(BUSY, "-m redline.measure.process", AT_WORK.format(path=str(pid_file)))
    ) as process:
        pid = int(_wait_for(pid_file))
        process.kill()
    wait_until_gone(pid)


def test_a_child_ends_with_its_parent_also_while_it_imports_torch(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    with subprocess.Popen(
        _parent(IDLE, "-m redline.measure.process"), env=environment, stdout=subprocess.DEVNULL
    ) as process:
        pid = int(_wait_for(pid_file))
        process.kill()
    wait_until_gone(pid)


def test_a_child_whose_parent_was_killed_before_it_could_look_does_not_begin(tmp_path: Path) -> None:
    at_work = AT_WORK.format(path=str(tmp_path / "pid"))
    request = {"do": "start", "subject": "builtins:exec", "setting": at_work}
    nobody = subprocess.Popen([sys.executable, "-c", ""])
    nobody.wait()
    command = [sys.executable, "-m", "redline.measure.process", str(nobody.pid)]
    ended = subprocess.run(command, input=json.dumps(request), text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert not (tmp_path / "pid").exists()


@pytest.mark.parametrize("kind", ["well", "killed", "hangs"])
def test_what_a_child_wrote_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writes = "import os, tempfile\ntempfile.mkdtemp(dir=os.environ['REDLINE_TRIAL_FOLDER'])\n"
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", writes + SCRIPT))
    with Child() as child:
        child.start(trial(tmp_path, kind, at=1, pid_file=str(tmp_path / "pid")), limit_s=60)
        assert list(tmp_path.glob("redline-trial-*/*"))
        if kind == "well":
            child.block(limit_s=60)
        else:
            with pytest.raises(ChildFailed):
                child.block(limit_s=2)
            assert not list(tmp_path.glob("redline-trial-*"))
    assert not list(tmp_path.glob("redline-trial-*"))


def test_a_training_writes_its_run_where_its_parent_cleans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.measure.training import TrainingSubject

    monkeypatch.setenv(SCRATCH, str(tmp_path))
    recipe = load_recipe(
        "nano", ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.ffn_size=64"]
    )
    training = TrainingSubject(
        train_trial(recipe, make_plan(recipe, hardware_here(read_facts(), None))).setting
    )
    try:
        assert list(tmp_path.glob("*/checkpoints"))
    finally:
        training.close()
    assert not list(tmp_path.glob("*/checkpoints"))


def three_rows(setting: dict[str, Any]) -> Iterator[dict[str, int]]:
    for n in range(3):
        if n == setting["fails_at"]:
            raise ConfigError("no such thing\nand why")
        yield {"n": n}


def test_rows_come_as_they_are_made_and_what_came_before_a_failure_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fails_at, last in ((None, {}), (1, {"failed": "crashed", "error": "no such thing"})):
        request = {"do": "rows", "function": f"{__name__}:three_rows", "setting": {"fails_at": fails_at}}
        said = list(inside._answers(inside.TrialServer(), request))
        rows = [{"row": {"n": n}} for n in range(3 if fails_at is None else fails_at)]
        assert said == [*rows, last]
        speaks = (
            f"import sys; sys.stdin.readline(); print({chr(10).join(map(json.dumps, said))!r}, flush=True)"
        )
        monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", speaks))
        found: list[dict[str, Any]] = []
        how = (
            contextlib.nullcontext()
            if fails_at is None
            else pytest.raises(ChildFailed, match="no such thing")
        )
        with Child() as child, how:
            for row in child.rows("", {}, 60):
                found.append(row)  # noqa: PERF402 - those before a failure stay
        assert found == [row["row"] for row in rows]


def test_what_was_measured_survives_json() -> None:
    measured = Measurement(outcome="ok", blocks_s=(0.1, 0.2), losses=(1.0,), tokens_per_step=7)
    assert build(Measurement, json.loads(json.dumps(asdict(measured))), where="test") == measured


# ---- inside the child ----


class Nothing:
    """A subject that does nothing."""

    tokens_per_step, waited_s, losses, grad_norms = 1, 0.0, (), ()

    def __init__(self, setting: object) -> None: ...
    def step(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


START = {"subject": f"{__name__}:Nothing", "setting": {}, "block_s": 0, "guard_steps": 2, "warmup_s": 0}


def test_memory_beside_torch_is_this_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that take turns fill and clear the same GPU between two requests; what they do there is not
    counted."""
    # Free or its own, before and after each start: 0.5 GiB of context, then a neighbour takes 60, then 0.1
    # GiB of a library.
    readings = iter([140.0, 139.5, 79.5, 79.4])
    monkeypatch.setattr(inside, "reachable_bytes", lambda: round(next(readings) * 2**30))
    monkeypatch.setattr(inside, "cuda_peaks", dict)
    server = inside.TrialServer()
    for expected in (0.5, 0.6):
        server.start(START)
        with monkeypatch.context() as patch:
            patch.setattr(inside.torch.cuda, "is_initialized", lambda: True)
            assert server.memory({})["other_bytes"] / 2**30 == pytest.approx(expected, abs=1e-6)
    server._clear()


class Skipping(Nothing):
    """fp16: its first updates have no norm."""

    losses, grad_norms = (11.0, math.nan), (math.inf, 2.0)


def test_numbers_that_are_none_come_through_the_pipe_as_none() -> None:
    server, request = inside.TrialServer(), START | {"subject": f"{__name__}:Skipping"}
    started = json.loads(json.dumps(server.start(request), allow_nan=False))
    assert (started["losses"], started["grad_norms"]) == ([11.0, None], [None, 2.0])
    assert build(Measurement, {"outcome": "ok", **started}, where="trial").grad_norms == (None, 2.0)
    server._clear()


@pytest.mark.parametrize("guard_steps", [1, 5])
def test_warm_up_is_as_long_as_the_guard_needs_and_long_steps_need_two(
    monkeypatch: pytest.MonkeyPatch, guard_steps: int
) -> None:
    monkeypatch.setattr(inside, "timed", lambda *_: 2.0)
    server, request = inside.TrialServer(), START | {"warmup_s": 100, "guard_steps": guard_steps}
    assert server.start(request)["warmup_steps"] == max(3, guard_steps)
    server._clear()
