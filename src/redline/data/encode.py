"""Documents of many files to tokens, in order, on several threads, from any position on: shared by `build`
and `stream`.

Memory is bounded by the batches in flight, so it does not grow with the corpus.
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redline.data.read import Row, Split, scan, split_of
from redline.data.tokenizer import Tokenizer

BATCH_BYTES = 256 * 1024
"""Text that a thread encodes at once; an encoding takes some 50 times the memory of its text until it is
reduced to ids."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files, and how documents are taken from them."""

    paths: tuple[Path, ...]
    text_field: str
    valid_fraction: float


@dataclass(frozen=True, slots=True)
class Document:
    """A document's tokens with the end-of-text token, and where it lies. A row that holds no text has no token."""

    tokens: np.ndarray
    split: Split
    wrong: str
    """Why the row holds no text; empty: it does."""
    bytes_of_text: int
    file: int
    number: int
    """Its place in the file, counted from 0."""
    offset_bytes: int
    """Bytes of the file read to get it."""


@dataclass(frozen=True, slots=True)
class _Text:
    row: Row
    split: Split
    bytes_of_text: int
    file: int
    number: int


def encoded(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    splits: tuple[Split, ...],
    file: int = 0,
    document: int = 0,
    workers: int = 1,
) -> Generator[Document, None, None]:
    """The documents of the given splits, and the rows that hold no text, from the given one on. Close the
    generator to stop its threads."""
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
) -> Iterator[_Text]:
    for file in range(first_file, len(corpus.paths)):
        skip = first_document if file == first_file else 0
        for number, row in enumerate(scan(corpus.paths[file], corpus.text_field, skip), start=skip):
            utf8 = row.text.encode()
            split = split_of(utf8, corpus.valid_fraction)
            if split in splits or row.wrong:
                yield _Text(row, split, len(utf8), file, number)


def _batches(texts: Iterator[_Text]) -> Iterator[list[_Text]]:
    batch: list[_Text] = []
    size_bytes = 0
    for text in texts:
        batch.append(text)
        size_bytes += text.bytes_of_text
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _encode(batch: list[_Text], tokenizer: Tokenizer) -> list[Document]:
    tokens = tokenizer.encode_documents([each.row.text for each in batch])
    return [
        Document(
            ids[:0] if each.row.wrong else ids,
            each.split,
            each.row.wrong,
            each.bytes_of_text,
            each.file,
            each.number,
            each.row.offset_bytes,
        )
        for each, ids in zip(batch, tokens, strict=True)
    ]
