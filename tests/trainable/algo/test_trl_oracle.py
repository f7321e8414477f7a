"""Losses, gradients and advantages equal those of TRL's trainers; where definitions differ, the relation is exact."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.scripted import make_random_episodes
from tests.trainable.ppo.test_update import draw_noise, make_backend
from trainable.algo.advantages import grpo, rloo
from trainable.backend.meter import Meter
from trainable.config.sections import ActorConfig
from trainable.models.load import find_model, load_policy
from trainable.ppo.update import ActorUpdate, Targets, TokenFunction, compute_at_trained_tokens, make_passes
from trainable.rollout.episode import Batch, collate

# TRL uses names that transformers has deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

ROWS, GROUP_SIZE, TEMPERATURE, MAX_COMPLETION_LENGTH = 12, 4, 0.8, 50
BASE = find_model("sokoban-tiny")
MODEL = load_policy("sokoban-tiny", torch.device("cpu")).model


def compute_logprobs(batch: Batch) -> Tensor:
    return compute_at_trained_tokens(batch, ROWS, TokenFunction.for_logprobs(MODEL, TEMPERATURE))


def make_batch() -> Batch:
    """Episodes of several turns, with some ratios beyond all clips."""
    batch = collate(make_random_episodes(ROWS, GROUP_SIZE, seed=5, vocab=MODEL.shape.vocab_size))
    # transformers gives no gradient to the input embedding of token 0, the padding, which no text contains.
    batch = batch._replace(tokens=batch.tokens.clamp_min(1))
    noise = draw_noise(batch.logprobs, 6, 0.4)
    noise[:, ::7] -= 2.0
    return batch._replace(logprobs=(compute_logprobs(batch) + noise) * batch.mask)


BATCH = make_batch()
ON_POLICY = BATCH._replace(logprobs=compute_logprobs(BATCH))
WITH_EMPTY_ROW = BATCH._replace(mask=BATCH.mask & (torch.arange(ROWS) != 3)[:, None])
SEQUENCE_ADVANTAGES = draw_noise(BATCH.scores, 7)
REF_LOGPROBS = (ON_POLICY.logprobs + draw_noise(BATCH.logprobs, 8, 0.5)) * BATCH.mask


class Result(NamedTuple):
    """A loss, and its gradient with respect to all weights."""

    loss: float
    gradient: Tensor


def make_result(loss: float, model: torch.nn.Module) -> Result:
    # Both models have the same weights in the same order.
    return Result(loss, torch.cat([weight.grad.flatten() for weight in model.parameters()]))  # type: ignore[union-attr]


def compute_ours(settings: ActorConfig, batch: Batch) -> Result:
    """Sum the terms of the loss over the passes of one optimizer step of the update."""
    targets = Targets(SEQUENCE_ADVANTAGES[:, None] * batch.mask, batch.rewards, batch.rewards, REF_LOGPROBS)
    backend = make_backend(MODEL, torch.optim.SGD(MODEL.parameters(), 0.0))
    actor = ActorUpdate(MODEL, backend, settings, TEMPERATURE)
    cut = (settings.loss_agg_mode, settings.ppo_micro_batch_size_per_gpu, batch.tokens.shape[1])
    passes = make_passes(batch, targets, torch.arange(ROWS), *cut)
    MODEL.zero_grad()
    loss = torch.stack([term for inputs in passes for term in actor.compute_loss_terms(inputs, Meter()).values()]).sum()
    loss.backward()
    return make_result(loss.item(), MODEL)


def make_trl_trainer(name: str, folder: Path, reward: Callable[..., list[float]], **settings: Any) -> Any:
    """Make TRL's trainer of that name, with the weights of MODEL."""
    config = resolve_name(f"trl:{name}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        num_generations=GROUP_SIZE,
        temperature=TEMPERATURE,
        **settings,
    )
    trainer = resolve_name(f"trl:{name}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=resolve_name("datasets:Dataset").from_dict({"prompt": ["#_"]}),
        processing_class=AutoTokenizer.from_pretrained(BASE, padding_side="left"),
    )
    trainer.model.train()
    return trainer


def compute_trl(settings: dict[str, Any], folder: Path, batch: Batch, micro_batches: int) -> Result:
    """Sum the losses of the micro-batches of one optimizer step of GRPOTrainer.

    The completion is all but the first token, and as after calls of tools, a mask leaves out what was not sampled.
    """
    trainer = make_trl_trainer(
        "GRPO",
        folder,
        lambda **_: [],
        max_completion_length=MAX_COMPLETION_LENGTH,
        per_device_train_batch_size=ROWS // micro_batches,
        gradient_accumulation_steps=micro_batches,
        **settings,
    )
    trainer.current_gradient_accumulation_steps = micro_batches
    is_token = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    inputs = {
        "prompt_ids": batch.tokens[:, :1],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": batch.tokens[:, 1:],
        "completion_mask": is_token[:, 1:].long(),
        "tool_mask": batch.mask[:, 1:].long(),
        "advantages": SEQUENCE_ADVANTAGES,
        "old_per_token_logps": batch.logprobs[:, 1:],
        "ref_per_token_logps": REF_LOGPROBS[:, 1:],
    }
    total = 0.0
    for rows in torch.arange(ROWS).chunk(micro_batches):
        micro_batch = {name: tensor[rows] for name, tensor in inputs.items()}
        loss = trainer.compute_loss(trainer.model, {**micro_batch, "num_items_in_batch": batch.mask.sum()})
        loss.backward()
        total += loss.item()
    return make_result(total, trainer.model)


