from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fakes.scripted import ScriptedSampler
from trainable.envs.environment import TurnLimits
from trainable.envs.level_sets import make_validation_levels
from trainable.envs.prompts import END_OF_MESSAGE, Observation, format_reply, make_prompt_template
from trainable.envs.sokoban.game import ACTION_NAMES, Sokoban
from trainable.models.codec import Codec
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.episode_loop import RolloutRequest, TurnPlayer, draw_luck
from trainable.rollout.sampler import SampledReply, SamplingParams
from trainable.tiny.policies import SOKOBAN_TINY

LEVELS = make_validation_levels(Sokoban(), 3)  # seed 123: solved by Down, Left, Up; seed 124: by Up
TOKENIZER: Tokenizer = SOKOBAN_TINY.build_tokenizer()
STOP = TOKENIZER.token_to_id(END_OF_MESSAGE)
PROMPT_TEMPLATE = make_prompt_template(Sokoban(), "compact", 10)
LIMITS = TurnLimits(turns=5, actions_per_turn=2, actions=10)
PLAYER = TurnPlayer(Sokoban(), PROMPT_TEMPLATE, Codec(TOKENIZER), LIMITS, format_penalty=-0.1, context_length=512)
PlayedEpisodes = tuple[list[Episode], ScriptedSampler]
ACTIONS = {name[0]: name for name in ACTION_NAMES.values()}


def answer(actions: str) -> str:
    """Format a reply with the actions that the letters name: "DL" means Down and Left."""
    return format_reply("P", [ACTIONS[letter] for letter in actions]) + END_OF_MESSAGE


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def play(
    script: Sequence[Sequence[str]],
    player: TurnPlayer = PLAYER,
    levels: int = 1,
    copies: int = 1,
    make_sampler: Callable[[Sequence[Sequence[Sequence[int]]]], ScriptedSampler] = ScriptedSampler,
) -> PlayedEpisodes:
    """Play episodes in which row r replies script[r][turn], with 512 tokens of context and 24 per reply."""
    sampler = make_sampler([[encode(text) for text in row] for row in script])
    rng, luck_rng = np.random.default_rng(0), np.random.default_rng(0)
    request = RolloutRequest(LEVELS[:levels], copies, sampler, SamplingParams(1.0, 24, STOP), rng, luck_rng)
    episodes = player.roll_out(request)
    return episodes, sampler


def play_one(*replies: str, **changes: Any) -> Episode:
    (episode,) = play([replies], replace(PLAYER, **changes))[0]
    return episode


def summarize(episode: Episode) -> tuple[StopReason, float, int, int, int]:
    """Return the stop reason, the score, and the numbers of actions, turns and invalid turns."""
    turns = len(episode.texts)
    return episode.stop_reason, round(episode.score, 9), episode.actions, turns, episode.invalid_turns


MALFORMED = "D" + END_OF_MESSAGE
MIXED = "P</think><answer>U || Down</answer>" + END_OF_MESSAGE  # an unknown word, and Down


