"""Whatever a child does is a result: it answers, says that it failed, dies, is killed, hangs, or prints what
it likes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from redline.config.load import build, load_recipe
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_as, hardware_here
from redline.plan.planner import make_plan
from redline.tune import trial as room
from redline.tune.scratch import SCRATCH, Scratch
from redline.tune.trial import (
    Arm,
    Bounds,
    Child,
    Children,
    Measured,
    Trial,
    measure,
    measure_together,
    take_turns,
    train_trial,
)

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
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if os.fork() == 0:
                    open(behaviour["pid_file"], "w").write(str(os.getpid()))
                    time.sleep(600)
                time.sleep(600)
        with open(behaviour["log"], "a") as log:
            log.write(behaviour["name"])
        reply(step_s=behaviour.get("step_s", 1.0) * (1 + behaviour.get("noise", 0) * (blocks // 2 % 2)), data_wait_s=0.25)
"""


CUDA_MEMORY = """CUDA error: out of memory
Search for `cudaErrorMemoryAllocation' in the CUDA documentation for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""
"""What CUDA itself says, with torch's advice behind it."""


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", SCRIPT))


def trial(tmp_path: Path, kind: str = "well", name: str = "a", limit_s: float = 20.0, **more: Any) -> Trial:
    setting = {"kind": kind, "name": name, "log": str(tmp_path / "log"), **more}
    return Trial(workload="", setting=setting, bounds=Bounds(blocks=6, limit_s=limit_s))


def test_a_trial_that_ends_well_gives_all_it_measured(tmp_path: Path) -> None:
    measured = measure(trial(tmp_path, step_s=0.5))
    assert measured.outcome == "ok"
    assert measured.blocks_s == (0.5,) * 6
    assert measured.losses == (2.0, 1.0)
    assert measured.data_wait_share == pytest.approx(0.5)
    assert measured.memory is not None
    assert measured.memory.active_bytes == 2


def test_a_trial_is_cut_short_when_enough_is_known(tmp_path: Path) -> None:
    assert len(measure(trial(tmp_path), enough=lambda blocks_s: len(blocks_s) == 2).blocks_s) == 2


