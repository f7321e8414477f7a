"""What every page is made with: templates, formats of numbers, figures as elements, settings as rows."""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.data.frames import Study
from analysis.gradients import plots as gradient_plots
from analysis.sweep import verdicts
from trainable.runs.links import whole_file

TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, page: str) -> Path:
    """Write a page beside its place and rename it there; returns `path`."""
    with whole_file(path) as beside:
        beside.write_text(page, encoding="utf-8")
    return path


def settings_rows(study: Study) -> list[dict[str, Any]]:
    """Every setting of the study: name, value as JSON, and whether it differs from the default.

    Defaults are those of study.json's `defaults`; without them `changed` is None.
    """
    settings, defaults = (_dotted(study.get(name) or {}) for name in ("settings", "defaults"))
    return [
        {
            "name": name,
            "value": json.dumps(value),
            "default": json.dumps(defaults.get(name)),
            "changed": defaults.get(name) != value if defaults else None,
        }
        for name, value in settings.items()
    ]


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def inline_svg(name: str, figure: Figure) -> str:
    """A figure as an <svg> element for a page: its ids prefixed by `name`, no prologue, no size of its own."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg role="img" \1', text, count=1)


_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """A count with at most four digits: 240, 5 400, 12.3 k, 1.23 M."""
    if value is None or pd.isna(value):
        return "–"
    if abs(value) < 1e4:
        return f"{value:,.0f}".replace(",", " ")
    rounded = float(f"{value:.3g}")  # before the unit is chosen: 999 999 is 1 M
    size, unit = next(entry for entry in _UNITS if abs(rounded) >= entry[0])
    return f"{rounded / size:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds as `1 h 02 min`, `3 min 05 s` or `12 s`."""
    if seconds is None or pd.isna(seconds):
        return "–"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def environment() -> jinja2.Environment:
    """The templates with the formats that they use; a name that a template does not get is an error."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters |= {
        "share": verdicts.share,
        "signed": verdicts.signed,
        "signed_number": verdicts.signed_number,
        "number": verdicts.number,
        "count": count,
        "duration": duration,
        "word": verdicts.word,
        "p_value": lambda p: "–" if np.isnan(p) else verdicts.p_value(p),
    }
    found.globals |= {"interval": verdicts.interval, "bounds": verdicts.bounds, "stop": verdicts.stop}
    found.globals["when"] = gradient_plots.WHEN
    found.tests["missing"] = lambda value: value is None or bool(pd.isna(value))
    return found
