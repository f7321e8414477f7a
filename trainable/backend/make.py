"""Choose the backend of a run's networks: torch on one device, or DeepSpeed over ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from trainable.backend.torch_backend import TorchBackend, make_adamw
from trainable.backend.world import DistributedWorld, World
from trainable.config.run_config import RunConfig
from trainable.config.sections import OptimConfig

if TYPE_CHECKING:
    from trainable.backend.zero import ZeroBackend  # it needs an optional package

Backend: TypeAlias = "TorchBackend | ZeroBackend"
"""Owns the optimizer of some networks. With sharded weights, its networks are copies of the run's own ones, which have
weights only within `gather_weights`."""


def make_backends(
    config: RunConfig, world: World, policy: nn.Module, head: nn.Module | None, critic: nn.Module | None
) -> dict[str, Backend]:
    """Make the backends by name: `actor` for the policy and a value head on its trunk, `critic` for a separate critic.

    config: the run's settings. world: the ranks of the run. policy: the policy. head: the value head on the policy's
    trunk; None without one. critic: the critic with its own trunk; None without one.
    """

    def make_backend(
        name: str, own_networks: dict[str, nn.Module], rates: Sequence[float], settings: OptimConfig
    ) -> Backend:
        """Make a DeepSpeed backend for a rank of a distributed world (even of one rank), otherwise a torch backend."""
        if isinstance(world, DistributedWorld):
            # Imported here because it needs an optional package.
            from trainable.backend.zero import ZeroBackend

            return ZeroBackend(name, own_networks, rates, settings, config.trainer, world)
        optimizer = make_adamw(own_networks.values(), rates, settings)
        loss_scale = config.model.loss_scale if config.model.dtype == "float16" else 1.0
        swaps_to_host = bool(config.trainer.swap_to_host)
        return TorchBackend(name, own_networks, optimizer, settings.grad_clip, swaps_to_host, loss_scale=loss_scale)

    # The policy's optimizer trains a head on the policy's trunk.
    networks = {"actor": policy, **({} if head is None else {"head": head})}
    rates = list_learning_rates(config)
    backends = {"actor": make_backend("actor_optimizer", networks, rates["actor"][: len(networks)], config.actor)}
    if critic is not None:
        backends["critic"] = make_backend("critic_optimizer", {"critic": critic}, rates["critic"], config.critic)
    return backends


def list_learning_rates(config: RunConfig) -> dict[str, tuple[float, ...]]:
    """List the learning rates of each backend's networks. A head on the policy's trunk has that of the critic."""
    return {"actor": (config.actor.lr, config.critic.lr), "critic": (config.critic.lr,)}
