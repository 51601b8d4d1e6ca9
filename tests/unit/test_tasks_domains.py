"""The domains of reasoning: where an answer stands, when it is right, which questions are held out, and the
files that they read."""

import gzip
import json
import re
from pathlib import Path

import pytest

from redline.errors import ConfigError, DataError
from redline.tasks import answers, domain, maths
from redline.tasks.registry import load_task
from redline.tasks.task import Question

DOMAINS = ("math", "simulation", "tables")

# ---- where an answer stands ----


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("I say <answer>1</answer>, no, <answer> 2 </answer> it is", "2"),
        ("<answer>one\ntwo</answer>", "one\ntwo"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<think><answer>1</answer></think> so \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} and more", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{", None),
        ("[ANSWER]\n[1, 2]\n[/ANSWER]", "[1, 2]"),
        ("steps\n#### 42", "42"),
        ("steps\n**Answer: 42**", "42"),
        ("So the answer is 42.", "42."),
        ("The answer is 42\nor so", None),
        ("42", None),
        ("<answer> </answer>", None),
        ("<answer>" + "9" * 30_000 + "</answer>", None),
        ("", None),
    ],
)
def test_where_an_answer_stands(completion, answer):
    assert answers.find(completion) == answer


def test_the_last_block_is_the_one_meant():
    text = "First\n```python\na = 1\n```\nbetter\n```python\nb = 2\n```\nDone."
    assert answers.find_block(text) == "b = 2"
    assert answers.find_block("```py\nb = 2") == "b = 2", "the closing fence may be cut off"
    assert answers.find_block("b = 2") is None


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("1,234.50", "1234.5", True),
        ("$12.", "12", True),
        ("-3", "3", False),
        ("12,34", "1234", False),
        ("[1, 2]", "[1,2.0]", True),
        ("(1, 2)", "[1, 2]", False),
        ("{'a': True}", '{"a": true}', True),
        ("True", "1", False),
        ('"Ann Lee"', "ann  lee.", True),
        ("{1, 2}", "{2, 1}", True),
        ("[" * 5000, "[", False),
        ("1e5", "100000", True),
    ],
)
def test_when_two_answers_are_the_same(a, b, equal):
    assert answers.same(a, b) is equal
    assert answers.same(b, a) is equal


def test_capitals_matter_only_where_they_should():
    assert answers.same("'Ab'", "ab")
    assert not answers.same("'Ab'", "ab", fold=False)


# ---- generated questions ----


@pytest.mark.parametrize("name", DOMAINS)
def test_splits_share_nothing_and_a_seed_fixes_the_questions(name):
    task = load_task(name)
    train, again = (task.questions("train", 300, 0) for _ in range(2))
    assert train == again
    assert task.questions("train", 20, 0) == train[:20]
    assert task.questions("train", 20, 1) != train[:20]
    assert len({question.id for question in train}) == len({question.text for question in train}) == 300
    held_out = {q.text for seed in (0, 1) for q in task.questions("valid", 200, seed)}
    assert not held_out & {q.text for seed in (0, 1, 2) for q in task.questions("train", 500, seed)}


@pytest.mark.parametrize("name", DOMAINS)
def test_a_solution_is_right_another_answer_wrong_and_none_a_format_failure(name):
    task = load_task(name)
    for question in task.questions("valid", 100, 0):
        right = task.score(question, question.solution)
        wrong = task.score(question, "<answer>no such thing</answer>")
        none = task.score(question, f"It is {question.answer}")
        assert (right.correct, right.parsed, right.reward) == (True, True, 1.0), question
        assert (wrong.correct, wrong.parsed, wrong.reward) == (False, True, 0.0)
        assert (none.correct, none.parsed, none.reward, none.answer) == (False, False, 0.0, None)
        assert task.answer_of(question.solution) == question.solution


