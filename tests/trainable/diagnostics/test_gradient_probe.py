"""Tests of the gradients of an analysis: they equal plain backward passes, and identities hold."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.trainers import make_quiet_trainer
from tests.strategies.examples import thin_out
from trainable.algo.batching import order_length_stratified
from trainable.algo.filters import compute_group_scores
from trainable.algo.names import LOSS_AGG_MODES
from trainable.algo.reductions import compute_loss_weights
from trainable.backend.meter import Meter
from trainable.config.seeds import make_rng
from trainable.diagnostics.gradient_probe import FOLDS, ProbeResult, probe_gradients
from trainable.ppo.targets import PreparedBatch
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import make_passes
from trainable.rollout.episode import reshape_by_group

GROUPS, SIZE = 7, 4
ANALYSIS: dict[str, object] = {
    "trainer__gradient_analysis_mode": True,
    "trainer__gradient_analysis_every": 2,
    "trainer__gradient_analysis_env_groups": GROUPS,
    "trainer__gradient_analysis_group_size": SIZE,
    "trainer__gradient_analysis_log_prefilter": True,
    "actor__use_kl_loss": True,
    "actor__kl_loss_coef": 0.5,
    "actor__entropy_coeff": 0.1,
    "env__group_size": SIZE,
}


def make_trained_trainer(**overrides: object) -> PPOTrainer:
    """Make a small trainer and train one step, so that policy and reference differ."""
    trainer = make_untrained_trainer(**overrides)
    trainer.step()
    return trainer


@pytest.fixture(scope="module")
def trainer() -> PPOTrainer:
    """A trained trainer, which no test changes."""
    return make_trained_trainer()


@pytest.fixture(scope="module")
def probed(trainer: PPOTrainer) -> tuple[PreparedBatch, ProbeResult]:
    """A batch of the trainer and the gradients of its three buckets."""
    return probe(trainer)


def prepare_batch(trainer: PPOTrainer) -> tuple[PreparedBatch, dict[int, float]]:
    levels = trainer.val_levels * GROUPS
    episodes = trainer.roll_out(levels[:GROUPS], SIZE, "gradient_sampling")
    stds = compute_group_scores("reward_std", reshape_by_group([episode.score for episode in episodes], SIZE))
    prepared = trainer.prepare_batch(episodes, GROUPS, GROUPS, make_rng(3, "gradient_duplicates", 0))
    distinct_stds = {group: float(std) + 0.1 * group for group, std in enumerate(stds)}  # no two are equal
    return prepared, distinct_stds


def measure(
    trainer: PPOTrainer,
    prepared: PreparedBatch,
    stds: dict[int, float],
    buckets: int = 2,
    mode: str = "quantile",
    sketch: int | None = None,
) -> ProbeResult:
    generator = torch.Generator().manual_seed(1)
    batch, targets, _ = prepared
    return probe_gradients(trainer.make_actor_update(), batch, targets, stds, buckets, mode, generator, sketch)


def probe(trainer: PPOTrainer, buckets: int = 3, sketch: int | None = None) -> tuple[PreparedBatch, ProbeResult]:
    prepared, stds = prepare_batch(trainer)
    return prepared, measure(trainer, prepared, stds, buckets, sketch=sketch)


def index_rows(findings: ProbeResult) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["bucket"], row["component"]): row for row in findings.rows}


def make_untrained_trainer(**overrides: object) -> PPOTrainer:
    return make_quiet_trainer(**{**ANALYSIS, "trainer__gradient_analysis_mode": False, **overrides})


def compute_plain_gradient(trainer: PPOTrainer, passes: Iterator[Any], component: str) -> torch.Tensor:
    """Compute the gradient of one term with plain backward passes, and read it from `.grad`."""
    trainer.model.zero_grad(set_to_none=True)
    for single_pass in passes:
        terms = trainer.make_actor_update().compute_loss_terms(single_pass, Meter())
        (sum(terms.values()) if component == "total" else terms[component]).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
    trainer.model.zero_grad(set_to_none=True)
    return gradient


@pytest.mark.long
@pytest.mark.parametrize("mode", thin_out(LOSS_AGG_MODES, 4))
def test_the_whole_batch_is_its_plain_gradient_and_the_sum_of_its_buckets(mode: str) -> None:
    trainer = make_trained_trainer(actor__loss_agg_mode=mode)
    prepared, findings = probe(trainer)
    rows, batch = index_rows(findings), prepared.batch
    all_rows = torch.arange(len(batch.lengths))
    whole_weights = compute_loss_weights(batch.mask, mode)
    episodes_by_bucket = list_episodes_by_bucket(prepared, findings)
    for component in ("task", "entropy", "kl", "total"):
        whole_gradient = compute_weighted_gradient(trainer, prepared, all_rows, whole_weights, component)
        assert rows["all", component]["mean_norm"] == pytest.approx(float(whole_gradient.norm()), rel=1e-4)
        gradient_sum = torch.zeros_like(whole_gradient)
        for bucket, index in episodes_by_bucket.items():
            bucket_gradient = compute_weighted_gradient(trainer, prepared, index, whole_weights[index], component)
            bucket_gradient /= rows[bucket, component]["weight"]
            assert rows[bucket, component]["mean_norm"] == pytest.approx(float(bucket_gradient.norm()), rel=1e-4)
            gradient_sum += rows[bucket, component]["weight"] * bucket_gradient
        assert float((gradient_sum - whole_gradient).norm()) < 1e-5 * float(whole_gradient.norm())
    assert sum(rows[bucket, "task"]["weight"] for bucket in episodes_by_bucket) == pytest.approx(1)


def compute_weighted_gradient(
    trainer: PPOTrainer, prepared: PreparedBatch, rows: torch.Tensor, weights: torch.Tensor, component: str
) -> torch.Tensor:
    all_weights = torch.zeros(prepared.batch.mask.shape).index_copy(0, rows, weights)
    passes = make_passes(prepared.batch, prepared.targets._replace(loss_weights=all_weights), rows)
    return compute_plain_gradient(trainer, passes, component)


def list_episodes_by_bucket(prepared: PreparedBatch, findings: ProbeResult) -> dict[str, torch.Tensor]:
    """Return the episodes of each bucket, from the table of groups."""
    bucket_of_group = {row["group"]: row["bucket"] for row in findings.groups}
    names = [bucket_of_group[int(group)] for group in prepared.batch.group_ids]
    return {
        name: torch.tensor([number for number, bucket in enumerate(names) if bucket == name])
        for name in sorted(set(names))
    }


@pytest.mark.long
def test_shares_and_cosines_are_those_of_the_plain_gradients(
    trainer: PPOTrainer, probed: tuple[PreparedBatch, ProbeResult]
) -> None:
    prepared, findings = probed
    rows = index_rows(findings)
    all_rows, mode = torch.arange(len(prepared.batch.lengths)), trainer.config.actor.loss_agg_mode
    loss_weights = compute_loss_weights(prepared.batch.mask, mode)
    gradients = {
        name: compute_weighted_gradient(trainer, prepared, all_rows, loss_weights, name).double()
        for name in ("task", "entropy", "kl")
    }
    gradient_sum = sum(gradients.values())
    assert isinstance(gradient_sum, torch.Tensor)
    for name, gradient in gradients.items():
        expected_share = float(gradient @ gradient_sum / (gradient_sum @ gradient_sum))
        assert rows["all", name]["share"] == pytest.approx(expected_share, rel=1e-3, abs=1e-6)
        for other in ("task", "entropy", "kl"):
            expected = float(gradient @ gradients[other] / gradient.norm() / gradients[other].norm())
            assert rows["all", name][f"cosine_{other}"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for bucket in ("bucket_1", "bucket_2", "bucket_3", "all"):
        assert sum(rows[bucket, name]["share"] for name in gradients) == pytest.approx(1)
        assert rows[bucket, "total"]["share"] == 1
        assert rows[bucket, "total"].get("norm") is None


@pytest.mark.long
def test_the_published_norm_is_a_mean_over_mini_batches() -> None:
    trainer = make_trained_trainer(actor__ppo_mini_batch_size=6, actor__ppo_micro_batch_size_per_gpu=2)
    prepared, findings = probe(trainer)
    rows, settings = index_rows(findings), trainer.config.actor
    order, batch = order_length_stratified(prepared.batch.lengths), prepared.batch
    groups = {bucket: set(index.tolist()) for bucket, index in list_episodes_by_bucket(prepared, findings).items()}
    assert any(len(index) % 6 for index in groups.values())  # at least one bucket ends with a short mini-batch
    for bucket, members in (*groups.items(), ("all", set(order.tolist()))):
        index = torch.tensor([number for number in order.tolist() if number in members])
        for component in ("task", "entropy", "kl"):
            norms = []
            for mini_batch in index.split(6):
                width, num_micro_batches = batch.tokens.shape[1], -(-len(mini_batch) // 2)
                passes = make_passes(batch, prepared.targets, mini_batch, settings.loss_agg_mode, 2, width)
                mini_batch_norm = float(compute_plain_gradient(trainer, passes, component).norm())
                norms.append(mini_batch_norm * num_micro_batches / 3)  # as if the mini-batch were full
            row, norm = rows[bucket, component], float(np.mean(norms))
            assert row["norm"] == pytest.approx(norm, rel=1e-4)
            assert row["norm_per_sample"] == pytest.approx(norm / len(index), rel=1e-4)
            assert row["norm_per_token"] == pytest.approx(norm / int(batch.mask[index].sum()), rel=1e-4)
            assert row["sample_count"] == len(index)
        losses = [rows[bucket, name]["loss"] for name in ("task", "entropy", "kl")]
        assert rows[bucket, "total"]["loss"] == pytest.approx(sum(losses))
        assert rows[bucket, "entropy"]["loss"] < 0 < rows[bucket, "kl"]["loss"]


@pytest.mark.long
def test_signal_and_noise_are_of_the_folds_mean_gradients(
    trainer: PPOTrainer, probed: tuple[PreparedBatch, ProbeResult]
) -> None:
    prepared, findings = probed
    row = index_rows(findings)["all", "task"]
    assert row["fold_count"] == min(FOLDS, GROUPS)
    assert row["mean_norm"] ** 2 == pytest.approx(row["signal"] + row["noise"])
    assert row["snr"] == pytest.approx(row["signal"] / row["noise"])
    assert row["snr_low"] < row["snr"] < row["snr_high"]
    # Each group is one fold, so the noise is the weighted variance of their gradients.
    batch, loss_weights = prepared.batch, compute_loss_weights(prepared.batch.mask, "token-mean")
    fold_gradients, shares = [], []
    for group in torch.unique(batch.group_ids):
        index = (batch.group_ids == group).nonzero().squeeze(-1)
        share = float(loss_weights[index].sum())
        fold_gradient = compute_weighted_gradient(trainer, prepared, index, loss_weights[index], "task")
        fold_gradients.append(fold_gradient.double() / share)
        shares.append(share)
    gradients, fold_shares = torch.stack(fold_gradients), torch.tensor(shares, dtype=torch.float64)
    mean = fold_shares @ gradients
    noise = float((fold_shares * (gradients - mean).square().sum(1)).sum() / (len(shares) - 1))
    assert row["noise"] == pytest.approx(noise, rel=1e-4)


@pytest.mark.long
def test_sketches_approximate_the_numbers_of_full_gradients(
    trainer: PPOTrainer, probed: tuple[PreparedBatch, ProbeResult]
) -> None:
    size = 2**16
    exact_rows, sketched_rows = index_rows(probed[1]), index_rows(probe(trainer, sketch=size)[1])
    assert exact_rows.keys() == sketched_rows.keys()
    tolerance = 5 / (2 * size) ** 0.5  # five standard errors of a norm
    for name, row in exact_rows.items():
        sketched_row, total = sketched_rows[name], exact_rows[name[0], "total"]["mean_norm"]
        for number in ("norm", "mean_norm", "norm_per_sample", "norm_per_token"):
            if number in row:
                assert sketched_row[number] == pytest.approx(row[number], rel=tolerance)
        assert sketched_row["signal"] == pytest.approx(row["signal"], abs=4 * tolerance * (row["mean_norm"] ** 2))
        assert sketched_row["share"] == pytest.approx(row["share"], abs=4 * tolerance * row["mean_norm"] / total)
        for other_component in ("task", "entropy", "kl"):
            cosine = row[f"cosine_{other_component}"]
            assert sketched_row[f"cosine_{other_component}"] == pytest.approx(cosine, abs=2 * tolerance)
        assert {key: sketched_row[key] for key in UNSKETCHED_COLUMNS} == {key: row[key] for key in UNSKETCHED_COLUMNS}


UNSKETCHED_COLUMNS = ("loss", "weight", "fold_count", "sample_count", "token_count", "group_count", "reward_std_mean")


@pytest.mark.long
def test_buckets_have_groups_in_the_order_of_their_reward_std(probed: tuple[PreparedBatch, ProbeResult]) -> None:
    prepared, findings = probed
    groups = sorted(findings.groups, key=lambda row: row["reward_std"])
    assert [row["bucket"] for row in groups] == ["bucket_1"] * 2 + ["bucket_2"] * 2 + ["bucket_3"] * 3
    rows = index_rows(findings)
    for bucket in ("bucket_1", "bucket_2", "bucket_3"):
        stds = [row["reward_std"] for row in groups if row["bucket"] == bucket]
        row = rows[bucket, "task"]
        assert (row["reward_std_min"], row["reward_std_max"]) == (min(stds), max(stds))
        assert row["reward_std_mean"] == pytest.approx(float(np.mean(stds)))
        assert row["group_count"] == len(stds)
    assert rows["all", "task"]["sample_count"] == len(prepared.batch.lengths)
    percentages = [rows[f"bucket_{number}", "kl"]["sample_pct"] for number in (1, 2, 3)]
    assert sum(percentages) == pytest.approx(100)


@pytest.mark.long
def test_fixed_edges_leave_empty_buckets_out(trainer: PPOTrainer) -> None:
    prepared, stds = prepare_batch(trainer)
    fixed_stds = dict(zip(stds, (0.2, 0.4, 2.5, 2.6, 2.7, 9.0, 9.5), strict=True))
    findings = measure(trainer, prepared, fixed_stds, 6, "fixed_rv")
    assert list(dict.fromkeys(row["bucket"] for row in findings.rows)) == ["bucket_1", "bucket_3", "bucket_6", "all"]


@pytest.mark.long
@pytest.mark.parametrize(("kl_loss_type", "is_zero"), [("kl", False), ("low_var_kl", True)])
def test_the_kl_gradient_where_policy_and_reference_are_equal(kl_loss_type: str, is_zero: bool) -> None:
    rows = index_rows(probe(make_untrained_trainer(actor__kl_loss_type=kl_loss_type), buckets=1)[1])
    kl, task = rows["all", "kl"], rows["all", "task"]
    if is_zero:  # the remainder is rounding, which has no ratio and no direction
        assert (kl["mean_norm"], kl["share"], kl["snr"], kl["cosine_task"]) == (0, 0, None, None)
        assert kl["signal_share"] == 0 or rows["all", "total"]["signal_share"] is None
        assert 0 <= kl["norm"] < 1e-6  # the published number is 0 where both passes have the same rows
        assert task["cosine_kl"] is None
    else:
        assert kl["mean_norm"] > 1e-3
        assert task["cosine_kl"] is not None


@pytest.mark.long
@pytest.mark.parametrize("coefficient", thin_out([1e-9, 1e3], 2))
def test_the_coefficient_does_not_decide_what_is_rounding(coefficient: float) -> None:
    untrained_trainer = make_untrained_trainer(actor__kl_loss_type="low_var_kl", actor__kl_loss_coef=coefficient)
    assert index_rows(probe(untrained_trainer, buckets=1)[1])["all", "kl"]["snr"] is None
    trained_row = index_rows(probe(make_trained_trainer(actor__kl_loss_coef=coefficient), buckets=1)[1])["all", "kl"]
    assert trained_row["snr"] is not None
    assert trained_row["mean_norm"] > 0


@pytest.mark.long
def test_a_bucket_has_a_fold_for_each_of_its_groups_up_to_eight(trainer: PPOTrainer) -> None:
    prepared, stds = prepare_batch(trainer)
    untrained_group = int(torch.unique(prepared.batch.group_ids)[0])  # a group without a trained token has no fold
    mask = prepared.batch.mask & (prepared.batch.group_ids != untrained_group)[:, None]
    for batch in (prepared.batch, prepared.batch._replace(mask=mask)):
        trained_groups = {int(group) for group in batch.group_ids[batch.mask.any(1)]}
        findings = measure(trainer, prepared._replace(batch=batch), stds)
        for row in findings.rows:
            bucket_groups = {group["group"] for group in findings.groups if row["bucket"] in (group["bucket"], "all")}
            assert row["fold_count"] == min(FOLDS, len(bucket_groups & trained_groups))


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"actor__policy_loss": "gspo"}, {"actor__stapo_tau_p": 0.5}], ids=str)
def test_losses_over_episodes_and_silenced_tokens_have_the_gradients_of_their_update(settings: dict[str, Any]) -> None:
    trainer = make_trained_trainer(**settings)
    prepared, findings = probe(trainer, buckets=1)
    rows, batch, actor = index_rows(findings), prepared.batch, trainer.make_actor_update()
    all_rows, mode = torch.arange(len(batch.lengths)), trainer.config.actor.loss_agg_mode
    for component in ("task", "kl"):
        targets = actor.silence_tokens(batch, prepared.targets, all_rows)
        gradient = compute_plain_gradient(trainer, make_passes(batch, targets, all_rows, mode), component)
        assert rows["all", component]["mean_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)
        norms = []
        for index in order_length_stratified(batch.lengths).split(trainer.config.actor.ppo_mini_batch_size):
            targets = actor.silence_tokens(batch, prepared.targets, index, actor.settings.ppo_micro_batch_size_per_gpu)
            passes = make_passes(batch, targets, index, mode, actor.settings.ppo_micro_batch_size_per_gpu)
            norms.append(float(compute_plain_gradient(trainer, passes, component).norm()))
        assert rows["all", component]["norm"] == pytest.approx(float(np.mean(norms)), rel=1e-4)
