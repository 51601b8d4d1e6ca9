"""`redline`: one sub-command a verb. Each lives in its own file, imports its room when it runs, and holds no
logic.

A user's mistake is one line on standard error and an exit code that is not zero; anything else keeps its
traceback.
"""

import argparse
import os
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


def main(arguments: Sequence[str] | None = None) -> int:
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
        print(f"redline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("redline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader (head, less) has gone; what is left must not be written when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
