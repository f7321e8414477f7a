"""Load studies from disk: from the JSONL files of their runs."""

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, cast_frame, concat_studies, make_setting_column
from analysis.data.run_files import (
    flatten_config,
    get_analysis_key,
    get_evaluation_key,
    make_analysis_rows,
    parse_step_row,
)
from analysis.data.schemas import Row, Schema, get_family, get_schemas
from trainable.families import Family
from trainable.files.json_lines import Lines, read_lines
from trainable.files.json_values import DamagedFileError, DamageWarning
from trainable.files.paths import check_path
from trainable.files.step_phase import STEP_PHASE
from trainable.runs.history import RunHistory
from trainable.runs.records import STOP_COLUMNS
from trainable.runs.run_files import GRADIENTS_FILE, LEVELS_FILE, PROBES_FILE, select_lines
from trainable.runs.study_record import (
    RUN_FILE,
    STUDY_FILE,
    RunEntry,
    RunRecord,
    StatusRecord,
    StudyRecord,
    find_total_steps,
    read_record,
)


class RunFiles(NamedTuple):
    """Content of the files of one run: the last line per step, evaluation and analysis, and the run's status.

    steps_total: the planned number of steps, if known.
    """

    header: RunRecord
    rows: list[Row]
    evaluations: list[Row]
    analyses: list[Row]
    status: StatusRecord
    steps_total: int | None


def load(path: Path | str, *, live: bool = False) -> StudyFrames:
    """Load the study or studies at `path`.

    Several studies of any family are concatenated (see `concat_studies`); the column `study` distinguishes them.

    Args:
        path: an output folder, a results/<run> folder, or any folder above these.
        live: keep the statuses "running" and "waiting" (see `read_study`).

    Raises:
        ValueError: there is no study.json, or its family is unknown.
    """
    return concat_studies([read_study(folder, live=live) for folder in find_study_folders(Path(path))])


def find_study_folders(path: Path) -> list[Path]:
    """Find all folders with a study.json at or below `path`, sorted. If `path`/results exists, search only there.

    Raises:
        UnsafePathError: the path to a study leads through a symbolic link.
        ValueError: there is no study.json.
    """
    if os.path.lexists(path / STUDY_FILE):
        return [path]
    # An output folder also holds logs and checkpoints: many files, and never a study.
    root = path / "results" if (path / "results").is_dir() else path
    folders = sorted(study_file.parent for study_file in root.rglob(STUDY_FILE))
    for folder in folders:
        check_path(path, folder)
    if not folders:
        raise ValueError(
            f"There is no study at {path}: give an output folder that contains results/, or a results/<run> folder."
        )
    return folders


def read_study(folder: Path | str, *, live: bool = False) -> StudyFrames:
    """Read one study from the files of its runs. Missing files and truncated or invalid lines are not errors.

    If lines repeat, the last one counts: per step in metrics.jsonl, per (step, split, mode) in levels.jsonl, and per
    (step, source, prefilter) in gradients.jsonl and probes.jsonl. A run without a step has the status "never_ran",
    unless it failed before its first step.

    Args:
        folder: a results/<run> folder.
        live: keep the statuses "running" and "waiting". The files do not show whether the process that wrote them still
            exists, so by default "running" is read as "interrupted", and "waiting" as the status before it.

    Raises:
        ValueError: there is no study.json, or a run.json or status.json is damaged.
        UnsafePathError: the folder of a run is a symbolic link.
    """
    folder = Path(folder)
    try:
        study = read_record(StudyRecord, folder)
    except FileNotFoundError:
        raise ValueError(f"{folder} contains no study.json: give a results/<run> folder that a study wrote.") from None
    STEP_PHASE.enter("reading rows")
    check_path(folder, folder / "runs")
    # A listed run without a folder never ran. A folder missing from study.json is read too, so that no result is lost.
    entries = {entry.run_id: entry for entry in study.runs}
    run_ids_on_disk = sorted(path.name for path in (folder / "runs").glob("*") if path.is_dir())
    runs = [
        _read_run_files(
            folder / "runs" / run_id, entries.get(run_id) or RunEntry(run_id), study, get_family(study), live
        )
        for run_id in STEP_PHASE.track(list(dict.fromkeys((*entries, *run_ids_on_disk))), "run")
    ]
    return make_frames(study, runs, (Path(os.path.abspath(folder)),))


