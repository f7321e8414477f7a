"""Plans of small studies, and the files of studies that have been started or trained without Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.catalog import STUDIES
from search_spaces.declaration.study import Study
from search_spaces.language_model.family import PPO as PPO_FAMILY
from trainable.trial import PPO
from tune_study.folder.outputs import write_study
from tune_study.placement.memory import ModelShape
from tune_study.placement.model_files import read_model_shape
from tune_study.plan.search import DEFAULT_POINT, Search, make_point_study, make_space
from tune_study.plan.study_plan import StudyPlan, make_plan, set_points
from tune_study.tune.trials import make_trial_config

SMALL_SETTINGS: Mapping[str, object] = {
    "env.env_groups": 2,
    "env.group_size": 4,
    "env.val_env_groups": 8,
    "env.test_env_groups": 0,
    "actor.ppo_mini_batch_size": 4,
    "critic.ppo_mini_batch_size": 4,
    "trainer.val_before_train": False,
    "trainer.test_freq": 0,
}
"""A step of a study of these settings takes a tenth of a second."""


def read_shape(path: str, environment: Mapping[str, str] | None = None) -> ModelShape:
    """Read the sizes of a model that is known here."""
    shape = read_model_shape(path, environment or {})
    assert shape is not None
    return shape


def plan_study(
    folder: Path,
    values: Sequence[str] | None = ("0", "0.1"),
    seeds: int | None = 1,
    *,
    study: str | Study = "kl",
    preset: str = "laptop",
    **settings: object,
) -> StudyPlan:
    """Plan a study; in the names of settings, `__` stands for the dot."""
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    declared = STUDIES[study] if isinstance(study, str) else study
    return make_plan(declared, preset, "a test", overrides, values, seeds, folder)


def plan_search(
    folder: Path,
    points: Mapping[str, Mapping[str, object]] | None = None,
    *,
    space: Sequence[str] = (),
    seeds: int = 1,
    num_points: int = 60,
    **options: Any,
) -> StudyPlan:
    """Plan a search with the point of the defaults and these further points."""
    plan = plan_study(folder, None, seeds, study=make_point_study(STUDIES["kl"], {DEFAULT_POINT: {}}))
    search = Search(make_space(PPO_FAMILY, plan.base_config, space), ("success",), num_points, **options)
    return set_points(replace(plan, search=search), {DEFAULT_POINT: {}, **(points or {})})


def write_started_study(output: Path, **settings: object) -> StudyPlan:
    """Write a study of three steps that was started and has no rows."""
    plan = plan_study(output, **{"trainer.total_training_steps": 3, **settings})
    write_study(plan)
    return plan


def train_without_ray(plan: StudyPlan, steps: int) -> StudyPlan:
    """Write the study, and train its runs for so many steps in this process."""
    write_study(plan)
    for spec in plan.runs:
        trial = PPO(make_trial_config(plan, [spec]))
        for _ in range(steps):
            trial.step()
        trial.cleanup()
    return plan
