"""Which backend a run's networks get."""

from collections.abc import Mapping, Sequence

from torch import nn

from trainable.backend.one_device import Backend, OneDevice
from trainable.backend.world import World
from trainable.sections import OptimConfig, TrainerConfig


def make_backend(
    trainer: TrainerConfig, world: World, name: str, networks: Mapping[str, nn.Module], rates: Sequence[float],
    settings: OptimConfig,
) -> Backend:  # fmt: skip
    """Torch on one device, or DeepSpeed where it is asked for or there are several ranks.

    name: of the optimizer in checkpoints. networks: by name. rates: learning rate of each of them.
    """
    if trainer.strategy == "deepspeed" or world.size > 1:
        from trainable.backend.zero import Zero

        return Zero(name, networks, rates, settings, trainer, world)
    return OneDevice(name, networks, rates, settings)
