"""A training step on a GPU: its numbers beside the processor's, and what it holds in memory."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from tests.fakes.trainers import make_quiet_trainer
from trainable.algo.vocabulary import compute_token_statistics
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.load import make_frozen_copy
from trainable.models.qwen2 import PassSettings, Qwen2
from trainable.ppo.filtering import filter_episodes
from trainable.ppo.phases import PhaseTimer
from trainable.ppo.schedule import plan_step
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import TokenFunction
from trainable.rollout.episode import Episode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]
LOSSES = ("pg_loss", "entropy_loss", "kl_loss", "vf_loss", "actor_grad_norm", "critic_grad_norm")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"


def trainer_on(device: str, **settings: object) -> PPOTrainer:
    return make_quiet_trainer(
        trainer__device=device,
        trainer__n_gpus_per_node=int(device == "cuda"),
        env__group_size=8,
        actor__use_kl_loss=True,
        actor__kl_loss_coef=0.1,
        actor__entropy_coeff=0.01,
        **settings,
    )


def moved(trainer: PPOTrainer, episodes: list[Episode]) -> tuple[dict[str, Any], Tensor]:
    """The row of an update on `episodes`, and how far it moved policy and critic."""
    assert trainer.critic is not None
    weights = [*trainer.model.parameters(), *trainer.critic.parameters()]
    before = torch.cat([weight.detach().flatten().cpu() for weight in weights])
    selection, phases = (
        filter_episodes(episodes, trainer.config.filter, trainer.config.env.group_size),
        PhaseTimer(trainer.device),
    )
    ready = trainer._prepare_selected(selection, phases)
    critic, policy = trainer._update_critic(ready, phases), trainer._update_policy(ready, phases)
    update = trainer._end_update(ready, critic, policy, plan_step(trainer.step_index, trainer.config), phases)
    return asdict(update), torch.cat([weight.detach().flatten().cpu() for weight in weights]) - before


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(scope="module")
def on_cpu() -> tuple[list[Episode], dict[str, Any], Tensor]:
    trainer = trainer_on("cpu")
    trainer.step_index = 1
    episodes = trainer._collect_episodes()
    return episodes, *moved(trainer, episodes)


@pytest.mark.parametrize(
    ("settings", "limit", "far"),
    [
        ({}, 1e-3, 0.02),
        ({"model__enable_gradient_checkpointing": True}, 1e-3, 0.02),
        ({"model__dtype": "bfloat16", "model__enable_gradient_checkpointing": True}, 0.05, 0.6),
    ],
    ids=["float32", "recomputed", "bfloat16"],
)
def test_an_update_has_the_processors_numbers(
    settings: dict[str, object], limit: float, far: float, on_cpu: tuple[list[Episode], dict[str, Any], Tensor]
) -> None:
    """Adam's first step is the sign of a gradient, so that small ones make weights differ more than losses."""
    episodes, wanted, wanted_moves = on_cpu
    trainer = trainer_on("cuda", **settings)
    trainer.step_index = 1
    assert next(trainer.model.parameters()).is_cuda
    row, moves = moved(trainer, episodes)
    for name in LOSSES:
        assert abs(row[name] - wanted[name]) <= limit * max(0.1, abs(wanted[name])), name
    assert error(moves, wanted_moves) < far


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_whole_step_runs_and_the_sampler_agrees_with_the_trainer(dtype: str, limit: float) -> None:
    trainer = trainer_on("cuda", model__dtype=dtype, model__enable_gradient_checkpointing=True)
    trainer.step_index = 1
    for episode in trainer._collect_episodes()[:8]:
        tokens, places = torch.from_numpy(episode.tokens)[None], torch.from_numpy(episode.mask).nonzero()[:, 0]
        function = TokenFunction.for_logprobs(trainer.model, trainer.config.rollout.temperature)
        with torch.no_grad():
            again = function(tokens.cuda(), (places - 1).cuda(), tokens[0, places].cuda())
        assert (again.cpu() - torch.from_numpy(episode.logprobs)[places]).abs().mean() < limit
    assert trainer.step().row["nonfinite_updates"] == 0


def test_cross_scores_are_the_processors() -> None:
    model = make_random_model(make_qwen2_shape(hidden_size=64, num_attention_heads=4, num_key_value_heads=2), std=0.2)
    prompts, thoughts = [[1, 2, 3], [4, 5], [6] * 30], [[7, 8, 9], [7, 8, 1, 2], [3]]
    wanted = compute_cross_scores(model, prompts, thoughts).logprob_sums
    on_gpu = model.cuda()
    torch.testing.assert_close(
        compute_cross_scores(on_gpu, prompts, thoughts).logprob_sums, wanted, rtol=1e-4, atol=1e-4
    )
    on_gpu.model.pass_settings = PassSettings(torch.bfloat16)
    assert error(compute_cross_scores(on_gpu, prompts, thoughts).logprob_sums, wanted) < 0.05


# ---------------------------------------------------------------------------- memory


def peak(work: Any) -> int:
    """Bytes held at most during `work`, beyond those held before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def deep(recompute: bool) -> Qwen2:
    sizes = make_qwen2_shape(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2
    )
    model = make_random_model(sizes, std=0.05).cuda()
    model.model.pass_settings = PassSettings(torch.bfloat16, recompute)
    return model


def test_recomputed_blocks_hold_less_memory_and_give_the_same_gradients() -> None:
    tokens = torch.randint(0, 23, (8, 512), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    where = torch.arange(8 * 512, device="cuda")
    peaks, gradients = {}, {}
    for recompute in (False, True):
        model = deep(recompute)
        peaks[recompute] = peak(
            lambda model=model: model.model.compute_hidden_states(tokens, where).float().sum().backward()
        )
        gradients[recompute] = torch.cat(
            [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        )
    assert peaks[True] < peaks[False] / 3
    assert error(gradients[True], gradients[False]) < 0.01


def test_chunks_bound_what_a_large_vocabulary_holds() -> None:
    """4,096 rows of 151,936 entries are 622 million logits, 2.5 GB in float32 alone; a chunk is 2**24, 67 MB."""
    generator, elements = torch.Generator("cuda").manual_seed(0), 2**24
    hidden = torch.randn(4096, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(151_936, 64, device="cuda", generator=generator).requires_grad_()
    tokens = torch.randint(0, 151_936, (4096,), device="cuda", generator=generator)

    def work(limit: int | None) -> Tensor:
        numbers = compute_token_statistics(hidden, weight, tokens, 1.0, True, (hidden.detach(), weight.detach()), limit)
        total = numbers.logprobs.mean() + numbers.entropies.mean()
        return torch.autograd.grad(total, [hidden, weight])[1]

    weights = 4 * weight.numel() * 4  # the head in bfloat16, its gradient, and what a chunk adds to it
    assert peak(lambda: work(elements)) < 16 * elements * 4 + weights
    assert peak(lambda: work(None)) > 3 * 622_000_000 * 4
    assert error(work(elements), work(None)) < 0.01


def test_the_reference_holds_half_of_what_the_policy_does() -> None:
    model = deep(False)
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    held = torch.cuda.memory_allocated()
    reference = make_frozen_copy(model)
    assert torch.cuda.memory_allocated() - held < 0.55 * size
    assert next(reference.parameters()).is_cuda


def test_a_whole_step_of_half_a_billion_parameters_runs() -> None:
    options = ["--shape", "0.5b", "--device", "cuda", "--episodes", "32", "--tokens", "64"]
    done = subprocess.run([sys.executable, str(BENCHMARK), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["parameters"] == 494_032_768
    assert all(0 < row["mfu"] < 1 for row in found["phases"].values())
