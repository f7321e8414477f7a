"""Find saved checkpoints that are not where the study looks for them, for example after it was moved."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainable.config.aliases import flatten_settings
from trainable.files.paths import UnsafePathError, check_path
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import ENDED_STATUSES, StatusRecord, StudyRecord, find_record
from tune_study.plan.study_plan import find_output

_MAX_NAMED_RUNS = 3


class MissingCheckpoints(NamedTuple):
    """The missing saved checkpoints of a run. folder: where they belong. steps: their steps."""

    run_id: str
    folder: Path
    steps: tuple[int, ...]


def list_saved_steps(rows: Sequence[Mapping[str, Any]], save_freq: int, has_ended: bool) -> list[int]:
    """List the steps after which a run with these rows has certainly saved a checkpoint, global_step_<N>.

    The checkpoint of a step is written after its row, so the last row of an unfinished run does not count. A run that
    has ended saved its last state as well. Only steps that have a row count, since a last row of unknown origin may
    claim any number of steps.
    """
    if save_freq <= 0 or not rows:
        return []
    last_step = int(rows[-1]["step"])
    row_steps = {int(row["step"]) for row in rows if 0 < row["step"] < last_step}
    steps = sorted(step for step in row_steps if step % save_freq == 0)
    return [*steps, last_step] if has_ended and last_step > 0 else steps


def find_missing(folder: Path, study: StudyRecord) -> Iterator[MissingCheckpoints]:
    """Yield the missing saved checkpoints of each run.

    With a storage, saved checkpoints are kept there, so none counts as missing.

    folder: the study's folder. study: the content of its study.json.
    """
    save_freq = flatten_settings(study.settings).get("trainer.save_freq", -1)
    if study.storage or type(save_freq) is not int or save_freq <= 0:
        return
    folder = Path(os.path.abspath(folder))
    output = find_output(folder, study.run)
    for entry in study.runs:
        checkpoint_dir = _find_checkpoint_dir(output, entry.checkpoints)
        if checkpoint_dir is None:
            continue
        run_dir = folder / "runs" / entry.run_id
        status = find_record(StatusRecord, run_dir)
        has_ended = status is not None and status.status in ENDED_STATUSES
        saved_steps = list_saved_steps(read_rows(run_dir / METRICS_FILE), save_freq, has_ended)
        if missing_steps := tuple(
            step for step in saved_steps if not (checkpoint_dir / f"global_step_{step}").is_dir()
        ):
            yield MissingCheckpoints(entry.run_id, checkpoint_dir, missing_steps)


def _find_checkpoint_dir(output: Path, relative_path: str) -> Path | None:
    """Find a run's folder of saved checkpoints; None if study.json names none below `output`, or one behind a link."""
    path = PurePosixPath(relative_path)
    if not relative_path or path.is_absolute() or ".." in path.parts:
        return None
    with suppress(UnsafePathError):
        check_path(output, output / path)
        return output / path
    return None


def format_missing(missing_checkpoints: Sequence[MissingCheckpoints], output: Path) -> str:
    """Format one paragraph that names the checkpoints, where they belong, and what needs them.

    output: the folder in which model_saving/ belongs.
    """
    total = sum(len(missing.steps) for missing in missing_checkpoints)
    named_runs = "; ".join(
        f"{missing.run_id} step {format_steps(missing.steps)}" for missing in missing_checkpoints[:_MAX_NAMED_RUNS]
    )
    ellipsis = "; ..." if len(missing_checkpoints) > _MAX_NAMED_RUNS else ""
    count_text = "1 saved checkpoint is" if total == 1 else f"{total} saved checkpoints are"
    past_verb = "was" if total == 1 else "were"
    return (
        f"{count_text} not in {output / 'model_saving'}, or {past_verb} never saved, if --save-freq was changed: "
        f"{named_runs}{ellipsis}. Only `probe` of these steps needs them. If they were left behind where the study "
        f"was, copy the folder model_saving from there into {output}."
    )


def format_steps(steps: Sequence[int]) -> str:
    """Format steps as text; if there are more than six, only the first two and the last."""
    return ", ".join(map(str, steps)) if len(steps) <= 6 else f"{steps[0]}, {steps[1]}, ..., {steps[-1]}"
