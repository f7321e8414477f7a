"""The frames of a study: their columns, types, order, files, and equality."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import trainable.sandbox.measure.records as sandbox
from analysis.data.families import FAMILIES, FLOAT, NULLABLE_INT, TEXT, TIME, Schema, TableFamily, get_family
from trainable.runs.links import atomic_write
from trainable.runs.records import TIME_COLUMNS

Study = dict[str, Any]

FRAME_NAMES = ("trials", "steps", "levels", "gradients", "gradient_groups")
SCHEMAS = FAMILIES["ppo"].schemas
"""Columns and types of the frames of a study of language models; other families: `TableFamily.schemas`."""

# Differ between two executions of one run: times, and the name that Ray Tune gave it.
NONDETERMINISTIC_COLUMNS: frozenset[str] = (
    TIME_COLUMNS | {column.name for column in sandbox.TIME_COLUMNS} | {"tokens_per_second", "trial_id"}
)


def make_empty_frame(name: str) -> pd.DataFrame:
    """The frame called `name` without a row, every column in its type."""
    return cast_frame(pd.DataFrame(columns=list(SCHEMAS[name])), SCHEMAS[name])


@dataclass(frozen=True)
class StudyFrames:
    """What a study wrote, as tidy frames.

    trials: one row a run. steps: one row a training step of a run, or an evaluation in the update-rule sandbox. levels:
    one row an episode of an evaluation. gradients: one row a loss component in a bucket of an analysis batch.
    gradient_groups: one row a group of one. Both are empty where no gradients were analysed, and with levels in the
    sandbox.
    study: study.json, or a list of them when several studies were loaded together.
    """

    trials: pd.DataFrame
    steps: pd.DataFrame
    levels: pd.DataFrame
    study: Study | list[Study]
    gradients: pd.DataFrame = field(default_factory=lambda: make_empty_frame("gradients"))
    gradient_groups: pd.DataFrame = field(default_factory=lambda: make_empty_frame("gradient_groups"))

    @property
    def studies(self) -> list[Study]:
        """study.json of each study, always as a list."""
        return self.study if isinstance(self.study, list) else [self.study]

    @property
    def families(self) -> list[TableFamily]:
        """The families of the studies, each once: one, unless studies of several kinds were loaded together."""
        return list({family.name: family for family in map(get_family, self.studies)}.values())

    @cached_property
    def runs(self) -> pd.DataFrame:
        """`trials` without the columns of settings, which are most of them."""
        return self.trials[[name for name in self.trials if not str(name).startswith("config/")]]

    @cached_property
    def steps_by_run(self) -> dict[str, pd.DataFrame]:
        """Rows of `steps` of each run that has some, in their order."""
        return {str(run_id): rows for run_id, rows in self.steps.groupby("run_id", sort=False)}

    def get_run_steps(self, run_id: str) -> pd.DataFrame:
        """Rows of `steps` of one run; none for a run without a step."""
        return self.steps_by_run.get(run_id, self.steps.iloc[:0])

    @cached_property
    def validations(self) -> dict[tuple[str, str], dict[int, pd.DataFrame]]:
        """The first and last validation of each run by (run_id, mode), then by step: (index level; success, cluster).

        The first is that before training, at step 0. The last is the last one no later than the run's last step.
        Made in one pass over `levels`, which has a row an episode: hundreds of thousands in a grid.
        """
        levels = self.levels[self.levels["split"] == "val"]
        steps_done: Any = levels["run_id"].map(self.trials.set_index("run_id")["steps_done"])
        levels = levels[levels["step"] <= steps_done.astype(FLOAT)]
        last_steps = levels.groupby(["run_id", "mode"])["step"].transform("max")
        boundary_rows = levels[(levels["step"] == last_steps) | (levels["step"] == 0)]
        names = ["run_id", "mode", "step"]
        means: Any = boundary_rows.groupby([*names, "level"]).agg(
            success=("success", "mean"), cluster=("cluster", "first")
        )
        rows_by_run_and_mode: dict[tuple[str, str], dict[int, pd.DataFrame]] = {}
        for (run_id, mode, step), rows in means.groupby(level=names, sort=True):
            rows_by_run_and_mode.setdefault((run_id, mode), {})[int(step)] = rows.droplevel(names)
        return rows_by_run_and_mode

    def select_study(self, name: str) -> "StudyFrames":
        """The frames of the study called `name` in the `study` column, without columns of other families."""
        names = [study["name"] for study in self.studies]
        if name not in names:
            raise ValueError(f"There is no study `{name}` here; there are: {', '.join(names)}.")
        study = self.studies[names.index(name)]
        dropped_columns = find_foreign_columns(self.families, get_family(study))
        frames = {part: getattr(self, part).drop(columns=list(dropped_columns[part])) for part in FRAME_NAMES}
        rows = {part: frame[frame["study"] == name].reset_index(drop=True) for part, frame in frames.items()}
        return StudyFrames(**rows, study=study)

    def write_parquet(self, folder: Path | str) -> None:
        """Write every frame to `folder` as <name>.parquet, each beside and then renamed."""
        for frame_name in FRAME_NAMES:
            with atomic_write(Path(folder) / f"{frame_name}.parquet") as temp_path:
                getattr(self, frame_name).to_parquet(temp_path, index=False)


def merge_schemas(families: Iterable[TableFamily], frame_name: str) -> Schema:
    """The columns of all families in the frame called `part`; a name that two share has one type (a test)."""
    return {name: kind for family in families for name, kind in family.schemas[frame_name].items()}


def find_foreign_columns(families: Iterable[TableFamily], target_family: TableFamily) -> dict[str, list[str]]:
    """Of each frame the columns that other families have and `own` does not."""
    all_families = list(families)
    return {
        part: [name for name in merge_schemas(all_families, part) if name not in target_family.schemas[part]]
        for part in FRAME_NAMES
    }


def to_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a frame as dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def cast_frame(frame: pd.DataFrame, schema: Mapping[str, str]) -> pd.DataFrame:
    """`frame` with every column of `schema`, in its type also when all missing; columns beside it come last."""
    columns = {
        name: _cast_column(frame[name], kind) if name in frame else _make_missing_column(frame, kind)
        for name, kind in schema.items()
    }
    extra_columns = {name: _fill_text(frame[name]) for name in frame.columns if name not in schema}
    return pd.DataFrame({**columns, **extra_columns}, index=frame.index).reset_index(drop=True)


def _cast_column(values: Any, dtype: str) -> Any:
    """A pandas Series as `kind`; missing text is empty text."""
    if values.dtype == dtype and not values.hasnans:
        return values
    if dtype == TEXT:
        return values.astype(object).where(values.notna(), "").astype(TEXT)
    if dtype == TIME:
        timestamps = values.astype(object).where(values.notna(), None)
        return pd.to_datetime(timestamps, utc=True, format="ISO8601").astype(TIME)
    if dtype == NULLABLE_INT:
        return values.astype(FLOAT).astype(NULLABLE_INT)
    return values.astype(dtype)


def _make_missing_column(frame: pd.DataFrame, dtype: str) -> Any:
    return _cast_column(pd.Series([None] * len(frame), index=frame.index, dtype=object), dtype)


def _fill_text(values: Any) -> Any:
    """A text column's gaps as empty text; other types keep their own missing value."""
    return _cast_column(values, TEXT) if isinstance(values.dtype, pd.StringDtype) or values.dtype == object else values


