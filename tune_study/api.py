"""Run a study from Python, with the same plan, folder and runs as on the command line."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from search_spaces.declaration.study import Study
from trainable.config.run_config import resolve_key
from tune_study.commands.arguments.parser import VALUES_OPTION
from tune_study.commands.option_groups import LaunchOptions, RunOptions
from tune_study.commands.run_options import ChosenPreset, plan_from_options
from tune_study.host.console import make_console
from tune_study.host.gpus import detect_gpus
from tune_study.plan.own_parts import load_typed_files
from tune_study.plan.own_study import StudySource, check_study
from tune_study.plan.study_plan import StudyPlan

if TYPE_CHECKING:
    from analysis.notebook.frames import NotebookFrames

NO_SETTINGS: Mapping[str, object] = {}

_GPU_SETTINGS = {"model.path", "trainer.n_gpus_per_node", "rollout.gpu_memory_utilization"}
"""Settings whose values suit only certain GPUs or the paper preset."""


def run(
    study: Study,
    preset: str | None = None,
    *,
    output: Path | str = ".",
    seeds: int | None = None,
    values: Sequence[str] | None = None,
    env: str | None = None,
    settings: Mapping[str, object] = NO_SETTINGS,
    code: Sequence[str] = (),
    extend: bool = False,
    max_concurrent: int | None = None,
) -> "NotebookFrames":
    """Run a study, or continue it if the output folder already contains it; return its tables.

    Progress is printed, and Ctrl-C stops the study in order, as on the command line. W&B is off.

    Args:
        study: the study.
        preset: laptop, stress or paper; None for paper if a visible GPU can hold it, else laptop. Under paper, only
            adapters are trained if training all weights does not fit.
        output: parent folder of results/, logs/ and model_saving/.
        seeds: number of seeds per arm; None for the study's own number.
        values: values of the axis; None for all of the preset.
        env: the game, with the settings that come with it; None for the study's own game.
        settings: values by setting, as --set takes them, such as {"trainer.total_training_steps": 10}.
        code: further plug-in files that the study in the folder uses, if it is extended.
        extend: whether to add new values and seeds to the study that the folder contains.
        max_concurrent: maximum number of concurrent runs; None for as many as the machine holds.

    Raises PlanError, ConfigError or OwnPartError (all are ValueErrors) if the study cannot be run, and RuntimeError if
    a run failed.

    Example:
        >>> import tune_study
        >>> frames = tune_study.run(STUDY, "laptop", seeds=1, output="out")  # doctest: +SKIP
        >>> frames.trials[["arm", "status", "final_val_success"]]  # doctest: +SKIP
    """
    from analysis import load
    from tune_study.commands.preflight import PlacementChoices, make_plans_that_fit, names_adapters, start_studies

    check_study(study, "the call of tune_study.run")
    load_typed_files(code)
    visible_gpus = detect_gpus(os.environ)
    options = RunOptions(
        env=env,
        seeds=seeds,
        assignments=[f"{name}={value}" for name, value in settings.items()],
        output=Path(os.path.abspath(output)),
        extend=extend,
        axis_texts={VALUES_OPTION: None if values is None else ",".join(values)},
    )

    def make_plans(preset: ChosenPreset) -> list[StudyPlan]:
        return [plan_from_options(study, preset, options, describe_source(study))]

    launch_options = LaunchOptions(max_concurrent=max_concurrent, wandb="off")
    fields = {resolve_key(name, study.family.config_class) for name in settings}
    choices = PlacementChoices(
        preset, has_adapters=names_adapters(fields), has_gpus=not _GPU_SETTINGS.isdisjoint(fields)
    )
    (plan,) = make_plans_that_fit(make_plans, choices, launch_options, visible_gpus)
    exit_code = start_studies([plan], launch_options, visible_gpus, False, make_console())
    if exit_code:
        raise RuntimeError(f"The study in {plan.folder} ended with code {exit_code}: see the lines above.")
    return load(plan.folder)


def describe_source(study: Study) -> StudySource:
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
    text = "".join(f"{name} = {value!r}\n" for name, value in fields.items())
    # Changed settings are refused when they are compared, so a changed text alone is no reason to stop.
    return StudySource("", text, accepts_change=True)
