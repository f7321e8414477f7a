"""The command `search`: draw points in rounds, and confirm the best one with seeds that the search never used.

A search is a study whose arms are points. It is planned, run, killed and resumed like any other study.
"""

from dataclasses import replace

from rich.console import Console

from search_spaces.declaration.study import Study
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from trainable.runs.study_record import MAX_RUNS, OBJECTIVES, Search
from tune_study.commands.confirmation import find_confirmation, plan_confirmation
from tune_study.commands.preflight import choose_wandb, start_studies
from tune_study.commands.requests import (
    ChosenPreset,
    LaunchRequest,
    RunRequest,
    SearchRequest,
    StudyRequest,
    find_studies,
    plan_from_options,
)
from tune_study.folder.study_file import plan_from_folder
from tune_study.host.console import print_line
from tune_study.host.gpus import Gpu
from tune_study.host.interrupt import start_time_limit
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy, StudySource
from tune_study.plan.search import DEFAULT_POINT, make_point_study, make_space
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.search.rounds import draw_first_points, plan_next_round

DEFAULT_SEEDS = 2
"""Seeds per point. With one, the luckiest run would win; with more, the same time would allow fewer points."""


def find_study(name: str, kl_type: str | None, accepts_change: bool) -> tuple[Study, StudySource | None]:
    """Find the study `name` (see `find_studies`). Raises PlanError for a suite, since one study must be chosen."""
    studies = find_studies(name, kl_type, accepts_change)
    if len(studies) > 1:
        names = ", ".join(study.name for study, _ in studies)
        raise PlanError(f"{format_value(name)} is a suite, and a search is over the settings of one study: {names}.")
    return studies[0]


def plan_search(
    study: Study,
    preset: ChosenPreset,
    request: SearchRequest,
    study_request: StudyRequest,
    source: StudySource | None,
) -> StudyPlan:
    """Plan a new search, or the one in its folder; see `plan_from_options` for the other arguments.

    Raises PlanError or ConfigError if the search cannot be run.
    """
    objectives = tuple(word.strip() for word in request.objective.split(","))
    if objectives not in OBJECTIVES:
        raise PlanError(
            f"--objective {format_value(request.objective)} is no objective: type --objective success, or success,cost."
        )
    if "cost" in objectives and not study.family.is_fine_tuning:
        raise PlanError(f"--objective cost counts tokens, which the runs of study {study.name} do not: leave it out.")
    if request.trials > MAX_RUNS:
        raise PlanError(f"--trials {format_value(request.trials)} is above the maximum: type {MAX_RUNS} or less.")
    if request.asha is not None and study.family.has_batched_seeds:
        raise PlanError(
            f"--asha does not belong to study {study.name}, which trains all seeds of an arm together: leave it out."
        )
    if request.confirm_seeds == 1:
        raise PlanError("--confirm-seeds 1 gives no interval: type --confirm-seeds 2 or more, or 0 for none.")
    run_request = RunRequest(**vars(study_request))
    if run_request.seeds is None:
        run_request = replace(run_request, seeds=DEFAULT_SEEDS)

    def add_search(plan: StudyPlan) -> StudyPlan:
        """Add the search to the plan of the default point. Its space depends on the settings of the preset."""
        search = Search(
            make_space(study.family, plan.base_config, request.vary or ()),
            objectives,
            request.trials,
            request.points_per_round,
            request.search_seed,
            request.confirm_seeds,
            request.asha,
        )
        return replace(plan, search=search, points={DEFAULT_POINT: {}})

    point_study = make_point_study(study, {DEFAULT_POINT: {}})
    plan = plan_from_options(point_study, preset, run_request, source, add_search)
    return draw_first_points(plan) if len(plan.points) == 1 else plan


def run_and_confirm(
    plan: StudyPlan, launch: LaunchRequest, visible_gpus: tuple[Gpu, ...], dry_run: bool, console: Console
) -> int:
    """Run or resume a study, and if it is a search that ends, confirm its best point.

    Returns the exit code of `start_studies`: the search's, unless only the confirmation fails.
    """
    time_limit = start_time_limit(launch.max_hours)
    exit_code = start_studies([plan], launch, visible_gpus, dry_run, console, time_limit)
    # After 130 the user may continue later, and another point may then be the best.
    if plan.search is None or dry_run or exit_code not in (0, 1) or not plan.search.confirm_seeds:
        return exit_code
    own_study = None if plan.source is None else OwnStudy(plan.study, plan.source)
    plan = plan_from_folder(plan.folder, own_study=own_study)
    best = _find_best(plan, console)
    if best is None:
        return exit_code
    assert plan.search is not None
    if launch.address is not None and plan.storage is not None:
        command = format_command("confirm", plan.folder, "--arm", best)
        print_line(console, f"A confirmation is kept on one machine. Where that can train it, type: {command}")
        return exit_code
    existing = find_confirmation(plan, best, own_study)
    if existing is not None and {*existing.seeds} & {spec.seed for spec in plan.runs}:
        print_line(
            console,
            f"The search has trained seeds of the confirmation in {existing.folder} since that began, so they chose "
            "the best point as well. Move the folder elsewhere, and type the command again for one with fresh seeds.",
        )
        return 1
    # A confirmation that has begun keeps its seeds, even if another number was typed for the search.
    n_seeds = plan.search.confirm_seeds if existing is None else len(existing.seeds)
    confirmation = plan_confirmation(str(plan.folder), best, None, n_seeds, own_study, extend=False)
    print_line(console, f"Confirmation of {best} against {DEFAULT_POINT}, with seeds that the search never used")
    wandb = choose_wandb(launch, plan)
    launch = replace(launch, wandb=wandb.mode, wandb_project=wandb.project or None)
    return max(exit_code, start_studies([confirmation], launch, visible_gpus, dry_run, console, time_limit))


def _find_best(plan: StudyPlan, console: Console) -> str | None:
    """Find the arm to confirm; if the search goes on or there is none, print why and return None."""
    from analysis.data.load import load  # imports pandas
    from analysis.search.points import OPEN, find_best_point, make_points

    frames = load(plan.folder)
    points = make_points(frames)
    if (points["state"] == OPEN).any() or (plan.has_next_round and plan_next_round(plan)[0] is not None):
        print_line(console, "The search has not ended, so its best point is not confirmed yet.")
        return None
    (family,) = frames.families
    best = find_best_point(points, family.is_higher_better)
    if best is None:
        print_line(console, "There is no point at which every run ended without a collapse, so nothing is confirmed.")
        return None
    if best["arm"] == DEFAULT_POINT:
        print_line(console, "No point is better than the default, so there is nothing to confirm.")
        return None
    return str(best["arm"])
