"""The update equals tests.oracles.update: a forward pass of transformers and autograd, one micro-batch at a time."""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_episodes, make_random_model
from tests.oracles import update as oracle
from trainable.algo.batching import order_length_stratified
from trainable.algo.names import LOSS_AGG_MODES
from trainable.backend.meter import Meter
from trainable.backend.torch_backend import TorchBackend
from trainable.config.sections import ActorConfig, CriticConfig
from trainable.models.interface import ValueModel
from trainable.models.qwen2 import Qwen2, Qwen2Trunk
from trainable.ppo import update
from trainable.ppo.update import ActorUpdate, Targets, TokenFunction, compute_at_trained_tokens, update_critic
from trainable.rollout.episode import Batch, collate

TEMPERATURE = 0.8
CUT = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4, "grad_clip": 1e9}


class Recorder(torch.optim.SGD):
    """Record the gradients of each step, and change no weight."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)
        self.steps: list[list[Tensor]] = []

    def step(self, closure: None = None) -> None:
        self.steps.append([weight.grad.clone() for group in self.param_groups for weight in group["params"]])


def make_backend(network: nn.Module, optimizer: torch.optim.Optimizer) -> TorchBackend:
    """The backend of one network."""
    return TorchBackend("optimizer", {"network": network}, optimizer, CUT["grad_clip"])


def draw_noise(like: Tensor, seed: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


MODEL = make_random_model(make_qwen2_shape(), seed=1)
REFERENCE = copy.deepcopy(MODEL)
for number, weight in enumerate(REFERENCE.parameters()):
    weight.data += draw_noise(weight, number, 0.1)
CRITIC = ValueModel(Qwen2Trunk(make_qwen2_shape()))
CRITIC.model.load_state_dict(make_random_model(make_qwen2_shape(), seed=3).model.state_dict())


def compute_logprobs(batch: Batch, model: Qwen2) -> Tensor:
    return compute_at_trained_tokens(batch, 3, TokenFunction.for_logprobs(model, TEMPERATURE))


def make_batch(count: int = 12) -> Batch:
    """Episodes whose old log-probs lie around the model's, with some ratios beyond the clips and the dual clip."""
    batch = collate(make_random_episodes(count, 4, seed=5))
    noise = draw_noise(batch.logprobs, 6, 0.4)
    noise[:, ::7] -= 2.0
    return batch._replace(logprobs=(compute_logprobs(batch, MODEL) + noise) * batch.mask)


BATCH = make_batch()
ORDER = order_length_stratified(BATCH.lengths)
VALUES = compute_at_trained_tokens(BATCH, 4, TokenFunction(CRITIC.model, CRITIC.score))
TARGETS = Targets(
    advantages=draw_noise(BATCH.logprobs, 7) * BATCH.mask,
    returns=(VALUES + draw_noise(VALUES, 8)) * BATCH.mask,
    values=(VALUES + draw_noise(VALUES, 9, 0.6)) * BATCH.mask,
    ref_logprobs=compute_logprobs(BATCH, REFERENCE),
)


def run_update(
    settings: ActorConfig,
    batch: Batch = BATCH,
    targets: Targets = TARGETS,
    reference: Qwen2 | None = REFERENCE,
    head: nn.Module | None = None,
) -> tuple[Recorder, Meter]:
    networks: dict[str, nn.Module] = {"actor": MODEL, **({} if head is None else {"head": head})}
    recorder = Recorder(weight for network in networks.values() for weight in network.parameters())
    backend = TorchBackend("actor_optimizer", networks, recorder, settings.grad_clip)
    actor = ActorUpdate(MODEL, backend, settings, TEMPERATURE, reference, head, 0.01, 0.5)
    return recorder, actor.run(batch, targets, order_length_stratified(batch.lengths))


def name_gradients(recorder: Recorder, model: nn.Module) -> list[dict[str, Tensor]]:
    names = [name for name, _ in model.named_parameters()]
    return [dict(zip(names, gradients, strict=True)) for gradients in recorder.steps]


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-5 * max(1.0, size), msg=name)


