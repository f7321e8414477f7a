"""Our runs against the numbers that others published: one test a cell, fixed before the first run.

The test of a cell is Welch's of our seeds against the published mean, standard deviation and number of seeds, where a
spread of 0, on either side, counts as `Cell.floor`. p-values are Holm's over all cells that are tested together.
"agrees" says that no difference is resolved; the interval says how large a one could have been missed. What cannot be
tested is in the table all the same, with its reason.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED
from analysis.data.families import Row
from analysis.data.frames import StudyFrames, records
from analysis.published.cells import AGREES, DIFFERS, NEVER, OPEN, PER_SEED, POOLED, Cell
from analysis.published.update_rule_sandbox import CELLS
from analysis.stats.estimates import Estimate, Floats, Sample, holm, welch
from analysis.sweep.verdicts import LEVEL, p_value, word

NOT_TESTED = "cannot be tested"
PLANNED_SEEDS = 10
_NO_SPREAD = 1e-12
COLUMNS = (
    "study", "arm", "column", "section", "kind", "published_mean", "published_spread", "published_n", "mean", "spread",
    "n", "difference", "low", "high", "df", "p", "p_holm", "verdict", "reason", "expected", "as_expected", "why",
    "notes",
)  # fmt: skip


def reproduction(frames: StudyFrames, cells: Sequence[Cell] = CELLS) -> pd.DataFrame:
    """One row a published cell whose study is in `frames`, in the order of `cells`; columns: `COLUMNS`.

    mean, spread (standard deviation, ddof 1) and n are ours: over scored runs (completed, or stopped by a rule, which
    keep their last row), or over logged rows where the cell is pooled. verdict: agrees, differs or cannot be tested;
    reason: why not. as_expected: whether it is what `expected` said; None where that was open or nothing was tested.
    notes: runs of the arm that were not counted, were stopped, or never reached the step. A cell that two studies
    run is tested once, on the first of them that is here.
    """
    here = {study["name"] for study in frames.studies}
    rows = [_row(frames, cell, study) for cell in cells for study in _study(cell, here)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table["p_holm"] = holm(table["p"].to_numpy(dtype=float))
    tested = table["reason"] == ""
    words = np.where(table["p_holm"] < LEVEL, DIFFERS, AGREES)
    table["verdict"] = np.where(tested, words, NOT_TESTED)
    table["as_expected"] = [
        verdict == expected if verdict != NOT_TESTED and expected != OPEN else None
        for verdict, expected in zip(table["verdict"], table["expected"], strict=True)
    ]
    return table


def _study(cell: Cell, here: set[str]) -> list[str]:
    return [name for name in cell.studies if name in here][:1]


def _row(frames: StudyFrames, cell: Cell, study: str) -> Row:
    trials = frames.trials[(frames.trials["study"] == study) & (frames.trials["arm"] == cell.arm)]
    runs = trials[trials["status"].isin(SCORED)]
    steps = frames.steps[(frames.steps["study"] == study) & frames.steps["run_id"].isin(runs["run_id"])]
    values = _numbers(steps if cell.kind == POOLED else runs, cell.column)
    ours = Sample(float(values.mean()) if len(values) else math.nan, spread_of(values), len(values))
    reason = _reason(cell, runs, values)
    found = Estimate(ours.mean - cell.mean) if reason else _test(ours, cell)
    return {
        "study": study, "arm": cell.arm, "column": cell.column, "section": cell.section, "kind": cell.kind,
        "published_mean": cell.mean, "published_spread": cell.spread, "published_n": cell.n,
        "mean": ours.mean, "spread": ours.spread, "n": ours.n,
        "difference": found.value, "low": found.low, "high": found.high, "df": found.df, "p": found.p,
        "reason": reason, "expected": cell.expected, "why": cell.why, "notes": _notes(cell, trials),
    }  # fmt: skip


def _numbers(rows: pd.DataFrame, column: str) -> Floats:
    return rows[column].dropna().to_numpy(dtype=float) if column in rows else np.empty(0)


def spread_of(values: Floats) -> float:
    """Standard deviation (ddof 1) of numbers (n,), exactly 0 where they are equal; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    return 0.0 if np.ptp(values) < _NO_SPREAD else float(values.std(ddof=1))


def _test(ours: Sample, cell: Cell) -> Estimate:
    theirs = Sample(cell.mean, cell.spread or cell.floor, cell.n)
    return welch(ours._replace(spread=ours.spread or cell.floor), theirs)


