"""Where training breaks: the edge of each line of a study that declares a dose, its safe band, and declared shifts.

A line is a set of arms that differ only in the dose, such as the learning rate. Its edge is the dose at which half of
the runs collapse (`analysis.stats.dose_response`), as `analysis.sweep.collapse` defines it. A shift is the difference
of two edges, for each declared contrast whose pairs compare two lines at equal doses.
"""

import math

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, get_margin, make_estimate_columns, require_single_study
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.grid.layout import label_value, select_settings
from analysis.stats.dose_response import DoseCounts, EdgeEstimate, count_events, estimate_edge, estimate_shift
from analysis.stats.estimates import Estimate, Floats, wilson_interval
from analysis.sweep.collapse import find_run_ends
from analysis.sweep.contrasts import read_contrasts
from trainable.config.aliases import shorten_setting

SUCCESS_COLUMN = "late_val_success"
MIN_SEEDS_OF_EDGE = 2
"""A single seed does not show how much seeds differ, however many doses there are."""
_RUN_COLUMNS = ("run_id", "arm", "seed", "line", "dose", "collapsed", "success")


def make_run_table(frames: StudyFrames) -> pd.DataFrame:
    """Make a table of the scored runs of a study with a dose: run_id, arm, seed, line, dose, collapsed, success.

    line: the settings other than the dose in which arms differ, such as `KL 0.1, advantage grpo`; `all arms` if there
    are none. success: at the end, a fraction. Empty if study.json declares no dose, or if no run has that setting.
    """
    dose, trials = require_single_study(frames).studies[0].axis.dose, frames.trials
    column = f"config/{dose}"
    if not dose or column not in trials or not pd.api.types.is_numeric_dtype(trials[column]):
        return pd.DataFrame(columns=list(_RUN_COLUMNS))
    settings = select_settings(trials)
    others = [name for name in settings if name != dose]
    table = trials[["run_id", "arm", "seed"]].assign(
        line=[
            ", ".join(f"{shorten_setting(name)} {label_value(row[name])}" for name in others) or "all arms"
            for row in to_records(settings)
        ],
        dose=trials[column].astype(float),
        success=trials[SUCCESS_COLUMN].astype(float),
    )
    ends = find_run_ends(frames)
    has_collapsed = dict(zip(ends["run_id"], ends["is_collapse"], strict=True))
    table = table[trials["status"].isin(SCORED_STATUSES) & (table["dose"] > 0)]
    table = table.assign(collapsed=[has_collapsed.get(run_id, False) for run_id in table["run_id"]])
    return table[list(_RUN_COLUMNS)].reset_index(drop=True)


def summarize_doses(runs: pd.DataFrame) -> pd.DataFrame:
    """Summarize each line and dose in a row, in ascending order of doses. runs: from `make_run_table`.

    Columns: line, dose, runs, collapsed (runs), fraction (of runs that collapsed, with Wilson's 95 % interval as
    fraction_low and fraction_high), success (mean over runs).
    """
    rows = []
    for line, line_runs in runs.groupby("line", sort=False):
        for dose, dose_runs in line_runs.groupby("dose"):
            num_runs, num_collapsed = len(dose_runs), int(dose_runs["collapsed"].sum())
            fraction = wilson_interval(num_collapsed, num_runs)[:3]
            rows.append((line, dose, num_runs, num_collapsed, *fraction, dose_runs["success"].mean()))
    names = ["line", "dose", "runs", "collapsed", "fraction", "fraction_low", "fraction_high", "success"]
    return pd.DataFrame(rows, columns=names)


def summarize_edges(frames: StudyFrames) -> pd.DataFrame:
    """Estimate the edge and the safe band of each line, one row per line. Empty for a study without a dose.

    * edge, edge_low, edge_high: the dose at which half of the runs collapse, with a 95 % interval. method: `profile`
      likelihood; or `exact`, which assumes no shape, where runs are separated: none collapsed up to a dose
      (bracket_low), and all did from the next one on (bracket_high). A bound is missing if the runs do not bound the
      edge on that side; both are missing with a single seed.
    * safe_low, safe_high: lowest and highest dose at which no run collapsed and mean success is within the margin of
      the line's best dose. safe_decades: width of this band. safe_decades_max: distance between the next doses outside
      the band, its largest possible width; missing if the band reaches the lowest or highest dose of the study.
    * collapse_bound: the largest probability of collapse at safe_high that is compatible, at 95 %, with no collapse.
    * note: what limits these numbers, or why they are missing.
    """
    margin = get_margin(frames.studies[0], SUCCESS_COLUMN)
    lines = make_run_table(frames).groupby("line", sort=False)
    return pd.DataFrame([_make_edge_row(str(line), runs, margin) for line, runs in lines])


