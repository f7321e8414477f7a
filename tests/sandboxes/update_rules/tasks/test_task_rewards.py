"""Tests of the rewards, noise and groups of the tasks against literal versions."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.toys.sequence_rewards import SEQUENCE_KINDS, compute_sequence_rewards
from sandboxes.update_rules.config.settings import NOISE_MODES, SEQUENCE_TASKS
from sandboxes.update_rules.tasks.rewards import (
    corrupt_rewards,
    detect_bandit_feature,
    detect_sequence_feature,
    filter_groups,
    find_mixed_groups,
    find_varied_groups,
)
from tests.sandboxes.update_rules.tasks import oracles


@st.composite
def draw_answers(draw: st.DrawFn) -> tuple[str, int, int, list[list[int]], list[list[int]], bool]:
    """Draw a task, V, the number of scored positions, prompts, answers that are often right, and a binary flag."""
    task = draw(st.sampled_from(SEQUENCE_TASKS))
    vocab, length = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    num_prompts = draw(st.integers(1, 4))
    prompt_lists = st.lists(st.integers(0, vocab - 1), min_size=length, max_size=length)
    prompts = [draw(prompt_lists) for _ in range(num_prompts)]
    all_answers = []
    for prompt in prompts:
        target = oracles.make_right_answer(task, prompt, vocab)
        random_answer = draw(st.lists(st.integers(0, vocab + 1), min_size=length, max_size=length))
        choices = draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
        all_answers.append(
            [b if choice == 0 else a for a, b, choice in zip(target, random_answer, choices, strict=True)]
        )
    binary = draw(st.booleans()) if task in ("token_reversal", "masked_reversal") else False
    score_len = draw(st.integers(1, length)) if task == "masked_reversal" else length
    return task, vocab, score_len, prompts, all_answers, binary


@given(draw_answers())
def test_rewards_are_those_of_the_literal_version(
    case: tuple[str, int, int, list[list[int]], list[list[int]], bool],
) -> None:
    task, vocab, score_len, prompts, outputs, binary = case
    labels = SEQUENCE_KINDS[task].make_labels(torch.tensor(prompts), vocab)
    assert labels.tolist() == [oracles.make_right_answer(task, prompt, vocab) for prompt in prompts]
    length = len(prompts[0])
    is_scored = torch.arange(length) >= length - score_len
    rewards = compute_sequence_rewards(SEQUENCE_KINDS[task], torch.tensor(outputs) == labels, is_scored, binary)
    expected = [
        oracles.compute_reward(task, prompt, output, vocab, score_len, binary)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    assert rewards.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", NOISE_MODES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_noise_of_sequences_is_that_of_the_literal_version(mode: str, share: float) -> None:
    prompts, outputs = torch.tensor([[0, 1], [1, 1], [2, 0]]), torch.tensor(list(product(range(4), repeat=2)))
    prompts, outputs = prompts.repeat_interleave(16, dim=0), outputs.repeat(3, 1)
    is_right = outputs == SEQUENCE_KINDS["token_reversal"].make_labels(prompts, 3)
    rewards = is_right.float().mean(-1)
    uniforms = torch.rand(48, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noisy_rewards = corrupt_rewards(
        rewards, uniforms, mode, share, is_right.all(-1), detect_sequence_feature(mode, prompts, outputs, 3)
    )
    expected = [
        oracles.corrupt_reward(mode, float(reward), prompt, output, 3, draw, share, random_reward)
        for reward, prompt, output, (draw, random_reward) in zip(
            rewards, prompts.tolist(), outputs.tolist(), uniforms.tolist(), strict=True
        )
    ]
    assert noisy_rewards.tolist() == pytest.approx(expected, abs=1e-6)
    assert (mode == "none" or share == 0) == torch.equal(noisy_rewards, rewards)


@pytest.mark.parametrize("mode", ["false_positive_action0", "spurious_feature"])
def test_noise_rewards_action_zero_of_a_bandit_where_it_is_wrong_and_groups_are_mixed(mode: str) -> None:
    actions, is_solved = torch.tensor([0, 1, 0, 2]), torch.tensor([False, False, True, True])
    rewards = torch.tensor([-0.5, 0.0, 0.75, 1.0])
    noisy_rewards = corrupt_rewards(
        rewards, torch.zeros(4, 2), mode, 0.5, is_solved, detect_bandit_feature(mode, actions)
    )
    assert noisy_rewards.tolist() == [1.0, 0.0, 0.75, 1.0]
    assert not detect_bandit_feature("label_flip", actions).any()
    is_solved = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    assert find_mixed_groups(is_solved, 2).tolist() == [[False, True, False]]


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_uniform_groups_are_left_out_unless_all_are(size: int, groups: int, data: st.DataObject) -> None:
    count = size * groups
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=count, max_size=count))
    member_rewards = torch.tensor([rewards, [0.3] * count])
    keep_mask, scalars = filter_groups(member_rewards, find_varied_groups(member_rewards, size))
    is_mixed = oracles.find_mixed_groups(rewards, size)
    is_kept = is_mixed if any(is_mixed) else [True] * groups
    assert keep_mask.tolist() == [[group for group in is_kept for _ in range(size)], [True] * count]
    assert scalars["informative_group_rate"].tolist() == pytest.approx([sum(is_mixed) / groups, 0], abs=1e-6)
    assert scalars["retained_group_rate"].tolist() == pytest.approx([sum(is_kept) / groups, 1], abs=1e-6)
    assert scalars["used_group_fallback"].tolist() == [float(not any(is_mixed)), 1.0]
