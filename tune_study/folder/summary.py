"""Write the summary log of a study: a line per ended run, and a closing block.

The lines have the form of the published scripts, with the fields seed and early_stop added at the end.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from search_spaces.language_model.family import get_model_name
from trainable.files.paths import escape_controls, write_text
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import OPEN_STATUSES, StatusRecord, find_record
from tune_study.folder.statuses import make_timestamp
from tune_study.plan.study_plan import ResourcePlan, RunSpec, StudyPlan
from tune_study.plan.typed_settings import format_values

# For each of our statuses, the status in the published logs, which record only whether a run's process ended normally.
_PUBLISHED_STATUS = {
    "completed": "success",
    "early_stopped": "success",
    "censored": "success",
    "failed": "fail",
    "interrupted": "interrupted",
    "never_ran": "missing",
}


RunTimes = dict[tuple[str, str | None], list[str]]
"""The time fields of summary lines, by run_id and end time of the run, so that its rows are read only once."""


def format_summary_line(
    plan: StudyPlan, spec: RunSpec, status: StatusRecord | None, gpu_label: str, run_times: RunTimes | None = None
) -> str:
    """Format a run in the published form: fields joined by ` | `. seed and early_stop=<rule>@<step> are our additions.

    A run that a rule stopped has the published status `success`, because its process ended normally. A run that never
    started is `missing`. run_times: a cache, to which the times of the run are added.
    """
    published_fields = plan.fill_run_template(plan.study.name_templates.summary, spec).split(" | ")
    # A run that has not ended has no times and no outcome.
    if status is None or status.status in ("never_ran", *OPEN_STATUSES):
        return f"{published_fields[0]} | status=missing | seed={spec.seed}"
    run_times = {} if run_times is None else run_times
    key = (spec.run_id, status.ended_at)
    if key not in run_times:
        rows = read_rows(plan.get_run_dir(spec.run_id) / METRICS_FILE)
        run_times[key] = format_run_times(rows, plan.study.name_templates.summary_times)
    stop_text = f"{status.stop_rule}@{status.stop_step}" if status.stop_rule else "none"
    fields = [
        *published_fields,
        *run_times[key],
        f"wall_time={format_wall_seconds(status)}",
        f"gpu={gpu_label}",
        f"status={_PUBLISHED_STATUS[status.status]}",
        f"seed={spec.seed}",
        f"early_stop={stop_text}",
    ]
    line = " | ".join(fields)
    return f"{line}\n  error: {status.reason}" if status.status == "failed" else line


def format_run_times(rows: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
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


def format_wall_seconds(status: StatusRecord) -> str:
    """Format the whole seconds from a run's first start to its end, with pauses; N/A if either is unknown."""
    if status.started_at is None or status.ended_at is None:
        return "N/A"
    duration = datetime.fromisoformat(status.ended_at) - datetime.fromisoformat(status.started_at)
    return f"{int(duration.total_seconds())}s"


def write_summary(
    plan: StudyPlan, resource_plan: ResourcePlan, is_closing: bool, run_times: RunTimes | None = None
) -> Path:
    """Write the summary log from the statuses on disk, and return its path.

    It has a heading, a line per ended run and, if `is_closing`, a closing block. It is rewritten as a whole, so that a
    continued study has one line per run. run_times: a cache, to which times are added.
    """
    run_times = {} if run_times is None else run_times
    run_statuses = [(spec, find_record(StatusRecord, plan.get_run_dir(spec.run_id))) for spec in plan.runs]
    ended_runs = [
        (spec, status)
        for spec, status in run_statuses
        # A run that waits to be continued still has the end of its earlier start.
        if status is not None and status.ended_at is not None and status.status not in OPEN_STATUSES
    ]
    # Lines are in the order in which runs ended, as in the published logs.
    ended_runs.sort(key=lambda pair: pair[1].ended_at or "")
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
    lines += [
        format_summary_line(plan, spec, status, resource_plan.gpu_label, run_times) for spec, status in ended_runs
    ]
    if is_closing:
        lines += ["", f"=== {title} Summary ==="]
        lines += [f"Project: {plan.wandb_project} | Steps: {steps} | GPU per exp: {resource_plan.gpu_label}"]
        lines += [
            format_summary_line(plan, spec, status, resource_plan.gpu_label, run_times) for spec, status in run_statuses
        ]
        # The published scripts count lines, including retries.
        names = [status.status if status else "never_ran" for _, status in run_statuses]
        published = Counter(_PUBLISHED_STATUS.get(name, "missing") for name in names)
        counts = {
            "Total": len(names),
            "Success": published["success"],
            "Failed": published["fail"],
            "Early stopped": names.count("early_stopped"),
            "Not ended": len(names) - published["success"] - published["fail"],
        }
        lines += [" | ".join(f"{label}: {count}" for label, count in counts.items())]
    # Reasons may come from an untrusted folder, and users print logs with `cat`.
    write_text(plan.summary_log, escape_controls("\n".join(lines) + "\n", allowed="\n"))
    return plan.summary_log
