"""Compare our runs with published numbers: one test per cell, fixed before the first run.

Each cell is tested with Welch's t test: our seeds against the published mean, standard deviation and number of seeds. A
standard deviation of 0, on either side, is replaced by `Cell.min_std`. A cell "differs" if Holm's p over all cells that
are tested together is below .05. It is "equal" if two one-sided tests show a difference below `Cell.margin`, each at
.05; these p-values are not corrected, since every such cell is a separate claim. Otherwise it is "open". Cells that
cannot be tested stay in the table, with the reason.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, SIGNIFICANCE_LEVEL
from analysis.data.frames import StudyFrames
from analysis.data.schemas import Row
from analysis.stats.estimates import Estimate, Floats, SampleStats, holm_adjust, welch_t_test
from analysis.stats.noise import compute_equivalence_p_value
from sandboxes.toys.published.cells import (
    CELLS,
    DIFFERS,
    EQUAL,
    MEAN_ALONE,
    NEVER_REACHED,
    NO_EXPECTATION,
    OPEN,
    PER_SEED,
    POOLED,
    SOURCES,
    Cell,
)

NOT_TESTED = "cannot be tested"
# Our planned seeds per arm, declared with the test before the first run; a report with fewer says so.
PLANNED_SEEDS = 10
# Rounding in a mean of equal numbers would give a tiny std, and Welch's test a huge t.
_ZERO_STD_TOLERANCE = 1e-12
COLUMNS = (
    *("study", "arm", "column", "section", "kind"),
    *("published_mean", "published_std", "published_n", "mean", "std", "n"),
    *("difference", "low", "high", "df", "p", "p_holm", "margin", "p_equal", "verdict", "reason"),
    *("expected_verdict", "as_expected", "rationale"),
)


def compare_to_published(frames: StudyFrames, cells: Sequence[Cell] = CELLS) -> pd.DataFrame:
    """Compare our runs with each published cell whose study is in `frames`: a row per cell, with the columns `COLUMNS`.

    mean, std (ddof 1) and n are ours, over scored runs; for a pooled cell, over logged rows. reason: why a cell cannot
    be tested. as_expected: whether the verdict on differing matches the expectation; None without an expectation or a
    test. A cell that two studies run is tested once, with the first of them that is in `frames`.
    """
    study_names = {study.name for study in frames.studies}
    rows = [
        _make_row(frames, cell, study)
        for cell in cells
        for study in [name for name in cell.studies if name in study_names][:1]
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    # Cells that cannot be tested have no p (NaN), so they do not count in Holm's correction.
    table["p_holm"] = holm_adjust(table["p"].to_numpy(dtype=float))
    is_tested = table["reason"] == ""
    is_equal = table["p_equal"] < SIGNIFICANCE_LEVEL
    test_verdicts = np.where(table["p_holm"] < SIGNIFICANCE_LEVEL, DIFFERS, np.where(is_equal, EQUAL, OPEN))
    table["verdict"] = np.where(is_tested, test_verdicts, NOT_TESTED)
    table["as_expected"] = [
        (verdict == DIFFERS) == (expected == DIFFERS) if verdict != NOT_TESTED and expected != NO_EXPECTATION else None
        for verdict, expected in zip(table["verdict"], table["expected_verdict"], strict=True)
    ]
    return table


def describe_sources(frames: StudyFrames) -> str:
    """Name the sources of the published numbers of the studies in `frames`, joined by "and"."""
    study_names = {study.name for study in frames.studies}
    return " and ".join(dict.fromkeys(SOURCES[cell.source] for cell in CELLS if study_names & set(cell.studies)))


def _make_row(frames: StudyFrames, cell: Cell, study: str) -> Row:
    trials = frames.trials[(frames.trials["study"] == study) & (frames.trials["arm"] == cell.arm)]
    runs = trials[trials["status"].isin(SCORED_STATUSES)]
    steps = frames.steps[(frames.steps["study"] == study) & frames.steps["run_id"].isin(runs["run_id"])]
    # A pooled cell is over logged rows, any other cell over runs.
    rows = steps if cell.kind == POOLED else runs
    values = rows[cell.column].dropna().to_numpy(dtype=float) if cell.column in rows else np.empty(0)
    sample = SampleStats(float(values.mean()) if len(values) else math.nan, sample_std(values), len(values))
    reason = _explain_untestable(cell, runs, values)
    estimate = Estimate(sample.mean - cell.mean)
    if not reason:
        published_sample = SampleStats(cell.mean, cell.std or cell.min_std, cell.n)
        estimate = welch_t_test(sample._replace(std=sample.std or cell.min_std), published_sample)
    fields = ("arm", "column", "section", "kind", "margin", "expected_verdict", "rationale")
    return {
        "study": study,
        **{name: getattr(cell, name) for name in fields},
        **{f"published_{name}": getattr(cell, name) for name in ("mean", "std", "n")},
        **sample._asdict(),
        "difference": estimate.value,
        **{name: getattr(estimate, name) for name in ("low", "high", "df", "p")},
        "p_equal": compute_equivalence_p_value(estimate, cell.margin),
        "reason": reason,
    }


def sample_std(values: Floats) -> float:
    """Compute the standard deviation (ddof 1) of values (n,); exactly 0 if all are equal, NaN if n < 2."""
    if len(values) < 2:
        return math.nan
    return 0.0 if np.ptp(values) < _ZERO_STD_TOLERANCE else float(values.std(ddof=1))


def _explain_untestable(cell: Cell, runs: pd.DataFrame, values: Floats) -> str:
    """Explain why a cell cannot be tested; empty if it can."""
    if cell.kind == POOLED:
        return "the number is pooled over rows, and no standard deviation over seeds is published"
    if cell.kind == MEAN_ALONE:
        return "the published mean has no standard deviation"
    if not len(runs):
        return "no run of this arm was completed or stopped by a rule"
    # A run with other settings is a different experiment, and must not be tested against the published number.
    for name, value in cell.conditions.items():
        our_values = runs[f"config/{name}"].unique().tolist() if f"config/{name}" in runs else []
        if our_values != [value]:
            our_text = ", ".join(map(str, our_values)) or "not recorded"
            return f"{name} is {value} in the published runs, {our_text} in ours"
    if cell.is_step:
        reached_text = f"{len(values)} of our {len(runs)} runs"
        if cell.kind == NEVER_REACHED:
            return f"none of the {cell.n} published seeds reaches this step; {reached_text} do"
        # Runs that never reach the step have no number, so a mean over the others would describe the fastest runs.
        if len(values) < len(runs):
            return (
                f"{reached_text} reach this step, and all {cell.n} published seeds do: a mean over only the runs that "
                "reach it would be too small"
            )
    return "" if len(values) > 1 else f"a standard deviation needs two values; our runs have {len(values)}"


def summarize_verdicts(table: pd.DataFrame) -> str:
    """Count the cells by verdict, in one line. table: from `compare_to_published`."""
    if table.empty:
        return "No published numbers are recorded for these studies."
    counts = table["verdict"].value_counts()
    verdict_counts = [
        f"{counts[verdict]} {'differ' if verdict == DIFFERS and counts[verdict] != 1 else verdict}"
        for verdict in (EQUAL, DIFFERS, OPEN)
        if verdict in counts
    ]
    # Pooled cells count rows in n, and cells without a published mean count seeds that reach a step. Without any other
    # cell, the maximum is NaN, which is not below the plan.
    max_seeds = table.loc[table["kind"] == PER_SEED, "n"].max()
    seed_warning = (
        f" Our arms have at most {max_seeds:.0f} of {PLANNED_SEEDS} planned seeds." if max_seeds < PLANNED_SEEDS else ""
    )
    if not verdict_counts:
        return f"None of the {len(table)} published numbers can be tested.{seed_warning}"
    expectations = table["as_expected"].dropna()
    return (
        f"Of {len(table)} published numbers, {(table['verdict'] != NOT_TESTED).sum()} can be tested: "
        f"{', '.join(verdict_counts)}. Of {len(expectations)} verdicts with an expectation, {expectations.sum()} "
        f"{'is' if expectations.sum() == 1 else 'are'} as expected.{seed_warning}"
    )
