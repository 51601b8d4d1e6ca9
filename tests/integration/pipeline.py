"""The smallest complete pipeline: a corpus of a few verses, a recipe of two layers, and what its run folders
hold.

nano.recipe(tmp_path, "train.steps=20")    # a recipe file
done = nano.train(recipe, run)             # `redline train`, in a fork of the warm process
steps(run), events(run, "checkpoint")      # the record
assert_same_training(run, reference)       # to the last bit
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import Command, Done, Fault, Warm

from redline.config.load import load_recipe, to_toml
from redline.data.read import SHIPPED
from redline.launch.processes import reserved_port
from redline.record.run import read_lines
from redline.train.checkpoint import read_tensors
from redline.train.places import resolve

TRAINING = ("loss", "grad_norm", "lr", "tokens", "valid_loss", "loss_scale", "skipped")
"""Numbers of a line that the training decides; the others are times and memory."""

RECIPE = """
[model]
vocab_size = 512
num_layers = 2
hidden_size = 32
num_heads = 2
num_kv_heads = 1
ffn_size = 64
context_length = 64

[data]
source = "{source}"
seq_len = 32
valid_fraction = 0.1

[train]
batch_size = 8
steps = 40
lr = 1e-2
warmup_steps = 4
eval_every = 10
eval_sequences = 12
checkpoint_every = 7
"""


@dataclass(frozen=True)
class Nano:
    warm: Warm
    cache: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every command."""

    def in_double(self) -> "Nano":
        """The same, computing in double precision where the plan says fp32."""
        return replace(self, environment={"IN_DOUBLE": "1"})

    def recipe(self, folder: Path, *overrides: str) -> Path:
        """Write the recipe with overrides into the folder; the corpus is the same for all."""
        corpus = self.cache / "verses.jsonl"
        if not corpus.exists():
            text = SHIPPED["tinyshakespeare"].read_text()
            corpus.write_text(
                "".join(json.dumps({"text": text[i : i + 400]}) + "\n" for i in range(0, 120_000, 400))
            )
        path = folder / "nano.toml"
        path.write_text(RECIPE.format(source=corpus))
        path.write_text(to_toml(load_recipe(str(path), overrides)))
        return path

    def start(self, recipe: Path, run: Path, *options: str, fault: Fault | None = None) -> Command:
        arguments = ("train", recipe, "--run", run, "--json", *options)
        return self.warm.start(*arguments, fault=fault, environment=self.environment)

    def train(self, recipe: Path, run: Path, *options: str, fault: Fault | None = None) -> Done:
        return self.start(recipe, run, *options, fault=fault).wait()

    def train_on_two(
        self, recipe: Path, run: Path, *options: str, faults: Sequence[Fault | None] = (None, None)
    ) -> list[Done]:
        """`redline train` as torchrun starts it, on two processes; without torchrun, which would import torch
        anew."""
        arguments = ("train", recipe, "--run", run, "--json", *options)
        return on_two(self.warm, *arguments, environment=self.environment, faults=faults)

    def outcome(self, recipe: Path, run: Path, *options: str, fault: Fault | None = None) -> dict[str, Any]:
        """Train to the end, which must be a good one; what `--json` printed."""
        done = self.train(recipe, run, *options, fault=fault)
        assert done.code == 0, done.err
        return json.loads(done.out)


def on_two(
    warm: Warm,
    *arguments: str | Path,
    environment: Mapping[str, str],
    faults: Sequence[Fault | None] = (None, None),
) -> list[Done]:
    """A command on a process for every fault, with the variables that torchrun sets."""
    with reserved_port() as port:
        place = {"WORLD_SIZE": str(len(faults)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        local = int(environment.get("LOCAL_WORLD_SIZE", len(faults)))
        ranks = [
            warm.start(
                *arguments,
                fault=fault,
                environment={**environment, **place, "RANK": str(rank), "LOCAL_RANK": str(rank % local)},
            )
            for rank, fault in enumerate(faults)
        ]
        return [rank.wait() for rank in ranks]


def real(nano: Nano, *command: str | Path) -> subprocess.Popen[str]:
    """A command of Python that is not a fork, with its own import of torch."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, **nano.warm.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def steps(run: Path) -> list[dict[str, Any]]:
    """The metrics, which must hold every step from the first on exactly once."""
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return lines


def lines_written(run: Path) -> int:
    """Steps in the metrics of a run that is still going."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def training(run: Path) -> list[dict[str, Any]]:
    """Of every step what the training decides."""
    return [{name: line[name] for name in TRAINING if name in line} for line in steps(run)]


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run / "events.jsonl") if not kinds or event["event"] in kinds]


def weights(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, optimiser state, random state."""
    return read_tensors(resolve(run, which), "")


def assert_same_training(run: Path, reference: Path) -> None:
    """Equal to the last bit: every line, and every tensor of the last checkpoint and of the best."""
    assert training(run) == training(reference)
    for which in ("last", "best"):
        assert resolve(run, which).name == resolve(reference, which).name
        assert_same_weights(run, reference, which)


def assert_same_weights(run: Path, reference: Path, which: str = "last") -> None:
    found, expected = weights(run, which), weights(reference, which)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def assert_close_training(run: Path, reference: Path, rel: float) -> None:
    """Equal but for the order of additions."""
    found, expected = training(run), training(reference)
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    for name in ("loss", "grad_norm", "valid_loss"):
        values, others = (
            {i: line[name] for i, line in enumerate(lines) if name in line} for lines in (found, expected)
        )
        assert values == pytest.approx(others, rel=rel), name


def one_line(text: str) -> str:
    """What the command said about the error: exactly one line of its own, and no traceback."""
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("redline: ")]
    return line
