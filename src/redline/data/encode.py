"""Documents of many files as tokens, in order, on several threads, from any position: for `build` and `stream`.

Memory is bounded by the batches in flight, so it does not grow with the corpus.
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from redline.data.read import Row, Split, scan, split_of
from redline.data.tokenizer import Tokenizer

NOTHING = np.empty(0, dtype=np.uint16)
BATCH_BYTES = 256 * 1024
"""Text in a batch; until it is reduced to ids, an encoding takes some 50 times the memory of its text."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files, and how documents are taken from them."""

    paths: tuple[Path, ...]
    text_field: str
    valid_fraction: float


@dataclass(frozen=True, slots=True)
class Document:
    """A document and its place. `_texts` makes it with no tokens yet; a row that holds no text never has any."""

    row: Row
    split: Split
    bytes_of_text: int
    file: int
    number: int
    """Its place in the file, counted from 0."""
    tokens: np.ndarray
    """With the end-of-text token."""

    @property
    def wrong(self) -> str:
        """Why the row holds no text; empty if it does."""
        return self.row.wrong

    @property
    def offset_bytes(self) -> int:
        return self.row.offset_bytes


def encoded(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    splits: tuple[Split, ...],
    file: int = 0,
    document: int = 0,
    workers: int = 1,
) -> Generator[Document, None, None]:
    """The documents of the given splits, and the rows without text, from a position on. Close the generator to stop
    its threads."""
    in_flight: deque[Future[list[Document]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            for batch in _batches(_texts(corpus, splits, file, document)):
                in_flight.append(pool.submit(_encode, batch, tokenizer))
                if len(in_flight) > 2 * workers:
                    yield from in_flight.popleft().result()
            while in_flight:
                yield from in_flight.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _texts(
    corpus: Corpus, splits: tuple[Split, ...], first_file: int, first_document: int
) -> Iterator[Document]:
    for file in range(first_file, len(corpus.paths)):
        skip = first_document if file == first_file else 0
        for number, row in enumerate(scan(corpus.paths[file], corpus.text_field, skip), start=skip):
            utf8 = row.text.encode()
            split = split_of(utf8, corpus.valid_fraction)
            if split in splits or row.wrong:
                yield Document(row, split, len(utf8), file, number, NOTHING)


def _batches(texts: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size_bytes = 0
    for text in texts:
        batch.append(text)
        size_bytes += text.bytes_of_text
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _encode(batch: list[Document], tokenizer: Tokenizer) -> list[Document]:
    tokens = tokenizer.encode_documents([each.row.text for each in batch])
    pairs = zip(batch, tokens, strict=True)
    return [each if each.wrong else replace(each, tokens=ids) for each, ids in pairs]
