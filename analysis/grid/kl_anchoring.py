"""Does a KL loss keep the policy at its reference? Answers from a grid of KL coefficients and losses.

The measure is `kl_to_reference`, the k3 estimate of KL(pi || ref) at the trained tokens before each update. It is
computed in the same way for every form of the loss. Runs without a reference pass do not have it.

Only runs with otherwise equal settings are compared. A set is the runs of one loss that differ only in the coefficient.
Two sets of different losses match if all other settings and the seed are equal. All runs of matching sets are measured
over the same steps, the last quarter of the steps that all of them have, because a stopped run moved for fewer steps.

Sets of one seed share random numbers, and often a run, so each seed counts as one number, the mean over its sets.
Intervals are over seeds; a grid of one seed has none.
"""

from typing import Any

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, SIGNIFICANCE_LEVEL, cut_interval, make_estimate_columns
from analysis.data.frames import StudyFrames, list_differing_settings, to_records
from analysis.grid.layout import LATE_START
from analysis.stats.estimates import MIN_SEEDS, mean_over_seeds, spearman_trend
from analysis.sweep.verdicts import count_nouns, format_interval, format_signed_2

K1_NAMES = ("kl", "k1")
FORM_COLUMN, COEFFICIENT_COLUMN = "config/actor.kl_loss_type", "config/actor.kl_loss_coef"
SWITCH_COLUMN = "config/actor.use_kl_loss"
NO_INTERVAL_TEXT = "(no interval with fewer than three seeds that differ)"


def make_kl_table(frames: StudyFrames) -> pd.DataFrame:
    """Make a table of the scored runs with a KL loss, with each run's mean KL to the reference.

    Columns: run_id, form, coefficient, match, seed, status, first_step, last_step, kl. match: id of the combination of
    all other settings and the seed. kl: mean of `kl_to_reference` (nats) over first_step to last_step. Empty if the
    study lacks the settings or the column.
    """
    columns = ["run_id", "form", "coefficient", "match", "seed", "status", "first_step", "last_step", "kl"]
    trials, steps = frames.trials, frames.steps.dropna(subset="kl_to_reference")
    if not {FORM_COLUMN, COEFFICIENT_COLUMN, SWITCH_COLUMN} <= set(trials) or steps.empty:
        return pd.DataFrame(columns=columns)
    # Runs with use_kl_loss=False may have a reference pass for the penalty in the reward: a different question.
    has_kl = trials[SWITCH_COLUMN].fillna(False).astype(bool) & trials["status"].isin(SCORED_STATUSES)
    # A schedule is not one coefficient.
    coefficients = pd.to_numeric(trials[COEFFICIENT_COLUMN], errors="coerce")
    runs = trials[has_kl & coefficients.notna() & trials["run_id"].isin(steps["run_id"])]
    if runs.empty:
        return pd.DataFrame(columns=columns)
    table = runs[["run_id", "seed", "status"]].assign(form=runs[FORM_COLUMN], coefficient=coefficients)
    # An id for each combination of the seed and all settings except form and coefficient.
    names = [f"config/{name}" for name in list_differing_settings(runs)]
    left_out = {FORM_COLUMN, COEFFICIENT_COLUMN, SWITCH_COLUMN}
    keys = [runs[name].astype(str) for name in (*names, "seed") if name not in left_out]
    table["match"] = runs.groupby(keys, sort=False, dropna=False).ngroup()
    table["last_step"] = table["run_id"].map(steps.groupby("run_id")["step"].max())
    # All runs with one match are measured over the steps of the shortest of them.
    table["last_step"] = table.groupby("match")["last_step"].transform("min")
    # Earlier, runs have not yet moved as far from the reference as they will.
    table["first_step"] = (LATE_START * table["last_step"]).astype(int) + 1
    rows = steps[["run_id", "step", "kl_to_reference"]].merge(table[["run_id", "first_step", "last_step"]], on="run_id")
    late_rows = rows[rows["step"].between(rows["first_step"], rows["last_step"])]
    table["kl"] = table["run_id"].map(late_rows.groupby("run_id")["kl_to_reference"].mean())
    return table.dropna(subset="kl")[columns].reset_index(drop=True)


