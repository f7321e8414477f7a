"""From a folder on disk to frames: the line files that every run appends to, or the parquet tables made of them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.data.families import Row, Schema, TableFamily, family_of
from analysis.data.frames import FRAMES, Study, StudyFrames, setting_column, together, typed
from analysis.data.line_files import (
    analysis_of,
    evaluation_of,
    flat,
    gradient_rows,
    group_rows,
    is_whole,
    measured,
    read_json,
    read_lines,
    step_of,
)
from trainable.runs.records import STOP_COLUMNS

_FROM_STATUS = (
    "trial_id",
    "failure_class",
    "started_at",
    "ended_at",
    "stop_rule",
    "stop_value",
    "stop_threshold",
    "stop_step",
)
_FROM_HEAD = ("config_hash", "experiment_name")


class _Run(NamedTuple):
    """The files of one run: run.json, the last line of each step, evaluation and analysis, and status.json."""

    head: Row
    rows: list[Row]
    evaluations: list[Row]
    analyses: list[Row]
    status: Row


def load(path: Path | str, *, live: bool = False) -> StudyFrames:
    """Frames of the study or studies at `path`: an output folder, one results/<run> folder, or a folder above some.

    Reads the parquet tables of a study where they are newer than each of its line files, else the line files; these too
    where the tables are an older version's and lack a column. Several studies are added up, of whatever family (see
    `frames.together`); the `study` column tells them apart. live: keep the status "running" (see `read_run`). Raises
    ValueError when no study.json is found, or one of an unknown family.
    """
    folders = study_folders(Path(path))
    parts = [_read_parquet(folder, live) if _parquet_is_newest(folder) else read_run(folder, live=live)
             for folder in folders]  # fmt: skip
    return together(parts)


def study_folders(path: Path) -> list[Path]:
    """Every folder with a study.json at or below `path`, sorted; below `path`/results where there is one."""
    if (path / "study.json").is_file():
        return [path]
    root = path / "results" if (path / "results").is_dir() else path
    folders = sorted(found.parent for found in root.rglob("study.json"))
    if not folders:
        raise ValueError(f"There is no study at {path}: give an output folder that holds results/, or a results/<run>.")
    return folders


def read_run(folder: Path | str, *, live: bool = False) -> StudyFrames:
    """Frames of one study from the line files of its runs; missing files and torn or odd lines are no error.

    The last line of a step counts, the last of a (step, split, mode) of levels.jsonl, and the last of a (step, source,
    prefilter) of gradients.jsonl and of probes.jsonl. A file cannot tell whether the process that wrote "running" still
    exists: live=False reads it as "interrupted", live=True keeps it.
    A run without a step is "never_ran", unless it failed before its first one. ValueError names a run.json or
    status.json, which are written whole, that is none any more.
    """
    folder = Path(folder)
    study = read_json(folder / "study.json")
    if not study:
        raise ValueError(f"{folder} holds no study.json: give a results/<run> folder that a study wrote.")
    family = family_of(study)
    schemas = family.schemas
    runs = sorted(_runs(folder, study, family), key=_order(study))
    trials = [_trial(study, run, family, live) for run in runs]
    steps = [row for run in runs for row in _step_rows(study, run, family)]
    frames = {
        "trials": _trials_frame(trials, [flat(run.head.get("config") or {}) for run in runs], schemas["trials"]),
        "steps": pd.DataFrame(steps, columns=list(schemas["steps"])),
        "levels": _levels_frame(study, runs, schemas["levels"]),
        "gradients": _analysis_frame(schemas["gradients"], gradient_rows, study, runs),
        "gradient_groups": _analysis_frame(schemas["gradient_groups"], group_rows, study, runs),
    }
    return StudyFrames(**{name: typed(frame, schemas[name]) for name, frame in frames.items()}, study=study)


def _runs(folder: Path, study: Study, family: TableFamily) -> list[_Run]:
    """Every run that study.json lists or that has a folder."""
    listed = {head["run_id"]: head for head in study.get("runs", [])}
    on_disk = sorted(path.name for path in (folder / "runs").glob("*") if path.is_dir())
    return [_read_files(folder / "runs" / run_id, listed.get(run_id, {"run_id": run_id}), family)
            for run_id in dict.fromkeys((*listed, *on_disk))]  # fmt: skip


def _read_files(folder: Path, listed: Row, family: TableFamily) -> _Run:
    return _Run(
        head={**listed, **read_json(folder / "run.json"), "run_id": folder.name},
        rows=[measured(row, family) for row in read_lines(folder / "metrics.jsonl", step_of(family))],
        evaluations=read_lines(folder / "levels.jsonl", evaluation_of),
        analyses=[
            *read_lines(folder / "gradients.jsonl", analysis_of),
            *read_lines(folder / "probes.jsonl", analysis_of, goes_back=False),
        ],
        status=read_json(folder / "status.json"),
    )


def _order(study: Study) -> Callable[[_Run], tuple[int, str, int, str]]:
    """Sorting key: arms in the order of study.json, then other arms by name, then seeds."""
    rank = {arm: index for index, arm in enumerate(study.get("axis", {}).get("values", []))}
    return lambda run: (
        rank.get(run.head.get("arm", ""), len(rank)),
        run.head.get("arm", ""),
        int(run.head.get("seed", 0)),
        run.head["run_id"],
    )


def _names(study: Study, run: _Run) -> Row:
    return {
        "run_id": run.head["run_id"],
        "study": study["name"],
        "arm": run.head.get("arm", ""),
        "seed": int(run.head.get("seed", 0)),
    }


def _status(run: _Run, live: bool) -> tuple[str, str]:
    """Status and reason of a run, from status.json and from whether it has a step."""
    status, reason = run.status.get("status") or "", run.status.get("reason") or ""
    if live and status == "running":
        return status, reason
    if not run.rows and status != "failed":
        return "never_ran", reason or "no training step was recorded"
    if status in ("", "running"):
        return "interrupted", reason or f"no end was recorded; the last step is {run.rows[-1]['step']}"
    return status, reason


def _trial(study: Study, run: _Run, family: TableFamily, live: bool) -> Row:
    status, reason = _status(run, live)
    total = _steps_total(run)
    return {
        **_names(study, run),
        "axis_setting": study.get("axis", {}).get("setting", ""),
        "axis_value": _number(run.head.get("arm", "")),
        **{name: run.head.get(name) for name in _FROM_HEAD},
        **{name: run.status.get(name) for name in _FROM_STATUS},
        "status": status,
        "reason": reason,
        "steps_total": total,
        **family.values(run.rows, total if status == "early_stopped" else None),
    }


def _steps_total(run: _Run) -> int | None:
    """The steps that the run was asked for; None where its run.json does not say."""
    total = flat(run.head.get("config") or {}).get("trainer.total_training_steps")
    return total if is_whole(total) else None


def _number(text: str) -> float:
    """The number that `text` spells; NaN for a word such as nofilter."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _trials_frame(trials: list[Row], configs: list[Row], schema: Schema) -> pd.DataFrame:
    frame = pd.DataFrame(trials, columns=list(schema))
    fields = dict.fromkeys(field for config in configs for field in config)
    settings = {f"config/{field}": setting_column([config.get(field) for config in configs]) for field in fields}
    return pd.concat([frame, pd.DataFrame(settings, index=frame.index)], axis=1)


