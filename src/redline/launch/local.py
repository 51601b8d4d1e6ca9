"""Experiments on this machine, one after another: each may use all of it. No torch."""

from typing import Any

from redline.errors import RedlineError
from redline.launch.experiments import Job, command_line
from redline.launch.processes import run_alone
from redline.record.run import read_lines
from redline.train.stop import STOPPED


def script(job: Job) -> str:
    commands = [command_line(experiment.arguments) for experiment in job.experiments]
    return "\n".join([*commands, *([command_line(job.report)] if len(commands) > 1 else [])]) + "\n"


def submit(job: Job) -> list[dict[str, Any]]:
    """Run all of them. One that fails does not keep the others from running; a request to stop does."""
    done: list[dict[str, Any]] = []
    for experiment in job.experiments:
        error = None
        try:
            code = run_alone(experiment.arguments)
        except RedlineError as raised:
            error, code = str(raised), raised.exit_code
        ends = [line for line in read_lines(experiment.run / "events.jsonl") if line["event"] == "end"]
        why = ends[-1]["why"] if code == 0 and ends else None
        done.append({"run": str(experiment.run), "exit_code": code, "why": why, "error": error})
        if why == STOPPED:
            break
    return done
