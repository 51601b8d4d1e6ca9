"""Every optimisation by its name, and the page made of them.

    CATALOGUE["bf16"].claimed            # (2.0, 3.0)
    document()                           # the table of docs/optimizations.md

A new optimisation is an entry in its family's file; a new family is a file and a line here.
"""

from redline.errors import ConfigError, nearest
from redline.optimizations import (
    attention,
    finetuning,
    generation,
    memory,
    precision,
    recipes,
    refuted,
    update,
)
from redline.optimizations.entry import Optimization

FAMILIES = {
    "precision": precision.ENTRIES,
    "attention and compiler": attention.ENTRIES,
    "memory": memory.ENTRIES,
    "update, data, bookkeeping": update.ENTRIES,
    "generation": generation.ENTRIES,
    "fine-tuning": finetuning.ENTRIES,
    "another training": recipes.ENTRIES,
    "claims that cannot hold": refuted.ENTRIES,
}

CATALOGUE: dict[str, Optimization] = {entry.name: entry for entries in FAMILIES.values() for entry in entries}


def find(name: str) -> Optimization:
    if name not in CATALOGUE:
        raise ConfigError(
            f"no optimisation {name!r}{nearest(name, CATALOGUE)}: `redline optimizations` lists them"
        )
    return CATALOGUE[name]


def ratio(claimed: tuple[float, float] | None) -> str:
    """`2-3x`, `1.25x`, or a dash where no number was given."""
    if claimed is None:
        return "–"
    low, high = (f"{bound:.4g}" for bound in claimed)
    return f"{low}x" if low == high else f"{low}-{high}x"


def switched(entry: Optimization) -> str:
    """`precision: fp32 to bf16`, or what stands in its place."""
    if entry.standing != "switch":
        return entry.standing
    if entry.change is not None:
        return "another recipe"
    words = [f"{name}: {_value(entry.off[name])} to {_value(value)}" for name, value in entry.on.items()]
    return ", ".join(words)


def _value(value: object) -> str:
    if isinstance(value, bool):  # 1 == True, and a number of chunks is no switch
        return "on" if value else "off"
    return "the planner's" if value is None else str(value) or "torch's default"


def document() -> str:
    """Markdown of every entry, for docs/optimizations.md."""
    lines = []
    for family, entries in FAMILIES.items():
        lines += [
            f"## {family.capitalize()}",
            "",
            "| name | what | for | switch | numbers | claimed | by | note |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for entry in entries:
            said = "; ".join(f"{claim.source}: {claim.words}" for claim in entry.claims)
            cells = (
                f"`{entry.name}`",
                entry.title,
                ", ".join(entry.workloads),
                switched(entry),
                entry.effect,
                ratio(entry.claimed),
                said,
                entry.note,
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
