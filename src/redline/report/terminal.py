"""The report as tables in a terminal: the figures of the page, run by run, then side by side. No torch."""

from textwrap import shorten

from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.record.read import values
from redline.record.units import counted, format_count, format_share, sparkline
from redline.report.ablation import Ablation
from redline.report.compare import Comparable
from redline.report.grid import Grid
from redline.report.view import Bar, RunView, side_by_side

BAR_COLUMNS = 20
CURVE_COLUMNS = 48
ASKED_COLUMNS = 200
MOST_DIFFERENCES = 12
ABLATION_COLUMNS = {"change": "name", "claimed": "claimed", "measured": "measured", "interval": "interval"}
ABLATION_COLUMNS |= {"verdict": "judged"} | {name: name for name in ("speed", "memory", "numerics", "note")}
"""Names of columns, with what they show of a row."""
_LEVELS = {"yes": "green", "no": "red"}


class Printer:
    """Prints a run's texts as they are, never as markup."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str = "", style: str = "", *, note: str = "", note_style: str = "dim") -> None:
        self.console.print(Text.assemble((text, style), (f"  {note}" if note else "", note_style)))

    def part(self, title: str, grid: Grid | None = None, note: str = "") -> None:
        self.console.print()
        self.line(title, "bold", note=note)
        if grid is not None:
            self.console.print(grid)


def print_report(runs: list[RunView], console: Console) -> None:
    """Print everything; the plan's reasons only for a single run."""
    out = Printer(console)
    for run in runs:
        _identity(out, run)
        _rft(out, run)
        _reinforcement(out, run)
        _findings(out, run)
        _bars(out, "How fast", run.speed_bars if len(run.speed_bars) > 1 else [], shares=False)
        _bars(out, "Where the time went", run.time_stack, shares=True)
        if run.crew is not None:
            out.part("Processes and workers", Grid(("",) * 4, [member[:4] for member in run.crew.members]))
            for said in run.crew.said:
                out.line(said)
        _bars(out, "Memory", run.memory_bars if run.summary.memory.predicted_bytes else [], shares=False)
        print_ablation(run.ablation, console)
        if len(runs) == 1 and run.plan:
            out.part("Plan", Grid(("", "value", "source", "reason"), run.plan))
        out.line()
    if len(runs) > 1:
        _comparison(out, runs)


def _identity(out: Printer, run: RunView) -> None:
    s = run.summary
    out.line(s.label, "bold", note=str(s.state))
    machines = f" x {s.world_size}" if s.world_size and s.world_size > 1 else ""
    facts = [
        f"recipe {s.recipe}" + (f", {format_count(s.parameters)} parameters" if s.parameters else ""),
        f"on {s.hardware}{machines}" if s.hardware else "",
        s.precision or "",
        counted(s.updates, "update") if s.updates or s.workload != "rft" else "",
        f"fingerprint {s.fingerprint}" if s.fingerprint else "",
    ]
    out.line(" · ".join(fact for fact in facts if fact))
    if s.missing:
        out.line(s.missing, "yellow")
    if run.progress:
        percent, text = run.progress
        out.line(f"{_bar(percent)} {text}")
    if run.tiles:
        out.part("Outcome", Grid(("", "", ""), [(t.label, t.value, t.note) for t in run.tiles], right=(1,)))
    if rewards := values(run.run.metrics, "reward"):
        out.line(f"reward {rewards[0]:.3f} {sparkline(rewards, CURVE_COLUMNS)} {rewards[-1]:.3f}")
    elif losses := values(run.run.metrics, "loss"):
        curve, lost = sparkline(losses, CURVE_COLUMNS), "×" if s.quality.nan_step else ""
        out.line(f"loss {losses[0]:.3f} {curve}{lost} {losses[-1]:.3f} nats/token")


def _bar(percent: float) -> str:
    return "█" * max(1, round(BAR_COLUMNS * percent / 100))


def _bars(out: Printer, title: str, bars: list[Bar], *, shares: bool) -> None:
    rows = [(b.name, b.text, f"{b.percent:.1f}%" if shares else _bar(b.percent), b.note) for b in bars]
    if rows:
        out.part(title, Grid(("",) * 4, rows, right=(1, 2) if shares else (1,)))


