import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.data.episodes import format_turns, read_episodes
from tests.fakes.lines import append_record, change_records
from trainable.files.json_lines import LineEnd, append_line, read_lines
from trainable.files.json_values import DamageWarning
from trainable.runs.episode_lines import RecordedChild, RecordedEpisode, RecordedTurn
from trainable.runs.run_files import ENDS_KEY, EPISODES_FILE, METRICS_FILE

FIRST_TURN = RecordedTurn("<|im_start|>user\n#P\n", "\x1b[2J</think>", ("Up", "Left"), -0.2, True)
NUMBERS = st.floats(-1e9, 1e9)
REPLIES = st.tuples(st.text(), st.text(), st.tuples(st.text()), NUMBERS, st.booleans())
TURNS = st.builds(lambda reply, *weights: RecordedTurn(*reply, *weights), REPLIES, *[st.none() | NUMBERS] * 2)
LAST_TURN = RecordedTurn("Turn 2", "", (), -0.1, False)
WRONG_PARTS = ({"reply": "\ud800"}, {"actions": [1]}, {"reward": "1"}, {"valid": 1}, {"advantage": "1"})


def make_episode(step: int, level: int, score: float = -0.3) -> RecordedEpisode:
    return RecordedEpisode(step, level, (FIRST_TURN, LAST_TURN), False, "out of turns", score)


def write_run(folder: Path, *episodes: RecordedEpisode, step: int = 1) -> None:
    """Write episodes, and the row of one step that vouches for them."""
    for episode in episodes:
        append_record(folder / EPISODES_FILE, episode.to_line())
    ends = {EPISODES_FILE: list(read_lines(folder / EPISODES_FILE).end)} if episodes else {}
    append_record(folder / METRICS_FILE, {"step": step, ENDS_KEY: ends})


