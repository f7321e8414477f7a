import errno
import os
import re
import resource
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import pytest

from search_spaces.catalog import STUDIES
from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study
from trainable.config.constants import SHIPPED_MODEL, SHIPPED_MODELS
from trainable.files.json_values import read_object, write_object
from trainable.runs.history import RunHistory, find_contradiction
from trainable.runs.records import STATUSES
from trainable.runs.run_files import acquire_lock, is_locked
from trainable.runs.study_record import ENDED_STATUSES, StatusRecord, find_record, read_record, write_record
from tune_study.folder.outputs import check_writable, lock_folder, read_git_state, write_study
from tune_study.folder.statuses import (
    DEFAULT_SKIPPED,
    StudyStatuses,
    format_run_times,
    format_summary_line,
    make_timestamp,
    parse_skipped_statuses,
    write_summary,
)
from tune_study.folder.study_file import check_unchanged, plan_from_folder
from tune_study.placement.model_files import check_model, find_hub_cache, make_absolute
from tune_study.placement.resources import preflight
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan, make_base_config


def make_plan_in(output: Path, values: tuple[str, ...] = ("0", "0.1"), seeds: int = 1, study: str = "kl") -> StudyPlan:
    return plan_study(output, values, seeds, study=study, preset="paper", trainer__n_gpus_per_node=0)


def allocate_resources(plan: StudyPlan) -> ResourcePlan:
    return preflight(plan, None, (), 2, None, is_real=True)._replace(gpu_label="1xH100")


