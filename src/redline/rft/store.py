"""The sample store: every completion with its verdict, in one SQLite file that survives a kill at any moment. Runs
without torch.

    with Store(run / "samples.db") as store:
        source = store.open_source(model_fingerprint, sampling)        # who writes, and how
        store.put_questions(questions)
        store.add(source, samples)                # one transaction: on return all of them are on the disk
        store.kept(source, per_question=4)        # distinct correct answers, in the order of the questions

A sample is named by (model, sampling, question, number), so none is stored twice, and a resumed run draws only what
is missing. The file is in WAL mode: it can be read while a run writes it. The run folder's lock decides who may
write. Correct samples keep their token ids, because they are trained on as they were sampled.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from redline.config.recipe import fingerprint_of
from redline.errors import DataError, StorageError
from redline.record.files import parse_json
from redline.tasks.task import Question

SCHEMA_VERSION = 1
_REFUSALS = (
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
"""What the operating system refuses; every other error is the file's."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (
    model TEXT, sampling TEXT, settings TEXT NOT NULL, opened_at REAL NOT NULL, PRIMARY KEY (model, sampling)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS questions (
    id TEXT PRIMARY KEY, position INTEGER NOT NULL, text TEXT NOT NULL, answer TEXT NOT NULL, meta TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    model TEXT, sampling TEXT, question TEXT REFERENCES questions, sample INTEGER,
    text TEXT NOT NULL, tokens INTEGER NOT NULL, logprob_sum REAL, logprob_min REAL, finish TEXT NOT NULL,
    correct INTEGER NOT NULL, parsed INTEGER NOT NULL, reward REAL NOT NULL, answer TEXT, reason TEXT,
    reasoning_key TEXT, seed INTEGER NOT NULL, at REAL NOT NULL, ids BLOB,
    PRIMARY KEY (model, sampling, question, sample)
) WITHOUT ROWID;
"""


class Source(NamedTuple):
    """Who wrote samples, and how: the hash of the model's weights, the hash of what decides the texts."""

    model: str
    sampling: str


class Sample(NamedTuple):
    """One completion with its verdict. A plain tuple: tens of thousands are made beside the engine."""

    question: str
    sample: int
    text: str
    """Up to where the task says the answer is complete; tokens and log-probabilities are the whole completion's."""
    tokens: int
    """0 if a server does not count them."""
    logprob_sum: float | None
    logprob_min: float | None
    finish: str
    """`length` if the tokens ran out before the answer was complete, else `stop`."""
    correct: bool
    """Scored as correct, and finished."""
    parsed: bool
    reward: float
    answer: str | None
    reason: str | None
    reasoning_key: str | None
    """A key that is equal for correct answers that differ only in spelling; None for others."""
    seed: int
    at: float
    ids: bytes | None = None
    """Token ids of the text (int32), for correct samples of an engine that reports them."""


class Kept(NamedTuple):
    """A correct answer that is trained on."""

    question: str
    text: str
    answer: str
    reasoning: str
    sample: int
    ids: bytes | None = None


_INSERT = f"INSERT INTO samples VALUES ({', '.join('?' * (2 + len(Sample._fields)))})"
_SELECT_KEPT = """
SELECT q.id, q.text, q.answer, s.text, s.sample, s.ids FROM questions q
JOIN samples s ON s.question = q.id AND s.model = ? AND s.sampling = ?
WHERE s.correct AND NOT EXISTS (
    SELECT 1 FROM samples e WHERE e.model = s.model AND e.sampling = s.sampling AND e.question = s.question
    AND e.sample < s.sample AND e.reasoning_key = s.reasoning_key
) ORDER BY q.position, s.sample
"""


