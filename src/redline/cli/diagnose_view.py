"""A diagnosis as text: readable at 80 columns, every number with its unit."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from redline.diagnose.answer import mfu, split, too_little, verdict, what_it_is
from redline.diagnose.finding import Finding
from redline.diagnose.observed import Observed
from redline.record.units import format_amount, format_count, format_duration, format_share
from redline.report.grid import Output

_CERTAINTY = ((0.85, "high"), (0.6, "medium"), (0.0, "low"))


def print_answer(observed: Observed, findings: list[Finding]) -> None:
    """What the run is, what holds it back, what to change, what to expect."""
    console = Output()
    console.print(f"[bold]{escape(observed.source)}[/bold]")
    table = _plain_table()
    for name, text in what_it_is(observed):
        table.add_row(name, escape(text))
    if parts := _split(observed):
        table.add_row("an update", escape(parts))
    for note in observed.notes:
        table.add_row("note", escape(note))
    console.print(table)
    for number, finding in enumerate(findings, start=1):
        _print_finding(console, number, finding)
    said = verdict(observed, findings)
    if said.word in ("not judged", "fast enough") and said.text:
        console.print(f"\n[bold]{said.word.capitalize()}.[/bold] {escape(said.text)}")
    elif little := too_little(observed):
        console.print(f"\n{escape(little)}")


def _plain_table() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _split(observed: Observed) -> str:
    """Where the update's time went, if it was measured."""
    step_s, known = observed.mean("step_s"), split(observed)
    if not step_s or not known:
        return ""
    shares = {name: value / step_s for name, value in known.items()}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    several = observed.plan.world_size > 1 if observed.plan else (observed.facts.gpus or 1) > 1
    hidden = several and "communication" not in known and "forward" in known
    return f"{shown} (means{'; communication is part of forward and backward' if hidden else ''})"


def _print_finding(console: Console, number: int, finding: Finding) -> None:
    gain = f"  [green]{finding.gain.low:.2f}–{finding.gain.high:.2f}x[/green]" if finding.gain else ""
    console.print(f"\n[bold]{number}. {escape(finding.title)}[/bold]{gain}")
    table = _plain_table()
    for item in finding.evidence:
        table.add_row(escape(item.name), escape(format_amount(item.value, item.unit)))
    table.add_row("fix", escape(finding.fix))
    if gained := finding.gain:
        expected = f"{gained.low:.2f} to {gained.high:.2f} times as fast, predicted: {gained.why}"
        table.add_row("gain", escape(expected))
    sure = next(word for least, word in _CERTAINTY if finding.confidence >= least)
    table.add_row("confidence", f"{sure} ({finding.confidence:.0%}); cause: {finding.cause}")
    console.print(Padding(table, (0, 0, 0, 3)))


def print_side_by_side(answers: Sequence[tuple[Observed, list[Finding]]]) -> None:
    """Several runs: a row each of what can be compared, then the first finding of each."""
    console = Output()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "update", "tokens/s", "MFU", "GPUs", "verdict"):
        text = name in ("", "verdict")
        table.add_column(name, justify="left" if text else "right", no_wrap=name != "verdict")
    for number, (observed, findings) in enumerate(answers, start=1):
        share, step_s = mfu(observed), observed.median("step_s")
        table.add_row(
            str(number),
            format_duration(step_s),
            format_count(observed.tokens_per_s),
            format_share(share[0] if share else None),
            f"{observed.facts.gpus:.0f}" if observed.facts.gpus else "–",
            verdict(observed, findings).word,
        )
    console.print(table)
    for number, (observed, findings) in enumerate(answers, start=1):
        title = observed.trainer.title or observed.format
        about = f"{escape(observed.source)} ({escape(title)}, {observed.updates:,} updates)"
        console.print(f"\n[bold]{number}[/bold] {about}")
        first = (
            f"{findings[0].title}. Fix: {findings[0].fix}" if findings else verdict(observed, findings).text
        )
        console.print(Padding(escape(first), (0, 0, 0, 2)))
    console.print("\n`redline diagnose PATH` shows all findings of one.")
