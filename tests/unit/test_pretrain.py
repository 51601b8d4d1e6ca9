"""What a run accepts as its corpus: damaged shards are refused when it starts, and what was not looked at is said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline import pretrain
from redline.config.load import load_recipe
from redline.config.recipe import Recipe
from redline.data.build import build
from redline.data.candidates import draw
from redline.data.read import SHIPPED
from redline.errors import DataError
from redline.machine.facts import read_facts
from redline.plan.hardware import hardware_here
from redline.plan.planner import make_plan
from redline.train.open_run import OpenRun
from redline.train.process import Process

ALONE = Process(0, 1, torch.device("cpu"))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    text, few = SHIPPED["tinyshakespeare"].read_text(), tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"text": text[i : i + 400]}) + "\n" for i in range(0, 60_000, 400)))
    build(str(few), tmp_path / "data", vocab_size=512, valid_fraction=0.1)
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


def test_a_run_reads_the_candidates_of_its_recipe(recipe: Recipe, tmp_path: Path) -> None:
    plan = make_plan(recipe, hardware_here(read_facts(), None))
    for size in (0, 400):
        its = replace(recipe, train=replace(recipe.train, softmax_candidates=size, seed=5))
        corpus = pretrain.open_corpus(its, tmp_path / "run", ALONE, None)
        source = pretrain.job_of(its, plan, corpus, ALONE, OpenRun()).source(None, 0)
        batch = source.next()
        source.close()
        expected = draw(batch.targets_BT.numpy(), size=400, vocab_size=its.model.vocab_size, seed=5)
        assert (
            batch.candidates is None
            if not size
            else torch.equal(batch.candidates, torch.from_numpy(expected))
        )


def test_a_ramp_of_the_length_cuts_the_first_updates_and_their_mfu(recipe: Recipe, tmp_path: Path) -> None:
    """Also of a run that is resumed within the ramp. The MFU is that of a recipe for sequences of a quarter."""
    ramped = replace(recipe, train=replace(recipe.train, length_ramp_steps=3))
    quarter = replace(recipe, data=replace(recipe.data, seq_len=recipe.data.seq_len // 4))
    hardware = hardware_here(read_facts(), None)
    plan, short = (make_plan(each, hardware).prediction.flops_per_token for each in (ramped, quarter))
    corpus = pretrain.open_corpus(ramped, tmp_path / "run", ALONE, None)
    job = pretrain.job_of(ramped, make_plan(ramped, hardware), corpus, ALONE, OpenRun())
    source = job.source(None, 2)
    lengths = [source.next().inputs_BT.shape[1] for _ in range(2)]
    source.close()
    assert lengths == [recipe.data.seq_len // 4, recipe.data.seq_len]
    lines = [{"step": step, "mfu": 0.5, "ceiling_share": None} for step in (3, 4)]
    assert job.derived(lines[0]) == {"mfu": pytest.approx(0.5 * short / plan)}
    assert job.derived(lines[1]) == {}


def test_shards_too_large_to_hash_are_named(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "HASHED_BYTES", 0)
    corpus = pretrain.open_corpus(recipe, tmp_path / "run", ALONE, None)
    assert corpus.unhashed_bytes == sum(path.stat().st_size for path in (tmp_path / "data").glob("*.bin"))
