"""Where the weights of networks under DeepSpeed are: whole on every rank, or in parts of which each rank has one."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainable.backend.one_device import named_parameters
from trainable.backend.world import World
from trainable.models.qwen2 import PassSettings
from trainable.runs.nonfinite import bad_weights
from trainable.runs.state import trained

MOMENTS = ("exp_avg", "exp_avg_sq")


class Weights(Protocol):
    """The weights of some networks, and the moments of their optimizer. Every method is called by all ranks."""

    @property
    def trained(self) -> Mapping[str, nn.Module]:
        """The networks that DeepSpeed is given."""
        ...

    def given(self, engine: Any) -> None:
        """DeepSpeed has been given them, and made `engine` of them."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """While it lasts the run's own networks have all of their weights on this rank (see `Backend.whole`)."""
        ...

    def get(self, weight: nn.Parameter, moment: str | None) -> Tensor:
        """A weight of `trained` as float32, or one of its moments, whole."""
        ...

    def put(self, weight: nn.Parameter, moment: str | None, value: Tensor | None) -> None:
        """Set what `get` gives; None: to 0."""
        ...

    def make_moments(self) -> None:
        """Make moments of 0: the optimizer has none before its first step."""
        ...

    def stepped(self) -> None:
        """The optimizer has made a step."""
        ...

    def bad(self) -> list[str]:
        """`weight <name>` for every weight that is not finite; the same list on all ranks."""
        ...


class Copied:
    """Stages 1 and 2: every rank has all weights; DeepSpeed deals out the float32 copy that it updates."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.trained = networks
        self.is_linked = False

    def given(self, engine: Any) -> None:
        """Keep the engine."""
        self.engine = engine

    def whole(self) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()

    def get(self, weight: nn.Parameter, moment: str | None) -> Tensor:
        """Collected from the ranks (see `Weights.get`)."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found: Tensor = (
            safe_get_full_fp32_param(weight) if moment is None else safe_get_full_optimizer_state(weight, moment)
        )
        return found

    def put(self, weight: nn.Parameter, moment: str | None, value: Tensor | None) -> None:
        """Each rank keeps its part, and of weights the whole too (see `Weights.put`)."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        value = torch.zeros_like(weight) if value is None else value.to(weight.device)
        if moment is not None:
            safe_set_full_optimizer_state(weight, value, moment)
            return
        safe_set_full_fp32_param(weight, value)
        weight.data.copy_(value)

    def make_moments(self) -> None:
        """A step of rate 0 along a gradient of 0."""
        groups = self.engine.optimizer.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        weights = [weight for _, weight in named_parameters(self.trained)]
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(self.engine(lambda: torch.stack([0 * weight.sum() for weight in weights]).sum()))
        self.engine.step()
        self.stepped()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def stepped(self) -> None:
        """Link every group's moments to its weights: DeepSpeed 0.19 does it when the first group alone has any."""
        zero = self.engine.optimizer
        if not self.is_linked and len(zero.optimizer.param_groups) > 1:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        self.is_linked = True

    def bad(self) -> list[str]:
        """Of weights that are the same on all ranks."""
        return bad_weights(_named(self.trained))


