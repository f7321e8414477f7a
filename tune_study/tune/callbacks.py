"""Tune callbacks of the driver: record the statuses and logs of the runs, and display their progress.

The scheduler, which ends the trials that the Recorder gives up, is here too.
"""

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler

from trainable.files.paths import open_regular
from trainable.runs.failures import NODE_UNFIT, NON_FINITE, PROCESS_DIED, Failure, RunFailedError
from trainable.runs.history import find_signal_problem, make_final_status
from trainable.runs.orphans import terminate_orphans
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import CENSORED, ENDED_STATUSES, StatusRecord
from tune_study.folder.statuses import make_timestamp
from tune_study.host.interrupt import Interrupt
from tune_study.plan.study_plan import RunSpec
from tune_study.tune.cluster import find_usable_nodes, parse_nodes
from tune_study.tune.progress import format_step
from tune_study.tune.search.halving import Rungs
from tune_study.tune.session import StudySession
from tune_study.tune.trials import has_several_runs, list_run_ids, split_rows_by_run

PULL_PATIENCE_S = 60.0
"""Seconds to wait for a storage that does not answer when the end of a run must be read from it."""
MAX_ATTEMPTS = 3
"""Consecutive failures after which a trial is no longer retried. A new furthest step restarts the count."""
MIN_FREE_BYTES = 8_000_000
"""With fewer free bytes on a disk the driver waits, because Ray Tune ends the study if it cannot write its files."""
_CHECK_INTERVAL_S, _WAIT_INTERVAL_S = 2.0, 0.5
"""Seconds between two checks of the disks, and of a full one: the most until the waiting driver sees a Ctrl-C."""
_SETUP_ERROR_PHRASE = "error raised in its creation task"
"""Ray's wording for an actor whose constructor raised, for example because our packages cannot be imported there."""
_ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""Colors that Ray adds to the tracebacks of workers, while logs and status.json are plain text."""


class StatelessCallback(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """A callback whose pickle is empty, since Tune pickles its callbacks into the results.

    The state of our callbacks is already on disk, or cannot be pickled, such as a thread.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return no state."""
        return {}


class SilentReporter(StatelessCallback, TrialProgressCallback):  # type: ignore[misc]  # Ray is untyped
    """A reporter that prints nothing, instead of Tune's reporter of trials, which prints even at verbosity 0.

    Tune adds its reporter unless the callbacks have one. It would call waiting trials that an interrupted study has
    removed "completed".
    """

    def _report_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `Progress` shows the runs."""

    on_trial_result = on_trial_complete = on_trial_error = _report_nothing


