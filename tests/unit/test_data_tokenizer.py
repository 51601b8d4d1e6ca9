"""The tokenizer: lossless on any text, trained to the same bytes twice, identified by meaning."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data import tokenizer as tokenizer_module
from redline.data.read import SHIPPED, documents
from redline.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from redline.errors import DataError


def small_corpus() -> list[str]:
    return list(documents(SHIPPED["tinyshakespeare"], "text"))[:8]


BPE = train_bpe(iter(small_corpus()), 512)


@given(st.lists(st.text(), max_size=4))
def test_any_text_survives_the_round_trip(texts: list[str]) -> None:
    assert [BPE.decode(ids) for ids in BPE.encode(texts)] == texts


def test_the_name_of_the_end_token_in_a_text_is_text() -> None:
    (ids,) = BPE.encode(["a<|endoftext|>b"])
    assert BPE.eot_id not in ids
    assert BPE.decode(ids) == "a<|endoftext|>b"
    assert BPE.decode([*ids, BPE.eot_id]).endswith("b<|endoftext|>")


def test_documents_end_with_the_end_token() -> None:
    texts = ["To be", ""]
    (full, empty), (ids, _) = BPE.encode_documents(texts), BPE.encode(texts)
    assert full.tolist() == [*ids, BPE.eot_id]
    assert empty.tolist() == [BPE.eot_id]
    assert full.dtype == np.uint16


def test_a_trained_bpe_keeps_digits_apart() -> None:
    texts = ["in 1000 of 1000 years 2000 and 1000"] * 50
    tokenizer = train_bpe(iter(texts), 300)
    assert all(
        sum(character.isdigit() for character in tokenizer.decode([i])) <= 1
        for i in range(tokenizer.vocab_size)
    )
    assert tokenizer.decode(tokenizer.encode(["x 120.50 y"])[0]) == "x 120.50 y"


def test_training_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    BPE.save(tmp_path / "a.json")
    train_bpe(iter(small_corpus()), 512).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert BPE.vocab_size == 512
    assert len(BPE.encode([small_corpus()[0]])[0]) < 0.6 * len(small_corpus()[0])  # it did learn merges


def test_a_saved_tokenizer_is_the_same_one(tmp_path: Path) -> None:
    BPE.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.fingerprint, loaded.vocab_size, loaded.eot_id) == (
            BPE.fingerprint,
            BPE.vocab_size,
            BPE.eot_id,
        )
        assert loaded.encode(["wherefore"]) == BPE.encode(["wherefore"])


def test_the_fingerprint_is_of_the_meaning_not_the_layout(tmp_path: Path) -> None:
    BPE.save(tmp_path / "tokenizer.json")
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    same = Tokenizer(json.dumps(settings), "same")
    assert same.fingerprint == BPE.fingerprint
    assert same.encode(["a long text that no setting may cut"]) == BPE.encode(
        ["a long text that no setting may cut"]
    )
    assert train_bpe(iter(small_corpus()), 500).fingerprint != BPE.fingerprint


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot be read as a tokenizer\.json"):
        load_tokenizer(tmp_path)
    BPE.save(tmp_path / "tokenizer.json")
    renamed = (tmp_path / "tokenizer.json").read_text().replace("<|endoftext|>", "[END]")
    with pytest.raises(DataError, match="no token that ends a document"):
        Tokenizer(renamed, "renamed")
    settings = json.loads(BPE.text)
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    long = json.dumps(settings).replace('"stride": 0', f'"stride": 0, "unknown": {"7" * 5000}')
    with pytest.raises(DataError, match=r"long cannot be read as a tokenizer\.json: .*5000 digits"):
        Tokenizer(long, "long")
    with pytest.raises(DataError, match=r"at least 257 .* got 256"):
        train_bpe(iter(small_corpus()), 256)


@pytest.mark.parametrize(
    ("name", "vocab_size", "eot_id", "itemsize"), [("gpt2", 50257, 50256, 2), ("qwen2_5", 151665, 151643, 4)]
)
def test_published_tokenizers(name: str, vocab_size: int, eot_id: int, itemsize: int) -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / "tokenizers" / name
    if not path.exists():
        pytest.skip("the shared data is not on this machine")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.dtype.itemsize) == (
        vocab_size,
        eot_id,
        itemsize,
    )
    assert (
        tokenizer.decode(tokenizer.encode(["Hello, wörld <|endoftext|>"])[0]) == "Hello, wörld <|endoftext|>"
    )
    if name == "gpt2":
        assert tokenizer.encode(["Hello world"]) == [[15496, 995]]  # as published


def test_a_long_file_is_parsed_once_and_then_only_to_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_module, "LONG", len(BPE.text))
    file = tmp_path / "tokenizer.json"
    BPE.save(file)

    def opened() -> tuple[Tokenizer, bool]:
        tokenizer_module._LAST.clear()
        found = load_tokenizer(file)
        return found, "_inner" in vars(found)

    first, parsed = opened()
    again, parsed_again = opened()
    assert (parsed, parsed_again) == (True, False)
    facts = [(t.fingerprint, t.vocab_size, t.eot_id, t.dtype) for t in (first, again, BPE)]
    assert facts[0] == facts[1] == facts[2]
    assert again.encode(["To be"]) == BPE.encode(["To be"])
    (memory,) = (tmp_path / "cache" / "tokenizers").iterdir()
    for broken in ("", "[]", '{"vocab_size": "512"}', "{}"):
        memory.write_text(broken)
        assert opened()[1]
    other = train_bpe(iter(small_corpus()), 500)
    monkeypatch.setattr(tokenizer_module, "LONG", 0)
    other.save(file)
    assert opened()[0].vocab_size == other.vocab_size
    assert not opened()[1]
    monkeypatch.setattr(tokenizer_module, "_END_NAMES", ("a", "<|endoftext|>"))
    assert opened()[0].eot_id == other.encode(["a"])[0][0], "what other names found is not taken"
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / ("x" * 300)))  # no such name is allowed
    assert opened()[1]
