"""Losses over episodes and STAPO in the update: passes, ranks, columns, and plug-ins that get the episodes."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.trainers import make_quiet_trainer, run_steps
from tests.oracles import algo as oracle
from tests.trainable.ppo.test_update import (
    BATCH,
    CUT,
    MODEL,
    ORDER,
    TARGETS,
    TEMPERATURE,
    assert_close,
    assert_same_steps,
    compute_logprobs,
    make_backend,
    name_gradients,
    run_update,
)
from trainable.algo.reductions import compute_loss_weights
from trainable.backend.meter import Meter
from trainable.backend.world import World
from trainable.config.own_parts import PartFile, register_file
from trainable.config.sections import ActorConfig
from trainable.ppo import update
from trainable.ppo.update import ActorUpdate, PassInputs, make_passes

KINDS: dict[str, dict[str, Any]] = {
    "gspo": {"policy_loss": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
    "cispo": {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.5},
    "cppo": {"policy_loss": "cppo", "cppo_delta": 0.01, "cppo_delta_b": 0.001},
    "stapo": {"stapo_tau_p": 0.1, "stapo_entropy_quantile": 0.5},
    "gspo with stapo": {"policy_loss": "gspo", "stapo_tau_p": 0.1},
}
# With entropies at random, so that their quantile separates tokens.
NOISY = BATCH._replace(entropies=torch.rand(BATCH.mask.shape, generator=torch.Generator().manual_seed(3)) * BATCH.mask)


def make_update(settings: ActorConfig) -> ActorUpdate:
    return ActorUpdate(MODEL, make_backend(MODEL, torch.optim.SGD(MODEL.parameters(), 0.0)), settings, TEMPERATURE)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gradients_do_not_depend_on_where_passes_are_cut(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ActorConfig(**CUT, **KINDS[name], loss_agg_mode=mode)
    expected, expected_meter = run_update(settings, NOISY)
    plain, _ = run_update(ActorConfig(**CUT, loss_agg_mode=mode), NOISY)
    monkeypatch.setattr(update, "TOKENS_PER_PASS", {"cpu": 37})
    actual, meter = run_update(settings, NOISY)
    assert_same_steps(expected, actual)
    assert meter.compute_means() == pytest.approx(expected_meter.compute_means(), rel=1e-4, abs=1e-6)
    # Another loss than the default.
    assert max(float((a - b).abs().max()) for a, b in zip(actual.steps[0], plain.steps[0], strict=True)) > 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_all_ranks_sum_to_those_of_one(name: str) -> None:
    actor = make_update(ActorConfig(**CUT, **KINDS[name]))
    targets = actor.silence_tokens(NOISY, TARGETS, ORDER, 4)
    arguments = (NOISY, targets, ORDER, "token-mean", 4, NOISY.tokens.shape[1])

    def compute_gradient(passes: Iterable[PassInputs]) -> Tensor:
        MODEL.zero_grad()
        for inputs in passes:
            actor.compute_loss_terms(inputs, Meter())["task"].backward()
        return torch.cat([weight.grad.flatten() for weight in MODEL.parameters()])  # type: ignore[union-attr]

    expected = compute_gradient(make_passes(*arguments))
    rank_gradients = [compute_gradient(make_passes(*arguments, World(rank, 3))) for rank in range(3)]
    assert float((torch.stack(rank_gradients).sum(0) - expected).norm()) < 1e-5 * float(expected.norm())


def test_an_update_with_gspo_is_the_loop_over_its_episodes() -> None:
    settings = ActorConfig(
        **{**CUT, "ppo_mini_batch_size": 12}, policy_loss="gspo", clip_ratio_low=0.05, clip_ratio_high=0.05
    )
    means = run_update(settings)[1].compute_means()
    rows, tokens = zip(*BATCH.mask.nonzero().tolist(), strict=True)
    places = (list(rows), list(tokens))
    columns = (compute_logprobs(BATCH, MODEL), BATCH.logprobs, TARGETS.advantages)
    losses = oracle.gspo(*(column[places].tolist() for column in columns), rows, 0.05, 0.05)
    weights = torch.zeros_like(BATCH.logprobs)
    weights[ORDER] = compute_loss_weights(BATCH.mask[ORDER], "token-mean", 4)
    assert means["pg_loss"] == pytest.approx(float(weights[places] @ torch.tensor(losses)), rel=1e-4)
    assert 0 < means["pg_clipfrac"] < 1
    assert "pg_clipfrac_lower" not in means  # which belongs to the dual clip


# ---------------------------------------------------------------------------- STAPO


def find_silenced(rows: Tensor, settings: ActorConfig) -> Tensor:
    """Find the silenced tokens of a mini-batch by the loop."""
    assert settings.stapo_tau_p is not None
    columns = (NOISY.logprobs, NOISY.entropies, TARGETS.advantages, NOISY.mask)
    places = oracle.spurious_tokens(
        *(column[rows].tolist() for column in columns), settings.stapo_tau_p, settings.stapo_entropy_quantile
    )
    is_silenced = torch.zeros_like(NOISY.mask)
    for row, token in places:
        is_silenced[rows[row], token] = True
    return is_silenced


@pytest.mark.parametrize("mode", ["token-mean", "token-mean-global", "seq-mean-token-mean"])
def test_silenced_tokens_train_as_if_they_were_not_there(mode: str) -> None:
    """Each mini-batch has its own quantile, and the loss is aggregated over the remaining tokens."""
    settings = ActorConfig(**CUT, **KINDS["stapo"], loss_agg_mode=mode)
    recorder, meter = run_update(settings, NOISY)
    is_silenced = sum((find_silenced(rows, settings) for rows in ORDER.split(8)), torch.zeros_like(NOISY.mask))
    assert 3 < int(is_silenced.sum()) < int(NOISY.mask.sum()) / 2
    remaining = NOISY._replace(mask=NOISY.mask & ~is_silenced.bool())
    expected, _ = run_update(ActorConfig(**CUT, loss_agg_mode=mode), remaining)
    for actual, step in zip(name_gradients(recorder, MODEL), name_gradients(expected, MODEL), strict=True):
        assert_close(actual, step)
    fraction = float(is_silenced.sum()) / int(NOISY.mask.sum())
    assert meter.compute_means()["stapo_silenced_fraction"] == pytest.approx(fraction)


def test_silenced_tokens_keep_their_entropy_and_kl_terms() -> None:
    other_terms = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_type": "mse"}
    zeros = TARGETS._replace(advantages=1e-9 * TARGETS.advantages)  # of the same sign: tokens are silenced all the same
    recorder, meter = run_update(ActorConfig(**CUT, **KINDS["stapo"], **other_terms), NOISY, zeros)
    expected, _ = run_update(ActorConfig(**CUT, **other_terms), NOISY, zeros)
    assert meter.compute_means()["stapo_silenced_fraction"] > 0
    assert_same_steps(expected, recorder)


# ---------------------------------------------------------------------------- plug-ins

OWN_LOSSES = """
from trainable.algo import losses

def gspo(logprobs, old_logprobs, advantages, episode_index):
    return losses.gspo_loss(logprobs, old_logprobs, advantages, episode_index, 0.2, 0.28).loss

class Loss:
    def __call__(self, logprobs, old_logprobs, advantages, *, episode_index):
        return losses.gspo_loss(logprobs, old_logprobs, advantages, episode_index, 0.2, 0.28).loss

instance = Loss()
"""


@pytest.mark.parametrize("own_name", ["gspo", "instance"])
def test_a_plug_in_gets_the_episodes_if_it_asks_for_them(own_name: str) -> None:
    file = PartFile("episode_losses.py", OWN_LOSSES)
    register_file(file)
    settings: dict[str, object] = {"algorithm__adv_estimator": "grpo", "actor__lr": 1e-2, "actor__ppo_epochs": 2}
    rows, own_rows = (
        run_steps(make_quiet_trainer(**settings, actor__policy_loss=value), 2)
        for value in ("gspo", f"episode_losses.py:{own_name}#{file.digest}")
    )
    assert [{column: row[column] for column in row if column != "pg_clipfrac"} for row in rows] == own_rows
