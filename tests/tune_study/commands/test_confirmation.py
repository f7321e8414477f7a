"""Tests of the plan of the command `confirm`: two arms of a study, with seeds that it never used."""

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.sweep.findings import describe_confirmation
from tests.fakes.command_line import read_files
from tests.fakes.plans import plan_study
from tune_study.commands.searching import plan_confirmation
from tune_study.folder import outputs
from tune_study.folder.study_file import plan_from_folder, read_study
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan, add_seeds


@pytest.fixture
def study(work_dir: Path) -> StudyPlan:
    """A study of three arms with the seeds 0 to 2, and two more of its baseline."""
    plan = plan_study(work_dir, ("0", "0.01", "0.1"), 3)
    plan = add_seeds(plan, {"0": (3, 4)})
    outputs.write_study(plan)
    return plan


def confirm(study: StudyPlan, arm: str = "0.01", baseline: str | None = None, n_seeds: int = 4) -> StudyPlan:
    return plan_confirmation(str(study.folder), arm, baseline, n_seeds, None, extend=False)


def test_two_arms_have_the_settings_of_the_study_and_seeds_after_all_that_it_used(study: StudyPlan) -> None:
    plan = confirm(study)
    assert plan.seeds == (5, 6, 7, 8)
    assert (plan.confirms.run, plan.confirms.seeds) == (study.run, (0, 1, 2, 3, 4))
    assert (plan.values, plan.baseline) == (("0", "0.01"), "0")
    hashes = {spec.arm: spec.config.compute_hash() for spec in study.runs}
    assert {spec.arm: spec.config.compute_hash() for spec in plan.runs} == {arm: hashes[arm] for arm in plan.values}


def test_a_confirmation_lies_beside_its_study_and_touches_no_file_of_it(study: StudyPlan) -> None:
    plan = confirm(study)
    assert plan.folder == study.folder.with_name(f"{study.folder.name}-confirm-001")
    before = read_files(study.folder)
    outputs.write_study(plan)
    assert read_files(study.folder) == before
    study_files = {study.output / spec.log_path for spec in study.runs}
    assert not study_files & {plan.output / spec.log_path for spec in plan.runs}


def test_another_arm_gets_seeds_that_no_confirmation_used(study: StudyPlan) -> None:
    outputs.write_study(confirm(study))
    assert confirm(study, "0.1").seeds == (9, 10, 11, 12)


def test_the_same_confirmation_is_continued_also_if_its_study_has_grown(study: StudyPlan) -> None:
    first = confirm(study)
    outputs.write_study(first)
    outputs.write_study(add_seeds(study, {"0": range(3, 30)}))
    again = confirm(study)
    assert (again.seeds, again.confirms, again.folder) == (first.seeds, first.confirms, first.folder)


def test_more_seeds_need_extend(study: StudyPlan) -> None:
    outputs.write_study(confirm(study))
    with pytest.raises(PlanError, match="--seeds: 4 -> 6"):
        confirm(study, n_seeds=6)
    assert plan_confirmation(str(study.folder), "0.01", None, 6, None, extend=True).seeds == tuple(range(5, 11))


def test_another_baseline_is_kept_by_resume(study: StudyPlan) -> None:
    plan = confirm(study, "0.1", baseline="0.01")
    assert plan.folder.name.endswith("-confirm-01-against-001")
    outputs.write_study(plan)
    resumed = plan_from_folder(plan.folder)
    assert resumed.baseline == "0.01"
    assert resumed == replace(plan, study=resumed.study)


def test_an_arm_is_what_it_sets(study: StudyPlan) -> None:
    assert confirm(study, "0.010").values == ("0", "0.01")


@pytest.mark.parametrize(
    ("arm", "baseline", "n_seeds", "message"),
    [
        ("0.5", None, 4, "There is no arm 0.5: type --arm with one of 0, 0.01, 0.1"),
        ("0.1", "7", 4, "There is no arm 7: type --baseline with"),
        ("0", None, 4, "--arm 0 is the arm that it would be compared with"),
        ("0.1", None, 1, "--seeds 1 gives no interval: type --seeds 2 or more"),
        ("0.1", None, 397, "are not distinct numbers from 0 to 400"),
    ],
)
def test_what_cannot_be_confirmed_is_refused(
    study: StudyPlan, arm: str, baseline: str | None, n_seeds: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        confirm(study, arm, baseline, n_seeds)


def test_a_confirmation_is_not_confirmed(study: StudyPlan) -> None:
    plan = confirm(study)
    outputs.write_study(plan)
    with pytest.raises(PlanError, match="is itself a confirmation"):
        confirm(plan)


def test_a_study_without_its_baseline_needs_one(work_dir: Path) -> None:
    plan = plan_study(work_dir, ("0.01", "0.1"))
    outputs.write_study(plan)
    with pytest.raises(PlanError, match=r"type --baseline with one of 0\.01, 0\.1"):
        confirm(plan)
    assert confirm(plan, "0.1", "0.01").baseline == "0.01"


def test_the_report_says_which_seeds_chose_and_which_confirm(study: StudyPlan) -> None:
    plan = confirm(study)
    outputs.write_study(plan)
    sentence = describe_confirmation(read_study(plan.folder))
    assert sentence.startswith("Confirmation of 0.01 against 0 in kl_sweep_sokoban-tiny, with seeds 5 to 8. ")
    assert "The arm was chosen by seeds 0 to 4 of that study" in sentence
    assert describe_confirmation(read_study(study.folder)) == ""
