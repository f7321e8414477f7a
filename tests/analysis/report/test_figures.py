"""Tests of declared figures: each is drawn once, in a section that the page shows."""

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
from analysis.search.page import FIGURES
from sandboxes.toys.report import figures as sandbox_figures
from tests.fakes import sandbox_folders
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.runs.records import STEP_COLUMNS

SMALL = FakeStudy(levels=10, total_steps=4)


def find_sections(*templates: str) -> list[str]:
    """Return the sections that these templates show, with repetitions."""
    texts = [(TEMPLATES / f"{name}.html.j2").read_text() for name in templates]
    return [section for text in texts for section in re.findall(r'render_figures\("([^"]+)"\)', text)]


def test_every_section_of_a_figure_is_on_the_page_once(tmp_path: Path) -> None:
    sections = {figure.section for figure in (*FIGURES, *figures.AXIS_FIGURES, *figures.GRID_FIGURES)}
    assert sorted(find_sections("report", "grid", "edge", "search")) == sorted(sections)
    runs = [sandbox_folders.FakeRun("DG", steps=40)]
    frames = load(sandbox_folders.write_sandbox(tmp_path, runs, sandbox_folders.FakeStudy("some-study")))
    sandbox_sections = {figure.section for figure in sandbox_figures.make_gallery(frames).figures}
    assert sorted(find_sections("sandbox", "contrasts", "search")) == sorted(sandbox_sections)


@pytest.mark.parametrize("report_figures", [figures.AXIS_FIGURES, figures.GRID_FIGURES])
def test_a_figure_is_listed_once(report_figures: list[ReportFigure[object]]) -> None:
    names = [figure.name for figure in report_figures]
    assert len(set(names)) == len(names)


def test_every_curve_is_in_the_reports_that_it_names() -> None:
    axis_names, grid_names = (
        [figure.name for figure in report_figures] for report_figures in (figures.AXIS_FIGURES, figures.GRID_FIGURES)
    )
    for curve in figures.CURVES:
        assert curve.column in {column.name for column in STEP_COLUMNS}
        assert curve.name in grid_names
        assert (curve.name in axis_names) != curve.only_in_grids


@pytest.mark.long
def test_one_more_declared_curve_is_a_file_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = figures.Curve("lengths", "stops", "train_response_tokens", "response (tokens)", "Tokens of an episode.")
    axis_figures = (*figures.AXIS_FIGURES, figures._make_arm_figure(curve))
    monkeypatch.setattr(figures, "AXIS_FIGURES", axis_figures)
    folder = write_study(tmp_path, [FakeRun(arm, steps=4) for arm in ("0", "0.1")], SMALL)
    text = pages.write_report(folder).read_text()
    assert "Tokens of an episode.<span" in text
    assert text.count('<svg role="img"') == len(list((folder / "figures").glob("*.png")))
    assert (folder / "figures" / "lengths.png").exists()


def test_a_figure_without_a_table_is_neither_drawn_nor_captioned() -> None:
    def refuse(table: pd.DataFrame, view: str) -> Figure:
        raise AssertionError

    figure = ReportFigure[str]("a", "somewhere", "what it shows", lambda view: None, refuse)
    drawn_figure = replace(figure, name="b", make_table=lambda view: pd.DataFrame(), draw=lambda table, view: Figure())
    gallery = Gallery((figure, replace(drawn_figure, caption=lambda view: f"of {view}")), "frames")
    drawings = gallery.draw()
    assert list(drawings) == ["b"]
    assert [
        (rendered_figure.name, rendered_figure.section, rendered_figure.caption)
        for rendered_figure in gallery.render(drawings)
    ] == [("b", "somewhere", "of frames")]
    assert gallery.render({}) == []


@pytest.mark.parametrize("names", [("dose_responses",), ("dose_response", "curve"), "dose_response"])
def test_a_figure_that_a_report_has_not_is_refused(tmp_path: Path, names: str | tuple[str, ...]) -> None:
    frames = load(write_study(tmp_path, [FakeRun("0", steps=SMALL.total_steps)], SMALL))
    with pytest.raises(ValueError, match=r"names is .*, and may have .*dose_response, "):
        pages.draw_figures(frames, names)


def test_a_study_without_a_run_has_no_figure(tmp_path: Path) -> None:
    assert pages.draw_figures(load(write_study(tmp_path, [], SMALL)), ("dose_response",)) == {}


@pytest.mark.long
@pytest.mark.parametrize("is_measured", [True, False])
def test_the_caption_of_the_dose_response_names_what_is_drawn(tmp_path: Path, is_measured: bool) -> None:
    missing = ("test_success", "base_val_success", "base_val_greedy_success")
    rows = {} if is_measured else dict.fromkeys(missing)
    frames = load(
        write_study(tmp_path, [FakeRun(arm, steps=SMALL.total_steps, rows=rows) for arm in ("0", "0.1")], SMALL)
    )
    text = pages.render_page(frames, pages.draw_figures(frames, ("dose_response",)))
    assert (
        "triangles greedy validation success, and squares sampled success on the test levels." in text
    ) == is_measured
    assert ("without intervals, and triangles greedy validation success." in text) != is_measured
    assert ("Horizontal lines show the policy before training: dashed sampled, dotted greedy." in text) == is_measured
