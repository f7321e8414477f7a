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

from analysis.data.compare import SCORED, SEEDS_FOR_SEEDS, single
from analysis.data.families import Row
from analysis.data.frames import Study, StudyFrames, records
from analysis.stats.estimates import Estimate, holm, mean_over_seeds
from analysis.sweep.verdicts import LEVEL, p_value, word

COLUMNS: Mapping[str, str] = {
    "final_test_error": "what a rule is for",
    "final_entropy": "what is left to explore with at the end; near 0 for all that collapsed, however early",
    "mean_entropy": "how long entropy lasted: a number for runs that never get low and for those at the floor alike",
    "final_test_error_unscored": "masked_reversal: what was learned where nothing is scored",
    "final_chain_reward": "chain tasks: what they pay",
    "final_perplexity": "lm_bandit: whether the model is still one of language",
    "mean_replay_age": "replay: no outcome, but whether pairs meant to be alike in age are",
}
"""The trial columns that are contrasted, and why."""
LEFT_OUT: Mapping[str, str] = {
    "final_greedy_separator_rate": "names a collapse, whose error final_test_error has",
    "first_step_entropy_low": "missing where it is never reached: a mean over those that reach it is of a chosen few",
    "first_step_error_zero": "the same",
    "mean_effective_age": "mean_replay_age, but for FreshDG",
}
"""The other trial columns, and why they are not."""
OF_EVERY_STUDY = ("final_test_error", "final_entropy", "mean_entropy")

LOWER, HIGHER, NOT_RESOLVED = "lower", "higher", "no difference resolved"
NO_INTERVAL, NO_COMPARISON = "no interval", "no comparison"
_DECIMALS = 12
"""Smaller differences are those of rounding: runs that are equal have a difference of 0, and no spread."""

NAMED = 3
"""Stopped runs that a sentence names; of more it says how many, and the table which."""

_BY_SEED = ("column", "contrast", "first", "second", "seed", "first_value", "second_value", "difference")
_PAIRS = (
    "column", "contrast", "first", "second", "first_mean", "second_mean", "difference", "seeds", "lower", "higher",
    "equal", "first_steps", "second_steps", "left_out", "stopped", "stopped_runs",
)  # fmt: skip
_CONTRASTS = (
    "column", "contrast", "difference", "low", "high", "seeds", "p", "p_holm", "verdict", "pairs", "pairs_used",
    "lower", "higher", "equal", "used", "planned", "difference_same_pairs", "left_out", "stopped",
    "stopped_runs",
)  # fmt: skip


def declared(study: Study) -> list[tuple[str, list[tuple[str, str]]]]:
    """Name and pairs of each contrast of study.json, none where it has none.

    ValueError where a name or a pair comes twice, or an arm is compared with itself: a pair would count twice, or for
    nothing.
    """
    found = [
        (each["name"], [(first, second) for first, second in each["pairs"]]) for each in study.get("contrasts") or []
    ]
    names = [name for name, _ in found]
    for name, pairs in found:
        if names.count(name) > 1:
            raise ValueError(
                f"study.json of `{study['name']}` has two contrasts named {name!r}: give each its own name."
            )
        odd = [pair for pair in pairs if sum(set(pair) == set(other) for other in pairs) > 1 or len(set(pair)) < 2]
        if odd:
            raise ValueError(
                f"The contrast {name!r} of `{study['name']}` pairs {' with '.join(odd[0])}, "
                f"{'which is one arm' if len(set(odd[0])) < 2 else 'twice'}: list each pair of two arms once."
            )
    return found


def by_seed(frames: StudyFrames) -> pd.DataFrame:
    """One row a column, contrast, pair and seed of the study: the values of both runs and first minus second.

    A value is missing where the run is not scored (see `compare.SCORED`), was not run, or has none; the difference is
    missing with it. Columns that `_measured` leaves out have no row.
    """
    runs = _runs(frames)
    seeds = sorted({seed for _, seed in runs})
    rows = [
        (column, name, first, second, seed, *values, round(values[0] - values[1], _DECIMALS))
        for column in COLUMNS
        for name, pairs in declared(single(frames).studies[0])
        if _measured(column, pairs, runs)
        for first, second in pairs
        for seed in seeds
        for values in [[_value(runs.get((arm, seed)), column) for arm in (first, second)]]
    ]
    return pd.DataFrame(rows, columns=list(_BY_SEED))


def _runs(frames: StudyFrames) -> dict[tuple[str, int], Row]:
    """Every run of the study by its arm and seed."""
    return {(run["arm"], run["seed"]): run for run in records(frames.runs)}


def _value(run: Row | None, column: str) -> float:
    return float(run[column]) if run is not None and run["status"] in SCORED else math.nan


