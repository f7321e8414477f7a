"""Passes in bfloat16 over float32 weights, blocks recomputed in the backward pass, and logits computed in chunks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fakes.scripted import (
    make_hub_twin,
    make_qwen2_shape,
    make_random_episodes,
    make_random_model,
)
from tests.fakes.trainers import make_quiet_trainer
from tests.strategies.examples import thin_out
from trainable.algo.batching import order_length_stratified
from trainable.algo.losses import logprobs_from_logits
from trainable.algo.vocabulary import logprobs_from_hidden
from trainable.backend.meter import Meter
from trainable.backend.torch_backend import TorchBackend
from trainable.config.sections import ActorConfig, CriticConfig
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.interface import PassSettings
from trainable.models.load import Policy, make_critic, make_frozen_copy
from trainable.models.qwen2 import Qwen2
from trainable.ppo.update import ActorUpdate, Targets, TokenFunction, compute_at_trained_tokens, update_critic
from trainable.rollout.episode import Batch, collate

BFLOAT16 = PassSettings(torch.bfloat16)
RECOMPUTED = PassSettings(recompute=True)
CPU = torch.device("cpu")
WIDE = make_qwen2_shape(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=3
)
CUT = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4}


def make_wide_model(pass_settings: PassSettings, **sizes: object) -> Qwen2:
    model = make_random_model(make_qwen2_shape(**{**vars(WIDE), **sizes}), seed=2, std=0.15)
    model.model.pass_settings = pass_settings
    return model


def make_tokens(rows: int = 3, length: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(seed))


def compute_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference, as a fraction of the norm of `expected`."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def compute_gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True))


# ---------------------------------------------------------------------------- bfloat16


def measure_bfloat16_error(compute: Callable[[Qwen2], Tensor]) -> float:
    """Relative error of bfloat16 against float32, which must not be zero."""
    error = compute_relative_error(compute(make_wide_model(BFLOAT16)), compute(make_wide_model(PassSettings())))
    assert error > 1e-4
    return error


def test_bfloat16_passes_are_as_near_to_float32_as_those_of_transformers_under_autocast() -> None:
    tokens = make_tokens()
    positions = torch.arange(tokens.numel())
    weights = torch.randn(len(positions), 23, generator=torch.Generator().manual_seed(1))

    def compute_logits_and_gradients(pass_settings: PassSettings) -> tuple[Tensor, dict[str, Tensor]]:
        model = make_wide_model(pass_settings)
        hidden = model.model.compute_hidden_states(tokens, positions)
        assert hidden.dtype == pass_settings.dtype
        logits = model.lm_head(hidden)
        return logits, compute_gradients(model, (logits.float() * weights).sum())

    twin = make_hub_twin(make_wide_model(PassSettings()))
    with torch.autocast("cpu", torch.bfloat16):
        twin_logits = twin(input_ids=tokens).logits.flatten(0, 1)
    twin_gradients = compute_gradients(twin, (twin_logits.float() * weights).sum())

    exact_logits, exact_gradients = compute_logits_and_gradients(PassSettings())
    rounded_logits, gradients = compute_logits_and_gradients(BFLOAT16)
    twin_error = compute_relative_error(twin_logits, exact_logits)
    assert twin_error < 0.03
    assert compute_relative_error(rounded_logits, exact_logits) < 1.3 * twin_error
    for name, exact_gradient in exact_gradients.items():
        assert gradients[name].dtype == torch.float32
        # The gradient of a gain or a bias is a sum of few terms, so that its error varies at random.
        limit = 2 * compute_relative_error(twin_gradients[name], exact_gradient) + 0.005
        assert compute_relative_error(gradients[name], exact_gradient) < limit, name


def test_a_cache_holds_what_the_network_computes_in_and_grows_to_the_full_passes_numbers() -> None:
    tokens = make_tokens(3, 9)

    def compute_with_cache(model: Qwen2) -> Tensor:
        cache = model.model.make_cache(3, 4)
        valid, positions = torch.ones(3, 9, dtype=torch.bool), torch.arange(9).expand(3, 9)
        with torch.inference_mode():
            for columns in (slice(0, 4), slice(4, 5), slice(5, 9)):
                hidden = model.model.extend(tokens[:, columns], positions[:, columns], valid[:, columns], cache)
        assert {tensor.dtype for tensor in [*cache.keys, *cache.values]} == {model.model.pass_settings.dtype}
        return hidden.clone()

    bfloat16_error = measure_bfloat16_error(compute_with_cache)
    model = make_wide_model(BFLOAT16)
    full_pass = model.model.compute_hidden_states(tokens, torch.tensor([8, 17, 26]))
    assert compute_relative_error(compute_with_cache(model), full_pass) < 1.5 * bfloat16_error
    assert bfloat16_error < 0.03


def test_a_caches_scores_are_not_rounded_to_bfloat16() -> None:
    """bfloat16 rounds scores near 50 by up to 0.125, yet attention over the cache equals that over whole sequences."""
    model, tokens = make_wide_model(BFLOAT16), make_tokens(4, 30)
    for block in model.model.blocks:
        block.self_attn.q_proj.weight.data *= 40
    cache = model.model.make_cache(4, 30)
    valid, positions = torch.ones(4, 30, dtype=torch.bool), torch.arange(30).expand(4, 30)
    with torch.inference_mode():
        hidden = model.model.extend(tokens, positions, valid, cache)
        expected = model.model.compute_hidden_states(tokens, torch.arange(1, 5) * 30 - 1)
    assert compute_relative_error(hidden, expected) < 0.005


# ---------------------------------------------------------------------------- float16, and a head in float32

FLOAT16 = PassSettings(torch.float16)


def test_updates_in_half_precision_are_near_and_float16_is_nearer() -> None:
    settings = ActorConfig(**CUT, entropy_coeff=0.1, use_kl_loss=True, kl_loss_type="full")
    means = {}
    for pass_settings in (PassSettings(), FLOAT16, BFLOAT16):
        model = make_wide_model(pass_settings)
        loss_scale = 2.0**16 if pass_settings == FLOAT16 else 1.0
        means[pass_settings] = run_update(model, settings, make_frozen_copy(model), loss_scale)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    exact = means[PassSettings()]
    for name in ("pg_loss", "entropy_loss", "actor_grad_norm"):
        assert means[FLOAT16][name] == pytest.approx(exact[name], rel=2e-3, abs=2e-3), name
        assert abs(means[FLOAT16][name] - exact[name]) < abs(means[BFLOAT16][name] - exact[name]), name
        assert means[BFLOAT16][name] == pytest.approx(exact[name], rel=1e-2, abs=0.02 if name == "pg_loss" else 0), name


def compute_tiny_gradient(pass_settings: PassSettings, loss_scale: float) -> Tensor:
    """The gradient with which the optimizer steps, for a loss so small that float16 rounds its gradients to 0."""
    model = make_wide_model(pass_settings)
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=1.0), list[Tensor]()

    def record(*_: object) -> None:
        gradients.extend(weight.grad.flatten().clone() for weight in model.parameters() if weight.grad is not None)

    optimizer.register_step_pre_hook(record)
    backend = TorchBackend("optimizer", {"actor": model}, optimizer, 1.0, loss_scale=loss_scale)
    weights = torch.randn(51, 64, generator=torch.Generator().manual_seed(1))

    def compute_loss() -> Tensor:
        hidden = model.model.compute_hidden_states(make_tokens(), torch.arange(51))
        return (hidden.float() * weights).sum() * 1e-9

    backend.backward(compute_loss, is_last=True)
    backend.step(Meter(), "norm")
    return torch.cat(gradients)


def test_a_loss_scale_keeps_gradients_that_float16_would_round_to_zero() -> None:
    exact = compute_tiny_gradient(PassSettings(), 1.0)
    assert compute_relative_error(compute_tiny_gradient(FLOAT16, 1.0), exact) > 0.5
    assert compute_relative_error(compute_tiny_gradient(FLOAT16, 2.0**16), exact) < 0.01
    assert torch.equal(compute_tiny_gradient(PassSettings(), 2.0**16), exact)  # a power of two rounds nothing


def test_backends_scale_losses_in_float16_only() -> None:
    overrides = {"model__compiled_passes": False, "rollout__name": "torch", "model__loss_scale": 1024}
    for dtype, scale in (("float16", 1024), ("bfloat16", 1), ("float32", 1)):
        trainer = make_quiet_trainer(model__dtype=dtype, **overrides)
        scales = {name: backend.loss_scale for name, backend in trainer.backends.items()}
        assert scales == {"actor": scale, "critic": scale}


def test_a_filler_gives_no_nan_in_float16() -> None:
    """Rows of one cache whose prompts differ in length: fillers on the left see no token at all."""
    tokens, valid = make_tokens(2, 6), torch.ones(2, 6, dtype=torch.bool)
    valid[0, :4] = False
    positions = (valid.cumsum(1) - 1).clamp_min(0)

    def compute_last_states(pass_settings: PassSettings) -> Tensor:
        model = make_wide_model(pass_settings)
        with torch.inference_mode():
            return model.model.extend(tokens, positions, valid, model.model.make_cache(2, 6)).clone()

    assert compute_relative_error(compute_last_states(FLOAT16), compute_last_states(PassSettings())) < 0.003
    model = make_wide_model(FLOAT16)
    cache = model.model.make_cache(2, 6)
    bias = cache.append_slots(valid)
    assert torch.isfinite(bias.to(torch.float16)).all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", thin_out(["float16", "bfloat16"], 2))
def test_a_head_in_float32_gives_every_network_and_the_sampler_float32_logits(dtype: str) -> None:
    overrides = {"model__dtype": dtype, "model__compiled_passes": False, "rollout__name": "torch"}
    trainer = make_quiet_trainer(**overrides, model__head_dtype="float32", actor__use_kl_loss=True)
    assert trainer.reference is not None
    tokens = torch.tensor([1, 2, 3])
    for network in (trainer.model, trainer.reference):
        hidden = network.model.compute_hidden_states(tokens[None], torch.arange(3))
        assert (hidden.dtype, network.lm_head(hidden).dtype) == (getattr(torch, dtype), torch.float32)
        exact_logits = hidden.double() @ network.lm_head.weight.to(hidden.dtype).double().T
        logprobs = network.lm_head(hidden, partial(logprobs_from_hidden, tokens=tokens, temperature=1.0))
        torch.testing.assert_close(logprobs.double(), logprobs_from_logits(exact_logits, tokens), rtol=0, atol=1e-5)
    row = trainer.step().row
    assert row["nonfinite_updates"] == 0
    rounded_row = make_quiet_trainer(**overrides, actor__use_kl_loss=True).step().row
    assert row["entropy_loss"] == pytest.approx(rounded_row["entropy_loss"], abs=0.05)
    assert row["entropy_loss"] != rounded_row["entropy_loss"]


# ---------------------------------------------------------------------------- recomputed blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_blocks_change_no_number_and_no_gradient(dtype: torch.dtype) -> None:
    tokens, positions = make_tokens(), torch.tensor([2, 7, 12, 25, 38])
    plain, recomputing = make_wide_model(PassSettings(dtype)), make_wide_model(PassSettings(dtype, recompute=True))
    expected, actual = (model.model.compute_hidden_states(tokens, positions) for model in (plain, recomputing))
    assert torch.equal(expected, actual)
    output_gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual_gradients = compute_gradients(recomputing, (actual * output_gradient).sum())
    expected_gradients = compute_gradients(plain, (expected * output_gradient).sum())
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(actual_gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_recomputing_keeps_the_inputs_of_blocks_only() -> None:
    """The test counts the bytes that autograd saves for the backward pass, except those of weights."""
    tokens = make_tokens(4, 30)

    def count_saved_bytes(pass_settings: PassSettings) -> int:
        model, storages = make_wide_model(pass_settings, num_hidden_layers=6), {}
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.model.compute_hidden_states(tokens, torch.arange(120))
        assert output.requires_grad
        return sum(size for pointer, size in storages.items() if pointer not in weights)

    assert count_saved_bytes(RECOMPUTED) < count_saved_bytes(PassSettings()) / 4


def test_passes_without_gradients_recompute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainable.models.qwen2.checkpoint", None)
    with torch.no_grad():
        make_wide_model(RECOMPUTED).model.compute_hidden_states(make_tokens(), torch.arange(4))
    with pytest.raises(TypeError):
        make_wide_model(RECOMPUTED).model.compute_hidden_states(make_tokens(), torch.arange(4))


# ---------------------------------------------------------------------------- whole updates


def make_batch(model: Qwen2, count: int = 12) -> tuple[Batch, Targets]:
    batch = collate(make_random_episodes(count, 4, seed=5, vocab=model.shape.vocab_size))
    logprobs = compute_at_trained_tokens(batch, 4, TokenFunction.for_logprobs(model, 1.0))
    noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1)) * batch.mask
    return batch._replace(logprobs=logprobs), Targets(noise, noise, 0.5 * noise, logprobs + 0.1 * noise)


def make_backend(loss_scale: float = 1.0, **networks: torch.nn.Module) -> TorchBackend:
    weights = [weight for network in networks.values() for weight in network.parameters()]
    return TorchBackend("optimizer", networks, torch.optim.AdamW(weights, 1e-3), 1.0, loss_scale=loss_scale)


def run_update(
    model: Qwen2, settings: ActorConfig, reference: Qwen2 | None = None, loss_scale: float = 1.0
) -> dict[str, float]:
    batch, targets = make_batch(model)
    actor = ActorUpdate(model, make_backend(loss_scale, actor=model), settings, 1.0, reference)
    return actor.run(batch, targets, order_length_stratified(batch.lengths)).compute_means()


class LargestTensorMode(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation creates."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return output


BOUND = 40_000


@pytest.mark.parametrize("chunking", [True, False])
def test_no_tensor_of_an_update_is_larger_than_the_bound(chunking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 vocabulary entries, some 80 trained tokens per pass: 160,000 logits; the embedding has 32,000 numbers."""
    model = make_random_model(make_qwen2_shape(vocab_size=2000), std=0.1)
    batch, _ = make_batch(model, 16)
    critic = make_critic(Policy(model, None, Path()), np.random.default_rng(0), CPU)  # type: ignore[arg-type]
    reference = make_frozen_copy(model)
    for name in ("trainable.ppo.update.CHUNK_ELEMENTS", "trainable.diagnostics.cross_scores.CHUNK_ELEMENTS"):
        monkeypatch.setattr(name, BOUND)
    settings = ActorConfig(
        **{**CUT, "ppo_mini_batch_size": 16},
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_type="full",
        entropy_from_logits_with_chunking=chunking,
    )
    order = order_length_stratified(batch.lengths)
    reference_function = TokenFunction.for_logprobs(reference, 1.0)
    with LargestTensorMode() as largest:
        logprobs = compute_at_trained_tokens(batch, 16, reference_function)
        values = compute_at_trained_tokens(batch, 16, TokenFunction(critic.model, critic.score))
        targets = Targets(batch.logprobs, values + 1, values, logprobs)
        update_critic(critic, make_backend(critic=critic), batch, targets, order, CriticConfig(**CUT))
        ActorUpdate(model, make_backend(actor=model), settings, 1.0, reference).run(batch, targets, order)
        compute_cross_scores(model, [[1, 2, 3], [4, 5]], [[6, 7, *range(30)], [8] * 20])
    assert (largest.elements <= BOUND) == chunking
    assert largest.elements >= 32_000


