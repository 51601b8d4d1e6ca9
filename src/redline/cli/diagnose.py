"""Say why a run is slow: causes with their evidence, the fix, and what it should bring. Reads logs of other
trainers too. Needs no torch.

redline diagnose runs/nano                              a run folder of ours
redline diagnose out/checkpoint-500                     Hugging Face's Trainer (trainer_state.json)
redline diagnose train.log --fact gpu=h100-80g          nanoGPT, torchtitan, verl: what they print, or verl's
                                                        JSONL
redline diagnose metrics.csv --map step=i,step_s=dt:ms  Lightning, or any CSV or JSONL; the unit behind the
                                                        colon where it is no second
redline diagnose guide.md                               a page of claims: what in it cannot hold

Units are repaired and said so. A gain is a prediction; `redline bench train` measures.
"""

import argparse
from pathlib import Path

LARGE_BYTES = 4 * 2**20
"""A log of this size takes a second to read; before that nobody needs to be told."""
HELP = "why a run is slow, from its record or another trainer's log"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    command.add_argument("path", type=Path, help="a run folder, a log, a table, or a Markdown page")
    command.add_argument(
        "--format",
        metavar="NAME",
        help="hf, verl, torchtitan, nanogpt, jsonl, lightning, document, csv; found by itself",
    )
    command.add_argument(
        "--map",
        default="",
        metavar="NAME=COLUMN[:UNIT],...",
        help=(
            "columns of a CSV or JSONL, with their unit where it is another, e.g."
            " step=iter,step_s=dt:ms,memory_bytes=mem:GB,mfu=mfu:%%"
        ),
    )
    command.add_argument(
        "--fact",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the log does not say, e.g. gpu=h100-80g, parameters=454M, gpus=8",
    )
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from redline.cli.options import print_json, status
    from redline.diagnose.read import read
    from redline.diagnose.rules import diagnose
    from redline.diagnose.summary import split, too_little
    from redline.record.units import format_bytes

    facts = _pairs(options.fact, "--fact")
    if options.path.is_file() and (size := options.path.stat().st_size) >= LARGE_BYTES:
        status(f"reading {format_bytes(size)} of {options.path}")
    observed = read(
        options.path,
        format=options.format,
        columns=_pairs(filter(None, options.map.split(",")), "--map"),
        facts=facts,
    )
    findings = diagnose(observed)
    if options.json:
        print_json(
            {
                "source": observed.source,
                "format": observed.format,
                "steps": len(observed.steps),
                "repairs": observed.repairs,
                "facts": asdict(observed.facts),
                "step_s": observed.median("step_s"),
                "mean_step_s": observed.mean("step_s"),
                "split_s": split(observed),
                "tokens_per_s": observed.tokens_per_s,
                "too_little": too_little(observed),
                "findings": [asdict(finding) for finding in findings],
            }
        )
        return
    from redline.cli.diagnose_view import print_findings

    print_findings(observed, findings)


def _pairs(given, option: str) -> dict[str, str]:  # type: ignore[no-untyped-def]
    from redline.errors import ConfigError

    pairs: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip() or not value.strip():
            raise ConfigError(f"{option} needs NAME=VALUE, got {text!r}")
        if name.strip() in pairs:
            raise ConfigError(
                f"{option} names {name.strip()} twice: {pairs[name.strip()]} and {value.strip()}"
            )
        pairs[name.strip()] = value.strip()
    return pairs
