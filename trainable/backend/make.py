"""Choose the backend of a run's networks: torch on one device, or DeepSpeed over ranks."""

from collections.abc import Mapping, Sequence

from torch import nn

from trainable.backend.torch_backend import Backend, TorchBackend, make_adamw
from trainable.backend.world import DistributedWorld, World
from trainable.config.run_config import RunConfig
from trainable.config.sections import OptimConfig


def make_backends(
    config: RunConfig, world: World, policy: nn.Module, head: nn.Module | None, critic: nn.Module | None
) -> dict[str, Backend]:
    """Make the backends by name: `actor` for the policy and a value head on its trunk, `critic` for a separate critic.

    config: the run's settings. world: the ranks of the run. policy: the policy. head: the value head on the policy's
    trunk; None without one. critic: the critic with its own trunk; None without one.
    """
    # The policy's optimizer trains a head on the policy's trunk, with the critic's learning rate.
    networks = {"actor": policy, **({} if head is None else {"head": head})}
    learning_rates = (config.actor.lr, config.critic.lr)[: len(networks)]
    backends = {"actor": _make_backend(config, world, "actor_optimizer", networks, learning_rates, config.actor)}
    if critic is not None:
        learning_rates = (config.critic.lr,)
        backends["critic"] = _make_backend(
            config, world, "critic_optimizer", {"critic": critic}, learning_rates, config.critic
        )
    return backends


def _make_backend(
    config: RunConfig,
    world: World,
    name: str,
    networks: Mapping[str, nn.Module],
    learning_rates: Sequence[float],
    settings: OptimConfig,
) -> Backend:
    """Make a DeepSpeed backend for a rank of a distributed world (even of one rank), otherwise a torch backend."""
    if isinstance(world, DistributedWorld):
        # Imported here because it needs an optional package.
        from trainable.backend.zero import ZeroBackend

        return ZeroBackend(name, networks, learning_rates, settings, config.trainer, world)
    optimizer = make_adamw(networks.values(), learning_rates, settings)
    loss_scale = config.model.loss_scale if config.model.dtype == "float16" else 1.0
    return TorchBackend(
        name, networks, optimizer, settings.grad_clip, bool(config.trainer.swap_to_host), loss_scale=loss_scale
    )
