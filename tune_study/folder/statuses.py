"""The status of each run: status.json, how the rows of the run correct it, and what a driver knows of it."""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainable.files.json_values import find_object, write_object
from trainable.runs.failures import NON_FINITE
from trainable.runs.run_ends import CENSORED, OPEN_STATUSES, describe_end, find_contradiction, get_status_before_waiting
from trainable.runs.run_files import METRICS_FILE, RunLines, read_rows
from tune_study.plan.study_plan import StudyPlan


@dataclass(frozen=True)
class RunStatus:
    """The content of a run's status.json; its fields are the keys on disk.

    Attributes:
        run_id: the run.
        status: one of `trainable.runs.records.STATUSES`; while a driver runs the study, also `waiting` or `running`. A
            run that waits to be continued keeps all other fields of its earlier status.
        reason: why the run has this status, as a sentence.
        failure_class: kind of the failure (see `trainable.runs.failures`); empty unless the run has failed, and not
            been continued since.
        stop_rule, stop_value, stop_threshold, stop_step: decision of the rule that stopped the run early.
        trial_id: id of the run's last Tune trial.
        started_at, ended_at: first start and last end, ISO 8601 in UTC; None before them.
    """

    run_id: str
    status: str
    reason: str = ""
    failure_class: str = ""
    stop_rule: str = ""
    stop_value: float | None = None
    stop_threshold: float | None = None
    stop_step: int | None = None
    trial_id: str = ""
    started_at: str | None = None
    ended_at: str | None = None

    @property
    def display_text(self) -> str:
        """The status for display, such as `completed` or `failed (out of memory)`."""
        is_classified = self.failure_class and self.status not in OPEN_STATUSES
        return f"{self.status} ({self.failure_class})" if is_classified else self.status


_STATUS = TypeAdapter(RunStatus)


def make_timestamp() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_status(run_dir: Path) -> RunStatus | None:
    """The status of a run; None if it has none yet, or if its status.json is damaged.

    A damaged status.json does not stop `status` or `resume`: the rows of the run are the source of everything in it.
    """
    content = find_object(run_dir / "status.json")
    # Keys that this version does not know are ignored, so that it reads the files of a newer one.
    field_names = set(RunStatus.__dataclass_fields__)
    if content is None or not {"run_id", "status"} <= content.keys():
        return None
    try:
        status = _STATUS.validate_python({key: content[key] for key in field_names & content.keys()})
    except ValidationError:  # a value has another type than was written
        return None
    return status if all(map(_is_timestamp, (status.started_at, status.ended_at))) else None


