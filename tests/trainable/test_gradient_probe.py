"""The gradients of an analysis: against plain backward passes, their identities, and that nothing else moves."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainers import quiet, timeless, weights
from trainable.algo.batching import length_stratified_order
from trainable.algo.filters import group_scores
from trainable.algo.reductions import LOSS_AGG_MODES, loss_weights
from trainable.evaluate import by_group
from trainable.gradient_analysis import analyse, is_due
from trainable.gradient_probe import FOLDS, Findings, probe_gradients
from trainable.records import GRADIENT_COLUMNS
from trainable.seeds import stream
from trainable.trainer import PPOTrainer, Prepared
from trainable.update import Meter, passes, weighted_passes

GROUPS, SIZE = 7, 4
ANALYSIS: dict[str, object] = {
    "trainer__gradient_analysis_mode": True, "trainer__gradient_analysis_every": 2,
    "trainer__gradient_analysis_env_groups": GROUPS, "trainer__gradient_analysis_group_size": SIZE,
    "trainer__gradient_analysis_log_prefilter": True,
    "actor__use_kl_loss": True, "actor__kl_loss_coef": 0.5, "actor__entropy_coeff": 0.1, "env__group_size": SIZE,
}  # fmt: skip


def analysed(**overrides: object) -> PPOTrainer:
    """A small trainer after one step, so that policy and reference differ."""
    trainer = quiet(**{**ANALYSIS, "trainer__gradient_analysis_mode": False, **overrides})
    trainer.step()
    return trainer


def prepared(trainer: PPOTrainer) -> tuple[Prepared, dict[int, float]]:
    rooms = trainer.val_rooms * GROUPS
    episodes = trainer.roll_out(rooms[:GROUPS], SIZE, stream(3, "gradient_sampling", 0))
    stds = group_scores("reward_std", by_group([episode.score for episode in episodes], SIZE))
    ready = trainer.prepare(episodes, GROUPS, GROUPS, stream(3, "gradient_duplicates", 0), {})
    spread = {group: float(std) + 0.1 * group for group, std in enumerate(stds)}  # no two alike
    return ready, spread


def probed(
    trainer: PPOTrainer, buckets: int = 3, mode: str = "quantile", sketch: int | None = None
) -> tuple[Prepared, Findings]:
    ready, stds = prepared(trainer)
    generator = torch.Generator().manual_seed(1)
    return ready, probe_gradients(
        trainer.actor_update(), ready.batch, ready.targets, stds, buckets, mode, generator, sketch
    )


def by_name(findings: Findings) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["bucket"], row["component"]): row for row in findings.rows}


def gradient(trainer: PPOTrainer, parts: Iterator[Any], component: str) -> torch.Tensor:
    """The plain way: backward of one term, read from `.grad`."""
    trainer.model.zero_grad(set_to_none=True)
    for part in parts:
        terms = trainer.actor_update().components(part, Meter())
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
    whole_weights = loss_weights(batch.mask, mode)
    members = buckets_of(ready, findings)
    for component in ("task", "entropy", "kl", "total"):
        whole = gradient(trainer, weighted_passes(batch, ready.targets, everyone, whole_weights), component)
        assert rows["all", component]["mean_norm"] == pytest.approx(float(whole.norm()), rel=1e-4)
        summed = torch.zeros_like(whole)
        for bucket, index in members.items():
            alone = gradient(
                trainer, weighted_passes(batch, ready.targets, index, whole_weights[index]), component
            ) / rows[bucket, component]["weight"]  # fmt: skip
            assert rows[bucket, component]["mean_norm"] == pytest.approx(float(alone.norm()), rel=1e-4)
            summed += rows[bucket, component]["weight"] * alone
        assert float((summed - whole).norm()) < 1e-5 * float(whole.norm())
    assert sum(rows[bucket, "task"]["weight"] for bucket in members) == pytest.approx(1)


def buckets_of(ready: Prepared, findings: Findings) -> dict[str, torch.Tensor]:
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
    weights_ = loss_weights(ready.batch.mask, mode)
    plain = {
        name: gradient(trainer, weighted_passes(ready.batch, ready.targets, everyone, weights_), name).double()
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
    order, batch = length_stratified_order(ready.batch.lengths), ready.batch
    groups = {bucket: set(index.tolist()) for bucket, index in buckets_of(ready, findings).items()}
    assert any(len(index) % 6 for index in groups.values())  # one ends with a short mini-batch
    for bucket, members in (*groups.items(), ("all", set(order.tolist()))):
        index = torch.tensor([number for number in order.tolist() if number in members])
        for component in ("task", "entropy", "kl"):
            norms = []
            for part in index.split(6):
                cut = passes(batch, ready.targets, part, settings.loss_agg_mode, 2, batch.tokens.shape[1])
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
    batch, weights_ = ready.batch, loss_weights(ready.batch.mask, "token-mean")
    found, shares = [], []
    for group in torch.unique(batch.group_ids):
        index = (batch.group_ids == group).nonzero().squeeze(-1)
        share = float(weights_[index].sum())
        part = gradient(trainer, weighted_passes(batch, ready.targets, index, weights_[index]), "task").double()
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


def test_rows_say_what_was_measured_and_how() -> None:
    trainer = analysed(actor__kl_loss_type="mse", trainer__gradient_analysis_sketch=1024)
    rows = {row["component"]: row for row in analyse(trainer, [])[0]["rows"]}
    assert {name: (row["form"], row["coefficient"]) for name, row in rows.items()} == {
        "task": ("gae", 1.0), "entropy": (None, 0.1), "kl": ("mse", 0.5), "total": (None, None),
    }  # fmt: skip
    assert {(row["bucket_mode"], row["sketch"]) for row in rows.values()} == {("quantile", 1024)}


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
        trainer.actor_update(), ready.batch, ready.targets, spread, 6, "fixed_rv", torch.Generator().manual_seed(1)
    )
    assert list(dict.fromkeys(row["bucket"] for row in found.rows)) == ["bucket_1", "bucket_3", "bucket_6", "all"]


@pytest.mark.parametrize(("kind", "is_zero"), [("kl", False), ("mse", True), ("low_var_kl", True)])
def test_the_kl_gradient_where_policy_and_reference_are_one(kind: str, is_zero: bool) -> None:
    trainer = quiet(**{**ANALYSIS, "trainer__gradient_analysis_mode": False, "actor__kl_loss_type": kind})
    _, findings = probed(trainer)
    rows = by_name(findings)
    kl, task = rows["all", "kl"], rows["all", "task"]
    if is_zero:  # what is left is rounding, and has no ratio and no direction
        assert (kl["mean_norm"], kl["norm"], kl["share"], kl["snr"], kl["cosine_task"]) == (0, 0, 0, None, None)
        assert task["cosine_kl"] is None
    else:
        assert kl["mean_norm"] > 1e-3
        assert task["cosine_kl"] is not None


def test_a_component_that_is_off_has_no_row() -> None:
    trainer = analysed(actor__use_kl_loss=False, actor__entropy_coeff=0.0)
    _, findings = probed(trainer)
    assert {row["component"] for row in findings.rows} == {"task", "total"}
    row = by_name(findings)["all", "task"]
    assert (row["cosine_kl"], row["cosine_entropy"], row["cosine_task"]) == (None, None, pytest.approx(1))


def test_an_analysis_leaves_weights_optimizers_gradients_and_streams_alone() -> None:
    trainer = analysed()
    before, values = weights(trainer), dict(trainer.totals)
    state, old = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    analyse(trainer, [])
    after = weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.totals == values
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], old)  # type: ignore[index]  # noqa: NPY002


def test_training_is_the_same_with_and_without_it() -> None:
    with_it, without = quiet(**ANALYSIS), quiet(**{**ANALYSIS, "trainer__gradient_analysis_mode": False})
    for step in (1, 2, 3):
        one, two = with_it.step(), without.step()
        assert timeless(one.row) == timeless(two.row)
        assert bool(one.gradients) == (step in (1, 3)) == ("seconds_gradient_analysis" in one.row)
    assert all(torch.equal(a, b) for a, b in zip(weights(with_it).values(), weights(without).values(), strict=True))


def test_the_lines_have_the_columns_and_no_number_that_json_lacks() -> None:
    lines = quiet(**ANALYSIS).step().gradients
    assert [(line["step"], line["source"], line["prefilter"]) for line in lines] == [
        (1, "train", True), (1, "train", False),
    ]  # fmt: skip
    columns = {column.name for column in GRADIENT_COLUMNS} - {"source", "prefilter"}
    for line in lines:
        for row in line["rows"]:
            assert set(row) <= columns
            assert columns - set(row) <= {"norm", "norm_per_sample", "norm_per_token"}
            assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))
        assert {row["source_env_groups"] for row in line["rows"]} == {GROUPS}
        assert not any(row["uses_training_batch"] for row in line["rows"])
        assert len({row["group"] for row in line["groups"]}) == len(line["groups"])


def test_the_steps_own_batch_is_used_where_no_other_is_asked_for() -> None:
    lines = quiet(**{**ANALYSIS, "trainer__gradient_analysis_env_groups": None}).step().gradients
    for line in lines:
        assert all(row["uses_training_batch"] and row["source_env_groups"] == 2 for row in line["rows"])
    assert len(lines[0]["groups"]) == 2


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4]), (2, [1, 3]), (50, [1])])
def test_it_is_due_at_the_first_step_and_every_so_many(every: int, expected: list[int]) -> None:
    settings = quiet(**{**ANALYSIS, "trainer__gradient_analysis_every": every}).config.trainer
    assert [step for step in range(1, 5) if is_due(step, settings)] == expected


def test_measuring_only_trains_nothing_and_ends_after_the_first() -> None:
    trainer = quiet(
        **ANALYSIS, trainer__gradient_analysis_only=True, trainer__exit_after_gradient_analysis=True
    )  # fmt: skip
    assert trainer.config.trainer.total_training_steps == 1
    before = weights(trainer)
    found = trainer.step()
    assert found.gradients
    assert found.row["optimizer_steps"] == 0
    after = weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
