"""Adapters over one frozen base: formula, gradients, shared memory, and the checkpoints of a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_model, make_small_config
from tests.fakes.trainers import (
    Row,
    check_resumption,
    copy_weights,
    is_finite,
    make_quiet_trainer,
    run_steps,
)
from tests.strategies.examples import draw_examples
from trainable.config.sections import ModelConfig
from trainable.config.setting_types import LINEAR_LAYERS
from trainable.diagnostics.gradient_analysis import analyze_gradients
from trainable.models import load as loading
from trainable.models.interface import PassSettings
from trainable.models.load import (
    check_fingerprint,
    compute_fingerprint,
    freeze,
)
from trainable.models.lora import (
    ADAPTER_NAME,
    find_adapters,
    iter_merged_weights,
    make_adapted_policy,
    share_parameters,
    write_adapters,
)
from trainable.models.qwen2 import Qwen2
from trainable.ppo.trainer import PPOTrainer

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 23, (3, 11), generator=torch.Generator().manual_seed(5))
ALL_POSITIONS = torch.arange(TOKENS.numel())
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KL = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__kl_loss_type": "low_var_kl"}


def make_settings(rank: int = 3, alpha: float = 16, targets: object = "all-linear") -> ModelConfig:
    return ModelConfig.model_validate({"lora_rank": rank, "lora_alpha": alpha, "lora_target_modules": targets})


def make_base_model(dtype: str = "float32", **sizes: object) -> Qwen2:
    model = make_random_model(make_qwen2_shape(**sizes), seed=4, std=0.2)
    model.model.pass_settings = PassSettings(DTYPES[dtype])
    return freeze(model)


def set_adapters(model: Qwen2, seed: int = 0) -> Qwen2:
    """Give the adapters of `model` a nonzero product."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in find_adapters(model):
            layer.lora_B[ADAPTER_NAME].weight.normal_(0.0, 0.1, generator=generator)
    return model


def make_adapted_model(settings: ModelConfig, dtype: str = "float32", **sizes: object) -> Qwen2:
    return set_adapters(make_adapted_policy(make_base_model(dtype, **sizes), settings, np.random.default_rng(1)))


def merge_into_copy(model: Qwen2) -> Qwen2:
    """Copy the model into a network without adapters that has the merged weights."""
    copy = Qwen2(model.shape)
    copy.load_state_dict(dict(iter_merged_weights(model)))
    return copy


def compute_logits(model: Qwen2) -> Tensor:
    logits: Tensor = model.lm_head(model.model.compute_hidden_states(TOKENS, ALL_POSITIONS)).float()
    return logits


def list_storages(network: nn.Module) -> set[int]:
    return {weight.untyped_storage().data_ptr() for weight in network.parameters()}


def make_tuned_trainer(**overrides: object) -> PPOTrainer:
    """Make a small trainer with adapters."""
    rates = {"actor__lr": 1e-3, "critic__lr": 1e-3}
    return make_quiet_trainer(**{"model__lora_rank": 4, **rates, **KL, **overrides})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_policy_is_the_base_to_the_last_bit(dtype: str, tied: bool) -> None:
    model = make_base_model(dtype, tie_word_embeddings=tied)
    fresh = make_adapted_policy(model, make_settings(), np.random.default_rng(0))
    with torch.no_grad():
        assert torch.equal(compute_logits(fresh), compute_logits(model))
        assert not torch.equal(compute_logits(set_adapters(fresh)), compute_logits(model))


def test_an_adapter_adds_its_product_times_alpha_over_rank() -> None:
    model = make_adapted_model(make_settings(rank=3, alpha=5))
    merged = dict(iter_merged_weights(model))
    for name, layer in find_adapters(model):
        a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        expected = layer.base_layer.weight + 5 / 3 * sum(torch.outer(b[:, k], a[k]) for k in range(3))
        torch.testing.assert_close(merged[f"{name}.weight"], expected)


