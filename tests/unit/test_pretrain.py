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
from redline.data.read import SHIPPED
from redline.errors import DataError
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


def test_shards_too_large_to_hash_are_named(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "HASHED_BYTES", 0)
    corpus = pretrain.open_corpus(recipe, tmp_path / "run", ALONE, None)
    assert corpus.unhashed_bytes == sum(path.stat().st_size for path in (tmp_path / "data").glob("*.bin"))
