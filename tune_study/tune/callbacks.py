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
from trainable.runs.orphans import end_leftovers
from trainable.runs.run_files import METRICS, read_rows
from tune_study.folder.outputs import ENDED, RunStatus, append_line, now, read_status, write_status
from tune_study.folder.summary import write_summary
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import RunSpec, StudyPlan
from tune_study.tune.progress import Progress, step_line, stop_reason
from tune_study.tune.trials import rows_by_run, run_ids_of

TRIES = 3
"""How often a run may fail in a row, without a step between, with what may pass."""


class _Failures(NamedTuple):
    """The furthest step of a trial whose row was on disk when it failed, and its failures since without another one."""

    furthest: int
    in_a_row: int


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IN_SETUP = "error raised in its creation task"


class Fetching(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """Has the rows of a run, which are in a storage, here before anyone asks how it ended: told before the Recorder.

    fetch: called with the run's id.
    """

    def __init__(self, fetch: Callable[[str], None]) -> None:
        self._fetch = fetch

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune stores its callbacks beside the results."""
        return {}

    def _look(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not trial.config["finished"]:
            for run_id in run_ids_of(trial.config):
                self._fetch(run_id)

    on_trial_recover = on_trial_complete = on_trial_error = _look


class Recorder(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """Keeps status.json, the logs and the shown progress of every run up to date.

    A trial whose config says `finished` only replays the last row of a run that ended before: of such a run nothing
    is recorded but the id of the trial that carried it. given_up: ids of trials whose failure is final. unwritten:
    statuses that a full disk did not take; the study goes on without them, and `settle` tries again.
    """

    def __init__(self, plan: StudyPlan, allotment: Allotment, progress: Progress) -> None:
        self._plan = plan
        self._allotment = allotment
        self._progress = progress
        self._specs: dict[str, RunSpec] = {spec.run_id: spec for spec in plan.runs}
        self._failures: dict[str, _Failures] = {}
        self.given_up: set[str] = set()
        self.unwritten: dict[str, RunStatus] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune stores its callbacks beside the results, and all that these know is on disk already."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs start, or start again after their process died."""
        carry_on_files(trial, self._plan.folder / trial.config["run_id"])
        for status in self._statuses(trial):
            if trial.config["finished"]:
                self._put(replace(status, trial_id=trial.trial_id))
            elif status.status not in ENDED:
                self._start(status, trial.trial_id)

    def _start(self, status: RunStatus, trial_id: str) -> None:
        started = status.started_at or now()
        self._put(RunStatus(status.run_id, "running", trial_id=trial_id, started_at=started))
        self._log(status.run_id, f"=== {status.run_id} started {now()}, trial {trial_id} ===")
        self._progress.start(status.run_id)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **i: Any) -> None:
        """Training steps are done; `result` has the rows of the runs, with a stop rule's decision in them."""
        note, _ = result.pop("note", ""), result.pop("saved", None)
        if trial.config["finished"]:
            return
        for run_id in run_ids_of(trial.config) if note else ():
            self._log(run_id, f"=== {note} ===")
            self._progress.remark(run_id, note)
        for run_id, row in rows_by_run(trial.config, result).items():
            self._row(run_id, row, ends_alone=trial.config["side_by_side"] and bool(row.get("stop_rule")))
        for run_id, reason in result.get("failed", {}).items():
            if (status := self._status(run_id)).status == "running":
                self._end(replace(status, status="failed", failure_class=NON_FINITE, reason=reason, ended_at=now()))

    def _row(self, run_id: str, row: dict[str, Any], ends_alone: bool) -> None:
        """ends_alone: whether the run ends with its row while the others of its trial go on."""
        status = self._status(run_id)
        if status.status in ENDED:  # told again by a trial that was started again
            return
        self._log(run_id, step_line(self._plan.study.family, row, self._specs[run_id].steps))
        self._progress.row(run_id, row)
        if ends_alone:
            self._conclude(status)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial failed. Tune would try it again for ever; whether it is depends on the failure, and how often it was.

        Failures count in a row until the trial gets further than ever before: a run of days meets more in all.
        """
        failed = failure(trial)
        if trial.config["finished"]:
            if self._count(trial) >= TRIES:  # the run has ended well, only its replay in Tune's own record fails
                self.given_up.add(trial.trial_id)
            return
        times = self._count(trial)
        again = failed.is_retried and times < TRIES
        for status in self._open(trial):
            left = [] if self._allotment.cluster else end_leftovers(self._plan.run_dir(status.run_id))
            if left:
                self._log(status.run_id, f"=== ended what it had started: {', '.join(left)} ===")
            if again:
                self._log(status.run_id, f"{failed.trace}\n=== {failed.kind}, trying again: {failed.message} ===")
                self._progress.again(status.run_id, f"{failed.kind}: {failed.message}")
        if again:
            return
        self.given_up.add(trial.trial_id)
        forget_windows(trial)
        often = f" ({times} times in a row without a step between)" if times > 1 else ""
        self._fail(trial, failed._replace(message=failed.message + often))

    def _count(self, trial: Any) -> int:
        """One more failure: how many it makes without a step beyond the furthest that the trial ever got to."""
        name = trial.config["run_id"]
        step = self._furthest(trial)
        before = self._failures.get(name, _Failures(-1, 0))
        times = 1 if step > before.furthest else before.in_a_row + 1
        self._failures[name] = _Failures(max(step, before.furthest), times)
        return times

    def _furthest(self, trial: Any) -> int:
        """The step to which all runs of a trial that go on have got; -1 before the first row, and where none goes on.

        They go on together: what one of them had written before the others joined it says nothing of this start.
        """
        running = (status.run_id for status in self._statuses(trial) if status.status == "running")
        return min((int(self._last_row(run_id).get("step", -1)) for run_id in running), default=-1)

    def _last_row(self, run_id: str) -> dict[str, Any]:
        """The last row of a run on disk; nothing before the first."""
        rows = read_rows(self._plan.run_dir(run_id) / METRICS, first=0)
        return rows[-1] if rows else {}

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs have trained all their steps, a rule has stopped them, or they were interrupted before."""
        if trial.config["finished"]:
            return
        for status in self._open(trial):
            if status.status == "running":  # one that never ran is not
                self._conclude(status)
        forget_windows(trial)

    def _conclude(self, status: RunStatus) -> None:
        """The run has ended, or was cut short, after its last row on disk, which has the decision of a stop rule."""
        self._end(ended_status(status, self._last_row(status.run_id), self._specs[status.run_id].steps))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed in a way that Tune itself calls final; the replay of an ended one changes nothing."""
        if not trial.config["finished"]:
            self._fail(trial, failure(trial))

    def _fail(self, trial: Any, failed: Failure) -> None:
        for status in self._open(trial):
            self._log(status.run_id, failed.trace)
            self._end(
                replace(status, status="failed", failure_class=failed.kind, reason=failed.message, ended_at=now())
            )

    def _open(self, trial: Any) -> list[RunStatus]:
        """Statuses of the trial's runs that have not ended well."""
        return [status for status in self._statuses(trial) if status.status not in ENDED]

    def _statuses(self, trial: Any) -> list[RunStatus]:
        return [self._status(run_id) for run_id in run_ids_of(trial.config)]

    def _status(self, run_id: str) -> RunStatus:
        status = self.unwritten.get(run_id) or read_status(self._plan.run_dir(run_id))
        return status or RunStatus(run_id, "never_ran")

    def settle(self) -> None:
        """Write the statuses that could not be written before; what still cannot stays in `unwritten`."""
        for status in list(self.unwritten.values()):
            self._put(status)

    def _put(self, status: RunStatus) -> None:
        try:
            write_status(self._plan.run_dir(status.run_id), status)
            self.unwritten.pop(status.run_id, None)
        except OSError:
            self.unwritten[status.run_id] = status

    def _end(self, status: RunStatus) -> None:
        self._put(status)
        self._log(status.run_id, f"=== {status.shown} {status.ended_at}: {status.reason} ===")
        with suppress(OSError):  # written again at the end
            write_summary(self._plan, self._allotment, closing=False)
        self._progress.end(status.run_id, status.shown, status.reason)

    def _log(self, run_id: str, line: str) -> None:
        with suppress(OSError):  # a line less, where the disk is full; rows are written by the runs themselves
            append_line(self._plan.output / self._specs[run_id].log, line)


