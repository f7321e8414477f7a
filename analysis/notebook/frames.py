"""`NotebookFrames`: the frames of a study with charts and single runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.data import load as loading
from analysis.data.compare import list_arms
from analysis.data.frames import StudyFrames
from analysis.data.tune_results import read_results
from trainable.config.aliases import shorten_setting
from trainable.runs.study_record import STUDY_FILE

if TYPE_CHECKING:
    from analysis.notebook.plots import StudyPlots
    from trainable.ppo.trainer import PPOTrainer


@dataclass(frozen=True, repr=False)
class NotebookFrames(StudyFrames):
    """`StudyFrames` with `plot`, for charts, and `run`, for one run."""

    @property
    def plot(self) -> "StudyPlots":
        """Interactive charts: `plot.dose_response()`, `plot.curves("entropy")`, `plot.survival()`."""
        from analysis.notebook.plots import StudyPlots  # libraries of charts take a second to load

        return StudyPlots(self)

    def run(self, name: str | float, seed: int | None = None) -> "StudyRun":
        """One run of an arm, named "0.1", 0.1 or "KL 0.1", or by its id. seed: None for the smallest of the arm.

        Raises ValueError that lists the arms or seeds if there is no such run, or if several studies have one.

        >>> run = load("out/results/kl_sweep_sokoban-tiny").run("0.1")  # doctest: +SKIP
        >>> run.steps["entropy"].iloc[-1], run.restore().evaluate("val", "greedy").success  # doctest: +SKIP
        """
        labels = self.runs["axis_setting"].map(shorten_setting) + " " + self.runs["arm"]
        is_named = (self.runs["arm"] == name) | (self.runs["run_id"] == name) | (labels == name)
        runs = self.runs[is_named if isinstance(name, str) else self.runs["axis_value"] == name]
        if runs.empty:
            raise ValueError(f"There is no arm `{name}` here. Choose one of: {', '.join(list_arms(self))}.")
        if runs["study"].nunique() > 1:
            studies = ", ".join(runs["study"].unique())
            raise ValueError(f"Several studies have an arm `{name}`: use select_study with one of {studies} first.")
        rows = runs.sort_values("seed") if seed is None else runs[runs["seed"] == seed]
        if rows.empty:
            seeds = ", ".join(map(str, sorted(runs["seed"])))
            raise ValueError(f"`{name}` has no seed {seed}. Choose one of: {seeds}.")
        return StudyRun(self, str(rows["run_id"].iloc[0]), str(rows["arm"].iloc[0]), int(rows["seed"].iloc[0]))


@dataclass(frozen=True)
class StudyRun:
    """One run of a study, with its rows of each frame. frames: the study."""

    frames: StudyFrames
    run_id: str
    arm: str
    seed: int

    def __repr__(self) -> str:
        """The run with its status, without the rows."""
        reason = f" ({self.trial['reason']})" if self.trial["reason"] else ""
        return f"StudyRun {self.arm}, seed {self.seed}: {self.trial['status']}{reason}"

    @property
    def trial(self) -> "pd.Series[object]":
        """The row of `runs`."""
        return self.frames.runs.set_index("run_id").loc[self.run_id]

    @property
    def settings(self) -> "pd.Series[object]":
        """The settings, by section and name."""
        return self.frames.settings.loc[self.run_id]

    @property
    def steps(self) -> pd.DataFrame:
        """The rows of `steps`, one per training step."""
        return self._select(self.frames.steps)

    @property
    def levels(self) -> pd.DataFrame:
        """The rows of `levels`, one per evaluated episode."""
        return self._select(self.frames.levels)

    @property
    def episodes(self) -> pd.DataFrame:
        """The rows of `episodes`, one per recorded validation episode, with its text."""
        return self._select(self.frames.episodes)

    @property
    def trained_episodes(self) -> pd.DataFrame:
        """The rows of `trained_episodes`, one per recorded episode that a step trained on, with its advantage."""
        return self._select(self.frames.trained_episodes)

    def restore(
        self,
        step: int | None = None,
        *,
        settings: Mapping[str, object] = MappingProxyType({}),
        study: str | None = None,
        code: Sequence[str] = (),
        allow: Sequence[str] = (),
    ) -> "PPOTrainer":
        """Restore the trainer from a checkpoint of the run, as `tune_study.probe.restore` does.

        step: of the checkpoint; None for the newest. settings: dotted settings to change, such as {"trainer.device":
        "cpu"}. study: the file that declares the study, such as "lr.py"; None for a study of this package. code: the
        files whose parts the study uses, such as ["my_loss.py"]. allow: what the folder of somebody else names outside
        of it and may be used, as the error prints it.

        Raises ValueError if the frames were not loaded from a folder, or if there is no such checkpoint.
        """
        from tune_study.commands import probe  # it needs torch, and frames do not

        if not self.frames.folders:
            raise ValueError("These frames were not loaded from a folder: use analysis.load.")
        folder = next(
            folder
            for folder, entry in zip(self.frames.folders, self.frames.studies, strict=True)
            if entry.name == self.trial["study"]
        )
        return probe.restore(folder, self.run_id, step, settings=settings, study=study, code=code, allow=allow)

    def _select(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["run_id"] == self.run_id].reset_index(drop=True)


def load(results: Any, *, live: bool = False, baseline: str | None = None) -> NotebookFrames:
    """Load all studies below a folder, as `analysis.data.load.load` does, with charts and runs.

    results: the folder, or a `ray.tune.ResultGrid` (`analysis.data.tune_results.read_results`). baseline: of a grid
    without a study, the arm with which the others are compared.
    """
    path = getattr(results, "experiment_path", results)  # of a grid that the command line made, which has a study.json
    is_study = path is results or Path(path, STUDY_FILE).exists()
    frames = loading.load(path, live=live) if is_study else read_results(results, baseline)
    return NotebookFrames(**{field.name: getattr(frames, field.name) for field in fields(frames)})
