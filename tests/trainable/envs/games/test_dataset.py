"""A data set as a game: its sets, its rules of scoring, and what is said about files that cannot be used."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.data_files import write_sums
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.sections import EnvConfig
from trainable.envs.data_rows import DataFileError
from trainable.envs.games.dataset import DataSet, compute_digest, read_number, read_rows
from trainable.envs.games.make import make_environment
from trainable.envs.level_sets import collect_level_keys, make_run_levels
from trainable.envs.prompts import Observation, make_prompt_template
from trainable.rollout.kv_cache_size import TEMPLATE_TOKENS, compute_max_tokens


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "sums.jsonl")


def make_game(file: Path | None, **settings: Any) -> DataSet:
    section = {**settings} | ({} if file is None else {"file": str(file)})
    game = make_environment(EnvConfig.model_validate({"name": "dataset", "dataset": section}))
    assert isinstance(game, DataSet)
    return game


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Sets.


def test_each_prompt_is_in_one_set_and_training_sees_all_of_its_rows_once_per_epoch(sums: Path) -> None:
    config = apply_overrides(
        RunConfig(),
        {
            "env.name": "dataset",
            "env.dataset.file": str(sums),
            "env.env_groups": 4,
            "model.prompt_style": "plain",
            "env.val_env_groups": 40,
            "trainer.total_training_steps": 200,
            "filter.max_num_gen_batches": 2,
            "filter.rollout_filter_include_zero": False,
        },
    )
    game = make_game(sums)
    levels = make_run_levels(game, config)
    # Further batches have rows of the training set, too.
    refill = [level for batch in levels.refill for level in batch]
    assert len(refill) == 800
    assert collect_level_keys(refill) == {row.key for row in game.rows.sets["training"]}
    training = [level for step in levels.training for level in step]
    keys = [collect_level_keys(each) for each in (training, levels.validation, levels.test)]
    assert sum(map(len, keys)) == len(frozenset.union(*keys))
    assert all(levels.unseen_mask)
    count = len(game.rows.sets["training"])
    assert sum(map(len, game.rows.sets.values())) == 400
    assert abs(count / 400 - 0.8) < 0.08
    first_epoch, second_epoch = training[:count], training[count : 2 * count]
    assert {level.key for level in first_epoch} == {level.key for level in second_epoch}
    assert len({level.key for level in first_epoch}) == count
    assert [level.key for level in first_epoch] != [level.key for level in second_epoch]
    assert {level.seed for level in levels.test} == set(range(900_000_000, 900_000_000 + len(levels.test)))


def test_the_split_depends_on_the_prompts_alone(sums: Path, tmp_path: Path) -> None:
    lines = sums.read_text().splitlines(keepends=True)
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(lines[::-1]))
    sets = [
        {name: set(rows) for name, rows in read_rows(str(file), "prompt", "answer").sets.items()}
        for file in (sums, shuffled)
    ]
    assert sets[0] == sets[1]


def test_rows_that_repeat_a_prompt_are_counted_and_left_out(sums: Path, tmp_path: Path) -> None:
    twins = [{"prompt": "  1 +  1 =", "answer": "3"}, {"prompt": "1 + 2 =", "answer": "3"}]
    sums.write_text(sums.read_text() + "".join(json.dumps(row) + "\n" for row in twins))
    rows = read_rows(str(sums), "prompt", "answer")
    assert rows.num_twins == 2
    assert Counter(row.answer for split in rows.sets.values() for row in split)["2"] == 3  # 0 + 2, 1 + 1, 2 + 0


def test_messages_and_parquet_are_read(tmp_path: Path) -> None:
    messages = [
        {
            "problem": [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"{number}?"}],
            "n": number,
        }
        for number in range(60)
    ]
    path = tmp_path / "messages.parquet"
    pq.write_table(pa.Table.from_pylist(messages), path)
    game = make_game(path, prompt="problem", answer="n")
    (level,) = game.make_levels([123])
    assert level.prompt == f"Be short.\n\n{level.answer}?"


# Scores.


@pytest.mark.parametrize(
    ("score", "reply", "answer", "is_right"),
    [
        ("exact", " a  b\n", "a b", True),
        ("exact", "A b", "a b", False),
        ("number", "it is 1,200.0.", "#### 1200", True),
        ("number", "1200 or 13", "1200", False),
        ("number", "none", "1200", False),
        ("number", "3/4", "1/4", False),
        ("number", "6/8", "3/4", True),
        ("number", "1e5", "5", False),
        ("number", "5-3", "3", True),
        ("number", "1/0", "0", True),  # no fraction, so the last number counts
        ("number", "1e999", "9", False),
        ("number", "-3", "3", False),
        ("regex", "blue or green", "^(blue|red)", True),
        ("regex", "green or blue", "^(blue|red)", False),
        ("format", "anything", "x", True),
    ],
)
def test_a_reply_is_right_if_its_rule_says_so(sums: Path, score: str, reply: str, answer: str, is_right: bool) -> None:
    game = make_game(sums, score=score)
    (level,) = game.make_levels([123])
    state = level.__class__(1, "", answer, b"")
    outcome = game.step([state], [(game.read_action(reply),)], np.zeros((1, 1)))
    assert (outcome.rewards[0], outcome.success[0], outcome.done[0]) == (float(is_right), is_right, True)


def test_the_answer_is_the_last_match_of_the_pattern(sums: Path) -> None:
    game = make_game(sums, pattern=r"<answer>(.*?)</answer>")
    assert game.read_action("<answer>1</answer> no: <answer> 2 </answer>") == "2"
    assert game.read_action("2") is None
    assert make_game(sums, pattern=r"\d+").read_action("1, 2, 3.") == "3"
    assert make_game(sums).read_action(" \n") is None
    outcome = game.step([game.make_levels([123])[0]], [()], np.zeros((1, 1)))
    assert (outcome.rewards[0], outcome.done[0]) == (0.0, False)


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc ,.", max_size=9))
def test_the_last_number_of_a_text_is_read(number: int, text: str) -> None:
    assert read_number(f"17 {text} {number:,} {text}") == Fraction(number)
    assert read_number(text.replace(".", "")) is None


def test_the_plain_style_is_the_prompt_and_nothing_else(sums: Path) -> None:
    game = make_game(sums, instructions="Answer with a number.")
    template = make_prompt_template(game, "plain", 1)
    (level,) = game.make_levels([10_000])
    assert template.format_first_turn(Observation(1, level, 1)) == (
        f"<|im_start|>system\nAnswer with a number.<|im_end|>\n<|im_start|>user\n{level.prompt}<|im_end|>\n"
        f"<|im_start|>assistant\n"
    )
    reply = template.parse("<think>5</think> || 6", 1, game.read_action)
    assert (reply.actions, reply.invalid) == (("<think>5</think> || 6",), False)
    assert template.parse("", 1, game.read_action).invalid


# Files that cannot be used.


def test_an_unusable_file_is_refused_with_the_place_and_what_to_type(sums: Path, tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", [{"prompt": str(number), "answer": "1"} for number in range(29)])
    no_number = write_rows(tmp_path / "text.jsonl", [{"prompt": str(number), "answer": "a"} for number in range(60)])
    bad_pattern = write_rows(
        tmp_path / "regex.jsonl", [{"prompt": str(n), "answer": "(" * (n > 50)} for n in range(60)]
    )
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    replies = write_rows(tmp_path / "sft.jsonl", [{"messages": messages, "answer": "2"}])
    cases: list[tuple[Path | None, dict[str, Any], str]] = [
        (None, {}, "type --env FILE.jsonl"),
        (tmp_path / "gone.jsonl", {}, "gone.jsonl cannot be read: "),
        (tmp_path / "a.csv", {}, r"a.csv: a data file ends in .jsonl or .parquet"),
        (few, {}, "few.jsonl has 29 different prompts, and 30 are the minimum"),
        (
            sums,
            {"prompt": "question"},
            r"line 1 has no text, .* in a field 'question' \(its fields: prompt, answer\): type",
        ),
        (no_number, {"score": "number"}, "the answer 'a' has no number"),
        (bad_pattern, {"score": "regex"}, "is no regular expression"),
        (replies, {"prompt": "messages"}, r"no messages without a reply, in a field 'messages'"),
        (sums, {"digest": "0" * 16}, "is not the file with which the study began"),
    ]
    for file, settings, message in cases:
        with pytest.raises(DataFileError, match=message):
            _ = make_game(file, **settings).rows
    assert make_game(sums, digest=compute_digest(sums)).rows.num_twins == 0


def test_a_plan_takes_the_bytes_of_the_longest_prompt_for_its_tokens(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "é" * n, "answer": n} for n in range(1, 41)])
    dataset = {"file": str(file), "instructions": "Count."}
    config = RunConfig.model_validate(
        {"env": {"name": "dataset", "max_turn": 1, "dataset": dataset}, "rollout": {"response_length": 8}}
    )
    assert compute_max_tokens(config) == 80 + len("Count.") + TEMPLATE_TOKENS + 8
