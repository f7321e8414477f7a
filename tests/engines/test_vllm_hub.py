"""vLLM beside a model of another architecture than Qwen2's: weights pushed under the names of the model's own files."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.hub_models import ARCHITECTURES, make_model, write_model
from trainable.models.load import Policy, load_policy
from trainable.models.lora import iter_hub_weights
from trainable.rollout.sampler import SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.rollout.vllm_sampler import EngineSettings, VllmSampler

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines"),
    # vLLM's own imports warn.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

CPU = torch.device("cpu")
SETTINGS = EngineSettings(CPU, "float32", 512, kv_cache_memory_bytes=64 << 20)
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
    kind, changes = MODELS[request.param]
    return load_policy(str(write_model(make_model(kind, ARCHITECTURES[kind] | changes, std=0.15), tmp_path)), CPU)


@pytest.fixture
def vllm(policy: Policy) -> Iterator[VllmSampler]:
    sampler = VllmSampler(policy.folder, SETTINGS)
    yield sampler
    sampler.close()


@torch.no_grad()
def logprobs(policy: Policy, tokens: list[int]) -> Tensor:
    where = torch.arange(len(tokens) - 1)
    logits = policy.model.lm_head(policy.model.model.compute_hidden_states(torch.tensor([tokens]), where))
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)


def test_what_is_pushed_is_what_is_sampled_from(policy: Policy, vllm: VllmSampler) -> None:
    row = list(range(5, 45))
    before = logprobs(policy, row)
    np.testing.assert_allclose(vllm.compute_logprobs([row])[0], before.numpy(), atol=2e-4)
    with torch.no_grad():
        for number, weight in enumerate(policy.model.parameters()):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    after = logprobs(policy, row)
    assert float((after - before).abs().mean()) > 0.05
    vllm.update_weights(iter_hub_weights(policy.model))
    np.testing.assert_allclose(vllm.compute_logprobs([row])[0], after.numpy(), atol=2e-4)
    prompts, params = [row, [9, 9, 150]], SamplingParams(0.0, 12, 2)
    told = [
        sampler.start_conversation(prompts, 1, params, np.random.default_rng(0)).sample_replies([0, 1], [[], []])
        for sampler in (vllm, TorchSampler(policy.model))
    ]
    assert [reply.token_ids.tolist() for reply in told[0]] == [reply.token_ids.tolist() for reply in told[1]]