class Recorder(StatelessCallback):
    """A callback that keeps the status.json, log and displayed progress of every run up to date.

    It also tells the study's storage of new checkpoints, and W&B's log of new rows and ended runs. Runs that ended in
    an earlier start get what they lack in W&B at the end of the study.
    """

    def __init__(self, session: StudySession, rungs: Rungs | None = None) -> None:
        self._plan, self._storage, self._wandb = session.plan, session.storage, session.wandb
        self._resource_plan, self._progress = session.resource_plan, session.progress
        self._statuses, self.rungs = session.statuses, rungs
        self._specs: dict[str, RunSpec] = {spec.run_id: spec for spec in session.plan.runs}
        # By trial: the last step with a row at any of its failures, and how many failures have not passed that step.
        self._failure_counts: dict[str, tuple[int, int]] = {}
        self._storage_failures: dict[str, float] = {}  # by trial: when a copy of its checkpoint first failed
        self.given_up_trials: set[str] = set()
        """Ids of trials that failed too often, which `FirstComeFirstServed` does not start again."""
        self.avoided_nodes = set(session.resource_plan.avoided_nodes)
        """Ray's ids of the nodes where no further run is placed, to which `FirstComeFirstServed` adds."""

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Update the phases of long steps. Tune calls this several times per second."""
        self._progress.look_at_phases()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record that runs start, or start again after their process died."""
        for status in self._get_statuses(trial):
            if status.status in ENDED_STATUSES:
                continue
            # Wall time counts from the first start of a run. All other fields of the old status are of an earlier end.
            run_id, started_at = status.run_id, status.started_at or make_timestamp()
            self._statuses.set(StatusRecord(run_id, "running", trial_id=trial.trial_id, started_at=started_at))
            self._log_line(run_id, f"=== {run_id} started {make_timestamp()}, trial {trial.trial_id} ===")
            self._progress.start_run(run_id)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **i: Any) -> None:
        """Record the rows of a step and the decisions of stop rules, which are in `result`."""
        # Messages to the driver, of which a stopper has already read `saved`. They are removed, so that they do not
        # become columns of Tune's progress.csv or of the W&B run.
        note, uploaded = result.pop("note", ""), result.pop("uploaded", "")
        result.pop("saved", None)
        if self._storage is not None and uploaded:
            self._storage.follow(trial.config["run"]["runs"], uploaded)
        if self._wandb is not None:  # first, since W&B runs are not opened again after their end
            self._wandb.send_rows(split_rows_by_run(trial.config, result))
        for run_id in list_run_ids(trial.config) if note else ():
            self._log_line(run_id, f"=== {note} ===")
            self._progress.print_note(run_id, note)
        for run_id, row in split_rows_by_run(trial.config, result).items():
            # If a rule fires in a trial of one run, Tune ends the trial, and `on_trial_complete` ends the run. A trial
            # of several runs continues with the others, so the run must be ended here.
            self._record_row(run_id, row, ends_alone=has_several_runs(trial.config) and bool(row.get("stop_rule")))
        # `failed` has the runs that failed while the others of their trial continue. Every later result repeats them,
        # so only runs that still count as running are ended here.
        for run_id, reason in result.get("failed", {}).items():
            if (status := self._statuses.get(run_id)).status == "running":
                # Only non-finite numbers end a single run of a trial; any other error ends the whole trial.
                self._end_run(replace(status, status="failed", failure_class=NON_FINITE, reason=reason))
        if kind := result.get("failure_class"):
            self._fail_runs(trial, Failure(kind, result["failure"], False, result.get("failure_trace", "")))

    def on_checkpoint(self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any) -> None:
        """Follow the checkpoint that Tune has stored, which names the last one that the trial has uploaded."""
        if self._storage is not None:
            self._storage.follow(trial.config["run"]["runs"], checkpoint.path)

    def _fetch_rows(self) -> None:
        """Fetch rows from the storage before the last one tells how a run ended."""
        deadline = time.monotonic() + PULL_PATIENCE_S
        while self._storage is not None:
            try:
                self._storage.pull()
                return
            except OSError:
                if time.monotonic() >= deadline:
                    return  # rows that could not be fetched stay in the storage
            time.sleep(1.0)

    def _record_row(self, run_id: str, row: dict[str, Any], ends_alone: bool) -> None:
        """Log and display one row. ends_alone: a stop rule ended the run while the others of its trial continue."""
        status = self._statuses.get(run_id)
        if status.status in ENDED_STATUSES:  # a restarted trial reports the row again
            return
        self._log_line(run_id, format_step(self._plan.study.family, row, self._specs[run_id].steps))
        if row.get("step") == 1 and (problem := find_signal_problem(row)):
            self._log_line(run_id, f"=== at step 1, {problem} ===")
        self._progress.record_row(run_id, row)
        if ends_alone:
            self._conclude_run(status, row)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Decide whether Tune may start a trial again that failed in a way that may be temporary.

        Tune retries without a limit (`max_failures=-1`); here, the MAX_ATTEMPTS-th failure without progress is final,
        because a run that takes days may have many failures in total. The loss of a node does not count.
        """
        self._fetch_rows()
        trial_failure, is_preempted = read_failure(trial)
        is_unfit = trial_failure.kind == NODE_UNFIT
        is_counted = not (is_preempted or is_unfit or self._may_wait_for_storage(trial, trial_failure))
        failure_count = self._count_failure(trial) if is_counted else 0
        is_retried = self._has_other_nodes() if is_unfit else failure_count < MAX_ATTEMPTS
        for status in self._list_open_statuses(trial):
            # A dead process may leave children, such as vLLM's engine, that hold the GPU that the retry needs. On a
            # cluster they are on another node, where the run terminates them when it starts there again.
            is_local = not self._resource_plan.cluster_address
            if is_local and (orphans := terminate_orphans(self._plan.get_run_dir(status.run_id))):
                self._log_line(status.run_id, f"=== terminated orphan processes: {', '.join(orphans)} ===")
            if is_retried:
                kind, message = trial_failure.kind, trial_failure.message
                self._log_line(status.run_id, f"{trial_failure.trace}\n=== {kind}, retrying: {message} ===")
                self._progress.print_note(status.run_id, f"failed, retrying: {kind}: {message}")
        if is_retried:
            return
        self.given_up_trials.add(trial.trial_id)  # the scheduler ends the trial before Tune starts it again
        clear_metric_windows(trial)
        repeat_note = (
            f" ({failure_count} consecutive failures without a step between them)" if failure_count > 1 else ""
        )
        self._fail_runs(trial, trial_failure._replace(message=trial_failure.message + repeat_note))

    def _has_other_nodes(self) -> bool:
        """Check whether a node that is not avoided can hold a run, or whether the study waits for one."""
        usable_nodes = find_usable_nodes(parse_nodes(ray.nodes()), self._resource_plan.bundles)
        return self._resource_plan.waits_for_nodes or any(node.id not in self.avoided_nodes for node in usable_nodes)

    def fail_without_nodes(self, trials: list[Any]) -> None:
        """Give up trials that have not started if every node that could hold one is avoided."""
        if trials and self.avoided_nodes and not self._has_other_nodes():
            reason = "every node that could hold a run lacks something that it needs: see the failures of other runs"
            self.given_up_trials |= {trial.trial_id for trial in trials}
            for trial in trials:
                self._fail_runs(trial, Failure(NODE_UNFIT, reason, is_retried=False))

    def _may_wait_for_storage(self, trial: Any, failure: Failure) -> bool:
        """Check whether to retry a failed copy of a checkpoint: for trainer.disk_patience seconds after the first.

        Each attempt starts the trial again, so the storage is asked every few seconds.
        """
        if failure.kind != "storage":
            self._storage_failures.pop(trial.trial_id, None)
            return False
        first_time = self._storage_failures.setdefault(trial.trial_id, time.monotonic())
        return time.monotonic() - first_time < self._plan.base_config.trainer.disk_patience

    def _count_failure(self, trial: Any) -> int:
        """Count one more failure; return the number of failures since the trial last reached a new furthest step.

        A run that always fails a few steps after its last checkpoint would otherwise be retried forever.
        """
        # The runs of a trial continue from a common step, so the run that is furthest behind counts. Later rows of a
        # run are from an earlier start, in which it was trained without the others, and are no progress.
        running_ids = [status.run_id for status in self._get_statuses(trial) if status.status == "running"]
        rows = [read_rows(self._plan.get_run_dir(run_id) / METRICS_FILE) for run_id in running_ids]
        step = min((int(run_rows[-1].get("step", -1)) if run_rows else -1 for run_rows in rows), default=-1)
        furthest_step, failure_count = self._failure_counts.get(trial.trial_id, (-1, 0))
        failure_count = 1 if step > furthest_step else failure_count + 1
        self._failure_counts[trial.trial_id] = max(step, furthest_step), failure_count
        return failure_count

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """End runs that have trained all their steps, were stopped by a rule, or were interrupted."""
        self._fetch_rows()
        for status in self._get_statuses(trial):
            if status.status == "running":  # a run that waits, or that failed alone, keeps its status
                self._conclude_run(status)
        clear_metric_windows(trial)

    def _conclude_run(self, status: StatusRecord, last_row: Mapping[str, Any] | None = None) -> None:
        """End a run. Its last row tells how it ended, including the decision of a stop rule.

        last_row: None for the one on disk. If a run ends before its trial, its rows may still be on its node.
        """
        rows = read_rows(self._plan.get_run_dir(status.run_id) / METRICS_FILE)
        if last_row is not None and (not rows or rows[-1]["step"] < last_row["step"]):
            rows.append(dict(last_row))
        final_status = make_final_status(status, rows, self._specs[status.run_id].steps)
        reason = "" if self.rungs is None else self.rungs.reasons.get(status.run_id, "")
        if reason and final_status.status == "interrupted":
            final_status = replace(status, status=CENSORED, reason=reason)
        self._end_run(final_status)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record a failure that Tune considers final: with `max_failures=-1`, only of a trial that was not running."""
        self._fetch_rows()
        self._fail_runs(trial, read_failure(trial)[0])

    def _fail_runs(self, trial: Any, trial_failure: Failure) -> None:
        kind, message = trial_failure.kind, trial_failure.message
        for status in self._list_open_statuses(trial):
            self._log_line(status.run_id, trial_failure.trace)
            self._end_run(replace(status, status="failed", failure_class=kind, reason=message))

    def _list_open_statuses(self, trial: Any) -> list[StatusRecord]:
        """List the statuses of the trial's runs that have not ended (see ENDED_STATUSES)."""
        return [status for status in self._get_statuses(trial) if status.status not in ENDED_STATUSES]

    def _get_statuses(self, trial: Any) -> list[StatusRecord]:
        return [self._statuses.get(run_id) for run_id in list_run_ids(trial.config)]

    def _end_run(self, status: StatusRecord) -> None:
        status = replace(status, ended_at=make_timestamp())
        self._statuses.set(status)
        self._log_line(status.run_id, f"=== {status.display_text} {status.ended_at}: {status.reason} ===")
        self._progress.end_run(status.run_id, status.display_text, status.reason)
        if self._wandb is not None:
            self._wandb.end_run(status)

    def _log_line(self, run_id: str, line: str) -> None:
        with suppress(OSError):  # on a full disk the log lacks a line; the rows are written by the runs
            path = self._plan.output / self._specs[run_id].log_path
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(path, "a") as log:
                log.write(line + "\n")


