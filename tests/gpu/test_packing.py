"""Attention over rows of unequal length in one call on a GPU, beside a call a length and the processor."""

import pytest
import torch
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from trainable.models import packing
from trainable.models.packing import attend_by_length, causal_attention, pack_rows
from trainable.models.qwen2 import PassSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]
LENGTHS = (1, 300, 17, 300, 64, 5)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_one_call_gives_the_numbers_and_gradients_of_a_call_for_each_length() -> None:
    where = torch.tensor([300 * row + length - 1 for row, length in enumerate(LENGTHS)], device="cuda")
    packed = pack_rows((len(LENGTHS), 300), where)
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        torch.randn(sum(LENGTHS), heads, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (8, 2, 2)
    ]
    assert packing._can_use_varlen(parts[0])
    found, wanted = causal_attention(*parts, packed), attend_by_length(*parts, packed)
    assert found.shape == (sum(LENGTHS), 512)
    assert error(found, wanted) < 0.01
    weights = torch.randn(found.shape, device="cuda", generator=generator)
    slopes, others = (torch.autograd.grad((out * weights).sum(), parts) for out in (found, wanted))
    for slope, other in zip(slopes, others, strict=True):
        assert error(slope, other) < 0.01


@pytest.mark.parametrize("recompute", [False, True])
def test_hidden_states_in_bfloat16_are_near_the_processors(recompute: bool) -> None:
    sizes = make_qwen2_shape(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    model = make_random_model(sizes, seed=2, std=0.15)
    tokens = torch.randint(0, 23, (4, 40), generator=torch.Generator().manual_seed(0))
    where = torch.tensor([3, 39, 41, 120, 130, 159])  # rows of unequal need
    wanted = model.model.compute_hidden_states(tokens, where)
    (wanted_slope,) = torch.autograd.grad(wanted.square().sum(), [model.model.embed_tokens.weight])
    model = model.cuda()
    model.model.pass_settings = PassSettings(torch.bfloat16, recompute)
    found = model.model.compute_hidden_states(tokens.cuda(), where.cuda())
    (slope,) = torch.autograd.grad(found.float().square().sum(), [model.model.embed_tokens.weight])
    assert error(found.cpu(), wanted) < 0.03
    assert error(slope.cpu(), wanted_slope) < 0.05
