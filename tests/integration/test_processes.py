"""Two processes train what one trains: the same data in the same order, the same losses but for the order of
additions.

Most runs here are two forks with torchrun's variables set, or forks that the launcher starts in the place of its
processes, because importing torch takes longer than the test. One test starts everything for real: once by `--nproc`
and once by torchrun from outside.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from pipeline import (
    Nano,
    assert_close_training,
    assert_same_training,
    assert_same_weights,
    events,
    lines_written,
    real,
    steps,
    weights,
)
from precision import CLOSE, CLOSE_FP32
from processes import wait_until_gone
from warm import LIMIT_S as HUNG_S
from warm import Fault

from redline.errors import MachineError, RedlineError
from redline.launch.processes import Member, _watched

STEPS = 20


@pytest.fixture(scope="module", params=["adamw", "muon"])
def optimizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def recipe(nano: Nano, optimizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Muon's with candidates of the softmax, which all processes must draw alike."""
    folder, some = tmp_path_factory.mktemp(optimizer), 300 if optimizer == "muon" else 0
    return nano.recipe(
        folder, f"train.steps={STEPS}", "train.lr=2e-3", f"train.optimizer={optimizer}", f"train.softmax_candidates={some}"
    )  # fmt: skip


@pytest.fixture(scope="module")
def single(nano: Nano, recipe: Path) -> Path:
    """A run on one process, in double precision."""
    nano.in_double().outcome(recipe, recipe.parent / "single")
    return recipe.parent / "single"


@pytest.fixture(scope="module")
def unbroken(nano: Nano, recipe: Path) -> Path:
    """A run on two processes that nobody disturbed."""
    nano.train_on_two(recipe, recipe.parent / "unbroken")
    return recipe.parent / "unbroken"


