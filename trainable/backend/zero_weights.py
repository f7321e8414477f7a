"""Weights of networks under DeepSpeed: replicated on every rank, or sharded over ranks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainable.backend.meter import find_nonfinite_weights
from trainable.backend.torch_backend import list_named_parameters, list_named_weights
from trainable.backend.world import World
from trainable.models.interface import PassSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class ReplicatedWeights:
    """Stages 1 and 2: every rank has all weights; DeepSpeed shards the float32 copy that it updates.

    trained_networks: the networks that DeepSpeed trains, by name. All ranks must call every method.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.trained_networks = networks
        self.has_linked_moments = False

    def attach_engine(self, engine: Any) -> None:
        """Store the engine that DeepSpeed made of `trained_networks`."""
        self.engine = engine

    def gather_weights(self) -> AbstractContextManager[None]:
        """Return a context without effect: every rank has all weights (see `Backend.gather_weights`)."""
        return nullcontext()

    def read_full(self, weight: nn.Parameter, moment: str | None) -> Tensor:
        """Gather a full weight of `trained_networks` in float32, or one of its moments, from all ranks."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if moment is not None:
            self._link_moments()
        tensor: Tensor = (
            safe_get_full_fp32_param(weight) if moment is None else safe_get_full_optimizer_state(weight, moment)
        )
        return tensor

    def write_full(self, weight: nn.Parameter, moment: str | None, value: Tensor | None) -> None:
        """Set the weight or moment that `read_full` reads to the full tensor `value`, or to 0 if None."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        value = torch.zeros_like(weight) if value is None else value.to(weight.device)
        if moment is not None:
            self._link_moments()
            safe_set_full_optimizer_state(weight, value, moment)
            return
        # A weight has two copies: the optimizer's, which is sharded, and the full one for passes.
        safe_set_full_fp32_param(weight, value)
        weight.data.copy_(value)

    def make_moments(self) -> None:
        """Create moments of 0 to load a checkpoint into, by a step with learning rate 0 along a gradient of 0.

        The optimizer has no moments before its first step.
        """
        # With rate 0 the step changes no weight, because the rate multiplies AdamW's weight decay, too.
        groups = self.engine.optimizer.optimizer.param_groups
        learning_rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        weights = [weight for _, weight in list_named_parameters(self.trained_networks)]
        self.engine.set_gradient_accumulation_boundary(True)
        # A sum over all weights, times 0, so that every weight gets a gradient of 0.
        self.engine.backward(self.engine(lambda: torch.stack([0 * weight.sum() for weight in weights]).sum()))
        self.engine.step()
        for group, learning_rate in zip(groups, learning_rates, strict=True):
            group["lr"] = learning_rate

    def _link_moments(self) -> None:
        """Link the moments of every parameter group to its weights, once. They must exist, that is, after a step.

        DeepSpeed 0.19 does this only once, when only the first group has moments. Its functions find the moments of a
        weight through these links.
        """
        zero_optimizer = self.engine.optimizer
        if not self.has_linked_moments and len(zero_optimizer.optimizer.param_groups) > 1:
            zero_optimizer._hp_optimizer_states_linked = False
            zero_optimizer._lazy_init_hp_params_optimizer_state()
        self.has_linked_moments = True

    def find_nonfinite(self) -> list[str]:
        """List `weight <name>` for every non-finite weight, equally on all ranks."""
        return find_nonfinite_weights(list_named_weights(self.trained_networks))