def _measured(column: str, pairs: Sequence[tuple[str, str]], runs: Mapping[tuple[str, int], Row]) -> bool:
    """Whether a contrast is made in a column.

    One of `OF_EVERY_STUDY`: where any scored run of the study has it, so that one without it is named as left out.
    Another: where every scored run of the contrast's arms has it, since it belongs to certain tasks and rules.
    """
    if column in OF_EVERY_STUDY:
        return any(not math.isnan(_value(run, column)) for run in runs.values())
    arms = {arm for pair in pairs for arm in pair}
    held = [_value(run, column) for (arm, _), run in runs.items() if arm in arms and run["status"] in SCORED]
    return bool(held) and not np.isnan(held).any()


def pairs(frames: StudyFrames) -> pd.DataFrame:
    """One row a column, contrast and pair: what stands behind `contrasts`, without a test of its own.

    Means and difference are over the seeds of which both runs have a value (`seeds`); lower, higher, equal: of how many
    of them first is below, above, or the same. first_steps, second_steps: what the runs of an arm were asked to train
    for. left_out and stopped: the runs, see `contrasts`.
    """
    return pd.DataFrame(_pairs(records(by_seed(frames)), _runs(frames)), columns=list(_PAIRS))


def _pairs(differences: Sequence[Row], runs: Mapping[tuple[str, int], Row]) -> list[Row]:
    """Rows of `pairs`. differences: of `by_seed`, in its order; plain rows, since frames of three rows are slow."""
    rows = []
    for key, group in groupby(differences, key=itemgetter(*_BY_SEED[:4])):
        own = list(group)
        used = [row for row in own if not math.isnan(row["difference"])]
        of_pair = [row["difference"] for row in used]
        rows.append({
            **dict(zip(_BY_SEED[:4], key, strict=True)),
            "first_mean": _mean([row["first_value"] for row in used]),
            "second_mean": _mean([row["second_value"] for row in used]),
            "difference": round(_mean(of_pair), _DECIMALS), "seeds": len(used),
            **_signs(of_pair), "first_steps": _steps(runs, key[2]), "second_steps": _steps(runs, key[3]),
            **_notes(own, runs),
        })  # fmt: skip
    return rows


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _signs(differences: Sequence[float]) -> Row:
    return {
        "lower": sum(difference < 0 for difference in differences),
        "higher": sum(difference > 0 for difference in differences),
        "equal": sum(difference == 0 for difference in differences),
    }


def _steps(runs: Mapping[tuple[str, int], Row], arm: str) -> str:
    """Planned steps of the arm's runs, each number once."""
    asked = {run["steps_total"] for (of, _), run in runs.items() if of == arm}
    return ", ".join(str(steps) for steps in sorted(steps for steps in asked if not pd.isna(steps)))


def contrasts(frames: StudyFrames) -> pd.DataFrame:
    """One row a column and contrast, the contrasts of a column together.

    difference: mean over seeds of the mean over a seed's pairs; low, high: 95 % t interval over the `seeds` that have a
    pair; p_holm: Holm's over the contrasts of one column. verdict: one of the five words above; "lower" and "higher" at
    p_holm < 0.05. pairs: declared; pairs_used: with a seed; lower, higher, equal: of these, by the sign of the pair's
    mean. used of planned: pairs times seeds. difference_same_pairs: over the pairs alone that every counted seed has.
    left_out: runs that take a pair and seed out, and why; stopped: counted runs that a rule stopped, and where, and
    stopped_runs how many.
    """
    runs, differences = _runs(frames), records(by_seed(frames))
    rows = []
    for (column, name), group in groupby(differences, key=itemgetter("column", "contrast")):
        own = list(group)
        found = _pairs(own, runs)
        rows.append({
            "column": column, "contrast": name, **_estimate(own), "pairs": len(found),
            "pairs_used": sum(pair["seeds"] > 0 for pair in found), **_signs([pair["difference"] for pair in found]),
            "used": sum(pair["seeds"] for pair in found), "planned": len(own), **_notes(own, runs),
        })  # fmt: skip
    table = pd.DataFrame(rows, columns=list(_CONTRASTS))
    adjusted = [holm(own["p"].to_numpy(dtype=float)) for _, own in table.groupby("column", sort=False)]
    table["p_holm"] = np.concatenate(adjusted) if adjusted else np.empty(0)
    return table.assign(verdict=[_verdict(row) for row in records(table)])


