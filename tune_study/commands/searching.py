"""The commands `search` and `confirm`: draw points in rounds, and run the best arm again with seeds that nothing used.

A search is a study whose arms are points. It is planned, run, killed and resumed like any other study.

The best of several arms is in part the luckiest one, so the study overestimates it. Fresh seeds played no part in the
choice, so their estimate is unbiased.
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from search_spaces.declaration.study import Study, make_value_label
from trainable.config.command_lines import format_command
from trainable.config.own_parts import PartFile
from trainable.config.setting_types import format_value
from trainable.runs.study_record import OBJECTIVES, STUDY_FILE, ConfirmedStudy, Search
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
from tune_study.folder import locate
from tune_study.folder.origin import NOTHING
from tune_study.folder.study_file import merge_with_folder, plan_from_folder
from tune_study.host.console import print_line
from tune_study.host.interrupt import start_time_limit
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy
from tune_study.plan.search import DEFAULT_POINT, make_point_study, make_space
from tune_study.plan.study_plan import StudyPlan, plan_runs
from tune_study.plan.typed_settings import find_arm
from tune_study.tune.search.rounds import draw_first_points, plan_next_round

SEEDS_PER_POINT = 2
"""Seeds per point. With one, the luckiest run would win; with more, the same time would allow fewer points."""
CONFIRMING_SEEDS = 5


def find_study(name: str, request: StudyRequest) -> tuple[Study, PartFile | None]:
    """Find the study `name` (see `find_studies`). Raises PlanError for a suite, since one study must be chosen."""
    studies = find_studies(name, request)
    if len(studies) > 1:
        names = ", ".join(study.name for study, _ in studies)
        raise PlanError(f"{format_value(name)} is a suite, and a search is over the settings of one study: {names}.")
    return studies[0]


def plan_search(
    study: Study,
    preset: ChosenPreset,
    request: SearchRequest,
    study_request: StudyRequest,
    source: PartFile | None = None,
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
    if request.asha is not None and study.family.has_batched_seeds:
        raise PlanError(
            f"--asha does not belong to study {study.name}, which trains all seeds of an arm together: leave it out."
        )
    if request.confirm_seeds == 1:
        raise PlanError("--confirm-seeds 1 gives no interval: type --confirm-seeds 2 or more, or 0 for none.")
    run_request = RunRequest(**vars(study_request))
    if run_request.seeds is None:
        run_request = replace(run_request, seeds=SEEDS_PER_POINT)

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


def run_and_confirm(plan: StudyPlan, launch: LaunchRequest, dry_run: bool, console: Console) -> int:
    """Run or resume a study, and if it is a search that ends, confirm its best point.

    Returns the exit code of `start_studies`: the search's, unless only the confirmation fails.
    """
    time_limit = start_time_limit(launch.max_hours)
    exit_code = start_studies([plan], launch, dry_run, console, time_limit)
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
    folder = _make_folder(plan, best, plan.baseline)
    existing = plan_from_folder(folder, own_study=own_study) if (folder / STUDY_FILE).exists() else None
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
    return max(exit_code, start_studies([confirmation], launch, dry_run, console, time_limit))


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
    if plan.forks is not None:
        raise PlanError(
            f"{format_value(plan.folder, 1000)} is a fork, and fresh seeds have no state that its arms could continue: "
            "train more seeds of the study that it forks, and fork those."
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
    study, seeds = replace(plan.study, baseline=compared), tuple(range(first, first + n_seeds))
    preset, values = (plan.preset, plan.preset_reason), (compared, confirmed)
    confirmation = plan_runs(StudyPlan(study, *preset, plan.base_config, values, seeds, folder))
    points = {value: settings for value, settings in plan.points.items() if value in confirmation.values}
    return merge_with_folder(replace(confirmation, source=plan.source, confirms=confirms, points=points), extend)


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
