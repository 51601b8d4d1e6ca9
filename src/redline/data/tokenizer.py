"""The tokenizer: a thin, strict wrapper around a Hugging Face `tokenizer.json`, and the training of a byte-level BPE.

Text is encoded as text: a document that spells '<|endoftext|>' gets ordinary tokens, so only Redline ends a document.
Special tokens are recognised only in prompts that Redline wrote (`encode_prompt`). Left out: chat templates
(`redline.engine.prompt`), truncation and padding (the file's settings are ignored).
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from redline.errors import DataError, StorageError
from redline.record.files import cache_folder, read_json, read_text, write_atomic

END_OF_TEXT = "<|endoftext|>"
# In order of preference: in a chat model, the token that ends a document comes before the one that ends a turn.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<|im_end|>")


class Tokenizer:
    """Text to token ids and back. Made by `load_tokenizer` or `train_bpe`."""

    def __init__(self, text: str, name: str) -> None:
        """`text` is the content of a tokenizer.json; `name` says where it is from, for errors."""
        self.text, self._name = text, name
        facts = _remembered(text) or self._facts()
        self.vocab_size: int = facts["vocab_size"]
        """Ids run from 0 to vocab_size - 1; some may be unused."""
        self.eot_id: int = facts["eot_id"]
        """The token after every document."""
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        """The smallest integer that holds every id."""
        self.fingerprint: str = facts["fingerprint"]
        """Equal fingerprints mean equal tokens, whatever the layout of the JSON."""

    def _facts(self) -> dict[str, Any]:
        ids = self._inner.get_vocab(with_added_tokens=True)
        ends = [ids[end] for end in _END_NAMES if end in ids]
        if not ends:
            raise DataError(f"{self._name} has no token that ends a document, one of {', '.join(_END_NAMES)}")
        try:
            settings = json.loads(self.text)
        except ValueError as error:  # the Rust side skips a number of 5,000 digits that it does not need
            raise DataError(f"{self._name} cannot be read as a tokenizer.json: {error}") from error
        meaning = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
        facts = {
            "vocab_size": max(ids.values(), default=-1) + 1,
            "eot_id": ends[0],
            "fingerprint": hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest(),
        }
        _remember(self.text, facts)
        return facts

    @functools.cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        inner = self._parsed()
        inner.encode_special_tokens = True
        return inner

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        """A second tokenizer, because recognising special tokens is a state that threads share."""
        return self._parsed()

    def _parsed(self) -> tokenizers.Tokenizer:
        try:
            inner = tokenizers.Tokenizer.from_str(self.text)
        except Exception as error:  # the Rust side raises a bare Exception for whatever it cannot parse
            raise DataError(f"{self._name} cannot be read as a tokenizer.json: {error}") from error
        inner.no_truncation()
        inner.no_padding()
        return inner

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens; runs on Rust threads and releases the GIL."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a rendered chat template or another prompt of ours, special tokens included."""
        return self._with_specials.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each document, then `eot_id`, as `dtype`."""
        return [np.array([*ids, self.eot_id], dtype=self.dtype) for ids in self.encode(texts)]

    def decode(self, ids: list[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=False)

    def decode_batch(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """`decode` for each, on Rust threads."""
        return self._inner.decode_batch(texts, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        write_atomic(path, self.text)


_LAST: list[Tokenizer] = []
"""The tokenizer that was read last: a start reads the same text several times."""
LONG = 2**20
"""A text of this many characters is parsed once, and the facts are kept in the cache: parsing GPT-2's takes 0.24 s, and a
start whose tokens are built needs only the facts."""


def _memory(text: str) -> Path | None:
    if len(text) < LONG:
        return None
    # Another version may look for other names, and find another end in the same text.
    found_by = hashlib.sha256(f"{_END_NAMES}{text}".encode(errors="replace"))
    return cache_folder() / "tokenizers" / f"{found_by.hexdigest()}.json"


def _remembered(text: str) -> dict[str, Any] | None:
    """The facts found when this text was last parsed."""
    path = _memory(text)
    try:
        facts = read_json(path, dict, error=DataError) if path is not None else {}
    except DataError:  # the first time, or a folder that we may not look into
        return None
    kinds = {"vocab_size": int, "eot_id": int, "fingerprint": str}
    return facts if {name: type(value) for name, value in facts.items()} == kinds else None


def _remember(text: str, facts: dict[str, Any]) -> None:
    if (path := _memory(text)) is not None:
        with contextlib.suppress(OSError, StorageError):  # the next start parses again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(facts))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a tokenizer.json, or a folder with one (Hugging Face, run, data)."""
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        file = file / "tokenizer.json"
    try:
        text = read_text(file)
        found = next((last for last in tuple(_LAST) if last.text == text), None) or Tokenizer(text, str(file))
        _LAST[:] = [found]
        return found  # not from the list: another thread may have replaced its entry
    except DataError as error:
        raise DataError(f"{error}; give a tokenizer.json or a folder with one") from error


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with GPT-2's pre-tokeniser and one token per digit; a small corpus may give fewer tokens."""
    if vocab_size < 256 + 1:
        raise DataError(f"a byte-level BPE needs at least 257 tokens (bytes, end of text), got {vocab_size}")
    inner = tokenizers.Tokenizer(models.BPE())
    # Merged digits ("00", " 19") split numbers at varying places, which makes arithmetic hard to learn.
    digits = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner.to_str(pretty=True), "the trained BPE")
