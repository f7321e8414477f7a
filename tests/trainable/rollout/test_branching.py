"""Prefix trees: from which turns episodes branch, what a branch shares with its parent, and what a run does with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.trainers import (
    Row,
    check_resumption,
    copy_weights,
    has_changed,
    make_quiet_trainer,
    record_results,
    run_steps,
)
from tests.oracles import algo as oracle
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.envs.environment import TurnLimits
from trainable.envs.games.frozen_lake import FrozenLake
from trainable.envs.prompts import END_OF_MESSAGE, format_reply, make_prompt_template
from trainable.models.codec import Codec
from trainable.rollout.engine import recompute_logprobs
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.episode_loop import Branching, RolloutRequest, TurnPlayer
from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams
from trainable.tiny.policies import FROZENLAKE_TINY

GAME = FrozenLake()
LEVELS = GAME.make_levels([1, 2, 3])
TOKENIZER = FROZENLAKE_TINY.build_tokenizer()
STOP = TOKENIZER.token_to_id(END_OF_MESSAGE)
LIMITS = TurnLimits(turns=4, actions_per_turn=2, actions=6)
REPLIES = [
    TOKENIZER.encode(text).ids
    for text in (
        *(format_reply("P", names) + END_OF_MESSAGE for names in (["Up"], ["Left"], ["Right", "Down"], ["Down"])),
        "P",  # a void turn, whose end marker the environment adds
    )
]
Choose = Callable[[int, int, np.random.Generator], Sequence[int]]
"""Chooses the reply of a row from the conversation's number, the turn within it, and the row's generator."""


@dataclass
class RandomSampler:
    """Replies with token ids that `choose` chooses, and random log-probs, which identify a reply."""

    choose: Choose = lambda number, turn, rng: REPLIES[rng.integers(len(REPLIES))]
    conversations: list["RandomConversation"] = field(default_factory=list)

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> Conversation:
        histories = [list(prompt) for prompt in prompts for _ in range(len(rngs) // len(prompts))]
        conversation = RandomConversation(self, len(self.conversations), histories, rngs)
        self.conversations.append(conversation)
        return conversation


@dataclass
class RandomConversation(Conversation):
    sampler: RandomSampler
    number: int
    histories: list[list[int]]
    rngs: Sequence[np.random.Generator]
    turn: int = 0

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        replies = []
        for row, ids in zip(rows, new_tokens, strict=True):
            reply = np.array(self.sampler.choose(self.number, self.turn, self.rngs[row]))
            logprobs = -self.rngs[row].random(len(reply), dtype=np.float32)
            replies.append(SampledReply(reply, logprobs, -logprobs / 2, bool(reply[-1] == STOP)))
            self.histories[row] += [*ids, *reply.tolist()]
        self.turn += 1
        return replies


class FixedNumbers:
    """Takes the place of a generator: its uniform numbers are given, one per episode."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = np.array(numbers)

    def random(self, size: int) -> np.ndarray:
        assert size == len(self.numbers)
        return self.numbers


def play(
    group_size: int,
    branches: int = 0,
    rounds: int = 1,
    numbers: Sequence[float] | None = None,
    ranks: Sequence[int] = (3,),
    sampler: RandomSampler | None = None,
    limits: TurnLimits = LIMITS,
    context_length: int = 512,
) -> list[Episode]:
    """Play with an arbitrary policy. numbers: draw nodes; None for random ones. ranks: the numbers of their levels."""
    player = TurnPlayer(
        GAME, make_prompt_template(GAME, "compact", limits.actions), Codec(TOKENIZER), limits, -0.1, context_length
    )
    rng, first, episodes = np.random.default_rng(0), 0, list[Episode]()
    for count in ranks:
        node_rng: Any = np.random.default_rng(2) if numbers is None else FixedNumbers(numbers)
        request = RolloutRequest(
            LEVELS[first : first + count],
            group_size,
            sampler or RandomSampler(),
            SamplingParams(1.0, 24, STOP),
            rng,
            np.random.default_rng(1),
            first * group_size,
            sum(ranks) * group_size,
            Branching(branches, rounds, node_rng) if branches else None,
        )
        episodes += [episode._replace(group=episode.group + first) for episode in player.roll_out(request)]
        first += count
    return episodes


def get_reply_start(episode: Episode, turn: int) -> int:
    """Find the place of the first token of a reply."""
    return int(np.flatnonzero(episode.mask & (episode.turns == turn))[0])


def make_key(episode: Episode, turn: int) -> tuple[float, ...]:
    """Identify a node: the start of a turn, by all log-probs before it."""
    return tuple(episode.logprobs[: get_reply_start(episode, turn)].tolist())


def list_nodes(episodes: Sequence[Episode]) -> list[tuple[float, ...]]:
    """List the distinct nodes of a tree at which a further turn was played, as sets of prefixes."""
    return sorted({make_key(episode, turn) for episode in episodes for turn in range(len(episode.texts))})


