"""A switch of a grid on and off at equal points: what regularisation does alone, beside training on the task."""

from typing import Any

import pandas as pd

from analysis.grid.layout import Grid
from analysis.grid.measures import MEASURES
from analysis.stats.estimates import mean_over_seeds


def switches(grid: Grid) -> list[str]:
    """Factors of the panels that are on or off."""
    return [setting for setting in grid.panels if isinstance(grid.levels[setting][0], bool)]


def contrast(grid: Grid, table: pd.DataFrame, setting: str) -> pd.DataFrame:
    """A switch on against off, in pairs of scored runs alike in all else, seed included. table: `grid.members`.

    One row a value of each factor in words (such as the loss) and measure: of (those values; "" without such a factor),
    measure, pairs, off, on (means over pairs), difference (on minus off) with low and high (t interval over pairs, from
    three on), higher (pairs in which on is above off), stopped_off, stopped_on (runs of the pairs that a rule stopped).
    """
    words = [name for name in grid.panels if isinstance(grid.levels[name][0], str)]
    keys = [name for name in grid.levels if name != setting]
    own = table[table["home"]]
    off, on = (own[own[setting] == value] for value in (False, True))
    pairs = off.merge(on, on=[*keys, "seed"], suffixes=("_off", "_on"))
    parts = pairs.groupby(words, sort=False) if words else [("", pairs)]
    rows = [_row(of, rows, measure.name) for of, rows in parts for measure in MEASURES]
    return pd.DataFrame([row for row in rows if row["pairs"]])


def _row(of: Any, pairs: pd.DataFrame, measure: str) -> dict[str, Any]:
    used = pairs.dropna(subset=[f"{measure}_off", f"{measure}_on"])
    difference = used[f"{measure}_on"] - used[f"{measure}_off"]
    found = mean_over_seeds(difference)
    inside = {"low": found.low, "high": found.high} if len(used) >= 3 else {"low": float("nan"), "high": float("nan")}
    return {
        "of": ", ".join(of) if isinstance(of, tuple) else of, "measure": measure, "pairs": len(used),
        "off": used[f"{measure}_off"].mean(), "on": used[f"{measure}_on"].mean(), "difference": difference.mean(),
        **inside, "higher": int((difference > 0).sum()),
        "stopped_off": int((used["status_off"] == "early_stopped").sum()),
        "stopped_on": int((used["status_on"] == "early_stopped").sum()),
    }  # fmt: skip