def _is_timestamp(text: str | None) -> bool:
    """Whether `text` is a time like those of `make_timestamp`, from which durations are computed; true for None."""
    try:
        return text is None or datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Write status.json of a run atomically."""
    write_object(run_dir / "status.json", asdict(status))


def make_final_status(status: RunStatus, rows: Sequence[Mapping[str, Any]], total_steps: int) -> RunStatus:
    """`status` with the end that the rows of the run tell: any final status."""
    end = describe_end(rows, total_steps)
    end_fields: dict[str, Any] = (
        {name: rows[-1].get(name) for name in ("stop_rule", "stop_value", "stop_threshold", "stop_step")}
        if end.status == "early_stopped"
        else {}
    )
    if end.status == "failed":  # only non-finite numbers end with a row
        end_fields["failure_class"] = NON_FINITE
    return replace(status, status=end.status, reason=end.reason, **end_fields)


def resolve_status(run_dir: Path, run_id: str, total_steps: int, is_live: bool = False) -> RunStatus:
    """The status of a run, by its status.json unless its rows say otherwise.

    is_live: whether a driver runs the study. Without one, no run is waiting or running, whatever its status.json says.

    Without a readable status.json, the rows alone say how the run ended. A run that is recorded as ended while rows are
    damaged or missing is interrupted: it is then never shown as whole, and `resume` trains it again.
    """
    status, lines = read_status(run_dir), RunLines.read(run_dir)
    # 0: the smallest step that a row of any family can have.
    rows, damage = lines.list_rows(first_step=0), lines.find_damage()
    if status is None:
        if not rows and not damage:
            return RunStatus(run_id, "never_ran", "has not started")
        status = make_final_status(RunStatus(run_id, "never_ran"), rows, total_steps)
    contradiction = find_contradiction(status.status, rows, total_steps, damage)
    if contradiction:
        return RunStatus(run_id, "interrupted", contradiction, trial_id=status.trial_id, started_at=status.started_at)
    return status if is_live else _settle_status(status, "the process that ran the study is gone", bool(rows))


def _settle_status(status: RunStatus, reason: str, has_rows: bool) -> RunStatus:
    """The status of a run whose study has ended. reason: why a run that was running has not ended by itself."""
    if status.status == "running":
        return replace(status, status="interrupted" if has_rows else "never_ran", reason=reason)
    if status.status == "waiting":
        return replace(status, status=get_status_before_waiting(status.failure_class, has_rows))
    return status


class StudyStatuses:
    """The statuses of a study's runs while this process is its driver.

    No other process writes them, so those in memory are right if a status.json is deleted or damaged, or cannot be
    written because the disk is full. Such a file is written again when the run has a new row, and at the end.

    plan: the study, whose run folders exist. finished_ids: runs that are not run again and keep their statuses. All
    others wait for their turn.
    """

    def __init__(self, plan: StudyPlan, finished_ids: Container[str]) -> None:
        self._plan = plan
        self._statuses: dict[str, RunStatus] = {}
        for spec in plan.runs:
            status = resolve_status(plan.get_run_dir(spec.run_id), spec.run_id, spec.steps)
            self.set(status if spec.run_id in finished_ids else replace(status, status="waiting"))

    def get(self, run_id: str) -> RunStatus:
        """The status of a run."""
        return self._statuses[run_id]

    def list_all(self) -> list[RunStatus]:
        """The statuses of all runs, in the order of the plan."""
        return list(self._statuses.values())

    def set(self, status: RunStatus) -> None:
        """Change the status of a run, and write it unless the disk is full."""
        self._statuses[status.run_id] = status
        with suppress(OSError):  # `close` tries again
            self.restore_file(status.run_id)

    def restore_file(self, run_id: str) -> None:
        """Write status.json of a run unless it has the status in memory. Raises OSError if that fails."""
        run_dir, status = self._plan.get_run_dir(run_id), self._statuses[run_id]
        if read_status(run_dir) != status:
            write_status(run_dir, status)

    def censor_waiting(self, is_censored: Callable[[str], bool], reason: str) -> list[RunStatus]:
        """Give the runs that still wait, and whose arm `is_censored`, their final status; returns these."""
        final_statuses = [
            replace(self._statuses[spec.run_id], status=CENSORED, reason=reason)
            for spec in self._plan.runs
            if self._statuses[spec.run_id].status == "waiting" and is_censored(spec.arm)
        ]
        for status in final_statuses:
            self.set(status)
        return final_statuses

    def close(self, reason: str) -> str:
        """Give every run that has not ended a final status, and write all files that do not have theirs.

        reason: why the study ended, the beginning of a sentence to which the step is added. Returns an error text,
        empty if all files are written.
        """
        error_text = ""
        for run_id, status in self._statuses.items():
            if status.status in OPEN_STATUSES:
                self._statuses[run_id] = self._close_run(status, reason)
            try:
                self.restore_file(run_id)
            except OSError as error:
                error_text = f"The statuses could not be written: {error}."
        return error_text

    def _close_run(self, status: RunStatus, reason: str) -> RunStatus:
        """The final status of a run that has not ended: interrupted if it has a row, else never_ran."""
        rows = read_rows(self._plan.get_run_dir(status.run_id) / METRICS_FILE, first_step=0)
        if status.status == "running":
            full_reason = f"{reason}, after step {rows[-1]['step']}" if rows else f"{reason} before its first step"
            return replace(_settle_status(status, full_reason, bool(rows)), ended_at=make_timestamp())
        final_status = _settle_status(status, reason, bool(rows))
        # A run that has never started has no time of an end, and appears in no line of the summary log. One that was to
        # be continued keeps its earlier reason.
        is_unstarted = final_status.status == "never_ran"
        return replace(final_status, reason=f"{reason} before it started") if is_unstarted else final_status
