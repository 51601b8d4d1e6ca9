"""The report as tables in a terminal: the same figures as on the page, one run after the other, then side by
side. No torch."""

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from redline.record.read import State, number
from redline.record.units import DASH, exact, format_count, format_limit_share, format_share, sparkline
from redline.report.ablation import Ablation, Trials
from redline.report.compare import comparable
from redline.report.narrow import WIDE, rows_with_texts
from redline.report.view import RunView, bad_gradient, last_loss, side_by_side

BAR_COLUMNS = 20
CURVE_COLUMNS = 48
SHORT_COLUMNS = ("outcome", "tokens", "against the best then", "verdict")
"""Of the trials, what stands beside their names in a narrow terminal."""
_LEVELS = {"yes": "green", "loss only": "yellow", "accuracy only": "yellow", "no": "red"}


def print_report(runs: list[RunView], console: Console) -> None:
    """Print everything but the plan's reasons of runs that are compared (each run's own report has them)."""
    for run in runs:
        _identity(console, run)
        _speed(console, run)
        _parts(console, run)
        _curve(console, run)
        _findings(console, run)
        _ablation(console, run)
        _rft(console, run)
        if len(runs) == 1:
            _plan(console, run)
        console.print()
    if len(runs) > 1:
        _comparison(console, runs)


def _grid(*columns: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns))
    for place, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if place in right else "left",
            no_wrap=place < 3 and not any(columns),
            overflow="fold",
        )
    return table


def _state(state: State) -> str:
    return state.text if state.text.startswith(state.ending) else f"{state.ending}: {state.text}"


def _identity(console: Console, run: RunView) -> None:
    s = run.summary
    console.print(f"[bold]{escape(s.label)}[/bold]  {escape(_state(s.state))}", highlight=False)
    facts = [
        f"recipe {s.recipe}" + (f", {format_count(s.parameters)} parameters" if s.parameters else ""),
        f"fingerprint {s.fingerprint}" if s.fingerprint else "",
        (
            f"on {s.hardware}" + (f" x {s.world_size}" if s.world_size and s.world_size > 1 else "")
            if s.hardware
            else ""
        ),
        s.precision or "",
        (
            f"{s.updates:,} updates"
            if s.updates
            else "no update is recorded"
            if s.workload == "pretrain"
            else ""
        ),
    ]
    console.print(escape(" · ".join(fact for fact in facts if fact)), highlight=False)
    if s.missing:
        console.print(f"[yellow]{s.missing}[/yellow]", highlight=False)


def _bar(percent: float) -> str:
    return "█" * max(1, round(BAR_COLUMNS * percent / 100))


def _speed(console: Console, run: RunView) -> None:
    speed = run.summary.speed
    if speed.update is None:
        return
    table = _grid("", "", "", "", right=(1,))
    for bar in run.speed_bars:
        table.add_row(bar.name, bar.text, _bar(bar.percent), f"[dim]{escape(bar.note)}[/dim]")
    console.print("\n[bold]How fast[/bold]", highlight=False)
    console.print(table, highlight=False)
    if speed.attained_share:
        console.print(format_limit_share(speed.attained_share, "of the attainable speed"), highlight=False)
    console.print(
        f"MFU {format_limit_share(speed.mfu)} [dim]({escape(speed.mfu_note)})[/dim]", highlight=False
    )
    console.print(
        f"{format_limit_share(speed.ceiling_share, 'of the ceiling')} [dim]({escape(speed.ceiling_note)})[/dim]",
        highlight=False,
    )


def _parts(console: Console, run: RunView) -> None:
    for title, bars in (("Where the time went", run.time_stack), ("Memory", run.memory_bars)):
        if not bars:
            continue
        table = _grid("", "", "", "", right=(1, 2))
        for bar in bars:
            share = f"{bar.percent:.1f} %" if title != "Memory" else ""
            table.add_row(bar.name, bar.text, share, f"[dim]{escape(bar.note)}[/dim]")
        console.print(f"\n[bold]{title}[/bold]", highlight=False)
        console.print(table, highlight=False)
    if run.memory_bars and run.summary.memory.note:
        console.print(f"[dim]{run.summary.memory.note}[/dim]", highlight=False)


