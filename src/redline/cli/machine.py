"""Show what this machine is and what it can do. Ceilings are measured once (seconds) and kept per machine;
--refresh measures again."""

import argparse
from dataclasses import asdict

HELP = "the facts of this machine and its measured ceilings"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    command.add_argument(
        "--refresh", action="store_true", help="measure again instead of reading the kept result"
    )
    command.add_argument(
        "--facts", action="store_true", help="facts only: nothing is measured, torch is not loaded"
    )
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from redline.cli.options import print_json, status
    from redline.machine.facts import read_facts
    from redline.machine.store import cached

    facts = read_facts()
    ceilings = None if options.facts or options.refresh else cached(facts, progress=status)
    if ceilings is None and not options.facts:
        from redline.machine.ceilings import load_or_measure

        ceilings = load_or_measure(facts, refresh=options.refresh, progress=status)
    if options.json:
        print_json({"facts": asdict(facts), "ceilings": asdict(ceilings) if ceilings else None})
        return
    from redline.cli.tables import print_machine

    print_machine(facts, ceilings)
