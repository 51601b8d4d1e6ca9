"""`redline`: one sub-command per verb. A command lives in the file of its name, which is imported only to run or
explain it: its docstring is its help, `ARGUMENTS` lists its arguments (arguments.py; a table if it has several
verbs), and `run` runs it.

A user's mistake is one line on standard error and a non-zero exit code; anything else keeps its traceback.
"""

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from redline import __version__
from redline.cli.arguments import Help, declare, folded
from redline.errors import ConfigError, RedlineError, StorageError, nearest
from redline.machine.cpu import avoid_broken_amx
from redline.record.files import REFUSALS
from redline.record.units import visible

GROUPS = {
    "Before a run": {
        "machine": "what this machine is, and its measured ceilings",
        "recipes": "list the shipped recipes, or print one",
        "plan": "how a recipe would be executed, and why",
        "data": "build token shards from text, or inspect them",
        "tasks": "list tasks, print questions, score completions",
        "tune": "find the fastest plan for a recipe on this machine",
    },
    "Train": {
        "train": "train a recipe, or resume, extend or fork its run",
        "finetune": "fine-tune a model on your own examples",
        "rft": "rejection-sampling fine-tuning: sample, train, test",
        "rl": "reinforcement learning: GRPO, PPO, several domains",
        "launch": "one or more runs of a recipe, here or on a cluster",
    },
    "Look at a run": {
        "watch": "watch a run in the terminal or on a local page",
        "report": "runs as tables and as one self-contained page",
        "diagnose": "why a run is slow, from its record or another trainer's log",
    },
    "Use a model": {
        "chat": "talk to a model; the answer appears as it is generated",
        "generate": "generate text from a trained model",
        "evaluate": "validation loss, perplexity and bits per byte",
        "export": "write a run's weights as a Hugging Face folder",
    },
    "Prove it": {
        "verify": "prove that everything a plan says is in effect",
        "optimizations": "every optimisation: who claims what, and which apply",
        "ablate": "measure each optimisation on a recipe, claimed against measured",
        "okadfa": "kernel attention and feedback alignment, part by part",
        "race": "time, tokens and joules of recipes to each validation loss",
        "bench": "compare speeds with PyTorch, Transformers and PEFT",
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` explains the command")


def module_of(command: str) -> Any:
    return importlib.import_module(f"redline.cli.{command}")


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, or the arguments of one command only, which is quicker. Imports no torch."""
    width = max(map(len, COMMANDS))
    listed = [
        "\n".join([title, *(f"  {name:<{width}}  {about}" for name, about in group.items())])
        for title, group in GROUPS.items()
    ]
    root = Parser(
        prog="redline",
        usage="redline COMMAND ...",
        description="\n\n".join(["Train language models at the limit of the GPU, and prove it.", *listed]),
        epilog="`redline COMMAND --help` explains a command. Start with: redline train nano",
        formatter_class=Help,
    )
    root.add_argument("--version", action="version", version=f"redline {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", prog="redline", help=argparse.SUPPRESS)
    for name in COMMANDS:
        command = commands.add_parser(name, formatter_class=Help)
        if only in (None, name):
            _fill(command, module_of(name))
    return root


def _fill(command: argparse.ArgumentParser, module: Any) -> None:
    command.description = folded(module.__doc__)
    if isinstance(module.ARGUMENTS, str):
        declare(command, module.ARGUMENTS)
        return
    verbs = command.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in module.ARGUMENTS.items():
        about, _, arguments = text.partition("\n")
        description = folded(f"{about[0].upper()}{about[1:]}.")
        declare(verbs.add_parser(verb, help=about, description=description, formatter_class=Help), arguments)


SPIN_COUNT = "3000"
"""How long libgomp's threads spin before they sleep. Its default makes two programs on the same cores wait
for each other's spinning: nano on two cores fell from 12.4k tokens/s to 3.0k each; with this, 12.4k and 5.8k
(LOG.md). Read when torch is first imported."""
LONGEST_MESSAGE = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Without arguments this is the program, and owns its signals."""
    if arguments is None:
        signal.signal(signal.SIGINT, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not support all of UTF-8
            stream.reconfigure(errors="replace")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    avoid_broken_amx(os.environ)
    try:
        try:
            given = sys.argv[1:] if arguments is None else list(arguments)
            named = next((word for word in given if not word.startswith("-")), "")
            if named and named not in COMMANDS:
                raise ConfigError(f"no command {named!r}{nearest(named, COMMANDS)}: `redline` lists them")
            options, unknown = parser(only=named).parse_known_args(given)
            if unknown:
                place = " ".join(filter(None, ("redline", options.command, getattr(options, "verb", None))))
                raise ConfigError(
                    f"no such argument: {' '.join(unknown)}{_as_override(unknown, options)}; `{place} --help`"
                    " explains the command"
                )
            if options.command is None:
                parser(only="").print_help()
                return 0
            options.arguments = given  # for a command that starts itself again
            return module_of(options.command).run(options) or 0
        finally:
            sys.stdout.flush()  # here, where a pipe that broke can still be handled
    except RedlineError as error:
        return _say(error)
    except KeyboardInterrupt:
        print("redline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader (head, less) has gone; Python must not write what is left when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a path that the user gave; nothing more is known about it
        if error.errno not in REFUSALS or error.filename is None:
            raise
        return _say(StorageError(f"{error.filename}: {error.strerror}; choose another path"))


def _as_override(unknown: Sequence[str], options: argparse.Namespace) -> str:
    """The hint for a recipe's value that was given like an option: `--lr 1e-3` is `--set train.lr=1e-3`."""
    from redline.config.load import keys_named  # here: `redline --help` needs no recipes

    name, _, value = "=".join(unknown[:2]).removeprefix("--").partition("=")
    keys = keys_named(name.replace("-", "_")) if hasattr(options, "set") else []
    return f" (did you mean --set {keys[0]}={value or '...'}?)" if keys else ""


def _say(error: RedlineError) -> int:
    """Print the message on one line, even if it quotes a file."""
    line = visible(str(error).replace("\n", " "))
    print(f"redline: {line[:LONGEST_MESSAGE]}", file=sys.stderr)
    return error.exit_code


def _interrupt(number: int, _frame: object) -> None:
    """Unwind at the first Ctrl-C and ignore the next: each would interrupt the unwinding and print a traceback."""
    signal.signal(number, signal.SIG_IGN)
    sys.excepthook = lambda *_: None  # what fails now fails because of it
    sys.unraisablehook = lambda _: None
    raise KeyboardInterrupt