# Right is blocked by a wall: the action is legal, has no effect, and costs its price.
ENDS: dict[str, tuple[list[str], dict[str, Any], tuple[StopReason, float, int, int, int]]] = {
    "level 123 takes three actions": ([answer("DL"), answer("U")], {}, (StopReason.SUCCESS, 10.7, 3, 2, 0)),
    "an unknown word is penalised once": ([MIXED, answer("LU")], {}, (StopReason.SUCCESS, 10.6, 3, 2, 1)),
    "what follows the solving action is not played": (
        [answer("D"), answer("L"), answer("UU")],
        {},
        (StopReason.SUCCESS, 10.7, 3, 3, 0),
    ),
    "turns that cannot be parsed": ([MALFORMED] * 5, {}, (StopReason.MALFORMED, -0.5, 0, 5, 5)),
    "the penalty is a setting": ([MALFORMED] * 5, {"format_penalty": -0.3}, (StopReason.MALFORMED, -1.5, 0, 5, 5)),
    "ten actions that fail": ([answer("RR")] * 5, {}, (StopReason.OUT_OF_ACTIONS, -1.0, 10, 5, 0)),
    "the tenth action may solve the level": (
        [*[answer("RR")] * 3, answer("RD"), answer("LU")],
        {},
        (StopReason.SUCCESS, 10.0, 10, 5, 0),
    ),
    "actions beyond the tenth are not played": (
        [answer("RRRR"), answer("RRRR"), answer("RRDL"), answer("U")],
        {"limits": TurnLimits(5, 4, 10)},
        (StopReason.OUT_OF_ACTIONS, -1.0, 10, 3, 0),
    ),
    "turns run out before actions do": ([answer("R")] * 5, {}, (StopReason.OUT_OF_TURNS, -0.5, 5, 5, 0)),
    "one turn with an action": ([answer("R"), *[MALFORMED] * 4], {}, (StopReason.OUT_OF_TURNS, -0.5, 1, 5, 4)),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_and_scores_by_hand(name: str) -> None:
    replies, changes, expected = ENDS[name]
    assert summarize(play_one(*replies, **changes)) == expected


def test_the_actions_of_a_turn_are_those_that_were_executed() -> None:
    solving_replies = [answer("RRRR"), answer("RRR"), answer("DLUU")]
    replies_and_actions = {
        (answer("DL"), MIXED, MALFORMED): ["DL", "D", "", "", ""],
        tuple(solving_replies): ["RRRR", "RRR", "DLU"],  # not the second Up, which comes after the solution
        (answer("RRRR"), answer("RRRR"), answer("RRDL")): ["RRRR", "RRRR", "RR"],  # ten actions, and no more
    }
    for replies, letters in replies_and_actions.items():
        padded_replies = [*replies, *[MALFORMED] * (5 - len(replies))]
        episode = play_one(*padded_replies, limits=TurnLimits(5, 4, 10))
        assert ["".join(action[0] for action in actions) for actions in episode.turn_actions] == letters
    assert play_one(*[MALFORMED, answer("R")] * 2, MALFORMED).turn_validity == (False, True, False, True, False)


def decode_observations(sampler: ScriptedSampler, row: int = 0) -> list[str]:
    """Decode the tokens that the row received after each of its replies except the last."""
    return [TOKENIZER.decode(turn[row], skip_special_tokens=False) for turn in sampler.requests[1:] if row in turn]


def test_the_model_is_shown_rewards_without_penalties_and_what_is_left() -> None:
    _, sampler = play([[MIXED, MALFORMED, answer("LU")]])
    second_turn, third_turn = decode_observations(sampler)
    state = "State:\n####\nO###\nX_##\n_P##\n9 actions left"
    assert second_turn.startswith(f"\n<|im_start|>user\nReward:\n-0.1\nTurn 2:\n{state}")
    assert third_turn.startswith(f"\n<|im_start|>user\nReward:\n0.0\nTurn 3:\n{state}")


def test_a_reply_that_was_cut_gets_its_end_marker_as_given_text() -> None:
    (episode,), sampler = play([["P32 ", answer("DL"), answer("U")]])
    after_cut_reply, after_complete_reply = decode_observations(sampler)
    assert after_cut_reply.startswith("<|im_end|>\n<|im_start|>user\n")
    assert after_complete_reply.startswith("\n<|im_start|>user\n")
    (end_index,) = np.flatnonzero((episode.turns == 1) & ~episode.mask & (episode.tokens == STOP))
    assert episode.mask[end_index - 1]
    assert not episode.mask[end_index]
    assert summarize(episode) == (StopReason.SUCCESS, 10.6, 3, 3, 1)


SCRIPT = [
    [answer("DL"), answer("U")],
    [MALFORMED, "P32 X31 ", answer("DL"), answer("U")],
    [MALFORMED] * 5,
    [answer("RR")] * 5,
    [answer("U")],
    [answer("D"), MALFORMED, answer("UU"), MALFORMED, answer("L")],
    [answer("LLL"), answer("R")] * 3,
    ["D"] * 5,
    [answer("D")] * 5,
    [answer("UU")] * 5,
    [MALFORMED, answer("RL")] * 3,
    [answer("L"), answer("R")] * 3,
]


@pytest.fixture(scope="module")
def many_episodes() -> PlayedEpisodes:
    """Twelve episodes of three levels, with four episodes per level."""
    return play(SCRIPT, levels=3, copies=4)


def test_sampled_tokens_are_those_of_the_sampler_with_its_numbers(many_episodes: PlayedEpisodes) -> None:
    episodes, sampler = many_episodes
    for row, episode in enumerate(episodes):
        replies = [turn[row] for turn in sampler.samples if row in turn]
        assert len(replies) == len(episode.texts) == len(episode.turn_rewards)
        for turn, reply in enumerate(replies):
            is_reply = episode.mask & (episode.turns == turn)
            start = int(np.argmax(is_reply))
            assert np.flatnonzero(is_reply).tolist() == list(range(start, start + len(reply.token_ids)))
            assert episode.tokens[is_reply].tolist() == reply.token_ids.tolist() == encode(SCRIPT[row][turn])
            assert episode.logprobs[is_reply].tolist() == reply.logprobs.tolist()
            assert episode.entropies[is_reply].tolist() == reply.entropies.tolist()
        assert episode.response_tokens == sum(len(reply.token_ids) for reply in replies)
        assert not episode.logprobs[~episode.mask].any()
        assert not episode.entropies[~episode.mask].any()


def test_given_tokens_are_the_prompt_and_what_the_sampler_was_given_until_the_row_ended(
    many_episodes: PlayedEpisodes,
) -> None:
    episodes, sampler = many_episodes
    for row, episode in enumerate(episodes):
        observations = [turn[row] for turn in sampler.requests if row in turn]
        assert observations[0] == []
        num_turns = len(episode.texts)  # a row that has ended is not asked again
        assert [row in turn for turn in sampler.requests] == [turn < num_turns for turn in range(len(sampler.requests))]
        inputs = [sampler.prompts[row], *observations[1:]]
        for turn, input_ids in enumerate(inputs):
            is_input = ~episode.mask & (episode.turns == turn)
            assert episode.tokens[is_input].tolist() == input_ids
            assert not episode.mask[np.flatnonzero(is_input)].any()
        assert (np.diff(episode.turns) >= 0).all()
        assert len(episode.tokens) == sum(map(len, inputs)) + episode.response_tokens
        assert (episode.tokens.dtype, episode.mask.dtype) == (np.int64, np.bool_)
        assert (episode.logprobs.dtype, episode.entropies.dtype) == (np.float32, np.float32)


def test_episodes_of_a_group_stand_together_and_share_level_and_prompt(many_episodes: PlayedEpisodes) -> None:
    episodes, sampler = many_episodes
    assert [episode.group for episode in episodes] == [0] * 4 + [1] * 4 + [2] * 4
    assert [episode.level_seed for episode in episodes] == [123] * 4 + [124] * 4 + [125] * 4
    for episode in episodes:
        prompt = sampler.prompts[4 * episode.group]
        assert episode.tokens[: len(prompt)].tolist() == prompt
        assert not episode.mask[: len(prompt)].any()
    assert sampler.prompts[0] != sampler.prompts[4]
    assert episodes[4].success  # level 124 is solved by Up alone


def test_a_conversation_that_would_outgrow_the_context_ends() -> None:
    prompt_length = len(encode(PROMPT_TEMPLATE.format_first_turn(Observation(1, LEVELS[0].cells, 10))))
    reply_length = len(encode(answer("R")))
    # The 11 prompt tokens and 24 new tokens of the second turn fit, and those of the third do not.
    context_length = prompt_length + reply_length + 11 + 24
    episode = play_one(*[answer("R")] * 5, context_length=context_length)
    assert summarize(episode) == (StopReason.OUT_OF_CONTEXT, -0.2, 2, 2, 0)
    assert len(episode.tokens) <= context_length
    assert episode.mask[-1]
    assert summarize(play_one(*[answer("R")] * 5, context_length=context_length - 1))[3] == 1


def test_an_episode_is_truncated_if_a_reply_is_cut_or_the_context_ends() -> None:
    cut_reply = answer("R").removesuffix(END_OF_MESSAGE)
    cut_reply += " U" * ((24 - len(encode(cut_reply))) // 2)
    assert len(encode(cut_reply)) == 24
    assert play_one(cut_reply, *[answer("R")] * 4).is_truncated
    assert not play_one(*[answer("R")] * 5).is_truncated
    assert not play_one(*[MALFORMED] * 5).is_truncated
    # A reply that another token than the end marker ended is shorter.
    assert not play_one("D", *[answer("R")] * 4).is_truncated
    prompt_length = len(encode(PROMPT_TEMPLATE.format_first_turn(Observation(1, LEVELS[0].cells, 10))))
    assert play_one(*[answer("R")] * 5, context_length=prompt_length + len(encode(answer("R"))) + 11 + 23).is_truncated


def test_each_long_reply_is_punished_in_its_turn() -> None:
    replies, length = [answer("R"), answer("RR"), *[answer("R")] * 3], len(encode(answer("R")))
    plain = play_one(*replies)
    punished = play_one(*replies, overlong_buffer=24 - length, overlong_factor=0.5)  # from the length of "R" on
    differences = [after - before for after, before in zip(punished.turn_rewards, plain.turn_rewards, strict=True)]
    excess = len(encode(answer("RR"))) - length
    assert differences == pytest.approx([0, -0.5 * excess / (24 - length), 0, 0, 0])
    assert excess > 0


def test_random_numbers_of_an_episode_depend_on_its_index_and_take_no_more_memory_than_it_can_use() -> None:
    many, few = (draw_luck(np.random.default_rng(0), count, LIMITS, 512) for count in (7, 3))
    assert many.shape == (7, 5, 2)
    assert np.array_equal(many[:3], few)
    endless = TurnLimits(10**9, 10**9, actions=10)
    assert draw_luck(np.random.default_rng(0), 2, endless, 512).shape == (2, 512, 10)


@dataclass
class StreamingSampler(ScriptedSampler):
    """Finishes the replies of rows in any order: those that `draws` selects among the ones that wait."""

    draws: Callable[[list[int]], list[int]] = list
    waiting: dict[int, list[int]] = field(default_factory=dict)
    played_turns: dict[int, int] = field(default_factory=dict)
    submitted: list[tuple[int, list[int]]] = field(default_factory=list)

    def submit(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> None:
        assert not set(rows) & set(self.waiting), "a row has one reply at a time"
        self.waiting |= {row: list(ids) for row, ids in zip(rows, new_tokens, strict=True)}
        self.submitted += [(row, self.waiting[row]) for row in rows]

    def collect(self) -> list[tuple[int, SampledReply]]:
        finished = []
        for row in sorted(self.draws(sorted(self.waiting))):
            del self.waiting[row]
            turn = self.played_turns.get(row, 0)
            self.played_turns[row] = turn + 1
            finished.append((row, self._make_reply(row, turn)))
        return finished


SCRIPTS = [
    [answer("DL"), answer("U")],
    [MALFORMED, answer("RR"), answer("RR"), answer("RR"), answer("RR")],
    [answer("U"), answer("DL"), answer("U"), MALFORMED, MALFORMED],
    [answer("RR")] * 5,
    [answer("U")] * 5,
    [answer("U"), MALFORMED, MALFORMED, MALFORMED, answer("RR")],
]


@pytest.mark.long
@given(st.data())
def test_episodes_do_not_depend_on_the_order_in_which_replies_finish(data: st.DataObject) -> None:
    episodes, sampler = play(SCRIPTS, levels=2, copies=3)

    def draw_rows(rows: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))

    make_sampler = partial(StreamingSampler, draws=draw_rows)
    streamed_episodes, streaming_sampler = play(SCRIPTS, levels=2, copies=3, make_sampler=make_sampler)
    assert isinstance(streaming_sampler, StreamingSampler)
    assert not streaming_sampler.waiting
    for episode, streamed_episode in zip(episodes, streamed_episodes, strict=True):
        for name, value in episode._asdict().items():
            streamed_value = getattr(streamed_episode, name)
            is_array = isinstance(value, np.ndarray)
            assert np.array_equal(streamed_value, value) if is_array else streamed_value == value, name
    # Every row got the same messages, in its own order.
    for row in range(len(SCRIPTS)):
        messages = [request[row] for request in sampler.requests if row in request]
        assert [ids for other, ids in streaming_sampler.submitted if other == row] == messages


def test_an_episode_goes_on_while_others_wait() -> None:
    order: list[int] = []

    def finish_first(rows: list[int]) -> list[int]:
        order.append(rows[0])
        return rows[:1]

    play([SCRIPTS[3]] * 2, copies=2, make_sampler=partial(StreamingSampler, draws=finish_first))
    assert order == [0] * 5 + [1] * 5


def test_the_longest_first_prompt_and_a_whole_reply_have_to_fit() -> None:
    tokens = max(len(PLAYER.encode_first_turn(level)) for level in LEVELS)
    replace(PLAYER, context_length=tokens + 24).check_first_turns(LEVELS, response_length=24)
    message = rf"may need {tokens + 24} tokens \({tokens} of the prompt and rollout\.response_length=24\)"
    with pytest.raises(ValueError, match=message):
        replace(PLAYER, context_length=tokens + 23).check_first_turns(LEVELS, response_length=24)
