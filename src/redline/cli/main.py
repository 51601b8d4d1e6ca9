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
from redline.errors import RedlineError
from redline.machine.cpu import avoid_broken_amx
from redline.record.units import visible

COMMANDS = {
    "machine": machine,
    "recipes": recipes,
    "plan": plan,
    "data": data,
    "tasks": tasks,
    "tune": tune,
    "train": train,
    "finetune": finetune,
    "rft": rft,
    "generate": generate,
    "evaluate": evaluate,
    "export": export,
    "report": report,
    "watch": watch,
    "bench": bench,
    "diagnose": diagnose,
    "optimizations": optimizations,
    "ablate": ablate,
    "verify": verify,
}


def parser() -> argparse.ArgumentParser:
    """The whole command line; building it imports no torch."""
    root = argparse.ArgumentParser(
        prog="redline", description="Train language models at the limit of the GPU, and prove it."
    )
    root.add_argument("--version", action="version", version=f"redline {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return root


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
            options = parser().parse_args(arguments)
            # for a command that starts itself again
            options.arguments = sys.argv[1:] if arguments is None else list(arguments)
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
