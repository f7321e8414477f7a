"""The results of a sweep that several sections of its report share, computed at their first use and then kept."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.charts.chart import make_arm_colors
from analysis.data.compare import list_arms
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.data.summaries import LATE_EVALUATIONS
from analysis.grid import edge, factors, layout
from analysis.report.common import StudyResults
from analysis.sweep import findings, symptoms, tables, time_course
from analysis.sweep.collapse import count_collapses
from analysis.sweep.symptoms import PERMUTATION_SEED


@dataclass(frozen=True)
class SweepResults(StudyResults):
    """A study of language models."""

    @cached_property
    def grid(self) -> layout.Grid | None:
        """The grid whose points are the arms; None in a study with one axis, and in a search."""
        return None if self.search else layout.find_grid(self.frames)

    @property
    def known_grid(self) -> layout.Grid:
        """The grid of a study that has one."""
        assert self.grid is not None, "only sections of grids need one"
        return self.grid

    @property
    def is_axis(self) -> bool:
        """Whether the arms are values of one axis, and a run is recorded."""
        return not (self.grid or self.search or self.frames.trials.empty)

    @cached_property
    def labels(self) -> dict[str, str]:
        """The name of each arm of a grid by its point."""
        return layout.make_arm_labels(self.frames, self.grid) if self.grid and self.has_labels else {}

    @cached_property
    def arm_frames(self) -> StudyFrames:
        """The study, with the arms of a grid named by their points."""
        return layout.rename_arms(self.frames, self.labels)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """From `tables.summarize_arms` for `arm_frames`: one row per arm."""
        return tables.summarize_arms(self.arm_frames)

    @cached_property
    def arms(self) -> list[Row]:
        """The rows of `summary`. In a search they are complete points: of a censored one the good runs are left."""
        rows = to_records(self.summary)
        if self.search:
            return [row for row in rows if row["arm"] in set(self.complete_points["arm"])]
        return rows

    @property
    def late_name(self) -> str:
        """What `late_val_success` is: the last validation, or the mean of the last few."""
        count = min(findings.count_validations(self.study) or LATE_EVALUATIONS, LATE_EVALUATIONS)
        return "the last validation" if count == 1 else f"mean of the last {count} validations"

    @cached_property
    def collapses(self) -> pd.DataFrame:
        """From `collapse.count_collapses` for `arm_frames`."""
        return count_collapses(self.arm_frames)

    @property
    def has_collapse(self) -> bool:
        """Whether a run collapsed."""
        return bool((self.collapses["collapsed"] > 0).any())

    @cached_property
    def collapse_times(self) -> pd.DataFrame:
        """From `time_course.summarize_collapse`: one row per arm."""
        return time_course.summarize_collapse(self.frames, np.random.default_rng(PERMUTATION_SEED))

    @cached_property
    def learning_curves(self) -> pd.DataFrame:
        """From `time_course.summarize_curves`: one row per arm and cost."""
        return time_course.summarize_curves(self.frames, np.random.default_rng(PERMUTATION_SEED))

    @cached_property
    def onsets(self) -> pd.DataFrame:
        """From `symptoms.find_collapse_onsets`: one row per run and symptom, if a run collapsed."""
        return symptoms.find_collapse_onsets(self.frames, np.random.default_rng(PERMUTATION_SEED))

    @cached_property
    def edge_tables(self) -> dict[str, pd.DataFrame]:
        """Edges, their shifts, and the counts behind them, by file name; none for a study without a dose."""
        runs = edge.make_run_table(self.frames)
        if runs.empty:
            return {}
        return {
            "edge": edge.summarize_edges(self.frames),
            "edge_shifts": edge.compare_edges(self.frames, np.random.default_rng(PERMUTATION_SEED)),
            "edge_doses": edge.summarize_doses(runs),
        }

    @cached_property
    def dose_response(self) -> pd.DataFrame:
        """From `tables.make_dose_response`: one row per arm of a study with one axis."""
        return tables.make_dose_response(self.frames, self.summary)

    @cached_property
    def members(self) -> pd.DataFrame:
        """From `layout.make_member_table`: one row per run and panel of a grid."""
        return layout.make_member_table(self.frames, self.known_grid)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """From `layout.make_cell_table`: one row per panel and point of a grid."""
        return layout.make_cell_table(self.known_grid, self.members)

    @cached_property
    def factor_grid(self) -> factors.FactorGrid | None:
        """From `factors.make_factor_grid`: the outcomes over all combinations of the declared factors, if any."""
        return factors.make_factor_grid(self.frames)

    @cached_property
    def line_frames(self) -> StudyFrames:
        """The frames whose arms are lines: the panels of a grid, because a line per point would be hundreds."""
        if not self.grid:
            return self.frames
        # A run without a KL loss is a member of several panels, but an arm needs one name.
        home_rows = self.members[self.members["home"]]
        return layout.rename_arms(self.frames, dict(zip(home_rows["arm"], home_rows["panel"], strict=True)))

    @cached_property
    def arm_colors(self) -> dict[str, str]:
        """The color of each arm, in the order of the axis; words such as nofilter have colors of their own."""
        if not self.is_axis:
            return make_arm_colors(list_arms(self.frames))
        table = self.dose_response
        return make_arm_colors(table["arm"].to_list(), table.loc[table["is_word"], "arm"].to_list())

    @cached_property
    def line_colors(self) -> dict[str, str]:
        """The color of each arm of `line_frames`."""
        return make_arm_colors(list_arms(self.line_frames)) if self.grid else self.arm_colors

    def fold(self, title: str) -> str:
        """Return the line under which a table with a row per arm is folded; empty where there are few arms."""
        return title if self.grid or self.search else ""
