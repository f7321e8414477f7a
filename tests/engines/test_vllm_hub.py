"""Tests of vLLM with models of other architectures: weights are pushed under the names of the files of the model."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines.devices import DEVICE
from tests.fakes.hub_models import ARCHITECTURES, make_model, write_model
from trainable.export.policy import write_tokenizer, write_weights
from trainable.models.load import Policy, load_policy
from trainable.models.lora import iter_hub_weights
from trainable.rollout.sampler import SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.rollout.vllm_sampler import VllmSampler

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines"),
    # Imports of vLLM raise warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

OPTIONS = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}  # heads of 32
MODELS = {
    "llama": ("llama", WIDE),
    "llama, tied head": ("llama", WIDE | {"tie_word_embeddings": True}),
    "mistral": ("mistral", WIDE),
    "qwen3": ("qwen3", WIDE | {"head_dim": 32}),
    "phi3, joined projections": ("phi3", WIDE),
    "gemma": ("gemma", WIDE | {"head_dim": 32}),
    "gpt2, tied head of another name": ("gpt2", {"n_embd": 64, "n_head": 2}),
}


@pytest.fixture(params=list(MODELS))
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    torch.set_num_threads(1)
    model_type, changes = MODELS[request.param]
    return load_policy(
        str(write_model(make_model(model_type, ARCHITECTURES[model_type] | changes, std=0.15), tmp_path)), DEVICE
    )


@pytest.fixture
def vllm(policy: Policy) -> Iterator[VllmSampler]:
    sampler = VllmSampler(policy.folder, DEVICE, **OPTIONS)
    yield sampler
    sampler.close()


@torch.no_grad()
def compute_policy_logprobs(policy: Policy, tokens: list[int]) -> Tensor:
    positions = torch.arange(len(tokens) - 1)
    logits = policy.model.lm_head(policy.model.model.compute_hidden_states(torch.tensor([tokens]), positions))
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)


def test_vllm_samples_from_the_pushed_weights(policy: Policy, vllm: VllmSampler) -> None:
    row = list(range(5, 45))
    old_logprobs = compute_policy_logprobs(policy, row)
    np.testing.assert_allclose(vllm.compute_logprobs([row])[0], old_logprobs.numpy(), atol=2e-4)
    with torch.no_grad():
        for number, weight in enumerate(policy.model.parameters()):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    new_logprobs = compute_policy_logprobs(policy, row)
    assert float((new_logprobs - old_logprobs).abs().mean()) > 0.05
    vllm.update_weights(iter_hub_weights(policy.model))
    np.testing.assert_allclose(vllm.compute_logprobs([row])[0], new_logprobs.numpy(), atol=2e-4)
    prompts, params = [row, [9, 9, 150]], SamplingParams(0.0, 12, 2)
    replies = [
        sampler.start_conversation(prompts, params, np.random.default_rng(0).spawn(2)).sample_replies([0, 1], [[], []])
        for sampler in (vllm, TorchSampler(policy.model))
    ]
    assert [reply.token_ids.tolist() for reply in replies[0]] == [reply.token_ids.tolist() for reply in replies[1]]


def test_vllm_loads_an_exported_policy(policy: Policy, tmp_path: Path) -> None:
    row = list(range(5, 45))
    old_logprobs = compute_policy_logprobs(policy, row)
    with torch.no_grad():
        for number, weight in enumerate(policy.model.parameters()):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    logprobs = compute_policy_logprobs(policy, row)
    assert float((logprobs - old_logprobs).abs().mean()) > 0.05
    folder = tmp_path / "exported"
    folder.mkdir()
    write_weights(policy, folder, "auto")
    write_tokenizer(policy, folder, "full")
    sampler = VllmSampler(folder, DEVICE, **OPTIONS)
    try:
        np.testing.assert_allclose(sampler.compute_logprobs([row])[0], logprobs.numpy(), atol=1e-5)
    finally:
        sampler.close()
