"""Packed rows: the layout, and results that equal those of each row alone without padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_model
from tests.strategies.examples import draw_examples
from trainable.models.interface import PassSettings, ValueModel
from trainable.models.packing import causal_attention, pack_rows
from trainable.models.qwen2 import Qwen2Trunk

SIZES = make_qwen2_shape(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
MODEL = make_random_model(SIZES, seed=5, std=0.2)
TWIN = make_hub_twin(MODEL).model
CRITIC = ValueModel(Qwen2Trunk(SIZES))
CRITIC.model.load_state_dict(MODEL.model.state_dict())

# The number of tokens of each row, and its requested positions.
Rows = list[tuple[int, list[int]]]


@st.composite
def row_lists(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return [(length, draw(st.lists(st.integers(0, length - 1), max_size=4))) for length in lengths]


def make_padded_tokens(rows: Rows) -> tuple[Tensor, Tensor]:
    """Tokens (B, T), and the requested positions of all rows, one row after the other."""
    width = max(length for length, _ in rows)
    tokens = torch.randint(0, 23, (len(rows), width), generator=torch.Generator().manual_seed(len(rows)))
    for row, (length, _) in enumerate(rows):
        tokens[row, length:] = 0
    positions = [row * width + position for row, (_, places) in enumerate(rows) for position in places]
    return tokens, torch.tensor(positions, dtype=torch.long)


def compute_row_by_row(rows: Rows, tokens: Tensor) -> Tensor:
    """Hidden states of the requested positions by transformers, from each row alone and without padding."""
    hidden_states = [
        TWIN(input_ids=tokens[row : row + 1, :length]).last_hidden_state[0, places]
        for row, (length, places) in enumerate(rows)
        if places
    ]
    return torch.cat(hidden_states) if hidden_states else TWIN.embed_tokens(tokens[0, :0])


def compute_gradient(trunk: torch.nn.Module, loss: Tensor) -> Tensor:
    """Gradient with respect to all weights of a trunk, as one vector."""
    gradients = torch.autograd.grad(loss, list(trunk.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def compute_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, as a fraction of the largest expected value."""
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


def test_a_layout_by_hand() -> None:
    """Of four rows of 5, the first ends at position 2, the second is left out, the third ends at 0, the fourth at 2."""
    packed = pack_rows((4, 5), torch.tensor([2, 0, 17, 10, 2]))
    assert packed.source_indices.tolist() == [10, 0, 1, 2, 15, 16, 17]
    assert packed.positions.tolist() == [0, 0, 1, 2, 0, 1, 2]
    assert packed.output_indices.tolist() == [3, 1, 6, 0, 3]
    assert packed.cu_seqlens.tolist() == [0, 1, 4, 7]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.length_groups == ((1, 1), (2, 3))


@given(row_lists())
def test_the_stream_contains_each_row_up_to_its_last_requested_position(rows: Rows) -> None:
    tokens, positions = make_padded_tokens(rows)
    width = tokens.shape[1]
    packed = pack_rows((len(rows), width), positions)
    needed_lengths = [max(places) + 1 if places else 0 for _, places in rows]
    if not sum(needed_lengths):
        needed_lengths[0] = 1  # the stream is never empty
    needed = [row * width + position for row, length in enumerate(needed_lengths) for position in range(length)]
    assert sorted(packed.source_indices.tolist()) == needed
    assert packed.source_indices[packed.output_indices].tolist() == positions.tolist()
    assert torch.equal(packed.positions, packed.source_indices % width)
    lengths = (packed.cu_seqlens[1:] - packed.cu_seqlens[:-1]).tolist()
    assert lengths == sorted(length for length in needed_lengths if length)
    assert [length for count, length in packed.length_groups for _ in range(count)] == lengths
    starts = packed.cu_seqlens[:-1].long()
    assert (packed.positions[starts] == 0).all()  # the positions of every row start at 0


def test_attention_is_the_softmax_over_a_rows_own_past() -> None:
    packed = pack_rows((3, 6), torch.tensor([3, 11, 15]))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(14, heads, 8, generator=generator).double() for heads in (4, 2, 2))
    actual = causal_attention(q, k, v, packed)
    expected = torch.zeros(14, 4, 8).double()
    for begin, end in zip(packed.cu_seqlens.tolist()[:-1], packed.cu_seqlens.tolist()[1:], strict=True):
        for token in range(begin, end):
            for head in range(4):
                past = slice(begin, token + 1)
                scores = (k[past, head // 2] @ q[token, head]) / 8**0.5
                expected[token, head] = scores.softmax(0) @ v[past, head // 2]
    torch.testing.assert_close(actual, expected.flatten(1))


@draw_examples(60)
@given(row_lists())
def test_hidden_states_and_gradients_are_those_of_each_row_alone(rows: Rows) -> None:
    tokens, positions = make_padded_tokens(rows)
    actual, expected = MODEL.model.compute_hidden_states(tokens, positions), compute_row_by_row(rows, tokens)
    assert actual.shape == expected.shape == (len(positions), 32)
    assert compute_relative_error(actual, expected) < 1e-5
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
    actual_gradient = compute_gradient(MODEL.model, (actual * weights).sum())
    expected_gradient = compute_gradient(TWIN, (expected * weights).sum())
    assert actual_gradient.shape == expected_gradient.shape
    assert compute_relative_error(actual_gradient, expected_gradient) < 1e-5


UNEQUAL: Rows = [(9, [8, 2]), (1, [0]), (4, []), (6, [5]), (6, [1, 5, 5]), (3, [0])]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_without_requested_positions_has_a_zero_gradient_of_every_weight(recompute: bool) -> None:
    """All ranks of a run make the same number of passes and sum the gradients of all weights."""
    model = make_random_model(SIZES, std=0.2)
    model.model.pass_settings = PassSettings(recompute=recompute)
    tokens, _ = make_padded_tokens(UNEQUAL)
    no_positions = torch.zeros(0, dtype=torch.long)
    model.lm_head(model.model.compute_hidden_states(tokens, no_positions)).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert not weight.grad.any(), name