def _estimate(own: Sequence[Row]) -> Row:
    """Difference of a contrast in one column with its interval. own: its rows of `by_seed`."""
    held: dict[int, dict[tuple[str, str], float]] = {}  # by seed, the pairs of which it has a difference
    for row in own:
        if not math.isnan(row["difference"]):
            held.setdefault(row["seed"], {})[row["first"], row["second"]] = row["difference"]
    per_seed = [round(_mean(list(found.values())), _DECIMALS) for _, found in sorted(held.items())]
    enough = len(per_seed) >= SEEDS_FOR_SEEDS
    found = mean_over_seeds(np.array(per_seed)) if enough else Estimate(_mean(per_seed))
    of_all = set.intersection(*map(set, held.values())) if held else set()
    return {
        "difference": found.value,
        "low": found.low,
        "high": found.high,
        "seeds": len(per_seed),
        "p": found.p,
        "difference_same_pairs": _mean([differences[pair] for differences in held.values() for pair in of_all]),
    }


def _verdict(row: Row) -> str:
    if not row["seeds"]:
        return NO_COMPARISON
    if math.isnan(row["p"]):
        return NO_INTERVAL
    if row["p_holm"] >= LEVEL:
        return NOT_RESOLVED
    return LOWER if row["difference"] < 0 else HIGHER


def _notes(own: Sequence[Row], runs: Mapping[tuple[str, int], Row]) -> Row:
    """The runs that take a pair and seed out, by arm and reason, and the counted ones that a rule stopped, by arm."""
    left_out: dict[str, set[str]] = {}
    stopped: dict[str, set[str]] = {}
    for row in own:
        for arm, value in ((row["first"], row["first_value"]), (row["second"], row["second_value"])):
            run = runs.get((arm, row["seed"]))
            if math.isnan(value):
                left_out.setdefault(f"{arm} {_why(run)}", set()).add(str(row["seed"]))
            elif run is not None and run["status"] == "early_stopped" and not math.isnan(row["difference"]):
                stopped.setdefault(arm, set()).add(f"{row['seed']} at step {run['steps_done']}")
    return {
        "left_out": _listed(left_out),
        "stopped": _listed(stopped),
        "stopped_runs": sum(len(seeds) for seeds in stopped.values()),
    }


def _why(run: Row | None) -> str:
    if run is None:
        return "not run"
    return "without a value" if run["status"] in SCORED else word(run["status"])


def _listed(found: Mapping[str, set[str]]) -> str:
    parts = [(name, sorted(seeds, key=lambda seed: int(seed.split()[0]))) for name, seeds in found.items()]
    return "; ".join(f"{name}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" for name, seeds in parts)


def sentence(row: Row) -> str:
    """The verdict on a contrast in words. row: of `contrasts`."""
    told = f"{row['contrast']}, {row['column']}: {row['verdict']}: {_size(row)}"
    if row["seeds"]:
        equal = f", equal in {row['equal']}" if row["equal"] else ""
        used = "" if row["pairs_used"] == row["pairs"] else f"{row['pairs_used']} of "
        told += f"; {used}{_count(row['pairs'], 'pair')}: lower in {row['lower']}, higher in {row['higher']}{equal}"
    if row["left_out"]:
        left_out = f"{row['planned'] - row['used']} of {row['planned']} pairs of runs left out ({row['left_out']})"
        told += f"{_unbalanced(row)}; {left_out}"
    if row["stopped"]:
        which = f" ({row['stopped']})" if row["stopped_runs"] <= NAMED else ""
        told += f"; {_count(row['stopped_runs'], 'run')} stopped by a rule, counted with the last row{which}"
    return told


def _size(row: Row) -> str:
    if row["verdict"] == NO_COMPARISON:
        return "no pair has a seed of which both runs count"
    over = f"over {_count(row['seeds'], 'seed')}"
    if row["verdict"] == NO_INTERVAL:
        return f"{row['difference']:+.4g} {over}: an interval needs {SEEDS_FOR_SEEDS}"
    if row["verdict"] == NOT_RESOLVED and row["lower"] == row["higher"] == 0:
        return f"every pair is equal, {over}"
    numbers = f"{row['difference']:+.4g} [{row['low']:+.4g}, {row['high']:+.4g}] {over}, Holm {p_value(row['p_holm'])}"
    if row["verdict"] != NOT_RESOLVED:
        return numbers
    alone = "; resolved alone, not among the contrasts of this column" if row["p"] < LEVEL else ""
    return f"{numbers}{alone}; one of up to {max(-row['low'], row['high']):.2g} could have been missed"


def _unbalanced(row: Row) -> str:
    """What the difference would be over the same pairs in every seed, where seeds have different ones."""
    if not row["seeds"] or row["used"] == row["pairs_used"] * row["seeds"]:
        return ""
    same = row["difference_same_pairs"]
    only = "no pair has every seed" if math.isnan(same) else f"{same:+.4g} over the pairs that every seed has"
    return f"; seeds have different pairs: {only}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def sentences(table: pd.DataFrame) -> list[str]:
    """One line a contrast and column. table: `contrasts`."""
    return [sentence(row) for row in records(table)]
