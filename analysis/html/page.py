"""Building blocks of all HTML pages: templates, number formats, SVG figures and tables of settings."""

import io
import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.gradients import plots as gradient_plots
from analysis.sweep import verdicts
from analysis.sweep.plots import save_figure
from trainable.config.aliases import flatten_settings
from trainable.files.control_characters import LINE_CHARACTERS, escape_controls
from trainable.files.paths import atomic_write
from trainable.runs.study_record import StudyRecord

TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, page: str) -> Path:
    """Write a page with an atomic rename, and return `path`."""
    with atomic_write(path) as temp_path:
        temp_path.write_text(page, encoding="utf-8")
    return path


_SECTION = re.compile(r'<section id="([a-z0-9-]+)">\s*<h2>(.*?)</h2>', re.DOTALL)
_CONTENTS_PLACE = '<nav aria-label="Contents"></nav>'


def add_contents(page: str) -> str:
    """`page` with links to its sections in its empty <nav>; unchanged if it has none.

    Example:
        >>> add_contents('<nav aria-label="Contents"></nav><section id="runs"><h2>All runs</h2>').splitlines()[1]
        '<li><a href="#runs">All runs</a></li>'
    """
    links = "\n".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in _SECTION.findall(page))
    return page.replace(_CONTENTS_PLACE, f'<nav aria-label="Contents"><ol>\n{links}\n</ol></nav>', 1)


def make_settings_rows(study: StudyRecord) -> list[dict[str, Any]]:
    """Every setting of the study: name, value and default as JSON, and whether it was changed from the default.

    Defaults come from `defaults` in study.json. If that is missing, `changed` is None, since nothing is known.
    """
    settings, defaults = map(flatten_settings, (study.settings, study.defaults))
    return [
        {
            "name": name,
            "value": json.dumps(value),
            "default": json.dumps(defaults.get(name)),
            "changed": defaults.get(name) != value if defaults else None,
        }
        for name, value in settings.items()
    ]


def list_commands(study: StudyRecord) -> list[str]:
    """The commands that started the study, in their order and each once: several if arms or seeds were added.

    Those that only resumed it are left out. A folder of an earlier version has the last one only.
    """
    # The program is `python -m tune_study`, or the installed `tune-study`.
    is_resume = re.compile(r"(python -m tune_study|tune-study) resume\b").match
    commands = [start.command for start in study.starts if start.command and not is_resume(start.command)]
    return [*dict.fromkeys(commands or filter(None, [study.command]))]


def list_sources(study: StudyRecord) -> list[dict[str, str]]:
    """The texts that a user wrote for the study: its declaration and the files of its parts, as study.json has them."""
    files = [
        *([("Study", study.declaration)] if study.declaration else []),
        *(("Study, an earlier text", file) for file in study.earlier_declarations),
        *(("Parts", file) for file in study.code),
    ]
    return [{"title": title, **asdict(file)} for title, file in files]


def render_svg(name: str, figure: Figure) -> str:
    """A figure as an <svg> element without XML prologue and fixed size. Its ids are prefixed by `name`."""
    buffer = io.BytesIO()
    # A fixed salt and no date make the output reproducible: the same figure gives the same text.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        save_figure(
            figure, buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue().decode()
    # An XML prologue is not allowed inside HTML.
    text = text[text.index("<svg") :]
    # Ids must be unique on a page with several figures; references to them change likewise.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    # Without a fixed size, the style sheet fits the figure to the width of the page.
    return re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg role="img" \1', text, count=1)


_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_count(value: float) -> str:
    """A count with at most four digits: 240, 5 400, 12.3 k, 1.23 M."""
    if value is None or pd.isna(value):
        return "–"
    # Four digits are as short as a number with a unit, and exact.
    if abs(value) < 1e4:
        return f"{value:,.0f}".replace(",", " ")
    # Round before choosing the unit: 999 999 is 1 M.
    rounded = float(f"{value:.3g}")
    size, unit = next(entry for entry in _UNITS if abs(rounded) >= entry[0])
    return f"{rounded / size:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """Seconds as `1 h 02 min`, `3 min 05 s` or `12 s`."""
    if seconds is None or pd.isna(seconds):
        return "–"
    total_seconds = round(seconds)
    if total_seconds >= 3600:
        return f"{total_seconds // 3600} h {total_seconds % 3600 // 60:02d} min"
    return f"{total_seconds // 60} min {total_seconds % 60:02d} s" if total_seconds >= 60 else f"{total_seconds} s"


def _escape_text(value: object) -> object:
    """What a template shows of a value: texts, also those that are HTML already, without control characters."""
    return type(value)(escape_controls(value, LINE_CHARACTERS)) if isinstance(value, str) else value


@cache
def make_environment() -> jinja2.Environment:
    """The Jinja environment with all templates, filters and functions. Undefined names in a template are errors.

    A process has one environment, because an environment compiles every template that it renders.
    """
    jinja_env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_escape_text,
    )
    jinja_env.filters |= {
        "fraction": verdicts.format_fraction,
        "signed": verdicts.format_signed,
        "signed_number": verdicts.format_signed_number,
        "number": verdicts.format_number,
        "count": format_count,
        "duration": format_duration,
        "status_text": verdicts.format_status,
        "p_value": lambda p: "–" if np.isnan(p) else verdicts.format_p_value(p),
    }
    jinja_env.globals |= {
        "interval": verdicts.format_interval,
        "bounds": verdicts.format_bounds,
        "describe_stop": verdicts.describe_stop,
    }
    jinja_env.globals["filter_labels"] = gradient_plots.FILTER_LABELS
    jinja_env.tests["missing"] = lambda value: value is None or bool(pd.isna(value))
    return jinja_env
