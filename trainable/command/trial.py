"""The Trainable of commands, in a separate module because it imports Ray."""

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from trainable.command.config import SETTINGS_SECTION, CommandConfig, make_config_class
from trainable.config.base_config import BaseRunConfig
from trainable.config.setting_types import flatten_settings
from trainable.trial import PPO

if TYPE_CHECKING:
    from trainable.runs.training import TrainerFamily


class Command(PPO):
    """Runs of a command of yours. Besides the settings of `CommandConfig`, those of the section `args` are yours.

    Example::

        param_space = {
            "command.run": "python train.py --beta {beta} --seed {seed} --output_dir {output}",
            "command.logs": "{output}/metrics.jsonl",
            "args.beta": tune.grid_search([0.0, 0.1]),
            "trainer.total_training_steps": 100,
        }
        tune.Tuner(Command, param_space=param_space).fit()
    """

    family, config_class = "trainable.command.trainer:make_family", CommandConfig

    @classmethod
    def get_config_class(cls, settings: Mapping[str, Any]) -> type[BaseRunConfig]:
        """See `PPO`: a class with the settings of the section `args`."""
        prefix = f"{SETTINGS_SECTION}."
        own = {key: value for key, value in flatten_settings(settings).items() if key.startswith(prefix)}
        return make_config_class({key.removeprefix(prefix): value for key, value in own.items()}, {})

    def load_family(self) -> "TrainerFamily":
        """See `PPO`: commands write below the folder of the run's saved checkpoints."""
        family: TrainerFamily = resolve_name(self.family)(Path(self._runs[0]["checkpoint_dir"]))
        return family