def split_into_trees(episodes: Sequence[Episode], size: int) -> list[Sequence[Episode]]:
    return [episodes[start : start + size] for start in range(0, len(episodes), size)]


def find_parent(tree: Sequence[Episode], place: int, branches: int) -> Episode:
    """Find an episode of an earlier round that has the node of a branch."""
    first_of_round = place - (place - 1) % branches
    key = make_key(tree[place], tree[place].prefix_turns)
    return next(e for e in tree[:first_of_round] for turn in range(len(e.texts)) if make_key(e, turn) == key)


def equals(episode: Episode, other: Episode) -> bool:
    """Compare all but the number of the tree."""
    values = [
        [value.tolist() if isinstance(value, np.ndarray) else value for value in e]
        for e in (episode._replace(prefix_tree=0), other._replace(prefix_tree=0))
    ]
    return values[0] == values[1]


SHAPES = [(1, 1, 2), (2, 1, 2), (1, 3, 1), (2, 2, 1)]
"""Branches, rounds, and trees per group."""


@pytest.mark.parametrize(("branches", "rounds", "trees"), SHAPES)
def test_a_branch_is_a_copy_of_its_parent_up_to_its_node_and_new_after_it(
    branches: int, rounds: int, trees: int
) -> None:
    size = 1 + branches * rounds
    sampler = RandomSampler()
    episodes = play(size * trees, branches, rounds, sampler=sampler)
    assert [episode.group for episode in episodes] == np.repeat(range(3), size * trees).tolist()
    assert [episode.level_seed for episode in episodes] == np.repeat([1, 2, 3], size * trees).tolist()
    assert [episode.prefix_tree for episode in episodes] == np.repeat([*range(trees)] * 3, size).tolist()
    for tree in split_into_trees(episodes, size):
        assert tree[0].prefix_turns == 0
        for place in range(1, size):
            branch, parent = tree[place], find_parent(tree, place, branches)
            turn = branch.prefix_turns
            start = get_reply_start(branch, turn)
            for name in ("tokens", "mask", "logprobs", "entropies", "turns"):
                assert np.array_equal(getattr(branch, name)[:start], getattr(parent, name)[:start])
            for name in ("texts", "turn_actions", "turn_validity", "turn_rewards"):
                assert getattr(branch, name)[:turn] == getattr(parent, name)[:turn]
            assert branch.suffix_mask.tolist() == [n >= start and is_reply for n, is_reply in enumerate(branch.mask)]
            # Log-probs are random, so that each reply has its own.
            assert not any(branch.logprobs[start] in other.logprobs for other in tree[:place])
    assert any(episode.prefix_turns for episode in episodes)
    # All branches of a round are one conversation, which has the history of each episode.
    assert len(sampler.conversations) == 1 + rounds
    histories = [sorted(map(tuple, conversation.histories)) for conversation in sampler.conversations]
    places = [[0], *(range(1 + branches * n, 1 + branches * (n + 1)) for n in range(rounds))]
    for of_round, lines in zip(places, histories, strict=True):
        assert lines == sorted(tuple(e.tokens.tolist()) for n, e in enumerate(episodes) if n % size in of_round)


def test_nodes_are_drawn_uniformly_from_the_root_and_the_starts_of_later_turns() -> None:
    """Evenly spaced numbers draw each node once: those of shared turns count once, and ends never."""
    (chain,) = play(1, ranks=[1])
    nodes = list_nodes([chain])
    assert len(nodes) == len(chain.texts) > 2
    for first, _ in enumerate(nodes):
        numbers = [0.0, (first + 0.5) / len(nodes), 0.0]
        _, branch, _ = tree = play(3, 1, 2, numbers, ranks=[1])
        assert equals(tree[0], chain)
        assert branch.prefix_turns == first
        later_nodes = list_nodes([chain, branch])
        drawn_nodes = []
        for second, _ in enumerate(later_nodes):
            numbers[2] = (second + 0.5) / len(later_nodes)
            again = play(3, 1, 2, numbers, ranks=[1])
            assert equals(again[1], branch)
            drawn_nodes.append(make_key(again[2], again[2].prefix_turns))
        assert sorted(drawn_nodes) == later_nodes


def test_nodes_of_a_round_are_those_of_the_tree_before_it() -> None:
    (chain,) = play(1, ranks=[1])
    _, *branches = play(3, 2, 1, [0.0, 0.999, 0.999], ranks=[1])
    assert [branch.prefix_turns for branch in branches] == [len(chain.texts) - 1] * 2


@pytest.mark.parametrize(("branches", "rounds"), [(1, 1), (2, 1), (1, 2)])
def test_branches_from_roots_are_the_episodes_that_do_not_branch(branches: int, rounds: int) -> None:
    plain = play(6)
    branched = play(6, branches, rounds, [0.0] * 18)
    assert all(map(equals, branched, plain))
    assert not all(map(equals, play(6, branches, rounds), plain))


