"""A run that continues another one: as before, it repeats its rows; with a remedy, only later rows differ."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from analysis.data.episodes import read_episodes
from tests.fakes.trials import drop_times, make_trial_config, read_run_files
from trainable.language_model import TRAINER
from trainable.runs.failures import CheckpointError
from trainable.runs.run import Run
from trainable.runs.run_files import LINE_FILES, RunLines
from trainable.runs.training import TrainingLoop
from trainable.trial import PPO

pytestmark = pytest.mark.long

IN_TORCH = {"rollout__name": "torch", "model__compiled_passes": False}
SETTINGS = {"trainer__total_training_steps": 4, "trainer__save_freq": 1, "trainer__log_val_generations": 2}
ADAPTIVE = {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}


def make_fork_loop(folder: Path, parent: Path, step: int, **settings: object) -> TrainingLoop:
    """Make the loop of a run in `folder` that continues the run in `parent` after `step`."""
    config = make_trial_config(folder, **SETTINGS, **settings)
    run = config["run"]["runs"][0] | {"run_id": "fork-s0"}
    places = {"run_dir": str(parent / "runs" / "r"), "checkpoint_dir": str(parent / "saved")}
    options = {**config["run"], "arm": "fork"}
    runs = [{**run, "parent": {**places, "step": step}}]
    return TrainingLoop(TRAINER, PPO.make_config(config), runs, options)


def train(loop: TrainingLoop) -> None:
    with closing(loop):
        while not loop.is_over:
            loop.step()


def check_equal(fork: Path, parent: Path) -> None:
    """Check that all that was measured in two runs is equal, but their names, and that no line is damaged."""
    names = {"run_id": "fork-s0", "arm": "fork"}
    rows, lines = read_run_files(fork)
    parent_rows, parent_lines = read_run_files(parent)
    assert [drop_times(row) for row in rows] == [{**drop_times(row), **names} for row in parent_rows]
    assert lines == parent_lines != []
    assert read_episodes(fork / "runs" / "r") == read_episodes(parent / "runs" / "r") != []
    assert RunLines.read(fork / "runs" / "r").find_damage() == []


def train_parent(folder: Path, **settings: object) -> Path:
    """Train a run of four steps that keeps every state."""
    config = make_trial_config(folder, **SETTINGS, **settings)
    train(TrainingLoop(TRAINER, PPO.make_config(config), config["run"]["runs"], config["run"]))
    return folder


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_parent(tmp_path_factory.mktemp("parent"))


@pytest.fixture
def fork(parent: Path, tmp_path: Path) -> Callable[..., TrainingLoop]:
    """Return a function that makes the loop of a run in `tmp_path` which continues the parent after a step."""
    return lambda step, parent=parent, **settings: make_fork_loop(tmp_path, parent, step, **settings)


def test_as_before_repeats_the_rows_of_the_run_to_the_last_bit(
    parent: Path, fork: Callable[..., TrainingLoop], tmp_path: Path
) -> None:
    train(fork(3))
    check_equal(tmp_path, parent)


def test_a_remedy_changes_only_later_rows(parent: Path, fork: Callable[..., TrainingLoop], tmp_path: Path) -> None:
    train(fork(2, actor__lr=1e-2))
    rows, parent_rows = ([drop_times(row) for row in read_run_files(folder)[0]] for folder in (tmp_path, parent))
    names = {"run_id": "fork-s0", "arm": "fork"}
    assert rows[:2] == [{**row, **names} for row in parent_rows[:2]]
    assert len(rows) == len(parent_rows)
    # It samples the same episodes in its first step, from the same weights, and only then updates them otherwise.
    assert {name for name in rows[2] if rows[2][name] != parent_rows[2][name]} >= {"actor_grad_norm", "run_id"}
    assert rows[2]["train_success"] == parent_rows[2]["train_success"]
    assert rows[2]["entropy"] == parent_rows[2]["entropy"]
    assert rows[3]["entropy"] != parent_rows[3]["entropy"]


def test_a_fork_that_was_killed_continues_by_itself_without_its_parent(
    parent: Path, fork: Callable[..., TrainingLoop], tmp_path: Path
) -> None:
    with closing(fork(1)) as loop:
        loop.step()
    with closing(fork(1, parent=tmp_path / "nowhere")) as loop:
        assert loop.trainer is not None
        assert loop.trainer.step_index == 2
        train(loop)
    check_equal(tmp_path, parent)
    assert not (tmp_path / "nowhere").exists()


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("method", "call"), [("append_row", 2), ("prepare_checkpoint", 0)])
def test_a_fork_that_was_killed_while_it_copied_begins_again(
    method: str,
    call: int,
    parent: Path,
    fork: Callable[..., TrainingLoop],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, calls = getattr(Run, method), list[int]()

    def kill(run: Run, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > call:
            raise KilledError
        return original(run, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Run, method, kill)
        with pytest.raises(KilledError):
            fork(3)
    assert not list((tmp_path / "runs" / "r").glob("state/step_*"))
    train(fork(3))
    check_equal(tmp_path, parent)


def test_a_fork_whose_files_are_damaged_begins_again(
    parent: Path, fork: Callable[..., TrainingLoop], tmp_path: Path
) -> None:
    train(fork(2))
    for name in LINE_FILES:
        if (path := tmp_path / "runs" / "r" / name).exists():
            path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 7', 1))
    shutil.rmtree(tmp_path / "runs" / "r" / "state")
    shutil.rmtree(tmp_path / "saved")
    train(fork(2))
    check_equal(tmp_path, parent)


@pytest.mark.parametrize(
    ("step", "settings", "message"),
    [
        (7, {}, "has no usable checkpoint after step 7"),
        (2, {"critic__shared_trunk": True, **IN_TORCH}, "tensors do not match"),
    ],
)
def test_a_state_that_cannot_be_continued_is_refused_before_a_row_is_written(
    step: int, settings: dict[str, object], message: str, fork: Callable[..., TrainingLoop], tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, ValueError), match=message):
        fork(step, **settings)
    assert not (tmp_path / "runs" / "r" / "metrics.jsonl").exists()


def test_a_controller_of_a_remedy_begins_with_its_own_coefficient(
    fork: Callable[..., TrainingLoop], tmp_path: Path
) -> None:
    train(fork(2, **ADAPTIVE, algorithm__kl_ctrl__kl_coef=0.3))
    coefficients = [row.get("kl_in_reward_coef") for row in read_run_files(tmp_path)[0]]
    assert coefficients[:3] == [None, None, 0.3]
