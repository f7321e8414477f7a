"""DeepSpeed's ZeRO: optimizer states, and gradients from stage 2 on, are dealt out to the ranks of a run."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainable.backend.one_device import adamw, below, named_parameters
from trainable.backend.world import World
from trainable.meter import Meter
from trainable.sections import OptimConfig, TrainerConfig
from trainable.state import check_fits, trained

MOMENTS = ("exp_avg", "exp_avg_sq")


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
        self.name, self.networks, self.world = name, networks, world
        self.unwrapped = adamw(networks.values(), rates, settings)  # its parameters stay the networks' own
        self.optimizer = adamw(networks.values(), rates, settings)
        self.linked = False
        self.engine, *_ = _deepspeed().initialize(
            model=_Networks(networks), optimizer=self.optimizer, config=_settings(settings, trainer),
            dist_init_required=False,
        )  # fmt: skip

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
            self._link_moments()
            meter.stepped(float(self.engine.get_global_grad_norm()), norm)
        else:
            meter.passed_over(["gradient"])
        self.engine.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Whole tensors on the processor (see `Backend.state`), collected from the ranks; rank 0 keeps them."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found: dict[str, Tensor] = {}
        for name, network in self.networks.items():
            for key, weight in trained(network):
                self._keep(found, f"{name}/{key}", safe_get_full_fp32_param(weight))
        step = self._steps()
        for number, (_, weight) in enumerate(named_parameters(self.networks) if step else []):
            for moment in MOMENTS:
                self._keep(found, f"{self.name}/{number}/{moment}", safe_get_full_optimizer_state(weight, moment))
            self._keep(found, f"{self.name}/{number}/step", torch.tensor(float(step)))
        return found

    def _keep(self, found: dict[str, Tensor], name: str, value: Tensor) -> None:
        if self.world.rank == 0:
            found[name] = value.detach().cpu().clone()

    def _link_moments(self) -> None:
        """Link every group's moments to its weights: DeepSpeed 0.19 does it when the first group alone has any."""
        zero = self.engine.optimizer
        if not self.linked and len(self.optimizer.param_groups) > 1:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        self.linked = True

    def _steps(self) -> int:
        """Optimizer steps made so far."""
        return max((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), default=0)

    def check_fits(self, tensors: Mapping[str, Tensor]) -> None:
        """ValueError unless they fit (see `Backend.check_fits`)."""
        for name, network in self.networks.items():
            check_fits(name, network, below(name, tensors))
        check_fits(self.name, self.unwrapped, below(self.name, tensors))

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back (see `Backend.load_state`); each rank keeps its part."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, network in self.networks.items():
            for key, weight in trained(network):
                value = tensors[f"{name}/{key}"].to(weight.device)
                safe_set_full_fp32_param(weight, value)
                weight.data.copy_(value)
        moments = below(self.name, tensors)
        if moments and not self._steps():
            self._make_moments()
        for number, (_, weight) in enumerate(named_parameters(self.networks) if self._steps() else []):
            for moment in MOMENTS:
                value = moments[f"{number}/{moment}"] if moments else torch.zeros_like(weight)
                safe_set_full_optimizer_state(weight, value.to(weight.device), moment)
        for state in self.optimizer.state.values():
            state["step"] = moments["0/step"].clone() if moments else torch.tensor(0.0)

    def _make_moments(self) -> None:
        """A step of rate 0 along a gradient of 0: the optimizer has none of its state before its first step."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        weights = [weight for _, weight in named_parameters(self.networks)]
        self.backward(lambda: torch.stack([0 * weight.sum() for weight in weights]).sum(), True)
        self.engine.step()
        self._link_moments()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _settings(settings: OptimConfig, trainer: TrainerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration. Batches are cut by the update: DeepSpeed is told of one at a time."""
    zero: dict[str, Any] = {"stage": trainer.zero_stage}
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
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
