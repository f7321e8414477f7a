"""Compare the two states of a switch, such as training with and without the task, over pairs of equal grid points."""

import pandas as pd

from analysis.data.schemas import Row
from analysis.grid.layout import MEASURES, Grid
from analysis.stats.estimates import Estimate
from analysis.stats.noise import Noise, estimate_paired_contrast, fit_noise


def list_switches(grid: Grid) -> list[str]:
    """List the boolean factors of the panels. The axes of the plane are numeric, so they need no check."""
    return [setting for setting in grid.panels if isinstance(grid.factor_values[setting][0], bool)]


def compare_switch(grid: Grid, table: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Compare runs with a switch on to runs with it off, in pairs of scored runs with equal seed and settings.

    One row per measure and combination of text factors (such as the loss): group (those values; "" without such a
    factor), measure, pairs, seeds, off, on (means over pairs), difference (on minus off), low, high (95 % interval),
    higher (pairs in which on is above off), stopped_off, stopped_on (runs in these pairs that a rule stopped).

    Pairs of one seed share random numbers, so each seed counts as one number, the mean over its pairs. The interval is
    over these numbers, with the noise of all grid points; with one seed there is none. table: from
    `layout.make_member_table`.
    """
    # One contrast per loss: a switch may act differently under each, which a mean over losses would hide.
    word_settings = [name for name in grid.panels if isinstance(grid.factor_values[name][0], str)]
    keys = [name for name in grid.factor_values if name != setting]
    # A run that is shown in several panels counts once.
    home_rows = table[table["home"]]
    off_rows, on_rows = (home_rows[home_rows[setting] == value] for value in (False, True))
    pairs = off_rows.merge(on_rows, on=[*keys, "seed"], suffixes=("_off", "_on"))
    pair_groups = pairs.groupby(word_settings, sort=False) if word_settings else [("", pairs)]
    # Estimated from the grid points that have runs of several seeds.
    noise = {
        name: fit_noise(home_rows.pivot_table(index="arm", columns="seed", values=name).to_numpy(dtype=float))
        for name, *_ in MEASURES
    }
    rows = []
    for group, group_pairs in pair_groups:
        for measure in noise:
            row = _contrast_pairs(group_pairs, measure, noise[measure])
            if row["pairs"]:
                rows.append({"group": ", ".join(group) if isinstance(group, tuple) else group, **row})
    return pd.DataFrame(rows)


def _contrast_pairs(pairs: pd.DataFrame, measure: str, noise: Noise) -> Row:
    pairs = pairs.dropna(subset=[f"{measure}_off", f"{measure}_on"])
    off, on = pairs[f"{measure}_off"], pairs[f"{measure}_on"]
    difference = on - off
    by_seed = difference.groupby(pairs["seed"])
    # Extra baseline seeds show the noise of runs, but a contrast of one seed would rest on them alone.
    estimate = Estimate(float(difference.mean()), n=len(by_seed))
    if len(by_seed) > 1:
        # In a mean of m pairs without a common run, each run has the weight 1/m.
        estimate = estimate_paired_contrast(by_seed.mean(), noise, float((2 / by_seed.size()).mean()))
    return {
        "measure": measure,
        "pairs": len(pairs),
        "seeds": estimate.n,
        "off": off.mean(),
        "on": on.mean(),
        "difference": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "higher": int((difference > 0).sum()),
        **{f"stopped_{side}": int((pairs[f"status_{side}"] == "early_stopped").sum()) for side in ("off", "on")},
    }
