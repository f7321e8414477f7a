"""Find the training step of each entry of a log: trackers mix several counters, and some entries have none."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from analysis.sources.logs import LogError, LogRow, RunLog, merge_rows, to_number

STEP_KEYS = (
    "step",
    "training/global_step",
    "trainer/global_step",
    "train/global_step",
    "rollout/step",
    "progress/batch",
    "training_step",
    "system/step",
    "global_step",
    "training_iteration",
    "iteration",
    "_step",
)
"""Names of the training step, in order of preference. Optimizer steps within a rollout, such as slime's `train/step`,
and the counter of calls of W&B, `_step`, do not count where there is another one."""
_OTHER_KEYS = ("eval/global_step", "eval/step", "progress/batch")
"""Names of the step in entries without the one of the others, such as those of OpenRLHF's, slime's and tinker's
validations."""
_COUNTERS = {*STEP_KEYS, *_OTHER_KEYS, "train/step"}
SEED_KEY = re.compile(r"(^|[._])seed$")


class Roles(NamedTuple):
    """What columns of a table are, besides those whose names say so."""

    runs: Sequence[str] = ()
    """Columns in which the runs of a table differ."""
    step: str = ""
    """The column of the training step."""


ROLES_BY_NAME = Roles()
Entries = Sequence[tuple[int, Mapping[str, Any]]]
"""Numbers of lines, from 1, and the flat values of each."""


def find_step_key(names: Iterable[str], step: str = "") -> str:
    """Find the name of the training step among `names`: `step`, or a known one in any case; empty if there is none.

    >>> find_step_key(["_step", "train/step", "rollout/step", "reward"])
    'rollout/step'
    """
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[key] for key in (step.lower(), *STEP_KEYS) if key in by_lower), "")


def make_logs(
    path: Path, format_name: str, entries: Entries, settings: Mapping[str, Any], roles: Roles
) -> list[RunLog]:
    """Make the logs of a table with the rows of several runs; empty if no row has a step and a number.

    Runs differ in columns that all rows have: those of a seed, and those that `roles` names. Their values count as
    settings of the run. Raises LogError if another column changes with each return to the first step.
    """
    keys = [
        name
        for name in (entries[0][1] if entries else ())
        if (name in roles.runs or SEED_KEY.search(name))
        and all(isinstance(entry.get(name), str | int | float) for _, entry in entries)
    ]
    entries_by_run: dict[tuple[Any, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for line, entry in entries:
        entries_by_run.setdefault(tuple(entry[key] for key in keys), []).append((line, entry))
    logs = []
    for values, run_entries in entries_by_run.items():
        # The numbers of a CSV file are floats.
        run_settings = {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in zip(keys, values, strict=True)
        }
        _check_runs(path, run_entries, roles.step)
        log = make_log(path, format_name, run_entries, {**settings, **run_settings}, roles.step)
        logs += [log] if log else []
    return logs


def _check_runs(path: Path, entries: Entries, step_name: str) -> None:
    """Raise LogError if the entries are of several runs, which one column tells apart."""
    step_key = find_step_key(entries[0][1], step_name)
    rows = [(step, entry) for _, entry in entries if (step := to_number(entry.get(step_key))) is not None]
    returns = [after < before for (before, _), (after, _) in pairwise(rows)]
    # A resumed run returns to a later step than its first one.
    if not any(returns) or any(step > rows[0][0] for (step, _), back in zip(rows[1:], returns, strict=True) if back):
        return
    for name in entries[0][1]:
        values = [entry.get(name) for _, entry in rows]
        if [after != before for before, after in pairwise(values)] == returns:
            raise LogError(
                f"{path} has the rows of several runs, whose column {name} differs: type --arm {name} or --seed {name}."
            )


def make_log(
    path: Path, format_name: str, entries: Entries, settings: Mapping[str, Any], step_name: str = ""
) -> RunLog | None:
    """Make a log from flat entries with their line numbers; None if none of them has a step and a number.

    Entries without the training step belong to the last step before them, but those whose `step` is null do not: they
    were measured by time. What is validated as step 0 before the first training step is before training.
    """
    step_key = find_step_key(
        {name for _, entry in entries for name, value in entry.items() if value is not None}, step_name
    )
    if not step_key:
        return None
    rows: list[LogRow] = []
    last_step = -1
    for line, entry in entries:
        step = to_number(entry.get(step_key))
        if step is not None:
            last_step = int(step)
        elif step_key == "step" and step_key in entry:
            continue
        else:
            others = (to_number(entry.get(key)) for key in _OTHER_KEYS)
            step = next((number for number in others if number is not None), last_step)
            step = last_step if step == 0 and not rows else step
        values = {
            name: number
            for name, value in entry.items()
            if name != step_key and name not in _COUNTERS and (number := to_number(value)) is not None
        }
        if step >= -1 and values:
            rows.append(LogRow(int(step), values, line))
    if last_step < 0 or not rows:
        return None
    merged, notes = merge_rows(rows)
    return RunLog(path, format_name, merged, dict(settings), notes)
