"""DeepSpeed's ZeRO: optimizer states, gradients from stage 2 on, and weights in stage 3, are dealt out to the ranks."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainable.backend.meter import Meter
from trainable.backend.one_device import adamw, below, named_parameters
from trainable.backend.world import World
from trainable.backend.zero_weights import MOMENTS, Copied, Dealt, Weights
from trainable.config.constants import ZERO_BUCKET, ZERO_LIVE
from trainable.config.sections import OptimConfig, TrainerConfig
from trainable.runs.state import check_shapes, tensor_shapes, trained


class _Networks(nn.Module):
    """Networks as one module, whose forward pass is whatever work is done with them."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(dict(networks))

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        """Do the work."""
        return work()


class Zero:
    """AdamW under DeepSpeed (see `Backend`). Needs torch's default process group to be set up.

    Weights and moments are float32, as in `OneDevice`; networks compute in what they compute in.
    """

    def __init__(
        self, name: str, networks: Mapping[str, nn.Module], rates: Sequence[float], settings: OptimConfig,
        trainer: TrainerConfig, world: World,
    ) -> None:  # fmt: skip
        self.name, self.world = name, world
        self.shapes = {part: tensor_shapes(network) for part, network in networks.items()}
        self.moment_shapes = tensor_shapes(adamw(networks.values(), rates, settings))
        self.weights: Weights = Dealt(networks, world) if trainer.zero_stage == 3 else Copied(networks)
        self.networks = self.weights.trained
        self.optimizer = adamw(self.networks.values(), rates, settings)
        self.engine, *_ = _deepspeed().initialize(
            model=_Networks(self.networks), optimizer=self.optimizer, config=_settings(settings, trainer),
            dist_init_required=False,
        )  # fmt: skip
        self.weights.given(self.engine)

    def backward(self, work: Callable[[], Tensor], is_last: bool) -> None:
        """Add a gradient (see `Backend.backward`). DeepSpeed takes the mean over ranks, and the loss is a sum."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(self.engine(work) * self.world.size)

    def step(self, meter: Meter, norm: str) -> None:
        """Clip and step, or skip (see `Backend.step`) where the gradient over all ranks is not finite.

        A loss alone is not looked at: other ranks would not know of it.
        """
        self.engine.step()
        if self.engine.was_step_applied():
            self.weights.stepped()
            meter.stepped(float(self.engine.get_global_grad_norm()), norm)
        else:
            meter.passed_over(["gradient"])
        self.engine.zero_grad()

    def whole(self) -> AbstractContextManager[None]:
        """Nothing to do below stage 3 (see `Backend.whole`)."""
        return self.weights.whole()

    def bad_weights(self) -> list[str]:
        """Of all ranks (see `Backend.bad_weights`)."""
        return self.weights.bad()

    def state(self) -> dict[str, Tensor]:
        """Whole tensors on the processor (see `Backend.state`), collected from the ranks; rank 0 keeps them."""
        found: dict[str, Tensor] = {}
        for name, network in self.networks.items():
            for key, weight in trained(network):
                self._keep(found, f"{name}/{key}", self.weights.get(weight, None))
        step = self._steps()
        for number, (_, weight) in enumerate(named_parameters(self.networks) if step else []):
            for moment in MOMENTS:
                self._keep(found, f"{self.name}/{number}/{moment}", self.weights.get(weight, moment))
            self._keep(found, f"{self.name}/{number}/step", torch.tensor(float(step)))
        return found

    def _keep(self, found: dict[str, Tensor], name: str, value: Tensor) -> None:
        if self.world.rank == 0:
            found[name] = value.detach().cpu().clone()

    def _steps(self) -> int:
        """Optimizer steps made so far."""
        return max((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), default=0)

    def check_fits(self, shapes: Mapping[str, torch.Size]) -> None:
        """ValueError unless they fit (see `Backend.check_fits`)."""
        for name, wanted in self.shapes.items():
            check_shapes(name, wanted, below(name, shapes))
        moments = below(self.name, shapes)
        check_shapes(self.name, self.moment_shapes if moments else {}, moments)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back (see `Backend.load_state`), one tensor after the other; each rank keeps its part."""
        for name, network in self.networks.items():
            for key, weight in trained(network):
                self.weights.put(weight, None, tensors[f"{name}/{key}"])
        has_stepped = f"{self.name}/0/step" in tensors
        if has_stepped and not self._steps():
            self.weights.make_moments()
        is_made = has_stepped or bool(self._steps())
        for number, (_, weight) in enumerate(named_parameters(self.networks) if is_made else []):
            for moment in MOMENTS:
                value = tensors[f"{self.name}/{number}/{moment}"] if has_stepped else None
                self.weights.put(weight, moment, value)
        step = tensors[f"{self.name}/0/step"] if has_stepped else torch.tensor(0.0)
        for state in self.optimizer.state.values():
            state["step"] = step.clone()


def _settings(settings: OptimConfig, trainer: TrainerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration. Batches are cut by the update: DeepSpeed is told of one at a time."""
    zero: dict[str, Any] = {"stage": trainer.zero_stage}
    if trainer.zero_stage == 3:
        zero |= {
            "reduce_bucket_size": ZERO_BUCKET, "stage3_max_live_parameters": ZERO_LIVE,
            "stage3_max_reuse_distance": ZERO_LIVE,
            "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False,
        }  # fmt: skip
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if trainer.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": zero,
        "gradient_clipping": settings.grad_clip, "steps_per_print": 2**31,
        # torch's AdamW: DeepSpeed's own has to be compiled first.
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def _deepspeed() -> Any:
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
