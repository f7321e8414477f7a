"""The sequence tasks: batches, candidates, exact expected rewards, evaluation, and what a member draws."""

from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.trainable.sandbox.tasks import oracles
from trainable.sandbox.batch.rngs import MemberRngs
from trainable.sandbox.batch.rollouts import Candidates, Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.models.transformer import TransformerEnsemble
from trainable.sandbox.tasks.make import make_task
from trainable.sandbox.tasks.sequences import SequenceTask

SMALL = {"batch_size": 12, "group_size": 4, "seq_len": 4, "score_len": 2, "d_model": 16}


def started(
    seeds: tuple[int, ...] = (3, 4), **settings: object
) -> tuple[SequenceTask, TransformerEnsemble, MemberRngs]:
    task = make_task(UpdateRuleConfig(**{"task": "token_reversal", **SMALL, **settings}))
    assert isinstance(task, SequenceTask)
    streams = MemberRngs(seeds)
    return task, task.make_models(streams), streams


def of_member(rollouts: Rollouts, member: int) -> dict[str, Tensor]:
    found = {}
    for field in fields(Rollouts):
        value = getattr(rollouts, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value[member]
        elif isinstance(value, Candidates):
            found |= {part.name: getattr(value, part.name)[member] for part in fields(Candidates)}
    return found | {name: value[member] for name, value in rollouts.scalars.items()}


@pytest.mark.parametrize("method", ["DG", "GRPO", "TPOToken"])
@pytest.mark.parametrize("task", ["token_reversal", "masked_reversal"])
def test_a_batch_is_what_its_fields_say(task: str, method: str) -> None:
    game, models, streams = started(task=task, method=method)
    rollouts = game.sample(models, streams, 2)
    prompts, separators, tokens = rollouts.observations.split((4, 1, 4), dim=-1)
    assert (separators == 2).all()
    assert torch.equal(tokens, rollouts.actions)
    log_probs = game.compute_log_probs(models, rollouts).detach()
    torch.testing.assert_close(
        rollouts.behavior_log_probs, log_probs.gather(-1, tokens[..., None])[..., 0], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(rollouts.behavior_baseline, log_probs.exp().square().sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        game.compute_logits(models, rollouts).log_softmax(-1).detach(), log_probs, atol=1e-6, rtol=1e-6
    )
    for member in range(2):
        for row in range(12):
            prompt, answer = prompts[member, row].tolist(), tokens[member, row].tolist()
            assert rollouts.labels[member, row].tolist() == oracles.right_answer(task, prompt, 2)
            expected = oracles.reward(task, prompt, answer, 2, 2, False)
            assert float(rollouts.rewards[member, row]) == pytest.approx(expected, abs=1e-6)
    assert (rollouts.score_mask is None) == (task == "token_reversal")
    if rollouts.score_mask is not None:
        assert rollouts.score_mask.tolist() == [[[False, False, True, True]] * 12] * 2
    assert (rollouts.candidates is None) == (method != "TPOToken")
    assert rollouts.group_size == (4 if method == "GRPO" else None)
    assert rollouts.age.tolist() == [0, 0]
    assert rollouts.expected_reward is None


def test_groups_share_a_prompt_and_uniform_ones_are_left_out() -> None:
    game, models, streams = started(method="GRPO", batch_size=40)
    rollouts = game.sample(models, streams, 1)
    prompts = rollouts.observations[..., :4].unflatten(1, (10, 4))
    assert (prompts == prompts[:, :, :1]).all()
    assert len({tuple(prompt) for prompt in prompts[0, :, 0].tolist()}) > 1
    for member in range(2):
        mixed = oracles.mixed_groups(rollouts.rewards[member].tolist(), 4)
        assert rollouts.keep_mask[member].tolist() == [one for one in mixed for _ in range(4)]
        assert float(rollouts.scalars["informative_group_rate"][member]) == pytest.approx(sum(mixed) / 10, abs=1e-6)


@pytest.mark.parametrize("method", ["DG", "GRPO", "TPOToken"])
def test_a_member_draws_the_same_whoever_is_beside_it(method: str) -> None:
    game, models, streams = started((3, 4, 5), method=method)
    together = game.sample(models, streams, 6)
    for member, seed in enumerate((3, 4, 5)):
        game, models, streams = started((seed,), method=method)
        alone, beside = of_member(game.sample(models, streams, 6), 0), of_member(together, member)
        assert alone.keys() == beside.keys()
        for name, value in alone.items():
            torch.testing.assert_close(beside[name], value, atol=1e-5 if value.is_floating_point() else 0, rtol=0)


def test_prompts_and_answers_are_those_of_every_other_rule() -> None:
    game, models, streams = started(method="DG")
    plain = game.sample(models, streams, 3)
    candidates = started(method="TPOToken")[0].sample(models, streams, 3)
    assert torch.equal(plain.observations, candidates.observations)
    grouped = started(method="GRPO")[0].sample(models, streams, 3)
    assert torch.equal(grouped.observations[:, ::4, :4], plain.observations[:, :3, :4])
    noisy = started(method="DG", reward_noise=0.5, reward_noise_mode="label_flip")[0].sample(models, streams, 3)
    assert torch.equal(noisy.observations, plain.observations)
    assert not torch.equal(noisy.rewards, plain.rewards)
    assert not torch.equal(game.sample(models, streams, 4).observations, plain.observations)
    game.evaluate(models, streams, 3)
    assert torch.equal(game.sample(models, streams, 3).observations, plain.observations)


@pytest.mark.parametrize("task", ["token_reversal", "masked_reversal"])
def test_candidates_are_next_tokens_of_each_prefix(task: str) -> None:
    game, models, streams = started(task=task, method="GRPOToken")
    rollouts = game.sample(models, streams, 2)
    found = rollouts.candidates
    assert found is not None
    assert found.actions.shape == (2, 12, 4, 4)
    assert torch.equal(found.actions[..., 0], rollouts.actions)
    for position in range(4):
        prefix = rollouts.observations[..., : 5 + position]
        repeated = models.compute_logits(prefix.repeat_interleave(4, dim=1), 1).log_softmax(-1).detach()[:, :, 0]
        actions = found.actions[:, :, position].flatten(1)
        expected = repeated.gather(-1, actions[..., None])[..., 0]
        torch.testing.assert_close(found.log_probs[:, :, position].flatten(1), expected, atol=1e-5, rtol=1e-5)
        right = found.actions[:, :, position] == rollouts.labels[:, :, position, None]
        scored = task == "token_reversal" or position >= 2
        assert torch.equal(found.rewards[:, :, position], (right & scored).float())


def test_candidates_come_with_the_policys_probabilities() -> None:
    game, models, streams = started((3,), method="TPOToken", batch_size=600, group_size=8)
    found = game.sample(models, streams, 1)
    assert found.candidates is not None
    expected = game.compute_log_probs(models, found).detach().exp().mean((0, 1, 2))
    drawn = torch.bincount(found.candidates.actions[..., 1:].flatten(), minlength=3) / (600 * 4 * 7)
    assert drawn.tolist() == pytest.approx(expected.tolist(), abs=0.015)
    taken = torch.bincount(found.actions.flatten(), minlength=3) / (600 * 4)
    assert taken.tolist() == pytest.approx(expected.tolist(), abs=0.03)


def test_the_expected_reward_is_the_sum_over_all_answers() -> None:
    game, models, streams = started(method="PMDMean", binary_reward=True, batch_size=3, seq_len=3)
    rollouts = game.sample(models, streams, 1)
    assert rollouts.expected_reward is not None
    answers = torch.tensor(list(product(range(3), repeat=3)))
    for member, row in product(range(2), range(3)):
        prompt = rollouts.observations[:, row : row + 1, :4].expand(2, 27, 4)
        whole = torch.cat((prompt, answers.expand(2, 27, 3)), dim=-1)
        log_probs = models.compute_logits(whole[..., :-1], 3).log_softmax(-1).detach()[member]
        probability = log_probs.gather(-1, answers[..., None])[..., 0].sum(-1).exp()
        reward = (answers == rollouts.labels[member, row]).all(-1).float()
        assert float(probability.sum()) == pytest.approx(1, abs=1e-5)
        mean = float((probability * reward).sum())
        assert float(rollouts.expected_reward[member, row]) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"binary_reward": False},
        {"method": "MaxRL"},
        {"reward_noise": 0.1, "reward_noise_mode": "random_reward"},
        {"task": "masked_reversal"},
    ],
)
def test_elsewhere_the_expected_reward_is_unknown(settings: dict[str, object]) -> None:
    game, models, streams = started(**{"method": "DG", "binary_reward": True, **settings})
    assert game.sample(models, streams, 1).expected_reward is None


