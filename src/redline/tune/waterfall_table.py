"""The table of an ablation as Markdown, claimed against measured. No torch."""

from collections.abc import Sequence

from redline.measure.statistics import FEWEST_BLOCKS
from redline.optimizations.catalogue import Quote, StudyPart, ratio, study
from redline.record.units import format_bytes
from redline.tune.ablate import AblationRow

COLUMNS = (
    "change", "claimed", "by", "measured", "interval", "verdict", "tokens/s (MFU)", "memory", "numerics",
)  # fmt: skip
WORKLOADS = {"train": "pre-training", "generate": "generation", "finetune": "LoRA fine-tuning"}


def cells(row: AblationRow, figures: str = "") -> tuple[str, ...]:
    """`figures`: what the training reached, if any row says it."""
    measured = f"{row.measured_ratio:.2f}x" if row.measured_ratio is not None else ""
    brief = "*" if row.rounds is not None and row.rounds < FEWEST_BLOCKS else ""
    interval = f"{row.low:.2f}-{row.high:.2f}x{brief}" if row.low is not None and row.high is not None else ""
    verdict = row.verdict if row.outcome == "ok" else row.outcome
    verdict = ", ".join(part for part in (verdict, "kept" if row.kept else "", row.note) if part)
    name = {"all": f"all kept: {row.title}", "second try": f"{row.name}, again"}.get(row.stage, row.name)
    share = f" ({100 * row.mfu:.2g}%)" if row.mfu is not None else ""
    before = f"{row.before_tokens_per_s:,.0f} → " if row.before_tokens_per_s is not None else ""
    tokens = f"{before}{row.tokens_per_s:,.0f}{share}" if row.tokens_per_s is not None else ""
    memory = format_bytes(row.memory_bytes) if row.memory_bytes else ""
    claimed = ratio(row.claimed) if row.claimed else ""
    quality = (str(row.quality or ""),) if figures else ()
    return name, claimed, row.source, measured, interval, verdict, tokens, memory, *quality, row.numerics


def markdown(rows: Sequence[AblationRow], title: str, where: str) -> str:
    """The guide's claims with the answers; a table for each workload and stage; what there was no time for."""
    lines = [f"## {title}", "", where, ""]
    answers = [(quote, _answer(quote, part, rows)) for part in study(title) for quote in part.quotes]
    if answers:
        lines += ["### What the guide claims", "", "| in its words | measured |", "|---|---|"]
        lines += [f'| "{quote.words}" | {answer} |' for quote, answer in answers] + [""]
    for workload, stage in dict.fromkeys((row.workload, _stage(row)) for row in rows):
        shown = [row for row in rows if (row.workload, _stage(row)) == (workload, stage)]
        lines += [f"### {WORKLOADS[workload]}, {stage}", ""]
        lines += [line for row in shown if row.stage == "baseline" for line in (f"Start: {row.title}.", "")]
        if ran := [row for row in shown if row.outcome != "not run"]:
            figures = " or ".join(dict.fromkeys(row.quality.figure for row in ran if row.quality))
            columns = [*COLUMNS[:-1], *([figures] if figures else []), COLUMNS[-1]]
            lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            lines += [f"| {' | '.join(c.replace('|', '/') for c in cells(row, figures))} |" for row in ran]
            lines.append("")
        if left := [cells(row)[0] for row in shown if row.outcome == "not run"]:
            lines += [f"Not run for want of time: {', '.join(left)}.", ""]
    return "\n".join(lines)


def _answer(quote: Quote, part: StudyPart, rows: Sequence[AblationRow]) -> str:
    """What a row says about a claim of speed or memory."""
    before_bytes: int | None = None
    for row in rows:
        if row.workload != part.workload or row.stage == "leave one out":
            continue
        if quote.of == ("all" if row.stage == "all" else row.name) and row.measured_ratio is not None:
            if quote.measures == "speed":
                since = "from the start below" if row.stage == "all" else "on top of those kept before it"
                return f"{row.measured_ratio:.2f}x in tokens/s ({row.verdict}), {since}"
            if row.memory_bytes and before_bytes:
                return f"{row.memory_bytes / before_bytes:.2f}x the memory: {format_bytes(row.memory_bytes)}"
        if row.kept or row.stage == "baseline":
            before_bytes = row.memory_bytes
    return quote.answer or "not run"


def _stage(row: AblationRow) -> str:
    if row.stage == "leave one out":
        return "left out of the best, one at a time"
    return "one by one, each on top of those kept before it"
