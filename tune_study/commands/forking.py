"""The command `fork`: continue the runs of an arm from kept states, with the same settings and with remedies.

All arms of a fork begin with the rows and the state of the same run, and draw the same random numbers after it. So
every difference between them comes from the remedy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from search_spaces.declaration.study import make_value_label
from search_spaces.language_model.family import as_run_config
from trainable.config.run_config import apply_overrides
from trainable.config.setting_types import format_value
from trainable.families import Settings
from trainable.files.paths import check_tree
from trainable.runs.run_files import METRICS_FILE, list_states, read_rows
from trainable.runs.study_record import AS_BEFORE, STUDY_FILE, ForkedStudy, name_fork_arm
from tune_study.folder import locate
from tune_study.folder.origin import NOTHING
from tune_study.folder.outputs import make_run_entry
from tune_study.folder.study_file import merge_with_folder, plan_from_folder
from tune_study.plan.errors import PlanError
from tune_study.plan.fork import EXAMPLE, make_fork_study, parse_remedies
from tune_study.plan.own_study import OwnStudy
from tune_study.plan.study_plan import StudyPlan, make_arm_config, plan_runs
from tune_study.plan.typed_settings import find_arm, parse_values


def plan_fork(
    run: str,
    arm: str,
    from_steps: str,
    remedies: Sequence[str],
    seeds: Sequence[int] | None,
    total_steps: int | None,
    own_study: OwnStudy | None,
    extend: bool,
    allowed: frozenset[str] = NOTHING,
) -> StudyPlan:
    """Plan the fork of an arm of the study RUN (a folder or a URI), or its continuation.

    The fork is a study beside RUN, `<run>-fork-<arm>`. For each step of the list `from_steps`, it has an arm that
    continues as before, and one per text of `remedies` (see `parse_remedies`). seeds: of the runs to continue; None for
    those that have a state after every step. total_steps: None for the steps of RUN. extend: whether to add arms, seeds
    or steps to a fork that lacks them. own_study and allowed: see `plan_from_folder`.

    Raises PlanError or ConfigError if the study, the arm or a state does not exist, or if a remedy cannot be used.
    """
    plan = locate.plan_resume(run, own_study=own_study, is_real=False, allowed=allowed)
    if not plan.study.family.is_fine_tuning:
        raise PlanError(
            f"Study {plan.study.name} fine-tunes no language model, and only runs that do can be continued with other "
            "settings: start a study with the settings of the remedy."
        )
    arm = find_arm(arm, plan.values)
    config = as_run_config(make_arm_config(plan.study, plan.base_config, arm))
    settings_by_remedy = {AS_BEFORE: {}, **parse_remedies(remedies, config)}
    if total_steps is not None:
        config = apply_overrides(config, {"trainer.total_training_steps": total_steps})
    steps = _parse_steps(from_steps, config.trainer.total_training_steps)
    new_points = {
        name_fork_arm(remedy, step): settings for step in steps for remedy, settings in settings_by_remedy.items()
    }
    arm_steps = {name_fork_arm(remedy, step): step for step in steps for remedy in settings_by_remedy}
    folder = plan.folder.with_name(f"{plan.folder.name}-fork-{make_value_label(arm)}")
    points, earlier_seeds = dict[str, Settings](), tuple[int, ...]()
    if (folder / STUDY_FILE).exists():
        existing = plan_from_folder(folder, own_study=own_study, allowed=allowed)
        points, earlier_seeds = {**existing.points}, existing.seeds
        arm_steps |= {} if existing.forks is None else existing.forks.steps
    if changed := [name for name in new_points if name in points and {**points[name]} != {**new_points[name]}]:
        raise PlanError(
            f"{format_value(folder, 1000)} has an arm {changed[0]} with other settings: give the remedy another name, "
            f"like {EXAMPLE}."
        )
    points |= new_points
    states = _find_states(plan, arm)
    chosen = seeds or earlier_seeds or [seed for seed, kept_steps in states.items() if {*steps} <= {*kept_steps}]
    unknown_seeds = sorted({*chosen} - {*states})
    if not chosen or unknown_seeds:
        wanted = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
        wanted += f" of seed {unknown_seeds[0]}" if unknown_seeds else ""
        raise PlanError(_describe_states(plan, arm, states, wanted))
    all_seeds = sorted({*chosen, *earlier_seeds})
    parents = tuple(make_run_entry(plan, spec) for spec in plan.runs if spec.arm == arm and spec.seed in all_seeds)
    forks = ForkedStudy(plan.run, plan.folder.name, arm, parents, arm_steps)
    study = make_fork_study(plan.study, forks, points)
    preset, values = (plan.preset, plan.preset_reason), tuple(new_points)
    fork = plan_runs(StudyPlan(study, *preset, config, values, tuple(sorted(chosen)), folder))
    fork = merge_with_folder(replace(fork, source=plan.source, forks=forks, points=points), extend)
    for spec in fork.runs:
        step = arm_steps[spec.arm]
        # A run that has begun has a state of its own.
        if step not in states[spec.seed] and not (fork.get_run_dir(spec.run_id) / METRICS_FILE).exists():
            raise PlanError(_describe_states(plan, arm, states, f"step {step} of seed {spec.seed}"))
    return fork


def _parse_steps(text: str, total_steps: int) -> list[int]:
    """Parse --from-step. Raises PlanError unless each entry is a step after which steps remain."""
    entries = parse_values(text, "--from-step")
    if not all(entry.isdecimal() and 0 < int(entry) < total_steps for entry in entries):
        raise PlanError(
            f"--from-step {format_value(text)} is no list of steps from 1 to {total_steps - 1}, after which steps "
            f"remain to be trained: type numbers such as --from-step 10,20, or more --steps."
        )
    return sorted({*map(int, entries)})


def _find_states(plan: StudyPlan, arm: str) -> dict[int, list[int]]:
    """Find, for each seed of an arm, the steps after which there is a state that can be continued, ascending.

    A state of the step at which a rule stopped the run is left out, since its row has the final evaluation.
    """
    states = {}
    for spec in plan.runs:
        if spec.arm == arm:
            run_dir, checkpoint_dir = plan.get_run_dir(spec.run_id), plan.output / spec.checkpoint_dir
            check_tree(plan.output, trees=[checkpoint_dir])  # beside the study's folder
            saved = (path.name.removeprefix("global_") for path in checkpoint_dir.glob("global_step_*"))
            names = {*list_states(run_dir), *saved}
            states[spec.seed] = [
                row["step"]
                for row in read_rows(run_dir / METRICS_FILE)
                if f"step_{row['step']}" in names and not (row.get("stop_rule") or row.get("failure"))
            ]
    return states


def _describe_states(plan: StudyPlan, arm: str, states: Mapping[int, Sequence[int]], wanted: str) -> str:
    """Describe, for an error, which states an arm has instead of the wanted ones."""
    listing = "; ".join(f"seed {seed}: {', '.join(map(str, steps)) or 'none'}" for seed, steps in states.items())
    return (
        f"Arm {format_value(arm)} of {format_value(plan.folder, 1000)} has no state to continue after {wanted}. The "
        f"steps with a state are: {listing}. Type --from-step, and --seed for some seeds, with these; or train the arm "
        f"again into another --output with `--set trainer.save_freq=5`, which keeps the state of every fifth step."
    )
