"""`transcripts` and `frames.episodes`: which recorded episodes are shown, and what is said where there are none."""

from pathlib import Path

import pandas as pd
import pytest

from analysis import load
from tests.fakes.command_line import assert_refused, get_output, type_in
from tests.fakes.lines import append_record
from tests.fakes.run_folders import FakeRun, write_study
from tests.tune_study.commands.reading.test_explain import make_episode
from trainable.files.json_lines import read_lines
from trainable.runs.run_files import ENDS_KEY, EPISODES_FILE, METRICS_FILE

RUNS = (FakeRun("0", 0), FakeRun("0", 1), FakeRun("0.1", 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms; levels 123 and 124 after steps 0 and 40. Level 124 of arm 0 is lost at step 40, all else is solved."""
    folder = write_study(tmp_path_factory.mktemp("transcripts"), list(RUNS))
    for run in RUNS[:2]:
        for step in (0, 40):
            for level in (123, 124):
                path = folder / "runs" / run.run_id / EPISODES_FILE
                append_record(path, make_episode(step, level, (step, level) != (40, 124)).to_line())
        end = {EPISODES_FILE: list(read_lines(folder / "runs" / run.run_id / EPISODES_FILE).end)}
        append_record(folder / "runs" / run.run_id / METRICS_FILE, {"step": 60, ENDS_KEY: end})
    return folder


def list_headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("Arm", "Level"))]


def test_the_last_validation_is_shown_if_none_is_chosen(folder: Path) -> None:
    output = get_output(f"transcripts {folder} --arm 0 --seed 1")
    assert list_headings(output) == [
        "Arm 0, seed 1: 2 of 2 episodes after step 40, 1 solved",
        "Level 123 after step 40: success, score 1.5",
        "Level 124 after step 40: out of turns, score 1.5",
    ]
    lines = output.splitlines()
    assert lines[0].startswith("Lines with | are what the policy saw")
    board = ["  | <user>board 123", "  | ####<end>"]
    assert lines[5:9] == [*board, "  > go 40\\x1b[31m<end>", "    Up, Left, reward -0.2"]
    assert "    no action (invalid reply), reward -0.2" in lines


@pytest.mark.parametrize(
    ("options", "headings"),
    [
        (
            "--arm 0 --failed",
            [
                "Arm 0, seed 0: 1 of 2 episodes after step 40, 0 solved",
                "Level 124 after step 40: out of turns, score 1.5",
                "Arm 0, seed 1: 1 of 2 episodes after step 40, 0 solved",
                "Level 124 after step 40: out of turns, score 1.5",
            ],
        ),
        (
            "--seed 1 --step 0 --solved",
            [
                "Arm 0, seed 1: 2 of 2 episodes after step 0, 2 solved",
                "Level 123 after step 0: success, score 1.5",
                "Level 124 after step 0: success, score 1.5",
            ],
        ),
        ("--arm 0 --seed 0 --step 0 --failed", ["Arm 0, seed 0: no recorded episode of this kind"]),
    ],
)
def test_episodes_are_chosen_by_arm_seed_step_and_success(folder: Path, options: str, headings: list[str]) -> None:
    answer = type_in(f"transcripts {folder} {options}")
    assert (answer.code, list_headings(answer.out)) == (0, headings)


def test_trained_episodes_are_shown_with_their_advantages(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0"), FakeRun("0.1")])
    run_dir = folder / "runs" / FakeRun("0").run_id
    for number, (step, success) in enumerate(((20, True), (40, False), (40, True))):
        episode = make_episode(step, 10_000, success)
        turns = tuple(turn._replace(advantage=number - 0.5) for turn in episode.turns)
        append_record(run_dir / EPISODES_FILE, episode._replace(turns=turns, rollout=number).to_line())
    append_record(
        run_dir / METRICS_FILE, {"step": 60, ENDS_KEY: {EPISODES_FILE: [*read_lines(run_dir / EPISODES_FILE).end]}}
    )
    answer = type_in(f"transcripts {folder} --trained --arm 0")
    assert list_headings(answer.out) == [
        "Arm 0, seed 0: 2 of 2 episodes of step 40, 1 solved",
        "Level 10000, rollout 1, trained in step 40: out of turns, score 1.5",
        "Level 10000, rollout 2, trained in step 40: success, score 1.5",
    ]
    assert "    Up, Left, reward -0.2, advantage 0.5" in answer.out.splitlines()
    frame = load(folder).trained_episodes
    columns = ["arm", "step", "level", "rollout", "success", "advantage", "turns"]
    assert frame[columns].to_numpy().tolist() == [
        ["0", 20, 10_000, 0, True, -0.5, 2],
        ["0", 40, 10_000, 1, False, 0.5, 2],
        ["0", 40, 10_000, 2, True, 1.5, 2],
    ]
    assert load(folder).episodes.empty
    assert_refused(
        f"transcripts {folder} --trained --arm 0.1",
        "has recorded an episode of the training",
        "--set trainer.log_train_generations=4",
    )
    # Without --trained, what there is is named.
    assert_refused(
        f"transcripts {folder} --arm 0",
        "has recorded an episode of a validation: ",
        "Type --trained for episodes of the training",
    )
    lines = type_in(f"transcripts {folder} --trained").out.splitlines()
    assert lines[0].split()[:6] == ["arm", "seed", "episodes", "training", "steps", "steps"]
    assert lines[1].split()[:7] == ["0", "0", "3", "2", "20", "to", "40"]
    assert type_in(lines[-1].partition("tune_study ")[2]).code == 0
    append_record(run_dir / EPISODES_FILE, make_episode(40, 123, True).to_line())
    lines = type_in(f"transcripts {folder}").out.splitlines()
    assert lines[1].split()[:4] == ["0", "0", "1", "1"]
    assert lines[-1].endswith(f"with their advantages: python -m tune_study transcripts {folder} --trained")


def test_without_a_choice_there_is_a_table_and_a_command_that_works(folder: Path) -> None:
    lines = type_in(f"transcripts {folder}").out.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["0", "0", "4", "2", "0", "to", "40", "2", "1"],
        ["0", "1", "4", "2", "0", "to", "40", "2", "1"],
        ["0.1", "0", "0", "0", "-", "-", "-"],
    ]
    command = lines[-1].partition("tune_study ")[2]
    assert command == f"transcripts {folder} --arm 0 --seed 0"
    assert type_in(command).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--arm 7", "There is no arm 7: type --arm with one of 0, 0.1."),
        ("--arm 0 --seed 5", "There is no run with seed 5: type --seed with one of 0, 1."),
        ("--arm 0 --step 20", "There is no recorded episode of step 20: type --step with one of 0, 40."),
        ("--arm 0.1", "No such run in "),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(folder: Path, options: str, message: str) -> None:
    assert_refused(f"transcripts {folder} {options}", message)


def test_a_study_without_episodes_says_how_to_record_them(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0")])
    assert_refused(f"transcripts {folder} --arm 0", "with --set trainer.log_val_generations=4.")


def test_the_frame_of_episodes_has_a_row_for_each(folder: Path) -> None:
    frames = load(folder)
    episodes = frames.episodes
    assert len(episodes) == 8
    assert set(episodes["run_id"]) == {run.run_id for run in RUNS[:2]}
    lost = episodes[~episodes["success"]]
    assert lost[["arm", "seed", "step", "level"]].to_numpy().tolist() == [["0", 0, 40, 124], ["0", 1, 40, 124]]
    assert (episodes["turns"] == 2).all()
    assert (episodes["invalid_turns"] == 1).all()
    assert episodes["text"].iloc[0].startswith("| <user>board 123\n| ####<end>\n> go 0")
    assert frames.select_study("kl").episodes.equals(episodes)
    assert load(folder.parent).episodes.equals(episodes)


def test_frames_without_episodes_have_an_empty_frame_of_the_same_columns(tmp_path: Path, folder: Path) -> None:
    empty = load(write_study(tmp_path, [FakeRun("0")])).episodes
    pd.testing.assert_series_equal(empty.dtypes, load(folder).episodes.dtypes)
    assert empty.empty
    empty_trained = load(folder).trained_episodes
    assert empty_trained.empty
    assert set(empty_trained) - set(empty) == {"rollout", "advantage"}
