"""The sections of a report on a search: its best point, all its points, and the Pareto front."""

import os
from collections.abc import Iterator
from typing import Any

import pandas as pd

from analysis.charts import search as charts
from analysis.data.frames import to_records
from analysis.data.schemas import Row
from analysis.report.common import StudyResults
from analysis.report.section import Figure, Section, Table, TableColumn, format_count, number, text
from analysis.search.points import CENSORED_POINT, OPEN, find_best_point
from analysis.search.trials import list_pareto_arms
from analysis.sweep import verdicts
from trainable.config.command_lines import format_command
from trainable.runs.study_record import Search

_NUM_LEADERS = 10


def _read_search(results: StudyResults) -> tuple[Search, bool]:
    """Return the search, and whether a higher outcome is better."""
    (family,) = results.frames.families
    assert results.search is not None, "the section is about a search"
    return results.search, family.is_higher_better


def describe_search(results: StudyResults) -> str:
    """Describe what a search came to: the best point, the default, and what the numbers are worth."""
    search, is_higher_better = _read_search(results)
    points, best = results.points, find_best_point(results.points, is_higher_better)
    num_ended = int((points["state"] != OPEN).sum())
    is_over = num_ended >= search.num_points
    progress = f"{num_ended} points" if is_over else f"{num_ended} of {search.num_points} points have ended"
    if num_censored := int((points["state"] == CENSORED_POINT).sum()):
        progress += f" ({num_censored} censored by successive halving, without an outcome)"
    num_broken = int((points["violations"] > 0).sum())
    broken = f"at {num_broken} of them a run collapsed or failed" if num_broken else "no run collapsed or failed"
    if best is None:
        return f"{progress}; {broken}. There is no best point yet."
    best_point = "The best of the others" if num_broken else "The best point"
    if best["number"] == 0:
        return f"{progress}; {broken}. {best_point} is the default, {_describe_outcome(best)}."
    settings = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in best["settings"].items())
    # As it is typed in the folder of this process, where the search was started.
    location = os.path.relpath(results.frames.folders[0]) if results.frames.folders else results.study.run
    return (
        f"{progress}; {broken}. {best_point} is {best['arm']} ({settings}), {_describe_outcome(best)} against "
        f"{verdicts.format_fraction(points['success'].iloc[0])} of the default. The best of many points is in part the "
        "luckiest one: its number is too good, and only fresh seeds show by how much "
        f"({format_command('confirm', location, '--arm', best['arm'])})."
    )


def _describe_outcome(row: Row) -> str:
    interval = verdicts.format_interval(row["low"], row["high"], verdicts.format_fraction)
    number = f"{verdicts.format_fraction(row['success'])} {interval}".strip()
    return f"{number} over {verdicts.count_nouns(row['seeds'], 'seed')}"


def make_complete_points(results: StudyResults) -> pd.DataFrame:
    """Make the table of the points with an outcome, with `is_front`: whether a point is in the Pareto front."""
    points = results.complete_points
    return points.assign(is_front=points["arm"].isin(list_pareto_arms(*_read_search(results), points)))


def _make_point_tables(results: StudyResults) -> Iterator[Table]:
    search, is_higher_better = _read_search(results)
    front_arms = list_pareto_arms(search, is_higher_better, results.points)
    order = results.points.assign(rank=results.points["success"].where(results.points["is_feasible"])).sort_values(
        ["rank", "success"], ascending=not is_higher_better, na_position="last", kind="stable"
    )
    settings = dict.fromkeys(dimension.setting for dimension in search.space)
    rows = [{**row, **settings, **row["settings"]} for row in to_records(order)]
    columns = [
        TableColumn("point", lambda row: f"{row['arm']}{' (front)' * (row['arm'] in front_arms)}", "name"),
        text("state", "state"),
        number("outcome", "success", verdicts.format_fraction, ("low", "high")),
        number("seeds", "seeds", str),
        number("collapsed\nor failed", "violations", str),
        number("tokens", "cost", format_count),
        *(number(setting.rpartition(".")[2], setting, str) for setting in settings),
    ]
    yield Table(columns, rows[:_NUM_LEADERS])
    yield Table(columns, rows if len(rows) > _NUM_LEADERS else [], fold=f"All {len(rows)} points")


def make_files(results: StudyResults) -> dict[str, pd.DataFrame]:
    """Make the table of the points with an outcome and the value of each dimension, missing where a point has none."""
    points = results.complete_points.drop(columns="settings")
    names = [dimension.name for dimension in _read_search(results)[0].space]
    rows = [{**row, **row["values"]} for row in to_records(points)]
    return {"search_points": pd.DataFrame(rows, columns=[*points.columns.drop("values"), *names])}


def _explain(results: StudyResults) -> str:
    search, _ = _read_search(results)
    cost = ", and its cost is the mean number of tokens that a run sampled and trained on" * (
        "cost" in search.objectives
    )
    return (
        f"The value of a point is the mean of the study's primary outcome over its seeds{cost}. A point is feasible if "
        "none of its runs collapsed, was stopped by a rule as a failure, or failed. A censored point has no value. "
        f"Optuna's TPE sampler drew {search.points_per_round} points at a time, based on all earlier results."
    )


FIGURES: tuple[Figure[StudyResults], ...] = (
    Figure(
        "search_history",
        "Mean outcome of each point over its seeds, in the order in which points were drawn, with 95 % intervals. The "
        "noise is estimated from all points together. The line shows the best outcome so far without a collapse, the "
        "diamond the default, and a vermilion cross a point at which a run collapsed or failed.",
        make_complete_points,
        lambda table, results: charts.draw_history(table, _read_search(results)[1]),
    ),
    Figure(
        "search_pareto",
        "Outcome against cost, the tokens that a run sampled and trained on. The line is the Pareto front: no other "
        "point has a better outcome at the same or a lower cost.",
        lambda results: table if (table := make_complete_points(results))["is_front"].any() else None,
        lambda table, results: charts.draw_pareto(table),
    ),
)
SEARCH: Section[Any] = Section(
    "search",
    "What the search came to",
    sentences=lambda results: [describe_search(results)],
    figures=FIGURES,
    tables=_make_point_tables,
    explanation=_explain,
    files=make_files,
    when=lambda results: results.search is not None,
    concludes=True,
)
