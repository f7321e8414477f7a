"""Charts of grids: heat maps of their cells, and the edges of a dose."""

import altair as alt
import pandas as pd

from analysis.charts import chart as charts

_DARK_SHARE = 0.47
"""The share of the color scale on which white is read better than black."""
_MIN_SPAN = 0.1
"""Of the largest value: a color scale over less would show equal numbers as opposites."""
_MIN_PANEL_WIDTH, _MIN_CELL_WIDTH, _CELL_HEIGHT = 230, 46, 34
_DOSE_WIDTH = 600
_SHAPES = ("circle", "square", "triangle-up", "diamond")


def draw_heat_maps(
    table: pd.DataFrame,
    label: str,
    axes: tuple[str, str],
    *,
    columns: int = 3,
    domain: tuple[float, float] | None = None,
    is_log: bool = False,
) -> alt.FacetChart:
    """Draw a panel of cells per panel of the grid, with one color scale for all.

    table: a row per cell with panel, x and y (as categories in their order), value (missing if no run is scored),
    `lines` of its text, and std, low, high, scored, runs and stopped. label: of the color scale, with its unit. axes:
    the titles of x and y. columns: panels per row. domain: of the color scale; None: of the values.
    """
    low, high = domain or _make_domain(table["value"], is_log)
    middle = low * (high / low) ** _DARK_SHARE if is_log else low + _DARK_SHARE * (high - low)
    panels, xs, ys = (table[column].cat.categories.to_list() for column in ("panel", "x", "y"))
    width = max(_MIN_PANEL_WIDTH, _MIN_CELL_WIDTH * len(xs))
    x = alt.X("x:N", sort=xs, axis=alt.Axis(title=axes[0], labelAngle=0, grid=False), scale=alt.Scale(padding=0.04))
    y = alt.Y("y:N", sort=ys[::-1], axis=alt.Axis(title=axes[1], grid=False), scale=alt.Scale(padding=0.04))
    # Cividis is readable without color vision and in gray.
    scale = alt.Scale(type="log" if is_log else "linear", domain=[low, high], scheme="cividis", clamp=True)
    legend = alt.Legend(title=label, orient="bottom", gradientLength=240, titleLimit=400, titleFontWeight="normal")
    numbers = [
        alt.Tooltip("value:Q", title="mean", format=".4g"),
        *(alt.Tooltip(f"{name}:Q", format=".4g") for name in ("std", "low", "high")),
    ]
    counts = [alt.Tooltip("scored:Q", title="scored runs"), *charts.make_tooltips("runs:Q", "stopped:Q")]
    places = [alt.Tooltip("panel:N"), alt.Tooltip("x:N", title=axes[0]), alt.Tooltip("y:N", title=axes[1])]
    cells = alt.Chart(name="cells").transform_filter("isValid(datum.value)").mark_rect()
    empty = alt.Chart(name="empty").transform_filter("!isValid(datum.value)")
    empty = empty.mark_rect(fill="transparent", stroke=charts.INK, strokeDash=[2, 2], strokeOpacity=0.5)
    # Inside of the cell, where its neighbors do not cover the frame.
    width_share, height_share = alt.RelativeBandSize(band=0.92), alt.RelativeBandSize(band=0.88)
    frames = alt.Chart(name="frames").transform_filter("datum.stopped > 0")
    frames = frames.mark_rect(
        fillOpacity=0, stroke=charts.STOPPED_COLOR, strokeWidth=2, width=width_share, height=height_share
    )
    middle_or_above = alt.ExprRef("length(datum.lines) > 1 ? -5 : 0")
    texts = alt.Chart(name="texts").mark_text(fontSize=10, lineHeight=11, dy=middle_or_above)
    ink = alt.when("!isValid(datum.value)").then(alt.value(charts.INK))
    text_color = ink.when(f"datum.value < {middle!r}").then(alt.value("#ffffff")).otherwise(alt.value("#000000"))
    layers = [
        cells.encode(x, y, alt.Color("value:Q", scale=scale, legend=legend), tooltip=[*places, *numbers, *counts]),
        empty.encode(x, y, tooltip=[*places, *counts]),
        frames.encode(x, y, tooltip=[*places, *numbers, *counts]),
        texts.encode(x, y, alt.Text("lines:N"), color=text_color),
    ]
    layered = alt.LayerChart(data=table, layer=layers, width=width, height=_CELL_HEIGHT * len(ys))
    return layered.facet(facet=alt.Facet("panel:N", title=None, sort=panels), columns=columns)


