"""The tokenizer of sokoban-tiny: a few hundred pieces of the compact prompt's text, in the hub's file format.

Two neighboring cells of a level are one token, as in a byte-pair tokenizer trained on this text, and so is each fixed
part of the template. The longest matching piece is used. Every symbol of a level or a reply is also a piece by itself,
so decoding restores any text of the prompts and replies exactly.
"""

import itertools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from trainable.envs.chat import CHATML
from trainable.envs.prompts import (
    ACTION_SEPARATOR,
    END_OF_MESSAGE,
    START_OF_THOUGHT,
    format_actions_left,
    format_reward,
    format_turn_header,
)
from trainable.envs.sokoban.board import Action, Tile
from trainable.envs.sokoban.game import ACTION_NAMES, Sokoban
from trainable.envs.sokoban.text import SYMBOLS

PAD = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
PLAN_LETTERS: dict[Action, str] = {action: name[0] for action, name in ACTION_NAMES.items()}
ACTIONS_SHOWN, TURNS_SHOWN = 10, 5
"""Actions and turns with pieces of their own: the defaults of env.max_actions_per_traj and env.max_turn."""


def format_place(symbol: str, row: int, col: int) -> str:
    """How a thought writes a position: "P32 " is the player at row 3, column 2."""
    return f"{symbol}{row}{col} "


def _can_neighbor(first: str, second: str) -> bool:
    """Whether a one-box level can contain both: at most one player, one box and one target."""
    contents = {"O": "target", "√": "target box", "X": "box", "P": "player", "S": "player target"}
    return not set(contents.get(first, "").split()) & set(contents.get(second, "").split())


def make_vocabulary() -> list[str]:
    """All pieces, in the order of their ids. The shipped weights depend on this order."""
    cells = [SYMBOLS[tile] for tile in Tile]
    pairs = [a + b for a, b in itertools.product(cells, cells) if _can_neighbor(a, b)]
    inner_range = range(1, 5)  # rows and columns of a 6x6 level without its walls
    turn_end = CHATML.reply_prefix + START_OF_THOUGHT
    return list(
        dict.fromkeys(  # each piece once, in order of first occurrence
            [
                PAD,
                "<|im_start|>",
                END_OF_MESSAGE,
                UNKNOWN,
                CHATML.system_prefix + Sokoban().title + END_OF_MESSAGE,
                CHATML.next_user_prefix,
                *(CHATML.next_user_prefix + format_reward(-tenths / 10 + 0.0) for tenths in range(ACTIONS_SHOWN + 1)),
                *(format_turn_header(turn) for turn in range(1, TURNS_SHOWN + 1)),
                *(format_actions_left(left) + turn_end for left in range(1, ACTIONS_SHOWN + 1)),
                turn_end.removeprefix(END_OF_MESSAGE),
                *pairs,
                *(pair + "\n" for pair in pairs),
                *cells,
                *(format_place(symbol, row, col) for symbol in "PXO" for row in inner_range for col in inner_range),
                *PLAN_LETTERS.values(),
                "<think>",
                "</think>",
                "<answer>",
                "</answer>",
                "</think><answer>",
                *ACTION_NAMES.values(),
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


def build_tokenizer() -> Tokenizer:
    """The tokenizer in the format of Hugging Face's fast tokenizers."""
    pieces = make_vocabulary()
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    # Added tokens are matched leftmost and longest, before any rule of the model type. Otherwise transformers would
    # apply byte-pair rules, which it gives to every Qwen2 model whatever class the files name, and split these pieces.
    special_pieces = [END_OF_MESSAGE, PAD, UNKNOWN]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces if piece not in special_pieces])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special_pieces])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which AutoTokenizer reads."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        pad_token=PAD,
        eos_token=END_OF_MESSAGE,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    ).save_pretrained(folder)
