"""Tables on the terminal: drawn by rich where somebody looks, aligned columns of plain text where not."""

import sys
from collections.abc import Sequence


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell; numbers to the right, columns named in `left` to the left."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        pairs = zip(cells, widths, strict=True)
        padded = [cell.ljust(n) if index in left else cell.rjust(n) for index, (cell, n) in enumerate(pairs)]
        return "  " + "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in (titles, *rows))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> None:
    """Print a table to stdout; see `plain_table`."""
    if not sys.stdout.isatty():
        print(plain_table(titles, rows, left))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
