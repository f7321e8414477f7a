"""Tests of studies with further seeds of single arms, or further steps: what study.json keeps, and looks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.data.compare import has_added_seeds
from search_spaces.catalog import STUDIES
from tests.fakes.plans import plan_study
from tests.fakes.sandbox_folders import FakeStudy, make_seed_runs, write_sandbox
from trainable.files.json_values import read_object, write_object
from trainable.runs.study_record import StatusRecord, StudyRecord, read_record
from tune_study.folder.outputs import record_look, write_study
from tune_study.folder.study_file import check_unchanged, merge_with_folder, plan_from_folder
from tune_study.plan.errors import PlanError
from tune_study.plan.remarks import find_remarks
from tune_study.plan.study_plan import StudyPlan, add_seeds, set_max_seeds
from tune_study.tune.session import plan_next_look

BASELINE = (0.30, 0.34, 0.35, 0.31, 0.33, 0.36, 0.32, 0.35)


def write_plan(output: Path) -> StudyPlan:
    plan = replace(add_seeds(plan_study(output), {"0": (1, 2), "0.1": (1,)}), max_seeds=7)
    write_study(plan)
    return plan


def test_a_study_keeps_its_further_seeds_and_its_maximum(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    plan_again = plan_from_folder(plan.folder)
    assert (plan_again.extra_seeds, plan_again.max_seeds) == ({"0": (1, 2), "0.1": (1,)}, 7)
    assert plan_again.runs == plan.runs


def test_the_command_of_the_first_start_continues_the_further_seeds(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    merged_plan = merge_with_folder(plan_study(tmp_path, ("0", "0.10")), extend=False)
    assert (merged_plan.runs, merged_plan.max_seeds) == (plan.runs, 7)
    # A larger number of seeds includes the further ones that it reaches.
    merged_plan = merge_with_folder(plan_study(tmp_path, seeds=2), extend=True)
    assert (merged_plan.seeds, merged_plan.extra_seeds) == ((0, 1), {"0": (2,)})
    merged_plan = merge_with_folder(set_max_seeds(plan_study(tmp_path), 9), extend=False)
    assert (merged_plan.max_seeds, merged_plan.runs) == (9, plan.runs)


@pytest.mark.parametrize(
    ("key", "content"),
    [
        *(("extra_seeds", seeds) for seeds in ({"0.7": [1]}, {"0": [500]}, {"0": [-1]}, {"0": ["one"]}, [1], {"0": 1})),
        ("extra_seeds", {"0": None}),
        *(("max_seeds", number) for number in (1, 402, "7", -3)),
    ],
)
def test_seeds_that_no_study_has_are_refused(tmp_path: Path, key: str, content: Any) -> None:
    path = write_plan(tmp_path).folder / "study.json"
    write_object(path, {**read_object(path), key: content})
    with pytest.raises(PlanError, match=r"study\.json"):
        plan_from_folder(path.parent)


def test_planned_numbers_are_those_of_the_first_start_also_of_an_older_version(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, seeds=3)
    write_study(add_seeds(plan, {"0": (3,)}))
    path = plan.folder / "study.json"
    content = read_object(path)
    assert (content["planned_seeds"], content["planned_baseline_seeds"]) == (3, 4)
    # A study of an older version lacks them: its seeds were planned, and those of this start were not.
    write_object(path, {name: value for name, value in content.items() if not name.startswith("planned")})
    write_study(plan_study(tmp_path, seeds=5))
    assert read_object(path)["planned_seeds"] == 3


def test_the_runs_of_the_baseline_are_planned_when_its_group_is_started(tmp_path: Path) -> None:
    smoke = STUDIES["smoke"]
    for group in ("1", "3"):
        plan = plan_study(tmp_path, smoke.axis.value_groups[group], None, study=smoke)
        write_study(merge_with_folder(plan, extend=False))
    study = read_record(StudyRecord, plan.folder)
    assert (study.planned_seeds, study.planned_baseline_seeds, len(study.runs)) == (1, 5, 24)
    assert not has_added_seeds(study)


def test_the_command_of_a_study_that_adds_seeds_is_that_of_its_first_start(tmp_path: Path) -> None:
    plan = set_max_seeds(plan_study(tmp_path), 9)
    write_study(plan)
    path = plan.folder / "study.json"
    write_object(path, {**read_object(path), "command": "the first"})
    write_study(add_seeds(plan, {"0": (1,), "0.1": (1,)}))
    assert read_object(path)["command"] == "the first"
    write_study(plan_study(tmp_path, seeds=2))
    assert read_object(path)["command"] != "the first"


def read_looks(plan: StudyPlan) -> list[tuple[int, int]]:
    return [(look["runs"], look["seeds"]) for look in read_object(plan.folder / "study.json")["looks"]]


def make_ends(plan: StudyPlan, count: int) -> list[StatusRecord]:
    """The first `count` runs have ended, and the others were interrupted."""
    return [
        StatusRecord(spec.run_id, "completed" if index < count else "interrupted")
        for index, spec in enumerate(plan.runs)
    ]


def test_a_look_is_recorded_once_for_the_same_results(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, seeds=3)
    write_study(plan)
    record_look(plan, make_ends(plan, 0))
    assert read_looks(plan) == []
    for count in (2, 2, 6):
        record_look(plan, make_ends(plan, count))
    assert read_looks(plan) == [(2, 1), (6, 3)]
    # A later start keeps them, and further runs of the baseline alone are no look at more seeds of an arm.
    plan = add_seeds(plan, {"0": (3, 4)})
    write_study(plan)
    record_look(plan, make_ends(plan, 8))
    assert read_looks(plan) == [(2, 1), (6, 3), (8, 3)]


def test_a_damaged_study_json_is_left_to_the_next_start(tmp_path: Path) -> None:
    plan = plan_study(tmp_path)
    write_study(plan)
    (plan.folder / "study.json").write_text("{")
    record_look(plan, make_ends(plan, 2))
    assert (plan.folder / "study.json").read_text() == "{"


def write_results(output: Path, arms: dict[str, Sequence[float]], num_seeds: int) -> StudyPlan:
    """Write runs of arms whose errors are those of the baseline plus shifts; return the plan of their study."""
    errors = {"GRPO": BASELINE, **{arm: [a + b for a, b in zip(BASELINE, arms[arm], strict=True)] for arm in arms}}
    runs = [run for arm, ends in errors.items() for run in make_seed_runs(arm, ends[:num_seeds])]
    study = FakeStudy("influence", baseline="GRPO", extra={"planned_seeds": 3, "max_seeds": 8})
    folder = write_sandbox(output, runs, study)
    plan = set_max_seeds(plan_study(output, tuple(errors), 3, study="influence"), 8)
    return replace(add_seeds(plan, dict.fromkeys(errors, range(num_seeds))), folder=folder)


APART, UNCLEAR = [-0.2, -0.21, -0.19, -0.2, -0.18, -0.22, -0.2, -0.2], [0.05, -0.04, 0.06, -0.07, 0.03, -0.03, 0.02, 0]


def test_open_arms_and_the_baseline_get_the_seeds_that_a_verdict_needs(tmp_path: Path) -> None:
    plan = write_results(tmp_path, {"DG": APART, "TPO": UNCLEAR}, 3)
    next_plan, line = plan_next_look(plan, max_concurrent=2)
    assert next_plan.extra_seeds == dict.fromkeys(("GRPO", "DG", "TPO"), (3, 4, 5))  # 2 comparisons need 6 seeds
    assert line == "Open: DG, TPO. These arms and the baseline get the seeds 0 to 5."


@pytest.mark.parametrize(("max_concurrent", "further"), [(2, (6,)), (5, (6, 7))])
def test_an_arm_with_a_verdict_gets_no_more_seeds(
    tmp_path: Path, max_concurrent: int, further: tuple[int, ...]
) -> None:
    plan = write_results(tmp_path, {"DG": APART, "TPO": UNCLEAR}, 6)
    next_plan, line = plan_next_look(plan, max_concurrent)
    further_seeds = {arm: seeds[3:] for arm, seeds in next_plan.extra_seeds.items()}
    assert further_seeds == {"GRPO": further, "DG": (), "TPO": further}
    assert line == f"Open: TPO. This arm and the baseline get the seeds 0 to {further[-1]}."


def test_looking_ends_with_the_last_verdict_or_the_last_seed(tmp_path: Path) -> None:
    plan = write_results(tmp_path / "resolved", {"DG": APART}, 6)
    assert plan_next_look(plan, 2) == (None, "No compared arm is open: no seed is added.")
    plan = write_results(tmp_path / "open", {"DG": APART, "TPO": UNCLEAR}, 8)
    assert plan_next_look(plan, 2) == (None, "Open: TPO, after 8 seeds per arm, the maximum (--max-seeds).")


def make_long_plan(folder: Path, steps: int, **settings: object) -> StudyPlan:
    return plan_study(folder, **{"trainer.total_training_steps": steps, **settings})


def test_a_study_is_made_longer_if_that_is_typed(tmp_path: Path) -> None:
    write_study(make_long_plan(tmp_path, 4))
    with pytest.raises(PlanError, match=r"total_training_steps: 4 -> 8\nAdd --extend to train its runs up to step 8"):
        merge_with_folder(make_long_plan(tmp_path, 8), extend=False)
    plan = merge_with_folder(make_long_plan(tmp_path, 8), extend=True)
    assert (plan.earlier_steps, {spec.steps for spec in plan.runs}) == ((4,), {8})
    (remark,) = (remark for remark in find_remarks(plan) if "trained from step 4 on" in remark)
    assert "step 4 has a validation, although trainer.test_freq=5" in remark
    write_study(plan)
    assert plan_from_folder(plan.folder).earlier_steps == (4,)
    check_unchanged(plan_from_folder(plan.folder))
    # Another spelling of a value is the same arm, as without more steps.
    overrides = {"trainer.total_training_steps": 9}
    spelled = plan_study(tmp_path, ("0", "0.10"), **overrides)
    assert merge_with_folder(spelled, extend=True).values == ("0", "0.1")
    # The same command again continues, and a further one adds steps once more.
    assert merge_with_folder(make_long_plan(tmp_path, 8), extend=True).earlier_steps == (4,)
    assert merge_with_folder(make_long_plan(tmp_path, 9), extend=True).earlier_steps == (4, 8)


def test_nothing_but_the_steps_may_differ_and_none_is_taken_back(tmp_path: Path) -> None:
    write_study(make_long_plan(tmp_path, 4))
    with pytest.raises(PlanError, match=r"actor\.lr: 0\.0003 -> 0\.001\nType the same settings"):
        merge_with_folder(make_long_plan(tmp_path, 8, actor__lr=1e-3), extend=True)
    with pytest.raises(PlanError, match=r"total_training_steps: 4 -> 3\nType the same settings"):
        merge_with_folder(make_long_plan(tmp_path, 3), extend=True)


def test_a_start_that_died_between_its_files_is_continued_by_the_same_command(tmp_path: Path) -> None:
    write_study(make_long_plan(tmp_path, 4))
    study = (path := make_long_plan(tmp_path, 4).folder / "study.json").read_bytes()
    write_study(merge_with_folder(make_long_plan(tmp_path, 8), extend=True))
    path.write_bytes(study)  # every run.json is of the longer study
    assert merge_with_folder(make_long_plan(tmp_path, 8), extend=True).earlier_steps == (4,)


def test_to_look_at_a_longer_study_is_another_look(tmp_path: Path) -> None:
    plan = make_long_plan(tmp_path, 4)
    write_study(plan)
    completed = [StatusRecord(spec.run_id, "completed") for spec in plan.runs]
    record_look(plan, completed)
    record_look(plan, completed)
    plan = merge_with_folder(make_long_plan(tmp_path, 8), extend=True)
    write_study(plan)
    record_look(plan, completed)
    looks = read_object(plan.folder / "study.json")["looks"]
    assert [(look["runs"], look["seeds"], look["steps"]) for look in looks] == [(2, 1, 4), (2, 1, 8)]
