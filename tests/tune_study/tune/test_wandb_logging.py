import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from wandb.sdk.lib import wbauth

from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study
from tests.fakes.run_folders import FakeAnalysis
from tests.fakes.wandb_files import read_wandb_files
from trainable.config.run_config import apply_overrides
from trainable.files.paths import UnsafePathError
from trainable.runs.records import make_empty_row
from trainable.runs.run_files import GRADIENTS_FILE, METRICS_FILE
from trainable.runs.study_record import StatusRecord, WandbMode, WandbTarget
from tune_study.commands.preflight import choose_wandb
from tune_study.commands.requests import LaunchRequest
from tune_study.folder.origin import find_last_wandb
from tune_study.folder.outputs import check_study_links, write_study
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.wandb_logging import WandbLog, select_loggable


def make_plan_in(output: Path, logger: str = "['console']", mode: WandbMode = "offline") -> StudyPlan:
    plan = plan_study(output, ("0",), trainer__logger=logger)
    plan.get_run_dir(plan.runs[0].run_id).mkdir(parents=True, exist_ok=True)
    return replace(plan, wandb=WandbTarget(mode))


def write_rows(plan: StudyPlan, steps: Iterable[int]) -> None:
    path = plan.get_run_dir(plan.runs[0].run_id) / METRICS_FILE
    for step in steps:
        append_record(path, {**make_empty_row(), "step": step, "val_success": step / 10})


def end_run(log: WandbLog, plan: StudyPlan) -> None:
    """End the first run as the recorder does."""
    log.end_run(StatusRecord(plan.runs[0].run_id, "completed"))


def log_study(plan: StudyPlan, steps: Iterable[int] = ()) -> None:
    """Write rows, and log a start of the study in which its first run ends."""
    write_rows(plan, steps)
    log = WandbLog(plan)
    end_run(log, plan)
    assert log.close() == ""


