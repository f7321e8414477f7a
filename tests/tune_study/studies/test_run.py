"""Studies through real Ray Tune, with a small trainer that fulfills the interface of a run."""

import gc
import io
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import psutil
import pytest
from rich.console import Console

from tests.fakes.plans import plan_study
from tests.fakes.sessions import allocate, run_placed
from tests.fakes.trainer import (
    COLLAPSES,
    CRASHES_ONCE,
    DIES,
    DIVERGES,
    FAILS_IN_SETUP,
    HANGS,
    HAS_A_CHILD,
    IS_TOO_LARGE,
    IS_WRONG,
    RAISES,
    STOPS_ITS_ARM,
    make_fake_rows,
    make_study,
)
from tests.fakes.wandb_files import read_wandb_files
from trainable.runs.history import find_last_value
from trainable.runs.records import DEFAULT_STEP_COLUMNS, STOP_COLUMNS
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord, WandbTarget, find_record, read_record
from tune_study.folder.study_file import merge_with_folder, plan_from_folder
from tune_study.plan.study_plan import ResourcePlan, StudyPlan
from tune_study.tune.run import execute_study
from tune_study.tune.trials import make_trial_config

pytestmark = pytest.mark.usefixtures("ray_session")

STEPS = 22
ARMS = ("0", COLLAPSES, CRASHES_ONCE, RAISES, FAILS_IN_SETUP, IS_WRONG, DIVERGES, DIES, IS_TOO_LARGE)
FAILED = (RAISES, FAILS_IN_SETUP, IS_WRONG, DIVERGES, DIES, IS_TOO_LARGE)


def make_plan_in(folder: Path, values: Sequence[str], seeds: int = 1, **overrides: object) -> StudyPlan:
    dotted_overrides: dict[str, object] = {"trainer.total_training_steps": STEPS, "trainer.resume_every": 1}
    dotted_overrides |= {key.replace("__", "."): value for key, value in overrides.items()}
    return plan_study(folder, values, seeds, study=make_study(), **dotted_overrides)


class Outcome(NamedTuple):
    """The result of a study: its exit code, its output, and the status of the first seed of every arm.

    other_text: what was printed to standard output and standard error besides the study's own lines.
    """

    plan: StudyPlan
    code: int
    text: str
    arms: dict[str, StatusRecord]
    other_text: str


def run_study(plan: StudyPlan, max_concurrent: int = 2) -> Outcome:
    # The console's lines go to a file of their own, not to the standard output that is captured below.
    console = Console(record=True, width=200, file=io.StringIO())
    other_output = io.StringIO()
    with redirect_stdout(other_output), redirect_stderr(other_output):
        code = execute_study(plan, allocate(plan, max_concurrent), console)
    gc.collect()  # warnings about files that Ray left open belong to this test and not to the next one
    statuses = {run.arm: find_record(StatusRecord, plan.get_run_dir(run.run_id)) for run in plan.runs if run.seed == 0}
    known_statuses = {arm: status for arm, status in statuses.items() if status is not None}
    return Outcome(plan, code, console.export_text(), known_statuses, other_output.getvalue())


def find_run_id(plan: StudyPlan, arm: str) -> str:
    return next(run.run_id for run in plan.runs if run.arm == arm)


def read_run_rows(run_dir: Path) -> list[dict[str, Any]]:
    return read_rows(run_dir / METRICS_FILE)


def read_written_steps(plan: StudyPlan, arm: str) -> list[int]:
    """Read the steps of the rows of an arm as they were written, including repeated steps."""
    text = (plan.get_run_dir(find_run_id(plan, arm)) / METRICS_FILE).read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


