"""`StudyFrames`: the results of a study as typed tables, and functions to combine, write and compare them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.episodes import read_episodes_frame
from analysis.data.schemas import BOOL, CATEGORY, FLOAT, INT, NULLABLE_INT, TEXT, TIME, Schema, get_family, get_schemas
from trainable.families import Family
from trainable.files.paths import atomic_write
from trainable.runs.records import TIME_COLUMNS, TOY_TIME_COLUMNS
from trainable.runs.study_record import StudyRecord

CONFIG_PREFIX = "config/"
"""Prefix of the columns of `trials` that hold settings."""
FRAME_NAMES = ("trials", "steps", "levels", "gradients", "gradient_groups")
SCHEMAS = get_schemas("ppo")
"""Columns and types of the frames of a PPO study; for other families see `Family.schemas`."""

# Columns that differ between two executions of the same run: times, and the trial name drawn by Ray Tune.
NONDETERMINISTIC_COLUMNS: frozenset[str] = (
    TIME_COLUMNS | {column.name for column in TOY_TIME_COLUMNS} | {"tokens_per_second", "trial_id"}
)


def make_empty_frame(name: str) -> pd.DataFrame:
    """Make an empty frame with the columns and types of the frame `name`, one of `FRAME_NAMES`."""
    return cast_frame(pd.DataFrame(columns=list(SCHEMAS[name])), SCHEMAS[name])


@dataclass(frozen=True, repr=False)
class StudyFrames:
    """The results of one or several studies as tidy frames."""

    trials: pd.DataFrame
    """One row per run."""
    steps: pd.DataFrame
    """One row per training step of a run; in the update-rule sandbox, one row per evaluation."""
    levels: pd.DataFrame
    """One row per evaluated episode. Empty in the sandbox."""
    study: StudyRecord | list[StudyRecord]
    """study.json, or a list of them if several studies were loaded together."""
    gradients: pd.DataFrame = field(default_factory=lambda: make_empty_frame("gradients"))
    """One row per loss component and bucket of an analysis batch. Empty if no gradients were analyzed."""
    gradient_groups: pd.DataFrame = field(default_factory=lambda: make_empty_frame("gradient_groups"))
    """One row per group of an analysis batch. Empty if no gradients were analyzed."""
    folders: tuple[Path, ...] = ()
    """The results/<run> folder of each study, in the order of `studies`; empty if the frames were not loaded."""

    def __repr__(self) -> str:
        """Summarize the studies with their numbers of runs, and the size of each frame."""
        studies = ", ".join(
            f"{study.name} ({(self.trials['study'] == study.name).sum()} runs)" for study in self.studies
        )
        sizes = ", ".join(f"{name} {len(getattr(self, name))}" for name in FRAME_NAMES)
        return f"StudyFrames of {studies}; rows: {sizes}"

    def _repr_html_(self) -> str:
        """The same for a notebook: a table of the studies, and the names of all tables with their numbers of rows."""
        rows = [
            (study.name, study.preset, (self.trials["study"] == study.name).sum(), study.question)
            for study in self.studies
        ]
        studies = pd.DataFrame(rows, columns=["study", "preset", "runs", "question"])
        sizes = ", ".join(f"<code>{name}</code> {len(getattr(self, name)):,}" for name in FRAME_NAMES)
        return f"{studies.to_html(index=False, border=0)}<p>Rows: {sizes}.</p>"

    @property
    def studies(self) -> list[StudyRecord]:
        """study.json of each study, as a list even for a single study."""
        return self.study if isinstance(self.study, list) else [self.study]

    @property
    def families(self) -> list[Family]:
        """The distinct families of the studies: more than one only if such studies were loaded together."""
        return list({family.name: family for family in map(get_family, self.studies)}.values())

    @property
    def has_symptoms(self) -> bool:
        """Whether all studies fine-tune language models, with this project's trainer or with another one."""
        return all(family.has_symptoms for family in self.families)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """`trials` without the columns of settings, which are the great majority."""
        return self.trials[[name for name in self.trials if not str(name).startswith(CONFIG_PREFIX)]]

    @cached_property
    def run_digests(self) -> dict[str, dict[str, int]]:
        """A hash for each run_id and measured column; equal hashes mean that all values are equal to the last bit.

        Times and names of runs are left out.
        """
        left_out = {"run_id", "study", "arm", *NONDETERMINISTIC_COLUMNS}
        places = self.steps.groupby("run_id", sort=False, observed=True).indices
        digests: dict[str, dict[str, int]] = {str(run_id): {} for run_id in places}
        # The factors are odd, so no hash is lost, and differ from row to row, so that the order counts.
        factors = np.arange(1, 2 * len(self.steps) + 1, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for name in self.steps.columns.difference(sorted(left_out)):
            is_measured = self.steps[name].notna().to_numpy()
            hashes = pd.util.hash_pandas_object(self.steps[name], index=False).to_numpy()
            for run_id, rows in places.items():
                if is_measured[rows].any():
                    digests[str(run_id)][str(name)] = int((hashes[rows] * factors[: len(rows)]).sum())
        return digests

    @cached_property
    def runs_by_arm(self) -> dict[str, pd.DataFrame]:
        """Rows of `runs` by arm."""
        return {str(arm): rows for arm, rows in self.runs.groupby("arm", sort=False)}

    @cached_property
    def settings(self) -> pd.DataFrame:
        """The settings of each run, by run_id. The columns have two levels, section and name, such as ("actor", "lr").

        Settings outside a section have the section "". In `trials` the same columns are named `config/actor.lr`.
        """
        names = [str(name) for name in self.trials if str(name).startswith(CONFIG_PREFIX)]
        keys = [name.removeprefix(CONFIG_PREFIX).rpartition(".") for name in names]
        columns = pd.MultiIndex.from_tuples([(key[0], key[2]) for key in keys], names=["section", "setting"])
        return self.trials.set_index("run_id")[names].set_axis(columns, axis="columns")

    @cached_property
    def episodes(self) -> pd.DataFrame:
        """One row per recorded validation episode, with its text (see `read_episodes_frame`). Read at first use.

        Frames that were not loaded from a folder have none.
        """
        return read_episodes_frame(zip(self.folders, self.studies, strict=bool(self.folders)))

    @cached_property
    def trained_episodes(self) -> pd.DataFrame:
        """One row per recorded episode that a step trained on, with its advantage, as in `episodes`. Read at first use.

        Needs the setting `trainer.log_train_generations`.
        """
        return read_episodes_frame(zip(self.folders, self.studies, strict=bool(self.folders)), is_trained=True)

    @cached_property
    def steps_by_run(self) -> dict[str, pd.DataFrame]:
        """Rows of `steps` by run_id. Runs without a row have no entry."""
        return {str(run_id): rows for run_id, rows in self.steps.groupby("run_id", sort=False)}

    def get_run_steps(self, run_id: str) -> pd.DataFrame:
        """Return the rows of `steps` of one run; empty for a run without a step."""
        return self.steps_by_run.get(run_id, self.steps.iloc[:0])

    def select_study(self, name: str) -> "StudyFrames":
        """Select the frames of one study, without columns that only other families have.

        name: the study's value in the `study` column. ValueError if no study has it.
        """
        names = [study.name for study in self.studies]
        if name not in names:
            raise ValueError(f"There is no study `{name}` here. Choose one of: {', '.join(names)}.")
        place = names.index(name)
        study = self.studies[place]
        schemas = get_schemas(get_family(study).name)
        rows = {}
        for frame_name in FRAME_NAMES:
            foreign_columns = merge_schemas(self.families, frame_name).keys() - schemas[frame_name].keys()
            frame = getattr(self, frame_name).drop(columns=list(foreign_columns))
            rows[frame_name] = frame[frame["study"] == name].reset_index(drop=True)
        return replace(self, **rows, study=study, folders=self.folders[place : place + 1])

    def write_parquet(self, folder: Path | str) -> None:
        """Write every frame to `folder` as <name>.parquet, each with an atomic rename."""
        for frame_name in FRAME_NAMES:
            with atomic_write(Path(folder) / f"{frame_name}.parquet") as temp_path:
                getattr(self, frame_name).to_parquet(temp_path, index=False)


def list_differing_settings(trials: pd.DataFrame) -> list[str]:
    """List the settings in which runs differ, without the seed."""
    names = [name.removeprefix(CONFIG_PREFIX) for name in map(str, trials) if name.startswith(CONFIG_PREFIX)]
    # As text, since the values of a column may have several types. A missing value, such as of a null, is a value, too.
    texts = {name: trials[CONFIG_PREFIX + name].astype("str") for name in names if name != "seed"}
    return [name for name, values in texts.items() if values.nunique(dropna=False) > 1]


def merge_schemas(families: Iterable[Family], frame_name: str) -> Schema:
    """Merge the columns of all families in one frame. A test ensures that a shared name has the same type."""
    return {name: kind for family in families for name, kind in get_schemas(family.name)[frame_name].items()}


def to_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert the rows of a frame to dictionaries."""
    if frame.empty:  # pandas takes a millisecond even for an empty frame, and a report asks for every arm
        return []
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


_DTYPES = {kind: pd.api.types.pandas_dtype(kind) for kind in (CATEGORY, FLOAT, INT, NULLABLE_INT, BOOL, TEXT, TIME)}
"""Column types as dtype objects. From a name, pandas would parse the type at each comparison, for hundreds of
columns."""


_OBJECT = np.dtype(object)


def cast_frame(frame: pd.DataFrame, schema: Mapping[str, str]) -> pd.DataFrame:
    """Cast every column of `schema` to its type, adding missing ones. Other columns come last."""
    series = dict(frame.items())
    # All missing columns of a type share one Series: short studies lack most columns.
    missing_values = pd.Series([None] * len(frame), index=frame.index, dtype=object)
    missing_kinds = {kind for name, kind in schema.items() if name not in series}
    missing_columns = {kind: _cast_column(missing_values, kind) for kind in missing_kinds}
    columns = {
        name: _cast_column(series[name], kind) if name in series else missing_columns[kind]
        for name, kind in schema.items()
    }
    # Text without missing values; other types keep them. Compared with the dtype object: for the name "object", pandas
    # would first look for an extension type.
    extra_columns = {
        name: _cast_column(values, TEXT)
        if isinstance(values.dtype, pd.StringDtype) or values.dtype == _OBJECT
        else values
        for name, values in series.items()
        if name not in schema
    }
    return pd.DataFrame({**columns, **extra_columns}, index=frame.index).reset_index(drop=True)


def _cast_column(values: Any, dtype: str) -> Any:
    """Cast a Series to `dtype`; missing text becomes empty text."""
    if dtype == CATEGORY:  # sorted texts
        is_category = isinstance(values.dtype, pd.CategoricalDtype)
        if is_category and not values.hasnans and values.cat.categories.dtype == _DTYPES[TEXT]:
            return values.cat.reorder_categories(sorted(values.cat.categories))
        return _cast_column(values, TEXT).astype(CATEGORY)
    # A column of the right type is not copied, since frames can be large. Missing text must still be filled.
    if values.dtype == _DTYPES[dtype] and not values.hasnans:
        return values
    if dtype == TEXT:
        return values.astype(object).where(values.notna(), "").astype(_DTYPES[TEXT])
    if dtype == TIME:
        timestamps = values.astype(object).where(values.notna(), None)
        return pd.to_datetime(timestamps, utc=True, format="ISO8601").astype(_DTYPES[TIME])
    if dtype == NULLABLE_INT:
        # An object column that contains None converts to float first, and only then to Int64.
        return values.astype(_DTYPES[FLOAT]).astype(_DTYPES[NULLABLE_INT])
    return values.astype(_DTYPES[dtype])


def make_setting_column(values: list[Any]) -> Any:
    """Convert the values of one setting to an array: boolean, Int64 or float64 if every value fits, otherwise text.

    A missing value (None) stays missing, or becomes empty text. Lists must already be JSON text.
    """
    # bool is a subclass of int in Python: it comes first, or True and 1 would share a numeric column.
    order = (bool, int, float, object)
    kinds = {next(kind for kind in order if isinstance(value, kind)) for value in values if value is not None}
    if kinds == {bool}:
        return pd.array(values, dtype="boolean")
    if kinds == {int}:
        return pd.array(values, dtype=_DTYPES[NULLABLE_INT])
    if kinds in ({float}, {int, float}):
        return np.array([np.nan if value is None else value for value in values], dtype=FLOAT)
    return pd.array(["" if value is None else str(value) for value in values], dtype=_DTYPES[TEXT])


def concat_studies(study_frames: list[StudyFrames]) -> StudyFrames:
    """Concatenate studies, also of different families: columns that a study's family lacks are missing in its rows.

    Studies that share a name are renamed to the name of their run folder, or to the path below their common parent if
    their folders share a name too. So two executions of one study stay distinct in the column `study`. A single study
    is returned unchanged.
    """
    if len(study_frames) == 1:
        return study_frames[0]
    names = _list_names(study_frames)
    families = [family for frames in study_frames for family in frames.families]
    merged_frames = {}
    for frame_name in FRAME_NAMES:
        renamed = [
            getattr(frames, frame_name).assign(study=name) for frames, name in zip(study_frames, names, strict=True)
        ]
        merged = pd.concat(renamed, ignore_index=True)
        merged_frames[frame_name] = cast_frame(merged, merge_schemas(families, frame_name))
    studies = [replace(frames.studies[0], name=name) for frames, name in zip(study_frames, names, strict=True)]
    folders = tuple(folder for frames in study_frames for folder in frames.folders)
    return StudyFrames(**merged_frames, study=studies, folders=folders)


def _list_names(study_frames: Sequence[StudyFrames]) -> list[str]:
    """Choose distinct names for studies: the study's name, its folder's name, its path, or a name with a number."""
    # A confirmation shares its study's name and run, and differs only in its folder.
    folders = [frames.folders[0] if frames.folders else Path(frames.studies[0].run) for frames in study_frames]
    loaded_parents = {frames.folders[0].parent for frames in study_frames if frames.folders}
    parent = Path(os.path.commonpath(loaded_parents)) if loaded_parents else Path()
    paths = [str(path.relative_to(parent)) if path.is_relative_to(parent) else path.name for path in folders]
    names = [frames.studies[0].name for frames in study_frames]
    for other_names in ([path.name for path in folders], paths):
        names = [other if names.count(name) > 1 else name for name, other in zip(names, other_names, strict=True)]
    # The same study loaded twice.
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def diff_frames(a: pd.DataFrame, b: pd.DataFrame, ignored_columns: Iterable[str] = ()) -> list[str]:
    """Describe the differences between two frames of the same kind in sentences; empty if they are bitwise equal.

    Ignores times, the id drawn by Ray Tune, and `ignored_columns`. Two missing values are equal.
    """
    skipped_columns = NONDETERMINISTIC_COLUMNS | set(ignored_columns)
    columns_a, columns_b = ([name for name in frame.columns if name not in skipped_columns] for frame in (a, b))
    # Frames with different columns or numbers of rows cannot be compared value by value.
    if columns_a != columns_b:
        return [f"columns differ: {sorted(set(columns_a) ^ set(columns_b)) or 'in order'}"]
    if len(a) != len(b):
        return [f"{len(a)} rows against {len(b)}"]
    a, b = (frame.reset_index(drop=True) for frame in (a, b))
    return [*filter(None, (_describe_difference(name, a[name], b[name]) for name in columns_a))]


def _describe_difference(name: str, a: Any, b: Any) -> str:
    # Categorical columns are compared as text, since their categories may differ.
    a, b = (values.astype(TEXT) if values.dtype == CATEGORY else values for values in (a, b))
    if a.dtype != b.dtype:
        return f"{name}: type {a.dtype} against {b.dtype}"
    both_missing = a.isna().to_numpy() & b.isna().to_numpy()
    is_equal = (a == b).fillna(False).to_numpy(dtype=bool) | both_missing
    if is_equal.all():
        return ""
    first_index = int(np.argmin(is_equal))
    return (
        f"{name}: {int((~is_equal).sum())} of {len(a)} rows differ, first {first_index}: "
        f"{a[first_index]!r} against {b[first_index]!r}"
    )
