"""What the driver records of a trial with several runs when its process dies or is interrupted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.cloudpickle
from ray.exceptions import RayActorError

from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study
from tests.fakes.sessions import make_session
from trainable.runs.run_files import METRICS_FILE
from trainable.runs.study_record import StatusRecord, read_record
from tune_study.folder.outputs import write_study
from tune_study.host.interrupt import make_interrupt
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune import callbacks
from tune_study.tune.callbacks import MAX_ATTEMPTS, DiskSpaceGuard, Recorder
from tune_study.tune.trials import make_trial_configs

STOPPED = {"step": 2, "stop_rule": "uniform_groups", "stop_value": 3.0, "stop_threshold": 3.0, "stop_step": 2}


class RecordedTrial:
    """A running trial of two runs, and its files on disk."""

    def __init__(self, folder: Path) -> None:
        self.plan: StudyPlan = plan_study(folder, ("GRPO",), 2, study="influence")
        write_study(self.plan)
        session = make_session(self.plan)
        self.recorder = Recorder(session)
        (config,) = make_trial_configs(self.plan, {}, session.interrupt)
        self.trial = SimpleNamespace(
            config=config,
            trial_id="one",
            local_path=str(self.plan.folder / "trial"),
            pickled_error_file=None,
            run_metadata=SimpleNamespace(metric_n_steps={}, invalidate_cache=lambda: None),
        )
        self.recorder.on_trial_start(0, [], self.trial)

    def write_row(self, seed: int, row: dict[str, Any]) -> None:
        append_record(self.plan.get_run_dir(self.plan.runs[seed].run_id) / METRICS_FILE, row)

    def report_rows(self, rows: dict[int, dict[str, Any]]) -> None:
        rows_by_run = {self.plan.runs[seed].run_id: row for seed, row in rows.items()}
        self.recorder.on_trial_result(0, [], self.trial, {"rows": rows_by_run, "failed": {}})

    def restart_after_death(self) -> None:
        self.recorder.on_trial_recover(0, [], self.trial)
        self.recorder.on_trial_start(0, [], self.trial)

    def get_status(self, seed: int) -> StatusRecord:
        return read_record(StatusRecord, self.plan.get_run_dir(self.plan.runs[seed].run_id))

    def read_log(self, seed: int) -> str:
        return (self.plan.output / self.plan.runs[seed].log_path).read_text()


@pytest.fixture
def recorded_trial(tmp_path: Path) -> RecordedTrial:
    return RecordedTrial(tmp_path)


def test_a_run_that_ends_before_the_others_ends_once(recorded_trial: RecordedTrial) -> None:
    recorded_trial.write_row(0, STOPPED)
    recorded_trial.report_rows({0: STOPPED})
    status, log = recorded_trial.get_status(0), recorded_trial.read_log(0)
    assert (status.status, status.stop_step) == ("early_stopped", 2)
    recorded_trial.restart_after_death()
    recorded_trial.report_rows({0: STOPPED})  # a trial whose runs had ended reports all of them again
    assert (recorded_trial.get_status(0), recorded_trial.read_log(0)) == (status, log)
    assert log.count("early_stopped") == 1
    assert recorded_trial.get_status(1).status == "running"


def test_the_log_of_a_run_that_cannot_learn_says_so_after_step_1(recorded_trial: RecordedTrial) -> None:
    empty = {"groups": 8, "zero_std_groups": 8, "groups_kept": 0}
    recorded_trial.report_rows({0: {"step": 1, **empty}, 1: {"step": 1, "groups": 8}})
    recorded_trial.report_rows({0: {"step": 2, **empty}, 1: {"step": 2, **empty}})
    clause = "=== at step 1, every group had equal scores, so the rewards taught nothing ==="
    assert [recorded_trial.read_log(seed).count(clause) for seed in (0, 1)] == [1, 0]
    assert "taught nothing" not in recorded_trial.read_log(1)


def test_a_rule_that_nobody_was_told_of_is_read_from_the_row(recorded_trial: RecordedTrial) -> None:
    recorded_trial.write_row(0, STOPPED)
    recorded_trial.restart_after_death()
    recorded_trial.write_row(1, {"step": 300})
    recorded_trial.report_rows({1: {"step": 300}})
    recorded_trial.recorder.on_trial_complete(0, [], recorded_trial.trial)
    assert [recorded_trial.get_status(seed).status for seed in (0, 1)] == ["early_stopped", "completed"]
    assert recorded_trial.get_status(0).reason == "uniform_groups at step 2: 3 reached the threshold 3"


def test_a_run_with_a_row_of_step_0_has_run(recorded_trial: RecordedTrial) -> None:
    recorded_trial.write_row(0, {"step": 0})
    recorded_trial.report_rows({0: {"step": 0}})
    recorded_trial.recorder.on_trial_complete(0, [], recorded_trial.trial)
    assert [recorded_trial.get_status(seed).status for seed in (0, 1)] == ["interrupted", "never_ran"]
    assert recorded_trial.get_status(0).reason == "interrupted after step 0 of 300"


def test_failures_count_from_where_the_runs_that_go_on_are(recorded_trial: RecordedTrial) -> None:
    recorded_trial.write_row(0, {"step": 280})  # from an earlier start without the other run
    for step in range(MAX_ATTEMPTS + 1):
        recorded_trial.restart_after_death()
        for seed in (0, 1):
            recorded_trial.write_row(seed, {"step": step})
    assert not recorded_trial.recorder.given_up_trials
    for _ in range(MAX_ATTEMPTS):
        assert not recorded_trial.recorder.given_up_trials
        recorded_trial.restart_after_death()
    assert recorded_trial.recorder.given_up_trials == {"one"}


def test_a_run_that_ends_on_another_node_before_its_trial_is_judged_by_what_it_reported(
    recorded_trial: RecordedTrial,
) -> None:
    recorded_trial.report_rows({0: STOPPED, 1: {"step": 2}})  # nothing is on the disk of the driver
    assert recorded_trial.get_status(0).status == "early_stopped"
    assert recorded_trial.get_status(0).stop_step == 2
    result = {"rows": {}, "failed": {recorded_trial.plan.runs[1].run_id: "the loss is nan"}}
    recorded_trial.recorder.on_trial_result(0, [], recorded_trial.trial, result)
    assert [recorded_trial.get_status(seed).status for seed in (0, 1)] == ["early_stopped", "failed"]


def test_the_rows_of_the_newest_checkpoint_are_fetched_before_an_end_is_recorded(
    recorded_trial: RecordedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "PULL_PATIENCE_S", 0.0)
    calls: list[object] = []

    class Storage:
        def follow(self, runs: list[dict[str, Any]], path: str) -> None:
            calls.append([run["run_id"] for run in runs] + [path])

        def pull(self) -> None:
            calls.append("pull")
            raise OSError("the storage does not answer, which must not end the study")

    recorder: Any = recorded_trial.recorder
    recorder._storage = Storage()
    result = {"step": 1, "uploaded": "a/start_1_01234567/checkpoint_000001", "rows": {}}
    recorder.on_trial_result(0, [], recorded_trial.trial, result)
    assert "uploaded" not in result
    recorder.on_trial_result(0, [], recorded_trial.trial, {"step": 1, "uploaded": "", "rows": {}})
    recorder.on_checkpoint(0, [], recorded_trial.trial, SimpleNamespace(path="a/checkpoint_000000"))
    for end in (recorder.on_trial_recover, recorder.on_trial_complete, recorder.on_trial_error):
        end(0, [], recorded_trial.trial)
    run_ids = [spec.run_id for spec in recorded_trial.plan.runs]
    uploaded = [*run_ids, "a/start_1_01234567/checkpoint_000001"]
    assert calls == [uploaded, [*run_ids, "a/checkpoint_000000"], "pull", "pull", "pull"]


def test_wandb_is_told_of_rows_and_ends(recorded_trial: RecordedTrial) -> None:
    recorder, calls = recorded_trial.recorder, list[tuple[str, ...]]()
    log: Any = SimpleNamespace(
        send_rows=lambda run_ids: calls.append(("rows", *run_ids)),
        end_run=lambda status: calls.append((status.status, status.run_id)),
    )
    recorder._wandb = log
    recorded_trial.report_rows({0: STOPPED, 1: {"step": 2}})
    recorded_trial.write_row(1, {"step": 300})
    recorder.on_trial_complete(0, [], recorded_trial.trial)
    first, second = (spec.run_id for spec in recorded_trial.plan.runs)
    assert calls == [("rows", first, second), ("early_stopped", first), ("completed", second)]


def test_a_node_that_is_taken_away_counts_for_no_failure(recorded_trial: RecordedTrial, tmp_path: Path) -> None:
    error = RayActorError()
    error._preempted = True
    path = tmp_path / "error.pkl"
    path.write_bytes(ray.cloudpickle.dumps(error))
    recorded_trial.trial.pickled_error_file = str(path)
    for _ in range(2 * MAX_ATTEMPTS):
        recorded_trial.restart_after_death()
    assert not recorded_trial.recorder.given_up_trials
    assert recorded_trial.read_log(0).count("=== process died, retrying: RayActorError") == 2 * MAX_ATTEMPTS
    recorded_trial.trial.pickled_error_file = None
    for _ in range(MAX_ATTEMPTS):
        recorded_trial.restart_after_death()
    assert recorded_trial.recorder.given_up_trials == {"one"}


def test_a_failure_that_is_a_result_ends_the_runs_of_its_trial(recorded_trial: RecordedTrial) -> None:
    recorded_trial.write_row(0, {"step": 1})
    failure = {"failure": "KeyError: 'x'", "failure_class": "error", "failure_trace": "Traceback: x", "done": True}
    recorded_trial.recorder.on_trial_result(0, [], recorded_trial.trial, failure)
    recorded_trial.recorder.on_trial_complete(0, [], recorded_trial.trial)
    for seed in (0, 1):
        status = recorded_trial.get_status(seed)
        assert (status.status, status.failure_class, status.reason) == ("failed", "error", "KeyError: 'x'")
        assert "Traceback: x" in recorded_trial.read_log(seed)


def test_a_storage_that_fails_is_asked_for_a_while_before_its_failures_count(
    recorded_trial: RecordedTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "error.pkl"
    path.write_bytes(ray.cloudpickle.dumps(OSError("the bucket does not answer")))
    recorded_trial.trial.pickled_error_file = str(path)
    for _ in range(2 * MAX_ATTEMPTS):
        recorded_trial.restart_after_death()
        now[0] += 50.0
    assert not recorded_trial.recorder.given_up_trials
    now[0] += recorded_trial.plan.base_config.trainer.disk_patience
    for _ in range(MAX_ATTEMPTS):
        recorded_trial.restart_after_death()
    assert recorded_trial.recorder.given_up_trials == {"one"}
    assert "=== failed (storage) " in recorded_trial.read_log(0)


@pytest.fixture
def make_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a guard of a disk, and the list of its messages."""
    monkeypatch.setattr(callbacks, "_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(callbacks, "_WAIT_INTERVAL_S", 0.01)
    messages: list[str] = []

    def make(patience: float) -> tuple[DiskSpaceGuard, list[str]]:
        interrupt = make_interrupt(tmp_path)
        return DiskSpaceGuard([tmp_path, tmp_path / "missing"], patience, interrupt, messages.append), messages

    return make


def test_the_driver_waits_while_a_disk_is_full(make_guard: Any, tmp_path: Path, monkeypatch: Any) -> None:
    free_bytes = iter([0, 0, 0, 10**9])
    monkeypatch.setattr(callbacks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=next(free_bytes)))
    guard, messages = make_guard(60)
    guard.on_step_begin(1, [])
    assert messages == [
        f"The disk of {tmp_path} is full: waiting up to 60 s for disk space.",
        "Disk space is available again.",
    ]


