"""Studies of toy tasks, whose arms are named conditions."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from search_spaces.declaration.family import Family
from search_spaces.declaration.presets import Settings
from search_spaces.declaration.study import Axis, Contrasts, NameTemplates, Study, keep_settings


def make_toy_study(
    family: Family,
    name: str,
    question: str,
    arms: Mapping[str, Settings],
    baseline: str,
    fixed_settings: Settings,
    smoke_settings: Settings,
    setting: str,
    run_template: str | None = None,
    contrasts: Contrasts = MappingProxyType({}),
    adapt: Callable[[Settings, Any], Settings] = keep_settings,
    stop_rules: tuple[str, ...] = (),
) -> Study:
    """A study whose arms are named conditions of a toy task.

    Args:
        family: of the study; its configuration has the settings `task` and `method`.
        name: of the study.
        question: the docstring of the study's module. Its first paragraph becomes the question.
        arms: for each arm, by its name, the settings in addition to `fixed_settings`.
        baseline: the arm that the others are compared with.
        fixed_settings: settings of all arms.
        smoke_settings: settings of --smoke.
        setting: how the arms differ, in words.
        run_template: name of the study's folder; by default the study's name with underscores.
        contrasts: see `Study`.
        adapt: see `Axis`.
        stop_rules: names of the rules by which the trainer may end a run.
    """
    run_template = run_template or name.replace("-", "_")
    return Study(
        name=name,
        question=question.split("\n\n")[0],
        axis=Axis(
            setting=setting,
            option="--arms",
            grids={"paper": tuple(arms), "laptop": tuple(arms)},
            named_settings=arms,
            adapt=adapt,
        ),
        fixed_settings=fixed_settings,
        baseline=baseline,
        published_templates=NameTemplates(
            run=run_template,
            experiment=f"{run_template}-{{arm}}",
            title=name.replace("-", " ").capitalize(),
            summary="{arm} | task={task} | method={method}",
            wandb_project=f"{family.name}_sandbox".replace("update_rules", "update_rule"),
            log="{run}/{experiment}.log",
            checkpoints="{run}/{experiment}",
            summary_times=("total",),
            probe_log="",
        ),
        family=family,
        stop_rules=stop_rules,
        smoke_settings=smoke_settings,
        contrasts=contrasts,
    )
