"""The tpo loss in the update: its gradient for any split into passes and any number of ranks, and short runs."""

import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.scripted import make_episode, make_hub_twin, make_qwen2_shape, make_random_model, make_small_config
from tests.fakes.trainers import copy_weights, has_changed, is_finite, make_quiet_trainer, run_steps
from tests.trainable.ppo.test_update import Recorder
from trainable.algo.target_policy import target_policy_loss
from trainable.backend.meter import Meter
from trainable.backend.torch_backend import TorchBackend
from trainable.backend.world import SINGLE_PROCESS, World
from trainable.config.run_config import ConfigError
from trainable.config.sections import ActorConfig
from trainable.models.qwen2 import Qwen2
from trainable.ppo import update
from trainable.ppo.update import ActorUpdate, Targets, TokenFunction, compute_at_trained_tokens
from trainable.rollout.episode import Batch, collate, make_update_order
from trainable.runs.records import DEFAULT_STEP_COLUMNS

TEMPERATURE, SIZE, ETA = 0.8, 4, 0.5
CUT: dict[str, Any] = {
    "policy_loss": "tpo",
    "tpo_eta": ETA,
    "ppo_mini_batch_size": 8,
    "ppo_micro_batch_size_per_gpu": 4,
    "grad_clip": 1e9,
}


MODEL = make_random_model(make_qwen2_shape(), seed=1, std=0.25).double()


def make_batch() -> Batch:
    """Three interleaved groups of episodes with two turns, whose old log-probs lie around the model's.

    All have the same number of trained tokens, but different numbers of others: with sums that are far apart, a group
    would have nothing to learn.
    """
    rng = np.random.default_rng(5)
    turns = [[(int(rng.integers(1, 6)), sampled, 0.0) for sampled in (3, 2)] for _ in range(3 * SIZE)]
    batch = collate([make_episode(turns[row], row % 3, rng) for row in range(3 * SIZE)])
    noise = 0.1 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(6))
    logprobs = compute_at_trained_tokens(batch, 3, TokenFunction.for_logprobs(MODEL, TEMPERATURE))
    return batch._replace(logprobs=(logprobs + noise) * batch.mask)


BATCH = make_batch()
SKILLS = torch.randn(3 * SIZE, generator=torch.Generator().manual_seed(7))
ORDER = make_update_order(BATCH, needs_whole_groups=True)


def make_update_targets() -> Targets:
    nothing = torch.zeros(BATCH.mask.shape)
    return Targets(SKILLS[:, None] * BATCH.mask, nothing, nothing, 0.5 * BATCH.logprobs)


def run_update(
    model: Qwen2, world: World = SINGLE_PROCESS, order: Tensor = ORDER, batch: Batch = BATCH, **settings: Any
) -> tuple[list[Tensor], Meter]:
    actor = ActorConfig(**{**CUT, **settings})
    recorder = Recorder(model.parameters())
    backend = TorchBackend("actor_optimizer", {"actor": model}, recorder, actor.grad_clip)
    backend.world = world
    meter = ActorUpdate(model, backend, actor, TEMPERATURE).run(batch, make_update_targets(), order)
    return [torch.cat([gradient.flatten() for gradient in step]) for step in recorder.steps], meter


