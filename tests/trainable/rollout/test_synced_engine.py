"""An engine with its own copy of the weights: what is synced, what noise does, and that a run can be continued."""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.scripted import clone_tensors, make_small_config
from tests.fakes.trainers import check_resumption, make_quiet_trainer, run_steps
from tests.strategies.examples import thin_out
from trainable.config.run_config import ConfigError
from trainable.config.seeds import make_rng
from trainable.models.load import Policy
from trainable.models.lora import iter_hub_weights
from trainable.ppo.evaluation import summarize_batch
from trainable.ppo.phases import PhaseTimer
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.engine import CopySampler, EngineMismatchError, SyncedEngine, iter_noisy_weights

KL = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1}
IN_TORCH = {"rollout__name": "torch", "model__compiled_passes": False}
MEASURES = ("mismatch_mean", "mismatch_max", "kl", "ess_fraction", "prompt_mismatch")
ENGINE_COLUMNS = tuple(f"engine_{measure}" for measure in MEASURES)


def make_noisy_trainer(noise: float, **overrides: object) -> PPOTrainer:
    return make_quiet_trainer(rollout__weight_noise=noise, rollout__logprob_tolerance=100.0, **KL, **overrides)


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides", thin_out([{}, IN_TORCH, {**IN_TORCH, "model__lora_rank": 4}]), ids=["compiled", "torch", "lora"]
)
def test_a_copy_without_noise_samples_as_the_policy(overrides: dict[str, object]) -> None:
    # So little noise that float32 rounds it away.
    copy, shared = make_noisy_trainer(1e-30, **overrides), make_quiet_trainer(**KL, **overrides)
    for step in range(3):
        # From equal weights in each step: log-probs that the trainer recomputes are rounded otherwise than those of the
        # sampler, so updates differ in the last digits, which may turn a later draw of a token.
        if step:
            shared.load_state(*copy.get_state())
        (row,), (shared_row,) = run_steps(copy, 1), run_steps(shared, 1)
        assert row["engine_mismatch_mean"] < 1e-5
        assert row["engine_prompt_mismatch"] < 1e-5
        for name in ("train_success", "sampled_tokens", "reward_std"):
            assert row[name] == shared_row[name], name
        for name, value in shared_row.items():
            if isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        assert all(name not in shared_row for name in ENGINE_COLUMNS)


@pytest.mark.long
def test_a_run_with_noise_continues_to_the_same_rows(tmp_path: Path) -> None:
    check_resumption(lambda: make_noisy_trainer(0.02), tmp_path)


def test_the_check_of_the_fixed_prompt_ends_a_run_with_much_noise() -> None:
    with pytest.raises(EngineMismatchError, match="After the sync of step 0"):
        make_quiet_trainer(rollout__weight_noise=0.2)
    assert make_quiet_trainer(rollout__weight_noise=0.001).step().row["engine_prompt_mismatch"] < 0.05


def test_noise_is_relative_new_in_each_step_and_the_same_for_a_tied_head() -> None:
    trainer = make_quiet_trainer(**IN_TORCH)
    weights = dict(iter_hub_weights(trainer.model))

    def draw(step: int) -> dict[str, torch.Tensor]:
        return dict(iter_noisy_weights(trainer.model, 0.1, make_rng(0, "engine_noise", step)))

    noisy_weights, same_weights, other_weights = draw(1), draw(1), draw(2)
    changes = torch.cat([(noisy_weights[name] / weight - 1).flatten() for name, weight in weights.items()])
    changes = changes[torch.isfinite(changes)]  # entries of 0 stay 0
    assert 0.098 < float(changes.std()) < 0.102
    assert abs(float(changes.mean())) < 0.001
    for name in weights:
        assert torch.equal(noisy_weights[name], same_weights[name])
        assert weights[name].count_nonzero() == 0 or not torch.equal(noisy_weights[name], other_weights[name])
    assert torch.equal(noisy_weights["lm_head.weight"], noisy_weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("rank", [0, 4])
def test_every_weight_has_noise_of_its_own(rank: int) -> None:
    model = make_quiet_trainer(model__lora_rank=rank, **IN_TORCH).model
    weights = dict(iter_hub_weights(model))
    noises = {
        name: (weight / weights[name] - 1).flatten()
        for name, weight in iter_noisy_weights(model, 0.1, make_rng(0, "engine_noise", 1))
        if name.endswith("proj.weight")
    }
    # The pairs are of layers of the same shape, whose draws would be equal if they had the same seed.
    pairs = [(a, b) for a, b in itertools.combinations(noises, 2) if weights[a].shape == weights[b].shape]
    assert len(pairs) > 10
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([noises[a], noises[b]]))[0, 1])) < 0.1, (a, b)