def compute_correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Correlate KL with the coefficient in each set of three or more coefficients: form, match, seed, runs, rho.

    table: from `make_kl_table`. rho: Spearman's correlation of KL to the reference with the coefficient. At -1, KL
    falls at every increase.
    """
    from scipy import stats

    # Two coefficients always have a correlation of 1 or -1.
    rows = []
    for (form, match), runs in table.groupby(["form", "match"], sort=False):
        if runs["coefficient"].nunique() >= 3 and runs["kl"].nunique() > 1:
            rho = float(stats.spearmanr(runs["coefficient"], runs["kl"]).statistic)
            rows.append({"form": form, "match": match, "seed": runs["seed"].iloc[0], "runs": len(runs), "rho": rho})
    return pd.DataFrame(rows, columns=["form", "match", "seed", "runs", "rho"])


def summarize_anchoring(table: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Summarize, per form of the loss, the trend of KL to the reference with the coefficient.

    Columns: form, sets, seeds, runs, early_stopped, rho (mean over seeds of the mean over a seed's sets; rho_low and
    rho_high are its t interval over seeds, with three or more), p (from permuting KL within sets), smallest,
    kl_smallest, largest, kl_largest (coefficients, and the geometric mean of KL at each, in nats), first_step,
    last_step (range of the measured steps). table: from `make_kl_table`.
    """
    rows = []
    for form, form_rhos in compute_correlations(table).groupby("form", sort=False):
        runs = table[(table["form"] == form) & table["match"].isin(form_rhos["match"])]
        # Ranks relative to the size of the set, so that sets of different sizes can be pooled.
        kl_ranks = runs.groupby("match")["kl"].rank() / (1 + runs.groupby("match")["kl"].transform("size"))
        per_seed = form_rhos.groupby("seed")["rho"].mean()
        rho_estimate = cut_interval(mean_over_seeds(per_seed, min_seeds=MIN_SEEDS), -1.0, 1.0)
        smallest, largest = runs["coefficient"].min(), runs["coefficient"].max()
        # KL spans orders of magnitude over the runs of a grid: the largest would dominate an arithmetic mean.
        positive = runs[runs["kl"] > 0]
        geometric_means = np.exp(np.log(positive["kl"]).groupby(positive["coefficient"]).mean())
        rows.append(
            {
                "form": form,
                "sets": len(form_rhos),
                "seeds": rho_estimate.n,
                "runs": len(runs),
                "early_stopped": int((runs["status"] == "early_stopped").sum()),
                **make_estimate_columns("rho", rho_estimate),
                "p": spearman_trend(runs["coefficient"], kl_ranks, runs["match"], generator).p,
                "smallest": smallest,
                "largest": largest,
                "kl_smallest": geometric_means.get(smallest, float("nan")),
                "kl_largest": geometric_means.get(largest, float("nan")),
                "first_step": int(runs["first_step"].min()),
                "last_step": int(runs["last_step"].max()),
            }
        )
    return pd.DataFrame(rows)


def compare_to_k1(table: pd.DataFrame) -> pd.DataFrame:
    """Compare each other form with k1 over matching sets: form, sets, seeds, difference, low, high.

    table: from `make_kl_table`. difference: mean over seeds of the mean over a seed's sets of rho of k1 minus rho of
    the form. It is positive if KL falls more with the form's coefficient than with k1's. low, high: t interval over
    seeds, cut to [-2, 2]; missing with fewer than three.
    """
    rhos = compute_correlations(table).pivot_table(index=["seed", "match"], columns="form", values="rho")
    k1 = next((form for form in K1_NAMES if form in rhos), None)
    rows = []
    for form in dict.fromkeys(table["form"]):
        if not k1 or form not in rhos or form == k1:
            continue
        differences = (rhos[k1] - rhos[form]).dropna()
        if len(differences):
            per_seed = differences.groupby(level="seed").mean()
            estimate = cut_interval(mean_over_seeds(per_seed, min_seeds=MIN_SEEDS), -2.0, 2.0)
            rows.append((form, len(differences), estimate.n, *estimate[:3]))
    return pd.DataFrame(rows, columns=["form", "sets", "seeds", "difference", "low", "high"])


def describe_anchoring(trends: pd.DataFrame, differences: pd.DataFrame) -> list[str]:
    """Describe whether k1 anchors the policy; empty if no set of k1 was measured.

    trends: from `summarize_anchoring`. differences: from `compare_to_k1`.
    """
    rows = to_records(trends)
    if not any(row["form"] in K1_NAMES for row in rows):
        return []
    theory = (
        "In theory, k1 (kl_loss_type=kl) used as a loss does not anchor the policy to the reference: its gradient is "
        "the gradient of log pi at the sampled tokens, which does not contain the reference and has expectation 0 on "
        "policy. The table shows what happened in the runs of this grid."
    )
    falling_forms = {row["form"] for row in rows if row["rho"] < 0 and row["p"] < SIGNIFICANCE_LEVEL}
    # Forms under which KL to the reference falls with the coefficient, unless it also falls under k1.
    anchoring_forms = falling_forms if falling_forms.isdisjoint(K1_NAMES) else set()
    comparisons = [_describe_difference(row, row["form"] in anchoring_forms) for row in to_records(differences)]
    missing = ["No other KL loss has matching runs in this study, so k1 is not compared with any."]
    return [theory, *(comparisons or missing)]


def _describe_difference(row: dict[str, Any], is_anchoring: bool) -> str:
    """Describe a comparison with k1. is_anchoring: KL falls with the coefficient of this form, but not of k1."""
    # A lower correlation alone may mean that KL rises less than under k1: anchoring also requires that it falls.
    if row["low"] > 0 and is_anchoring:
        statement = f"At the same coefficients, {row['form']} pulls the policy toward the reference and k1 does not"
    elif row["low"] > 0:
        statement = (
            f"The rank correlation is lower under {row['form']} than under k1, which alone does not show anchoring"
        )
    elif row["high"] < 0:
        statement = (
            f"KL to the reference falls more with the coefficient of k1 than with the coefficient of {row['form']}"
        )
    else:
        statement = f"Whether k1 and {row['form']} differ is open"
    interval_text = format_interval(row["low"], row["high"], format_signed_2) or NO_INTERVAL_TEXT
    return (
        f"{statement}: the rank correlation under k1 minus the rank correlation under {row['form']} is "
        f"{format_signed_2(row['difference'])} {interval_text} over {row['sets']} matching sets of "
        f"{count_nouns(row['seeds'], 'seed')}."
    )
