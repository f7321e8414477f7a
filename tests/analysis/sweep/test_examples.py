"""The example episodes of a report: which are chosen, and that their texts stay texts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from analysis import load
from analysis.sweep import examples
from tests.analysis.report.test_pages import render_frames
from tests.fakes.lines import append_record
from tests.fakes.run_folders import FakeRun, write_study
from trainable.files.json_lines import read_lines
from trainable.files.paths import UnsafePathError
from trainable.runs.episode_lines import RecordedEpisode, RecordedTurn
from trainable.runs.run_files import ENDS_KEY, EPISODES_FILE, METRICS_FILE
from trainable.runs.study_record import RunEntry

RUNS = [FakeRun(arm, seed) for arm in ("0", "0.1", "1") for seed in (0, 1)]


def make_episode(step: int, level: int, success: bool, observation: str = "a board") -> RecordedEpisode:
    turn = RecordedTurn(observation, f"<think>{step}</think>", ("Up",), -0.1, True)
    return RecordedEpisode(step, level, (turn,), success, "success" if success else "out of turns", -0.1)


def write_episodes(folder: Path, run: FakeRun, *episodes: RecordedEpisode) -> None:
    run_dir = folder / "runs" / run.run_id
    for episode in episodes:
        append_record(run_dir / EPISODES_FILE, episode.to_line())
    ends = {EPISODES_FILE: list(read_lines(run_dir / EPISODES_FILE).end)}
    append_record(run_dir / METRICS_FILE, {"step": 60, ENDS_KEY: ends})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs. Arm 1 has no episodes, and arm 0.1 only solved ones."""
    folder = write_study(tmp_path_factory.mktemp("examples"), RUNS)
    outcomes = {7: True, 8: False, 9: False, 10: True}
    for seed, number in ((0, 0), (1, 1)):
        episodes = [make_episode(step, level, outcomes[level]) for step in (0, 5, 60) for level in outcomes]
        write_episodes(folder, RUNS[number], *(episode._replace(score=seed) for episode in episodes))
    attack = "</pre><script>alert(1)</script>\x1b[2J"
    write_episodes(folder, RUNS[2], make_episode(0, 7, True, attack), make_episode(60, 7, True, "x" * 9_000))
    return folder


def test_a_solved_and_a_failed_episode_of_the_first_and_the_last_validation_are_chosen(folder: Path) -> None:
    first, second = examples.choose_examples(load(folder))
    assert (first.arm, first.seed, second.arm) == ("0", 0, "0.1")
    assert [(episode["step"], episode["level"], episode["success"]) for episode in first.episodes] == [
        (0, 7, True),
        (0, 8, False),
        (60, 7, True),
        (60, 8, False),
    ]
    assert [episode["step"] for episode in second.episodes] == [0, 60]
    assert first.episodes[0]["text"] == "| a board\n> <think>0</think>\n  Up, reward -0.1"


@pytest.mark.long
def test_the_trained_episodes_with_the_extreme_advantages_of_the_last_step_are_chosen(tmp_path: Path) -> None:
    folder = write_study(tmp_path, RUNS[:1])
    episodes = []
    for step, advantages in ((5, (9.0, -9.0)), (60, (0.5, -1.0, 2.0))):
        for rollout, advantage in enumerate(advantages):
            episode = make_episode(step, 70, False)
            episodes.append(episode._replace(turns=(episode.turns[0]._replace(advantage=advantage),), rollout=rollout))
    write_episodes(folder, RUNS[0], *episodes)
    (example,) = examples.choose_examples(load(folder))
    assert [episode["title"] for episode in example.episodes] == [
        "Trained in step 60, level 70, rollout 2",
        "Trained in step 60, level 70, rollout 1",
    ]
    text = render_frames(load(folder))
    assert "from the last training step the episodes with the largest and the smallest advantage" in text
    assert "<summary>Arm KL 0, seed 0: advantage +2 in step 60, advantage -1 in step 60</summary>" in text
    assert "Up, reward -0.1, advantage 2\n" in text or "Up, reward -0.1, advantage 2<" in text


def test_long_and_hostile_texts_are_cut_and_escaped(folder: Path) -> None:
    page = render_frames(load(folder))
    assert "<script>alert" not in page
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in page
    # 9,000 letters, whose middle is left out; what comes after them stays.
    assert re.search(r"x{3000,}\n\[1,\d{3} of 9,\d{3} characters left out\]\nx{3000,}\n&gt; &lt;think&gt;60", page)
    assert "x" * 4_001 not in page
    assert "<summary>Arm KL 0, seed 0: solved after step 0, failed after step 0, solved after step 60" in page
    assert '<li><a href="#examples">What the policy did</a></li>' in page


@pytest.mark.parametrize("run_id", ["../../../elsewhere", "/etc", "a/../b", ""])
def test_a_name_that_is_no_run_reads_nothing(folder: Path, run_id: str) -> None:
    frames = load(folder)
    trials = frames.trials.assign(run_id=run_id)
    assert examples.choose_examples(replace(frames, trials=trials)) == []
    with pytest.raises(ValidationError):
        RunEntry(run_id)


def test_the_link_of_a_run_is_not_followed(folder: Path, tmp_path: Path) -> None:
    copy = write_study(tmp_path, RUNS)
    frames = load(copy)
    run_dir = copy / "runs" / RUNS[0].run_id
    run_dir.rename(tmp_path / "elsewhere")
    run_dir.symlink_to(folder / "runs" / RUNS[0].run_id)
    with pytest.raises(UnsafePathError):
        examples.choose_examples(frames)
    with pytest.raises(UnsafePathError):
        _ = frames.episodes


def test_episodes_are_read_from_another_folder_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    frames = load(folder.name)
    monkeypatch.chdir("/")
    assert len(frames.episodes) > 0


@pytest.mark.slow
def test_studies_of_many_arms_and_frames_without_a_folder_have_no_examples(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = load(folder)
    assert examples.choose_examples(replace(frames, folders=())) == []
    monkeypatch.setattr(examples, "MAX_ARMS", 2)
    assert examples.choose_examples(frames) == []
    assert 'id="examples"' not in render_frames(load(folder))
