"""A search as an Optuna study, for its samplers, importances and dashboard.

The study is made anew from the rows of the runs whenever it is needed, so the two never disagree.
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
"""Importances refer to reaching the best fraction of the points. Optuna's default, a tenth, is two points of twenty."""
_NUM_RESAMPLES = 200
_MIN_POINTS = 8
"""With fewer points, the best quarter is a single point, from which nothing can be concluded."""


def make_distribution(dimension: Dimension) -> BaseDistribution:
    """Convert a dimension of the search space to an Optuna distribution."""
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
    """Create the Optuna study of a search, with a trial per point that has ended.

    Args:
        search: the search that the study declares.
        points: from `make_points`; None for a study without a trial.
        is_higher_better: whether a higher primary outcome is better.
        sampler: draws the next points.
        storage: where to write the study, which must not contain one of this name; None keeps it in memory.
        name: of the study in the storage.
    """
    success_direction = StudyDirection.MAXIMIZE if is_higher_better else StudyDirection.MINIMIZE
    directions = [StudyDirection.MINIMIZE if name == COST else success_direction for name in search.objectives]
    study = optuna.create_study(directions=directions, sampler=sampler, storage=storage, study_name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(search.objectives))
    study.add_trials([] if points is None else _make_trials(search, points))
    return study


def _make_trials(search: Search, points: pd.DataFrame) -> list[FrozenTrial]:
    """Make a trial per point that has ended.

    Both a censored point and a point all of whose runs failed become pruned trials: the sampler learns from their
    violations, while it would ignore a failed trial.
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
    """Importance of a dimension for being among the best points: its share of the total, with a 90 % interval."""

    name: str
    value: float
    low: float
    high: float


def compute_importances(
    search: Search, points: pd.DataFrame, is_higher_better: bool, generator: np.random.Generator
) -> list[Importance]:
    """Compute PED-ANOVA importances of the dimensions for success, largest first; empty with too few points.

    The intervals come from 200 resamples of the points. They show how much depends on which points were drawn, not on
    the seeds.

    Source: Watanabe, Bansal & Hutter 2023, https://arxiv.org/abs/2304.10255, in Optuna's implementation.
    """
    single = replace(search, objectives=(SUCCESS,))
    # The default is left out, since its values were not drawn.
    complete_points = points[(points["number"] > 0) & (points["state"] == COMPLETE)]
    if len(complete_points) < _MIN_POINTS:
        return []
    count = len(complete_points)
    resamples = [
        _compute_shares(single, complete_points.iloc[generator.integers(count, size=count)], is_higher_better)
        for _ in range(_NUM_RESAMPLES)
    ]
    importances = []
    for name, value in _compute_shares(single, complete_points, is_higher_better).items():
        low, high = np.quantile([resample.get(name, 0.0) for resample in resamples], (0.05, 0.95))
        importances.append(Importance(name, value, float(low), float(high)))
    return sorted(importances, key=lambda importance: -importance.value)


def _compute_shares(search: Search, points: pd.DataFrame, is_higher_better: bool) -> dict[str, float]:
    evaluator = PedAnovaImportanceEvaluator(target_quantile=IMPORTANCE_QUANTILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings without an effect in a resample
        return get_param_importances(make_optuna_study(search, points, is_higher_better), evaluator=evaluator)


def list_pareto_arms(search: Search, points: pd.DataFrame, is_higher_better: bool) -> list[str]:
    """List the Pareto-optimal feasible points: any that is better in success or cost is worse in the other."""
    both = replace(search, objectives=(SUCCESS, COST))
    study = make_optuna_study(both, points[points["is_feasible"]], is_higher_better)
    return sorted((trial.user_attrs["arm"] for trial in study.best_trials), key=list(points["arm"]).index)
