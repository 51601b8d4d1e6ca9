"""What the benchmarks share: an arm in its process, the tables, and the two files that a benchmark writes. No torch.

    path = run_arms(BENCH, "full", facts, Path("benchmarks"), arms=("trl",), progress=print)
    for row in rows_of("redline.bench.generate:redline", {"name": "full"}): ...
    path = write(out, "generate", facts, results, lines)           # generate_<hardware>_<date>.{json,md}

What an arm measured before it died is kept; its last row says how it failed.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from redline.config.recipe import ModelConfig
from redline.errors import ConfigError, Say
from redline.machine.facts import MachineFacts, same_kind
from redline.machine.store import Ceilings
from redline.measure.process import Child, ChildFailed
from redline.measure.statistics import APART_SPREAD
from redline.plan.arithmetic import parameters
from redline.plan.hardware import hardware_here
from redline.record.files import read_json, write_atomic
from redline.record.units import DASH, format_bytes

BenchRow = dict[str, Any]
Column = tuple[str, Callable[..., object], *tuple[str, ...]]
"""Its title, how to show it, and the keys of what is shown: without any, the row."""
MEASURED: tuple[Column, ...] = (
    ("tokens/s", "{:,.0f}".format, "tokens_per_s"),
    ("interval", "{:,.0f} – {:,.0f}".format, "low", "high"),
    ("peak memory", format_bytes, "memory_bytes"),
)
Reference = Callable[[BenchRow, BenchRow], bool]
"""Whether a row is the one that another is compared with."""
SMOLLM2_360M = ModelConfig(
    vocab_size=49152, num_layers=32, hidden_size=960, num_heads=15, num_kv_heads=5, ffn_size=2560,
    context_length=2048, rope_theta=100_000.0,
)  # fmt: skip
"""Its shape, with random weights."""
TINY = ModelConfig(
    vocab_size=320, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=64, context_length=64
)
"""Small enough to show on a CPU, in seconds, that everything runs."""
ROW_LIMIT_S = 1800.0
"""A row that takes longer counts as hung."""
MEANINGLESS = "A tiny model, to check that everything runs: **its speeds mean nothing.**"


def rows_of(function: str, setting: dict[str, Any], allocator: str = "") -> Iterator[BenchRow]:
    """The rows of an arm as they come; if it fails, the last one has `failed` and `outcome`."""
    with Child(allocator) as child:
        try:
            yield from child.rows(function, setting, ROW_LIMIT_S)
        except ChildFailed as failed:
            yield {"failed": failed.error, "outcome": failed.outcome}


def spread(rates: Sequence[float], name: str) -> dict[str, float]:
    """The median under its name, and the slowest and fastest."""
    return {name: median(rates), "low": min(rates), "high": max(rates)}


def head(verb: str, what: str, facts: MachineFacts, *, quick: bool = False) -> list[str]:
    """The first lines of a page: what was measured on which machine, and what made it."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    made = f"Made by `redline bench {verb}`, {time.strftime('%Y-%m-%d')}; {versions}; Python {facts.python}."
    return [f"# {what} on {hardware_here(facts, None).title}", "", made, *[MEANINGLESS] * quick]


def shape(model: ModelConfig) -> str:
    return (
        f"{parameters(model).total:,} parameters ({model.num_layers} layers, width {model.hidden_size},"
        f" {model.num_heads} heads, {model.kv_heads} key/value heads, vocabulary {model.vocab_size:,}),"
        " random weights"
    )


def grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; short rows are filled up."""
    filled = [[*row, *[""] * (len(titles) - len(row))] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *filled)]


def table(columns: Sequence[Column], rows: Sequence[BenchRow], reference: Reference) -> list[str]:
    """The rows, with their speed `against` the reference's."""
    shown = []
    for row in rows:
        by = next((rate for other in rows if reference(other, row) and (rate := _rate(other))), None)
        shown.append(_cells(columns, row | {"against": _rate(row) / by} if by else row))
    return grid([title for title, *_ in columns], shown)


def brief(columns: Sequence[Column], row: BenchRow) -> str:
    label, *cells = _cells(columns, row)
    if "failed" in row:
        return f"{label}: {': '.join(cells[-2:])}"
    titled = zip((title for title, *_ in columns[1:]), cells, strict=True)
    return f"{label}: " + ", ".join(f"{title} {cell}" for title, cell in titled if cell != DASH)


def _cells(columns: Sequence[Column], row: BenchRow) -> list[str]:
    """The cells of a row: a dash for a missing value; a failed row says why where its speed would be."""
    shown = [
        DASH if None in (values := [row.get(key) for key in keys] or [row]) else str(form(*values))
        for _, form, *keys in columns
    ]
    at = next(i for i, (title, *_) in enumerate(columns) if title.endswith("/s"))
    return [*shown[:at], "failed", row["failed"]] if "failed" in row else shown


def _rate(row: BenchRow) -> float:
    return row.get("rows_per_s") or row.get("tokens_per_s", 0.0)


def page_of(out: Path, what: str, facts: MachineFacts) -> Path:
    """The page that a benchmark on this machine writes today; its JSON lies beside it."""
    name = re.sub(r"[^a-z0-9]+", "-", hardware_here(facts, None).title.lower()).strip("-")
    return out / f"{what}_{name}_{time.strftime('%Y%m%d')}.md"


