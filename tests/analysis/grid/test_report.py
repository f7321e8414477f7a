"""Tests of the figures and the page of a grid: every cell has its text, one scale of colors, all numbers in files."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.grid import layout
from analysis.grid import page as grid_page
from analysis.grid import plots as grid_plots
from analysis.report import pages
from analysis.sweep import findings, plots, tables
from tests.analysis.report.test_pages import Page, parse_page
from tests.fakes.grid_folders import ALL_TYPES, ONE_TYPE, make_runs, write_grid


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 164 arms of three KL losses."""
    return write_grid(tmp_path_factory.mktemp("grid"), ALL_TYPES, levels=20)


@pytest.fixture(scope="module")
def frames(folder: Path) -> StudyFrames:
    return load(folder)


@pytest.fixture(scope="module")
def figures(frames: StudyFrames) -> dict[str, Figure]:
    return pages.draw_figures(frames, ("grid_success", "grid_entropy", "validation_curves"))


@pytest.fixture(scope="module")
def page(frames: StudyFrames) -> Page:
    return parse_page(pages.render_page(frames, {}))


def make_cells(frames: StudyFrames) -> tuple[layout.Grid, pd.DataFrame]:
    grid = layout.find_grid(frames)
    assert grid is not None
    return grid, layout.make_cell_table(grid, layout.make_member_table(frames, grid))


def get_panels(figure: Figure) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


@pytest.mark.long
def test_every_cell_is_written_at_its_place(frames: StudyFrames, figures: dict[str, Figure]) -> None:
    _, table = make_cells(frames)
    panels = get_panels(figures["grid_success"])
    levels = ["0", "0.001", "0.003", "0.01", "0.03"]
    assert set(panels) == set(table["panel"])
    for panel, axes in panels.items():
        assert [label.get_text() for label in axes.get_xticklabels()] == levels  # categories in order, with 0 first
        cell_texts = {text.get_position(): text.get_text() for text in axes.texts}
        cells = to_records(table[table["panel"] == panel])
        assert len(cell_texts) == len(cells)
        for cell in cells:
            place = (levels.index(f"{cell['x']:g}"), levels.index(f"{cell['y']:g}"))
            assert cell_texts[place] == grid_plots.format_cell(
                cell["state"], cell["early_stopped"], cell["scored"], cell["runs"], cell["success"]
            )


@pytest.mark.long
def test_stopped_cells_have_a_frame_and_no_other(frames: StudyFrames, figures: dict[str, Figure]) -> None:
    _, table = make_cells(frames)
    for panel, axes in get_panels(figures["grid_entropy"]).items():
        frames_drawn = [patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
        assert len(frames_drawn) == (table.loc[table["panel"] == panel, "early_stopped"] > 0).sum()


@pytest.mark.long
def test_one_scale_of_colors_and_text_that_is_read_on_it(frames: StudyFrames, figures: dict[str, Figure]) -> None:
    _, table = make_cells(frames)
    low, high = table["success"].min(), table["success"].max()
    for panel, axes in get_panels(figures["grid_success"]).items():
        squares = {
            (patch.get_x() + 0.5, patch.get_y() + 0.5): patch.get_facecolor()
            for patch in axes.patches
            if patch.get_fill()
        }
        for cell in to_records(table[(table["panel"] == panel) & table["success"].notna()]):
            xs, ys = (sorted(table[axis].unique()) for axis in ("x", "y"))
            expected = mpl.colormaps["cividis"]((cell["success"] - low) / (high - low))
            assert squares[xs.index(cell["x"]), ys.index(cell["y"])] == pytest.approx(expected, abs=0.01)
    shades = [mpl.colors.to_hex(mpl.colormaps["cividis"](place / 50)) for place in range(51)]
    assert {grid_plots.choose_text_color(shade) for shade in shades} == {"white", "black"}
    assert (grid_plots.choose_text_color("#000000"), grid_plots.choose_text_color("#ffffff")) == ("white", "black")


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (("scored", 0, 1, 1, 0.534), ".53"),
        (("stopped", 1, 1, 1, 0.0), "✕ 0"),
        (("stopped", 1, 3, 3, 0.5), "✕1/3 .50"),
        (("scored", 0, 2, 3, 1.0), "1.00\n2 of 3"),
        (("never_ran", 0, 0, 1, float("nan")), "never\nran"),
        (("failed", 0, 0, 2, float("nan")), "failed"),
        (("scored", 0, 1, 1, float("nan")), "–"),
        (("scored", 0, 1, 1, 0.00041), "4.1e-4"),
        (("scored", 0, 1, 1, -0.25), "-.25"),
        (("scored", 0, 1, 1, 12.34), "12.3"),
    ],
)
def test_the_text_of_a_cell(cell: tuple[str, int, int, int, float], text: str) -> None:
    assert grid_plots.format_cell(*cell) == text


@pytest.mark.long
def test_losses_stand_side_by_side(frames: StudyFrames) -> None:
    grid, table = make_cells(frames)
    arrangement = grid_plots.arrange_panels(grid, table)
    assert (arrangement.rows, arrangement.columns) == (5, 3)
    for panel, (row, column) in arrangement.positions.items():
        assert f"loss {('kl', 'mse', 'low_var_kl')[column]}" in panel
        assert ("zero task advantage" in panel) == (row == 1)  # directly below the panel with the task


