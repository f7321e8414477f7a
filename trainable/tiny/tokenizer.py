"""Tokenizers of the tiny policies: a few hundred pieces of the compact prompt's text, in the hub's file format.

Each fixed part of the template is one token, and so is each piece of a game, such as two neighboring cells of a board.
The longest matching piece is used. Every symbol of states and replies is also a separate piece, so that decoding
restores prompts and replies exactly.
"""

from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models

from trainable.envs import prompts
from trainable.envs.environment import TurnLimits

PAD = "<|endoftext|>"
UNKNOWN = "<|unknown|>"


class Vocabulary(NamedTuple):
    """The pieces of a game's states, thoughts and actions, and the rewards that a prompt may show."""

    rewards: tuple[float, ...]
    state_pieces: tuple[str, ...]
    thought_pieces: tuple[str, ...]
    action_pieces: tuple[str, ...]


def format_place(symbol: str, row: int, col: int) -> str:
    """Format a position for a thought: "P32 " is the player at row 3, column 2."""
    return f"{symbol}{row}{col} "


def list_pieces(title: str, vocabulary: Vocabulary, limits: TurnLimits) -> list[str]:
    """List all pieces in the order of their ids. The shipped weights depend on this order.

    title: the system message of the game. limits: each number of turns and of actions left up to these has a piece.
    """
    turn_end = prompts.CHATML.reply_prefix + prompts.START_OF_THOUGHT
    return list(
        dict.fromkeys(  # each piece once, in order of first occurrence
            [
                PAD,
                "<|im_start|>",
                prompts.END_OF_MESSAGE,
                UNKNOWN,
                prompts.CHATML.system_prefix + title + prompts.END_OF_MESSAGE,
                prompts.CHATML.next_user_prefix,
                *(prompts.CHATML.next_user_prefix + prompts.format_reward(reward) for reward in vocabulary.rewards),
                *(prompts.format_turn_header(turn) for turn in range(1, limits.turns + 1)),
                *(prompts.format_actions_left(left) + turn_end for left in range(1, limits.actions + 1)),
                turn_end.removeprefix(prompts.END_OF_MESSAGE),
                *vocabulary.state_pieces,
                *vocabulary.thought_pieces,
                *("<think>", "</think>", "<answer>", "</answer>", "</think><answer>"),
                *vocabulary.action_pieces,
                f" {prompts.ACTION_SEPARATOR} ",
                *("Reward:\n", "Turn ", "State:\n", " actions left\n", "assistant\n", "user\n", "system\n"),
                *"0123456789|-.: \n",
            ]
        )
    )


def build_tokenizer(pieces: list[str]) -> Tokenizer:
    """Build a fast Hugging Face tokenizer from the pieces of `list_pieces`."""
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    # Added tokens are matched leftmost and longest, before any rules of the model type. Otherwise transformers would
    # split pieces by the byte-pair rules that it applies to every Qwen2 model, whatever class the files name.
    special_pieces = [prompts.END_OF_MESSAGE, PAD, UNKNOWN]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces if piece not in special_pieces])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special_pieces])
    return tokenizer


def write_tokenizer(folder: Path, pieces: list[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(pieces),
        pad_token=PAD,
        eos_token=prompts.END_OF_MESSAGE,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    ).save_pretrained(folder)