@pytest.fixture(scope="module")
def outcome(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A study whose runs complete, are stopped by a rule, crash and recover, or fail in different ways.

    Tune saves its experiment state as often as it can: also between the failure of a run and the end of its trial.
    """
    plan = make_plan_in(tmp_path_factory.mktemp("study"), ARMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")
        return run_study(replace(plan, wandb=WandbTarget("offline")))


def test_every_run_has_one_status_with_its_reason(outcome: Outcome) -> None:
    assert {arm: status.status for arm, status in outcome.arms.items()} == {
        "0": "completed",
        COLLAPSES: "early_stopped",
        CRASHES_ONCE: "completed",
        **dict.fromkeys(FAILED, "failed"),
    }
    assert outcome.arms["0"].reason == f"trained {STEPS} of {STEPS} steps"
    assert outcome.code == 1
    assert f"Continue with: python -m tune_study resume {outcome.plan.folder}" in outcome.text


def test_a_failure_has_its_class_and_its_words(outcome: Outcome) -> None:
    three_failures = " (3 consecutive failures without a step between them)"
    died = "ActorDiedError: The actor died unexpectedly before finishing this task."
    failures = {arm: (outcome.arms[arm].failure_class, outcome.arms[arm].reason) for arm in FAILED}
    assert failures == {
        RAISES: ("error", "RuntimeError: the fake was told to raise" + three_failures),
        FAILS_IN_SETUP: ("configuration", "ValueError: the fake was told not to start"),
        IS_WRONG: ("error", "KeyError: 'the fake was told to look for what is not there'"),
        DIVERGES: ("non-finite", "NonFiniteError: steps 1 to 3 skipped updates whose numbers were not finite: pg_loss"),
        DIES: ("process died", died + three_failures),
        IS_TOO_LARGE: (
            "out of memory",
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte too many",
        ),
    }
    trials = pd.read_parquet(outcome.plan.folder / "trials.parquet").set_index("arm")
    assert trials["failure_class"].to_dict() == {arm: outcome.arms[arm].failure_class for arm in ARMS}


def test_only_what_may_pass_is_tried_again(outcome: Outcome) -> None:
    logs = {run.arm: (outcome.plan.output / run.log_path).read_text() for run in outcome.plan.runs}
    starts = {arm: logs[arm].count(" started ") for arm in ARMS}
    assert starts == {**dict.fromkeys(ARMS, 1), CRASHES_ONCE: 2, RAISES: 3, DIES: 3}
    assert (outcome.plan.get_run_dir(find_run_id(outcome.plan, DIES)) / "deaths").read_text() == "xxx"
    assert read_written_steps(outcome.plan, CRASHES_ONCE) == list(range(1, STEPS + 1))  # from its own state


def test_every_run_is_recorded_as_ended_with_its_files(outcome: Outcome) -> None:
    from ray.tune import ExperimentAnalysis

    trials = ExperimentAnalysis(str(outcome.plan.folder)).trials
    trial_statuses = {trial.config["run"]["arm"]: trial.status for trial in trials}
    assert trial_statuses == dict.fromkeys(ARMS, "TERMINATED"), (trial_statuses, outcome.other_text)
    assert all(status.ended_at is not None for status in outcome.arms.values())
    for run in outcome.plan.runs:
        files = list((outcome.plan.folder / run.run_id).iterdir())
        assert [path for path in files if path.name.startswith("events.out.tfevents.")], (files, outcome.other_text)
    assert f"Report: {outcome.plan.folder / 'report.html'}" in outcome.text
    assert (outcome.plan.folder / "report.html").stat().st_size > 0


def test_the_rule_that_stopped_a_run_is_in_its_status(outcome: Outcome) -> None:
    status = outcome.arms[COLLAPSES]
    assert (status.stop_rule, status.stop_step) == ("reward_variance_collapse", 20)
    assert status.stop_value == 0.01
    assert status.stop_threshold == pytest.approx(0.2)
    assert status.reason == (
        "reward_variance_collapse at step 20: 0.01 is below the threshold 0.2; success was 0.952, so little was left "
        "to learn"
    )


def test_tunes_own_views_agree_with_the_rows(outcome: Outcome) -> None:
    frame = load_ray_frame(outcome.plan.folder)
    trained_runs = [run for run in outcome.plan.runs if run.arm not in (FAILS_IN_SETUP, IS_TOO_LARGE)]
    assert set(frame["run_id"]) == {run.run_id for run in outcome.plan.runs}
    for run in trained_runs:
        rows = read_run_rows(outcome.plan.get_run_dir(run.run_id))
        tune_row = frame.set_index("run_id").loc[run.run_id]
        assert tune_row["config/actor.kl_loss_coef"] == float(run.arm)
        assert tune_row["config/seed"] == run.seed
        for column in ("step", *(extra_column.name for extra_column in DEFAULT_STEP_COLUMNS)):
            value = find_last_value(rows, column)
            expected_value = find_last_value(rows, f"base_{column}") if value is None else value
            assert is_same_value(tune_row[column], expected_value), column
    stopped_row = frame.set_index("run_id").loc[find_run_id(outcome.plan, COLLAPSES)]
    assert (stopped_row["stop_rule"], stopped_row["stop_step"]) == ("reward_variance_collapse", 20)
    trials = pd.read_parquet(outcome.plan.folder / "trials.parquet").set_index("run_id")
    trials, frame = trials[trials["steps_done"] > 0], frame.dropna(subset="step")
    assert trials["trial_id"].to_dict() == frame.set_index("run_id")["trial_id"].to_dict()
    assert trials["steps_done"].to_dict() == frame.set_index("run_id")["step"].to_dict()


def load_ray_frame(folder: Path) -> pd.DataFrame:
    from ray.tune import ExperimentAnalysis, ResultGrid

    return ResultGrid(ExperimentAnalysis(str(folder))).get_dataframe()


def is_same_value(left: Any, right: Any) -> bool:
    if right is None:
        return left is None or bool(pd.isna(left))
    return bool(left == right)


def test_tunes_csv_has_every_column_although_the_first_row_lacks_their_values(outcome: Outcome) -> None:
    frame = pd.read_csv(outcome.plan.folder / find_run_id(outcome.plan, COLLAPSES) / "progress.csv")
    assert {column.name for column in (*DEFAULT_STEP_COLUMNS, *STOP_COLUMNS)} <= set(frame.columns)
    assert frame["stop_rule"].tolist()[-1] == "reward_variance_collapse"
    is_carried = pd.Series(["val_success" in names.split() for names in frame["carried"]])
    assert frame["step"][~is_carried].tolist() == [5, 10, 15, 20]


def test_logs_and_rows_hold_each_step_and_why_a_run_failed(outcome: Outcome) -> None:
    logs = {run.arm: (outcome.plan.output / run.log_path).read_text() for run in outcome.plan.runs}
    assert logs["0"].count(f"/{STEPS} ") == STEPS
    assert f"step 5/{STEPS} train_success=0.833 reward_std=2.0000 groups_kept=8 val_success=0.833" in logs["0"]
    assert "early_stop=reward_variance_collapse at step 20" in logs[COLLAPSES]
    assert 'raise RuntimeError("the fake was told to raise")' in logs[RAISES]
    assert "=== process died, retrying: ActorDiedError: The actor died unexpectedly" in logs[CRASHES_ONCE]
    assert "=== failed (non-finite) " in logs[DIVERGES]
    assert "\x1b" not in logs[RAISES]
    rows = read_run_rows(outcome.plan.get_run_dir(find_run_id(outcome.plan, "0")))
    assert all(row["kl_loss"] is None for row in rows)  # it was not finite
    assert not any(isinstance(value, float) and math.isnan(value) for row in rows for value in row.values())


def test_wandb_offline_keeps_a_run_for_each_run(outcome: Outcome) -> None:
    run_files = list((outcome.plan.output / "wandb").glob("offline-run-*/run-*.wandb"))
    folder = outcome.plan.output / "wandb"
    assert f"W&B: offline runs in {folder}; to upload them: wandb sync {folder}/offline-run-*" in outcome.text
    assert len(run_files) == len(outcome.plan.runs)
    files = read_wandb_files(outcome.plan.output)
    for run in outcome.plan.runs:
        file, status = files[run.run_id], outcome.arms[run.arm]
        rows = read_rows(outcome.plan.get_run_dir(run.run_id) / METRICS_FILE)
        assert file.run.run_id.startswith(f"{run.run_id}-")
        assert (file.run.project, file.run.run_group) == (outcome.plan.wandb_project, outcome.plan.run)
        labels = {"study": "kl", "arm": run.arm, "seed": 0, "group": outcome.plan.run, "preset": "laptop"}
        assert {name: file.config[name] for name in labels} == labels
        assert file.steps == [row["step"] for row in rows]
        assert (file.summary["status"], file.summary["reason"]) == (status.status, status.reason)
    assert files[find_run_id(outcome.plan, COLLAPSES)].summary["collapsed"] is False  # it was given nothing to learn
    assert files[find_run_id(outcome.plan, "0")].summary["verdict"] == "baseline"


@pytest.mark.slow
def test_a_child_that_outlives_its_trial_is_ended_and_the_run_goes_on(tmp_path: Path) -> None:
    study_outcome = run_study(make_plan_in(tmp_path, (HAS_A_CHILD,)))
    assert study_outcome.arms[HAS_A_CHILD].status == "completed"
    pid = int((study_outcome.plan.get_run_dir(find_run_id(study_outcome.plan, HAS_A_CHILD)) / "child").read_text())
    assert not psutil.pid_exists(pid)
    log = (study_outcome.plan.output / study_outcome.plan.runs[0].log_path).read_text()
    assert f"=== terminated orphan processes: {pid} (python" in log


@pytest.mark.slow
def test_a_trial_that_hangs_at_its_end_does_not_hold_the_study(tmp_path: Path) -> None:
    study_outcome = run_study(make_plan_in(tmp_path, (HANGS,), trainer__total_training_steps=2))
    assert (study_outcome.code, study_outcome.arms[HANGS].status) == (0, "completed")


# Continuing a study.


@pytest.fixture(scope="module")
def extended(outcome: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The study of `outcome` in another folder, with its failures fixed and one more value."""
    folder = tmp_path_factory.mktemp("moved") / "study"
    shutil.copytree(outcome.plan.output, folder, symlinks=True)
    plan = merge_with_folder(make_plan_in(folder, ("0", "0.1")), extend=True)
    for arm in FAILED:
        (plan.get_run_dir(find_run_id(plan, arm)) / "mended").touch()
    return run_study(plan)


@pytest.mark.slow
def test_an_extended_study_has_the_old_runs_and_the_new(extended: Outcome) -> None:
    assert [run.arm for run in extended.plan.runs] == [*ARMS, "0.1"]
    assert extended.code == 0
    assert {arm: status.status for arm, status in extended.arms.items()} == {
        "0": "completed",
        COLLAPSES: "early_stopped",
        CRASHES_ONCE: "completed",
        **dict.fromkeys(FAILED, "completed"),
        "0.1": "completed",
    }
    assert not any(status.failure_class for status in extended.arms.values())
    for arm in FAILED:  # each goes on from its state
        assert read_written_steps(extended.plan, arm) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_finished_runs_are_named_and_not_run_again(outcome: Outcome, extended: Outcome) -> None:
    assert f"arm {COLLAPSES} seed 0 is early_stopped and is not run again" in extended.text
    assert "7 of 10 runs remain" in extended.text
    assert extended.text.endswith(f": python -m tune_study explain {extended.plan.folder}\n")
    for arm in ("0", COLLAPSES, CRASHES_ONCE):
        name = find_run_id(extended.plan, arm)
        assert read_run_rows(extended.plan.get_run_dir(name)) == read_run_rows(outcome.plan.get_run_dir(name))
        assert read_written_steps(extended.plan, arm) == read_written_steps(outcome.plan, arm)
        assert replace(extended.arms[arm], trial_id="") == replace(outcome.arms[arm], trial_id="")
    log = (extended.plan.output / extended.plan.runs[0].log_path).read_text()
    assert log.count(f"step {STEPS}/{STEPS}") == 1


@pytest.fixture(scope="module")
def interrupted(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A study that was interrupted by Ctrl-C when its first run, which collapses later, was at step 4.

    Two runs were under way, and arm 0 was to start last. The other one has so many steps that it does not end before,
    on a busy machine either.
    """
    plan = make_plan_in(tmp_path_factory.mktemp("cut"), (COLLAPSES, "0.2", "0"), trainer__total_training_steps=400)
    folder = plan.get_run_dir(find_run_id(plan, COLLAPSES))
    folder.mkdir(parents=True)
    (folder / "interrupt.pid").write_text(str(os.getpid()))
    return run_study(plan)


@pytest.fixture(scope="module")
def resumed(interrupted: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The interrupted study, continued in a copy of its folder under another name."""
    folder = tmp_path_factory.mktemp("elsewhere") / "-my $HOME 'old' résultats" / "first try?"
    shutil.copytree(interrupted.plan.folder, folder)
    return run_study(plan_from_folder(folder, study=make_study()))


def test_ctrl_c_gives_every_run_a_status_and_says_how_to_go_on(interrupted: Outcome) -> None:
    assert interrupted.code == 130
    assert interrupted.arms[COLLAPSES].status == "interrupted"
    assert interrupted.arms["0"] == StatusRecord(
        interrupted.arms["0"].run_id, "never_ran", "the study was interrupted before it started"
    )
    assert f"Continue with: python -m tune_study resume {interrupted.plan.folder}" in interrupted.text
    assert interrupted.arms[COLLAPSES].reason.startswith("interrupted after step ")
    assert len(pd.read_parquet(interrupted.plan.folder / "trials.parquet")) == 3


@pytest.mark.slow
def test_an_arm_that_is_stopped_ends_alone_and_can_be_resumed(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, ("0", STOPS_ITS_ARM), seeds=2, trainer__total_training_steps=40)
    stopped = run_study(plan, max_concurrent=1)
    statuses = {run.run_id: find_record(StatusRecord, plan.get_run_dir(run.run_id)) for run in plan.runs}
    ends = {(run.arm, run.seed): status for run in plan.runs if (status := statuses[run.run_id]) is not None}
    assert [ends["0", seed].status for seed in (0, 1)] == ["completed", "completed"]
    first, second = (ends[STOPS_ITS_ARM, seed] for seed in (0, 1))
    assert first.status == "interrupted"
    assert first.reason.startswith("interrupted after step ")
    assert (second.status, second.reason) == ("never_ran", "the arm was stopped by `stop --arm` before it started")
    assert stopped.code == 1
    assert f"Continue with: python -m tune_study resume {plan.folder}" in stopped.text
    for run in plan.runs:
        (plan.get_run_dir(run.run_id) / "mended").touch()
    resumed_study = run_study(plan_from_folder(plan.folder, study=make_study()))
    assert (resumed_study.code, resumed_study.arms[STOPS_ITS_ARM].status) == (0, "completed")


def test_an_interrupted_study_says_only_that_waiting_runs_never_ran(interrupted: Outcome) -> None:
    assert interrupted.other_text == ""  # neither Tune's "completed" nor an error of its own record
    lines = [line for line in interrupted.text.splitlines() if line.startswith("arm 0 seed 0 ")]
    assert lines == ["arm 0 seed 0 never_ran: the study was interrupted before it started"]


def test_an_interrupted_study_goes_on_to_the_rows_of_an_uninterrupted_one(
    interrupted: Outcome, resumed: Outcome
) -> None:
    assert {arm: status.status for arm, status in resumed.arms.items()} == {
        COLLAPSES: "early_stopped",
        "0": "completed",
        "0.2": "completed",
    }
    for run in resumed.plan.runs:
        config = make_trial_config(resumed.plan, [run])
        expected_rows = make_fake_rows(config, run.config, run.steps)
        assert read_run_rows(resumed.plan.get_run_dir(run.run_id)) == expected_rows
    assert interrupted.arms[COLLAPSES].started_at is not None
    assert resumed.arms[COLLAPSES].started_at == interrupted.arms[COLLAPSES].started_at


def test_a_study_that_was_moved_writes_only_where_it_lies_now(interrupted: Outcome, resumed: Outcome) -> None:
    folder = resumed.plan.folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert resumed.plan.summary_log.is_file()
    assert resumed.plan.summary_log.is_relative_to(folder)
    assert (folder / find_run_id(resumed.plan, "0") / "result.json").is_file()  # Tune's experiment moves along
    assert "training continues after step" in resumed.text
    for spec in interrupted.plan.runs:
        status = read_record(StatusRecord, interrupted.plan.get_run_dir(spec.run_id))
        assert status.status in ("interrupted", "never_ran")


# Placement on declared GPUs.


def make_gpu_plan(folder: Path, gpus_per_run: float, values: Sequence[str]) -> StudyPlan:
    plan = make_plan_in(
        folder, values, trainer__n_gpus_per_node=gpus_per_run, trainer__device="auto", trainer__total_training_steps=1
    )
    return replace(plan, study=make_study("Placed"))


def run_on_gpus(plan: StudyPlan, num_parallel: int) -> list[dict[str, Any]]:
    return run_placed(plan, ResourcePlan((), 4, ("0", "1"), (), len(plan.runs), "0xGPU"), num_parallel)


@pytest.mark.slow
def test_two_halves_share_each_gpu(tmp_path: Path) -> None:
    placements = run_on_gpus(make_gpu_plan(tmp_path, 0.5, ("0", "0.1", "0.2", "0.3")), 4)
    assert Counter(placement["visible"] for placement in placements) == {"0": 2, "1": 2}


# Refusals.


def test_settings_that_change_no_row_may_change(outcome: Outcome) -> None:
    same_runs = make_plan_in(outcome.plan.output, ARMS, trainer__save_freq=10)
    assert merge_with_folder(same_runs, extend=False).base_config.trainer.save_freq == 10
