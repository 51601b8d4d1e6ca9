"""Tasks by name, or by the path of a user's own file: `load_task("units")`, `load_task("my_task.py:make")`, and
those of reasoning-gym: `load_task("gym:chain_sum")`.

To add a task here: one file and one line in TASKS. A path runs the user's code, in this process and in the
scoring processes.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from redline.errors import ConfigError, nearest
from redline.tasks import code, gsm8k, gym, logic, maths, science, simulation, tables, units
from redline.tasks.task import Task

Make = Callable[[str | None], Task]
"""Makes a task; the argument is the folder of data that the user named, or None."""

TASKS: dict[str, Make] = {
    "units": units.make,
    "gsm8k": gsm8k.make,
    "math": maths.make,
    "code": code.make,
    "logic": logic.make,
    "simulation": simulation.make,
    "tables": tables.make,
    "science": science.make,
}


def load_task(spec: str, data: str | None = None) -> Task:
    """The task of that name, or the one that a function in a Python file returns (`path.py:function`)."""
    if spec in TASKS:
        return TASKS[spec](data)
    if spec.startswith("gym:"):
        if data is not None:
            raise ConfigError(f"{spec} generates its questions and reads no files; got the folder {data}")
        return gym.make(spec.removeprefix("gym:"))
    path, colon, function = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ConfigError(
            f"no task {spec!r}{nearest(spec, TASKS)}; known: {', '.join(TASKS)}, gym:NAME of"
            " reasoning-gym, or a file of your own and its function: my_task.py:make"
        )
    try:
        task = _function(Path(path), function)(data)
    except SystemExit as error:  # exit code 0 would look like success
        raise ConfigError(
            f"{spec} must return a Task, but it ends the program (sys.exit({error.code!r}))"
        ) from error
    if not isinstance(task, Task):
        raise ConfigError(f"{spec} must return a redline.tasks.task.Task, got {type(task).__name__}")
    return task


def _function(path: Path, name: str) -> Make:
    if not path.is_file():
        raise ConfigError(f"no task file at {path}: name an existing Python file")
    module_spec = importlib.util.spec_from_file_location(f"redline_task_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their own module up
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid Python ({error.msg})") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{path} has no function {name!r}{nearest(name, vars(module))}")
    made: Make = found
    return made
