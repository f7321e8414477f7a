"""What the driver records as Tune reports: each run's status, its log, the summary, and the progress that is shown."""

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ray import tune

from trainable.runs.failures import NON_FINITE, PROCESS_DIED, Failure, RunFailedError
from trainable.runs.orphans import terminate_orphans
from trainable.runs.run_files import METRICS_FILE, read_rows
from tune_study.folder.outputs import ENDED_STATUSES, RunStatus, append_line, make_timestamp, read_status, write_status
from tune_study.folder.summary import write_summary
from tune_study.plan.allotment import ResourcePlan
from tune_study.plan.study_plan import RunSpec, StudyPlan
from tune_study.tune.progress import Progress, format_step, format_stop_reason
from tune_study.tune.trials import list_run_ids, split_rows_by_run

MAX_ATTEMPTS = 3
"""How often a run may fail in a row, without a step between, with what may pass."""


class _FailureCount(NamedTuple):
    """The furthest step of a trial whose row was on disk when it failed, and its failures since without another one."""

    furthest_step: int
    consecutive_failures: int


_ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_SETUP_ERROR_PHRASE = "error raised in its creation task"


class RowFetcher(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """Has the rows of a run, which are in a storage, here before anyone asks how it ended: told before the Recorder.

    fetch: called with the run's id.
    """

    def __init__(self, fetch: Callable[[str], None]) -> None:
        self._fetch = fetch

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune stores its callbacks beside the results."""
        return {}

    def _fetch_rows(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not trial.config["finished"]:
            for run_id in list_run_ids(trial.config):
                self._fetch(run_id)

    on_trial_recover = on_trial_complete = on_trial_error = _fetch_rows


class Recorder(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """Keeps status.json, the logs and the shown progress of every run up to date.

    A trial whose config says `finished` only replays the last row of a run that ended before: of such a run nothing
    is recorded but the id of the trial that carried it. given_up: ids of trials whose failure is final. unwritten:
    statuses that a full disk did not take; the study goes on without them, and `settle` tries again.
    """

    def __init__(self, plan: StudyPlan, resource_plan: ResourcePlan, progress: Progress) -> None:
        self._plan = plan
        self._resource_plan = resource_plan
        self._progress = progress
        self._specs: dict[str, RunSpec] = {spec.run_id: spec for spec in plan.runs}
        self._failure_counts: dict[str, _FailureCount] = {}
        self.given_up_trials: set[str] = set()
        self.unwritten_statuses: dict[str, RunStatus] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune stores its callbacks beside the results, and all that these know is on disk already."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs start, or start again after their process died."""
        copy_earlier_files(trial, self._plan.folder / trial.config["run_id"])
        for status in self._read_statuses(trial):
            if trial.config["finished"]:
                self._write_status(replace(status, trial_id=trial.trial_id))
            elif status.status not in ENDED_STATUSES:
                self._start_run(status, trial.trial_id)

    def _start_run(self, status: RunStatus, trial_id: str) -> None:
        started_at = status.started_at or make_timestamp()
        self._write_status(RunStatus(status.run_id, "running", trial_id=trial_id, started_at=started_at))
        self._log_line(status.run_id, f"=== {status.run_id} started {make_timestamp()}, trial {trial_id} ===")
        self._progress.start_run(status.run_id)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **i: Any) -> None:
        """Training steps are done; `result` has the rows of the runs, with a stop rule's decision in them."""
        note, _ = result.pop("note", ""), result.pop("saved", None)
        if trial.config["finished"]:
            return
        for run_id in list_run_ids(trial.config) if note else ():
            self._log_line(run_id, f"=== {note} ===")
            self._progress.print_note(run_id, note)
        for run_id, row in split_rows_by_run(trial.config, result).items():
            self._record_row(run_id, row, ends_alone=trial.config["side_by_side"] and bool(row.get("stop_rule")))
        for run_id, reason in result.get("failed", {}).items():
            if (status := self._read_status(run_id)).status == "running":
                self._end_run(
                    replace(status, status="failed", failure_class=NON_FINITE, reason=reason, ended_at=make_timestamp())
                )

    def _record_row(self, run_id: str, row: dict[str, Any], ends_alone: bool) -> None:
        """ends_alone: whether the run ends with its row while the others of its trial go on."""
        status = self._read_status(run_id)
        if status.status in ENDED_STATUSES:  # told again by a trial that was started again
            return
        self._log_line(run_id, format_step(self._plan.study.family, row, self._specs[run_id].steps))
        self._progress.record_row(run_id, row)
        if ends_alone:
            self._conclude_run(status)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial failed. Tune would try it again for ever; whether it is depends on the failure, and how often it was.

        Failures count in a row until the trial gets further than ever before: a run of days meets more in all.
        """
        trial_failure = read_failure(trial)
        if trial.config["finished"]:
            if (
                self._count_failure(trial) >= MAX_ATTEMPTS
            ):  # the run has ended well, only its replay in Tune's own record fails
                self.given_up_trials.add(trial.trial_id)
            return
        failure_count = self._count_failure(trial)
        is_retried = trial_failure.is_retried and failure_count < MAX_ATTEMPTS
        for status in self._list_open_statuses(trial):
            orphans = (
                [] if self._resource_plan.cluster_address else terminate_orphans(self._plan.get_run_dir(status.run_id))
            )
            if orphans:
                self._log_line(status.run_id, f"=== ended what it had started: {', '.join(orphans)} ===")
            if is_retried:
                self._log_line(
                    status.run_id,
                    f"{trial_failure.trace}\n=== {trial_failure.kind}, trying again: {trial_failure.message} ===",
                )
                self._progress.retry_run(status.run_id, f"{trial_failure.kind}: {trial_failure.message}")
        if is_retried:
            return
        self.given_up_trials.add(trial.trial_id)
        clear_metric_windows(trial)
        repeat_note = f" ({failure_count} times in a row without a step between)" if failure_count > 1 else ""
        self._fail_runs(trial, trial_failure._replace(message=trial_failure.message + repeat_note))

    def _count_failure(self, trial: Any) -> int:
        """One more failure: how many it makes without a step beyond the furthest that the trial ever got to."""
        trial_run_id = trial.config["run_id"]
        step = self._find_furthest_step(trial)
        previous_count = self._failure_counts.get(trial_run_id, _FailureCount(-1, 0))
        failure_count = 1 if step > previous_count.furthest_step else previous_count.consecutive_failures + 1
        self._failure_counts[trial_run_id] = _FailureCount(max(step, previous_count.furthest_step), failure_count)
        return failure_count

    def _find_furthest_step(self, trial: Any) -> int:
        """The step to which all runs of a trial that go on have got; -1 before the first row, and where none goes on.

        They go on together: what one of them had written before the others joined it says nothing of this start.
        """
        running_ids = (status.run_id for status in self._read_statuses(trial) if status.status == "running")
        return min((int(self._read_last_row(run_id).get("step", -1)) for run_id in running_ids), default=-1)

    def _read_last_row(self, run_id: str) -> dict[str, Any]:
        """The last row of a run on disk; nothing before the first."""
        rows = read_rows(self._plan.get_run_dir(run_id) / METRICS_FILE, first_step=0)
        return rows[-1] if rows else {}

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs have trained all their steps, a rule has stopped them, or they were interrupted before."""
        if trial.config["finished"]:
            return
        for status in self._list_open_statuses(trial):
            if status.status == "running":  # one that never ran is not
                self._conclude_run(status)
        clear_metric_windows(trial)

    def _conclude_run(self, status: RunStatus) -> None:
        """The run has ended, or was cut short, after its last row on disk, which has the decision of a stop rule."""
        self._end_run(make_final_status(status, self._read_last_row(status.run_id), self._specs[status.run_id].steps))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed in a way that Tune itself calls final; the replay of an ended one changes nothing."""
        if not trial.config["finished"]:
            self._fail_runs(trial, read_failure(trial))

    def _fail_runs(self, trial: Any, trial_failure: Failure) -> None:
        for status in self._list_open_statuses(trial):
            self._log_line(status.run_id, trial_failure.trace)
            self._end_run(
                replace(
                    status,
                    status="failed",
                    failure_class=trial_failure.kind,
                    reason=trial_failure.message,
                    ended_at=make_timestamp(),
                )
            )

    def _list_open_statuses(self, trial: Any) -> list[RunStatus]:
        """Statuses of the trial's runs that have not ended well."""
        return [status for status in self._read_statuses(trial) if status.status not in ENDED_STATUSES]

    def _read_statuses(self, trial: Any) -> list[RunStatus]:
        return [self._read_status(run_id) for run_id in list_run_ids(trial.config)]

    def _read_status(self, run_id: str) -> RunStatus:
        status = self.unwritten_statuses.get(run_id) or read_status(self._plan.get_run_dir(run_id))
        return status or RunStatus(run_id, "never_ran")

    def retry_unwritten(self) -> None:
        """Write the statuses that could not be written before; what still cannot stays in `unwritten`."""
        for status in list(self.unwritten_statuses.values()):
            self._write_status(status)

    def _write_status(self, status: RunStatus) -> None:
        try:
            write_status(self._plan.get_run_dir(status.run_id), status)
            self.unwritten_statuses.pop(status.run_id, None)
        except OSError:
            self.unwritten_statuses[status.run_id] = status

    def _end_run(self, status: RunStatus) -> None:
        self._write_status(status)
        self._log_line(status.run_id, f"=== {status.display_text} {status.ended_at}: {status.reason} ===")
        with suppress(OSError):  # written again at the end
            write_summary(self._plan, self._resource_plan, is_closing=False)
        self._progress.end_run(status.run_id, status.display_text, status.reason)

    def _log_line(self, run_id: str, line: str) -> None:
        with suppress(OSError):  # a line less, where the disk is full; rows are written by the runs themselves
            append_line(self._plan.output / self._specs[run_id].log_path, line)


