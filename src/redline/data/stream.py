"""Streaming: tokenise while training, without shards (`data.stream = true`).

The stream gives the windows of the shards, unshuffled, epoch after epoch. Its position (epoch, file, document in the
file, token in the document) is where the next window starts; resuming skips to that document.

    stream = TokenStream(data, tokenizer)               # the training split, for the loader
    valid = stream.head("valid", tokens=65_537)         # the first validation tokens, in memory

What it costs: no shuffling beyond the order of the files; every process tokenises the whole stream and keeps its slice
of each batch; a resumed run reads the current file again up to its position. Build shards to read a text more than
once.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np

from redline.config.recipe import DataConfig
from redline.data.read import Corpus, Document, Split, encoded, find_sources
from redline.data.shards import Job, Position, TokenDataset
from redline.data.tokenizer import Tokenizer
from redline.errors import DataError


class TokenStream:
    """A corpus that is tokenised as it is read, from the beginning by `order` and `head`."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        self.name = f"the stream of {data.source}"
        self.tokenizer = tokenizer
        self.corpus = Corpus(tuple(find_sources(data.source)), data.text_field, data.valid_fraction)

    def order(
        self, *, seq_len: int, seed: int, position: Position | None, threads: int = 1
    ) -> "StreamedWindows":
        del seed  # the order is that of the files
        return StreamedWindows(self, seq_len=seq_len, position=position, threads=threads)

    def head(self, split: Split, *, tokens: int) -> TokenDataset:
        """The first documents of a split, with at least `tokens` tokens if it has as many, in memory."""
        arrays: list[np.ndarray] = []
        bytes_of_text = found = 0
        for document in encoded(self.corpus, self.tokenizer, splits=(split,)):
            _need_text(document)
            arrays.append(document.tokens)
            bytes_of_text += document.bytes_of_text
            found += len(document.tokens)
            if found >= tokens:
                break
        name = f"the {split} split of {self.name}"
        return TokenDataset(name, arrays, vocab_size=self.tokenizer.vocab_size, bytes_of_text=bytes_of_text)


class StreamedWindows:
    """Windows of seq_len + 1 tokens, seq_len apart, over the training split. Jobs must run one by one, in order."""

    def __init__(self, stream: TokenStream, *, seq_len: int, position: Position | None, threads: int) -> None:
        start = position or {"epoch": 0, "file": 0, "document": 0, "token": 0}
        # not a method of this object: a reference cycle would leave its threads to the garbage collector
        self._windows = _windows(stream, seq_len, threads, **start)

    def claim(self, count: int, rows: slice) -> Job:
        """A job that reads the next `count` windows and keeps those that `rows` selects."""
        return partial(self._read, count, rows)

    def close(self) -> None:
        """Nothing to release."""

    def _read(self, count: int, rows: slice) -> tuple[np.ndarray, Position]:
        read = [next(self._windows) for _ in range(count)]
        return np.stack([window for window, _ in read])[rows], read[-1][1]


def _windows(
    stream: TokenStream, seq_len: int, threads: int, epoch: int, file: int, document: int, token: int
) -> Iterator[tuple[np.ndarray, Position]]:
    """Windows, each with the position after it, epoch after epoch; the last tokens of an epoch make none."""
    corpus, tokenizer = stream.corpus, stream.tokenizer
    while True:
        held, tokens = deque[Document](), np.empty(0, dtype=np.int64)
        fresh, size = list[np.ndarray](), 0  # arrays read but not yet joined, and the tokens in them
        whole, found = not (file or document or token), False
        at = {"file": file, "document": document}
        for read in encoded(corpus, tokenizer, splits=("train",), workers=threads, **at):
            _need_text(read)
            held.append(read)
            fresh.append(read.tokens)
            size += len(read.tokens)
            if size - token <= seq_len:
                continue
            tokens, fresh = np.concatenate([tokens, *fresh]), []
            while len(tokens) - token > seq_len:
                window = tokens[token : token + seq_len + 1]
                token += seq_len
                # the next window starts with the last token of this one, so a document is always held
                while token >= (used := len(held[0].tokens)):
                    held.popleft()
                    tokens, token = tokens[used:], token - used
                found, place = True, {"file": held[0].file, "document": held[0].number}
                yield window, {"epoch": epoch, **place, "token": token}
            size = len(tokens)
        if whole and not found:
            has = f"{stream.name} has {size} training tokens"
            needs = f"one sequence needs {seq_len + 1}"
            raise DataError(f"{has} and {needs}: give more text, or a smaller data.seq_len")
        epoch, file, document, token = epoch + 1, 0, 0, 0


def _need_text(document: Document) -> None:
    """Refuse a row without text: a stream does not count them."""
    if document.row.wrong:
        raise DataError(f"{document.row.wrong}; fix it, or build shards, which leave such rows out")
