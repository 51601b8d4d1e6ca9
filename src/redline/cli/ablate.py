"""Measure what each optimisation is worth: added one at a time to a naive baseline, then left out of the best set
one at a time; the table shows what was claimed and what was measured.

redline ablate gpt2-124m                         the catalogue's pre-training list, on your recipe and machine
redline ablate seeds/003                         the changes of a public tuning guide (docs/claims.md: 000 to 004),
                                                 from the guide's starting point, on a recipe of its shape
redline ablate nano --only sdpa,fused-optimizer --minutes 5
redline ablate seeds/002 --markdown > table.md   the table as Markdown, with who claimed what
redline ablate rft/demo --quality --seeds 4      also check that what is kept trains equally well (docs/tune.md)

If it is killed or runs out of time, run the same command again: finished trials are kept in the folder. `redline
report FOLDER` draws it.
"""

import argparse
import shlex
import time
from dataclasses import asdict
from pathlib import Path

from redline.cli.options import name_of, print_json, recipe_of, status, tokenise
from redline.cli.tune import judge_of, of_quality
from redline.config.recipe import Recipe
from redline.errors import ConfigError
from redline.machine.facts import MachineFacts, read_facts, software_key
from redline.machine.store import cached
from redline.measure.trial import Timing
from redline.optimizations.catalogue import study
from redline.plan.hardware import hardware_here
from redline.plan.plan import Hardware
from redline.report.ablation import ablation
from redline.report.grid import Output
from redline.report.terminal import print_ablation
from redline.tune.ablate import ablate, chosen, judged
from redline.tune.store import check_folder
from redline.tune.waterfall_table import markdown

ARGUMENTS = """
@RECIPE
--only NAME,NAME          only these entries of `redline optimizations`; everything else stays as at the start
--minutes MINUTES         total time (default 30)
--block-seconds SECONDS   length of a timed block (default 0.5); shorter is quicker but less precise
@QUALITY
--out DIR                 output folder (default: runs/ablate-RECIPE, followed by the names of --only)
--markdown                print the table as Markdown
@JSON
"""


def run(options: argparse.Namespace) -> None:
    only = [name.strip() for name in (options.only or "").split(",") if name.strip()]
    if options.only and not only:
        raise ConfigError(f"--only {options.only!r} names no entry: `redline optimizations` lists them")
    of_quality(options)
    recipe, facts = recipe_of(options), read_facts()
    name = name_of(options, recipe)
    folder = options.out or Path("runs") / "-".join(["ablate", name.replace("/", "-"), *only])
    parts = chosen(study(options.recipe, recipe.workload), only)
    check_folder(folder, recipe)
    if options.quality and not any(judged(recipe, part) for part in parts):
        raise ConfigError(
            f"--quality compares training runs, and the study of {name} only measures generation or random rows:"
            " leave it out, or give a recipe that trains on data"
        )
    judge = judge_of(options, folder / "quality", facts)
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
        judge=judge,
    )
    if options.json:
        print_json([asdict(row) for row in rows])
    elif options.markdown:
        print(markdown(rows, name, _where(options, hardware, facts, recipe)))
    else:
        print(f"{recipe.name} on {hardware.title}")
        print_ablation(ablation([asdict(row) for row in rows]), Output())
        print(f"written to {folder / 'ablation.json'}; `redline report {folder}` draws it")
    if left := sum(row.outcome == "not run" for row in rows):
        some = any(row.tokens_per_s for row in rows)
        again = "run the same command again to continue" if some else "give more --minutes"
        short = f"because {options.minutes:g} min were not enough"
        status(f"not run: {left} of {len(rows)} rows, {short}; {again}")


def _where(options: argparse.Namespace, hardware: Hardware, facts: MachineFacts, recipe: Recipe) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    given = [options.recipe, *(part for override in options.set for part in ("--set", override))]
    given += ["--only", options.only] if options.only else []
    given += ["--minutes", f"{options.minutes:g}", "--block-seconds", f"{options.block_seconds:g}"]
    given += ["--quality", *of_quality(options)] if options.quality else []
    return (
        f"Made by `redline ablate {shlex.join(given)}` on {time.strftime('%Y-%m-%d')}: {hardware.title};"
        f" {versions}; fingerprint {recipe.fingerprint}. Ratios: speed with the change over speed without it, on top"
        " of what was kept before it; medians of interleaved blocks of steps, with a 95% interval. * Four"
        " rounds, each a fifth apart: 87.5%. The first state ran alone, for two blocks. MFU: of the dense bf16 peak,"
        " whatever the precision; generation counts the forward pass only, LoRA omits the gradients of frozen weights."
    )
