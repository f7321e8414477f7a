"""Log-probs that a trainer recomputes for the episodes of an engine, and their mismatch."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import cast

import numpy as np
import pytest
import torch

from tests.fakes.trainers import make_quiet_trainer
from trainable.backend.meter import Meter
from trainable.config.seeds import make_rng
from trainable.models.interface import LanguageModel
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import make_passes
from trainable.rollout.engine import Engine, EngineMismatchError, SyncedEngine, recompute_logprobs
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import TurnPlayer
from trainable.runs.failures import NonFiniteError


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


def test_the_difference_over_sampled_tokens_is_measured_and_ends_no_run() -> None:
    trainer = make_quiet_trainer()
    episodes = play_episodes(trainer)
    assert type(trainer.engine) is Engine
    assert trainer.engine.measure_mismatch(episodes, 1) is None
    engine = SyncedEngine.__new__(SyncedEngine)
    engine.config = trainer.config
    mismatch = engine.measure_mismatch(shift_engine_logprobs(episodes, 0.01), 1)
    assert mismatch.mean_abs == pytest.approx(0.01, rel=1e-3)
    assert mismatch.max_abs == pytest.approx(0.01, rel=1e-3)
    assert mismatch.ess_fraction == pytest.approx(1)
    # Far above the tolerance: a policy that loses its way has such differences by rounding alone.
    assert engine.measure_mismatch(shift_engine_logprobs(episodes, 0.2), 4).mean_abs == pytest.approx(0.2, rel=1e-3)
    with pytest.raises(NonFiniteError, match="engine were not finite at step 5"):
        engine.measure_mismatch(shift_engine_logprobs(episodes, float("nan")), 5)


class FixedEngine:
    """Takes the place of vLLM: its log-probs of the fixed prompt are those of the trainer plus `shift`."""

    def __init__(self, shift: float) -> None:
        self.shift = shift
        self.expected = np.zeros(0, dtype=np.float32)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert list(weights)

    def compute_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [self.expected + self.shift]


@pytest.mark.parametrize(("shift", "is_allowed"), [(0.04, True), (-0.04, True), (0.06, False), (-0.06, False)])
def test_a_difference_on_the_fixed_prompt_after_a_sync_ends_the_run(shift: float, is_allowed: bool) -> None:
    trainer = make_quiet_trainer()
    engine = SyncedEngine.__new__(SyncedEngine)
    engine.config, engine.model, engine.device = trainer.config, trainer.model, trainer.device
    engine.gather_weights, engine.prompt = nullcontext, list(range(5, 25))
    sampler = FixedEngine(shift)
    logits = torch.log_softmax(compute_logits(trainer.model, engine.prompt), -1)
    sampler.expected = logits[torch.arange(19), torch.tensor(engine.prompt[1:])].numpy()
    engine.sampler = sampler  # type: ignore[assignment]
    message = "After the sync of step 4 the engine's log-probs of a fixed prompt"
    with nullcontext() if is_allowed else pytest.raises(EngineMismatchError, match=message):
        engine.sync_weights(4)


@torch.no_grad()
def compute_logits(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """Compute the logits (T - 1, V) that predict the tokens after the first."""
    positions = torch.arange(len(tokens) - 1)
    logits: torch.Tensor = model.lm_head(model.model.compute_hidden_states(torch.tensor([tokens]), positions))
    return logits


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
