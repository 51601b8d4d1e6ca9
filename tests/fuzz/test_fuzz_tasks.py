"""Files of questions and answers that hold anything: questions, or one line."""

import pytest
from hostile import answer, contents, each_crafted, put, values
from hypothesis import given
from hypothesis import strategies as st

from redline.cli.main import main
from redline.tasks.registry import load_task
from redline.tasks.task import Question

FILES = {"units": "train.json", "gsm8k": "train.jsonl"}


@pytest.mark.parametrize("task", FILES)
@given(raw=contents)
@each_crafted
def test_questions_of_anything(tmp_path, task, raw):
    put(tmp_path / FILES[task], raw)
    answer(lambda: load_task(task, str(tmp_path)).questions("train", None, 0), names=tmp_path)


@given(raw=contents)
@each_crafted
def test_answers_of_anything(tmp_path, capsys, raw):
    put(tmp_path / "train.json", b'[["How many min is 2 h?", 120]]')
    path = put(tmp_path / "answers.jsonl", raw)
    assert main(["tasks", "units", "--data", str(tmp_path), "--split", "train", "--score", str(path)]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


@given(
    completion=st.text(max_size=200) | values.map(str),
    number=st.floats() | st.integers() | st.text(max_size=9),
)
@pytest.mark.parametrize("task", FILES)
def test_completions_of_anything(task, completion, number):
    question = Question("a", "How many min is 2 h?", "120.0")
    verdict = load_task(task).score(question, f"{completion}<answer>{number}</answer>")
    assert isinstance(verdict.correct, bool)
