"""Declarations of report figures: name, section, caption, table and drawing function of a figure in one place."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import altair as alt
from matplotlib.figure import Figure

from analysis.html.charts import format_chart
from analysis.html.page import render_svg

View_contra = TypeVar("View_contra", contravariant=True)
"""What a page shows: the frames of a study, and results that several of its figures share."""


@dataclass(frozen=True)
class ReportFigure(Generic[View_contra]):
    """The declaration of one figure of a page."""

    name: str
    """Name of the file in figures/, and prefix of the ids of SVG elements on the page."""
    section: str
    """Section of the page that shows the figure. Several figures of one section keep the order of the list."""
    caption: str | Callable[[View_contra], str]
    """The text below the figure, or a function of the view that returns it."""
    make_table: Callable[[View_contra], Any]
    """Returns the data to draw, one DataFrame or several; None if there is nothing to show."""
    draw: Callable[[Any, View_contra], Figure]
    """Draws that data. The view provides colors and layouts only, no further numbers."""
    make_chart: Callable[[Any, View_contra], alt.TopLevelMixin | None] | None = None
    """Makes an interactive chart of that data, or returns None if it is too large; None: a picture alone."""
    describe: Callable[[Any, View_contra], str] | None = None
    """Says in a sentence what these numbers come to; None: the page says it elsewhere."""
    picture_note: str = ""
    """A text after the caption of what the picture has and the interactive chart has not."""

    def get_caption(self, view: View_contra) -> str:
        """The caption for `view`."""
        return self.caption if isinstance(self.caption, str) else self.caption(view)


class RenderedFigure(NamedTuple):
    """A figure as a template uses it. svg: an <svg> element. chart: an interactive chart as JSON; empty without one."""

    name: str
    section: str
    svg: str
    finding: str
    caption: str
    picture_note: str
    chart: str


@dataclass(frozen=True)
class Gallery(Generic[View_contra]):
    """The figures of a page, in the order in which sections show them, and the view they are drawn from."""

    figures: Sequence[ReportFigure[View_contra]]
    view: View_contra

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The data of every figure that has something to show, by the name of the figure."""
        tables = {figure.name: figure.make_table(self.view) for figure in self.figures}
        return {name: table for name, table in tables.items() if table is not None}

    def select(self, names: Collection[str]) -> "Gallery[View_contra]":
        """These figures alone, in the same order; the data of the others is not computed."""
        return Gallery([figure for figure in self.figures if figure.name in names], self.view)

    def draw(self) -> dict[str, Figure]:
        """Draw every figure that has something to show: {name: figure}."""
        return {
            figure.name: figure.draw(self.tables[figure.name], self.view)
            for figure in self.figures
            if figure.name in self.tables
        }

    def render(self, drawn_figures: Mapping[str, Figure], with_charts: bool = True) -> list[RenderedFigure]:
        """The figures of `drawn_figures` for a template, in the order of the list.

        with_charts: whether those that have an interactive chart come with it.
        """
        return [
            RenderedFigure(
                figure.name,
                figure.section,
                render_svg(figure.name, drawn_figures[figure.name]),
                figure.describe(self.tables[figure.name], self.view) if figure.describe else "",
                figure.get_caption(self.view),
                figure.picture_note,
                self._make_chart(figure) if with_charts else "",
            )
            for figure in self.figures
            if figure.name in drawn_figures
        ]

    def _make_chart(self, figure: ReportFigure[View_contra]) -> str:
        chart = figure.make_chart(self.tables[figure.name], self.view) if figure.make_chart else None
        return format_chart(chart) if chart else ""
