"""The domains of reasoning: where an answer stands, when it is right, which questions are held out, and the
files that they read."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from redline.errors import ConfigError, DataError, MissingExtra
from redline.tasks import answers, domain, maths
from redline.tasks.pool import Pool
from redline.tasks.registry import load_task
from redline.tasks.task import Question

DOMAINS = ("math", "logic", "simulation", "tables", "science")

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
    for question in load_task("logic").questions("valid", 200, 0):
        if question.meta["kind"] == "order":
            above = dict(re.findall(r"(\w+) is taller than (\w+)\.", question.text))
            end = next(iter(above))
            follow = above if "shortest" in question.text else {b: a for a, b in above.items()}
            while end in follow:
                end = follow[end]
            assert question.answer == end
        else:
            rule, animal, kind = re.findall(r"^(All|No) (\w+?)s? (?:is|are) .*? is a (\w+)\.", question.text)[
                0
            ]
            assert question.answer == ("unknown" if animal != kind else {"All": "yes", "No": "no"}[rule])
    for question in load_task("science").questions("valid", 200, 0):
        a, b = map(int, re.findall(r"(?<!\^)\b\d+\b", question.text))
        divided = question.meta["kind"] in ("speed", "acceleration", "resistance", "density")
        assert float(question.answer) == (a / b if divided else a * b)


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


def test_mathematics_without_end_is_killed_and_costs_its_own_completion(tmp_path):
    pytest.importorskip("math_verify", reason="the extra rl is not installed")
    for split, text in (("train", "Root?"), ("validation", "Other?")):
        write_lines(tmp_path / f"{split}.jsonl", {"problem": text, "answer": "\\sqrt{2}"})
    (question,) = load_task("math", str(tmp_path)).questions("train", None, 0)
    said = ("\\sqrt{2}", "9^{9^{9^{9}}}", "\\sqrt{2}")
    with Pool("math", str(tmp_path), workers=1, budget_s=2) as pool:
        verdicts = pool.score([(question, f"\\boxed{{{text}}}") for text in said])
    assert [verdict.correct for verdict in verdicts] == [True, False, True]
    assert verdicts[1].reason == "the scorer took more than 2 s and was killed"


def test_the_documented_domain_works(tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    path = tmp_path / "parity.py"
    path.write_text(re.findall(r"```python\n(.*?)```", document, flags=re.S)[1])
    write_lines(tmp_path / "train.jsonl", {"number": 12})
    write_lines(tmp_path / "valid.jsonl", {"number": 13}, {"word": "none"})
    task = load_task(f"{path}:make")
    assert not {q.text for q in task.questions("train", 50, 0)} & {
        q.text for q in task.questions("valid", 50, 0)
    }
    for question in [
        *task.questions("test", 20, 0),
        *load_task(f"{path}:make", str(tmp_path)).questions("valid", None, 0),
    ]:
        parity = "odd" if int(re.findall(r"\d+", question.text)[0]) % 2 else "even"
        assert task.score(question, f"<answer>{parity}</answer>").correct
        assert task.score(question, question.solution).correct


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


def test_puzzles_are_read_from_their_public_files(tmp_path):
    rows = [{"quiz": "Who is who?", "solution_text_format": "(1) Zoey is a knight\n(2) Ann is a knave"}]
    write_parquet(tmp_path / "kk_3ppl_train.parquet", rows)
    write_lines(
        tmp_path / "folio-validation.jsonl",
        {"premises": ["All men are mortal."], "conclusion": "Ann is mortal.", "label": "Uncertain"},
    )
    task = load_task("logic", str(tmp_path))
    (island,) = task.questions("train", None, 0)
    assert task.score(island, "<answer>Ann is a knave, and Zoey is a knight.</answer>").correct
    assert not task.score(island, "<answer>Zoey is a knight</answer>").correct
    (folio,) = task.questions("valid", None, 0)
    assert task.score(folio, "<answer>uncertain</answer>").correct
    pytest.importorskip("math_verify", reason="the extra rl is not installed")
    choices = {"question": "Which?", "choices": ["one", "two"], "answer": 1}
    write_lines(tmp_path / "mmlu_stem.jsonl", *({**choices, "question": f"Which of {n}?"} for n in range(40)))
    task = load_task("science", str(tmp_path))
    question = task.questions("valid", 1, 0)[0]
    assert [
        task.score(question, f"<answer>{said}</answer>").correct
        for said in ("B", "(b)", "B. two", "A", "Both")
    ] == [True, True, True, False, False]


# ---- GURU ----


def write_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def guru_row(source: str, truth: object, text: str = "How many?", **extra: object) -> dict[str, object]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "ability": source.partition("__")[0],
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 0, "split": "train", **extra},
    }


ZEBRA = {"header": ["House", "Name"], "rows": [["1", "Ann"], ["2", "Bob"]]}


@pytest.mark.parametrize(
    ("name", "source", "truth", "completion", "reward"),
    [
        ("math", "math__combined", "\\frac{3}{4}", "So \\boxed{0.75}", 1),
        ("math", "math__combined", "12", "So \\boxed{13}", 0),
        ("tables", "table__hitab", "3|Oslo", "\\boxed{oslo|3.0}", 1),
        ("logic", "logic__zebra_puzzle_dataset", ZEBRA, f"<answer>{json.dumps(ZEBRA)}</answer>", 1),
        (
            "logic",
            "zebra_puzzle_dataset",
            ZEBRA,
            "<answer>{'rows': [['1', 'Ann'], ['2', 'Cy']]}</answer>",
            0.75,
        ),
        ("logic", "ordering_puzzle_dataset", ["owl", "jay"], "<answer>[Owl, jay]</answer>", 1),
        ("logic", "ordering_puzzle_dataset", ["owl", "jay"], "<answer>['jay', 'owl']</answer>", 0),
        ("logic", "graph_logical_dataset", "Qp", "<answer>qP</answer>", 1),
        ("simulation", "simulation__codeio", '"output": {"n": 4}', '```json\n{"output": {"n": 4}}\n```', 1),
        ("simulation", "simulation__arcagi1", [[1, 0], [0, 1]], "<answer>[[1, 0],\n[0, 1]]</answer>", 1),
        ("simulation", "simulation__arcagi1", [[1, 0], [0, 1]], "<answer>[[1, 0], [1, 1]]</answer>", 0),
        ("science", "stem_web", "$6.0 \\times 10^{3}$", "\\boxed{6000}", 1),
        (
            "code",
            "codegen__leetcode2k",
            json.dumps(
                {"functional": "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(Solution().go)"}
            ),
            "```python\nclass Solution:\n    def go(self, x: List[int]):\n        return x * x\n```",
            1,
        ),
        (
            "code",
            "codegen__primeintellect",
            json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3\n", "7\n"]}),
            "```python\nprint(sum(map(int, input().split())))\n```",
            1,
        ),
    ],
)
def test_rows_of_guru_are_scored_by_their_source(tmp_path, name, source, truth, completion, reward):
    pytest.importorskip("math_verify", reason="the extra rl is not installed")
    prefix = {"tables": "table", "code": "codegen", "science": "stem"}.get(name, name)
    row = guru_row(source, truth, prefix="from typing import List")
    write_parquet(tmp_path / "train" / f"{prefix}__some_1k.parquet", [row])
    write_parquet(
        tmp_path / "online_eval" / f"{prefix}__other_1k.parquet", [guru_row(source, truth, "Held out?")]
    )
    task = load_task(name, str(tmp_path))
    (question,) = task.questions("train", None, 0)
    assert (question.text, task.instruction, task.examples) == ("How many?", "", ())
    assert [q.text for q in task.questions("valid", None, 0)] == ["Held out?"]
    verdict = task.score(question, completion)
    assert (verdict.reward, verdict.correct, verdict.parsed) == (reward, reward == 1, True)
    assert not task.score(question, "no idea").parsed


def test_a_file_of_guru_alone_is_divided_and_a_validation_question_never_trained_on(tmp_path):
    rows = [guru_row("table__a", str(n), f"Question {n % 90}?") for n in range(100)]
    write_parquet(tmp_path / "table__a_100.parquet", rows)
    task = load_task("tables", str(tmp_path))
    splits = {split: {q.text for q in task.questions(split, None, 0)} for split in domain.SPLITS}
    assert sum(map(len, splits.values())) == 90
    assert not splits["train"] & splits["valid"]
    write_parquet(
        tmp_path / "online_eval" / "table__a_1.parquet", [guru_row("table__a", "1", "question  7?")]
    )
    assert len({q.text for q in load_task("tables", str(tmp_path)).questions("train", None, 0)}) == 89


def test_what_guru_cannot_mean_is_refused_and_what_cannot_be_scored_left_out(tmp_path):
    write_parquet(tmp_path / "simulation__codeio_1.parquet", [guru_row("simulation__codeio", "{")])
    with pytest.raises(DataError, match="simulation__codeio_1-0: a ground truth of simulation__codeio"):
        load_task("simulation", str(tmp_path)).questions("train", None, 0)
    loops = json.dumps({"functional": "for x in range(3):\n    assert f(x) == x"})
    write_parquet(tmp_path / "codegen__taco_1.parquet", [guru_row("codegen__taco", loops)])
    with pytest.raises(DataError, match="holds none with questions"):
        load_task("code", str(tmp_path)).questions("train", None, 0)


# ---- reasoning-gym ----


def test_the_data_sets_of_reasoning_gym_are_tasks():
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    task = load_task("gym:chain_sum")
    train, valid = (task.questions(split, 30, 0) for split in ("train", "valid"))
    assert not {q.text for q in train} & {q.text for q in valid}
    assert task.questions("train", 5, 0) == train[:5]
    for question in train:
        assert task.score(question, question.solution).correct
        assert not task.score(question, "<answer>x</answer>").correct
        assert not task.score(question, question.answer).parsed
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        load_task("gym:chain_sun")
    with pytest.raises(ConfigError, match="reads no files"):
        load_task("gym:chain_sum", "folder")


def test_without_reasoning_gym_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"redline\[gym\]"):
        load_task("gym:chain_sum")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "wtq_train.jsonl.gz").write_bytes(b"not gzip")
    task = load_task("tables", str(tmp_path))
    with pytest.raises(DataError, match=r"wtq_train.jsonl.gz cannot be read: "):
        task.questions("train", None, 0)
    for wrong, named in (
        ("{}\n[1]", "row 2: not a JSON object .got list"),
        ("{", "row 1: not a JSON object .Expecting"),
    ):
        (tmp_path / "wtq_train.jsonl.gz").write_bytes(gzip.compress(wrong.encode()))
        with pytest.raises(DataError, match=named):
            task.questions("train", None, 0)