CORRECTIONS = {
    "tokens": {},
    "masked tokens": {"actor__tis_mode": "token_mask", "actor__tis_imp_ratio_floor": 0.9},
    "sequences": {"actor__tis_mode": "sequence_truncate"},
    "masked sequences": {"actor__tis_mode": "sequence_mask"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_change_the_update_and_count_what_they_clip(name: str) -> None:
    # With so little noise, the ratios of some episodes are above 1: on average their logarithm is minus a KL.
    plain_row = run_steps(make_noisy_trainer(0.01), 1)[0]
    row = run_steps(make_noisy_trainer(0.01, actor__tis_imp_ratio_cap=1.05, **CORRECTIONS[name]), 1)[0]
    assert "tis_clipfrac" not in plain_row
    assert 0 < row["tis_clipfrac"] < 1
    assert row["pg_loss"] != plain_row["pg_loss"]
    assert row["engine_mismatch_mean"] == plain_row["engine_mismatch_mean"]


@pytest.mark.parametrize("overrides", [{}, {"rollout__recompute_logprobs": False}], ids=["trainer's", "engine's"])
def test_old_log_probs_are_the_engines_if_they_are_not_recomputed(overrides: dict[str, object]) -> None:
    reference_episodes = make_noisy_trainer(0.05)._collect_episodes()
    episodes = make_noisy_trainer(0.05, **overrides)._collect_episodes()
    for episode, expected in zip(episodes, reference_episodes, strict=True):
        assert expected.engine_logprobs is not None
        assert not np.array_equal(expected.logprobs, expected.engine_logprobs)
        assert np.array_equal(episode.logprobs, expected.engine_logprobs if overrides else expected.logprobs)
        assert (episode.engine_logprobs is None) == bool(overrides)


def test_a_mismatch_is_in_the_ratios_of_engine_log_probs() -> None:
    # Of one optimizer step per batch, whose ratios are 1 where the trainer's own log-probs are the old ones.
    config = make_noisy_trainer(0.05).config
    one_step = {"actor__ppo_mini_batch_size": config.max_batch_size}
    plain_row = run_steps(make_noisy_trainer(0.05, **one_step), 1)[0]
    row = run_steps(make_noisy_trainer(0.05, rollout__recompute_logprobs=False, **one_step), 1)[0]
    assert row["optimizer_steps"] == plain_row["optimizer_steps"] == 1
    assert abs(plain_row["ppo_kl"]) < 1e-6
    assert 1e-4 < abs(row["ppo_kl"]) <= plain_row["engine_mismatch_max"]
    assert row["pg_loss"] != plain_row["pg_loss"]


def test_a_validation_with_its_kl_recomputes_log_probs_always() -> None:
    trainer = make_noisy_trainer(0.05, rollout__recompute_logprobs=False, trainer__measure_val_kl=True)
    trainer.evaluation_engine = trainer.engine  # as with vLLM, which has no room for a second engine
    trainer.step_index = 1
    # The untrained policy is the reference: from the log-probs of the engine, this would be their KL.
    assert trainer.evaluate("val", "sampled").kl_to_reference == pytest.approx(0, abs=1e-9)


TPO = {
    "actor__policy_loss": "tpo",
    "algorithm__adv_estimator": "group_skill",
    "env__group_size": 4,
    "actor__ppo_mini_batch_size": 8,
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"actor__tis_imp_ratio_cap": 2.0}, "have nothing to correct: set actor.tis_imp_ratio_cap=null"),
        (TPO, "with them the mismatch of the engine: set rollout.recompute_logprobs=true"),
        ({"filter__rollout_filter_metric": "entropy"}, "rollout_filter_metric=entropy is made of them"),
        ({"early_stop__alarm": "entropy > 2"}, "early_stop.alarm watches entropy, and the run has none"),
    ],
)
def test_what_needs_the_trainers_log_probs_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_small_config(rollout__name="vllm", rollout__recompute_logprobs=False, **overrides)
    make_small_config(rollout__name="vllm", **overrides)
    # Where the engine samples from the trainer's weights, its log-probs are the trainer's.
    make_small_config(rollout__name="torch", rollout__recompute_logprobs=False, **overrides)