def _step_rows(study: Study, run: _Run, family: TableFamily) -> list[Row]:
    """The run's rows; the one at which status.json says that a rule fired carries the stop columns."""
    names = _names(study, run)
    stop = {column.name: run.status.get(column.name) for column in STOP_COLUMNS}
    fired_at = stop["stop_step"] if stop["stop_rule"] else None
    return [
        {
            **names,
            "step": row["step"],
            **{column.name: row.get(column.name) for column in family.step_columns},
            **(stop if row["step"] == fired_at else {}),
        }
        for row in run.rows
    ]


def _levels_frame(study: Study, runs: Iterable[_Run], schema: Schema) -> pd.DataFrame:
    parts = [_evaluation_frame(_names(study, run), line) for run in runs for line in run.evaluations]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(schema))


def _analysis_frame(
    schema: Schema, rows_of: Callable[[Iterable[Row]], list[Row]], study: Study, runs: Iterable[_Run]
) -> pd.DataFrame:
    rows = [{**_names(study, run), **row} for run in runs for row in rows_of(run.analyses)]
    return pd.DataFrame(rows, columns=list(schema))


def _evaluation_frame(names: Row, line: Row) -> pd.DataFrame:
    success = np.frombuffer(line["success"].encode(), dtype=np.uint8) == ord("1")
    if not len(line["levels"]) == len(line["clusters"]) == len(success):
        raise ValueError(
            f"levels.jsonl of {names['run_id']}, step {line['step']} {line['split']} {line['mode']}: "
            f"{len(line['levels'])} levels, {len(line['clusters'])} clusters and {len(success)} outcomes; "
            "there must be one each an episode."
        )
    shared = {**names, "step": line["step"], "split": line["split"], "mode": line["mode"]}
    return pd.DataFrame({**shared, "level": line["levels"], "cluster": line["clusters"], "success": success})


def _parquet_is_newest(folder: Path) -> bool:
    """Whether all tables exist and were written after every file that they are made of."""
    tables = [folder / f"{name}.parquet" for name in FRAMES]
    if not all(table.is_file() for table in tables):
        return False
    sources = [folder / "study.json", folder / "runs", *folder.glob("runs/*/*.json"), *folder.glob("runs/*/*.jsonl")]
    written = min(table.stat().st_mtime_ns for table in tables)
    return all(source.stat().st_mtime_ns < written for source in sources if source.exists())


def _read_parquet(folder: Path, live: bool) -> StudyFrames:
    study = read_json(folder / "study.json")
    schemas = family_of(study).schemas
    tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in FRAMES}
    older = any(not set(schemas[name]) <= set(tables[name]) for name in FRAMES) and (folder / "runs").is_dir()
    if older or (not live and (tables["trials"]["status"] == "running").any()):
        return read_run(folder, live=live)
    frames = {name: typed(tables[name], schemas[name]) for name in FRAMES}
    return StudyFrames(**frames, study=study)
