"""What a search came to: its points, the best one, and the importances of its settings."""

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.search.points import CENSORED_POINT, COMPLETE, COST, OPEN, find_best_point, make_points
from analysis.search.trials import Importance, compute_importances, list_pareto_arms
from analysis.sweep import verdicts
from trainable.config.command_lines import format_command
from trainable.runs.study_record import Search

RESAMPLING_SEED = 0


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
    interval = verdicts.format_interval(row["low"], row["high"], verdicts.format_fraction)
    number = f"{verdicts.format_fraction(row['success'])} {interval}".strip()
    return f"{number} over {verdicts.count_nouns(row['seeds'], 'seed')}"


def find_search(frames: StudyFrames) -> SearchResults | None:
    """The search whose points are the arms of a study; None in a study of arms that were chosen beforehand."""
    study = frames.studies[0]
    return SearchResults(frames) if study.search and study.points else None