def test_trouble_ends_the_logging_and_is_told(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_rows(plan, [1])
    (tmp_path / "wandb").write_text("no folder")
    log = WandbLog(plan)
    end_run(log, plan)
    assert log.close()


@pytest.mark.long
def test_each_step_is_there_once_whatever_an_earlier_start_wrote(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    run_id = plan.runs[0].run_id
    log_study(plan, range(4))
    assert read_wandb_files(tmp_path)[run_id].steps == [0, 1, 2, 3]
    # A run that goes back to a checkpoint writes steps again, and the study ends with words on the run.
    write_rows(plan, range(2, 8))
    second = WandbLog(plan)
    end_run(second, plan)
    second.conclude({run_id: {"status": "completed", "verdict": "worse"}})
    assert second.close() == ""
    file = read_wandb_files(tmp_path)[run_id]
    assert file.steps == list(range(8))
    assert [row["val_success"] for row in file.rows] == [step / 10 for step in range(8)]
    assert (file.summary["verdict"], file.run.job_type) == ("worse", "0")


def test_a_run_that_never_ran_is_not_in_wandb(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    log = WandbLog(plan)
    log.conclude({plan.runs[0].run_id: {"status": "never_ran", "reason": "has not started"}})
    assert log.close() == ""
    assert not (tmp_path / "wandb").exists()


def test_a_folder_that_is_no_run_of_the_study_ends_no_logging(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_rows(plan, [1])
    log = WandbLog(plan)
    log.conclude({"copy-of-it": {"status": "completed"}, plan.runs[0].run_id: {"status": "completed"}})
    assert log.close() == ""
    assert list(read_wandb_files(tmp_path)) == [plan.runs[0].run_id]


def test_a_link_in_the_place_of_the_folder_of_wandb_is_refused(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (tmp_path / "wandb").symlink_to(elsewhere)
    with pytest.raises(UnsafePathError, match="is a symbolic link"):
        check_study_links(plan)


def test_two_studies_in_one_folder_have_runs_of_their_own(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    other = replace(plan, run="another", folder=plan.folder.with_name("another"))
    for one in (plan, other):
        one.get_run_dir(one.runs[0].run_id).mkdir(parents=True, exist_ok=True)
        log_study(one, [1])
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2


def test_a_study_that_is_made_longer_continues_its_runs(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    spec = plan.runs[0]
    longer_config = apply_overrides(spec.config, {"trainer.total_training_steps": 99})
    longer = replace(plan, runs=(replace(spec, config=longer_config),))
    for one, steps in ((plan, [1]), (longer, [2])):
        log_study(one, steps)
    assert read_wandb_files(tmp_path)[spec.run_id].steps == [1, 2]


def test_ray_is_not_imported_before_its_environment_is_prepared() -> None:
    # Ray reads whether it may listen to other machines when it is imported.
    code = (
        "import sys; from pathlib import Path; from search_spaces.catalog import STUDIES\n"
        "from tune_study.plan.study_plan import WandbTarget, make_plan\n"
        "from dataclasses import replace; from tune_study.tune.wandb_logging import WandbLog\n"
        "plan = make_plan(STUDIES['kl'], 'laptop', 'a test', {}, ('0',), 1, Path('out'))\n"
        "log = WandbLog(replace(plan, wandb=WandbTarget('offline'))); log.close()\n"
        "assert 'ray' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == ""


def test_numbers_and_words_are_logged() -> None:
    row = {"a": 1.5, "b": 2, "c": "x", "d": None, "config": {"lr": 1}, "e": True}
    assert select_loggable(row) == {"a": 1.5, "b": 2, "c": "x", "e": True}


def test_an_analysis_is_logged_under_the_published_keys(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    run_id = plan.runs[0].run_id
    for fake_analysis in (FakeAnalysis(1, prefilter=True), FakeAnalysis(1, buckets=0), FakeAnalysis(51)):
        append_record(plan.get_run_dir(run_id) / GRADIENTS_FILE, fake_analysis.make_line())
    log = WandbLog(plan)
    step_row = {"seconds_gradient_analysis": 2.5}
    first_metrics, last_metrics = (log._read_gradient_analysis(run_id, step, step_row) for step in (1, 51))
    assert (first_metrics["timing_s/gradient_analysis"], first_metrics["grad_analysis/empty_after_filter"]) == (2.5, 1)
    table = first_metrics["grad_norm_prefilter/bucket_2/group_rv_table"]
    assert table.columns == ["bucket", "group_id", "reward_std"]
    assert [row[0] for row in table.data] == ["bucket_2"] * 4
    norms = {row["component"]: row["norm"] for row in FakeAnalysis(51).make_line()["rows"] if row["bucket"] == "all"}
    assert last_metrics["actor/grad_norm/task"] == norms["task"]
    assert log._read_gradient_analysis(run_id, 51, {}) == {}


def choose(plan: StudyPlan, mode: str | None = None, project: str | None = None) -> WandbTarget:
    return choose_wandb(LaunchRequest(wandb=mode, wandb_project=project), plan)


def test_wandb_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert choose(make_plan_in(tmp_path)) == WandbTarget("off")
    assert choose(make_plan_in(tmp_path, "['console','wandb']")).mode == "offline"
    assert choose(make_plan_in(tmp_path, "['console','wandb']"), "off") == WandbTarget("off")


def test_the_mode_and_project_of_the_last_start_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan_in(tmp_path)
    declared = plan.wandb_project
    write_study(replace(plan, wandb=choose(plan, "offline")))
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_PROJECT", "of-the-shell")
        assert choose(plan) == WandbTarget("offline", declared)  # or rows of one study would be in two projects
    write_study(replace(plan, wandb=WandbTarget("offline", "ours")))
    assert choose(plan) == WandbTarget("offline", "ours")
    assert choose(plan, project="others") == WandbTarget("offline", "others")
    assert choose(plan, "off") == WandbTarget("off")
    # The environment stands behind what the study was started with.
    monkeypatch.setenv("WANDB_PROJECT", "of-the-shell")
    assert choose(plan).project == "ours"
    write_study(replace(plan, wandb=WandbTarget("off")))
    assert choose(plan, "offline").project == "of-the-shell"


def test_a_folder_of_somebody_else_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan_in(tmp_path)
    write_study(replace(plan, wandb=WandbTarget("online", "ours")))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert choose(plan) == WandbTarget("online", "ours")
    assert find_last_wandb(plan.folder) == (WandbTarget("online", "ours"), "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert choose(plan) == WandbTarget("off")
    assert "type that to log it from here" in find_last_wandb(plan.folder)[1]


def test_a_missing_key_is_known_before_the_study_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wbauth.unauthenticate_session()  # another test of this process may have logged in
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(PlanError, match="--wandb online needs a login, and W&B says: no key is configured"):
        choose(make_plan_in(tmp_path), "online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(PlanError, match="API key must have 40"):
        choose(make_plan_in(tmp_path), "online")


def test_what_wandb_does_not_take_is_refused(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    with pytest.raises(PlanError, match="a/b is no project of W&B"):
        choose(plan, "offline", "a/b")
    with pytest.raises(PlanError, match="--wandb-project names a project of W&B, which is off"):
        choose(plan, project="ours")
