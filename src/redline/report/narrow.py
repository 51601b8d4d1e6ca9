"""Rows whose texts are too long for a column: short cells in a line, and what else there is to say below it,
over the whole width.

    if console.width < WIDE:
        console.print(rows_with_texts(("name", "claimed"), [(("bf16", "2-3x"), "by tuning guide 003 §1"), (("a heading",), "")]))

A row of one cell is a heading. Left out: widths under about 70 columns, where cells fold as rich folds them.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDE = 120
"""Columns from which a table with texts in its cells can be read; in fewer, words are cut into pieces of a
few letters."""


def rows_with_texts(
    columns: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], *, title: str = ""
) -> Group:
    """All columns but the last are as wide as their longest cell; the last has what is left."""
    full = [columns, *(cells for cells, _ in rows if len(cells) > 1)]
    widths = [max(map(cell_len, column)) for column in zip(*full, strict=True)]
    parts: list[RenderableType] = [Text(title, style="table.title")] if title else []
    parts.append(_line(columns, widths, "bold"))
    for cells, text in rows:
        parts.append(Text(cells[0], style="bold") if len(cells) == 1 else _line(cells, widths, ""))
        if text:
            parts.append(Padding(Text(text, style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _line(cells: Sequence[str], widths: Sequence[int], style: str) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    for width in widths[:-1]:
        line.add_column(width=width)
    line.add_column(overflow="fold")
    line.add_row(*map(Text, cells), style=style)
    return line
