"""The stacked transformers against torch's own layers, and the cached continuations against whole passes."""

import math

import pytest
import torch
from torch import Tensor, nn

from trainable.sandbox.batch.rngs import MemberRngs
from trainable.sandbox.models.decoding import generate_completions, sample_actions
from trainable.sandbox.models.transformer import TransformerEnsemble, TransformerShape, init_transformer_ensemble

SHAPE = TransformerShape(vocab_size=4, d_model=16, num_heads=2, num_layers=2, max_positions=9)


class Plain(nn.Module):
    """One member, built of torch's layers."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.width = shape.d_model
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.max_positions, shape.d_model)
        layer = nn.TransformerEncoderLayer(
            shape.d_model, shape.num_heads, 4 * shape.d_model, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, shape.num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(shape.d_model)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.embedding(tokens) * math.sqrt(self.width) + self.positions(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits: Tensor = self.head(self.norm(self.encoder(hidden, mask=mask)))
        return logits


def perturbed(seeds: tuple[int, ...]) -> TransformerEnsemble:
    """First weights and a little more, so that no bias is zero, no scale is 1 and blocks differ."""
    models = init_transformer_ensemble(SHAPE, MemberRngs(seeds))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in models.weights.values():
            noise = torch.randn(weight.shape[1:], generator=generator) * 0.1
            weight += noise * torch.arange(1, len(seeds) + 1).view(-1, *[1] * noise.ndim)
    return models


def plain(models: TransformerEnsemble, member: int) -> Plain:
    torch.manual_seed(0)
    one = Plain(models.shape)
    own = {name: weight[member].detach() for name, weight in models.weights.items()}
    one.load_state_dict({name.replace("blocks.", "encoder.layers."): weight for name, weight in own.items()})
    return one


def some_tokens(members: int, rows: int, length: int) -> Tensor:
    return torch.randint(SHAPE.vocab_size, (members, rows, length), generator=torch.Generator().manual_seed(1))


def test_a_member_is_torchs_encoder_with_its_weights() -> None:
    models, tokens = perturbed((3, 4)), some_tokens(2, 5, 9)
    target = torch.randn(2, 5, 4, SHAPE.vocab_size, generator=torch.Generator().manual_seed(2))
    logits = models.compute_logits(tokens, 4)
    (logits.log_softmax(-1) * target).sum().backward()
    for member in range(2):
        one = plain(models, member)
        expected = one(tokens[member])[:, -4:]
        torch.testing.assert_close(logits[member], expected, atol=1e-5, rtol=1e-5)
        (expected.log_softmax(-1) * target[member]).sum().backward()
        for name, weight in one.named_parameters():
            ours = models.weights[name.replace("encoder.layers.", "blocks.")].grad
            assert ours is not None
            assert weight.grad is not None
            torch.testing.assert_close(ours[member], weight.grad, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: n + m)


def test_the_weights_and_gradients_of_a_member_do_not_depend_on_who_is_beside_it() -> None:
    tokens = some_tokens(3, 6, 9)
    together = init_transformer_ensemble(SHAPE, MemberRngs((7, 8, 9)))
    logits = together.compute_logits(tokens, 4)
    logits.log_softmax(-1)[..., 0].sum().backward()
    for member, seed in enumerate((7, 8, 9)):
        alone = init_transformer_ensemble(SHAPE, MemberRngs((seed,)))
        own = alone.compute_logits(tokens[member : member + 1], 4)
        own.log_softmax(-1)[..., 0].sum().backward()
        torch.testing.assert_close(logits[member], own[0], atol=1e-5, rtol=1e-5)
        for name, weight in alone.weights.items():
            beside = together.weights[name]
            torch.testing.assert_close(beside[member].detach(), weight[0].detach(), atol=0, rtol=0)
            assert beside.grad is not None
            assert weight.grad is not None
            torch.testing.assert_close(beside.grad[member], weight.grad[0], atol=1e-5, rtol=1e-5)


def test_no_position_sees_a_later_one() -> None:
    models, tokens = perturbed((3,)), some_tokens(1, 4, 9)
    changed = tokens.clone()
    changed[..., -1] = (changed[..., -1] + 1) % SHAPE.vocab_size
    before, after = models.compute_logits(tokens, 9), models.compute_logits(changed, 9)
    torch.testing.assert_close(before[:, :, :-1], after[:, :, :-1], atol=0, rtol=0)
    assert not torch.allclose(before[:, :, -1], after[:, :, -1], atol=1e-3)


@pytest.mark.parametrize("read", [1, 4, 9])
def test_positions_nobody_reads_change_nothing(read: int) -> None:
    models, tokens = perturbed((3, 4)), some_tokens(2, 5, 9)
    whole = models.compute_logits(tokens, 9)[:, :, -read:]
    torch.testing.assert_close(models.compute_logits(tokens, read), whole, atol=1e-5, rtol=1e-5)


def test_first_weights_are_distributed_as_torchs() -> None:
    shape = TransformerShape(vocab_size=50, d_model=64, num_heads=2, num_layers=2, max_positions=50)
    ours = {
        name: weight[0].detach() for name, weight in init_transformer_ensemble(shape, MemberRngs((11,))).weights.items()
    }
    torch.manual_seed(0)
    theirs = {name.replace("encoder.layers.", "blocks."): weight for name, weight in Plain(shape).state_dict().items()}
    assert {name: weight.shape for name, weight in ours.items()} == {name: w.shape for name, w in theirs.items()}
    for name, weight in ours.items():
        if weight.numel() >= 3000:  # enough of them to tell a spread, and the bounds of a uniform one
            spread = float(theirs[name].std())
            assert float(weight.std()) == pytest.approx(spread, abs=0.05 * spread)
            assert float(weight.mean()) == pytest.approx(0, abs=0.06 * spread)
        if not name.startswith(("embedding", "positions")):
            bounds = weight.abs().max(), theirs[name].abs().max()
            assert float(bounds[0]) == pytest.approx(float(bounds[1]), abs=0.05 * float(bounds[1]))


def test_all_blocks_start_alike() -> None:
    weights = init_transformer_ensemble(SHAPE, MemberRngs((1, 2))).weights
    for name in (name for name in weights if name.startswith("blocks.1.")):
        assert torch.equal(weights[name], weights[name.replace("blocks.1.", "blocks.0.")])
        assert weights[name].data_ptr() != weights[name.replace("blocks.1.", "blocks.0.")].data_ptr()


@pytest.mark.parametrize("each", [1, 3])
def test_cached_continuations_are_those_of_whole_passes(each: int) -> None:
    models, prompts, steps = perturbed((3, 4)), some_tokens(2, 4, 5), 4
    uniforms = MemberRngs((0, 1)).uniform("sandbox_samples", 1, shape=(4 * each, steps))
    found = generate_completions(models, prompts, steps, uniforms, each)
    sequences = torch.cat((prompts.repeat_interleave(each, dim=1), found.tokens), dim=-1)
    whole = models.compute_logits(sequences[..., :-1], steps).log_softmax(-1)
    torch.testing.assert_close(found.log_probs, whole.detach(), atol=1e-5, rtol=1e-5)
    assert torch.equal(found.tokens, sample_actions(found.log_probs, uniforms))


def test_greedy_continuations_are_those_of_a_literal_decoder() -> None:
    models, prompts, steps = perturbed((3, 4)), some_tokens(2, 4, 5), 4
    found = generate_completions(models, prompts, steps)
    for member in range(2):
        one = plain(models, member)
        for row in range(4):
            sequence = prompts[member, row].tolist()
            for _ in range(steps):
                sequence.append(int(one(torch.tensor([sequence]))[0, -1].argmax()))
            assert sequence[5:] == found.tokens[member, row].tolist()


def test_tokens_are_drawn_by_their_probabilities_and_never_with_probability_zero() -> None:
    probabilities = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    actions = sample_actions(probabilities.log().expand(1000, 5), uniforms)
    assert torch.bincount(actions, minlength=5).tolist() == [200, 0, 500, 300, 0]
    extremes = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample_actions(torch.tensor([0.0, 0.5, 0.5, 0.0]).log().expand(2, 4), extremes).tolist() == [1, 2]
