"""Plain-text pictures of a pipeline: a row per stage, time from left to right.

A cell covers columns [start, end) of its row; all columns are equally wide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_COLUMNS = 4
"""Columns that are drawn even if the terminal is too narrow."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`label` in columns [start, end) of a row."""

    row: int
    start: int
    end: int
    label: str


def render(cells: Iterable[Cell], row_names: Sequence[str], width: int | None = None) -> str:
    """The cells as text, one line per row, idle columns as dots.

    Cells come in any order; those of one row must not overlap. Lines are as long as needed. With `width` they are cut
    at a whole column to that many characters, and a note under the picture says how much is missing.

    Example:
        >>> print(render([Cell(0, 0, 1, "0F0"), Cell(1, 1, 2, "1F0"), Cell(1, 2, 4, "1B0")], ["a ", "b "]))
        a 0F0 .   .   .
        b .   1F0 1B0-----
    """
    rows: list[list[Cell]] = [[] for _ in row_names]
    for cell in sorted(cells, key=lambda cell: cell.start):
        rows[cell.row].append(cell)
    num_columns = max((row[-1].end for row in rows if row), default=0)
    column = max((len(cell.label) for row in rows for cell in row), default=0) + 1
    margin = max((len(name) for name in row_names), default=0)
    shown = num_columns
    if width is not None and margin + num_columns * column > width:
        shown = min(num_columns, max(MIN_COLUMNS, (width - margin) // column))
    lines = [name.ljust(margin) + _draw_row(row, shown, column) for name, row in zip(row_names, rows, strict=True)]
    if shown < num_columns:
        needed = margin + num_columns * column
        lines.append(f"({shown} of {num_columns} time slots shown; all of it needs {needed} characters a line)")
    return "\n".join(line.rstrip() for line in lines)


def _draw_row(row: Sequence[Cell], num_columns: int, column: int) -> str:
    idle = ".".ljust(column)
    text = ""
    for cell in row:
        text += idle * (cell.start - len(text) // column)
        width = (cell.end - cell.start) * column
        # the last character of a cell stays blank, so that neighbours never touch
        filling = "-" if cell.end - cell.start > 1 else " "
        text += cell.label.ljust(width - 1, filling) + " "
    text += idle * (num_columns - len(text) // column)
    return text[: num_columns * column]
