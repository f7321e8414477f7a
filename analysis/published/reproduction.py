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

from analysis.data.compare import SCORED_STATUSES
from analysis.data.families import Row
from analysis.data.frames import StudyFrames, to_records
from analysis.published.cells import DIFFERS, NEVER_REACHED, NO_EXPECTATION, NOT_DISTINGUISHABLE, PER_SEED, POOLED, Cell
from analysis.published.update_rule_sandbox import CELLS
from analysis.stats.estimates import Estimate, Floats, SampleStats, holm_adjust, welch_t_test
from analysis.sweep.verdicts import SIGNIFICANCE_LEVEL, format_p_value, format_status

NOT_TESTED = "cannot be tested"
PLANNED_SEEDS = 10
_ZERO_STD_TOLERANCE = 1e-12
COLUMNS = (
    "study", "arm", "column", "section", "kind", "published_mean", "published_spread", "published_n", "mean", "spread",
    "n", "difference", "low", "high", "df", "p", "p_holm", "verdict", "reason", "expected", "as_expected", "why",
    "notes",
)  # fmt: skip


def compare_to_published(frames: StudyFrames, cells: Sequence[Cell] = CELLS) -> pd.DataFrame:
    """One row a published cell whose study is in `frames`, in the order of `cells`; columns: `COLUMNS`.

    mean, spread (standard deviation, ddof 1) and n are ours: over scored runs (completed, or stopped by a rule, which
    keep their last row), or over logged rows where the cell is pooled. verdict: agrees, differs or cannot be tested;
    reason: why not. as_expected: whether it is what `expected` said; None where that was open or nothing was tested.
    notes: runs of the arm that were not counted, were stopped, or never reached the step. A cell that two studies
    run is tested once, on the first of them that is here.
    """
    study_names = {study["name"] for study in frames.studies}
    rows = [_make_row(frames, cell, study) for cell in cells for study in _select_study(cell, study_names)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table["p_holm"] = holm_adjust(table["p"].to_numpy(dtype=float))
    is_tested = table["reason"] == ""
    test_verdicts = np.where(table["p_holm"] < SIGNIFICANCE_LEVEL, DIFFERS, NOT_DISTINGUISHABLE)
    table["verdict"] = np.where(is_tested, test_verdicts, NOT_TESTED)
    table["as_expected"] = [
        verdict == expected if verdict != NOT_TESTED and expected != NO_EXPECTATION else None
        for verdict, expected in zip(table["verdict"], table["expected"], strict=True)
    ]
    return table


def _select_study(cell: Cell, study_names: set[str]) -> list[str]:
    return [name for name in cell.studies if name in study_names][:1]


def _make_row(frames: StudyFrames, cell: Cell, study: str) -> Row:
    trials = frames.trials[(frames.trials["study"] == study) & (frames.trials["arm"] == cell.arm)]
    runs = trials[trials["status"].isin(SCORED_STATUSES)]
    steps = frames.steps[(frames.steps["study"] == study) & frames.steps["run_id"].isin(runs["run_id"])]
    values = _select_values(steps if cell.kind == POOLED else runs, cell.column)
    sample = SampleStats(float(values.mean()) if len(values) else math.nan, sample_std(values), len(values))
    reason = _explain_untestable(cell, runs, values)
    estimate = Estimate(sample.mean - cell.mean) if reason else _compute_welch_test(sample, cell)
    return {
        "study": study, "arm": cell.arm, "column": cell.column, "section": cell.section, "kind": cell.kind,
        "published_mean": cell.mean, "published_spread": cell.std, "published_n": cell.n,
        "mean": sample.mean, "spread": sample.std, "n": sample.n,
        "difference": estimate.value, "low": estimate.low, "high": estimate.high, "df": estimate.df, "p": estimate.p,
        "reason": reason, "expected": cell.expected_verdict, "why": cell.rationale, "notes": _format_notes(cell, trials),
    }  # fmt: skip


def _select_values(rows: pd.DataFrame, column: str) -> Floats:
    return rows[column].dropna().to_numpy(dtype=float) if column in rows else np.empty(0)


def sample_std(values: Floats) -> float:
    """Standard deviation (ddof 1) of numbers (n,), exactly 0 where they are equal; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    return 0.0 if np.ptp(values) < _ZERO_STD_TOLERANCE else float(values.std(ddof=1))


def _compute_welch_test(ours: SampleStats, cell: Cell) -> Estimate:
    theirs = SampleStats(cell.mean, cell.std or cell.min_std, cell.n)
    return welch_t_test(ours._replace(std=ours.std or cell.min_std), theirs)


def _explain_untestable(cell: Cell, runs: pd.DataFrame, values: Floats) -> str:
    """Why a cell cannot be tested; empty where it can."""
    if cell.kind == POOLED:
        return "pooled over rows: no spread of seeds is published"
    if not len(runs):
        return "no run of this arm ended by the protocol"
    setting_mismatch = _find_setting_mismatch(cell, runs)
    if setting_mismatch:
        return setting_mismatch
    if cell.column.startswith("first_step"):
        reached_text = f"{len(values)} of our {len(runs)} runs reach it"
        if cell.kind == NEVER_REACHED:
            return f"none of the {cell.n} published seeds reaches it, {reached_text}"
        if len(values) < len(runs):
            return f"{reached_text}, all {cell.n} published seeds do: the mean of those that do would be too small"
    return "" if len(values) > 1 else f"{len(values)} of our runs has a value: two are needed for a spread"


def _find_setting_mismatch(cell: Cell, runs: pd.DataFrame) -> str:
    """The first setting in which our runs differ from the published ones."""
    for name, value in cell.conditions.settings.items():
        our_values = runs[f"config/{name}"].unique().tolist() if f"config/{name}" in runs else []
        if our_values != [value]:
            our_text = ", ".join(map(str, our_values)) or "not recorded"
            return f"the published runs have {name} {value}, ours: {our_text}"
    return ""


def _format_notes(cell: Cell, trials: pd.DataFrame) -> str:
    """Runs of the arm that are told apart, with their seeds."""
    notes = []
    for status, rows in trials[trials["status"] != "completed"].groupby("status", sort=False):
        counting_text = "counted with the last row" if status in SCORED_STATUSES else "not counted"
        notes.append(f"{format_status(str(status))}, {counting_text}: {_format_seeds(rows)}")
    if cell.column.startswith("first_step") and cell.column in trials:
        scored_runs = trials[trials["status"].isin(SCORED_STATUSES)]
        missing_runs = scored_runs[scored_runs[cell.column].isna()]
        notes += [f"never reached: {_format_seeds(missing_runs)}"] if len(missing_runs) else []
    return "; ".join(notes)


def _format_seeds(rows: pd.DataFrame) -> str:
    seeds = ", ".join(str(seed) for seed in sorted(rows["seed"]))
    return f"seed{'s' if len(rows) > 1 else ''} {seeds}"


def format_sentence(row: Row) -> str:
    """The verdict on one cell in words. row: of `reproduction`."""
    name = f"{row['study']} {row['arm']} {row['column']}" + (f" ({row['section']})" if row["kind"] == POOLED else "")
    published_text = (
        f"never (n {row['published_n']})" if row["kind"] == NEVER_REACHED else _format_number(row, "published_")
    )
    if row["verdict"] == NOT_TESTED:
        verdict_text = f"{NOT_TESTED}: {row['reason']}"
    else:
        interval_text = f"{row['difference']:+.4g} [{row['low']:+.4g}, {row['high']:+.4g}]"
        expectation_text = {True: "as expected", False: "not as expected", None: "open beforehand"}[row["as_expected"]]
        verdict_text = f"{row['verdict']}: {interval_text}, Holm {format_p_value(row['p_holm'])}, {expectation_text}"
    notes = f" ({row['notes']})" if row["notes"] else ""
    return f"{name}: published {published_text}, ours {_format_number(row, '')}: {verdict_text}{notes}"


def _format_number(row: Row, prefix: str) -> str:
    """`0.3345 (SD 0.0043, n 3)`. whose: "published_" or "" for ours."""
    if not row[f"{prefix}n"]:
        return "none"
    std_text = "" if math.isnan(row[f"{prefix}spread"]) else f"SD {row[f'{prefix}spread']:.3g}, "
    return f"{row[f'{prefix}mean']:.4g} ({std_text}{'rows' if row['kind'] == POOLED else 'n'} {row[f'{prefix}n']})"


def format_sentences(table: pd.DataFrame) -> list[str]:
    """One line a cell. table: `reproduction`."""
    return [format_sentence(row) for row in to_records(table)]


def summarize_verdicts(table: pd.DataFrame) -> str:
    """How the cells turned out, in one line. table: `reproduction`."""
    if table.empty:
        return "No published number is held for these studies."
    counts = table["verdict"].value_counts()
    verdict_counts = [f"{counts[verdict]} {_inflect_verdict(verdict, counts[verdict])}" for verdict in (NOT_DISTINGUISHABLE, DIFFERS, NOT_TESTED)
             if verdict in counts]  # fmt: skip
    unexpected_count = int((table["as_expected"] == False).sum())  # noqa: E712 (None is neither)
    max_seeds = table.loc[table["kind"] == PER_SEED, "n"].max()
    seed_warning = (
        "" if max_seeds >= PLANNED_SEEDS else f" At most {max_seeds:.0f} of our seeds: {PLANNED_SEEDS} were planned."
    )
    return (
        f"{len(table)} published cells: {', '.join(verdict_counts)}; {unexpected_count} not as expected.{seed_warning}"
    )


def _inflect_verdict(verdict: str, count: int) -> str:
    return verdict if count == 1 else {NOT_DISTINGUISHABLE: "agree", DIFFERS: "differ"}.get(verdict, verdict)