def assert_same_steps(one: Recorder, other: Recorder) -> None:
    for gradients, other_gradients in zip(name_gradients(one, MODEL), name_gradients(other, MODEL), strict=True):
        assert_close(gradients, other_gradients)


def compare(settings: ActorConfig, batch: Batch = BATCH) -> None:
    """Compare the gradients of both mini-batches (8 and 4 sequences), and every mean that the meter reports."""
    recorder, meter = run_update(settings, batch)
    twin, reference = make_hub_twin(MODEL), make_hub_twin(REFERENCE)
    expected = [
        oracle.compute_actor_step(twin, reference, batch, TARGETS, rows, settings, TEMPERATURE)
        for rows in ORDER.split(8)
    ]
    for actual, step in zip(name_gradients(recorder, MODEL), expected, strict=True):
        assert_close(actual, step.gradients)
    means = meter.compute_means()
    for name in ("pg_loss", "entropy_loss", *(["kl_loss"] if settings.use_kl_loss else [])):
        assert means[name] == pytest.approx(sum(step.losses[name] for step in expected) / 2, rel=1e-4, abs=1e-6), name
    tokens = [int(batch.mask[rows].sum()) for rows in ORDER.split(8)]
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        total = sum(step.losses[name] * count for step, count in zip(expected, tokens, strict=True))
        assert means[name] == pytest.approx(total / sum(tokens), rel=1e-4, abs=1e-6), name
    assert means["actor_grad_norm"] == pytest.approx(sum(map(oracle.compute_norm, expected)) / 2, rel=1e-3)
    assert ("kl_loss" in means) == settings.use_kl_loss


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_loss_is_the_published_one_in_every_aggregation(mode: str) -> None:
    kl_settings = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "low_var_kl"}
    compare(ActorConfig(**CUT, **kl_settings, loss_agg_mode=mode, entropy_coeff=0.3))


@pytest.mark.parametrize("kl_type", ["kl", "abs", "mse", "full", "low_var_kl+"])
def test_the_kl_term_is_the_published_one_of_every_kind(kl_type: str) -> None:
    compare(ActorConfig(**CUT, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type=kl_type))


@pytest.mark.parametrize("settings", [{}, {"entropy_coeff": -0.5}, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.6}])
def test_the_loss_without_kl(settings: dict[str, float]) -> None:
    compare(ActorConfig(**CUT, **settings))


