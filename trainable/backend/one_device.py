"""Who owns the optimizer of some networks: what an update needs of it, and plain torch on one device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from trainable.backend.meter import Meter
from trainable.backend.world import ALONE, World
from trainable.config.sections import OptimConfig
from trainable.runs.nonfinite import Named, bad_gradients, bad_weights
from trainable.runs.state import check_shapes, flat_state, load_flat_state, tensor_shapes, trained

T = TypeVar("T")


class Backend(Protocol):
    """Owns the optimizer of some networks, whose gradients are summed over the ranks of `world`.

    networks: those that updates are made with, by name. Where weights are dealt out to ranks they are twins of those
    that the run itself holds, which have weights only within `whole`.
    """

    networks: Mapping[str, nn.Module]
    world: World

    def backward(self, work: Callable[[], Tensor], is_last: bool) -> None:
        """Add the gradient of the loss that `work` computes; is_last: nothing is added before the next `step`."""
        ...

    def step(self, meter: Meter, norm: str) -> None:
        """Clip and step, or skip the step where a loss or the gradient is not finite; `norm` names its column."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """While it lasts the run's networks can be read: passes outside of updates are made within it.

        Ranks come into it and leave it together; inside, each makes passes of its own.
        """
        ...

    def bad_weights(self) -> list[str]:
        """`weight <name>` for every weight that is not finite; the same list on all ranks."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Networks and optimizer as tensors by name, the same ones for every backend and number of ranks."""
        ...

    def check_fits(self, shapes: Mapping[str, torch.Size]) -> None:
        """ValueError unless `shapes` holds those of what `state` gives; nothing is changed."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave; every rank asks `tensors` for the same ones, in the same order."""
        ...


class OneDevice:
    """An optimizer in torch on one device.

    name: of the optimizer in checkpoints. networks: by name, whose parameters it has, in their order. clip: largest
    total norm of a gradient.
    """

    def __init__(
        self, name: str, networks: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, clip: float
    ) -> None:
        self.name, self.networks, self.optimizer, self.clip = name, networks, optimizer, clip
        self.world: World = ALONE

    def backward(self, work: Callable[[], Tensor], is_last: bool) -> None:
        """Add a gradient (see `Backend.backward`)."""
        work().backward()

    def step(self, meter: Meter, norm: str) -> None:
        """Clip and step, or skip (see `Backend.step`; published: where the gradient is not finite)."""
        named = named_parameters(self.networks)
        weights = [weight for _, weight in named]
        found = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        if torch.isfinite(found) and not meter.bad_losses:
            nn.utils.clip_grads_with_norm_(weights, self.clip, found)
            self.optimizer.step()
            meter.stepped(found, norm)
        else:
            meter.passed_over(bad_gradients(named))
        self.optimizer.zero_grad(set_to_none=True)

    def whole(self) -> AbstractContextManager[None]:
        """Weights are always there (see `Backend.whole`)."""
        return nullcontext()

    def bad_weights(self) -> list[str]:
        """Of all networks (see `Backend.bad_weights`)."""
        return bad_weights([
            (f"{name}.{key}", weight) for name, part in self.networks.items() for key, weight in trained(part)
        ])  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The live tensors: write or clone them before the next step."""
        return {
            f"{name}/{key}": value for name, part in self._parts().items() for key, value in flat_state(part).items()
        }

    def check_fits(self, shapes: Mapping[str, torch.Size]) -> None:
        """ValueError unless they fit (see `Backend.check_fits`); an optimizer without moments has made no step."""
        for name, part in self._parts().items():
            given = below(name, shapes)
            check_shapes(name, tensor_shapes(part) if given or isinstance(part, nn.Module) else {}, given)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back (see `Backend.load_state`)."""
        for name, part in self._parts().items():
            load_flat_state(part, below(name, tensors))

    def _parts(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        return {**self.networks, self.name: self.optimizer}


def adamw(networks: Iterable[nn.Module], rates: Sequence[float], settings: OptimConfig) -> torch.optim.AdamW:
    """AdamW with a constant rate for each network."""
    groups = [
        {"params": [weight for _, weight in trained(network)], "lr": rate}
        for network, rate in zip(networks, rates, strict=True)
    ]
    return torch.optim.AdamW(groups, betas=settings.betas, weight_decay=settings.weight_decay)


def named_parameters(networks: Mapping[str, nn.Module]) -> Named:
    """All trained parameters; those of the first network by their own names, of others behind their network's."""
    first = next(iter(networks))
    return [
        (key if name == first else f"{name}.{key}", weight)
        for name, network in networks.items() for key, weight in trained(network)
    ]  # fmt: skip


def below(name: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors of one part, or what there is to say of them, by their names in it."""
    return {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