# ---------------------------------------------------------------------------- settings


TWO_EPISODES = {
    "env__env_groups": 1,
    "env__group_size": 2,
    "filter__rollout_filter_include_zero": True,
    "actor__ppo_mini_batch_size": 2,
    "critic__ppo_mini_batch_size": 2,
}
"""A step of two episodes, since passes in half precision are slow on a CPU."""


@pytest.mark.long
def test_settings_reach_every_network_of_a_run() -> None:
    settings = {**TWO_EPISODES, "model__dtype": "bfloat16", "model__enable_gradient_checkpointing": True}
    trainer = make_quiet_trainer(**settings, actor__use_kl_loss=True)
    assert trainer.critic is not None
    assert trainer.reference is not None
    expected = PassSettings(torch.bfloat16, True)
    for network in (trainer.model, trainer.critic, trainer.reference):
        assert network.model.pass_settings == expected
    row = trainer.step().row
    assert row["nonfinite_updates"] == 0
    assert abs(row["kl_loss"]) < 1
    assert make_quiet_trainer().model.model.pass_settings == PassSettings(compiled=True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_copy_holds_what_passes_compute_in_and_gives_the_very_numbers(tied: bool) -> None:
    model = make_wide_model(BFLOAT16, tie_word_embeddings=tied)
    frozen = make_frozen_copy(model)
    tokens, positions = make_tokens(), torch.arange(20)
    with torch.no_grad():
        hidden = [network.model.compute_hidden_states(tokens, positions) for network in (model, frozen)]
        expected, actual = model.lm_head(hidden[0]), frozen.lm_head(hidden[1])
    assert torch.equal(expected, actual)
    assert not any(weight.requires_grad for weight in frozen.parameters())
    assert frozen.model.blocks[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert frozen.model.embed_tokens.weight.dtype == frozen.model.norm.weight.dtype == torch.float32
    assert (frozen.lm_head.weight is frozen.model.embed_tokens.weight) == tied
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert not torch.equal(model.lm_head.weight, frozen.lm_head.weight)