class Store:
    """A samples.db. Made for one writer; used from one thread at a time."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """`create`: open for a writer, which makes the file if there is none; else for a reader."""
        self.path = path
        if not create and not path.is_file():
            rounds = len(list(path.parent.glob("round-*")))
            way_out = "draw some with `redline rft sample`"
            if rounds:
                way_out = f"name one of its {rounds} rounds, {path.parent / 'round-1'} and so on"
            raise DataError(f"no samples at {path}: {way_out}, or name the folder of another run")
        with _errors(path):
            self._db = sqlite3.connect(
                _address(path, create), uri=True, isolation_level=None, check_same_thread=False, timeout=10.0
            )
            self._db.row_factory = sqlite3.Row
            try:
                if create:
                    self._db.execute("PRAGMA journal_mode = WAL")
                    # what a commit reports as done survives a power cut
                    self._db.execute("PRAGMA synchronous = FULL")
                self._prepare(create)
                self._check()
            except BaseException:
                self._db.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def _prepare(self, create: bool) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise DataError(
                f"{self.path} has layout {version}, but this Redline reads {SCHEMA_VERSION}: use the version that wrote"
                " it"
            )
        if version == 0:
            if not create or self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise DataError(f"{self.path} is another program's database: move it away to start over")
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    def _check(self) -> None:
        """Refuse rows with values of the wrong type, which SQLite itself would take from a damaged file."""
        for table in ("sources", "questions", "samples"):
            wrong = [
                f"typeof({name}) != '{kind.lower()}'" + ("" if needed else f" AND {name} IS NOT NULL")
                for _, name, kind, needed, _, _ in self._db.execute(f"PRAGMA table_info({table})")
            ]
            if self._db.execute(f"SELECT 1 FROM {table} WHERE {' OR '.join(wrong)} LIMIT 1").fetchone():
                raise sqlite3.DatabaseError(f"a row of {table} holds values of the wrong type")

    # ---- writing ----

    def open_source(self, model: str, settings: dict[str, Any]) -> Source:
        """The source of samples drawn from these weights with these settings; it becomes the latest one."""
        source = Source(model, fingerprint_of(settings))
        opened = (*source, json.dumps(settings), time.time())
        self._run("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?)", *opened)
        return source

    def put_questions(self, questions: Sequence[Question]) -> None:
        """Store the questions in their order; one whose id is known must be the same question."""
        rows = {
            q.id: (q.id, place, q.text, q.answer, json.dumps(dict(q.meta)))
            for place, q in enumerate(questions)
        }
        if len(rows) < len(questions):
            raise DataError(
                f"a task must give every question of a split its own id, but {len(questions) - len(rows)} came twice"
            )
        with self._transaction():
            known = dict(self._db.execute("SELECT id, text || char(10) || answer FROM questions"))
            for q in questions:
                if known.get(q.id, same := f"{q.text}\n{q.answer}") != same:
                    raise DataError(
                        f"{self.path} has another question under the id {q.id}, so the task's data has changed: give"
                        " another --run"
                    )
            self._db.executemany("INSERT OR REPLACE INTO questions VALUES (?, ?, ?, ?, ?)", rows.values())

    def add(self, source: Source, samples: Sequence[Sample]) -> None:
        """Store samples in one transaction; when this returns they are on the disk."""
        with self._transaction():
            self._db.executemany(_INSERT, [(*source, *sample) for sample in samples])

    # ---- reading ----

    def begun(self) -> bool:
        """Whether sampling has begun; the store is made before that."""
        return bool(self._run("SELECT 1 FROM sources LIMIT 1"))

    def latest(self) -> tuple[Source, dict[str, Any]]:
        """The source that was opened last, and its settings."""
        rows = self._run("SELECT model, sampling, settings FROM sources ORDER BY opened_at DESC LIMIT 1")
        if not rows:
            raise DataError(f"{self.path} holds no samples yet: draw some with `redline rft sample`")
        model, sampling, settings = rows[0]
        return Source(model, sampling), parse_json(settings, f"{self.path} (settings)", dict)

    def verdicts(self, source: Source) -> list[tuple[str, int, bool, str | None]]:
        """(question, number, correct, reasoning key) of every sample."""
        query = (
            "SELECT question, sample, correct, reasoning_key FROM samples WHERE model = ? AND sampling = ?"
            " ORDER BY question, sample"
        )
        rows = self._run(query, *source)
        return [(question, sample, bool(correct), key) for question, sample, correct, key in rows]

    def cut(self, source: Source) -> int:
        """Samples that ran out of tokens before the answer was complete."""
        query = "SELECT count(*) FROM samples WHERE model = ? AND sampling = ? AND finish = 'length'"
        return int(self._run(query, *source)[0][0])

    def kept(self, source: Source, per_question: int) -> list[Kept]:
        """Correct answers that say something new, by question and number, at most `per_question` of each (0: all)."""
        rows = map(Kept._make, self._run(_SELECT_KEPT, *source))
        each = (list(same) for _, same in itertools.groupby(rows, key=lambda row: row.question))
        return [row for same in each for row in same[: per_question or None]]

    def examples(self, source: Source, *, correct: bool, most: int) -> list[dict[str, Any]]:
        """The first sample with that verdict of so many questions, in their order."""
        query = (
            "SELECT q.text question, q.answer expected, s.text, s.answer, s.reward, s.correct, s.reason,"
            " min(s.sample) sample FROM samples s JOIN questions q ON q.id = s.question"
            " WHERE s.model = ? AND s.sampling = ? AND s.correct = ? GROUP BY s.question ORDER BY q.position"
            " LIMIT ?"
        )
        return [dict(row) | {"correct": correct} for row in self._run(query, *source, correct, most)]

    def tallies(self, source: Source) -> list[dict[str, Any]]:
        """Every question in its order, with what was drawn of it."""
        query = (
            "SELECT q.id, q.text, q.meta, count(s.sample) samples, sum(s.correct) correct, sum(s.tokens) tokens,"
            " sum(s.finish = 'length') cut, count(DISTINCT s.reasoning_key) distinct_correct FROM questions q"
            " LEFT JOIN samples s ON s.question = q.id AND s.model = ? AND s.sampling = ? GROUP BY q.id"
            " ORDER BY q.position"
        )
        rows, where = map(dict, self._run(query, *source)), f"{self.path} (question %.40r)"
        return [row | {"meta": parse_json(row["meta"], where % row["id"], dict)} for row in rows]

    def rows(self, source: Source) -> Iterator[dict[str, Any]]:
        """Every sample with its question, by question and number."""
        columns = [f"s.{name}" for name in ("model", "sampling", *Sample._fields) if name != "ids"]
        query = (
            f"SELECT q.text question_text, q.answer question_answer, {', '.join(columns)} FROM samples s"
            " JOIN questions q ON q.id = s.question WHERE s.model = ? AND s.sampling = ? ORDER BY q.position, s.sample"
        )
        for named in map(dict, self._run(query, *source)):
            known = named["logprob_sum"] is not None and named["tokens"]
            named["logprob_mean"] = named["logprob_sum"] / named["tokens"] if known else None
            yield named | {"correct": bool(named["correct"]), "parsed": bool(named["parsed"])}

    def _run(self, query: str, *values: object) -> list[sqlite3.Row]:
        with _errors(self.path):
            return self._db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing: SQLite's own context commits, or rolls back after an error."""
        with _errors(self.path), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield


def _address(path: Path, create: bool) -> str:
    """The file's address with what SQLite may do to it. A closed store has no log beside it; if one cannot be created,
    SQLite reads only a file that is declared immutable."""
    if create:
        return path.absolute().as_uri()
    still = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if still else ''}"


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """SQLite's errors as one line; a row that exists already is our own mistake and keeps its traceback."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # Python finds text that is not UTF-8; its error has no code and may quote all of the text
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _REFUSALS:
            raise StorageError(
                f"{path} cannot be read or written: {error}; free some space or check its permissions, and run again"
            ) from error
        raise DataError(
            f"{path} is not a sample store, or it is damaged ({str(error)[:80]!r}): move it away to start over"
        ) from error


_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d+)?")
_SPACE = re.compile(r"\s+")


def reasoning_key(text: str) -> str:
    """A key that is equal for answers that differ only in case, white space, how numbers are written (1,000 = 1000.0) or a full stop."""
    plain = _NUMBER.sub(_plain_number, _SPACE.sub(" ", text.strip().lower()))
    return hashlib.blake2b(plain.rstrip(" .,;:!").encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _plain_number(found: re.Match[str]) -> str:
    text = found[0].replace(",", "")
    return text.rstrip("0").rstrip(".") if "." in text else text