def make_ended_status(run_id: str, status: str = "completed", **fields: object) -> StatusRecord:
    times = {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T01:00:05+00:00"}
    return StatusRecord(run_id, status, **{**times, **fields})


@pytest.mark.parametrize("field", ["started_at", "ended_at"])
@pytest.mark.parametrize("time", ["2026-01-01T00:00:00", "yesterday", ""])
def test_a_status_with_a_time_that_is_none_counts_as_damaged(tmp_path: Path, field: str, time: str) -> None:
    write_object(tmp_path / "status.json", {**asdict(make_ended_status("a")), field: time})
    assert find_record(StatusRecord, tmp_path) is None


def test_a_failure_is_read_from_the_rows_without_a_status(tmp_path: Path) -> None:
    rows = [{"step": 1}, {"step": 2, "failure": "the loss is nan"}]
    for row in rows:
        append_record(tmp_path / "metrics.jsonl", row)
    status = RunHistory.read(tmp_path, 2).status
    assert (status.display_text, status.reason) == ("failed (non-finite)", "the loss is nan")
    write_record(tmp_path, StatusRecord("a", "completed"))
    assert RunHistory.read(tmp_path, 2).status.reason == "recorded as completed, but the loss is nan"


def test_every_run_has_a_status_before_and_after(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, values=("0", "0.1", "0.2"))
    write_study(plan)
    run_dirs = [plan.get_run_dir(run.run_id) for run in plan.runs]
    assert {read_record(StatusRecord, run_dir).status for run_dir in run_dirs} == {"never_ran"}
    statuses = StudyStatuses(plan)
    assert {read_record(StatusRecord, run_dir).status for run_dir in run_dirs} == {"waiting"}
    statuses.set(make_ended_status(plan.runs[0].run_id))
    statuses.set(StatusRecord(plan.runs[1].run_id, "running", started_at=make_timestamp()))
    append_record(run_dirs[1] / "metrics.jsonl", {"step": 0})  # written after the first evaluation, before training
    assert statuses.close("the study was interrupted") == ""
    ends = [read_record(StatusRecord, run_dir) for run_dir in run_dirs]
    assert [status.status for status in ends] == ["completed", "interrupted", "never_ran"]
    assert ends[1].reason == "the study was interrupted, after step 0"
    assert ends[2].reason == "the study was interrupted before it started"


EARLIER_STATUSES = (
    StatusRecord(
        "", "failed", "OSError: the disk is full", failure_class="storage", ended_at="2026-01-01T00:00:00+00:00"
    ),
    StatusRecord("", "interrupted", "interrupted after step 3", ended_at="2026-01-01T00:00:00+00:00"),
)


@pytest.mark.parametrize("earlier_status", EARLIER_STATUSES)
def test_a_run_that_waited_in_vain_has_its_earlier_status_again(tmp_path: Path, earlier_status: StatusRecord) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    spec = plan.runs[0]
    run_dir, status = plan.get_run_dir(spec.run_id), replace(earlier_status, run_id=spec.run_id)
    write_record(run_dir, status)
    append_record(run_dir / "metrics.jsonl", {"step": 3})
    statuses = StudyStatuses(plan)
    waiting_status = RunHistory.read(run_dir, spec.steps, is_live=True).status
    assert (waiting_status.display_text, waiting_status.reason) == ("waiting", status.reason)
    assert RunHistory.read(run_dir, spec.steps).status == status  # the driver was killed
    assert statuses.close("the study was interrupted") == ""
    assert find_record(StatusRecord, run_dir) == status


@pytest.mark.parametrize(("trial_id", "expected"), [("t1", "interrupted"), ("", "running")])
def test_only_a_run_without_a_trial_is_running_without_a_driver(tmp_path: Path, trial_id: str, expected: str) -> None:
    write_record(tmp_path, StatusRecord(tmp_path.name, "running", trial_id=trial_id))
    append_record(tmp_path / "metrics.jsonl", {"step": 3})
    with closing(acquire_lock(tmp_path, 0)):
        assert RunHistory.read(tmp_path, 9).status.status == expected
    assert RunHistory.read(tmp_path, 9).status.status == "interrupted"


def test_a_skipped_run_does_not_wait(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    spec = plan.runs[0]
    write_record(plan.get_run_dir(spec.run_id), StatusRecord(spec.run_id, "failed", "OSError", "storage"))
    assert StudyStatuses(plan, ("failed",)).get(spec.run_id).display_text == "failed (storage)"


@pytest.mark.parametrize("damage", [b"", b'{"run_id": "other", "status": "never_ran"}'])
def test_a_deleted_or_damaged_status_is_written_again_at_the_end(tmp_path: Path, damage: bytes) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    statuses = StudyStatuses(plan)
    path = plan.get_run_dir(plan.runs[0].run_id) / "status.json"
    running_status = StatusRecord(plan.runs[0].run_id, "running", trial_id="one", started_at=make_timestamp())
    statuses.set(running_status)
    path.unlink()
    if damage:
        path.write_bytes(damage)
    assert statuses.get(running_status.run_id) == running_status
    assert statuses.close("the study was interrupted") == ""
    status = read_record(StatusRecord, path.parent)
    assert (status.status, status.started_at) == ("never_ran", running_status.started_at)


def test_a_status_that_cannot_be_written_is_kept_and_named(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    statuses, path = StudyStatuses(plan), plan.get_run_dir(plan.runs[0].run_id) / "status.json"
    path.unlink()
    path.mkdir()  # a folder refuses the file as a full disk does, also for root
    ended_status = make_ended_status(plan.runs[0].run_id)
    statuses.set(ended_status)
    assert statuses.close("the study was interrupted").startswith("The statuses could not be written: ")
    assert statuses.get(ended_status.run_id) == ended_status
    path.rmdir()
    assert statuses.close("the study was interrupted") == ""
    assert find_record(StatusRecord, path.parent) == ended_status


def test_a_study_file_gives_the_plan_again(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, ("1.0", "nofilter"), 2, "top-p")
    write_study(plan)
    assert plan_from_folder(plan.folder) == plan
    assert plan_from_folder(plan.folder / ".." / plan.run) == plan


def test_a_study_file_has_the_steps_of_its_preset(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, None, trainer__total_training_steps=3)
    path = plan.folder / "study.json"
    write_study(plan)
    entry = read_object(path)
    assert (entry["preset_steps"], entry["settings"]["trainer"]["total_training_steps"]) == (60, 3)
    # Those of the first start stay, and a folder of an earlier version gets none.
    for steps in (20, None):
        entry.pop("checksum", None)
        write_object(path, {**entry, "preset_steps": steps})
        write_study(plan)
        assert read_object(path)["preset_steps"] == steps


def test_a_study_file_keeps_its_date_and_command_while_its_runs_are_the_same(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    path = plan.folder / "study.json"
    changed_study = {**read_object(path), "created_at": "2026-01-01T00:00:00+00:00", "command": "as typed"}
    write_object(path, changed_study)
    write_study(plan)
    assert read_object(path)["command"] == "as typed"
    write_study(make_plan_in(tmp_path, seeds=2))
    reloaded_study = read_object(path)
    assert reloaded_study["command"] != "as typed"
    assert reloaded_study["created_at"] == "2026-01-01T00:00:00+00:00"
    assert datetime.fromisoformat(reloaded_study["created_at"]).tzinfo is not None


def test_a_study_file_keeps_every_start_and_what_changed_between_two(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    assert write_study(plan) == []
    path = plan.folder / "study.json"
    first_study = read_object(path)
    assert [start["versions"] for start in first_study["starts"]] == [first_study["versions"]]
    older_start = {
        **first_study["starts"][0],
        "versions": {**first_study["versions"], "torch": "2.0.0"},
        "git": {"commit": "abc", "dirty": False},
    }
    write_object(
        path, {**first_study, "starts": [older_start], "versions": older_start["versions"], "git": older_start["git"]}
    )
    changes = write_study(plan)
    assert f"torch: 2.0.0 -> {first_study['versions']['torch']}" in changes
    assert any(change.startswith("commit: abc -> ") for change in changes)
    reloaded_study = read_object(path)
    assert len(reloaded_study["starts"]) == 2
    assert reloaded_study["versions"]["torch"] == "2.0.0"  # the versions of the first start
    assert write_study(plan) == []  # nothing has changed since the last start


def test_a_study_that_is_declared_otherwise_now_is_not_gone_on_with(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    check_unchanged(plan_from_folder(plan.folder))
    path = plan.get_run_dir(plan.runs[1].run_id) / "run.json"
    run = read_object(path)
    run["config"]["actor"]["kl_loss_type"] = "mse"
    write_object(path, run)
    with pytest.raises(PlanError, match=r"has changed since(.|\n)*kl_loss_type: mse -> "):
        check_unchanged(plan_from_folder(plan.folder))


def test_a_glance_at_the_lock_does_not_refuse_a_start(tmp_path: Path) -> None:
    def check_lock() -> None:
        for _ in range(2000):
            is_locked(tmp_path)

    watcher = threading.Thread(target=check_lock)
    watcher.start()
    for _ in range(200):
        with lock_folder(tmp_path):
            pass
    watcher.join()


@pytest.mark.parametrize("damage", [{"name": "unknown"}, {"settings": {"actor": {"lr": -1}}}, {"seeds": None}])
def test_a_study_file_that_cannot_be_read_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    path = plan.folder / "study.json"
    write_object(path, {**read_object(path), **damage})
    with pytest.raises(PlanError, match=str(plan.folder)):
        plan_from_folder(plan.folder)


def test_a_study_that_was_moved_on_its_own_contains_all_its_files(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path / "a")
    write_study(plan)
    for moved_folder in (plan.folder.with_name("renamed"), tmp_path / "results" / "other", tmp_path / plan.run):
        shutil.copytree(plan.folder, moved_folder)
        moved_plan = plan_from_folder(moved_folder)
        assert moved_plan == replace(plan, folder=moved_folder)
        assert moved_plan.output == moved_folder
        assert moved_folder in moved_plan.summary_log.parents
    # The same layout elsewhere: logs and saved checkpoints are expected beside results/.
    (tmp_path / "b").mkdir()
    shutil.copytree(plan.folder, tmp_path / "b" / "results" / plan.run)
    assert plan_from_folder(tmp_path / "b" / "results" / plan.run).output == tmp_path / "b"


def test_copies_of_a_study_are_run_independently(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_study(plan)
    with lock_folder(plan.folder):
        shutil.copytree(plan.folder, tmp_path / "copy")
        with lock_folder(tmp_path / "copy"):
            assert is_locked(plan.folder)
        assert not is_locked(tmp_path / "copy")
        # A folder that is renamed while its study runs keeps its lock.
        plan.folder.rename(tmp_path / "renamed")
        assert is_locked(tmp_path / "renamed")


def test_a_model_of_another_machine_is_named_with_a_link_to_it(tmp_path: Path) -> None:
    path = tmp_path / "big disk" / "Qwen"
    with pytest.raises(PlanError) as raised:
        check_model(str(path), {})
    command = f"mkdir -p '{path.parent}' && ln -s FOLDER '{path}'"
    assert f"The model folder {path} does not exist on this machine" in str(raised.value)
    assert f"`{command}`" in str(raised.value)
    subprocess.run(
        ["bash", "-c", command.replace("FOLDER", shlex.quote(str(SHIPPED_MODELS[SHIPPED_MODEL].folder)))], check=True
    )
    check_model(str(path), {})


@contextmanager
def limit_file_size(n_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond this size inside the block."""
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)


def test_a_file_is_tried_in_the_output_and_nothing_stays(tmp_path: Path) -> None:
    check_writable(tmp_path)
    check_writable(tmp_path / "new" / "folder")
    too_large = re.escape(
        f"{tmp_path / 'new'} cannot be written ({tmp_path}: {os.strerror(errno.EFBIG)}): type another"
    )
    with limit_file_size(2**12), pytest.raises(PlanError, match=too_large):
        check_writable(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for output, place in (("taken/below", "taken"), ("dangling", "dangling"), ("/proc/no-such-folder", "/proc")):
        with pytest.raises(PlanError, match=re.escape(f"({tmp_path / place}: ")):
            check_writable(tmp_path / output)


def test_the_state_of_the_sources_is_known_where_they_are_kept(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    (tmp_path / "code.py").write_text("")
    assert read_git_state(tmp_path) is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "nothing")
    assert read_git_state(tmp_path) is None
    git("add", "code.py")
    git("commit", "-q", "-m", "code")
    state = read_git_state(tmp_path)
    assert (len(state.commit), state.dirty) == (40, False)
    (tmp_path / "rows.jsonl").write_text("{}")  # results of studies in the checkout change no code
    assert read_git_state(tmp_path) == state
    (tmp_path / "code.py").write_text("x = 1")
    assert read_git_state(tmp_path) == replace(state, dirty=True)


# The summary log.

ROWS = [
    {"step": 1, "seconds_total": 10.0, "seconds_validation": 2.5},
    {"step": 2, "seconds_total": 18.126, "seconds_validation": None},
    {"step": 3, "seconds_total": 30.0, "seconds_validation": 4.0},
]


def test_times_add_up() -> None:
    collapse_times = [{"seconds_collapse_first_turn": 1.5}, {"seconds_collapse_multi_turn": 2.0}, {}]
    rows = [{**row, **collapse_time} for row, collapse_time in zip(ROWS, collapse_times, strict=True)]
    failure = {"step": 4, "failure": "not finite"}  # which has no times
    phases = ("train", "eval", "total")
    assert format_run_times([*ROWS, failure], phases) == ["train_time=23.50s", "eval_time=6.50s", "total_time=30.00s"]
    assert format_run_times([], phases) == [f"{phase}_time=N/A" for phase in phases]
    phases = ("train", "collapse", "collapse_first", "collapse_multi")
    times = [
        f"{phase}_time={seconds}s" for phase, seconds in zip(phases, ("20.00", "3.50", "1.50", "2.00"), strict=True)
    ]
    assert format_run_times(rows, phases) == times


def test_a_summary_line_has_the_published_fields_of_its_study(tmp_path: Path) -> None:
    times = "train_time=N/A | eval_time=N/A | total_time=N/A | wall_time=3605s | gpu=1xH100"
    kl, entropy = make_plan_in(tmp_path), make_plan_in(tmp_path, study="entropy")
    top_p = make_plan_in(tmp_path, ("0.9", "nofilter"), study="top-p")
    assert format_summary_line(kl, kl.runs[1], make_ended_status("a"), "1xH100") == (
        f"kl=0.1 | filter=nofilter | include_zero=True | {times} | status=success | seed=0 | early_stop=none"
    )
    assert format_summary_line(entropy, entropy.runs[0], make_ended_status("a"), "1xH100").startswith(
        "entropy=0 | filter=nofilter | inc"
    )
    assert format_summary_line(top_p, top_p.runs[0], make_ended_status("a"), "1xH100") == (
        f"value=0.9 | include_zero=False | filter_value=0.9 | {times} | status=success | seed=0 | early_stop=none"
    )
    assert "include_zero=True | filter_value=1.0 |" in format_summary_line(
        top_p, top_p.runs[1], make_ended_status("a"), "1xH100"
    )


@pytest.mark.parametrize(
    ("status", "published"),
    [("completed", "success"), ("early_stopped", "success"), ("failed", "fail"), ("interrupted", "interrupted")],
)
def test_published_words_for_how_a_run_ended(tmp_path: Path, status: str, published: str) -> None:
    plan = make_plan_in(tmp_path)
    line = format_summary_line(plan, plan.runs[0], make_ended_status("a", status, reason="ValueError: no"), "1xH100")
    assert f" | status={published} | " in line
    assert line.endswith("\n  error: ValueError: no") == (status == "failed")


def test_the_summary_lists_ended_runs_as_they_ended_and_then_all(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, values=("0", "0.1", "0.2"))
    first, second, third = (spec.run_id for spec in plan.runs)
    statuses = [
        make_ended_status(first, ended_at="2026-01-01T03:00:00+00:00"),
        StatusRecord(second, "never_ran"),
        make_ended_status(third, ended_at="2026-01-01T02:00:00+00:00"),
    ]
    write_summary(plan, allocate_resources(plan), statuses)
    text, closing_text = plan.summary_log.read_text().split("\n\n")
    lines = text.splitlines()
    assert lines[0].startswith("=== KL Sweep Runner (Qwen2.5-3B): ")
    assert lines[1] == "Values: 0,0.1,0.2 | Steps: 400 | GPUs per exp: 1xH100"
    # What Ray gets on this machine, not the setting.
    assert lines[2] == f"Groups: none | ray_num_cpus: {allocate_resources(plan).cpus} | save_freq: -1"
    assert [line.split(" | ")[0] for line in lines[3:]] == ["kl=0.2", "kl=0"]
    block = closing_text.splitlines()
    assert block[:2] == [
        "=== KL Sweep Summary ===",
        "Project: ragen_release_kl_sweep | Steps: 400 | GPU per exp: 1xH100",
    ]
    assert [line.split(" | ")[0] for line in block[2:-1]] == ["kl=0", "kl=0.1", "kl=0.2"]
    assert block[-1] == "Total: 3 | Success: 2 | Failed: 0 | Early stopped: 0 | Not ended: 1"
    assert block[3] == "kl=0.1 | status=missing | seed=0"


def list_finished(plan: StudyPlan, skipped: str = DEFAULT_SKIPPED) -> list[str]:
    """Record a status for each run, and list those of the runs that are not run again."""
    for run, status in zip(plan.runs, STATUSES, strict=True):
        write_record(plan.get_run_dir(run.run_id), StatusRecord(run.run_id, status))
    return [status.status for status in StudyStatuses(plan, parse_skipped_statuses(skipped)).finished.values()]


def test_only_runs_that_ended_well_are_finished(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, values=("0", "0.1", "0.2", "0.3", "0.4", "0.5"))
    # Without rows, no run has ended well; a censored one may have none.
    assert list_finished(plan) == ["censored"]
    append_record(plan.get_run_dir(plan.runs[0].run_id) / "metrics.jsonl", {"step": plan.runs[0].steps})
    append_record(plan.get_run_dir(plan.runs[1].run_id) / "metrics.jsonl", {"step": 2, "stop_rule": "a rule"})
    append_record(plan.get_run_dir(plan.runs[2].run_id) / "metrics.jsonl", {"step": 2})
    assert list_finished(plan) == ["completed", "early_stopped", "censored"]
    assert list_finished(plan, "completed,early_stopped, failed") == [*ENDED_STATUSES, "failed"]


def test_a_censored_run_is_one_that_its_rows_show_as_interrupted() -> None:
    assert not find_contradiction("censored", [{"step": 5}], 10, [])
    assert "trained 10 of 10" in find_contradiction("censored", [{"step": 10}], 10, [])
    assert not find_contradiction("censored", [], 10, [])  # a run of a censored point that has not started


@pytest.mark.parametrize("text", ["completed", "completed,early_stopped,running", "failed"])
def test_runs_that_have_ended_are_never_trained_again(text: str) -> None:
    with pytest.raises(PlanError, match="type completed,early_stopped, followed by failed or interrupted"):
        parse_skipped_statuses(text)


def test_a_line_of_the_grid_has_the_published_form(tmp_path: Path) -> None:
    study = STUDIES["smoke"]
    values = (
        "g5-smoke-ppo-sokoban-nofilter-kl0003-ent001-low_var_kl",
        "g2-smoke-ppo-sokoban-topk80-kl0-ent003-low_var_kl",
    )
    plan = plan_study(tmp_path, values, study=study, preset="paper")
    status = make_ended_status("a", "early_stopped", stop_rule="low_validation_success", stop_step=50)
    times = "train_time=N/A | eval_time=N/A | collapse_time=N/A | collapse_first_time=N/A | collapse_multi_time=N/A"
    end = f"{times} | total_time=N/A | wall_time=3605s | gpu=1xH100 | status=success | seed=0"
    cell = "collapse=first:true,multi:true,samples:64"
    assert format_summary_line(plan, plan.runs[0], status, "1xH100") == (
        f"{values[0]}-ftmt | filter=1 | kl=0.003 | entropy=0.01 | {cell} | {end} | early_stop=low_validation_success@50"
    )
    assert format_summary_line(plan, plan.runs[1], make_ended_status("b"), "1xH100") == (
        f"{values[1]}-ftmt | filter=0.8 | kl=0 | entropy=0.03 | {cell} | {end} | early_stop=none"
    )


# Models.


def test_where_the_hub_cache_is() -> None:
    assert find_hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert find_hub_cache({"HF_HOME": "/b", "HOME": "/h"}) == Path("/b/hub")
    assert find_hub_cache({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/huggingface/hub")
    assert find_hub_cache({"HOME": "/h"}) == Path("/h/.cache/huggingface/hub")


def test_the_shipped_model_and_a_folder_are_models(work_dir: Path) -> None:
    (work_dir / "mine").mkdir()
    (work_dir / "mine" / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    (work_dir / "mine" / "model-00001-of-00002.safetensors").touch()
    (work_dir / "mine" / "tokenizer.json").touch()
    check_model("sokoban-tiny", {})
    check_model(str(work_dir / "mine"), {})
    assert make_absolute("mine") == str(work_dir / "mine")
    assert make_absolute("Qwen/Qwen2.5-3B") == "Qwen/Qwen2.5-3B"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}", "no architecture"),
        ("[]", "cannot be read"),
        ('{"architectures": ["Qwen2ForCausalLM"]}', r"no \*.safetensors and no tokenizer.json"),
    ],
)
def test_a_folder_that_the_engine_cannot_run_is_refused(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(PlanError, match=message):
        check_model(str(tmp_path), {})


SMALL_MODEL = make_base_config(STUDIES["kl"], "small").model.path


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-3B", "../up", "no*such", SMALL_MODEL])
def test_what_was_not_fetched_is_no_model(tmp_path: Path, path: str) -> None:
    with pytest.raises(PlanError, match="was not found") as caught:
        check_model(path, {"HF_HUB_CACHE": str(tmp_path)})
    assert ("smollm2` makes this model" in str(caught.value)) == (path == SMALL_MODEL)


def test_outcomes_margins_and_planned_seeds_are_those_before_the_first_run(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, seeds=2)
    write_study(plan)
    entry = read_object(plan.folder / "study.json")
    assert entry["outcomes"][0] == "late_val_success"
    assert entry["margins"]["late_val_success"] == 0.05
    assert entry["planned_seeds"] == 2
    # A study that is extended after a look keeps what was declared.
    extended_plan = replace(
        make_plan_in(tmp_path, seeds=5), study=replace(plan.study, margins={"late_val_success": 0.2})
    )
    write_study(extended_plan)
    entry = read_object(plan.folder / "study.json")
    assert len(entry["seeds"]) == 5
    assert entry["planned_seeds"] == 2
    assert entry["margins"]["late_val_success"] == 0.05


def test_a_study_declares_its_own_margin(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    write_study(replace(plan, study=replace(plan.study, margins={"late_val_success": 0.02})))
    margins = read_object(plan.folder / "study.json")["margins"]
    assert (margins["late_val_success"], margins["test_success"]) == (0.02, 0.05)
