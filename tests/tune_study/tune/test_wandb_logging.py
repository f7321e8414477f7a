from pathlib import Path
from typing import Any, NamedTuple

import pytest

from search_spaces import STUDIES
from tests.fakes.lines import append_record
from tests.fakes.run_folders import FakeAnalysis
from trainable.runs.records import make_empty_row
from trainable.runs.run_files import GRADIENTS_FILE
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.tune.run import choose_wandb_mode
from tune_study.tune.trials import make_trial_config
from tune_study.tune.wandb_logging import WandbCallback, select_loggable


class Trial(NamedTuple):
    """The part of a trial that the callback reads."""

    config: dict[str, Any]


def make_plan_in(output: Path, logger: str = "['console']") -> StudyPlan:
    return make_plan(STUDIES["kl"], "laptop", "a test", {"trainer.logger": logger}, ("0",), 1, output)


def log_one_step(callback: WandbCallback, plan: StudyPlan, finished: bool) -> None:
    trial = Trial(make_trial_config(plan, plan.runs[:1], finished))
    callback.setup()
    callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, {**make_empty_row(), "step": 1, "val_success": 0.5})
    callback.on_trial_complete(0, [], trial)


def test_trouble_ends_the_logging_and_is_told(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    callback = WandbCallback(plan, "no-such-mode")
    log_one_step(callback, plan, finished=False)
    assert not callback.close()
    assert callback.problem


def test_a_run_that_was_finished_before_is_not_logged_again(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    callback = WandbCallback(plan, "offline")
    log_one_step(callback, plan, finished=True)
    assert callback.close()
    assert list(tmp_path.iterdir()) == []


def test_a_study_that_never_started_has_nothing_to_end(tmp_path: Path) -> None:
    assert WandbCallback(make_plan_in(tmp_path), "offline").close()


def test_numbers_and_words_are_logged() -> None:
    row = {"a": 1.5, "b": 2, "c": "x", "d": None, "config": {"lr": 1}, "e": True}
    assert select_loggable(row) == {"a": 1.5, "b": 2, "c": "x", "e": True}


def test_an_analysis_is_logged_under_the_published_keys(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    run_id = plan.runs[0].run_id
    plan.get_run_dir(run_id).mkdir(parents=True)
    for fake_analysis in (FakeAnalysis(1, prefilter=True), FakeAnalysis(1, buckets=0), FakeAnalysis(51)):
        append_record(plan.get_run_dir(run_id) / GRADIENTS_FILE, fake_analysis.make_line())
    callback = WandbCallback(plan, "offline")
    step_row = {"seconds_gradient_analysis": 2.5}
    first_metrics, last_metrics = (callback._read_gradient_analysis(run_id, step, step_row) for step in (1, 51))
    assert (first_metrics["timing_s/gradient_analysis"], first_metrics["grad_analysis/empty_after_filter"]) == (2.5, 1)
    table = first_metrics["grad_norm_prefilter/bucket_2/group_rv_table"]
    assert table.columns == ["bucket", "group_id", "reward_std"]
    assert [row[0] for row in table.data] == ["bucket_2"] * 4
    norms = {row["component"]: row["norm"] for row in FakeAnalysis(51).make_line()["rows"] if row["bucket"] == "all"}
    assert last_metrics["actor/grad_norm/task"] == norms["task"]
    assert callback._read_gradient_analysis(run_id, 51, {}) == {}


@pytest.mark.long
def test_a_step_with_an_analysis_is_written_whole(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    run_id = plan.runs[0].run_id
    plan.get_run_dir(run_id).mkdir(parents=True)
    append_record(plan.get_run_dir(run_id) / GRADIENTS_FILE, FakeAnalysis(1).make_line())
    callback, trial = WandbCallback(plan, "offline"), Trial(make_trial_config(plan, plan.runs[:1], False))
    callback.setup()
    callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, {**make_empty_row(), "step": 1, "seconds_gradient_analysis": 2.5})
    callback.on_trial_complete(0, [], trial)
    assert callback.close(), callback.problem
    assert list(tmp_path.rglob("*group_rv_table*"))


def test_wandb_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert choose_wandb_mode(None, make_plan_in(tmp_path)) == "off"
    assert choose_wandb_mode(None, make_plan_in(tmp_path, "['console','wandb']")) == "offline"
    assert choose_wandb_mode("off", make_plan_in(tmp_path, "['console','wandb']")) == "off"
    assert choose_wandb_mode("online", make_plan_in(tmp_path)) == "online"


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--wandb maybe is not a mode"):
        choose_wandb_mode("maybe", make_plan_in(tmp_path))
