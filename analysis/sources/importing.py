"""Turn logs of other trainers into a study folder: which run is which arm and seed, and the files of each."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from analysis.sources.trl_completions import read_completions
from analysis.sweep.verdicts import count_nouns
from trainable.files.json_lines import write_lines
from trainable.files.json_values import write_object
from trainable.files.paths import read_bytes
from trainable.runs.history import describe_end
from trainable.runs.run_files import EPISODES_FILE, METRICS_FILE
from trainable.runs.study_record import (
    RUN_FILE,
    SCHEMA,
    STATUS_FILE,
    STUDY_FILE,
    AxisRecord,
    RunEntry,
    RunRecord,
    StatusRecord,
    StudyRecord,
)
from trainable.sources.logs import SEED_KEY, LogError, Roles, RunLog
from trainable.sources.names import Name, find_keys, translate_rows
from trainable.sources.reading import read_runs

_MAX_LISTED = 12
"""Maximum number of settings or values that a message lists."""

_IS_NO_ARM = re.compile(
    r"(experiment|project|run|exp)_?name|(^|[._])(dir|folder|file|files|path|url|port|host|log|logger|wandb|hdfs|resume"
    r"|timestamp|id|uid)($|[._])|_(dir|folder|url|port|host|id)$"
)
"""Settings that name a run or a place, in which runs of one arm differ, too. The path of a model does not count."""
_TOTAL_STEPS = (
    "trainer.total_training_steps",
    "actor_rollout_ref.actor.optim.total_training_steps",
    "max_steps",
    "total_training_steps",
    "num_train_steps",
    "max_train_steps",
)


class RunNames(NamedTuple):
    """Which runs the logs are of."""

    setting: str
    """The setting whose values are the arms; empty if there is one arm."""
    pairs: list[tuple[str, int]]
    """Arm and seed of each log, no two alike."""
    notes: list[str]


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


def name_runs(logs: Sequence[RunLog], arm_keys: Sequence[str] = (), seed_key: str | None = None) -> RunNames:
    """Find arm and seed of each log from the settings that it printed.

    arm_keys: the settings whose values are the arms; by default the only one in which the logs differ, besides seeds,
    names and places. seed_key: the setting that is the seed; by default the one that is called so. If no log names a
    seed, every run gets another number, so that no runs of different arms count as a pair.

    Raises LogError with the settings to choose from if they leave open what is an arm, or if two logs are of one run.
    """
    keys = dict.fromkeys(key for log in logs for key in log.settings)
    differing = [key for key in keys if len({str(log.settings.get(key)) for log in logs}) > 1]
    for key in (*arm_keys, *filter(None, [seed_key])):
        if key not in keys:
            raise LogError(
                f"No log has the setting {key}: those that differ between the logs are {_list_keys(differing)}."
            )
    silent_logs = [log for log in logs if not log.settings]
    if silent_logs and len(logs) > 1:
        charted_runs = [log.run for log in silent_logs if log.run]
        place = f", beside the charts, with a row per run: {_list_keys(charted_runs)}" if charted_runs else ""
        raise LogError(
            f"Arms and seeds are read from the settings that a log prints, and {silent_logs[0].path} prints none: type "
            f"--runs FILE, a CSV file with the columns log, arm and seed{place}."
        )
    seed_keys = [seed_key] if seed_key else [key for key in differing if SEED_KEY.search(key)]
    if len(_group_by_partition(logs, seed_keys)) > 1:
        raise LogError(f"Several settings may be the seed: type --seed with one of {_list_keys(seed_keys)}.")
    notes, axis_keys = [], list(arm_keys)
    if not axis_keys:
        candidates = [
            key
            for key in differing
            if key not in seed_keys and (key.endswith("model.path") or not _IS_NO_ARM.search(key))
        ]
        groups = _group_by_partition(logs, candidates)
        if len(groups) > 1:
            values = {key: list(dict.fromkeys(_format(log.settings.get(key)) for log in logs)) for key in candidates}
            choice = "; ".join(f"{key} ({_list_keys(values[key])})" for key in candidates[:_MAX_LISTED])
            raise LogError(
                f"The logs differ in several settings: type --arm with that of the arms, in `import`: {choice}."
            )
        axis_keys = [group[0] for group in groups]
        notes += [f"The arms differ in {_list_keys(group)} together." for group in groups if len(group) > 1]
    pairs = []
    for number, log in enumerate(logs):
        arm = ",".join(_format(log.settings.get(key)) for key in axis_keys) or "all"
        seed = next((log.settings.get(key) for key in seed_keys), None)
        pairs.append((arm, seed if type(seed) is int and 0 <= seed < 2**31 else number))
    if not seed_keys and len(logs) > 1:
        notes.append("The logs name no seed, so runs are numbered, and no two of different arms count as a pair.")
    for number, pair in enumerate(pairs):
        if pair in pairs[:number]:
            raise LogError(
                f"{logs[pairs.index(pair)].path} and {logs[number].path} are both of arm {pair[0]} and seed {pair[1]}: "
                f"leave one out, or type --seed or --arm with one of {_list_keys(differing)}."
            )
    return RunNames(" x ".join(axis_keys), pairs, notes)


def _group_by_partition(logs: Sequence[RunLog], keys: Sequence[str]) -> list[list[str]]:
    """Group the settings that change together, such as the paths of a model and of its tokenizer."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for key in keys:
        values = [str(log.settings.get(key)) for log in logs]
        groups.setdefault(tuple(map(values.index, values)), []).append(key)
    return list(groups.values())


