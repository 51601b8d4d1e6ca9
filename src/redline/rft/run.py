"""The whole loop: test, sample, train, test again. Each stage resumes where it was stopped; a finished one is not
repeated.

    report = run_all(session)
    report["before"]["accuracy"], report["after"]["accuracy"], report["stages_s"]
    reports = run_rounds(recipe, plan, Path("runs/units"), outside, 4)     # a round samples from the one before

`generate_dataset` is the sampling stage alone, as a Python function that writes rft.json.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redline.config.load import load_recipe
from redline.config.recipe import Recipe, later_round
from redline.engine.server import ServerEngine
from redline.errors import ConfigError
from redline.finetune import check_result
from redline.machine.facts import read_facts
from redline.machine.store import cached
from redline.plan.bounds import Outside
from redline.plan.hardware import hardware_here
from redline.plan.plan import Plan
from redline.plan.planner import make_plan
from redline.record.observe import Observer
from redline.record.read import total
from redline.record.run import read_lines
from redline.rft.sample import sample
from redline.rft.session import Session, open_session
from redline.rft.stats import export
from redline.rft.test import run_test
from redline.rft.train import train
from redline.train.restore import with_shape


def run_rounds(
    recipe: Recipe, plan: Plan, run: Path, outside: Outside, rounds: int, **how: Any
) -> list[dict[str, Any]]:
    """The loop several times, in RUN/round-1 and so on: each trains the base model on a better sampler's samples."""
    if rounds > 1 and (run / "samples.db").exists():
        raise ConfigError(f"{run} holds a run of one round: give another --run for {rounds} rounds")
    if recipe.sample.server is not None:  # check that it is there, before minutes of testing
        ServerEngine(recipe.sample.server, recipe.sample.server_model).close()
    reports: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        folder = run / f"round-{number}" if rounds > 1 else run
        own = recipe if number == 1 else later_round(recipe, str((run / f"round-{number - 1}").resolve()))
        with open_session(own, plan, folder, outside, **how) as session:
            reports.append(run_all(session, test_base=number == 1))
        if reports[-1]["why"] != "finished":
            break
    return reports


def run_all(session: Session, *, test_base: bool = True) -> dict[str, Any]:
    """Test, sample, train and test; returns what each stage gave, up to where the user stopped it."""
    report: dict[str, Any] = {"run": str(session.folder.path), "why": "finished"}
    if test_base:
        check_result(session.recipe)
        report["before"] = run_test(session, "base")
    drawn = sample(session)
    total_s = total(read_lines(session.folder.events_path), "sampling_end")
    report["sample"] = vars(drawn) | {"total_s": total_s}
    if drawn.why != "finished":
        return report | {"why": drawn.why}
    report["train"] = train(session, "samples")
    if report["train"]["why"] != "finished":
        return report | {"why": report["train"]["why"]}
    report["after"] = run_test(session, "samples")
    report["stages_s"] = {
        "open": round(session.opening_s, 3),
        **({"test before": report["before"]["elapsed_s"]} if test_base else {}),
        "sample": report["sample"]["total_s"],
        "train": report["train"]["elapsed_s"],
        "test after": report["after"]["elapsed_s"],
    }
    return report


def generate_dataset(
    output_json: str | Path,
    oversample: int = 30,
    temperature: float = 0.7,
    batch_size: int | None = None,
    *,
    recipe: str = "rft/units-smollm2",
    run: Path | None = None,
    overrides: tuple[str, ...] = (),
    observers: Sequence[Observer] = (),
) -> int:
    """Sample `oversample` answers to each question, keep the correct ones and write them as [question, answer,
    reasoning]; returns how many.

    `batch_size` limits the sequences generated at the same time, `run` is the folder of samples.db (default: beside
    the output, so that the same call resumes after a kill), and `overrides` are `table.key=value` of the recipe, such
    as model.init_from and task.data.
    """
    own = [f"sample.samples_per_question={oversample}", f"sample.temperature={temperature}", *overrides]
    chosen = with_shape(load_recipe(recipe, own))
    environment = dict(os.environ) | ({"MICRO_BATCH_SIZE": str(batch_size)} if batch_size is not None else {})
    folder = run if run is not None else Path(output_json).with_suffix(".run")
    facts, outside = read_facts(), Outside(environment=environment)
    plan = make_plan(chosen, hardware_here(facts, cached(facts)), outside=outside)
    with open_session(chosen, plan, folder, outside, observers=observers) as session:
        why = sample(session).why
    # sampling handled the Ctrl-C; some of the samples must not pass for all of them
    if why != "finished":
        raise KeyboardInterrupt(f"{why}; make the same call again and it resumes from {folder}")
    return export(folder, Path(output_json))
