"""logs/<run>.log: the published summary, a line a run as it ends and a closing block, and what it leaves out."""

from datetime import datetime
from pathlib import Path
from typing import Any

from trainable.run_files import METRICS, read_rows
from tune_study.outputs import ENDED, RunStatus, now, read_status, write_text
from tune_study.plan import TAGS, RunSpec, StudyPlan, model_name
from tune_study.resources import Allotment

_PUBLISHED_STATUS = {
    "completed": "success",
    "early_stopped": "success",
    "failed": "fail",
    "interrupted": "interrupted",
    "never_ran": "missing",
}


def summary_line(plan: StudyPlan, spec: RunSpec, status: RunStatus | None, gpu_label: str) -> str:
    """One run in the published form: fields joined by ` | `, then seed and early_stop, which are ours.

    A run that a rule stopped has the published status `success` (its process ended well) and names the rule:
    early_stop=<rule>@<step>. A run that never started is `missing`.
    """
    name = f"{plan.study.summary_key}={spec.arm}"
    if status is None or status.status in ("never_ran", "running"):
        return f"{name} | status=missing | seed={spec.seed}"
    stop = f"{status.stop_rule}@{status.stop_step}" if status.stop_rule else "none"
    fields = [
        name,
        *_filter_fields(plan, spec),
        *run_times(read_rows(plan.run_dir(spec.run_id) / METRICS)),
        f"wall_time={wall_seconds(status)}",
        f"gpu={gpu_label}",
        f"status={_PUBLISHED_STATUS[status.status]}",
        f"seed={spec.seed}",
        f"early_stop={stop}",
    ]
    line = " | ".join(fields)
    return f"{line}\n  error: {status.reason}" if status.status == "failed" else line


def _filter_fields(plan: StudyPlan, spec: RunSpec) -> list[str]:
    """The filter as the published line of this study names it: by its tag, or by the value that is swept."""
    settings = spec.config.filter
    include = f"include_zero={settings.rollout_filter_include_zero}"
    if plan.study.include_zero_option:
        return [f"filter={TAGS[settings.rollout_filter_include_zero]}", include]
    return [include, f"filter_value={settings.rollout_filter_value}"]


def run_times(rows: list[dict[str, Any]]) -> list[str]:
    """train_time, eval_time and total_time of a run in seconds, from its rows; N/A where it has none.

    total = seconds_total of the last row, eval = the sum of seconds_validation, train = total - eval.
    """
    total = rows[-1].get("seconds_total") if rows else None
    if not isinstance(total, int | float):
        return ["train_time=N/A", "eval_time=N/A", "total_time=N/A"]
    evaluation = sum(row.get("seconds_validation") or 0.0 for row in rows)
    return [f"train_time={total - evaluation:.2f}s", f"eval_time={evaluation:.2f}s", f"total_time={total:.2f}s"]


def wall_seconds(status: RunStatus) -> str:
    """Whole seconds from a run's first start to its end, pauses included; N/A without both."""
    if status.started_at is None or status.ended_at is None:
        return "N/A"
    span = datetime.fromisoformat(status.ended_at) - datetime.fromisoformat(status.started_at)
    return f"{int(span.total_seconds())}s"


def write_summary(plan: StudyPlan, allotment: Allotment, closing: bool) -> Path:
    """Write the summary anew from the statuses on disk: the heading, the ended runs, and with `closing` the block."""
    found = [(spec, read_status(plan.run_dir(spec.run_id))) for spec in plan.runs]
    ended = [(spec, status) for spec, status in found if status is not None and status.ended_at is not None]
    ended.sort(key=lambda pair: pair[1].ended_at or "")
    lines = [*_heading(plan, allotment)]
    lines += [summary_line(plan, spec, status, allotment.gpu_label) for spec, status in ended]
    if closing:
        steps = plan.base.trainer.total_training_steps
        lines += ["", f"=== {plan.study.title} Summary ==="]
        lines += [f"Project: {plan.study.wandb_project} | Steps: {steps} | GPU per exp: {allotment.gpu_label}"]
        lines += [summary_line(plan, spec, status, allotment.gpu_label) for spec, status in found]
    write_text(plan.summary_log, "\n".join(lines) + "\n")
    return plan.summary_log


def _heading(plan: StudyPlan, allotment: Allotment) -> list[str]:
    trainer = plan.base.trainer
    return [
        f"=== {plan.study.title} Runner ({model_name(plan.base.model.path)}): {now()} ===",
        f"Values: {','.join(plan.values)} | Steps: {trainer.total_training_steps} | "
        f"GPUs per exp: {allotment.gpu_label}",
        f"Groups: {' '.join(allotment.slots) or 'none'} | "
        f"GPU memory util: {plan.base.rollout.gpu_memory_utilization} | "
        f"ray_num_cpus: {trainer.ray_num_cpus} | save_freq: {trainer.save_freq}",
    ]


def finished_runs(plan: StudyPlan) -> dict[str, RunStatus]:
    """The runs that are never run again, by run_id."""
    found = {spec.run_id: read_status(plan.run_dir(spec.run_id)) for spec in plan.runs}
    return {run_id: status for run_id, status in found.items() if status is not None and status.status in ENDED}
