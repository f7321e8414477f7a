"""Tests of attention over rows of unequal length in one call on a GPU, against one call per length and the CPU."""

import pytest
import torch
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from trainable.models import packing
from trainable.models.interface import PassSettings
from trainable.models.packing import attend_by_length, causal_attention, pack_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")]
LENGTHS = (1, 300, 17, 300, 64, 5)


def compute_relative_error(values: Tensor, expected: Tensor) -> float:
    return float((values.double() - expected.double()).norm() / expected.double().norm())


def test_one_call_gives_the_numbers_and_gradients_of_a_call_for_each_length() -> None:
    positions = torch.tensor([300 * row + length - 1 for row, length in enumerate(LENGTHS)], device="cuda")
    packed = pack_rows((len(LENGTHS), 300), positions)
    generator = torch.Generator("cuda").manual_seed(0)
    projections = [
        torch.randn(sum(LENGTHS), heads, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (8, 2, 2)
    ]
    assert packing._can_use_varlen(projections[0])
    states, expected = causal_attention(*projections, packed), attend_by_length(*projections, packed)
    assert states.shape == (sum(LENGTHS), 512)
    assert compute_relative_error(states, expected) < 0.01
    weights = torch.randn(states.shape, device="cuda", generator=generator)
    gradients, expected_gradients = (
        torch.autograd.grad((output * weights).sum(), projections) for output in (states, expected)
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert compute_relative_error(gradient, expected_gradient) < 0.01


@pytest.mark.parametrize("recompute", [False, True])
def test_hidden_states_in_bfloat16_are_close_to_those_of_the_cpu(recompute: bool) -> None:
    sizes = make_qwen2_shape(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    model = make_random_model(sizes, seed=2, std=0.15)
    tokens = torch.randint(0, 23, (4, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([3, 39, 41, 120, 130, 159])  # rows with different numbers of positions
    expected = model.model.compute_hidden_states(tokens, positions)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), [model.model.embed_tokens.weight])
    model = model.cuda()
    model.model.pass_settings = PassSettings(torch.bfloat16, recompute)
    states = model.model.compute_hidden_states(tokens.cuda(), positions.cuda())
    (gradient,) = torch.autograd.grad(states.float().square().sum(), [model.model.embed_tokens.weight])
    assert compute_relative_error(states.cpu(), expected) < 0.03
    assert compute_relative_error(gradient.cpu(), expected_gradient) < 0.05