def _reason(cell: Cell, runs: pd.DataFrame, values: Floats) -> str:
    """Why a cell cannot be tested; empty where it can."""
    if cell.kind == POOLED:
        return "pooled over rows: no spread of seeds is published"
    if not len(runs):
        return "no run of this arm ended by the protocol"
    other = _other_settings(cell, runs)
    if other:
        return other
    if cell.column.startswith("first_step"):
        reached = f"{len(values)} of our {len(runs)} runs reach it"
        if cell.kind == NEVER:
            return f"none of the {cell.n} published seeds reaches it, {reached}"
        if len(values) < len(runs):
            return f"{reached}, all {cell.n} published seeds do: the mean of those that do would be too small"
    return "" if len(values) > 1 else f"{len(values)} of our runs has a value: two are needed for a spread"


def _other_settings(cell: Cell, runs: pd.DataFrame) -> str:
    """The first setting in which our runs differ from the published ones."""
    for name, value in cell.conditions.settings.items():
        held = runs[f"config/{name}"].unique().tolist() if f"config/{name}" in runs else []
        if held != [value]:
            ours = ", ".join(map(str, held)) or "not recorded"
            return f"the published runs have {name} {value}, ours: {ours}"
    return ""


def _notes(cell: Cell, trials: pd.DataFrame) -> str:
    """Runs of the arm that are told apart, with their seeds."""
    parts = []
    for status, rows in trials[trials["status"] != "completed"].groupby("status", sort=False):
        counted = "counted with the last row" if status in SCORED else "not counted"
        parts.append(f"{word(str(status))}, {counted}: {_seeds(rows)}")
    if cell.column.startswith("first_step") and cell.column in trials:
        scored = trials[trials["status"].isin(SCORED)]
        missing = scored[scored[cell.column].isna()]
        parts += [f"never reached: {_seeds(missing)}"] if len(missing) else []
    return "; ".join(parts)


def _seeds(rows: pd.DataFrame) -> str:
    seeds = ", ".join(str(seed) for seed in sorted(rows["seed"]))
    return f"seed{'s' if len(rows) > 1 else ''} {seeds}"


def sentence(row: Row) -> str:
    """The verdict on one cell in words. row: of `reproduction`."""
    name = f"{row['study']} {row['arm']} {row['column']}" + (f" ({row['section']})" if row["kind"] == POOLED else "")
    theirs = f"never (n {row['published_n']})" if row["kind"] == NEVER else _number(row, "published_")
    if row["verdict"] == NOT_TESTED:
        verdict = f"{NOT_TESTED}: {row['reason']}"
    else:
        size = f"{row['difference']:+.4g} [{row['low']:+.4g}, {row['high']:+.4g}]"
        told = {True: "as expected", False: "not as expected", None: "open beforehand"}[row["as_expected"]]
        verdict = f"{row['verdict']}: {size}, Holm {p_value(row['p_holm'])}, {told}"
    notes = f" ({row['notes']})" if row["notes"] else ""
    return f"{name}: published {theirs}, ours {_number(row, '')}: {verdict}{notes}"


def _number(row: Row, whose: str) -> str:
    """`0.3345 (SD 0.0043, n 3)`. whose: "published_" or "" for ours."""
    if not row[f"{whose}n"]:
        return "none"
    spread = "" if math.isnan(row[f"{whose}spread"]) else f"SD {row[f'{whose}spread']:.3g}, "
    return f"{row[f'{whose}mean']:.4g} ({spread}{'rows' if row['kind'] == POOLED else 'n'} {row[f'{whose}n']})"


def sentences(table: pd.DataFrame) -> list[str]:
    """One line a cell. table: `reproduction`."""
    return [sentence(row) for row in records(table)]


def tally(table: pd.DataFrame) -> str:
    """How the cells turned out, in one line. table: `reproduction`."""
    if table.empty:
        return "No published number is held for these studies."
    counts = table["verdict"].value_counts()
    parts = [f"{counts[verdict]} {_verb(verdict, counts[verdict])}" for verdict in (AGREES, DIFFERS, NOT_TESTED)
             if verdict in counts]  # fmt: skip
    surprising = int((table["as_expected"] == False).sum())  # noqa: E712 (None is neither)
    seeds = table.loc[table["kind"] == PER_SEED, "n"].max()
    fewer = "" if seeds >= PLANNED_SEEDS else f" At most {seeds:.0f} of our seeds: {PLANNED_SEEDS} were planned."
    return f"{len(table)} published cells: {', '.join(parts)}; {surprising} not as expected.{fewer}"


def _verb(verdict: str, count: int) -> str:
    return verdict if count == 1 else {AGREES: "agree", DIFFERS: "differ"}.get(verdict, verdict)