class Dealt:
    """Stage 3: a rank has a part of every weight, in its own or the host's memory.

    DeepSpeed's forward and backward passes gather one block's weights after the other, which needs all ranks to make
    equally many passes. Only updates do. So DeepSpeed is given twins of the run's networks, and trains those; the
    networks themselves, which all other passes read, hold weights within `whole` alone.
    """

    def __init__(self, networks: Mapping[str, nn.Module], world: World) -> None:
        self.networks, self.world = networks, world
        self.trained = {name: _twin(network) for name, network in networks.items()}
        self.types = {id(weight): dtype for part in networks.values() for weight, dtype in _types(part)}
        self.depth = 0

    def given(self, engine: Any) -> None:
        """Keep the engine; DeepSpeed has cut up the twins, and what they shared with the networks is let go."""
        self.engine = engine
        self._let_go()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather at the start and let go at the end (see `Weights.whole`); within itself it does nothing.

        The linear layers of blocks are gathered in the type that passes compute in, to which a pass would round them.
        """
        if self.depth == 0:
            self._gather()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self._let_go()

    def _gather(self) -> None:
        for name, network in self.networks.items():
            for weight, part in zip(network.parameters(), self.trained[name].parameters(), strict=True):
                weight.data = self._joined(part, _part_of(part), self.types[id(weight)])

    def _let_go(self) -> None:
        for network in self.networks.values():
            for weight in network.parameters():
                weight.data = weight.data.new_empty(0)

    def _joined(self, weight: Any, part: Tensor, dtype: torch.dtype) -> Tensor:
        """The ranks' parts of a tensor of a weight's shape; the last one is filled up."""
        whole = self.world.join(part.detach().to(weight.device, dtype))
        return whole[: weight.ds_numel].view(weight.ds_shape)

    def get(self, weight: Any, moment: str | None) -> Tensor:
        """Joined of the ranks' parts (see `Weights.get`)."""
        return self._joined(weight, self._part(weight, moment), torch.float32)

    def put(self, weight: Any, moment: str | None, value: Tensor | None) -> None:
        """Each rank keeps its part (see `Weights.put`): of weights both of DeepSpeed's copies."""
        part = self._part(weight, moment)
        start = self.world.rank * part.numel()
        mine = part.new_zeros(part.shape) if value is None else value.flatten()[start : start + part.numel()]
        part[: len(mine)].copy_(mine)
        if moment is None:
            weight.ds_tensor.data[: len(mine)].copy_(mine)

    def _own(self, weight: Any) -> nn.Parameter:
        """This rank's part of a weight, without what fills it up, which may be anything."""
        part = _part_of(weight)
        length = max(0, weight.ds_numel - self.world.rank * part.numel())
        return nn.Parameter(part.detach()[:length], requires_grad=False)

    def _part(self, weight: Any, moment: str | None) -> Tensor:
        """This rank's part of what the optimizer holds: a view, since DeepSpeed's public form is a copy on a GPU."""
        part, _ = self.engine.optimizer._get_fp32_opt_state_partition(weight, True, moment)
        mine: Tensor = part.detach()
        return mine

    def make_moments(self) -> None:
        """As torch's AdamW makes them at its first step."""
        zero = self.engine.optimizer
        for weight in zero.fp32_partitioned_groups_flat:
            moments = {moment: torch.zeros_like(weight.detach()) for moment in MOMENTS}
            zero.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    def stepped(self) -> None:
        """Moments are found by DeepSpeed's own tables."""

    def bad(self) -> list[str]:
        """Of the ranks' parts."""
        mine = [(name, self._own(weight)) for name, weight in _named(self.trained)]
        found = {name for names in self.world.gather(bad_weights(mine)) for name in names}
        return [f"weight {name}" for name, _ in mine if f"weight {name}" in found]


def _part_of(weight: Any) -> nn.Parameter:
    """This rank's part of a weight, as passes use it: flat."""
    return nn.Parameter(weight.ds_tensor.detach(), requires_grad=False)


def _named(networks: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name}.{key}", weight) for name, network in networks.items() for key, weight in trained(network)]


def _twin(network: nn.Module) -> nn.Module:
    """A copy with parameters of its own on the same memory."""
    own: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in network.parameters()
    }
    return deepcopy(network, own)


def _types(network: nn.Module) -> Iterator[tuple[nn.Parameter, torch.dtype]]:
    """Each parameter with the type in which passes without an optimizer read it; heads, embedding, norms stay float32.

    A linear layer casts its weights to the type of the passes, so they may as well be gathered in it.
    """
    reads: dict[int, torch.dtype] = {}
    for trunk in network.modules():
        passes = getattr(trunk, "passes", None)
        if isinstance(passes, PassSettings):
            layers = [part for part in trunk.modules() if type(part) is nn.Linear]
            reads |= {id(weight): passes.dtype for layer in layers for weight in layer.parameters()}
    for weight in network.parameters():
        yield weight, reads.get(id(weight), torch.float32)