def _curve(console: Console, run: RunView) -> None:
    losses = [value for line in run.run.metrics if (value := number(line.get("loss"))) is not None]
    if not losses:
        if run.summary.quality.nan_step is not None:
            console.print(f"\n[bold]Loss[/bold]\n[red]{last_loss(run.summary)}[/red]", highlight=False)
        return
    each = -(-len(losses) // CURVE_COLUMNS)
    q = run.summary.quality
    blocks = [losses[i : i + each] for i in range(0, len(losses), each)]
    console.print("\n[bold]Loss[/bold]", highlight=False)
    line = sparkline([sum(b) / len(b) for b in blocks])
    console.print(
        f"training {q.first_loss:.3f} {line}{'×' if q.nan_step else ''} {q.last_loss:.3f} nats/token",
        highlight=False,
    )
    if q.nan_step is not None:
        console.print(
            f"[red]not a number from update {q.nan_step:,}[/red]; the last number is given above",
            highlight=False,
        )
    elif q.bad_gradient_step is not None:
        console.print(f"[red]{bad_gradient(q)}[/red]", highlight=False)
    if q.valid_loss is not None:
        best = f", best {q.best_loss:.4f} at update {q.best_step:,}" if q.best_step != q.valid_step else ""
        bits = f", {q.valid_bits_per_byte:.3f} bits/byte" if q.valid_bits_per_byte is not None else ""
        perplexity = f", perplexity {q.valid_perplexity:.2f}" if q.valid_perplexity is not None else ""
        console.print(
            f"validation {q.valid_loss:.4f} nats/token at update {q.valid_step:,}{perplexity}{bits}{best}",
            highlight=False,
        )


def _findings(console: Console, run: RunView) -> None:
    if run.findings is None:
        return
    console.print("\n[bold]Findings[/bold]", highlight=False)
    for finding in run.findings:
        console.print(
            f"[bold]{escape(finding.title)}[/bold]  [green]{escape(finding.gain)}[/green]", highlight=False
        )
        because = [*finding.evidence, finding.gain_why] if finding.gain_why else finding.evidence
        console.print(f"  {escape('; '.join(because))}", highlight=False)
        console.print(
            f"  {escape(finding.fix)} [dim](confidence {finding.confidence})[/dim]", highlight=False
        )
    if run.remark:
        console.print(escape(run.remark), highlight=False)


def _ablation(console: Console, run: RunView) -> None:
    for chart in run.ablation:
        title = f": {chart.title}" if chart.title else ""
        console.print(
            f"\n[bold]Ablation{escape(title)}[/bold]; measured is speed with the change over speed"
            " without it",
            highlight=False,
        )
        console.print(_ablation_table(chart, console.width), highlight=False)
    if run.trials.rows:
        console.print("\n[bold]Trials[/bold]", highlight=False)
        console.print(_trial_table(run.trials, console.width), highlight=False)
    if run.trials.note:
        console.print(f"[dim]{run.trials.note}[/dim]", highlight=False)


def _ablation_table(chart: Ablation, width: int) -> RenderableType:
    columns = ("change", "claimed", "measured", "interval", "verdict", "speed", "memory", "numerics")
    if width < WIDE:
        rows = [
            (
                (row.name, row.claimed, row.measured, row.interval or DASH, row.judged),
                _joined(row.speed, row.memory, row.numerics, row.note),
            )
            for row in chart.rows
        ]
        return rows_with_texts(columns[:5], rows)
    table = _grid(*columns, right=(1, 2, 3, 5, 6))
    for row in chart.rows:
        shown = (
            row.name,
            row.claimed,
            row.measured,
            row.interval or DASH,
            row.verdict,
            row.speed,
            row.memory,
            row.numerics,
        )
        table.add_row(*(escape(cell) for cell in shown))
    return table


def _trial_table(trials: Trials, width: int) -> RenderableType:
    if width < WIDE:
        short = [place for place, name in enumerate(trials.columns) if place == 0 or name in SHORT_COLUMNS]
        columns = [trials.columns[place] for place in short]
        return rows_with_texts(
            columns,
            [([cells[place] for place in short], _below(trials, cells, short)) for cells in trials.rows],
        )
    table = _grid(*(escape(name) for name in trials.columns))
    for cells in trials.rows:
        table.add_row(*(escape(cell) for cell in cells))
    return table


def _below(trials: Trials, cells: list[str], short: list[int]) -> str:
    """What a trial says in the columns that a narrow terminal has no room for."""
    long = [
        (name, cell)
        for place, (name, cell) in enumerate(zip(trials.columns, cells, strict=True))
        if place not in short
    ]
    return _joined(*(cell if name == "note" else f"{name} {cell}" for name, cell in long if cell != DASH))


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _rft(console: Console, run: RunView) -> None:
    if run.tests:
        table = _grid("greedy, held out", "n", "accuracy", "95 %", "answer rate", right=(1, 2, 3, 4))
        for test in run.tests:
            interval = f"{test.low:.3f} to {test.high:.3f}"
            table.add_row(
                escape(test.name), f"{test.n:,}", f"{test.accuracy:.3f}", interval, f"{test.answer_rate:.3f}"
            )
        console.print("\n[bold]Rejection sampling[/bold]", highlight=False)
        console.print(table, highlight=False)
    if run.samples:
        a = run.samples
        console.print(
            f"{a['samples']:,} samples, {format_share(a['success_rate'])} correct, {a['cut']:,} cut off by"
            f" max_new_tokens and counted as wrong; {a['solved']:,} of"
            f" {a['asked']:,} questions solved; {exact(a['tokens_per_s'])} tokens/s while sampling",
            highlight=False,
        )


def _plan(console: Console, run: RunView) -> None:
    if not run.plan:
        return
    table = _grid("plan", "", "source", "reason")
    for row in run.plan:
        table.add_row(row.name, escape(row.value), row.source, escape(row.reason))
    console.print()
    console.print(table, highlight=False)


def _comparison(console: Console, runs: list[RunView]) -> None:
    verdict = comparable([run.run for run in runs])
    table = _grid("", *(escape(run.summary.label) for run in runs))
    for name, cells in side_by_side(runs):
        table.add_row(name, *(escape(cell) for cell in cells))
    console.print("[bold]Side by side[/bold]", highlight=False)
    console.print(table, highlight=False)
    console.print(f"\n[{_LEVELS[verdict.level]}]{verdict.title}[/]: {escape(verdict.text)}", highlight=False)
    for line in verdict.differences:
        console.print(f"  recipe  {escape(line)}", highlight=False)
    for line in verdict.plan_differences:
        console.print(f"  plan    {escape(line)}", highlight=False)
