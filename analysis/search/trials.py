"""A search as an Optuna study, for its samplers, its Pareto front and its dashboard.

The study is made anew from the rows of the runs whenever it is needed, so the two never disagree.
"""

import warnings
from dataclasses import replace

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from analysis.data.frames import to_records
from analysis.search.points import COMPLETE, COST, OPEN, SUCCESS
from trainable.runs.study_record import Dimension, Search

optuna.logging.set_verbosity(optuna.logging.WARNING)

CONSTRAINT = "runs that collapsed or failed"


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

    A censored point and a point all of whose runs failed become pruned trials: the sampler learns from their
    violations, while it would ignore a failed trial.

    points: from `make_points`; None for a study without a trial. sampler: draws the next points. storage, name: where
    to write the study, which must not contain one of this name; None keeps it in memory.
    """
    success_direction = StudyDirection.MAXIMIZE if is_higher_better else StudyDirection.MINIMIZE
    directions = [StudyDirection.MINIMIZE if name == COST else success_direction for name in search.objectives]
    study = optuna.create_study(directions=directions, sampler=sampler, storage=storage, study_name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(search.objectives))
    distributions = {dimension.name: make_distribution(dimension) for dimension in search.space}
    for row in [] if points is None else to_records(points[points["state"] != OPEN]):
        outcomes = [row[name] for name in search.objectives]
        is_complete = row["state"] == COMPLETE and not np.isnan(outcomes).any()
        trial = create_trial(
            state=TrialState.COMPLETE if is_complete else TrialState.PRUNED,
            values=outcomes if is_complete else None,
            params=row["values"],
            distributions={name: distributions[name] for name in row["values"]},
            user_attrs={"arm": row["arm"], "seeds": row["seeds"], "state": row["state"]},
            constraints={CONSTRAINT: float(row["violations"])},
        )
        study.add_trial(trial)
    return study


def list_pareto_arms(search: Search, is_higher_better: bool, points: pd.DataFrame) -> list[str]:
    """List the Pareto-optimal feasible points: any that is better in success or cost is worse in the other."""
    points = points[points["is_feasible"] & points[COST].notna()]  # a family without tokens has no cost
    study = make_optuna_study(replace(search, objectives=(SUCCESS, COST)), points, is_higher_better)
    return sorted((trial.user_attrs["arm"] for trial in study.best_trials), key=list(points["arm"]).index)
