"""A run on disk, for all families of studies: its lock, rows and checkpoints, and whether it is over."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from torch import Tensor

from trainable.config.base_config import BaseRunConfig
from trainable.files.json_lines import LineEnd, Lines, abandon_lines, append_line
from trainable.runs.checkpoint import (
    iter_checkpoints,
    read_checkpoint,
    remove_checkpoints,
    write_checkpoint,
    write_rolling_checkpoint,
)
from trainable.runs.failures import CheckpointError
from trainable.runs.run_files import (
    ENDS_KEY,
    LINE_FILES,
    MAX_ROLLING_CHECKPOINTS,
    METRICS_FILE,
    STATE_FOLDER,
    Row,
    RunLines,
    acquire_lock,
    copy_run_files,
    find_best_step,
    parse_end,
    select_rows,
)

T = TypeVar("T")

LinesByFile = Mapping[str, Sequence[Mapping[str, Any]]]
"""The lines to append to files of the run's folder, by file name."""

LOCK_TIMEOUT_S = 60.0
"""Seconds to wait for an earlier process that is still training the run.

A worker that Ray was just starting may outlive a killed driver by up to half a minute (docs/reliability.md).
"""


@dataclass(frozen=True)
class TrainerState:
    """Everything that a run needs to continue after a step.

    tensors: weights and moments by name, of any shape. values: JSON-serializable values, including `step`, the number
    of trained steps.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


class Run:
    """The run of one configuration and one seed.

    run_id: name of the run. run_dir: folder of the rows and rolling checkpoints. checkpoint_dir: folder of the saved
    checkpoints, global_step_<N>. settings: the configuration, including the seed. identity: further columns that
    identify the run in every row. write: executes each write, and may wait while the disk is full. best_column: the
    column whose largest value marks the checkpoint that `trainer.keep_best` keeps. allows_other_settings: whether the
    checkpoints in `run_dir` may be from a run with other settings.

    A row is on disk and in `rows` before `append_row` returns. A run that continues from a checkpoint repeats the steps
    after it and writes the same rows again, since rows depend only on the settings and the seed. `drop_rows_after`
    forgets the earlier rows of these steps.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: Path,
        checkpoint_dir: Path,
        settings: BaseRunConfig,
        identity: Mapping[str, Any],
        write: Callable[[Callable[[], None]], None],
        best_column: str,
        allows_other_settings: bool,
    ) -> None:
        self.run_id, self.seed, self.settings = run_id, settings.seed, settings
        self.run_dir, self.checkpoint_dir = run_dir, checkpoint_dir
        self.identity = {**identity, "run_id": run_id, "seed": settings.seed}
        self.rows: list[Row] = []
        # Only language models have these two settings.
        self._best_column = best_column if getattr(settings.trainer, "keep_best", False) else ""
        self._keeps_last = getattr(settings.trainer, "keep_last", True)
        self._allows_other_settings = allows_other_settings
        self._lines = RunLines(dict.fromkeys(LINE_FILES, Lines(())))
        self._ends = dict.fromkeys(LINE_FILES, LineEnd())  # where each file ends now
        self._checkpoint_ends: dict[int, LineEnd] = {}  # where METRICS_FILE ended at each loaded checkpoint
        self._write = write
        self._lock: BinaryIO | None = None

    # ------------------------------------------------------------------ lock

    def lock(self) -> None:
        """Lock the run against other processes. Raise RunLockedError if one still has the lock after LOCK_TIMEOUT_S."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = acquire_lock(self.run_dir, LOCK_TIMEOUT_S)

    def unlock(self) -> None:
        """Allow another process to train the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ------------------------------------------------------------------ rows

    def load_rows(self) -> None:
        """Read the rows from disk."""
        self._lines = RunLines.read(self.run_dir)
        self._ends = {name: lines.end for name, lines in self._lines.files.items()}
        self.rows = self._lines.list_rows()

    def append_row(self, row: Mapping[str, Any], lines: LinesByFile) -> None:
        """Write `lines` and then `row`, without columns that were not measured (None).

        The row is written last because it marks the step as done. After a crash before that, the step is repeated.
        """
        for file_name, records in lines.items():
            for record in records:
                self._extend_file(file_name, append_line, record)
        # Without None, rows are shorter: most steps have no validation, diagnosis or gradient analysis.
        full_row = {name: value for name, value in {**self.identity, **row}.items() if value is not None}
        # The row vouches for the lines of the other files by recording where they end now.
        ends = {name: list(end) for name, end in self._ends.items() if end.line_count and name != METRICS_FILE}
        self._extend_file(METRICS_FILE, append_line, {**full_row, ENDS_KEY: ends} if ends else full_row)
        self.rows.append(full_row)

    def _extend_file(self, file_name: str, extend: Callable[[Path, T, LineEnd], LineEnd], content: T) -> None:
        """Call `extend` (`append_line` or `abandon_lines`) at the current end of the file, and update this end."""

        def write() -> None:
            self._ends[file_name] = extend(self.run_dir / file_name, content, self._ends[file_name])

        self._write(write)

    def is_final_row(self, row: Mapping[str, Any]) -> bool:
        """Check whether `row` is the run's last: all steps are trained, a stop rule fired, or the run failed."""
        is_trained = row.get("step") == self.settings.trainer.total_training_steps
        return is_trained or bool(row.get("stop_rule") or row.get("failure"))

    @property
    def is_over(self) -> bool:
        """Whether the run has written its final row."""
        return bool(self.rows) and self.is_final_row(self.rows[-1])

    def is_complete(self, notify: Callable[[str], None]) -> bool:
        """Check whether nothing is left to do: the final row and its checkpoint are on disk, and no line is damaged.

        If the final checkpoint is not kept, the final row is enough. If lines are damaged, or if a process died between
        these two writes, the run continues from an earlier checkpoint and writes both again. notify: called with a
        message if lines are damaged, or if the final checkpoint cannot be used.
        """
        damage = self._lines.find_damage()
        for problem in damage:
            notify(f"{self.run_id}: {problem}")
        if damage or not self.is_over:
            return False
        # A run that failed is complete without a final checkpoint.
        if self.failure or not (self.keeps_final_state or self.settings.trainer.save_freq > 0):
            return True
        try:
            self.load_checkpoint(self.rows[-1]["step"], notify)
        except CheckpointError:
            return False
        return True

    @property
    def failure(self) -> str:
        """Why the run failed, or empty."""
        return str(self.rows[-1].get("failure", "")) if self.rows else ""

    def drop_rows_after(self, step: int) -> None:
        """Forget the rows that the run writes again when it continues after `step` steps.

        With `first_row_step` 1, the row of step n is written after n steps; with 0, before step n + 1 is trained. On
        disk, repeated rows simply replace the earlier ones. Damaged lines are abandoned by a line that says so.
        """
        if self._lines.find_damage():
            ends = self._lines.get_ends(self._checkpoint_ends.get(step, LineEnd()))
            for name, end in self._ends.items():
                if end.line_count:
                    self._extend_file(name, abandon_lines, ends[name])
        self.rows = [row for row in self.rows if row["step"] < step + self.settings.first_row_step]

    def begin_with(self, parent: "Run", step: int) -> None:
        """Write the rows of `parent` up to `step`, and the lines that they vouch for, as the first ones of this run.

        parent: a run whose checkpoint after `step` was loaded. If a process dies before this run has a checkpoint of
        its own, the next one calls this again, and the lines so far no longer count.
        """
        for name, end in self._ends.items():
            if end.line_count:
                self._extend_file(name, abandon_lines, LineEnd())
        ends = parent._lines.get_ends(parent._checkpoint_ends[step])
        records = {name: Lines(parent._lines.files[name].lines[: end.line_count]).records for name, end in ends.items()}
        lines: LinesByFile = {name: records[name] for name in LINE_FILES if name != METRICS_FILE}
        for row in select_rows(records[METRICS_FILE]):
            self.append_row({**row, **self.identity}, lines)
            lines = {}
        self.load_rows()

    # ------------------------------------------------------------------ checkpoints

    def list_checkpoint_steps(self) -> set[int]:
        """List the steps after which there is a checkpoint on disk, usable or not."""
        return {step for step, _ in self._list_checkpoints()}

    def _list_checkpoints(self) -> list[tuple[int, Path]]:
        """List (step, folder) of all checkpoints. At the same step, rolling ones come before saved ones."""
        return [*iter_checkpoints(self.run_dir / STATE_FOLDER), *iter_checkpoints(self.checkpoint_dir)]

    def load_checkpoint(self, step: int, notify: Callable[[str], None]) -> TrainerState:
        """Load the state after `step` from a complete checkpoint of this run, or raise CheckpointError.

        notify: called with a message for each checkpoint that cannot be used.
        """
        # There may be a rolling and a saved checkpoint after the same step. Either will do.
        for path in (path for checkpoint_step, path in self._list_checkpoints() if checkpoint_step == step):
            try:
                tensors, values = read_checkpoint(path)
                self._validate_checkpoint(step, values)
                return TrainerState(tensors, values)
            except (CheckpointError, ValueError) as error:
                notify(f"{path} is not used: {error}")
        raise CheckpointError(f"{self.run_dir} has no usable checkpoint after step {step}.")

    def _validate_checkpoint(self, step: int, values: Mapping[str, Any]) -> None:
        """Raise ValueError unless this run wrote the checkpoint, and all lines up to it are on disk and intact."""
        saved_settings = type(self.settings).model_validate(values.get("settings"))
        if not (self._allows_other_settings or saved_settings.is_same_run(self.settings)):
            raise ValueError("it was written with other settings or another seed.")
        # If someone renamed the folder, the run would silently repeat or skip steps.
        if values.get("step") != step:
            raise ValueError(f"its name says step {step}, but it contains step {values.get('step')}.")
        row_end = parse_end(values.get("row_end"))
        if row_end is None:
            raise ValueError("the ends of the files are missing or malformed.")
        if not self._lines.is_intact_up_to(row_end):
            raise ValueError(f"rows or evaluations up to step {step} are damaged or missing.")
        self._checkpoint_ends[step] = row_end

    @property
    def best_step(self) -> int | None:
        """The step of the best row so far, if its checkpoint is kept; otherwise None."""
        return find_best_step(self.rows, self._best_column) if self._best_column else None

    @property
    def keeps_final_state(self) -> bool:
        """Whether to keep the last rolling checkpoint of a run that is over: it is wanted, or its row is the best."""
        return self._keeps_last or self.best_step == self.rows[-1]["step"]

    def remove_unwanted_state(self) -> None:
        """Remove all rolling checkpoints of a run that is over but its best, unless its last one is kept.

        A failed run keeps all.
        """
        if not (self.failure or self.keeps_final_state):
            remove_checkpoints(self.run_dir / STATE_FOLDER, {self.best_step})

    def copy_to(self, folder: Path) -> None:
        """Copy what a process on another node needs to continue: the lines, and the newest and the best state."""
        checkpoints = dict(iter_checkpoints(self.run_dir / STATE_FOLDER))
        wanted_steps = {max(checkpoints, default=None), self.best_step}
        names = [path.name for step, path in checkpoints.items() if step in wanted_steps]
        copy_run_files(self.run_dir, folder, names, links=True)

    def prepare_checkpoint(self, state: TrainerState, *, is_rolling: bool, is_permanent: bool) -> Callable[[], None]:
        """Make a function that writes a checkpoint as the newest rolling one, as a saved one, or as both.

        It writes the current state of the run, even if more rows follow before it is called, but the tensors must not
        change until then. Once the run is over, only the last rolling checkpoint is kept, to save disk space, and the
        best if wanted.
        """
        step = state.values["step"]
        # By the settings, a later start checks that the checkpoint belongs to its run, and by the end of the rows, that
        # they have not changed (`_validate_checkpoint`).
        row_end = list(self._ends[METRICS_FILE])
        settings = self.settings.model_dump(mode="json")
        values = deepcopy({**state.values, "settings": settings, "row_end": row_end})
        # Views, because swapping a tensor to a GPU changes where the data of the same object is.
        tensors = {name: tensor.detach() for name, tensor in state.tensors.items()}
        writes: list[Callable[[], None]] = []
        if is_permanent:
            writes.append(partial(write_checkpoint, self.checkpoint_dir / f"global_step_{step}", tensors, values))
        if is_rolling:
            folder, max_to_keep = self.run_dir / STATE_FOLDER, 1 if self.is_over else MAX_ROLLING_CHECKPOINTS
            writes.append(partial(write_rolling_checkpoint, folder, step, tensors, values, max_to_keep, self.best_step))

        def write_all() -> None:
            for write in writes:
                self._write(write)

        return write_all
