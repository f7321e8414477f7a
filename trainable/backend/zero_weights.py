"""Weights of networks under DeepSpeed: replicated on every rank, or sharded over the ranks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainable.backend.torch_backend import list_named_parameters, list_named_weights
from trainable.backend.world import World
from trainable.models.interface import PassSettings
from trainable.runs.nonfinite import find_nonfinite_weights

MOMENTS = ("exp_avg", "exp_avg_sq")


class ReplicatedWeights:
    """Stages 1 and 2: every rank has all weights; DeepSpeed shards the float32 copy that it updates.

    trained_networks: the networks that DeepSpeed trains, by name. All ranks call every method.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.trained_networks = networks
        self.has_linked_moments = False

    def attach_engine(self, engine: Any) -> None:
        """Store the engine that DeepSpeed made of `trained_networks`."""
        self.engine = engine

    def gather_weights(self) -> AbstractContextManager[None]:
        """Context in which the run's networks have all their weights on this rank (see `Backend.gather_weights`)."""
        return nullcontext()

    def read_full(self, weight: nn.Parameter, moment: str | None) -> Tensor:
        """A full weight of `trained_networks` in float32, or one of its moments, gathered from the ranks."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        tensor: Tensor = (
            safe_get_full_fp32_param(weight) if moment is None else safe_get_full_optimizer_state(weight, moment)
        )
        return tensor

    def write_full(self, weight: nn.Parameter, moment: str | None, value: Tensor | None) -> None:
        """Set the weight or moment that `read_full` reads to `value`, which is the full tensor; None sets it to 0."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        value = torch.zeros_like(weight) if value is None else value.to(weight.device)
        if moment is not None:
            safe_set_full_optimizer_state(weight, value, moment)
            return
        # There are two copies of a weight: the sharded one of the optimizer, and the full one that passes read.
        safe_set_full_fp32_param(weight, value)
        weight.data.copy_(value)

    def make_moments(self) -> None:
        """Create moments of 0 to load a checkpoint into: the optimizer has none before its first step.

        It creates them in a step with learning rate 0 along a gradient of 0.
        """
        # At rate 0 the step changes no weight: AdamW's weight decay is multiplied by the rate, too.
        groups = self.engine.optimizer.optimizer.param_groups
        learning_rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        weights = [weight for _, weight in list_named_parameters(self.trained_networks)]
        self.engine.set_gradient_accumulation_boundary(True)
        # A sum over all weights, times 0: every weight gets a gradient, and every gradient is 0.
        self.engine.backward(self.engine(lambda: torch.stack([0 * weight.sum() for weight in weights]).sum()))
        self.engine.step()
        self.after_step()
        for group, learning_rate in zip(groups, learning_rates, strict=True):
            group["lr"] = learning_rate

    def after_step(self) -> None:
        """Do the work that is due after a step: link the moments of every parameter group to its weights, once.

        DeepSpeed 0.19 does so by itself, but at a time at which only the first group has moments, and never again.
        `read_full` and `write_full` find the moments of a weight through these links.
        """
        zero_optimizer = self.engine.optimizer
        if not self.has_linked_moments and len(zero_optimizer.optimizer.param_groups) > 1:
            zero_optimizer._hp_optimizer_states_linked = False
            zero_optimizer._lazy_init_hp_params_optimizer_state()
        self.has_linked_moments = True

    def find_nonfinite(self) -> list[str]:
        """`weight <name>` for every weight that is not finite; the same list on all ranks."""
        return find_nonfinite_weights(list_named_weights(self.trained_networks))