@pytest.mark.numerics
def test_two_processes_train_what_one_trains(nano: Nano, recipe: Path, single: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = nano.in_double().train_on_two(recipe, run)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["why"] == "finished"
    assert second.out == ""
    assert_close_training(run, single, CLOSE)
    assert_close_tensors(run, single)


@pytest.mark.numerics
@pytest.mark.parametrize(
    "overrides",
    [
        ("plan.precision=bf16",),  # rotary positions
        (
            "plan.precision=bf16",
            "model.positions=learned",
            "model.norm=layernorm",
            "model.activation=gelu",
            "model.bias=true",
        ),
        ("plan.precision=bf16", "model.attention=favor", "model.features=16", "train.orthogonality=0.01"),
        ("train.rule=dfa",),
        ("train.rule=dfa", "dfa.depth=layer", "dfa.error=logits", "dfa.shared=true", "plan.precision=bf16"),
        (
            "train.rule=dfa",
            "dfa.error=residual",
            "dfa.top_blocks=1",
            "model.tie_embeddings=false",
            "train.orthogonality=0.01",
        ),
        pytest.param(("plan.compile=default",), marks=pytest.mark.slow),
    ],
    ids=["bf16", "bf16-gpt2", "bf16-favor", "dfa", "dfa-layer", "dfa-top", "compiled"],
)
def test_two_processes_round_where_one_does(nano: Nano, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """One process takes the batch in two passes, and each of two takes one of these: the same kernels on the
    same shapes, and a sum of two gradients has one order. So they compute the same bits, unless one of them
    rounds or casts where the other does not. (Clipping would divide by a norm, whose sum has another order,
    and MKL may add in another order where memory is aligned otherwise, unless it is told not to.)"""
    nano = replace(nano, environment={"MKL_CBWR": "COMPATIBLE"})
    recipe = nano.recipe(
        tmp_path,
        "train.steps=3",
        "train.warmup_steps=0",
        "train.eval_every=0",
        "train.lr=1e-3",
        "train.clip_norm=0",
        "plan.micro_batch=4",
        *overrides,
    )
    alone, run = tmp_path / "alone", tmp_path / "run"
    nano.outcome(recipe, alone)
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert [line["loss"] for line in steps(run)] == [line["loss"] for line in steps(alone)]
    assert_same_weights(run, alone)


@pytest.mark.numerics
def test_a_run_moves_between_one_and_two_processes(
    nano: Nano, recipe: Path, single: Path, tmp_path: Path
) -> None:
    """A signal to one of two stops both; one process resumes; two finish what it began."""
    nano, run = nano.in_double(), tmp_path / "run"
    for done in nano.train_on_two(recipe, run, faults=(None, Fault("signalled_at", update=6))):
        assert done.code == 0, done.err
    assert len(steps(run)) == 6
    assert nano.outcome(recipe, run, fault=Fault("signalled_at", update=7))["step"] == 13
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert [(event["step"], event["world_size"]) for event in events(run, "start", "resume")] == [
        (0, 2),
        (6, 1),
        (13, 2),
    ]
    assert_close_training(run, single, CLOSE)
    assert "model.head.weight" not in weights(run), "tied under FSDP and over a resume: one tensor"
    assert_close_tensors(run, single)


def test_resumed_on_two_is_the_same_to_the_last_bit_as_unbroken_on_two(
    nano: Nano, recipe: Path, unbroken: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    nano.train_on_two(recipe, run, faults=(Fault("signalled_at", update=11), None))
    nano.train_on_two(recipe, run)
    assert [event["step"] for event in events(run, "start", "resume")] == [0, 11]
    assert_same_training(run, unbroken)


@pytest.mark.parametrize("optimizer", ["muon"], scope="module")  # whose state has both kinds of shards
def test_killed_while_two_processes_save(nano: Nano, recipe: Path, unbroken: Path, tmp_path: Path) -> None:
    """The first of two dies in the middle of a commit; the other cannot continue without it; started again,
    both resume."""
    run = tmp_path / "run"
    first, second = nano.train_on_two(recipe, run, faults=(Fault("kill_at", call=23), None))
    assert first.code == -signal.SIGKILL
    assert second.code not in (0, -signal.SIGKILL)
    assert 0 < len(steps(run)) < STEPS
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert_same_training(run, unbroken)


@pytest.mark.numerics
def test_streamed_data_is_the_same_on_two_processes(nano: Nano, tmp_path: Path) -> None:
    nano = nano.in_double()
    recipe = nano.recipe(
        tmp_path, "data.stream=true", "train.steps=10", "train.lr=2e-3", "train.eval_sequences=7"
    )
    nano.outcome(recipe, tmp_path / "one")
    for done in nano.train_on_two(recipe, tmp_path / "two"):
        assert done.code == 0, done.err
    assert_close_training(tmp_path / "two", tmp_path / "one", CLOSE)


@pytest.mark.numerics
def test_a_head_apart_from_the_embedding_is_a_tensor_of_its_own(nano: Nano, tmp_path: Path) -> None:
    """Tied ones are the default, in the tests above."""
    nano = nano.in_double()
    recipe = nano.recipe(tmp_path, "model.tie_embeddings=false", "train.steps=12", "train.lr=2e-3")
    nano.outcome(recipe, tmp_path / "one")
    run = tmp_path / "two"
    nano.train_on_two(recipe, run, faults=(Fault("signalled_at", update=5), None))
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert_close_training(run, tmp_path / "one", CLOSE)
    assert "model.head.weight" in weights(run)
    assert_close_tensors(run, tmp_path / "one")


def assert_close_tensors(run: Path, reference: Path) -> None:
    found, expected = weights(run), weights(reference)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.startswith("rng."):
            torch.testing.assert_close(
                found[name], tensor, rtol=CLOSE, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.slow
def test_through_torchrun(nano: Nano, tmp_path: Path) -> None:
    """`--nproc 2` stopped by Ctrl-C, then resumed by a torchrun from outside: every line once, and the first
    loss is that of one process."""
    recipe = nano.recipe(tmp_path, "train.lr=2e-3", *ENDLESS)
    run = tmp_path / "run"
    arguments = ("-m", "redline", "train", recipe, "--run", run, "--json")
    stopped_at = stopped(
        real(nano, *arguments, "--nproc", "2"), run,
        # as a terminal does, to every process of the group
        lambda command: os.killpg(command.pid, signal.SIGINT)
    )  # fmt: skip

    def stop_a_worker(command: subprocess.Popen[str]) -> None:
        below = psutil.Process(command.pid).children(recursive=True)
        next(child for child in below if "redline" in child.cmdline()).terminate()

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "--")
    stopped(real(nano, *torchrun, sys.executable, *arguments), run, stop_a_worker)
    assert [event["step"] for event in events(run, "start", "resume")] == [0, stopped_at]
    nano.outcome(recipe, tmp_path / "one", fault=Fault("signalled_at", update=1))
    assert steps(run)[0]["loss"] == pytest.approx(steps(tmp_path / "one")[0]["loss"], rel=CLOSE_FP32)


def stopped(command: subprocess.Popen[str], run: Path, stop: Callable[[subprocess.Popen[str]], None]) -> int:
    """Stop the command when it has written a line; the step at which it said so."""
    before = lines_written(run)
    while command.poll() is None and lines_written(run) == before:
        time.sleep(0.01)
    if command.poll() is None:
        stop(command)
    out, err = command.communicate(timeout=HUNG_S)
    assert command.returncode == 0, err
    assert "Traceback" not in err
    said = json.loads(out)
    assert said["why"] == "stopped by signal"
    assert said["step"] == len(steps(run)) > before
    return said["step"]


def test_a_worker_that_fails_fails_the_command(nano: Nano, tmp_path: Path) -> None:
    """With its own exit code and one line, whatever the number of processes."""
    recipe = nano.recipe(tmp_path, "data.source=nowhere")
    done = nano.train(recipe, tmp_path / "run", "--nproc", "2", fault=Fault("forked_members"))
    assert done.code == 3
    assert [line for line in done.err.splitlines() if "corpus" in line] == done.err.splitlines()[-1:]
    assert done.err.splitlines()[-1].startswith("redline: no such corpus: nowhere")


ENDLESS = ("train.steps=1000000", "train.eval_every=0", "train.checkpoint_every=0")


def test_a_process_that_is_killed_is_one_line(nano: Nano, tmp_path: Path) -> None:
    fault = Fault("forked_members", fault="signalled_at", update=3, number=int(signal.SIGKILL), only_rank=1)
    done = nano.train(nano.recipe(tmp_path, *ENDLESS), tmp_path / "run", "--nproc", "2", fault=fault)
    assert done.code == MachineError.exit_code
    assert "Traceback" not in done.err
    assert [line for line in done.err.splitlines() if line.startswith("redline: ")] == [
        "redline: process 1 was killed by SIGKILL (the system does that when memory runs out) and the others were"
        " stopped; run the same command again and it resumes from the last checkpoint"
    ]
    (died,) = events(tmp_path / "run", "process_died")
    assert died["error"].startswith("process 1 was killed by SIGKILL")


def test_ctrl_c_before_the_processes_can_save_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = object.__new__(Member)
    asked.stopped, asked.failure, asked.reader = False, [], SimpleNamespace(join=lambda: None)
    asked.process = SimpleNamespace(returncode=None, poll=lambda: asked.process.returncode)
    asked.process.terminate = lambda: setattr(asked.process, "returncode", -signal.SIGTERM)
    monkeypatch.setattr(time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        _watched([asked])
    assert asked.stopped, "the processes were asked, not this one interrupted"


def test_the_failure_of_a_later_process_ends_an_earlier_one_that_never_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With NCCL the first one waits in its collective and does not notice."""

    class Process:
        """As `Popen`: how it ended is known once somebody asked."""

        def __init__(self, code: int | None) -> None:
            self.code, self.returncode = code, None

        def poll(self) -> int | None:
            self.returncode = self.code
            return self.returncode

        def kill(self) -> None:
            self.code = -signal.SIGKILL

    def member(rank: int, code: int | None, said: list[str]) -> Member:
        made = object.__new__(Member)
        made.rank, made.stopped, made.failure, made.process = rank, False, said, Process(code)
        made.reader = SimpleNamespace(join=lambda: None)
        return made

    waits = iter(range(100))
    monkeypatch.setattr(time, "sleep", lambda seconds: next(waits))
    monkeypatch.setattr("redline.launch.processes.PATIENCE_S", 0.0)
    with pytest.raises(RedlineError, match="no such corpus"):
        _watched([member(0, None, []), member(1, 3, ["redline: no such corpus: nowhere\n"])])


def test_a_launcher_that_is_killed_takes_its_processes_with_it(nano: Nano, tmp_path: Path) -> None:
    recipe, run = nano.recipe(tmp_path, *ENDLESS), tmp_path / "run"
    command = nano.start(recipe, run, "--nproc", "2", fault=Fault("forked_members"))
    while command.alive() and lines_written(run) == 0:
        time.sleep(0.01)
    assert command.alive(), command.wait().err
    processes = psutil.Process(command.pid).children()
    assert len(processes) == 2
    command.kill()
    for process in processes:
        wait_until_gone(process.pid)
