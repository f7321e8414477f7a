"""logs/<run>.log: the published summary, a line a run as it ends and a closing block, and what it leaves out."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from search_spaces.language_model.family import model_name
from trainable.config.setting_types import shown
from trainable.runs.run_files import METRICS, read_rows
from tune_study.folder.outputs import ENDED, RunStatus, now, read_status, write_text
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import PlanError, RunSpec, StudyPlan, template_words, values_said

DEFAULT_SKIPPED = ",".join(ENDED)
_SKIPPABLE = (*ENDED, "failed", "interrupted")

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
    words = template_words(plan.study, plan.run, spec.arm, spec.config, spec.seed)
    said = plan.study.names.summary.format(**words, experiment=spec.experiment_name).split(" | ")
    if status is None or status.status in ("never_ran", "running"):
        return f"{said[0]} | status=missing | seed={spec.seed}"
    stop = f"{status.stop_rule}@{status.stop_step}" if status.stop_rule else "none"
    fields = [
        *said,
        *run_times(read_rows(plan.run_dir(spec.run_id) / METRICS, first=0), plan.study.names.summary_times),
        f"wall_time={wall_seconds(status)}",
        f"gpu={gpu_label}",
        f"status={_PUBLISHED_STATUS[status.status]}",
        f"seed={spec.seed}",
        f"early_stop={stop}",
    ]
    line = " | ".join(fields)
    return f"{line}\n  error: {status.reason}" if status.status == "failed" else line


def run_times(rows: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """`<name>_time=` of a run in seconds from its rows, for each of `names`; N/A where it has none.

    total: seconds_total of the last row that has it, which the line of a failure has not. eval: validation and test.
    collapse_first, collapse_multi, collapse: diagnostics of first turns, of all turns, of both. train: total without
    eval and collapse.
    """
    total = next((row["seconds_total"] for row in reversed(rows) if row.get("seconds_total") is not None), None)
    if not isinstance(total, int | float):
        return [f"{name}_time=N/A" for name in names]
    spent = {
        name: sum(row.get(column) or 0.0 for row in rows)
        for name, column in (
            ("eval", "seconds_validation"),
            ("collapse_first", "seconds_collapse_first_turn"),
            ("collapse_multi", "seconds_collapse_multi_turn"),
        )
    }
    spent |= {"total": total, "collapse": spent["collapse_first"] + spent["collapse_multi"]}
    spent["train"] = max(0.0, total - spent["eval"] - spent["collapse"])
    return [f"{name}_time={spent[name]:.2f}s" for name in names]


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
        lines += ["", f"=== {plan.study.names.title} Summary ==="]
        lines += [f"Project: {plan.wandb_project} | Steps: {steps} | GPU per exp: {allotment.gpu_label}"]
        lines += [summary_line(plan, spec, status, allotment.gpu_label) for spec, status in found]
        lines += [_counts([status for _, status in found])]
    write_text(plan.summary_log, "\n".join(lines) + "\n")
    return plan.summary_log


def _counts(statuses: Sequence[RunStatus | None]) -> str:
    """How many runs there are and how they ended; the published counts are of lines, retries included."""
    words = [_PUBLISHED_STATUS.get(status.status if status else "never_ran", "missing") for status in statuses]
    stopped = sum(status is not None and status.status == "early_stopped" for status in statuses)
    left = len(words) - words.count("success") - words.count("fail")
    said = f"Total: {len(words)} | Success: {words.count('success')} | Failed: {words.count('fail')}"
    return f"{said} | Early stopped: {stopped} | Not ended: {left}"


def _heading(plan: StudyPlan, allotment: Allotment) -> list[str]:
    trainer, model = plan.base.trainer, "" if plan.model is None else f" ({model_name(plan.model)})"
    memory = "" if plan.model is None else f"GPU memory util: {plan.ppo.rollout.gpu_memory_utilization} | "
    return [
        f"=== {plan.study.names.title} Runner{model}: {now()} ===",
        f"Values: {values_said(plan.study, plan.values)} | Steps: {trainer.total_training_steps} | "
        f"GPUs per exp: {allotment.gpu_label}",
        f"Groups: {' '.join(allotment.slots) or 'none'} | {memory}"
        f"ray_num_cpus: {trainer.ray_num_cpus} | save_freq: {trainer.save_freq}",
    ]


def parse_skipped(text: str) -> tuple[str, ...]:
    """The statuses of --skip-statuses; PlanError unless they are statuses, and hold those of runs that have ended."""
    found = tuple(word.strip() for word in text.split(","))
    missing = [status for status in ENDED if status not in found]
    if missing or not set(found) <= set(_SKIPPABLE):
        raise PlanError(
            f"--skip-statuses '{shown(text)}' cannot be used: type {DEFAULT_SKIPPED}, and failed or interrupted after "
            f"them for runs that are not to be tried again. A run that has ended is never trained again in its folder: "
            f"type another --output for that."
        )
    return found


def finished_runs(plan: StudyPlan, skipped: Sequence[str] = ENDED) -> dict[str, RunStatus]:
    """The runs that are not run again, by run_id: those of a status in `skipped`."""
    found = {spec.run_id: read_status(plan.run_dir(spec.run_id)) for spec in plan.runs}
    return {run_id: status for run_id, status in found.items() if status is not None and status.status in skipped}
