"""Tokenizers of the tiny policies: a few hundred pieces of the compact prompt's text, in the hub's file format.

Each fixed part of the template is one token, and so are the pieces of a game, such as two neighboring cells of a board.
The longest matching piece is used. Every symbol of a state or a reply is also a piece by itself, so decoding restores
any text of the prompts and replies exactly.
"""

from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models

from trainable.envs.environment import TurnLimits
from trainable.envs.prompts import (
    ACTION_SEPARATOR,
    CHATML,
    END_OF_MESSAGE,
    START_OF_THOUGHT,
    format_actions_left,
    format_reward,
    format_turn_header,
)

PAD = "<|endoftext|>"
UNKNOWN = "<|unknown|>"


class Vocabulary(NamedTuple):
    """The pieces of a game: of its states, thoughts and actions, and the rewards that a next turn may show."""

    rewards: tuple[float, ...]
    state_pieces: tuple[str, ...]
    thought_pieces: tuple[str, ...]
    action_pieces: tuple[str, ...]


def format_place(symbol: str, row: int, col: int) -> str:
    """How a thought writes a position: "P32 " is the player at row 3, column 2."""
    return f"{symbol}{row}{col} "


def list_pieces(title: str, vocabulary: Vocabulary, limits: TurnLimits) -> list[str]:
    """All pieces, in the order of their ids. The shipped weights depend on this order.

    title: the system message of the game. limits: turns and actions left have a piece for each number up to these.
    """
    turn_end = CHATML.reply_prefix + START_OF_THOUGHT
    return list(
        dict.fromkeys(  # each piece once, in order of first occurrence
            [
                PAD,
                "<|im_start|>",
                END_OF_MESSAGE,
                UNKNOWN,
                CHATML.system_prefix + title + END_OF_MESSAGE,
                CHATML.next_user_prefix,
                *(CHATML.next_user_prefix + format_reward(reward) for reward in vocabulary.rewards),
                *(format_turn_header(turn) for turn in range(1, limits.turns + 1)),
                *(format_actions_left(left) + turn_end for left in range(1, limits.actions + 1)),
                turn_end.removeprefix(END_OF_MESSAGE),
                *vocabulary.state_pieces,
                *vocabulary.thought_pieces,
                "<think>",
                "</think>",
                "<answer>",
                "</answer>",
                "</think><answer>",
                *vocabulary.action_pieces,
                f" {ACTION_SEPARATOR} ",
                "Reward:\n",
                "Turn ",
                "State:\n",
                " actions left\n",
                "assistant\n",
                "user\n",
                "system\n",
                *"0123456789|-.: \n",
            ]
        )
    )


def build_tokenizer(pieces: list[str]) -> Tokenizer:
    """The tokenizer of `list_pieces` in the format of Hugging Face's fast tokenizers."""
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    # Added tokens are matched leftmost and longest, before any rule of the model type. Otherwise transformers would
    # apply byte-pair rules, which it gives to every Qwen2 model whatever class the files name, and split these pieces.
    special_pieces = [END_OF_MESSAGE, PAD, UNKNOWN]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces if piece not in special_pieces])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special_pieces])
    return tokenizer


def write_tokenizer(folder: Path, pieces: list[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json, which AutoTokenizer reads."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(pieces),
        pad_token=PAD,
        eos_token=END_OF_MESSAGE,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    ).save_pretrained(folder)
