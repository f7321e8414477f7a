"""The report of a study of toy tasks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import altair as alt
import pandas as pd

from analysis.charts.chart import HUES, make_arm_colors
from analysis.charts.curves import draw_curves
from analysis.data.compare import has_added_seeds, list_arms, select_runs
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.report.common import (
    CONTRASTS,
    STATUS_COUNTS,
    StudyResults,
    format_ordinary,
    format_p,
    format_verdict,
    list_command_sentences,
    list_remarks,
    make_reproduction_tables,
    make_runs_table,
)
from analysis.report.search import SEARCH
from analysis.report.section import (
    VERDICT_COLUMNS,
    Figure,
    Heading,
    Listing,
    Report,
    Section,
    Table,
    TableColumn,
    name,
    number,
    text,
)
from analysis.sweep import findings, series
from analysis.sweep.tables import compare_outcomes
from analysis.sweep.verdicts import explain_open, format_interval, format_signed, format_signed_4, is_missing
from sandboxes.toys.published.cells import POOLED
from sandboxes.toys.published.reproduction import compare_to_published, describe_sources, summarize_verdicts
from sandboxes.toys.report import tables


@dataclass(frozen=True)
class ToyResults(StudyResults):
    """A study of a toy task."""

    @cached_property
    def differences(self) -> pd.DataFrame:
        """From `compare_outcomes`: one row per outcome and arm other than the baseline.

        First steps are not compared, because runs that never reach one have no number.
        """
        return compare_outcomes(self.frames, tables.list_outcomes(self.frames))

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """From `tables.compute_arm_statistics`: one row per measured column and arm."""
        return tables.compute_arm_statistics(self.frames)

    @cached_property
    def published(self) -> pd.DataFrame:
        """From `compare_to_published`: one row per published cell of these arms."""
        return compare_to_published(self.frames)

    @cached_property
    def curves(self) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
        """For each column of `tables.select_panels`, the curves of single runs and the mean curves."""
        frames = self.frames
        return {
            column: (series.make_curves(frames, column), tables.compute_mean_curves(frames, column))
            for column in tables.select_panels(frames)
        }

    @property
    def colors(self) -> dict[str, str]:
        """The color of each arm: arms have no order, so they have distinct hues where there are enough."""
        arms = list_arms(self.frames)
        return dict(zip(arms, HUES, strict=False)) if len(arms) <= len(HUES) else make_arm_colors(arms)


# ---------------------------------------------------------------------- verdicts


def _make_verdict_table(results: ToyResults) -> Iterator[Table]:
    rows = _add_differences(results, to_records(tables.select_primary(results.frames, results.statistics)))
    for row in rows:
        row["is_baseline"] = row["arm"] == results.study.baseline
        row["verdict"] = "baseline" if row["is_baseline"] else row["verdict"] or "–"
        row |= select_runs(results.frames, row["arm"])["status"].value_counts().to_dict()
    yield Table(
        [
            name("arm"),
            TableColumn("verdict", format_verdict, "verdict"),
            number(results.frames.families[0].primary_column.replace("_", " "), "mean", "{:.4f}".format),
            number("minus the\nbaseline", "difference", format_signed_4),
            number("Holm p", "p_holm", format_p),
            number("seeds", "n", str),
            STATUS_COUNTS,
            text("basis", "basis"),
        ],
        rows,
        note=explain_open(rows, "arms"),
    )


def _add_differences(results: ToyResults, rows: Iterable[Row]) -> list[Row]:
    """Add the columns of `ToyResults.differences` to rows with arm and column; None without a difference."""
    differences = {(row["arm"], row["column"]): row for row in to_records(results.differences)}
    untested = dict.fromkeys(results.differences.columns)
    return [{**untested, **differences.get((row["arm"], row["column"]), {}), **row} for row in rows]


VERDICTS: Section[ToyResults] = Section(
    "verdicts",
    "Verdict for each arm",
    sentences=lambda results: [tables.format_headline(results.frames, results.differences)],
    tables=_make_verdict_table,
    explanation=lambda results: _explain_numbers(results),
    when=lambda results: not results.search,
    concludes=True,
)
NOTES: Section[ToyResults] = Section(
    "notes", "Limits of these numbers", sentences=lambda results: tables.make_notes(results.frames), is_warning=True
)


def _explain_numbers(results: ToyResults) -> str:
    (family,) = results.frames.families
    basis = "Their noise is estimated from all arms, and they are not corrected for the number of arms."
    if has_added_seeds(results.study):
        basis = "They are valid at every look, for all arms together."
    return (
        "Numbers are over the scored runs of each arm: completed runs, and runs that a rule stopped, with their last "
        "row. The standard error is the standard deviation / √n. Differences are paired by seed if the arms share two "
        f"seeds or more. Brackets are 95 % intervals. {basis} p-values of `{family.primary_column}`, the primary "
        "outcome, are corrected with Holm's method over the arms; p-values of all other columns are corrected together."
    )


# ---------------------------------------------------------------------- curves


def _draw_curves(curves: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]], results: ToyResults) -> alt.TopLevelMixin:
    labels = tables.select_panels(results.frames)
    chance_error = tables.compute_chance_error(results.frames)
    panels: list[Any] = [
        draw_curves(
            runs,
            means[means["runs"] > 1],
            results.colors,
            labels[column],
            line_at=chance_error if column.startswith("test_error") else None,
            key=column,
        )
        for column, (runs, means) in curves.items()
    ]
    if len(panels) == 1:
        return panels[0]
    return alt.ConcatChart(concat=[panel.properties(width=380) for panel in panels], columns=2)


def _make_curves_caption(results: ToyResults) -> str:
    chance_error = tables.compute_chance_error(results.frames)
    line = "" if chance_error is None else " A dashed line is the error of random content tokens."
    return (
        "Learning curves. Thick lines are means over the scored runs of an arm, thin lines are runs, and bands are one "
        "standard error of the mean to each side. A run that a rule stopped keeps its last value in the mean, and a "
        f"cross marks its end. Step 0 is before the first update.{line}"
    )


def _describe_curves(curves: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]], results: ToyResults) -> str:
    labels = tables.select_panels(results.frames)
    return " ".join(findings.describe_curves(runs, labels[column]) for column, (runs, _) in curves.items())


CURVES: Section[ToyResults] = Section(
    "curves",
    "Learning curves",
    sentences=lambda results: [] if results.curves else ["No run has written a row yet."],
    figures=(
        Figure("curves", _make_curves_caption, lambda results: results.curves or None, _draw_curves, _describe_curves),
    ),
    files=lambda results: {f"mean_{column}": means for column, (_, means) in results.curves.items()},
)


# ---------------------------------------------------------------------- numbers


def _make_number_tables(results: ToyResults) -> Iterator[Table]:
    (family,) = results.frames.families
    captions = {column.name: f"{column.meaning} ({column.unit})" for column in family.trial_columns}
    rows_of_all = _add_differences(results, to_records(results.statistics))
    for key, rows in groupby(rows_of_all, key=itemgetter("column")):
        key_rows = list(rows)
        yield Table(_make_number_columns(key_rows, key), key_rows, title=f"`{key}`", caption=captions[key])


def _make_number_columns(rows: Sequence[Row], key: str) -> list[TableColumn]:
    def format_number(value: float) -> str:
        return format_ordinary(value, key)

    result = [
        name("arm"),
        number("mean", "mean", format_number),
        number("standard\nerror", "standard_error", format_number),
        number("standard\ndeviation", "standard_deviation", format_number),
        TableColumn(
            "n", lambda row: f"{row['n']}" + f" of {row['scored_runs']}" * (row["n"] != row["scored_runs"]), "number"
        ),
    ]
    if any(row["verdict"] for row in rows):
        result += [
            number("minus the\nbaseline", "difference", format_signed_4),
            number("Holm p", "p_holm", format_p),
            TableColumn("verdict", lambda row: format_verdict(row) if row["verdict"] else "", "verdict"),
            text("basis", "basis"),
        ]
    if any(row["missing_seeds"] for row in rows):
        heading = "never reached" if key.startswith("first_step") else "without a value"
        result.append(TableColumn(heading, lambda row: f"seed {row['missing_seeds']}" if row["missing_seeds"] else ""))
    return result


NUMBERS: Section[ToyResults] = Section(
    "numbers",
    "Final numbers",
    sentences=lambda results: [] if len(results.statistics) else ["No scored run has a number."],
    tables=_make_number_tables,
    explanation=_explain_numbers,
    files=lambda results: {"arm_statistics": results.statistics, "differences": results.differences},
)


# ---------------------------------------------------------------------- published numbers


def _make_published_tables(table: pd.DataFrame) -> Iterator[Table]:
    numbers = [
        TableColumn("column", lambda row: f"`{row['column']}`"),
        TableColumn("published", _make_cell_formatter("published_"), "number"),
        TableColumn("ours", _make_cell_formatter(""), "number"),
    ]
    yield Table(
        [
            name("arm"),
            TableColumn("verdict", _format_expectation, "verdict"),
            *numbers,
            TableColumn("ours minus\npublished", _format_published_difference, "number"),
            number("Holm p", "p_holm", format_p),
            text("reason", "reason"),
        ],
        to_records(table[table["kind"] != POOLED]),
    )
    pooled = to_records(table[table["kind"] == POOLED])
    yield Table(
        [name("arm"), numbers[0], text("table", "section"), *numbers[1:]],
        pooled,
        fold=f"All {len(pooled)} pooled cells",
        note="These cells pool the logged rows of all seeds, without a standard deviation over seeds: none is tested.",
    )
    rationales = table[table["rationale"] != ""].groupby(["expected_verdict", "rationale"], sort=False)["arm"]
    yield Table(
        [name("expected", "expected_verdict"), text("arms", "arm"), text("reason", "rationale")],
        to_records(rationales.agg(lambda arms: ", ".join(dict.fromkeys(arms))).reset_index()),
        fold="Expected verdicts, with reasons",
    )


def _make_cell_formatter(prefix: str) -> Callable[[Row], str]:
    def format_cell(row: Row) -> str:
        if row["kind"] == "never" and prefix:
            return f"never\nn {row['published_n']}"
        if not row[f"{prefix}n"]:
            return "–"
        std = row[f"{prefix}std"]
        std_text = "" if is_missing(std) else f"SD {format_ordinary(std, row['column'])}, "
        count = "rows" if row["kind"] == "pooled" else "n"
        return f"{format_ordinary(row[f'{prefix}mean'], row['column'])}\n{std_text}{count} {row[f'{prefix}n']}"

    return format_cell


def _format_published_difference(row: Row) -> str:
    if row["reason"]:
        return "–"
    digits = 1 if row["column"].startswith("first_step") else 4
    interval = format_interval(row["low"], row["high"], lambda value: format_signed(value, digits))
    return f"{format_signed(row['difference'], digits)}\n{interval}".rstrip("\n")


def _format_expectation(row: Row) -> str:
    if row["reason"]:
        return str(row["verdict"])
    expectation = {None: "no expectation", True: "as expected"}.get(row["as_expected"], "not as expected")
    return f"{row['verdict']}\n{expectation}"


def _explain_published(frames: StudyFrames) -> str:
    return (
        f"The published numbers are from {describe_sources(frames)}. Welch's t test compares our seeds with the "
        "published mean, standard deviation (ddof 1) and number of seeds, with Holm's correction over the cells that "
        "are tested here. A standard deviation of 0 is replaced by 0.01, or by the evaluation interval / √12 "
        "if the number is a step. **equal**: two one-sided tests, each at .05 and not corrected, show a difference "
        "below 0.05 (for a step, below one evaluation interval). **open**: neither a difference nor equality is "
        "shown. Expectations were written down before the first run: every verdict is expected to be not "
        "distinguishable, except where a reason is listed."
    )


PUBLISHED: Section[ToyResults] = Section(
    "reproduction",
    "Comparison with published numbers",
    sentences=lambda results: [summarize_verdicts(results.published)],
    tables=lambda results: _make_published_tables(results.published),
    explanation=lambda results: _explain_published(results.frames),
    files=lambda results: {"reproduction": results.published},
    when=lambda results: bool(len(results.published)),
    concludes=True,
)


# ---------------------------------------------------------------------- what was run


def _make_run_tables(results: ToyResults) -> Iterator[Table]:
    columns = tables.list_outcomes(results.frames)
    yield from make_runs_table(
        results.frames, [number(column.replace("_", " "), column, "{:.4f}".format) for column in columns]
    )


def _make_reproduction_tables(results: ToyResults) -> Iterator[Table | Listing]:
    study = results.study
    facts = {"arms": ", ".join(study.axis.values), "stop rules": ", ".join(study.stop_rules) or "none"}
    yield from make_reproduction_tables(results, facts)


def _make_heading(results: ToyResults) -> Heading:
    study = results.study
    statuses = findings.format_status_counts(results.frames.trials)
    over = f"Study **{study.name}** · {tables.get_description(results.frames).label} · {statuses}"
    return Heading(over, study.question or study.name, list_remarks(results.frames))


TOY_REPORT: Report[ToyResults] = Report(
    ToyResults,
    _make_heading,
    (
        VERDICTS,
        SEARCH,
        CONTRASTS,
        CURVES,
        NOTES,
        NUMBERS,
        PUBLISHED,
        Section("runs", "All runs", tables=_make_run_tables),
        Section("reproduce", "Reproduce", sentences=list_command_sentences, tables=_make_reproduction_tables),
    ),
    lambda results: (
        tables.select_primary(results.frames, results.differences)
        .rename(columns={"verdict": "outcome"})
        .reindex(columns=VERDICT_COLUMNS)
    ),
)
"""The report of a study of toy tasks."""
