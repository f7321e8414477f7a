from pathlib import Path
from typing import Any, NamedTuple

import pytest

from analysis.gradients import published_of_step
from search_spaces import STUDIES
from trainable.records import empty_row
from trainable.run_files import append_line
from tune_study.plan import PlanError, StudyPlan, make_plan
from tune_study.run import choose_wandb
from tune_study.wandb_logging import WandbRuns, loggable


class Carrier(NamedTuple):
    """What the callback reads of a trial."""

    config: dict[str, Any]


def plan_in(output: Path, logger: str = "['console']") -> StudyPlan:
    return make_plan(STUDIES["kl"], "laptop", "a test", {"trainer.logger": logger}, ("0",), 1, output)


def feed(runs: WandbRuns, plan: StudyPlan, finished: bool) -> None:
    trial = Carrier({"run_id": plan.runs[0].run_id, "finished": finished})
    runs.setup()
    runs.on_trial_start(0, [], trial)
    runs.on_trial_result(0, [], trial, {**empty_row(), "step": 1, "val_success": 0.5})
    runs.on_trial_complete(0, [], trial)


def test_trouble_ends_the_logging_and_is_told(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    runs = WandbRuns(plan, "no-such-mode")
    feed(runs, plan, finished=False)
    assert not runs.close()
    assert runs.problem


def test_a_run_that_was_finished_before_is_not_logged_again(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    runs = WandbRuns(plan, "offline")
    feed(runs, plan, finished=True)
    assert runs.close()
    assert list(tmp_path.iterdir()) == []


def test_a_study_that_never_started_has_nothing_to_end(tmp_path: Path) -> None:
    assert WandbRuns(plan_in(tmp_path), "offline").close()


def test_numbers_and_words_are_logged() -> None:
    row = {"a": 1.5, "b": 2, "c": "x", "d": None, "config": {"lr": 1}, "e": True}
    assert loggable(row) == {"a": 1.5, "b": 2, "c": "x", "e": True}


def test_an_analysis_is_logged_under_the_published_keys(tmp_path: Path) -> None:
    path = tmp_path / "gradients.jsonl"
    assert published_of_step(path, 1) == {}
    row = {"bucket": "all", "component": "task", "uses_training_batch": False, "norm": 2.0, "sample_count": 4}
    for step, prefilter, norm in ((1, True, 2.0), (1, False, 3.0), (51, False, 5.0)):
        line = {"step": step, "source": "train", "prefilter": prefilter, "rows": [{**row, "norm": norm}], "groups": []}
        append_line(path, line)
    found = published_of_step(path, 1)
    assert (found["grad_norm/all/task"], found["grad_norm_prefilter/all/task"]) == (3.0, 2.0)
    assert found["actor/grad_norm/task"] == 3.0
    assert published_of_step(path, 51)["grad_norm/all/task"] == 5.0
    assert published_of_step(path, 2) == {}


def test_wandb_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert choose_wandb(None, plan_in(tmp_path)) == "off"
    assert choose_wandb(None, plan_in(tmp_path, "['console','wandb']")) == "offline"
    assert choose_wandb("off", plan_in(tmp_path, "['console','wandb']")) == "off"
    assert choose_wandb("online", plan_in(tmp_path)) == "online"


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--wandb maybe is no mode"):
        choose_wandb("maybe", plan_in(tmp_path))
