"""Adapters over models of other architectures: they learn, peft reads them, and their passes stay within the budget."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.fakes.hub_models import NO_SYSTEM_TEMPLATE, make_tokens, make_wrapped_model, write_small_model
from tests.fakes.trainers import make_quiet_trainer, run_steps
from trainable.algo.batching import split_by_tokens
from trainable.config.sections import ModelConfig
from trainable.models.lora import get_base_weights, iter_hub_weights, make_adapted_policy, write_adapters
from trainable.models.qwen2_shape import is_plain_qwen2
from trainable.ppo import update
from trainable.runs.flat_state import flatten_state, load_flat_state

SMALL = {
    "rollout__response_length": 8,
    "env__max_turn": 2,
    "actor__use_kl_loss": True,
    "actor__kl_loss_coef": 0.01,
    "model__lora_rank": 2,
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "gemma"])
def test_peft_reads_the_adapters_of_another_architecture(model_type: str, tmp_path: Path) -> None:
    from peft import PeftModel

    causal, model = make_wrapped_model(model_type)
    settings = ModelConfig(lora_rank=2)
    policy = make_adapted_policy(model, settings, np.random.default_rng(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
        tokens = make_tokens(2, 7)
        logits = policy.lm_head(policy.model.compute_hidden_states(tokens, torch.arange(14)))
        # These are computed before peft inserts its adapters into the model.
        base_logits = model.lm_head(model.model.compute_hidden_states(tokens, torch.arange(14)))
        write_adapters(policy, settings, tmp_path)
        twin = PeftModel.from_pretrained(causal, str(tmp_path))
        expected_logits = twin(input_ids=tokens).logits.flatten(0, 1)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert float((logits - base_logits).abs().max()) > 1e-2
    assert get_base_weights(policy).keys() == dict(iter_hub_weights(policy)).keys()


@pytest.mark.parametrize("is_hub", [True, False])
def test_passes_are_split_as_the_model_reads_them(
    is_hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of a model that pads are bounded by the size of their rectangle, and all others by their tokens."""
    padding_flags: list[bool] = []

    def record_call(lengths: torch.Tensor, max_tokens: int, needs_padding: bool = False) -> list[torch.Tensor]:
        padding_flags.append(needs_padding)
        return split_by_tokens(lengths, max_tokens, needs_padding)

    monkeypatch.setattr(update, "split_by_tokens", record_call)
    model = {"model__path": str(write_small_model(tmp_path / "llama", template=NO_SYSTEM_TEMPLATE))} if is_hub else {}
    run_steps(make_quiet_trainer(**SMALL, **model), 1)
    assert len(padding_flags) >= 4  # values, reference, and the updates of critic and policy
    assert set(padding_flags) == {is_hub}


def test_a_flat_state_contains_no_buffers() -> None:
    module, other_module = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    state = {name: value.clone() for name, value in flatten_state(module).items()}
    assert state.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    load_flat_state(other_module, state)
    assert all(torch.equal(value, state[name]) for name, value in flatten_state(other_module).items())


@pytest.mark.parametrize("change", [{"use_sliding_window": True, "sliding_window": 4}, {"hidden_act": "gelu"}])
def test_a_qwen2_of_another_kind_is_not_run_by_our_own_code(change: dict[str, object]) -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
    assert is_plain_qwen2(config)
    assert not is_plain_qwen2(config | change)
