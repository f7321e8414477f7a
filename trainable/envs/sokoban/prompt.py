"""Prompts for Sokoban in two styles, and the parser of replies.

The text between messages comes from the model's chat format. The text of a turn ends with the forced start of the
reply, `<think>`. Only tokens that the model sampled are trained; all other text is context.

Departures from the published code, which rebuilds conversations from text: a reply stays in the conversation as sampled
(there: re-rendered, without surplus actions), and training sees the text that sampling saw (there: the warning after an
invalid turn is dropped, and role headers are trained).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainable.envs.chat import CHATML, ChatFormat
from trainable.envs.sokoban.board import Action, Tile
from trainable.envs.sokoban.text import SYMBOLS, render

END_OF_MESSAGE = CHATML.end_marker
START_OF_THOUGHT = "<think>"
ACTION_SEPARATOR = "||"
_REPLY = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>")
_MEANINGS = {
    Tile.WALL: "wall",
    Tile.FLOOR: "empty",
    Tile.TARGET: "target",
    Tile.BOX_ON_TARGET: "box on target",
    Tile.BOX: "box",
    Tile.PLAYER: "player",
    Tile.PLAYER_ON_TARGET: "player on target",
}
_ACTIONS = {action.name.lower(): action for action in Action if action != Action.NONE}


class ParsedReply(NamedTuple):
    """A parsed reply: thought, actions, and whether it gets the format penalty."""

    thought: str
    actions: tuple[Action, ...]
    invalid: bool


class Observation(NamedTuple):
    """The contents of a turn: its number from 1, the board (R, C), actions left, the result of the previous turn."""

    turn: int
    cells: np.ndarray
    actions_left: int
    last_reward: float = 0.0
    last_invalid: bool = False


def parse_reply(text: str, max_actions: int) -> ParsedReply:
    """Parse the text after the forced `<think>`: the first match of think and answer tags.

    The answer is split at `||`. Only the first `max_actions` words count; surplus words have no penalty. Unknown words
    among them are dropped. A reply is invalid if a word that counts is unknown, or if no action is left.
    """
    match = _REPLY.search(START_OF_THOUGHT + text)
    if match is None:
        return ParsedReply(thought="", actions=(), invalid=True)
    thought, answer = (_strip_tags(group) for group in match.groups())
    words = [word.strip() for word in answer.split(ACTION_SEPARATOR)]
    words = [word for word in words if word][:max_actions]
    actions = tuple(_ACTIONS[word.lower()] for word in words if word.lower() in _ACTIONS)
    return ParsedReply(thought, actions, len(actions) < len(words) or not actions)


def _strip_tags(text: str) -> str:
    for tag in _TAGS:
        text = text.replace(tag, "")
    return text.strip()


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt style with its limits filled in.

    format_first_turn(observation): the text before the first reply. format_next_turn(observation): the text between a
    reply's end marker and the next reply. end_marker: the marker that ends a reply.
    """

    format_first_turn: Callable[[Observation], str]
    format_next_turn: Callable[[Observation], str]
    end_marker: str


def make_prompt_template(
    style: str, observation_format: str, max_actions: int, chat: ChatFormat = CHATML
) -> PromptTemplate:
    """The prompt template of a style, `full` or `compact`, in a chat format; ValueError for another style."""
    if style not in ("full", "compact"):
        raise ValueError(f"There is no prompt style `{style}`: choose full or compact.")
    system = COMPACT_SYSTEM_PROMPT if style == "compact" else _make_system_prompt(max_actions)

    def format_state(observation: Observation) -> str:
        return (
            _format_compact_state(observation)
            if style == "compact"
            else _format_full_state(observation, observation_format)
        )

    return PromptTemplate(
        lambda observation: chat.format_first_turn(system, format_state(observation)) + START_OF_THOUGHT,
        lambda observation: (
            chat.format_next_turn(format_reward(observation.last_reward) + format_state(observation)) + START_OF_THOUGHT
        ),
        chat.end_marker,
    )


def format_reward(reward: float) -> str:
    """The reward of the previous turn, as shown to the model."""
    return f"Reward:\n{reward:.1f}\n"


def _make_system_prompt(max_actions: int) -> str:
    names = ", ".join(name.capitalize() for name in _ACTIONS)
    legend = ", ".join(f"{SYMBOLS[tile]}: {meaning}" for tile, meaning in _MEANINGS.items())
    return (
        "You are a helpful assistant. You are solving a Sokoban puzzle: move the player so that every box stands on a "
        "target. You are given a grid and zero-indexed coordinates (row, column), from (0, 0) at the top left to "
        "(5, 5) at the bottom right. Moving toward a box next to you pushes it one cell, if the cell behind it is "
        "free. You cannot push a box through a wall or another box, and you cannot pull. Your answer is a sequence "
        "of actions, for example <answer>Right || Right || Up</answer>.\n"
        f"The meaning of each symbol is:\n{legend}\n"
        f"Your available actions are:\n{names}\n"
        f'You may take up to {max_actions} actions, separated by the action separator " || ".'
    )


def _format_full_state(observation: Observation, observation_format: str) -> str:
    warning = "Your last answer held no valid action; the state has not changed.\n" if observation.last_invalid else ""
    return (
        f"\nTurn {observation.turn}:\nState:\n{render(observation.cells, observation_format)}\n{warning}"
        f"You have {observation.actions_left} actions left. Always output: "
        "<think> [Your thoughts] </think> <answer> [your answer] </answer> with no extra text. "
        "Strictly follow this format. Max response length: 120 words (tokens).\n"
    )


COMPACT_SYSTEM_PROMPT = "Sokoban"


def format_turn_header(turn: int) -> str:
    """The header of a turn in the compact style."""
    return f"Turn {turn}:\nState:\n"


def format_actions_left(actions_left: int) -> str:
    """The last line of a turn in the compact style."""
    return f"{actions_left} actions left\n"


def _format_compact_state(observation: Observation) -> str:
    # Every level has an outer wall, so the compact style leaves it out.
    grid = render(observation.cells[1:-1, 1:-1], "grid")
    return f"{format_turn_header(observation.turn)}{grid}\n{format_actions_left(observation.actions_left)}"


def format_reply(thought: str, actions: Sequence[Action]) -> str:
    """A well-formed reply after the forced `<think>`, without its end marker; demonstrations consist of these."""
    words = f" {ACTION_SEPARATOR} ".join(action.name.capitalize() for action in actions)
    return f"{thought}</think><answer>{words}</answer>"