@draw_examples(20)
@given(
    rank=st.integers(1, 9),
    alpha=st.sampled_from([0.5, 8.0, 32.0]),
    tied=st.booleans(),
    targets=st.lists(st.sampled_from(LINEAR_LAYERS), min_size=1),
)
def test_merged_weights_compute_what_adapters_do(rank: int, alpha: float, tied: bool, targets: list[str]) -> None:
    model = make_adapted_model(make_settings(rank, alpha, targets), tie_word_embeddings=tied)
    assert dict(iter_merged_weights(model)).keys() == Qwen2(model.shape).state_dict().keys()
    assert {name.rsplit(".", 1)[-1] for name, _ in find_adapters(model)} == set(targets)
    with torch.no_grad():
        torch.testing.assert_close(compute_logits(merge_into_copy(model)), compute_logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_peft_over_transformers_reads_the_adapters_and_computes_the_same(targets: object, tmp_path: Path) -> None:
    from peft import PeftModel

    model = make_base_model()
    policy = set_adapters(make_adapted_policy(model, make_settings(3, 5, targets), np.random.default_rng(1)))
    write_adapters(policy, make_settings(3, 5, targets), tmp_path / "adapter")
    twin = PeftModel.from_pretrained(make_hub_twin(model), str(tmp_path / "adapter"))
    with torch.no_grad():
        expected_logits = twin(input_ids=TOKENS).logits.flatten(0, 1)
        torch.testing.assert_close(compute_logits(policy), expected_logits, rtol=1e-4, atol=1e-5)
        assert float((compute_logits(model) - expected_logits).abs().max()) > 1e-2


def test_gradients_are_the_full_gradients_by_the_chain_rule() -> None:
    """With W' = W + s B A: dL/dB = s G A^T and dL/dA = s B^T G, where G = dL/dW' is that of the merged network."""
    model, scale = make_adapted_model(make_settings(rank=3, alpha=5)), 5 / 3
    output_gradients = torch.randn(len(ALL_POSITIONS), 23, generator=torch.Generator().manual_seed(2))
    (compute_logits(model) * output_gradients).sum().backward()
    merged_model = merge_into_copy(model)
    (compute_logits(merged_model) * output_gradients).sum().backward()
    merged_parameters = dict(merged_model.named_parameters())
    for name, layer in find_adapters(model):
        a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        weight_gradient = merged_parameters[f"{name}.weight"].grad
        assert weight_gradient is not None
        with torch.no_grad():
            for actual, expected in ((b.grad, scale * weight_gradient @ a.T), (a.grad, scale * b.T @ weight_gradient)):
                assert float((actual - expected).norm()) <= 1e-4 * float(expected.norm()), name
    assert all(weight.grad is None for name, weight in model.named_parameters() if "lora_" not in name)


def get_first_adapter(network: nn.Module) -> Tensor:
    weight: Tensor = find_adapters(network)[0][1].lora_A[ADAPTER_NAME].weight
    return weight


def test_adapters_are_drawn_from_the_generator_of_their_seed_and_network_alone() -> None:
    def draw_first_adapter(seed: int) -> Tensor:
        policy = make_adapted_policy(make_base_model(), make_settings(), np.random.default_rng(seed))
        return get_first_adapter(policy)

    torch.manual_seed(1)
    adapter = draw_first_adapter(0)
    torch.manual_seed(2)
    assert torch.equal(adapter, draw_first_adapter(0))
    assert not torch.equal(adapter, draw_first_adapter(1))
    assert 0.8 * 16**-0.5 < float(adapter.detach().abs().max()) <= 16**-0.5  # 16 input features
    trainer, other_trainer = (PPOTrainer(make_small_config(model__lora_rank=4, seed=seed)) for seed in (0, 1))
    assert trainer.critic is not None
    assert not torch.equal(get_first_adapter(trainer.model), get_first_adapter(other_trainer.model))
    assert not torch.equal(get_first_adapter(trainer.model), get_first_adapter(trainer.critic))


@pytest.mark.parametrize("dtype", DTYPES)
def test_policy_critic_and_reference_hold_one_base(dtype: str) -> None:
    trainer = make_tuned_trainer(model__dtype=dtype)
    assert trainer.critic is not None
    assert trainer.reference is not None
    base_storages = list_storages(trainer.reference)
    assert base_storages < list_storages(trainer.model)
    assert list_storages(trainer.reference.model) < list_storages(trainer.critic)
    adapter_storages = list_storages(trainer.model) - base_storages, list_storages(trainer.critic) - base_storages
    assert not adapter_storages[0] & adapter_storages[1]
    assert not any(weight.requires_grad for weight in trainer.reference.parameters())
    for network in (trainer.model, trainer.critic):
        for name, weight in network.named_parameters():
            assert weight.requires_grad == ("lora_" in name or name.startswith("score."))
            assert "lora_" not in name or weight.dtype == torch.float32


@pytest.mark.long
def test_all_adapters_and_the_value_head_learn() -> None:
    trainer = make_tuned_trainer()
    old_weights = copy_weights(trainer)
    run_steps(trainer, 2)
    new_weights = copy_weights(trainer)
    changed_names = {name for name in old_weights if not torch.equal(old_weights[name], new_weights[name])}
    network_names = {name for name in new_weights if not name.startswith(("actor_opt", "critic_opt"))}
    assert changed_names == set(old_weights) == network_names
    assert {name.split("/")[0] for name in old_weights} == {"actor", "critic"}
    assert all("lora_" in name or name.startswith("critic/score.") for name in old_weights)
    trainer = make_tuned_trainer(critic__shared_trunk=True)
    old_weights = copy_weights(trainer)
    assert {name.split("/")[0] for name in old_weights} == {"actor", "head"}
    assert all(is_finite(row) for row in run_steps(trainer, 2))
    assert not torch.equal(old_weights["head/weight"], copy_weights(trainer)["head/weight"])


def test_sharing_and_reading_without_adapters_copy_no_tensor() -> None:
    model = make_base_model()
    shared = share_parameters(model)
    assert list_storages(shared) == list_storages(model)
    assert not {id(module) for module in model.modules()} & {id(module) for module in shared.modules()}
    model = make_random_model(make_qwen2_shape())
    merged, state = dict(iter_merged_weights(model)), model.state_dict()
    assert merged.keys() == state.keys()
    assert all(merged[name].data_ptr() == state[name].data_ptr() for name in state)


STATES = {"kl": {}, "shared trunk": {"critic__shared_trunk": True}, "full kl": {"actor__kl_loss_type": "full"}}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "kl")) for name in STATES])
def test_resumed_equals_straight_through(name: str, tmp_path: Path) -> None:
    check_resumption(lambda: make_tuned_trainer(**STATES[name]), tmp_path)


