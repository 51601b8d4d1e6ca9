"""Documents from disk (text, Markdown, JSONL, plain, .gz or .xz, Parquet, or a folder that mixes them), and their tokens.

`find_sources` turns source names into files in a fixed order; `documents` yields the texts of a file, `scan` all of
its rows, including why a row has no text. A document's split is that of its file where the files are named so
(`splits_of`), and else follows from its text (`split_of`). `encoded` tokenises the documents of many files, in order, on
several threads, from any position. Memory is bounded by the longest document and the batches in flight, not by the
corpus. Left out: cleaning, filtering and deduplication.
"""

import codecs
import contextlib
import gzip
import hashlib
import itertools
import json
import lzma
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np

from redline.data.hub import CORPORA, CORPUS, fetch_corpus
from redline.data.remote import fetch_folder, is_remote
from redline.data.tokenizer import Tokenizer
from redline.errors import DataError, need
from redline.record.files import cache_folder, write_atomic

Split = Literal["train", "valid"]
SPLITS: tuple[Split, ...] = ("train", "valid")

SHIPPED = {"tinyshakespeare": Path(__file__).parent / "corpora" / "tinyshakespeare.txt"}

# A text file has no rows, so it is cut into documents: memory stays constant, and a file of a megabyte still has
# enough of them (68 in tinyshakespeare; pieces of 64 KiB would give 17) for a hash to hold some out.
PIECE_BYTES = 16 * 1024
LONGEST_PIECE_BYTES = 4 * PIECE_BYTES
BATCH_BYTES = 256 * 1024
"""Text that is encoded together; until it is reduced to ids, an encoding takes some 50 times the memory of its text."""
NOTHING = np.empty(0, dtype=np.uint16)


@dataclass(frozen=True, slots=True)
class Row:
    text: str
    offset_bytes: int
    """Bytes of the (perhaps compressed) file read up to it."""
    wrong: str = ""
    """Why it holds no text; empty if it does."""


def find_sources(*sources: str) -> list[Path]:
    """The files that the sources name: shipped corpora, files, or all files under a folder, sorted. Of files that are
    named by split, those for the test are left out."""
    files = [file for source in sources for file in _files(source)]
    splits = splits_of(files)
    files = [file for file in files if not splits or file in splits]
    for file, count in Counter(os.path.abspath(file) for file in files).items():
        if count > 1:
            raise DataError(f"the sources name {file} {count} times: name every file once")
    return files


def _files(source: str) -> list[Path]:
    if is_remote(source):
        raise DataError(f"{source} is not on disk: from an object store only built shards are read")
    if (path := find_source(source)).is_dir():
        return files_under(path, tuple(_FORMATS), "file that can be read as a corpus")
    if not path.name.endswith(tuple(_FORMATS)):
        known = ", ".join(_FORMATS)
        raise DataError(f"{path} cannot be read as a corpus: the name must end in one of {known}")
    return [path]


def find_source(source: str) -> Path:
    """The path of the source, which may also be a data folder; an error if it does not exist. A corpus on the Hugging
    Face Hub is fetched, and the manifest of a data folder in an object store."""
    if is_remote(source):
        return fetch_folder(source)
    if (address := CORPORA.get(source, source)).startswith(CORPUS):
        folder = fetch_corpus(address)
        return _joined(source, folder) if "/Salesforce/wikitext" in address else folder
    path = SHIPPED.get(source) or Path(os.path.expanduser(source))
    try:
        if path.is_dir() or path.exists():
            return path
    except OSError as error:
        raise DataError(f"the corpus {source!r:.100} cannot be read: {error.strerror}") from error
    raise DataError(
        f"no such corpus: {source}; give text files, a folder made by `redline data build` (in a recipe: --set"
        f" data.source=...), or a name ({', '.join((*SHIPPED, *CORPORA))}, {CORPUS}org/name)"
    )


def _joined(source: str, folder: Path) -> Path:
    """WikiText as text: its rows are lines, and many of them make a document."""
    out = cache_folder() / "corpora" / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    for split, files in itertools.groupby(
        files_under(folder, (".parquet",), f"rows of {source}"), lambda file: file.name.partition("-")[0]
    ):
        if not (path := out / f"{split}.txt").exists():
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(path, "".join(line or "\n" for file in files for line in documents(file, "text")))
    return out


def splits_of(files: Sequence[Path]) -> dict[Path, Split]:
    """The split of each file by names (train*, valid* or dev*; test* has none); empty if they do not tell."""
    named: dict[Path, Split] = {}
    for file in files:
        if file.name.startswith(("train", "valid", "dev")):
            named[file] = "train" if file.name.startswith("train") else "valid"
    told = set(named.values()) == set(SPLITS)
    return named if told and all(f in named or f.name.startswith("test") for f in files) else {}


def files_under(folder: Path, suffixes: tuple[str, ...], what: str) -> list[Path]:
    """Every file with one of these endings, sorted, except for hidden ones. An unreadable folder is an error."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): change that, or move it away")

    files = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    if not files:
        raise DataError(f"{folder} holds no {what}; it needs one of {', '.join(suffixes)}")
    if odd := [file for file in files if not file.is_file()]:
        raise DataError(f"{odd[0]} is not a readable file (a pipe, or a link to nothing): move it away")
    return sorted(files)


def documents(path: Path, text_field: str) -> Iterator[str]:
    return (row.text for row in scan(path, text_field) if not row.wrong)


def scan(path: Path, text_field: str, skip: int = 0) -> Iterator[Row]:
    """The rows of one file in order, without the first `skip`."""
    read = next(read for suffix, read in _FORMATS.items() if path.name.endswith(suffix))
    with read_errors(path):
        yield from read(path, text_field, skip)


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """The errors of the readers of all formats, in one line."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    if path.name.endswith(".parquet"):
        # ValueError: text that is not UTF-8; OverflowError: a time that Python cannot hold
        errors += (need("pyarrow", extra="parquet").ArrowException, ValueError, OverflowError)
    try:
        yield
    except errors as error:
        why = f"{error}; the file may be truncated or not what its name says"
        raise DataError(f"{path} cannot be read: {why}") from error


