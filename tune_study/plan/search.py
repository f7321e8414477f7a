"""Define a search over settings: its space, its points, and the study whose arms are the points."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from search_spaces.declaration.study import Axis, Study
from trainable.families import Settings
from trainable.runs.study_record import Dimension, Search

DEFAULT_POINT = "default"
"""The arm with the preset's settings: the first point of every search, and the one that others are compared with."""

FIRST_POINTS = 10
"""Number of points, including the default, that are drawn before results are used, as by default in Optuna."""


def name_point(number: int) -> str:
    """Name the arm of the point that is drawn as number `number`; number 0 is the default."""
    return f"point-{number}" if number else DEFAULT_POINT


def make_point_study(study: Study, points: Mapping[str, Settings]) -> Study:
    """Make a study whose arms are points (settings by arm). It equals `study` otherwise, but has a separate folder."""
    templates = replace(study, name=f"search-{study.name}", published_templates=None).name_templates
    return replace(
        study,
        question="Which settings are best, of those under which no run collapses?",
        axis=Axis("point", dict.fromkeys(study.family.presets, tuple(points)), "--points", named_settings=points),
        baseline=DEFAULT_POINT,
        baseline_seeds=1,
        published_templates=replace(templates, title=f"Search {study.name}", summary="point={arm}"),
        contrasts={},
        interactions={},
        variants={},
    )


def find_search_differences(old: Search, new: Search) -> list[str]:
    """List as `option: old -> new` what may not change once a search has begun, since later points depend on it."""
    pairs: Sequence[tuple[str, object, object]] = (
        ("--vary", describe_space(old.space), describe_space(new.space)),
        ("--objective", ",".join(old.objectives), ",".join(new.objectives)),
        ("--points-per-round", old.points_per_round, new.points_per_round),
        ("--search-seed", old.seed, new.seed),
        ("--asha", old.grace_steps, new.grace_steps),
    )
    return [f"{option}: {before} -> {after}" for option, before, after in pairs if before != after]


def describe_space(space: Sequence[Dimension]) -> str:
    """Describe the space as it can be typed, each dimension as a value of --vary."""
    return "; ".join(map(format_dimension, space))


def format_dimension(dimension: Dimension) -> str:
    """Format a dimension as a value of --vary.

    >>> format_dimension(Dimension("actor.lr", 1e-5, 1e-3, is_log=True))
    'actor.lr=1e-05:0.001:log'
    """
    text = ",".join(dimension.values)
    if not text:
        text = f"{dimension.low:g}:{dimension.high:g}:{'log' if dimension.is_log else 'linear'}"
    condition = f" if {'='.join(dimension.condition)}" if dimension.condition else ""
    return f"{dimension.setting}={text}{condition}"
