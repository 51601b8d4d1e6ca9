"""Show what this machine is and what it can do. Ceilings are measured once, in seconds, and kept for the machine."""

import argparse
from dataclasses import asdict

from redline.cli.arguments import JSON
from redline.cli.options import answer, status
from redline.cli.tables import print_machine
from redline.machine.facts import read_facts
from redline.machine.store import cached

ARGUMENTS = f"""
--refresh   measure again instead of reading the kept result
--facts     facts only: measure nothing, and do not load torch
{JSON}
"""


def run(options: argparse.Namespace) -> None:
    facts = read_facts()
    ceilings = None if options.facts or options.refresh else cached(facts, progress=status)
    if ceilings is None and not options.facts:
        from redline.machine.ceilings import load_or_measure

        ceilings = load_or_measure(facts, refresh=options.refresh, progress=status)
    answer(
        options,
        {"facts": asdict(facts), "ceilings": asdict(ceilings) if ceilings else None},
        lambda: print_machine(facts, ceilings),
    )
