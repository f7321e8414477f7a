"""Tests of the influence of samples: it equals that of gradients which are taken one at a time."""

from dataclasses import replace

import pytest
import torch

from sandboxes.toys.optimizer import MemberAdam
from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.token_credit import cross_entropy
from sandboxes.update_rules.training.diagnostics import (
    SampleInfluence,
    compute_fit_statistics,
    compute_sample_influence,
)
from tests.sandboxes.update_rules.tabular import TabularTask

CONFIG = UpdateRuleConfig(batch_size=6, eta=0.5)


def compute_influence(takes_labels: bool = False) -> tuple[SampleInfluence, torch.Tensor, torch.Tensor]:
    """Return samples of a batch, and projections [E, B * T] and log-probabilities from one gradient at a time."""
    task, rngs = TabularTask(CONFIG), MemberRngs((3, 4))
    models = task.make_models(rngs)
    optimizer = MemberAdam(models.weights, 0.1)
    batch = task.sample(models, rngs, 0)
    if takes_labels:
        batch = replace(batch, actions=batch.labels)
    oracle_loss = cross_entropy(batch, task.compute_oracle_log_probs(models, batch), CONFIG).loss
    oracle_gradient = optimizer.compute_gradient(oracle_loss)
    projections = []
    for index in range(batch.actions[0].numel()):
        log_probs = task.compute_logits(models, batch).log_softmax(-1)
        taken_log_probs = log_probs.gather(-1, batch.actions.unsqueeze(-1)).flatten(1)
        projections.append((optimizer.compute_gradient(taken_log_probs[:, index]) * oracle_gradient).sum(1))
    samples = compute_sample_influence(task, models, batch, optimizer.split_by_parameter(oracle_gradient), CONFIG)
    return samples, torch.stack(projections, dim=1), taken_log_probs.detach()


def test_all_projections_equal_those_of_one_gradient_per_sample() -> None:
    samples, projections, taken_log_probs = compute_influence()
    torch.testing.assert_close(samples.projection, projections, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(samples.surprisal, -taken_log_probs)
    torch.testing.assert_close(samples.delight, samples.advantage * -taken_log_probs)
    torch.testing.assert_close(samples.gate, torch.sigmoid(samples.delight / 0.5))
    assert float(projections.abs().max()) > 1e-3


def test_the_projection_of_the_right_action_is_negative() -> None:
    """Raising the log-probability of the right action lowers the loss of the oracle."""
    assert (compute_influence(takes_labels=True)[0].projection.mean(1) < 0).all()


def test_correlations_are_over_kept_samples_and_have_the_sign_of_the_projection() -> None:
    projection = torch.tensor([[-2.0, -1.0, 0.0, 50.0]])
    advantage = -projection
    keep_mask = torch.tensor([[True, True, True, False]])
    samples = SampleInfluence(projection, advantage, projection, advantage.clamp(max=3), torch.ones(1, 4), keep_mask)
    statistics = compute_fit_statistics(samples)
    assert float(statistics["oracle_fit_advantage_correlation"]) == pytest.approx(-1)
    assert float(statistics["oracle_fit_surprisal_correlation"]) == pytest.approx(1)
    assert float(statistics["oracle_fit_delight_correlation"]) == pytest.approx(-1)
    assert bool(statistics["oracle_fit_gate_correlation"].isnan().all())
