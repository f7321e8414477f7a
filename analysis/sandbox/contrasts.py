"""Contrasts of a study: pairs of arms, declared before any run, that differ in one thing; what that thing does.

study.json holds them as "contrasts": [{"name": ..., "pairs": [[first, second], ...]}, ...]; a difference is that of the
first arm minus the second, of two runs of one seed. The estimand is the mean over the pairs of a contrast. Pairs of one
seed share streams of random numbers and often an arm, so they are not independent: each seed gives one number, the mean
over its pairs, and the interval is Student's t over seeds, from `SEEDS_FOR_SEEDS` on. It is about other seeds of these
very pairs, not about pairs that nobody declared.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import pandas as pd

from analysis.data.compare import MIN_SEEDS, SCORED_STATUSES, require_single_study
from analysis.data.families import Row
from analysis.data.frames import Study, StudyFrames, to_records
from analysis.stats.estimates import Estimate, holm_adjust, mean_over_seeds
from analysis.sweep.verdicts import SIGNIFICANCE_LEVEL, format_p_value, format_status

CONTRASTED_COLUMNS: Mapping[str, str] = {
    "final_test_error": "what a rule is for",
    "final_entropy": "what is left to explore with at the end; near 0 for all that collapsed, however early",
    "mean_entropy": "how long entropy lasted: a number for runs that never get low and for those at the floor alike",
    "final_test_error_unscored": "masked_reversal: what was learned where nothing is scored",
    "final_chain_reward": "chain tasks: what they pay",
    "final_perplexity": "lm_bandit: whether the model is still one of language",
    "mean_replay_age": "replay: no outcome, but whether pairs meant to be alike in age are",
}
"""The trial columns that are contrasted, and why."""
EXCLUDED_COLUMNS: Mapping[str, str] = {
    "final_greedy_separator_rate": "names a collapse, whose error final_test_error has",
    "first_step_entropy_low": "missing where it is never reached: a mean over those that reach it is of a chosen few",
    "first_step_error_zero": "the same",
    "mean_effective_age": "mean_replay_age, but for FreshDG",
}
"""The other trial columns, and why they are not."""
COMMON_COLUMNS = ("final_test_error", "final_entropy", "mean_entropy")

LOWER, HIGHER, NOT_RESOLVED = "lower", "higher", "no difference resolved"
NO_INTERVAL, NO_COMPARISON = "no interval", "no comparison"
_DECIMALS = 12
"""Smaller differences are those of rounding: runs that are equal have a difference of 0, and no spread."""

MAX_NAMED_RUNS = 3
"""Stopped runs that a sentence names; of more it says how many, and the table which."""

_SEED_COLUMNS = ("column", "contrast", "first", "second", "seed", "first_value", "second_value", "difference")
_PAIR_COLUMNS = (
    "column", "contrast", "first", "second", "first_mean", "second_mean", "difference", "seeds", "lower", "higher",
    "equal", "first_steps", "second_steps", "left_out", "stopped", "stopped_runs",
)  # fmt: skip
_CONTRAST_COLUMNS = (
    "column", "contrast", "difference", "low", "high", "seeds", "p", "p_holm", "verdict", "pairs", "pairs_used",
    "lower", "higher", "equal", "used", "planned", "difference_same_pairs", "left_out", "stopped",
    "stopped_runs",
)  # fmt: skip


def read_contrasts(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """Name and pairs of each contrast of study.json, none where it has none.

    ValueError where a name or a pair comes twice, or an arm is compared with itself: a pair would count twice, or for
    nothing.
    """
    declarations = [
        (each["name"], [(first, second) for first, second in each["pairs"]]) for each in study.get("contrasts") or []
    ]
    names = [name for name, _ in declarations]
    for name, pairs in declarations:
        if names.count(name) > 1:
            raise ValueError(
                f"study.json of `{study['name']}` has two contrasts named {name!r}: give each its own name."
            )
        invalid_pairs = [
            pair for pair in pairs if sum(set(pair) == set(other) for other in pairs) > 1 or len(set(pair)) < 2
        ]
        if invalid_pairs:
            raise ValueError(
                f"The contrast {name!r} of `{study['name']}` pairs {' with '.join(invalid_pairs[0])}, "
                f"{'which is one arm' if len(set(invalid_pairs[0])) < 2 else 'twice'}: list each pair of two arms once."
            )
    return declarations


def compute_seed_differences(frames: StudyFrames) -> pd.DataFrame:
    """One row a column, contrast, pair and seed of the study: the values of both runs and first minus second.

    A value is missing where the run is not scored (see `compare.SCORED`), was not run, or has none; the difference is
    missing with it. Columns that `_measured` leaves out have no row.
    """
    runs = _index_runs(frames)
    seeds = sorted({seed for _, seed in runs})
    rows = [
        (column, name, first, second, seed, *values, round(values[0] - values[1], _DECIMALS))
        for column in CONTRASTED_COLUMNS
        for name, pairs in read_contrasts(require_single_study(frames).studies[0])
        if _is_contrasted(column, pairs, runs)
        for first, second in pairs
        for seed in seeds
        for values in [[_read_value(runs.get((arm, seed)), column) for arm in (first, second)]]
    ]
    return pd.DataFrame(rows, columns=list(_SEED_COLUMNS))


def _index_runs(frames: StudyFrames) -> dict[tuple[str, int], Row]:
    """Every run of the study by its arm and seed."""
    return {(run["arm"], run["seed"]): run for run in to_records(frames.runs)}


def _read_value(run: Row | None, column: str) -> float:
    return float(run[column]) if run is not None and run["status"] in SCORED_STATUSES else math.nan


def _is_contrasted(column: str, pairs: Sequence[tuple[str, str]], runs: Mapping[tuple[str, int], Row]) -> bool:
    """Whether a contrast is made in a column.

    One of `OF_EVERY_STUDY`: where any scored run of the study has it, so that one without it is named as left out.
    Another: where every scored run of the contrast's arms has it, since it belongs to certain tasks and rules.
    """
    if column in COMMON_COLUMNS:
        return any(not math.isnan(_read_value(run, column)) for run in runs.values())
    arms = {arm for pair in pairs for arm in pair}
    scored_values = [
        _read_value(run, column) for (arm, _), run in runs.items() if arm in arms and run["status"] in SCORED_STATUSES
    ]
    return bool(scored_values) and not np.isnan(scored_values).any()


def compute_pair_differences(frames: StudyFrames) -> pd.DataFrame:
    """One row a column, contrast and pair: what stands behind `contrasts`, without a test of its own.

    Means and difference are over the seeds of which both runs have a value (`seeds`); lower, higher, equal: of how many
    of them first is below, above, or the same. first_steps, second_steps: what the runs of an arm were asked to train
    for. left_out and stopped: the runs, see `contrasts`.
    """
    return pd.DataFrame(
        _make_pair_rows(to_records(compute_seed_differences(frames)), _index_runs(frames)), columns=list(_PAIR_COLUMNS)
    )


def _make_pair_rows(differences: Sequence[Row], runs: Mapping[tuple[str, int], Row]) -> list[Row]:
    """Rows of `pairs`. differences: of `by_seed`, in its order; plain rows, since frames of three rows are slow."""
    rows = []
    for key, group in groupby(differences, key=itemgetter(*_SEED_COLUMNS[:4])):
        seed_rows = list(group)
        counted_rows = [row for row in seed_rows if not math.isnan(row["difference"])]
        seed_differences = [row["difference"] for row in counted_rows]
        rows.append({
            **dict(zip(_SEED_COLUMNS[:4], key, strict=True)),
            "first_mean": _mean_or_nan([row["first_value"] for row in counted_rows]),
            "second_mean": _mean_or_nan([row["second_value"] for row in counted_rows]),
            "difference": round(_mean_or_nan(seed_differences), _DECIMALS), "seeds": len(counted_rows),
            **_count_signs(seed_differences), "first_steps": _format_planned_steps(runs, key[2]), "second_steps": _format_planned_steps(runs, key[3]),
            **_collect_run_notes(seed_rows, runs),
        })  # fmt: skip
    return rows


def _mean_or_nan(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _count_signs(differences: Sequence[float]) -> Row:
    return {
        "lower": sum(difference < 0 for difference in differences),
        "higher": sum(difference > 0 for difference in differences),
        "equal": sum(difference == 0 for difference in differences),
    }


def _format_planned_steps(runs: Mapping[tuple[str, int], Row], arm: str) -> str:
    """Planned steps of the arm's runs, each number once."""
    planned_steps = {run["steps_total"] for (of, _), run in runs.items() if of == arm}
    return ", ".join(str(steps) for steps in sorted(steps for steps in planned_steps if not pd.isna(steps)))


