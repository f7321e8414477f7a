"""What a declared figure does: it is drawn, stands in a section that the page shows, and once."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.data.load import load
from analysis.html.figures import Gallery, ReportFigure
from analysis.html.page import TEMPLATES
from analysis.report import figures, pages
from analysis.sandbox import figures as sandbox_figures
from tests.fakes import sandbox_folders
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.runs.records import STEP_COLUMNS

SMALL = FakeStudy(levels=10, total_steps=4)


def sections_of(*templates: str) -> list[str]:
    """The sections that these templates show, as often as they do."""
    texts = [(TEMPLATES / f"{name}.html.j2").read_text() for name in templates]
    return [section for text in texts for section in re.findall(r'render_figures\("([^"]+)"\)', text)]


def test_every_section_of_a_figure_is_on_the_page_once(tmp_path: Path) -> None:
    declared = {figure.section for figure in (*figures.AXIS_FIGURES, *figures.GRID_FIGURES)}
    assert sorted(sections_of("report", "grid")) == sorted(declared)
    runs = [sandbox_folders.FakeRun("DG", steps=40)]
    frames = load(sandbox_folders.write_sandbox(tmp_path, runs, sandbox_folders.FakeStudy("some-study")))
    rules = {figure.section for figure in sandbox_figures.make_gallery(frames).figures}
    assert sorted(sections_of("sandbox", "contrasts")) == sorted(rules)


@pytest.mark.parametrize("listed", [figures.AXIS_FIGURES, figures.GRID_FIGURES])
def test_a_figure_is_listed_once(listed: list[ReportFigure[object]]) -> None:
    names = [figure.name for figure in listed]
    assert len(set(names)) == len(names)


def test_every_curve_is_in_the_reports_that_it_names() -> None:
    along_an_axis, in_grids = (
        [figure.name for figure in each] for each in (figures.AXIS_FIGURES, figures.GRID_FIGURES)
    )
    for curve in figures.CURVES:
        assert curve.column in {column.name for column in STEP_COLUMNS}
        assert curve.name in in_grids
        assert (curve.name in along_an_axis) != curve.only_in_grids


def test_one_more_declared_curve_is_a_file_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = figures.Curve("lengths", "stops", "train_response_tokens", "response (tokens)", "Tokens of an episode.")
    more = (*figures.AXIS_FIGURES, figures._make_arm_figure(curve))
    monkeypatch.setattr(figures, "AXIS_FIGURES", more)
    folder = write_study(tmp_path, [FakeRun(arm, steps=4) for arm in ("0", "0.1")], SMALL)
    text = pages.write_report(folder).read_text()
    assert "Tokens of an episode.</figcaption>" in text
    assert text.count("<svg") == len(list((folder / "figures").glob("*.png")))
    assert (folder / "figures" / "lengths.png").exists()


def test_a_figure_without_a_table_is_neither_drawn_nor_captioned() -> None:
    def refuse(table: pd.DataFrame, view: str) -> Figure:
        raise AssertionError

    figure = ReportFigure[str]("a", "somewhere", "what it shows", lambda view: None, refuse)
    shown = replace(figure, name="b", make_table=lambda view: pd.DataFrame(), draw=lambda table, view: Figure())
    gallery = Gallery((figure, replace(shown, caption=lambda view: f"of {view}")), "frames")
    drawn = gallery.draw()
    assert list(drawn) == ["b"]
    assert [(each.name, each.section, each.caption) for each in gallery.render(drawn)] == [
        ("b", "somewhere", "of frames")
    ]
    assert gallery.render({}) == []
