"""Experiments as one SLURM job: the script, and its submission. No torch.

One array task per run. SLURM signals the batch shell before the time limit (and on preemption, where the cluster is set to
`send_user_signal`); the shell passes it to the training, which saves a checkpoint and leaves, and the job goes back into
the queue. SIGTERM to the training alone, the notice of other preemptions, ends the same way; `scancel` does not requeue.
Started again, the run resumes. Partition and account come from SBATCH_PARTITION and SBATCH_ACCOUNT, which sbatch reads.
"""

import re
import shlex
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from redline.errors import ConfigError, MachineError
from redline.launch.experiments import Job, command_line
from redline.record.files import storage_errors, write_atomic
from redline.train.stop import STOPPED

LEAD_S = 300
"""How long before the limit the signal comes: time to finish an update and write a checkpoint."""


def script(job: Job) -> str:
    """The batch script."""
    if not re.fullmatch(r"[\w./+=-]+", str(job.run)):
        raise ConfigError(f"a SLURM script takes no blanks or quotes in --run, got {str(job.run)!r}")
    cases = "\n".join(
        f"{number}) run={shlex.quote(str(experiment.run))} command=({command_line(experiment.arguments)}) ;;"
        for number, experiment in enumerate(job.experiments)
    )
    directives = "\n".join(f"#SBATCH --{name}" for name in _directives(job))
    text = (files("redline") / "launch/slurm.sh.jinja").read_text(encoding="utf-8")
    template = Template(text, keep_trailing_newline=True, undefined=StrictUndefined)
    about = {"path": _path(job), "nodes": job.nodes, "stopped": STOPPED}
    return template.render(directives=directives, cases=cases, **about)


def _directives(job: Job) -> list[str]:
    count = len(job.experiments)
    return [
        f"job-name={job.run.name}",
        f"nodes={job.nodes}",
        "ntasks-per-node=1",
        *([f"gpus-per-node={job.gpus}"] if job.gpus else []),
        f"cpus-per-task={job.cpus}",
        f"mem={job.memory}",
        f"time={job.time_limit}",
        f"signal=B:USR1@{LEAD_S}",
        "requeue",
        "open-mode=append",
        f"output={job.run}-{'%A-%a' if count > 1 else '%j'}.log",
        *([f"array=0-{count - 1}"] if count > 1 else []),
    ]


def _path(job: Job) -> Path:
    return job.run.with_name(f"{job.run.name}.sbatch")


def submit(job: Job) -> list[dict[str, Any]]:
    """Write the script and hand it to sbatch; several runs are compared by a job that waits for them."""
    path, text = _path(job), script(job)
    with storage_errors("the SLURM script", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    number = _sbatch(str(path))
    done: list[dict[str, Any]] = [
        {"job": number, "script": str(path), "run": str(experiment.run)} for experiment in job.experiments
    ]
    if len(done) > 1:
        after = f"--dependency=afterany:{number}"
        log = f"--output={job.run}-report.log"
        name = f"--job-name={job.run.name}-report"
        wrapped = f"--wrap={command_line(job.report)}"
        report = _sbatch("--time=30", "--cpus-per-task=1", log, name, after, wrapped)
        done.append({"job": report, "report": job.report[-1]})
    return done


def _sbatch(*arguments: str) -> str:
    if shutil.which("sbatch") is None:
        raise MachineError("there is no sbatch here: submit on the cluster, or see the script with --dry-run")
    done = subprocess.run(["sbatch", "--parsable", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"sbatch refused the job: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]
