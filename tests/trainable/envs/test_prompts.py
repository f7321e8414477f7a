from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.examples import draw_examples
from trainable.envs.level_sets import make_validation_levels
from trainable.envs.prompts import Observation, ParsedReply, format_reply, make_prompt_template, parse_reply
from trainable.envs.sokoban.game import Sokoban

UP, DOWN, LEFT, RIGHT = "Up", "Down", "Left", "Right"
LEVEL_123 = make_validation_levels(Sokoban(), 1)[0].cells


def read(text: str, max_actions: int) -> ParsedReply:
    return parse_reply(text, max_actions, Sokoban().read_action)


def make_answer(text: str) -> str:
    return f"why</think><answer>{text}</answer>"


# answer, actions, invalid; at most two actions
ANSWERS: list[tuple[str, tuple[str, ...], bool]] = [
    ("Up || Left", (UP, LEFT), False),
    ("Up", (UP,), False),
    (" down\n||\tRIGHT ", (DOWN, RIGHT), False),  # blanks around words, any case
    ("|| Up || || Down ||", (UP, DOWN), False),  # blank items do not count as actions
    ("Up || Left || Down", (UP, LEFT), False),  # extra actions are cut without a penalty
    ("Jump || Up || Left", (UP,), True),  # cut first, then unknown words dropped
    ("Up Left", (), True),
    ("", (), True),
    ("<answer>Up", (UP,), False),  # stray tags and markers are removed
    ("<|im_start|>Up <|im_end|>|| Le<think>ft", (UP, LEFT), False),
]


@pytest.mark.parametrize(("text", "actions", "invalid"), ANSWERS)
def test_answers(text: str, actions: tuple[str, ...], invalid: bool) -> None:
    assert read(make_answer(text), max_actions=2) == ParsedReply("why", actions, invalid)


def parse_literally(text: str, limit: int) -> tuple[list[str], bool]:
    """Parse by the published rules, character by character: action names, and whether the penalty is due."""
    open_answer, close_answer, close_thought = "<answer>", "</answer>", "</think>"
    for index in range(len(text)):
        if not text.startswith(close_thought, index):
            continue
        rest_of_reply = text[index + len(close_thought) :].lstrip()
        if rest_of_reply.startswith(open_answer) and close_answer in rest_of_reply:
            answer_text = rest_of_reply[len(open_answer) : rest_of_reply.index(close_answer)]
            break
    else:
        return [], True
    for tag in ("<think>", close_thought, open_answer, close_answer, "<|im_start|>", "<|im_end|>"):
        answer_text = answer_text.replace(tag, "")
    words = [item.strip().lower() for item in answer_text.strip().split("||") if item.strip() != ""][:limit]
    known_words = [word for word in words if word in ("up", "down", "left", "right")]
    return known_words, known_words == [] or known_words != words


PIECES: Sequence[str] = (
    *("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>", "||", "|", " ", "\n"),
    *("Up", "down", "LEFT", "Right", "Jump", "none", "√", "\x00", "<", ">"),
)
replies = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=8).map(lambda pieces: make_answer("".join(pieces))),
    st.text(max_size=40),
)


@draw_examples(300)
@given(replies, st.integers(1, 4))
def test_any_text_is_read_by_the_rules(text: str, limit: int) -> None:
    reply = read(text, limit)
    action_names, invalid = parse_literally(text, limit)
    assert [action.lower() for action in reply.actions] == action_names
    assert reply.invalid == invalid
    assert len(reply.actions) <= limit


@given(st.lists(st.sampled_from([UP, DOWN, LEFT, RIGHT]), min_size=1, max_size=3), st.text("UDLRPXO123 ", max_size=9))
def test_a_well_formed_reply_is_read_back(actions: list[str], thought: str) -> None:
    assert read(format_reply(thought, actions), 3) == ParsedReply(thought.strip(), tuple(actions), False)


FULL_OPENING = """<|im_start|>system
You are a helpful assistant. You are solving a Sokoban puzzle: move the player so that every box stands on a target. \
You are given a grid and zero-indexed coordinates (row, column), from (0, 0) at the top left to (5, 5) at the bottom \
right. Moving toward a box next to you pushes it one cell, if the cell behind it is free. You cannot push a box \
through a wall or another box, and you cannot pull. Your answer is a sequence of actions, for example \
<answer>Right || Right || Up</answer>.
The meaning of each symbol is:
#: wall, _: empty, O: target, √: box on target, X: box, P: player, S: player on target
Your available actions are:
Up, Down, Left, Right
You may take up to 10 actions, separated by the action separator " || ".<|im_end|>
<|im_start|>user

Turn 1:
State:
Coordinates:\x20
Board size: 6 rows x 6 cols (zero-indexed).
Targets: (2, 1)
Boxes: (3, 1)
Player: (3, 2)
Grid Map:\x20
######
######
#O####
#XP###
#__###
######
You have 10 actions left. Always output: <think> [Your thoughts] </think> <answer> [your answer] </answer> with no \
extra text. Strictly follow this format. Max response length: 120 words (tokens).
<|im_end|>
<|im_start|>assistant
<think>"""

FULL_FOLLOWING = """
<|im_start|>user
Reward:
-0.2

Turn 3:
State:
######
######
#O####
#XP###
#__###
######
Your last answer held no valid action; the state has not changed.
You have 8 actions left. Always output: <think> [Your thoughts] </think> <answer> [your answer] </answer> with no \
extra text. Strictly follow this format. Max response length: 120 words (tokens).
<|im_end|>
<|im_start|>assistant
<think>"""

COMPACT_OPENING = """<|im_start|>system
Sokoban<|im_end|>
<|im_start|>user
Turn 1:
State:
####
O###
XP##
__##
10 actions left
<|im_end|>
<|im_start|>assistant
<think>"""

COMPACT_FOLLOWING = """
<|im_start|>user
Reward:
-0.2
Turn 3:
State:
####
O###
XP##
__##
8 actions left
<|im_end|>
<|im_start|>assistant
<think>"""


def test_the_full_prompt() -> None:
    prompt_template = make_prompt_template(Sokoban(), "full", 10)
    assert prompt_template.format_first_turn(Observation(1, LEVEL_123, 10)) == FULL_OPENING
    prompt_template = make_prompt_template(Sokoban("grid"), "full", 10)
    observation = Observation(3, LEVEL_123, 8, last_reward=-0.2, last_invalid=True)
    assert prompt_template.format_next_turn(observation) == FULL_FOLLOWING
    warning = "Your last answer held no valid action; the state has not changed.\n"
    text = prompt_template.format_next_turn(observation._replace(last_invalid=False))
    assert text == FULL_FOLLOWING.replace(warning, "")
    text = make_prompt_template(Sokoban("grid"), "full", 7).format_first_turn(Observation(1, LEVEL_123, 7))
    assert "You may take up to 7 actions," in text


def test_the_compact_prompt() -> None:
    prompt_template = make_prompt_template(Sokoban(), "compact", 10)
    assert prompt_template.format_first_turn(Observation(1, LEVEL_123, 10)) == COMPACT_OPENING
    assert prompt_template.format_next_turn(Observation(3, LEVEL_123, 8, last_reward=-0.2)) == COMPACT_FOLLOWING