def compute_contrasts(frames: StudyFrames) -> pd.DataFrame:
    """One row a column and contrast, the contrasts of a column together.

    difference: mean over seeds of the mean over a seed's pairs; low, high: 95 % t interval over the `seeds` that have a
    pair; p_holm: Holm's over the contrasts of one column. verdict: one of the five words above; "lower" and "higher" at
    p_holm < 0.05. pairs: declared; pairs_used: with a seed; lower, higher, equal: of these, by the sign of the pair's
    mean. used of planned: pairs times seeds. difference_same_pairs: over the pairs alone that every counted seed has.
    left_out: runs that take a pair and seed out, and why; stopped: counted runs that a rule stopped, and where, and
    stopped_runs how many.
    """
    runs, differences = _index_runs(frames), to_records(compute_seed_differences(frames))
    rows = []
    for (column, name), group in groupby(differences, key=itemgetter("column", "contrast")):
        seed_rows = list(group)
        pair_rows = _make_pair_rows(seed_rows, runs)
        rows.append({
            "column": column, "contrast": name, **_estimate_difference(seed_rows), "pairs": len(pair_rows),
            "pairs_used": sum(pair["seeds"] > 0 for pair in pair_rows), **_count_signs([pair["difference"] for pair in pair_rows]),
            "used": sum(pair["seeds"] for pair in pair_rows), "planned": len(seed_rows), **_collect_run_notes(seed_rows, runs),
        })  # fmt: skip
    table = pd.DataFrame(rows, columns=list(_CONTRAST_COLUMNS))
    adjusted_p_values = [holm_adjust(own["p"].to_numpy(dtype=float)) for _, own in table.groupby("column", sort=False)]
    table["p_holm"] = np.concatenate(adjusted_p_values) if adjusted_p_values else np.empty(0)
    return table.assign(verdict=[_decide_verdict(row) for row in to_records(table)])