def make_final_status(status: RunStatus, row: dict[str, Any], total_steps: int) -> RunStatus:
    """The final status of a run whose last row is `row`: stopped by a rule, completed, or cut short.

    row: empty where the run has written none; a row of step 0 is of a run that has started to train. A rule that fires
    at the last step counts: the run is early_stopped.
    """
    step = row.get("step")
    if row.get("stop_rule"):
        return replace(
            status,
            status="early_stopped",
            reason=format_stop_reason(row),
            stop_rule=row["stop_rule"],
            stop_value=row["stop_value"],
            stop_threshold=row["stop_threshold"],
            stop_step=row["stop_step"],
            ended_at=make_timestamp(),
        )
    if step == total_steps:
        return replace(
            status,
            status="completed",
            reason=f"trained {total_steps} of {total_steps} steps",
            ended_at=make_timestamp(),
        )
    if step is None:
        return replace(status, status="never_ran", reason="interrupted before its first row", ended_at=make_timestamp())
    return replace(
        status,
        status="interrupted",
        reason=f"interrupted after step {step} of {total_steps}",
        ended_at=make_timestamp(),
    )


def read_failure(trial: Any) -> Failure:
    """What a trial failed with. An error without a class of its own means that its process died."""
    import ray.cloudpickle

    # Written by this process, in its own session's folder. The trial's own getter reads the copy in the results
    # folder, which may be an older failure's.
    path = Path(trial.pickled_error_file) if trial.pickled_error_file else None
    if path is None or not path.exists():
        return Failure("error", "the trial failed before it could say why", is_retried=True)
    error = ray.cloudpickle.loads(path.read_bytes())
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RunFailedError):
        return cause.failure
    lines = [line.strip() for line in _ANSI_COLOR.sub("", str(cause)).splitlines() if line.strip()] or ["no message"]
    trace = _ANSI_COLOR.sub("", str(error))
    if _SETUP_ERROR_PHRASE in str(cause):
        return Failure("error", f"in setup, {lines[-1]}", is_retried=True, trace=trace)
    kind = "out of memory" if "memory pressure" in trace else PROCESS_DIED
    return Failure(kind, f"{type(cause).__name__}: {lines[0]}", is_retried=True, trace=trace)


def clear_metric_windows(trial: Any) -> None:
    """Drop the sliding windows that Tune keeps of every metric of a trial that has ended: they serve no more.

    They are half of what an ended trial takes in the driver's memory and in Tune's record of the experiment. The
    means, minima and maxima that Tune computed with them stay.
    """
    trial.run_metadata.metric_n_steps.clear()
    trial.run_metadata.invalidate_cache()


def copy_earlier_files(trial: Any, earlier_folder: Path) -> None:
    """Give Tune the rows that it wrote for this run in an earlier start, so that its files go on and lose nothing.

    trial: about to start. before: the folder of the earlier start's files. Tune itself does so only on its own
    restore, which is not used.
    """
    for name in ("result.json", "progress.csv"):
        source, target = earlier_folder / name, Path(trial.local_path) / name
        if source.exists() and not target.exists():
            with suppress(OSError):  # Tune's copy of older rows; ours are where they were
                trial.init_local_path()
                shutil.copyfile(source, target)
