"""What a report is made of: sections, each with sentences, figures and tables.

A report is a list of `Section`s. Each is a declaration; its functions take the results of the family, such as
`SweepResults`, and are called when the report is written. A section without anything to show is left out. Texts may
have `code` in backticks and **bold** words.

Example, in the file of an own study; `run` and `report` add it to the page:
    >>> from analysis.report.section import Section, Table, name, number
    >>> def make_tables(results):
    ...     rows = results.frames.trials.groupby("arm")["steps_done"].mean().reset_index()
    ...     yield Table([name("arm"), number("steps", "steps_done")], rows.to_dict("records"))
    >>> SECTIONS = [Section("effort", "Steps of each arm", tables=make_tables)]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import altair as alt
import pandas as pd

from analysis.data.schemas import Row
from analysis.sweep.verdicts import format_interval, format_number, is_missing

Results_contra = TypeVar("Results_contra", contravariant=True)
"""What the functions of a section take: the frames of a study, and results that several sections share."""


_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_count(value: float) -> str:
    """Format a count with at most four digits: 240, 5 400, 12.3 k, 1.23 M."""
    # Four digits are as short as a number with a unit, and exact.
    if abs(value) < 1e4:
        return f"{value:,.0f}".replace(",", " ")
    # Round before choosing the unit: 999 999 is 1 M.
    rounded = float(f"{value:.3g}")
    size, unit = next(entry for entry in _UNITS if abs(rounded) >= entry[0])
    return f"{rounded / size:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds as `1 h 02 min`, `3 min 05 s` or `12 s`."""
    total_seconds = round(seconds)
    if total_seconds >= 3600:
        return f"{total_seconds // 3600} h {total_seconds % 3600 // 60:02d} min"
    return f"{total_seconds // 60} min {total_seconds % 60:02d} s" if total_seconds >= 60 else f"{total_seconds} s"


class TableColumn(NamedTuple):
    """A column of a table on a page."""

    heading: str
    """Its words; a line break where the heading may break."""
    cell: Callable[[Row], str]
    """The text of a cell. What follows a line break is printed small below it."""
    kind: str = "text"
    """`name` (of the row), `text`, `number`, `verdict` (with the color of its first words, up to a colon) or `status`
    (a line per status: its name, and what the line says)."""


def name(heading: str, key: str = "arm") -> TableColumn:
    """Make the column that names the rows. key: of the rows."""
    return TableColumn(heading, lambda row: str(row[key]), "name")


def text(heading: str, key: str) -> TableColumn:
    """Make a column of texts, which may be missing."""
    return TableColumn(heading, lambda row: "–" if is_missing(row[key]) else str(row[key]))


def number(
    heading: str, key: str, format_value: Callable[[Any], str] = format_number, bounds: tuple[str, str] | None = None
) -> TableColumn:
    """Make a column of numbers; a dash where one is missing.

    bounds: the keys of an interval, which is printed below the number if it has one; None: <key>_low and <key>_high.
    """
    low, high = bounds or (f"{key}_low", f"{key}_high")

    def format_cell(row: Row) -> str:
        value = "–" if is_missing(row[key]) else format_value(row[key])
        return f"{value}\n{format_interval(row[low], row[high], format_value)}".rstrip("\n") if low in row else value

    return TableColumn(heading, format_cell, "number")


def count_of(heading: str, key: str, whole: str) -> TableColumn:
    """Make a column of counts such as `2 of 3`. whole: the key of the second number, which may be missing."""

    def format_cell(row: Row) -> str:
        return f"{row[key]}" if is_missing(row[whole]) else f"{row[key]} of {row[whole]}"

    return TableColumn(heading, format_cell, "number")


@dataclass(frozen=True)
class Table:
    """A table of a section."""

    columns: Sequence[TableColumn]
    rows: Sequence[Row]
    title: str = ""
    """A heading of its own; empty in a section with one table."""
    caption: str = ""
    """What a reader must know before the table."""
    fold: str = ""
    """If not empty, the table is folded under this text."""
    note: str = ""
    """Small print below the table."""
    get_class: Callable[[Row], str] = lambda row: "baseline" if row.get("is_baseline") else ""
    """Returns the CSS class of a row: `baseline`, `changed` or none."""


class Listing(NamedTuple):
    """A text that is shown as it is, such as an episode or a file, folded under a line."""

    fold: str
    text: str


def say(words: str | Callable[[Any], str], results: Any) -> str:
    """Return a text of a declaration for `results`."""
    return words if isinstance(words, str) else words(results)


@dataclass(frozen=True)
class Figure(Generic[Results_contra]):
    """A chart of a section. Its table has every number; drawing computes none."""

    name: str
    """Name of the files in figures/."""
    caption: str | Callable[[Results_contra], str]
    """How to read the chart. Its first sentence is what a screen reader says of it."""
    make_table: Callable[[Results_contra], Any]
    """Returns the data to draw, one DataFrame or several; None or an empty one if there is nothing to show."""
    draw: Callable[[Any, Results_contra], alt.TopLevelMixin]
    """Draws that data."""
    describe: Callable[[Any, Results_contra], str] = lambda table, results: ""
    """Returns a sentence on what these numbers come to."""


@dataclass(frozen=True)
class Section(Generic[Results_contra]):
    """A section of a report. On the page its order is: sentences, figures, tables, explanation."""

    name: str
    """Its id on the page: letters, digits and hyphens."""
    title: str | Callable[[Results_contra], str]
    sentences: Callable[[Results_contra], Iterable[str]] = lambda results: ()
    """What the numbers say."""
    figures: Sequence[Figure[Results_contra]] = ()
    tables: Callable[[Results_contra], Iterable[Table | Listing]] = lambda results: ()
    explanation: str | Callable[[Results_contra], str] = ""
    """How the numbers are made, folded below them."""
    when: Callable[[Results_contra], bool] = lambda results: True
    """Whether the report has the section."""
    files: Callable[[Results_contra], Mapping[str, pd.DataFrame]] = lambda results: {}
    """The tables that are also written as figures/<name>.csv, by name, whether or not the page shows them."""
    concludes: bool = False
    """Whether the terminal and the index of a suite have the sentences too, and the first table of these sections."""
    is_warning: bool = False
    """Whether the sentences are a list in a box, such as the limits of a report."""


class Heading(NamedTuple):
    """The head of a page."""

    over: str
    """What the study is: name, model or task, preset, and its runs by status."""
    title: str
    remarks: Sequence[str] = ()
    """What a reader must know before any number, such as that the study is short."""
    lead: Sequence[str] = ()
    """The conclusion in sentences."""


VERDICT_COLUMNS = (
    *("arm", "outcome", "difference", "difference_low", "difference_high"),
    *("p", "p_holm", "p_equal_holm", "margin"),
)
"""Columns of `Report.make_verdicts`: an arm, the word of its verdict, and columns of its test."""


@dataclass(frozen=True)
class Report(Generic[Results_contra]):
    """The report of a family of studies."""

    make_results: Callable[..., Results_contra]
    """Makes what the functions of all sections take, from the frames of a study: a class below `StudyResults`."""
    make_heading: Callable[[Results_contra], Heading]
    sections: Sequence[Section[Results_contra]]
    make_verdicts: Callable[[Results_contra], pd.DataFrame]
    """Returns a row per arm with `VERDICT_COLUMNS`; empty in a search."""
