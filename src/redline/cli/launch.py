"""Start one or more runs of a recipe, here or on a cluster. If a run is preempted or reaches its time limit, it saves a
checkpoint, goes back into the queue and resumes.

redline launch nano --set train.lr=1e-3,3e-3                     two runs here, one after the other, and a page that
                                                                 compares them
redline launch gpt2-124m --on slurm --set train.seed=1,2,3       submit an array of three seeds, on 8 GPUs each
redline launch gpt2-124m --on slurm --nodes 2 --dry-run          print the script for two nodes of 8 GPUs
redline launch gpt2-124m --on ray                                leave it with a Ray cluster (RAY_ADDRESS)

Values separated by commas give one run each (a list in brackets is one value); several such options give every combination.
docs/many-machines.md has the details.
"""

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from redline.cli.options import answer, run_of, status, verb_of
from redline.config.load import load_recipe
from redline.errors import ConfigError
from redline.launch.experiments import Job
from redline.report.grid import Output
from redline.report.page import write_page
from redline.report.terminal import print_report
from redline.report.view import views

ARGUMENTS = """
RECIPE                     a shipped recipe (see `redline recipes`) or a .toml file
--on {local,slurm,ray}     where to run (default local)
--set TABLE.KEY=VALUE...   override a value; values separated by commas give one run each: train.lr=1e-3,3e-3
--run DIR                  the run folder; for several runs, how their names begin (default: runs/RECIPE)
--nodes N                  nodes per run, which share its folder (default 1)
--gpus N                   GPUs per node, one process each; 0: CPUs (default: 8 on a cluster, 1 process here)
--cpus N                   CPU cores per node, on a cluster (default 48)
--memory SIZE              memory per node, on a cluster (default 256G)
--time LIMIT               time limit on a cluster: minutes, HH:MM:SS or D-HH:MM (default 1-00, a day)
--dry-run                  print what would be started, and start nothing
@JSON
"""
LIMIT = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}"
FORMS = {"memory": (r"[1-9]\d*[KMGT]?", "256G"), "time": (LIMIT, "24:00:00 or 1-00")}


def run(options: argparse.Namespace) -> int:
    place, job = import_module(f"redline.launch.{options.on}"), job_of(options)
    if options.dry_run:
        text = place.script(job)
        answer(options, {"script": text}, lambda: print(text, end=""))
        return 0
    done = place.submit(job)
    failed = next((entry["exit_code"] for entry in done if entry.get("exit_code")), 0)
    if options.on == "local" and len(done) > 1 and not failed:
        runs = views([Path(entry["run"]) for entry in done])
        done.append({"report": job.report[-1]})
        write_page(runs, Path(job.report[-1]))
        if not options.json:
            print_report(runs, Output())
    answer(options, done, lambda: _told(done))
    return failed


def job_of(options: argparse.Namespace) -> Job:
    """The job that the options ask for; what is wrong with it is refused before anything starts."""
    for name, (form, example) in FORMS.items():
        if not re.fullmatch(form, value := getattr(options, name)):
            raise ConfigError(f"--{name} must look like {example}, got {value!r}")
    recipe = load_recipe(options.recipe)
    workload = recipe.workload
    gpus = options.gpus if options.gpus is not None else (8 if options.on != "local" else 1)
    if options.nodes > 1 and (options.on != "slurm" or workload == "rft"):
        where = f"--on {options.on}" if options.on != "slurm" else "rejection sampling"
        raise ConfigError(f"--nodes {options.nodes}: {where} takes one node; leave it out")
    if options.run is not None and not options.run.name:
        raise ConfigError(f"--run begins the names of runs, which {str(options.run)!r} cannot: name a folder")
    given = {name: getattr(options, name) for name in ("recipe", "nodes", "cpus", "memory")}
    gpus = min(gpus, 1) if workload == "rft" else gpus
    run, sets = run_of(options, recipe), tuple(options.set)
    job = Job(verb=verb_of(workload), overrides=sets, run=run, gpus=gpus, time_limit=options.time, **given)
    for experiment in job.experiments:
        load_recipe(options.recipe, experiment.overrides)
    return job


def _told(done: list[dict[str, Any]]) -> None:
    for entry in done:
        if entry.get("error"):
            status(f"{entry['run']}: {entry['error']}")
        elif "job" in entry or "report" in entry:
            what = f"run {entry['run']}" if "run" in entry else f"page {entry['report']}"
            status(f"job {entry['job']}: {what}" if "job" in entry else what)
