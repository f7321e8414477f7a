"""The results of a sweep that take long to compute, shared by the page, its figures and the files beside it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames
from analysis.grid import edge, layout
from analysis.search.page import SearchResults, find_search
from analysis.sweep import symptoms, time_course
from analysis.sweep.symptoms import PERMUTATION_SEED


@dataclass(frozen=True)
class SweepResults:
    """A study of language models, and tables that are computed at their first use and then kept.

    frames: the study.
    """

    frames: StudyFrames

    @cached_property
    def grid(self) -> layout.Grid | None:
        """The grid whose points are the arms; None in a study with one axis, and in a search."""
        return None if self.search else layout.find_grid(self.frames)

    @cached_property
    def search(self) -> SearchResults | None:
        """The search whose points are the arms; None in a study of arms that were chosen beforehand."""
        return find_search(self.frames)

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
