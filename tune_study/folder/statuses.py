"""The statuses of a study's runs, from their files and while this process is the driver; which are run again."""

from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from trainable.config.setting_types import format_value
from trainable.runs.history import RunHistory, settle_status
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import CENSORED, ENDED_STATUSES, OPEN_STATUSES, StatusRecord, find_record, write_record
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan

_ALWAYS_SKIPPED = tuple(status for status in ENDED_STATUSES if status != CENSORED)
DEFAULT_SKIPPED = ",".join(_ALWAYS_SKIPPED)
"""The published list. Runs that a search has censored are never run again either, typed or not."""
_SKIPPABLE = (*_ALWAYS_SKIPPED, "failed", "interrupted")


def make_timestamp() -> str:
    """Return the current time in UTC in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_statuses(plan: StudyPlan) -> dict[str, StatusRecord]:
    """Read the status of each run of a study, by run_id: as recorded unless the rows contradict it."""
    return {spec.run_id: RunHistory.read(plan.get_run_dir(spec.run_id), spec.steps).status for spec in plan.runs}


def find_finished_runs(plan: StudyPlan, skipped_statuses: Container[str] = ENDED_STATUSES) -> dict[str, StatusRecord]:
    """Find the runs that are not run again, with a status in `skipped_statuses`. Returns their statuses by run_id."""
    statuses = read_statuses(plan) if plan.folder.exists() else {}
    return {run_id: status for run_id, status in statuses.items() if status.status in skipped_statuses}


def parse_skipped_statuses(text: str) -> tuple[str, ...]:
    """Parse --skip-statuses. Raises PlanError if a status is unknown, or a status of ended runs is missing.

    A run that has ended is never trained again in its folder, because new rows would replace a finished result.
    """
    statuses = tuple(entry.strip() for entry in text.split(","))
    missing_statuses = [status for status in _ALWAYS_SKIPPED if status not in statuses]
    if missing_statuses or not set(statuses) <= set(_SKIPPABLE):
        raise PlanError(
            f"--skip-statuses '{format_value(text)}' is invalid: type {DEFAULT_SKIPPED}, followed by failed or "
            f"interrupted if such runs are not to be run again. A run that has ended is never trained again in its "
            f"folder: to train it again, type another --output."
        )
    return (*statuses, CENSORED)


class StudyStatuses:
    """The statuses of a study's runs while this process is its driver.

    No other process writes them. If a status.json is deleted, damaged, or not written because the disk is full, the
    status in memory is right, and the file is written again at the end. Runs that are
    not in `finished_ids` get the status `waiting`.
    """

    def __init__(self, plan: StudyPlan, finished_ids: Container[str]) -> None:
        self._plan = plan
        self._statuses: dict[str, StatusRecord] = {}
        for run_id, status in read_statuses(plan).items():
            self.set(status if run_id in finished_ids else replace(status, status="waiting"))

    def get(self, run_id: str) -> StatusRecord:
        """Return the status of a run."""
        return self._statuses[run_id]

    def list_all(self) -> list[StatusRecord]:
        """Return the statuses of all runs, in the order of the plan."""
        return list(self._statuses.values())

    def set(self, status: StatusRecord) -> None:
        """Change the status of a run, and write it unless the disk is full."""
        self._statuses[status.run_id] = status
        with suppress(OSError):  # `close` tries again
            write_record(self._plan.get_run_dir(status.run_id), status)

    def censor_waiting(self, is_censored: Callable[[str], bool], reason: str) -> list[StatusRecord]:
        """Give waiting runs whose arm `is_censored` their final status, and return these statuses."""
        final_statuses = [
            replace(self._statuses[spec.run_id], status=CENSORED, reason=reason)
            for spec in self._plan.runs
            if self._statuses[spec.run_id].status == "waiting" and is_censored(spec.arm)
        ]
        for status in final_statuses:
            self.set(status)
        return final_statuses

    def close(self, reason: str) -> str:
        """Give every run that has not ended a final status, and write all files that are out of date.

        reason: why the study ended, as the beginning of a sentence to which the step is added. Returns an error text,
        empty if all files are written.
        """
        error_text = ""
        for run_id, status in self._statuses.items():
            if status.status in OPEN_STATUSES:
                rows = read_rows(self._plan.get_run_dir(run_id) / METRICS_FILE)
                final_status = settle_status(status, reason, rows)
                # A run that never started gets no end time, and no line in the summary log. A run that was to be
                # continued keeps its earlier reason.
                if status.status == "running":
                    final_status = replace(final_status, ended_at=make_timestamp())
                elif final_status.status == "never_ran":
                    final_status = replace(final_status, reason=f"{reason} before it started")
                self._statuses[run_id] = final_status
            run_dir, final_status = self._plan.get_run_dir(run_id), self._statuses[run_id]
            try:
                if find_record(StatusRecord, run_dir) != final_status:
                    write_record(run_dir, final_status)
            except OSError as error:
                error_text = f"The statuses could not be written: {error}."
        return error_text
