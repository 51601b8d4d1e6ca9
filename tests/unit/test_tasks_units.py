"""Unit conversion: arithmetic against textbook values and laws, splits, the parser against the specification,
and the real files."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.errors import ConfigError, DataError
from redline.tasks import units
from redline.tasks.task import Question

REAL = Path(__file__).parents[3] / "shared" / "data" / "reasoning" / "units"
FAMILY = st.sampled_from(sorted(units.FAMILIES))


@st.composite
def spellings(draw: st.DrawFn, how_many: int) -> list[str]:
    family = units.FAMILIES[draw(FAMILY)]
    return [draw(st.sampled_from(draw(st.sampled_from(family))[1].split(","))) for _ in range(how_many)]


def factor(a: str, b: str) -> float:
    return units.convert(1, a, b)


@pytest.mark.parametrize(
    ("number", "a", "b", "expected"),
    [
        (2, "hour", "min", 120),
        (1, "mi", "km", 1.609344),
        (1, "ton", "pound", 2204.6226218487757),
        (1, "metric ton", "kg", 1000),
        (1, "year", "day", 365.24219878),
        (1, "year", "month", 12),
        (1, "month", "days", 30.436849898),
        (1, "century", "weeks", 5217.745696875),
        (1, "ounce", "gram", 28.349523125),
        (1, "ounce", "mL", 29.5735295625),
        (1, "gallon", "ounce", 128),
        (1, "pound", "ounce", 16),
        (1, "L", "mL", 1000),
        (1, "cc", "ml", 1),
        (3, "KB", "bit", 24000),
        (1, "G", "M", 1000),
        (36, "km/h", "m/s", 10),
        (1, "mph", "ft/s", 22 / 15),
        (1, "yd", "in", 36),
    ],
)
def test_conversions_that_a_textbook_has(number, a, b, expected):
    assert units.convert(number, a, b) == pytest.approx(expected, rel=1e-9)


@given(spellings(2), st.integers(1, 1000))
def test_there_and_back_is_where_one_started(pair, number):
    a, b = pair
    assert units.convert(Fraction(units.convert(number, a, b)), b, a) == pytest.approx(number, rel=1e-12)


@given(spellings(3))
def test_by_way_of_a_third_unit_is_the_same(three):
    a, b, c = three
    if {"ounce"} < {a, b, c}:
        return  # it is two units: which one depends on its neighbour
    assert factor(a, b) * factor(b, c) == pytest.approx(factor(a, c), rel=1e-12)


def test_units_of_two_families_do_not_convert():
    with pytest.raises(ConfigError, match="'kg' and 'cm'"):
        units.convert(1, "kg", "cm")


# ---- the questions ----


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Question]]:
    return {split: units.generate(split, None, 0) for split in units.SPLITS}


def unit_of(question: Question, end: str) -> tuple[str, str]:
    """The unit behind a spelling: all its spellings, as the table has them."""
    family = question.meta["family"]
    return family, next(
        names for _, names in units.FAMILIES[family] if question.meta[end] in names.split(",")
    )


def test_splits_are_disjoint_in_every_spelling_and_hold_every_family(splits):
    spelt = {s: {(q.meta["from"], q.meta["to"], q.meta["number"]) for q in qs} for s, qs in splits.items()}
    meant = {
        s: {(unit_of(q, "from"), unit_of(q, "to"), q.meta["number"]) for q in qs} for s, qs in splits.items()
    }
    for keys in (spelt, meant):
        assert not keys["train"] & keys["valid"]
        assert not keys["train"] & keys["test"]
        assert not keys["valid"] & keys["test"]
    for questions in splits.values():
        assert {q.meta["family"] for q in questions} == set(units.FAMILIES)
    assert all(units.parse_question(text)._replace(number=0) for text, _ in units.EXAMPLES)
    shown = {
        (c.source, c.target, c.number) for c in (units.parse_question(text) for text, _ in units.EXAMPLES)
    }
    assert shown <= spelt["train"], "what every prompt shows must not be held out"


def test_a_split_holds_each_question_once_and_all_templates(splits):
    for questions in splits.values():
        assert len({q.text for q in questions}) == len({q.id for q in questions}) == len(questions)
    assert len(units.TEMPLATES) == 23
    numbers = {q.meta["number"] for q in splits["train"]}
    assert numbers == set(range(1, 11))
    assert len({(q.meta["from"], q.meta["to"]) for qs in splits.values() for q in qs}) == 385


def test_answers_and_solutions_of_generated_questions(splits):
    for question in splits["valid"]:
        asked = units.parse_question(question.text)
        assert asked is not None
        assert (asked.number, asked.source, asked.target) == tuple(
            question.meta[k] for k in ("number", "from", "to")
        )
        assert float(question.answer) == units.convert(*asked)
        assert units.score(question, question.solution).correct


def test_a_seed_gives_one_order_and_a_longer_list_begins_with_a_shorter():
    assert units.generate("train", 50, 7) == units.generate("train", 200, 7)[:50]
    assert units.generate("train", 50, 7) != units.generate("train", 50, 8)


def test_families_come_in_equal_shares():
    found = [q.meta["family"] for q in units.generate("train", 3000, 1)]
    assert all(400 < found.count(family) < 600 for family in units.FAMILIES)


def test_what_cannot_be_generated():
    with pytest.raises(ConfigError, match="did you mean 'valid'"):
        units.generate("vald", 1, 0)
    with pytest.raises(ConfigError, match="8,280 distinct questions; got a count of 8,281"):
        units.generate("valid", 8281, 0)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        units.generate("valid", 0, 0)


# ---- parsing and scoring ----


def specified(text: str) -> float:
    try:
        return float(text.split("<answer>")[1].split("</answer>")[0])
    except (IndexError, ValueError):
        return math.nan


PIECES = st.sampled_from(
    ["<answer>", "</answer>", "12", "-3.5", " ", "nan", "inf", "1_000", "٣", "1e3", "1e999", "x", "\n", "="]
)


@given(st.lists(PIECES, max_size=8).map("".join), st.sampled_from([12.0, -3.5, 1000.0, 0.125, 0.0]))
def test_parsing_and_the_rule_are_the_specified_expressions(text, reference):
    value = specified(text)
    found = units.parse_answer(text)
    assert math.isnan(value) if found is None else float(found) == value
    verdict = units.score(Question("q", "?", repr(reference)), text)
    assert verdict.parsed == (not math.isnan(value))
    assert verdict.answer is None or verdict.answer == verdict.answer.strip()
    right = math.isfinite(value) and abs(round(value, 3) - round(reference, 3)) < 0.05 * abs(
        round(reference, 3)
    )
    assert verdict.correct == right
    assert verdict.reward == (1.0 if right else 0.0)
    assert (verdict.answer is None) == (not verdict.parsed)


@pytest.mark.parametrize(
    ("text", "correct", "parsed"),
    [
        ("<answer>100</answer>", True, True),
        ("<answer>104.999</answer>", True, True),
        ("<answer>105</answer>", False, True),  # 5% off exactly: the rule is strict
        ("<answer>95.001", True, True),  # no closing tag
        ("<answer>100</answer> <answer>7</answer>", True, True),  # the first tag counts
        ("<answer>100 cm</answer>", False, False),
        ("<answer>nan</answer>", False, False),
        ("<answer>-inf</answer>", False, True),
        ("100", False, False),
        ("", False, False),
    ],
)
def test_verdicts_by_hand(text, correct, parsed):
    verdict = units.score(Question("q", "?", "100.0"), text)
    assert (verdict.correct, verdict.parsed) == (correct, parsed)


# ---- files ----


def test_files_keep_their_order_and_need_not_be_of_the_grammar(tmp_path):
    (tmp_path / "valid.json").write_text(
        json.dumps([["What is 3 in in cm?", 7.62], ["And what of it?", 4], ["How many B is 1 KB?", 1000]])
    )
    found = units.make(str(tmp_path)).questions("valid", 2, 5)
    assert [(q.id, q.text, q.answer) for q in found] == [
        ("valid-0", "What is 3 in in cm?", "7.62"),
        ("valid-1", "And what of it?", "4.0"),
    ]
    assert found[0].meta == {"family": "length", "from": "in", "to": "cm", "number": 3}
    assert found[1].meta == {}


@pytest.mark.parametrize(
    "row", ["[1, 2]", '["q"]', '["q", true]', '["q", NaN]', '["q", 1e999]', '["q", "4"]', "{}"]
)
def test_a_row_that_is_no_question(tmp_path, row):
    (tmp_path / "train.json").write_text(f'[["What is 3 in in cm?", 7.62], {row}]')
    with pytest.raises(DataError, match=r"train.json, row 1: \[question, finite number\] is needed"):
        units.make(str(tmp_path)).questions("train", None, 0)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "train.json").write_text("{}")
    with pytest.raises(DataError, match="must hold a list"):
        units.make(str(tmp_path)).questions("train", None, 0)
    with pytest.raises(DataError, match=r"no split 'valid' here: .* holds train$"):
        units.make(str(tmp_path)).questions("valid", None, 0)
    (tmp_path / "train.json").write_text("[")
    with pytest.raises(DataError, match="is damaged"):
        units.make(str(tmp_path)).questions("train", None, 0)


@pytest.mark.skipif(not REAL.exists(), reason="the real files are not shipped")
def test_the_grammar_covers_the_real_files_and_agrees_with_every_answer():
    drawn = {
        (c.source, c.target)
        for family in units.FAMILIES
        for s in units.SPLITS
        for c in units.conversions(family, s)
    }
    for split in ("train", "valid"):
        questions = units.make(str(REAL)).questions(split, None, 0)
        assert len(questions) == 1000
        for question in questions:
            asked = units.parse_question(question.text)
            assert asked is not None, question.text
            assert asked[1:] in drawn
            assert asked.number in units.NUMBERS
            assert units.convert(*asked) == pytest.approx(float(question.answer), rel=1e-12)
            assert units.score(question, question.solution).correct
