"""The tokenizer: a thin, strict wrapper round a Hugging Face `tokenizer.json`, and the training of a
byte-level BPE.

    tokenizer = load_tokenizer("gpt2/tokenizer.json")       # or a folder that has one
    tokenizer.decode(tokenizer.encode(["Hello"])[0])

Text is encoded as text: a document that spells '<|endoftext|>' gets ordinary tokens, so only Redline itself
ends a document. Only in prompts that Redline wrote (`encode_prompt`) are special tokens recognised. Left out:
chat templates (`redline.engine.prompt`), truncation and padding (a file's own settings for these are
ignored).
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from redline.errors import DataError
from redline.record.files import read_text, write_atomic

END_OF_TEXT = "<|endoftext|>"
# In order of preference: where a chat model has several, the one that ends a document comes before the one
# that ends a turn.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<|im_end|>")


class Tokenizer:
    """Text to token ids and back. Made by `load_tokenizer` or `train_bpe`."""

    def __init__(self, text: str, name: str) -> None:
        """`text` is the content of a tokenizer.json; `name` says where it came from, for errors."""
        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
            settings = json.loads(text)
        except Exception as error:  # the Rust side raises a bare Exception for whatever it cannot parse
            raise DataError(f"{name} is not a tokenizer.json that can be read: {error}") from error
        self._text = text
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        ids = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values(), default=-1) + 1
        """Ids run from 0 to vocab_size - 1; some may be unused."""
        ends = [ids[end] for end in _END_NAMES if end in ids]
        if not ends:
            raise DataError(
                f"{name} has no token that ends a document; one of {', '.join(_END_NAMES)} is needed"
            )
        self.eot_id: int = ends[0]
        """The token after every document."""
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        """The smallest integer that holds every id."""
        meaning = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
        self.fingerprint: str = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
        """Equal fingerprints mean equal tokens; the layout of the JSON does not count."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens; runs on Rust threads and releases the GIL."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a rendered chat template or another prompt of ours: special tokens spelt in it are
        those tokens."""
        return self._with_specials.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        """A second tokenizer, because recognising special tokens is a state of the first that threads
        share."""
        inner = tokenizers.Tokenizer.from_str(self._text)
        inner.no_truncation()
        inner.no_padding()
        return inner

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """What a corpus holds for each document: its tokens, then `eot_id`, as `dtype`."""
        return [np.array([*ids, self.eot_id], dtype=self.dtype) for ids in self.encode(texts)]

    def decode(self, ids: list[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=False)

    def decode_batch(self, texts: list[list[int]]) -> list[str]:
        """Like `decode` for each, on Rust threads."""
        return self._inner.decode_batch(texts, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write the tokenizer.json that this was made from."""
        write_atomic(path, self._text)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer.json, or a folder that has one (a Hugging Face folder, a run folder, a data folder)."""
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        file = file / "tokenizer.json"
    try:
        return Tokenizer(read_text(file), str(file))
    except DataError as error:
        raise DataError(f"{error}; give a tokenizer.json or a folder with one") from error


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with GPT-2's pre-tokeniser, every digit a token of its own.

    The same texts give the same bytes; a small corpus may give fewer tokens.
    """
    smallest = 256 + 1
    if vocab_size < smallest:
        raise DataError(
            f"a byte-level BPE needs a vocabulary of at least {smallest} (bytes, end of text), got"
            f" {vocab_size}"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    # Merged digits ("00", " 19") cut numbers at places that differ from one number to the next, which makes
    # arithmetic hard to learn.
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
