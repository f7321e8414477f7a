"""An interrupted run continues from its newest complete checkpoint, to the rows of an uninterrupted one."""

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.data.episodes import read_episodes
from tests.fakes.trials import (
    Row,
    UninterruptedRun,
    drop_times,
    find_newest_checkpoint,
    get_rows,
    make_loop,
    make_trial_config,
    read_run_files,
    start_trial,
)
from tests.strategies.examples import thin_out
from trainable.ppo.trainer import PPOTrainer
from trainable.runs import run
from trainable.runs.checkpoint import iter_checkpoints, read_checkpoint, write_checkpoint
from trainable.runs.run import LinesByFile, TrainerState
from trainable.runs.run_files import RunLines, RunLockedError, read_rows
from trainable.runs.training import StepResult, TrainerFamily, TrainingLoop
from trainable.trial import PPO


def compare(folder: Path, uninterrupted_run: UninterruptedRun) -> None:
    """Compare the rows and evaluations that count with those of the uninterrupted run."""
    rows, lines = read_run_files(folder)
    assert [drop_times(row) for row in rows] == [drop_times(row) for row in read_run_files(uninterrupted_run[0])[0]]

    def index_lines(lines: list[Row]) -> dict[tuple[Any, ...], Row]:
        return {(line["step"], line["split"], line["mode"]): line for line in lines}

    assert index_lines(lines) == index_lines(read_run_files(uninterrupted_run[0])[1])
    assert read_episodes(folder / "runs" / "r") == read_episodes(uninterrupted_run[0] / "runs" / "r") != []


def finish(folder: Path, uninterrupted_run: UninterruptedRun, first_step: int, **settings: object) -> str:
    """Continue a run to its end in a new process. Check its first step, compare it, and return the first note."""
    resumed = start_trial(folder, **settings)
    assert [row["step"] for row in get_rows(resumed)] == list(range(1, first_step))
    rows = [resumed.step() for _ in range(first_step, 4)]
    assert [row["step"] for row in rows] == list(range(first_step, 4))
    compare(folder, uninterrupted_run)
    assert RunLines.read(folder / "runs" / "r").find_damage() == []
    return str(rows[0]["note"])


