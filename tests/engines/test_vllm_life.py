"""Tests of the lifetime of VllmSampler: one after another in a process."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.fakes.scripted import make_random_model
from trainable.rollout.vllm_sampler import LM_HEAD_NAME
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.recipe import write_model

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines"),
]

TWO_ENGINES_SCRIPT = """
import sys, torch
from pathlib import Path
from trainable.models.load import find_model, load_policy
from trainable.rollout.vllm_sampler import VllmSampler
cpu = torch.device("cpu")
options = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20}
tokens = torch.arange(5, 25)
for folder in (find_model("sokoban-tiny"), Path(sys.argv[1])):  # of two engines in a row, the second with its own head
    sampler, model = VllmSampler(folder, cpu, **options), load_policy(str(folder), cpu).model
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.9
        logits = model.lm_head(model.model.compute_hidden_states(tokens[None], torch.arange(19)))
    sampler.update_weights(model.state_dict().items())
    found = torch.from_numpy(sampler.compute_logprobs([tokens.tolist()])[0])
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0], rtol=1e-5, atol=1e-4)
    sampler.close()
    sampler.close()
    assert not torch.distributed.is_initialized()
"""


@pytest.fixture
def untied_folder(tmp_path: Path) -> Path:
    """A model on disk with an untied head, which is in a second file."""
    model = make_random_model(replace(SOKOBAN_TINY.make_shape(), tie_word_embeddings=False), seed=5, std=0.1)
    write_model(model, tmp_path, SOKOBAN_TINY.pieces)
    save_file({LM_HEAD_NAME: model.lm_head.weight.detach()}, tmp_path / "head.safetensors")
    return tmp_path


def test_an_engine_can_be_closed_and_another_opened(untied_folder: Path) -> None:
    command = [sys.executable, "-c", TWO_ENGINES_SCRIPT, str(untied_folder)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr[-3000:]
