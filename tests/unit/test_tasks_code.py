"""Rewards for code: tests become calls without their results, programs run in the sandbox, and a bad one costs
its own completion only."""

import functools
import json

import pytest

from redline.tasks import asserts, code, sandbox
from redline.tasks.pool import Pool
from redline.tasks.registry import load_task
from redline.tasks.task import Question


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a busy machine does not reach, where the sandbox is used in this process."""
    limits = sandbox.Limits(wall_s=600, cpu_s=60)
    monkeypatch.setattr(code, "run", functools.partial(sandbox.run, limits=limits))


def block(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```"


def asking(**tests: object) -> Question:
    return Question("q", "Write it.", json.dumps(tests))


SQUARE = asking(setup="", calls=["f(3)", "f(-4)"], values=["9", "16"])
ADDER = asking(inputs=["1 2\n", "3 4\n"], outputs=["3\n", "7.0000000001\n"])


@pytest.mark.parametrize(
    ("question", "completion", "correct", "parsed"),
    [
        (SQUARE, block("def f(x):\n    return x * x"), True, True),
        (SQUARE, block("print('hello')\ndef f(x):\n    print(x)\n    return x * x"), True, True),
        (SQUARE, block("def f(x):\n    return x + 6"), False, True),
        (SQUARE, block("def f(x):\n    return str(x * x)"), False, True),
        (SQUARE, block("def g(x):\n    return x * x"), False, True),
        (SQUARE, block("def f(x:"), False, True),
        (SQUARE, "def f(x): return x * x", False, False),
        (ADDER, block("a, b = map(int, input().split())\nprint(a + b)"), True, True),
        (ADDER, block("a, b = map(int, input().split())\nprint(a * b)"), False, True),
        (ADDER, block("print(3)"), False, True),
        (
            SQUARE,
            block(
                "class Any(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return 'Any'\nf = Any"
            ),
            False,
            True,
        ),
        (SQUARE, block("import os\ndef f(x):\n    os._exit(0)"), False, True),
    ],
)
def test_what_earns_the_reward(question, completion, correct, parsed):
    verdict = code.score(question, completion)
    assert (verdict.correct, verdict.parsed, verdict.reward) == (correct, parsed, float(correct))


def test_generated_questions_have_solutions_that_pass():
    task = load_task("code")
    questions = task.questions("train", 6, 0)
    assert not {q.text for q in task.questions("valid", 20, 0)} & {
        q.text for q in task.questions("train", 200, 1)
    }
    for question in questions:
        assert task.score(question, question.solution).correct, question
    for (_, completion), value in zip(task.examples, ("7", "20"), strict=True):
        assert task.score(asking(setup="", calls=["f(4)"], values=[value]), completion).correct


def test_the_expected_results_never_enter_the_sandbox(monkeypatch):
    entered = []

    def watched(program: str, given: str = "") -> sandbox.Ran:
        entered.append((program, given))
        return sandbox.Ran("", None)

    monkeypatch.setattr(code, "run", watched)
    code.score(asking(setup="", calls=["f(2)"], values=["'the secret'"]), block("f = str"))
    code.score(asking(inputs=["2"], outputs=["the secret"]), block("f = str"))
    assert len(entered) == 2
    assert "the secret" not in repr(entered)


@pytest.mark.parametrize(
    ("tests", "calls", "values"),
    [
        ("assert f(1) == 2\nassert set(f(2)) == set((3, 4))", ["f(1)", "set(f(2))"], ["2", "{3, 4}"]),
        ("assert f(1)\nassert not f(2)", ["bool(f(1))", "bool(not f(2))"], ["True", "True"]),
        (
            "def check(candidate):\n    assert candidate(1, k=[2]) == {'a': 1}\n\ncheck(Solution().go)",
            ["(lambda candidate: candidate(1, k=[2]))(Solution().go)"],
            ["{'a': 1}"],
        ),
        ("def check_f():\n    assert f(1) == 'x'\n\ncheck_f()\n", ["f(1)"], ["'x'"]),
        ("assert f(0) == 0\ndef check_f():\n    assert f(1) == 'x'", ["f(0)", "f(1)"], ["0", "'x'"]),
        # in one order in all processes: texts hash differently in each
        (
            "assert f(1) == {'d', 'b', 'a', 'c'}\nassert f(2) == [({'z', 'y', 'x'},), {1: {'w', 'v', 'u'}}, (), set()]",
            ["f(1)", "f(2)"],
            ["{'a', 'b', 'c', 'd'}", "[({'x', 'y', 'z'},), {1: {'u', 'v', 'w'}}, (), set()]"],
        ),
    ],
)
def test_asserts_become_calls_and_values(tests, calls, values):
    read = json.loads(asserts.from_asserts(tests) or "{}")
    assert (read["calls"], read["values"]) == (calls, values)


@pytest.mark.parametrize(
    "tests", ["assert f(1) == g(2)", "for x in y:\n    assert f(x) == 1", "assert f(1) < 2", "a ="]
)
def test_tests_that_do_more_than_compare_are_left_out(tests):
    assert asserts.from_asserts(tests) is None


def test_problems_are_read_from_mbpp_with_its_own_splits(tmp_path):
    rows = [
        {
            "text": f"Add {n}.",
            "code": "def f(x):\r\n  return x",
            "task_id": n,
            "test_list": [f"assert f(1) == {n + 1}", "assert f(0) == 7"],
        }
        for n in (5, 20, 555, 700)
    ]
    rows.append({"text": "odd", "task_id": 701, "test_list": ["assert close(f(1))", "assert f(x) < 1"]})
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task("code", str(tmp_path))
    train, valid, test = (task.questions(split, None, 0) for split in ("train", "valid", "test"))
    assert [q.text for q in train] == [
        "Add 5.\nFor example, f(1) is 6.",
        "Add 700.\nFor example, f(1) is 701.",
    ]
    assert [q.text.split(".")[0] for q in [*valid, *test]] == ["Add 555", "Add 20"]
    assert train[0].solution == "```python\ndef f(x):\n  return x\n```"


def test_a_bad_program_costs_its_own_completion_in_the_pool():
    good = block("def f(x):\n    return x * x")
    programs = [
        "def f(x):\n    while True: pass",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\ndef f(x):\n    while True: os.fork()",
        "x = 'y' * (1 << 40)",
        "while True: print('x' * 10000)",
    ]
    items = [(SQUARE, text) for program in programs for text in (good, block(program))]
    with Pool("code", workers=1, budget_s=120) as pool:
        verdicts = pool.score(items)
    assert [verdict.correct for verdict in verdicts] == [True, False] * len(programs)
    assert [verdict.reason for verdict in verdicts] == [None] * len(items)


def test_a_scorer_that_the_sandbox_keeps_too_long_is_killed_and_the_record_says_so():
    waiting = block("import threading\nthreading.Event().wait()")
    with Pool("code", workers=1, budget_s=1.5) as pool:
        (waited,) = pool.score([(SQUARE, waiting)])
    assert waited.reason == "the scorer took more than 1.5 s and was killed"
    assert waited.reward == 0


def test_a_weak_sandbox_is_warned_of(monkeypatch):
    weak = [layer._replace(missing="not here") for layer in sandbox.layers()[:2]]
    weak.append(sandbox.layers()[2]._replace(missing=""))
    assert sandbox.weakness() is None or sandbox.in_force().name == "limits"
    monkeypatch.setattr(sandbox, "layers", lambda: weak)
    said = sandbox.weakness() or ""
    assert said.startswith(
        "generated code runs under limits alone (bubblewrap: not here; namespaces: not here)"
    )
    assert "Install bubblewrap" in said
