"""Writes the report of a study, the index of several studies, and what a terminal prints of them."""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import altair as alt
import pandas as pd

from analysis.charts import chart as charts
from analysis.data.compare import require_single_study
from analysis.data.frames import StudyFrames, concat_studies, to_records
from analysis.data.load import find_study_folders, load
from analysis.grid import layout
from analysis.report.page import (
    SectionView,
    format_plain,
    format_plain_table,
    render_page,
    view_sections,
    write_page,
)
from analysis.report.section import Heading, Report, Section, Table
from analysis.sweep import series
from analysis.sweep.collapse import find_run_ends
from trainable.files.paths import atomic_write, make_folder
from trainable.files.step_phase import STEP_PHASE

_ARM_COLUMNS = {"arm", "baseline", "first", "second"}
"""Columns of the tables beside the page that name arms."""


class Conclusion(NamedTuple):
    """The results of a study in words."""

    sentences: tuple[str, ...]
    """What the sections that conclude say, in their order."""
    verdicts: tuple[tuple[str, ...], ...]
    """A table: its headings, and a row per arm; empty in a search."""


def write_report(folder: Path | str) -> Path:
    """Write report.html and figures/ into a results/<run> folder, and return the path of the report.

    The page needs no network. A script makes most figures interactive; without it they are pictures. The family of the
    study selects the sections.
    """
    return write_frames_report(load(folder), Path(folder))


def write_frames_report(
    frames: StudyFrames, folder: Path, *, with_pictures: bool = True, own_sections: Sequence[Section[Any]] = ()
) -> Path:
    """Write the report of a study that is already loaded, with or without PNG and SVG files of its figures.

    Tables beside the page have the arms of the frames, so that both can be joined. folder: its results/<run>.
    own_sections: sections of the study's own file, which are shown last.
    """
    report = find_report(frames, own_sections)
    arms = {label: arm for arm, label in layout.make_axis_labels(frames).items()}
    STEP_PHASE.enter("statistics")
    results = report.make_results(layout.name_arms(frames))
    figures_folder = make_folder(folder, "figures")
    files = [section.files(results) for section in report.sections if section.when(results)]
    for name, table in (entry for tables in files for entry in tables.items()):
        with atomic_write(figures_folder / f"{name}.csv") as temp_path:
            table.replace(dict.fromkeys(_ARM_COLUMNS & set(table), arms)).to_csv(temp_path, index=False)
    views = view_sections(report.sections, results, with_charts=True)
    for figure in [figure for view in views for figure in view.figures] if with_pictures else ():
        with atomic_write(figures_folder / f"{figure.name}.png") as temp_path:
            temp_path.write_bytes(charts.draw_png(figure.picture))
        with atomic_write(figures_folder / f"{figure.name}.svg") as temp_path:
            temp_path.write_text(charts.make_svg_file(figure.picture), encoding="utf-8")
    return write_page(folder / "report.html", render_page(make_heading(report, results), views))


def find_report(frames: StudyFrames, own_sections: Sequence[Section[Any]] = ()) -> Report[Any]:
    """Find the report of the family of a study. own_sections: sections of the study's own file, which come last."""
    (family,) = require_single_study(frames).families
    report: Report[Any] = resolve_name(family.report)
    return replace(report, sections=(*report.sections, *own_sections))


def make_heading(report: Report[Any], results: Any) -> Heading:
    """Make the head of a report, which ends with the sentences of the sections that conclude."""
    sections = [section for section in report.sections if section.concludes and section.when(results)]
    lead = [sentence for section in sections for sentence in section.sentences(results) if sentence]
    return report.make_heading(results)._replace(lead=lead)


def conclude(frames: StudyFrames, own_sections: Sequence[Section[Any]] = ()) -> Conclusion:
    """Return what the report concludes, for the terminal: with arms as `--arm` takes them."""
    report = find_report(frames, own_sections)
    results = report.make_results(frames, has_labels=False)
    heading = make_heading(report, results)
    table = None if results.search else _find_verdict_table(report, results)
    notes = [table.note] if table and table.note else []
    sentences = tuple(map(format_plain, [*notes, *heading.remarks, *heading.lead]))
    return Conclusion(sentences, tuple(format_plain_table(table)) if table else ())


def _find_verdict_table(report: Report[Any], results: Any) -> Table | None:
    """Find the first table with rows among those of the sections that conclude."""
    sections = [section for section in report.sections if section.concludes and section.when(results)]
    tables = (table for section in sections for table in section.tables(results))
    return next((table for table in tables if isinstance(table, Table) and table.rows), None)


def summarize_runs(frames: StudyFrames) -> dict[str, dict[str, Any]]:
    """Summarize how each run of a study ended, by run_id: status, reason, collapsed and verdict.

    collapsed is missing where runs do not collapse (`collapse.find_run_ends`). verdict is the arm's, `baseline` for the
    baseline, and missing in a search.
    """
    study = summarize_study(frames)
    verdicts = {arm["arm"]: arm["verdict"] for arm in study["arms"]}
    verdicts |= {arm: "baseline" for arm in verdicts if arm == study["baseline"]}
    summaries = {}
    for run in study["runs"]:
        names = ("status", "reason", "collapsed")
        entries = {**{name: run[name] for name in names}, "verdict": verdicts.get(run["arm"])}
        summaries[run["run"]] = {name: value for name, value in entries.items() if value is not None}
    return summaries


