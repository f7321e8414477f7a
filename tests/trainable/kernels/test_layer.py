"""Compiled passes against torch's: hidden states and gradients of many shapes, and whole training steps."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from tests.fakes.trainers import copy_weights, make_quiet_trainer, run_steps
from trainable.config.sections import ModelConfig
from trainable.kernels import compiled as kernels
from trainable.models.interface import PassSettings
from trainable.models.lora import make_adapted_policy
from trainable.models.qwen2 import Qwen2

SHAPES = [
    {},
    {"num_key_value_heads": 2},
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3},
    {"hidden_size": 20, "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 4},
    {"num_hidden_layers": 1},
]


def run_pass(model: Qwen2, tokens: Tensor, positions: Tensor, *, is_compiled: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of a pass, and the gradients of a loss that weights all of their numbers differently."""
    model.model.pass_settings = PassSettings(compiled=is_compiled)
    model.zero_grad()
    hidden = model.model.compute_hidden_states(tokens, positions)
    slopes = torch.sin(torch.arange(hidden.numel(), dtype=torch.float32)).view_as(hidden)
    (hidden * slopes).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return hidden.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def assert_equal_passes(model: Qwen2, tokens: Tensor, positions: Tensor) -> None:
    expected, expected_gradients = run_pass(model, tokens, positions, is_compiled=False)
    hidden, gradients = run_pass(model, tokens, positions, is_compiled=True)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=2e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = float(expected_gradients[name].abs().max())
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=2e-5 * max(scale, 1.0), msg=name)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_hidden_states_and_gradients_are_those_of_torch(sizes: dict[str, object]) -> None:
    model = make_random_model(make_qwen2_shape(**sizes), seed=1, std=0.25)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(23, (9, 41), generator=generator)
    mask = torch.rand(9, 41, generator=generator) > 0.6
    mask[3] = False  # a row without a requested position is left out
    mask[4, 1:], mask[5, 9:] = False, False
    mask[6] = True
    assert_equal_passes(model, tokens, mask.flatten().nonzero().squeeze(1))


@given(
    lengths=st.lists(st.integers(1, 37), min_size=1, max_size=5),
    density=st.sampled_from([0.05, 0.5, 1.0]),
    is_reversed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sequences_of_any_lengths(lengths: list[int], density: float, is_reversed: bool, seed: int) -> None:
    model = make_random_model(make_qwen2_shape(), seed=3, std=0.25)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(23, (len(lengths), max(lengths)), generator=generator)
    mask = torch.rand(tokens.shape, generator=generator) < density
    for row, length in enumerate(lengths):
        mask[row, length:], mask[row, length - 1] = False, True
    positions = mask.flatten().nonzero().squeeze(1)
    assert_equal_passes(model, tokens, positions.flip(0) if is_reversed else positions)


def test_a_pass_without_a_requested_position_has_gradients_of_zero() -> None:
    model = make_random_model(make_qwen2_shape(), seed=3, std=0.25)
    tokens, nowhere = torch.tensor([[3, 4, 5]]), torch.zeros(0, dtype=torch.long)
    _, expected_gradients = run_pass(model, tokens, nowhere, is_compiled=False)
    hidden, gradients = run_pass(model, tokens, nowhere, is_compiled=True)
    assert hidden.shape == (0, 16)
    assert gradients.keys() == expected_gradients.keys()  # every rank has a gradient for every weight
    assert len(gradients) > 20
    assert not any(gradient.any() for gradient in gradients.values())


def test_scores_of_any_size_are_finite_and_a_number_that_is_not_stays_visible() -> None:
    model = make_random_model(make_qwen2_shape(), seed=3, std=0.25)
    with torch.no_grad():
        for block in model.model.blocks:
            block.self_attn.q_proj.weight.mul_(1e4)
    tokens = torch.randint(23, (3, 20), generator=torch.Generator().manual_seed(0))
    (expected, _), (hidden, gradients) = (
        run_pass(model, tokens, torch.arange(60), is_compiled=is_compiled) for is_compiled in (False, True)
    )
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-3)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    model = make_random_model(make_qwen2_shape(), seed=3, std=0.25)
    with torch.no_grad():
        model.model.blocks[0].mlp.up_proj.weight[0, 0] = torch.nan
    hidden, _ = run_pass(model, torch.tensor([[3, 4, 5]]), torch.arange(3), is_compiled=True)
    assert torch.isnan(hidden).any()


@pytest.mark.parametrize("overrides", [{}, {"algorithm__adv_estimator": "grpo", "actor__use_kl_loss": True}], ids=str)
def test_training_steps_are_those_of_torch(overrides: dict[str, object]) -> None:
    steps = []
    for is_compiled in (False, True):
        # With seed 0, the ratio of one token is at the boundary of the clip range up to rounding.
        trainer = make_quiet_trainer(**overrides, seed=1, model__compiled_passes=is_compiled)
        assert trainer.model.model.pass_settings.compiled == is_compiled
        before = copy_weights(trainer)
        rows = run_steps(trainer, 2)
        after = {name: weight for name, weight in copy_weights(trainer).items() if name in before}
        steps.append((rows, {name: weight - before[name] for name, weight in after.items()}))
    (expected_rows, expected_changes), (rows, changes) = steps
    for expected_row, row in zip(expected_rows, rows, strict=True):
        for name in ("train_reward", "pg_loss", "pg_clipfrac", "actor_grad_norm", "entropy", "trained_tokens"):
            assert row[name] == pytest.approx(expected_row[name], rel=1e-3, abs=1e-5), name
    for name, change in changes.items():
        # AdamW turns rounding of a tiny gradient into a change of up to the learning rate, in a few weights.
        assert (change - expected_changes[name]).abs().mean() < 0.02 * expected_changes[name].abs().mean() + 1e-9, name


def test_what_compiled_passes_cannot_do_is_refused() -> None:
    model = make_random_model(make_qwen2_shape())
    tokens, positions = torch.tensor([[3, 4, 5]]), torch.arange(3)
    for pass_settings in (PassSettings(torch.bfloat16, compiled=True), PassSettings(recompute=True, compiled=True)):
        model.model.pass_settings = pass_settings
        with pytest.raises(ValueError, match=r"Use torch with --set model\.compiled_passes=false"):
            model.model.compute_hidden_states(tokens, positions)
    other = make_random_model(make_qwen2_shape(hidden_size=12))  # heads of six channels
    other.model.pass_settings = PassSettings(compiled=True)
    with pytest.raises(ValueError, match="its head size of 6 is not a multiple of 4"):
        other.model.compute_hidden_states(tokens, positions)
    adapted = make_adapted_policy(model, ModelConfig(lora_rank=2), np.random.default_rng(0))
    adapted.model.pass_settings = PassSettings(compiled=True)
    with pytest.raises(ValueError, match="does not support LoRA adapters"):
        adapted.model.compute_hidden_states(tokens, positions)


def test_the_stored_machine_code_names_no_class_of_ours() -> None:
    model = make_random_model(make_qwen2_shape())
    run_pass(model, torch.tensor([[3, 4, 5]]), torch.arange(3), is_compiled=True)
    for kernel in (kernels.attend_stream, kernels.attend_stream_backward, kernels.normalize, kernels.rotate):
        assert kernel.signatures  # type: ignore[attr-defined]
        assert "NamedTuple" not in str(kernel.signatures)  # type: ignore[attr-defined]
