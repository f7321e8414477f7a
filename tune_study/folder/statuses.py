"""The statuses of a study's runs, from their files and while this process is the driver; which are run again.

The summary log has a line per ended run, and a closing block. Its lines have the form of the published scripts, with
the fields seed and early_stop added at the end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from search_spaces.language_model.family import get_model_name
from trainable.config.setting_types import format_value
from trainable.files.paths import escape_controls, write_text
from trainable.runs.history import RunHistory, settle_status
from trainable.runs.run_files import METRICS_FILE, Row, read_rows
from trainable.runs.study_record import CENSORED, ENDED_STATUSES, OPEN_STATUSES, StatusRecord, find_record, write_record
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, RunSpec, StudyPlan
from tune_study.plan.typed_settings import format_values

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
    status in memory is right, and the file is written again at the end.

    skipped_statuses: runs with one of these are not run again, nor those that have ended. All others get the status
    `waiting`.
    """

    def __init__(self, plan: StudyPlan, skipped_statuses: Iterable[str] = ()) -> None:
        self._plan = plan
        # In a search, a failed run is a result, since later points were drawn in view of it.
        self._final_statuses = ENDED_STATUSES if plan.search is None else (*ENDED_STATUSES, "failed")
        self._statuses: dict[str, StatusRecord] = {}
        self.finished: dict[str, StatusRecord] = {}
        """The statuses, by run_id, of the runs that are not run again."""
        skipped_statuses = (*skipped_statuses, *self._final_statuses)
        for run_id, status in read_statuses(plan).items():
            if status.status in skipped_statuses:
                self.finished[run_id] = status
            self.set(status if run_id in self.finished else replace(status, status="waiting"))

    def get(self, run_id: str) -> StatusRecord:
        """Return the status of a run."""
        return self._statuses[run_id]

    def list_all(self) -> list[StatusRecord]:
        """Return the statuses of all runs, in the order of the plan."""
        return list(self._statuses.values())

    def list_unfinished(self) -> list[StatusRecord]:
        """Return the statuses of the runs that a later start would train."""
        return [status for status in self.list_all() if status.status not in self._final_statuses]

    def set(self, status: StatusRecord) -> None:
        """Change the status of a run, and write it unless the disk is full."""
        self._statuses[status.run_id] = status
        with suppress(OSError):  # `close` tries again
            write_record(self._plan.get_run_dir(status.run_id), status)

    def censor_waiting(self, is_censored: Callable[[str], bool], reason: str) -> None:
        """Give waiting runs whose arm `is_censored` their final status."""
        for spec in self._plan.runs:
            if self._statuses[spec.run_id].status == "waiting" and is_censored(spec.arm):
                self.set(replace(self._statuses[spec.run_id], status=CENSORED, reason=reason))

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


# For each of our statuses, the status in the published logs, which record only whether a run's process ended normally.
_PUBLISHED_STATUS = {
    "completed": "success",
    "early_stopped": "success",
    "censored": "success",
    "failed": "fail",
    "interrupted": "interrupted",
    "never_ran": "missing",
}


def format_summary_line(plan: StudyPlan, spec: RunSpec, status: StatusRecord, gpu_label: str) -> str:
    """Format a run in the published form: fields joined by ` | `. seed and early_stop=<rule>@<step> are our additions.

    A run that a rule stopped has the published status `success`, because its process ended normally. A run that never
    started is `missing`.
    """
    published_fields = plan.fill_run_template(plan.study.name_templates.summary, spec).split(" | ")
    if status.status == "never_ran":
        return f"{published_fields[0]} | status=missing | seed={spec.seed}"
    rows = read_rows(plan.get_run_dir(spec.run_id) / METRICS_FILE)
    wall_time = "N/A"  # from the first start to the end, with pauses
    if status.started_at is not None and status.ended_at is not None:
        duration = datetime.fromisoformat(status.ended_at) - datetime.fromisoformat(status.started_at)
        wall_time = f"{int(duration.total_seconds())}s"
    stop_text = f"{status.stop_rule}@{status.stop_step}" if status.stop_rule else "none"
    fields = [
        *published_fields,
        *format_run_times(rows, plan.study.name_templates.summary_times),
        f"wall_time={wall_time}",
        f"gpu={gpu_label}",
        f"status={_PUBLISHED_STATUS[status.status]}",
        f"seed={spec.seed}",
        f"early_stop={stop_text}",
    ]
    line = " | ".join(fields)
    return f"{line}\n  error: {status.reason}" if status.status == "failed" else line


