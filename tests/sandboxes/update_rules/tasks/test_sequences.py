"""Tests of the sequence tasks: batches, candidates, exact expected rewards, evaluation, and draws of a member."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from sandboxes.toys.rngs import MemberRngs
from sandboxes.toys.transformer import TransformerEnsemble
from sandboxes.update_rules.config.settings import SEQUENCE_TASKS, UpdateRuleConfig
from sandboxes.update_rules.rollouts import flatten_rollouts
from sandboxes.update_rules.tasks.sequences import SequenceTask
from sandboxes.update_rules.training.make import make_task
from tests.sandboxes.update_rules.tasks import oracles

SMALL = {"batch_size": 12, "group_size": 4, "seq_len": 4, "score_len": 2, "d_model": 16}


def make_task_and_models(
    seeds: tuple[int, ...] = (3, 4), **settings: object
) -> tuple[SequenceTask, TransformerEnsemble, MemberRngs]:
    task = make_task(UpdateRuleConfig(**{"task": "token_reversal", **SMALL, **settings}))
    rngs = MemberRngs(seeds)
    return task, task.make_models(rngs), rngs


@pytest.mark.parametrize("method", ["DG", "GRPO", "TPOToken"])
@pytest.mark.parametrize("task", ["token_reversal", "masked_reversal"])
def test_the_fields_of_a_batch_are_consistent(task: str, method: str) -> None:
    sequence_task, models, rngs = make_task_and_models(task=task, method=method)
    rollouts = sequence_task.sample(models, rngs, 2)
    prompts, separators, tokens = rollouts.observations.split((4, 1, 4), dim=-1)
    assert (separators == 2).all()
    assert torch.equal(tokens, rollouts.actions)
    log_probs = sequence_task.compute_logits(models, rollouts).log_softmax(-1).detach()
    torch.testing.assert_close(
        rollouts.behavior_log_probs, log_probs.gather(-1, tokens[..., None])[..., 0], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(rollouts.behavior_baseline, log_probs.exp().square().sum(-1), atol=1e-5, rtol=1e-5)
    for member in range(2):
        for row in range(12):
            prompt, answer = prompts[member, row].tolist(), tokens[member, row].tolist()
            assert rollouts.labels[member, row].tolist() == oracles.make_right_answer(task, prompt, 2)
            expected = oracles.compute_reward(task, prompt, answer, 2, 2, False)
            assert float(rollouts.rewards[member, row]) == pytest.approx(expected, abs=1e-6)
    assert (rollouts.score_mask is None) == (task == "token_reversal")
    if rollouts.score_mask is not None:
        assert rollouts.score_mask.tolist() == [[[False, False, True, True]] * 12] * 2
    assert (rollouts.candidates is None) == (method != "TPOToken")
    assert rollouts.group_size == (4 if method == "GRPO" else None)
    assert rollouts.age.tolist() == [0, 0]
    assert rollouts.expected_reward is None


def test_groups_share_a_prompt_and_uniform_ones_are_left_out() -> None:
    sequence_task, models, rngs = make_task_and_models(method="GRPO", batch_size=40)
    rollouts = sequence_task.sample(models, rngs, 1)
    prompts = rollouts.observations[..., :4].unflatten(1, (10, 4))
    assert (prompts == prompts[:, :, :1]).all()
    assert len({tuple(prompt) for prompt in prompts[0, :, 0].tolist()}) > 1
    for member in range(2):
        is_mixed = oracles.find_mixed_groups(rollouts.rewards[member].tolist(), 4)
        assert rollouts.keep_mask[member].tolist() == [keep for keep in is_mixed for _ in range(4)]
        assert float(rollouts.scalars["informative_group_rate"][member]) == pytest.approx(sum(is_mixed) / 10, abs=1e-6)


@pytest.mark.parametrize("method", ["DG", "GRPO", "TPOToken"])
def test_a_member_draws_the_same_in_every_ensemble(method: str) -> None:
    sequence_task, models, rngs = make_task_and_models((3, 4, 5), method=method)
    ensemble_rollouts = sequence_task.sample(models, rngs, 6)
    for member, seed in enumerate((3, 4, 5)):
        sequence_task, models, rngs = make_task_and_models((seed,), method=method)
        single_tensors = flatten_rollouts(sequence_task.sample(models, rngs, 6))
        ensemble_tensors = flatten_rollouts(ensemble_rollouts)
        assert single_tensors.keys() == ensemble_tensors.keys()
        for name, value in single_tensors.items():
            tolerance = 1e-5 if value.is_floating_point() else 0
            torch.testing.assert_close(ensemble_tensors[name][member], value[0], atol=tolerance, rtol=0)


def test_all_rules_draw_the_same_prompts() -> None:
    sequence_task, models, rngs = make_task_and_models(method="DG")
    rollouts = sequence_task.sample(models, rngs, 3)
    candidate_rollouts = make_task_and_models(method="TPOToken")[0].sample(models, rngs, 3)
    assert torch.equal(rollouts.observations, candidate_rollouts.observations)
    grouped_rollouts = make_task_and_models(method="GRPO")[0].sample(models, rngs, 3)
    assert torch.equal(grouped_rollouts.observations[:, ::4, :4], rollouts.observations[:, :3, :4])
    noisy_rollouts = make_task_and_models(method="DG", reward_noise=0.5, reward_noise_mode="label_flip")[0].sample(
        models, rngs, 3
    )
    assert torch.equal(noisy_rollouts.observations, rollouts.observations)
    assert not torch.equal(noisy_rollouts.rewards, rollouts.rewards)
    assert not torch.equal(sequence_task.sample(models, rngs, 4).observations, rollouts.observations)
    sequence_task.evaluate(models, rngs, 3)
    assert torch.equal(sequence_task.sample(models, rngs, 3).observations, rollouts.observations)


@pytest.mark.parametrize("task", ["token_reversal", "masked_reversal"])
def test_candidates_are_next_tokens_of_each_prefix(task: str) -> None:
    sequence_task, models, rngs = make_task_and_models(task=task, method="GRPOToken")
    rollouts = sequence_task.sample(models, rngs, 2)
    candidates = rollouts.candidates
    assert candidates.actions.shape == (2, 12, 4, 4)
    assert torch.equal(candidates.actions[..., 0], rollouts.actions)
    for position in range(4):
        prefix = rollouts.observations[..., : 5 + position]
        log_probs = models.compute_logits(prefix.repeat_interleave(4, dim=1), 1).log_softmax(-1).detach()[:, :, 0]
        actions = candidates.actions[:, :, position].flatten(1)
        expected = log_probs.gather(-1, actions[..., None])[..., 0]
        torch.testing.assert_close(candidates.log_probs[:, :, position].flatten(1), expected, atol=1e-5, rtol=1e-5)
        is_right = candidates.actions[:, :, position] == rollouts.labels[:, :, position, None]
        is_scored = task == "token_reversal" or position >= 2
        assert torch.equal(candidates.rewards[:, :, position], (is_right & is_scored).float())


def test_the_expected_reward_is_the_sum_over_all_answers_and_elsewhere_unknown() -> None:
    sequence_task, models, rngs = make_task_and_models(method="PMDMean", binary_reward=True, batch_size=3, seq_len=3)
    rollouts = sequence_task.sample(models, rngs, 1)
    answers = torch.tensor(list(product(range(3), repeat=3)))
    for member, row in product(range(2), range(3)):
        prompt = rollouts.observations[:, row : row + 1, :4].expand(2, 27, 4)
        sequences = torch.cat((prompt, answers.expand(2, 27, 3)), dim=-1)
        log_probs = models.compute_logits(sequences[..., :-1], 3).log_softmax(-1).detach()[member]
        probability = log_probs.gather(-1, answers[..., None])[..., 0].sum(-1).exp()
        reward = (answers == rollouts.labels[member, row]).all(-1).float()
        assert float(probability.sum()) == pytest.approx(1, abs=1e-5)
        mean = float((probability * reward).sum())
        assert float(rollouts.expected_reward[member, row]) == pytest.approx(mean, abs=1e-6)
    noise = {"reward_noise": 0.1, "reward_noise_mode": "random_reward"}
    for settings in ({"binary_reward": False}, {"method": "MaxRL"}, noise, {"task": "masked_reversal"}):
        sequence_task, models, rngs = make_task_and_models(**{"method": "DG", "binary_reward": True, **settings})
        assert sequence_task.sample(models, rngs, 1).expected_reward is None


@pytest.mark.parametrize(
    ("task", "binary"),
    [("token_reversal", True), *((task, False) for task in SEQUENCE_TASKS)],
)
def test_evaluation_is_that_of_a_literal_greedy_decoder(task: str, binary: bool) -> None:
    sequence_task, models, rngs = make_task_and_models(task=task, binary_reward=binary, vocab_size=3)
    metrics = sequence_task.evaluate(models, rngs, 5)
    prompts = rngs.integers("sandbox_evaluation", 5, high=3, shape=(1000, 4))
    for member in range(2):
        weights = {name: weight[member : member + 1] for name, weight in models.weights.items()}
        sequences = torch.cat((prompts[member], torch.full((1000, 1), 3)), dim=-1)
        answers, entropies = decode_greedily(TransformerEnsemble(models.shape, weights), sequences)
        right_rows = [
            [a == b for a, b in zip(answer, oracles.make_right_answer(task, prompt, 3), strict=True)]
            for prompt, answer in zip(prompts[member].tolist(), answers, strict=True)
        ]
        scored_rows = [right_row[2:] if task == "masked_reversal" else right_row for right_row in right_rows]
        scores_sequences = binary or task not in ("token_reversal", "masked_reversal")
        units = [[all(right_row)] for right_row in scored_rows] if scores_sequences else scored_rows
        is_wrong = [not is_right for unit in units for is_right in unit]
        expected = {
            "test_error": sum(is_wrong) / len(is_wrong),
            "entropy": sum(entropies) / len(entropies),
            "greedy_separator_rate": sum(answer.count(3) for answer in answers) / 4000,
        }
        if task == "masked_reversal":
            num_right = sum(sum(right_row[:2]) for right_row in right_rows)
            expected["test_error_unscored"] = 1 - num_right / 2000
        if task in ("chain_reversal", "chain_arithmetic", "format_answer"):
            pairs = zip(prompts[member].tolist(), answers, strict=True)
            expected["chain_reward"] = sum(oracles.compute_reward(task, *pair, 3, 4, False) for pair in pairs) / 1000
        assert {name: float(value[member]) for name, value in metrics.items()} == pytest.approx(expected, abs=1e-4)


def decode_greedily(model: TransformerEnsemble, sequences: Tensor) -> tuple[list[list[int]], list[float]]:
    """Decode answers of 4 tokens and the entropies at each token, with a full pass per token."""
    entropies: list[float] = []
    for _ in range(4):
        probs = model.compute_logits(sequences[None], sequences.shape[-1])[0, :, -1].softmax(-1).detach()
        entropies += (-(probs * probs.log()).sum(-1)).tolist()
        sequences = torch.cat((sequences, probs.argmax(-1, keepdim=True)), dim=-1)
    return sequences[:, -4:].tolist(), entropies


def test_the_oracle_reads_the_right_tokens() -> None:
    sequence_task, models, rngs = make_task_and_models(method="CE")
    rollouts = sequence_task.sample(models, rngs, 1)
    prompts = rollouts.observations[..., :5]
    corrected = replace(rollouts, observations=torch.cat((prompts, rollouts.labels), dim=-1))
    expected = sequence_task.compute_logits(models, corrected).log_softmax(-1)
    torch.testing.assert_close(sequence_task.compute_oracle_log_probs(models, rollouts), expected, atol=1e-6, rtol=1e-6)
    assert sequence_task.compute_oracle_log_probs(models, rollouts).requires_grad


@pytest.mark.parametrize("mode", ["false_positive_rare_token", "random_reward"])
def test_rewards_are_corrupted_by_the_members_own_noise(mode: str) -> None:
    sequence_task, models, rngs = make_task_and_models(
        method="DG", reward_noise=0.5, reward_noise_mode=mode, batch_size=40
    )
    rollouts = sequence_task.sample(models, rngs, 2)
    uniforms = rngs.uniform("sandbox_noise", 2, shape=(40, 2))
    for member, row in product(range(2), range(40)):
        prompt, answer = rollouts.observations[member, row, :4].tolist(), rollouts.actions[member, row].tolist()
        reward = oracles.compute_reward("token_reversal", prompt, answer, 2, 4, False)
        draw, random_reward = uniforms[member, row].tolist()
        expected = oracles.corrupt_reward(mode, reward, prompt, answer, 2, draw, 0.5, random_reward)
        assert float(rollouts.rewards[member, row]) == pytest.approx(expected, abs=1e-6)
