from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.trainable.diagnostics.conftest import Rollout
from trainable.diagnostics.collapse import (
    Turn,
    compute_thought_coverage,
    read_turns,
    sample_first_turn_pairs,
    sample_trajectory_pairs,
)
from trainable.envs.prompts import END_OF_MESSAGE
from trainable.models.codec import Codec
from trainable.rollout.episode import Episode, StopReason
from trainable.tiny.policies import SOKOBAN_TINY

TINY_TOKENIZER = SOKOBAN_TINY.build_tokenizer()


def make_byte_tokenizer() -> Tokenizer:
    """Make a byte tokenizer with a few merges, as of a hub model. A tag is several tokens, and some cross its ends."""
    merges = [("<", "/"), (".", "</"), ("Ġ", "</"), ("t", "h"), ("th", "i"), ("Ġ", "U"), ("Ġ", "Ġ"), (">", "<")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_MESSAGE])
    return tokenizer


BYTE_TOKENIZER = make_byte_tokenizer()


def make_episode(replies: Sequence[str], tokenizer: Tokenizer = TINY_TOKENIZER, group: int = 0) -> Episode:
    """Make an episode with `replies`. The prompt of a turn is "<think>", after a header in later turns."""
    forced_tokens = [tokenizer.encode("Turn 1:\nState:\n" * (turn > 0) + "<think>").ids for turn in range(len(replies))]
    reply_tokens = [tokenizer.encode(reply).ids for reply in replies]
    segments = [segment for pair in zip(forced_tokens, reply_tokens, strict=True) for segment in pair]
    sizes = [len(segment) for segment in segments]
    zeros = np.zeros(sum(sizes), dtype=np.float32)
    return Episode(
        level_seed=0,
        group=group,
        tokens=np.concatenate([np.array(segment, dtype=np.int64) for segment in segments]),
        mask=np.repeat([False, True] * len(replies), sizes),
        logprobs=zeros,
        entropies=zeros,
        turns=np.repeat(np.arange(len(segments)) // 2, sizes),
        turn_rewards=(0.0,) * len(replies),
        turn_actions=(("Up",),) * len(replies),
        turn_validity=(True,) * len(replies),
        stop_reason=StopReason.OUT_OF_TURNS,
        texts=tuple(reply.split("<|im_end|>")[0] for reply in replies),
    )


def read_thoughts(replies: Sequence[str], tokenizer: Tokenizer = TINY_TOKENIZER) -> list[str]:
    """Read the text of the thought of each turn."""
    (turns,) = read_turns([make_episode(replies, tokenizer)], Codec(tokenizer))
    return [tokenizer.decode(turn.thought.tolist()) for turn in turns]


# ---------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "end", ["</think><answer>Up</answer><|im_end|>", "</think> <answer>U", "</think>", "</think>L<|im_end|>"]
)
@pytest.mark.parametrize("tokenizer", [TINY_TOKENIZER, BYTE_TOKENIZER], ids=["tiny", "bytes"])
def test_a_thought_is_the_text_before_its_end(tokenizer: Tokenizer, end: str) -> None:
    assert read_thoughts(["P32 X22 O11 UL" + end], tokenizer) == ["P32 X22 O11 UL"]


@pytest.mark.parametrize("tokenizer", [TINY_TOKENIZER, BYTE_TOKENIZER], ids=["tiny", "bytes"])
@pytest.mark.parametrize(
    "reply",
    [
        "</think><answer>Up</answer>",
        " \n </think><answer>Up</answer>",
        "UL",
        "UL<answer>Up</answer><|im_end|>",
        "UL</t",
    ],
    ids=["empty", "blank", "cut off", "not closed", "half closed"],
)
def test_a_thought_that_is_empty_or_not_closed_has_no_tokens(tokenizer: Tokenizer, reply: str) -> None:
    (turns,) = read_turns([make_episode([reply], tokenizer)], Codec(tokenizer))
    assert len(turns[0].thought) == 0
    assert not turns[0].is_valid


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("\n\nUL\n</think>", "UL"),  # blank tokens at both ends are removed
        ("U  L </think>", "U  L"),  # " </" contains the start of the tag, and blanks inside are kept
        ("think. Up.</think>", "think. Up"),  # ".</" contains the start of the tag, so the full stop is removed with it
        ("U</think>L</think>", "U"),  # the first end counts
        ("é</think>", "é"),  # one letter of two tokens, neither of which is text by itself
        (" Up</think>", " Up"),  # the blank is part of a token with text
    ],
)
def test_only_tokens_wholly_inside_the_thought_are_kept(reply: str, expected: str) -> None:
    assert read_thoughts([reply], BYTE_TOKENIZER) == [expected]


def test_a_prompt_is_the_whole_conversation_up_to_the_forced_start() -> None:
    replies = ["UL</think><answer>Up</answer><|im_end|>", "D</think><answer>Down</answer><|im_end|>"]
    episode = make_episode(replies)
    ((first, second),) = read_turns([episode], Codec(TINY_TOKENIZER))
    assert TINY_TOKENIZER.decode(first.prompt.tolist()) == "<think>"
    prompt = TINY_TOKENIZER.decode(second.prompt.tolist(), skip_special_tokens=False)
    assert prompt == "<think>" + replies[0] + "Turn 1:\nState:\n<think>"
    assert np.array_equal(np.concatenate((second.prompt, second.thought)), episode.tokens[: len(second.prompt) + 1])