@pytest.mark.parametrize(
    ("task", "binary"),
    [
        ("token_reversal", False),
        ("token_reversal", True),
        ("masked_reversal", False),
        ("chain_reversal", False),
        ("chain_arithmetic", False),
        ("format_answer", False),
    ],
)
def test_evaluation_is_that_of_a_literal_greedy_decoder(task: str, binary: bool) -> None:
    game, models, streams = started(task=task, binary_reward=binary, vocab_size=3)
    found = game.evaluate(models, streams, 5)
    prompts = streams.integers("sandbox_evaluation", 5, high=3, shape=(1000, 4))
    for member in range(2):
        one = TransformerEnsemble(models.shape, {name: w[member : member + 1] for name, w in models.weights.items()})
        answers, entropies = greedy(one, torch.cat((prompts[member], torch.full((1000, 1), 3)), dim=-1))
        rights = [
            [a == b for a, b in zip(answer, oracles.right_answer(task, prompt, 3), strict=True)]
            for prompt, answer in zip(prompts[member].tolist(), answers, strict=True)
        ]
        counted = [right[2:] if task == "masked_reversal" else right for right in rights]
        whole = binary or task not in ("token_reversal", "masked_reversal")
        wrong = [not all(right) for right in counted] if whole else [not one for right in counted for one in right]
        expected = {
            "test_error": sum(wrong) / len(wrong),
            "entropy": sum(entropies) / len(entropies),
            "greedy_separator_rate": sum(answer.count(3) for answer in answers) / 4000,
        }
        if task == "masked_reversal":
            expected["test_error_unscored"] = sum(not one for right in rights for one in right[:2]) / 2000
        if task in ("chain_reversal", "chain_arithmetic", "format_answer"):
            pairs = zip(prompts[member].tolist(), answers, strict=True)
            expected["chain_reward"] = sum(oracles.reward(task, *pair, 3, 4, False) for pair in pairs) / 1000
        assert {name: float(value[member]) for name, value in found.items()} == pytest.approx(expected, abs=1e-4)


