"""What all charts share: colors, sizes, legends and marks, and how a chart becomes text, SVG or PNG.

Text and thin lines have the color `INK`, which on a page is the color of the page's text. All other colors have a
contrast of at least 3:1 to white and to the dark background of a page. Texts of a study, such as the names of arms, are
data and scale domains, and never part of an expression.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

from trainable.files.paths import LINE_CHARACTERS, escape_controls

INK = "currentColor"
FILE_INK = "#333333"
"""Stands for `INK` in files, on white."""
STOPPED_COLOR = "#d55e00"
POINT_COLOR = "#3b7cb2"
WORD_COLORS = ("#777777", "#a6761d", "#7a6a8f")
"""Of arms that are words, such as nofilter, and have no place in an order."""
ORDERED_COLORS = ("#7858a7", "#546bbd", "#3b7cb2", "#1e8c8c", "#2e9758", "#7b961b", "#bc8900")
"""Anchors of the color map of ordered arms: hues from purple to amber, each lighter than the one before."""
HUES = ("#0072b2", "#a6761d", "#00875f", "#b8578f", "#2f86b5", "#777777", "#7b961b", "#7b61c4")
"""Of arms without an order."""
WIDTH = 720
"""Width of a chart in pixels where it cannot take the width of a page."""
HEIGHT = 300
MAX_ROWS = 5_000
"""Rows of an interactive chart. With more, a page would have megabytes, and shows a picture alone."""
TARGETS = "targets"
"""Beginning of the name of a layer of invisible points, at which the pointer finds the values of lines."""
_FAINT_OPACITY = 0.08
_TEXTS = {"labelColor": INK, "titleColor": INK}
_LINES = {"gridColor": INK, "gridOpacity": 0.1, "tickColor": INK, "tickOpacity": 0.4}
_AXIS = {**_LINES, "domainColor": INK, "domainOpacity": 0.4, "titleFontWeight": "normal"}
_SYMBOLS = {"symbolBaseFillColor": INK, "symbolBaseStrokeColor": INK}
_CONFIG = {
    "view": {"stroke": None},
    "axis": {**_TEXTS, **_AXIS, "labelFontSize": 11, "titleFontSize": 12, "labelLimit": 240},
    "legend": {**_TEXTS, **_SYMBOLS, "labelFontSize": 11, "titleFontSize": 11, "labelLimit": 180},
    "header": {**_TEXTS, "labelFontSize": 12, "labelFontWeight": "bold", "labelLimit": 300},
    "title": {"color": INK, "subtitleColor": INK, "fontSize": 12, "anchor": "start"},
    "rule": {"color": INK},
    "text": {"color": INK, "fontSize": 11},
}


def make_arm_colors(arms: Sequence[str], words: Sequence[str] = ()) -> dict[str, str]:
    """Choose the color of each arm: along the color map in the given order, and grays and browns for `words`.

    More words than there are grays and browns are colored along the map, too: no two arms have one color.
    """
    words = words if len(words) <= len(WORD_COLORS) else ()
    ordered_arms = [arm for arm in arms if arm not in words]
    anchors = np.array([[int(color[place : place + 2], 16) for place in (1, 3, 5)] for color in ORDERED_COLORS])
    positions = np.linspace(0, len(anchors) - 1, max(len(ordered_arms), 2))
    channels = [np.interp(positions, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    shades = ["#" + "".join(f"{round(value):02x}" for value in shade) for shade in np.transpose(channels)]
    colors = dict(zip(ordered_arms, shades, strict=False))
    return colors | dict(zip(words, WORD_COLORS, strict=False))


def make_color(column: str, colors: Mapping[str, str], legend: alt.Legend | None) -> alt.Color:
    """Make the color of marks by the values of a column, such as `arm`."""
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    return alt.Color(f"{column}:N", legend=legend, scale=scale)


def make_arm_color(colors: Mapping[str, str], table: pd.DataFrame) -> alt.Color:
    """Make the color of marks by arm, with a legend of the arms in `table`."""
    arms = set(table["arm"])
    return make_color("arm", {arm: color for arm, color in colors.items() if arm in arms}, make_legend())


def choose(column: str, key: str = "") -> alt.Parameter:
    """Make the choice of values of a column by clicks on the legend. key: beginning of its name."""
    return alt.selection_point(name=f"{key}{column}", fields=[column], bind="legend")


# Channels are given as objects: for a text such as "arm:N" Altair looks for the class of the channel through the whole
# schema, which took a third of the time of a chart.


def make_tooltips(*columns: str) -> list[alt.Tooltip]:
    """Make tooltips of columns with their types, such as `arm:N`; numbers have four digits."""
    return [
        alt.Tooltip(column, format=".4g") if column in ("value:Q", "low:Q", "high:Q") else alt.Tooltip(column)
        for column in columns
    ]


def make_opacity(choice: alt.Parameter | alt.PredicateComposition, on: float = 1.0) -> alt.OpacityValue:
    """Make marks faint where something else is chosen."""
    condition = alt.when(choice).then(alt.value(on)).otherwise(alt.value(_FAINT_OPACITY))
    return alt.OpacityValue(**condition)


def make_legend(columns: int = 4) -> alt.Legend:
    """Make a legend below the chart."""
    return alt.Legend(title=None, orient="bottom", columns=columns, symbolOpacity=1, symbolLimit=60)


def make_step_axis() -> alt.X:
    """Make the horizontal axis of training steps."""
    return alt.X("step:Q", title="training step", axis=alt.Axis(tickMinStep=1, grid=False, tickCount=8))


def mark_stop(size: int = 90) -> dict[str, Any]:
    """Return the mark of a run that a rule stopped: a vermilion cross."""
    return {"shape": "cross", "angle": 45, "filled": True, "color": STOPPED_COLOR, "size": size, "opacity": 1}


def draw_line_at(x: float | None = None, y: float | None = None) -> alt.Chart:
    """Draw a dashed line through the chart at a value of one axis."""
    channel, at = (alt.X("at:Q"), x) if x is not None else (alt.Y("at:Q"), y)
    return alt.Chart(pd.DataFrame({"at": [at]})).mark_rule(strokeDash=[4, 3], opacity=0.6).encode(channel)


def layer(*charts: alt.Chart, height: int | alt.Step = HEIGHT, width: Any = "container") -> alt.LayerChart:
    """Put charts above each other. width: "container" for the width of the page."""
    # In one call: each further method would copy the chart with all of its data.
    return alt.LayerChart(layer=charts, width=width, height=height)


def make_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """Return a chart as a Vega-Lite object with the colors and fonts of all charts.

    Texts have no control characters: in JSON they would have escapes, and be whole in the chart.
    """
    with alt.data_transformers.disable_max_rows():
        # Altair would check every value against the schema of Vega-Lite, which takes longer than all else; tests do.
        spec: dict[str, Any] = _escape_texts(chart.to_dict(validate=False))
    # Altair binds a selection of a layered panel to all of its layers, each of which Vega would give the same signals.
    params = [{**param, "views": param["views"][:1]} if "views" in param else param for param in spec.get("params", [])]
    return {**spec, "params": params, "background": None, "config": _CONFIG}


def format_spec(spec: Mapping[str, Any]) -> str:
    """Format a chart as JSON that may stand in a <script> element: no text in it can end the element."""
    text = json.dumps(spec, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def count_rows(spec: Mapping[str, Any]) -> int:
    """Count the rows of all data of a chart."""
    return sum(len(rows) for rows in spec.get("datasets", {}).values())


def draw_svg(spec: Mapping[str, Any]) -> str:
    """Draw a chart as an SVG document whose ink is `INK` and whose background is transparent."""
    svg = str(vl_convert.vegalite_to_svg(_drop_targets(_fix_width(spec))))
    # Vega counts gradients through all charts of a process, and a chart has one at most, the scale of its colors.
    return re.sub(r"\bgradient_\d+", "gradient_0", svg)


def _fix_width(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {**spec, "width": WIDTH} if spec.get("width") == "container" else dict(spec)


def _drop_targets(spec: dict[str, Any]) -> dict[str, Any]:
    """Drop the layers that only the pointer needs, which would be most of a picture."""
    panels: dict[str, Any] = {
        key: [_drop_targets(entry) for entry in spec[key] if not str(entry.get("name")).startswith(TARGETS)]
        for key in ("layer", "concat", "vconcat")
        if key in spec
    }
    return spec | panels | ({"spec": _drop_targets(spec["spec"])} if "spec" in spec else {})


def embed_svg(name: str, svg: str, label: str) -> str:
    """Make an <svg> element of a document: without a fixed size, with a label, and with ids that begin with `name`."""
    safe_label = html.escape(escape_controls(label, LINE_CHARACTERS))
    text = re.sub(r'\bid="', f'id="{name}-', svg[svg.index("<svg") :])
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    # Without a fixed size, the style sheet fits the figure to the width of the page.
    return re.sub(
        r'^<svg ([^>]*?)width="([0-9.]+)" height="[^"]*"',
        lambda match: f'<svg role="img" aria-label="{safe_label}" style="--width: {match[2]}px" {match[1].rstrip()}',
        text,
        count=1,
    )


def make_svg_file(svg: str) -> str:
    """Make an SVG file for white paper of a document."""
    return re.sub(r"(<svg [^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', svg, count=1).replace(
        INK, FILE_INK
    )


def draw_png(svg: str) -> bytes:
    """Draw an SVG file as a PNG file, 1.5 times as large."""
    return bytes(vl_convert.svg_to_png(make_svg_file(svg), scale=1.5))


def make_file_chart(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    """Return a chart for a notebook or a file: on white, with a width in pixels, and shown without network.

    It is saved as `chart.save("x.png")`, with .svg, .pdf, .html or .json likewise.
    """
    fixed = {**_fix_width(make_spec(chart)), "background": "white"}
    content = json.loads(json.dumps(fixed).replace(INK, FILE_INK))
    file_chart: Any = type(chart).from_dict(content, validate=False)  # type: ignore[attr-defined]
    # Methods such as `properties` return a chart of the same class. To set an attribute of a chart sets a property.
    object.__setattr__(file_chart, "__class__", type(type(chart).__name__, (_Offline, type(chart)), {}))
    return cast(alt.TopLevelMixin, file_chart)


class _Offline:
    """A chart that a notebook shows without network: its 0.9 MB hold the library, which Altair loads from a CDN."""

    def _repr_mimebundle_(self, *arguments: Any, **options: Any) -> Any:
        with alt.renderers.enable("html", template="inline"):
            return super()._repr_mimebundle_(*arguments, **options)  # type: ignore[misc]


def _escape_texts(value: Any) -> Any:
    if isinstance(value, str):
        return escape_controls(value, LINE_CHARACTERS)
    if isinstance(value, Mapping):
        return {_escape_texts(key): _escape_texts(entry) for key, entry in value.items()}
    return [_escape_texts(entry) for entry in value] if isinstance(value, list | tuple) else value
