"""AdamW without torch's compiler: the numbers are those of torch's class."""

import torch
from torch import Tensor, nn

from trainable.backend.torch_backend import EagerAdamW, make_adamw
from trainable.config.sections import ActorConfig
from trainable.runs.flat_state import flatten_state, load_flat_state


def make_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_torch_adamw(network: nn.Module, settings: ActorConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(network.parameters(), 0.01, settings.betas, weight_decay=settings.weight_decay)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    """Train `steps` steps with gradients that change, and return the weights."""
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        network(inputs * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in network.parameters()]


def test_the_numbers_are_those_of_torch_through_a_saved_state() -> None:
    settings = ActorConfig(weight_decay=0.1)
    network, torch_network = make_network(), make_network()
    optimizer, torch_optimizer = make_adamw([network], [0.01], settings), make_torch_adamw(torch_network, settings)
    assert isinstance(optimizer, EagerAdamW)
    for actual, expected in zip(train(network, optimizer, 3), train(torch_network, torch_optimizer, 3), strict=True):
        assert torch.equal(actual, expected)
        assert actual.abs().sum() > 0
    state = {name: value.clone() for name, value in flatten_state(optimizer).items()}
    assert state.keys() == flatten_state(torch_optimizer).keys()
    continued_network = make_network()
    continued_network.load_state_dict(network.state_dict())
    continued_optimizer = make_adamw([continued_network], [0.01], settings)
    load_flat_state(continued_optimizer, state)
    for actual, expected in zip(
        train(continued_network, continued_optimizer, 2), train(torch_network, torch_optimizer, 2), strict=True
    ):
        assert torch.equal(actual, expected)


def test_steps_build_no_graph_and_need_a_gradient() -> None:
    network = make_network()
    optimizer = make_adamw([network], [0.01], ActorConfig())
    old_weights = [weight.detach().clone() for weight in network.parameters()]
    optimizer.step()  # without gradients
    assert all(map(torch.equal, old_weights, network.parameters()))
    train(network, optimizer, 1)
    assert all(weight.requires_grad and weight.is_leaf for weight in network.parameters())
