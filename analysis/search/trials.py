"""A search as an Optuna study: what its sampler, its importances and its dashboard work on.

The study is made from the rows of the runs whenever it is needed, so it never disagrees with them.
"""

import warnings
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from analysis.data.frames import to_records
from analysis.search.points import COMPLETE, COST, OPEN, SUCCESS
from trainable.runs.study_record import Dimension, Search

optuna.logging.set_verbosity(optuna.logging.WARNING)

CONSTRAINT = "runs that collapsed or failed"
IMPORTANCE_QUANTILE = 0.25
"""Importances say what it takes to be among this fraction of the points. Optuna's tenth is two points of twenty."""
_NUM_RESAMPLES = 200
_MIN_POINTS = 8
"""With fewer points, the best quarter is a single one, and there is nothing to say about it."""


def make_distribution(dimension: Dimension) -> BaseDistribution:
    """The distribution of a dimension, which is an search of `space` in study.json."""
    if dimension.values:
        return CategoricalDistribution(tuple(dimension.values))
    if dimension.is_integer:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)


def make_optuna_study(
    search: Search,
    points: pd.DataFrame | None,
    is_higher_better: bool,
    sampler: BaseSampler | None = None,
    storage: BaseStorage | None = None,
    name: str | None = None,
) -> optuna.Study:
    """The Optuna study of a search, with a trial per point that has ended.

    Args:
        search: of the study.
        points: from `make_points`; None for a study without a trial.
        is_higher_better: of the primary outcome.
        sampler: draws the next points.
        storage: where the study is written, without a study of this name; None for memory.
        name: of the study in the storage.
    """
    directions = {
        SUCCESS: StudyDirection.MAXIMIZE if is_higher_better else StudyDirection.MINIMIZE,
        COST: StudyDirection.MINIMIZE,
    }
    objectives = search.objectives
    study = optuna.create_study(
        directions=[directions[objective] for objective in objectives],
        sampler=sampler,
        storage=storage,
        study_name=name,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(objectives))
    study.add_trials([] if points is None else _make_trials(search, points))
    return study


def _make_trials(search: Search, points: pd.DataFrame) -> list[FrozenTrial]:
    """A trial per point that has ended.

    A censored point is a pruned trial, and so is one of which every run failed: the sampler learns of its violations,
    while a failed trial would be as if it had never been drawn.
    """
    distributions = {dimension.name: make_distribution(dimension) for dimension in search.space}
    trials = []
    for row in to_records(points):
        if row["state"] == OPEN:
            continue
        outcomes = [row[name] for name in search.objectives]
        is_complete = row["state"] == COMPLETE and not np.isnan(outcomes).any()
        trials.append(
            create_trial(
                state=TrialState.COMPLETE if is_complete else TrialState.PRUNED,
                values=outcomes if is_complete else None,
                params=row["values"],
                distributions={name: distributions[name] for name in row["values"]},
                user_attrs={"arm": row["arm"], "seeds": row["seeds"], "state": row["state"]},
                constraints={CONSTRAINT: float(row["violations"])},
            )
        )
    return trials


class Importance(NamedTuple):
    """How much a dimension matters for being among the best points: its share of the total, with a 90 % interval."""

    name: str
    value: float
    low: float
    high: float


def compute_importances(
    search: Search, points: pd.DataFrame, is_higher_better: bool, generator: np.random.Generator
) -> list[Importance]:
    """PED-ANOVA importances of the dimensions for the first objective, the largest first; empty with too few points.

    The intervals are from 200 resamples of the points. They say how much depends on which points were drawn, and
    nothing of other seeds.

    Source: Watanabe, Bansal & Hutter 2023, https://arxiv.org/abs/2304.10255, in Optuna's implementation.
    """
    single = replace(search, objectives=(SUCCESS,))
    # The default has a value of every setting, but none that was drawn.
    complete_points = points[(points["number"] > 0) & (points["state"] == COMPLETE)]
    if len(complete_points) < _MIN_POINTS:
        return []
    values = _compute_shares(single, complete_points, is_higher_better)
    count = len(complete_points)
    resamples = [
        _compute_shares(single, complete_points.iloc[generator.integers(count, size=count)], is_higher_better)
        for _ in range(_NUM_RESAMPLES)
    ]
    importances = []
    for name, value in values.items():
        low, high = np.quantile([resample.get(name, 0.0) for resample in resamples], (0.05, 0.95))
        importances.append(Importance(name, value, float(low), float(high)))
    return sorted(importances, key=lambda importance: -importance.value)


def _compute_shares(search: Search, points: pd.DataFrame, is_higher_better: bool) -> dict[str, float]:
    evaluator = PedAnovaImportanceEvaluator(target_quantile=IMPORTANCE_QUANTILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings without an effect in a resample
        return get_param_importances(make_optuna_study(search, points, is_higher_better), evaluator=evaluator)


def list_pareto_arms(search: Search, points: pd.DataFrame, is_higher_better: bool) -> list[str]:
    """The feasible points that no other beats in one of success and cost without being worse in the other."""
    both = replace(search, objectives=(SUCCESS, COST))
    study = make_optuna_study(both, points[points["is_feasible"]], is_higher_better)
    return sorted((trial.user_attrs["arm"] for trial in study.best_trials), key=list(points["arm"]).index)
