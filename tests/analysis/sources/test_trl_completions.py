"""Completions of TRL: which become episodes, with which rewards, and what cannot be read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.sources import trl_completions
from analysis.sources.trl_completions import read_completions
from tests.trainable.sources.logs import COMPLETIONS, write_completions
from trainable.runs.episode_lines import RecordedEpisode
from trainable.sources.json_files import list_completions
from trainable.sources.logs import LogRow, RunLog


def read_episodes(
    folder: Path, evaluated_steps: Sequence[int] = (), **settings: Any
) -> tuple[list[RecordedEpisode], list[str]]:
    """Read the completions of a run of four steps. Return its episodes and notes."""
    values = {"reward": 0.5, "rewards/is_right/mean": 0.5, "rewards/is_short/mean": 0.5}
    rows = [
        LogRow(step, values | ({"eval_reward": 0.5} if step in evaluated_steps else {}), step) for step in range(1, 5)
    ]
    log = RunLog(folder / "trainer_state.json", "trainer_state.json", rows, settings)
    log.completions = list_completions(folder)
    return list(read_completions(log)), log.notes


def test_completions_are_episodes_of_their_prompts_with_the_rewards_of_the_functions(tmp_path: Path) -> None:
    write_completions(tmp_path, 1)
    write_completions(tmp_path, 3, prompt=["3+3=", "3+3=", "1+1=", "1+1="])
    episodes, notes = read_episodes(tmp_path, reward_weights=[1.0, 2.0])
    keys = [(episode.step, episode.level, episode.rollout) for episode in episodes]
    assert keys == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (3, 1, 0), (3, 1, 1), (3, 2, 0), (3, 2, 1)]
    assert [episode.score for episode in episodes[:4]] == [2.0, 1.0, 0.0, 1.5]
    assert [episode.success for episode in episodes[:4]] == [True, True, False, True]
    (turn,) = episodes[2].turns
    assert (turn.observation, turn.reply, turn.actions, turn.advantage) == ("3+3=", "7", ("is_right 0",), -0.7)
    assert episodes[0].turns[0].actions == ("is_right 1", "is_short 0.5")
    assert notes == [
        "2 steps have completions of the training, of which 8 of 8 are for `transcripts --trained`. One with a reward "
        "above 0 counts as solved."
    ]
    assert [episode.score for episode in read_episodes(tmp_path)[0][:4]] == [1.5, 0.5, 0.0, 1.25]


def test_completions_that_may_be_of_an_evaluation_are_left_out(tmp_path: Path) -> None:
    for step in (0, 1, 4, 5):
        write_completions(tmp_path, step, completion=[str(step)] * 4)
    for step in (2, 3):  # at step 3, no batch was generated
        write_completions(tmp_path, step, completion=["evaluated"] * 4)
    episodes, notes = read_episodes(tmp_path, [2])
    assert [episode.turns[0].reply for episode in episodes] == ["1"] * 4 + ["4"] * 4
    assert notes[1].startswith("At 2 steps, such as 2, the completions of an evaluation have replaced those of the")


def test_a_conversation_is_shown_with_its_roles_and_calls_of_tools(tmp_path: Path) -> None:
    question = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    answers = [[{"role": "assistant", "content": "4"}], [call]] * 2
    write_completions(tmp_path, 1, prompt=[question] * 4, completion=answers)
    episodes, _ = read_episodes(tmp_path)
    turns = [episode.turns[0] for episode in episodes[:2]]
    assert turns[0].observation == "[system] Add.\n[user] 2+2="
    assert turns[0].reply == "[assistant] 4"
    assert '"tool_calls": [{"name": "add"}]' in turns[1].reply


def test_texts_have_a_budget_of_which_all_steps_have_the_same_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write_completions(tmp_path, step, completion=["x" * 50] * 4)
    monkeypatch.setattr(trl_completions, "MAX_TEXT_CHARACTERS", 40)
    for characters, counts in ((2 * 2 * 44, [2, 2]), (2 * 2 * 44 - 2, [1, 1]), (0, [1, 1])):
        monkeypatch.setattr(trl_completions, "MAX_RUN_CHARACTERS", characters)
        episodes, notes = read_episodes(tmp_path)
        assert [sum(episode.step == step for episode in episodes) for step in (1, 2)] == counts
        assert f"of which {sum(counts)} of 8 are for" in notes[0]
    assert {episode.turns[0].reply for episode in episodes} == {"x" * 40}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "magic bytes not found in footer"),
        (lambda path: path.write_bytes(b""), "file size is 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"4", b"\xff")), ""),
        (lambda path: pd.DataFrame({"prompt": ["a"]}).to_parquet(path), "reward functions, it has prompt"),
        (
            lambda path: pd.DataFrame({**COMPLETIONS, "is_right": ["a"] * 4}).drop(columns="is_short").to_parquet(path),
            None,
        ),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "is a symbolic link"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_the_others_count(
    tmp_path: Path, damage: Any, reason: str | None
) -> None:
    write_completions(tmp_path, 1)
    path = write_completions(tmp_path, 2)
    damage(path)
    episodes, notes = read_episodes(tmp_path)
    assert {episode.step for episode in episodes} == {1}
    if reason is not None:
        assert notes[-1].startswith(f"1 files of completions cannot be read, such as {path} (")
        assert reason in notes[-1]
        assert "\n" not in notes[-1]


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_completions(tmp_path, 1, completion=["x" * 10_000] * 4)
    for limit, reason in ((path.stat().st_size - 1, "and at most"), (path.stat().st_size, "more than")):
        monkeypatch.setattr(trl_completions, "MAX_FILE_BYTES", limit)
        episodes, notes = read_episodes(tmp_path)
        assert not episodes
        assert reason in notes[-1]
