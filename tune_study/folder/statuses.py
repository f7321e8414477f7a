"""The status of each run: status.json, and how the rows of the run correct it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainable.files.json_values import find_object, write_object
from trainable.runs.run_ends import describe_end, find_contradiction
from trainable.runs.run_files import METRICS_FILE, RunLines, read_rows
from tune_study.plan.study_plan import StudyPlan


@dataclass(frozen=True)
class RunStatus:
    """The content of a run's status.json; its fields are the keys on disk.

    Attributes:
        run_id: the run.
        status: `running`, or one of `trainable.runs.records.STATUSES`.
        reason: why the run has this status, as a sentence.
        failure_class: kind of the failure (see `trainable.runs.failures`); empty unless the run has failed.
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
        return f"{self.status} ({self.failure_class})" if self.failure_class else self.status


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
        return _STATUS.validate_python({key: content[key] for key in field_names & content.keys()})
    except ValidationError:  # a value has another type than was written
        return None


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Write status.json of a run atomically."""
    write_object(run_dir / "status.json", asdict(status))


def make_final_status(status: RunStatus, rows: Sequence[Mapping[str, Any]], total_steps: int) -> RunStatus:
    """`status` with the end that the rows of the run tell: early_stopped, completed, interrupted or never_ran."""
    end = describe_end(rows, total_steps)
    stop_columns: dict[str, Any] = (
        {name: rows[-1].get(name) for name in ("stop_rule", "stop_value", "stop_threshold", "stop_step")}
        if end.status == "early_stopped"
        else {}
    )
    return replace(status, status=end.status, reason=end.reason, **stop_columns)


def resolve_status(run_dir: Path, run_id: str, total_steps: int) -> RunStatus:
    """The status of a run, by its status.json unless its rows say otherwise.

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
    return status


def close_unfinished(plan: StudyPlan, reason: str) -> None:
    """Give every run without a final status one: interrupted if it has a row, else never_ran.

    reason: why the study ended, the beginning of a sentence to which the step is added.
    """
    for spec in plan.runs:
        run_dir = plan.get_run_dir(spec.run_id)
        status = read_status(run_dir) or resolve_status(run_dir, spec.run_id, spec.steps)
        if status.status == "running":
            rows = read_rows(run_dir / METRICS_FILE, first_step=0)
            final_status = "interrupted" if rows else "never_ran"
            full_reason = f"{reason}, after step {rows[-1]['step']}" if rows else f"{reason} before its first step"
            write_status(run_dir, replace(status, status=final_status, reason=full_reason, ended_at=make_timestamp()))
        elif status.status == "never_ran":
            # A run that has never started has no time of an end, and appears in no line of the summary log.
            write_status(run_dir, replace(status, reason=f"{reason} before it started"))
