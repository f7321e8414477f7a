"""AdamW over several networks, which starts without torch's compiler."""

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from trainable.config.sections import OptimConfig
from trainable.runs.flat_state import get_trainable_parameters


class EagerAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, with the same numbers, for programs that compile nothing.

    Torch wraps these methods so that its compiler leaves them alone, and the wrappers import the compiler and sympy:
    1,000 modules, which take longer than the rest of a run's start. Here they are the methods inside the wrappers.
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
    """AdamW over the trainable weights, with one parameter group and a constant learning rate per network.

    On a GPU it is the fused kernel, which needs no scratch memory, while the default one needs another copy of the
    weights. On a CPU the default stays, because the fused kernel rounds otherwise.
    """
    weights = [[weight for _, weight in get_trainable_parameters(network)] for network in networks]
    groups = [
        {"params": network_weights, "lr": learning_rate}
        for network_weights, learning_rate in zip(weights, learning_rates, strict=True)
    ]
    # None is the default of a device; False would be the slow loop over tensors.
    is_fused = all(weight.is_cuda for network_weights in weights for weight in network_weights) or None
    return optimizer_class(groups, betas=settings.betas, weight_decay=settings.weight_decay, fused=is_fused)
