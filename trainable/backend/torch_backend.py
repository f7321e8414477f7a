"""The backend of one device in plain torch, which owns the optimizer of some networks."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from trainable.backend.host_swap import HostSwap
from trainable.backend.meter import Meter, NamedParameters, find_nonfinite_gradients, find_nonfinite_weights
from trainable.backend.world import SINGLE_PROCESS, World
from trainable.config.sections import OptimConfig
from trainable.runs.flat_state import (
    check_shapes,
    compute_flat_shapes,
    flatten_state,
    get_trainable_parameters,
    load_flat_state,
)

T = TypeVar("T")


class EagerAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, with equal results, for programs without torch.compile.

    Torch wraps these methods to exclude them from compilation, and the wrappers import the compiler and sympy: 1,000
    modules, which take longer than the rest of a run's start. Here the methods are unwrapped.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(Adam.step))


def make_adamw(
    networks: Iterable[nn.Module],
    learning_rates: Sequence[float],
    settings: OptimConfig,
    optimizer_class: type[torch.optim.AdamW] = EagerAdamW,
) -> torch.optim.AdamW:
    """Make AdamW for the trainable weights, with one parameter group and a constant learning rate per network.

    GPUs use the fused kernel, which needs no scratch memory; the default needs another copy of the weights. CPUs use
    the default, because the fused kernel rounds differently.
    """
    weights = [[weight for _, weight in get_trainable_parameters(network)] for network in networks]
    groups = [
        {"params": network_weights, "lr": learning_rate}
        for network_weights, learning_rate in zip(weights, learning_rates, strict=True)
    ]
    # None selects the device's default; False would be the slow loop over tensors.
    is_fused = all(weight.is_cuda for network_weights in weights for weight in network_weights) or None
    return optimizer_class(groups, betas=settings.betas, weight_decay=settings.weight_decay, fused=is_fused)


def set_learning_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each parameter group of an optimizer. Further rates are not read."""
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate


class TorchBackend:
    """A torch optimizer on one device. `ZeroBackend` has the same methods, and sums gradients over its ranks.

    name: of the optimizer in checkpoints. networks: those that it updates, by name. optimizer: has the parameters of
    `networks`, in the same order. loss_scale: factor of a loss before its backward pass, by which gradients are divided
    afterwards: a power of two, to avoid rounding. swaps_to_host: whether to keep weights and moments in host memory
    while unused.
    """

    def __init__(
        self,
        name: str,
        networks: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        swaps_to_host: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        self.name, self.networks, self.optimizer, self.max_grad_norm = name, networks, optimizer, max_grad_norm
        self.world: World = SINGLE_PROCESS
        self.loss_scale = loss_scale
        device = self._list_weights()[0].device
        self._weight_swap = HostSwap(self._list_weights if swaps_to_host else list, device)
        self._moment_swap = HostSwap(self._list_moments if swaps_to_host else list, device)

    def backward(self, compute_loss: Callable[[], Tensor], is_last: bool) -> None:
        """Compute a loss and add its gradient.

        is_last: whether this is the last call before a `step`. DeepSpeed accumulates gradients until then.
        """
        (compute_loss() * self.loss_scale).backward()

    def step(self, meter: Meter, norm_column: str) -> None:
        """Clip the gradient and step, or skip the step if a loss or the gradient is not finite.

        The published code skips for gradients, but not for losses. norm_column: of the gradient norm in `meter`.
        """
        named_weights, weights = list_named_parameters(self.networks), self._list_weights()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if self.loss_scale != 1:
            torch._foreach_div_(gradients, self.loss_scale)
        grad_norm = nn.utils.get_total_norm(gradients)
        # Check before clipping: a NaN norm would make every gradient NaN, and the meter should name only the bad ones.
        if torch.isfinite(grad_norm) and not meter.nonfinite_losses:
            nn.utils.clip_grads_with_norm_(weights, self.max_grad_norm, grad_norm)
            self.optimizer.step()
            meter.record_step(grad_norm, norm_column)
        else:
            named_gradients = ((name, weight.grad) for name, weight in named_weights if weight.grad is not None)
            meter.record_skipped_step(find_nonfinite_gradients(named_gradients, grad_norm))
        self.optimizer.zero_grad(set_to_none=True)

    def reset_moments(self) -> None:
        """Set AdamW's moments and step count to 0, as before its first step. All ranks must call it."""
        self.optimizer.state.clear()

    def gather_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the run's networks have all their weights, for passes outside of updates.

        All ranks enter and leave it together. Inside, ranks may make different numbers of passes.
        """
        return self._weight_swap.load(has_changed=False)

    @contextmanager
    def load_for_update(self) -> Iterator[None]:
        """Return a context for optimizer steps, with networks and optimizer on the device. All ranks must enter it."""
        with self._weight_swap.load(has_changed=True), self._moment_swap.load(has_changed=True):
            yield

    def _list_weights(self) -> list[nn.Parameter]:
        return [weight for _, weight in list_named_parameters(self.networks)]

    def _list_moments(self) -> list[Tensor]:
        """List AdamW's moments, which exist after its first step. Step counts are not swapped."""
        return [value for state in self.optimizer.state.values() for name, value in state.items() if name != "step"]

    def find_nonfinite_weights(self) -> list[str]:
        """List `weight <name>` for every non-finite weight, equally on all ranks."""
        with self.gather_weights():
            return find_nonfinite_weights(list_named_parameters(self.networks))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of networks and optimizer as live tensors by name: write or clone them before the next step.

        Names and shapes depend neither on the backend nor on the number of ranks, so any of them can continue a
        checkpoint. Swapped tensors are on the host.
        """
        return {
            f"{name}/{key}": value
            for name, stateful in self._get_stateful().items()
            for key, value in flatten_state(stateful).items()
        }

    def check_state_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise ValueError if `shapes` differ from the shapes in `state_dict`."""
        for name, stateful in self._get_stateful().items():
            saved_shapes = select_below(name, shapes)
            # AdamW has no tensors before its first step, so a checkpoint may have none for an optimizer.
            is_unstepped = not saved_shapes and not isinstance(stateful, nn.Module)
            check_shapes(name, {} if is_unstepped else compute_flat_shapes(stateful), saved_shapes)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`. Every rank reads the same ones from `tensors`, in the same order."""
        # On the device, because AdamW puts its moments (and the fused kernel's step count) where the weights are.
        with self.load_for_update():
            for name, stateful in self._get_stateful().items():
                load_flat_state(stateful, select_below(name, tensors))

    def _get_stateful(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        return {**self.networks, self.name: self.optimizer}


def list_named_parameters(networks: Mapping[str, nn.Module]) -> NamedParameters:
    """List all trained parameters, named `<network>.<parameter>`, in the order of the optimizer."""
    return [
        (f"{name}.{key}", weight)
        for name, network in networks.items()
        for key, weight in get_trainable_parameters(network)
    ]


def select_below(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Select the entries whose names start with `<prefix>/`, and remove this prefix."""
    return {key.removeprefix(f"{prefix}/"): value for key, value in tensors.items() if key.startswith(f"{prefix}/")}
