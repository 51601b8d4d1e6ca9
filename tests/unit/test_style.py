"""House rules that a machine can hold: a docstring a file, short files and functions, and rooms that load
without torch."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import redline

SOURCE = Path(redline.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 450
MOST_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions that may be longer, as `room/file.py:name`, each with the reason."""
TORCH_FREE = (
    "report",
    "diagnose",
    "optimizations",
    "config",
    "record",
    "plan",
    "cli",
    "launch",
    "errors",
    "tasks",
)
NEEDS_TORCH = ("launch/agent.py",)
TORCH_FREE_MODULES = {
    "machine": ("facts", "specs", "store", "nvml"),
    "engine": ("request", "server", "calls"),
    "rft": ("store", "budget", "stats"),
    "measure": ("statistics", "trial", "turns", "process"),
    "tune": ("guard", "memory", "candidates", "search", "store", "ablate", "arms"),
    "train": ("places", "open_run"),
    "data": ("read", "tokenizer", "shards", "remote", "segment", "build", "stream", "examples"),
}  # fmt: skip


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_what_it_is_and_is_short(path):
    assert (ast.get_docstring(tree_of(path)) or "").strip(), "a file says what it is before it does anything"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def functions() -> dict[str, int]:
    lengths = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths[f"{name_of(path)}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    return lengths


def test_functions_are_short():
    long = {name: lines for name, lines in functions().items() if lines > MOST_FUNCTION_LINES}
    assert set(long) <= set(LONG_FUNCTIONS), f"split these, or list them with a reason: {long}"
    assert set(LONG_FUNCTIONS) <= set(long), "an exception that is no longer needed"


def torch_free() -> list[str]:
    """Every module of the rooms that must work without torch."""
    found = [f"redline.{room}.{module}" for room, modules in TORCH_FREE_MODULES.items() for module in modules]
    for path in FILES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] in TORCH_FREE and name_of(path) not in NEEDS_TORCH:
            found.append(".".join(["redline", *parts]).removesuffix(".__init__"))
    return found


IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"
    assert "transformers" not in sys.modules, f"{name} imports transformers"
"""


def test_rooms_that_must_work_without_torch_do_not_import_it():
    names = torch_free()
    assert {
        "redline.config.load",
        "redline.plan.planner",
        "redline.cli.main",
        "redline.record.run",
        "redline.launch",
    } <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_those_rooms_import_where_torch_is_not_installed():
    """A laptop without torch: the import itself fails, so nobody can catch it by looking at sys.modules
    alone."""
    blocked = "import sys; sys.modules['torch'] = None\n" + IMPORT_EACH.replace(
        '"torch" not in sys.modules', "sys.modules['torch'] is None"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked, *torch_free()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_named_after_nothing():
    vague = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [
        name_of(path) for path in FILES if vague & set(path.with_suffix("").parts[len(SOURCE.parts) :])
    ]


def test_no_pickle_is_loaded():
    for path in FILES:
        tree = tree_of(path)
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        imported |= {
            (node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        }
        assert not imported & {"pickle", "cloudpickle", "dill", "joblib"}, name_of(path)
        for node in ast.walk(tree):
            loads = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "load"
            )
            if loads and ast.unparse(node.func) == "torch.load":
                assert any(
                    k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
                ), name_of(path)


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_privates(tree: ast.Module) -> set[str]:
    """Private names that a file defines: functions, classes, values, and attributes of its own objects."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return {name for name in names if _private(name)}


def test_no_file_reaches_into_the_privates_of_another():
    trees = {name_of(path): tree_of(path) for path in FILES}
    own = {name: _own_privates(tree) for name, tree in trees.items()}
    ours = set[str]().union(*own.values())  # privates of torch and the standard library are their own matter
    found = []
    for name, tree in trees.items():
        others = ours - own[name]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("redline"):
                found += [
                    f"{name}:{node.lineno} {alias.name}" for alias in node.names if _private(alias.name)
                ]
            elif isinstance(node, ast.Attribute) and _private(node.attr) and node.attr in others:
                found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    assert not found, "make it public, or do it where it belongs"


def test_test_files_have_names_of_their_own():
    """pytest imports them by their names alone."""
    names = [path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
