"""`redline`: one sub-command a verb. Each lives in its own file, imports its room when it runs, and holds no
logic.

A user's mistake is one line on standard error and an exit code that is not zero; anything else keeps its
traceback.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from redline import __version__
from redline.cli import (
    ablate,
    bench,
    chat,
    data,
    diagnose,
    evaluate,
    export,
    finetune,
    generate,
    machine,
    optimizations,
    plan,
    recipes,
    report,
    rft,
    tasks,
    train,
    tune,
    verify,
    watch,
)
from redline.errors import ConfigError, RedlineError, nearest
from redline.machine.cpu import avoid_broken_amx
from redline.record.units import visible

GROUPS = {
    "Before a run": {
        "machine": machine,
        "recipes": recipes,
        "plan": plan,
        "data": data,
        "tasks": tasks,
        "tune": tune,
    },
    "Train": {"train": train, "finetune": finetune, "rft": rft},
    "Look at a run": {"watch": watch, "report": report, "diagnose": diagnose},
    "Use a model": {"chat": chat, "generate": generate, "evaluate": evaluate, "export": export},
    "Prove it": {"verify": verify, "optimizations": optimizations, "ablate": ablate, "bench": bench},
}
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, or with the options of one command only, which is quicker. Imports no torch."""
    root = argparse.ArgumentParser(
        prog="redline",
        usage="redline COMMAND ...",
        description=f"Train language models at the limit of the GPU, and prove it.\n\n{_listed()}",
        epilog="`redline COMMAND --help` explains a command. Start with: redline train nano",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"redline {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", prog="redline", help=argparse.SUPPRESS)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if only in (None, name):
            module.add_arguments(command)
    return root


def _listed() -> str:
    """Every command with a line about it."""
    width = max(map(len, COMMANDS))
    return "\n\n".join(
        "\n".join([title, *(f"  {name:<{width}}  {module.HELP}" for name, module in group.items())])
        for title, group in GROUPS.items()
    )


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
        if isinstance(stream, io.TextIOWrapper):  # a terminal may know less than UTF-8
            stream.reconfigure(errors="replace")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    avoid_broken_amx(os.environ)
    try:
        try:
            given = sys.argv[1:] if arguments is None else list(arguments)
            named = next((word for word in given if not word.startswith("-")), "")
            if named and named not in COMMANDS:
                raise ConfigError(f"no command {named!r}{nearest(named, COMMANDS)}: `redline` lists them")
            options = parser(only=named).parse_args(given)
            if options.command is None:
                parser(only="").print_help()
                return 0
            options.arguments = given  # for a command that starts itself again
            return COMMANDS[options.command].run(options) or 0
        finally:
            sys.stdout.flush()  # here, where a pipe that broke can still be handled
    except RedlineError as error:
        # a message may quote what stood in a file
        line = visible(str(error).replace("\n", " "))
        print(f"redline: {line[:LONGEST_MESSAGE]}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("redline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader (head, less) has gone; what is left must not be written when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _interrupt(number: int, _frame: object) -> None:
    """Unwind at the first Ctrl-C; those that follow would each break into the unwinding, and print where."""
    signal.signal(number, signal.SIG_IGN)
    sys.excepthook = lambda *_: None  # what fails now fails because of it
    sys.unraisablehook = lambda _: None
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
