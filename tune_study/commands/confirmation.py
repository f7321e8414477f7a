"""The command `confirm`: run one arm and its baseline again, with seeds that the study never used.

The best of several arms is in part the luckiest one, so the study overestimates it. Fresh seeds played no part in the
choice, so their estimate is unbiased.
"""

from dataclasses import replace
from pathlib import Path

from search_spaces.declaration.study import make_value_label
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from trainable.runs.study_record import MAX_SEEDS, STUDY_FILE, ConfirmedStudy
from tune_study.folder import locate
from tune_study.folder.origin import NOTHING
from tune_study.folder.study_file import merge_with_folder, plan_from_folder
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy
from tune_study.plan.study_plan import StudyPlan, build_plan
from tune_study.plan.typed_settings import find_arm

DEFAULT_SEEDS = 5


def plan_confirmation(
    run: str,
    arm: str,
    baseline: str | None,
    n_seeds: int,
    own_study: OwnStudy | None,
    extend: bool,
    allowed: frozenset[str] = NOTHING,
) -> StudyPlan:
    """Plan the confirmation of an arm of the study RUN (a folder or a URI), or its continuation.

    The confirmation is a study beside RUN, `<run>-confirm-<arm>`, with the settings of RUN, two arms and `n_seeds`
    seeds. They follow the largest seed of RUN and of all of its other confirmations. baseline: the arm to compare
    with; None for the baseline of RUN. extend: whether to add seeds to a confirmation that has fewer. own_study and
    allowed: see `plan_from_folder`. Raises PlanError if the study or an arm does not exist, or if too few seeds are
    left.
    """
    plan = locate.plan_resume(run, own_study=own_study, is_real=False, allowed=allowed)
    if plan.confirms is not None:
        raise PlanError(
            f"{format_value(plan.folder, 1000)} is itself a confirmation: type "
            f"`{format_command('resume', plan.folder)}` to continue it, or `confirm` with the study that it confirms."
        )
    if n_seeds < 2:
        raise PlanError(f"--seeds {format_value(n_seeds)} gives no interval: type --seeds 2 or more.")
    compared = plan.baseline if baseline is None else find_arm(baseline, plan.values, "--baseline")
    if compared is None:
        raise PlanError(
            f"The baseline {plan.study.baseline} is not among the arms of {format_value(plan.run)}: type --baseline "
            f"with one of {', '.join(plan.values)}."
        )
    confirmed = find_arm(arm, plan.values)
    if confirmed == compared:
        raise PlanError(
            f"--arm {format_value(arm)} is the arm that it would be compared with: type another --arm, or --baseline."
        )
    folder = _make_folder(plan, confirmed, compared)
    confirms, first = _choose_seeds(plan, folder, own_study, allowed)
    if first + n_seeds > MAX_SEEDS:
        raise PlanError(
            f"--seeds {format_value(n_seeds)} from seed {first} on go beyond the largest one, {MAX_SEEDS - 1}: type "
            f"--seeds {max(MAX_SEEDS - first, 0)} or less."
        )
    confirmation = build_plan(
        replace(plan.study, baseline=compared),
        plan.preset,
        plan.preset_reason,
        plan.base_config,
        (compared, confirmed),
        tuple(range(first, first + n_seeds)),
        folder,
    )
    points = {value: settings for value, settings in plan.points.items() if value in confirmation.values}
    return merge_with_folder(replace(confirmation, source=plan.source, confirms=confirms, points=points), extend)


def find_confirmation(plan: StudyPlan, arm: str, own_study: OwnStudy | None) -> StudyPlan | None:
    """Find the confirmation of an arm against the study's baseline; None if it has not begun."""
    folder = _make_folder(plan, arm, plan.baseline)
    return plan_from_folder(folder, own_study=own_study) if (folder / STUDY_FILE).exists() else None


def _make_folder(plan: StudyPlan, confirmed: str, compared: str | None) -> Path:
    """Make the path of a confirmation, beside its study's folder."""
    suffix = make_value_label(confirmed)
    if compared is not None and compared != plan.baseline:
        suffix += f"-against-{make_value_label(compared)}"
    return plan.folder.with_name(f"{plan.folder.name}-confirm-{suffix}")


def _choose_seeds(
    plan: StudyPlan, folder: Path, own_study: OwnStudy | None, allowed: frozenset[str]
) -> tuple[ConfirmedStudy, int]:
    """Return what the confirmation in `folder` confirms, and its first seed. One that has begun keeps both."""
    if (folder / STUDY_FILE).exists():
        existing = plan_from_folder(folder, own_study=own_study, allowed=allowed)
        if existing.confirms is not None:
            return existing.confirms, min(existing.seeds)
    used = {spec.seed for spec in plan.runs}
    others = {
        seed
        for path in sorted(plan.folder.parent.glob(f"{plan.folder.name}-confirm-*"))
        if path != folder and (path / STUDY_FILE).exists()
        for seed in plan_from_folder(path, own_study=own_study, allowed=allowed).seeds
    }
    return ConfirmedStudy(plan.run, tuple(sorted(used))), max(used | others) + 1
