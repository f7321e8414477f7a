"""DeepSpeed's ZeRO: shards optimizer states over ranks (stage 1), also gradients (stage 2), also weights (stage 3)."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainable.backend.host_swap import HostSwap
from trainable.backend.meter import Meter, find_nonfinite_weights
from trainable.backend.torch_backend import list_named_parameters, make_adamw, select_below
from trainable.backend.world import DistributedWorld, World
from trainable.config.constants import ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS
from trainable.config.sections import OptimConfig, TrainerConfig
from trainable.models.interface import PassSettings
from trainable.runs.flat_state import check_shapes, compute_flat_shapes, get_trainable_parameters

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
        """Return a context without effect: every rank has all weights (see `TorchBackend.gather_weights`)."""
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
        return find_nonfinite_weights(list_named_parameters(self.trained_networks))


class ShardedWeights:
    """Stage 3: each rank has a shard of every weight, in GPU or host memory. See `ReplicatedWeights` for the methods.

    DeepSpeed's passes gather the weights of one block at a time, which requires equal numbers of passes on all ranks.
    Only updates can guarantee that, so DeepSpeed trains copies of the run's networks. The run's own networks, for all
    other passes, have weights only within `gather_weights`.
    """

    def __init__(self, networks: Mapping[str, nn.Module], world: DistributedWorld) -> None:
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
            (name, self._get_unpadded_shard(weight)) for name, weight in list_named_parameters(self.trained_networks)
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


class _Networks(nn.Module):
    """Combines networks into one module, whose forward pass computes a given loss.

    DeepSpeed trains a single module, which must be called before each backward pass.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(dict(networks))

    def forward(self, compute_loss: Callable[[], Tensor]) -> Tensor:
        """Compute the loss."""
        return compute_loss()


class ZeroBackend:
    """AdamW under DeepSpeed (see `TorchBackend`). torch's default process group must be initialized.

    Weights and moments are float32, as in `TorchBackend`; each network computes in the dtype of its passes.

    name: of the optimizer in checkpoints. learning_rates: of each network. Raises ValueError without DeepSpeed.
    """

    def __init__(
        self,
        name: str,
        networks: Mapping[str, nn.Module],
        learning_rates: Sequence[float],
        settings: OptimConfig,
        trainer: TrainerConfig,
        world: DistributedWorld,
    ) -> None:
        self.name, self.loss_scale = name, 1.0
        self.world: World = world
        # Read the shapes before stage 3 shards the weights, which then lose them. This optimizer is not used.
        self.shapes = {network_name: compute_flat_shapes(network) for network_name, network in networks.items()}
        self.moment_shapes = compute_flat_shapes(make_adamw(networks.values(), learning_rates, settings))
        is_sharded = trainer.zero_stage == 3
        self.weights = ShardedWeights(networks, world) if is_sharded else ReplicatedWeights(networks)
        self.networks = self.weights.trained_networks
        deepspeed, deepspeed_config = _import_deepspeed(), _make_deepspeed_config(settings, trainer)
        module = _Networks(self.networks)
        if is_sharded:
            # Replace the weights, which may be in host memory, by shards on the device, one weight at a time.
            # DeepSpeed's `initialize` would do the same, but first move the whole module to the device.
            deepspeed.zero.Init(
                module=module,
                config_dict_or_path=deepspeed_config,
                dtype=torch.float32,
                remote_device="cpu" if trainer.offload_parameters else None,
            )
        # After sharding, because the optimizer's kernel depends on where the weights are. DeepSpeed recognizes torch's
        # class, and imports torch's compiler anyway.
        self.optimizer = make_adamw(self.networks.values(), learning_rates, settings, torch.optim.AdamW)
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            config=deepspeed_config,
            dist_init_required=False,  # `connect` has done it
        )
        self.weights.attach_engine(self.engine)
        # With several ranks, swaps are allowed only in stage 3.
        self._shard_swap = HostSwap(self._list_optimizer_shards if trainer.swap_to_host else list, self.engine.device)

    def backward(self, compute_loss: Callable[[], Tensor], is_last: bool) -> None:
        """Add a gradient (see `TorchBackend.backward`)."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages gradients over ranks, but a mini-batch's gradient is their sum.
        self.engine.backward(self.engine(compute_loss) * self.world.size)

    def step(self, meter: Meter, norm_column: str) -> None:
        """Clip and step, or skip the step if the gradient over all ranks is not finite (see `TorchBackend.step`).

        A non-finite loss alone does not skip the step, because only its rank would know.
        """
        self.engine.step()  # DeepSpeed checks for non-finite values and skips on all ranks
        if self.engine.was_step_applied():
            meter.record_step(float(self.engine.get_global_grad_norm()), norm_column)
        else:
            # DeepSpeed does not tell which gradients are not finite.
            meter.record_skipped_step([f"gradient of {name}" for name in self.networks])
        self.engine.zero_grad()

    def reset_moments(self) -> None:
        """Set this rank's shards to 0 (see `TorchBackend.reset_moments`)."""
        with self.load_for_update():
            for _, weight in list_named_parameters(self.networks) if self._count_steps() else []:
                for moment in MOMENTS:
                    self.weights.write_full(weight, moment, value=None)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)

    def gather_weights(self) -> AbstractContextManager[None]:
        """Gather the weights in stage 3; do nothing in other stages (see `TorchBackend.gather_weights`)."""
        return self.weights.gather_weights()

    def load_for_update(self) -> AbstractContextManager[None]:
        """Move the optimizer's shards to the device if they are swapped (see `TorchBackend.load_for_update`)."""
        return self._shard_swap.load(has_changed=True)

    def _list_optimizer_shards(self) -> list[Tensor]:
        """List this rank's stage-3 shards that only the optimizer reads: its copy of the weights, and the moments."""
        zero_optimizer = self.engine.optimizer
        moments = [state[moment] for state in self.optimizer.state.values() for moment in MOMENTS if moment in state]
        return [*zero_optimizer.fp32_partitioned_groups_flat, *moments]

    def find_nonfinite_weights(self) -> list[str]:
        """Check the weights of all ranks (see `TorchBackend.find_nonfinite_weights`)."""
        return self.weights.find_nonfinite()

    def state_dict(self) -> dict[str, Tensor]:
        """Gather full tensors on the CPU (see `TorchBackend.state_dict`); only rank 0 keeps them."""
        # Reading is a collective operation, so all ranks must read every tensor.
        tensors: dict[str, Tensor] = {}
        for name, network in self.networks.items():
            for key, weight in get_trainable_parameters(network):
                self._copy_to_rank_zero(tensors, f"{name}/{key}", self.weights.read_full(weight, moment=None))
        # Names and entries are as in torch's AdamW, which has no moments before its first step.
        step = self._count_steps()
        for number, (_, weight) in enumerate(list_named_parameters(self.networks) if step else []):
            for moment in MOMENTS:
                self._copy_to_rank_zero(
                    tensors, f"{self.name}/{number}/{moment}", self.weights.read_full(weight, moment)
                )
            self._copy_to_rank_zero(tensors, f"{self.name}/{number}/step", torch.tensor(float(step)))
        return tensors

    def _copy_to_rank_zero(self, tensors: dict[str, Tensor], name: str, value: Tensor) -> None:
        if self.world.rank == 0:
            tensors[name] = value.detach().cpu().clone()

    def _count_steps(self) -> int:
        """Count the optimizer steps so far, which are equal for all weights."""
        return max((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), default=0)

    def check_state_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise ValueError for other shapes (see `TorchBackend.check_state_shapes`)."""
        for name, expected_shapes in self.shapes.items():
            check_shapes(name, expected_shapes, select_below(name, shapes))
        moment_shapes = select_below(self.name, shapes)
        # Without moments, the checkpoint was written before the first step.
        check_shapes(self.name, self.moment_shapes if moment_shapes else {}, moment_shapes)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors one by one (see `TorchBackend.load_state_dict`); each rank keeps its shard."""
        with self.load_for_update():  # moments that are made here must be on the device
            for name, network in self.networks.items():
                for key, weight in get_trainable_parameters(network):
                    self.weights.write_full(weight, moment=None, value=tensors[f"{name}/{key}"])
            if f"{self.name}/0/step" not in tensors:
                self.reset_moments()  # this optimizer may have stepped since
                return
            if not self._count_steps():
                self.weights.make_moments()
            for number, (_, weight) in enumerate(list_named_parameters(self.networks)):
                for moment in MOMENTS:
                    self.weights.write_full(weight, moment, tensors[f"{self.name}/{number}/{moment}"])
            for state in self.optimizer.state.values():
                state["step"] = tensors[f"{self.name}/0/step"].clone()