def compute_loss_at_once(rows: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient of a whole mini-batch: a padded forward pass of transformers, and autograd through the loss."""
    twin, mini_batch = make_hub_twin(MODEL).double(), BATCH.select_rows(rows)
    all_logprobs = (twin(input_ids=mini_batch.tokens).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    logprobs = all_logprobs.gather(-1, mini_batch.tokens[:, 1:, None])[..., 0]
    logprob_sums = (logprobs.double() * mini_batch.mask[:, 1:]).sum(1)
    old_logprob_sums = (mini_batch.logprobs.double() * mini_batch.mask).sum(1)
    loss = target_policy_loss(logprob_sums, old_logprob_sums, SKILLS[rows], mini_batch.group_ids, ETA).loss
    loss.backward()
    parameters = dict(twin.named_parameters())
    return float(loss.detach()), torch.cat([parameters[name].grad.flatten() for name, _ in MODEL.named_parameters()])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Assert that gradients differ by less than 1e-6 of the expected norm, which is far from 0."""
    assert float(expected.norm()) > 0.1
    assert float((actual - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("tokens_per_pass", [1, 40])
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_any_split_into_passes_gives_the_gradient_of_the_whole_loss(
    monkeypatch: pytest.MonkeyPatch, tokens_per_pass: int, micro_batch_size: int
) -> None:
    monkeypatch.setitem(update.TOKENS_PER_PASS, "cpu", tokens_per_pass)
    actual, meter = run_update(MODEL, ppo_micro_batch_size_per_gpu=micro_batch_size)
    expected = [compute_loss_at_once(rows) for rows in ORDER.split(8)]
    assert [len(rows) for rows in ORDER.split(8)] == [8, 4]
    for gradient, (_, expected_gradient) in zip(actual, expected, strict=True):
        assert_close(gradient, expected_gradient)
    assert meter.compute_means()["pg_loss"] == pytest.approx(sum(loss for loss, _ in expected) / 2, rel=1e-6)


def test_kl_and_entropy_are_added_as_to_any_policy_loss() -> None:
    kl_settings: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "low_var_kl"}
    terms: dict[str, Any] = {**kl_settings, "entropy_coeff": 0.3}
    tpo_with_terms, meter = run_update(MODEL, **terms)
    tpo_alone, _ = run_update(MODEL)
    clip_settings: dict[str, Any] = {"policy_loss": "ppo_clip", "clip_ratio_low": 0.0, "clip_ratio_high": 0.0}
    clip_with_terms, clip_alone = run_update(MODEL, **clip_settings, **terms)[0], run_update(MODEL, **clip_settings)[0]
    for actual, tpo_gradient, clip_with_term_gradient, clip_gradient in zip(
        tpo_with_terms, tpo_alone, clip_with_terms, clip_alone, strict=True
    ):
        assert float((actual - tpo_gradient - (clip_with_term_gradient - clip_gradient)).norm() / actual.norm()) < 1e-5
    means = meter.compute_means()
    assert {"kl_loss", "entropy_loss", "ppo_kl", "tpo_target_entropy", "tpo_target_top_prob"} <= set(means)
    assert "pg_clipfrac" not in means


class Threads:
    """The collectives of one rank, where all ranks of a run are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: dict[int, Any]) -> None:
        self.rank, self.size, self.barrier, self.slots = rank, size, barrier, slots

    def all_gather_object(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.barrier.wait()
        values = [self.slots[rank] for rank in range(self.size)]
        self.barrier.wait()
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensors: Sequence[Tensor] = self.all_gather_object(tensor.clone())
        return tensor.copy_(torch.stack(list(tensors)).sum(0))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_out_a_groups_rollouts_sum_to_the_same_gradient(size: int) -> None:
    barrier, slots, results = threading.Barrier(size), {}, {}

    def run_rank(rank: int) -> None:
        world: Any = Threads(rank, size, barrier, slots)
        results[rank] = run_update(copy.deepcopy(MODEL), world)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected_gradients, meter = run_update(MODEL)
    for number, gradient in enumerate(expected_gradients):
        assert_close(torch.stack([results[rank][0][number] for rank in range(size)]).sum(0), gradient)
    for name, value in meter.compute_means().items():
        if name != "actor_grad_norm":  # the norm of one rank, which has only a part of the gradient here
            assert results[0][1].compute_means()[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


# ---------------------------------------------------------------------------- whole runs

TPO = {"actor__policy_loss": "tpo", "algorithm__adv_estimator": "group_skill"}


def test_a_run_trains_and_reports_its_targets() -> None:
    trainer = make_quiet_trainer(**TPO, actor__ppo_epochs=2)
    old_weights = copy_weights(trainer)
    rows = run_steps(trainer, 2)
    for row in rows:
        assert is_finite(row)
        assert row["optimizer_steps"] == 4
        assert set(row) <= {column.name for column in DEFAULT_STEP_COLUMNS}
        assert 0 < row["tpo_target_entropy"] < torch.log(torch.tensor(4.0))
        assert 0.25 < row["tpo_target_top_prob"] <= 1
        assert "pg_clipfrac" not in row
    assert has_changed(trainer, old_weights, "actor/")
    assert trainer.critic is None


def test_no_episode_is_copied_into_a_group() -> None:
    """Three groups in mini-batches of two groups: the last one has one group; other losses would copy episodes."""
    settings = {"env__env_groups": 3, "actor__ppo_mini_batch_size": 8}
    (row,) = run_steps(make_quiet_trainer(**TPO, **settings), 1)
    (gae_row,) = run_steps(make_quiet_trainer(**settings), 1)
    assert (row["batch_size"], row["optimizer_steps"]) == (12, 2)
    assert (gae_row["batch_size"], gae_row["optimizer_steps"]) == (24, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env__group_size": 1}, "set env.group_size=2"),
        ({"algorithm__adv_estimator": "grpo"}, "set algorithm.adv_estimator=group_skill"),
        ({"algorithm__adv_estimator": "gae"}, "set algorithm.adv_estimator=group_skill"),
        ({"env__group_size": 3}, "set actor.ppo_mini_batch_size=6, or a multiple"),
        ({"actor__filter_loss_scaling": "sqrt"}, "set actor.filter_loss_scaling=none"),
        ({"algorithm__zero_task_advantage": True}, "set algorithm.zero_task_advantage=false"),
        ({"actor__tis_imp_ratio_cap": 2.0}, "set actor.tis_imp_ratio_cap=null"),
        ({"trainer__zero_stage": 3}, "set trainer.zero_stage=2"),
        ({"trainer__gradient_analysis_mode": True}, "set trainer.gradient_analysis_mode=false"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_small_config(**{**TPO, **changes})
    suggested = {"env__group_size": 3, "actor__ppo_mini_batch_size": 6}
    assert make_small_config(**TPO, **suggested).actor.loss.needs_whole_groups
