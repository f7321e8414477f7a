"""DeepSpeed's ZeRO: optimizer states, gradients from stage 2 on, and weights in stage 3, are dealt out to the ranks."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainable.backend.meter import Meter
from trainable.backend.one_device import list_named_parameters, make_adamw, select_below
from trainable.backend.world import World
from trainable.backend.zero_weights import MOMENTS, ReplicatedWeights, ShardedWeights, Weights
from trainable.config.constants import ZERO_BUCKET_SIZE, ZERO_MAX_LIVE_PARAMETERS
from trainable.config.sections import OptimConfig, TrainerConfig
from trainable.runs.state import check_shapes, compute_flat_shapes, get_trainable_parameters


class _Networks(nn.Module):
    """Networks as one module, whose forward pass is whatever work is done with them."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(dict(networks))

    def forward(self, compute_loss: Callable[[], Tensor]) -> Tensor:
        """Do the work."""
        return compute_loss()


class ZeroBackend:
    """AdamW under DeepSpeed (see `Backend`). Needs torch's default process group to be set up.

    Weights and moments are float32, as in `OneDevice`; networks compute in what they compute in.
    """

    def __init__(
        self, name: str, networks: Mapping[str, nn.Module], learning_rates: Sequence[float], settings: OptimConfig,
        trainer: TrainerConfig, world: World,
    ) -> None:  # fmt: skip
        self.name, self.world = name, world
        self.shapes = {network_name: compute_flat_shapes(network) for network_name, network in networks.items()}
        self.moment_shapes = compute_flat_shapes(make_adamw(networks.values(), learning_rates, settings))
        self.weights: Weights = (
            ShardedWeights(networks, world) if trainer.zero_stage == 3 else ReplicatedWeights(networks)
        )
        self.networks = self.weights.trained_networks
        self.optimizer = make_adamw(self.networks.values(), learning_rates, settings)
        self.engine, *_ = _import_deepspeed().initialize(
            model=_Networks(self.networks), optimizer=self.optimizer, config=_make_deepspeed_config(settings, trainer),
            dist_init_required=False,
        )  # fmt: skip
        self.weights.attach_engine(self.engine)

    def backward(self, compute_loss: Callable[[], Tensor], is_last: bool) -> None:
        """Add a gradient (see `Backend.backward`). DeepSpeed takes the mean over ranks, and the loss is a sum."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(self.engine(compute_loss) * self.world.size)

    def step(self, meter: Meter, norm_column: str) -> None:
        """Clip and step, or skip (see `Backend.step`) where the gradient over all ranks is not finite.

        A loss alone is not looked at: other ranks would not know of it.
        """
        self.engine.step()
        if self.engine.was_step_applied():
            self.weights.after_step()
            meter.record_step(float(self.engine.get_global_grad_norm()), norm_column)
        else:
            meter.record_skipped_step(["gradient"])
        self.engine.zero_grad()

    def gather_weights(self) -> AbstractContextManager[None]:
        """Nothing to do below stage 3 (see `Backend.whole`)."""
        return self.weights.gather_weights()

    def find_nonfinite_weights(self) -> list[str]:
        """Of all ranks (see `Backend.bad_weights`)."""
        return self.weights.find_nonfinite()

    def state_dict(self) -> dict[str, Tensor]:
        """Whole tensors on the processor (see `Backend.state`), collected from the ranks; rank 0 keeps them."""
        tensors: dict[str, Tensor] = {}
        for name, network in self.networks.items():
            for key, weight in get_trainable_parameters(network):
                self._copy_to_rank_zero(tensors, f"{name}/{key}", self.weights.read_full(weight, None))
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
        """Optimizer steps made so far."""
        return max((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), default=0)

    def check_state_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """ValueError unless they fit (see `Backend.check_fits`)."""
        for name, expected_shapes in self.shapes.items():
            check_shapes(name, expected_shapes, select_below(name, shapes))
        moment_shapes = select_below(self.name, shapes)
        check_shapes(self.name, self.moment_shapes if moment_shapes else {}, moment_shapes)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back (see `Backend.load_state`), one tensor after the other; each rank keeps its part."""
        for name, network in self.networks.items():
            for key, weight in get_trainable_parameters(network):
                self.weights.write_full(weight, None, tensors[f"{name}/{key}"])
        has_stepped = f"{self.name}/0/step" in tensors
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
    """DeepSpeed's configuration. Batches are cut by the update: DeepSpeed is told of one at a time."""
    zero_config: dict[str, Any] = {"stage": trainer.zero_stage}
    if trainer.zero_stage == 3:
        zero_config |= {
            "reduce_bucket_size": ZERO_BUCKET_SIZE, "stage3_max_live_parameters": ZERO_MAX_LIVE_PARAMETERS,
            "stage3_max_reuse_distance": ZERO_MAX_LIVE_PARAMETERS,
            "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False,
        }  # fmt: skip
    if trainer.offload_optimizer:
        zero_config["offload_optimizer"] = {"device": "cpu"}
    if trainer.offload_parameters:
        zero_config["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero_config,
        "gradient_clipping": settings.grad_clip, "steps_per_print": 2**31,
        # torch's AdamW: DeepSpeed's own has to be compiled first.
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def _import_deepspeed() -> Any:
    """The package, which on a machine without a GPU is kept from compiling what it has a plain form of."""
    os.environ["LOCAL_RANK"] = "0"  # a rank sees its own GPU only, whatever started it
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.utils import logger
    except ModuleNotFoundError:
        raise ValueError(
            "DeepSpeed is not installed: type `pip install deepspeed==0.19.8`, or --set trainer.strategy=torch and one "
            "GPU a run."
        ) from None
    logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
