"""Read JSON: lines or a list of objects, and the trainer_state.json of transformers and TRL."""

import json
from pathlib import Path
from typing import Any

from trainable.files.paths import read_bytes
from trainable.sources.event_files import read_event_settings
from trainable.sources.logs import Roles, RunLog, flatten, make_log, make_logs, to_number

_SETTINGS_FILES = ("config.json", "args.json")
_TRL_SETTINGS_FILES = ("config.json", "adapter_config.json", "training_args.json")
_COMPLETIONS_PREFIX = "completions_"


def read_json_lines(path: Path, content: bytes, roles: Roles) -> list[RunLog]:
    """Read one JSON object per line, or a list of them, flat or nested; empty if the file begins with neither.

    verl's file logger has `{"step": N, "data": {...}}`. prime-rl writes several lines per step, which belong together.
    Exports of W&B and of pandas have one object per row. Settings are those of a config.json beside the log, as
    tinker-cookbook writes it.
    """
    start = content.lstrip()[:1]
    if start == b"[":
        try:
            objects = list(enumerate(json.loads(content), 1))
        except ValueError:
            return []
        broken = 0
    elif start == b"{":
        lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        objects, broken = [], 0
        for number, line in lines:
            try:
                objects.append((number, json.loads(line)))
            except ValueError:
                broken += 1
    else:
        return []
    entries = []
    for number, row in objects:
        data = row.get("data") if isinstance(row, dict) else None
        if isinstance(row, dict):
            entries.append((number, flatten({**data, "step": row.get("step")} if isinstance(data, dict) else row)))
    logs = make_logs(path, "JSON lines", entries, _read_settings(path.parent, _SETTINGS_FILES), roles)
    if logs and broken:
        logs[0].notes.append(
            f"{broken} lines are damaged and were skipped, such as the last one of a run that was killed."
        )
    return logs


def read_trainer_state(path: Path, content: bytes) -> RunLog | None:
    """Read the trainer_state.json of transformers and TRL; None if the file is none.

    Rows with evaluations have the step of the training row before them. training_args.bin is a pickle and is not
    opened. Settings are those of the configurations of the model and of its adapter, of a training_args.json, where a
    script wrote one, and of the event files of TensorBoard in `runs`, which hold all arguments.
    """
    try:
        state = json.loads(content)
    except ValueError:
        return None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        return None
    output = path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent
    settings = _read_settings(path.parent, _TRL_SETTINGS_FILES)
    settings |= read_event_settings(sorted(output.glob("runs/*/events.out.tfevents.*")))
    settings |= {key: state[key] for key in ("max_steps",) if to_number(state.get(key)) is not None}
    entries = [(number, flatten(row)) for number, row in enumerate(state["log_history"], 1) if isinstance(row, dict)]
    log = make_log(path, "trainer_state.json", entries, settings)
    if log:
        log.completions = list_completions(output)
    return log


def _read_settings(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in names:
        try:
            settings = json.loads(read_bytes(folder / name))
        except (OSError, ValueError):
            continue
        if isinstance(settings, dict):
            flat |= flatten(settings)
    return flat


def list_completions(output: Path) -> dict[int, Path]:
    """List the files of completions in the output folder of TRL, by step."""
    paths = (output / "completions").glob(f"{_COMPLETIONS_PREFIX}*.parquet")
    files = {path.stem.removeprefix(_COMPLETIONS_PREFIX): path for path in paths}
    return {int(step): path for step, path in files.items() if step.isdecimal()}
