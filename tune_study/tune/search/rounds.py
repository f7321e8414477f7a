"""Plan the rounds of a search: Optuna draws the next points from the outcomes of all points so far."""

import math
import warnings
from typing import TYPE_CHECKING, Any

from trainable.config.run_config import ConfigError
from trainable.runs.study_record import Dimension, Search
from tune_study.plan.errors import PlanError
from tune_study.plan.search import FIRST_POINTS, make_point_study, name_point
from tune_study.plan.study_plan import StudyPlan, make_arm_config, set_points

if TYPE_CHECKING:
    import optuna

_DIVISIONS = 300
"""Minimum number of distinguishable values in an interval."""
_MAX_DRAWS = 200
"""Maximum number of draws per round. Points that are repeated, or whose settings exclude each other, are redrawn."""


def plan_next_round(plan: StudyPlan) -> tuple[StudyPlan | None, str]:
    """Plan the next round of a search, and say what follows; the plan is None at the end of the search.

    The points depend only on the rows of the runs and the search's seed, so a search that is killed and resumed draws
    the points that it would have drawn.
    """
    from analysis.data.load import load  # imports pandas
    from analysis.search.points import find_best_point, make_points

    search = plan.search
    assert search is not None
    if len(plan.points) >= search.num_points:
        return None, f"All {search.num_points} points have been tried."
    frames = load(plan.folder)
    (family,) = frames.families
    points = make_points(frames)
    # The first points use no result, so they need not wait for any.
    count = max(FIRST_POINTS - len(plan.points), 0) or search.points_per_round
    count = min(count, search.num_points - len(plan.points))
    new_points = _draw_points(plan, search, points, family.is_higher_better, count)
    if not new_points:
        return None, f"The space has no point that was not tried: the search ends with {len(plan.points)} points."
    best = find_best_point(points, family.is_higher_better)
    arms = list(new_points)
    names = f"{arms[0]} to {arms[-1]} of {search.num_points - 1} follow" if len(arms) > 1 else f"{arms[0]} follows"
    best_text = f"; the best so far is {best['arm']}, {best['success']:.3f}" if best else ""
    return set_points(plan, {**plan.points, **new_points}), f"Search: {names}{best_text}"


def draw_first_points(plan: StudyPlan) -> StudyPlan:
    """Add the points that are drawn before any result to a new search, which has only the default."""
    search = plan.search
    assert search is not None
    count = min(FIRST_POINTS, search.num_points) - len(plan.points)
    new_points = _draw_points(plan, search, None, is_higher_better=True, count=count)
    return set_points(plan, {**plan.points, **new_points})


def _draw_points(
    plan: StudyPlan, search: Search, points: Any, is_higher_better: bool, count: int
) -> dict[str, dict[str, str]]:
    """Draw up to `count` new points (settings by arm), or fewer if the space has no others.

    points: the points so far; None before the first result. Raises PlanError if no point can be trained.
    """
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import TPESampler

    from analysis.search.trials import make_optuna_study

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of `group`, which conditional settings need
        # A resumed search would not have the sampler's state, so each round begins with a new seed.
        sampler = TPESampler(
            seed=search.seed * 1_000_003 + len(plan.points),
            n_startup_trials=FIRST_POINTS,
            multivariate=True,
            group=True,
            constant_liar=True,
        )
    study = make_optuna_study(search, points, is_higher_better, sampler)
    hashes = {spec.config.model_copy(update={"seed": 0}).compute_hash() for spec in plan.runs}
    new_points: dict[str, dict[str, str]] = {}
    problem = ""
    for _ in range(_MAX_DRAWS):
        if len(new_points) == count:
            break
        settings = _ask(study, search)
        arm = name_point(len(plan.points) + len(new_points))
        try:
            config = make_arm_config(make_point_study(plan.study, {arm: settings}), plan.base_config, arm)
        except ConfigError as error:
            problem = str(error)
            continue
        if (config_hash := config.compute_hash()) not in hashes:
            hashes.add(config_hash)
            new_points[arm] = settings
    if problem and not new_points and len(plan.points) == 1:
        raise PlanError(f"No point of the space can be trained; the last one that was drawn: {problem}")
    return new_points


def _ask(study: "optuna.Study", search: Search) -> dict[str, str]:
    """Ask Optuna for a point, and return its settings as text."""
    trial = study.ask()
    settings: dict[str, str] = {}
    for dimension in search.space:
        if dimension.condition and settings.get(dimension.condition[0]) != dimension.condition[1]:
            continue
        name, low, high, is_log = dimension.name, dimension.low, dimension.high, dimension.is_log
        if dimension.values:
            settings[dimension.setting] = str(trial.suggest_categorical(name, dimension.values))
        elif dimension.is_integer:
            settings[dimension.setting] = str(trial.suggest_int(name, int(low), int(high), log=is_log))
        else:
            settings[dimension.setting] = _round_within(trial.suggest_float(name, low, high, log=is_log), dimension)
    return settings


def _round_within(value: float, dimension: Dimension) -> str:
    """Round a value to about a 300th of the interval on its scale, as text that can be typed."""
    width = value * math.log(dimension.high / dimension.low) if dimension.is_log else dimension.high - dimension.low
    decimals = math.ceil(-math.log10(width / _DIVISIONS))
    return f"{min(max(round(value, decimals), dimension.low), dimension.high):.12g}"
