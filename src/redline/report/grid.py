"""Tables that fit the terminal, however narrow: no word is broken and nothing is cut.

    show(("name", "claimed", "why"), [("bf16", "2-3x", "a long text"), ("a heading",)], title="Precision", right=(1,))

A row takes one line if there is room; its last column may wrap. Otherwise the columns that do not fit go below the
row, over the whole width. A row of one cell is a heading.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from redline.record.units import DASH, visible

GAP = 2
LEAST_TEXT = 26
"""A column narrower than this goes below its row: a few words a line are hard to read."""
Cell = str | Text


class Output(Console):
    """Standard output, or another stream. Control characters in the texts of runs and models are shown, not obeyed. A
    reader that has gone (head, less) is handled in one place, cli/main.py."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def on_broken_pipe(self) -> None:
        raise  # rich would exit with 1


def show(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, title: str = "", right: Collection[int] = ()
) -> None:
    """Print a table on standard output; markup in it is shown as it is."""
    console = Output()
    if title:
        console.print(Text(title, style="italic"))
    console.print(Grid(columns, rows, right))


@dataclass(frozen=True)
class Grid:
    columns: Sequence[str]
    """Their names; if all are empty there is no header."""
    rows: Sequence[Sequence[Cell]]
    right: Collection[int] = ()
    """Columns of numbers."""
    named_below: bool = False
    """Whether all cells below a row, not only numbers, are prefixed with the names of their columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        full = [self.columns, *(row for row in self.rows if len(row) > 1)]
        widths = [max(cell_len(str(cell)) for cell in column) for column in zip(*full, strict=True)]
        beside = self._fitting(widths, options.max_width)
        if any(self.columns):
            yield self._line([Text(name, style="bold") for name in self.columns], widths, beside)
        for row in self.rows:
            if len(row) == 1:
                yield Text(str(row[0]), style="bold")
                continue
            yield self._line(row, widths, beside)
            below = [
                f"{name} {cell}" if self._named(place) else str(cell)
                for place, (name, cell) in enumerate(zip(self.columns, row, strict=True))
                if place >= beside and str(cell) not in ("", DASH)
            ]
            if below:
                yield Padding(Text("; ".join(below), style="dim"), (0, 0, 0, GAP))

    def _named(self, place: int) -> bool:
        """Whether a cell below its row has the name of its column: a number says nothing without it."""
        return self.columns[place] not in ("", "note") and (self.named_below or place in self.right)

    def _fitting(self, widths: Sequence[int], room: int) -> int:
        gaps = GAP * (len(widths) - 1)
        words = [cell_len(word) for row in self.rows if len(row) > 1 for word in str(row[-1]).split()]
        least = min(widths[-1], max(LEAST_TEXT, *words)) if words else 0
        if sum(widths[:-1]) + gaps + least <= room:
            return len(widths)
        fits = [n for n in range(1, len(widths)) if sum(widths[:n]) + GAP * (n - 1) <= room]
        return max(fits, default=1)

    def _line(self, cells: Sequence[Cell], widths: Sequence[int], beside: int) -> Table:
        line = Table.grid(padding=(0, GAP, 0, 0))
        for place in range(beside):
            last = place == len(widths) - 1
            justify: JustifyMethod = "right" if place in self.right else "left"
            line.add_column(width=None if last else widths[place], justify=justify, overflow="fold")
        line.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells[:beside]))
        return line