def _make_deepspeed_config(settings: OptimConfig, trainer: TrainerConfig) -> dict[str, Any]:
    """Make DeepSpeed's configuration.

    Batch size and accumulation steps are 1, because the update itself splits batches into passes and weights their
    losses. `ZeroBackend.backward` tells DeepSpeed which pass is the last.
    """
    zero_config: dict[str, Any] = {"stage": trainer.zero_stage}
    if trainer.zero_stage == 3:
        zero_config |= {
            "reduce_bucket_size": ZERO_BUCKET_SIZE,
            "stage3_max_live_parameters": ZERO_MAX_LIVE_PARAMETERS,
            "stage3_max_reuse_distance": ZERO_MAX_LIVE_PARAMETERS,
            "stage3_param_persistence_threshold": 0,  # small weights are sharded, too
            # True would replace torch's linear function in the whole process, also for the run's own networks.
            "memory_efficient_linear": False,
        }
    if trainer.offload_optimizer:
        zero_config["offload_optimizer"] = {"device": "cpu"}
    if trainer.offload_parameters:
        zero_config["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero_config,
        "gradient_clipping": settings.grad_clip,
        "steps_per_print": 2**31,  # never
        # Both settings allow torch's AdamW, the second one with offloading. DeepSpeed's AdamW would need compiling.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _import_deepspeed() -> Any:
    """Import DeepSpeed, and prevent it from compiling operators on a machine without a GPU.

    Raises ValueError, with the command that installs it, if DeepSpeed is missing.
    """
    # The index of the GPU for DeepSpeed. Each rank sees only its own GPU, so the index is 0.
    os.environ["LOCAL_RANK"] = "0"
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.utils import logger
    except ModuleNotFoundError:
        raise ValueError(
            "DeepSpeed is not installed: type `pip install deepspeed==0.19.8`, or use --set trainer.strategy=torch "
            "and one GPU per run."
        ) from None
    logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # Otherwise DeepSpeed compiles this operator for communication between CPU processes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
