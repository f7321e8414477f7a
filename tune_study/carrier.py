"""The Tune trial that carries a run. The run's class is imported where the run is: the driver needs no torch."""

import importlib
from typing import Any

from ray import tune


class Carrier(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """Hands setup, step, reset and cleanup on to the Trainable that config["trainable"] names as "module:Class"."""

    def setup(self, config: dict[str, Any]) -> None:
        """Import the run's class and build it."""
        module, _, name = config["trainable"].partition(":")
        carried = getattr(importlib.import_module(module), name)
        # Ray's constructor would make a folder of its own in the user's home; this trial has its place already.
        self.run = carried.__new__(carried)
        self.run.config = config
        self.run.setup(config)

    def step(self) -> dict[str, Any]:
        """One training step of the run: its row. Tune counts the run's own steps, also after a restart."""
        row = self.run.step()
        return {**row, "training_iteration": row["step"]}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Carry another run in the same process, if the class can."""
        return bool(self.run.reset_config(new_config))

    def cleanup(self) -> None:
        """The run gives back what it holds."""
        self.run.cleanup()
