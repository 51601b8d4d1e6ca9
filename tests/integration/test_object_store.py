"""Training from an object store: the losses of the disk, one cache for all processes, and a store that goes away."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from object_store import BUCKET, ObjectStore
from pipeline import Nano, assert_same_training, steps

from redline.data.build import build
from redline.data.read import SHIPPED
from redline.data.remote import upload
from redline.data.shards import MIXED_SHARDS, Manifest
from redline.errors import DataError

URL = f"s3://{BUCKET}/verses"


@pytest.fixture(scope="module")
def verses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of more shards than training mixes: 35 of four or five windows."""
    base, text = tmp_path_factory.mktemp("verses"), SHIPPED["tinyshakespeare"].read_text()
    rows = [json.dumps({"text": text[i : i + 400]}) + "\n" for i in range(0, 400 * 38, 400)]
    (base / "text").mkdir()
    (base / "text" / "train.jsonl").write_text("".join(rows[:35]))
    (base / "text" / "valid.jsonl").write_text("".join(rows[35:]))
    build(str(base / "text"), base / "data", vocab_size=512, shard_tokens=120)
    return base / "data"


@pytest.fixture
def store(verses: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        store.use(monkeypatch)
        upload(verses, URL)
        store.requests.clear()
        yield store


def test_two_processes_train_from_a_store_as_from_the_disk_and_share_the_cache(
    nano: Nano, store: ObjectStore, verses: Path, tmp_path: Path
) -> None:
    remote = replace(nano, environment=store.environment | {"REDLINE_CACHE": str(tmp_path / "cache")})
    runs = {}
    for name, source, how in (("disk", str(verses), nano), ("store", URL, remote)):
        (tmp_path / name).mkdir()
        recipe = nano.recipe(tmp_path / name, f"data.source={source}", "train.steps=20")
        runs[name] = tmp_path / name / "run"
        for done in how.train_on_two(recipe, runs[name]):
            assert done.code == 0, done.err
    assert_same_training(runs["store"], runs["disk"])
    manifest = Manifest.load(verses)
    assert len(manifest.train) == 35
    assert {store.fetched(shard.name) for shard in manifest.train} == {1}  # all were read: more than an epoch
    assert all(line["data_wait_s"] >= 0 for line in steps(runs["store"]))


def test_a_store_that_goes_away_is_one_line_and_the_run_resumes_when_it_is_back(
    nano: Nano, store: ObjectStore, verses: Path, tmp_path: Path
) -> None:
    """It goes away for the shards of the second group, which are fetched ahead long before they are needed."""
    recipe = nano.recipe(tmp_path, f"data.source={verses}", "train.steps=20")
    reference = tmp_path / "reference"
    assert nano.train(recipe, reference).code == 0
    train = Manifest.load(verses).train
    order = np.argsort(np.random.PCG64([0, 0]).random_raw(len(train)), kind="stable")
    starts = np.cumsum([0, *(shard.tokens for shard in train)])
    inside = (starts[1:] - 1) // 32 - -(-starts[:-1] // 32)
    first_windows = int(np.maximum(0, inside)[order[:MIXED_SHARDS]].sum())
    store.broken = {train[index].name for index in order[MIXED_SHARDS:]}

    recipe = nano.recipe(tmp_path, f"data.source={URL}", "train.steps=20")
    remote = replace(nano, environment=store.environment | {"REDLINE_CACHE": str(tmp_path / "cache")})
    done = remote.train(recipe, tmp_path / "run")
    assert done.code == DataError.exit_code
    assert "cannot be reached" in done.err.splitlines()[-1]
    assert len(steps(tmp_path / "run")) == first_windows // 8
    store.broken = set()
    done = remote.train(recipe, tmp_path / "run")
    assert done.code == 0, done.err
    assert_same_training(tmp_path / "run", reference)