def _make_domain(values: "pd.Series[float]", is_log: bool) -> tuple[float, float]:
    """Make the domain of a color scale. A log scale leaves out values of 0 and less, which have its lowest color."""
    shown = values[values > 0] if is_log else values.dropna()
    if shown.empty:
        return 0.5, 1.0
    low, high = float(shown.min()), float(shown.max())
    missing = _MIN_SPAN * (max(abs(low), abs(high)) or 1.0) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def draw_edges(doses: pd.DataFrame, edges: pd.DataFrame, label: str) -> alt.VConcatChart:
    """Draw collapsed runs, edges with their safe bands, and success by dose. A click on the legend leaves one line.

    doses: from `edge.summarize_doses`. edges: from `edge.summarize_edges`. label: of the dose.
    """
    lines = list(dict.fromkeys(doses["line"]))
    values = sorted(doses["dose"].unique())
    choice, legend = charts.choose("line"), charts.make_legend(columns=2)
    color = charts.make_color("line", charts.make_arm_colors(lines), legend)
    shapes = alt.Scale(domain=lines, range=[_SHAPES[index % len(_SHAPES)] for index in range(len(lines))])
    shape = alt.Shape("line:N", legend=legend, scale=shapes)
    ends = values[0] / 1.5, values[-1] * 1.5
    scale = alt.Scale(type="log", domain=list(ends), nice=False)
    opacity = charts.make_opacity(choice)
    # A few percent apart, so that the intervals of lines with equal fractions do not cover each other.
    shifts = {line: 10 ** (0.012 * (index - (len(lines) - 1) / 2)) for index, line in enumerate(lines)}
    data = doses.assign(place=doses["dose"] * doses["line"].map(shifts))

    def at(column: str, title: str | None = None) -> alt.X:
        axis = alt.Axis(values=values, format="~g", grid=False, title=title)
        return alt.X(f"{column}:Q", scale=scale, axis=axis)

    def draw_lines(column: str, x: alt.X, title: str, y_scale: alt.Scale) -> list[alt.Chart]:
        y = alt.Y(f"{column}:Q", axis=alt.Axis(title=title, tickCount=5), scale=y_scale)
        fractions = ("fraction", "fraction_low", "fraction_high", "success")
        tooltips = [
            *charts.make_tooltips("line:N", "dose:Q", "collapsed:Q", "runs:Q"),
            *(alt.Tooltip(f"{key}:Q", format=".3f") for key in fractions),
        ]
        points = alt.Chart(data, name=column).mark_point(size=50, filled=True)
        return [
            alt.Chart(data).mark_line(strokeWidth=1.5).encode(x, y, color, opacity=opacity),
            points.encode(x, y, color, shape, opacity=opacity, tooltip=tooltips),
        ]

    scale_to_1 = alt.Scale(domain=[0, 1.0])
    fraction_lines, fraction_points = draw_lines("fraction", at("place"), "collapsed runs (fraction)", scale_to_1)
    bounds = alt.Y("fraction_low:Q"), alt.Y2("fraction_high")
    intervals = alt.Chart(data).mark_rule().encode(at("place"), *bounds, color, opacity=opacity)
    y = alt.Y("line:N", sort=lines, axis=alt.Axis(title="edge", labels=False, ticks=False, domain=False, grid=False))
    bounded = edges.dropna(subset=["edge_low", "edge_high"], how="all")
    # A bound that is missing is an arrow that leaves the doses of the study.
    bars = bounded.assign(start=bounded["edge_low"].fillna(ends[0]), end=bounded["edge_high"].fillna(ends[1]))
    numbers = (f"{name}:Q" for name in ("edge", "edge_low", "edge_high", "safe_low", "safe_high"))
    tooltips = charts.make_tooltips(*numbers, "line:N", "note:N")
    channels = {"opacity": opacity, "tooltip": tooltips}
    bands = alt.Chart(edges.dropna(subset="safe_low")).mark_bar(height=10)
    # An edge that is extrapolated beyond the axis has only its interval.
    points = alt.Chart(edges[edges["edge"].between(*ends)], name="edges").mark_point(filled=True, size=70)
    edge_layers = [
        bands.encode(at("safe_low"), alt.X2("safe_high"), y, color, charts.make_opacity(choice, 0.4), tooltip=tooltips),
        alt.Chart(bars).mark_rule(strokeWidth=2).encode(at("start"), alt.X2("end"), y, color, **channels),
        *(
            alt.Chart(bars[bounded[column].isna() == is_open])
            .mark_point(shape=mark, filled=is_open, angle=angle, size=size, strokeWidth=2)
            .encode(at(place), y, color, opacity=opacity)
            for column, place, arrow in (("edge_low", "start", "triangle-left"), ("edge_high", "end", "triangle-right"))
            for is_open, mark, angle, size in ((True, arrow, 0, 70), (False, "stroke", 90, 100))
        ),
        points.encode(at("edge"), y, color, shape, **channels),
    ]
    # The legend of all panels has the choice of the first.
    fraction_panel = [fraction_lines, intervals, fraction_points.add_params(choice)]
    success_panel = draw_lines("success", at("dose", label), "success (fraction)", alt.Scale(zero=True))
    return alt.VConcatChart(
        vconcat=[
            charts.layer(*fraction_panel, height=180, width=_DOSE_WIDTH),
            charts.layer(*edge_layers, height=alt.Step(22), width=_DOSE_WIDTH),
            charts.layer(*success_panel, height=180, width=_DOSE_WIDTH),
        ],
        spacing=8,
    )
