"""Prompts of a game in three styles, chat formats, and the parser of replies.

The text between messages comes from the model's chat format. A turn's text ends with `<think>`, the forced start of
the reply, except in the plain style. Only sampled tokens are trained; all other text is context.

Departures from the published code, which rebuilds conversations from text: replies stay in the conversation as sampled
(there: re-rendered without surplus actions), and training sees the same text as sampling (there: the warning after an
invalid turn is dropped, and role headers are trained).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainable.config.setting_types import PromptStyle
from trainable.envs.environment import Environment, State


@dataclass(frozen=True)
class ChatFormat:
    """The text around messages, for conversations that grow turn by turn.

    system_prefix: before the system message. first_user_prefix: from the system message to the first user message.
    reply_prefix: from a user message to the reply. end_marker: the single token, sampled by the model, that ends a
    reply. next_user_prefix: from the end marker to the next user message. strips_content: whether messages are stripped
    of blanks at both ends.
    """

    system_prefix: str
    first_user_prefix: str
    reply_prefix: str
    end_marker: str
    next_user_prefix: str
    strips_content: bool = False

    def format_first_turn(self, system: str, user: str) -> str:
        """Format the conversation up to its first reply."""
        opening = f"{self.system_prefix}{self._format_content(system)}{self.first_user_prefix}"
        return f"{opening}{self._format_content(user)}{self.reply_prefix}"

    def format_next_turn(self, user: str) -> str:
        """Format the text between the end of a reply and the next reply."""
        return f"{self.next_user_prefix}{self._format_content(user)}{self.reply_prefix}"

    def _format_content(self, text: str) -> str:
        return text.strip() if self.strips_content else text


CHATML = ChatFormat(
    system_prefix="<|im_start|>system\n",
    first_user_prefix="<|im_end|>\n<|im_start|>user\n",
    reply_prefix="<|im_end|>\n<|im_start|>assistant\n",
    end_marker="<|im_end|>",
    next_user_prefix="\n<|im_start|>user\n",
)
"""The format of Qwen models, also used for models without a chat template."""

END_OF_MESSAGE = CHATML.end_marker
START_OF_THOUGHT = "<think>"
ACTION_SEPARATOR = "||"
_REPLY = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>")


class ParsedReply(NamedTuple):
    """A parsed reply: thought, actions, and whether it gets the format penalty."""

    thought: str
    actions: tuple[str, ...]
    invalid: bool


class Observation(NamedTuple):
    """The contents of a turn: its number (from 1), the state, the actions left, and the result of the previous turn."""

    turn: int
    state: State
    actions_left: int
    last_reward: float = 0.0
    last_invalid: bool = False


def parse_reply(text: str, max_actions: int, read_action: Callable[[str], str | None]) -> ParsedReply:
    """Parse the text after the forced `<think>`: the first match of think and answer tags.

    The answer is split at `||`. Only its first `max_actions` words count; surplus words are not penalized. Words that
    `read_action` rejects are dropped. A reply is invalid if a counted word is rejected, or if no action is left.
    """
    match = _REPLY.search(START_OF_THOUGHT + text)
    if match is None:
        return ParsedReply(thought="", actions=(), invalid=True)
    thought, answer = _strip_tags(match[1]), _strip_tags(match[2])
    words = [word for text in answer.split(ACTION_SEPARATOR) if (word := text.strip())][:max_actions]
    actions = tuple([action for word in words if (action := read_action(word)) is not None])
    return ParsedReply(thought, actions, len(actions) < len(words) or not actions)


def parse_plain_reply(text: str, max_actions: int, read_action: Callable[[str], str | None]) -> ParsedReply:
    """Parse a reply of the plain style: all of it is one action. It is invalid if `read_action` rejects it."""
    action = read_action(text)
    return ParsedReply("", () if action is None else (action,), action is None)


def get_reply_start(style: PromptStyle) -> str:
    """Return the forced start of each reply, which follows the prompt."""
    return "" if style == "plain" else START_OF_THOUGHT


def _strip_tags(text: str) -> str:
    if "<" in text:
        for tag in _TAGS:
            text = text.replace(tag, "")
    return text.strip()


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt style with its limits filled in.

    format_first_turn(observation): the text before the first reply. format_next_turn(observation): the text between a
    reply's end marker and the next reply. parse(text, max_actions, read_action): parses a reply.
    """

    format_first_turn: Callable[[Observation], str]
    format_next_turn: Callable[[Observation], str]
    end_marker: str
    parse: Callable[[str, int, Callable[[str], str | None]], ParsedReply] = parse_reply


