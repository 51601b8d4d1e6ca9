"""RL on the tiny random model of RFT's tests: a task that random weights solve at times, and the loop in this
process."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rft_model import TASK, planned

from redline.engine.ray import OnRay
from redline.record.run import read_lines
from redline.rl.domains import Domains
from redline.rl.run import reinforce
from redline.rl.samples import Key
from redline.train.loop import Outcome
from redline.train.process import Process

RECIPE = """
workload = "rl"
[model]
init_from = "{model}"
[prompt]
mode = "text"
[rl]
domains = ["{task}:make"]
group_size = 8
max_prompt_tokens = 40
max_new_tokens = 2
overlong = "none"
[train]
seed = 3
steps = 6
batch_size = 4
lr = 1e-2
checkpoint_every = 2
[test]
rows = 5
"""


def letters_rl(folder: Path, model: Path) -> Path:
    """Write the task and a recipe for it."""
    task, recipe = folder / "letters.py", folder / "letters-rl.toml"
    task.write_text(TASK)
    recipe.write_text(RECIPE.format(task=task, model=model))
    return recipe


def run_rl(
    recipe: Path,
    run: Path,
    overrides: Sequence[str] = (),
    observers: Sequence[Any] = (),
    on: OnRay | None = None,
) -> Outcome:
    shaped, plan, _ = planned(recipe, overrides)
    process = Process(0, 1, torch.device("cpu"))
    return reinforce(shaped, plan, run, process, observers=lambda step: observers, on=on)


def kill_after(monkeypatch: pytest.MonkeyPatch, drawn: int) -> list[tuple[int, Key]]:
    """Break a run off once, after so many groups were drawn; returns the groups as they are drawn, (step, key)."""
    found: list[tuple[int, Key]] = []
    answers, killed = Domains.answers, threading.Event()

    def counting(self: Domains, run: Any, asked: Any, **how: Any) -> Any:
        for key, samples in answers(self, run, asked, **how):
            if "seed" in how:  # not a validation
                if len(found) == drawn and not killed.is_set():
                    killed.set()
                    raise KeyboardInterrupt
                found.append((how["seed"].args[0], key))
            yield key, samples

    monkeypatch.setattr(Domains, "answers", counting)
    return found


TIMES = ("_s", "mfu", "ceiling_share", "tokens_per_s", "memory_bytes", "throughput")


def training(run: Path) -> list[dict[str, Any]]:
    """Of every step what does not depend on the clock."""
    lines = read_lines(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.endswith(TIMES)} for line in lines]
