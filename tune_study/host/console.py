"""Print lines and tables, formatted in a terminal and as plain text elsewhere.

Everything that a command prints goes through a console of `make_console` or through `print_error`. Both show control
characters as escapes, because texts and file names of a results folder may come from somebody else.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import IO, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from trainable.files.control_characters import LINE_CHARACTERS, escape_controls
from trainable.files.json_values import DamageWarning


class EscapedRenderable:
    """A renderable whose text has escapes for control characters; rich's own control codes stay."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            # A style can have a link, which is part of what is sent to the terminal.
            style = segment.style.update_link(None) if segment.style and segment.style.link else segment.style
            yield segment if segment.control else Segment(_escape(segment.text), style)


class _ControlEscaper(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [EscapedRenderable(renderable) for renderable in renderables]


def make_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that never passes a control character of a text on to the terminal.

    file: where it writes; standard output by default. width: in characters; that of the terminal by default.
    """
    console = Console(file=file, width=width)
    console.push_render_hook(_ControlEscaper())
    return console


def print_error(message: str) -> None:
    """Print a message to standard error."""
    print(_escape(message), file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Print warnings with escapes for control characters, and a DamageWarning as a sentence without a line of code."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, DamageWarning):
            print_error(f"tune_study: {message}")
        else:  # such as Matplotlib's, which repeats a character that its font lacks
            print_error(warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n"))

    warnings.showwarning = show


def _escape(text: str) -> str:
    return escape_controls(text, allowed=LINE_CHARACTERS)


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. A terminal gets a table that fits its width: cells are wrapped, and none is cut.

    Elsewhere each row is one line with columns two spaces apart, in which nothing is cut, so that it can be searched.
    """
    # Before the widths are measured. A line break in a name would look like another row.
    columns, *rows = [[escape_controls(cell) for cell in row] for row in [columns, *rows]]
    if console.is_terminal:
        # Names are in the first column, and a cut name cannot be copied: only the other columns may be wrapped.
        first_column, *other_columns = columns
        table = Table(Column(first_column, no_wrap=True), box=box.SIMPLE_HEAD)
        for name in other_columns:
            table.add_column(name, overflow="fold")
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
    """`text` with escapes for control characters, and for those that the encoding lacks: printing them would fail."""
    return _escape(text).encode(console.encoding, "backslashreplace").decode(console.encoding)
