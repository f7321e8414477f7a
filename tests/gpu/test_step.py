"""Tests of a training step on a GPU: its numbers against those of the CPU, and its memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from tests.fakes.trainers import make_quiet_trainer
from trainable.algo.vocabulary import compute_token_statistics
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.interface import PassSettings
from trainable.models.load import make_frozen_copy
from trainable.models.qwen2 import Qwen2
from trainable.ppo.phases import PhaseTimer, plan_step
from trainable.ppo.targets import filter_episodes
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import TokenFunction
from trainable.rollout.episode import Episode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")]
LOSSES = ("pg_loss", "entropy_loss", "kl_loss", "vf_loss", "actor_grad_norm", "critic_grad_norm")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"


def make_trainer(device: str, **settings: object) -> PPOTrainer:
    return make_quiet_trainer(
        trainer__device=device,
        trainer__n_gpus_per_node=int(device == "cuda"),
        env__group_size=8,
        actor__use_kl_loss=True,
        actor__kl_loss_coef=0.1,
        actor__entropy_coeff=0.01,
        **settings,
    )


def update(trainer: PPOTrainer, episodes: list[Episode]) -> tuple[dict[str, Any], Tensor]:
    """Update on `episodes`, and return the row and the change of the weights of policy and critic."""
    assert trainer.critic is not None
    weights = [*trainer.model.parameters(), *trainer.critic.parameters()]
    old_weights = torch.cat([weight.detach().flatten().cpu() for weight in weights])
    selection, phases = (
        filter_episodes(episodes, trainer.config.filter, trainer.config.env.group_size),
        PhaseTimer(trainer.device),
    )
    prepared = trainer._prepare_selected(selection, phases)
    critic, policy = trainer._update_critic(prepared, phases), trainer._update_policy(prepared, phases)
    summary = trainer._end_update(prepared, critic, policy, plan_step(trainer.step_index, trainer.config), phases)
    return summary, torch.cat([weight.detach().flatten().cpu() for weight in weights]) - old_weights


def compute_relative_error(values: Tensor, expected: Tensor) -> float:
    return float((values.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def cpu_update() -> tuple[list[Episode], dict[str, Any], Tensor]:
    trainer = make_trainer("cpu")
    trainer.step_index = 1
    episodes = trainer._collect_episodes()
    return episodes, *update(trainer, episodes)


@pytest.mark.parametrize(
    ("settings", "limit", "max_error"),
    [
        ({}, 1e-3, 0.02),
        ({"model__enable_gradient_checkpointing": True}, 1e-3, 0.02),
        ({"model__dtype": "bfloat16", "model__enable_gradient_checkpointing": True}, 0.05, 0.6),
    ],
    ids=["float32", "recomputed", "bfloat16"],
)
def test_an_update_has_the_numbers_of_the_cpu(
    settings: dict[str, object],
    limit: float,
    max_error: float,
    cpu_update: tuple[list[Episode], dict[str, Any], Tensor],
) -> None:
    """Adam's first step is the sign of a gradient, so the weights differ more than the losses."""
    episodes, expected_row, expected_changes = cpu_update
    trainer = make_trainer("cuda", **settings)
    trainer.step_index = 1
    assert next(trainer.model.parameters()).is_cuda
    row, changes = update(trainer, episodes)
    for name in LOSSES:
        assert abs(row[name] - expected_row[name]) <= limit * max(0.1, abs(expected_row[name])), name
    assert compute_relative_error(changes, expected_changes) < max_error


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_step_runs_and_the_sampler_has_the_logprobs_of_the_trainer(dtype: str, limit: float) -> None:
    trainer = make_trainer("cuda", model__dtype=dtype, model__enable_gradient_checkpointing=True)
    trainer.step_index = 1
    for episode in trainer._collect_episodes()[:8]:
        tokens, positions = torch.from_numpy(episode.tokens)[None], torch.from_numpy(episode.mask).nonzero()[:, 0]
        function = TokenFunction.for_logprobs(trainer.model, trainer.config.rollout.temperature)
        with torch.no_grad():
            logprobs = function(tokens.cuda(), (positions - 1).cuda(), tokens[0, positions].cuda())
        assert (logprobs.cpu() - torch.from_numpy(episode.logprobs)[positions]).abs().mean() < limit
    assert trainer.step().row["nonfinite_updates"] == 0