def summarize_study(frames: StudyFrames) -> dict[str, Any]:
    """Summarize the verdict on each arm and the end of each run, for other programs (`docs/after_a_study.md`).

    A difference is an arm's `outcome` minus the baseline's, with a 95 % interval. collapsed is None where runs do not
    collapse. notes: what the report concludes, in sentences.
    """
    (study,), (family,) = require_single_study(frames).studies, frames.families
    # Runs without a training step, and those of other families, do not collapse.
    ends = find_run_ends(frames) if family.has_symptoms else pd.DataFrame(columns=["run_id", "is_collapse"])
    collapses = dict(zip(ends["run_id"], map(bool, ends["is_collapse"]), strict=True))
    report = find_report(frames)
    results = report.make_results(frames, has_labels=False)
    heading = make_heading(report, results)
    return {
        "study": study.name,
        "baseline": study.baseline,
        "outcome": family.primary_column,
        "arms": [
            {
                "arm": row["arm"],
                "verdict": row["outcome"],
                "difference": row["difference"],
                "low": row["difference_low"],
                "high": row["difference_high"],
                **{name: row[name] for name in ("p", "p_holm", "p_equal_holm", "margin")},
            }
            for row in to_records(report.make_verdicts(results))
        ],
        "runs": [
            {
                "run": run["run_id"],
                **{name: run[name] for name in ("arm", "seed", "status", "reason")},
                "collapsed": collapses.get(run["run_id"]),
            }
            for run in to_records(frames.runs)
        ],
        "notes": list(map(format_plain, [*heading.remarks, *heading.lead])),
    }


def list_open_arms(frames: StudyFrames) -> list[str]:
    """List the arms whose difference from the baseline is neither resolved nor equal within the margin."""
    return [arm["arm"] for arm in summarize_study(frames)["arms"] if arm["verdict"] == "open"]


def draw_figures(frames: StudyFrames, names: Collection[str] | None = None) -> dict[str, alt.TopLevelMixin]:
    """Draw the figures of the report for which the study has data: {name: chart}.

    A notebook shows a chart without network, and `chart.save` writes PNG, SVG, PDF or HTML. names: of the figures to
    draw; None: all. Raises ValueError if the report of such a study has no figure of that name.
    """
    report = find_report(frames)
    results = report.make_results(layout.name_arms(frames))
    sections = [section for section in report.sections if names is not None or section.when(results)]
    figures = {figure.name: figure for section in sections for figure in section.figures}
    if names is not None and (isinstance(names, str) or not set(names) <= set(figures)):
        raise ValueError(f"names is {names!r}, and may have {', '.join(figures)}.")
    tables = {name: figure.make_table(results) for name, figure in figures.items() if names is None or name in names}
    return {
        name: charts.make_file_chart(figures[name].draw(table, results))
        for name, table in tables.items()
        if table is not None and len(table)
    }


def write_index(output: Path | str) -> Path:
    """Write <output>/index.html, with links to the reports of all studies below `output`; return its path.

    Runs with equal configuration and seed are compared across studies.
    """
    output = Path(output)
    folders = find_study_folders(output)
    study_frames = [load(folder) for folder in folders]
    views = []
    for folder, frames in zip(folders, study_frames, strict=True):
        report, study = find_report(frames), frames.studies[0]
        results = report.make_results(layout.name_arms(frames))
        heading, table = make_heading(report, results), _find_verdict_table(report, results)
        remarks = (f"**{remark}**" for remark in heading.remarks)
        words = [f"**{heading.title}**", heading.over, *remarks, *heading.lead]
        tables, link = [table] if table else [], os.path.relpath(folder / "report.html", output)
        views.append(SectionView(f"study-{study.run}", study.name, words, tables=tables, link=link))
    frames = concat_studies(study_frames)
    title = f"{len(views)} stud{'y' if len(views) == 1 else 'ies'}"
    pairs = list_consistency(frames) or ["No two runs here have the same configuration and seed."]
    note = "p-values of arms are corrected within each study, not across studies."
    views += [SectionView("consistency", "Consistency of equal runs", [*pairs, note])]
    return write_page(output / "index.html", render_page(Heading("", title), views))


def list_consistency(frames: StudyFrames) -> list[str]:
    """Say of each pair of runs with equal configuration and seed whether their rows are equal; empty without one."""
    pairs = [
        f"{pair['a']} and {pair['b']} {'have equal rows.' if pair['agree'] else 'differ: ' + pair['difference']}"
        for pair in to_records(series.check_consistency(frames))
    ]
    rule = "Runs with the same configuration and seed must have equal rows, except for times."
    return [rule, *pairs] if pairs else []