def test_its_patience_has_an_end(make_guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, messages = make_guard(0.05)
    guard.on_step_begin(0, [])
    assert messages == []  # there is room
    # The guard does not begin to wait again before there was space.
    for min_free_bytes, num_messages in ((10**18, 2), (10**18, 2), (0, 2), (10**18, 4)):
        monkeypatch.setattr(callbacks, "MIN_FREE_BYTES", min_free_bytes)
        guard.on_step_begin(1, [])
        assert len(messages) == num_messages
    assert messages[-1] == "The disk is still full."


def test_an_interruption_ends_its_waiting(make_guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "MIN_FREE_BYTES", 10**18)
    guard, messages = make_guard(600)
    guard._interrupt.request()
    guard.on_step_begin(1, [])
    assert len(messages) == 2


def test_waiting_trials_fail_once_every_usable_node_is_avoided(
    recorded_trial: RecordedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": {"CPU": cpus}}
        for name, cpus in (("head", 0.0), ("one", 2.0), ("two", 2.0))
    ]
    monkeypatch.setattr(callbacks.ray, "nodes", lambda: nodes)
    recorder, trials = recorded_trial.recorder, [recorded_trial.trial]
    recorder.fail_without_nodes(trials)  # nothing is avoided
    recorder.avoided_nodes.add("one")
    recorder.fail_without_nodes(trials)
    assert recorder.given_up_trials == set()
    recorder.avoided_nodes.add("two")
    recorder.fail_without_nodes(trials)
    assert recorder.given_up_trials == {"one"}  # the trial's id
    assert [recorded_trial.get_status(seed).failure_class for seed in (0, 1)] == ["node", "node"]
