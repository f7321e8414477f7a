"""What a report says in words: sentences made of the tables, no more than the numbers carry."""

from typing import Any

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED, SEEDS_FOR_SEEDS
from analysis.data.frames import StudyFrames, records
from analysis.stats.estimates import Trend
from analysis.sweep.verdicts import interval, p_value, share, signed, word

LINE = 120
_OUTCOMES = {
    "better": "Better than it",
    "worse": "Worse than it",
    "ended higher": "Ended higher than it",
    "ended lower": "Ended lower than it",
    "no difference resolved": "No difference from it resolved",
    "failed regime": "Failed regime, stopped by a rule",
    "no comparison": "Without comparison",
    "no verdict": "Without a scored run",
}


def headline(summary: pd.DataFrame) -> str:
    """The arms by verdict, in one line, with what the comparison is over. summary: `tables.arm_summary`."""
    if summary.empty:
        return "No run is recorded."
    baseline = summary["baseline"].iloc[0]
    compared = f"baseline {baseline}" if isinstance(baseline, str) and baseline else "no baseline among them"
    parts = [f"{len(summary)} arm{'s' if len(summary) > 1 else ''}, {compared}.", *_compared_over(summary)]
    for outcome, words in _OUTCOMES.items():
        arms = summary.loc[summary["outcome"] == outcome, "arm"].to_list()
        if arms:
            parts.append(f"{words}: {_by_name(arms)}.")
    partly = [f"{row['arm']} ({row['early_stopped']} of {row['early_stopped'] + row['completed']})"
              for row in records(summary) if row["early_stopped"] and row["completed"]]  # fmt: skip
    parts += [f"Some runs stopped by a rule: {_by_name(partly)}."] if partly else []
    return " ".join(parts)


def _compared_over(summary: pd.DataFrame) -> list[str]:
    """What the arms' comparisons are over, in a sentence; none where nothing was compared."""
    seeds = summary.loc[summary["p"].notna(), "paired_seeds"]
    if seeds.empty:
        return []
    if seeds.min() >= SEEDS_FOR_SEEDS:
        return [f"Compared over {span(seeds)} seeds."]
    return [
        f"Compared over validation levels, by {span(seeds)} run{'s' if seeds.max() > 1 else ''} per arm: this is what "
        "these runs did, and another seed may turn out differently."
    ]


def span(numbers: "pd.Series[int]") -> str:
    """`3`, or `3 to 5` where the numbers differ."""
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


def _by_name(arms: list[str]) -> str:
    """Arms by name where that is a line, else their number."""
    listed = ", ".join(arms)
    return (
        f"{len(arms)} arms" if len(arms) > 1 and len(listed) > LINE else f"arm{'s' if len(arms) > 1 else ''} {listed}"
    )


def interval_basis(table: pd.DataFrame) -> str:
    """Over what the arms' own intervals are; arms are named where they differ. table: `tables.dose_response`."""
    arms_of = table[table["basis"] != ""].groupby("basis", sort=False)["arm"].agg(_listed).to_dict()
    if len(arms_of) <= 1:
        return "".join(str(basis) for basis in arms_of)
    return "; ".join(f"{arms}: {basis}" for basis, arms in arms_of.items())


def _listed(arms: "pd.Series[str]") -> str:
    listed = ", ".join(arms)
    return listed if len(arms) == 1 or len(listed) <= LINE else f"{len(arms)} arms"


def statuses(trials: pd.DataFrame) -> str:
    """The runs counted by status: `6 runs: 5 completed, 1 early stopped`."""
    counts = trials["status"].value_counts()
    order = ["completed", "early_stopped", "failed", "interrupted", "never_ran", "running"]
    parts = [f"{counts[status]} {word(status)}" for status in order if status in counts]
    return f"{len(trials)} run{'s' if len(trials) != 1 else ''}: {', '.join(parts)}" if parts else "no run"


def trend_sentence(found: Trend, page: float) -> str:
    """The trend over the ordered axis in words."""
    if np.isnan(found.rho):
        return "A trend over the axis needs three scored runs at two values that differ in success."
    paged = "" if np.isnan(page) else f" Page's test over the paired seeds: {p_value(page)}."
    return (
        f"Trend over the ordered axis: Spearman's rho {signed(found.rho, 2)} over {found.n} runs, permutation "
        f"{p_value(found.p)} (words have no place in the order and are left out; a stopped run has its last value)."
        f"{paged}"
    )


def learning_sentences(row: dict[str, Any]) -> list[str]:
    """What success before and after training shows for one arm, and what it does not. row: of `arm_summary`."""
    if np.isnan(row["gain"]):
        return [f"Arm {row['arm']} has no success before training to compare with."]
    gains = [f"sampled {signed(row['gain'])} {interval(row['gain_low'], row['gain_high'])}"]
    if not np.isnan(row["gain_greedy"]):
        greedy = interval(row["gain_greedy_low"], row["gain_greedy_high"])
        gains.append(f"greedy {signed(row['gain_greedy'])} {greedy}")
    sentences = [f"Arm {row['arm']}, end of training minus before: {', '.join(gains)}, {row['gain_basis']}."]
    sentences.append(_what_it_shows(row))
    base_greedy, final = row["base_val_greedy_success"], row["final_val_success"]
    if not np.isnan(base_greedy):
        side = "above" if final > base_greedy else "not above"
        sentences.append(
            f"Sampled success at the end ({share(final)}) is {side} the base policy's own greedy success "
            f"({share(base_greedy)})."
        )
    return sentences


