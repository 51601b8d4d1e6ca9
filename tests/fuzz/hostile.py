"""What a damaged or hostile file may hold: the inputs that every reader of ours must answer with one line."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hypothesis import example
from hypothesis import strategies as st

from redline.errors import RedlineError

T = TypeVar("T")

NESTED = b"[" * 100_000
LONG_NUMBER = b"9" * 5000
CRAFTED = [
    b"",
    b"\n",
    b"null",
    b"3",
    b"[]",
    b"{}",
    b'"text"',
    b"\xff\xfe\x00",
    b'{"a": "\xe2\x9c"}',
    b'{"a": "\\ud800"}',
    NESTED,
    b'{"a":' * 100_000,
    b'{"step": ' + LONG_NUMBER + b"}",
    b'{"step": 1' + b"0" * 400 + b"}",
    b'{"step": 1e999, "loss": NaN}',
    b"\x00" * 100,
]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def encoded(value: object) -> bytes:
    """A value as JSON in one line, numbers that are not finite included, as Python's writer does it."""
    return json.dumps(value).encode()


contents = st.sampled_from(CRAFTED) | st.binary(max_size=200) | values.map(encoded)


WRONG = st.sampled_from(
    [None, True, -1, 0, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "text", [], [1], {}, {"a": 1}]
)


def wrong_in(value: object, data: st.DataObject) -> object:
    """The value with something in it, however deep, left out or replaced by what does not belong there."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(value)))
        if not data.draw(st.integers(0, 3)):
            return {other: inner for other, inner in value.items() if other != key}
        return value | {key: wrong_in(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], wrong_in(value[place], data), *value[place + 1 :]]
    return data.draw(WRONG)


def damaged(path: Path, data: st.DataObject) -> bytes:
    """The content of a file of JSON, with one thing wrong in it."""
    whole = path.suffix == ".json"
    parts = [path.read_text()] if whole else path.read_text().splitlines()
    place = data.draw(st.integers(0, len(parts) - 1))
    parts[place] = json.dumps(wrong_in(json.loads(parts[place]), data))
    return "\n".join([*parts, ""]).encode()


def one_line(error: BaseException) -> str:
    """The message of a user's error, held to the form in which the command line prints it."""
    text = str(error)
    assert text, "an error says something"
    assert "\n" not in text, f"one line, not {text!r}"
    assert len(text) < 2000, f"a message is not a copy of the file: {len(text)} characters"
    text.encode()
    return text


def answer(call: Callable[[], T], *, names: object = "") -> T | None:
    """What the call gives, or None where it ends in one line that names the file; anything else is raised."""
    try:
        return call()
    except RedlineError as error:
        text = one_line(error)
    assert str(names) in text, f"{text!r} does not name {names}"
    return None


def each_crafted(test: Callable[..., None]) -> Callable[..., None]:
    """Every crafted content as an explicit example of the test's `raw`."""
    for raw in CRAFTED:
        test = example(raw=raw)(test)
    return test


def put(path: Path, raw: bytes) -> Path:
    """The file with these bytes in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Permissions count for root too while this lasts."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
