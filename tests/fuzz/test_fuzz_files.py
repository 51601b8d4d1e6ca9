"""The strict readers: a value of the right kind, or one line."""

import json
import os
import re

import pytest
from hostile import answer, contents, each_crafted, one_line, put, values
from hypothesis import given

from redline.errors import CheckpointError, DataError
from redline.record.files import read_json, read_text
from redline.record.run import read_lines


@given(raw=contents)
@each_crafted
def test_a_file_is_a_table_or_one_line(tmp_path, raw):
    path = put(tmp_path / "plan.json", raw)
    table = answer(lambda: read_json(path, dict), names=path)
    assert table is None or isinstance(table, dict)
    json.dumps(table, ensure_ascii=False).encode()


@given(raw=contents)
@each_crafted
def test_lines_are_tables_or_one_line(tmp_path, raw):
    path = put(tmp_path / "metrics.jsonl", b'{"step": 1}\n' + raw + b"\n" + b'{"torn')
    lines = answer(lambda: read_lines(path), names=path)
    assert lines is None or (lines[0] == {"step": 1} and all(isinstance(line, dict) for line in lines))


@given(value=values)
def test_what_was_written_comes_back_unless_it_has_no_64_bits_or_no_utf_8(tmp_path, value):
    text = json.dumps([value])
    found = answer(lambda: read_json(put(tmp_path / "value.json", text.encode()), list))
    long = any(len(run) > 18 for run in re.findall(r"\d+", text))
    assert json.dumps(found) == text if found is not None else long or "\\ud" in text


@pytest.mark.parametrize("largest", [2**64 - 1, -(2**63), 0])
def test_every_number_of_64_bits_is_read_exactly(tmp_path, largest):
    assert read_json(put(tmp_path / "n.json", json.dumps({"n": largest}).encode()), dict) == {"n": largest}


def test_a_line_separator_inside_a_text_does_not_cut_the_line(tmp_path):
    path = put(tmp_path / "events.jsonl", '{"event": "a\u2028b\\n"}\n'.encode())
    assert read_lines(path) == [{"event": "a\u2028b\n"}]


def test_what_is_not_a_plain_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in [
        (tmp_path / "pipe", "not a plain file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "a\0b", "null"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            read_text(path, error=CheckpointError)
        assert why in one_line(caught.value)


def test_a_file_too_large_to_read_is_refused_before_it_is_read(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)  # sparse: takes no disk
    with pytest.raises(DataError, match="more than we read"):
        read_text(tmp_path / "large")