def format_run_times(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Format a field `<name>_time=` in seconds for each of `names`, from a run's rows; N/A if it has no total.

    total is over all starts, eval of validations and tests; collapse_first, collapse_multi and collapse are of the
    diagnostics of first turns, of all turns, and of both; train is total without eval and collapse.
    """
    # The row of a failure has no times, so the last row with times is used.
    total_seconds = next((row["seconds_total"] for row in reversed(rows) if row.get("seconds_total") is not None), None)
    if not isinstance(total_seconds, int | float):
        return [f"{name}_time=N/A" for name in names]
    validation, first_turn, multi_turn = (
        sum(row.get(f"seconds_{column}") or 0.0 for row in rows)
        for column in ("validation", "collapse_first_turn", "collapse_multi_turn")
    )
    seconds = {
        "total": total_seconds,
        "eval": validation,
        "collapse_first": first_turn,
        "collapse_multi": multi_turn,
        "collapse": first_turn + multi_turn,
        "train": max(0.0, total_seconds - validation - (first_turn + multi_turn)),
    }
    return [f"{name}_time={seconds[name]:.2f}s" for name in names]


def write_summary(plan: StudyPlan, resource_plan: ResourcePlan, statuses: Iterable[StatusRecord]) -> Path:
    """Write the summary log, and return its path. statuses: of the runs, in the order of the plan.

    It has a heading, a line per ended run, and a closing block. It is rewritten as a whole, so that a continued study
    has one line per run.
    """
    statuses = list(statuses)
    lines_by_run = {
        spec.run_id: format_summary_line(plan, spec, status, resource_plan.gpu_label)
        for spec, status in zip(plan.runs, statuses, strict=True)
    }
    # First in the order in which runs ended, as in the published logs.
    ended_statuses = sorted((end for end in statuses if end.ended_at), key=lambda status: status.ended_at or "")
    trainer, model = plan.base_config.trainer, "" if plan.model is None else f" ({get_model_name(plan.model)})"
    utilization = None if plan.model is None else plan.ppo_config.rollout.gpu_memory_utilization
    memory_text = "" if utilization is None else f"GPU memory util: {utilization} | "
    steps, title = trainer.total_training_steps, plan.study.name_templates.title
    lines = [
        f"=== {title} Runner{model}: {make_timestamp()} ===",
        f"Values: {format_values(plan.study, plan.values)} | Steps: {steps} | GPUs per exp: {resource_plan.gpu_label}",
        f"Groups: {' '.join(resource_plan.gpu_slots) or 'none'} | {memory_text}"
        f"ray_num_cpus: {resource_plan.cpus} | save_freq: {trainer.save_freq}",
    ]
    # The published scripts count lines, including retries.
    names = [status.status for status in statuses]
    published = Counter(_PUBLISHED_STATUS[name] for name in names)
    counts = {
        "Total": len(names),
        "Success": published["success"],
        "Failed": published["fail"],
        "Early stopped": names.count("early_stopped"),
        "Not ended": len(names) - published["success"] - published["fail"],
    }
    lines += [
        *(lines_by_run[status.run_id] for status in ended_statuses),
        "",
        f"=== {title} Summary ===",
        f"Project: {plan.wandb_project} | Steps: {steps} | GPU per exp: {resource_plan.gpu_label}",
        *lines_by_run.values(),
        " | ".join(f"{label}: {count}" for label, count in counts.items()),
    ]
    # Reasons may come from an untrusted folder, and users print logs with `cat`.
    write_text(plan.summary_log, escape_controls("\n".join(lines) + "\n", allowed="\n"))
    return plan.summary_log
