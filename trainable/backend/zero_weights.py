"""Where the weights of networks under DeepSpeed are: whole on every rank, or in parts of which each rank has one."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainable.backend.one_device import list_named_parameters
from trainable.backend.world import World
from trainable.models.qwen2 import PassSettings
from trainable.runs.nonfinite import find_nonfinite_weights
from trainable.runs.state import get_trainable_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


class Weights(Protocol):
    """The weights of some networks, and the moments of their optimizer. Every method is called by all ranks."""

    @property
    def trained_networks(self) -> Mapping[str, nn.Module]:
        """The networks that DeepSpeed is given."""
        ...

    def attach_engine(self, engine: Any) -> None:
        """DeepSpeed has been given them, and made `engine` of them."""
        ...

    def gather_weights(self) -> AbstractContextManager[None]:
        """While it lasts the run's own networks have all of their weights on this rank (see `Backend.whole`)."""
        ...

    def read_full(self, weight: nn.Parameter, moment: str | None) -> Tensor:
        """A weight of `trained` as float32, or one of its moments, whole."""
        ...

    def write_full(self, weight: nn.Parameter, moment: str | None, value: Tensor | None) -> None:
        """Set what `get` gives; None: to 0."""
        ...

    def make_moments(self) -> None:
        """Make moments of 0: the optimizer has none before its first step."""
        ...

    def after_step(self) -> None:
        """The optimizer has made a step."""
        ...

    def find_nonfinite(self) -> list[str]:
        """`weight <name>` for every weight that is not finite; the same list on all ranks."""
        ...


class ReplicatedWeights:
    """Stages 1 and 2: every rank has all weights; DeepSpeed deals out the float32 copy that it updates."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.trained_networks = networks
        self.has_linked_moments = False

    def attach_engine(self, engine: Any) -> None:
        """Keep the engine."""
        self.engine = engine

    def gather_weights(self) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()

    def read_full(self, weight: nn.Parameter, moment: str | None) -> Tensor:
        """Collected from the ranks (see `Weights.get`)."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        tensor: Tensor = (
            safe_get_full_fp32_param(weight) if moment is None else safe_get_full_optimizer_state(weight, moment)
        )
        return tensor

    def write_full(self, weight: nn.Parameter, moment: str | None, value: Tensor | None) -> None:
        """Each rank keeps its part, and of weights the whole too (see `Weights.put`)."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        value = torch.zeros_like(weight) if value is None else value.to(weight.device)
        if moment is not None:
            safe_set_full_optimizer_state(weight, value, moment)
            return
        safe_set_full_fp32_param(weight, value)
        weight.data.copy_(value)

    def make_moments(self) -> None:
        """A step of rate 0 along a gradient of 0."""
        groups = self.engine.optimizer.optimizer.param_groups
        learning_rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        weights = [weight for _, weight in list_named_parameters(self.trained_networks)]
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(self.engine(lambda: torch.stack([0 * weight.sum() for weight in weights]).sum()))
        self.engine.step()
        self.after_step()
        for group, learning_rate in zip(groups, learning_rates, strict=True):
            group["lr"] = learning_rate

    def after_step(self) -> None:
        """Link every group's moments to its weights: DeepSpeed 0.19 does it when the first group alone has any."""
        zero_optimizer = self.engine.optimizer
        if not self.has_linked_moments and len(zero_optimizer.optimizer.param_groups) > 1:
            zero_optimizer._hp_optimizer_states_linked = False
            zero_optimizer._lazy_init_hp_params_optimizer_state()
        self.has_linked_moments = True

    def find_nonfinite(self) -> list[str]:
        """Of weights that are the same on all ranks."""
        return find_nonfinite_weights(_list_named_weights(self.trained_networks))


