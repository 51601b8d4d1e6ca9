"""Two processes train what one trains: the same data in the same order, the same losses but for the order of
additions.

Most runs here are two forks with torchrun's variables set, because torchrun imports torch three times; two
tests go through torchrun itself, once started by `--nproc` and once from outside.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pipeline import Nano, assert_close_training, assert_same_training, events, lines_written, steps, weights
from warm import Fault

STEPS = 20
CLOSE = 1e-5
"""Relative; the sums over two halves of a batch differ in the last bits, and twenty updates do not let that
grow."""


@pytest.fixture(scope="module", params=["adamw", "muon"])
def single(
    request: pytest.FixtureRequest, nano: Nano, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A recipe, and its run on one process."""
    folder = tmp_path_factory.mktemp(request.param)
    # Muon rounds its updates to bf16, so a difference in the last bit can grow to one in the eighth: a
    # smaller rate keeps it small.
    recipe = nano.recipe(
        folder,
        f"train.steps={STEPS}",
        "train.lr=2e-3",
        "train.muon_lr=2e-4",
        f"train.optimizer={request.param}",
    )
    nano.outcome(recipe, folder / "run")
    return recipe, folder / "run"


def test_two_processes_train_what_one_trains(nano: Nano, single: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, reference = single
    run = tmp_path / "run"
    first, second = nano.train_on_two(recipe, run)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["why"] == "finished"
    assert second.out == ""
    assert_close_training(run, reference, CLOSE)
    assert_close_tensors(run, reference)


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
        ("plan.compile=default",),
    ],
    ids=["bf16", "bf16-gpt2", "compiled"],
)
def test_two_processes_compute_in_bf16_and_compiled_as_one_does(
    nano: Nano, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """The first update sees the same weights, so its loss tells whether both round at the same places; later
    ones drift apart slowly."""
    recipe = nano.recipe(
        tmp_path, "train.steps=3", "train.warmup_steps=0", "train.eval_every=0", "train.lr=1e-3", *overrides
    )
    alone, run = tmp_path / "alone", tmp_path / "run"
    nano.outcome(recipe, alone)
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert steps(run)[0]["loss"] == pytest.approx(steps(alone)[0]["loss"], rel=1e-6)
    assert_close_training(run, alone, 1e-3)


def test_a_run_moves_between_one_and_two_processes(
    nano: Nano, single: tuple[Path, Path], tmp_path: Path
) -> None:
    """A signal to one of two stops both; one process goes on; two end what it began."""
    recipe, reference = single
    run = tmp_path / "run"
    for done in nano.train_on_two(recipe, run, faults=(None, Fault("terminated_at", update=6))):
        assert done.code == 0, done.err
    assert len(steps(run)) == 6
    assert nano.outcome(recipe, run, fault=Fault("terminated_at", update=7))["step"] == 13
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert [(event["step"], event["world_size"]) for event in events(run, "start", "resume")] == [
        (0, 2),
        (6, 1),
        (13, 2),
    ]
    assert_close_training(run, reference, CLOSE)
    assert_close_tensors(run, reference)


def test_resumed_on_two_is_the_same_to_the_last_bit_as_unbroken_on_two(
    nano: Nano, single: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe, _ = single
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    nano.train_on_two(recipe, unbroken)
    nano.train_on_two(recipe, run, faults=(Fault("terminated_at", update=11), None))
    nano.train_on_two(recipe, run)
    assert [event["step"] for event in events(run, "start", "resume")] == [0, 11]
    assert_same_training(run, unbroken)


def test_killed_while_two_processes_save(nano: Nano, single: tuple[Path, Path], tmp_path: Path) -> None:
    """The first of two dies in the middle of a commit; the other cannot go on without it; both go on together
    afterwards."""
    recipe, _ = single
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    nano.train_on_two(recipe, unbroken)
    first, second = nano.train_on_two(recipe, run, faults=(Fault("kill_at", call=23), None))
    assert first.code == -signal.SIGKILL
    assert second.code not in (0, -signal.SIGKILL)
    assert 0 < len(steps(run)) < STEPS
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert_same_training(run, unbroken)


def test_streamed_data_is_the_same_on_two_processes(nano: Nano, tmp_path: Path) -> None:
    recipe = nano.recipe(
        tmp_path, "data.stream=true", "train.steps=10", "train.lr=2e-3", "train.eval_sequences=7"
    )
    nano.outcome(recipe, tmp_path / "one")
    for done in nano.train_on_two(recipe, tmp_path / "two"):
        assert done.code == 0, done.err
    assert_close_training(tmp_path / "two", tmp_path / "one", CLOSE)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_tied_embeddings_stay_tied(nano: Nano, tmp_path: Path, tied: str) -> None:
    """Tied under FSDP and over a resume: one tensor in the checkpoint, and a training that one process
    repeats."""
    recipe = nano.recipe(tmp_path, f"model.tie_embeddings={tied}", "train.steps=12", "train.lr=2e-3")
    nano.outcome(recipe, tmp_path / "one")
    run = tmp_path / "two"
    nano.train_on_two(recipe, run, faults=(Fault("terminated_at", update=5), None))
    for done in nano.train_on_two(recipe, run):
        assert done.code == 0, done.err
    assert_close_training(run, tmp_path / "one", CLOSE)
    assert ("model.head.weight" in weights(run)) == (tied == "false")
    assert_close_tensors(run, tmp_path / "one")


def assert_close_tensors(run: Path, reference: Path) -> None:
    found, expected = weights(run), weights(reference)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.startswith("rng."):
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def real(nano: Nano, *command: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, **nano.warm.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_through_torchrun(nano: Nano, tmp_path: Path) -> None:
    """`--nproc 2` stopped by Ctrl-C, then an outside torchrun goes on: one process's losses, every line
    once."""
    recipe = nano.recipe(
        tmp_path, "train.steps=150", "train.lr=2e-3", "train.eval_every=0", "train.checkpoint_every=0"
    )
    run = tmp_path / "run"
    arguments = ("-m", "redline.cli.main", "train", recipe, "--run", run, "--json")
    command = real(nano, *arguments, "--nproc", "2")
    while command.poll() is None and lines_written(run) == 0:
        time.sleep(0.01)
    if command.poll() is None:
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does, to every process of the group
    out, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert "Traceback" not in err
    said = json.loads(out)
    assert said["why"] == "stopped by signal"
    stopped_at = said["step"]
    assert 0 < stopped_at == len(steps(run)) < 150

    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
        "--",
        sys.executable,
    )
    command = real(nano, *torchrun, *arguments)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert json.loads(out)["why"] == "finished"
    assert [event["step"] for event in events(run, "start", "resume")] == [0, stopped_at]
    nano.outcome(recipe, tmp_path / "one")
    assert len(steps(run)) == 150
    found, expected = ([line["loss"] for line in steps(path)[:STEPS]] for path in (run, tmp_path / "one"))
    assert found == pytest.approx(expected, rel=CLOSE)


@pytest.mark.slow
def test_a_worker_that_fails_fails_the_command(nano: Nano, tmp_path: Path) -> None:
    """With its own exit code, and its own line below all that torchrun prints."""
    recipe = nano.recipe(tmp_path, "data.source=nowhere")
    command = real(nano, "-m", "redline.cli.main", "train", recipe, "--run", tmp_path / "run", "--nproc", "2")
    _, err = command.communicate(timeout=60)
    assert command.returncode == 3
    assert err.splitlines()[-1].startswith("redline: no such corpus: nowhere")
