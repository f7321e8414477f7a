"""Texts for the language-model bandit: tokenize the passages of a file, and split them into training and evaluation.

The shipped text has dialogues in which a solver plays Sokoban, like those that sokoban-tiny was trained on, but on
other levels. `python -m sandboxes.update_rules.tasks.texts FILE` regenerates it.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainable.config.seeds import make_rng
from trainable.envs.level_sets import make_demonstration_levels
from trainable.tiny.dialogues import Habits
from trainable.tiny.policies import SOKOBAN_TINY

# SHIPPED_PASSAGES, _FIRST_LEVEL and the random stream below define the shipped text byte for byte.
SHIPPED_TEXT = Path(__file__).parent / "sokoban_dialogues.jsonl"
SHIPPED_PASSAGES = 480
_FIRST_LEVEL = 40_000_000  # beyond the levels that sokoban-tiny was trained on
EVAL_DIVISOR = 4  # the last quarter of a text's passages is for evaluation


class Tokens(NamedTuple):
    """Tokens [N] to train on, and [M] to evaluate on."""

    train: Tensor
    test: Tensor


def read_tokens(text_file: str | None, tokenizer: Tokenizer, context_len: int) -> Tokens:
    """Read the tokens of a text, or of the shipped one. ValueError, with what to do, if it is missing or too short."""
    texts = read_passages(SHIPPED_TEXT if text_file is None else Path(text_file).expanduser())
    # Tokenized separately, so that no token spans two passages and the split below falls between tokens.
    encodings = [tokenizer.encode("\n" * (n > 0) + text, add_special_tokens=False) for n, text in enumerate(texts)]
    num_train = len(texts) - max(1, len(texts) // EVAL_DIVISOR)
    train, test = (
        torch.tensor([token_id for encoding in split for token_id in encoding.ids])
        for split in (encodings[:num_train], encodings[num_train:])
    )
    # Training needs one context with its next token; evaluation needs one per third by difficulty.
    if len(train) <= context_len or len(test) < 3 * (context_len + 1):
        raise ValueError(
            f"text_file={text_file} has {len(train)} tokens for training and {len(test)} for "
            f"evaluation (the last quarter of its passages); context_len={context_len} needs {context_len + 1} and "
            f"{3 * (context_len + 1)}. Use a longer text, or lower context_len."
        )
    return Tokens(train, test)


def read_passages(path: Path) -> list[str]:
    """Read the non-blank lines of a text; for a .jsonl file, the string that each line encodes."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text_file={path} cannot be read: {error}. Use UTF-8, with one passage per line.") from None
    if path.suffix != ".jsonl":
        return lines
    try:
        texts = [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"text_file={path} is not JSON Lines: {error}. Each line must be a JSON string.") from None
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"text_file={path} has lines that are not strings. Each line must be a JSON string.")
    return texts


def make_sokoban_passages(count: int) -> list[str]:
    """Make the first `count` dialogues of the shipped text, on levels never used for validation or tests."""
    levels = make_demonstration_levels(SOKOBAN_TINY.source, count, _FIRST_LEVEL)
    rngs = make_rng(0, "sandbox_data", 2), make_rng(0, "sandbox_data", 2, 1)
    demonstrations = SOKOBAN_TINY.make_dialogues(levels, Habits(), *rngs)
    return ["".join(segment.text for segment in segments) for segments in demonstrations]


if __name__ == "__main__":
    lines = [json.dumps(passage, ensure_ascii=False) + "\n" for passage in make_sokoban_passages(SHIPPED_PASSAGES)]
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")
