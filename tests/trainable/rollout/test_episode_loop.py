from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.fakes.scripted import ScriptedSampler
from trainable.envs.sokoban.board import Action
from trainable.envs.sokoban.level_sets import make_validation_levels
from trainable.envs.sokoban.prompt import END_OF_MESSAGE, Observation, format_reply, make_prompt_template
from trainable.models.load import make_codec
from trainable.rollout.batch import place_turn_rewards
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.episode_loop import EpisodeLimits, roll_out_episodes
from trainable.rollout.sampler import SamplingParams
from trainable.tiny.tokenizer import build_tokenizer

LEVELS = make_validation_levels(3)  # seed 123: solved by Down, Left, Up; seed 124: by Up
RULES = EpisodeLimits(max_turn=5, max_actions_per_turn=2, max_actions=10, format_penalty=-0.1, context_length=512)
TOKENIZER: Tokenizer = build_tokenizer()
STOP = TOKENIZER.token_to_id(END_OF_MESSAGE)
PROTOCOL = make_prompt_template("compact", "grid", 10)
Played = tuple[list[Episode], ScriptedSampler]
ACTIONS = {action.name[0]: action for action in Action if action != Action.NONE}


def said(actions: str) -> str:
    """A reply with the actions that the letters name: "DL" for Down and Left."""
    return format_reply("P", [ACTIONS[letter] for letter in actions]) + END_OF_MESSAGE


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def played(script: Sequence[Sequence[str]], rules: EpisodeLimits = RULES, levels: int = 1, copies: int = 1) -> Played:
    """Episodes in which row r says script[r][turn]; 512 tokens of context, 24 per reply."""
    sampler = ScriptedSampler([[ids(text) for text in row] for row in script])
    episodes = roll_out_episodes(
        LEVELS[:levels],
        copies,
        sampler,
        PROTOCOL,
        make_codec(TOKENIZER),
        rules,
        SamplingParams(1.0, 24, STOP),
        np.random.default_rng(0),
    )
    return episodes, sampler


def one(*replies: str, **rules: int) -> Episode:
    (episode,) = played([replies], replace(RULES, **rules))[0]
    return episode


def outcome(episode: Episode) -> tuple[StopReason, float, int, int, int]:
    """Stop, score, actions, turns, invalid turns."""
    turns = len(episode.texts)
    return episode.stop_reason, round(episode.score, 9), episode.actions, turns, episode.invalid_turns


NOISE = "D" + END_OF_MESSAGE


def test_level_123_in_three_actions_is_worth_10_7() -> None:
    episode = one(said("DL"), said("U"))
    assert outcome(episode) == (StopReason.SOLVED, 10.7, 3, 2, 0)
    assert episode.solved
    assert episode.turn_rewards == pytest.approx((-0.2, 10.9))


def test_what_follows_the_solving_action_is_not_played() -> None:
    assert outcome(one(said("D"), said("L"), said("UU"))) == (StopReason.SOLVED, 10.7, 3, 3, 0)


def test_five_unparsable_turns_cost_half_a_point() -> None:
    assert outcome(one(*[NOISE] * 5)) == (StopReason.MALFORMED, -0.5, 0, 5, 5)


def test_ten_actions_that_fail_cost_a_point() -> None:
    # Right is blocked by a wall: legal, without effect, and paid for.
    assert outcome(one(*[said("RR")] * 5)) == (StopReason.OUT_OF_ACTIONS, -1.0, 10, 5, 0)


def test_the_tenth_action_may_solve_the_level() -> None:
    assert outcome(one(*[said("RR")] * 3, said("RD"), said("LU"))) == (StopReason.SOLVED, 10.0, 10, 5, 0)


def test_actions_beyond_the_tenth_are_not_played() -> None:
    replies = [said("RRRR"), said("RRRR"), said("RRDL"), said("U")]
    episode = one(*replies, max_actions_per_turn=4)
    assert outcome(episode) == (StopReason.OUT_OF_ACTIONS, -1.0, 10, 3, 0)
    almost = [said("RRRR"), said("RRR"), said("DLUU")]
    assert outcome(one(*almost, max_actions_per_turn=4)) == (StopReason.SOLVED, 10.0, 10, 3, 0)


def test_turns_may_run_out_before_actions_do() -> None:
    assert outcome(one(*[said("R")] * 5)) == (StopReason.OUT_OF_TURNS, -0.5, 5, 5, 0)
    assert outcome(one(said("R"), *[NOISE] * 4)) == (StopReason.OUT_OF_TURNS, -0.5, 1, 5, 4)


def test_a_turn_with_an_unknown_word_plays_the_others_and_is_penalised_once() -> None:
    mixed = "P</think><answer>U || Down</answer>" + END_OF_MESSAGE
    episode = one(mixed, said("LU"))
    assert outcome(episode) == (StopReason.SOLVED, 10.6, 3, 2, 1)
    assert episode.turn_rewards == pytest.approx((-0.2, 10.8))


def test_the_penalty_is_a_setting() -> None:
    assert outcome(one(*[NOISE] * 5, format_penalty=-0.3))[1] == -1.5


def given_texts(sampler: ScriptedSampler, row: int = 0) -> list[str]:
    """The tokens that the row was given after each of its replies except the last."""
    return [TOKENIZER.decode(turn[row], skip_special_tokens=False) for turn in sampler.requests[1:] if row in turn]


