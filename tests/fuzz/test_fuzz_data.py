"""Corpora, manifests and tokenizers that hold anything: a data folder, or one line."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hostile import answer, contents, each_crafted, put, without_root
from hypothesis import given
from hypothesis import strategies as st

from redline.data.build import build
from redline.data.read import SHIPPED, documents, find_sources
from redline.data.shards import Manifest, TokenDataset
from redline.data.tokenizer import load_tokenizer, train_bpe
from redline.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter(list(documents(SHIPPED["tinyshakespeare"], "text"))[:3]), 300).save(path)
    return str(path)


@given(raw=contents, name=st.sampled_from(["a.jsonl", "a.txt", "a.jsonl.gz", "a.jsonl.xz", "a.parquet"]))
def test_a_corpus_of_anything(tmp_path, tokenizer, raw, name):
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    put(tmp_path / name, raw)
    manifest = answer(lambda: build(str(tmp_path / name), tmp_path / "out", tokenizer=tokenizer))
    if manifest is not None:
        TokenDataset.open(tmp_path / "out", "train", verify=True)


@given(raw=contents)
@each_crafted
def test_a_data_folder_of_anything(tmp_path, tokenizer, raw):
    for name in ("manifest.json", "building.json", "tokenizer.json"):
        folder = tmp_path / name.removesuffix(".json")
        put(folder / name, raw)
        answer(lambda folder=folder: Manifest.load(folder), names=folder)
        answer(lambda folder=folder: load_tokenizer(folder), names=folder)
        answer(lambda folder=folder: build("tinyshakespeare", folder, tokenizer=tokenizer), names=folder)


def test_a_folder_that_cannot_be_read_is_not_left_out():
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        for path in (folder / "a.txt", folder / "closed" / "b.txt"):
            put(path, b"text")
        (folder / "closed").chmod(0)
        with without_root(), pytest.raises(DataError, match="closed cannot be read"):
            find_sources(name)
