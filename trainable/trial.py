"""The Tune trial: the one class that Ray Tune constructs, steps and resets, whatever the family of its runs."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from trainable.runs.failures import RunFailedError, classify
from trainable.runs.orphans import MARK, end_leftovers
from trainable.runs.run_files import METRICS, read_rows

if TYPE_CHECKING:
    from trainable.runs.training import Report, Training
    from trainable.storage.mirror import Mirrored


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

    training: "Training | None" = None
    mirrored: "Mirrored | None" = None

    def setup(self, config: dict[str, Any]) -> None:
        """Remember what to train; whatever process a run starts inherits whose it is."""
        self.given = config
        os.environ[MARK] = str(self._folders()[0])

    def _folders(self) -> list[Path]:
        """Where the runs keep their rows."""
        return [Path(place["run_dir"]) for place in self.given["runs"]]

    def step(self) -> dict[str, Any]:
        """Train to the next rows, which are on disk when they are reported."""
        try:
            return self._result(*self._train())
        except Exception as error:
            has_rows = any(read_rows(folder / METRICS, first=0) for folder in self._folders())
            raise RunFailedError(classify(error, has_rows)) from None

    def _train(self) -> tuple["Report", str]:
        """The report of a step, and what was met since the last one."""
        training = self.begin()
        if self.mirrored is None:
            report = training.step()
            return report, report.note
        self.mirrored.before_step()
        report = training.step()
        more = "" if self.given["finished"] else self.mirrored.after_step()
        return report, "; ".join(filter(None, (report.note, more)))

    def begin(self) -> "Training":
        """The runs, locked and continued from their newest states; they are begun once."""
        if self.training is not None:
            return self.training
        if self.given["storage"] is not None:
            from trainable.storage.mirror import Mirrored

            self.mirrored = Mirrored(self.given)
            self.given = self.mirrored.config
            os.environ[MARK] = str(self._folders()[0])
        end_leftovers(self._folders()[0])  # of a process that died on this node
        # Ray's driver imports this module, and needs no torch.
        from trainable.runs.training import Training

        module, _, name = self.given["family"].partition(":")
        self.training = Training(getattr(importlib.import_module(module), name), self.given)
        return self.training

    def _result(self, report: "Report", note: str) -> dict[str, Any]:
        """The report as Tune keeps it. Tune counts the runs' own steps, also after a restart."""
        common = {"training_iteration": report.steps, "note": note, "saved": report.is_saved}
        if self.given["side_by_side"]:
            rows = {"step": report.step, "rows": report.rows, "failed": report.failed}
            return {**common, **rows, "done": report.is_over}
        (row,) = report.rows.values()
        # What a rule ends, the experiment's Stopper ends: it reads the rule in the row.
        return {**common, **row, "done": report.is_over and (report.is_replayed or not row.get("stop_rule"))}

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
        if self.mirrored is not None:
            self.mirrored.close()
            self.mirrored = None
