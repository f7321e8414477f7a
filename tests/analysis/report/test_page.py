"""Tests of the one page that all reports are: texts that may be hostile, cells of each kind, figures, and its head."""

import re
from html.parser import HTMLParser
from typing import Any

import altair as alt
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.charts import chart as charts
from analysis.report.page import format_cell, format_inline, format_plain, format_plain_cell, render_page, view_sections
from analysis.report.section import Figure, Heading, Listing, Section, Table, TableColumn, name, number
from tests.analysis.report.test_pages import CONTROLS, SCRIPT, parse_page
from trainable.files.paths import LINE_CHARACTERS, escape_controls, is_printable

HOSTILE = f"</script></title></pre><b onclick='x'>\"& `c** **d` [a](//b) {CONTROLS}"
DATA = pd.DataFrame({"arm": [HOSTILE, "b"], "value": [1.0, 2.0]})


def draw(table: pd.DataFrame, results: Any) -> alt.Chart:
    return alt.Chart(table).mark_point().encode(alt.X("value:Q"), alt.Y("arm:N"))


FIGURE = Figure[Any](
    "points", f"Of {HOSTILE} each. More.", lambda results: DATA, draw, lambda table, _: f"{len(table)} of {HOSTILE}"
)
COLUMNS = [name("arm"), number(f"mean\n{HOSTILE}", "value"), TableColumn("verdict", lambda row: "open", "verdict")]


def make_section(section_name: str, **changes: Any) -> Section[Any]:
    parts: dict[str, Any] = {
        "sentences": lambda results: [HOSTILE],
        "figures": [FIGURE],
        "tables": lambda results: [
            Table(COLUMNS, DATA.to_dict("records"), HOSTILE, HOSTILE, HOSTILE, HOSTILE, lambda row: '"odd'),
            Listing(HOSTILE, HOSTILE),
        ],
        "explanation": HOSTILE,
    }
    return Section(section_name, HOSTILE, **(parts | changes))


def render(*sections: Section[Any], with_charts: bool = True, **options: Any) -> str:
    views = view_sections(sections, None, with_charts)
    return render_page(Heading(HOSTILE, HOSTILE, [HOSTILE], [HOSTILE]), views, **options)


@pytest.mark.long
def test_a_hostile_text_is_a_text_wherever_it_stands() -> None:
    text = render(make_section("hostile"), make_section("limits", is_warning=True, figures=()))
    page = parse_page(text)
    assert is_printable(text, LINE_CHARACTERS)
    assert "<b onclick" not in text
    # 7 in the head with the contents, 13 in a section with a figure, and 11 in one without; listings are shown as is.
    assert page.text.count(escape_controls(format_plain(HOSTILE), LINE_CHARACTERS)) == 7 + 13 + 11
    assert page.text.count(escape_controls(HOSTILE, LINE_CHARACTERS)) == 2
    assert page.sections == ["hostile", "limits"]


def test_a_page_without_a_chart_or_with_one_of_many_rows_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [render(make_section("a"), with_charts=False), render(make_section("a", figures=()), refresh_seconds=7)]
    assert [len(SCRIPT.findall(text)) for text in pages] == [0, 0]
    assert all("script-src" not in text for text in pages)
    assert ['http-equiv="refresh" content="7"' in text for text in pages] == [False, True]
    assert '<svg role="img" aria-label="Of ' in pages[0]
    (drawn,) = view_sections([make_section("a")], None, with_charts=True)[0].figures
    assert drawn.spec
    monkeypatch.setattr(charts, "MAX_ROWS", 1)
    (picture,) = view_sections([make_section("a")], None, with_charts=True)[0].figures
    assert picture == drawn._replace(spec="")


def test_a_section_with_nothing_to_show_is_left_out() -> None:
    nothing: dict[str, Any] = {"sentences": lambda results: (), "figures": (), "tables": lambda results: ()}
    empty = Figure[Any]("empty", "", lambda results: None, lambda table, results: pytest.fail("nothing to draw"))
    sections = [
        make_section("nothing", **nothing),
        make_section("no-rows", **nothing | {"tables": lambda results: [Table(COLUMNS, [])]}),
        make_section("no-figure", **nothing | {"figures": [empty]}),
        make_section("not-now", when=lambda results: False, sentences=lambda results: pytest.fail("not asked")),
        make_section("sentence", **nothing | {"sentences": lambda results: ["One."]}),
        make_section("concludes", **nothing | {"sentences": lambda results: ["In the head."], "concludes": True}),
    ]
    page = parse_page(render(*sections))
    assert page.sections == ["sentence"]
    assert "In the head." not in page.text


@given(st.text("`*<>&\"'[]()/a \x1b\u202e\n", max_size=40))
def test_marks_never_break_a_page(text: str) -> None:
    marked = format_inline(text)
    parser = HTMLParser()
    opened: list[str] = []
    parser.handle_starttag = lambda tag, attrs: opened.append(tag)
    parser.handle_endtag = lambda tag: opened.remove(tag) if opened[-1] == tag else pytest.fail(marked)
    parser.feed(marked)
    assert opened == []
    assert set(re.findall("<[^>]*>", marked)) <= {"<b>", "</b>", "<code>", "</code>", "</a>", *re.findall(
        r'<a href="/[^"/]*">', marked)}  # fmt: skip
    assert len(format_plain(text)) <= len(text)


@pytest.mark.parametrize(
    ("text", "marked", "plain"),
    [
        ("`a<b` is **new**", "<code>a&lt;b</code> is <b>new</b>", "a<b is new"),
        ("**all `x`**", "<b>all <code>x</code></b>", "all x"),
        ("`a ** b` and **", "<code>a ** b</code> and **", "a ** b and **"),
        ("2 ** 3, `open", "2 ** 3, `open", "2 ** 3, `open"),
        ("[pause](/?pause=1)", '<a href="/?pause=1">pause</a>', "[pause](/?pause=1)"),
        ("[x](javascript:y) [x](//y)", "[x](javascript:y) [x](//y)", "[x](javascript:y) [x](//y)"),
    ],
)
def test_marks_are_code_bold_and_links_within_the_server(text: str, marked: str, plain: str) -> None:
    assert format_inline(text) == marked
    assert format_plain(text) == plain


@pytest.mark.parametrize(
    ("kind", "content", "cell", "plain"),
    [
        ("text", "a\nb", 'a<span class="ci">b</span>', "a b"),
        ("number", "0.1\n[0, 1]\n[−1, 2]", '0.1<span class="ci">[0, 1]<br>[−1, 2]</span>', "0.1 [0, 1]"),
        ("verdict", "no effect: `x`", '<b class="no-effect">no effect</b>: <code>x</code>', "no effect: x"),
        ("verdict", "open", '<b class="open">open</b>', "open"),
        (
            "status",
            "early_stopped 1 early <stopped>\nfailed 2 failed",
            '<span class="status early_stopped">1 early &lt;stopped&gt;</span><br>'
            '<span class="status failed">2 failed</span>',
            "1 early <stopped>, 2 failed",
        ),
    ],
)
def test_cells_of_each_kind(kind: str, content: str, cell: str, plain: str) -> None:
    column = TableColumn("heading", lambda row: row, kind)
    assert format_cell(column, content) == cell
    assert format_plain_cell(column, content) == plain