def _make_edge_row(line: str, runs: pd.DataFrame, margin: float) -> Row:
    counts = count_events(runs["dose"], runs["collapsed"])
    estimate = estimate_edge(counts)
    edge, num_seeds = estimate.edge, int(runs["seed"].nunique())
    if num_seeds < MIN_SEEDS_OF_EDGE:
        edge = edge._replace(low=math.nan, high=math.nan)
    safe_band, band_note = _find_safe_band(summarize_doses(runs), margin)
    has_bound = not (math.isnan(edge.low) and math.isnan(edge.high))
    return {
        "line": line,
        "doses": len(counts.doses),
        "seeds": num_seeds,
        "runs": len(runs),
        "collapsed": int(runs["collapsed"].sum()),
        "edge": _raise(edge.value),
        "edge_low": _raise(edge.low),
        "edge_high": _raise(edge.high),
        "method": ("exact" if estimate.is_separated else "profile") if has_bound else "",
        "bracket_low": _raise(estimate.bracket_low),
        "bracket_high": _raise(estimate.bracket_high),
        **safe_band,
        "note": "; ".join(filter(None, (_describe_edge(estimate, edge, counts, num_seeds), band_note))),
    }


def _raise(exponent: float) -> float:
    """Convert a log10 dose to a dose, without the rounding of the logarithm."""
    return float(f"{10**exponent:.6g}")


def _describe_edge(estimate: EdgeEstimate, edge: Estimate, counts: DoseCounts, num_seeds: int) -> str:
    """Describe what limits an edge, or why there is none. edge: the estimate's, with the interval as reported."""
    low, high = (label_value(_raise(value)) for value in (estimate.bracket_low, estimate.bracket_high))
    note = estimate.refusal
    if estimate.is_separated and math.isnan(estimate.bracket_high):
        note = f"no run collapsed, so the edge is above {low}"
    elif estimate.is_separated and math.isnan(estimate.bracket_low):
        note = f"every run collapsed, so the edge is below {high}"
    elif estimate.is_separated:
        note = f"separated: no run collapsed up to {low}, and all did from {high} on"
    elif not counts.doses[0] <= edge.value <= counts.doses[-1] and not estimate.refusal:
        note = "the edge is extrapolated beyond the doses of the study"
    is_bounded = estimate.refusal and num_seeds >= MIN_SEEDS_OF_EDGE
    return "; ".join(filter(None, (note, "" if is_bounded else _describe_bounds(edge, "edge", num_seeds))))


def _describe_bounds(estimate: Estimate, name: str, num_seeds: int) -> str:
    """Say why an interval is missing, or on which sides it is open; empty if it has both bounds."""
    if num_seeds < MIN_SEEDS_OF_EDGE:
        return f"an interval needs {MIN_SEEDS_OF_EDGE} seeds"
    sides = [side for side, bound in (("below", estimate.low), ("above", estimate.high)) if math.isnan(bound)]
    return f"the runs do not bound the {name} from {' and '.join(sides)}" if sides else ""


def _find_safe_band(doses: pd.DataFrame, margin: float) -> tuple[Row, str]:
    """Make the columns of a line's safe band, and a note on what limits it. doses: rows of `summarize_doses`."""
    is_safe = ((doses["collapsed"] == 0) & (doses["success"] >= doses["success"].max() - margin)).to_numpy()
    columns = dict.fromkeys(("safe_low", "safe_high", "safe_decades", "safe_decades_max", "collapse_bound"), math.nan)
    if not is_safe.any():
        return columns, f"no dose without a collapse is within {margin:g} of the best success"
    values = doses["dose"].to_numpy()
    first, last = np.flatnonzero(is_safe)[[0, -1]]
    is_enclosed = first > 0 and last < len(values) - 1
    columns |= {
        "safe_low": values[first],
        "safe_high": values[last],
        "safe_decades": float(np.log10(values[last] / values[first])),
        "safe_decades_max": float(np.log10(values[last + 1] / values[first - 1])) if is_enclosed else math.nan,
        # The probability that none of n runs collapses is (1 - p)^n.
        "collapse_bound": 1 - 0.05 ** (1 / float(doses["runs"].iloc[last])),
    }
    unsafe_values = values[first : last + 1][~is_safe[first : last + 1]]
    holes = ", ".join(label_value(float(value)) for value in unsafe_values)
    return columns, f"within the band, {holes} is not safe" if holes else ""


