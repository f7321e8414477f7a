import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from analysis.sweep.plots import save_figure

BROKEN_FORMULA = r"$\frac{$"


def draw(name: str) -> Figure:
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 10, 1000], [0.1, 1, 10], label=name)
    axes.set_title(name)
    axes.set_xlabel(name)
    axes.set_xscale("log")
    axes.set_yticks([0.1, 10], labels=[name, name])
    axes.annotate(name, (1, 1))
    axes.legend(title=name)
    figure.suptitle(name)
    return figure


def save_text(figure: Figure) -> str:
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # a layout that is computed again may move by a fraction of a point
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue().decode()


def test_a_name_with_dollar_signs_is_no_formula(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frac"):
        draw(BROKEN_FORMULA).savefig(tmp_path / "x.png")
    figure = draw(BROKEN_FORMULA)
    # Twice, since a report has each figure as a file and on its page.
    for file_format in ("png", "svg"):
        save_figure(figure, tmp_path / f"x.{file_format}", format=file_format)
    # matplotlib writes each text as a comment beside its paths; ticks are of numbers and have formulas.
    page = (tmp_path / "x.svg").read_text()
    assert page.count(f"<!-- {BROKEN_FORMULA} -->") == 8
    assert r"$\mathdefault{10^{2}}$" in page


def test_other_figures_are_unchanged(tmp_path: Path) -> None:
    expected, figure = save_text(draw("kl 0.1")), draw("kl 0.1")
    save_figure(figure, tmp_path / "x.svg", format="svg", metadata={"Date": None})
    paths = [
        line for line in (tmp_path / "x.svg").read_text().splitlines() if line.startswith(("   <path", "L ", "M "))
    ]
    assert paths == [line for line in expected.splitlines() if line.startswith(("   <path", "L ", "M "))]


def test_the_layout_is_that_of_matplotlib_up_to_a_point(tmp_path: Path) -> None:
    expected, figure = draw("kl 0.1"), draw("kl 0.1")
    expected.savefig(tmp_path / "expected.png")
    save_figure(figure, tmp_path / "x.png")
    for axes, expected_axes in zip(figure.axes, expected.axes, strict=True):
        corners, expected_corners = (item.get_window_extent().corners() for item in (axes, expected_axes))
        assert abs(corners - expected_corners).max() < figure.dpi / 72
    # A second format has the same layout.
    positions = [axes.get_position().bounds for axes in figure.axes]
    save_figure(figure, tmp_path / "x.svg", format="svg")
    assert [axes.get_position().bounds for axes in figure.axes] == positions
