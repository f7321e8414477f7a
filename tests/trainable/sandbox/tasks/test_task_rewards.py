"""Rewards, noise and groups of the tasks, against literal versions."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainable.sandbox.tasks import oracles
from trainable.sandbox.batch.reward_noise import corrupt_rewards, detect_bandit_feature, detect_sequence_feature
from trainable.sandbox.config.names import NOISE_MODES, SEQUENCE_TASKS
from trainable.sandbox.tasks.groups import filter_groups, find_mixed_groups, find_varied_groups
from trainable.sandbox.tasks.sequence_rewards import SEQUENCE_KINDS, compute_sequence_rewards


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, int, int, list[list[int]], list[list[int]], bool]:
    """A task, V, the number of scored positions, prompts, answers that are often right, and whether it is binary."""
    task = draw(st.sampled_from(SEQUENCE_TASKS))
    vocab, length = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    rows = draw(st.integers(1, 4))
    prompts = draw(
        st.lists(st.lists(st.integers(0, vocab - 1), min_size=length, max_size=length), min_size=rows, max_size=rows)
    )
    given_answers = []
    for prompt in prompts:
        target = oracles.right_answer(task, prompt, vocab)
        wrong = draw(st.lists(st.integers(0, vocab + 1), min_size=length, max_size=length))
        taken = draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
        given_answers.append([b if pick == 0 else a for a, b, pick in zip(target, wrong, taken, strict=True)])
    binary = draw(st.booleans()) if task in ("token_reversal", "masked_reversal") else False
    score_len = draw(st.integers(1, length)) if task == "masked_reversal" else length
    return task, vocab, score_len, prompts, given_answers, binary


@given(answers())
@settings(deadline=None)
def test_rewards_are_those_of_the_literal_version(
    case: tuple[str, int, int, list[list[int]], list[list[int]], bool],
) -> None:
    task, vocab, score_len, prompts, outputs, binary = case
    labels = SEQUENCE_KINDS[task].make_labels(torch.tensor(prompts), vocab)
    assert labels.tolist() == [oracles.right_answer(task, prompt, vocab) for prompt in prompts]
    length = len(prompts[0])
    scored = torch.arange(length) >= length - score_len
    found = compute_sequence_rewards(SEQUENCE_KINDS[task], torch.tensor(outputs) == labels, scored, binary)
    expected = [
        oracles.reward(task, prompt, output, vocab, score_len, binary)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("task", SEQUENCE_TASKS)
def test_the_right_answer_is_worth_one_and_the_separator_is_never_right(task: str) -> None:
    prompts = torch.tensor(list(product(range(3), repeat=4)))
    labels = SEQUENCE_KINDS[task].make_labels(prompts, 3)
    assert not (labels == 3).any()
    scored = torch.ones(4, dtype=torch.bool)
    assert (compute_sequence_rewards(SEQUENCE_KINDS[task], labels == labels, scored, False) == 1).all()
    assert (
        compute_sequence_rewards(SEQUENCE_KINDS[task], torch.full_like(labels, 3) == labels, scored, False) == 0
    ).all()


@pytest.mark.parametrize("mode", NOISE_MODES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_noise_of_sequences_is_that_of_the_literal_version(mode: str, share: float) -> None:
    prompts, outputs = torch.tensor([[0, 1], [1, 1], [2, 0]]), torch.tensor(list(product(range(4), repeat=2)))
    prompts, outputs = prompts.repeat_interleave(16, dim=0), outputs.repeat(3, 1)
    right = outputs == SEQUENCE_KINDS["token_reversal"].make_labels(prompts, 3)
    rewards = right.float().mean(-1)
    uniforms = torch.rand(48, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = corrupt_rewards(
        rewards, uniforms, mode, share, right.all(-1), detect_sequence_feature(mode, prompts, outputs, 3)
    )
    expected = [
        oracles.noisy(mode, float(reward), prompt, output, 3, draw, share, other)
        for reward, prompt, output, (draw, other) in zip(
            rewards, prompts.tolist(), outputs.tolist(), uniforms.tolist(), strict=True
        )
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert (mode == "none" or share == 0) == torch.equal(found, rewards)


@pytest.mark.parametrize("mode", ["false_positive_action0", "spurious_feature"])
def test_a_bandit_is_paid_for_action_zero_where_it_is_not_solved(mode: str) -> None:
    actions, solved = torch.tensor([0, 1, 0, 2]), torch.tensor([False, False, True, True])
    rewards = torch.tensor([-0.5, 0.0, 0.75, 1.0])
    found = corrupt_rewards(rewards, torch.zeros(4, 2), mode, 0.5, solved, detect_bandit_feature(mode, actions))
    assert found.tolist() == [1.0, 0.0, 0.75, 1.0]
    assert not detect_bandit_feature("label_flip", actions).any()


@given(st.integers(2, 5), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_uniform_groups_are_left_out_unless_all_are(size: int, groups: int, data: st.DataObject) -> None:
    count = size * groups
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=count, max_size=count))
    members = torch.tensor([rewards, [0.3] * count])
    keep, scalars = filter_groups(find_varied_groups(members, size), size)
    mixed = oracles.mixed_groups(rewards, size)
    kept = mixed if any(mixed) else [True] * groups
    assert keep.tolist() == [[group for group in kept for _ in range(size)], [True] * count]
    assert scalars["informative_group_rate"].tolist() == pytest.approx([sum(mixed) / groups, 0], abs=1e-6)
    assert scalars["retained_group_rate"].tolist() == pytest.approx([sum(kept) / groups, 1], abs=1e-6)
    assert scalars["used_group_fallback"].tolist() == [float(not any(mixed)), 1.0]


def test_groups_of_a_bandit_are_mixed_where_some_are_right_and_some_wrong() -> None:
    solved = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    assert find_mixed_groups(solved, 2).tolist() == [[False, True, False]]
