"""Tests of `explain`: what it prints of one run, of several and of none, and what it refuses."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.data.load import load
from analysis.sweep.collapse import find_run_ends
from analysis.sweep.symptoms import PERMUTATION_SEED, find_onsets
from analysis.sweep.verdicts import format_p_value
from tests.analysis.sweep.test_symptoms import STUDY, write_collapse
from tests.fakes.command_line import assert_refused, get_output, type_in
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from trainable.files.json_values import read_object, write_object
from trainable.runs.episode_lines import RecordedEpisode, RecordedTurn
from tune_study.commands.reading.explain import choose_episodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of arm 0 that a rule stopped at step 40, and a run of arm 0.1 that completed."""
    return write_collapse(tmp_path_factory.mktemp("explain"), (10, 12, 14))


def test_one_run_is_told_in_order(folder: Path) -> None:
    output = get_output(f"explain {folder} --arm 0 --seed 1")
    lines = output.splitlines()
    assert lines[0] == "Arm 0, seed 1: collapsed at step 40 (reward_variance_collapse)."
    spread, success = (
        next(index for index, line in enumerate(lines) if line.startswith(label))
        for label in ("spread of the rewards in a group", "success of the training episodes")
    )
    assert spread < success
    assert lines[spread].split()[7] == "12"  # the onset; the label has seven words
    # The p that decided, corrected for the symptoms of this run, and not the smaller one of its permutations.
    frames = load(folder)
    ends = find_run_ends(frames)
    onsets = find_onsets(frames, ends[ends["run_id"] == "arm0-seed1"], np.random.default_rng(PERMUTATION_SEED))
    row = onsets[onsets["symptom"] == "reward_std"].iloc[0]
    assert row["p"] < row["p_adjusted"]
    assert lines[spread].split()[-1] == format_p_value(row["p_adjusted"]).removeprefix("p ")
    assert lines[-2].startswith("No change for the worse is resolved in: groups without spread")
    assert lines[-1].startswith("No episode of a validation was recorded.")


def make_episode(step: int, level: int, success: bool) -> RecordedEpisode:
    turn = RecordedTurn(f"<user>board {level}\n####<end>", f"go {step}\x1b[31m<end>", ("Up", "Left"), -0.2, True)
    turns = (turn, turn._replace(actions=(), valid=False))
    return RecordedEpisode(step, level, turns, success, "success" if success else "out of turns", 1.5)


def make_onsets(**onset_and_end: tuple[float, float]) -> pd.DataFrame:
    rows = [{"symptom": name, "onset": onset, "end": end} for name, (onset, end) in onset_and_end.items()]
    return pd.DataFrame(rows, columns=["symptom", "onset", "end"])


def test_episodes_are_from_before_during_and_after_the_collapse() -> None:
    episodes = [make_episode(step, level, step < 20) for step in range(0, 45, 5) for level in (123, 124)]
    onsets = make_onsets(reward_std=(12, 20), train_success=(18, 27))
    chosen = choose_episodes(episodes, onsets, 38)
    assert [(episode.step, episode.level) for episode in chosen] == [(10, 123), (25, 123), (40, 123)]
    # A level that shows the change comes before one that never ended with success.
    never_successful = [episode._replace(success=False) if episode.level == 123 else episode for episode in episodes]
    assert {episode.level for episode in choose_episodes(never_successful, onsets, 38)} == {124}
    # Without an onset, the first and the last; a run that ends before its next validation has none after its end.
    assert [episode.step for episode in choose_episodes(episodes, make_onsets(), 60)] == [0, 40]
    assert choose_episodes([], onsets, 38) == []


@pytest.mark.long
def test_several_runs_are_summarized(folder: Path) -> None:
    output = get_output(f"explain {folder}")
    lines = output.splitlines()
    collapses = "Arm 0 collapsed in 3 of 3 runs, at steps 40, 40 and 40 (seeds 0, 1, 2); no run of arm 0.1 collapsed."
    assert lines[0] == collapses
    assert "% of the symptoms changed in these runs before the collapse" in lines[2]
    assert lines[-1] == f"One run: python -m tune_study explain {folder} --arm 0 --seed 0"
    assert type_in(lines[-1].partition("tune_study ")[2]).code == 0


def test_without_a_collapse_the_command_says_what_to_type(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0"), FakeRun("0.1")], STUDY)
    first, second = type_in(f"explain {folder}").out.splitlines()
    assert first == "No run collapsed, so this study cannot tell whether an arm protects from collapse."
    assert second.endswith(f"type: python -m tune_study explain {folder} --arm 0 --seed 0")


def test_runs_that_never_could_learn_come_before_those_that_collapsed(tmp_path: Path) -> None:
    runs = [FakeRun("0", rows={"train_invalid_turns": 1.0}), FakeRun("0.1")]
    assert type_in(f"explain {write_study(tmp_path, runs, STUDY)}").out.splitlines()[:2] == [
        "In 1 of 2 runs (arm 0), no reply had a valid action: `transcripts` shows them.",
        "No run collapsed, so this study cannot tell whether an arm protects from collapse.",
    ]


@pytest.mark.long
def test_runs_that_are_too_short_say_so(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=7), FakeRun("0.1", steps=3)], STUDY)
    sentence = "No change can be resolved in fewer than 8 steps."
    assert type_in(f"explain {folder}").out.splitlines() == [sentence]
    assert type_in(f"explain {folder} --arm 0.1").out.splitlines()[1] == sentence


def test_a_run_without_a_change_is_not_called_short(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=8)], STUDY)
    lines = type_in(f"explain {folder}").out.splitlines()
    assert lines[1] == "No change is resolved."


def test_without_rows_there_is_nothing_to_explain(tmp_path: Path) -> None:
    answer = type_in(f"explain {write_study(tmp_path, [FakeRun('0', status='', steps=0)], STUDY)}")
    assert (answer.code, answer.out.strip()) == (0, "No run of this study has rows yet: there is nothing to explain.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--arm 9", "There is no arm 9: type --arm with one of 0, 0.1."),
        ("--seed 5", "There is no run with seed 5: type --seed with one of 0, 1, 2."),
        ("--arm 0.1 --seed 1", "There is no run of arm 0.1 with seed 1: type --seed with one of 0."),
    ],
)
def test_wrong_options_are_refused(folder: Path, options: str, words: str) -> None:
    assert_refused(f"explain {folder} {options}", words)


def test_a_study_of_update_rules_is_refused(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], FakeStudy(levels=10))
    path = folder / "study.json"
    write_object(path, {**read_object(path), "family": "update_rules"})
    assert_refused(f"explain {folder}", "fine-tuned no language model")
