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
        self._stream = stream
        self._threads = threads
        self._seq_len = seq_len
        self._epoch = start["epoch"]
        self._buffer: deque[Document] = deque()
        self._held = -start["token"]
        self._offset = start["token"]
        self._restart(start["file"], start["document"])

    def claim(self, count: int, rows: slice) -> Job:
        """A job that reads the next `count` windows and keeps those that `rows` selects."""
        return partial(self._read, count, rows)

    def close(self) -> None:
        """Nothing to let go of."""

    def _read(self, count: int, rows: slice) -> tuple[np.ndarray, Position]:
        windows = np.stack([self._window() for _ in range(count)])
        return windows[rows], self._position()

    def _restart(self, file: int, document: int) -> None:
        self._start = (file, document)
        at = {"file": file, "document": document}
        self._documents = encoded(
            self._stream.corpus, self._stream.tokenizer, splits=("train",), workers=self._threads, **at
        )
        self._windows_since_start = 0

    def _window(self) -> np.ndarray:
        while not self._fill():
            if not self._windows_since_start and self._start == (0, 0) and not self._offset:
                found = f"{self._stream.name} has {self._held} training tokens"
                needed = f"one sequence needs {self._seq_len + 1}"
                raise DataError(f"{found} and {needed}: give more text, or a smaller data.seq_len")
            self._epoch += 1
            self._buffer.clear()
            self._held = self._offset = 0
            self._restart(0, 0)
        self._windows_since_start += 1
        return self._take()

    def _fill(self) -> bool:
        """Read until a window is held; false at the end of the corpus, whose last tokens make no window."""
        while self._held < self._seq_len + 1:
            document = next(self._documents, None)
            if document is None:
                return False
            _need_text(document)
            self._buffer.append(document)
            self._held += len(document.tokens)
        return True

    def _take(self) -> np.ndarray:
        row = np.empty(self._seq_len + 1, dtype=np.int64)
        filled = 0
        for document in self._buffer:
            skip = self._offset if filled == 0 else 0
            part = document.tokens[skip : skip + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            if filled == len(row):
                break
        self._held -= self._seq_len
        self._offset += self._seq_len
        while self._offset >= len(self._buffer[0].tokens):
            self._offset -= len(self._buffer.popleft().tokens)
        return row

    def _position(self) -> Position:
        """The next window starts with the last token of this one, so the buffer is never empty here."""
        head = self._buffer[0]
        return {"epoch": self._epoch, "file": head.file, "document": head.number, "token": self._offset}


def _need_text(document: Document) -> None:
    """Refuse a row without text: a stream does not count them."""
    if document.row.wrong:
        raise DataError(f"{document.row.wrong}; fix it, or build shards, which leave such rows out")
