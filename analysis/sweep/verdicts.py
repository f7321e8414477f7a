"""One plain sentence for each arm of a study, made of the numbers of its row in the summary."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.compare import SEEDS_FOR_SEEDS
from analysis.data.frames import records

LEVEL = 0.05
UNFINISHED = ("failed", "interrupted", "never_ran", "running")
_STOP = ["stop_rule", "stop_value", "stop_threshold", "stop_step"]
_END = ["seed", "status", "reason", "steps_done", "steps_total"]
WORDS = {"never_ran": "never ran", "early_stopped": "early stopped"}


def word(status: str) -> str:
    """A status as a word for people: `early stopped`, `never ran`."""
    return WORDS.get(status, status)


def number(value: float) -> str:
    """A value or threshold with three digits."""
    return f"{value:.3g}"


def share(value: float) -> str:
    """A share with three decimals, or a dash."""
    return "–" if np.isnan(value) else f"{value:.3f}"


def signed(value: float, decimals: int = 3) -> str:
    """A difference with its sign, or a dash."""
    return "–" if np.isnan(value) else f"{value:+.{decimals}f}".replace("-", "−")


def signed_number(value: float) -> str:
    """A difference of any size with its sign and two digits, or a dash."""
    return "–" if np.isnan(value) else f"{value:+.2g}".replace("-", "−")


def interval(low: float, high: float, decimals: int = 3) -> str:
    """An interval of a difference in brackets, or nothing where there is none."""
    return "" if np.isnan(low) else f"[{signed(low, decimals)}, {signed(high, decimals)}]"


def bounds(low: float, high: float) -> str:
    """An interval of a share in brackets, or nothing where there is none."""
    return "" if np.isnan(low) else f"[{share(low)}, {share(high)}]"


def p_value(p: float) -> str:
    """`p 0.012`, or `p < 0.001`."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def stops(runs: pd.DataFrame) -> str:
    """Which rule stopped how many of an arm's scored runs, at which step, with which value against which bound."""
    found: dict[str, list[str]] = {}
    for run in records(runs.loc[runs["status"] == "early_stopped", _STOP]):
        found.setdefault(run["stop_rule"] or "a rule", []).append(stop(run))
    return " and ".join(f"{rule} stopped {len(each)} of {len(runs)} runs ({'; '.join(each)})"
                        for rule, each in found.items())  # fmt: skip


def stop(run: Mapping[str, Any]) -> str:
    """`step 45: 0.002 < 0.01`: when a rule stopped a run, its value and the bound that it broke."""
    where = "" if pd.isna(run["stop_step"]) else f"step {run['stop_step']}: "
    value, threshold = run["stop_value"], run["stop_threshold"]
    return f"{where}{number(value)} {broke(value, threshold)} {number(threshold)}"


def broke(value: float, threshold: float) -> str:
    """The sign between a value and the bound that it broke."""
    return "<" if value < threshold else "≥"


def unfinished(runs: pd.DataFrame) -> str:
    """The runs of an arm that did not end by the protocol, and why; empty when all did."""
    return "; ".join(_unfinished(run) for run in records(runs.loc[runs["status"].isin(UNFINISHED), _END]))


def _unfinished(run: Mapping[str, Any]) -> str:
    total = "" if pd.isna(run["steps_total"]) else f" of {run['steps_total']}"
    steps = "" if run["status"] == "never_ran" else f" after {run['steps_done']}{total} steps"
    status = word(run["status"])
    return f"seed {run['seed']} {status}{steps}" + (f" ({run['reason']})" if run["reason"] else "")


def these_runs(seeds: int) -> str:
    """The runs of an arm that a sentence is about: `this run`, or `these 2 runs`."""
    return "this run" if seeds == 1 else f"these {seeds} runs"


def outcome(row: Mapping[str, Any]) -> str:
    """The verdict in words of a fixed list, to sort and colour by.

    `better` and `worse` speak of the setting and need an interval over seeds (`compare.SEEDS_FOR_SEEDS` of them);
    with fewer, `ended higher` and `ended lower` say what the runs did that were made.
    """
    scored = row["completed"] + row["early_stopped"]
    if not scored:
        return "no verdict"
    if row["early_stopped"] == scored:
        return "failed regime"
    if row["is_baseline"]:
        return "baseline"
    if np.isnan(row["p_holm"]):
        return "no comparison"
    if row["p_holm"] >= LEVEL:
        return "no difference resolved"
    if row["paired_seeds"] < SEEDS_FOR_SEEDS:
        return "ended higher" if row["difference"] > 0 else "ended lower"
    return "better" if row["difference"] > 0 else "worse"


def verdict(row: Mapping[str, Any]) -> str:
    """One sentence on an arm. row: a row of `tables.arm_summary`.

    An arm whose scored runs were all stopped by a rule is a failed regime, whatever its last success was. Otherwise it
    is better or worse than the baseline, or no difference is resolved, and then how small a one could have been. With
    fewer than three seeds the sentence is about these runs, which ended higher or lower, and not about the setting.
    Runs that failed, were interrupted or never ran are named; they are not scored.
    """
    found, scored = outcome(row), row["completed"] + row["early_stopped"]
    parts = []
    if row["early_stopped"]:
        some = "" if row["early_stopped"] == scored else f" in {row['early_stopped']} of {scored} runs"
        parts.append(f"failed regime{some}: {row['stops']}")
    if found not in ("failed regime", "no verdict"):
        parts.append(_against_base(row) if row["is_baseline"] else _against_baseline(row, found))
    if row["unfinished"]:
        parts.append(("not scored: " if scored else "no verdict: ") + row["unfinished"])
    return "; ".join(parts) or "no verdict: no run"


def _against_base(row: Mapping[str, Any]) -> str:
    if np.isnan(row["gain"]):
        return f"baseline: {share(row['final_val_success'])} at the end; the base policy was not validated"
    within = interval(row["gain_low"], row["gain_high"]) or "(no interval)"
    return (
        f"baseline: {share(row['final_val_success'])} at the end, {signed(row['gain'])} {within} from the base policy "
        f"({row['gain_basis']})"
    )


def _against_baseline(row: Mapping[str, Any], found: str) -> str:
    if not isinstance(row["baseline"], str) or not row["baseline"]:
        return "no comparison: the baseline arm is not in this study"
    baseline = f"the baseline ({row['baseline']})"
    if found == "no comparison":
        if np.isnan(row["difference"]):
            return f"no comparison: {baseline} has no scored run with a seed of this arm"
        return f"no interval: {signed(row['difference'])} to {baseline}, without the outcomes of single levels"
    numbers = f"{signed(row['difference'])} {interval(row['difference_low'], row['difference_high'])}"
    tested = f"{numbers}, Holm {p_value(row['p_holm'])}"
    failed = ", itself a failed regime" if row["baseline_failed"] else ""
    runs = f"{these_runs(row['paired_seeds'])} " if row["paired_seeds"] < SEEDS_FOR_SEEDS else ""
    if found != "no difference resolved":
        return f"{runs}{found} than {baseline}{failed}: {tested} ({row['basis']})"
    limit = row["detectable"]
    missed = f"one below about {share(limit)} would probably be missed" if limit < 1 else "any would probably be missed"
    of_runs = f" of {runs.strip()}" if runs else ""
    return f"no difference{of_runs} from {baseline}{failed} resolved: {tested}; {missed} ({row['basis']})"
