"""`redline launch`: which runs a grid gives, and the SLURM script, which shellcheck reads."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.cli.main import main, parser
from redline.cli.train import nodes_of
from redline.errors import ConfigError, MachineError
from redline.launch import ray as ray_place
from redline.launch.experiments import Job
from redline.launch.processes import LAUNCHER
from redline.launch.slurm import script
from redline.train.stop import handled_by, stop_on_signal


def job(*overrides: str, **given: Any) -> Job:
    values = {"recipe": "nano", "verb": ("train",), "run": Path("runs/nano"), "nodes": 1, "gpus": 8}
    values |= {"cpus": 48, "memory": "256G", "time_limit": "1-00", "overrides": overrides}
    return Job(**{**values, **given})


def test_every_combination_of_the_values_is_a_run() -> None:
    found = job("train.lr=1e-3,3e-3", "train.steps=7", "train.seed=1,2").experiments
    assert [str(experiment.run) for experiment in found] == [
        "runs/nano-lr-1e-3-seed-1",
        "runs/nano-lr-1e-3-seed-2",
        "runs/nano-lr-3e-3-seed-1",
        "runs/nano-lr-3e-3-seed-2",
    ]
    assert found[1].overrides == ("train.lr=1e-3", "train.steps=7", "train.seed=2")
    assert found[1].arguments[-4:] == ("--run", "runs/nano-lr-1e-3-seed-2", "--nproc", "8")


@pytest.mark.parametrize(
    "override",
    ["lora.targets=['q','v']", 'data.source="a,b"', "rl.domains=[a, b]", "train.steps=7", "x={a=1,b=2}"],
)
def test_a_list_or_a_quoted_text_is_one_value(override: str) -> None:
    (only,) = job(override).experiments
    assert only.overrides == (override,)
    assert only.run == Path("runs/nano")


def test_lists_are_values_of_a_grid_too() -> None:
    found = job("lora.targets=['q'],['q','v']").experiments
    assert [experiment.overrides for experiment in found] == [
        ("lora.targets=['q']",),
        ("lora.targets=['q','v']",),
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.lr=1e-3,",), "empty value between commas"),
        (("train.lr=1e-3,1e-3",), "give each value once"),
        (("train.lr",), "table.key=value"),
    ],
)
def test_what_is_no_grid_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = job(*overrides).experiments


@pytest.mark.parametrize(
    "given",
    [
        job("train.lr=1e-3,3e-3", "data.source='a b \"c\" $(d)'"),
        job(nodes=4, run=Path("runs/a+b=c")),
        job(gpus=0, verb=("rl", "run")),
    ],
)
def test_shellcheck_finds_nothing_in_the_script(given: Job, tmp_path: Path) -> None:
    (path := tmp_path / "job.sbatch").write_text(script(given))
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_script_asks_for_what_the_options_say(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["launch", "nano", "--on", "slurm", "--set", "train.seed=1,2,3", "--dry-run"]
    assert main([*options, "--gpus", "4", "--time", "90", "--memory", "64G", "--cpus", "12"]) == 0
    asked = [
        line.removeprefix("#SBATCH --") for line in capsys.readouterr().out.splitlines() if "#SBATCH" in line
    ]
    assert {"gpus-per-node=4", "time=90", "mem=64G", "cpus-per-task=12", "array=0-2", "requeue"} <= set(asked)
    assert any(line.startswith("signal=B:USR1@") for line in asked)
    assert main([*options, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["script"]
    assert (
        "#SBATCH --gpus-per-node=8\n#SBATCH --cpus-per-task=48\n#SBATCH --mem=256G\n#SBATCH --time=1-00\n"
        in text
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("launch nano --dry-run --time soon", "--time must look like 24:00:00 or 1-00, got 'soon'"),
        ("launch nano --dry-run --memory lots", "--memory must look like 256G, got 'lots'"),
        ("launch nano --dry-run --nodes 2 --on local", "--nodes 2: --on local takes one node; leave it out"),
        ("launch nano --dry-run --gpus -1", "--gpus must be at least 0, got -1"),
        ("launch nano --dry-run --set train.lr=1e-3,high", "train: lr must be a number"),
        ("launch nano --dry-run --on slurm --run 'my runs/a'", "takes no blanks or quotes in --run"),
        ("train nano --nnodes 2", "--nnodes 2 needs --rdzv HOST:PORT, the same on each; it is missing"),
        ("train nano --nnodes 1:2 --rdzv node1", "HOST:PORT, the same on each; got 'node1'"),
        ("train nano --nnodes 2 --rdzv node1:65536", "HOST:PORT, the same on each; got"),
        ("train nano --nnodes 4:2 --rdzv node1:29400", "a number or MIN:MAX, like 2 or 1:4, got '4:2'"),
        ("launch nano --dry-run --run .", "--run begins the names of runs, which '.' cannot: name a folder"),
        ("train nano --rdzv node1:29400", "--rdzv node1:29400 is where several machines meet: add --nnodes"),
        ("train nano --plan auto --prefer memory", "--prefer memory has no effect with --plan auto: leave"),
        ("train nano --nnodes two", "--nnodes takes a number or MIN:MAX, like 2 or 1:4, got 'two'"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
    assert main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(("nodes", "found"), [("1", (1, 1)), ("1:1", (1, 1)), ("1:4", (1, 4))])
def test_a_script_for_any_number_of_machines_runs_on_one(nodes: str, found: tuple[int, int]) -> None:
    given = ["train", "nano", "--nnodes", nodes, "--rdzv", "node1:29400"]
    assert nodes_of(parser(only="train").parse_args(given)) == found


def test_without_slurm_one_line_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert (
        main(["launch", "nano", "--on", "slurm", "--run", str(tmp_path / "nano")]) == MachineError.exit_code
    )
    assert capsys.readouterr().err.startswith("redline: there is no sbatch here: ")


def test_a_dry_run_on_ray_prints_what_would_be_submitted(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("constraints.txt").write_text("numpy==2.0.0\n")
    assert (
        main(["launch", "nano", "--on", "ray", "--set", "train.seed=1,2", "--time", "1-02", "--dry-run"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["runtime_env"]["working_dir"] == str(tmp_path)
    assert told["runtime_env"]["pip"] == "constraints.txt"
    first, second = told["actors"]
    assert first["options"] == {"name": "nano-seed-1", "num_cpus": 48, "num_gpus": 8, "memory": 256 * 2**30}
    assert second["redline"][-4:] == ["--run", f"{tmp_path}/runs/nano-seed-2", "--nproc", "8"]
    assert second["limit_s"] == 26 * 3600


def test_a_run_on_ray_ends_with_its_actor(tmp_path, monkeypatch) -> None:
    """Ray starts an actor that was killed again: two processes would train in one folder."""
    seen: list[dict[str, str]] = []

    def started(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        seen.append(env)
        return SimpleNamespace(wait=lambda limit_s: 0)

    ended: list[str] = []
    context = SimpleNamespace(current_actor="this one")
    fake = SimpleNamespace(kill=ended.append, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_place.subprocess, "Popen", started)
    keeper = ray_place._keeper()
    keeper.keep(object.__new__(keeper), ["train", "nano"], str(tmp_path / "nano.log"), 60)
    assert seen[0][LAUNCHER] == str(os.getpid())
    assert ended == ["this one"]


def test_limits_and_sizes_are_read_as_slurm_reads_them() -> None:
    limits = {"90": 5400, "1:30": 90, "1:00:01": 3601, "2-00": 172_800, "1-01:30": 91_800, "0-00:00:07": 7}
    assert {text: ray_place._seconds(text) for text in limits} == limits
    assert [ray_place._bytes(text) for text in ("3", "3K", "2T")] == [3 * 2**20, 3 * 2**10, 2**41]


def test_signals_are_handled_as_before_once_a_block_has_ended() -> None:
    """Nested, where the inner one fails; in another thread, which may not handle any, nothing changes."""
    heard: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    with handled_by(lambda *_: heard.append("outer"), signal.SIGUSR1):
        with contextlib.suppress(OSError), handled_by(lambda *_: heard.append("inner"), signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
            raise OSError
        with ThreadPoolExecutor() as pool:
            pool.submit(lambda: handled_by(print, signal.SIGUSR1).__enter__()).result()
        signal.raise_signal(signal.SIGUSR1)
    assert heard == ["inner", "outer"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_terminal_is_told_at_the_first_interrupt_that_the_run_will_stop() -> None:
    asked: list[str] = []
    (ours, theirs), before = os.openpty(), os.dup(2)
    os.dup2(theirs, 2)
    try:
        with stop_on_signal(lambda: asked.append("stop")):
            signal.raise_signal(signal.SIGINT)
            said = os.read(ours, 200)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        os.dup2(before, 2)
        for number in (ours, theirs, before):
            os.close(number)
    assert asked == ["stop"]
    assert b"press Ctrl-C again to stop at once" in said