def make_prompt_template(
    environment: Environment[Any], style: PromptStyle, max_actions: int, chat: ChatFormat = CHATML
) -> PromptTemplate:
    """Make the prompt template of a game for a style and a chat format."""
    is_compact, reply_start = style == "compact", get_reply_start(style)
    system = environment.title if is_compact else environment.format_instructions(max_actions)

    def format_turn(observation: Observation) -> str:
        state = environment.format_state(observation.state, style)
        if style == "plain":
            return state
        if is_compact:
            return f"{format_turn_header(observation.turn)}{state}\n{format_actions_left(observation.actions_left)}"
        warning = "Your last answer held no valid action; the state has not changed.\n"
        return (
            f"\nTurn {observation.turn}:\nState:\n{state}\n{warning if observation.last_invalid else ''}"
            f"You have {observation.actions_left} actions left. Always output: "
            "<think> [Your thoughts] </think> <answer> [your answer] </answer> with no extra text. "
            "Strictly follow this format. Max response length: 120 words (tokens).\n"
        )

    return PromptTemplate(
        lambda observation: chat.format_first_turn(system, format_turn(observation)) + reply_start,
        lambda observation: (
            chat.format_next_turn(format_reward(observation.last_reward) + format_turn(observation)) + reply_start
        ),
        chat.end_marker,
        parse_plain_reply if style == "plain" else parse_reply,
    )


def format_board(
    grid: str, shape: tuple[int, ...], cells_by_label: Mapping[str, Sequence[int]], observation_format: str
) -> str:
    """Format a board as its grid, as the (row, col) positions of its objects, or as both, each under a title.

    grid: one line per row. shape: (rows, cols), printed before the positions. cells_by_label: the flat cells of each
    kind of object; kinds without cells are left out. observation_format: grid, coord or grid_coord.
    Source: published code (both title lines end in a space).
    """
    if observation_format == "grid":
        return grid
    rows, cols = shape
    lines = [f"Board size: {rows} rows x {cols} cols (zero-indexed)."]
    for label, cells in cells_by_label.items():
        if cells:
            lines.append(f"{label}: {', '.join(f'({cell // cols}, {cell % cols})' for cell in cells)}")
    coordinates = "\n".join(lines)
    return coordinates if observation_format == "coord" else f"Coordinates: \n{coordinates}\nGrid Map: \n{grid}"


def format_reward(reward: float) -> str:
    """Format the reward of the previous turn, as shown to the model."""
    return f"Reward:\n{reward:.1f}\n"


def format_action_rules(names: Sequence[str], max_actions: int) -> str:
    """Format the sentences on a game's actions that end its instructions in the full style."""
    return (
        f"Your available actions are:\n{', '.join(names)}\n"
        f'You may take up to {max_actions} actions, separated by the action separator " {ACTION_SEPARATOR} ".'
    )


def format_turn_header(turn: int) -> str:
    """Format the header of a turn in the compact style."""
    return f"Turn {turn}:\nState:\n"


def format_actions_left(actions_left: int) -> str:
    """Format the last line of a turn in the compact style."""
    return f"{actions_left} actions left\n"


def format_reply(thought: str, actions: Sequence[str]) -> str:
    """Format a valid reply for demonstrations: the text after the forced `<think>`, without the end marker."""
    return f"{thought}</think><answer>{f' {ACTION_SEPARATOR} '.join(actions)}</answer>"
