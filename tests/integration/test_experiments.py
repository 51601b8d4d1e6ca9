"""`redline launch` starts runs: here one after another, and through SLURM's commands, which stand-ins play."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pipeline import Nano, events, lines_written, steps
from warm import LIMIT_S, Fault

from redline.cli.main import main
from redline.errors import StorageError
from redline.launch.experiments import PROGRAM, Job
from redline.launch.slurm import script


def test_two_experiments_here_and_a_page_that_compares_them(nano: Nano, tmp_path: Path) -> None:
    recipe = nano.recipe(tmp_path, "train.steps=2")
    options = ("launch", recipe, "--run", tmp_path / "grid", "--set", "train.lr=1e-3,2e-3")
    done = nano.warm.start(*options, "--json", fault=Fault("forked_members")).wait()
    assert done.code == 0, done.err
    first, second, page = json.loads(done.out)
    assert [first["run"], second["run"]] == [str(tmp_path / "grid-lr-1e-3"), str(tmp_path / "grid-lr-2e-3")]
    assert [first["why"], second["why"]] == ["finished", "finished"]
    assert [steps(Path(run["run"]))[-1]["lr"] for run in (first, second)] == [1e-3, 2e-3]
    shown = Path(page["report"]).read_text()
    assert "grid-lr-1e-3" in shown
    assert "grid-lr-2e-3" in shown


def test_an_experiment_that_fails_does_not_keep_the_next_from_running(nano: Nano, tmp_path: Path) -> None:
    recipe = nano.recipe(tmp_path, "train.steps=2")
    (there := tmp_path / "grid-steps-2").mkdir()
    (there / "other.txt").write_text("not a run")
    options = ("launch", recipe, "--run", tmp_path / "grid", "--set", "train.steps=2,3")
    done = nano.warm.start(*options, "--json", fault=Fault("forked_members")).wait()
    assert done.code == StorageError.exit_code
    first, second = json.loads(done.out)
    assert "holds files that are not a run's" in first["error"]
    assert second["why"] == "finished"
    assert len(steps(tmp_path / "grid-steps-3")) == 3


# ---- SLURM, played by stand-ins ----

SBATCH = 'echo "$@" >> {there}/submitted\necho 4242\n'
SCONTROL = """if [[ $1 == show ]]; then printf '127.0.0.1\\n%.0s' $(seq "$SLURM_JOB_NUM_NODES"); else echo "$@" >> {there}/requeued; fi
"""
SRUN = """pids=() asked=
trap 'asked=1' USR1
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do "$@" & pids+=($!); done
trap 'kill -USR1 "${{pids[@]}}"' USR1
[[ $asked ]] && kill -USR1 "${{pids[@]}}"
code=0
for pid in "${{pids[@]}}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
done
exit $code
"""
"""Signals to it go to the tasks, as to the real one."""
TRAINING = """run=$4
trap 'echo "{{\\"event\\": \\"end\\", \\"why\\": \\"stopped by signal\\"}}" >> "$run/events.jsonl"; kill $!; exit 0' USR1
echo "$@" >> {there}/started
[[ -e {there}/end ]] && exit "$(cat {there}/end)"
sleep 600 &
wait
"""
"""Instead of a training: it ends when it is asked to, or with the code that lies there."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (programs := tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("srun", SRUN), ("training", TRAINING)):
        (path := programs / name).write_text("#!/bin/bash\n" + text.format(there=tmp_path))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    return tmp_path


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def batch(path: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", path], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def waited(condition: Callable[[], Any]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("what", "requeued", "code"),
    [("limit", True, 0), ("preempted", True, 0), ("cancelled", False, 0), ("failed", False, 3)],
)
def test_when_a_job_goes_back_into_the_queue(slurm: Path, what: str, requeued: bool, code: int) -> None:
    """Before the time limit and on preemption, but not if it was cancelled or has failed. The training is a stand-in."""
    (run := slurm / "run").mkdir()
    job = Job(
        recipe="nano", verb=("train",), overrides=(), run=run, nodes=1, gpus=1, cpus=1, memory="1G", time_limit="1"
    )  # fmt: skip
    (path := slurm / "job").write_text(
        script(job).replace(shlex.join(PROGRAM), str(slurm / "bin" / "training"))
    )
    if what == "failed":
        (slurm / "end").write_text("3")
    batched = batch(path)
    waited(lambda: lines(slurm / "started"))
    if what == "preempted":  # the steps alone get the signal
        below = psutil.Process(batched.pid).children(recursive=True)
        next(
            process for process in below if any("training" in word for word in process.cmdline()[:2])
        ).send_signal(signal.SIGUSR1)
    elif what != "failed":
        batched.send_signal({"limit": signal.SIGUSR1, "cancelled": signal.SIGTERM}[what])
    out, _ = batched.communicate(timeout=LIMIT_S)
    assert lines(slurm / "requeued") == (["requeue 4242"] if requeued else [])
    assert what == "cancelled" or batched.returncode == code, out


def test_an_array_is_submitted_with_a_job_that_compares_its_runs(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = "--on slurm --set train.seed=1,2 --json"
    assert main(["launch", "nano", "--run", str(slurm / "grid"), *how.split()]) == 0
    first, second, page = json.loads(capsys.readouterr().out)
    assert (first["job"], first["run"], second["run"]) == (
        "4242",
        f"{slurm}/grid-seed-1",
        f"{slurm}/grid-seed-2",
    )
    assert first["script"] == f"{slurm}/grid.sbatch"
    array, report = lines(slurm / "submitted")
    assert array == f"--parsable {slurm}/grid.sbatch"
    assert "--dependency=afterany:4242" in report
    assert f"report {slurm}/grid-seed-1 {slurm}/grid-seed-2 --out {page['report']}" in report


@pytest.mark.slow
def test_a_job_on_two_nodes_is_requeued_and_resumes(nano: Nano, slurm: Path) -> None:
    """The submitted script, twice until the signal before the time limit: every update is in the record once."""
    recipe = nano.recipe(slurm, "train.steps=1000000", "train.eval_every=0", "train.checkpoint_every=0")
    run = slurm / "run"
    options = ["launch", str(recipe), "--on", "slurm", "--nodes", "2", "--gpus", "0", "--run", str(run)]
    assert main(options) == 0
    with socket.socket() as held:  # the script takes the port from the number of the job
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        number = next(number for number in range(12_000) if _bound(held, 20_000 + number))
        place = {"SLURM_JOB_ID": str(number), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "two"}
        for attempt in (1, 2):
            before = lines_written(run)
            batched = batch(slurm / "run.sbatch", **place, **nano.warm.environment)
            waited(
                lambda before=before, batched=batched: (
                    lines_written(run) > before or batched.poll() is not None
                )
            )
            batched.send_signal(signal.SIGUSR1)
            batched.communicate(timeout=LIMIT_S)
            assert lines(slurm / "requeued") == [f"requeue {number}"] * attempt
    first, second = events(run, "start", "resume")
    stops = events(run, "end")
    assert [stop["why"] for stop in stops] == ["stopped by signal"] * 2
    assert second["step"] == stops[0]["step"] > 0
    assert (first["world_size"], second["world_size"], second["metrics_dropped"]) == (2, 2, 0)
    assert len(steps(run)) == stops[1]["step"] > stops[0]["step"]


def _bound(held: socket.socket, port: int) -> bool:
    try:
        held.bind(("", port))
    except OSError:
        return False
    return True
