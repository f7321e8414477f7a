"""Find the files of each run: trackers write several per run, and folders with several runs."""

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from analysis.sources.importing import RunNames, merge_logs, read_logs
from analysis.sources.logs import LogError, Roles, RunLog
from trainable.files.paths import read_bytes

_KINDS = (
    r"trainer_state\.json",
    r"metrics\.jsonl",
    r"run-.+\.wandb",
    r"events\.out\.tfevents\..+",
)
"""Names of the logs that are looked for in a folder. If it has several kinds, the first one counts: they are of the
same runs, and the first one is the most precise."""
_COMPONENTS = ("trainer", "orchestrator")
"""Folders of the components of a run of prime-rl, each with a metrics.jsonl."""
_HPARAMS_FOLDER = re.compile(r"\d+\.\d+")
"""tensorboardX writes hyper-parameters to a folder that is called like the time."""


def list_runs(paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    """List the files of each run in `paths`, which may be files, and folders of one run or of several.

    Files of one run are those of a .wandb name within a folder `wandb`, all event files of a folder, and the files of
    the components of prime-rl. Of the checkpoints of TRL the last one counts. Links such as `latest-run` to what is
    there already are left out.

    Raises LogError for a folder without a log.
    """
    runs: dict[tuple[Path, str], list[Path]] = {}
    seen: set[Path] = set()
    for path in paths:
        for file in _find_logs(path) if path.is_dir() else [path]:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                runs.setdefault(_identify_run(file), []).append(file)
    return [
        (max(files, key=_read_global_step),) if files[0].name == "trainer_state.json" else tuple(files)
        for files in runs.values()
    ]


def read_runs(paths: Sequence[Path], roles: Roles) -> list[RunLog]:
    """Read the logs of all runs in `paths`. What several charts of W&B show of a run is one log.

    Raises LogError if a file is no log of an RL run.
    """
    logs = [log for files in list_runs(paths) for log in read_logs(files, roles)]
    charts: dict[str, list[RunLog]] = {}
    for log in logs:
        if log.run:
            charts.setdefault(log.run, []).append(log)
    return [log for log in logs if not log.run] + list(map(merge_logs, charts.values()))


def read_runs_file(path: Path, charts: Sequence[RunLog], roles: Roles) -> tuple[list[RunLog], RunNames]:
    """Read a CSV file with the columns log, arm and seed, and the logs in it. Return these, and the names of the runs.

    Logs are paths relative to the folder of the file, or the names of runs in `charts`, if there are some. Raises
    LogError if a cell is missing, a seed is no whole number, or a run or a log occurs twice.
    """
    try:
        text = io.StringIO(read_bytes(path).decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, restval="", skipinitialspace=True)
        columns = reader.fieldnames or ()
        rows = [
            (reader.line_num, {name: row.get(name, "").strip() for name in ("log", "arm", "seed")}) for row in reader
        ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LogError(f"{path} cannot be read: {error}.") from None
    if not rows or not {"log", "arm", "seed"} <= set(columns):
        raise LogError(
            f"{path} has the columns {', '.join(columns) or 'of an empty file'}, and {len(rows)} rows: it needs the "
            "columns log, arm and seed, and a row per run."
        )
    logs: list[RunLog] = []
    pairs: list[tuple[str, int]] = []
    for line, row in rows:
        if not (row["log"] and row["arm"] and re.fullmatch(r"\d{1,9}", row["seed"])):
            raise LogError(f"{path}, line {line}: log, arm, and a seed that is a whole number from 0 are needed.")
        place = f"{path}, line {line}: {row['log']}"
        if charts:
            row_logs = [chart for chart in charts if chart.run == row["log"]]
        else:
            row_logs = read_runs([path.parent / row["log"]], roles)
        names = ", ".join(chart.run for chart in charts or row_logs)
        if not row_logs:
            raise LogError(f"{place} is no run of the charts: their runs are {names}.")
        if len(row_logs) > 1 and row_logs[0].run:
            raise LogError(f"{place} is a chart of {names}: type it beside --runs, and give a row to each of these.")
        if len(row_logs) > 1:
            raise LogError(
                f"{place} has {len(row_logs)} runs. Give a row to each; a table that names seeds needs no --runs."
            )
        pair = (row["arm"], int(row["seed"]))
        if pair in pairs:
            raise LogError(f"{path}, line {line}: arm {pair[0]} with seed {pair[1]} occurs twice.")
        if any((log.path, log.run) == (row_logs[0].path, row_logs[0].run) for log in logs):
            raise LogError(f"{place} occurs twice, and each run has one row.")
        logs += row_logs
        pairs.append(pair)
    return logs, RunNames("", pairs, [])


def _find_logs(folder: Path) -> list[Path]:
    files = sorted(Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    for kind in _KINDS:
        if logs := [file for file in files if re.fullmatch(kind, file.name)]:
            return logs
    raise LogError(
        f"{folder} has no log that is looked for in folders: trainer_state.json, metrics.jsonl, run-*.wandb, or "
        "events.out.tfevents.*. Give the file with the numbers of each step."
    )


def _identify_run(file: Path) -> tuple[Path, str]:
    """Return what the files of a run have in common."""
    folder = file.resolve().parent
    if file.suffix == ".wandb":
        return folder.parent, file.name
    if re.fullmatch(_KINDS[-1], file.name):
        return (folder.parent if _HPARAMS_FOLDER.fullmatch(folder.name) else folder), "events"
    if file.name == "trainer_state.json":
        return (folder.parent if folder.name.startswith("checkpoint-") else folder), file.name
    if file.name == "metrics.jsonl":
        component = next((parent for parent in (folder, *folder.parents) if parent.name in _COMPONENTS), None)
        return (component.parent if component else folder), file.name
    return folder, file.name


def _read_global_step(file: Path) -> float:
    try:
        return float(json.loads(read_bytes(file))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1
