"""Say why a run is slow: causes with their evidence, the fix, and what it should bring. Reads logs of other trainers too. Needs no torch.

redline diagnose runs/nano                              a run folder of ours
redline diagnose out/checkpoint-500                     Hugging Face's Trainer (trainer_state.json)
redline diagnose train.log --fact gpu=h100-80g          nanoGPT, torchtitan, verl: what they print, or verl's JSONL
redline diagnose metrics.csv --map step=iter,step_s=dt  Lightning, or any CSV or JSONL
redline diagnose guide.md                               a page of claims: what in it cannot hold

Units are repaired and said so. A gain is a prediction; `redline bench train` measures.
"""

import argparse
from pathlib import Path

HELP = "why a run is slow, from its record or another trainer's log"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    command.add_argument("path", type=Path, help="a run folder, a log, a table, or a Markdown page")
    command.add_argument("--format", metavar="NAME", help="hf, verl, torchtitan, nanogpt, jsonl, lightning, document, csv; found by itself")
    command.add_argument("--map", default="", metavar="NAME=COLUMN,...", help="columns of a CSV or JSONL, e.g. step=iter,step_s=dt,loss=l")
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

    from redline.cli.options import print_json
    from redline.diagnose.read import read
    from redline.diagnose.rules import diagnose

    facts = _pairs(options.fact, "--fact")
    observed = read(options.path, format=options.format, columns=_pairs(filter(None, options.map.split(",")), "--map"), facts=facts)
    findings = diagnose(observed)
    if options.json:
        head = {"source": observed.source, "format": observed.format, "steps": len(observed.steps), "repairs": observed.repairs}
        print_json({**head, "tokens_per_s": observed.tokens_per_s, "findings": [asdict(finding) for finding in findings]})
        return
    from redline.cli.diagnose_view import print_findings

    print_findings(observed, findings)


def _pairs(given, option: str) -> dict[str, str]:  # type: ignore[no-untyped-def]
    from redline.errors import ConfigError

    pairs = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip() or not value.strip():
            raise ConfigError(f"{option} needs NAME=VALUE, got {text!r}")
        pairs[name.strip()] = value.strip()
    return pairs
