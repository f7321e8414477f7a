"""Translate a trainer's names of measurements to ours, with the table `names.csv`."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainable.files.paths import read_bytes
from trainable.runs.records import IMPORTED_COLUMNS, STEP_COLUMNS
from trainable.sources.logs import LogError, LogRow, RunLog

KEEPS_ZERO = ("train_reward", "val_success", "train_truncated", "zero_std_fraction", "pg_clipfrac", "pg_clipfrac_lower")
"""Shares and rewards, of which a value printed as 0.000 is 0 up to rounding. In other columns it is missing: a learning
rate of 1e-6 and a KL of 4e-4 are printed so, too."""


_STOPPED = "early_stopped/"
_VALIDATES_FIRST = ("tinker", "prime-rl")
"""Trainers whose validation in a row, counted from 0, was made before the update of that row."""

OUR_COLUMNS = frozenset(column.name for column in (*STEP_COLUMNS, *IMPORTED_COLUMNS))


class Name(NamedTuple):
    """One of the trainer's names for a column of ours: a sum of terms, its complement to 1, or its negative."""

    column: str
    terms: tuple[re.Pattern[str], ...]
    """Patterns of the names whose values are added. The values of all names that match one pattern are averaged."""
    is_complement: bool = False
    is_negative: bool = False


def parse_name(column: str, key: str) -> Name:
    """Parse a key of `names.csv`: names with wildcards, joined by ` + `, after `1 - ` for the complement.

    After `- ` the number is better if it is lower, and its sign is changed.

    A name that begins with `^` is a regular expression.

    >>> parse_name("zero_std_fraction", "1 - solved_some").is_complement
    True
    """
    terms = key.removeprefix("1 ").removeprefix("- ").split(" + ")
    patterns = tuple(re.compile(term if term.startswith("^") else translate(term)) for term in terms)
    return Name(column, patterns, key.startswith("1 - "), key.startswith("- "))


@cache
def read_names() -> Mapping[str, Sequence[Name]]:
    """Read `names.csv`: by trainer, its names in order of preference."""
    names: dict[str, list[Name]] = {}
    table = read_bytes(Path(__file__).with_name("names.csv")).decode()
    for entry in csv.DictReader(table.splitlines()):
        names.setdefault(entry["trainer"], []).append(parse_name(entry["column"], entry["key"]))
    return names


def find_trainer(keys: Iterable[str]) -> str:
    """Find the trainer of whose columns most occur in `keys`; empty if there is none with a reward or a success."""
    keys = list(keys)
    columns = {
        trainer: {name.column for name in names if all(any(map(term.match, keys)) for term in name.terms)}
        for trainer, names in read_names().items()
    }
    trainer = max(columns, key=lambda name: len(columns[name]))
    return trainer if columns[trainer] & {"train_reward", "val_success"} else ""


def find_keys(log: RunLog, own_names: Sequence[Name], column: str) -> list[str]:
    """Find the measurements of a log that become `column`, as `names.csv` writes them; see `translate_rows`."""
    names = [name for name in (*own_names, *read_names().get(find_trainer(log.keys), ())) if name.column == column]
    spellings: dict[str, None] = {}
    for keys in dict.fromkeys(tuple(row.values) for row in log.rows):
        for name in names:
            terms = [", ".join(filter(term.match, keys)) for term in name.terms]
            if all(terms):
                spellings["1 - " * name.is_complement + "- " * name.is_negative + " + ".join(terms)] = None
                break
    return list(spellings)


def translate_rows(
    log: RunLog, own_names: Sequence[Name] = (), trainer: str = "", *, counts_from_zero: bool = False
) -> list[dict[str, Any]]:
    """Make the rows of a run from its log: our columns, then the trainer's under its own names.

    own_names: names that a user has typed, which take precedence. trainer: the trainer, as `names.csv` calls it; by
    default it is found from the names in the log. A value before training becomes a column `base_...`
    of the first step, as in our own runs. What the trainer did not measure stays missing. A log that has a reward of
    the training at step 0 counts from 0, and its steps are counted from 1 here. counts_from_zero: whether there is such
    a reward at its beginning, which `log` lacks.

    Raises LogError if the log has neither a reward nor a success, or no step of the training.
    """
    trainer = trainer or find_trainer(log.keys)
    names = [*own_names, *(read_names().get(trainer) or ())]
    if not trainer and not {"train_reward", "val_success"} & {name.column for name in own_names}:
        raise LogError(
            f"{log.path} has steps, but none of the rewards or successes that RL trainers write, so it is no log of an "
            f"RL run that is known here: type --column train_reward=NAME with one of its names, such as "
            f"{', '.join(log.keys[:8])}."
        )
    # Other trainers have measurements of the same name: TRL's reward_std is over the batch, and not within groups.
    ours = {name.column for name in names} | ({*OUR_COLUMNS} if trainer != "tune_study" else set())
    matches: dict[tuple[str, ...], list[tuple[Name, list[list[str]]]]] = {}
    translated: list[tuple[LogRow, dict[str, float]]] = []
    for row in log.rows:
        keys = tuple(row.values)
        if keys not in matches:
            matches[keys] = [
                (name, [[key for key in keys if term.match(key)] for term in name.terms]) for name in names
            ]
        values: dict[str, float] = {}
        for name, keys_by_term in matches[keys]:
            if name.column in values or not all(keys_by_term):
                continue
            is_rounded = any(key in row.rounded_zeros for term_keys in keys_by_term for key in term_keys)
            if is_rounded and name.column not in KEEPS_ZERO:
                continue
            total = sum(sum(row.values[key] for key in term_keys) / len(term_keys) for term_keys in keys_by_term)
            values[name.column] = 1 - total if name.is_complement else -total if name.is_negative else total
        translated.append((row, values))
    has_step_0 = any(row.step == 0 and "train_reward" in values for row, values in translated)
    shift = int(counts_from_zero or has_step_0)
    if shift:
        log.notes.append("The log counts steps from 0, and these rows from 1.")
    if trainer == "areal":
        log.notes.append("AReaL never counts back: after a resume, steps of the log may be later than those trained.")
    rows, base = list[dict[str, Any]](), dict[str, float]()
    for row, values in translated:
        step = max(row.step + shift, 0)
        validation = {column: value for column, value in values.items() if column.startswith("val_")}
        if shift and trainer in _VALIDATES_FIRST and row.step >= 0:
            earlier = base if row.step == 0 else rows[-1] if rows and rows[-1]["step"] == row.step else None
            if earlier is not None:
                for column in validation:
                    earlier[column] = values.pop(column)
                if not values:
                    continue
        elif step == 0:
            base |= validation
        if step == 0:
            continue
        theirs = {
            f"{trainer or 'log'}/{key}" if key in ours and values.get(key) != value else key: value
            for key, value in row.values.items()
        }
        first = {f"base_{column}": value for column, value in base.items()} if not rows else {}
        # RAGEN names the rule that has stopped a run.
        rule = next((key.removeprefix(_STOPPED) for key in row.values if key.startswith(_STOPPED)), "")
        stop = {"stop_rule": rule, "stop_step": step} if rule and row.values[_STOPPED + rule] else {}
        origin = {"source": log.format, "file": str(log.path), "line": row.line}
        rows.append({**theirs, **values, **first, "step": step, **stop, **origin})
    if not rows:
        raise LogError(f"{log.path} has no step of the training, only what was measured before it: leave it out.")
    return rows