def test_cross_scores_equal_those_of_the_cpu() -> None:
    model = make_random_model(make_qwen2_shape(hidden_size=64, num_attention_heads=4, num_key_value_heads=2), std=0.2)
    prompts, thoughts = [[1, 2, 3], [4, 5], [6] * 30], [[7, 8, 9], [7, 8, 1, 2], [3]]
    expected = compute_cross_scores(model, prompts, thoughts)
    gpu_model = model.cuda()
    torch.testing.assert_close(compute_cross_scores(gpu_model, prompts, thoughts), expected, rtol=1e-4, atol=1e-4)
    gpu_model.model.pass_settings = PassSettings(torch.bfloat16)
    assert compute_relative_error(compute_cross_scores(gpu_model, prompts, thoughts), expected) < 0.05


# ---------------------------------------------------------------------------- memory


def measure_peak_memory(work: Any) -> int:
    """Measure the most bytes allocated during `work`, beyond those allocated before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - allocated_before


def make_deep_model(recompute: bool) -> Qwen2:
    sizes = make_qwen2_shape(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2
    )
    model = make_random_model(sizes, std=0.05).cuda()
    model.model.pass_settings = PassSettings(torch.bfloat16, recompute)
    return model


def test_recomputed_blocks_use_less_memory_and_have_the_same_gradients() -> None:
    tokens = torch.randint(0, 23, (8, 512), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    positions = torch.arange(8 * 512, device="cuda")
    peaks, gradients = {}, {}
    for recompute in (False, True):
        model = make_deep_model(recompute)
        peaks[recompute] = measure_peak_memory(
            lambda model=model: model.model.compute_hidden_states(tokens, positions).float().sum().backward()
        )
        gradients[recompute] = torch.cat(
            [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        )
    assert peaks[True] < peaks[False] / 3
    assert compute_relative_error(gradients[True], gradients[False]) < 0.01


def test_chunks_bound_the_memory_of_a_large_vocabulary() -> None:
    """4,096 rows of 151,936 entries are 622 million logits, 2.5 GB in float32 alone; a chunk is 2**24, 67 MB."""
    generator, elements = torch.Generator("cuda").manual_seed(0), 2**24
    hidden = torch.randn(4096, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(151_936, 64, device="cuda", generator=generator).requires_grad_()
    tokens = torch.randint(0, 151_936, (4096,), device="cuda", generator=generator)

    def compute_gradient(limit: int | None) -> Tensor:
        statistics = compute_token_statistics(
            hidden, weight, tokens, 1.0, True, (hidden.detach(), weight.detach()), limit
        )
        total = statistics.logprobs.mean() + statistics.entropies.mean()
        return torch.autograd.grad(total, [hidden, weight])[1]

    head_bytes = 4 * weight.numel() * 4  # the head in bfloat16, its gradient, and the addition of a chunk to it
    assert measure_peak_memory(lambda: compute_gradient(elements)) < 16 * elements * 4 + head_bytes
    assert measure_peak_memory(lambda: compute_gradient(None)) > 3 * 622_000_000 * 4
    assert compute_relative_error(compute_gradient(elements), compute_gradient(None)) < 0.01


def test_the_reference_uses_half_the_memory_of_the_policy() -> None:
    model = make_deep_model(False)
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    allocated_before = torch.cuda.memory_allocated()
    reference = make_frozen_copy(model)
    assert torch.cuda.memory_allocated() - allocated_before < 0.55 * size
    assert next(reference.parameters()).is_cuda


def test_a_step_of_half_a_billion_parameters_runs() -> None:
    options = ["--shape", "0.5b", "--device", "cuda", "--episodes", "32", "--tokens", "64"]
    process = subprocess.run([sys.executable, str(BENCHMARK), *options], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    report = json.loads(process.stdout)
    assert report["parameters"] == 494_032_768
    assert all(0 < row["mfu"] < 1 for row in report["phases"].values())