def _what_it_shows(row: dict[str, Any]) -> str:
    if np.isnan(row["gain_low"]):
        return "Without the outcomes of single levels it stays open whether this is more than chance."
    if not row["gain_low"] > 0:
        return "A rise of sampled success is not resolved."
    if np.isnan(row["gain_greedy"]):
        return "Without greedy success it stays open whether more levels can be solved or samples are only less noisy."
    if row["gain_greedy_low"] > 0:
        return (
            "Both rise: the likeliest reply solves more levels than before, so the gain is not only less noise in "
            "sampling. It does not show which skill was learned."
        )
    return (
        "Sampled success rises and a rise of greedy success is not resolved: the policy samples more of what it "
        "already preferred. That is no evidence that it solves levels which it could not solve before."
    )


def caveats(frames: StudyFrames, summary: pd.DataFrame) -> list[str]:
    """What the report cannot claim, for this study as it ran."""
    return [
        *_about_seeds(frames),
        *_about_levels(frames),
        *_about_scoring(frames, summary),
        *_about_comparisons(summary),
        "A peak is the best of many noisy validations and thus too high; no verdict uses it.",
        "Repeating a seed on the same machine was not part of this study; times depend on what else the machine did.",
    ]


def _about_seeds(frames: StudyFrames) -> list[str]:
    scored = frames.trials[frames.trials["status"].isin(SCORED)]
    seeds = scored["seed"].nunique()
    if seeds == 0:
        return ["No run ended by the protocol, so nothing is compared."]
    if seeds < SEEDS_FOR_SEEDS:
        return [
            f"{seeds} seed{'s' if seeds > 1 else ''}: intervals and p-values are over validation levels, of the very "
            "runs shown. Another seed may turn out differently; nothing here is a claim about the setting itself."
        ]
    weak = " Five are the usual least for a claim, ten are better." if seeds < 5 else ""
    return [f"{seeds} seeds: differences are paired by seed, with Student's t interval.{weak}"]


def _about_levels(frames: StudyFrames) -> list[str]:
    levels = frames.levels[frames.levels["split"] == "val"]
    if levels.empty:
        return ["The outcomes of single levels are missing, so below three seeds there are no intervals."]
    number, classes = levels["level"].nunique(), levels["cluster"].nunique()
    same = (levels.groupby(["run_id", "step", "mode"])["level"].nunique() == number).all()
    shared = "All arms were validated on the same" if same else "Runs were validated on different sets of"
    return [
        f"{shared} {number} levels, {classes} of them different up to symmetry. Intervals over levels treat symmetric "
        "levels as one cluster; they do not speak of levels of another kind or size."
    ]


def _about_scoring(frames: StudyFrames, summary: pd.DataFrame) -> list[str]:
    found = []
    if len(summary) and (summary["early_stopped"] > 0).any():
        found.append(
            "An early stop is part of the protocol: the arm is a failed regime, and its run keeps the last validation "
            "it had. The section on stops shows the same mean with a stopped run scored 0, and with it left out."
        )
    left_out = int((~frames.trials["status"].isin(SCORED)).sum())
    if left_out:
        found.append(f"{left_out} of {len(frames.trials)} runs did not end by the protocol and are not scored.")
    if len(summary) and summary["kept_ratio"].min() < 0.99:
        found.append(
            "Arms differ in how many groups they kept, hence in optimizer steps and trained tokens; compare them at "
            "equal budgets before calling one more efficient."
        )
    return found


def _about_comparisons(summary: pd.DataFrame) -> list[str]:
    number = int(summary["p"].notna().sum()) if len(summary) else 0
    if number == 0:
        return []
    return [
        f"{number} comparison{'s' if number > 1 else ''} with the baseline: p-values are adjusted by Holm's procedure "
        "within this study; an interval is that of its arm alone."
    ]


def level_sets(frames: StudyFrames) -> list[dict[str, Any]]:
    """The levels of each split: how many, how many up to symmetry, the range of their seeds, how they were decoded."""
    return [
        {
            "split": split,
            "levels": rows["level"].nunique(),
            "classes": rows["cluster"].nunique(),
            "first": rows["level"].min(),
            "last": rows["level"].max(),
            "modes": ", ".join(sorted(rows["mode"].unique(), reverse=True)),
        }
        for split, rows in frames.levels.groupby("split", sort=False)
    ]


def arm_settings(frames: StudyFrames) -> list[dict[str, Any]]:
    """The settings in which runs differ, seeds left out: each with its value in every arm."""
    configs = [name for name in frames.trials.columns if name.startswith("config/") and name != "config/seed"]
    differing = [name for name in configs if frames.trials[name].astype("str").nunique() > 1]
    by_arm = frames.trials.groupby("arm", sort=False)
    return [
        {"setting": name.removeprefix("config/"), "values": [str(rows[name].iloc[0]) for _, rows in by_arm]}
        for name in differing
    ]


def run_list(frames: StudyFrames) -> list[dict[str, Any]]:
    """Every run, for the list at the end of a report."""
    return records(frames.trials)
