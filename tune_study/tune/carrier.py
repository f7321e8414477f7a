"""The Tune trial that carries a run. The run's class is imported where the run is: the driver needs no torch."""

import importlib
import os
from pathlib import Path
from typing import Any

from ray import tune

from trainable.runs.failures import RunFailedError, classify
from trainable.runs.run_files import METRICS, read_rows
from tune_study.host.orphans import MARK, end_leftovers


class Carrier(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """Hands step, reset and cleanup on to the Trainable that config["trainable"] names as "module:Class".

    The run is built in its first step, not in setup: what Ray says of an error in setup is text, and the study has to
    know what kind of failure it was. Whatever the run raises leaves here as a RunFailedError.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Remember what to carry; whatever process the run starts inherits whose it is."""
        self.given = config
        self.run: Any = None
        self.mirrored: Any = None
        os.environ[MARK] = str(self._folders()[0])

    def _folders(self) -> tuple[Path, ...]:
        """Where the runs keep their rows: one, or one a seed."""
        return tuple(Path(place["run_dir"]) for place in self.given.get("members", [self.given]))

    def step(self) -> dict[str, Any]:
        """One training step of the run: its row. Tune counts the run's own steps, also after a restart."""
        try:
            if self.run is None:
                self._build()
            if self.mirrored is not None:
                self.mirrored.before_step()
            row = self.run.step()
            if self.mirrored is not None and not self.given["finished"]:
                row["note"] = "; ".join(filter(None, (row.get("note"), self.mirrored.after_step())))
        except Exception as error:
            has_rows = any(read_rows(folder / METRICS, first=0) for folder in self._folders())
            raise RunFailedError(classify(error, has_rows)) from None
        return {"training_iteration": row["step"], **row}

    def _build(self) -> None:
        """Import the run's class and set it up, where a study has a storage in a folder of this node."""
        if self.given.get("storage") is not None:
            from trainable.runs.mirror import Mirrored

            self.mirrored = Mirrored(self.given)
            self.given = self.mirrored.config
            os.environ[MARK] = str(self._folders()[0])
        end_leftovers(self._folders()[0])  # of a process that died on this node
        module, _, name = self.given["trainable"].partition(":")
        carried = getattr(importlib.import_module(module), name)
        # Ray's constructor would make a folder of its own in the user's home; this trial has its place already.
        run = carried.__new__(carried)
        run.config = self.given
        run.setup(self.given)
        self.run = run

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Carry another run in the same process."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """The run gives back what it holds."""
        if self.run is not None:
            self.run.cleanup()
            self.run = None
        if self.mirrored is not None:
            self.mirrored.close()
            self.mirrored = None
