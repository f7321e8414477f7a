"""Log-probs that a trainer recomputes for the episodes of an engine, and their mismatch."""

from typing import cast

import numpy as np
import pytest
import torch

from tests.fakes.trainers import make_quiet_trainer
from trainable.backend.meter import Meter
from trainable.config.seeds import make_rng
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import make_passes
from trainable.rollout.engine import recompute_logprobs
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import TurnPlayer


def play_episodes(trainer: PPOTrainer) -> list[Episode]:
    return trainer.roll_out(trainer.val_levels * 2, 3, "sampling")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recomputed_logprobs_are_those_of_the_shared_sampler(temperature: float) -> None:
    trainer = make_quiet_trainer(rollout__temperature=temperature)
    episodes = play_episodes(trainer)
    recomputed_episodes = recompute_logprobs(trainer.model, episodes, temperature, 2, trainer.device)
    for recomputed, episode in zip(recomputed_episodes, episodes, strict=True):
        np.testing.assert_allclose(recomputed.logprobs, episode.logprobs, atol=1e-5)
        np.testing.assert_allclose(recomputed.entropies, episode.entropies, atol=1e-5)
        assert recomputed.engine_logprobs is episode.logprobs
        assert not recomputed.logprobs[~recomputed.mask].any()
    assert recompute_logprobs(trainer.model, [], 1.0, 2, trainer.device) == []


def shift_engine_logprobs(episodes: list[Episode], shift: float) -> list[Episode]:
    """Give the episodes engine log-probs that are lower than the trainer's by `shift`."""
    return [
        episode._replace(engine_logprobs=np.where(episode.mask, episode.logprobs - shift, 0).astype(np.float32))
        for episode in episodes
    ]


@pytest.mark.parametrize(("shift", "weight"), [(0.1, np.exp(0.1)), (-0.3, np.exp(-0.3)), (1.0, 1.5)])
def test_truncated_weights_multiply_the_policys_loss(shift: float, weight: float) -> None:
    losses = []
    for cap in (None, 1.5):
        trainer = make_quiet_trainer(actor__tis_imp_ratio_cap=cap)
        episodes = shift_engine_logprobs(play_episodes(trainer), shift)
        batch, targets, _ = trainer.prepare_batch(episodes, 2, 2, make_rng(0, "duplicates", 1))
        rows, update = torch.arange(len(batch.lengths)), trainer.make_actor_update()
        passes = make_passes(batch, targets, rows, "token-mean", 2, batch.tokens.shape[1])
        with torch.no_grad():
            losses.append([float(update.compute_loss_terms(inputs, Meter())["task"]) for inputs in passes])
    assert losses[1] == pytest.approx([weight * loss for loss in losses[0]], rel=1e-4)
    assert any(abs(loss) > 1e-3 for loss in losses[0])


def get_context(**overrides: object) -> int:
    return cast(TurnPlayer, make_quiet_trainer(**overrides).player).context_length


def test_a_conversation_is_no_longer_than_the_setting_or_the_models_context() -> None:
    assert get_context(rollout__max_model_len=200) == 200
    model_context = make_quiet_trainer().model.shape.max_position_embeddings
    assert get_context(rollout__max_model_len=model_context + 1) == model_context
