"""Make Ray Tune's Tuner over the runs of a study, for the command line and for users' scripts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from ray import tune
from ray.tune.search.sample import Domain

from search_spaces.declaration.study import Study
from trainable.config.run_config import resolve_key
from trainable.config.setting_types import flatten_settings
from tune_study.plan.study_plan import find_changed_settings, make_plan
from tune_study.tune.stoppers import resolve_study, rules

ALWAYS_NAMED = ("trainer.total_training_steps", "trainer.test_freq")
"""Settings that a parameter space has even if they are the defaults, since readers of its results need them."""


def get_trainable(study: Study | str) -> type[tune.Trainable]:
    """Find the Trainable for the runs of a study: PPO, or its counterpart in the study's family."""
    trainable: type[tune.Trainable] = resolve_name(resolve_study(study).family.trainable)
    return trainable


def param_space(
    study: Study | str,
    preset: str = "laptop",
    *,
    seeds: int = 1,
    values: Sequence[str] | None = None,
    **settings: object,
) -> dict[str, Any]:
    """Make the parameter space of a study, for `tune.Tuner`: a grid over arms and seeds, as on the command line.

    Args:
        study: the name of a study, or a declared study.
        preset: laptop, stress or paper.
        seeds: number of seeds per arm. Update rules and their companions train them side by side in one trial.
        values: the arms; None for all of the preset.
        settings: settings by name, such as **{"actor.lr": 1e-4}. A value may be a domain of Tune, such as
            `tune.loguniform(1e-5, 1e-3)`.

    Raises ConfigError or PlanError (both are ValueErrors) for settings, values or presets that the study does not have.

    Each key is a setting and can be replaced or removed. Arms that differ in several settings have their name in `run`
    / `arm`, and their settings depend on it.

    Example:
        >>> space = param_space("kl", seeds=2, values=("0.01", "0.1"), **{"trainer.total_training_steps": 6})
        >>> space["actor.kl_loss_coef"], space["seed"]
        ({'grid_search': [0.01, 0.1]}, {'grid_search': [0, 1]})
    """
    declared = resolve_study(study)
    domains = {
        name: value
        for name, value in settings.items()
        if isinstance(value, Domain) or (isinstance(value, Mapping) and value.keys() == {"grid_search"})
    }
    fixed = {name: value for name, value in settings.items() if name not in domains}
    chosen_values = None if values is None else tuple(values)
    plan = make_plan(declared, preset, "", fixed, chosen_values, seeds, Path(), n_baseline_seeds=seeds)
    arms: dict[str, dict[str, Any]] = {}
    for spec in plan.runs:
        every = flatten_settings(spec.config.model_dump(mode="json"))
        arms[spec.arm] = {**{name: every[name] for name in ALWAYS_NAMED}, **find_changed_settings(spec.config)}
    defaults = flatten_settings(declared.family.config_class.model_validate({}).model_dump(mode="json"))
    names = dict.fromkeys(name for arm in arms.values() for name in arm)
    arm_values = {name: [arm.get(name, defaults[name]) for arm in arms.values()] for name in names}
    varying = [name for name, column in arm_values.items() if any(value != column[0] for value in column)]
    space: dict[str, Any] = {name: column[0] for name, column in arm_values.items() if name not in varying}
    run: dict[str, Any] = {"study": declared.name, "stop_rules": list(declared.stop_rules)}
    if not declared.family.is_fine_tuning:
        run["family"] = declared.family.name
    if code := {file.name: file.text for file in plan.code}:
        run["code"] = code
    if len(varying) == 1:
        space[varying[0]] = tune.grid_search(arm_values[varying[0]])
    elif len(arms) > 1:
        run["arm"] = tune.grid_search(list(arms))
        space |= {name: _follow_arm(dict(zip(arms, arm_values[name], strict=True))) for name in varying}
    space["seed"] = list(range(seeds))
    if not declared.family.has_batched_seeds:
        space["seed"] = tune.grid_search(space["seed"]) if seeds > 1 else 0
    return {
        **space,
        **{resolve_key(name, declared.family.config_class): value for name, value in domains.items()},
        "run": run,
    }


def _follow_arm(values: Mapping[str, Any]) -> Any:
    """Make a setting depend on the name of the arm. values: by arm."""
    return tune.sample_from(lambda config: values[config["run"]["arm"]])


def make_tuner(
    study: Study | str,
    preset: str = "laptop",
    *,
    seeds: int = 1,
    values: Sequence[str] | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    space: Mapping[str, Any] | None = None,
    tune_config: tune.TuneConfig | None = None,
    **run_options: Any,
) -> tune.Tuner:
    """Make the Tuner of a study: Trainable, parameter space, stop rules, and a checkpoint at the end of each trial.

    Args:
        study, preset, seeds, values, settings: see `param_space`.
        space: a parameter space to use instead of `param_space` of these arguments.
        tune_config: metric, scheduler and searcher; None for Tune's defaults (first come, first served).
        run_options: arguments of `tune.RunConfig`, which override these: `name` is the study's name, `stop` has its
            stop rules, and `checkpoint_config` asks for a checkpoint at the end.
    """
    declared = resolve_study(study)
    if space is None:
        space = param_space(declared, preset, seeds=seeds, values=values, **settings)
    options = {
        "name": declared.name,
        "stop": rules(declared, preset),
        "checkpoint_config": tune.CheckpointConfig(checkpoint_at_end=True),
        **run_options,
    }
    return tune.Tuner(
        get_trainable(declared), param_space=space, tune_config=tune_config, run_config=tune.RunConfig(**options)
    )
