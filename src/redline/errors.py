"""The tree of errors that a user can cause and fix. The command line prints each as one line, without a
traceback.

    RedlineError
    ├── ConfigError      a recipe, an override or an option is wrong
    ├── DataError        a corpus, a shard or a tokenizer is wrong
    ├── CheckpointError  a checkpoint is truncated, altered or does not fit
    ├── StorageError     the disk is full or cannot be written
    ├── MachineError     the machine lacks what was asked for
    ├── MissingExtra     an optional package is not installed
    └── TrainingError    the run itself went wrong (a loss that is not a number)

A message states the rule, the value that broke it, and the way out. Anything else that is raised is our own
mistake and keeps its traceback.
"""

import difflib
import importlib
from collections.abc import Callable, Iterable
from types import ModuleType

Say = Callable[[str], None]
"""Receives one line at a time for a person: what is being done, or what was changed."""


class RedlineError(Exception):
    """Base of every error that a user can cause; `exit_code` is what the command line returns."""

    exit_code = 2


class ConfigError(RedlineError):
    """A recipe, an override or a command-line option is wrong."""


class DataError(RedlineError):
    """A corpus, a token shard or a tokenizer is wrong."""

    exit_code = 3


class CheckpointError(RedlineError):
    """A checkpoint is truncated, altered, or does not fit the recipe."""

    exit_code = 4


class StorageError(RedlineError):
    """The disk is full or cannot be written."""

    exit_code = 5


class MachineError(RedlineError):
    """The machine lacks what the plan asks for."""

    exit_code = 6


class MissingExtra(RedlineError):
    """An optional package is not installed; the message names the extra that brings it."""

    exit_code = 7


class TrainingError(RedlineError):
    """The run went wrong in a way that no retry fixes, such as a loss that is not a number."""

    exit_code = 8


def nearest(word: str, known: Iterable[object]) -> str:
    """A hint for a message: the known name closest to an unknown word, or one that begins with it; else empty."""
    names = [str(name) for name in known]
    begun = [name for name in names if word and name.startswith(word)]
    close = difflib.get_close_matches(word, names, n=1) or begun
    return f" (did you mean {close[0]!r}?)" if close else ""


def need(module: str, *, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{module.split('.')[0]} is needed for this and is not installed ({error}): pip install"
            f" 'redline[{extra}]'"
        ) from error
