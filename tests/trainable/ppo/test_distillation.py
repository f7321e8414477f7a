"""On-policy distillation: the KL loss with a teacher as its reference."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.fakes.scripted import make_qwen2_shape, make_random_model, make_small_config
from tests.fakes.trainers import copy_weights, has_changed, has_same_weights, make_quiet_trainer, run_steps
from tests.strategies.examples import thin_out
from trainable.backend.meter import Meter
from trainable.config.run_config import ConfigError
from trainable.config.seeds import make_rng
from trainable.models.load import load_policy
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import make_passes
from trainable.tiny.policies import FROZENLAKE_TINY, SOKOBAN_TINY
from trainable.tiny.recipe import write_model

CPU = torch.device("cpu")
EXACT = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 1.0, "actor__kl_loss_type": "full"}
DISTILLATION = {
    **EXACT,
    "algorithm__zero_task_advantage": True,
    "algorithm__adv_estimator": "grpo",
    "actor__weight_decay": 0.0,
}


def test_the_untrained_policy_as_its_own_teacher_changes_nothing() -> None:
    trainer = make_quiet_trainer(**EXACT)
    other_trainer = make_quiet_trainer(**EXACT, model__reference_path="sokoban-tiny")
    assert run_steps(trainer, 2) == run_steps(other_trainer, 2)
    assert has_same_weights(trainer, other_trainer)


def test_the_loss_is_the_kl_from_the_policy_to_the_teacher_at_the_policys_tokens(random_folder: Path) -> None:
    trainer = make_quiet_trainer(**DISTILLATION, model__reference_path=str(random_folder))
    # In the order of `step`: the episodes and the batch of the first step, before any update.
    trainer.step_index = 1
    episodes = trainer._collect_episodes()
    prepared = trainer.prepare_batch(episodes, 2, 2, make_rng(0, "duplicates", 1))
    batch = prepared.batch
    rows, count = torch.arange(len(episodes)), len(episodes)
    (inputs,) = make_passes(batch, prepared.targets, rows, "token-mean", count, batch.tokens.shape[1])
    terms = trainer.make_actor_update().compute_loss_terms(inputs, Meter())

    teacher = load_policy(str(random_folder), CPU).model
    token_kls = []
    for tokens, mask in zip(batch.tokens, batch.mask, strict=True):
        positions = torch.nonzero(mask).squeeze(1) - 1
        policy_logprobs, teacher_logprobs = (
            model.lm_head(model.model.compute_hidden_states(tokens[None], positions)).detach().double().log_softmax(-1)
            for model in (trainer.model, teacher)
        )
        token_kls.append((policy_logprobs.exp() * (policy_logprobs - teacher_logprobs)).sum(-1))
    kl = terms["kl"].item()
    assert kl == pytest.approx(float(torch.cat(token_kls).mean()), rel=1e-4)
    assert kl > 0.5
    assert terms["task"].item() == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", thin_out(["full", "mse"], 2))
def test_the_policy_moves_to_its_teacher_without_any_reward(kind: str, random_folder: Path) -> None:
    settings = {**DISTILLATION, "actor__kl_loss_type": kind, "actor__lr": 3e-3, "trainer__total_training_steps": 16}
    trainer = make_quiet_trainer(**settings, model__reference_path=str(random_folder))
    old_weights = copy_weights(trainer)
    rows = run_steps(trainer, 16)
    kls = [row["kl_to_reference"] for row in rows]
    assert sum(kls[-4:]) < 0.8 * sum(kls[:4])  # over five seeds .09 to .67: single steps of the sampled loss vary
    assert has_changed(trainer, old_weights, "actor/")
    assert all(row["pg_loss"] == 0 for row in rows)


def test_a_teacher_with_other_words_is_refused(tmp_path: Path) -> None:
    write_model(make_random_model(FROZENLAKE_TINY.make_shape()), tmp_path, FROZENLAKE_TINY.pieces)
    with pytest.raises(ValueError, match=r"has another vocabulary than model\.path=sokoban-tiny"):
        make_quiet_trainer(**EXACT, model__reference_path=str(tmp_path))


def test_a_shipped_teacher_of_another_game_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"set model\.reference_path=sokoban-tiny-teacher"):
        make_small_config(**EXACT, model__reference_path="frozenlake-tiny-teacher")
    policy = {"model__path": "mastermind-tiny", "env__name": "mastermind"}
    with pytest.raises(ConfigError, match="it has no teacher, so choose another game"):
        make_small_config(**EXACT, **policy, model__reference_path="sokoban-tiny-teacher")


@pytest.mark.parametrize(
    ("kind", "extra_tokens", "context", "problem"),
    [
        ("full", 0, 128, r"set rollout\.max_model_len=128"),
        ("full", 8, 512, r"set actor\.kl_loss_type=mse"),  # the exact KL needs heads of one size
        ("mse", 8, 512, ""),
    ],
)
def test_a_teacher_of_other_sizes_may_be_refused(
    kind: str, extra_tokens: int, context: int, problem: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": SOKOBAN_TINY.make_shape().vocab_size + extra_tokens, "max_position_embeddings": context}
    write_model(make_random_model(make_qwen2_shape(**sizes)), tmp_path, SOKOBAN_TINY.pieces)
    settings = {**EXACT, "actor__kl_loss_type": kind, "model__reference_path": str(tmp_path)}
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        run_steps(make_quiet_trainer(**settings), 1)


def test_a_run_with_adapters_has_a_teacher_beside_its_base(random_folder: Path) -> None:
    trainer: PPOTrainer = make_quiet_trainer(**EXACT, model__lora_rank=2, model__reference_path=str(random_folder))
    (row,) = run_steps(trainer, 1)
    assert row["kl_to_reference"] > 0.1


def test_the_distance_to_a_teacher_is_measured_before_training(random_folder: Path) -> None:
    settings = {"trainer__measure_val_kl": True, "trainer__val_before_train": True}
    (row,) = run_steps(make_quiet_trainer(**settings, model__reference_path=str(random_folder)), 1)
    assert row["base_val_kl_to_reference"] > 0.1
    (row,) = run_steps(make_quiet_trainer(**settings), 1)
    assert "base_val_kl_to_reference" not in row  # the policy is its own reference then
