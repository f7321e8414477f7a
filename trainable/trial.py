"""The Tune trial: the one class that Ray Tune constructs, steps and resets, whatever the family of its runs."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from trainable.runs.failures import RunFailedError, classify_failure
from trainable.runs.orphans import MARK_ENV, terminate_orphans
from trainable.runs.run_files import METRICS_FILE, read_rows

if TYPE_CHECKING:
    from trainable.runs.training import StepReport, TrainingLoop
    from trainable.storage.mirror import MirroredRun


class Trial(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """Trains one run, or the runs of several seeds side by side, and reports their rows to Ray Tune.

    config: what `Training` is given, and: run_id, the name of the trial; family, "module:NAME" of a TrainerFamily;
    side_by_side, whether the trial may have several runs; storage, the URI of the study's storage or None, with
    storage_patience, the seconds that it is waited for.

    A trial of one run reports its row, flat, with `note` (what the run met since its last row), `saved` (whether its
    state after this step is on disk) and `done`. One of several reports `rows` by run_id instead, with `failed`, the
    reason of every run that failed beside others, and `step`.

    Runs are continued from the newest whole state in their folders, whoever starts them again; no pickle is read. They
    are begun in the first step, not in `setup`: what Ray says of an error in setup is text, and the study has to know
    what kind of failure it was. Whatever is raised leaves here as a RunFailedError.
    """

    training: "TrainingLoop | None" = None
    mirror: "MirroredRun | None" = None

    def setup(self, config: dict[str, Any]) -> None:
        """Remember what to train; whatever process a run starts inherits whose it is."""
        self.trial_config = config
        os.environ[MARK_ENV] = str(self._list_run_dirs()[0])

    def _list_run_dirs(self) -> list[Path]:
        """Where the runs keep their rows."""
        return [Path(place["run_dir"]) for place in self.trial_config["runs"]]

    def step(self) -> dict[str, Any]:
        """Train to the next rows, which are on disk when they are reported."""
        try:
            return self._make_result(*self._train())
        except Exception as error:
            has_rows = any(read_rows(folder / METRICS_FILE, first_step=0) for folder in self._list_run_dirs())
            raise RunFailedError(classify_failure(error, has_rows)) from None

    def _train(self) -> tuple["StepReport", str]:
        """The report of a step, and what was met since the last one."""
        training = self.begin()
        if self.mirror is None:
            report = training.step()
            return report, report.note
        self.mirror.poll_interrupt()
        report = training.step()
        mirror_note = "" if self.trial_config["finished"] else self.mirror.push_step()
        return report, "; ".join(filter(None, (report.note, mirror_note)))

    def begin(self) -> "TrainingLoop":
        """The runs, locked and continued from their newest states; they are begun once."""
        if self.training is not None:
            return self.training
        if self.trial_config["storage"] is not None:
            from trainable.storage.mirror import MirroredRun

            self.mirror = MirroredRun(self.trial_config)
            self.trial_config = self.mirror.config
            os.environ[MARK_ENV] = str(self._list_run_dirs()[0])
        terminate_orphans(self._list_run_dirs()[0])  # of a process that died on this node
        # Ray's driver imports this module, and needs no torch.
        from trainable.runs.training import TrainingLoop

        module, _, name = self.trial_config["family"].partition(":")
        self.training = TrainingLoop(getattr(importlib.import_module(module), name), self.trial_config)
        return self.training

    def _make_result(self, report: "StepReport", note: str) -> dict[str, Any]:
        """The report as Tune keeps it. Tune counts the runs' own steps, also after a restart."""
        common_columns = {"training_iteration": report.step_count, "note": note, "saved": report.is_saved}
        if self.trial_config["side_by_side"]:
            run_columns = {"step": report.last_step, "rows": report.rows, "failed": report.failures}
            return {**common_columns, **run_columns, "done": report.is_over}
        (row,) = report.rows.values()
        # What a rule ends, the experiment's Stopper ends: it reads the rule in the row.
        return {**common_columns, **row, "done": report.is_over and (report.is_replayed or not row.get("stop_rule"))}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Train other runs in this process: everything is built anew."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Give back what the runs hold."""
        if self.training is not None:
            self.training.close()
            self.training = None
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None
