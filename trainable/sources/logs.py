"""The log of another trainer: rows of numbers under the trainer's names, and the settings that it printed.

Trackers mix several counters of steps, and some entries have none, so the training step of each entry is looked for.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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


class LogError(ValueError):
    """Raised for a file that is no log of an RL run, or that cannot be read."""


@dataclass
class LogRow:
    """The measurements of one training step."""

    step: int
    """As the log counts. What stands before the first step of a log that counts from 0 has -1."""
    values: dict[str, float]
    """By the trainer's name. Missing values are absent."""
    line: int
    """Number of the line in the file, or of the entry if the file has no lines, from 1."""
    rounded_zeros: frozenset[str] = frozenset()
    """Names of the values that were printed as 0.000: smaller than half a unit of the last digit, not known to be 0."""


@dataclass
class RunLog:
    """The log of one run."""

    path: Path
    format: str
    """Kind of file, such as `verl console`."""
    rows: list[LogRow]
    """In the order of their steps, one per step (see `merge_rows`)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Flat settings by dotted name, as far as the log contains them."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know, in sentences: lost steps, repeated steps, rounded numbers."""
    run: str = ""
    """The name of the run in a chart of several, which has no other mark of it."""
    completions: Mapping[int, Path] = field(default_factory=dict)
    """The files of TRL with the completions of a step, by step."""

    @property
    def keys(self) -> list[str]:
        """The trainer's names of all values, in the order in which they appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))


def to_number(value: object) -> float | None:
    """Return a finite number as a float; None for everything else. True and False count as 1 and 0."""
    # The comparison is False for NaN, infinities, and integers that are too large for a float.
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names. Values that are no number, text, list or null become text."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value if isinstance(value, str | int | float | list | None) else str(value)
    return flat


def merge_rows(rows: Iterable[LogRow]) -> tuple[list[LogRow], list[str]]:
    """Merge the rows of each step, and drop those that a resumed run wrote again. Return rows and notes.

    Some trainers write several rows per step, which belong together, and their processes write at their own pace. If
    most measurements of a row have been made at a later step, the run was resumed from a checkpoint: the later rows
    count, and the earlier ones of the repeated steps do not.

    Example:
        >>> rows = [LogRow(1, {"a": 1.0}, 1), LogRow(1, {"b": 2.0}, 2), LogRow(2, {"a": 3.0}, 3)]
        >>> [(row.step, row.values) for row in merge_rows(rows)[0]]
        [(1, {'a': 1.0, 'b': 2.0}), (2, {'a': 3.0})]
    """
    merged: dict[int, LogRow] = {}
    last_steps: dict[str, int] = {}
    notes: list[str] = []
    overwritten: dict[int, str] = {}
    for row in rows:
        later = [step for name in row.values if (step := last_steps.get(name, row.step)) > row.step]
        if 2 * len(later) > len(row.values):
            notes.append(
                f"At line {row.line} the step goes back from {max(later)} to {row.step}: the run was resumed, and "
                "its later rows count."
            )
            merged = {step: earlier for step, earlier in merged.items() if step < row.step}
            last_steps = {name: min(step, row.step) for name, step in last_steps.items()}
        last = merged.get(row.step)
        if last:
            differing = [name for name, value in row.values.items() if last.values.get(name, value) != value]
            # A trainer may log several optimizer steps per step, but then these rows lack other measurements.
            if last.values.keys() <= row.values.keys() and 2 * len(differing) > len(row.values):
                overwritten.setdefault(row.step, differing[0])
            zeros = (last.rounded_zeros - row.values.keys()) | row.rounded_zeros
            merged[row.step] = LogRow(row.step, {**last.values, **row.values}, last.line, zeros)
        else:
            merged[row.step] = row
        last_steps.update(dict.fromkeys(row.values, row.step))
    if overwritten:
        step, name = next(iter(overwritten.items()))
        notes.append(
            f"{len(overwritten)} steps, such as {step}, have several values of {name}, of which the last counts: if "
            "they are of several runs, name the column that tells these apart by --arm or --seed."
        )
    steps = sorted(merged)
    return [merged[step] for step in steps], [*notes, *_describe_gaps([step for step in steps if step > 0])]


def _describe_gaps(steps: list[int]) -> list[str]:
    """Say which steps a log lacks, and over how many steps its rows average."""
    if len(steps) < 3:
        return []
    # Rows of every n-th step leave no gap.
    interval = Counter(after - before for before, after in pairwise(steps)).most_common(1)[0][0]
    notes = [f"Rows are {interval} steps apart: each may be a mean over them."] if interval > 1 else []
    if steps[0] > interval:
        notes.append(f"The log begins at step {steps[0]}: earlier rows are lost.")
    gaps = [f"{before} to {after}" for before, after in pairwise(steps) if after - before > interval]
    if gaps:
        notes.append(f"Rows are missing from step {', '.join(gaps[:5])}{', ...' if len(gaps) > 5 else ''}.")
    return notes


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
