"""Reads what a chart shows from its Vega-Lite object."""

import re
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from analysis.charts.chart import make_spec


class Layer(NamedTuple):
    """One layer of a chart with the rows that it draws."""

    mark: dict[str, Any]
    encoding: dict[str, Any]
    rows: pd.DataFrame

    def list(self, *columns: str) -> list[list[Any]]:
        """Return these columns of each row."""
        return self.rows[list(columns)].to_numpy().tolist()

    def get_field(self, channel: str) -> str:
        """Return the column of a channel."""
        return str(self.encoding[channel]["field"])


def read_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """Check a chart against the schema of Vega-Lite, and return it as a page has it."""
    chart.to_dict()
    return make_spec(chart)


def read_layers(chart: alt.TopLevelMixin) -> list[Layer]:
    """Return the layers of a chart or of all of its panels."""
    spec = read_spec(chart)
    return [_read_layer(spec, panel, layer) for panel in spec.get("vconcat", [spec]) for layer in panel["layer"]]


def _read_layer(spec: dict[str, Any], panel: dict[str, Any], layer: dict[str, Any]) -> Layer:
    # Data that all layers share belong to the panel or the chart.
    rows = pd.DataFrame(spec["datasets"][layer.get("data", panel.get("data", spec.get("data")))["name"]])
    for transform in layer.get("transform", ()):
        ((column, value),) = re.findall(r"^(?:isValid\()?datum\.(\w+)(?:\)| == '(\w+)')$", transform["filter"])
        rows = rows[rows[column] == value if value else rows[column].notna()]
    return Layer(layer["mark"], layer["encoding"], rows)


def compute_luminance(color: str) -> float:
    """Return the relative luminance of a color such as #0072b2 or rgb(0, 114, 178), as WCAG 2.2 defines it."""
    hexadecimal = [int(color[place : place + 2], 16) for place in (1, 3, 5)] if color[0] == "#" else None
    channels = hexadecimal or re.findall(r"\d+", color)
    values = np.array(channels, dtype=float) / 255
    return float(
        np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)
    )
