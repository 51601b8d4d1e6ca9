"""Experiments on a Ray cluster: each waits there until a machine has its share free, and survives the loss of one. No
torch.

A run is the process of a detached actor. Ray starts it with a copy of the working directory and, if that holds a
constraints.txt, with those packages; if its machine is lost, Ray starts it again elsewhere, and it resumes from its
checkpoint. So the run folder has to be on storage that all machines share; its path is made absolute. At the time
limit the run saves a checkpoint and ends; launched again, it resumes.

Ray's own jobs would need ray[default] on both sides, with sixteen packages more. A detached actor needs only Ray's
core, and is tested on a real one. RAY_ADDRESS names the cluster; without it, the one on this machine.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from redline.engine.calls import shown
from redline.errors import ConfigError, MachineError, need
from redline.launch.experiments import Job
from redline.launch.processes import LAUNCHER

NAMESPACE = "redline"


def script(job: Job) -> str:
    """What would be submitted, as JSON."""
    submitted = {"namespace": NAMESPACE, "runtime_env": _environment(), "actors": _actors(job)}
    return json.dumps(submitted, indent=2) + "\n"


def submit(job: Job) -> list[dict[str, Any]]:
    """Leave the runs with the cluster; they outlive this process."""
    ray = need("ray", extra="ray")
    from redline.engine.ray import connect

    actors, done = _actors(job), list[dict[str, Any]]()
    connect(os.environ.get("RAY_ADDRESS") or "auto", namespace=NAMESPACE, runtime_env=_environment())
    try:
        # An actor whose environment cannot be made dies silently, so the first one is made while we listen.
        ray.get(ray.remote(num_cpus=0)(lambda: None).remote())
        for actor in actors:
            options = {**actor["options"], "lifetime": "detached", "max_restarts": -1}
            try:
                keeper = ray.remote(_keeper()).options(**options)
                keeper.remote(actor["redline"], actor["log"], actor["limit_s"])
            except ValueError as error:  # the name is taken
                raise ConfigError(f"{options['name']} is still running on the cluster: {error}") from error
            done.append({"job": options["name"], "run": actor["run"], "log": actor["log"]})
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise MachineError(f"Ray could not make the run's environment: {shown(str(error))}") from error
    finally:
        ray.shutdown()
    return done


def _environment() -> dict[str, Any]:
    pinned = {"pip": "constraints.txt"} if Path("constraints.txt").is_file() else {}
    return {"working_dir": str(Path.cwd()), "excludes": [".git/", "runs/"], **pinned}


def _actors(job: Job) -> list[dict[str, Any]]:
    share = {"num_cpus": job.cpus, "num_gpus": job.gpus, "memory": _bytes(job.memory)}
    return [
        {
            "options": {"name": run.name, **share},
            "redline": [str(run) if word == str(experiment.run) else word for word in experiment.arguments],
            "run": str(run),
            "log": f"{run}.log",
            "limit_s": _seconds(job.time_limit),
        }
        for experiment in job.experiments
        if (run := experiment.run.absolute())
    ]


def _bytes(size: str) -> int:
    """A size as SLURM reads it: megabytes without a letter."""
    number, unit = (size[:-1], size[-1]) if size[-1] in "KMGT" else (size, "M")
    return int(number) * 1024 ** ("KMGT".index(unit) + 1)


def _seconds(limit: str) -> int:
    """A time as SLURM reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86_400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _keeper() -> type:
    """The actor's class. Made in a function, so that Ray sends it whole: its process may not find Redline before the
    run's own does, in the copy of the working directory."""

    class Keeper:
        def __init__(self, arguments: list[str], log: str, limit_s: int) -> None:
            threading.Thread(target=self.keep, args=(arguments, log, limit_s)).start()

        def keep(self, arguments: list[str], log: str, limit_s: int) -> None:
            import ray

            source = Path("src").resolve()
            path = [str(source)] * (source / "redline").is_dir() + [os.environ.get("PYTHONPATH", "")]
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            # The run ends with this process: Ray starts the actor again, and there must not be two of them.
            own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), LAUNCHER: str(os.getpid())}
            with open(log, "ab") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "redline", *arguments],
                    env={**os.environ, **own},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
                try:
                    process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    process.wait()
            ray.kill(ray.get_runtime_context().current_actor)  # frees its share; Ray does not start it again

    return Keeper
