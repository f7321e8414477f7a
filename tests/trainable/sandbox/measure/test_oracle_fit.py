"""Influence of samples against gradients that are taken one at a time."""

import pytest
import torch

from tests.trainable.sandbox.tabular import TabularTask
from trainable.sandbox.batch.rngs import MemberRngs
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.measure.oracle_fit import SampleInfluence, compute_fit_statistics, compute_sample_influence
from trainable.sandbox.rules.oracle_labels import cross_entropy
from trainable.sandbox.training.optimizer import MemberAdam

CONFIG = UpdateRuleConfig(batch_size=6, eta=0.5)


def influence() -> tuple[SampleInfluence, torch.Tensor, torch.Tensor]:
    """Samples of a drawn batch, their projections one gradient at a time [E, B * T], and the oracle's gradient."""
    task, streams = TabularTask(CONFIG), MemberRngs((3, 4))
    models = task.make_models(streams)
    optimizer = MemberAdam(models.get_parameters(), 0.1)
    batch = task.sample(models, streams, 0)
    oracle = optimizer.compute_gradient(cross_entropy(batch, task.compute_oracle_log_probs(models, batch), CONFIG).loss)
    single = []
    for place in range(batch.actions[0].numel()):
        taken = task.compute_log_probs(models, batch).gather(-1, batch.actions.unsqueeze(-1)).flatten(1)
        single.append((optimizer.compute_gradient(taken[:, place]) * oracle).sum(1))
    samples = compute_sample_influence(task, models, batch, optimizer.split_by_parameter(oracle), CONFIG)
    return samples, torch.stack(single, dim=1), taken.detach()


def test_all_projections_at_once_are_those_of_one_gradient_a_sample() -> None:
    samples, single, taken = influence()
    torch.testing.assert_close(samples.projection, single, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(samples.surprisal, -taken)
    torch.testing.assert_close(samples.delight, samples.advantage * -taken)
    torch.testing.assert_close(samples.gate, torch.sigmoid(samples.delight / 0.5))
    assert float(single.abs().max()) > 1e-3


def test_the_projection_of_the_right_action_is_negative() -> None:
    """One prompt, one action a position: raising the right action's log-probability lowers the oracle's loss."""
    task, streams = TabularTask(CONFIG), MemberRngs((3,))
    models = task.make_models(streams)
    batch = task.sample(models, streams, 0)
    batch = type(batch)(**{**vars(batch), "actions": batch.labels})
    optimizer = MemberAdam(models.get_parameters(), 0.1)
    oracle = optimizer.compute_gradient(cross_entropy(batch, task.compute_oracle_log_probs(models, batch), CONFIG).loss)
    samples = compute_sample_influence(task, models, batch, optimizer.split_by_parameter(oracle), CONFIG)
    assert float(samples.projection.mean()) < 0


def test_correlations_are_of_what_is_kept_and_have_the_sign_of_the_projection() -> None:
    projection = torch.tensor([[-2.0, -1.0, 0.0, 50.0]])
    helpful = -projection
    kept = torch.tensor([[True, True, True, False]])
    samples = SampleInfluence(projection, helpful, projection, helpful.clamp(max=3), torch.ones(1, 4), kept)
    found = compute_fit_statistics(samples)
    assert float(found["oracle_fit_advantage_correlation"]) == pytest.approx(-1)
    assert float(found["oracle_fit_surprisal_correlation"]) == pytest.approx(1)
    assert float(found["oracle_fit_delight_correlation"]) == pytest.approx(-1)
    assert bool(found["oracle_fit_gate_correlation"].isnan().all())