class ShardedWeights:
    """Stage 3: each rank has a shard of every weight, in GPU or host memory. See `ReplicatedWeights` for the methods.

    DeepSpeed's passes gather the weights of one block at a time, which requires equal numbers of passes on all ranks.
    Only updates can guarantee that, so DeepSpeed trains copies of the run's networks. The run's own networks, for all
    other passes, have weights only within `gather_weights`.
    """

    def __init__(self, networks: Mapping[str, nn.Module], world: World) -> None:
        self.networks, self.world = networks, world
        self.trained_networks = {name: _copy_sharing_memory(network) for name, network in networks.items()}
        self.read_dtypes = _find_read_dtypes(networks.values())
        self.gather_depth = 0

    def attach_engine(self, engine: Any) -> None:
        """Store the engine and free the full weights, of which DeepSpeed has shards now."""
        self.engine = engine
        for network in (*self.networks.values(), *self.trained_networks.values()):
            for buffer in network.buffers():  # not sharded, and may be in host memory
                buffer.data = buffer.data.to(engine.device)
        self._free_weights()

    @contextmanager
    def gather_weights(self) -> Iterator[None]:
        """Gather on entry and free on exit.

        The trunk's linear layers are gathered in the dtype of the passes, to which passes would round them anyway.
        """
        # Contexts may be nested, for example when a gradient analysis rolls out episodes. Only the outermost gathers.
        for name, network in self.networks.items() if self.gather_depth == 0 else ():
            trained_weights = self.trained_networks[name].parameters()
            for weight, trained_weight in zip(network.parameters(), trained_weights, strict=True):
                dtype = self.read_dtypes.get(id(weight), torch.float32)
                weight.data = self._all_gather(trained_weight, _get_shard(trained_weight), dtype)
        self.gather_depth += 1
        try:
            yield
        finally:
            self.gather_depth -= 1
            if self.gather_depth == 0:
                self._free_weights()

    def _free_weights(self) -> None:
        """Free the weights of the run's networks by replacing them with empty tensors."""
        for network in self.networks.values():
            for weight in network.parameters():
                weight.data = weight.data.new_empty(0)

    def _all_gather(self, weight: Any, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Concatenate the shards of all ranks to the full tensor, without the padding of the last shard."""
        full_tensor = self.world.all_gather(shard.detach().to(weight.device, dtype))
        return full_tensor[: weight.ds_numel].view(weight.ds_shape)

    def read_full(self, weight: Any, moment: str | None) -> Tensor:
        """Concatenate the shards of all ranks."""
        return self._all_gather(weight, self._get_optimizer_shard(weight, moment), torch.float32)

    def write_full(self, weight: Any, moment: str | None, value: Tensor | None) -> None:
        """Set this rank's shard from `value`.

        DeepSpeed has two copies of a weight's shard, for the optimizer and for passes. Both are set.
        """
        shard = self._get_optimizer_shard(weight, moment)
        start = self.world.rank * shard.numel()
        local_values = shard.new_zeros(shard.shape) if value is None else value.flatten()[start : start + shard.numel()]
        # The last shard is padded, so its slice of the tensor may be shorter or empty.
        shard[: len(local_values)].copy_(local_values)
        if moment is None:
            weight.ds_tensor.data[: len(local_values)].copy_(local_values)

    def _get_unpadded_shard(self, weight: Any) -> nn.Parameter:
        """Return this rank's shard of a weight without its padding, whose values are arbitrary."""
        shard = _get_shard(weight)
        # 0 for ranks behind the end of a small tensor.
        length = max(0, weight.ds_numel - self.world.rank * shard.numel())
        return nn.Parameter(shard.detach()[:length], requires_grad=False)

    def _get_optimizer_shard(self, weight: Any, moment: str | None) -> Tensor:
        """Return this rank's shard of the optimizer's copy as a view. DeepSpeed's public function copies it on GPUs."""
        shard, _ = self.engine.optimizer._get_fp32_opt_state_partition(weight, True, moment)
        detached_shard: Tensor = shard.detach()
        return detached_shard

    def make_moments(self) -> None:
        """Create the moments as torch's AdamW does in its first step."""
        zero_optimizer = self.engine.optimizer
        for weight in zero_optimizer.fp32_partitioned_groups_flat:
            moments = {moment: torch.zeros_like(weight.detach()) for moment in MOMENTS}
            zero_optimizer.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    def find_nonfinite(self) -> list[str]:
        """Check the shards of all ranks."""
        local_shards = [
            (name, self._get_unpadded_shard(weight)) for name, weight in list_named_weights(self.trained_networks)
        ]
        bad_names = {
            name for names in self.world.all_gather_object(find_nonfinite_weights(local_shards)) for name in names
        }
        # In the order of weights, not of the ranks that found them, so that the list is the same on all ranks.
        return [f"weight {name}" for name, _ in local_shards if f"weight {name}" in bad_names]


def _get_shard(weight: Any) -> nn.Parameter:
    """Return this rank's shard of a weight for passes, flat and with padding."""
    return nn.Parameter(weight.ds_tensor.detach(), requires_grad=False)


def _copy_sharing_memory(network: nn.Module) -> nn.Module:
    """Copy a network with new parameters that share the memory of the old ones."""
    # deepcopy treats objects in `memo` as already copied, so it copies only the modules around the parameters.
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in network.parameters()
    }
    return deepcopy(network, memo)


def _find_read_dtypes(networks: Iterable[nn.Module]) -> dict[int, torch.dtype]:
    """Map the id of each linear layer's parameter to the dtype in which passes outside of updates read it.

    Linear layers cast their weights to the dtype of the passes, so these are gathered in it. Heads, embeddings and
    norms stay float32.
    """
    read_dtypes: dict[int, torch.dtype] = {}
    for trunk in chain.from_iterable(network.modules() for network in networks):
        pass_settings = getattr(trunk, "pass_settings", None)
        if isinstance(pass_settings, PassSettings):
            layers = [module for module in trunk.modules() if type(module) is nn.Linear]
            read_dtypes |= {id(weight): pass_settings.dtype for layer in layers for weight in layer.parameters()}
    return read_dtypes