def make_frames(study: StudyRecord, study_runs: Iterable[RunFiles], folders: tuple[Path, ...]) -> StudyFrames:
    """Make the frames of a study from what its runs wrote. folders: the study's folder; empty if it has none."""
    family = get_family(study)
    schemas = get_schemas(family.name)
    # Arms in the order of study.json, then other arms by name, then seeds. run_id comes last, which makes the order the
    # same on every machine even if two runs share arm and seed.
    rank = {arm: index for index, arm in enumerate(study.axis.values)}
    runs = sorted(
        study_runs,
        key=lambda run: (rank.get(run.header.arm, len(rank)), run.header.arm, run.header.seed, run.header.run_id),
    )
    trials = [_make_trial_row(study, run, family) for run in runs]
    steps = [row for run in runs for row in _make_step_rows(study, run)]
    configs = [flatten_config(run.header.config) for run in runs]
    fields = dict.fromkeys(field for config in configs for field in config)
    settings = {f"config/{field}": make_setting_column([config.get(field) for config in configs]) for field in fields}
    # Measures of a plug-in game follow the family's columns; only the first ones are kept if there are many.
    own_columns = list(dict.fromkeys(name for row in steps for name in row if name not in schemas["steps"]))
    frames = {
        "trials": pd.concat(
            [_make_frame(trials, schemas["trials"]), pd.DataFrame(settings, index=range(len(runs)))], axis=1
        ),
        "steps": _make_frame(steps, [*schemas["steps"], *own_columns[: family.max_own_columns]]),
        "levels": _make_levels_frame(study, runs, schemas["levels"]),
    }
    for name in ("gradients", "gradient_groups"):
        rows = [
            {**_make_run_columns(study, run), **row} for run in runs for row in make_analysis_rows(run.analyses, name)
        ]
        frames[name] = _make_frame(rows, schemas[name])
    typed_frames = {name: cast_frame(frame, schemas[name]) for name, frame in frames.items()}
    return StudyFrames(**typed_frames, study=study, folders=folders)


def _read_run_files(folder: Path, entry: RunEntry, study: StudyRecord, family: Family, live: bool) -> RunFiles:
    """Read the files of a run. If run.json is unreadable, warn and use the entry of study.json."""
    check_path(folder.parent, folder)
    header = RunRecord(**asdict(entry))
    try:
        header = replace(read_record(RunRecord, folder), run_id=folder.name)
    except FileNotFoundError:  # a run that has not started may have no files
        pass
    except (DamagedFileError, OSError) as error:
        _warn(f"{error}.")
    # Without run.json, assume the study's number of steps, although an arm may have another.
    steps_total = find_total_steps(header.config) or study.total_steps
    history = RunHistory.read(folder, steps_total, is_live=live)
    # A study starts only after each run has a run.json, so a run with rows but without this file has lost it.
    if history.rows and not (folder / RUN_FILE).exists():
        _warn(f"{folder / RUN_FILE} is missing, so the settings of this run are not known.")
    for note in history.notes:
        _warn(note)
    files = {name: lines.records for name, lines in history.lines.files.items()}
    # No run depends on probes, so damaged lines are skipped. Rows state how many lines the other files must have, but
    # nothing does for probes: only an unfinished line shows.
    path, probes = folder / PROBES_FILE, Lines(())
    try:
        probes = read_lines(path)
    except OSError as error:
        _warn(f"{error}.")
    if numbers := sorted((*probes.damaged_numbers, *probes.unchecked_numbers)):
        _warn(f"{path} does not match its checksums at line {numbers[0]}.")
    return RunFiles(
        header=header,
        rows=[parse_step_row(row, family) for row in history.rows],
        evaluations=select_lines(files[LEVELS_FILE], get_evaluation_key),
        analyses=[
            *select_lines(files[GRADIENTS_FILE], get_analysis_key),
            # Probes read checkpoints in any order: an earlier step does not invalidate later ones.
            *select_lines(probes.records, get_analysis_key, drop_rolled_back=False),
        ],
        status=history.status,
        steps_total=steps_total,
    )


