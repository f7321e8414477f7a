"""Adapters over one frozen base: their formula and gradients, what shares memory with what, and what a run keeps."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_model, make_small_config
from tests.fakes.trainers import (
    Row,
    copy_weights,
    has_same_weights,
    is_finite,
    make_quiet_trainer,
    replay_step,
    run_steps,
)
from trainable.config.sections import ModelConfig
from trainable.config.seeds import make_rng
from trainable.config.setting_types import LINEAR_LAYERS
from trainable.diagnostics.gradient_analysis import analyse_gradients
from trainable.models import load as loading
from trainable.models.load import freeze, load_policy, make_critic, make_frozen_copy, make_pass_settings
from trainable.models.lora import (
    ADAPTER_NAME,
    check_base,
    compute_fingerprint,
    find_adapters,
    iter_merged_weights,
    make_adapted_policy,
    share_parameters,
    write_adapters,
)
from trainable.models.qwen2 import PassSettings, Qwen2
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import TokenFunction, compute_at_trained_tokens
from trainable.rollout.batch import collate
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 23, (3, 11), generator=torch.Generator().manual_seed(5))
EVERYWHERE = torch.arange(TOKENS.numel())
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KL = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__kl_loss_type": "low_var_kl"}


def lora(rank: int = 3, alpha: float = 16, targets: object = "all-linear") -> ModelConfig:
    return ModelConfig.model_validate({"lora_rank": rank, "lora_alpha": alpha, "lora_target_modules": targets})


def base(dtype: str = "float32", **sizes: object) -> Qwen2:
    model = make_random_model(make_qwen2_shape(**sizes), seed=4, std=0.2)
    model.model.pass_settings = PassSettings(DTYPES[dtype])
    return freeze(model)


def moved(model: Qwen2, seed: int = 0) -> Qwen2:
    """`model` with adapters that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in find_adapters(model):
            layer.lora_B[ADAPTER_NAME].weight.normal_(0.0, 0.1, generator=generator)
    return model


def made(settings: ModelConfig, dtype: str = "float32", **sizes: object) -> Qwen2:
    return moved(make_adapted_policy(base(dtype, **sizes), settings, np.random.default_rng(1)))


def whole(model: Qwen2) -> Qwen2:
    """A network of its own whose weights are the merged ones."""
    copy = Qwen2(model.shape)
    copy.load_state_dict(dict(iter_merged_weights(model)))
    return copy


def logits(model: Qwen2) -> Tensor:
    found: Tensor = model.lm_head(model.model.compute_hidden_states(TOKENS, EVERYWHERE)).float()
    return found


def storages(network: nn.Module) -> set[int]:
    return {weight.untyped_storage().data_ptr() for weight in network.parameters()}


def contents(network: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in network.parameters()]


def tuned(**overrides: object) -> PPOTrainer:
    """A small trainer with adapters."""
    rates = {"actor__lr": 1e-3, "critic__lr": 1e-3}
    return make_quiet_trainer(**{"model__lora_rank": 4, **rates, **KL, **overrides})


# ---------------------------------------------------------------------------- the formula


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_policy_is_the_base_to_the_last_bit(dtype: str, tied: bool) -> None:
    model = base(dtype, tie_word_embeddings=tied)
    fresh = make_adapted_policy(model, lora(), np.random.default_rng(0))
    with torch.no_grad():
        assert torch.equal(logits(fresh), logits(model))
        assert not torch.equal(logits(moved(fresh)), logits(model))


def test_an_adapter_adds_its_product_times_alpha_over_rank() -> None:
    model = made(lora(rank=3, alpha=5))
    found = dict(iter_merged_weights(model))
    for name, layer in find_adapters(model):
        a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        wanted = layer.base_layer.weight + 5 / 3 * sum(torch.outer(b[:, k], a[k]) for k in range(3))
        torch.testing.assert_close(found[f"{name}.weight"], wanted)


