"""Tests of what all charts share: colors that can be told apart and seen, and the ways from a chart to a file."""

import html
import re
import struct
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest

from analysis.charts import chart as charts
from analysis.charts.curves import draw_curves, draw_intervals, draw_onsets, draw_survival
from analysis.charts.dose import draw_dose_response
from analysis.charts.gradients import COMPONENT_COLORS
from analysis.data.frames import StudyFrames
from analysis.sweep import series, symptoms, tables
from analysis.sweep.collapse import compute_survival
from tests.analysis.charts.specs import compute_luminance, read_spec
from trainable.files.paths import LINE_CHARACTERS, is_printable

BACKGROUNDS = ("#ffffff", "#fdfdfc", "#17191d")
HOSTILE = 'a\\" + datum + "\\ </script><!-- \x1b[2J \u202e'
SHOWN = HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")


def compute_contrast(color: str, other: str) -> float:
    dark, light = sorted((compute_luminance(color), compute_luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("num_words", range(6))
def test_every_arm_has_a_color_of_its_own_that_can_be_seen(num_words: int) -> None:
    words = [f"word {index}" for index in range(num_words)]
    for num_ordered in (*range(21), 100):
        ordered = [str(index) for index in range(num_ordered)]
        colors = charts.make_arm_colors([*ordered, *words], words)
        assert set(colors) == {*ordered, *words}
        assert len(set(colors.values())) == len(colors)
        assert all(compute_contrast(color, background) >= 3 for color in colors.values() for background in BACKGROUNDS)
        if num_words <= len(charts.WORD_COLORS) and num_ordered <= 20:
            # Lightness says the order, and words have none.
            assert np.all(np.diff([compute_luminance(colors[arm]) for arm in ordered]) > 0)
            assert {colors[word] for word in words} <= set(charts.WORD_COLORS)


@pytest.mark.parametrize("color", [*charts.HUES, charts.STOPPED_COLOR, charts.POINT_COLOR, *COMPONENT_COLORS.values()])
def test_other_colors_can_be_seen_and_are_distinct(color: str) -> None:
    assert min(compute_contrast(color, background) for background in BACKGROUNDS) >= 3
    assert charts.HUES.count(color) <= 1


def draw_all(frames: StudyFrames, colors: dict[str, str], arm: str, new_arm: str) -> dict[str, alt.TopLevelMixin]:
    """Draw every kind of chart, in which an arm has another name."""
    colors = {new_arm if name == arm else name: color for name, color in colors.items()}

    def rename(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(arm=table["arm"].replace(arm, new_arm))

    curves = rename(series.make_curves(frames, "val_success"))
    panels = curves.assign(dash=new_arm, panel=curves["arm"])
    doses = rename(tables.make_dose_response(frames, tables.summarize_arms(frames)))
    doses["tick"] = doses["tick"].replace(arm, new_arm)
    onsets = rename(symptoms.find_collapse_onsets(frames, np.random.default_rng(0)))
    onsets = onsets.assign(onset=5.0, low=4.0, high=7.0, label=onsets["label"] + new_arm)
    differences = pd.DataFrame({"name": [new_arm], "difference": 0.1, "difference_low": 0.0, "difference_high": 0.2})
    return {
        "curves": draw_curves(curves, series.compute_mean_curves(curves), colors, new_arm),
        "panels": draw_curves(panels, curves[:0], colors, new_arm, dash="dash", panel="panel", line_at=0.2, key="x"),
        "doses": draw_dose_response(doses, tables.make_run_outcomes(frames), colors, new_arm),
        "survival": draw_survival(rename(compute_survival(frames)), colors),
        "onsets": draw_onsets(onsets, colors),
        "intervals": draw_intervals(differences, new_arm, margin=0.05, pairs=differences),
    }


@pytest.mark.long
def test_charts_are_the_same_each_time_with_texts_that_stay_texts(frames: StudyFrames, colors: dict[str, str]) -> None:
    first, second = (draw_all(frames, colors, "0.3", HOSTILE) for _ in range(2))
    for name, chart in first.items():
        spec = read_spec(chart)
        assert spec == charts.make_spec(second[name])
        text = charts.format_spec(spec)
        assert not {"<", ">", "&"} & set(text)
        names = re.findall('"name":"((?!data-)[^"]*)"', text.partition('"datasets"')[0])
        assert len(set(names)) == len(names)
        assert not any(re.match("view_|param_", entry) for entry in names)  # altair counts them in a process
        # In a second view, a selection would give Vega the same signals again.
        assert all(len(param["views"]) == 1 for param in spec["params"])
        # Vega draws them without a browser.
        svg = charts.draw_svg(spec)
        assert is_printable(svg, LINE_CHARACTERS)
        assert name == "doses" or SHOWN in html.unescape(svg)
        # An interrupted run has no success at the end.
        arms = {"curves": "0 0.1 0.3 nofilter", "doses": "0 0.3 nofilter", "onsets": "0.3"}
        assert all(colors[shown] in svg for shown in arms.get(name, "").split())
        assert (charts.STOPPED_COLOR in svg) == (name in ("curves", "panels", "doses"))
        # No mark or legend has a color of Vega, which may not be seen on a dark page.
        used = set(re.findall('(?:fill|stroke)="([^"]*)"', svg)) - {*colors.values(), charts.STOPPED_COLOR}
        assert used - {"none", "transparent"} == {charts.INK}
    for name in ("panels", "survival"):  # as files, which are checked against the schema again
        file_chart = charts.make_file_chart(first[name]).properties(title="a")
        assert file_chart.to_dict()["datasets"] == charts.make_spec(first[name])["datasets"]
        assert isinstance(file_chart, charts._Offline)


DATA = pd.DataFrame({"arm": ["a", "b\x00"], "value": [1.0, 2.0]})
CHART = charts.layer(alt.Chart(DATA).mark_point().encode(alt.X("value:Q"), alt.Y("arm:N")), height=50)


def test_pictures_have_a_width_in_pixels_and_files_are_on_white() -> None:
    svg = charts.draw_svg(charts.make_spec(CHART))
    width, height = (float(svg.partition(f'{side}="')[2].partition('"')[0]) for side in ("width", "height"))
    assert charts.WIDTH < width < charts.WIDTH + 80
    assert 50 < height < 110
    png = charts.draw_png(svg)
    assert struct.unpack(">4sII", png[12:24]) == (b"IHDR", int(1.5 * width), int(1.5 * height))
    file = charts.make_svg_file(svg)
    assert 'fill="#ffffff"/>' in file
    assert charts.INK not in file
    assert charts.INK in svg
    chart = charts.make_file_chart(CHART).to_dict()
    assert (chart["width"], chart["background"]) == (charts.WIDTH, "white")
    assert charts.INK not in str(chart)
    assert CHART.to_dict()["width"] == "container"


def test_an_embedded_picture_has_names_of_its_own_and_a_chart_no_control_character() -> None:
    svg = (
        '<?xml version="1.0"?><svg class="marks" width="30" height="20" viewBox="0 0 30 20"><clipPath id="c"/>'
        '<g clip-path="url(#c)"><use href="#c"/></g></svg>'
    )
    assert charts.embed_svg("dose", svg, 'Of "<b>\x1b') == (
        '<svg role="img" aria-label="Of &quot;&lt;b&gt;\\x1b" style="--width: 30px" class="marks" '
        'viewBox="0 0 30 20"><clipPath id="dose-c"/><g clip-path="url(#dose-c)"><use href="#dose-c"/></g></svg>'
    )
    spec: dict[str, Any] = charts.make_spec(CHART)
    assert [row["arm"] for rows in spec["datasets"].values() for row in rows] == ["a", r"b\x00"]
    assert charts.count_rows(spec) == 2
    assert charts.count_rows(charts.make_spec(alt.VConcatChart(vconcat=[CHART, CHART.properties(height=1)]))) == 2
