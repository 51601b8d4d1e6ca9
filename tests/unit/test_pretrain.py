"""What a run accepts as its corpus and as its record: damaged shards are refused when it starts, what was not looked
at is said, and so are updates that are missing from the metrics of a run that resumes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline import pretrain
from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.data.build import build
from redline.errors import DataError
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.record.read import read_run
from redline.record.words import told
from redline.train.process import Process

ALONE = Process(0, 1, torch.device("cpu"))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    build("tinyshakespeare", tmp_path / "data", vocab_size=512, valid_fraction=0.1)
    nano = load_recipe("nano")
    return replace(nano, data=replace(nano.data, source=str(tmp_path / "data")))


def test_a_flipped_byte_in_a_shard_is_refused_at_the_start(recipe: Recipe, tmp_path: Path) -> None:
    assert pretrain.open_corpus(recipe, tmp_path / "run", ALONE, None).unhashed_bytes == 0
    shard = tmp_path / "data" / "train-00000.bin"
    damaged = bytearray(shard.read_bytes())
    damaged[1000] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(DataError, match=r"train-00000\.bin"):
        pretrain.open_corpus(recipe, tmp_path / "run", ALONE, None)


def test_shards_too_large_to_hash_are_named(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "HASHED_BYTES", 0)
    corpus = pretrain.open_corpus(recipe, tmp_path / "run", ALONE, None)
    assert corpus.unhashed_bytes == sum(path.stat().st_size for path in (tmp_path / "data").glob("*.bin"))


def test_updates_missing_from_the_metrics_are_recorded_when_the_run_resumes(
    recipe: Recipe, tmp_path: Path
) -> None:
    def train(steps: int, run: Path, fork: Path | None = None) -> list[dict[str, object]]:
        small = replace(recipe, train=replace(recipe.train, steps=steps, warmup_steps=0, batch_size=2))
        plan = make_plan(small, hardware_here(read_facts(), None))
        pretrain.pretrain(small, plan, run, ALONE, fork=fork)
        return [event for event in read_run(run).events if event["event"] == "updates_not_recorded"]

    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    assert train(4, run) == []
    assert train(6, tmp_path / "fork", fork=run) == [], "a fork begins at its parent's step"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]))
    (event,) = train(6, run)
    assert (event["first"], event["last"]) == (3, 4)
    assert told("updates_not_recorded", event) == "updates 3 to 4 are missing from metrics.jsonl"
    found = read_run(run)
    assert [line["step"] for line in found.metrics] == [1, 2, 5, 6]
    assert found.holes == [(3, 4)]
