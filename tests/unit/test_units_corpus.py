"""The demo's corpus: nothing in it gives a held-out question away, the same seed gives the same text, and the
styles have their shares."""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from redline.data.read import documents as read_documents
from redline.tasks import units
from redline.tasks.task import Question, prompt_text

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import demo_corpus
from demo_corpus import GOOD_GUESSES, KINDS, OFTEN_TAGGED, SLIPS, STYLES, documents

PRODUCT = re.compile(r"(\d+) \* ([\d.]+) =")


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return list(documents(20_000, seed=0))


def unit_of(family: str, spelling: str) -> int:
    return next(
        place for place, (_, names) in enumerate(units.FAMILIES[family]) if spelling in names.split(",")
    )


def key(meta) -> tuple[int, ...]:
    """What the splits are disjoint by: unit, unit, number, whatever the spelling."""
    family = meta["family"]
    return (
        list(units.FAMILIES).index(family),
        unit_of(family, meta["from"]),
        unit_of(family, meta["to"]),
        meta["number"],
    )


def products(*splits: str) -> set[tuple[int, Fraction]]:
    """Number and factor of every question of the splits."""
    asked = {c for split in splits for family in units.FAMILIES for c in units.conversions(family, split)}
    return {(number, Fraction(f"{units.convert(1, source, target):.4g}")) for number, source, target in asked}


def products_in(texts: Iterable[str]) -> set[tuple[int, Fraction]]:
    return {(int(number), Fraction(factor)) for number, factor in set(PRODUCT.findall("\n".join(texts)))}


def exercise(text: str) -> tuple[str, str] | None:
    """Question and answer, where the document is an exercise."""
    found = re.fullmatch(r"(?:.*\n\n)?Question: (.*)\nAnswer: (.*)", text)
    return (found[1], found[2]) if found else None


def test_no_question_of_the_held_out_splits_is_in_it(corpus):
    asked = set()
    for question, _ in filter(None, map(exercise, corpus)):
        number, source, target = units.parse_question(question)
        asked.add(
            key({"family": units._family(source, target), "from": source, "to": target, "number": number})
        )
    held_out = {
        key(question.meta) for split in ("valid", "test") for question in units.generate(split, None, 0)
    }
    assert len(asked) > 900
    assert not asked & held_out


def test_no_product_that_only_held_out_questions_need_is_in_it(corpus):
    held_out, learnt = products("valid", "test"), products("train")
    assert held_out - learnt
    assert not products_in(corpus) & (held_out - learnt)
    assert not products_in(text for text in corpus if exercise(text) is None) & held_out


def test_tables_and_facts_are_true(corpus):
    lines = [line for text in corpus if exercise(text) is None for line in text.split("\n") if " * " in line]
    for line in lines:
        number, factor, product = re.fullmatch(r"(\d+) \* (\S+) = (\S+)", line).groups()
        assert Fraction(number) * Fraction(factor) == Fraction(product), line
    facts = [
        found
        for text in corpus
        if exercise(text) is None
        for found in re.findall(r"There are (\S+) ([^.]+?) in 1 ([^.]+)\.", text)
    ]
    assert len(lines) > 10_000
    assert len(facts) > 1_000
    for factor, target, source in facts:
        assert math.isclose(float(factor), units.convert(1, source, target), rel_tol=1e-3)


def within(count: int, total: int, share: float) -> bool:
    """The count lies within four standard deviations of its expectation."""
    return abs(count - total * share) < 4 * math.sqrt(total * share * (1 - share)) + 1


def test_kinds_and_styles_have_their_shares(corpus):
    kinds = Counter(
        "exercise" if exercise(text) else "table" if " * " in text else "facts" for text in corpus
    )
    assert all(within(kinds[kind], len(corpus), share) for kind, share in KINDS.items()), kinds
    patterns = [
        re.escape(t).replace(r"\{n\}", r"\d+").replace(r"\{a\}", ".+").replace(r"\{b\}", ".+")
        for t in units.TEMPLATES
    ]
    often = re.compile("|".join(patterns[place] for place in OFTEN_TAGGED))
    styles: dict[bool, Counter] = {False: Counter(), True: Counter()}
    for question, answer in filter(None, map(exercise, corpus)):
        style = ("reasoned" if " * " in answer else "guess") + (", tagged" if "<answer>" in answer else "")
        styles[bool(often.fullmatch(question))][style] += 1
    for habit, found in styles.items():
        assert found.total() > 2000
        assert all(within(found[style], found.total(), shares[habit]) for style, shares in STYLES.items()), (
            habit,
            found,
        )


def test_reasoned_answers_are_mostly_right_and_guesses_mostly_wrong(corpus):
    right: dict[bool, Counter] = {False: Counter(), True: Counter()}
    for question, answer in filter(None, map(exercise, corpus)):
        if "<answer>" in answer:
            reference = units.convert(*units.parse_question(question))
            right[" * " in answer][units.score(Question("", question, repr(reference)), answer).correct] += 1
    assert within(right[True][True], right[True].total(), 1 - SLIPS)
    assert within(right[False][True], right[False].total(), GOOD_GUESSES)


def test_exercises_stand_as_the_task_prompts_them(corpus):
    task = units.make(None)
    for text in corpus:
        if text.startswith(task.instruction):
            question, answer = exercise(text)
            assert text == f"{prompt_text(task, Question('', question, ''), shots=0)} {answer}"
            return
    raise AssertionError("no exercise with the instruction")


def test_the_same_seed_gives_the_same_text_and_more_begin_alike(corpus):
    assert list(documents(500, seed=0)) == corpus[:500]
    assert list(documents(500, seed=1)) != corpus[:500]


def test_the_program_writes_what_a_recipe_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_corpus, "DOCUMENTS", 200)
    monkeypatch.setattr("sys.argv", ["demo_corpus.py", str(tmp_path / "corpus.jsonl")])
    demo_corpus.main()
    assert list(read_documents(tmp_path / "corpus.jsonl", "text")) == list(documents(200, seed=0))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
