"""Turns sections into one self-contained HTML page: texts, tables and charts, with one template for all pages."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from analysis.charts import chart as charts
from analysis.charts.script import make_script
from analysis.report.section import Heading, Listing, Section, Table, TableColumn, say
from trainable.files.paths import LINE_CHARACTERS, atomic_write, escape_controls
from trainable.files.step_phase import STEP_PHASE


class FigureView(NamedTuple):
    """A drawn figure. spec: the chart as JSON if the page draws it too, else empty. picture: an SVG document."""

    name: str
    caption: str
    finding: str
    picture: str
    spec: str

    @property
    def svg(self) -> Markup:
        """The picture as an element of the page."""
        return Markup(charts.embed_svg(self.name, self.picture, format_plain(self.caption.partition(". ")[0])))


class SectionView(NamedTuple):
    """A section as the template shows it. link: of its title."""

    name: str
    title: str
    sentences: Sequence[str] = ()
    figures: Sequence[FigureView] = ()
    tables: Sequence[Table | Listing] = ()
    explanation: str = ""
    is_warning: bool = False
    link: str = ""


def view_sections(sections: Iterable[Section[Any]], results: Any, with_charts: bool) -> list[SectionView]:
    """View the sections that have something to show.

    with_charts: whether the page may draw the figures with a script, too.
    """
    STEP_PHASE.enter("figures")
    views = []
    for section in sections:
        if section.when(results):
            figures = []
            for figure in section.figures:
                if (data := figure.make_table(results)) is not None and len(data):
                    spec = charts.make_spec(figure.draw(data, results))
                    is_interactive = with_charts and charts.count_rows(spec) <= charts.MAX_ROWS
                    chart, picture = charts.format_spec(spec) if is_interactive else "", charts.draw_svg(spec)
                    words = say(figure.caption, results), figure.describe(data, results)
                    figures.append(FigureView(figure.name, *words, picture, chart))
            tables = [table for table in section.tables(results) if isinstance(table, Listing) or table.rows]
            # The page has the sentences of a section that concludes in its head.
            sentences = [] if section.concludes else list(section.sentences(results))
            title, explanation = say(section.title, results), say(section.explanation, results)
            if sentences or figures or tables:
                views.append(
                    SectionView(section.name, title, sentences, figures, tables, explanation, section.is_warning)
                )
    return views


def render_page(heading: Heading, sections: Sequence[SectionView], *, refresh_seconds: int | None = None) -> str:
    """Render a page as HTML that needs no network.

    refresh_seconds: after which a browser loads the page again; None: never.
    """
    has_charts = any(figure.spec for section in sections for figure in section.figures)
    script = make_script() if has_charts else None
    template = _make_environment().get_template("page.html.j2")
    return template.render(heading=heading, sections=sections, refresh_seconds=refresh_seconds, script=script)


def write_page(path: Path, page: str) -> Path:
    """Write a page with an atomic rename, and return `path`."""
    with atomic_write(path) as temp_path:
        temp_path.write_text(page, encoding="utf-8")
    return path


_MARKS = re.compile(r"`([^`\n]+)`|\*\*([^*\n]+)\*\*")
_LOCAL_LINK = re.compile(r"\[([a-z ]+)\]\((/[?=\w]*)\)")


def format_inline(text: str) -> Markup:
    """Return a text as HTML, with `code`, **bold** words and [links](/) to pages of the same server.

    >>> format_inline("`a<b` is **new**")
    Markup('<code>a&lt;b</code> is <b>new</b>')
    """
    escaped = str(escape(escape_controls(text, LINE_CHARACTERS)))
    return Markup(_LOCAL_LINK.sub(r'<a href="\2">\1</a>', _mark(escaped)))


def _mark(text: str) -> str:
    # In one pass: two would close a tag within another.
    return _MARKS.sub(lambda match: f"<code>{match[1]}</code>" if match[1] else f"<b>{_mark(match[2])}</b>", text)


def format_plain(text: str) -> str:
    """Return a text of a section for a terminal, in which `code` has no backticks and nothing is bold."""
    return _MARKS.sub(lambda match: match[1] or format_plain(match[2]), text)


def format_cell(column: TableColumn, row: Any) -> Markup:
    """Return the cell of a table as HTML."""
    content = column.cell(row)
    if column.kind == "status":
        lines = (line.partition(" ") for line in content.splitlines())
        return Markup("<br>").join(
            Markup('<span class="status {}">{}</span>').format(status, label) for status, _, label in lines
        )
    main, _, small = content.partition("\n")
    if column.kind == "verdict":
        word, colon, rest = main.partition(":")
        shown = Markup('<b class="{}">{}</b>').format(word.replace(" ", "-"), word) + format_inline(colon + rest)
    else:
        shown = format_inline(main)
    return shown + Markup('<span class="ci">{}</span>').format(_break_lines(small)) if small else shown


def format_plain_cell(column: TableColumn, row: Any) -> str:
    """Return the cell of a table as a line for a terminal, with a first interval, but without further ones."""
    lines = column.cell(row).split("\n")
    if column.kind == "status":
        return ", ".join(line.partition(" ")[2] for line in lines)
    return format_plain(" ".join(lines[:2]))


def format_plain_table(table: Table) -> list[tuple[str, ...]]:
    """Return a table for a terminal: its headings, and then its rows."""
    headings = tuple(column.heading.replace("\n", " ") for column in table.columns)
    return [headings, *(tuple(format_plain_cell(column, row) for column in table.columns) for row in table.rows)]


def _break_lines(text: str) -> Markup:
    return Markup("<br>").join(map(format_inline, text.split("\n")))


@cache
def _make_environment() -> jinja2.Environment:
    """Make the environment of all pages. A process has one, because it compiles every template that it renders."""
    jinja_env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        # Texts that no filter has made HTML of.
        finalize=lambda value: escape_controls(value, LINE_CHARACTERS) if type(value) is str else value,
    )
    jinja_env.filters |= {"inline": format_inline, "lines": _break_lines, "plain": format_plain}
    jinja_env.globals |= {"format_cell": format_cell}
    return jinja_env
