"""The catalogue of optimisations: what is claimed for each and by whom, what it does to numbers, and whether
it applies. Needs no torch.

redline optimizations                             every entry
redline optimizations gpt2-124m --as a100-40g     which of them apply to a recipe on a GPU, and if not why not
redline optimizations train.log                   which of them mend what `redline diagnose` finds in a log

`redline ablate RECIPE` measures them.
"""

import argparse
from typing import Any

HELP = "every optimisation: who claims what, and which apply"


def add_arguments(command: argparse.ArgumentParser) -> None:
    from redline.cli.options import add_json

    command.add_argument(
        "recipe", nargs="?", help="say for this recipe and machine, or this log, whether each applies"
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override a value of the recipe"
    )
    command.add_argument(
        "--as", dest="as_gpu", metavar="GPU", help="for this GPU instead of the machine's own; needs a recipe"
    )
    add_json(command)


def run(options: argparse.Namespace) -> None:
    from redline.cli.options import print_json, recipe_of
    from redline.errors import ConfigError

    if options.recipe is None and (options.as_gpu or options.set):
        raise ConfigError("--as and --set need a recipe: redline optimizations RECIPE --as GPU")
    if options.recipe is not None and _is_log(options.recipe):
        return _of_a_log(options)
    hardware = None if options.recipe is None else _hardware(options.as_gpu)
    rows = _rows(None if options.recipe is None else recipe_of(options), options.recipe, hardware)
    if options.json:
        print_json(rows)
        return None
    _print(rows, "" if hardware is None else f"{options.recipe} on {hardware.title}")
    return None


def _is_log(name: str) -> bool:
    """Whether the argument is a file or folder and no recipe."""
    from pathlib import Path

    return Path(name).exists() and not name.endswith(".toml")


def _of_a_log(options: argparse.Namespace) -> None:
    """The entries that mend what a log shows, with what they would bring there."""
    from pathlib import Path

    from redline.cli.options import print_json
    from redline.diagnose.answer import verdict
    from redline.diagnose.read import read
    from redline.diagnose.rules import diagnose
    from redline.errors import ConfigError

    if options.as_gpu or options.set:
        raise ConfigError("--as and --set are for a recipe: a log has its own GPU and settings")
    observed = read(Path(options.recipe))
    findings = diagnose(observed)
    rows = []
    for row in _rows(None, "", None):
        for finding in findings:
            if finding.optimisation == row["name"]:
                gain = (
                    f"{finding.gain.low:.2f} to {finding.gain.high:.2f}x predicted"
                    if finding.gain
                    else "no speed"
                )
                rows.append(row | {"applies": True, "cause": finding.cause, "gain": gain, "fix": finding.fix})
    if options.json:
        print_json(rows)
        return
    _print_mending(rows, verdict(observed, findings).text)


def _print_mending(rows: list[dict[str, object]], otherwise: str) -> None:
    from rich.markup import escape

    from redline.report.grid import Output

    console = Output()
    for row in rows:
        console.print(f"[bold]{row['name']}[/bold] {row['title']}")
        console.print(escape(f"  {row['gain']}; claimed {_claimed(row)} by {_by(row)}"))
        console.print(escape(f"  found: {row['cause']}. Fix: {row['fix']}"))
    if not rows:
        console.print(escape(f"No entry mends anything that was found. {otherwise}".strip()))


def _hardware(as_gpu: str | None):  # type: ignore[no-untyped-def]
    from redline.machine.facts import read_facts
    from redline.plan.hardware import hardware_as, hardware_here

    facts = read_facts()
    return hardware_as(as_gpu, facts.cpu_cores) if as_gpu else hardware_here(facts, None)


def _rows(recipe, name: str, hardware) -> list[dict[str, object]]:  # type: ignore[no-untyped-def]
    from dataclasses import asdict

    from redline.optimizations.catalogue import catalogue, switched

    rows = []
    for entry in catalogue().values():
        row: dict[str, object] = {
            "family": entry.family,
            "name": entry.name,
            "title": entry.title,
            "workloads": entry.workloads,
            "effect": entry.effect,
            "standing": entry.standing,
            "switch": switched(entry),
            "claimed": entry.claimed,
            "claims": [asdict(claim) for claim in entry.claims],
            "note": entry.note,
        }
        if recipe is not None:
            why_not = _why_not(entry, recipe, name, hardware)
            row |= {"applies": why_not is None, "why_not": why_not}
        rows.append(row)
    return rows


def _why_not(entry, recipe, name: str, hardware) -> str | None:  # type: ignore[no-untyped-def]
    """Why an entry does not apply: by what it is, by what the recipe's study runs, by the recipe's shapes and
    the machine."""
    from redline.optimizations.catalogue import study

    if entry.standing == "refuted":
        return "the claim cannot hold"
    if entry.standing == "recipe":
        return "another training: a matter of the recipe"
    workloads = {part.workload for part in study(name, recipe.workload)}
    if not workloads & set(entry.workloads):
        return (
            f"for {' and '.join(entry.workloads)}, and this recipe's study is of"
            f" {' and '.join(sorted(workloads))}"
        )
    return entry.why_not(recipe, hardware)


def _print(rows: list[dict[str, object]], where: str) -> None:
    from redline.report.grid import show

    if where:
        print(where)
    columns = ("name", "claimed", "numbers", "applies" if where else "switch", "by", "why")
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        show(columns, [_cells(row, applies=bool(where)) for row in own], title=f"\n{family}")
    print("\nclaimed: speed with the change over speed without it, as the source has it;")
    print("nothing here was measured")
    print("notes: docs/optimizations.md, or --json")


def _cells(row: dict[str, object], *, applies: bool) -> tuple[str, ...]:
    """Name, claim, effect on numbers, switch; then who claims it, and why it does not apply or what refutes it."""
    last, reason = _last(row, applies=applies)
    refuted = str(row["note"]) if row["standing"] == "refuted" else ""
    why = " ".join(text for text in (reason, refuted) if text)
    return (str(row["name"]), _claimed(row), str(row["effect"]), last, f"by {_by(row)}", why)


def _claimed(row: dict[str, Any]) -> str:
    from redline.optimizations.catalogue import ratio

    return ratio(row["claimed"])


def _by(row: dict[str, Any]) -> str:
    return "; ".join(claim["source"] for claim in row["claims"])


def _last(row: dict[str, object], *, applies: bool) -> tuple[str, str]:
    """What the last column says: the switch, or whether the entry applies and why not."""
    if not applies:
        return str(row["switch"]), ""
    if row["standing"] in ("recipe", "refuted"):
        return str(row["standing"]), ""
    if not row["applies"]:
        return "no", str(row["why_not"])
    return ("yes" if row["standing"] == "switch" else str(row["standing"])), ""
