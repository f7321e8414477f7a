"""Run a study from Python, with the same plan, folder and runs as on the command line."""

import os
from typing import TYPE_CHECKING

from search_spaces.declaration.study import Study
from tune_study.commands.requests import ChosenPreset, LaunchRequest, RunRequest, plan_from_options
from tune_study.host.console import make_console
from tune_study.host.gpus import detect_gpus
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import StudySource, check_study, load_typed_files
from tune_study.plan.study_plan import StudyPlan

if TYPE_CHECKING:
    from analysis.notebook.frames import NotebookFrames


WITHOUT_WANDB = LaunchRequest(wandb="off")


def run(study: Study, request: RunRequest, launch: LaunchRequest = WITHOUT_WANDB) -> "NotebookFrames":
    """Run a study, or continue it if the output folder already contains it; return its tables.

    Progress is printed, and Ctrl-C stops the study in order, as on the command line.

    Args:
        study: the study.
        request: what is trained. Its fields are options of `python -m tune_study run --help`, such as `preset` (None
            for paper if a visible GPU can hold it, else laptop) and `assignments`, the texts of --set.
        launch: where and how. W&B is off by default.

    Raises PlanError, ConfigError or OwnPartError (all are ValueErrors) if the study cannot be run, UnsafePathError (an
    OSError) if its folder has links, and RuntimeError if a run failed.

    Example:
        >>> import tune_study
        >>> frames = tune_study.run(STUDY, tune_study.RunRequest("laptop", seeds=1))  # doctest: +SKIP
        >>> frames.trials[["arm", "status", "final_val_success"]]  # doctest: +SKIP
    """
    from analysis import load
    from tune_study.commands.preflight import make_plans_that_fit, start_studies

    check_study(study, "the call of tune_study.run")
    if request.dry_run or request.kl_type is not None or request.accept_changed_file:
        raise PlanError("dry_run, kl_type and accept_changed_file belong to the command line: leave them out.")
    load_typed_files(request.code or [])
    visible_gpus = detect_gpus(os.environ)

    def make_plans(preset: ChosenPreset) -> list[StudyPlan]:
        return [plan_from_options(study, preset, request, describe_source(study))]

    (plan,) = make_plans_that_fit(make_plans, request, launch, visible_gpus)
    exit_code = start_studies([plan], launch, visible_gpus, False, make_console())
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
