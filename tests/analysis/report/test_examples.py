"""The example episodes of a report: which are chosen, and that their texts stay texts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from analysis import StudyFrames, load
from analysis.report import sweep
from analysis.report.results import SweepResults
from analysis.report.section import Listing
from tests.analysis.data.test_episodes import write_run
from tests.analysis.report.test_pages import render_frames
from tests.fakes.run_folders import FakeRun, write_study
from trainable.files.paths import UnsafePathError
from trainable.runs.episode_lines import RecordedEpisode, RecordedTurn
from trainable.runs.study_record import RunEntry

RUNS = [FakeRun(arm, seed) for arm in ("0", "0.1", "1") for seed in (0, 1)]


def make_episode(step: int, level: int, success: bool, observation: str = "a board") -> RecordedEpisode:
    turn = RecordedTurn(observation, f"<think>{step}</think>", ("Up",), -0.1, True)
    return RecordedEpisode(step, level, (turn,), success, "success" if success else "out of turns", -0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs. Arm 1 has no episodes, and arm 0.1 only solved ones."""
    folder = write_study(tmp_path_factory.mktemp("examples"), RUNS)
    outcomes = {7: True, 8: False, 9: False, 10: True}
    attack = "</pre><script>alert(1)</script>\x1b[2J"
    episodes = [
        make_episode(step, level, outcomes[level])._replace(score=0) for step in (0, 5, 60) for level in outcomes
    ]
    attacks = [make_episode(0, 7, True, attack), make_episode(60, 7, True, "x" * 9_000)]
    for run, recorded in zip(RUNS, (episodes, [each._replace(score=1) for each in episodes], attacks), strict=False):
        write_run(folder / "runs" / run.run_id, *recorded, step=60)
    return folder


def list_examples(frames: StudyFrames) -> list[Listing]:
    return [table for table in sweep.EXAMPLES.tables(SweepResults(frames)) if isinstance(table, Listing)]


def test_a_solved_and_a_failed_episode_of_the_first_and_the_last_validation_are_chosen(folder: Path) -> None:
    first, second = list_examples(load(folder))
    ends = "solved after step 0, failed after step 0, solved after step 60, failed after step 60"
    assert first.fold == f"Arm 0, seed 0: {ends}"
    places = re.findall(r"After step (\d+), level (\d+): ", first.text)
    assert places == [("0", "7"), ("0", "8"), ("60", "7"), ("60", "8")]
    assert "\n\n| a board\n> <think>0</think>\n  Up, reward -0.1\n\n" in first.text
    assert second.fold == "Arm 0.1, seed 0: solved after step 0, solved after step 60"


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
    assert list_examples(replace(frames, trials=trials)) == []
    with pytest.raises(ValidationError):
        RunEntry(run_id)


def test_the_link_of_a_run_is_not_followed(folder: Path, tmp_path: Path) -> None:
    copy = write_study(tmp_path, RUNS)
    frames = load(copy)
    run_dir = copy / "runs" / RUNS[0].run_id
    run_dir.rename(tmp_path / "elsewhere")
    run_dir.symlink_to(folder / "runs" / RUNS[0].run_id)
    with pytest.raises(UnsafePathError):
        list_examples(frames)
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
    assert list_examples(replace(frames, folders=())) == []
    monkeypatch.setattr(sweep, "MAX_EXAMPLE_ARMS", 2)
    assert list_examples(frames) == []
    assert 'id="examples"' not in render_frames(load(folder))
