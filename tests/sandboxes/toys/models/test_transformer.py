"""Tests of the stacked transformers against torch's layers, and of cached continuations against full passes."""

import math

import pytest
import torch
from torch import Tensor, nn

from sandboxes.toys.decoding import generate_completions, sample_actions
from sandboxes.toys.rngs import MemberRngs
from sandboxes.toys.transformer import TransformerEnsemble, TransformerShape, init_transformer_ensemble

SHAPE = TransformerShape(vocab_size=4, d_model=16, num_heads=2, num_layers=2, max_positions=9)


class PlainTransformer(nn.Module):
    """One member, built from torch's layers."""

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


def make_perturbed_models(seeds: tuple[int, ...]) -> TransformerEnsemble:
    """Make initial weights with added noise, so that no bias is 0, no scale is 1 and the blocks differ."""
    models = init_transformer_ensemble(SHAPE, MemberRngs(seeds))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in models.weights.values():
            noise = torch.randn(weight.shape[1:], generator=generator) * 0.1
            weight += noise * torch.arange(1, len(seeds) + 1).view(-1, *[1] * noise.ndim)
    return models


def make_plain_model(models: TransformerEnsemble, member: int) -> PlainTransformer:
    torch.manual_seed(0)
    model = PlainTransformer(models.shape)
    weights = {name: weight[member].detach() for name, weight in models.weights.items()}
    model.load_state_dict({name.replace("blocks.", "encoder.layers."): weight for name, weight in weights.items()})
    return model


def make_tokens(members: int, rows: int, length: int) -> Tensor:
    return torch.randint(SHAPE.vocab_size, (members, rows, length), generator=torch.Generator().manual_seed(1))


def test_a_member_is_torchs_encoder_with_its_weights_at_all_positions_that_are_returned() -> None:
    models, tokens = make_perturbed_models((3, 4)), make_tokens(2, 5, 9)
    target = torch.randn(2, 5, 4, SHAPE.vocab_size, generator=torch.Generator().manual_seed(2))
    for num_positions in (1, 4):
        expected = models.compute_logits(tokens, 9)[:, :, -num_positions:]
        torch.testing.assert_close(models.compute_logits(tokens, num_positions), expected, atol=1e-5, rtol=1e-5)
    logits = models.compute_logits(tokens, 4)
    (logits.log_softmax(-1) * target).sum().backward()
    for member in range(2):
        model = make_plain_model(models, member)
        expected = model(tokens[member])[:, -4:]
        torch.testing.assert_close(logits[member], expected, atol=1e-5, rtol=1e-5)
        (expected.log_softmax(-1) * target[member]).sum().backward()
        for name, weight in model.named_parameters():
            gradient = models.weights[name.replace("encoder.layers.", "blocks.")].grad
            torch.testing.assert_close(
                gradient[member], weight.grad, atol=2e-5, rtol=1e-4, msg=lambda m, key=name: key + m
            )


def test_first_weights_depend_on_no_other_member_and_all_blocks_have_equal_ones() -> None:
    ensemble = init_transformer_ensemble(SHAPE, MemberRngs((7, 8, 9)))
    for member, seed in enumerate((7, 8, 9)):
        for name, weight in init_transformer_ensemble(SHAPE, MemberRngs((seed,))).weights.items():
            assert torch.equal(ensemble.weights[name][member], weight[0])
    weights = init_transformer_ensemble(SHAPE, MemberRngs((1, 2))).weights
    for name in (name for name in weights if name.startswith("blocks.1.")):
        assert torch.equal(weights[name], weights[name.replace("blocks.1.", "blocks.0.")])
        assert weights[name].data_ptr() != weights[name.replace("blocks.1.", "blocks.0.")].data_ptr()


def test_first_weights_are_distributed_as_torchs() -> None:
    shape = TransformerShape(vocab_size=50, d_model=64, num_heads=2, num_layers=2, max_positions=50)
    ensemble = init_transformer_ensemble(shape, MemberRngs((11,)))
    weights = {name: weight[0].detach() for name, weight in ensemble.weights.items()}
    torch.manual_seed(0)
    plain = PlainTransformer(shape).state_dict()
    torch_weights = {name.replace("encoder.layers.", "blocks."): weight for name, weight in plain.items()}
    shapes, torch_shapes = ({name: w.shape for name, w in each.items()} for each in (weights, torch_weights))
    assert shapes == torch_shapes
    for name, weight in weights.items():
        # Enough entries to estimate a standard deviation, and the bounds of a uniform distribution.
        if weight.numel() >= 3000:
            std = float(torch_weights[name].std())
            assert float(weight.std()) == pytest.approx(std, abs=0.05 * std)
            assert float(weight.mean()) == pytest.approx(0, abs=0.06 * std)
        if not name.startswith(("embedding", "positions")):
            bounds = weight.abs().max(), torch_weights[name].abs().max()
            assert float(bounds[0]) == pytest.approx(float(bounds[1]), abs=0.05 * float(bounds[1]))


@pytest.mark.parametrize("each", [1, 3])
def test_cached_continuations_are_those_of_full_passes(each: int) -> None:
    models, prompts, steps = make_perturbed_models((3, 4)), make_tokens(2, 4, 5), 4
    uniforms = MemberRngs((0, 1)).uniform("sandbox_samples", 1, shape=(4 * each, steps))
    completions = generate_completions(models, prompts, steps, uniforms, each)
    sequences = torch.cat((prompts.repeat_interleave(each, dim=1), completions.tokens), dim=-1)
    expected = models.compute_logits(sequences[..., :-1], steps).log_softmax(-1)
    torch.testing.assert_close(completions.log_probs, expected.detach(), atol=1e-5, rtol=1e-5)
    assert torch.equal(completions.tokens, sample_actions(completions.log_probs, uniforms))


def test_tokens_are_drawn_by_their_probabilities_and_never_with_probability_zero() -> None:
    probabilities = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    actions = sample_actions(probabilities.log().expand(1000, 5), uniforms)
    assert torch.bincount(actions, minlength=5).tolist() == [200, 0, 500, 300, 0]
    extremes = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample_actions(torch.tensor([0.0, 0.5, 0.5, 0.0]).log().expand(2, 4), extremes).tolist() == [1, 2]