def split_of(text: bytes, valid_fraction: float) -> Split:
    """The split of a document. It depends only on the text, so order, files and repeats cannot move it."""
    return "valid" if int.from_bytes(hashlib.sha256(text).digest()[:8]) < valid_fraction * 2**64 else "train"


def _read_text(path: Path, text_field: str, skip: int) -> Iterator[Row]:
    """Pieces that end at a blank line, or after LONGEST_PIECE_BYTES without one; joined they are the file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    piece: list[str] = []
    size_bytes = pieces = 0
    with open(path, "rb") as file:
        # The limit is for files without line ends; the decoder keeps a character that it cuts in two.
        lines = iter(partial(file.readline, LONGEST_PIECE_BYTES), b"")
        for line_number, line in enumerate(itertools.chain(lines, [b""]), start=1):
            try:
                piece.append(decoder.decode(line, final=not line))
            except UnicodeDecodeError as error:
                where = f"{path}, line {line_number - (not line)}"
                raise DataError(f"{where}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
            size_bytes += len(line)
            blank = size_bytes >= PIECE_BYTES and not line.strip()
            if size_bytes >= LONGEST_PIECE_BYTES or blank or not line:
                pieces += 1
                if pieces > skip and any(piece):
                    yield Row("".join(piece), file.tell())
                piece, size_bytes = [], 0


def _read_jsonl(path: Path, text_field: str, skip: int) -> Iterator[Row]:
    with open(path, "rb") as file:
        numbered = enumerate(decompressed(path, file), start=1)
        rows = ((number, line) for number, line in numbered if line.strip())
        for number, line in itertools.islice(rows, skip, None):
            yield _row_of_json(line, text_field, f"{path}, line {number}", file.tell())


def decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if path.name.endswith(".xz"):
        return cast(BinaryIO, lzma.LZMAFile(file))
    return file


def _row_of_json(line: bytes, text_field: str, where: str, offset_bytes: int) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row("", offset_bytes, f"{where}: not a JSON row: {error}")
    if not isinstance(row, dict):
        return Row("", offset_bytes, f"{where}: a row must be a JSON object, got {type(row).__name__}")
    if text_field not in row:
        names = f"{', '.join(row) or 'none'!s:.200}"
        return Row("", offset_bytes, f"{where}: no field '{text_field}'; the row has {names}: set text_field")
    return _row(row[text_field], text_field, where, offset_bytes)


def _row(text: object, text_field: str, where: str, offset_bytes: int) -> Row:
    if not isinstance(text, str):
        wrong = f"{where}: field '{text_field}' must be text, got {type(text).__name__}"
        return Row("", offset_bytes, wrong)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer accepts
        return Row("", offset_bytes, f"{where}: field '{text_field}' is not Unicode text: {error.reason}")
    return Row(text, offset_bytes)


def _read_parquet(path: Path, text_field: str, skip: int) -> Iterator[Row]:
    size_bytes = path.stat().st_size
    with need("pyarrow.parquet", extra="parquet").ParquetFile(path) as file:
        if text_field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path}: no column '{text_field}'; it has {names}: set text_field")
        end = 0
        # each group alone: one scan of the whole file keeps what it has read
        for group in range(file.num_row_groups):
            start, end = end, end + file.metadata.row_group(group).num_rows
            if end <= skip:
                continue
            batches = file.iter_batches(batch_size=256, row_groups=[group], columns=[text_field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            numbered = enumerate(texts, start=start + 1)
            for row, text in itertools.islice(numbered, max(0, skip - start), None):
                offset_bytes = size_bytes * row // file.metadata.num_rows
                yield _row(text, text_field, f"{path}, row {row}", offset_bytes)


_FORMATS: dict[str, Callable[[Path, str, int], Iterator[Row]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.xz": _read_jsonl,
    ".parquet": _read_parquet,
}


# ---- tokens ----


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


def encoded(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    splits: tuple[Split, ...],
    file: int = 0,
    document: int = 0,
    end_file: int | None = None,
    workers: int = 1,
) -> Generator[Document, None, None]:
    """Documents of the splits, and rows without text, from a position on. Close it to stop its threads."""
    in_flight: deque[Future[list[Document]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            for batch in _batches(_texts(corpus, splits, file, document, end_file)):
                in_flight.append(pool.submit(_encode, batch, tokenizer))
                if len(in_flight) > 2 * workers:
                    yield from in_flight.popleft().result()
            while in_flight:
                yield from in_flight.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _texts(
    corpus: Corpus, splits: tuple[Split, ...], first_file: int, first_document: int, end_file: int | None
) -> Iterator[Document]:
    named = splits_of(corpus.paths)
    for file in range(first_file, len(corpus.paths) if end_file is None else end_file):
        skip = first_document if file == first_file else 0
        for number, row in enumerate(scan(corpus.paths[file], corpus.text_field, skip), start=skip):
            utf8 = row.text.encode()
            split = named.get(corpus.paths[file]) or split_of(utf8, corpus.valid_fraction)
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
    return [each if each.row.wrong else replace(each, tokens=ids) for each, ids in pairs]
