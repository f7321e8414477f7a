"""Print lines and tables, formatted in a terminal and as plain text elsewhere.

All output of commands goes through a console of `make_console` or through `print_error`. Both escape control
characters, because texts and file names in a results folder may come from somebody else.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.live import Live
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainable.files.json_values import DamageWarning, parse_finite
from trainable.files.paths import LINE_CHARACTERS, escape_controls
from trainable.files.step_phase import STEP_PHASE

_LEGIBLE_WIDTH = 18
"""Width in characters below which prose in a cell is hard to read."""

JSON_SCHEMA = 1
"""Version of what --json prints. It rises if a key is removed or renamed, or its values change their type."""

SECONDS_PER_PHASE_LINE = 30.0
"""Without a terminal, the least seconds between two progress lines of a long task."""


class EscapedRenderable:
    """A renderable that escapes control characters in its text; rich's own control codes stay."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            # A link in a style would be sent to the terminal, too.
            style = segment.style.update_link(None) if segment.style and segment.style.link else segment.style
            yield segment if segment.control else Segment(_escape(segment.text), style)


class _ControlEscaper(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [EscapedRenderable(renderable) for renderable in renderables]


def make_console(file: IO[str] | None = None, width: int | None = None, *, quiet: bool = False) -> Console:
    """Make a console that never passes control characters in texts on to the terminal.

    file: where it writes; standard output by default. width: in characters; the terminal's by default. quiet: whether
    it prints nothing.
    """
    console = Console(file=file, width=width, quiet=quiet)
    console.push_render_hook(_ControlEscaper())
    return console


def print_error(message: str) -> None:
    """Print a message to standard error."""
    print(_escape(message), file=sys.stderr, flush=True)


def print_json(command: str, value: Mapping[str, Any]) -> None:
    """Print what a command computed as a JSON object on standard output. NaN and infinities become null.

    `{"schema": 1, "command": "status", ...}`; characters beyond ASCII, and those that control a terminal, are escaped.
    """
    print(json.dumps(_replace_missing({"schema": JSON_SCHEMA, "command": command, **value}), indent=2, allow_nan=False))


def _replace_missing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_missing(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_missing(item) for item in value]
    return parse_finite(value) if isinstance(value, float) else value


@contextmanager
def show_phases(console: Console, task: str) -> Iterator[None]:
    """Show `task` while the body runs, and the phases of the body that `STEP_PHASE` names.

    In a terminal each replaces the previous one, and the last is erased. Elsewhere a line is printed at most every
    SECONDS_PER_PHASE_LINE, and none if the body is quick.
    """
    next_line = time.monotonic() + SECONDS_PER_PHASE_LINE

    def print_phase(phase: str) -> None:
        nonlocal next_line
        if (now := time.monotonic()) >= next_line:
            next_line = now + SECONDS_PER_PHASE_LINE
            print_line(console, f"{task}: {phase}")

    if not console.is_terminal:
        with STEP_PHASE.reporting(print_phase):
            yield
        return
    # No refresh thread: a fork of this process draws the figures of a report, and must not be made with other threads.
    note = EscapedRenderable(Text(f"{task} ..."))
    with (
        Live(note, console=console, auto_refresh=False, transient=True) as live,
        STEP_PHASE.reporting(lambda phase: live.update(EscapedRenderable(Text(f"{task}: {phase}")), refresh=True)),
    ):
        yield


def show_warnings() -> None:
    """Print warnings with escaped control characters, and a DamageWarning as a sentence without a line of code."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **_: Any) -> None:
        if issubclass(category, DamageWarning):
            print_error(f"tune_study: {message}")
        else:  # of a library, which may repeat a text of the study
            print_error(warnings.formatwarning(message, category, *place[:2]).rstrip("\n"))

    warnings.showwarning = show


def _escape(text: str) -> str:
    return escape_controls(text, allowed=LINE_CHARACTERS)


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()
) -> None:
    """Print a table. In a terminal it fits the width: cells and headings are wrapped between words, never cut.

    If the columns do not fit, those in `optional` are left out one by one, and a line names them. If that is not
    enough, each row becomes a short list. Outside of a terminal each row is one complete line, with columns two spaces
    apart, so that it can be searched.
    """
    # Escaped before the widths are measured; a line break in a name would look like another row.
    columns, *rows = [[escape_controls(cell) for cell in row] for row in [columns, *rows]]
    if not console.is_terminal:
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        for row in [columns, *rows]:
            print_line(console, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    columns, *rows = [[_escape_unencodable(console, cell) for cell in row] for row in [columns, *rows]]
    narrow, n_hidden = [columns, *rows], 0
    while not (widths := _choose_widths(narrow, console.width)) and n_hidden < len(optional):
        place = narrow[0].index(optional[n_hidden])
        narrow = [[*row[:place], *row[place + 1 :]] for row in narrow]
        n_hidden += 1
    if not widths:
        for row in rows:
            pairs = [f"{name}: {cell}" for name, cell in zip(columns[1:], row[1:], strict=True) if cell]
            console.print(Text(row[0], overflow="fold"), Padding(Text("; ".join(pairs), overflow="fold"), (0, 0, 0, 4)))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width in zip(narrow[0], widths, strict=True):
        table.add_column(Text(name), width=width)
    for row in narrow[1:]:
        table.add_row(*map(Text, row))
    console.print(table)
    if n_hidden:
        print_line(console, f"Left out at this width: {', '.join(optional[:n_hidden])}. `| cat` shows all columns.")


def _choose_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Choose widths of columns that fit a terminal of `width` characters, two spaces apart; empty if there are none.

    rows: the first has the headings, which are wrapped before cells are. No word is broken, and no cell is wrapped to
    fewer than _LEGIBLE_WIDTH characters.
    """
    columns = [*zip(*rows, strict=True)]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    sizes = [max(map(len, column)) for column in columns]
    cell_sizes = [max(map(len, column[1:]), default=0) for column in columns]
    for limits in (
        sizes,
        *([min(size, limit) for size in cell_sizes] for limit in range(width, _LEGIBLE_WIDTH - 1, -1)),
    ):
        widths = [*map(max, words, limits)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            return widths
    return []


def print_line(console: Console, line: str) -> None:
    """Print one line without markup; characters that the terminal's encoding lacks are escaped."""
    console.print(_escape_unencodable(console, line), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _escape_unencodable(console: Console, text: str) -> str:
    """Escape control characters and those that the encoding lacks, since printing these would fail."""
    return _escape(text).encode(console.encoding, "backslashreplace").decode(console.encoding)
