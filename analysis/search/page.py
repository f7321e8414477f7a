"""The section of the report on a search: its best point, its importances, and its figures."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.html.figures import ReportFigure
from analysis.search import plots
from analysis.search.points import CENSORED_POINT, COMPLETE, COST, OPEN, find_best_point, make_points
from analysis.search.trials import IMPORTANCE_QUANTILE, Importance, compute_importances, list_pareto_arms
from analysis.sweep import verdicts
from trainable.config.command_lines import format_command
from trainable.runs.study_record import Search

RESAMPLING_SEED = 0
_NUM_LEADERS = 10


@dataclass(frozen=True)
class SearchResults:
    """A search, and what its section shows. frames: of a study with `search` in its study.json."""

    frames: StudyFrames

    @property
    def search(self) -> Search:
        """The search in study.json: its space and objectives."""
        (study,) = self.frames.studies
        assert study.search is not None, "only a search has results"
        return study.search

    @property
    def is_higher_better(self) -> bool:
        """Of the primary outcome."""
        (family,) = self.frames.families
        return family.is_higher_better

    @cached_property
    def points(self) -> pd.DataFrame:
        """From `points.make_points`."""
        return make_points(self.frames)

    @cached_property
    def complete_points(self) -> pd.DataFrame:
        """The points with an outcome."""
        return self.points[self.points["state"] == COMPLETE]

    @cached_property
    def best(self) -> Row | None:
        """The best point; None if none is feasible."""
        return find_best_point(self.points, self.is_higher_better)

    @cached_property
    def importances(self) -> list[Importance]:
        """From `trials.compute_importances`."""
        generator = np.random.default_rng(RESAMPLING_SEED)
        return compute_importances(self.search, self.points, self.is_higher_better, generator)

    @cached_property
    def pareto_arms(self) -> list[str]:
        """The points of the Pareto front of success and cost; none in a family without cost."""
        if self.complete_points[COST].isna().any() or not self.complete_points["is_feasible"].any():
            return []
        return list_pareto_arms(self.search, self.complete_points, self.is_higher_better)

    @cached_property
    def values(self) -> pd.DataFrame:
        """Outcome of each complete point, and its values by the name of the dimension; missing where it has none."""
        rows = [{**row, **row["values"]} for row in to_records(self.complete_points)]
        return pd.DataFrame(rows, columns=[*self.complete_points.columns, *(entry.name for entry in self.search.space)])


def describe_search(results: SearchResults) -> str:
    """What a search came to, as a paragraph: the best point, the default, and what the numbers are worth."""
    points, study = results.points, results.frames.studies[0]
    num_planned = results.search.num_points
    num_ended = int((points["state"] != OPEN).sum())
    num_broken = int((points["violations"] > 0).sum())
    progress = f"{num_ended} of {num_planned} points have ended" if num_ended < num_planned else f"{num_ended} points"
    num_censored = int((points["state"] == CENSORED_POINT).sum())
    if num_censored:
        progress += f" ({num_censored} censored by successive halving, which have no outcome)"
    broken = f"at {num_broken} of them a run collapsed or failed" if num_broken else "no run collapsed or failed"
    best, default = results.best, to_records(points.iloc[:1])[0]
    if best is None:
        return f"{progress}; {broken}. There is no best point yet."
    condition = " at which none did" if num_broken else ""
    if best["number"] == 0:
        return f"{progress}; {broken}. The best point{condition} is the default, {_describe_outcome(best)}."
    settings = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in best["settings"].items())
    # As it is typed in the folder of this process, where the search was started.
    location = os.path.relpath(results.frames.folders[0]) if results.frames.folders else study.run
    command = format_command("confirm", location, "--arm", best["arm"])
    return (
        f"{progress}; {broken}. The best point{condition} is {best['arm']} ({settings}), {_describe_outcome(best)} "
        f"against {verdicts.format_fraction(default['success'])} of the default. The best of many points is in part "
        f"the luckiest one: its number is too good, and only fresh seeds say by how much ({command})."
    )


def _describe_outcome(row: Row) -> str:
    number = f"{verdicts.format_fraction(row['success'])} {verdicts.format_bounds(row['low'], row['high'])}".strip()
    return f"{number} over {verdicts.count_nouns(row['seeds'], 'seed')}"


def make_context(results: SearchResults) -> dict[str, Any]:
    """The template context of the section."""
    points = results.points
    order = points.assign(rank=points["success"].where(points["is_feasible"])).sort_values(
        ["rank", "success"], ascending=not results.is_higher_better, na_position="last", kind="stable"
    )
    settings = list(dict.fromkeys(dimension.setting for dimension in results.search.space))
    return {
        "sentence": describe_search(results),
        "settings": [name.rpartition(".")[2] for name in settings],
        "leaders": [
            {**row, "values": [row["settings"].get(name, "–") for name in settings]} for row in to_records(order)
        ],
        "shown": _NUM_LEADERS,
        "importances": results.importances,
        "pareto": results.pareto_arms,
        "objectives": results.search.objectives,
        "points_per_round": results.search.points_per_round,
    }


def make_tables(results: SearchResults) -> Sequence[tuple[str, pd.DataFrame]]:
    """The tables that are also written as files: the points, and the importances."""
    importances = pd.DataFrame(results.importances, columns=Importance._fields)
    return [("search_points", results.values.drop(columns=["settings", "values"])), ("search_importances", importances)]


def _make_values(view: Any) -> pd.DataFrame | None:
    return view.search.values if view.search and len(view.search.values) else None


def _make_pareto_table(view: Any) -> pd.DataFrame | None:
    if not (view.search and view.search.pareto_arms):
        return None
    points = view.search.complete_points
    return points.assign(is_front=points["arm"].isin(view.search.pareto_arms))


FIGURES: Sequence[ReportFigure[Any]] = (
    ReportFigure(
        "search_history",
        "search",
        "Outcome of each point in the order in which the points were drawn, the mean over its seeds, with 95 % "
        "intervals whose noise is estimated from all points together. The line is the best outcome so far without a "
        "collapse. A vermilion cross marks a point at which a run collapsed or failed.",
        _make_values,
        lambda table, view: plots.draw_history(table, view.search.is_higher_better),
    ),
    ReportFigure(
        "search_importances",
        "search",
        f"How much each setting matters for being among the best {IMPORTANCE_QUANTILE:.0%} of the points (PED-ANOVA), "
        "as a share of all settings. Lines are 90 % intervals over resampled points: they say how much depends on the "
        "points that happened to be drawn.",
        lambda view: (view.search and view.search.importances) or None,
        lambda table, view: plots.draw_importances(table),
    ),
    ReportFigure(
        "search_slices",
        "search",
        "Outcome of the points against each setting, on the scale on which it was searched. Later points are darker. A "
        "diamond is the default; a cross as above. The sampler prefers good regions, so points are no even sample.",
        _make_values,
        lambda table, view: plots.draw_slices(table, view.search.search.space),
    ),
    ReportFigure(
        "search_parallel",
        "search",
        "A line per point through its settings to its outcome. Settings that a point does not have are left out of its "
        "line. The best quarter is dark; points at which a run collapsed or failed are vermilion.",
        _make_values,
        lambda table, view: plots.draw_parallel(table, view.search.search.space, view.search.is_higher_better),
    ),
    ReportFigure(
        "search_pareto",
        "search",
        "Outcome against cost, the tokens that a run sampled and trained on. The line joins the points that no other "
        "one beats in one of them without being worse in the other.",
        _make_pareto_table,
        lambda table, view: plots.draw_pareto(table),
    ),
)
"""The figures of a view with `search`: its SearchResults, or None in a study that is no search, which has none."""


def find_search(frames: StudyFrames) -> SearchResults | None:
    """The search whose points are the arms of a study; None in a study of arms that were chosen beforehand."""
    study = frames.studies[0]
    return SearchResults(frames) if study.search and study.points else None