def make_setting_column(values: list[Any]) -> Any:
    """One setting of every run as a column: boolean, Int64, float64, or text (lists as JSON) that may be missing."""
    present_values = [value for value in values if value is not None]
    if present_values and all(isinstance(value, bool) for value in present_values):
        return pd.Series(values, dtype="boolean")
    if present_values and all(isinstance(value, int) and not isinstance(value, bool) for value in present_values):
        return pd.Series(values, dtype=NULLABLE_INT)
    if present_values and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in present_values
    ):
        return pd.Series(values, dtype=FLOAT)
    return pd.Series(["" if value is None else str(value) for value in values], dtype=TEXT)


def concat_studies(study_frames: list[StudyFrames]) -> StudyFrames:
    """Several studies as one; where two have the same name, their `study` column and name become the run's name.

    Studies of different families stand below each other: a column that a study's family does not have is missing in
    its rows, and `StudyFrames.one` leaves it out again. One study is itself.
    """
    if len(study_frames) == 1:
        return study_frames[0]
    names = [part.studies[0]["name"] for part in study_frames]
    renamed_studies = [
        _rename_to_run(part) if names.count(name) > 1 else part for part, name in zip(study_frames, names, strict=True)
    ]
    families = [family for part in renamed_studies for family in part.families]
    frames = {
        name: cast_frame(
            pd.concat([getattr(part, name) for part in renamed_studies], ignore_index=True),
            merge_schemas(families, name),
        )
        for name in FRAME_NAMES
    }
    return StudyFrames(**frames, study=[part.studies[0] for part in renamed_studies])


def _rename_to_run(study_frames: StudyFrames) -> StudyFrames:
    study = study_frames.studies[0]
    frames = {name: getattr(study_frames, name).assign(study=study["run"]) for name in FRAME_NAMES}
    return replace(study_frames, **frames, study={**study, "name": study["run"]})


def diff_frames(a: pd.DataFrame, b: pd.DataFrame, ignored_columns: Iterable[str] = ()) -> list[str]:
    """Differences between two frames of one kind as sentences; empty when they are equal bit for bit.

    Times and Ray Tune's id are left out, and so are the columns of `leave_out`. Two missing values are equal.
    """
    skipped_columns = NONDETERMINISTIC_COLUMNS | set(ignored_columns)
    columns_a, columns_b = ([name for name in frame.columns if name not in skipped_columns] for frame in (a, b))
    if columns_a != columns_b:
        return [f"columns differ: {sorted(set(columns_a) ^ set(columns_b)) or 'in order'}"]
    if len(a) != len(b):
        return [f"{len(a)} rows against {len(b)}"]
    differences = (
        _describe_difference(name, a[name].reset_index(drop=True), b[name].reset_index(drop=True)) for name in columns_a
    )
    return [difference for difference in differences if difference]


def _describe_difference(name: str, a: Any, b: Any) -> str:
    if a.dtype != b.dtype:
        return f"{name}: type {a.dtype} against {b.dtype}"
    both_missing = a.isna().to_numpy() & b.isna().to_numpy()
    is_equal = (a == b).fillna(False).to_numpy(dtype=bool) | both_missing
    if is_equal.all():
        return ""
    first_index = int(np.argmin(is_equal))
    return f"{name}: {int((~is_equal).sum())} of {len(a)} rows differ, first {first_index}: {a[first_index]!r} against {b[first_index]!r}"
