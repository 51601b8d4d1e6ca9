"""Fine-tuning killed at every place of a checkpoint's commit, and resumed, equals a run that was left alone,
to the last bit."""

import importlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from redline.record.run import read_lines
from redline.train.checkpoint import read_tensors, verify
from redline.train.places import resolve, step_folders

HERE = Path(__file__).parent


def serve(folder: Path) -> None:
    """Runs in a process of its own: forks a child for every line `method run call`, which fine-tunes and is
    killed at that durable call."""
    import faults
    from warm import IMPORTED_ONCE, leave

    for module in (*IMPORTED_ONCE, "redline.finetune"):  # once, and not in every child
        importlib.import_module(module)
    for line in sys.stdin:
        method, run, call = line.split()
        if (pid := os.fork()) == 0:
            if int(call):
                faults.kill_at(int(call))
            tune(method, folder / run)
            leave(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def tune(method: str, run: Path) -> None:
    from dataclasses import replace

    from redline.config.recipe import DEFAULTS, LoraConfig, ModelConfig, Recipe, TrainConfig
    from redline.finetune import job_of, prepare, train
    from redline.machine.facts import read_facts
    from redline.model.transformer import build_model
    from redline.plan.hardware import hardware_here
    from redline.plan.planner import make_plan
    from redline.record.run import RunFolder
    from redline.train.open_run import OpenRun
    from redline.train.packed import Example
    from redline.train.process import Process

    shape = ModelConfig(
        vocab_size=64,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=40,
        context_length=64,
    )
    rng = random.Random(0)
    words = lambda most: tuple(rng.randrange(64) for _ in range(rng.randint(1, most)))  # noqa: E731
    examples = [Example(words(12), words(9)) for _ in range(27)]
    given = {"epochs": 3, "batch_size": 4, "lr": 1e-2, "checkpoint_every": 4}
    config = TrainConfig(**DEFAULTS["finetune"]["train"] | given)
    lora = LoraConfig(rank=4) if method == "lora" else None
    recipe = Recipe(name="test", workload="finetune", model=shape, train=config, lora=lora)
    plan = make_plan(recipe, hardware_here(replace(read_facts(), gpus=()), None))
    model, process = build_model(shape, device="cpu", seed=0), Process(0, 1, torch.device("cpu"))
    prepare(model, recipe, process)
    with RunFolder(run) as folder:
        train(job_of(model, examples, recipe, plan, process, opened=OpenRun(run, folder)), process)


class Children:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [
            sys.executable,
            "-c",
            f"import test_finetune_resume as t; from pathlib import Path; t.serve(Path({str(folder)!r}))",
        ]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tune(self, method: str, run: str, kill_at: int = 0) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(method, run, kill_at, file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    made = Children(tmp_path_factory.mktemp("runs"))
    yield made
    made.server.stdin.close()
    made.server.wait()


@pytest.mark.parametrize("method", ["lora", "full"])
def test_killed_in_the_middle_of_commits_and_resumed(children: Children, method: str) -> None:
    assert children.tune(method, f"{method}-reference") == 0
    kills = [children.tune(method, f"{method}-run", kill_at=call) for call in (1, 3, 5, 7, 9, 11, 13, 16, 19)]
    assert kills.count(-signal.SIGKILL) >= 7
    assert children.tune(method, f"{method}-run") == 0
    run, reference = children.folder / f"{method}-run", children.folder / f"{method}-reference"
    lines, truth = (read_lines(folder / "metrics.jsonl") for folder in (run, reference))
    assert [line["step"] for line in lines] == list(range(1, 22))
    assert [(line["loss"], line["grad_norm"], line["lr"]) for line in lines] == [
        (line["loss"], line["grad_norm"], line["lr"]) for line in truth
    ]
    found, expected = (read_tensors(resolve(folder, "last"), "") for folder in (run, reference))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for folder in step_folders(run / "checkpoints").values():
        verify(folder)
    announced = 0
    for event in read_lines(run / "events.jsonl"):
        if event["event"] in ("start", "resume"):
            assert event["step"] >= announced, "no attempt starts before a checkpoint that was announced"
        if event["event"] == "checkpoint":
            announced = event["step"]
    assert announced == 21
