"""Rows end to end: the layout, and every number beside that of each row alone, without padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_model
from trainable.models.packing import PackedRows, causal_attention, pack_rows
from trainable.models.qwen2 import PassSettings, ValueModel

SIZES = make_qwen2_shape(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
MODEL = make_random_model(SIZES, seed=5, std=0.2)
TWIN = make_hub_twin(MODEL).model
CRITIC = ValueModel(SIZES)
CRITIC.model.load_state_dict(MODEL.model.state_dict())

# Of each row: how many tokens it has, and which of its positions are asked for.
Rows = list[tuple[int, list[int]]]


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return [(length, draw(st.lists(st.integers(0, length - 1), max_size=4))) for length in lengths]


def padded(rows: Rows, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens (B, T) and `where`, the rows' asked positions one row after the other."""
    width = max(length for length, _ in rows)
    tokens = torch.randint(0, 23, (len(rows), width), generator=torch.Generator().manual_seed(len(rows)))
    for row, (length, _) in enumerate(rows):
        tokens[row, length:] = filler
    where = [row * width + place for row, (_, places) in enumerate(rows) for place in places]
    return tokens, torch.tensor(where, dtype=torch.long)


def row_by_row(rows: Rows, tokens: Tensor) -> Tensor:
    """Hidden states of the asked positions by transformers, each row alone and without padding."""
    found = [
        TWIN(input_ids=tokens[row : row + 1, :length]).last_hidden_state[0, places]
        for row, (length, places) in enumerate(rows)
        if places
    ]
    return torch.cat(found) if found else TWIN.embed_tokens(tokens[0, :0])


