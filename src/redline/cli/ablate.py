"""Measure what every optimisation is worth: one by one from a naive state, then left out of the best,
claimed beside measured.

redline ablate gpt2-124m                         the catalogue's pre-training list, on your recipe and machine
redline ablate seeds/003                         the list of a public tuning guide (docs/claims.md: 000 to 004),
                                                 from the state it starts in, on a recipe of its shape
redline ablate nano --only sdpa,fused-optimizer --minutes 5
redline ablate seeds/002 --markdown > table.md   the table as Markdown, with who claimed what

If it is killed or runs out of time, run the same command again: finished trials are kept in the folder. `redline
report FOLDER` draws it.
"""

import argparse
from pathlib import Path

HELP = "measure each optimisation on a recipe, claimed beside measured"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json, add_recipe

    add_recipe(command)
    command.add_argument(
        "--only",
        metavar="NAME,NAME",
        default="",
        help="only these entries of `redline optimizations`; all else as the study starts",
    )
    command.add_argument(
        "--minutes", type=float, default=30.0, metavar="N", help="time for all of it (default 30)"
    )
    command.add_argument(
        "--block-seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="of a timed block (default 0.5); shorter is quicker and less sure",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the folder (default runs/ablate-RECIPE, the names of --only behind it)",
    )
    command.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from redline.cli.options import check_positive, print_json, recipe_of, status, tokenise
    from redline.config.load import shipped
    from redline.errors import ConfigError
    from redline.machine.facts import read_facts, software_key
    from redline.machine.store import cached
    from redline.measure.trial import Timing
    from redline.optimizations.catalogue import study
    from redline.plan.hardware import hardware_here
    from redline.tune.ablate import ablate, chosen
    from redline.tune.store import check_folder

    check_positive("--minutes", options.minutes)
    check_positive("--block-seconds", options.block_seconds)
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    if options.only and not only:
        raise ConfigError(f"--only {options.only!r} names nothing")
    recipe, facts = recipe_of(options), read_facts()
    named = options.recipe.replace("/", "-") if options.recipe in shipped() else recipe.name
    folder = options.out or Path("runs") / "-".join(["ablate", named, *only])
    parts = chosen(study(options.recipe, recipe.workload), only)
    check_folder(folder, recipe)
    hardware = hardware_here(facts, cached(facts, progress=status))
    if any(part.workload == "train" for part in parts):
        tokenise(recipe)
    rows = ablate(
        recipe,
        options.recipe,
        hardware,
        folder,
        only=only,
        minutes=options.minutes,
        progress=status,
        timing=Timing(block_s=options.block_seconds),
        machine=software_key(facts),
    )
    if options.json:
        print_json([asdict(row) for row in rows])
    elif options.markdown:
        from redline.tune.waterfall_table import markdown

        print(
            markdown(
                rows,
                options.recipe if options.recipe in shipped() else recipe.name,
                _where(options, hardware, facts, recipe),
            )
        )
    else:
        _print(rows, f"{recipe.name} on {hardware.title}")
        print(f"written to {folder / 'ablation.json'}; `redline report {folder}` draws it")
    if left := sum(row.outcome == "not run" for row in rows):
        status(
            f"not run: {left} of {len(rows)} rows, for which {options.minutes:g} min were too short; run the same"
            " command again to continue"
        )


def _where(options, hardware, facts, recipe) -> str:  # type: ignore[no-untyped-def]
    import shlex
    import time

    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    given = [options.recipe, *(part for override in options.set for part in ("--set", override))]
    given += ["--only", options.only] if options.only else []
    given += ["--minutes", f"{options.minutes:g}", "--block-seconds", f"{options.block_seconds:g}"]
    return (
        f"Made by `redline ablate {shlex.join(given)}` on {time.strftime('%Y-%m-%d')}: {hardware.title};"
        f" {versions}; fingerprint {recipe.fingerprint}. Speed with the change over speed without it, on top"
        " of what was kept before it; medians of blocks of steps in turns, with an interval of 95 %. * Four"
        " rounds, each a fifth apart: 87.5 %. The first state alone: two blocks. MFU: of the dense bf16 peak,"
        " whatever the precision; generation counts the forward pass, LoRA no gradients of frozen weights."
    )


def _print(rows, title: str) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    from redline.report.grid import show
    from redline.tune.waterfall_table import COLUMNS, cells

    lines = []
    for heading, row in _shown(rows):
        lines += [(heading,)] if heading else []
        named = dict(zip(COLUMNS, cells(replace(row, note="")), strict=True))
        note = row.note
        if row.stage == "all":  # what was kept is a list
            named["change"], note = row.name, "; ".join(text for text in (row.title, row.note) if text)
        lines.append((*(cell for name, cell in named.items() if name != "by"), note))
    columns = [name for name in COLUMNS if name != "by"]
    show((*columns, "note"), lines, title=title)


def _shown(rows):  # type: ignore[no-untyped-def]
    """Every row with the heading before it, if there is one, and without what stands elsewhere: figures of
    the numerics are in the JSON and the Markdown, and that there was no time is the last line of the output,
    once."""
    from dataclasses import replace

    stage = None
    for row in rows:
        heading = f"{row.workload}: {row.stage}" if row.stage not in (stage, "one by one") else ""
        stage = row.stage
        yield (
            heading,
            replace(
                row,
                numerics=row.numerics.partition(" (")[0],
                note="" if row.outcome == "not run" else row.note,
            ),
        )
