"""Declarations of report figures: name, section, caption, table and drawing function of a figure in one place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from matplotlib.figure import Figure

from analysis.html.page import render_svg

View_contra = TypeVar("View_contra", contravariant=True)
"""What a page shows: the frames of a study, and results that several of its figures share."""


@dataclass(frozen=True)
class ReportFigure(Generic[View_contra]):
    """The declaration of one figure of a page.

    Attributes:
        name: name of the file in figures/, and prefix of the ids of SVG elements on the page.
        section: section of the page that shows the figure. Several figures of one section keep the order of the list.
        caption: the text below the figure, or a function of the view that returns it.
        make_table: returns the data to draw, one DataFrame or several; None if there is nothing to show.
        draw: draws that data. The view provides colors and layouts only, no further numbers.
    """

    name: str
    section: str
    caption: str | Callable[[View_contra], str]
    make_table: Callable[[View_contra], Any]
    draw: Callable[[Any, View_contra], Figure]

    def get_caption(self, view: View_contra) -> str:
        """The caption for `view`."""
        return self.caption if isinstance(self.caption, str) else self.caption(view)


class RenderedFigure(NamedTuple):
    """A figure as a template uses it. svg: an <svg> element."""

    name: str
    section: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Gallery(Generic[View_contra]):
    """The figures of a page, in the order in which sections show them, and the view they are drawn from."""

    figures: Sequence[ReportFigure[View_contra]]
    view: View_contra

    def draw(self) -> dict[str, Figure]:
        """Draw every figure that has something to show: {name: figure}."""
        tables = [(figure, figure.make_table(self.view)) for figure in self.figures]
        return {figure.name: figure.draw(table, self.view) for figure, table in tables if table is not None}

    def render(self, drawn_figures: Mapping[str, Figure]) -> list[RenderedFigure]:
        """The figures of `drawn_figures` for a template, in the order of the list."""
        return [
            RenderedFigure(
                figure.name,
                figure.section,
                render_svg(figure.name, drawn_figures[figure.name]),
                figure.get_caption(self.view),
            )
            for figure in self.figures
            if figure.name in drawn_figures
        ]
