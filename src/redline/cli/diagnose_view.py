"""Findings for people: readable at 80 columns, every number with its unit."""

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.diagnose.summary import nothing_found, split, too_little
from redline.record.units import format_amount, format_duration, format_limit_share, format_rate
from redline.report.grid import Output

_CERTAINTY = ((0.85, "high"), (0.6, "medium"), (0.0, "low"))


def print_findings(observed: Observed, findings: list[Finding]) -> None:
    console = Output()
    speed = f", {format_rate(observed.tokens_per_s, 'tokens')}" if observed.tokens_per_s else ""
    update = f", {format_duration(observed.median('step_s'))} an update" if observed.median("step_s") else ""
    lines = f": {len(observed.steps)} updates on record{update}{speed}" if observed.steps else ""
    console.print(f"[bold]{escape(observed.source)}[/bold] read as {observed.format}{lines}", soft_wrap=False)
    for repair in observed.repairs:
        console.print(f"note: {escape(repair)}")
    _print_split(console, observed)
    for number, finding in enumerate(findings, start=1):
        _print_finding(console, number, finding)
    if not findings:
        console.print(f"\n{nothing_found(observed)}{_how_far(observed)}")
    elif little := too_little(observed):
        console.print(f"\n{little}")


def _how_far(observed: Observed) -> str:
    """For a run with a plan: its speed against what the roofline allows."""
    attainable = observed.plan.prediction.attainable_tokens_per_s if observed.plan else None
    if not attainable or not observed.tokens_per_s:
        return ""
    limit = f"of the {format_rate(attainable, 'tokens')} that the roofline allows its plan"
    return f" The run reaches {format_limit_share(observed.tokens_per_s / attainable, limit)}."


def _print_split(console: Console, observed: Observed) -> None:
    """Where the update's time went, where it was measured."""
    step_s, known = observed.mean("step_s"), split(observed)
    if not step_s or not known:
        return
    shown = ", ".join(
        f"{name} {value / step_s:.0%}" for name, value in known.items() if value / step_s >= 0.005
    )
    several = observed.plan.world_size > 1 if observed.plan else (observed.facts.gpus or 1) > 1
    inside = (
        "; communication is part of forward and backward" if several and "communication" not in known else ""
    )
    console.print(f"update: {shown} (means{inside})")


def _print_finding(console: Console, number: int, finding: Finding) -> None:
    gain = ""
    if finding.gain:
        gain = f"  [green]{finding.gain.low:.2f}–{finding.gain.high:.2f}x[/green]"
    console.print(f"\n[bold]{number}. {escape(finding.title)}[/bold]{gain}")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for item in finding.evidence:
        table.add_row(escape(item.name), escape(format_amount(item.value, item.unit)))
    table.add_row("fix", escape(finding.fix))
    if finding.gain:
        table.add_row(
            "gain",
            escape(
                f"{finding.gain.low:.2f} to {finding.gain.high:.2f} times as fast, predicted:"
                f" {finding.gain.why}"
            ),
        )
    sure = next(word for least, word in _CERTAINTY if finding.confidence >= least)
    table.add_row("confidence", f"{sure} ({finding.confidence:.0%}); cause: {finding.cause}")
    console.print(Padding(table, (0, 0, 0, 3)))
