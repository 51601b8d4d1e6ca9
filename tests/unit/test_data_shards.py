"""Shards: windows across borders against plain slicing, and every kind of damage refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data.build import build
from redline.data.shards import Manifest, TokenDataset, check_vocab
from redline.errors import DataError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "data"
    build("tinyshakespeare", folder, vocab_size=300, valid_fraction=0.1, shard_tokens=200_000)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "data")


@given(st.lists(st.integers(1, 23), min_size=1, max_size=8), st.integers(1, 17), st.randoms())
def test_windows_equal_slices_of_the_concatenation(lengths: list[int], seq_len: int, random: object) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    arrays = np.split(whole, np.cumsum(lengths)[:-1])
    dataset = TokenDataset("test", arrays, vocab_size=len(whole), bytes_of_text=0)
    count = dataset.windows(seq_len)
    assert count == len(
        [start for start in range(0, len(whole), seq_len) if start + seq_len + 1 <= len(whole)]
    )
    indices = list(range(count))
    random.shuffle(indices)
    rows = dataset.read_windows(np.array(indices, dtype=np.int64), seq_len)
    assert rows.dtype == np.int64
    assert rows.tolist() == [whole[i * seq_len : (i + 1) * seq_len + 1].tolist() for i in indices]


def test_a_split_too_short_says_so() -> None:
    dataset = TokenDataset("the valid split of x", [np.arange(8)], vocab_size=8, bytes_of_text=9)
    dataset.need_window(7)
    with pytest.raises(DataError, match="the valid split of x has 8 tokens and one sequence needs 9"):
        dataset.need_window(8)


def test_an_empty_split_opens_and_has_no_window(tmp_path: Path) -> None:
    build("tinyshakespeare", tmp_path / "data", vocab_size=300, valid_fraction=0)
    dataset = TokenDataset.open(tmp_path / "data", "valid")
    assert (dataset.tokens, dataset.windows(4)) == (0, 0)
    with pytest.raises(DataError, match="has 0 tokens and one sequence needs 5"):
        dataset.need_window(4)


def test_damage_is_refused(folder: Path) -> None:
    shard = folder / "train-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(
        DataError,
        match=r"train-00001.bin has \d+ bytes and should have \d+: remove .*data and build it again",
    ):
        TokenDataset.open(folder, "train")
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    TokenDataset.open(folder, "train")
    with pytest.raises(DataError, match=r"train-00001.bin was altered"):
        TokenDataset.open(folder, "train", verify=True)
    shard.write_bytes(b"\xff" * len(content))
    dataset = TokenDataset.open(folder, "train")
    with pytest.raises(DataError, match="holds token 65535, beyond the vocabulary of 300"):
        dataset.read_windows(np.array([dataset.windows(64) // 2]), 64)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00001.bin cannot be read"):
        TokenDataset.open(folder, "train")


def test_vocabularies_are_compared(folder: Path) -> None:
    dataset = TokenDataset.open(folder, "train")
    check_vocab(dataset.vocab_size, 300)
    with pytest.raises(DataError, match=r"set model\.vocab_size to at least 300"):
        check_vocab(dataset.vocab_size, 299)
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    value["vocab_size"] = 200
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=r"train-00000.bin holds token 299, beyond the vocabulary of 200"):
        TokenDataset.open(folder, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("dtype"), "is damaged: .*'dtype' is missing"),
        (lambda m: m.update(extra=1), "is damaged: .*unknown key 'extra'"),
        (lambda m: m["train"][0].pop("sha256"), "is damaged: .*'sha256' is missing"),
        (lambda m: m["inputs"].update(seed=1), "is damaged: .*unknown key 'seed'"),
        (lambda m: m.update(train=[3]), "train must be a table"),
        (lambda m: m.update(train=None), "is damaged"),
        (lambda m: m["inputs"].update(sources=7), "is damaged"),
        (lambda m: m["valid"][0].update(tokens="many"), "is damaged"),
        (lambda m: m.update(dtype="float32"), "is damaged"),
        (lambda m: m.update(format=99), "has format 99, but this version reads 1"),
    ],
)
def test_the_manifest_is_strict(folder: Path, change: object, message: str) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        Manifest.load(folder)


def test_a_manifest_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a data folder"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1')
    with pytest.raises(DataError, match="is damaged"):
        Manifest.load(tmp_path)