def _estimate_difference(seed_rows: Sequence[Row]) -> Row:
    """Difference of a contrast in one column with its interval. own: its rows of `by_seed`."""
    differences_by_seed: dict[int, dict[tuple[str, str], float]] = {}  # by seed, the pairs of which it has a difference
    for row in seed_rows:
        if not math.isnan(row["difference"]):
            differences_by_seed.setdefault(row["seed"], {})[row["first"], row["second"]] = row["difference"]
    seed_means = [
        round(_mean_or_nan(list(estimate.values())), _DECIMALS) for _, estimate in sorted(differences_by_seed.items())
    ]
    has_enough_seeds = len(seed_means) >= MIN_SEEDS
    found = mean_over_seeds(np.array(seed_means)) if has_enough_seeds else Estimate(_mean_or_nan(seed_means))
    common_pairs = set.intersection(*map(set, differences_by_seed.values())) if differences_by_seed else set()
    return {
        "difference": found.value,
        "low": found.low,
        "high": found.high,
        "seeds": len(seed_means),
        "p": found.p,
        "difference_same_pairs": _mean_or_nan(
            [differences[pair] for differences in differences_by_seed.values() for pair in common_pairs]
        ),
    }


def _decide_verdict(row: Row) -> str:
    if not row["seeds"]:
        return NO_COMPARISON
    if math.isnan(row["p"]):
        return NO_INTERVAL
    if row["p_holm"] >= SIGNIFICANCE_LEVEL:
        return NOT_RESOLVED
    return LOWER if row["difference"] < 0 else HIGHER