@pytest.mark.long
def test_every_run_has_its_curve(frames: StudyFrames, figures: dict[str, Figure]) -> None:
    grid, _ = make_cells(frames)
    members = layout.make_member_table(frames, grid)
    curves = layout.make_panel_curves(frames, grid, members, "val_success")
    for panel, axes in get_panels(figures["validation_curves"]).items():
        segments = axes.collections[0].get_segments()
        panel_curves = curves[curves["panel"] == panel]
        assert len(segments) == panel_curves["run_id"].nunique()
        assert sorted(len(segment) for segment in segments) == sorted(panel_curves.groupby("run_id").size())


@pytest.mark.long
def test_the_page_is_complete(frames: StudyFrames, page: Page) -> None:
    words = " ".join(page.text.split())
    for sentence in (
        "164 runs: 146 completed, 16 early stopped, 1 failed, 1 never ran",
        "No difference has an interval: nothing shows how much runs of one setting differ",
        "20 runs with KL 0 appear in the panels of every loss but count once",
        "k1 (kl_loss_type=kl) used as a loss does not anchor the policy to the reference",
        "Regularization without the task",
        "1 seed: nothing shows how much runs of one setting differ, so no difference has an interval",
        "reward_variance_collapse stopped 1 of 1 runs (step 15: 0.09 < 0.1)",
    ):
        assert sentence in words
    for arm in frames.trials["arm"]:
        assert arm in page.text
    assert "Success against" not in page.text  # a grid has no single axis


@pytest.mark.long
def test_a_grid_of_one_loss_does_not_mention_k1(tmp_path: Path) -> None:
    runs = [run for run in make_runs(ONE_TYPE) if run.arm.startswith(("g3", "g4", "g5"))]
    frames = load(write_grid(tmp_path, {"low_var_kl": ("3", "4", "5")}, levels=10))
    assert len(frames.trials) == len(runs)
    page = parse_page(pages.render_page(frames, {}))
    assert "keep the policy at its reference" not in page.text
    assert "k1 (kl_loss_type=kl)" not in page.text


@pytest.mark.slow
def test_tables_and_pictures_are_files_beside_the_page(tmp_path: Path) -> None:
    folder = write_grid(tmp_path, {"kl": ("5",)}, seeds=2, levels=10)
    first = pages.write_report(folder).read_text()
    table = pd.read_csv(folder / "figures" / "grid_cells.csv")
    assert len(table) == 16
    assert {"actor.kl_loss_coef", "actor.entropy_coeff", "success", "success_std", "runs", "state"} <= set(table)
    assert (folder / "figures" / "grid_kl_to_reference.csv").exists()
    assert pages.write_report(folder).read_text() == first
    assert "grid_success.png" in {path.name for path in (folder / "figures").iterdir()}


@pytest.mark.long
def test_a_headline_counts_arms_that_do_not_fit_a_line(frames: StudyFrames) -> None:
    grid = layout.find_grid(frames)
    assert grid is not None
    summary = tables.summarize_arms(layout.rename_arms(frames, layout.make_arm_labels(frames, grid)))
    headline = findings.format_headline(summary)
    assert len(headline) < 500
    assert "Stopped in 1 of 1 run: 16 arms." in headline


def test_many_lines_that_never_collapsed_are_counted() -> None:
    rows = [
        {"arm": f"{n} is a panel with a long name", "step": step, "surviving_fraction": 1.0, "runs": 4, "collapsed": 0}
        for n in range(9)
        for step in (0, 20)
    ]
    (axes,) = plots.draw_survival(pd.DataFrame(rows), {}).axes
    (label,) = axes.get_legend_handles_labels()[1]
    assert label == "no collapse: 9 of 9"


@pytest.mark.long
def test_every_figure_of_a_grid_has_a_sentence_made_from_its_numbers(frames: StudyFrames) -> None:
    grid, table = make_cells(frames)
    sentence = grid_page.describe_cells(grid, table, layout.SUCCESS)
    lowest, highest = table.loc[table["success"].idxmin()], table.loc[table["success"].idxmax()]
    assert sentence.startswith(f"Success at the end (fraction of episodes): from {lowest['success']:.3g} (KL ")
    assert (
        f" to {highest['success']:.3g} (KL {highest['x']:g}, entropy {highest['y']:g}, {highest['panel']})." in sentence
    )
    assert grid_page.describe_cells(grid, table.assign(success=np.nan), layout.SUCCESS) == ""
    equal = grid_page.describe_cells(grid, table.assign(success=0.5), layout.SUCCESS)
    assert equal == "Success at the end (fraction of episodes): 0.5 in every cell."


def test_the_sentence_of_curves_names_their_panel_and_x() -> None:
    grid = layout.Grid("actor.kl_loss_coef", "actor.lr", ("filter.mode",), {})
    rows = [
        # panel, x, run_id, status, step, value
        ("a", 0.0, "r0", "completed", 0, 0.2),
        ("a", 0.0, "r0", "completed", 9, 0.5),
        ("a", 0.0, "r1", "completed", 0, 0.2),
        ("a", 0.0, "r1", "completed", 9, 0.7),
        ("b", 0.1, "r2", "early_stopped", 0, 0.2),
        ("b", 0.1, "r2", "early_stopped", 4, 0.1),
        ("b", 0.1, "r3", "failed", 4, 0.0),  # is not scored
    ]
    table = pd.DataFrame(rows, columns=["panel", "x", "run_id", "status", "step", "value"])
    assert grid_page.describe_curves(grid, table, "success (fraction)") == (
        "Success (fraction): 0.2 at first, from 0.1 (KL 0.1, b) to 0.6 (KL 0, a) at the end."
    )
    one_panel = grid_page.describe_curves(grid, table.assign(panel="all arms"), "success")
    assert one_panel == "Success: 0.2 at first, from 0.1 (KL 0.1) to 0.6 (KL 0) at the end."