def greedy(model: TransformerEnsemble, sequences: Tensor) -> tuple[list[list[int]], list[float]]:
    """Answers of 4 tokens and the entropies at each of them, by a whole pass a token."""
    entropies: list[float] = []
    for _ in range(4):
        ahead = model.compute_logits(sequences[None], sequences.shape[-1])[0, :, -1].softmax(-1).detach()
        entropies += (-(ahead * ahead.log()).sum(-1)).tolist()
        sequences = torch.cat((sequences, ahead.argmax(-1, keepdim=True)), dim=-1)
    return sequences[:, -4:].tolist(), entropies


def test_the_oracle_reads_the_right_tokens() -> None:
    game, models, streams = started(method="CE")
    rollouts = game.sample(models, streams, 1)
    prompts = rollouts.observations[..., :5]
    corrected = replace(rollouts, observations=torch.cat((prompts, rollouts.labels), dim=-1))
    expected = game.compute_log_probs(models, corrected)
    torch.testing.assert_close(game.compute_oracle_log_probs(models, rollouts), expected, atol=1e-6, rtol=1e-6)
    assert game.compute_oracle_log_probs(models, rollouts).requires_grad


@pytest.mark.parametrize("mode", ["false_positive_rare_token", "random_reward"])
def test_rewards_are_corrupted_by_the_members_own_noise(mode: str) -> None:
    game, models, streams = started(method="DG", reward_noise=0.5, reward_noise_mode=mode, batch_size=40)
    rollouts = game.sample(models, streams, 2)
    uniforms = streams.uniform("sandbox_noise", 2, shape=(40, 2))
    for member, row in product(range(2), range(40)):
        prompt, answer = rollouts.observations[member, row, :4].tolist(), rollouts.actions[member, row].tolist()
        reward = oracles.reward("token_reversal", prompt, answer, 2, 4, False)
        draw, other = uniforms[member, row].tolist()
        expected = oracles.noisy(mode, reward, prompt, answer, 2, draw, 0.5, other)
        assert float(rollouts.rewards[member, row]) == pytest.approx(expected, abs=1e-6)