def read_with_problems(folder: Path) -> tuple[list[RecordedEpisode], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        episodes = read_episodes(folder)
    assert all(warning.category is DamageWarning for warning in caught)
    return episodes, [str(warning.message) for warning in caught]


def test_trained_episodes_are_read_beside_those_of_validations(tmp_path: Path) -> None:
    validated = [make_episode(0, 123), make_episode(5, 123)]
    turn = FIRST_TURN._replace(advantage=-0.5)
    trained = [make_episode(5, 10_000)._replace(turns=(turn, LAST_TURN), rollout=number) for number in (0, 1)]
    write_run(tmp_path, validated[0], *trained, validated[1])
    assert read_with_problems(tmp_path) == ([validated[0], validated[1], *trained], [])
    assert [episode.is_trained for episode in read_episodes(tmp_path)] == [False, False, True, True]
    assert [*format_turns(trained[0])][-4].endswith(", reward -0.2, advantage -0.5")


@pytest.mark.long
@given(st.lists(TURNS), st.floats(-1e300, 1e300))
def test_a_line_keeps_every_text_and_every_digit(
    tmp_path_factory: pytest.TempPathFactory, turns: list[RecordedTurn], score: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    episode = RecordedEpisode(3, 2**63 - 1, tuple(turns), True, "success", score)
    append_line(folder / EPISODES_FILE, episode.to_line(), LineEnd())
    assert read_with_problems(folder) == ([episode], [])


def make_tree() -> RecordedEpisode:
    turns = (
        RecordedTurn("Who?", "ask()", ("run", "ask", "ask"), 0.0, True, 0.25),
        RecordedTurn("['a']", "FINAL(x)", ("run",), 0.75, True, 0.25),
    )
    children = (
        RecordedChild(0, (RecordedTurn("first", "no code", (), 0.0, False, 0.25),), "malformed"),
        RecordedChild(0, (RecordedTurn("second", "FINAL(y)", ("run",), 0.0, True, 0.25),), "failure", "a\nb"),
    )
    return RecordedEpisode(5, 123, turns, False, "failure", 0.75, children, answer="", evidence="one\ntwo")


def test_a_tree_is_read_and_written_with_its_children(tmp_path: Path) -> None:
    write_run(tmp_path, make_episode(0, 123), make_tree())
    assert read_with_problems(tmp_path) == ([make_episode(0, 123), make_tree()], [])
    assert not {"children", "answer", "evidence"} & set(make_episode(0, 123).to_line())
    assert "weight" not in json.dumps(make_episode(0, 123).to_line())
    assert list(format_turns(make_tree())) == [
        "| Who?",
        "> ask()",
        "  run, ask, ask, reward 0, weight 0.25",
        "    Child 1: malformed",
        "    | first",
        "    > no code",
        "      no action (invalid reply), weight 0.25",
        "    Child 2: answered",
        "    | second",
        "    > FINAL(y)",
        "      run, weight 0.25",
        "      final answer: a",
        "      final answer: b",
        "| ['a']",
        "> FINAL(x)",
        "  run, reward 0.75, weight 0.25",
        "  final answer: ",
        "  evidence to quote: one",
        "  evidence to quote: two",
    ]


@pytest.mark.parametrize(
    "children",
    [
        *(3, {}, [1], [{}], [{"parent_turn": -1, "turns": [], "stop_reason": "x"}], [{"parent_turn": 0, "turns": 1}]),
        [{"parent_turn": 0, "turns": [], "stop_reason": "x", "answer": 1}],
    ],
)
def test_a_damaged_child_is_named(tmp_path: Path, children: object) -> None:
    append_record(tmp_path / EPISODES_FILE, {**make_tree().to_line(), "children": children})
    episodes, (problem,) = read_with_problems(tmp_path)
    assert episodes == []
    assert "that is no episode: see children" in problem


def test_a_repeated_episode_replaces_the_earlier_one_and_drops_later_steps(tmp_path: Path) -> None:
    write_run(tmp_path, make_episode(0, 123), make_episode(5, 123), make_episode(10, 123), make_episode(5, 123, 10.7))
    assert read_with_problems(tmp_path) == ([make_episode(0, 123), make_episode(5, 123, 10.7)], [])
    # Runs of older versions, and runs that record none.
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "empty")
    assert read_with_problems(tmp_path / "empty") == ([], [])


@pytest.mark.parametrize(
    ("change", "levels", "problem"),
    [
        (lambda content: content.replace(b": 124", b": 134"), [123, 125], "does not match its checksums at line 2"),
        (
            lambda content: content[: content.rindex(b"\n", 0, -1) + 1],
            [123, 124],
            "lacks lines: it had 3 when the last row was written",
        ),
    ],
)
def test_a_changed_or_lost_line_is_left_out_and_named(
    tmp_path: Path, change: Callable[[bytes], bytes], levels: list[int], problem: str
) -> None:
    write_run(tmp_path, *(make_episode(0, level) for level in (123, 124, 125)))
    path = tmp_path / EPISODES_FILE
    path.write_bytes(change(path.read_bytes()))
    expected = [make_episode(0, level) for level in levels]
    assert read_with_problems(tmp_path) == (expected, [f"{tmp_path}: episodes.jsonl {problem}."])


def test_a_file_that_is_refused_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, make_episode(0, 123))
    (tmp_path / EPISODES_FILE).rename(tmp_path / "moved")
    (tmp_path / EPISODES_FILE).symlink_to(tmp_path / "moved")
    episodes, (problem,) = read_with_problems(tmp_path)
    assert episodes == []
    assert "episodes.jsonl is a symbolic link" in problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step", value) for value in (None, True, -1, 2**63)),
        *(("turns", value) for value in ({}, ["text"], [{"reply": "U"}])),
        *(("turns", [{**FIRST_TURN._asdict(), **change}]) for change in WRONG_PARTS),
        *(("rollout", value) for value in (-1, "0")),
        *(("score", value) for value in (None, 10**400)),
        ("level", "123"),
        ("success", "no"),
        ("stop_reason", 3),
    ],
)
def test_a_line_that_no_run_writes_is_left_out_and_named(tmp_path: Path, name: str, value: object) -> None:
    write_run(tmp_path, make_episode(0, 123), make_episode(1, 124))
    change_records(tmp_path / EPISODES_FILE, lambda records: records[1].update({name: value}))
    (tmp_path / METRICS_FILE).unlink()  # its row would miss the line that was written
    episodes, (problem,) = read_with_problems(tmp_path)
    assert episodes == [make_episode(0, 123)]
    step = "" if name == "step" and value != -1 else f" of step {json.dumps(value if name == 'step' else 1)}"
    assert problem == f"{tmp_path}: episodes.jsonl has a line{step} that is no episode: see {name}."
