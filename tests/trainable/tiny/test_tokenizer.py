from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trainable.envs.level_sets import make_validation_levels
from trainable.envs.prompts import END_OF_MESSAGE, Observation, format_reply, make_prompt_template, parse_reply
from trainable.envs.sokoban.board import Tile
from trainable.envs.sokoban.game import SYMBOLS, Sokoban
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.tokenizer import PAD, UNKNOWN, format_place, write_tokenizer

PROMPT_TEMPLATE = make_prompt_template(Sokoban(), "compact", 10)
VALIDATION = make_validation_levels(Sokoban())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return SOKOBAN_TINY.build_tokenizer()


def restore(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    unknown = tokenizer.token_to_id(UNKNOWN)
    assert not any(unknown in ids for ids in encoded)
    return tokenizer.decode_batch(encoded, skip_special_tokens=False)


def test_every_piece_is_one_token_and_ids_are_in_order(tokenizer: Tokenizer) -> None:
    pieces = SOKOBAN_TINY.pieces
    assert len(set(pieces)) == len(pieces) == tokenizer.get_vocab_size()
    assert [encoding.ids for encoding in tokenizer.encode_batch(pieces)] == [[n] for n in range(len(pieces))]
    assert tokenizer.decode_batch([[n] for n in range(len(pieces))], skip_special_tokens=False) == pieces
    ids = [tokenizer.token_to_id(piece) for piece in ("Up", PAD, END_OF_MESSAGE, UNKNOWN, "Left")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "UpLeft"


def test_all_validation_levels_are_restored_from_their_tokens(tokenizer: Tokenizer) -> None:
    texts = [PROMPT_TEMPLATE.format_first_turn(Observation(1, level.cells, 10)) for level in VALIDATION]
    assert restore(tokenizer, texts) == texts
    has_wall_row = [(level.cells[1:-1, 1:-1] == Tile.WALL).all(axis=1).any() for level in VALIDATION]
    assert sum(has_wall_row) > 100  # levels with an inner row of only walls, which a greedier vocabulary would misread


@given(st.lists(st.text("".join(SYMBOLS.values()), min_size=4, max_size=4), min_size=4, max_size=4))
def test_any_grid_of_symbols_is_restored(rows: list[str]) -> None:
    text = "Turn 3:\nState:\n" + "\n".join(rows) + "\n7 actions left\n"
    assert restore(SOKOBAN_TINY.build_tokenizer(), [text]) == [text]


@pytest.mark.parametrize("actions", [("Up",), ("Left", "Right"), ("Down",) * 3])
def test_a_reply_is_read_from_its_tokens(tokenizer: Tokenizer, actions: tuple[str, ...]) -> None:
    thought = format_place("P", 3, 2) + format_place("X", 3, 1) + format_place("O", 2, 1) + "DLU"
    ids = tokenizer.encode(format_reply(thought, actions) + END_OF_MESSAGE).ids
    assert len(ids) == 3 + 3 + 1 + (2 * len(actions) - 1) + 1 + 1
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert parse_reply(text, 3, Sokoban().read_action) == (thought, actions, False)


def test_auto_tokenizer_gives_the_same_ids_and_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, SOKOBAN_TINY.pieces)
    auto_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [PROMPT_TEMPLATE.format_first_turn(Observation(1, level.cells, 10)) for level in VALIDATION[:32]]
    texts += [format_reply("P32 X31 O21 DLU", ("Down", "Left")) + END_OF_MESSAGE]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert auto_tokenizer(texts)["input_ids"] == ids
    assert auto_tokenizer.batch_decode(ids) == texts
    assert (auto_tokenizer.eos_token, auto_tokenizer.pad_token) == (END_OF_MESSAGE, PAD)
    assert auto_tokenizer.convert_tokens_to_ids(SOKOBAN_TINY.pieces) == list(range(len(SOKOBAN_TINY.pieces)))
