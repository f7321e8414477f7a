"""The gradients of an analysis: against plain backward passes, and their identities."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.trainers import make_quiet_trainer
from trainable.algo.batching import order_length_stratified
from trainable.algo.filters import compute_group_scores
from trainable.algo.reductions import LOSS_AGG_MODES, compute_loss_weights
from trainable.backend.meter import Meter
from trainable.config.seeds import make_rng
from trainable.diagnostics.gradient_analysis import _replace_nonfinite as finite_or_missing
from trainable.diagnostics.gradient_probe import FOLDS, ProbeResult, probe_gradients
from trainable.ppo.evaluation import reshape_by_group
from trainable.ppo.targets import PreparedBatch
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import make_passes, make_weighted_passes

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


def analysed(**overrides: object) -> PPOTrainer:
    """A small trainer after one step, so that policy and reference differ."""
    trainer = make_quiet_trainer(**{**ANALYSIS, "trainer__gradient_analysis_mode": False, **overrides})
    trainer.step()
    return trainer


def prepared(trainer: PPOTrainer) -> tuple[PreparedBatch, dict[int, float]]:
    levels = trainer.val_levels * GROUPS
    episodes = trainer.roll_out(levels[:GROUPS], SIZE, make_rng(3, "gradient_sampling", 0))
    stds = compute_group_scores("reward_std", reshape_by_group([episode.score for episode in episodes], SIZE))
    ready = trainer.prepare_batch(episodes, GROUPS, GROUPS, make_rng(3, "gradient_duplicates", 0))
    spread = {group: float(std) + 0.1 * group for group, std in enumerate(stds)}  # no two alike
    return ready, spread


def probed(
    trainer: PPOTrainer, buckets: int = 3, mode: str = "quantile", sketch: int | None = None
) -> tuple[PreparedBatch, ProbeResult]:
    ready, stds = prepared(trainer)
    generator = torch.Generator().manual_seed(1)
    return ready, probe_gradients(
        trainer.make_actor_update(), ready.batch, ready.targets, stds, buckets, mode, generator, sketch
    )


def by_name(findings: ProbeResult) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["bucket"], row["component"]): row for row in findings.rows}


def gradient(trainer: PPOTrainer, parts: Iterator[Any], component: str) -> torch.Tensor:
    """The plain way: backward of one term, read from `.grad`."""
    trainer.model.zero_grad(set_to_none=True)
    for part in parts:
        terms = trainer.make_actor_update().compute_loss_terms(part, Meter())
        (sum(terms.values()) if component == "total" else terms[component]).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
    trainer.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_whole_batch_is_its_plain_gradient_and_the_sum_of_its_buckets(mode: str) -> None:
    trainer = analysed(actor__loss_agg_mode=mode)
    ready, findings = probed(trainer)
    rows, batch = by_name(findings), ready.batch
    everyone = torch.arange(len(batch.lengths))
    whole_weights = compute_loss_weights(batch.mask, mode)
    members = buckets_of(ready, findings)
    for component in ("task", "entropy", "kl", "total"):
        whole = gradient(trainer, make_weighted_passes(batch, ready.targets, everyone, whole_weights), component)
        assert rows["all", component]["mean_norm"] == pytest.approx(float(whole.norm()), rel=1e-4)
        summed = torch.zeros_like(whole)
        for bucket, index in members.items():
            alone = (
                gradient(trainer, make_weighted_passes(batch, ready.targets, index, whole_weights[index]), component)
                / rows[bucket, component]["weight"]
            )
            assert rows[bucket, component]["mean_norm"] == pytest.approx(float(alone.norm()), rel=1e-4)
            summed += rows[bucket, component]["weight"] * alone
        assert float((summed - whole).norm()) < 1e-5 * float(whole.norm())
    assert sum(rows[bucket, "task"]["weight"] for bucket in members) == pytest.approx(1)


def buckets_of(ready: PreparedBatch, findings: ProbeResult) -> dict[str, torch.Tensor]:
    """Episodes of each bucket, from the table of groups."""
    home = {row["group"]: row["bucket"] for row in findings.groups}
    names = [home[int(group)] for group in ready.batch.group_ids]
    return {
        name: torch.tensor([number for number, own in enumerate(names) if own == name]) for name in sorted(set(names))
    }


def test_shares_and_cosines_are_those_of_the_plain_gradients() -> None:
    trainer = analysed()
    ready, findings = probed(trainer)
    row = by_name(findings)
    everyone, mode = torch.arange(len(ready.batch.lengths)), trainer.config.actor.loss_agg_mode
    weights_ = compute_loss_weights(ready.batch.mask, mode)
    plain = {
        name: gradient(trainer, make_weighted_passes(ready.batch, ready.targets, everyone, weights_), name).double()
        for name in ("task", "entropy", "kl")
    }
    whole = sum(plain.values())
    assert isinstance(whole, torch.Tensor)
    for name, own in plain.items():
        assert row["all", name]["share"] == pytest.approx(float(own @ whole / (whole @ whole)), rel=1e-3, abs=1e-6)
        for other in ("task", "entropy", "kl"):
            expected = float(own @ plain[other] / own.norm() / plain[other].norm())
            assert row["all", name][f"cosine_{other}"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for bucket in ("bucket_1", "bucket_2", "bucket_3", "all"):
        assert sum(row[bucket, name]["share"] for name in plain) == pytest.approx(1)
        assert row[bucket, "total"]["share"] == 1
        assert row[bucket, "total"].get("norm") is None


def test_the_published_norm_is_a_mean_over_mini_batches() -> None:
    trainer = analysed(actor__ppo_mini_batch_size=6, actor__ppo_micro_batch_size_per_gpu=2)
    ready, findings = probed(trainer)
    rows, settings = by_name(findings), trainer.config.actor
    order, batch = order_length_stratified(ready.batch.lengths), ready.batch
    groups = {bucket: set(index.tolist()) for bucket, index in buckets_of(ready, findings).items()}
    assert any(len(index) % 6 for index in groups.values())  # one ends with a short mini-batch
    for bucket, members in (*groups.items(), ("all", set(order.tolist()))):
        index = torch.tensor([number for number in order.tolist() if number in members])
        for component in ("task", "entropy", "kl"):
            norms = []
            for part in index.split(6):
                cut = make_passes(batch, ready.targets, part, settings.loss_agg_mode, 2, batch.tokens.shape[1])
                micros = -(-len(part) // 2)
                norms.append(float(gradient(trainer, cut, component).norm()) * micros / 3)  # as if it were whole
            row, norm = rows[bucket, component], float(np.mean(norms))
            assert row["norm"] == pytest.approx(norm, rel=1e-4)
            assert row["norm_per_sample"] == pytest.approx(norm / len(index), rel=1e-4)
            assert row["norm_per_token"] == pytest.approx(norm / int(batch.mask[index].sum()), rel=1e-4)
            assert row["sample_count"] == len(index)
        parts = [rows[bucket, name]["loss"] for name in ("task", "entropy", "kl")]
        assert rows[bucket, "total"]["loss"] == pytest.approx(sum(parts))
        assert rows[bucket, "entropy"]["loss"] < 0 < rows[bucket, "kl"]["loss"]


def test_signal_and_noise_are_of_the_folds_mean_gradients() -> None:
    trainer = analysed()
    ready, findings = probed(trainer)
    row = by_name(findings)["all", "task"]
    assert row["fold_count"] == min(FOLDS, GROUPS)
    assert row["mean_norm"] ** 2 == pytest.approx(row["signal"] + row["noise"])
    assert row["snr"] == pytest.approx(row["signal"] / row["noise"])
    assert row["snr_low"] < row["snr"] < row["snr_high"]
    # Each of the groups is a fold of its own: the noise is the weighted spread of their gradients.
    batch, weights_ = ready.batch, compute_loss_weights(ready.batch.mask, "token-mean")
    found, shares = [], []
    for group in torch.unique(batch.group_ids):
        index = (batch.group_ids == group).nonzero().squeeze(-1)
        share = float(weights_[index].sum())
        part = gradient(trainer, make_weighted_passes(batch, ready.targets, index, weights_[index]), "task").double()
        found.append(part / share)
        shares.append(share)
    gradients, share_of = torch.stack(found), torch.tensor(shares, dtype=torch.float64)
    mean = share_of @ gradients
    noise = float((share_of * (gradients - mean).square().sum(1)).sum() / (len(shares) - 1))
    assert row["noise"] == pytest.approx(noise, rel=1e-4)


def test_sketches_give_nearly_the_numbers_of_whole_gradients() -> None:
    trainer, size = analysed(), 2**16
    whole, sketched = (by_name(probed(trainer, sketch=entries)[1]) for entries in (None, size))
    assert whole.keys() == sketched.keys()
    deviation = 5 / (2 * size) ** 0.5  # of a norm: five standard ones
    for name, row in whole.items():
        other, total = sketched[name], whole[name[0], "total"]["mean_norm"]
        for number in ("norm", "mean_norm", "norm_per_sample", "norm_per_token"):
            if number in row:
                assert other[number] == pytest.approx(row[number], rel=deviation)
        assert other["signal"] == pytest.approx(row["signal"], abs=4 * deviation * (row["mean_norm"] ** 2))
        assert other["share"] == pytest.approx(row["share"], abs=4 * deviation * row["mean_norm"] / total)
        for beside in ("task", "entropy", "kl"):
            assert other[f"cosine_{beside}"] == pytest.approx(row[f"cosine_{beside}"], abs=2 * deviation)
        assert {key: other[key] for key in COUNTED} == {key: row[key] for key in COUNTED}


COUNTED = ("loss", "weight", "fold_count", "sample_count", "token_count", "group_count", "reward_std_mean")


def test_the_buckets_are_of_groups_in_order_of_their_spread() -> None:
    trainer = analysed()
    ready, findings = probed(trainer, buckets=3)
    groups = sorted(findings.groups, key=lambda row: row["reward_std"])
    assert [row["bucket"] for row in groups] == ["bucket_1"] * 2 + ["bucket_2"] * 2 + ["bucket_3"] * 3
    rows = by_name(findings)
    for bucket in ("bucket_1", "bucket_2", "bucket_3"):
        stds = [row["reward_std"] for row in groups if row["bucket"] == bucket]
        row = rows[bucket, "task"]
        assert (row["reward_std_min"], row["reward_std_max"]) == (min(stds), max(stds))
        assert row["reward_std_mean"] == pytest.approx(float(np.mean(stds)))
        assert row["group_count"] == len(stds)
    assert rows["all", "task"]["sample_count"] == len(ready.batch.lengths)
    assert sum(rows[bucket, "kl"]["sample_pct"] for bucket in ("bucket_1", "bucket_2", "bucket_3")) == pytest.approx(
        100
    )


def test_fixed_edges_leave_empty_buckets_out() -> None:
    trainer = analysed()
    ready, stds = prepared(trainer)
    spread = dict(zip(stds, (0.2, 0.4, 2.5, 2.6, 2.7, 9.0, 9.5), strict=True))
    found = probe_gradients(
        trainer.make_actor_update(), ready.batch, ready.targets, spread, 6, "fixed_rv", torch.Generator().manual_seed(1)
    )
    assert list(dict.fromkeys(row["bucket"] for row in found.rows)) == ["bucket_1", "bucket_3", "bucket_6", "all"]


@pytest.mark.parametrize(("kind", "is_zero"), [("kl", False), ("mse", True), ("low_var_kl", True)])
def test_the_kl_gradient_where_policy_and_reference_are_one(kind: str, is_zero: bool) -> None:
    trainer = make_quiet_trainer(**{**ANALYSIS, "trainer__gradient_analysis_mode": False, "actor__kl_loss_type": kind})
    _, findings = probed(trainer)
    rows = by_name(findings)
    kl, task = rows["all", "kl"], rows["all", "task"]
    if is_zero:  # what is left is rounding, and has no ratio and no direction
        assert (kl["mean_norm"], kl["share"], kl["snr"], kl["cosine_task"]) == (0, 0, None, None)
        assert kl["signal_share"] == 0 or rows["all", "total"]["signal_share"] is None
        assert 0 <= kl["norm"] < 1e-6  # the published number stays what it is: 0 where both passes are cut alike
        assert task["cosine_kl"] is None
    else:
        assert kl["mean_norm"] > 1e-3
        assert task["cosine_kl"] is not None


@pytest.mark.parametrize("coefficient", [1e-9, 1e3])
def test_the_coefficient_does_not_decide_what_is_rounding(coefficient: float) -> None:
    fresh = make_quiet_trainer(
        **{
            **ANALYSIS,
            "trainer__gradient_analysis_mode": False,
            "actor__kl_loss_type": "low_var_kl",
            "actor__kl_loss_coef": coefficient,
        }
    )
    assert by_name(probed(fresh)[1])["all", "kl"]["snr"] is None
    trained = by_name(probed(analysed(actor__kl_loss_coef=coefficient))[1])["all", "kl"]
    assert trained["snr"] is not None
    assert trained["mean_norm"] > 0


def test_what_is_not_finite_is_missing_and_the_rest_keeps_its_numbers() -> None:
    trainer = analysed()
    ready, stds = prepared(trainer)

    def rows(advantages: torch.Tensor) -> dict[tuple[str, str], dict[str, Any]]:
        targets = ready.targets._replace(advantages=advantages)
        generator = torch.Generator().manual_seed(1)
        found = probe_gradients(trainer.make_actor_update(), ready.batch, targets, stds, 3, "quantile", generator)
        return by_name(found._replace(rows=[finite_or_missing(row) for row in found.rows]))

    sound = ready.targets.advantages
    bad = sound.clone()
    bad[0, int(ready.batch.mask[0].nonzero()[0])] = torch.nan
    before, after = rows(sound), rows(bad)
    hit = [bucket for bucket in dict.fromkeys(name for name, _ in after) if after[bucket, "task"]["mean_norm"] is None]
    assert len(hit) == 2
    assert "all" in hit
    for bucket, component in after:
        row, whole = after[bucket, component], before[bucket, component]
        if bucket not in hit:
            assert row == whole
        elif component in ("task", "total"):
            assert {row[name] for name in ("mean_norm", "signal", "noise", "snr", "loss")} == {None}
            assert row.get("norm") is None
        else:
            same = ("norm", "mean_norm", "signal", "noise", "snr", "snr_low", "loss", "cosine_entropy", "cosine_kl")
            assert {name: row[name] for name in same} == {name: whole[name] for name in same}
            assert row["mean_norm"] > 0
            assert row["cosine_task"] is None


def test_a_bucket_has_a_fold_for_each_of_its_groups_up_to_eight() -> None:
    trainer = analysed()
    ready, stds = prepared(trainer)
    lost = int(torch.unique(ready.batch.group_ids)[0])  # a group without a trained token has no fold
    mask = ready.batch.mask & (ready.batch.group_ids != lost)[:, None]
    for batch in (ready.batch, ready.batch._replace(mask=mask)):
        trained = {int(group) for group in batch.group_ids[batch.mask.any(1)]}
        found = probe_gradients(
            trainer.make_actor_update(), batch, ready.targets, stds, 2, "quantile", torch.Generator().manual_seed(3)
        )
        for row in found.rows:
            own = {group["group"] for group in found.groups if row["bucket"] in (group["bucket"], "all")}
            assert row["fold_count"] == min(FOLDS, len(own & trained))


def test_groups_without_spread_teach_grpo_the_regularizers_alone() -> None:
    trainer = analysed(algorithm__adv_estimator="grpo")
    ready, stds = prepared(trainer)
    targets = ready.targets._replace(advantages=torch.zeros_like(ready.targets.advantages))
    found = probe_gradients(
        trainer.make_actor_update(), ready.batch, targets, stds, 2, "quantile", torch.Generator().manual_seed(1)
    )
    rows = by_name(found)
    names = ("signal_share", "signal_share_low", "signal_share_high")
    assert [rows["all", "task"][name] for name in names] == [0, 0, 0]
    assert rows["all", "kl"]["signal_share"] + rows["all", "entropy"]["signal_share"] == pytest.approx(1)
    # What is nothing has no share in a step that has no signal.
    for row in (row for row in found.rows if row["component"] == "task"):
        assert (row["signal_share"] == 0) == (rows[row["bucket"], "total"]["signal_share"] == 1)


def test_shares_of_the_expected_step_sum_to_one_where_it_has_signal() -> None:
    rows = by_name(probed(analysed())[1])
    for bucket in dict.fromkeys(name for name, _ in rows):
        parts = [rows[bucket, name]["signal_share"] for name in ("task", "entropy", "kl")]
        assert np.isnan(parts).all() or sum(parts) == pytest.approx(1)
        assert np.isnan(parts).all() or rows[bucket, "total"]["signal"] > 0
        assert np.isnan(parts).all() == (rows[bucket, "total"]["signal_share"] is None)
    whole = rows["all", "kl"]
    assert rows["all", "total"]["signal"] > 0
    assert whole["signal_share_low"] < whole["signal_share"] < whole["signal_share_high"]


def test_a_component_that_is_off_has_no_row() -> None:
    trainer = analysed(actor__use_kl_loss=False, actor__entropy_coeff=0.0)
    _, findings = probed(trainer)
    assert {row["component"] for row in findings.rows} == {"task", "total"}
    row = by_name(findings)["all", "task"]
    assert (row["cosine_kl"], row["cosine_entropy"], row["cosine_task"]) == (None, None, pytest.approx(1))