def test_the_batch_reaches_both_clips_and_every_epoch_repeats_all_mini_batches() -> None:
    recorder, meter = run_update(ActorConfig(**CUT, ppo_epochs=3))
    means = meter.compute_means()
    assert means["pg_clipfrac"] > 0.1
    assert means["pg_clipfrac_lower"] > 0.02
    assert meter.optimizer_steps == len(recorder.steps) == 6
    assert meter.tokens == 3 * int(BATCH.mask.sum())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradients_do_not_depend_on_where_passes_are_cut(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ActorConfig(**CUT, loss_agg_mode=mode, entropy_coeff=0.1, use_kl_loss=True, kl_loss_type="mse")
    expected, _ = run_update(settings)
    for tokens in (1, 37):
        monkeypatch.setattr(update, "TOKENS_PER_PASS", {"cpu": tokens})
        actual, _ = run_update(settings)
        assert_same_steps(expected, actual)


@pytest.mark.parametrize("chunking", [True, False])
@pytest.mark.parametrize("kl_type", ["full", "low_var_kl"])
def test_gradients_do_not_depend_on_chunks_of_the_vocabulary(
    kl_type: str, chunking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ActorConfig(
        **CUT, entropy_coeff=0.5, use_kl_loss=True, kl_loss_type=kl_type, entropy_from_logits_with_chunking=chunking
    )
    expected, meter = run_update(settings)
    monkeypatch.setattr(update, "CHUNK_ELEMENTS", 7 * 23)
    actual, actual_meter = run_update(settings)
    assert_same_steps(expected, actual)
    assert actual_meter.compute_means() == pytest.approx(meter.compute_means(), rel=1e-4, abs=1e-6)


# ---------------------------------------------------------------------------- the policy that sampled


def make_on_policy_batch() -> Batch:
    return BATCH._replace(logprobs=compute_logprobs(BATCH, MODEL))


def shift_old_logprobs(batch: Batch, nats: float, every: int = 1) -> Batch:
    """Add `nats` to the old log-probs of every `every`-th position."""
    shifts = torch.zeros_like(batch.logprobs)
    shifts[:, ::every] = nats
    return batch._replace(logprobs=(batch.logprobs + shifts) * batch.mask)


@pytest.mark.parametrize("nats", [-50.0, -3.0, 0.0, 3.0, 50.0])
def test_ppo_kl_has_the_sign_of_the_old_log_prob_and_counts_50_nats_as_20(nats: float) -> None:
    _, meter = run_update(ActorConfig(**CUT), shift_old_logprobs(make_on_policy_batch(), nats))
    means = meter.compute_means()
    assert means["ppo_kl"] == pytest.approx(max(-20.0, min(20.0, nats)), abs=1e-5)
    if nats == 0:  # the policy is the one that sampled
        assert means["pg_clipfrac"] == means["pg_clipfrac_lower"] == 0


@pytest.mark.parametrize("nats", [-50.0, 50.0])
def test_the_update_of_far_old_log_probs_is_the_published_one(nats: float) -> None:
    compare(ActorConfig(**CUT), shift_old_logprobs(BATCH, nats, every=5))


# ---------------------------------------------------------------------------- optimizer steps


def test_the_gradient_is_clipped_and_its_norm_reported_before() -> None:
    recorder, meter = run_update(ActorConfig(**{**CUT, "grad_clip": 0.05}))
    unclipped_recorder, _ = run_update(ActorConfig(**CUT))
    for clipped_gradients, gradients in zip(recorder.steps, unclipped_recorder.steps, strict=True):
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert norm > 0.1
        for a, b in zip(clipped_gradients, gradients, strict=True):
            torch.testing.assert_close(a, b * 0.05 / norm, rtol=1e-3, atol=1e-6)
    assert meter.compute_means()["actor_grad_norm"] > 0.1


def make_adam(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def test_a_skipped_step_leaves_the_others_alone() -> None:
    bad_row = int(ORDER[0])
    advantages = TARGETS.advantages.clone()
    advantages[bad_row, int(BATCH.mask[bad_row].nonzero()[0])] = float("nan")
    model, expected_model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    update, expected_update = (
        ActorUpdate(each, make_backend(each, make_adam(each)), ActorConfig(**CUT), TEMPERATURE)
        for each in (model, expected_model)
    )
    meter = update.run(BATCH, TARGETS._replace(advantages=advantages), ORDER)
    assert (meter.optimizer_steps, meter.skipped_steps) == (2, 1)
    expected_meter = expected_update.run(BATCH, TARGETS, ORDER[8:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected_model.parameters(), strict=True))
    assert meter.compute_means()["actor_grad_norm"] == pytest.approx(expected_meter.compute_means()["actor_grad_norm"])


# ---------------------------------------------------------------------------- the critic


CRITIC_CUT = CriticConfig(**CUT)


def make_hub_critic(critic: ValueModel) -> tuple[nn.Module, nn.Linear]:
    trunk = Qwen2(critic.shape)
    trunk.model.load_state_dict(critic.model.state_dict())
    head = nn.Linear(critic.shape.hidden_size, 1)
    head.load_state_dict(critic.score.state_dict())
    return make_hub_twin(trunk), head


def test_the_value_loss_is_the_published_one() -> None:
    recorder = Recorder(CRITIC.parameters())
    meter = update_critic(CRITIC, make_backend(CRITIC, recorder), BATCH, TARGETS, ORDER, CRITIC_CUT)
    twin, head = make_hub_critic(CRITIC)
    expected = [oracle.compute_critic_step(twin, head, BATCH, TARGETS, rows, CRITIC_CUT) for rows in ORDER.split(8)]
    for actual, step in zip(name_gradients(recorder, CRITIC), expected, strict=True):
        assert_close(actual, step.gradients)
    means = meter.compute_means()
    assert means["vf_loss"] == pytest.approx(sum(step.losses["vf_loss"] for step in expected) / 2, rel=1e-4)
    tokens = [int(BATCH.mask[rows].sum()) for rows in ORDER.split(8)]
    clipped_tokens = sum(step.losses["vf_clipfrac"] * count for step, count in zip(expected, tokens, strict=True))
    assert means["vf_clipfrac"] == pytest.approx(clipped_tokens / sum(tokens))
    assert 0.1 < means["vf_clipfrac"] < 0.9
    assert means["critic_grad_norm"] > 0


def test_on_a_shared_trunk_the_value_loss_joins_with_its_weight() -> None:
    settings = ActorConfig(**CUT, entropy_coeff=0.1)
    recorder, meter = run_update(settings, head=CRITIC.score)
    twin = make_hub_twin(MODEL)
    head = nn.Linear(16, 1)
    head.load_state_dict(CRITIC.score.state_dict())
    rows = ORDER[:8]
    policy_gradients = oracle.compute_actor_step(twin, None, BATCH, TARGETS, rows, settings, TEMPERATURE).gradients
    value_gradients = oracle.compute_critic_step(twin, head, BATCH, TARGETS, rows, CRITIC_CUT).gradients
    *trunk_gradients, weight_gradient, bias_gradient = recorder.steps[0]
    actual = dict(zip(dict(MODEL.named_parameters()), trunk_gradients, strict=True))
    assert_close(actual, {name: policy_gradients[name] + 0.01 * value_gradients[name] for name in actual})
    assert_close(
        {"w": weight_gradient, "b": bias_gradient},
        {"w": 0.01 * value_gradients["score.weight"], "b": 0.01 * value_gradients["score.bias"]},
    )
    assert {"vf_loss", "vf_clipfrac", "pg_loss"} <= set(meter.compute_means())


# ---------------------------------------------------------------------------- passes without gradients


@pytest.mark.parametrize("rows_per_pass", [1, 5, 100])
def test_numbers_at_trained_tokens_are_those_of_transformers(rows_per_pass: int) -> None:
    with torch.no_grad():
        logprobs = (make_hub_twin(MODEL)(input_ids=BATCH.tokens).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
        expected = torch.zeros(BATCH.tokens.shape)
        expected[:, 1:] = logprobs.gather(-1, BATCH.tokens[:, 1:, None])[..., 0]
        twin, head = make_hub_critic(CRITIC)
        values = torch.zeros(BATCH.tokens.shape)
        values[:, 1:] = head(twin.model(input_ids=BATCH.tokens).last_hidden_state)[:, :-1, 0]
    actual = compute_at_trained_tokens(BATCH, rows_per_pass, TokenFunction.for_logprobs(MODEL, TEMPERATURE))
    torch.testing.assert_close(actual, expected * BATCH.mask, rtol=1e-5, atol=1e-5)
    actual = compute_at_trained_tokens(BATCH, rows_per_pass, TokenFunction(CRITIC.model, CRITIC.score))
    torch.testing.assert_close(actual, values * BATCH.mask, rtol=1e-5, atol=1e-5)
    assert not actual.requires_grad


def test_all_tensors_are_on_the_device_of_the_batch() -> None:
    """As in test_qwen2, a tensor that is created without a device lands on `meta`."""
    settings = ActorConfig(**CUT, entropy_coeff=0.1, use_kl_loss=True, kl_loss_type="low_var_kl")
    expected, _ = run_update(settings, head=CRITIC.score)
    rows = torch.arange(len(BATCH.lengths))
    with torch.device("meta"):
        actual, _ = run_update(settings, head=CRITIC.score)
        update_critic(CRITIC, make_backend(CRITIC, Recorder(CRITIC.parameters())), BATCH, TARGETS, rows, CRITIC_CUT)
        logprobs = compute_logprobs(BATCH, MODEL)
    assert all(torch.equal(a, b) for a, b in zip(actual.steps[0], expected.steps[0], strict=True))
    assert logprobs.device.type == "cpu"