def compare_edges(frames: StudyFrames, generator: np.random.Generator) -> pd.DataFrame:
    """Estimate, for each declared contrast between two lines, how far the first edge is from the second.

    Columns: contrast, line, reference, doses (common), seeds (common), shift (decades, `stats.dose_response`) with its
    95 % interval shift_low and shift_high, collapsed and reference_collapsed (runs), p, note. p: two-sided, from
    swapping the collapses of the two lines within each seed; the statistic is the number of collapses at common doses
    and seeds. It is at least 2 / 2^seeds, and missing with one seed. A contrast without arms in this study is left out.
    """
    runs = make_run_table(frames)
    rows = []
    for contrast in read_contrasts(require_single_study(frames).studies[0]):
        present_pairs = [pair for pair in contrast.pairs if set(pair) <= set(runs["arm"])]
        if present_pairs:
            line, reference = (runs[runs["arm"].isin(arms)] for arms in zip(*present_pairs, strict=True))
            rows.append({"contrast": contrast.name, **_compare_lines(line, reference, generator)})
    names = ["contrast", "line", "reference", "doses", "seeds", "shift", "shift_low", "shift_high"]
    return pd.DataFrame(rows, columns=[*names, "collapsed", "reference_collapsed", "p", "note"])


def _compare_lines(runs: pd.DataFrame, reference: pd.DataFrame, generator: np.random.Generator) -> Row:
    """Estimate the shift between two lines, over the seeds and doses that they share."""
    pairs = runs.merge(reference, on=["seed", "dose"], suffixes=("", "_reference"))
    num_seeds = int(pairs["seed"].nunique())
    row: Row = {
        "line": ", ".join(runs["line"].unique()),
        "reference": ", ".join(reference["line"].unique()),
        "doses": int(pairs["dose"].nunique()),
        "seeds": num_seeds,
        **make_estimate_columns("shift", Estimate()),
        "collapsed": int(pairs["collapsed"].sum()),
        "reference_collapsed": int(pairs["collapsed_reference"].sum()),
        "p": math.nan,
    }
    if runs["line"].nunique() > 1 or reference["line"].nunique() > 1:
        return row | {"note": "the pairs of this contrast belong to several lines"}
    if pairs.empty:
        return row | {"note": "no seed and dose in common"}
    columns = ["collapsed", "collapsed_reference"]
    counts = [count_events(pairs["dose"], pairs[column]) for column in columns]
    shift = estimate_shift(*counts)
    if num_seeds < MIN_SEEDS_OF_EDGE:
        shift = shift._replace(low=math.nan, high=math.nan)
    notes = [_describe_bounds(shift, "shift", num_seeds)]
    for name, side in zip(("the line", "the reference"), counts, strict=True):
        if not side.num_events.any():
            notes.append(f"no run of {name} collapsed")
        elif (side.num_events == side.num_runs).all():
            notes.append(f"every run of {name} collapsed")
    return row | {
        **make_estimate_columns("shift", shift),
        "p": _exchange_lines(pairs.groupby("seed")[columns].sum().to_numpy(dtype=float), generator),
        "note": "; ".join(filter(None, notes)),
    }


def _exchange_lines(num_collapses: Floats, generator: np.random.Generator) -> float:
    """Test the difference between two lines in collapses (seeds, 2) by swapping the lines within each seed.

    Returns p, or NaN with a single seed.
    """
    if len(num_collapses) < MIN_SEEDS_OF_EDGE:
        return math.nan
    from scipy import stats

    result = stats.permutation_test(
        num_collapses.T,
        lambda first, second, axis: np.sum(first - second, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        rng=generator,
    )
    return float(result.pvalue)
