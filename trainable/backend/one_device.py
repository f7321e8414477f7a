"""Who owns the optimizer of some networks: what an update needs of it, and plain torch on one device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from trainable.backend.meter import Meter
from trainable.backend.world import SINGLE_PROCESS, World
from trainable.config.sections import OptimConfig
from trainable.runs.nonfinite import NamedParameters, find_nonfinite_gradients, find_nonfinite_weights
from trainable.runs.state import (
    check_shapes,
    compute_flat_shapes,
    flatten_state,
    get_trainable_parameters,
    load_flat_state,
)

T = TypeVar("T")


class Backend(Protocol):
    """Owns the optimizer of some networks, whose gradients are summed over the ranks of `world`.

    networks: those that updates are made with, by name. Where weights are dealt out to ranks they are twins of those
    that the run itself holds, which have weights only within `whole`.
    """

    networks: Mapping[str, nn.Module]
    world: World

    def backward(self, compute_loss: Callable[[], Tensor], is_last: bool) -> None:
        """Add the gradient of the loss that `work` computes; is_last: nothing is added before the next `step`."""
        ...

    def step(self, meter: Meter, norm_column: str) -> None:
        """Clip and step, or skip the step where a loss or the gradient is not finite; `norm` names its column."""
        ...

    def gather_weights(self) -> AbstractContextManager[None]:
        """While it lasts the run's networks can be read: passes outside of updates are made within it.

        Ranks come into it and leave it together; inside, each makes passes of its own.
        """
        ...

    def find_nonfinite_weights(self) -> list[str]:
        """`weight <name>` for every weight that is not finite; the same list on all ranks."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Networks and optimizer as tensors by name, the same ones for every backend and number of ranks."""
        ...

    def check_state_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """ValueError unless `shapes` holds those of what `state` gives; nothing is changed."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave; every rank asks `tensors` for the same ones, in the same order."""
        ...


class TorchBackend:
    """An optimizer in torch on one device.

    name: of the optimizer in checkpoints. networks: by name, whose parameters it has, in their order. clip: largest
    total norm of a gradient.
    """

    def __init__(
        self, name: str, networks: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, max_grad_norm: float
    ) -> None:
        self.name, self.networks, self.optimizer, self.max_grad_norm = name, networks, optimizer, max_grad_norm
        self.world: World = SINGLE_PROCESS

    def backward(self, compute_loss: Callable[[], Tensor], is_last: bool) -> None:
        """Add a gradient (see `Backend.backward`)."""
        compute_loss().backward()

    def step(self, meter: Meter, norm_column: str) -> None:
        """Clip and step, or skip (see `Backend.step`; published: where the gradient is not finite)."""
        named_weights = list_named_parameters(self.networks)
        weights = [weight for _, weight in named_weights]
        grad_norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        if torch.isfinite(grad_norm) and not meter.nonfinite_losses:
            nn.utils.clip_grads_with_norm_(weights, self.max_grad_norm, grad_norm)
            self.optimizer.step()
            meter.record_step(grad_norm, norm_column)
        else:
            meter.record_skipped_step(find_nonfinite_gradients(named_weights))
        self.optimizer.zero_grad(set_to_none=True)

    def gather_weights(self) -> AbstractContextManager[None]:
        """Weights are always there (see `Backend.whole`)."""
        return nullcontext()

    def find_nonfinite_weights(self) -> list[str]:
        """Of all networks (see `Backend.bad_weights`)."""
        return find_nonfinite_weights([
            (f"{name}.{key}", weight) for name, network in self.networks.items() for key, weight in get_trainable_parameters(network)
        ])  # fmt: skip

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors: write or clone them before the next step."""
        return {
            f"{name}/{key}": value
            for name, stateful in self._get_stateful().items()
            for key, value in flatten_state(stateful).items()
        }

    def check_state_shapes(self, shapes: Mapping[str, torch.Size]) -> None:
        """ValueError unless they fit (see `Backend.check_fits`); an optimizer without moments has made no step."""
        for name, stateful in self._get_stateful().items():
            saved_shapes = select_below(name, shapes)
            check_shapes(
                name,
                compute_flat_shapes(stateful) if saved_shapes or isinstance(stateful, nn.Module) else {},
                saved_shapes,
            )

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back (see `Backend.load_state`)."""
        for name, stateful in self._get_stateful().items():
            load_flat_state(stateful, select_below(name, tensors))

    def _get_stateful(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        return {**self.networks, self.name: self.optimizer}


def make_adamw(
    networks: Iterable[nn.Module], learning_rates: Sequence[float], settings: OptimConfig
) -> torch.optim.AdamW:
    """AdamW with a constant rate for each network."""
    groups = [
        {"params": [weight for _, weight in get_trainable_parameters(network)], "lr": learning_rate}
        for network, learning_rate in zip(networks, learning_rates, strict=True)
    ]
    return torch.optim.AdamW(groups, betas=settings.betas, weight_decay=settings.weight_decay)


def list_named_parameters(networks: Mapping[str, nn.Module]) -> NamedParameters:
    """All trained parameters; those of the first network by their own names, of others behind their network's."""
    first_network = next(iter(networks))
    return [
        (key if name == first_network else f"{name}.{key}", weight)
        for name, network in networks.items() for key, weight in get_trainable_parameters(network)
    ]  # fmt: skip


def select_below(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors of one part, or what there is to say of them, by their names in it."""
    return {key.removeprefix(f"{prefix}/"): value for key, value in tensors.items() if key.startswith(f"{prefix}/")}
