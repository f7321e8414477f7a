"""DeepSpeed's ZeRO: shards optimizer states over ranks (stage 1), also gradients (stage 2), also weights (stage 3)."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainable.backend.host_swap import HostSwap
from trainable.backend.meter import Meter
from trainable.backend.torch_backend import list_named_parameters, make_adamw, select_below
from trainable.backend.world import World
from trainable.backend.zero_weights import MOMENTS, ReplicatedWeights, ShardedWeights
from trainable.config.constants import ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS
from trainable.config.sections import OptimConfig, TrainerConfig
from trainable.runs.flat_state import check_shapes, compute_flat_shapes, get_trainable_parameters


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
    """AdamW under DeepSpeed (see `Backend`). torch's default process group must be initialized.

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
        world: World,
    ) -> None:
        self.name, self.world, self.loss_scale = name, world, 1.0
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
        self._shard_swap: HostSwap | None = None
        if trainer.swap_to_host:  # with several ranks, allowed only in stage 3
            self._shard_swap = HostSwap(self._list_optimizer_shards, self.engine.device)

    def backward(self, compute_loss: Callable[[], Tensor], is_last: bool) -> None:
        """Add a gradient (see `Backend.backward`)."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages gradients over ranks, but a mini-batch's gradient is their sum.
        self.engine.backward(self.engine(compute_loss) * self.world.size)

    def step(self, meter: Meter, norm_column: str) -> None:
        """Clip and step, or skip the step if the gradient over all ranks is not finite (see `Backend.step`).

        A non-finite loss alone does not skip the step, because only its rank would know.
        """
        self.engine.step()  # DeepSpeed checks for non-finite values and skips on all ranks
        if self.engine.was_step_applied():
            meter.record_step(float(self.engine.get_global_grad_norm()), norm_column)
        else:
            # DeepSpeed does not tell which gradients are not finite.
            meter.record_skipped_step([f"gradient of {name}" for name in self.networks])
        self.engine.zero_grad()

    def gather_weights(self) -> AbstractContextManager[None]:
        """Gather the weights in stage 3; do nothing in other stages (see `Backend.gather_weights`)."""
        return self.weights.gather_weights()

    def load_for_update(self) -> AbstractContextManager[None]:
        """Move the optimizer's shards to the device if they are swapped (see `Backend.load_for_update`)."""
        return nullcontext() if self._shard_swap is None else self._shard_swap.load(has_changed=True)

    def _list_optimizer_shards(self) -> list[Tensor]:
        """List this rank's stage-3 shards that only the optimizer reads: its copy of the weights, and the moments."""
        zero_optimizer = self.engine.optimizer
        moments = [state[moment] for state in self.optimizer.state.values() for moment in MOMENTS if moment in state]
        return [*zero_optimizer.fp32_partitioned_groups_flat, *moments]

    def find_nonfinite_weights(self) -> list[str]:
        """Check the weights of all ranks (see `Backend.find_nonfinite_weights`)."""
        return self.weights.find_nonfinite()

    def state_dict(self) -> dict[str, Tensor]:
        """Gather full tensors on the CPU (see `Backend.state_dict`); only rank 0 keeps them."""
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
        """Raise ValueError for other shapes (see `Backend.check_state_shapes`)."""
        for name, expected_shapes in self.shapes.items():
            check_shapes(name, expected_shapes, select_below(name, shapes))
        moment_shapes = select_below(self.name, shapes)
        # Without moments, the checkpoint was written before the first step.
        check_shapes(self.name, self.moment_shapes if moment_shapes else {}, moment_shapes)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors one by one (see `Backend.load_state_dict`); each rank keeps its shard."""
        with self.load_for_update():  # moments that are made here must be on the device
            for name, network in self.networks.items():
                for key, weight in get_trainable_parameters(network):
                    self.weights.write_full(weight, moment=None, value=tensors[f"{name}/{key}"])
            has_stepped = f"{self.name}/0/step" in tensors
            # If only the checkpoint has moments, create them. If only this optimizer has moments, because it has
            # stepped since, set them to 0.
            if has_stepped and not self._count_steps():
                self.weights.make_moments()
            has_moments = has_stepped or bool(self._count_steps())
            for number, (_, weight) in enumerate(list_named_parameters(self.networks) if has_moments else []):
                for moment in MOMENTS:
                    value = tensors[f"{self.name}/{number}/{moment}"] if has_stepped else None
                    self.weights.write_full(weight, moment, value)
            step = tensors[f"{self.name}/0/step"] if has_stepped else torch.tensor(0.0)
            for state in self.optimizer.state.values():
                state["step"] = step.clone()


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
