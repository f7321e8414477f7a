"""One run on disk: its lock, its rows, its states, and whether it has ended. The same for every family of studies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from trainable.config.study_config import BaseRunConfig
from trainable.runs.checkpoint import (
    CheckpointError,
    iter_checkpoints,
    read_checkpoint,
    write_checkpoint,
    write_rolling_checkpoint,
)
from trainable.runs.run_files import (
    LEVELS_FILE,
    METRICS_FILE,
    STATE_FOLDER,
    acquire_lock,
    append_json_line,
    read_json_lines,
    read_rows,
)

Row = dict[str, Any]
"""A line of JSON on its way to a file of lines, or back from it: columns and their values."""

LinesByFile = Mapping[str, Sequence[Mapping[str, Any]]]
"""File of a run's folder -> lines to append to it."""

MAX_ROLLING_CHECKPOINTS = 2
"""Rolling states of a run that is under way: the newest, and the one before in case the newest is damaged."""

LOCK_TIMEOUT_S = 60.0
"""Seconds that a run waits for the process that trained it before."""


@dataclass(frozen=True)
class TrainerState:
    """All that a run needs to continue after a step.

    tensors: weights and moments by name, of any shape. values: what JSON can hold, `step` (steps trained) among them.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


def write_without_retry(operation: Callable[[], None]) -> None:
    """Write, whatever the disk says of it."""
    operation()


class Run:
    """The run of one configuration and one seed.

    run_id, seed: whose it is. run_dir: folder of rows and rolling states. checkpoint_dir: folder of the
    global_step_<N> checkpoints that stay. settings: its configuration, the seed included. identity: what else each row
    says of whose it is. write: does each write, and may wait for room on a full disk.

    A row is on disk, and among `rows`, before `append` returns. Rows of an attempt that was given up count no more
    once `read_state` was used: a run is a function of its settings and seed and writes the same rows again.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: Path,
        checkpoint_dir: Path,
        settings: BaseRunConfig,
        identity: Mapping[str, Any],
        write: Callable[[Callable[[], None]], None] = write_without_retry,
    ) -> None:
        self.run_id, self.seed, self.settings = run_id, settings.seed, settings
        self.run_dir, self.checkpoint_dir = run_dir, checkpoint_dir
        self.identity = {**identity, "run_id": run_id, "seed": settings.seed}
        self.rows: list[Row] = []
        self._write = write
        self._lock: BinaryIO | None = None
        run_dir.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ lock

    def lock(self) -> None:
        """Keep every other process from writing the run; BusyError where one does for LOCK_PATIENCE_S more."""
        self._lock = acquire_lock(self.run_dir, LOCK_TIMEOUT_S)

    def unlock(self) -> None:
        """Let another process train the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ------------------------------------------------------------------ rows

    def load_rows(self) -> None:
        """Read the rows that are on disk."""
        self.rows = read_rows(self.run_dir / METRICS_FILE, first_step=self.settings.first_row_step)

    def append_row(self, row: Mapping[str, Any], lines: LinesByFile) -> None:
        """Write `lines` and then `row`; what was not measured (None) takes no room."""
        for name, records in lines.items():
            for record in records:
                self._write(partial(append_json_line, self.run_dir / name, record))
        full_row = {name: value for name, value in {**self.identity, **row}.items() if value is not None}
        self._write(partial(append_json_line, self.run_dir / METRICS_FILE, full_row))
        self.rows.append(full_row)

    def is_final_row(self, row: Mapping[str, Any]) -> bool:
        """Whether `row` is the run's last: all steps are trained, a rule stopped it, or it failed."""
        is_trained = row.get("step") == self.settings.trainer.total_training_steps
        return is_trained or bool(row.get("stop_rule") or row.get("failure"))

    @property
    def is_over(self) -> bool:
        """Whether the last row on disk is the run's last."""
        return bool(self.rows) and self.is_final_row(self.rows[-1])

    def is_complete(self, notify: Callable[[str], None]) -> bool:
        """Whether nothing is left to do: the last row is on disk, and the state that follows it.

        A process may have died between the two, or before anybody recorded that the run had ended; a run that failed
        has no last state. note: told of a last state that cannot be used.
        """
        if not self.is_over or self.failure:
            return self.is_over
        try:
            self.load_checkpoint(self.rows[-1]["step"], notify)
        except CheckpointError:
            return False
        return True

    @property
    def failure(self) -> str:
        """Why the run failed; empty where it did not."""
        return str(self.rows[-1].get("failure", "")) if self.rows else ""

    def drop_rows_after(self, step: int) -> None:
        """Forget the rows that are written again by a run that continues after `step` steps."""
        self.rows = [row for row in self.rows if row["step"] < step + self.settings.first_row_step]

    # ------------------------------------------------------------------ states

    def list_checkpoint_steps(self) -> set[int]:
        """Steps after which there is a state on disk, whole or not."""
        return {step for step, _ in self._list_checkpoints()}

    def _list_checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of all states; of two after one step, the rolling one comes first."""
        return [*iter_checkpoints(self.run_dir / STATE_FOLDER), *iter_checkpoints(self.checkpoint_dir)]

    def load_checkpoint(self, step: int, notify: Callable[[str], None]) -> TrainerState:
        """The state after `step`, whole and this run's own; CheckpointError where there is none.

        note: told of each state that cannot be used, and why.
        """
        for path in (path for number, path in self._list_checkpoints() if number == step):
            try:
                tensors, values = read_checkpoint(path)
                self._validate_checkpoint(step, values)
            except (CheckpointError, ValueError) as error:
                notify(f"{path} is not used: {error}")
                continue
            return TrainerState(tensors, values)
        raise CheckpointError(f"{self.run_dir} has no usable state after step {step}.")

    def _validate_checkpoint(self, step: int, values: Mapping[str, Any]) -> None:
        """ValueError unless a state was written by this run, and the rows up to it are there."""
        saved_settings = type(self.settings).model_validate(values.get("settings"))
        if saved_settings.compute_hash() != self.settings.compute_hash() or saved_settings.seed != self.seed:
            raise ValueError("it was written with other settings or another seed.")
        if values.get("step") != step:
            raise ValueError(f"its name says step {step} and it holds step {values.get('step')}.")
        rows = [row for row in self.rows if row["step"] < step + self.settings.first_row_step]
        if [row["step"] for row in rows] != list(self.settings.get_row_steps(step)):
            raise ValueError(f"rows up to step {step} are missing in {METRICS_FILE}.")
        validated_steps = {row["step"] for row in rows if row.get("val_success") is not None}
        if not validated_steps <= {line.get("step") for line in read_json_lines(self.run_dir / LEVELS_FILE)}:
            raise ValueError(f"evaluations up to step {step} are missing in {LEVELS_FILE}.")

    def save_checkpoint(self, state: TrainerState, *, is_rolling: bool, is_permanent: bool) -> None:
        """Write a state where it is due: as the rolling one, as a checkpoint that stays, or as both.

        The rolling state of a run that is over is the only one that stays.
        """
        step = state.values["step"]
        values = {**state.values, "settings": self.settings.model_dump(mode="json")}
        if is_permanent:
            self._write(partial(write_checkpoint, self.checkpoint_dir / f"global_step_{step}", state.tensors, values))
        if is_rolling:
            max_to_keep = 1 if self.is_over else MAX_ROLLING_CHECKPOINTS
            self._write(
                partial(write_rolling_checkpoint, self.run_dir / STATE_FOLDER, step, state.tensors, values, max_to_keep)
            )
