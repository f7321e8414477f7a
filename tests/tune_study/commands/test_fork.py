"""Tests of the plan of the command `fork`: arms that continue kept states of one arm of another study."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.sweep.findings import describe_fork
from tests.fakes.command_line import assert_refused, get_output, read_files
from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study
from trainable.config.run_config import ConfigError
from tune_study.commands.forking import plan_fork
from tune_study.commands.searching import plan_confirmation
from tune_study.folder import outputs
from tune_study.folder.study_file import plan_from_folder, read_study
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.trials import make_trial_config

KL = "kl: actor.use_kl_loss=True actor.kl_loss_coef=0.3"
RATE = "actor.lr=1e-6"
ENDS = {2: 6}
"""Step at which a rule stopped the run of a seed of arm 0."""


@pytest.fixture
def study(work_dir: Path) -> StudyPlan:
    """A study of two arms that ended, with the states of steps 2, 4, 6 and 8; a rule stopped seed 2 of arm 0."""
    settings = {"trainer__total_training_steps": 8, "trainer__save_freq": 2, "trainer__test_freq": 1}
    plan = plan_study(work_dir, ("0", "0.1"), 3, **settings)
    outputs.write_study(plan)
    for spec in plan.runs:
        end = ENDS.get(spec.seed, 8) if spec.arm == "0" else 8
        for step in range(1, end + 1):
            stop = {"stop_rule": "low_validation_success", "stop_step": step} if step == end < 8 else {}
            append_record(plan.get_run_dir(spec.run_id) / "metrics.jsonl", {"step": step, "val_success": 0.5, **stop})
        for step in range(2, end + 1, 2):
            (plan.output / spec.checkpoint_dir / f"global_step_{step}").mkdir(parents=True)
    return plan


def fork(
    study: StudyPlan,
    from_steps: str = "2,4",
    remedies: Sequence[str] = (KL, RATE),
    *,
    arm: str = "0",
    seeds: Sequence[int] | None = None,
    total_steps: int | None = None,
    extend: bool = False,
) -> StudyPlan:
    return plan_fork(str(study.folder), arm, from_steps, remedies, seeds, total_steps, None, extend)


def list_changes(plan: StudyPlan) -> dict[str, dict[str, Any]]:
    """List by arm which settings differ from those of the forked arm."""
    return {arm: {name: str(value) for name, value in settings.items()} for arm, settings in plan.points.items()}


def test_each_step_has_an_arm_as_before_and_one_per_remedy(study: StudyPlan) -> None:
    plan = fork(study)
    kl = {"actor.use_kl_loss": "True", "actor.kl_loss_coef": "0.3"}
    by_remedy = {"as-before": {}, "kl": kl, "lr1e-6": {"actor.lr": "1e-6"}}
    assert list_changes(plan) == {f"{name}-from-{step}": by_remedy[name] for step in (2, 4) for name in by_remedy}
    assert (plan.values, plan.seeds, plan.baseline) == (tuple(plan.points), (0, 1, 2), "as-before-from-2")
    assert {spec.steps for spec in plan.runs} == {8}
    as_before = {spec.config.compute_hash() for spec in plan.runs if spec.arm.startswith("as-before")}
    assert as_before == {spec.config.compute_hash() for spec in study.runs if spec.arm == "0"}


def test_each_remedy_is_compared_with_as_before_from_its_step(study: StudyPlan) -> None:
    plan = fork(study)
    contrasts = {contrast.name: contrast.pairs for contrast in outputs.make_study_record(plan).contrasts}
    assert contrasts == {
        f"{remedy} from step {step}": ((f"{remedy}-from-{step}", f"as-before-from-{step}"),)
        for remedy in ("kl", "lr1e-6")
        for step in (2, 4)
    }


def test_a_run_continues_the_run_of_its_seed_after_the_step_of_its_arm(study: StudyPlan) -> None:
    plan = fork(study)
    parents = {(spec.arm, spec.seed): spec for spec in study.runs}
    for spec in plan.runs:
        (entry,) = make_trial_config(plan, [spec])["run"]["runs"]
        parent = parents["0", spec.seed]
        assert entry["parent"] == {
            "run_dir": str(study.get_run_dir(parent.run_id)),
            "checkpoint_dir": str(study.output / parent.checkpoint_dir),
            "step": int(spec.arm.rpartition("-")[2]),
        }


def test_a_fork_lies_beside_its_study_and_touches_no_file_of_it(study: StudyPlan) -> None:
    plan = fork(study, arm="0.1")
    assert plan.folder == study.folder.with_name(f"{study.folder.name}-fork-01")
    before = read_files(study.folder)
    outputs.write_study(plan)
    assert read_files(study.folder) == before
    assert all(plan.folder in (plan.output / spec.checkpoint_dir).parents for spec in plan.runs)


def test_a_fork_is_planned_again_from_its_folder(study: StudyPlan) -> None:
    plan = fork(study, seeds=[1])
    outputs.write_study(plan)
    assert plan_from_folder(plan.folder) == replace(plan, study=plan_from_folder(plan.folder).study)
    assert fork(study, seeds=[1]) == plan
    assert fork(study) == plan  # a fork that has begun keeps its seeds
    sentence = describe_fork(read_study(plan.folder))
    assert sentence.startswith("Fork of arm 0 of kl_sweep_sokoban-tiny, seeds 1: the rows up to the step")
    assert describe_fork(read_study(study.folder)) == ""


def test_remedies_steps_and_seeds_are_added_with_extend(study: StudyPlan) -> None:
    outputs.write_study(fork(study, "2", [KL], seeds=[0]))
    for options in ({"from_steps": "2,4"}, {"remedies": [KL, RATE]}, {"seeds": [0, 1]}):
        typed: dict[str, Any] = {"from_steps": "2", "remedies": [KL], **options}
        with pytest.raises(PlanError, match="Type --extend to add the new runs"):
            fork(study, **typed)
    plan = fork(study, "4", [RATE], seeds=[1], extend=True)
    assert plan.values == ("as-before-from-2", "kl-from-2", "as-before-from-4", "lr1e-6-from-4")
    assert plan.seeds == (0, 1)
    outputs.write_study(plan)
    assert len(read_study(plan.folder).contrasts) == 2
    assert plan_from_folder(plan.folder).forks == plan.forks


def test_only_seeds_with_a_state_after_every_step_are_continued(study: StudyPlan) -> None:
    # A rule stopped seed 2 at step 6.
    assert fork(study, "4,6").seeds == (0, 1)
    assert fork(study, "4").seeds == (0, 1, 2)
    out = get_output(
        shlex.join(["fork", str(study.folder), "--arm", "0", "--from-step", "6", "--remedy", RATE, "--dry-run"])
    )
    assert (
        "Fork: arm 0 of kl_sweep_sokoban-tiny is continued from step 6, with its rows up to there; without its seed 2"
        in out
    )
    assert "Remark: the outcome is the mean of the last 4 validations" in out


def test_a_fork_may_be_longer_than_its_study(study: StudyPlan) -> None:
    plan = fork(study, "8", total_steps=12)
    assert {spec.steps for spec in plan.runs} == {12}


def test_a_fork_of_a_fork_continues_its_runs(study: StudyPlan) -> None:
    plan = fork(study)
    outputs.write_study(plan)
    for spec in (spec for spec in plan.runs if spec.arm == "kl-from-2"):
        append_record(plan.get_run_dir(spec.run_id) / "metrics.jsonl", {"step": 1})
        append_record(plan.get_run_dir(spec.run_id) / "metrics.jsonl", {"step": 6})
        (plan.get_run_dir(spec.run_id) / "state" / "step_6").mkdir(parents=True)
    second = fork(plan, "6", [RATE], arm="kl-from-2")
    assert second.folder.name == "kl_sweep_sokoban-tiny-fork-0-fork-kl-from-2"
    assert all(spec.ppo_config.actor.kl_loss_coef == 0.3 for spec in second.runs)
    parent = second.find_parent(second.runs[0])
    assert parent is not None
    assert parent.run_dir.parents[1] == plan.folder
    outputs.write_study(second)
    assert plan_from_folder(second.folder).forks == second.forks


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"arm": "7"}, "There is no arm 7: type --arm with one of 0, 0.1"),
        (
            {"from_steps": "3"},
            r"no state to continue after step 3\. .* seed 0: 2, 4, 6, 8; .* seed 2: 2, 4\. .*save_freq=5",
        ),
        ({"from_steps": "2,6", "seeds": [2]}, "no state to continue after step 6 of seed 2"),
        ({"from_steps": "8"}, "no list of steps from 1 to 7"),
        ({"from_steps": "2,,4"}, "has an empty entry"),
        ({"remedies": ["actor.lr"]}, r"actor\.lr is not KEY=VALUE: type --remedy"),
        ({"remedies": ["'actor.lr=1"]}, "has a quote without an end"),
        ({"remedies": ["actor.use_kl_loss=False"]}, "changes nothing"),
        ({"remedies": ["actor.lr=1e-6 lr_of_nothing=1"]}, "There is no setting `lr_of_nothing`"),
        ({"remedies": ["actor.lr=1e-6 actor.lr=1e-5"]}, r"gives `actor\.lr` twice"),
        ({"remedies": [RATE, RATE]}, "another arm is called lr1e-6"),
        ({"remedies": [f"as-before: {RATE}"]}, "another arm is called as-before"),
        ({"remedies": [f"a/b: {RATE}"]}, "type another name"),
        ({"remedies": ["model.lora_rank=8"]}, r"`model\.lora_rank` cannot change in the middle of a run"),
        ({"remedies": ["critic.shared_trunk=True"]}, "cannot change in the middle"),
        ({"remedies": ["seed=3"]}, "cannot change in the middle"),
    ],
)
def test_what_cannot_be_forked_is_refused(study: StudyPlan, typed: dict[str, Any], message: str) -> None:
    before = read_files(study.folder.parent)
    with pytest.raises((PlanError, ConfigError), match=message):
        fork(study, **typed)
    assert read_files(study.folder.parent) == before


@pytest.mark.parametrize(
    ("settings", "remedy", "is_allowed"),
    [
        ({}, "algorithm.adv_estimator=grpo", True),
        ({"algorithm__adv_estimator": "grpo"}, "algorithm.adv_estimator=gae", False),
        (
            {"critic__shared_trunk": True, "rollout__name": "torch", "model__compiled_passes": False},
            "algorithm.adv_estimator=grpo",
            False,
        ),
    ],
)
def test_a_remedy_may_drop_a_critic_but_not_need_a_new_one(
    work_dir: Path, settings: dict[str, object], remedy: str, is_allowed: bool
) -> None:
    plan = plan_study(work_dir, ("0", "0.1"), 1, trainer__total_training_steps=4, **settings)
    outputs.write_study(plan)
    with pytest.raises(PlanError, match="no state to continue" if is_allowed else "needs other networks"):
        fork(plan, "2", [remedy])


def test_a_reference_that_has_moved_stays(work_dir: Path) -> None:
    settings = {"actor__use_kl_loss": True, "trainer__ref_model_sync_steps": 2, "trainer__total_training_steps": 4}
    plan = plan_study(work_dir, ("0.1", "0.2"), 1, **settings)
    outputs.write_study(plan)
    with pytest.raises(PlanError, match="the reference of the runs has moved"):
        fork(plan, "2", ["trainer.ref_model_sync_steps=null"], arm="0.1")


def test_a_remedy_keeps_its_settings_under_its_name(study: StudyPlan) -> None:
    outputs.write_study(fork(study, "2", [KL]))
    with pytest.raises(PlanError, match="has an arm kl-from-2 with other settings"):
        fork(study, "2", [f"kl: {RATE}"])


def test_a_state_that_was_removed_is_needed_only_by_runs_without_rows(study: StudyPlan) -> None:
    plan = fork(study, "2", [KL], seeds=[0])
    outputs.write_study(plan)
    for spec in study.runs:
        (study.output / spec.checkpoint_dir / "global_step_2").rmdir()
    with pytest.raises(PlanError, match="no state to continue after step 2 of seed 0"):
        fork(study, "2", [KL])
    for spec in plan.runs:
        append_record(plan.get_run_dir(spec.run_id) / "metrics.jsonl", {"step": 1})
    assert fork(study, "2", [KL]) == plan


def test_studies_that_train_no_language_model_are_not_forked(work_dir: Path) -> None:
    plan = plan_study(work_dir, None, 1, study="influence")
    outputs.write_study(plan)
    with pytest.raises(PlanError, match="fine-tunes no language model"):
        fork(plan, arm=plan.values[0])


def test_a_fork_is_not_confirmed(study: StudyPlan) -> None:
    plan = fork(study)
    outputs.write_study(plan)
    with pytest.raises(PlanError, match="is a fork, and fresh seeds have no state"):
        plan_confirmation(str(plan.folder), "kl-from-2", None, 2, None, extend=False)


def test_a_dry_run_writes_nothing_and_the_resume_of_a_fork_is_planned(study: StudyPlan, work_dir: Path) -> None:
    before = read_files(work_dir)
    words = ["fork", str(study.folder), "--arm", "0", "--from-step", "2,4", "--remedy", KL, "--dry-run"]
    out = get_output(shlex.join(words))
    assert "12 runs: fork in as-before-from-2,kl-from-2,as-before-from-4,kl-from-4; seeds 0,1,2" in out
    (summary,) = json.loads(get_output(shlex.join([*words, "--json"])))["plans"]
    assert (summary["results"], summary["seeds"]) == (f"{study.folder}-fork-0", [0, 1, 2])
    assert read_files(work_dir) == before
    assert_refused(shlex.join(words[:4]), "Missing option '--from-step'")
    outputs.write_study(fork(study, remedies=[KL]))
    assert "12 runs: fork in as-before-from-2" in get_output(
        shlex.join(["resume", f"{study.folder}-fork-0", "--dry-run"])
    )
