"""Dialogues of every tiny policy: what is shown is what the game says, and plans are what they claim to be."""

from collections.abc import Sequence

import numpy as np
import pytest

from trainable.config.seeds import make_rng
from trainable.envs.games.frozen_lake import GOAL, HOLE, FrozenLake, compute_distances, make_moves
from trainable.envs.games.mastermind import Mastermind, compare_codes, compute_consistent_share
from trainable.envs.level_sets import make_demonstration_levels
from trainable.envs.prompts import parse_reply
from trainable.tiny import frozen_lake
from trainable.tiny.dialogues import Habits, Segment
from trainable.tiny.policies import MASTERMIND_TINY, TURN_POLICIES
from trainable.tiny.recipe import TinyPolicy
from trainable.tiny.tokenizer import UNKNOWN

ALL_HABITS = Habits(detour=0.5, careless=0.2, unfinished=0.1)


def demonstrate(policy: TinyPolicy, habits: Habits, count: int = 48) -> list[list[Segment]]:
    levels = make_demonstration_levels(policy.source, count, 5_000_000)
    rngs = make_rng(0, "demonstrations", 0), make_rng(0, "demonstrations", 0, 1)
    return list(policy.make_dialogues(levels, habits, *rngs))


def read_replies(policy: TinyPolicy, segments: Sequence[Segment]) -> list[tuple[str, tuple[str, ...], bool]]:
    """Thought, actions and validity of each reply."""
    replies = [segment.text.removesuffix("<|im_end|>") for segment in segments if segment.is_trained]
    parsed = [parse_reply(reply, policy.limits.actions_per_turn, policy.source.read_action) for reply in replies]
    thoughts = [reply.split("</think>")[0] for reply in replies]
    return [(thought, item.actions, item.invalid) for thought, item in zip(thoughts, parsed, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("name", list(TURN_POLICIES))
def test_the_tokenizer_restores_every_dialogue(name: str) -> None:
    policy = TURN_POLICIES[name]
    tokenizer = policy.build_tokenizer()
    for segments in demonstrate(policy, ALL_HABITS, 24):
        text = "".join(segment.text for segment in segments)
        encoding = tokenizer.encode(text)
        assert UNKNOWN not in encoding.tokens
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        replies = [segment.text for segment in segments if segment.is_trained]
        assert max(len(tokenizer.encode(reply).ids) for reply in replies) <= policy.response_length
        # The longest conversation leaves room for one more reply.
        assert len(encoding.ids) + policy.response_length <= policy.make_shape().max_position_embeddings


@pytest.mark.parametrize("name", list(TURN_POLICIES))
def test_good_habits_end_every_dialogue_well(name: str) -> None:
    policy = TURN_POLICIES[name]
    replies = [reply for segments in demonstrate(policy, Habits()) for reply in read_replies(policy, segments)]
    assert not any(invalid for _, _, invalid in replies)
    replies = [reply for segments in demonstrate(policy, ALL_HABITS) for reply in read_replies(policy, segments)]
    assert 0.03 < np.mean([invalid for _, _, invalid in replies]) < 0.2


def test_paths_avoid_holes_and_are_shortest_unless_they_begin_with_a_detour() -> None:
    game = FrozenLake()
    for level in game.make_levels(range(40)):
        (state,) = game.start([level])
        tiles, distances, moves = level.tiles.reshape(-1), compute_distances(level.tiles), make_moves(4)
        make_plan = frozen_lake.start_plans(state)
        for has_detour in (False, True):
            plan = make_plan([state], has_detour, np.random.default_rng(level.seed))
            cell, cells = state.player, []
            for name in plan.actions:
                cell = int(moves[cell, ("Left", "Down", "Right", "Up").index(name)])
                cells.append(cell)
            assert tiles[cell] == GOAL
            assert not any(tiles[cell] == HOLE for cell in cells)
            assert plan.thought.endswith("".join(name[0] for name in plan.actions))
            if has_detour:
                assert len(plan.actions) > distances[state.player] or distances[cells[0]] == distances[state.player] - 1
            else:
                assert len(plan.actions) == distances[state.player]


def test_guesses_are_possible_unless_they_are_detours() -> None:
    for level in Mastermind().make_levels(range(30)):
        for habits, expected in ((Habits(), True), (Habits(detour=1.0), False)):
            rngs = np.random.default_rng(level.seed), np.random.default_rng(0)
            (segments,) = MASTERMIND_TINY.make_dialogues([level], habits, *rngs)
            guesses = [guess for _, actions, _ in read_replies(MASTERMIND_TINY, segments) for guess in actions]
            if len(guesses) > 1:
                assert compute_consistent_share(level, guesses) == float(expected)


def test_thoughts_repeat_all_answers_so_far() -> None:
    lengths = []
    for level in Mastermind().make_levels(range(8)):
        rngs = np.random.default_rng(1), np.random.default_rng(0)
        (segments,) = MASTERMIND_TINY.make_dialogues([level], Habits(), *rngs)
        replies, recap = read_replies(MASTERMIND_TINY, segments), ""
        for thought, (guess,), _ in replies:
            assert thought == recap + guess
            recap += f"{guess} {''.join(map(str, compare_codes(level.code, guess)))} "
        lengths.append(len(replies))
    assert max(lengths) > 2
