"""Does a KL loss hold the policy at its reference? What a grid over KL coefficients and losses shows.

Measured by `kl_to_reference`, the k3 estimate of KL(pi || ref) at the trained tokens before each update: one column for
every form of the loss. Runs without a reference pass do not have it.

As a loss k1 = log pi - log ref has the gradient of log pi: the reference does not occur in it, and on-policy its
expectation is 0. So its coefficient cannot anchor; k2, k3 and forms with a + have the gradient of a distance.

Compared are runs that are alike in all else. A set holds the runs of one loss that differ in the coefficient alone; two
sets of different losses match where all other settings and the seed are equal. Every run of matching sets is measured
over the same steps, the last quarter of those that all of them have: one that a rule stopped moved for less long.
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from analysis.data.compare import SCORED
from analysis.data.frames import StudyFrames, records
from analysis.stats.estimates import Estimate, mean_over_seeds, spearman_trend
from analysis.sweep.verdicts import LEVEL, interval, p_value, signed

K1 = ("kl", "k1")
FORM, COEFFICIENT, SWITCH = "config/actor.kl_loss_type", "config/actor.kl_loss_coef", "config/actor.use_kl_loss"
FEWEST_SETS = 3
NO_INTERVAL = "(no interval below three sets)"
_LATE = 0.75


def measured(frames: StudyFrames) -> pd.DataFrame:
    """One row a scored run with a KL loss: run_id, form, coefficient, match, status, first and last step, kl.

    match: number of the setting that it shares with runs of any form and coefficient, seed included. kl: mean of
    `kl_to_reference` (nats) over steps first to last. Empty where a study lacks the settings or the column.
    """
    names = ["run_id", "form", "coefficient", "match", "status", "first", "last", "kl"]
    trials, steps = frames.trials, frames.steps.dropna(subset="kl_to_reference")
    if not {FORM, COEFFICIENT, SWITCH} <= set(trials) or steps.empty:
        return pd.DataFrame(columns=names)
    with_kl = trials[SWITCH].fillna(False).astype(bool) & trials["status"].isin(SCORED)
    runs = trials[with_kl & trials["run_id"].isin(steps["run_id"])]
    table = runs[["run_id", "status"]].assign(form=runs[FORM], coefficient=runs[COEFFICIENT].astype(float))
    table["match"] = _matches(runs)
    table["last"] = table["run_id"].map(steps.groupby("run_id")["step"].max())
    table["last"] = table.groupby("match")["last"].transform("min")
    table["first"] = (_LATE * table["last"]).astype(int) + 1
    joined = steps[["run_id", "step", "kl_to_reference"]].merge(table[["run_id", "first", "last"]], on="run_id")
    late = joined[joined["step"].between(joined["first"], joined["last"])]
    table["kl"] = table["run_id"].map(late.groupby("run_id")["kl_to_reference"].mean())
    return table.dropna(subset="kl")[names].reset_index(drop=True)


def _matches(runs: pd.DataFrame) -> Any:
    """The number of each run's combination of all settings but form and coefficient."""
    other = [name for name in runs.columns if name.startswith("config/") and name not in (FORM, COEFFICIENT, SWITCH)]
    differing = [name for name in other if runs[name].astype(str).nunique() > 1]
    keys = runs[[*differing, "seed"]].astype(str)
    return keys.groupby([*keys.columns], sort=False).ngroup()


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """One row a set of at least three coefficients: form, match, runs, rho. table: `measured`.

    rho: Spearman's correlation of KL to the reference with the coefficient; -1: it falls at each step up.
    """
    rows = []
    for (form, match), runs in table.groupby(["form", "match"], sort=False):
        if runs["coefficient"].nunique() >= 3 and runs["kl"].nunique() > 1:
            rho = float(stats.spearmanr(runs["coefficient"], runs["kl"]).statistic)
            rows.append({"form": form, "match": match, "runs": len(runs), "rho": rho})
    return pd.DataFrame(rows, columns=["form", "match", "runs", "rho"])