@pytest.mark.long
def test_a_state_over_another_base_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(loading.find_model("sokoban-tiny"), folder)
    trainer = make_tuned_trainer()
    run_steps(trainer, 1)
    state = trainer.get_state()
    assert compute_fingerprint(folder) == state[1]["base"]
    (weights_file,) = folder.glob("*.safetensors")
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    other_trainer = make_tuned_trainer(model__path=str(folder), model__prompt_style="compact")
    old_weights = copy_weights(other_trainer)
    with pytest.raises(ValueError, match=r"adapters of the base .* type the same model"):
        other_trainer.load_state(*state)
    assert all(torch.equal(old_weights[name], value) for name, value in copy_weights(other_trainer).items())


def test_states_with_and_without_adapters_are_not_exchanged() -> None:
    adapted, plain = make_tuned_trainer(), make_quiet_trainer(**KL)
    with pytest.raises(ValueError, match="no adapters"):
        adapted.load_state(*plain.get_state())
    with pytest.raises(ValueError, match="this run has no adapters"):
        plain.load_state(*adapted.get_state())
    check_fingerprint("base", None, None)
    assert "base" not in plain.get_state()[1]


@pytest.mark.long
def test_gradients_are_analyzed_of_adapters_alone() -> None:
    analysis = {
        "trainer__gradient_analysis_mode": True,
        "trainer__gradient_analysis_env_groups": 2,
        "trainer__gradient_analysis_group_size": 4,
        "env__group_size": 4,
        "trainer__gradient_analysis_sketch": 4096,
    }
    trainer = make_tuned_trainer(**analysis)
    set_adapters(trainer.model)
    rows: list[Row] = analyze_gradients(trainer, [])[-1]["rows"]
    total_rows = {row["component"]: row for row in rows if row["bucket"] == "all"}
    assert total_rows["task"]["mean_norm"] > 0
    assert total_rows["kl"]["mean_norm"] > 0
    assert is_finite(total_rows["total"])
