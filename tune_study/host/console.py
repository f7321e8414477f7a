"""Print lines and tables, formatted in a terminal and as plain text elsewhere."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. A terminal gets a table that fits its width.

    Elsewhere each row is one line with columns two spaces apart, in which nothing is cut, so that it can be searched.
    """
    if console.is_terminal:
        table = Table(*columns, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*(Text(_escape_unencodable(console, cell)) for cell in row))
        console.print(table)
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        print_line(console, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_line(console: Console, line: str) -> None:
    """Print one line without markup; characters that the terminal's encoding lacks are escaped."""
    console.print(_escape_unencodable(console, line), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _escape_unencodable(console: Console, text: str) -> str:
    """`text` with backslash escapes for characters that the console's encoding lacks: printing them would fail."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)