class Case(NamedTuple):
    """Settings of TRL's GRPOConfig and of our ActorConfig, and TRL's loss divided by ours."""

    trl: dict[str, Any]
    ours: dict[str, Any]
    factor: float = 1.0
    micro_batches: int = 1
    batch: Batch = BATCH


# Both clip ranges are .2, without a dual clip, unless a case says otherwise: the defaults of TRL.
DEFAULTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e6}
BNPO, GRPO, DAPO = ({"loss_agg_mode": mode} for mode in ("token-mean", "seq-mean-token-mean", "token-mean-global"))
GSPO = {"policy_loss": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
TRL_GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1}
CISPO = {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.3}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
CASES = {
    "grpo": Case({"loss_type": "grpo"}, GRPO),
    "grpo, micro-batches": Case({"loss_type": "grpo"}, GRPO, micro_batches=3),
    "bnpo": Case({"loss_type": "bnpo"}, BNPO),
    "bnpo, micro-batches": Case({"loss_type": "bnpo"}, BNPO, micro_batches=3),
    "dapo, micro-batches": Case({"loss_type": "dapo"}, DAPO, micro_batches=3),
    # TRL divides by the longest completion that is allowed; ours by nothing, or by the longest episode of the batch.
    "dr_grpo": Case({"loss_type": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum"}, 1 / MAX_COMPLETION_LENGTH),
    "dr_grpo, norm": Case(
        {"loss_type": "dr_grpo"},
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        BATCH.tokens.shape[1] / (ROWS * MAX_COMPLETION_LENGTH),
    ),
    # TRL counts a completion without trained tokens in the mean over sequences; ours leaves it out.
    "grpo, empty completion": Case({"loss_type": "grpo"}, GRPO, (ROWS - 1) / ROWS, batch=WITH_EMPTY_ROW),
    "dapo, empty completion": Case({"loss_type": "dapo"}, DAPO, batch=WITH_EMPTY_ROW),
    "two clip ranges": Case(
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.4},
        {**DAPO, "clip_ratio_low": 0.1, "clip_ratio_high": 0.4},
    ),
    # For delta of at least 1 + epsilon_high, as TRL's documentation asks.
    "dual clip": Case({"loss_type": "grpo", "delta": 1.5}, {**GRPO, "clip_ratio_c": 1.5}),
    "gspo": Case({"loss_type": "grpo", **TRL_GSPO}, {**GRPO, **GSPO}),
    "gspo, dapo": Case({"loss_type": "dapo", **TRL_GSPO}, {**DAPO, **GSPO}, micro_batches=3),
    # In TRL, there is no lower bound, epsilon_high is the largest weight, and losses are aggregated as with dapo.
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 1.3}, {**DAPO, **CISPO}, micro_batches=3),
    "kl": Case(
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}, {**GRPO, **KL, "kl_loss_type": "k3"}
    ),
    # By default, TRL multiplies k3 by the ratio. At ratio 1, the product has the gradient of k2, as our k3+.
    "kl, bias correction": Case(
        {"loss_type": "grpo", "beta": 0.3}, {**GRPO, **KL, "kl_loss_type": "k3+"}, batch=ON_POLICY
    ),
    # Whatever its loss type, TRL averages the entropy over the tokens of each micro-batch.
    "entropy": Case({"loss_type": "bnpo", "entropy_coef": 0.3}, {**BNPO, "entropy_coeff": 0.3}, micro_batches=3),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradient_are_those_of_trl(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    settings = ActorConfig(
        **{**DEFAULTS, **case.ours}, ppo_mini_batch_size=ROWS, ppo_micro_batch_size_per_gpu=ROWS // case.micro_batches
    )
    expected = compute_trl(case.trl, tmp_path, case.batch, case.micro_batches)
    actual = compute_ours(settings, case.batch)
    assert case.factor * actual.loss == pytest.approx(expected.loss, rel=1e-5, abs=5e-6)
    error = (case.factor * actual.gradient - expected.gradient).norm() / expected.gradient.norm()
    assert float(error) < 2e-5


# A group of usual scores, one of a small spread, which TRL scales less, and one without a spread.
SCORES = torch.tensor([10.9, -0.1, 0.3, -1.2, 0.5, 0.501, 0.5, 0.499, 1.0, 1.0, 1.0, 1.0])
GROUP_IDS = torch.arange(ROWS) // GROUP_SIZE
TRL_STD_FLOOR = 1e-4
ADVANTAGES: dict[str, tuple[str, dict[str, Any], Callable[..., Tensor], dict[str, Any]]] = {
    "group": ("GRPO", {"scale_rewards": "group"}, grpo, {"norm_by_std": True, "std_floor": TRL_STD_FLOOR}),
    "batch": (
        "GRPO",
        {"scale_rewards": "batch"},
        grpo,
        {"norm_by_std": True, "has_batch_std": True, "std_floor": TRL_STD_FLOOR},
    ),
    "none": ("GRPO", {"scale_rewards": "none"}, grpo, {"norm_by_std": False}),
    "rloo": ("RLOO", {}, rloo, {}),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_trl_with_its_larger_constant_beside_the_std(name: str, tmp_path: Path) -> None:
    trainer_name, trl_settings, estimator, settings = ADVANTAGES[name]
    trainer = make_trl_trainer(
        trainer_name,
        tmp_path,
        lambda **_: SCORES.tolist(),
        max_completion_length=2,
        per_device_train_batch_size=ROWS,
        **trl_settings,
    )
    expected = trainer._generate_and_score_completions([{"prompt": "#_"} for _ in range(ROWS)])["advantages"]
    actual = estimator(SCORES, GROUP_IDS, torch.ones(ROWS, 1, dtype=torch.bool), **settings)[:, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