def _list_keys(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_MAX_LISTED]) + (", ..." if len(keys) > _MAX_LISTED else "") if keys else "none"


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe_runs(logs: Sequence[RunLog], names: RunNames, columns: Sequence[Name]) -> list[str]:
    """Say which runs were read, and which measurement is the success, in two sentences. columns: as typed."""
    counts = Counter(arm for arm, _ in names.pairs)
    arms = _list_keys([f"{arm} ({count_nouns(count, 'run')})" for arm, count in counts.items()])
    keys = dict.fromkeys(key for log in logs for key in find_keys(log, columns, "val_success"))
    return [
        f"Read {count_nouns(len(logs), 'run')} of {count_nouns(len(counts), 'arm')}: {names.setting or 'arm'} {arms}.",
        f"Success (val_success), by which arms are compared, is {_list_keys([*keys])}.",
    ]


def import_logs(
    logs: Sequence[RunLog], names: RunNames, folder: Path, columns: Sequence[Name], command: str = ""
) -> None:
    """Write the logs as a study to the new `folder`, with one run each.

    columns: see `translate_rows`. command: the one that writes the study again. Raises LogError before anything is
    written if the logs lack what arms are compared by.
    """
    all_rows = [translate_rows(log, columns) for log in logs]
    if not any("val_success" in row for rows in all_rows for row in rows):
        keys = list(dict.fromkeys(key for log in logs for key in log.keys))
        raise LogError(
            "No log has the success of a validation, by which arms are compared: type --column val_success=NAME with "
            f"the measurement to compare, which may be one of the training, of {_list_keys(keys)}."
        )
    longest = max(rows[-1]["step"] for rows in all_rows)
    totals = [find_planned_steps(log.settings) or longest for log in logs]
    entries: list[RunEntry] = []
    for (arm, seed), log in zip(names.pairs, logs, strict=True):
        entries.append(make_entry(folder.name, arm, seed, entries, str(log.path)))
    for entry, log, rows, total in zip(entries, logs, all_rows, totals, strict=True):
        _write_run(folder / "runs" / entry.run_id, entry, log, rows, total)
    record = make_study(folder.name, names.setting, entries, max(totals), command)
    write_object(folder / STUDY_FILE, _to_json(record))


def find_planned_steps(settings: Mapping[str, Any]) -> int | None:
    """Find the planned number of training steps in the flat settings of a trainer; None if they do not say it."""
    values = (settings.get(key) for key in _TOTAL_STEPS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def make_entry(study: str, arm: str, seed: int, entries: Sequence[RunEntry], log: str = "") -> RunEntry:
    """Make the entry of a run, whose name none of the other `entries` of the study has."""
    run_id = re.sub(r"[^\w.=,+-]+", "_", f"{arm}-s{seed}").lstrip(".")[:200]
    run_id += f"-{len(entries)}" * any(run_id == entry.run_id for entry in entries)
    return RunEntry(run_id, arm, seed, study, arm, run_id, log=log)


def make_study(
    name: str, setting: str, entries: Sequence[RunEntry], total_steps: int | None, command: str = ""
) -> StudyRecord:
    """Make study.json of runs of another trainer. The first arm is the baseline.

    setting: the one whose values are the arms; empty if it has no name. total_steps: those of the longest run.
    """
    arms = tuple(dict.fromkeys(entry.arm for entry in entries))
    return StudyRecord(
        name,
        "",
        AxisRecord(setting or "arm", values=arms),
        tuple(sorted({entry.seed for entry in entries})),
        tuple(entries),
        {"trainer": {"total_training_steps": total_steps}} if total_steps else {},
        schema=SCHEMA,
        question=f"How do these runs differ {f'by {setting}' if setting else 'between seeds'}?",
        run=name,
        family="imported",
        baseline=arms[0] if len(arms) > 1 else "",
        command=command,
        created_at=datetime.now(UTC).isoformat(),
    )


def _write_run(run_dir: Path, entry: RunEntry, log: RunLog, rows: list[dict[str, Any]], total: int) -> None:
    run_dir.mkdir(parents=True)
    settings = {**log.settings, "trainer.total_training_steps": total}
    write_lines(run_dir / METRICS_FILE, rows)
    if log.completions:
        write_lines(run_dir / EPISODES_FILE, (episode.to_line() for episode in read_completions(log)))
    end = describe_end(rows, total)
    reason = f"its log ends at step {rows[-1]['step']} of {total}" if end.status == "interrupted" else end.reason
    write_object(run_dir / STATUS_FILE, _to_json(StatusRecord(entry.run_id, end.status, reason)))
    write_object(run_dir / RUN_FILE, _to_json(RunRecord(**asdict(entry), config=settings)))


def _to_json(record: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(record).items() if value is not None}
