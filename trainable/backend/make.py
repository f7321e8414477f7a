"""Which backend a run's networks get."""

from collections.abc import Mapping, Sequence

from torch import nn

from trainable.backend.one_device import Backend, OneDevice, adamw
from trainable.backend.world import Connected, World
from trainable.sections import OptimConfig, TrainerConfig


def make_backend(
    trainer: TrainerConfig, world: World, name: str, networks: Mapping[str, nn.Module], rates: Sequence[float],
    settings: OptimConfig,
) -> Backend:  # fmt: skip
    """DeepSpeed where this process is a rank among others (or made one by itself), else torch on one device.

    name: of the optimizer in checkpoints. networks: by name. rates: learning rate of each of them.
    """
    if isinstance(world, Connected):
        from trainable.backend.zero import Zero

        return Zero(name, networks, rates, settings, trainer, world)
    return OneDevice(name, networks, adamw(networks.values(), rates, settings), settings.grad_clip)
