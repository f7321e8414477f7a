"""Tests of the sections of a grid: every cell has its text, one scale of colors, all numbers in tables and files."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.charts import chart as charts
from analysis.charts.grid import draw_heat_maps
from analysis.data.frames import StudyFrames, to_records
from analysis.grid import layout
from analysis.report.grid import GRID, format_cell, make_heat_map_table
from analysis.report.page import render_page, view_sections
from analysis.report.results import SweepResults
from analysis.report.section import Heading
from analysis.report.sweep import LEARNING_CURVES, SWEEP_REPORT
from tests.analysis.charts.specs import compute_luminance
from tests.analysis.report.test_pages import parse_page

LEVELS = ["0", "0.001", "0.003", "0.01", "0.03"]


@pytest.fixture(scope="module")
def results(three_loss_frames: StudyFrames) -> SweepResults:
    return SweepResults(three_loss_frames)


def draw_figure(section: Any, index: int, results: SweepResults) -> dict[str, Any]:
    figure = section.figures[index]
    return charts.make_spec(figure.draw(figure.make_table(results), results))


def read_marks(svg: str, kind: str) -> list[dict[str, str]]:
    """Return the attributes of the marks of a kind, such as `rect mark`, in an SVG document."""
    tags = re.findall(
        rf'<(?:path|text) aria-label="[^"]*" role="graphics-symbol" aria-roledescription="{kind}[^>]*>', svg
    )
    return [dict(re.findall(r'([a-z-]+)="([^"]*)"', tag)) for tag in tags]


@pytest.mark.long
def test_every_cell_is_written_at_its_place(results: SweepResults) -> None:
    table, cells = make_heat_map_table(results, "success"), results.cells
    assert table["x"].cat.categories.to_list() == table["y"].cat.categories.to_list() == LEVELS  # 0 first
    lines = {(row["panel"], row["x"], row["y"]): row["lines"] for row in to_records(table)}
    assert len(lines) == len(table) == len(cells)
    for cell in to_records(cells):
        place = cell["panel"], f"{cell['x']:g}", f"{cell['y']:g}"
        expected = format_cell(cell["state"], cell["early_stopped"], cell["scored"], cell["runs"], cell["success"])
        assert lines[place] == expected
    spec = draw_figure(GRID, 0, results)
    x, y = (spec["spec"]["layer"][0]["encoding"][axis] for axis in "xy")
    assert (x["sort"], y["sort"]) == (LEVELS, LEVELS[::-1])  # 0 is at the bottom
    assert (x["axis"]["title"], y["axis"]["title"]) == ("KL", "entropy")


@pytest.mark.long
def test_stopped_cells_have_a_frame_and_cells_without_a_number_no_color(results: SweepResults) -> None:
    table = make_heat_map_table(results, "success")
    marks = read_marks(charts.draw_svg(draw_figure(GRID, 0, results)), "rect mark")
    framed = [mark for mark in marks if mark.get("stroke") == charts.STOPPED_COLOR]
    assert len(framed) == (table["stopped"] > 0).sum() > 0
    assert all(mark["fill-opacity"] == "0" and re.search("stopped: [1-9]", mark["aria-label"]) for mark in framed)
    dashed = [mark for mark in marks if "stroke-dasharray" in mark]
    assert len(dashed) == table["value"].isna().sum() == 2
    assert all("fill" not in mark for mark in dashed)
    colored = [mark for mark in marks if mark not in framed and mark not in dashed]
    assert len(colored) == table["value"].notna().sum()


def make_cells(values: Sequence[float] | np.ndarray) -> pd.DataFrame:
    """Make the table of a heat map of one row."""
    table = pd.DataFrame({"panel": "a", "x": [f"{n:02}" for n in range(len(values))], "y": "0", "value": values})
    table = table.assign(lines=[["0"]] * len(values), std=np.nan, low=0, high=0, runs=1, scored=1, stopped=0)
    return table.astype({"panel": "category", "x": "category", "y": "category"})


@pytest.mark.long
def test_one_scale_of_colors_and_text_that_is_read_on_it() -> None:
    values = np.linspace(0, 1, 40)
    chart = draw_heat_maps(make_cells(values), "success", ("x", "y"), domain=(0.0, 1.0))
    svg = charts.draw_svg(charts.make_spec(chart))
    cells, texts = read_marks(svg, "rect mark"), read_marks(svg, "text mark")
    luminances = [compute_luminance(mark["fill"]) for mark in cells]
    assert luminances == sorted(luminances)  # higher is lighter
    assert {mark["fill"] for mark in texts} == {"#ffffff", "#000000"}
    for cell, text in zip(luminances, texts, strict=True):
        low, high = sorted((cell, compute_luminance(text["fill"])))
        assert (high + 0.05) / (low + 0.05) > 4.4


@pytest.mark.parametrize(
    ("measure", "values", "domain"),
    [
        (layout.SUCCESS, (0.30, 0.31), (0, 1)),
        (layout.LATE_MEANS[0], (0.5, 3.0), (0.5, 3.0)),
        (layout.LATE_MEANS[0], (2.99, 3.0), (2.845, 3.145)),  # not opposites
        (layout.LATE_MEANS[0], (0.0, 0.0), (-0.05, 0.05)),
        (layout.LATE_MEANS[2], (0.0, 0.001, 1.0), (0.001, 1.0)),  # log: a 0 has the lowest color
        (layout.LATE_MEANS[2], (0.0, np.nan), (0.5, 1.0)),
    ],
)
def test_colors_do_not_make_opposites_of_equal_numbers(
    measure: layout.Measure, values: tuple[float, ...], domain: tuple[float, float]
) -> None:
    chart = draw_heat_maps(make_cells(values), measure.label, ("x", "y"), domain=measure.domain, is_log=measure.is_log)
    scale = charts.make_spec(chart)["spec"]["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == pytest.approx(domain)
    assert scale["type"] == ("log" if measure.is_log else "linear")
    assert "nan" not in charts.draw_svg(charts.make_spec(chart)).lower().replace("sans", "")


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        (("scored", 0, 1, 1, 0.534), [".53"]),
        (("stopped", 1, 1, 1, 0.0), ["× 0"]),
        (("stopped", 1, 3, 3, 0.5), ["×1/3 .50"]),
        (("scored", 0, 2, 3, 1.0), ["1.00", "2 of 3"]),
        (("never_ran", 0, 0, 1, float("nan")), ["never", "ran"]),
        (("failed", 0, 0, 2, float("nan")), ["failed"]),
        (("scored", 0, 1, 1, float("nan")), ["–"]),
        (("scored", 0, 1, 1, 0.00041), ["4.1e-4"]),
        (("scored", 0, 1, 1, -0.25), ["-.25"]),
        (("scored", 0, 1, 1, 12.34), ["12.3"]),
    ],
)
def test_the_text_of_a_cell(cell: tuple[str, int, int, int, float], lines: list[str]) -> None:
    assert format_cell(*cell) == lines


@pytest.mark.long
def test_losses_stand_side_by_side(results: SweepResults) -> None:
    panels, columns = layout.arrange_panels(results.grid, results.members)
    assert (len(panels), columns) == (15, 3)
    for index, panel in enumerate(panels):
        assert f"loss {('kl', 'mse', 'low_var_kl')[index % 3]}" in panel
        assert ("zero task advantage" in panel) == (index // 3 == 1)  # directly below the panel with the task
    spec = draw_figure(GRID, 0, results)
    assert (spec["facet"]["sort"], spec["columns"]) == (panels, 3)


@pytest.mark.long
def test_every_run_has_its_curve_with_the_color_of_x_and_the_dashes_of_y(results: SweepResults) -> None:
    members = results.members
    curves = layout.make_panel_curves(results.frames, results.grid, members, "val_success")
    measured = members[members["run_id"].isin(curves["run_id"])]
    assert len(curves.drop_duplicates(["panel", "run_id"])) == len(measured)
    names = curves.drop_duplicates(["panel", "run_id"]).merge(members, on=["panel", "run_id"])
    assert names["arm_x"].to_list() == [f"KL {value:g}" for value in names["actor.kl_loss_coef"]]
    assert names["dash"].to_list() == [f"entropy {value:g}" for value in names["actor.entropy_coeff"]]
    spec = draw_figure(LEARNING_CURVES, 0, results)
    thick = next(layer for layer in spec["spec"]["layer"] if "thick" in str(layer["transform"]))["encoding"]
    assert thick["color"]["scale"]["domain"] == [f"KL {level}" for level in LEVELS]
    assert len(set(thick["color"]["scale"]["range"])) == 5
    assert thick["strokeDash"]["scale"]["domain"] == [f"entropy {level}" for level in LEVELS]
    assert {entry["field"] for entry in spec["spec"]["layer"][-1]["encoding"]["tooltip"]} >= {"arm", "dash", "value"}
    assert {entry["bind"] for entry in spec["params"]} == {"legend"}
    # A run that is in several panels has its end in each of them.
    stopped = members[members["status"] == "early_stopped"]
    (rows,) = spec["datasets"].values()
    assert sum(row["end"] == "early_stopped" for row in rows) == len(stopped) > stopped["run_id"].nunique()


@pytest.mark.long
def test_the_sections_are_complete(results: SweepResults) -> None:
    sections = [*SWEEP_REPORT.sections[:1], replace(GRID, figures=()), *SWEEP_REPORT.sections[-2:]]
    page = parse_page(render_page(Heading("", "title"), view_sections(sections, results, with_charts=False)))
    words = page.words
    for sentence in (
        "164 arms over KL (actor.kl_loss_coef: 0, 0.001, 0.003, 0.01, 0.03), entropy (actor.entropy_coeff:",
        "A vermilion frame and a cross mark cells with runs that a rule stopped",
        "20 runs with KL 0 appear in the panels of every loss but count once",
        "k1 (kl_loss_type=kl) used as a loss does not anchor the policy to the reference",
        "only the entropy bonus and the KL loss move the policy",
    ):
        assert sentence in words
    assert "grid" in page.ids
    labels = layout.make_arm_labels(results.frames, results.grid)
    assert all(label in words for label in labels.values())
