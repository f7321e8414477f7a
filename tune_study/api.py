"""Run a study from Python, with the same plan, folder and runs as on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from search_spaces.declaration.study import Study
from trainable.config.own_parts import PartFile
from tune_study.commands.requests import LaunchRequest, RunRequest, plan_from_options
from tune_study.host.console import make_console
from tune_study.plan.own_study import check_study, load_typed_files

if TYPE_CHECKING:
    from analysis.notebook.frames import NotebookFrames

NO_SETTINGS: Mapping[str, object] = {}

_TYPED = {"dry_run", "kl_type", "assignments", "config"}
"""Options that only the command line has."""


def run(
    study: Study,
    preset: str | None = None,
    *,
    values: Sequence[str] | None = None,
    settings: Mapping[str, object] = NO_SETTINGS,
    **options: Any,
) -> "NotebookFrames":
    """Run a study, or continue it if the output folder already contains it; return its tables.

    Progress is printed, and Ctrl-C stops the study in order, as on the command line.

    Args:
        study: the study.
        preset: laptop, stress or paper; None for paper if a visible GPU can hold it, else `study.cpu_preset`. Under
            paper, only adapters are trained if training all weights does not fit.
        values: values of the axis; None for all of the preset.
        settings: values by setting, as --set takes them, such as {"trainer.total_training_steps": 10}.
        options: other fields of `RunRequest` and `LaunchRequest`, such as output="out", seeds=3, env="frozenlake" or
            max_concurrent=2; `python -m tune_study run --help` explains them. W&B is off unless `wandb` is typed.

    Raises PlanError, ConfigError or OwnPartError (all are ValueErrors) if the study cannot be run, UnsafePathError (an
    OSError) if its folder has links, TypeError for an unknown option, and RuntimeError if a run failed.

    Example:
        >>> import tune_study
        >>> frames = tune_study.run(STUDY, "laptop", seeds=1, output="out")  # doctest: +SKIP
        >>> frames.trials[["arm", "status", "final_val_success"]]  # doctest: +SKIP
    """
    from analysis import load
    from tune_study.commands.preflight import make_plans_that_fit, start_studies

    check_study(study, "the call of tune_study.run")
    launch_names = {field.name for field in fields(LaunchRequest)}
    known_names = (launch_names | {field.name for field in fields(RunRequest)}) - _TYPED
    if unknown_names := sorted(options.keys() - known_names):
        raise TypeError(f"tune_study.run has no argument {', '.join(unknown_names)}: see its docstring.")
    launch = LaunchRequest(**{"wandb": "off"} | {name: options.pop(name) for name in launch_names & options.keys()})
    request = RunRequest(
        preset=preset,
        assignments=[f"{name}={value}" for name, value in settings.items()],
        values=None if values is None else ",".join(values),
        **options,
    )
    load_typed_files(request.code or [])
    make_plan = partial(plan_from_options, request=request)
    (plan,) = make_plans_that_fit(make_plan, [(study, describe_source(study))], request, launch)
    exit_code = start_studies([plan], launch, False, make_console())
    if exit_code:
        raise RuntimeError(f"The study in {plan.folder} ended with code {exit_code}: see the lines above.")
    return load(plan.folder)


def describe_source(study: Study) -> PartFile:
    """Describe, for study.json, a declaration that is in no file: its fields, as text."""
    fields = {
        "name": study.name,
        "question": study.question,
        "axis.setting": study.axis.setting,
        "axis.grids": {preset: list(values) for preset, values in study.axis.grids.items()},
        "axis.named_settings": {name: dict(arm) for name, arm in study.axis.named_settings.items()},
        "fixed_settings": dict(study.fixed_settings),
        "presets": {preset: dict(settings) for preset, settings in study.presets.items()},
        "baseline": study.baseline,
    }
    return PartFile("", "".join(f"{name} = {value!r}\n" for name, value in fields.items()))
