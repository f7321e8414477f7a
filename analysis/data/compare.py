"""Which runs of an arm count, what each scores, and how two sets of runs differ."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, records
from analysis.stats.estimates import (
    Estimate,
    area_under_curve,
    difference_over_levels,
    mean_over_seeds,
    share_over_levels,
)

SCORED = ("completed", "early_stopped")
SEEDS_FOR_SEEDS = 3


class Point(NamedTuple):
    """An evaluation of a run: after `step` training steps, 0 being before training."""

    run_id: str
    step: int


def single(frames: StudyFrames) -> StudyFrames:
    """`frames` if it holds one study, else ValueError naming them."""
    names = [study["name"] for study in frames.studies]
    if len(names) != 1:
        raise ValueError(f"These frames hold {len(names)} studies ({', '.join(names)}): take one, frames.one(NAME).")
    return frames


def arms(frames: StudyFrames) -> list[str]:
    """Arms of the study in the order of study.json."""
    return list(dict.fromkeys(frames.trials["arm"]))


def runs_of(frames: StudyFrames, arm: str, *, scored: bool = False) -> pd.DataFrame:
    """Rows of `trials` of one arm, settings left out. scored: only runs that completed or that a rule stopped."""
    runs = frames.runs[frames.runs["arm"] == arm]
    return runs[runs["status"].isin(SCORED)] if scored else runs


def outcomes(runs: pd.DataFrame) -> "pd.Series[float]":
    """The estimand of each run: sampled validation success at its last validation.

    A run that a rule stopped keeps the last one it had; one stopped before its first has the base policy's.
    """
    return runs["final_val_success"].fillna(runs["base_val_success"])


def basis(seeds: int) -> str:
    """What an interval is over, in words that never claim more."""
    if seeds >= SEEDS_FOR_SEEDS:
        return f"over {seeds} seeds"
    which = "this one run" if seeds == 1 else f"these {seeds} runs"
    return f"over levels, of {which}; says nothing about seeds" if seeds else ""


def by_level(frames: StudyFrames, runs: pd.DataFrame, mode: str = "sampled") -> dict[Point, pd.DataFrame]:
    """The first and the last validation of each of `runs`: success of each level; see `StudyFrames.validations`."""
    return {
        Point(run_id, step): levels
        for run_id in sorted(runs["run_id"])
        for step, levels in frames.validations.get((run_id, mode), {}).items()
    }


def last_points(points: Iterable[Point]) -> dict[str, Point]:
    """The last of `points` of each run."""
    return {point.run_id: point for point in sorted(points)}


def level(frames: StudyFrames, runs: pd.DataFrame) -> Estimate:
    """Mean outcome of an arm's scored runs: t interval, cut to [0, 1], from 3 seeds on; else Wilson's over levels."""
    if len(runs) >= SEEDS_FOR_SEEDS:
        found = mean_over_seeds(outcomes(runs))
        return found._replace(low=max(found.low, 0.0), high=min(found.high, 1.0))
    levels = by_level(frames, runs)
    last = last_points(levels)
    if not last or len(last) < len(runs):
        return Estimate(float(outcomes(runs).mean()))
    episodes = pd.concat([levels[point] for point in last.values()])
    return share_over_levels(episodes["success"], episodes["cluster"])


def difference(frames: StudyFrames, runs: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Estimate, int]:
    """Outcome of `runs` minus that of `baseline`, paired by seed, and the number of seeds that both have.

    From 3 seeds on over seeds; below, over the levels of the paired runs. No common seed: an empty estimate. Without
    the outcomes of single levels: a value without an interval.
    """
    ours, theirs = runs.set_index("seed"), baseline.set_index("seed")
    seeds = [seed for seed in ours.index if seed in theirs.index]
    ours, theirs = ours.loc[seeds], theirs.loc[seeds]
    per_seed = outcomes(ours) - outcomes(theirs)
    if len(seeds) >= SEEDS_FOR_SEEDS:
        return mean_over_seeds(per_seed), len(seeds)
    both = pd.concat([ours, theirs])
    levels = by_level(frames, both)
    last = last_points(levels)
    if any(run_id not in last for run_id in both["run_id"]):
        return Estimate(float(per_seed.mean())), len(seeds)
    pairs = [(last[a], last[b]) for a, b in zip(ours["run_id"], theirs["run_id"], strict=True)]
    return over_levels(levels, pairs), len(seeds)


def gain(frames: StudyFrames, runs: pd.DataFrame, mode: str = "sampled") -> Estimate:
    """Validation success at the end minus before training, of the same runs; over seeds from 3 on, else over levels.

    Without the outcomes of single levels: a value without an interval.
    """
    after = outcomes(runs) if mode == "sampled" else runs["final_val_greedy_success"]
    before = runs["base_val_success" if mode == "sampled" else "base_val_greedy_success"]
    per_seed = (after - before).dropna()
    if len(per_seed) >= SEEDS_FOR_SEEDS:
        return mean_over_seeds(per_seed)
    levels = by_level(frames, runs.loc[per_seed.index], mode)
    pairs = [(point, Point(point.run_id, 0)) for point in last_points(levels).values()]
    if len(per_seed) == 0 or len(pairs) < len(per_seed) or any(base not in levels for _, base in pairs):
        return Estimate(float(per_seed.mean()) if len(per_seed) else float("nan"))
    return over_levels(levels, pairs)


def over_levels(levels: Mapping[Point, pd.DataFrame], pairs: list[tuple[Point, Point]]) -> Estimate:
    """Difference over the levels of each pair of evaluations, first minus second. levels: from `by_level`.

    Levels that one evaluation lacks are left out. Pairs share clusters: a level met by two seeds is one level.
    """
    if not pairs:
        return Estimate()
    differences = pd.concat([(levels[a]["success"] - levels[b]["success"]).dropna() for a, b in pairs])
    clusters = pd.concat([levels[a]["cluster"] for a, _ in pairs])
    return difference_over_levels(differences, clusters[~clusters.index.duplicated()].loc[differences.index])


def auc(frames: StudyFrames, runs: pd.DataFrame) -> "pd.Series[float]":
    """Secondary estimand of each run: mean height of its validation curve from step 0 to steps_total.

    A run that a rule stopped keeps its last value to the end.
    """
    needed = records(runs[["run_id", "base_val_success", "steps_total"]])
    areas = [_area(frames.steps_of(run["run_id"])[["step", "val_success"]].dropna(), run) for run in needed]
    return pd.Series(areas, index=runs.index, dtype="float64")


def _area(validated: pd.DataFrame, run: Mapping[str, Any]) -> float:
    base = [] if np.isnan(run["base_val_success"]) else [run["base_val_success"]]
    at = [0] * len(base) + validated["step"].to_list()
    until = max(at, default=0) if pd.isna(run["steps_total"]) else run["steps_total"]
    return area_under_curve(at, base + validated["val_success"].to_list(), until)