def _rft(out: Printer, run: RunView) -> None:
    if not (found := run.samples):
        return
    speed = f", {format_count(found['tokens_per_s'])} tokens/s" if found["tokens_per_s"] else ""
    correct, solved = format_share(found["success_rate"]), f"{found['solved']:,} of {found['asked']:,}"
    out.part("Samples")
    out.line(f"{found['samples']:,} samples, {correct} correct; {solved} questions solved{speed}")
    if found.get("cut"):
        out.line(f"{found['cut']:,} were cut off by sample.max_new_tokens and count as wrong")
    for example in found["examples"][:2]:
        verdict = "correct" if example["correct"] else f"wrong, expected {example['expected']}"
        out.line(f"  {example['question']}", note=f"{verdict}, score {example['reward']:g}")
        out.line(f"    {' '.join(example['text'].split())}")


def _reinforcement(out: Printer, run: RunView) -> None:
    if (rl := run.rl) is None:
        return
    if rl.figures:
        columns: tuple[str, ...] = ("", "recent updates", "first updates")
        out.part("What the policy does", Grid(columns, rl.figures, right=(1, 2)))
    if rl.pairs:
        rows = [
            (f"{a} and {b}", f"{cosine:+.2f}", format_share(rate), format_share(tensors))
            for a, b, cosine, rate, tensors in rl.pairs
        ]
        columns = ("", "mean cosine", "updates in conflict", "tensors in conflict")
        out.part("Conflicts between domains", Grid(columns, rows, right=(1, 2, 3)))
    if rl.said:
        out.part("What it wrote in the last step")
    for one in rl.said:
        asked = shorten(one.question, ASKED_COLUMNS, placeholder=" …")
        out.line(f"  {one.domain}: {asked}", note=f"{one.note}, reward {one.reward:g}")
        out.line(f"    {' '.join(one.text.split())}")


def _findings(out: Printer, run: RunView) -> None:
    if run.findings is None:
        return
    out.part("Findings")
    for finding in run.findings:
        gain = finding.gain
        out.line(finding.title, "bold", note=str(gain or ""), note_style="green")
        out.line(f"  {'; '.join([*map(str, finding.evidence), *([gain.why] if gain else [])])}")
        out.line(f"  {finding.fix}", note=f"(confidence {finding.confidence:.0%})")
    if run.remark:
        out.line(run.remark)


def print_ablation(charts: list[Ablation], console: Console) -> None:
    """A table for each workload and stage of an ablation."""
    out = Printer(console)
    for chart in charts:
        figures = " or ".join(dict.fromkeys(row.quality[0] for row in chart.rows if row.quality[0]))
        columns = {name: [getattr(row, of) for row in chart.rows] for name, of in ABLATION_COLUMNS.items()}
        if figures:
            last = {name: columns.pop(name) for name in ("speed", "memory", "numerics", "note")}
            columns |= {figures: [row.quality[1] for row in chart.rows]} | last
        title = f"Ablation: {chart.title}" if chart.title else "Ablation"
        out.part(title, note="measured is speed with the change over speed without it")
        if chart.rows:
            rows = [*zip(*columns.values(), strict=True)]
            console.print(Grid([*columns], rows, (1, 2, 3), named_below=True))
        if chart.not_applicable:
            out.line(f"not applicable here: {'; '.join(f'{n} ({why})' for n, why in chart.not_applicable)}")


def _comparison(out: Printer, runs: list[RunView]) -> None:
    verdict = Comparable([run.run for run in runs])
    out.line("Side by side", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for label in ("", *(run.summary.label for run in runs)):
        table.add_column(Text(label), ratio=1 if label else None, overflow="fold")
    for name, cells in side_by_side(runs):
        table.add_row(*map(Text, (name, *cells)))
    out.console.print(table)
    out.line()
    out.line(verdict.title, _LEVELS.get(verdict.level, "yellow"), note=verdict.text)
    for what, lines in (("recipe", verdict.differences), ("plan", verdict.plan_differences)):
        for line in lines[:MOST_DIFFERENCES]:
            out.line(f"  {what:<6}  {line}")
        if len(lines) > MOST_DIFFERENCES:
            out.line(f"  {what:<6}  and {len(lines) - MOST_DIFFERENCES} more")