def _warn(message: str) -> None:
    warnings.warn(message, DamageWarning, stacklevel=2)


def _make_run_columns(study: StudyRecord, run: RunFiles) -> Row:
    return {"run_id": run.header.run_id, "study": study.name, "arm": run.header.arm, "seed": run.header.seed}


def _make_trial_row(study: StudyRecord, run: RunFiles, family: Family) -> Row:
    return {
        **_make_run_columns(study, run),
        "axis_setting": study.axis.setting,
        "axis_value": pd.to_numeric(run.header.arm, errors="coerce"),
        "config_hash": run.header.config_hash,
        "experiment_name": run.header.experiment_name,
        **asdict(replace(run.status, run_id=run.header.run_id)),
        "steps_total": run.steps_total,
        # Only a run that a rule stopped is credited with its last values up to the planned end.
        **resolve_name(family.summarize)(
            run.rows, run.steps_total if run.status.status == "early_stopped" else None, family.trial_columns
        ),
    }


def _make_step_rows(study: StudyRecord, run: RunFiles) -> list[Row]:
    """Make the rows of a run. Only the row of the step at which a rule stopped it has values in `STOP_COLUMNS`."""
    names = _make_run_columns(study, run)
    stop_columns = {column.name: getattr(run.status, column.name) for column in STOP_COLUMNS}
    stop_step = stop_columns["stop_step"] if stop_columns["stop_rule"] else None  # None matches no row
    return [
        {
            # Absent columns are not filled in: a run may have 100,000 rows, few of which have all columns.
            **{name: value for name, value in row.items() if name not in stop_columns},
            **names,
            **(stop_columns if row["step"] == stop_step else {}),
        }
        for row in run.rows
    ]


def _make_levels_frame(study: StudyRecord, runs: Iterable[RunFiles], schema: Schema) -> pd.DataFrame:
    heads: list[Row] = []
    episodes: dict[str, list[Any]] = {"level": [], "cluster": [], "success": []}
    for run in runs:
        for line in run.evaluations:
            # One character per episode: "1" for success, "0" otherwise.
            success = np.frombuffer(line["success"].encode(), dtype=np.uint8) == ord("1")
            heads.append(_make_run_columns(study, run) | {name: line[name] for name in ("step", "split", "mode")})
            for name, values in zip(episodes, (line["levels"], line["clusters"], success), strict=True):
                episodes[name].append(np.asarray(values))
    if not heads:
        return pd.DataFrame(columns=list(schema))
    # Cast before rows are repeated: categories take a tenth of the memory of text.
    head_frame = cast_frame(pd.DataFrame(heads), {name: schema[name] for name in heads[0]})
    frame = head_frame.loc[head_frame.index.repeat([len(levels) for levels in episodes["level"]])]
    return frame.reset_index(drop=True).assign(**{name: np.concatenate(values) for name, values in episodes.items()})


def _make_frame(rows: Sequence[Row], columns: Iterable[str]) -> pd.DataFrame:
    """Make a frame of those `columns` that occur in `rows`; `cast_frame` adds the others faster than pandas does."""
    present_names = {name for row in rows for name in row}
    return pd.DataFrame(rows, columns=[name for name in columns if name in present_names], index=range(len(rows)))