@settings(max_examples=20, deadline=None)
@given(
    rank=st.integers(1, 9),
    alpha=st.sampled_from([0.5, 8.0, 32.0]),
    tied=st.booleans(),
    targets=st.lists(st.sampled_from(LINEAR_LAYERS), min_size=1),
)
def test_merged_weights_compute_what_adapters_do(rank: int, alpha: float, tied: bool, targets: list[str]) -> None:
    model = made(lora(rank, alpha, targets), tie_word_embeddings=tied)
    assert dict(iter_merged_weights(model)).keys() == Qwen2(model.shape).state_dict().keys()
    assert {name.rsplit(".", 1)[-1] for name, _ in find_adapters(model)} == set(targets)
    with torch.no_grad():
        torch.testing.assert_close(logits(whole(model)), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_peft_over_transformers_reads_the_adapters_and_computes_the_same(targets: object, tmp_path: Path) -> None:
    from peft import PeftModel

    model = base()
    policy = moved(make_adapted_policy(model, lora(3, 5, targets), np.random.default_rng(1)))
    write_adapters(policy, lora(3, 5, targets), tmp_path / "adapter")
    twin = PeftModel.from_pretrained(make_hub_twin(model), str(tmp_path / "adapter"))
    with torch.no_grad():
        theirs = twin(input_ids=TOKENS).logits.flatten(0, 1)
        torch.testing.assert_close(logits(policy), theirs, rtol=1e-4, atol=1e-5)
        assert float((logits(model) - theirs).abs().max()) > 1e-2


def test_without_adapters_weights_are_given_as_they_are() -> None:
    model = make_random_model(make_qwen2_shape())
    given_, own = dict(iter_merged_weights(model)), model.state_dict()
    assert given_.keys() == own.keys()
    assert all(given_[name].data_ptr() == own[name].data_ptr() for name in own)


def test_gradients_are_the_full_gradients_by_the_chain_rule() -> None:
    """With W' = W + s B A: dL/dB = s G A^T and dL/dA = s B^T G, where G = dL/dW' is that of the merged network."""
    model, scale = made(lora(rank=3, alpha=5)), 5 / 3
    slopes = torch.randn(len(EVERYWHERE), 23, generator=torch.Generator().manual_seed(2))
    (logits(model) * slopes).sum().backward()
    full = whole(model)
    (logits(full) * slopes).sum().backward()
    of_whole = dict(full.named_parameters())
    for name, layer in find_adapters(model):
        a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        slope = of_whole[f"{name}.weight"].grad
        assert slope is not None
        with torch.no_grad():
            for found, wanted in ((b.grad, scale * slope @ a.T), (a.grad, scale * b.T @ slope)):
                assert float((found - wanted).norm()) <= 1e-4 * float(wanted.norm()), name
    assert all(weight.grad is None for name, weight in model.named_parameters() if "lora_" not in name)


def test_blocks_made_again_give_the_same_gradients() -> None:
    found = []
    for recompute in (False, True):
        model = made(lora())
        model.model.pass_settings = PassSettings(recompute=recompute)
        logits(model).square().sum().backward()
        found.append([weight.grad for weight in model.parameters() if weight.requires_grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_adapters_are_float32_beside_weights_in_the_type_of_the_passes() -> None:
    model = made(lora(), "bfloat16")
    for _, layer in find_adapters(model):
        assert layer.base_layer.weight.dtype == torch.bfloat16
        assert layer.lora_A[ADAPTER_NAME].weight.dtype == layer.lora_B[ADAPTER_NAME].weight.dtype == torch.float32
    assert model.model.compute_hidden_states(TOKENS, EVERYWHERE).dtype == torch.bfloat16


def test_adapters_are_drawn_from_the_generator_alone() -> None:
    def first(seed: int) -> Tensor:
        _, layer = find_adapters(make_adapted_policy(base(), lora(), np.random.default_rng(seed)))[0]
        weight: Tensor = layer.lora_A[ADAPTER_NAME].weight
        return weight

    torch.manual_seed(1)
    one = first(0)
    torch.manual_seed(2)
    assert torch.equal(one, first(0))
    assert not torch.equal(one, first(1))
    assert 0.8 * 16**-0.5 < float(one.detach().abs().max()) <= 16**-0.5  # in: 16


# ---------------------------------------------------------------------------- one base


@pytest.mark.parametrize("dtype", DTYPES)
def test_policy_critic_and_reference_hold_one_base(dtype: str) -> None:
    trainer = tuned(model__dtype=dtype)
    assert trainer.critic is not None
    assert trainer.reference is not None
    held = storages(trainer.reference)
    assert held < storages(trainer.model)
    assert storages(trainer.reference.model) < storages(trainer.critic)
    own = storages(trainer.model) - held, storages(trainer.critic) - held
    assert not own[0] & own[1]
    assert not any(weight.requires_grad for weight in trainer.reference.parameters())
    for network in (trainer.model, trainer.critic):
        for name, weight in network.named_parameters():
            assert weight.requires_grad == ("lora_" in name or name.startswith("score."))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_frozen_copy_before_and_after_training(dtype: str) -> None:
    trainer = tuned(model__dtype=dtype)
    passes = make_pass_settings(trainer.config.model)
    copy = make_frozen_copy(load_policy("sokoban-tiny", CPU, passes).model)
    assert trainer.reference is not None
    before = contents(trainer.reference)
    batch = collate(replay_step(trainer, 1))

    def found(model: Qwen2) -> Tensor:
        return compute_at_trained_tokens(batch, 4, TokenFunction.for_logprobs(model, 1.0))

    assert torch.equal(found(trainer.reference), found(copy))
    assert torch.equal(found(trainer.model), found(copy))  # B is 0
    assert all(is_finite(row) for row in run_steps(trainer, 2))
    assert torch.equal(found(trainer.reference), found(copy))
    assert not torch.equal(found(trainer.model), found(copy))
    assert all(torch.equal(one, other) for one, other in zip(before, contents(trainer.reference), strict=True))


def test_a_fresh_critic_has_the_values_of_one_with_weights_of_its_own() -> None:
    trainer = tuned()
    assert trainer.critic is not None
    full = make_critic(load_policy("sokoban-tiny", CPU), make_rng(0, "critic"), CPU)
    tokens = torch.from_numpy(replay_step(trainer, 1)[0].tokens)[None]
    where = torch.arange(tokens.shape[1])
    with torch.no_grad():
        assert torch.equal(trainer.critic.compute_values(tokens, where), full.compute_values(tokens, where))


def test_all_adapters_and_the_value_head_learn() -> None:
    trainer = tuned()
    before = copy_weights(trainer)
    run_steps(trainer, 2)
    after = copy_weights(trainer)
    moved_ = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved_ == set(before) == {name for name in after if not name.startswith(("actor_opt", "critic_opt"))}
    assert {name.split("/")[0] for name in before} == {"actor", "critic"}
    assert all("lora_" in name or name.startswith("critic/score.") for name in before)


def test_a_head_on_the_shared_trunk_learns_beside_the_policys_adapters() -> None:
    trainer = tuned(critic__shared_trunk=True)
    before = copy_weights(trainer)
    assert {name.split("/")[0] for name in before} == {"actor", "head"}
    assert all(is_finite(row) for row in run_steps(trainer, 2))
    assert not torch.equal(before["head/weight"], copy_weights(trainer)["head/weight"])


def test_sharing_copies_no_tensor_and_keeps_modules_apart() -> None:
    model = base()
    other = share_parameters(model)
    assert storages(other) == storages(model)
    assert not {id(part) for part in model.modules()} & {id(part) for part in other.modules()}


# ---------------------------------------------------------------------------- a run


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sampler_and_the_trainer_agree(dtype: str) -> None:
    trainer = tuned(model__dtype=dtype)
    moved(trainer.model)
    episodes = replay_step(trainer, 1)
    batch = collate(episodes)
    found = compute_at_trained_tokens(batch, 4, TokenFunction.for_logprobs(trainer.model, 1.0))
    gap = (found - batch.logprobs)[batch.mask].abs()
    assert float(gap.max() if dtype == "float32" else gap.mean()) < (1e-5 if dtype == "float32" else 0.05)


STATES = {"kl": {}, "shared trunk": {"critic__shared_trunk": True}, "full kl": {"actor__kl_loss_type": "full"}}


@pytest.mark.parametrize("name", STATES)
def test_resumed_equals_straight_through(name: str, tmp_path: Path) -> None:
    straight, resumed = tuned(**STATES[name]), tuned(**STATES[name])
    run_steps(straight, 1)
    write_checkpoint(tmp_path / "state", *straight.get_state())
    wanted = run_steps(straight, 2)
    resumed.load_state(*read_checkpoint(tmp_path / "state"))
    assert run_steps(resumed, 2) == wanted
    assert has_same_weights(resumed, straight)


def test_two_trainers_write_the_same_rows() -> None:
    one, other = (run_steps(tuned(), 2) for _ in range(2))
    assert one == other


def test_a_state_over_another_base_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(loading.find_model("sokoban-tiny"), folder)
    trainer = tuned()
    run_steps(trainer, 1)
    state = trainer.get_state()
    assert compute_fingerprint(folder) == state[1]["base"]
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = tuned(model__path=str(folder), model__prompt_style="compact")
    before = copy_weights(other)
    with pytest.raises(ValueError, match=r"adapters of the base .* type the same model"):
        other.load_state(*state)
    assert all(torch.equal(before[name], value) for name, value in copy_weights(other).items())


def test_states_with_and_without_adapters_are_not_exchanged() -> None:
    with_them, without = tuned(), make_quiet_trainer(**KL)
    for one, other, said in ((with_them, without, "no adapters"), (without, with_them, "this run has no adapters")):
        with pytest.raises(ValueError, match=said):
            one.load_state(*other.get_state())
    check_base(None, None)
    assert "base" not in without.get_state()[1]


def test_gradients_are_analysed_of_adapters_alone() -> None:
    analysis = {
        "trainer__gradient_analysis_mode": True,
        "trainer__gradient_analysis_env_groups": 6,
        "trainer__gradient_analysis_group_size": 4,
        "env__group_size": 4,
    }
    for more in ({}, {"trainer__gradient_analysis_sketch": 4096}):
        trainer = tuned(**analysis, **more)
        moved(trainer.model)
        rows: list[Row] = analyse_gradients(trainer, [])[-1]["rows"]
        everything = {row["component"]: row for row in rows if row["bucket"] == "all"}
        assert everything["task"]["mean_norm"] > 0
        assert everything["kl"]["mean_norm"] > 0
        assert is_finite(everything["total"])


def test_seeds_and_networks_have_adapters_of_their_own() -> None:
    def first(network: nn.Module) -> Tensor:
        weight: Tensor = find_adapters(network)[0][1].lora_A[ADAPTER_NAME].weight
        return weight

    one, other = (PPOTrainer(make_small_config(model__lora_rank=4, seed=seed)) for seed in (0, 1))
    assert one.critic is not None
    assert not torch.equal(first(one.model), first(other.model))
    assert not torch.equal(first(one.model), first(one.critic))
