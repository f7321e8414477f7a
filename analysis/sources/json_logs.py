"""Read JSON logs: one object per line, or the trainer_state.json of transformers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from analysis.sources.logs import LogRow, RunLog, flatten, merge_rows, to_number

_STEP_KEYS = ("step", "_step", "global_step", "training/global_step", "trainer/global_step", "progress/batch")
"""Names of the training step, in order of preference."""
_SETTINGS_FILES = ("config.json", "run.json", "args.json")


def read_json_lines(path: Path, content: bytes) -> RunLog | None:
    """Read one JSON object per line, flat or nested; None if the first line is none.

    verl's file logger has `{"step": N, "data": {...}}`. prime-rl writes several lines per step, which belong together.
    Settings are those of a config.json beside the log, as tinker-cookbook writes it.
    """
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith(b"{"):
        return None
    entries, broken = [], 0
    for number, line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            broken += 1
            continue
        if isinstance(entry, dict):
            data = entry.get("data")
            entries.append((number, {**data, "step": entry.get("step")} if isinstance(data, dict) else entry))
    log = _make_log(path, "JSON lines", entries)
    if log and broken:
        log.notes.append(f"{broken} lines are damaged and were skipped, such as the last one of a run that was killed.")
    return log


def read_trainer_state(path: Path, content: bytes) -> RunLog | None:
    """Read the trainer_state.json of transformers and TRL; None if the file is none.

    Rows with evaluations have the step of the training row before them. Settings are those of training_args.json, where
    a script wrote one beside it, since training_args.bin is a pickle and is not opened.
    """
    try:
        state = json.loads(content)
    except ValueError:
        return None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        return None
    log = _make_log(path, "trainer_state.json", enumerate(state["log_history"], 1))
    if log is not None:
        log.settings |= {key: state[key] for key in ("max_steps",) if to_number(state.get(key)) is not None}
    return log


def _make_log(path: Path, format_name: str, entries: Iterable[tuple[int, Mapping[str, Any]]]) -> RunLog | None:
    rows: list[LogRow] = []
    step_key = ""
    for number, entry in entries:
        flat = flatten(entry)
        step_key = step_key or next((key for key in _STEP_KEYS if to_number(flat.get(key)) is not None), "")
        step = to_number(flat.pop(step_key, None)) if step_key else None
        values = {key: value for key in flat if (value := to_number(flat[key])) is not None}
        if step is not None and step >= 0 and values:
            rows.append(LogRow(int(step), values, number))
    if not rows:
        return None
    merged, notes = merge_rows(rows)
    return RunLog(path, format_name, merged, _read_settings(path.parent), notes)


def _read_settings(folder: Path) -> dict[str, Any]:
    for name in (*_SETTINGS_FILES, "training_args.json"):
        try:
            settings = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(settings, dict):
            return flatten(settings)
    return {}
