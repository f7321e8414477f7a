"""What a figure of a report is: its name, its place, its caption, its table and its drawing, declared in one place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from matplotlib.figure import Figure

from analysis.html.page import render_svg

View_contra = TypeVar("View_contra", contravariant=True)
"""What the figures of a page make their tables from: the frames of a study, and what is computed of them once."""


@dataclass(frozen=True)
class ReportFigure(Generic[View_contra]):
    """One figure of a page, in one declaration.

    name: of its file in figures/, and prefix of its ids on the page. section: where on the page it stands; a section
    shows all of its figures, in the order of the page's list. caption: the sentences below it, or how they follow from
    the view. table: what is drawn, a DataFrame or several; None where there is nothing to show. draw: the picture of
    that table; the view gives colours and layouts, and no further number.
    """

    name: str
    section: str
    caption: str | Callable[[View_contra], str]
    make_table: Callable[[View_contra], Any]
    draw: Callable[[Any, View_contra], Figure]

    def get_caption(self, view: View_contra) -> str:
        """The caption on the page of `view`."""
        return self.caption if isinstance(self.caption, str) else self.caption(view)


class RenderedFigure(NamedTuple):
    """A figure as a template shows it. svg: an element of the page."""

    name: str
    section: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Gallery(Generic[View_contra]):
    """The figures that a page lists, in the order in which a section shows them, and the view that they are of."""

    figures: Sequence[ReportFigure[View_contra]]
    view: View_contra

    def draw(self) -> dict[str, Figure]:
        """Every figure that has something to show, by name."""
        tables = [(figure, figure.make_table(self.view)) for figure in self.figures]
        return {figure.name: figure.draw(table, self.view) for figure, table in tables if table is not None}

    def render(self, drawn_figures: Mapping[str, Figure]) -> list[RenderedFigure]:
        """What a template needs of the figures in `drawn`, in the order of the list."""
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