class DiskSpaceGuard(StatelessCallback):
    """A callback that blocks Tune's event loop while a disk is full.

    While the loop is blocked, Tune processes no result and writes no file, so no failed write can end the study. Runs
    are separate processes and wait for disk space by themselves.

    folders: where the driver and Ray write. patience: seconds to wait (trainer.disk_patience). notify: called with a
    message when the wait begins and when it ends.
    """

    def __init__(
        self, folders: Sequence[Path], patience: float, interrupt: Interrupt, notify: Callable[[str], None]
    ) -> None:
        self._folders, self._patience, self._interrupt, self._notify = tuple(folders), patience, interrupt, notify
        self._next_check = 0.0
        # True from the wait until there is space: the study goes on after `patience`, and must not wait again.
        self._has_waited = False

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Check the disks every few seconds; Tune calls this many times per second."""
        if time.monotonic() < self._next_check:
            return
        full_folder = self._find_full_folder()
        if full_folder is not None and not self._has_waited:
            self._notify(f"The disk of {full_folder} is full: waiting up to {self._patience:g} s for disk space.")
            # Ctrl-C ends the wait, because runs can end only in Tune's loop, which is blocked here.
            deadline = time.monotonic() + self._patience
            while full_folder is not None and time.monotonic() < deadline and not self._interrupt.is_requested:
                time.sleep(_WAIT_INTERVAL_S)
                full_folder = self._find_full_folder()
            self._notify("Disk space is available again." if full_folder is None else "The disk is still full.")
        self._has_waited = full_folder is not None
        self._next_check = time.monotonic() + _CHECK_INTERVAL_S

    def _find_full_folder(self) -> Path | None:
        # The disk of a folder that does not exist yet cannot be measured.
        folders = (folder for folder in self._folders if folder.exists())
        return next((folder for folder in folders if shutil.disk_usage(folder).free < MIN_FREE_BYTES), None)


def read_failure(trial: Any) -> tuple[Failure, bool]:
    """Read why a trial failed from the error that Tune has stored in a file, and whether its node was taken away.

    A RunFailedError comes from a step of the run and contains the failure. Any other error is from Ray: a checkpoint
    could not be saved or restored, or the trial's process could not begin or has died.
    """
    import ray.cloudpickle

    # This process wrote the file into its session folder. The trial's getter reads the copy in the results folder,
    # which may be of an older failure.
    path = Path(trial.pickled_error_file) if trial.pickled_error_file else None
    if path is None or not path.exists():
        return Failure("error", "the trial failed without an error message", is_retried=True), False
    error = ray.cloudpickle.loads(path.read_bytes())
    cause = getattr(error, "cause", None) or error  # Ray wraps an exception of a worker in a RayTaskError
    if isinstance(cause, RunFailedError):
        return cause.failure, False
    lines = [line.strip() for line in _ANSI_COLOR.sub("", str(cause)).splitlines() if line.strip()] or ["no message"]
    trace = _ANSI_COLOR.sub("", str(error))
    if isinstance(cause, OSError):  # outside of a step, Tune saves and restores checkpoints
        return Failure("storage", f"{type(cause).__name__}: {lines[0]}", is_retried=True, trace=trace), False
    if _SETUP_ERROR_PHRASE in str(cause):
        # Ray's message is the worker's traceback, whose last line is the error itself.
        message = f"the trial could not begin: {lines[-1]}"
        if "versions" not in trial.config["run"]:  # on this machine
            return Failure("error", message, is_retried=True, trace=trace), False
        # On a cluster, the node lacks our packages. No public function of Ray tells on which node an actor was.
        address = (ray._private.state.actors(cause.actor_id) or {}).get("Address", {})
        return Failure(
            NODE_UNFIT,
            f"no run is placed on the node {address.get('IPAddress')} again, because {message}",
            is_retried=True,
            trace=trace,
            node_id=address.get("NodeID", ""),
        ), False
    # Ray kills a worker when the machine's memory runs low, and says "memory pressure" in its error.
    kind = "out of memory" if "memory pressure" in trace else PROCESS_DIED
    failure = Failure(kind, f"{type(cause).__name__}: {lines[0]}", is_retried=True, trace=trace)
    return failure, bool(getattr(cause, "preempted", False))


def clear_metric_windows(trial: Any) -> None:
    """Drop Tune's sliding windows over the metrics of a trial that has ended.

    Tune keeps the last values of every metric of every trial. For ended trials they are useless, and take half of the
    driver's memory per trial. The means, minima and maxima computed from them stay.
    """
    trial.run_metadata.metric_n_steps.clear()
    trial.run_metadata.invalidate_cache()


class FirstComeFirstServed(FIFOScheduler):  # type: ignore[misc]  # Ray is untyped
    """A FIFO scheduler that also ends pending trials that must not start. Tune asks it before each start.

    These are the recorder's `given_up_trials`, which have failed too often or have no node, trials of a study or arm
    that is asked to stop, and those of arms that the rungs of successive halving have censored. No scheduler that
    favors an arm is used, since arms are compared after the same number of steps. On a cluster, no trial that starts
    again is placed on a node because of which a run failed.
    """

    def __init__(self, recorder: Recorder, interrupt: Interrupt) -> None:
        super().__init__()
        self._recorder, self._interrupt = recorder, interrupt

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Avoid the node of a run that failed because of it. Tune calls this before the trial waits again."""
        super().on_trial_error(tune_controller, trial)
        if node_id := read_failure(trial)[0].node_id:
            self._recorder.avoided_nodes.add(node_id)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Choose the nodes for a trial that starts, or starts again."""
        super().on_trial_add(tune_controller, trial)
        if self._recorder.avoided_nodes:
            trial.config["run"]["avoided_nodes"] = sorted(self._recorder.avoided_nodes)
            trial.update_resources(trial.get_trainable_cls().default_resource_request(trial.config))

    def choose_trial_to_run(self, tune_controller: Any, **kwargs: Any) -> Any:
        """Choose the next trial to start, or None (see ray.tune.schedulers.TrialScheduler)."""
        pending_trials = [trial for trial in tune_controller.get_trials() if trial.status == Trial.PENDING]
        rungs, given_up_trials = self._recorder.rungs, self._recorder.given_up_trials
        self._recorder.fail_without_nodes([trial for trial in pending_trials if trial.trial_id not in given_up_trials])
        for trial in pending_trials:
            arm = trial.config["run"]["arm"]
            is_stopped = self._interrupt.is_requested or self._interrupt.is_arm_requested(arm)
            is_censored = rungs is not None and rungs.is_censored(arm)
            if is_stopped or is_censored or trial.trial_id in given_up_trials:
                # Tune lists the folder of every ended trial, which a trial that never started lacks.
                trial.init_local_path()
                tune_controller.stop_trial(trial)  # closes its files
                # Tune saves the state of a trial that has changed, but forgets that one without a process has.
                tune_controller._tune_controller._mark_trial_to_checkpoint(trial)
        return super().choose_trial_to_run(tune_controller, **kwargs)
