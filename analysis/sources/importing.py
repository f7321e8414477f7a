"""Turn logs of other trainers into a study folder: which run is which arm and seed, and the files of each."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from analysis.sources.json_logs import read_json_lines, read_trainer_state
from analysis.sources.logs import LogError, RunLog
from analysis.sources.names import Name, translate_rows
from analysis.sources.verl_console import read_verl_console
from trainable.files.json_lines import write_lines
from trainable.files.json_values import write_object
from trainable.files.paths import read_bytes
from trainable.runs.history import describe_end
from trainable.runs.run_files import METRICS_FILE
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

READERS: Sequence[Callable[[Path, bytes], RunLog | None]] = (read_trainer_state, read_json_lines, read_verl_console)
"""Readers of the formats, in the order in which they are tried. Each returns None for a file of another format."""
MAX_LOG_BYTES = 2**30

_NOT_AN_ARM = re.compile(
    r"(experiment|project|run|exp)_?name|(^|[._])(dir|folder|file|files|path|url|port|host|log|logger|wandb|hdfs|resume"
    r"|timestamp|id|uid)($|[._])|_(dir|folder|url|port|host|id)$"
)
"""Settings that name a run or a place, in which runs of one arm differ, too. The path of a model does not count."""
_SEED = re.compile(r"(^|[._])seed$")
_TOTAL_STEPS = (
    "trainer.total_training_steps",
    "max_steps",
    "total_training_steps",
    "num_train_steps",
    "max_train_steps",
)


class ImportedRun(NamedTuple):
    """A run of a log."""

    log: RunLog
    arm: str
    seed: int
    rows: list[dict[str, Any]]


def read_log(path: Path) -> RunLog:
    """Read a log, whatever its format. Raise LogError if it is none of an RL run."""
    try:
        content = read_bytes(path, MAX_LOG_BYTES)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror or error}.") from None
    for read in READERS:
        log = read(path, content)
        if log is not None and log.rows:
            return log
    raise LogError(
        f"{path} has no training step in any format that is known here: the console of verl, JSON lines with a `step`, "
        "or the trainer_state.json of TRL. Give the file with the numbers of each step."
    )


def assign_runs(
    logs: Sequence[RunLog], arm_keys: Sequence[str], seed_key: str | None
) -> tuple[list[RunLog], str, list[tuple[str, int]], list[str]]:
    """Find arm and seed of each log from its settings. Return the logs, the setting of the axis, arms and seeds, notes.

    Arms are the values of `arm_keys`; without them, of the setting in which the logs differ. Raises LogError if several
    settings differ, and none is chosen.
    """
    differing = [
        key
        for key in dict.fromkeys(key for log in logs for key in log.settings)
        if len({str(log.settings.get(key)) for log in logs}) > 1
    ]
    known_keys = {key for log in logs for key in log.settings}
    for key in (*arm_keys, *([seed_key] if seed_key else [])):
        if key not in known_keys:
            shown = ", ".join(differing[:20]) or "none"
            raise LogError(f"No log has the setting {key}: the settings that differ between the logs are {shown}.")
    seed_keys = [key for key in differing if _SEED.search(key)]
    if seed_key is None and len({_partition(logs, key) for key in seed_keys}) > 1:
        raise LogError(f"Several settings may be the seed: type --seed with one of {', '.join(seed_keys)}.")
    chosen_seed = seed_key or (seed_keys[0] if seed_keys else None)
    notes: list[str] = []
    candidates = [
        key
        for key in differing
        if key not in seed_keys and key != chosen_seed and (key.endswith("model.path") or not _NOT_AN_ARM.search(key))
    ]
    axis_keys = list(arm_keys)
    if not axis_keys and candidates:
        by_partition: dict[tuple[str, ...], list[str]] = {}
        for key in candidates:
            by_partition.setdefault(_partition(logs, key), []).append(key)
        if len(by_partition) > 1:
            raise LogError(
                f"The logs differ in several settings: type `import --arm` with those whose values are the arms, of "
                f"{', '.join(f'{key} ({_list_values(logs, key)})' for key in candidates[:12])}."
            )
        (together,) = by_partition.values()
        axis_keys = together[:1]
        if len(together) > 1:
            notes.append(f"The arms differ in {', '.join(together)} together.")
    arms = [",".join(_format(log.settings.get(key)) for key in axis_keys) or "all" for log in logs]
    seeds: list[int] = []
    for index, log in enumerate(logs):
        seed = log.settings.get(chosen_seed) if chosen_seed else None
        seeds.append(seed if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 else index)
    if chosen_seed is None and len(logs) > 1:
        notes.append("The logs name no seed, so runs are numbered, and no two of different arms count as a pair.")
    pairs = list(zip(arms, seeds, strict=True))
    for index, pair in enumerate(pairs):
        if pair in pairs[:index]:
            other = logs[pairs.index(pair)].path
            raise LogError(
                f"{other} and {logs[index].path} are both of arm {pair[0]} and seed {pair[1]}: leave one out, or type --seed or --arm with a setting in which they differ ({', '.join(differing[:12]) or 'none does'})."
            )
    return list(logs), " x ".join(axis_keys), pairs, notes


def _partition(logs: Sequence[RunLog], key: str) -> tuple[str, ...]:
    """Return which logs share a value of a setting, the same for all settings that change together."""
    values = [str(log.settings.get(key)) for log in logs]
    return tuple(str(values.index(value)) for value in values)


def _list_values(logs: Sequence[RunLog], key: str) -> str:
    values = list(dict.fromkeys(_format(log.settings.get(key)) for log in logs))
    return ", ".join(values[:4]) + (", ..." if len(values) > 4 else "")


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def import_logs(
    paths: Sequence[Path],
    folder: Path,
    name: str,
    arm_keys: Sequence[str],
    seed_key: str | None,
    own_names: Sequence[Name],
    command: str,
    at: str,
) -> list[str]:
    """Read the logs, and write them as a study to the new `folder`. Return what a reader must know, in sentences.

    Nothing is written if a log is refused. Raises LogError.
    """
    logs, setting, pairs, notes = assign_runs([read_log(path) for path in paths], arm_keys, seed_key)
    all_rows = [translate_rows(log, own_names) for log in logs]
    if not any("val_success" in row for rows in all_rows for row in rows):
        keys = list(dict.fromkeys(key for log in logs for key in log.keys))
        raise LogError(
            "No log has the success of a validation, by which arms are compared: type --column val_success=NAME with "
            f"the measurement to compare, which may be of the training, such as {', '.join(keys[:15])}."
        )
    for log in logs:
        notes += [f"{log.path}: {note}" for note in log.notes]
    totals = [_find_total(log) for log in logs]
    longest = max(rows[-1]["step"] for rows in all_rows)
    entries: list[RunEntry] = []
    for log, (arm, seed), rows, total in zip(logs, pairs, all_rows, totals, strict=True):
        run_id = re.sub(r"[^\w.=,+-]+", "_", f"{arm}-s{seed}").lstrip(".")[:200]
        if run_id in {entry.run_id for entry in entries}:
            run_id += f"-{len(entries)}"
        entry = RunEntry(run_id, arm, seed, name, label=arm, experiment_name=run_id, log=str(log.path))
        entries.append(entry)
        _write_run(folder, entry, log, rows, total or longest)
    arms = tuple(dict.fromkeys(arm for arm, _ in pairs))
    study = StudyRecord(
        name,
        "",
        AxisRecord(setting or "arm", values=arms),
        tuple(sorted({seed for _, seed in pairs})),
        tuple(entries),
        {"trainer": {"total_training_steps": max(total or longest for total in totals)}},
        schema=SCHEMA,
        run=folder.name,
        family="imported",
        baseline=arms[0] if len(arms) > 1 else "",
        command=command,
        question=f"How do runs of other trainers differ by {setting}?" if setting else "What did these runs do?",
        created_at=at,
        stop_rules=(),
    )
    write_object(folder / STUDY_FILE, _to_json(study))
    return notes


def _find_total(log: RunLog) -> int | None:
    values = (log.settings.get(key) for key in _TOTAL_STEPS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _write_run(folder: Path, entry: RunEntry, log: RunLog, rows: list[dict[str, Any]], total: int) -> None:
    run_dir = folder / "runs" / entry.run_id
    run_dir.mkdir(parents=True)
    settings = {**log.settings, "trainer.total_training_steps": total}
    write_lines(run_dir / METRICS_FILE, rows)
    end = describe_end(rows, total)
    reason = f"its log ends at step {rows[-1]['step']} of {total}" if end.status == "interrupted" else end.reason
    write_object(run_dir / STATUS_FILE, _to_json(StatusRecord(entry.run_id, end.status, reason)))
    write_object(run_dir / RUN_FILE, _to_json(RunRecord(**asdict(replace(entry)), config=settings)))


def _to_json(record: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(record).items() if value is not None}