class ShardedWeights:
    """Stage 3: a rank has a part of every weight, in its own or the host's memory.

    DeepSpeed's forward and backward passes gather one block's weights after the other, which needs all ranks to make
    equally many passes. Only updates do. So DeepSpeed is given twins of the run's networks, and trains those; the
    networks themselves, which all other passes read, hold weights within `whole` alone.
    """

    def __init__(self, networks: Mapping[str, nn.Module], world: World) -> None:
        self.networks, self.world = networks, world
        self.trained_networks = {name: _copy_sharing_memory(network) for name, network in networks.items()}
        self.read_dtypes = {
            id(weight): dtype for part in networks.values() for weight, dtype in _iter_read_dtypes(part)
        }
        self.gather_depth = 0

    def attach_engine(self, engine: Any) -> None:
        """Keep the engine; DeepSpeed has cut up the twins, and what they shared with the networks is let go."""
        self.engine = engine
        self._free_weights()

    @contextmanager
    def gather_weights(self) -> Iterator[None]:
        """Gather at the start and let go at the end (see `Weights.whole`); within itself it does nothing.

        The linear layers of blocks are gathered in the type that passes compute in, to which a pass would round them.
        """
        if self.gather_depth == 0:
            self._gather()
        self.gather_depth += 1
        try:
            yield
        finally:
            self.gather_depth -= 1
            if self.gather_depth == 0:
                self._free_weights()

    def _gather(self) -> None:
        for name, network in self.networks.items():
            for weight, trained_weight in zip(
                network.parameters(), self.trained_networks[name].parameters(), strict=True
            ):
                weight.data = self._all_gather(trained_weight, _get_shard(trained_weight), self.read_dtypes[id(weight)])

    def _free_weights(self) -> None:
        for network in self.networks.values():
            for weight in network.parameters():
                weight.data = weight.data.new_empty(0)

    def _all_gather(self, weight: Any, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The ranks' parts of a tensor of a weight's shape; the last one is filled up."""
        full_tensor = self.world.all_gather(shard.detach().to(weight.device, dtype))
        return full_tensor[: weight.ds_numel].view(weight.ds_shape)

    def read_full(self, weight: Any, moment: str | None) -> Tensor:
        """Joined of the ranks' parts (see `Weights.get`)."""
        return self._all_gather(weight, self._get_optimizer_shard(weight, moment), torch.float32)

    def write_full(self, weight: Any, moment: str | None, value: Tensor | None) -> None:
        """Each rank keeps its part (see `Weights.put`): of weights both of DeepSpeed's copies."""
        shard = self._get_optimizer_shard(weight, moment)
        start = self.world.rank * shard.numel()
        local_values = shard.new_zeros(shard.shape) if value is None else value.flatten()[start : start + shard.numel()]
        shard[: len(local_values)].copy_(local_values)
        if moment is None:
            weight.ds_tensor.data[: len(local_values)].copy_(local_values)

    def _get_unpadded_shard(self, weight: Any) -> nn.Parameter:
        """This rank's part of a weight, without what fills it up, which may be anything."""
        shard = _get_shard(weight)
        length = max(0, weight.ds_numel - self.world.rank * shard.numel())
        return nn.Parameter(shard.detach()[:length], requires_grad=False)

    def _get_optimizer_shard(self, weight: Any, moment: str | None) -> Tensor:
        """This rank's part of what the optimizer holds: a view, since DeepSpeed's public form is a copy on a GPU."""
        shard, _ = self.engine.optimizer._get_fp32_opt_state_partition(weight, True, moment)
        detached_shard: Tensor = shard.detach()
        return detached_shard

    def make_moments(self) -> None:
        """As torch's AdamW makes them at its first step."""
        zero_optimizer = self.engine.optimizer
        for weight in zero_optimizer.fp32_partitioned_groups_flat:
            moments = {moment: torch.zeros_like(weight.detach()) for moment in MOMENTS}
            zero_optimizer.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    def after_step(self) -> None:
        """Moments are found by DeepSpeed's own tables."""

    def find_nonfinite(self) -> list[str]:
        """Of the ranks' parts."""
        local_shards = [
            (name, self._get_unpadded_shard(weight)) for name, weight in _list_named_weights(self.trained_networks)
        ]
        bad_names = {
            name for names in self.world.all_gather_object(find_nonfinite_weights(local_shards)) for name in names
        }
        return [f"weight {name}" for name, _ in local_shards if f"weight {name}" in bad_names]


def _get_shard(weight: Any) -> nn.Parameter:
    """This rank's part of a weight, as passes use it: flat."""
    return nn.Parameter(weight.ds_tensor.detach(), requires_grad=False)


def _list_named_weights(networks: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{name}.{key}", weight)
        for name, network in networks.items()
        for key, weight in get_trainable_parameters(network)
    ]


def _copy_sharing_memory(network: nn.Module) -> nn.Module:
    """A copy with parameters of its own on the same memory."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in network.parameters()
    }
    return deepcopy(network, memo)


def _iter_read_dtypes(network: nn.Module) -> Iterator[tuple[nn.Parameter, torch.dtype]]:
    """Each parameter with the type in which passes without an optimizer read it; heads, embedding, norms stay float32.

    A linear layer casts its weights to the type of the passes, so they may as well be gathered in it.
    """
    read_dtypes: dict[int, torch.dtype] = {}
    for trunk in network.modules():
        pass_settings = getattr(trunk, "pass_settings", None)
        if isinstance(pass_settings, PassSettings):
            layers = [module for module in trunk.modules() if type(module) is nn.Linear]
            read_dtypes |= {id(weight): pass_settings.dtype for layer in layers for weight in layer.parameters()}
    for weight in network.parameters():
        yield weight, read_dtypes.get(id(weight), torch.float32)