def test_a_run_without_entropies_has_no_column_of_them() -> None:
    trainer = make_quiet_trainer()
    episodes = [
        episode._replace(entropies=np.where(episode.mask, np.nan, 0).astype(np.float32))
        for episode in trainer._collect_episodes()
    ]
    groups, timer = trainer.config.env.env_groups, PhaseTimer(trainer.device)
    batch, targets, _ = trainer.prepare_batch(episodes, groups, groups, np.random.default_rng(0), timer)
    assert summarize_batch(batch, targets, episodes, has_values=True, has_entropies=False)["entropy"] is None
    # A NaN of another cause is not hidden.
    assert math.isnan(summarize_batch(batch, targets, episodes, has_values=True)["entropy"] or 0.0)


class SleepingSampler(CopySampler):
    """A copy that loses its weights when it sleeps, as vLLM does on a GPU."""

    def __init__(self, sampler: CopySampler) -> None:
        super().__init__(Policy(sampler.model, None, Path()), sampler.sampler)  # type: ignore[arg-type]
        self.sleeps, self.wakes = 0, 0

    @torch.no_grad()
    def sleep(self) -> None:
        self.is_sleeping = True
        self.sleeps += 1
        for weight in self.model.parameters():
            weight.fill_(torch.nan)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().update_weights(weights)
        self.wakes += self.is_sleeping
        self.is_sleeping = False


def make_sleeping_trainer(noise: float, **overrides: object) -> tuple[PPOTrainer, SleepingSampler]:
    trainer = make_noisy_trainer(noise, **overrides)
    assert isinstance(trainer.engine, SyncedEngine)
    assert isinstance(trainer.engine.sampler, CopySampler)
    sampler = SleepingSampler(trainer.engine.sampler)
    trainer.engine.sampler = sampler
    return trainer, sampler


@pytest.mark.long
@pytest.mark.parametrize("noise", thin_out([0.02, 1e-30], 2))
@pytest.mark.parametrize("recomputes", thin_out([True, False], 2))
@pytest.mark.parametrize(("is_empty", "wakes"), [(True, 2), (False, 3)])
def test_a_sleeping_engine_wakes_once_per_rollout_or_sync_with_the_weights_of_the_last_sync(
    noise: float, recomputes: bool, is_empty: bool, wakes: int, random_folder: Path
) -> None:
    """A step that trains nothing is not followed by a sync, so the next rollout needs the old weights."""
    settings = {**IN_TORCH, "rollout__recompute_logprobs": recomputes, "env__env_groups": 1}
    settings["filter__rollout_filter_include_zero"] = not is_empty
    if is_empty:  # the model in the folder never writes a valid answer
        settings["model__path"] = str(random_folder)
    expected = run_steps(make_noisy_trainer(noise, **settings), 3)
    trainer, sampler = make_sleeping_trainer(noise, **settings)
    assert run_steps(trainer, 3) == expected
    assert (sampler.sleeps, sampler.wakes, sampler.is_sleeping) == (3, wakes, is_empty)
    # The noise of the last sync, also if a step that trains nothing has followed it.
    trainer.engine.sync_weights(2)
    expected_weights = clone_tensors(dict(sampler.model.named_parameters()))
    trainer.engine.sleep()
    trainer.engine.wake_up()
    assert all(torch.equal(weight, expected_weights[name]) for name, weight in sampler.model.named_parameters())
    assert trainer.get_state()[1]["synced_step"] == 2
    trainer.engine.sleep()
    trainer.load_state(*trainer.get_state())
    assert all(torch.equal(weight, expected_weights[name]) for name, weight in sampler.model.named_parameters())
