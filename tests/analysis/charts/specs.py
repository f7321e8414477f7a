"""Reads what a chart shows from its Vega-Lite object."""

import re
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from analysis.charts.chart import make_spec


class Layer(NamedTuple):
    """One layer of a chart with the rows that it draws."""

    name: str
    mark: dict[str, Any]
    encoding: dict[str, Any]
    rows: pd.DataFrame


def read_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """Check a chart against the schema of Vega-Lite, and return it as a page has it."""
    chart.to_dict()
    return make_spec(chart)


def read_layers(chart: alt.TopLevelMixin) -> list[Layer]:
    """Return the layers of a chart, of a panel of its facets, or of all of its panels."""
    spec = read_spec(chart)
    panels = spec.get("vconcat") or spec.get("concat") or [spec.get("spec", spec)]
    return [_read_layer(spec, layer) for panel in panels for layer in panel.get("layer", [panel])]


def _read_layer(spec: dict[str, Any], layer: dict[str, Any]) -> Layer:
    # Data that all layers share belong to the chart.
    rows = pd.DataFrame(spec["datasets"][layer.get("data", spec.get("data"))["name"]])
    for transform in layer.get("transform", ()):
        column, value = re.fullmatch(r"(?:isValid\()?datum\.(\w+)(?:\)| == '(\w+)')", transform["filter"]).groups()  # type: ignore[union-attr]
        rows = rows[rows[column].notna() if value is None else rows[column] == value]
    return Layer(layer.get("name", ""), layer["mark"], layer["encoding"], rows)


def list_names(value: Any) -> list[str]:
    """Return the names of all views and selections of a chart."""
    if isinstance(value, list):
        return [name for entry in value for name in list_names(entry)]
    if not isinstance(value, dict):
        return []
    own = [str(value.get("name"))] * ("name" in value and bool({"mark", "layer", "select"} & value.keys()))
    return own + [name for key, entry in value.items() if key != "datasets" for name in list_names(entry)]
