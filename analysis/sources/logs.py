"""The log of another trainer: rows of numbers under the trainer's names, and the settings that it printed."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


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