def train_steps(folder: Path, count: int, **settings: object) -> PPO:
    trainable = start_trial(folder, **settings)
    for _ in range(count):
        trainable.step()
    return trainable


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after the second of its three steps."""
    folder = tmp_path_factory.mktemp("interrupted")
    train_steps(folder, 2).cleanup()
    return folder


@pytest.fixture
def interrupted(interrupted_run: Path, tmp_path: Path) -> Path:
    """A copy of the interrupted run, for this test alone."""
    return shutil.copytree(interrupted_run, tmp_path / "interrupted")


def start(folder: Path, **settings: object) -> tuple[int, str]:
    """Start a run again. Return the step after which it continues, and the notes of the start."""
    with closing(make_loop(folder, **settings)) as loop:
        assert loop.trainer is not None
        return loop.trainer.step_index, "; ".join(loop.notes)


@dataclass
class FakeTrainer:
    """Trains nothing: the row of a step is what `make_columns` makes."""

    seeds: Sequence[int]
    make_columns: Callable[[], Row]
    step_index: int = 0

    def step(self, before_update: Callable[[], None]) -> StepResult:
        self.step_index += 1
        row = {"step": self.step_index, **self.make_columns()}
        return StepResult(dict.fromkeys(self.seeds, row))

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        return row, {}

    def get_state(self, seed: int) -> TrainerState:
        return TrainerState({"weight": torch.zeros(1)}, {"step": self.step_index})

    def load_states(self, states: Sequence[TrainerState]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def make_fake_family(make_columns: Callable[[], Row]) -> TrainerFamily:
    return TrainerFamily(lambda config, seeds: FakeTrainer(seeds, make_columns), best_column="val_success")


@pytest.mark.long
def test_interrupted_after_a_step_and_started_again(interrupted: Path, uninterrupted_run: UninterruptedRun) -> None:
    finish(interrupted, uninterrupted_run, first_step=3)


@pytest.mark.long
def test_rows_written_after_the_last_state_are_repeated(tmp_path: Path, uninterrupted_run: UninterruptedRun) -> None:
    trainable = start_trial(tmp_path, trainer__resume_every=2)
    rows = [trainable.step() for _ in range(3)][:2]
    # This is the state on disk if the process dies before it writes the last checkpoint.
    shutil.rmtree(tmp_path / "runs" / "r" / "state")
    resumed = start_trial(tmp_path, trainer__resume_every=2)
    assert get_rows(resumed) == []
    repeated_rows = [resumed.step() for _ in range(2)]
    note = "no checkpoint is common to all runs: training starts from the beginning"
    assert repeated_rows[0].pop("note") == note
    assert rows[0].pop("note") == ""
    assert [drop_times(row) for row in repeated_rows] == [drop_times(row) for row in rows]
    second_resumed = start_trial(tmp_path, trainer__resume_every=2)
    assert [row["step"] for row in get_rows(second_resumed)] == [1, 2]
    assert second_resumed.step()["done"]
    compare(tmp_path, uninterrupted_run)


@pytest.mark.parametrize(
    ("step_seconds", "every", "limit", "write_seconds", "expected"),
    [
        # A state is due if another step, as long as the longest so far, could end after the limit.
        ([1.0] * 12, 100, 4.0, 0.0, [4, 8, 12]),
        ([3.0, 1.0, 1.0, 1.0, 1.0, 1.0], 100, 4.0, 0.0, [1, 3, 5, 6]),
        ([2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 100, 4.5, 0.0, [2, 5, 7]),
        ([9.0, 9.0], 100, 4.0, 0.0, [1, 2]),
        ([1.0] * 7, 3, None, 0.0, [3, 6, 7]),
        # A step is also trained while a state is written in the background.
        ([1.0] * 6, 100, 4.0, 2.0, [2, 4, 6]),
        ([1.0] * 7, 3, 2.5, 0.0, [2, 3, 5, 6, 7]),
    ],
    ids=str,
)
def test_states_are_written_by_steps_and_by_seconds(
    step_seconds: list[float],
    every: int,
    limit: float | None,
    write_seconds: float,
    expected: list[int],
    tmp_path: Path,
) -> None:
    now, remaining = [1000.0], list(step_seconds)

    def take_time() -> Row:
        now[0] += remaining.pop(0)
        return {}

    settings = {"trainer__resume_every": every, "trainer__resume_seconds": limit}
    settings |= {"trainer__total_training_steps": len(step_seconds)}
    loop = make_loop(tmp_path, lambda: now[0], make_fake_family(take_time), **settings)
    loop._longest_write_seconds = write_seconds
    with closing(loop):
        reports = [loop.step() for _ in step_seconds]
    assert [report.last_step for report in reports if report.is_saved] == expected


@pytest.mark.parametrize(
    ("values", "states"),
    [
        # The first of equal values is the best, and a missing one is none.
        ([0.3, 0.5, 0.5, 0.4, None, 0.2], [2, 6]),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [6]),
        ([0.6, 0.5, 0.4, 0.3, 0.2, 0.1], [1, 6]),
        ([None] * 6, [6]),
    ],
    ids=["in the middle", "at the end", "at first", "none"],
)
@pytest.mark.parametrize("keeps_last", [False, True], ids=["the last is removed", "the last stays"])
@pytest.mark.parametrize("keeps_best", [True, False], ids=["the best stays", "the best is removed"])
def test_the_state_of_the_best_validation_stays(
    values: list[float | None], states: list[int], keeps_best: bool, keeps_last: bool, tmp_path: Path
) -> None:
    remaining = list(values)
    states_to_keep = {"trainer__keep_best": keeps_best, "trainer__keep_last": keeps_last}
    lengths = {"trainer__resume_every": 100, "trainer__total_training_steps": 6}
    family = make_fake_family(lambda: {"val_success": remaining.pop(0)})
    loop = make_loop(tmp_path, family=family, **lengths, **states_to_keep)
    with closing(loop):
        for _ in values:
            loop.step()
    steps = sorted(step for step, _ in iter_checkpoints(tmp_path / "runs" / "r" / "state"))
    best_steps = [] if values == [None] * 6 else [states[0]]
    assert steps == sorted({*(best_steps if keeps_best else ()), *([6] if keeps_last else ())})


@pytest.mark.long
def test_a_run_that_dies_between_row_and_checkpoint_repeats_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted_run: UninterruptedRun
) -> None:
    trainable = start_trial(tmp_path)
    trainable.step()

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "write_rolling_checkpoint", die)
        with pytest.raises(KeyboardInterrupt):
            trainable.step()
    assert [row["step"] for row in read_rows(tmp_path / "runs" / "r" / "metrics.jsonl")] == [1, 2]
    finish(tmp_path, uninterrupted_run, first_step=2)


def make_async_loop(folder: Path, **settings: object) -> TrainingLoop:
    return make_loop(folder, trainer__async_checkpoints=True, **settings)


@pytest.mark.long
def test_a_checkpoint_is_written_while_the_next_step_samples_and_before_it_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted_run: UninterruptedRun
) -> None:
    events: list[str] = []
    has_sampled, is_updating = threading.Event(), threading.Event()
    write, collect, update = run.write_rolling_checkpoint, PPOTrainer._collect_episodes, PPOTrainer._update_critic

    def write_late(folder: Path, step: int, *arguments: Any) -> None:
        if step < 3:  # the last one is written before the step ends
            assert has_sampled.wait(60)
            assert not is_updating.wait(0.2)
        write(folder, step, *arguments)
        events.append(f"wrote {step}")

    def collect_and_tell(trainer: PPOTrainer) -> Any:
        episodes = collect(trainer)
        events.append(f"sampled {trainer.step_index}")
        is_updating.clear()
        has_sampled.set()
        return episodes

    def tell_and_update(trainer: PPOTrainer, *arguments: Any) -> Any:
        events.append(f"updates {trainer.step_index}")
        is_updating.set()
        has_sampled.clear()
        return update(trainer, *arguments)

    monkeypatch.setattr(run, "write_rolling_checkpoint", write_late)
    monkeypatch.setattr(PPOTrainer, "_collect_episodes", collect_and_tell)
    monkeypatch.setattr(PPOTrainer, "_update_critic", tell_and_update)
    with closing(make_async_loop(tmp_path)) as loop:
        reports = [loop.step() for _ in range(3)]
    expected = ["sampled 1", "updates 1"]
    for step in (2, 3):
        expected += [f"sampled {step}", f"wrote {step - 1}", f"updates {step}"]
    assert events == [*expected, "wrote 3"]
    assert [report.is_saved for report in reports] == [False, False, True]
    assert loop._longest_write_seconds >= 0.2  # what `write_late` waits for
    compare(tmp_path, uninterrupted_run)


@pytest.mark.long
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["trains on", "interrupted"])
def test_an_error_of_a_checkpoint_in_the_background_reaches_the_run(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise PermissionError("read-only")

    loop = make_async_loop(tmp_path, interrupt=str(tmp_path / "interrupt"))
    with closing(loop), monkeypatch.context() as patched:
        patched.setattr(run, "write_rolling_checkpoint", fail)
        loop.step()
        if is_interrupted:
            (tmp_path / "interrupt").touch()
        with pytest.raises(PermissionError, match="read-only"):
            loop.step()
    assert start(tmp_path)[0] == 0  # nothing was saved: the steps are trained again


@pytest.mark.long
def test_an_interrupted_study_has_its_checkpoint_when_the_step_is_reported(tmp_path: Path) -> None:
    interrupt = tmp_path / "interrupt"
    loop = make_async_loop(tmp_path, interrupt=str(interrupt))
    with closing(loop):
        assert not loop.step().is_saved
        interrupt.touch()
        assert loop.step().is_saved
        assert find_newest_checkpoint(tmp_path).name == "step_2"
    assert start(tmp_path)[0] == 2


@pytest.mark.long
@pytest.mark.parametrize("save_freq", [-1, 2])
def test_a_run_whose_last_state_is_removed_is_never_trained_again(
    save_freq: int, tmp_path: Path, uninterrupted_run: UninterruptedRun
) -> None:
    # A saved last state that is missing is made again.
    for expected_steps, is_missing in (([1, 2, 3], False), ([3], False), ([3], save_freq > 0)):
        if is_missing:
            shutil.rmtree(tmp_path / "saved" / "global_step_3")
        loop = make_loop(tmp_path, trainer__save_freq=save_freq, trainer__keep_last=False)
        with closing(loop):
            assert loop.notes == ["training continues after step 2"] * is_missing
            steps = []
            while not steps or not loop.is_over:
                steps.append(loop.step().last_step)
        assert steps == expected_steps
        assert list(iter_checkpoints(tmp_path / "runs" / "r" / "state")) == []
        saved_steps = [step for step, _ in iter_checkpoints(tmp_path / "saved")]
        assert saved_steps == ([] if save_freq < 0 else [3, 2])
    compare(tmp_path, uninterrupted_run)


@pytest.mark.parametrize("keeps_last", [True, False])
def test_a_state_that_a_dead_process_left_is_removed_by_the_next_start(
    keeps_last: bool, tmp_path: Path, uninterrupted_run: UninterruptedRun
) -> None:
    folder = shutil.copytree(uninterrupted_run[0], tmp_path / "run")
    loop = make_loop(folder, trainer__keep_last=keeps_last)
    loop.close()
    assert loop.is_over
    assert [step for step, _ in iter_checkpoints(folder / "runs" / "r" / "state")] == ([3] if keeps_last else [])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.long
def test_a_kept_checkpoint_is_used_where_every_rolling_state_is_damaged(tmp_path: Path) -> None:
    train_steps(tmp_path, 2, trainer__save_freq=1).cleanup()
    for _, path in iter_checkpoints(tmp_path / "runs" / "r" / "state"):
        truncate(path / "state.json")
    truncate(tmp_path / "saved" / "global_step_2" / "checksums.json")
    assert start(tmp_path, trainer__save_freq=1)[0] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda values: values["settings"].update(seed=1), "written with other settings"),
        (lambda values: values.pop("settings"), "RunConfig"),
        (lambda values: values.update(step=1), "it contains step 1"),
        (lambda values: values.pop("kl_coef"), "kl_coef"),
    ],
    ids=["seed", "settings", "step", "coefficient"],
)
def test_a_whole_state_that_is_not_this_runs_is_not_used(
    interrupted: Path, change: Callable[[Row], object], reason: str
) -> None:
    tensors, values = read_checkpoint(find_newest_checkpoint(interrupted))
    change(values)
    write_checkpoint(find_newest_checkpoint(interrupted), tensors, values)
    step, note = start(interrupted)
    assert step == 1
    assert reason in note


@pytest.mark.long
@pytest.mark.parametrize("change", thin_out(["missing", "reshaped", "added"]))
def test_tensors_that_do_not_fit_leave_the_trainer_as_it_was(
    interrupted: Path, uninterrupted_run: UninterruptedRun, change: str
) -> None:
    tensors, values = read_checkpoint(find_newest_checkpoint(interrupted))
    name = "critic_optimizer/0/exp_avg"
    changed_tensors = {
        "missing": {},
        "reshaped": {name: tensors[name].flatten()},
        "added": {name: tensors[name], "actor/x": tensors[name].clone()},
    }
    other_tensors = {key: tensor for key, tensor in tensors.items() if key != name}
    write_checkpoint(find_newest_checkpoint(interrupted), {**other_tensors, **changed_tensors[change]}, values)
    assert "tensors do not match" in finish(interrupted, uninterrupted_run, first_step=2)


def drop_lines(name: str, *indices: int) -> Callable[[Path], None]:
    """Drop lines of a file of the run, by index; without indices, the file."""

    def drop(folder: Path) -> None:
        path = folder / "runs" / "r" / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(line for index, line in enumerate(lines) if index not in indices))
        if not indices:
            path.unlink()

    return drop


LOSSES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    # The change, the first step that is trained again, and a part of the note. Lines of levels.jsonl are two of the
    # validation before training, and one of step 2.
    "the row of step 1": (drop_lines("metrics.jsonl", 0), 1, "metrics.jsonl does not match its checksums at line 1"),
    "all evaluations": (drop_lines("levels.jsonl"), 1, "levels.jsonl lacks lines: it had 3 when the last row"),
    "all episodes": (drop_lines("episodes.jsonl"), 1, "episodes.jsonl lacks lines: it had 8 when the last row"),
    "an evaluation before training": (drop_lines("levels.jsonl", 1), 1, "levels.jsonl"),
    "the evaluation of step 2": (drop_lines("levels.jsonl", 2), 2, "levels.jsonl"),
    "a state": (lambda folder: truncate(find_newest_checkpoint(folder) / "state.safetensors"), 2, "step_2 is not used"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_damaged_state_or_one_without_its_lines_is_not_used(name: str, interrupted: Path) -> None:
    change, first_step, words = LOSSES[name]
    change(interrupted)
    step, note = start(interrupted)
    assert step == first_step - 1
    assert words in note


@pytest.mark.long
def test_a_run_that_abandoned_lines_continues_from_the_checkpoints_after_them(tmp_path: Path) -> None:
    """The evaluations have no line after the abandoned ones until the next validation."""
    settings: dict[str, object] = {"trainer__total_training_steps": 5, "trainer__test_freq": 5}
    train_steps(tmp_path, 3, **settings)
    path = tmp_path / "runs" / "r" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"groups": 2', b'"groups": 3')]))
    second_trial = start_trial(tmp_path, **settings)
    row = second_trial.step()
    assert row["step"] == 3
    assert "training continues after step 2" in row["note"]
    assert RunLines.read(path.parent).find_damage() == []
    third_trial = start_trial(tmp_path, **settings)
    row = third_trial.step()
    assert (row["step"], row["note"]) == (4, "training continues after step 3")
    assert third_trial.step()["done"]
    assert RunLines.read(path.parent).find_damage() == []


@pytest.mark.long
def test_a_finished_run_with_a_changed_letter_is_trained_again(
    tmp_path: Path, uninterrupted_run: UninterruptedRun
) -> None:
    shutil.copytree(uninterrupted_run[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "runs" / "r" / "episodes.jsonl"
    path.write_bytes(path.read_bytes().replace(b"State", b"Skate", 1))
    # The only checkpoint stands on the changed line.
    note = finish(tmp_path, uninterrupted_run, first_step=1)
    assert "episodes.jsonl does not match its checksums at line " in note


def test_trained_episodes_are_in_the_file_beside_those_of_validations(tmp_path: Path) -> None:
    train_steps(tmp_path, 2, trainer__log_train_generations=3, trainer__test_freq=1)
    run_dir = tmp_path / "runs" / "r"
    assert RunLines.read(run_dir).find_damage() == []
    episodes = read_episodes(run_dir)
    assert [(episode.step, episode.level) for episode in episodes if not episode.is_trained] == [
        (step, level) for step in (0, 1, 2) for level in (123, 124, 125, 126)
    ]
    trained = [(episode.step, episode.rollout) for episode in episodes if episode.is_trained]
    assert trained == [(step, number) for step in (1, 2) for number in range(3)]
    turns = [turn for episode in episodes for turn in episode.turns if episode.is_trained]
    assert all(turn.advantage is not None for turn in turns)


@pytest.mark.long
def test_a_restored_trainer_holds_no_file_that_was_deleted(tmp_path: Path) -> None:
    trainable = start_trial(tmp_path)
    trainable.step()
    resumed = start_trial(tmp_path)
    resumed.step()
    resumed.step()
    assert "step_1" not in {path.name for path in (tmp_path / "runs" / "r" / "state").iterdir()}
    memory_maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in memory_maps


def test_no_two_processes_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOCK_TIMEOUT_S", 0.0)
    start_trial(tmp_path)
    with pytest.raises(RunLockedError, match=f"runs/r is still in use by another process .pid {os.getpid()} on "):
        PPO(make_trial_config(tmp_path)).begin()
