"""Declares a command's arguments from text that reads like its help: one per line, two spaces, what it means.

    RECIPE                  a positional argument; [RECIPE] may be left out, RUN... takes one or more
    --set KEY=VALUE...      an option that may be repeated
    --minutes MINUTES       time for all trials (default 6)
    --device {cuda,cpu}     one of these
    --json                  a switch
    @PLAN                   the entry of that name in SHARED

The name of a value decides its type (TYPES); any other is text, and only TEXT may be empty. `(default 6)` in the help
sets the default; `(default: the recipe's)` only describes what happens without the option. A number must be above 0,
unless the help mentions 0.
"""

import argparse
import keyword
import math
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from redline.errors import ConfigError

TYPES: dict[str, type] = (
    dict.fromkeys(("N", "K"), int)
    | dict.fromkeys(("MINUTES", "SECONDS", "NUMBER", "SHARE"), float)
    | dict.fromkeys(("DIR", "FILE", "OUT", "PATH", "RUN"), Path)
)

SHARED = {
    "RECIPE": """
RECIPE                     a shipped recipe (see `redline recipes`) or a .toml file
--set TABLE.KEY=VALUE...   override a value, e.g. train.steps=100; =none removes it
""",
    "PLAN": "--plan FILE|auto   a plan saved by `redline plan --save`; auto: the plan `redline tune` found here, if any",
    "PREFER": "--prefer {speed,memory}   what the planner favours where it has a choice (default speed)",
    "MODEL": """
MODEL                a run folder, a checkpoint, a Hugging Face folder, a .gguf file or demo
--checkpoint WHICH   which one of a pre-training run: last, best or step-N (default last)
""",
    "DEVICE": "--device {cuda,cpu}   where to compute (default: cuda if there is a GPU)",
    "RUN": """
--run DIR          the run folder (default: runs/RECIPE)
@PLAN
@PREFER
--fork RUN         start from this run's last checkpoint (or from this checkpoint) with other values; needs --run
--nproc N          processes on this machine, one per GPU (default 1)
--nnodes N|MIN:MAX   machines; MIN:MAX continues on those that remain, down to MIN (default: 1)
--rdzv HOST:PORT   where the machines meet: one of them and a free port on it; start the same command on each
--export NAME...   also send metrics to tensorboard, wandb or mlflow
--quiet            no live view
""",
    "QUALITY": """
--quality           keep only what trains equally well, by validation loss (RFT and RL: accuracy) after short runs
--seeds N           runs per arm, for --quality (default: 3)
--seconds SECONDS   length of a pre-training run without the change (default: 60); other workloads run to their end
--margin NUMBER     how much worse a change may score (default: 0.01 in loss, 0.05 in accuracy)
""",
    "ON_RAY": """
--on {ray}            sample on a Ray cluster (default: in this process)
--workers N           workers on that cluster (default: one per GPU, or one per CPU if it has none)
--ray-address PLACE   address of that cluster (default: RAY_ADDRESS, or one on this machine, started if there is none)
""",
    "JSON": "--json   print JSON for programs instead of text for people",
}
"""Arguments that several commands share."""
WIDTH = 80
wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


class Help(argparse.RawDescriptionHelpFormatter):
    """Wraps at whole words, whatever the width of the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width)


def folded(text: str) -> str:
    """Fold a command's docstring to the width: fill prose, and where an example and its explanation do not fit on one
    line, put the explanation below."""
    return "\n\n".join(
        _examples(part) if re.match(r"\s*redline ", part) else "\n".join(wrap(part, WIDTH))
        for part in re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n"))
    )


def _examples(part: str) -> str:
    part = textwrap.dedent(part)
    if max(map(len, part.splitlines())) <= WIDTH:
        return part
    shown = list[str]()
    joined = re.sub(r"\n +", " ", part)  # an indented line continues the explanation above it
    for line in joined.splitlines():
        command, _, about = line.partition("  ")
        whole = re.sub(r"( --\S+) (?!-)", "\\1\0", command)  # an option stays with its value
        shown.append(" \\\n".join(wrap(whole, WIDTH - 2, subsequent_indent=" " * 8)).replace("\0", " "))
        shown += wrap(about.strip(), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(shown)


class _Number(argparse.Action):
    def __call__(self, _parser: object, options: argparse.Namespace, value: Any, name: Any = None) -> None:
        may_be_0 = re.search(r"(?<![\w.])0(?![\w.])", self.help or "") is not None
        if not 0 <= value < math.inf or (value == 0 and not may_be_0):
            whole, real = f"at least {0 if may_be_0 else 1}", "of at least" if may_be_0 else "above"
            rule = whole if self.type is int else f"a finite number {real} 0"
            raise ConfigError(f"{name} must be {rule}, got {str(value).removesuffix('.0')}")
        if self.type is int and value >= 2**63:
            raise ConfigError(f"{name} must be a signed number of at most 64 bits, got {value}")
        setattr(options, self.dest, value)


def _filled(kind: type, text: str) -> Any:
    """Refuse an empty value: a variable that a script forgot to set would mean the working directory or no option."""
    if not text:
        raise argparse.ArgumentTypeError("the value must not be empty")
    return kind(text)


def _text(text: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python holds a byte that is not UTF-8
        raise argparse.ArgumentTypeError("the value must be UTF-8 text")
    return text


def declare(command: argparse.ArgumentParser, text: str) -> None:
    for line in text.splitlines():
        form, _, about = line.strip().partition("  ")
        if form.startswith("@"):
            declare(command, SHARED[form.removeprefix("@")])
        elif form:
            _add(command, form, about.strip())


def _add(command: argparse.ArgumentParser, form: str, about: str) -> None:
    name, _, value = form.removesuffix("...").partition(" ")
    many = form.endswith("...")
    facts: dict[str, Any] = {"help": about.replace("%", "%%")}
    if name.startswith("--"):
        word = name.removeprefix("--").replace("-", "_")
        facts["dest"] = f"{word}_" if keyword.iskeyword(word) else word
        if not value:
            command.add_argument(name, action="store_true", **facts)
            return
        facts |= {"action": "append", "default": []} if many else {"required": "(required)" in about}
        facts["help"] += "; may be repeated" if many else ""
    else:
        value = name.strip("[]")
        facts |= {"nargs": "+"} if many else {"nargs": "?"} if name.startswith("[") else {}
        name = value.lower()
    kind = TYPES.get(value, str)
    facts["type"] = kind if kind in (int, float) else _text if value == "TEXT" else partial(_filled, kind)
    facts |= {"action": _Number} if kind in (int, float) and value != "SHARE" else {}
    if default := re.search(r"\(default ([^\s,:;)]+)", about):
        facts["default"] = kind(default[1])
    facts |= {"choices": value.strip("{}").split(",")} if value.startswith("{") else {"metavar": value}
    command.add_argument(name, **facts)