def ended_status(status: RunStatus, row: dict[str, Any], total: int) -> RunStatus:
    """The final status of a run whose last row is `row`: stopped by a rule, completed, or cut short.

    row: empty where the run has written none; a row of step 0 is of a run that has started to train. A rule that fires
    at the last step counts: the run is early_stopped.
    """
    step = row.get("step")
    if row.get("stop_rule"):
        return replace(
            status,
            status="early_stopped",
            reason=stop_reason(row),
            stop_rule=row["stop_rule"],
            stop_value=row["stop_value"],
            stop_threshold=row["stop_threshold"],
            stop_step=row["stop_step"],
            ended_at=now(),
        )
    if step == total:
        return replace(status, status="completed", reason=f"trained {total} of {total} steps", ended_at=now())
    if step is None:
        return replace(status, status="never_ran", reason="interrupted before its first row", ended_at=now())
    return replace(status, status="interrupted", reason=f"interrupted after step {step} of {total}", ended_at=now())


def failure(trial: Any) -> Failure:
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
    lines = [line.strip() for line in _COLOURS.sub("", str(cause)).splitlines() if line.strip()] or ["no message"]
    trace = _COLOURS.sub("", str(error))
    if _IN_SETUP in str(cause):
        return Failure("error", f"in setup, {lines[-1]}", is_retried=True, trace=trace)
    kind = "out of memory" if "memory pressure" in trace else PROCESS_DIED
    return Failure(kind, f"{type(cause).__name__}: {lines[0]}", is_retried=True, trace=trace)


def forget_windows(trial: Any) -> None:
    """Drop the sliding windows that Tune keeps of every metric of a trial that has ended: they serve no more.

    They are half of what an ended trial takes in the driver's memory and in Tune's record of the experiment. The
    means, minima and maxima that Tune computed with them stay.
    """
    trial.run_metadata.metric_n_steps.clear()
    trial.run_metadata.invalidate_cache()


def carry_on_files(trial: Any, before: Path) -> None:
    """Give Tune the rows that it wrote for this run in an earlier start, so that its files go on and lose nothing.

    trial: about to start. before: the folder of the earlier start's files. Tune itself does so only on its own
    restore, which is not used.
    """
    for name in ("result.json", "progress.csv"):
        source, target = before / name, Path(trial.local_path) / name
        if source.exists() and not target.exists():
            with suppress(OSError):  # Tune's copy of older rows; ours are where they were
                trial.init_local_path()
                shutil.copyfile(source, target)