class ShardedWeights:
    """Stage 3: each rank has a shard of every weight, in GPU or host memory. See `ReplicatedWeights` for the methods.

    DeepSpeed's forward and backward passes gather the weights of one block at a time, which requires the same number of
    passes on all ranks. Only updates can promise that. DeepSpeed is therefore given copies of the run's networks, and
    trains those; the run's own networks, which all other passes read, have weights only within `gather_weights`.
    """

    def __init__(self, networks: Mapping[str, nn.Module], world: World) -> None:
        self.networks, self.world = networks, world
        self.trained_networks = {name: _copy_sharing_memory(network) for name, network in networks.items()}
        self.read_dtypes = _find_read_dtypes(networks.values())
        self.gather_depth = 0

    def attach_engine(self, engine: Any) -> None:
        """Store the engine, and free the full weights: by now DeepSpeed has shards of them."""
        self.engine = engine
        for network in (*self.networks.values(), *self.trained_networks.values()):
            for buffer in network.buffers():  # which are not sharded, and may have been made in host memory
                buffer.data = buffer.data.to(engine.device)
        self._free_weights()

    @contextmanager
    def gather_weights(self) -> Iterator[None]:
        """Gather on entry and free on exit.

        Linear layers of blocks are gathered in the type of the passes, to which a pass would round them anyway.
        """
        # Contexts may be nested, as when a gradient analysis rolls out episodes. Only the outermost one gathers.
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
        """Give every weight of the run's networks the values of its trained copy, from the shards of all ranks."""
        for name, network in self.networks.items():
            trained_weights = self.trained_networks[name].parameters()
            for weight, trained_weight in zip(network.parameters(), trained_weights, strict=True):
                dtype = self.read_dtypes.get(id(weight), torch.float32)
                weight.data = self._all_gather(trained_weight, _get_shard(trained_weight), dtype)

    def _free_weights(self) -> None:
        """Replace every weight of the run's networks by an empty tensor, which frees its memory."""
        for network in self.networks.values():
            for weight in network.parameters():
                weight.data = weight.data.new_empty(0)

    def _all_gather(self, weight: Any, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The full tensor, from a shard of each rank; the last shard is padded."""
        full_tensor = self.world.all_gather(shard.detach().to(weight.device, dtype))
        return full_tensor[: weight.ds_numel].view(weight.ds_shape)

    def read_full(self, weight: Any, moment: str | None) -> Tensor:
        """Concatenate the shards of the ranks."""
        return self._all_gather(weight, self._get_optimizer_shard(weight, moment), torch.float32)

    def write_full(self, weight: Any, moment: str | None, value: Tensor | None) -> None:
        """Keep this rank's shard of `value`.

        DeepSpeed has two copies of a shard of a weight, for the optimizer and for passes. Both are set.
        """
        shard = self._get_optimizer_shard(weight, moment)
        start = self.world.rank * shard.numel()
        local_values = shard.new_zeros(shard.shape) if value is None else value.flatten()[start : start + shard.numel()]
        # The last shard is padded, so its slice of the tensor may be shorter or empty.
        shard[: len(local_values)].copy_(local_values)
        if moment is None:
            weight.ds_tensor.data[: len(local_values)].copy_(local_values)

    def _get_unpadded_shard(self, weight: Any) -> nn.Parameter:
        """This rank's shard of a weight without its padding, which has arbitrary values."""
        shard = _get_shard(weight)
        # 0 for ranks behind the end of a tensor that has fewer entries than there are ranks.
        length = max(0, weight.ds_numel - self.world.rank * shard.numel())
        return nn.Parameter(shard.detach()[:length], requires_grad=False)

    def _get_optimizer_shard(self, weight: Any, moment: str | None) -> Tensor:
        """This rank's shard of the optimizer's copy, as a view: DeepSpeed's public function copies it on a GPU."""
        shard, _ = self.engine.optimizer._get_fp32_opt_state_partition(weight, True, moment)
        detached_shard: Tensor = shard.detach()
        return detached_shard

    def make_moments(self) -> None:
        """Create the moments in the form in which torch's AdamW creates them at its first step."""
        zero_optimizer = self.engine.optimizer
        for weight in zero_optimizer.fp32_partitioned_groups_flat:
            moments = {moment: torch.zeros_like(weight.detach()) for moment in MOMENTS}
            zero_optimizer.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    def after_step(self) -> None:
        """Nothing to do: in stage 3, moments are looked up in DeepSpeed's own tables and need no links."""

    def find_nonfinite(self) -> list[str]:
        """Check the shards of all ranks."""
        local_shards = [
            (name, self._get_unpadded_shard(weight)) for name, weight in list_named_weights(self.trained_networks)
        ]
        bad_names = {
            name for names in self.world.all_gather_object(find_nonfinite_weights(local_shards)) for name in names
        }
        # Ordered by weight instead of by the rank that found it, so that the list is the same on all ranks.
        return [f"weight {name}" for name, _ in local_shards if f"weight {name}" in bad_names]


def _get_shard(weight: Any) -> nn.Parameter:
    """This rank's shard of a weight as passes use it, flat and with its padding."""
    return nn.Parameter(weight.ds_tensor.detach(), requires_grad=False)


def _copy_sharing_memory(network: nn.Module) -> nn.Module:
    """A copy of a network that has its own parameters, which share memory with those of `network`."""
    # deepcopy treats every object in `memo` as already copied, so it copies only the modules around the parameters.
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in network.parameters()
    }
    return deepcopy(network, memo)


def _find_read_dtypes(networks: Iterable[nn.Module]) -> dict[int, torch.dtype]:
    """The type in which passes outside of updates read the parameters of linear layers, by the id of the parameter.

    A linear layer casts its weights to the type of the passes, so they may as well be gathered in it. Heads, embeddings
    and norms stay float32.
    """
    read_dtypes: dict[int, torch.dtype] = {}
    for trunk in chain.from_iterable(network.modules() for network in networks):
        pass_settings = getattr(trunk, "pass_settings", None)
        if isinstance(pass_settings, PassSettings):
            layers = [module for module in trunk.modules() if type(module) is nn.Linear]
            read_dtypes |= {id(weight): pass_settings.dtype for layer in layers for weight in layer.parameters()}
    return read_dtypes