def test_ranks_play_the_trees_of_one() -> None:
    for other in ([1, 2], [1, 1, 1]):
        assert all(map(equals, play(6, 2, 1, ranks=other), play(6, 2, 1)))


@pytest.mark.parametrize(
    ("limits", "context_length", "reason"),
    [
        (TurnLimits(2, 2, 6), 512, StopReason.OUT_OF_TURNS),
        (TurnLimits(4, 2, 3), 512, StopReason.OUT_OF_ACTIONS),
        (LIMITS, 70, StopReason.OUT_OF_CONTEXT),
    ],
)
def test_the_limits_of_an_episode_count_its_prefix(limits: TurnLimits, context_length: int, reason: StopReason) -> None:
    episodes = play(9, 1, 8, limits=limits, context_length=context_length)
    for episode in episodes:
        assert len(episode.texts) <= limits.turns
        assert episode.actions <= limits.actions
        assert len(episode.tokens) <= context_length
    assert reason in {episode.stop_reason for episode in episodes if episode.prefix_turns}


# ---------------------------------------------------------------------------- runs

TREES = {"algorithm__adv_estimator": "tree", "rollout__ts_n": 1, "env__group_size": 4, "rollout__temperature": 1.2}
TORCH = {"rollout__name": "torch", "model__compiled_passes": False}


@pytest.mark.parametrize("settings", [TORCH, {}], ids=["torch", "compiled"])
def test_a_run_trains_all_tokens_of_prefix_trees(settings: Row) -> None:
    trainer = make_quiet_trainer(**TREES, **settings, trainer__log_train_generations=8, trainer__test_freq=2)
    rollouts, batches = record_results(trainer, "_collect_episodes"), record_results(trainer, "_prepare_selected")
    old_weights = copy_weights(trainer)
    rows = run_steps(trainer, 2)
    assert has_changed(trainer, old_weights, "actor/")
    shares = [row["train_shared_tokens"] for row in rows]
    assert any(shares)
    for episodes, (batch, targets, _), row, share in zip(rollouts, batches, rows, shares, strict=True):
        assert [episode.prefix_tree for episode in episodes] == [0, 0, 1, 1] * 2
        sampled_tokens = sum(int(episode.suffix_mask.sum()) for episode in episodes)
        all_tokens = sum(episode.response_tokens for episode in episodes)
        assert (row["sampled_tokens"], row["trained_tokens"]) == (sampled_tokens, all_tokens)
        assert row["env_steps"] == sum(len(names) for e in episodes for names in e.turn_actions[e.prefix_turns :])
        assert share == 1 - sampled_tokens / all_tokens
        scores = [episode.score for episode in episodes]
        terms = [oracle.grpo(scores, ids, norm_by_std=True) for ids in ([0] * 4 + [1] * 4, [0, 0, 1, 1, 2, 2, 3, 3])]
        expected = torch.tensor(terms).sum(0)[:, None] * batch.mask
        torch.testing.assert_close(targets.advantages, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("settings", "temperature"), [(TORCH, 0.7), ({}, 1.0)], ids=["torch", "compiled"])
def test_the_replies_of_a_branch_are_conditioned_on_its_prefix(settings: Row, temperature: float) -> None:
    trainer = make_quiet_trainer(**{**TREES, **settings, "rollout__temperature": temperature, "rollout__ts_l": 3})
    episodes = trainer.roll_out(trainer.levels[0], 8, "sampling")
    assert any(episode.prefix_turns for episode in episodes)
    recomputed_episodes = recompute_logprobs(trainer.model, episodes, temperature, 2, trainer.device)
    for recomputed, episode in zip(recomputed_episodes, episodes, strict=True):
        np.testing.assert_allclose(recomputed.logprobs, episode.logprobs, atol=1e-4)


def test_a_run_with_branches_resumes_to_the_same_rows(tmp_path: Path) -> None:
    check_resumption(lambda: make_quiet_trainer(**TREES), tmp_path)


def test_training_episodes_branch_and_those_of_validations_do_not() -> None:
    evaluated = {"env__val_env_groups": 8, "trainer__val_before_train": True, "algorithm__adv_estimator": "grpo"}
    plain, branched = (make_quiet_trainer(**{**TREES, **evaluated, "rollout__ts_n": number}) for number in (0, 1))
    (plain_row,), (branched_row,) = run_steps(plain, 1), run_steps(branched, 1)
    base_columns = [name for name in plain_row if name.startswith("base_")]
    assert base_columns
    assert all(branched_row[name] == plain_row[name] for name in base_columns)
    assert branched_row.keys() - plain_row.keys() == {"train_shared_tokens"}
    assert branched_row["sampled_tokens"] < plain_row["sampled_tokens"]


def test_the_published_names_are_aliases() -> None:
    config = apply_overrides(RunConfig(), {"actor_rollout_ref.rollout.ts_n": 3, "actor_rollout_ref.rollout.ts_l": 5})
    assert (config.rollout.ts_n, config.rollout.ts_l, config.rollout.episodes_per_tree) == (3, 5, 16)
