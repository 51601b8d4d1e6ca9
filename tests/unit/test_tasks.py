"""Tasks as a user meets them: prompts, metrics, a file of one's own, the documented example, and the command
line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.cli.main import main
from redline.errors import ConfigError, DataError
from redline.tasks.pool import Pool
from redline.tasks.registry import TASKS, load_task
from redline.tasks.task import STOP, Question, Task, Verdict, prompt_messages, prompt_text, shares

DOCUMENT = Path(__file__).parents[2] / "docs" / "tasks.md"


def made(**fields: Any) -> Task:
    """A task without questions, to whose scorer every answer is wrong."""
    return Task(
        name="t", about="", questions=lambda split, count, seed: [],
        score=lambda question, completion: Verdict(False, True, 0.0, completion), **fields,
    )  # fmt: skip


# ---- prompts and metrics ----


def test_prompts_hold_instruction_examples_and_question():
    task = made(instruction="Add.", examples=(("1+1?", "2"), ("2+2?", "4")))
    asked = Question("q", "3+3?", "6")
    text = prompt_text(task, asked)
    assert text == "Add.\n\nQuestion: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer: 4\n\nQuestion: 3+3?\nAnswer:"
    assert text.count(STOP) == 3
    assert prompt_text(task, asked, shots=0) == "Add.\n\nQuestion: 3+3?\nAnswer:"
    assert [(m["role"], m["content"]) for m in prompt_messages(task, asked, shots=1)] == [
        ("system", "Add."),
        ("user", "1+1?"),
        ("assistant", "2"),
        ("user", "3+3?"),
    ]
    assert prompt_messages(made(), asked) == [{"role": "user", "content": "3+3?"}]


def test_metrics_by_hand():
    verdicts = [
        Verdict(True, True, 1.0, "1"),
        Verdict(False, True, 0.0, "2"),
        Verdict(False, False, 0.0, None),
        Verdict(True, True, 1.0, "1"),
    ]
    found = shares(verdicts)
    assert (found["accuracy"], found["answer_rate"]) == (0.5, 0.75)
    with pytest.raises(DataError, match="at least one verdict"):
        shares([])


@pytest.mark.parametrize("name", [name for name in TASKS if name != "code"])
def test_the_examples_of_a_task_follow_its_own_rules(name):
    task = load_task(name)
    assert task.name == name
    for asked, completion in task.examples:
        said = re.findall("<answer>(.*)</answer>", completion)
        assert task.score(Question("q", asked, said[0]), completion).correct


# ---- a task of one's own ----


def example() -> str:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.S)[0]


def test_the_documented_task_is_thirty_lines_and_works(tmp_path, capsys):
    source = example()
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    path = tmp_path / "my_task.py"
    path.write_text(source)
    task = load_task(f"{path}:make")
    train, valid = (task.questions(split, None, 0) for split in ("train", "valid"))
    assert not {q.text for q in train} & {q.text for q in valid}
    assert task.questions("train", 2, 0) == train[:2]
    with Pool(f"{path}:make", workers=1) as pool:
        verdicts = pool.score([*((q, f"It is {q.solution}.") for q in train), (valid[0], "")])
    found = shares(verdicts)
    assert (found["accuracy"], found["answer_rate"]) == (6 / 7, 6 / 7)
    assert main(["tasks", f"{path}:make", "--split", "train", "--count", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["prompt"].startswith(
        "Answer with one word.\n\nQuestion: Spell river backwards.\nAnswer: revir\n\nQuestion: Spell "
    )


@pytest.mark.parametrize(
    ("source", "function", "says"),
    [
        ("def make(data: return 1", "make", "line 1: not valid Python"),
        ("def make(data): return 1", "make", "must return a redline.tasks.task.Task, got int"),
        ("def make(data): return 1", "mak", "no function 'mak' (did you mean 'make'?)"),
    ],
)
def test_a_file_that_is_no_task(tmp_path, source, function, says):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_task(f"{tmp_path / 'bad.py'}:{function}")


# ---- the command line ----


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["tasks", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_command_lists_tasks_and_prints_questions(capsys):
    assert [line.split()[0] for line in lines(capsys) if not line.startswith(" ")] == list(TASKS)
    assert sum(line.startswith("units-") for line in lines(capsys, "units")) == 10
    five = " ".join(
        " ".join(lines(capsys, "units", "--split", "test", "--count", "5", "--seed", "3")).split()
    )
    asked = TASKS["units"](None).questions("test", 5, 3)
    assert five == " ".join(["id answer question", *(f"{q.id} {q.answer} {q.text}" for q in asked)])
    shown = json.loads(
        "\n".join(lines(capsys, "units", "--split", "test", "--count", "5", "--seed", "3", "--json"))
    )
    assert [(row["id"], row["question"], row["answer"]) for row in shown] == [q[:3] for q in asked]


def test_the_command_scores_by_id_and_by_question(capsys, tmp_path):
    questions = load_task("units").questions("valid", 8, 5)
    behind = " No: <answer>-1</answer>"  # the task's `end` ended the answer
    rows = [{"id": q.id, "completion": q.solution + behind} for q in questions[:3]]
    rows += [{"question": q.text, "completion": "<answer>-1</answer>"} for q in questions[3:6]]
    rows += [{"question": q.text, "completion": "I cannot say"} for q in questions[6:]]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = json.loads("\n".join(lines(capsys, "units", "--score", str(path), "--json")))
    assert found == {
        "completions": 8,
        "questions": 8,
        "accuracy": 3 / 8,
        "answer_rate": 6 / 8,
        "failures": [],
    }
    shown = lines(capsys, "units", "--score", str(path))
    assert shown[:2] == ["accuracy     37.5%", "answer rate  75.0%"]


@pytest.mark.parametrize("arguments", [[], ["units", "--count", "5"], ["--help"]], ids=" ".join)
def test_the_command_answers_without_torch(arguments):
    program = (
        "import sys; sys.modules['torch'] = None; from redline.cli.main import main; sys.exit(main(['tasks',"
        " *sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["unitz"], 2, "did you mean 'units'?"),
        (["my_task.py"], 2, "my_task.py:make"),
        (["none.py:make"], 2, "no task file at none.py"),
        (["units", "--split", "vald"], 2, "did you mean 'valid'?"),
        (["units", "--count", "0"], 2, "at least 1, got 0"),
        (["units", "--count", "-3"], 2, "at least 1, got -3"),
        (["units", "--count", "999999"], 2, "distinct questions; got a count of 999,999"),
        (["gsm8k"], 2, "--data FOLDER"),
        (["gsm8k", "--data", "nowhere"], 3, "nowhere holds no .jsonl file"),
        (["units", "--data", "nowhere", "--seed", "1"], 2, "files keep their order"),
        (["--score", "answers.jsonl"], 2, "--score needs a task"),
        (["units", "--score", "missing.jsonl"], 3, "missing.jsonl cannot be read"),
        (["units", "--score", "EMPTY"], 3, "is empty"),
        (["units", "--score", "BROKEN"], 3, "line 1 is damaged"),
        (["units", "--score", "SCALAR"], 3, "line 1 is damaged: it must hold a table"),
        (["units", "--score", "FIELDS"], 3, "answer 1: needs `completion` and either `id` or `question`"),
        (["units", "--score", "UNKNOWN"], 3, "no id 'units-0' among the 8,280 questions of the valid split"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, arguments, code, says):
    monkeypatch.chdir(tmp_path)
    texts = {
        "EMPTY": "\n",
        "BROKEN": "{",
        "SCALAR": "4",
        "FIELDS": '{"id": "x"}',
        "UNKNOWN": '{"id": "units-0", "completion": "x"}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert main(["tasks", *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert says in shown.err


def test_an_answer_ends_where_the_task_says():
    task, plain = made(end="</answer>"), made()
    assert task.answer_of("so <answer>3</answer> is it. <answer>4</answer>") == "so <answer>3</answer>"
    assert task.answer_of("so <answer>3") == "so <answer>3"
    assert plain.answer_of("all of it") == "all of it"
    whole, part = "so <answer>3</answer>", "so <answer>3"
    assert [task.finished(text, "stop") for text in (whole, part)] == [True, True]
    assert [task.finished(text, "length") for text in (whole, part)] == [True, False]
    assert [plain.finished(whole, finish) for finish in ("stop", "length")] == [True, False]