def _collect_run_notes(seed_rows: Sequence[Row], runs: Mapping[tuple[str, int], Row]) -> Row:
    """The runs that take a pair and seed out, by arm and reason, and the counted ones that a rule stopped, by arm."""
    excluded_seeds: dict[str, set[str]] = {}
    stopped_seeds: dict[str, set[str]] = {}
    for row in seed_rows:
        for arm, value in ((row["first"], row["first_value"]), (row["second"], row["second_value"])):
            run = runs.get((arm, row["seed"]))
            if math.isnan(value):
                excluded_seeds.setdefault(f"{arm} {_format_exclusion(run)}", set()).add(str(row["seed"]))
            elif run is not None and run["status"] == "early_stopped" and not math.isnan(row["difference"]):
                stopped_seeds.setdefault(arm, set()).add(f"{row['seed']} at step {run['steps_done']}")
    return {
        "left_out": _format_seed_lists(excluded_seeds),
        "stopped": _format_seed_lists(stopped_seeds),
        "stopped_runs": sum(len(seeds) for seeds in stopped_seeds.values()),
    }


def _format_exclusion(run: Row | None) -> str:
    if run is None:
        return "not run"
    return "without a value" if run["status"] in SCORED_STATUSES else format_status(run["status"])


def _format_seed_lists(seeds_by_name: Mapping[str, set[str]]) -> str:
    sorted_items = [
        (name, sorted(seeds, key=lambda seed: int(seed.split()[0]))) for name, seeds in seeds_by_name.items()
    ]
    return "; ".join(f"{name}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" for name, seeds in sorted_items)


def format_sentence(row: Row) -> str:
    """The verdict on a contrast in words. row: of `contrasts`."""
    text = f"{row['contrast']}, {row['column']}: {row['verdict']}: {_format_size(row)}"
    if row["seeds"]:
        equal_text = f", equal in {row['equal']}" if row["equal"] else ""
        used_text = "" if row["pairs_used"] == row["pairs"] else f"{row['pairs_used']} of "
        text += f"; {used_text}{_format_count(row['pairs'], 'pair')}: lower in {row['lower']}, higher in {row['higher']}{equal_text}"
    if row["left_out"]:
        exclusion_text = (
            f"{row['planned'] - row['used']} of {row['planned']} pairs of runs left out ({row['left_out']})"
        )
        text += f"{_format_unbalanced(row)}; {exclusion_text}"
    if row["stopped"]:
        stopped_text = f" ({row['stopped']})" if row["stopped_runs"] <= MAX_NAMED_RUNS else ""
        text += (
            f"; {_format_count(row['stopped_runs'], 'run')} stopped by a rule, counted with the last row{stopped_text}"
        )
    return text


def _format_size(row: Row) -> str:
    if row["verdict"] == NO_COMPARISON:
        return "no pair has a seed of which both runs count"
    seeds_text = f"over {_format_count(row['seeds'], 'seed')}"
    if row["verdict"] == NO_INTERVAL:
        return f"{row['difference']:+.4g} {seeds_text}: an interval needs {MIN_SEEDS}"
    if row["verdict"] == NOT_RESOLVED and row["lower"] == row["higher"] == 0:
        return f"every pair is equal, {seeds_text}"
    interval_text = f"{row['difference']:+.4g} [{row['low']:+.4g}, {row['high']:+.4g}] {seeds_text}, Holm {format_p_value(row['p_holm'])}"
    if row["verdict"] != NOT_RESOLVED:
        return interval_text
    unadjusted_text = (
        "; resolved alone, not among the contrasts of this column" if row["p"] < SIGNIFICANCE_LEVEL else ""
    )
    return f"{interval_text}{unadjusted_text}; one of up to {max(-row['low'], row['high']):.2g} could have been missed"


def _format_unbalanced(row: Row) -> str:
    """What the difference would be over the same pairs in every seed, where seeds have different ones."""
    if not row["seeds"] or row["used"] == row["pairs_used"] * row["seeds"]:
        return ""
    common_difference = row["difference_same_pairs"]
    common_text = (
        "no pair has every seed"
        if math.isnan(common_difference)
        else f"{common_difference:+.4g} over the pairs that every seed has"
    )
    return f"; seeds have different pairs: {common_text}"


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_sentences(table: pd.DataFrame) -> list[str]:
    """One line a contrast and column. table: `contrasts`."""
    return [format_sentence(row) for row in to_records(table)]
