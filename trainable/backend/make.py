"""Which backend a run's networks get."""

from collections.abc import Mapping, Sequence

from torch import nn

from trainable.backend.one_device import Backend, OneDevice, adamw
from trainable.backend.world import Connected, World
from trainable.config.run_config import RunConfig
from trainable.config.sections import OptimConfig, TrainerConfig


def make_backends(
    config: RunConfig, world: World, policy: nn.Module, head: nn.Module | None, critic: nn.Module | None
) -> dict[str, Backend]:
    """Who owns the optimizers of a run: `actor`, with the value head on its trunk, and `critic`, one of its own."""
    networks = {"actor": policy, **({} if head is None else {"head": head})}
    rates = (config.actor.lr, config.critic.lr)[: len(networks)]
    found = {"actor": _make(config.trainer, world, "actor_optimizer", networks, rates, config.actor)}
    if critic is not None:
        rates = (config.critic.lr,)
        found["critic"] = _make(config.trainer, world, "critic_optimizer", {"critic": critic}, rates, config.critic)
    return found


def _make(
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