# ---------------------------------------------------------------------------- counting and sampling


def make_turn(prompt: Sequence[int], thought: Sequence[int]) -> Turn:
    return Turn(np.array(prompt, dtype=np.int64), np.array(thought, dtype=np.int64))


# Five episodes of three groups. Groups 0 and 2 have the same opening.
EPISODES = [
    [make_turn([1], [10]), make_turn([1, 2], [11])],
    [make_turn([1], [])],
    [make_turn([5], [12, 13]), make_turn([5, 6], []), make_turn([5, 6, 7], [14])],
    [make_turn([1], [15])],
    [make_turn([1], []), make_turn([1, 9], [])],
]
GROUPS = [0, 0, 1, 2, 2]


def test_coverage_by_hand() -> None:
    coverage = {"num_total": 5, "num_valid": 3, "valid_rate": 3 / 5}
    expected = {f"collapse_first_turn_{name}": value for name, value in coverage.items()}
    assert compute_thought_coverage(EPISODES) == pytest.approx({"collapse_valid_thinking_rate": 5 / 9, **expected})
    assert set(compute_thought_coverage([]).values()) == {0}


def test_first_turns_are_paired_with_the_openings_of_their_groups() -> None:
    pairs = sample_first_turn_pairs(EPISODES, GROUPS, 64, np.random.default_rng(0))
    assert [list(thought) for thought in pairs.thoughts] == [[10], [12, 13], [15]]
    assert [list(prompt) for prompt in pairs.prompts] == [[1], [5], [1]]
    assert pairs.own_columns.tolist() == [0, 1, 2]
    assert pairs.classes.tolist() == [0, 1, 0]
    # A group without a valid first turn has no column.
    pairs = sample_first_turn_pairs(EPISODES, [0, 3, 1, 1, 0], 64, np.random.default_rng(0))
    assert [list(prompt) for prompt in pairs.prompts] == [[1], [5]]
    assert pairs.own_columns.tolist() == [0, 1, 1]


def make_episodes(count: int) -> list[list[Turn]]:
    """Make episodes of one to three turns with unique tokens. Every fourth episode has no valid turn."""
    return [
        [make_turn([number, index], [number, index] if number % 4 else []) for index in range(1 + number % 3)]
        for number in range(count)
    ]


def test_first_turns_are_drawn_without_replacement_and_follow_their_own_prompt() -> None:
    episodes = make_episodes(40)
    pairs = sample_first_turn_pairs(episodes, range(40), 8, np.random.default_rng(1))
    numbers = [int(thought[0]) for thought in pairs.thoughts]
    assert len(set(numbers)) == len(numbers) == 8
    assert [int(pairs.prompts[column][0]) for column in pairs.own_columns] == numbers
    counts = np.zeros(40)
    for seed in range(400):
        for thought in sample_first_turn_pairs(episodes, range(40), 8, np.random.default_rng(seed)).thoughts:
            counts[thought[0]] += 1
    assert not counts[::4].any()
    # Each of the 30 valid turns is in 8/30 of the draws: 107 of 400, within five standard errors of 8.9.
    assert np.delete(counts, np.arange(0, 40, 4)) == pytest.approx(400 * 8 / 30, abs=45)


def test_trajectory_draws_have_one_column_each_and_weigh_episodes_equally() -> None:
    episodes = make_episodes(8)
    counts: dict[tuple[int, int], int] = {}
    draws = 0
    for seed in range(1500):
        pairs = sample_trajectory_pairs(episodes, 4, np.random.default_rng(seed))
        assert len(pairs.prompts) == len(pairs.thoughts) == len(pairs.own_columns) == len(pairs.classes) <= 4
        assert pairs.own_columns.tolist() == list(range(len(pairs.own_columns)))
        for prompt, thought in zip(pairs.prompts, pairs.thoughts, strict=True):
            assert np.array_equal(prompt, thought)
            turn_key = int(thought[0]), int(thought[1])
            counts[turn_key] = counts.get(turn_key, 0) + 1
        draws += 4
    for number in range(8):
        for turn_index in range(1 + number % 3):
            share = counts.get((number, turn_index), 0) / draws
            expected = 1 / 8 / (1 + number % 3) if number % 4 else 0
            assert share == pytest.approx(expected, abs=5 * (0.125 / draws) ** 0.5)


def test_a_turn_drawn_twice_has_two_columns_of_one_class() -> None:
    episodes = [[make_turn([1], [2])], [make_turn([1], [3]), make_turn([4], [5])]]
    pairs = sample_trajectory_pairs(episodes, 64, np.random.default_rng(0))
    prompts, classes = [tuple(prompt) for prompt in pairs.prompts], pairs.classes.tolist()
    assert len(prompts) == 3  # as many draws as there are valid turns
    class_of_prompt = dict(zip(prompts, classes, strict=True))
    assert [class_of_prompt[prompt] for prompt in prompts] == classes
    assert len(set(class_of_prompt.values())) == len(class_of_prompt)


# ---------------------------------------------------------------------------- a real rollout


def test_thoughts_of_a_rollout_equal_those_of_its_texts(rollout: Rollout) -> None:
    _, codec, episodes = rollout
    for episode, turns in zip(episodes, read_turns(episodes, codec), strict=True):
        for text, turn in zip(episode.texts, turns, strict=True):
            expected = text.split("</think>")[0].strip() if "</think>" in text else ""
            assert codec.decode([turn.thought])[0].strip() == expected