def anchoring(table: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """One row a form of the loss: how KL to the reference goes with its coefficient. table: `measured`.

    Columns: form, sets, runs, early_stopped, rho (mean over sets, with t interval over sets from three on: rho_low,
    rho_high), p (permuting KL within sets), smallest, kl_smallest, largest, kl_largest (coefficients, and geometric
    means of KL there, in nats), first, last (steps that were measured: least and largest).
    """
    rhos = correlations(table)
    rows = []
    for form, found in rhos.groupby("form", sort=False):
        runs = table[(table["form"] == form) & table["match"].isin(found["match"])]
        places = runs.groupby("match")["kl"].rank() / (1 + runs.groupby("match")["kl"].transform("size"))
        spread = _over_sets(found["rho"])
        ends = {"smallest": runs["coefficient"].min(), "largest": runs["coefficient"].max()}
        rows.append({
            "form": form, "sets": len(found), "runs": len(runs),
            "early_stopped": int((runs["status"] == "early_stopped").sum()),
            "rho": spread.value, "rho_low": spread.low, "rho_high": spread.high,
            "p": spearman_trend(runs["coefficient"], places, runs["match"], generator).p,
            **ends, **{f"kl_{end}": _typical(runs.loc[runs["coefficient"] == at, "kl"]) for end, at in ends.items()},
            "first": int(runs["first"].min()), "last": int(runs["last"].max()),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _over_sets(values: Any) -> Estimate:
    """Mean of rank correlations with its interval, cut to [-1, 1]; below three sets without one."""
    found = mean_over_seeds(values)
    if found.n < FEWEST_SETS:
        return Estimate(float(np.mean(values)), n=found.n)
    return found._replace(low=max(found.low, -1.0), high=min(found.high, 1.0))


def _typical(values: "pd.Series[float]") -> float:
    """Geometric mean of the positive values; NaN without one."""
    positive = values[values > 0]
    return float(np.exp(np.log(positive).mean())) if len(positive) else float("nan")


def against_k1(table: pd.DataFrame) -> pd.DataFrame:
    """One row a form beside k1, over matching sets: form, sets, difference, low, high. table: `measured`.

    difference: mean of rho of k1 minus rho of the form; above 0 where KL falls with the form's coefficient and less, or
    not at all, with that of k1. low, high: t interval over sets, cut to [-2, 2]; missing below three sets.
    """
    rhos = correlations(table).pivot_table(index="match", columns="form", values="rho")
    k1 = next((form for form in K1 if form in rhos), None)
    rows = []
    for form in [name for name in dict.fromkeys(table["form"]) if name in rhos and name != k1] if k1 else []:
        pairs = (rhos[k1] - rhos[form]).dropna()
        if len(pairs):
            found = mean_over_seeds(pairs) if len(pairs) >= FEWEST_SETS else Estimate(float(pairs.mean()))
            ends = {"low": np.maximum(found.low, -2.0), "high": np.minimum(found.high, 2.0)}
            rows.append({"form": form, "sets": len(pairs), "difference": found.value, **ends})
    return pd.DataFrame(rows, columns=["form", "sets", "difference", "low", "high"])


def sentences(trends: pd.DataFrame, differences: pd.DataFrame) -> list[str]:
    """What the grid shows of k1; nothing where no set of its runs was measured. From `anchoring` and `against_k1`."""
    rows = records(trends)
    if not any(row["form"] in K1 for row in rows):
        return []
    theory = (
        "k1 (kl_loss_type=kl) used as a loss does not anchor to the reference: its gradient is that of log pi at the "
        "sampled tokens, in which the reference does not occur, and its expectation on-policy is 0. So much is "
        "algebra; what the runs of this grid show:"
    )
    falling = {row["form"] for row in rows if _falls(row)}
    return [theory, *(_trend_sentence(row) for row in rows), *_difference_sentences(records(differences), falling)]


def _falls(row: dict[str, Any]) -> bool:
    """Whether KL to the reference falls with the coefficient, beyond chance."""
    return bool(row["rho_high"] < 0 and row["p"] < LEVEL)


def _trend_sentence(row: dict[str, Any]) -> str:
    rises = row["rho_low"] > 0 and row["p"] < LEVEL
    verb = "falls" if _falls(row) else "rises" if rises else "neither falls nor rises resolvably"
    within = interval(row["rho_low"], row["rho_high"], 2) or NO_INTERVAL
    stopped = f"{row['early_stopped']} of them stopped by a rule" if row["early_stopped"] else "none stopped"
    return (
        f"Under the loss {row['form']}, KL to the reference {verb} with the coefficient: mean rank correlation "
        f"{signed(row['rho'], 2)} {within} over {row['sets']} sets alike in all else, {row['runs']} runs "
        f"({stopped}), permutation {p_value(row['p'])}; {row['kl_smallest']:.2g} nats at {row['smallest']:g}, "
        f"{row['kl_largest']:.2g} at {row['largest']:g}."
    )


def _difference_sentences(rows: list[dict[str, Any]], falling: set[str]) -> list[str]:
    if not rows:
        return ["No other KL loss has matching runs in this study, so k1 is compared with none."]
    return [_difference_sentence(row, row["form"] in falling and not falling.intersection(K1)) for row in rows]


def _difference_sentence(row: dict[str, Any], is_anchoring: bool) -> str:
    """is_anchoring: KL to the reference falls with the form's own coefficient, and with that of k1 it does not."""
    within = interval(row["low"], row["high"], 2) or NO_INTERVAL
    numbers = f"{signed(row['difference'], 2)} {within} over {row['sets']} matching sets"
    if row["low"] > 0 and is_anchoring:
        told = f"At the same coefficients {row['form']} pulls the policy to the reference as k1 does not"
    elif row["low"] > 0:
        told = f"The rank correlation is lower under {row['form']} than under k1, which alone is no anchoring"
    elif row["high"] < 0:
        told = f"KL to the reference falls more with the coefficient of k1 than with that of {row['form']}"
    else:
        told = f"A difference between k1 and {row['form']} is not resolved in this grid"
    return f"{told}: rank correlation of k1 minus that of {row['form']} {numbers}."
