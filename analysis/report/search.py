"""The section of a report on a search: its best point, the importances of its settings, and its points."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from analysis.charts import search as charts
from analysis.data.frames import to_records
from analysis.report.common import StudyResults
from analysis.report.section import Figure, Section, Table, TableColumn, format_count, number, text
from analysis.search.results import SearchResults, describe_search
from analysis.search.trials import IMPORTANCE_QUANTILE, Importance
from analysis.sweep.verdicts import format_fraction

_NUM_LEADERS = 10


def _require_search(results: StudyResults) -> SearchResults:
    assert results.search is not None, "the section is about a search"
    return results.search


def _list_conclusions(results: StudyResults) -> Iterator[str]:
    search = _require_search(results)
    yield describe_search(search)
    shares = [f"{entry.name} {entry.value:.2f} [{entry.low:.2f}, {entry.high:.2f}]" for entry in search.importances]
    known = f"Shares of the importance, with 90 % intervals: {'; '.join(shares)}."
    yield known if shares else "Importances need at least eight points besides the default."
    yield "By chance alone, one of many points beats the default: only its confirmation on fresh seeds is a test."


def _make_point_tables(results: StudyResults) -> Iterator[Table]:
    search = _require_search(results)
    order = search.points.assign(rank=search.points["success"].where(search.points["is_feasible"])).sort_values(
        ["rank", "success"], ascending=not search.is_higher_better, na_position="last", kind="stable"
    )
    settings = dict.fromkeys(dimension.setting for dimension in search.search.space)
    rows = [{**row, **settings, **row["settings"]} for row in to_records(order)]
    columns = [
        TableColumn("point", lambda row: f"{row['arm']}{' (front)' * (row['arm'] in search.pareto_arms)}", "name"),
        text("state", "state"),
        number("outcome", "success", format_fraction, ("low", "high")),
        number("seeds", "seeds", str),
        number("collapsed\nor failed", "violations", str),
        number("tokens", "cost", format_count),
        *(number(setting.rpartition(".")[2], setting, str) for setting in settings),
    ]
    yield Table(columns, rows[:_NUM_LEADERS])
    yield Table(columns, rows if len(rows) > _NUM_LEADERS else [], fold=f"All {len(rows)} points")


def _make_files(results: StudyResults) -> dict[str, pd.DataFrame]:
    search = _require_search(results)
    return {
        "search_points": search.values.drop(columns=["settings", "values"]),
        "search_importances": pd.DataFrame(search.importances, columns=Importance._fields),
    }


def _explain(results: StudyResults) -> str:
    search = _require_search(results).search
    cost = ", and its cost the mean number of tokens that a run sampled and trained on" * ("cost" in search.objectives)
    return (
        f"The value of a point is the mean of the study's primary outcome over its seeds{cost}. A point is feasible if "
        "none of its runs collapsed, was stopped by a rule as a failure, or failed. A censored point has no value. "
        f"Optuna's TPE sampler drew {search.points_per_round} points at a time from the results of all before."
    )


def _make_values(results: StudyResults) -> pd.DataFrame | None:
    return None if _require_search(results).values.empty else _require_search(results).values


def _make_pareto_table(results: StudyResults) -> pd.DataFrame | None:
    search = _require_search(results)
    is_front = search.complete_points["arm"].isin(search.pareto_arms)
    return search.complete_points.assign(is_front=is_front) if search.pareto_arms else None


FIGURES: tuple[Figure[StudyResults], ...] = (
    Figure(
        "search_history",
        "Outcome of each point in the order of drawing, the mean over its seeds, with 95 % intervals from the noise of "
        "all points together. The line is the best outcome so far without a collapse, a vermilion cross a point at "
        "which a run collapsed or failed.",
        _make_values,
        lambda table, results: charts.draw_history(table, _require_search(results).is_higher_better),
    ),
    Figure(
        "search_importances",
        f"How much each setting matters for being among the best {IMPORTANCE_QUANTILE:.0%} of the points (PED-ANOVA), "
        "as a share of all settings, with 90 % intervals over resampled points.",
        lambda results: _require_search(results).importances or None,
        lambda table, results: charts.draw_importances(table),
    ),
    Figure(
        "search_slices",
        "Outcome of the points against each setting, on the scale on which it was searched. Later points are darker, a "
        "diamond is the default, a cross as above. The sampler prefers good regions, so points are no even sample.",
        _make_values,
        lambda table, results: charts.draw_slices(table, _require_search(results).search.space),
    ),
    Figure(
        "search_parallel",
        "A line per point through its settings, each from its lowest to its highest value, to its outcome. Settings "
        "that a point does not have are left out of its line.",
        _make_values,
        lambda table, results: charts.draw_parallel(
            table, _require_search(results).search.space, _require_search(results).is_higher_better
        ),
    ),
    Figure(
        "search_pareto",
        "Outcome against cost, the tokens that a run sampled and trained on. The line joins the points that no other "
        "one beats in one of them without being worse in the other.",
        _make_pareto_table,
        lambda table, results: charts.draw_pareto(table),
    ),
)
SEARCH: Section[Any] = Section(
    "search",
    "What the search came to",
    sentences=_list_conclusions,
    tables=_make_point_tables,
    explanation=_explain,
    files=_make_files,
    when=lambda results: results.search is not None,
    concludes=True,
)
SEARCH_FIGURES: Section[Any] = Section(
    "points", "Points and settings", figures=FIGURES, when=lambda results: results.search is not None
)