def write(out: Path, what: str, facts: MachineFacts, results: dict[str, Any], lines: Sequence[str]) -> Path:
    """Write the results as JSON, with the machine, and as a page; returns the page's path."""
    page = page_of(out, what, facts)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": asdict(facts), **results}, indent=1)
    write_atomic(page.with_suffix(".json"), text + "\n")
    write_atomic(page, "\n".join(lines) + "\n")
    return page


# ---- benchmarks of one work ----


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark whose arms do the same work: what to run, and what its page says."""

    verb: str
    title: str
    works: Mapping[str, Any]
    """`full` and `quick`."""
    arm: str
    """The function of `{arm}` in its process."""
    columns: Sequence[Column]
    """Columns of the table; the first names a row."""
    reference: Reference
    about: Callable[[Any], Sequence[str]]
    """What the work is and how it is counted."""
    findings: Callable[[Sequence[BenchRow], Any], Sequence[str]]
    """Findings from the rows besides the table."""
    summary: Callable[[BenchRow, Sequence[BenchRow], Any, Any], BenchRow] = lambda *_: {}
    """Figures that follow from a row besides its speed, given all rows, the work and the machine's ceilings."""

    def page(self, facts: MachineFacts, name: str, rows: Sequence[BenchRow]) -> list[str]:
        found = self.findings(rows, self.works[name])
        return [
            *head(self.verb, self.title, facts, quick=name == "quick"),
            *self.about(self.works[name]),
            "",
            *table(self.columns, rows, self.reference),
            *[""] * bool(found),
            *found,
        ]


def run_arms(
    bench: Bench,
    name: str,
    facts: MachineFacts,
    out: Path,
    *,
    arms: Sequence[str],
    progress: Say,
    ceilings: Ceilings | None = None,
) -> Path:
    """Run the arms and write the results after each; returns the path of the page."""
    work, measured, rows, path = bench.works[name], list[BenchRow](), list[BenchRow](), out
    above: BenchRow = {"ceilings": asdict(ceilings)} if ceilings else {}
    for arm in arms:
        for row in rows_of(bench.arm.format(arm=arm), {"name": name, "arm": arm}):
            rates = [row["tokens"] / seconds for seconds in row.get("seconds", ())]
            measured.append({"row": arm, **row} | (spread(rates, "tokens_per_s") if rates else {}))
            rows = [row | bench.summary(row, measured, work, ceilings) for row in measured]
            progress(brief(bench.columns, rows[-1]))
        results = {**above, "setting": {"name": name, **asdict(work)}, "rows": rows}
        what = bench.verb if name == "full" else f"{bench.verb}-{name}"
        path = write(out, what, facts, results, bench.page(facts, name, rows))
    return path


# ---- the gate ----

THEIRS = ("plain", "hf", "hf-seeds", "hf-best", "generate", "continuous", "trl", "trl_continuous")
"""Arms that are not our code: a slower alternative is not a failure."""
NAMING = ("row", "prompts", "samples", "sequences", "rows")
"""Fields that tell the rows of one benchmark apart."""


def recorded(path: Path, facts: MachineFacts) -> dict[str, Any]:
    """A recorded benchmark; refuses what no benchmark on this machine can be compared with, before one is run."""
    before = read_json(path, dict, error=ConfigError)
    try:
        alike, speeds = same_kind(before["machine"], asdict(facts)), _speeds(before)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not the JSON of a benchmark ({error!r}): give one that `redline bench` wrote"
        ) from error
    if not speeds:
        raise ConfigError(f"{path} holds no speed of a benchmark: give a JSON that `redline bench` wrote")
    if not alike:
        raise ConfigError(f"{path} was made on another kind of machine: record one here first")
    return before


def slower(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Our arms that are slower than in a recorded result, beyond the intervals of both and what two sessions on one
    machine differ by; an arm that failed counts. Refuses a record of other work."""
    here, then = _speeds(now), _speeds(before)
    if not here.keys() & then.keys():
        raise ConfigError("the recorded result has no arm of this benchmark on this work: record one first")
    found = []
    for name in sorted(here.keys() & then.keys()):
        (rate, high), (old, low) = here[name][::2], then[name][:2]
        if old and high < low * (1 - APART_SPREAD):
            is_now = f"{rate:,.0f}/s, at most {high:,.0f}"
            found.append(f"{name}: {is_now}; recorded {old:,.0f}, at least {low:,.0f}")
    return found


def _speeds(results: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Rate, slowest and fastest of every arm of ours, by the work it did; zeros for one that failed."""
    rows: list[tuple[str, BenchRow]] = []
    for entry in results.get("results", ()):
        recipe, plan = entry["recipe"], entry["plan"]
        train, flops = recipe["train"], plan["prediction"]["flops_per_token"] / 1e6
        tokens = train["batch_size"] * recipe["data"]["seq_len"]
        update = f"{tokens:,} tokens of {flops:,.3f} MFLOP per update with {train['optimizer']},"
        work = f"{recipe['name']} {plan['precision']['value']}, {update}"
        for arm, row in entry["arms"].items():
            named = row.get("speeds") or {arm: row}
            rows += [(f"{work} {name}", {"row": name, **speed}) for name, speed in named.items()]
    for row in results.get("rows", ()):
        named = " ".join(f"{name} {row[name]}" for name in NAMING if name in row)
        rows.append((f"{named}, {results['setting']['name']}", row))
    found = {}
    for name, row in rows:
        if row["row"] not in THEIRS and ("low" in row or "failed" in row):
            found[name] = _rate(row), row.get("low", 0.0), row.get("high", 0.0)
    return found
