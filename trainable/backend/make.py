"""Which backend a run's networks get."""

from collections.abc import Mapping, Sequence

from torch import nn

from trainable.backend.one_device import Backend, TorchBackend, make_adamw
from trainable.backend.world import DistributedWorld, World
from trainable.config.run_config import RunConfig
from trainable.config.sections import OptimConfig, TrainerConfig


def make_backends(
    config: RunConfig, world: World, policy: nn.Module, head: nn.Module | None, critic: nn.Module | None
) -> dict[str, Backend]:
    """Who owns the optimizers of a run: `actor`, with the value head on its trunk, and `critic`, one of its own."""
    networks = {"actor": policy, **({} if head is None else {"head": head})}
    learning_rates = (config.actor.lr, config.critic.lr)[: len(networks)]
    backends = {
        "actor": _make_backend(config.trainer, world, "actor_optimizer", networks, learning_rates, config.actor)
    }
    if critic is not None:
        learning_rates = (config.critic.lr,)
        backends["critic"] = _make_backend(
            config.trainer, world, "critic_optimizer", {"critic": critic}, learning_rates, config.critic
        )
    return backends


def _make_backend(
    trainer: TrainerConfig, world: World, name: str, networks: Mapping[str, nn.Module], learning_rates: Sequence[float],
    settings: OptimConfig,
) -> Backend:  # fmt: skip
    """DeepSpeed where this process is a rank among others (or made one by itself), else torch on one device.

    name: of the optimizer in checkpoints. networks: by name. rates: learning rate of each of them.
    """
    if isinstance(world, DistributedWorld):
        from trainable.backend.zero import ZeroBackend

        return ZeroBackend(name, networks, learning_rates, settings, trainer, world)
    return TorchBackend(name, networks, make_adamw(networks.values(), learning_rates, settings), settings.grad_clip)
