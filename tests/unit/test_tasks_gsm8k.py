"""GSM8K: how numbers are read, how files are read, and the real files where they are at hand."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.errors import ConfigError, DataError
from redline.tasks import gsm8k
from redline.tasks.task import Question

REAL = Path(__file__).parents[3] / "shared" / "data" / "reasoning" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 40 + 2 = 42.", "42"),
        ("it costs $1,234.50.", "1234.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("he owes −7 dollars", "-7"),
        ("10-5", "5"),
        ("(10)-5", "5"),
        (".5 of it", "0.5"),
        ("1e3", "1000"),
        ("1,2,3", "3"),
        ("1,450,000", "1450000"),
        ("<answer>42</answer> is my answer to question 7", "42"),
        ("<answer>7</answer> no: <answer>42</answer>", "42"),
        ("<answer>about 42 apples", "42"),
        (r"thus \boxed{42} and 9 others", "42"),
        (r"\boxed{\text{\$1{,}000}}", "1000"),
        ("#### 42\n\nQuestion: 9 bees and 7 ants?", "42"),
        ("#### $2,125", "2125"),
        ("<answer></answer> 7", None),
        ("#### \n 7", None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_number_that_a_completion_gives(text, number):
    assert gsm8k.parse_number(text) == (None if number is None else Decimal(number))


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{:,}", "{}", "{}.00", "{:,}."]),
    st.sampled_from(["{}", "#### {}", "= ${}"]),
)
def test_any_whole_number_is_read_as_it_is_written(value, form, frame):
    verdict = gsm8k.score(
        Question("q", "?", str(value)), "After 3 steps: " + frame.format(form.format(value))
    )
    assert verdict.correct
    assert not gsm8k.score(Question("q", "?", str(value + 1)), frame.format(form.format(value))).correct


@given(st.text(alphabet="0123456789,.-$eE <>answr/\\boxd{}#\n", max_size=60))
def test_no_text_upsets_the_scorer(text):
    verdict = gsm8k.score(Question("q", "?", "42"), text)
    assert verdict.parsed == (verdict.answer is not None)


def test_files(tmp_path):
    rows = [
        {"question": "Two and two?", "answer": "2+2 = <<2+2=4>>4\n#### 4"},
        {"question": "Far?", "answer": "#### 1,000"},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second = gsm8k.make(str(tmp_path)).questions("train", None, 0)
    assert first == Question("train-0", "Two and two?", "4", "2+2 = 4\n<answer>4</answer>")
    assert second.answer == "1000"
    assert gsm8k.score(second, second.solution).correct
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "x", "answer": "4"}))
    with pytest.raises(DataError, match=r"test.jsonl, row 0: .*'#### number'"):
        gsm8k.make(str(tmp_path)).questions("test", None, 0)
    (tmp_path / "test.jsonl").write_text("\n{")
    with pytest.raises(DataError, match="line 2 is damaged"):
        gsm8k.make(str(tmp_path)).questions("test", None, 0)
    with pytest.raises(ConfigError, match="--data FOLDER"):
        gsm8k.make(None).questions("train", 1, 0)


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not shipped")
@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_the_real_files(split, rows):
    questions = gsm8k.make(str(REAL)).questions(split, None, 0)
    assert len(questions) == rows
    assert all(gsm8k.score(question, question.solution).correct for question in questions)
    assert not [
        q for q in questions if gsm8k.score(q, f"{q.solution} or not; #### {Decimal(q.answer) + 1}").correct
    ]