def gradient(trunk: torch.nn.Module, loss: Tensor) -> Tensor:
    """Of all weights of a trunk, end to end."""
    found = torch.autograd.grad(loss, list(trunk.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


def far(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, as a share of the largest number."""
    if not wanted.numel():
        return 0.0
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))


# ---------------------------------------------------------------------------- the layout


def test_a_layout_by_hand() -> None:
    """Rows of 5: the first up to position 2, the second left out, the third up to 0, the fourth up to 2."""
    packed = pack_rows((4, 5), torch.tensor([2, 0, 17, 10, 2]))
    assert packed.source_indices.tolist() == [10, 0, 1, 2, 15, 16, 17]
    assert packed.positions.tolist() == [0, 0, 1, 2, 0, 1, 2]
    assert packed.output_indices.tolist() == [3, 1, 6, 0, 3]
    assert packed.cu_seqlens.tolist() == [0, 1, 4, 7]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.length_groups == ((1, 1), (2, 3))


@settings(deadline=None)
@given(some_rows())
def test_the_stream_holds_each_row_up_to_its_last_asked_position(rows: Rows) -> None:
    tokens, where = padded(rows)
    width = tokens.shape[1]
    packed = pack_rows((len(rows), width), where)
    needed = [max(places) + 1 if places else 0 for _, places in rows]
    if not sum(needed):
        needed[0] = 1  # never nothing
    assert sorted(packed.source_indices.tolist()) == [
        row * width + place for row, length in enumerate(needed) for place in range(length)
    ]
    assert packed.source_indices[packed.output_indices].tolist() == where.tolist()
    assert torch.equal(packed.positions, packed.source_indices % width)
    lengths = (packed.cu_seqlens[1:] - packed.cu_seqlens[:-1]).tolist()
    assert lengths == sorted(length for length in needed if length)
    assert [length for count, length in packed.length_groups for _ in range(count)] == lengths
    starts = packed.cu_seqlens[:-1].long()
    assert (packed.positions[starts] == 0).all()  # every row counts from 0


def test_attention_is_the_softmax_over_a_rows_own_past() -> None:
    packed = pack_rows((3, 6), torch.tensor([3, 11, 15]))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(14, heads, 8, generator=generator).double() for heads in (4, 2, 2))
    found = causal_attention(q, k, v, packed)
    wanted = torch.zeros(14, 4, 8).double()
    for begin, end in zip(packed.cu_seqlens.tolist()[:-1], packed.cu_seqlens.tolist()[1:], strict=True):
        for token in range(begin, end):
            for head in range(4):
                past = slice(begin, token + 1)
                scores = (k[past, head // 2] @ q[token, head]) / 8**0.5
                wanted[token, head] = scores.softmax(0) @ v[past, head // 2]
    torch.testing.assert_close(found, wanted.flatten(1))


# ---------------------------------------------------------------------------- beside each row alone


@settings(deadline=None, max_examples=60)
@given(some_rows())
def test_hidden_states_and_gradients_are_those_of_each_row_alone(rows: Rows) -> None:
    tokens, where = padded(rows)
    found, wanted = MODEL.model.compute_hidden_states(tokens, where), row_by_row(rows, tokens)
    assert found.shape == wanted.shape == (len(where), 32)
    assert far(found, wanted) < 1e-5
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    slope, alone = gradient(MODEL.model, (found * weights).sum()), gradient(TWIN, (wanted * weights).sum())
    assert slope.shape == alone.shape
    assert far(slope, alone) < 1e-5


@settings(deadline=None, max_examples=30)
@given(some_rows())
def test_values_are_those_of_each_row_alone(rows: Rows) -> None:
    tokens, where = padded(rows)
    with torch.no_grad():
        found = CRITIC.compute_values(tokens, where)
        wanted = row_by_row(rows, tokens) @ CRITIC.score.weight[0] + CRITIC.score.bias[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


UNEQUAL: Rows = [(9, [8, 2]), (1, [0]), (4, []), (6, [5]), (6, [1, 5, 5]), (3, [0])]


@pytest.mark.parametrize("filler", [1, 22])
def test_padding_and_what_follows_the_last_asked_position_change_no_bit(filler: int) -> None:
    tokens, where = padded(UNEQUAL)
    other, _ = padded(UNEQUAL, filler)
    other[5, 1:] = filler  # only its first token is asked for
    other[2] = filler  # nothing is
    assert torch.equal(
        MODEL.model.compute_hidden_states(tokens, where), MODEL.model.compute_hidden_states(other, where)
    )


def test_a_token_before_an_asked_position_changes_its_number_and_no_other_rows() -> None:
    tokens, where = padded(UNEQUAL)
    other = tokens.clone()
    other[3, 2] = (tokens[3, 2] + 1) % 23
    moved = (
        MODEL.model.compute_hidden_states(tokens, where) - MODEL.model.compute_hidden_states(other, where)
    ).abs().amax(1) > 1e-6
    assert moved.tolist() == [False, False, False, True, False, False, False, False]


def test_the_order_of_rows_changes_nothing_but_their_order() -> None:
    tokens, where = padded(UNEQUAL)
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    of, place = where // 9, where % 9
    moved = torch.argsort(order)[of] * 9 + place
    found = MODEL.model.compute_hidden_states(tokens[order], moved)
    torch.testing.assert_close(found, MODEL.model.compute_hidden_states(tokens, where), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_that_asks_for_nothing_has_a_zero_gradient_of_every_weight(recompute: bool) -> None:
    """The ranks of a run make as many passes each, and add the gradients of all weights."""
    model = make_random_model(SIZES, std=0.2)
    model.model.pass_settings = PassSettings(recompute=recompute)
    tokens, _ = padded(UNEQUAL)
    nothing = torch.zeros(0, dtype=torch.long)
    model.lm_head(model.model.compute_hidden_states(tokens, nothing)).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert not weight.grad.any(), name


@pytest.mark.parametrize("passes", [PassSettings(recompute=True), PassSettings(torch.bfloat16, True)], ids=str)
def test_recomputed_and_bfloat16_passes_are_near(passes: PassSettings) -> None:
    tokens, where = padded(UNEQUAL)
    usual = MODEL.model.compute_hidden_states(tokens, where)
    slope = gradient(MODEL.model, usual.square().sum())
    model = make_random_model(SIZES, seed=5, std=0.2)
    model.model.pass_settings = passes
    found = model.model.compute_hidden_states(tokens, where).float()
    again = gradient(model.model, found.square().sum())
    limit = 0.05 if passes.dtype == torch.bfloat16 else 1e-5
    assert far(found, usual) < limit
    assert far(again, slope) < limit


def test_groups_are_views_of_the_stream() -> None:
    """One call of attention a length: rows of one length share it, and none is padded."""
    packed: PackedRows = pack_rows((6, 9), padded(UNEQUAL)[1])
    assert packed.length_groups == ((2, 1), (2, 6), (1, 9))
    assert sum(count * length for count, length in packed.length_groups) == len(packed.source_indices) == 23