@pytest.mark.parametrize(
    ("behaviour", "outcome", "words", "blocks"),
    [
        ({"kind": "says", "failed": "out_of_memory"}, "out_of_memory", "said so", 0),
        ({"kind": "says", "failed": "crashed"}, "crashed", "said so", 0),
        ({"kind": "dies in start"}, "crashed", "no kernel image", 0),
        ({"kind": "dies in start", "words": CUDA_MEMORY}, "out_of_memory", "CUDA error: out of memory", 0),
        (
            {"kind": "dies in start", "words": "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"},
            "out_of_memory",
            "CUBLAS",
            0,
        ),
        ({"kind": "dies", "at": 3}, "out_of_memory", "Tried to allocate", 2),
        (
            {"kind": "killed", "at": 2},
            "crashed",
            "killed by signal 9 (the system does so when memory runs out)",
            1,
        ),
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
    began_s = time.monotonic()
    measured = measure(trial(tmp_path, "hangs", at=2, limit_s=1.0, pid_file=str(pid_file)))
    assert measured.outcome == "timed_out"
    assert len(measured.blocks_s) == 1
    assert time.monotonic() - began_s < 10
    grandchild = int(pid_file.read_text())
    deadline_s = time.monotonic() + 5
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the process group was not killed"
        time.sleep(0.02)


def test_arms_take_turns_in_turned_order_and_a_dead_one_leaves_the_other(tmp_path: Path) -> None:
    first, second = measure_together([trial(tmp_path, name="a"), trial(tmp_path, "dies", "b", at=4)])
    assert first.outcome == "ok"
    assert len(first.blocks_s) == 6
    assert second.outcome == "out_of_memory"
    assert len(second.blocks_s) == 2  # the first of its three was warm-up
    assert (tmp_path / "log").read_text() == "ab" + "ab" + "ba" + "aaaa"


def test_one_child_measures_several_settings_and_dies_with_its_parent_block(tmp_path: Path) -> None:
    with Child() as child:
        results = [measure(trial(tmp_path, name=name), child=child) for name in "ab"]
        assert [measured.outcome for measured in results] == ["ok", "ok"]
        pid = child._process.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_an_arm_forgets_the_blocks_of_an_earlier_duel(tmp_path: Path) -> None:
    with Child() as one, Child() as other:
        holder, challenger = Arm(trial(tmp_path), one), Arm(trial(tmp_path, name="b"), other)
        for arm in (holder, challenger):
            arm.start()
        take_turns([holder, challenger], 6, lambda: len(challenger.blocks_s) == 4)
        assert [len(arm.end().blocks_s) for arm in (holder, challenger)] == [4, 4]
        take_turns([holder, challenger], 2)
        assert len(holder.blocks_s) == 2


@pytest.mark.parametrize(("block_s", "rounds"), [(60.0, 24), (0.0, 7)])
def test_noise_gets_more_rounds_within_the_time_that_they_were_meant_to_take(
    tmp_path: Path, block_s: float, rounds: int
) -> None:
    """Blocks of whole steps may be longer than asked for: generation's are."""
    bounds = Bounds(blocks=6, block_s=block_s, limit_s=20.0)
    with Child() as one, Child() as other:
        arms = [
            Arm(replace(trial(tmp_path), bounds=bounds), one),
            Arm(replace(trial(tmp_path, noise=0.5), bounds=bounds), other),
        ]
        for arm in arms:
            arm.start()
        take_turns(arms, 6)
        assert [len(arm.blocks_s) for arm in arms] == [rounds, rounds]


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


@pytest.mark.parametrize(("profile", "cores", "ahead"), [("h200-141g", 16, True), ("h200-141g", 4, False)])
def test_nothing_is_started_ahead_where_it_would_be_felt(
    profile: str, cores: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    children = Children.on(hardware_as(profile, cores))
    with children.take(""):
        assert bool(children._ready) == ahead
    children.close()


def test_long_steps_need_no_round_that_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "UNMOVED_S", 0.0)
    measured = measure_together([trial(tmp_path, name="a"), trial(tmp_path, name="b")])
    assert [len(each.blocks_s) for each in measured] == [6, 6]
    assert (tmp_path / "log").read_text() == "ab" + "baab" * 2 + "ba"


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
        assert child.ask({}, 20)["conf"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    with Child("expandable_segments:True") as child:
        assert child.ask({}, 20)["conf"] == "backend:native"


IDLE = "child = room.Child(); print(child._process.pid, flush=True); time.sleep(600)"
BUSY = """room.Child().ask({"do": "start", "workload": "builtins:exec", "setting": sys.argv[2]}, 600)"""
AT_WORK = "import os; open({path!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
WITHOUT_LINUX = (
    "from redline.tune import lifeline; lifeline._signalled_when_parent_ends = lambda: False; lifeline.main()"
)


def _gone(pid: int, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _parent(then: str, *arguments: str) -> list[str]:
    begin = (
        "import sys, time\nfrom redline.tune import trial as room\nroom.COMMAND = (sys.executable,"
        " *sys.argv[1].split(' ', 1))\n"
    )
    return [sys.executable, "-c", begin + then, *arguments]


def test_a_child_that_waits_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(_parent(IDLE, f"-c {SCRIPT}"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    assert _gone(pid, 5), "an orphan goes on"


@pytest.mark.parametrize("command", ["-m redline.tune.lifeline", f"-c {WITHOUT_LINUX}"])
def test_a_child_at_work_ends_when_its_parent_is_killed(tmp_path: Path, command: str) -> None:
    """Where Linux says that the parent is gone, and where the child has to look."""
    pid_file, pid = tmp_path / "pid", ""
    with subprocess.Popen(_parent(BUSY, command, AT_WORK.format(path=str(pid_file)))) as process:
        deadline_s = time.monotonic() + 120
        while not (pid := pid_file.read_text() if pid_file.exists() else ""):
            assert time.monotonic() < deadline_s, "the child did not begin"
            time.sleep(0.05)
        process.kill()
    assert _gone(int(pid), 10), "an orphan goes on"


def test_a_child_ends_with_its_parent_also_while_it_imports_torch(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    with subprocess.Popen(
        _parent(IDLE, "-m redline.tune.lifeline"), env=environment, stdout=subprocess.DEVNULL
    ) as process:
        deadline_s = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline_s, "torch was not imported"
            time.sleep(0.05)
        process.kill()
    assert _gone(int(pid_file.read_text()), 5), "an orphan goes on importing"


def test_a_child_whose_parent_was_killed_before_it_could_look_does_not_begin(tmp_path: Path) -> None:
    request = {
        "do": "start",
        "workload": "builtins:exec",
        "setting": AT_WORK.format(path=str(tmp_path / "pid")),
    }
    nobody = subprocess.Popen([sys.executable, "-c", ""])
    nobody.wait()
    command = [sys.executable, "-m", "redline.tune.lifeline", str(nobody.pid)]
    ended = subprocess.run(command, input=json.dumps(request), text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert not (tmp_path / "pid").exists()


@pytest.mark.parametrize("kind", ["well", "killed", "hangs"])
def test_what_a_child_wrote_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writes = "import os, tempfile\ntempfile.mkdtemp(dir=os.environ['REDLINE_TRIAL_FOLDER'])\n"
    monkeypatch.setattr(room, "COMMAND", (sys.executable, "-c", writes + SCRIPT))
    with Child() as child:
        measured = measure(
            trial(tmp_path, kind, at=2, limit_s=2.0, pid_file=str(tmp_path / "pid")), child=child
        )
        assert bool(list(tmp_path.glob("redline-trial-*/*"))) == (measured.outcome == "ok")
    assert not list(tmp_path.glob("redline-trial-*"))


def test_the_next_trial_removes_what_a_killed_parent_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young, foreign = (
        tmp_path / name for name in ("redline-trial-left", "redline-trial-young", "other")
    )
    for folder in (left, young, foreign):
        (folder / "run").mkdir(parents=True)
    (tmp_path / "redline-trial-link").symlink_to(foreign)
    at_work = Scratch()
    for folder in (left, foreign, at_work.path):
        os.utime(folder, (0, 0))
    Scratch().close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["redline-trial-young", "other", "redline-trial-link", at_work.path.name]
    )
    assert (foreign / "run").exists()
    at_work.close()


def test_a_training_writes_its_run_where_its_parent_cleans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redline.tune.child import Training

    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    recipe = load_recipe(
        "nano", ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.ffn_size=64"]
    )
    training = Training(train_trial(recipe, make_plan(recipe, hardware_here(read_facts(), None))).setting)
    try:
        assert list(tmp_path.glob("*/checkpoints"))
    finally:
        training.close()
    assert not list(tmp_path.glob("*/checkpoints"))


def test_what_was_measured_survives_json() -> None:
    measured = Measured(outcome="ok", blocks_s=(0.1, 0.2), losses=(1.0,), tokens_per_step=7)
    assert build(Measured, json.loads(json.dumps(asdict(measured))), where="test") == measured