def test_generated_answers_are_true():
    for question in load_task("math").questions("valid", 200, 0):
        numbers = [float(n) for n in re.findall(r"(?<![\w^*])\d+(?:\.\d+)?(?![\w^])", question.text)]
        if question.meta["kind"] == "rate":
            assert numbers[1] * numbers[2] == pytest.approx(float(question.answer), rel=1e-5), question
        else:
            sign = question.text.split()[3]
            assert {"*": numbers[0] * numbers[1], "+": sum(numbers), "-": numbers[0] - numbers[1]}[
                sign
            ] == int(question.answer)
    for question in load_task("tables").questions("valid", 200, 0):
        *lines, asked = question.text.splitlines()
        cells = dict(line.strip("| ").split(" | ") for line in lines)
        if question.meta["kind"] == "conversion":
            found = re.fullmatch(r"What is (\d+ .+) in (.+)\?", asked)
            assert found is not None
            assert cells[found[1]] == f"{question.answer} {found[2]}"
        elif question.meta["kind"] == "look-up":
            assert cells[asked.split()[-1].rstrip("?")] == question.answer
        else:
            assert max((int(v), k) for k, v in cells.items() if k != "item")[1] == question.answer
    for question in load_task("simulation").questions("valid", 200, 0):
        first, *numbers = map(int, re.findall(r"\d+", question.text))
        if question.meta["kind"] == "update":
            assert int(question.answer) == first + numbers[0] * (1 if "Add" in question.text else -1)
        elif question.meta["kind"] == "count":
            assert int(question.answer) == sum(first == number for number in numbers)
        else:
            assert question.answer.split() == sorted(map(str, [first, *numbers]))


def test_a_count_that_no_split_holds_and_an_unknown_split_are_refused():
    def draw(randomness):
        number = str(randomness.randint(1, 30))
        return domain.Drawn(number, number, "", domain.split_of(number), "")

    assert len(domain.generate("t", draw, "train", None, 0)) < 30
    with pytest.raises(ConfigError, match="split of t has about"):
        domain.generate("t", draw, "train", 31, 0)
    with pytest.raises(ConfigError, match="did you mean 'valid'"):
        load_task("tables").questions("vaild", 1, 0)


# ---- files ----


def write_lines(path: Path, *rows: dict[str, object]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def test_maths_files_are_compared_by_mathematics(tmp_path):
    pytest.importorskip("math_verify", reason="the extra rl is not installed")
    half = {"problem": "A half?", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": "Level 1"}
    write_lines(tmp_path / "train.jsonl", half, {"problem": " a HALF? ", "answer": "x"}, {"problem": "2?"})
    write_lines(tmp_path / "validation.jsonl", {"problem": "Roots?", "answer": "2\\sqrt{3}"}, half)
    task = load_task("math", str(tmp_path))
    with pytest.raises(DataError, match=r"test.jsonl, math500.jsonl"):
        task.questions("test", None, 0)
    assert task.questions("train", None, 0) == [], "both are validation questions"
    roots, a_half = task.questions("valid", None, 0)
    assert a_half.meta["level"] == "Level 1"
    assert task.score(a_half, "So \\boxed{0.5}").correct
    assert task.score(roots, "<answer>\\sqrt{12}</answer>").correct
    assert not task.score(roots, "<answer>\\sqrt{13}</answer>").correct
    assert maths.equal("180", "180\\text{ miles}")
    assert not maths.equal("12", "13")


def test_tables_and_functions_are_read_from_their_public_files(tmp_path):
    table = [["Year", "City"], ["2004", "Oslo|Bergen"], ["2008", "Rome"]]
    rows = [{"question": "which cities?", "answer": ["Rome", "Oslo/Bergen"], "table": table}]
    write_lines(tmp_path / "wtq_train.jsonl.gz", *rows)
    write_lines(tmp_path / "wtq_test.jsonl", {"question": "when?", "answer": ["2004"], "table": table})
    task = load_task("tables", str(tmp_path))
    (question,) = task.questions("train", None, 0)
    assert question.text.startswith("| Year | City |\n| 2004 | Oslo/Bergen |")
    assert task.score(question, "<answer>oslo/bergen | Rome</answer>").correct
    assert not task.score(question, "<answer>Rome</answer>").correct
    write_lines(
        tmp_path / "cruxeval.jsonl",
        *(
            {"code": f"def f(x):\n    return [x, {n}]", "input": "'A'", "output": f"['A', {n}]"}
            for n in range(60)
        ),
    )
    task = load_task("simulation", str(tmp_path))
    train, valid, test = (task.questions(split, None, 0) for split in ("train", "valid", "test"))
    assert len(train) + len(valid) + len(test) == 60
    assert min(len(train), len(valid), len(test)) > 0
    assert task.score(train[0], f"[ANSWER]{train[0].answer}[/ANSWER]").correct
    assert not task.score(train[0], f"[ANSWER]{train[0].answer.lower()}[/ANSWER]").correct
    told = Question("q", "", '{"n": [1, 2]}')
    assert task.score(told, '```json\n{"output": {"n": [1, 2]}}\n```').correct


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "wtq_train.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"wtq_train.jsonl.gz cannot be read as gzipped JSONL"):
        load_task("tables", str(tmp_path)).questions("train", None, 0)
