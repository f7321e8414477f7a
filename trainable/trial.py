"""The trial, which Ray Tune constructs, steps and resets, for runs of every family."""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from trainable.backend.gpus import take_gpus
from trainable.files.run_marks import MARK_ENV
from trainable.runs.failures import RunFailedError, classify_failure
from trainable.runs.orphans import terminate_orphans
from trainable.runs.run_files import METRICS_FILE, read_rows

if TYPE_CHECKING:
    from trainable.runs.training import StepReport, TrainingLoop
    from trainable.storage.mirror import MirroredTrial


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector off, such as during imports, and from looking at the objects of new modules later.

    These stay as long as the process. To look through them takes about a seventh of the time of the imports.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if len(sys.modules) > num_modules:
            gc.freeze()


class Trial(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """Trains one run, or the runs of several seeds side by side, and reports their rows to Ray Tune.

    config: the configuration of `TrainingLoop`, and in addition these keys.
        run_id: name of the trial.
        family: "module:NAME" of a TrainerFamily.
        side_by_side: whether the family trains several seeds in one trial.
        storage: URI of the study's storage, or None.
        storage_patience: seconds to wait for that storage.

    A trial with one run reports the columns of its row, and in addition `note` (notable events since the last row),
    `saved` (whether a checkpoint of this step is on disk) and `done`. A trial with several runs reports `rows` by
    run_id instead of columns, `step`, and `failed`: the reason of each run that failed while others could continue.

    A run continues from the newest complete checkpoint in its folder, whichever command restarts it. No pickle is read.
    Runs begin in the first step rather than in `setup`, because Ray reports an error in `setup` as text only, and the
    study needs to know the kind of failure. Every error leaves a step as a RunFailedError.
    """

    training: "TrainingLoop | None" = None
    mirror: "MirroredTrial | None" = None

    def setup(self, config: dict[str, Any]) -> None:
        """Store the configuration, and mark this process and its children as belonging to the run."""
        self.trial_config = config
        os.environ[MARK_ENV] = str(self._list_run_dirs()[0])
        if ray.is_initialized():  # a trial may also be constructed without Ray
            take_gpus(ray.get_gpu_ids(), os.environ)

    def _list_run_dirs(self) -> list[Path]:
        """The folders in which the runs keep their rows."""
        return [Path(run["run_dir"]) for run in self.trial_config["runs"]]

    def step(self) -> dict[str, Any]:
        """Train to the next rows. They are on disk before they are reported. Raises RunFailedError."""
        try:
            return self._make_result(*self._train())
        except Exception as error:
            # Read from disk, since the error may have come before the runs were loaded.
            has_rows = any(read_rows(folder / METRICS_FILE, first_step=0) for folder in self._list_run_dirs())
            # Without the cause: a RunFailedError consists of text and flags, so that it can be sent to the study. The
            # traceback of the cause is part of it, as text.
            raise RunFailedError(classify_failure(error, has_rows)) from None

    def _train(self) -> tuple["StepReport", str]:
        """Train one step; return its report, and a note about events since the last report."""
        training = self.begin()
        if self.mirror is None:
            report = training.step()
            return report, report.note
        # Before the step: the interrupt file is in the storage, and the training loop looks for a local one.
        self.mirror.poll_interrupt()
        report = training.step()
        training.finish_writing()
        # Finished runs only report their last row again, so there is nothing new to copy.
        mirror_note = "" if self.trial_config["finished"] else self.mirror.push_step()
        return report, "; ".join(filter(None, (report.note, mirror_note)))

    def begin(self) -> "TrainingLoop":
        """Lock the runs and continue them from their newest checkpoints; later calls return the same loop."""
        if self.training is not None:
            return self.training
        if self.trial_config["storage"] is not None:
            from trainable.storage.mirror import MirroredTrial

            self.mirror = MirroredTrial(self.trial_config)
            # Now with folders of this node, which mirror those in the storage. The mark names such a folder, so it has
            # to be set again.
            self.trial_config = self.mirror.config
            os.environ[MARK_ENV] = str(self._list_run_dirs()[0])
        # An earlier process of this trial may have died on this node, and its children may still occupy a GPU.
        terminate_orphans(self._list_run_dirs()[0])
        module, _, name = self.trial_config["family"].partition(":")
        # Imported here because Ray's driver imports this module, too, and should not have to load torch.
        with _pause_garbage_collection():
            from trainable.runs.training import TrainingLoop

            family = getattr(importlib.import_module(module), name)
        self.training = TrainingLoop(family, self.trial_config)
        return self.training

    def _make_result(self, report: "StepReport", note: str) -> dict[str, Any]:
        """Make the result that Tune records. Its `training_iteration` counts the steps of the runs, across restarts."""
        common_columns = {"training_iteration": report.step_count, "note": note, "saved": report.is_saved}
        if self.trial_config["side_by_side"]:
            run_columns = {"step": report.last_step, "rows": report.rows, "failed": report.failures}
            return {**common_columns, **run_columns, "done": report.is_over}
        (row,) = report.rows.values()
        # A run that a stop rule has ended is not `done` here: the experiment's Stopper reads the rule in this row, and
        # ends the trial. A row that is reported again is always `done`, so that an experiment without our Stopper ends
        # as well.
        return {**common_columns, **row, "done": report.is_over and (report.is_replayed or not row.get("stop_rule"))}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Close these runs, and prepare the process for those of `new_config`, for which everything is built anew."""
        self.cleanup()
        self.setup(new_config)
        return True  # tells Ray that the process can be used again

    def cleanup(self) -> None:
        """Close the runs, then the mirror that copies their files."""
        if self.training is not None:
            self.training.close()
            self.training = None
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None