def test_the_model_is_shown_rewards_without_penalties_and_what_is_left() -> None:
    mixed = "P</think><answer>U || Down</answer>" + END_OF_MESSAGE
    _, sampler = played([[mixed, NOISE, said("LU")]])
    first, second = given_texts(sampler)
    state = "State:\n####\nO###\nX_##\n_P##\n9 actions left"
    assert first.startswith(f"\n<|im_start|>user\nReward:\n-0.1\nTurn 2:\n{state}")
    assert second.startswith(f"\n<|im_start|>user\nReward:\n0.0\nTurn 3:\n{state}")


def test_a_reply_that_was_cut_gets_its_end_marker_as_given_text() -> None:
    (episode,), sampler = played([["P32 ", said("DL"), said("U")]])
    cut, whole = given_texts(sampler)
    assert cut.startswith("<|im_end|>\n<|im_start|>user\n")
    assert whole.startswith("\n<|im_start|>user\n")
    (marker,) = np.flatnonzero((episode.turns == 1) & ~episode.mask & (episode.tokens == STOP))
    assert episode.mask[marker - 1]
    assert not episode.mask[marker]
    assert outcome(episode) == (StopReason.SOLVED, 10.6, 3, 3, 1)


SCRIPT = [
    [said("DL"), said("U")],
    [NOISE, "P32 X31 ", said("DL"), said("U")],
    [NOISE] * 5,
    [said("RR")] * 5,
    [said("U")],
    [said("D"), NOISE, said("UU"), NOISE, said("L")],
    [said("LLL"), said("R")] * 3,
    ["D"] * 5,
    [said("D")] * 5,
    [said("UU")] * 5,
    [NOISE, said("RL")] * 3,
    [said("L"), said("R")] * 3,
]


@pytest.fixture(scope="module")
def many() -> Played:
    """Twelve episodes of three levels, four of each."""
    return played(SCRIPT, levels=3, copies=4)


def test_sampled_tokens_are_those_of_the_sampler_with_its_numbers(many: Played) -> None:
    episodes, sampler = many
    for row, episode in enumerate(episodes):
        replies = [turn[row] for turn in sampler.samples if row in turn]
        assert len(replies) == len(episode.texts) == len(episode.turn_rewards)
        for turn, reply in enumerate(replies):
            here = episode.mask & (episode.turns == turn)
            assert np.flatnonzero(here).tolist() == list(range(np.argmax(here), np.argmax(here) + len(reply.token_ids)))
            assert episode.tokens[here].tolist() == reply.token_ids.tolist() == ids(SCRIPT[row][turn])
            assert episode.logprobs[here].tolist() == reply.logprobs.tolist()
            assert episode.entropies[here].tolist() == reply.entropies.tolist()
        assert episode.response_tokens == sum(len(reply.token_ids) for reply in replies)
        assert not episode.logprobs[~episode.mask].any()
        assert not episode.entropies[~episode.mask].any()


def test_given_tokens_are_the_prompt_and_what_the_sampler_was_given(many: Played) -> None:
    episodes, sampler = many
    for row, episode in enumerate(episodes):
        given = [turn[row] for turn in sampler.requests if row in turn]
        assert given[0] == []
        parts = [sampler.prompts[row], *given[1:]]
        for turn, part in enumerate(parts):
            here = ~episode.mask & (episode.turns == turn)
            assert episode.tokens[here].tolist() == part
            assert not episode.mask[np.flatnonzero(here)].any()
        assert (np.diff(episode.turns) >= 0).all()
        assert len(episode.tokens) == sum(map(len, parts)) + episode.response_tokens
        assert (episode.tokens.dtype, episode.mask.dtype) == (np.int64, np.bool_)
        assert (episode.logprobs.dtype, episode.entropies.dtype) == (np.float32, np.float32)


def test_episodes_of_a_group_stand_together_and_share_level_and_prompt(many: Played) -> None:
    episodes, sampler = many
    assert [episode.group for episode in episodes] == [0] * 4 + [1] * 4 + [2] * 4
    assert [episode.level_seed for episode in episodes] == [123] * 4 + [124] * 4 + [125] * 4
    for episode in episodes:
        prompt = sampler.prompts[4 * episode.group]
        assert episode.tokens[: len(prompt)].tolist() == prompt
        assert not episode.mask[: len(prompt)].any()
    assert sampler.prompts[0] != sampler.prompts[4]
    assert episodes[4].solved  # level 124, by Up alone


def test_rewards_at_turn_ends_add_up_to_the_score(many: Played) -> None:
    for episode in many[0]:
        rewards = place_turn_rewards(episode)
        assert rewards.sum() == pytest.approx(episode.score, abs=1e-5)
        ends = [np.flatnonzero(episode.mask & (episode.turns == turn))[-1] for turn in range(len(episode.texts))]
        assert rewards[ends] == pytest.approx(episode.turn_rewards, abs=1e-6)
        assert set(np.flatnonzero(rewards)) <= set(ends)


def test_a_row_that_has_ended_is_not_asked_again(many: Played) -> None:
    episodes, sampler = many
    for row, episode in enumerate(episodes):
        assert [row in turn for turn in sampler.requests] == [
            n < len(episode.texts) for n in range(len(sampler.requests))
        ]


def test_a_conversation_that_would_outgrow_the_context_ends() -> None:
    prompt = len(ids(PROTOCOL.format_first_turn(Observation(1, LEVELS[0].cells, 10))))
    reply = len(ids(said("R")))
    # The second turn's 11 prompt tokens and 24 new ones fit, and those of the third do not.
    context = prompt + reply + 11 + 24
    episode = one(*[said("R")] * 5, context_length=context)
    assert outcome(episode) == (StopReason.OUT_OF_CONTEXT, -0.2, 2, 2, 0)
    assert len(episode.tokens) <= context
    assert episode.mask[-1]
    assert outcome(one(*[said("R")] * 5, context_length=context - 1))[3] == 1
