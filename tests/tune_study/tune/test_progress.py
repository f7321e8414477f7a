import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from search_spaces.language_model.family import PPO
from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study
from trainable.files.step_phase import write_phase
from trainable.runs.run_files import METRICS_FILE
from trainable.runs.study_record import StatusRecord
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.progress import Progress, format_duration, format_step


def make_study_plan(values: tuple[str, ...] = ("0", "0.1"), steps: int = 100) -> StudyPlan:
    settings = {"trainer.total_training_steps": steps}
    return plan_study(Path("/out"), values, **settings)


def make_progress(
    plan: StudyPlan, is_terminal: bool = False, n_parallel_runs: int = 1, width: int = 160
) -> tuple[Progress, io.StringIO, list[str]]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=width)
    return Progress(plan, n_parallel_runs, console), screen, [run.run_id for run in plan.runs]


def make_row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "reward_std": 2.0, "groups_kept": 8.0, "tokens_per_second": 900.0, **values}


def read_cells(progress: Progress) -> list[list[str]]:
    table = progress.make_table()
    columns = [list(column.cells) for column in table.columns]
    return [[str(cell) for cell in line] for line in zip(*columns, strict=True)]


@pytest.mark.parametrize("width", [160, 60])
def test_a_narrow_terminal_wraps_headings_and_cuts_the_longest_names(width: int) -> None:
    plan = make_study_plan()
    object.__setattr__(plan.runs[1], "arm", "a" * 80)
    progress, screen, (first, second) = make_progress(plan, is_terminal=True, width=width)
    progress.end_run(first, "early_stopped", "a rule")
    progress.start_run(second)
    progress.record_row(second, make_row(7, val_success=0.5, seconds_total=20.0))
    with progress.show_live():
        pass
    lines = [line.split() for line in screen.getvalue().splitlines()]
    assert ["0", "0", "0/100", "-", "-", "-", "-", "early_stopped"] in lines
    (values,) = (line for line in lines if line[0].startswith("aa"))
    assert values[1:] == ["0", "7/100", "0.500", "2.000", "8", "900", "4:26", "running"]
    assert ("…" in values[0]) == (width < 160)


def test_a_run_that_continues_is_shown_from_its_last_step(tmp_path: Path) -> None:
    plan = plan_study(tmp_path)
    first, second = (run.run_id for run in plan.runs)
    plan.get_run_dir(first).mkdir(parents=True)
    for step, success in ((1, 0.25), (40, 0.5), (41, None)):
        append_record(plan.get_run_dir(first) / METRICS_FILE, {"step": step, "val_success": success})
    finished = {second: StatusRecord(second, "completed")}
    progress = Progress(plan, 1, Console(file=io.StringIO()), finished)
    assert read_cells(progress) == [
        ["0", "0", "41/60", "0.500", "-", "-", "-", "-", "waiting"],
        ["0.1", "0", "0/60", "-", "-", "-", "-", "", "completed"],
    ]
    progress.start_run(first)
    progress.record_row(first, make_row(31, seconds_total=62.0))  # from a checkpoint before the last row
    assert read_cells(progress)[0] == ["0", "0", "31/60", "0.500", "2.000", "8", "900", "0:58", "running"]


def test_the_table_follows_the_runs() -> None:
    progress, _, (first, _) = make_progress(make_study_plan())
    assert read_cells(progress)[0] == ["0", "0", "0/100", "-", "-", "-", "-", "-", "waiting"]
    progress.start_run(first)
    progress.record_row(first, make_row(1, base_val_success=0.25, seconds_total=2.0))
    assert read_cells(progress)[0] == ["0", "0", "1/100", "0.250", "2.000", "8", "900", "3:18", "running"]
    progress.record_row(first, make_row(5, val_success=0.0, seconds_total=10.0, reward_std=math.nan))
    progress.record_row(first, make_row(6, seconds_total=12.0))
    assert read_cells(progress)[0] == ["0", "0", "6/100", "0.000", "2.000", "8", "900", "3:08", "running"]
    progress.end_run(first, "early_stopped", "a rule")
    assert read_cells(progress)[0][-2:] == ["", "early_stopped"]


@pytest.mark.parametrize(("n_parallel_runs", "expected_seconds"), [(1, 300.0), (2, 200.0), (8, 200.0)])
def test_time_left_is_the_work_left_over_the_runs_at_once(n_parallel_runs: int, expected_seconds: float) -> None:
    progress, _, (first, _) = make_progress(make_study_plan(), n_parallel_runs=n_parallel_runs)
    assert progress.estimate_study_time_left() == math.inf
    progress.start_run(first)
    progress.record_row(first, make_row(50, seconds_total=100.0))
    assert progress.estimate_study_time_left() == expected_seconds


def test_the_runs_of_a_trial_go_on_together() -> None:
    settings = {"trainer.total_training_steps": 100}
    plan = plan_study(Path("/out"), ("DG", "TPO"), 3, study="influence", **settings)
    progress, _, run_ids = make_progress(plan)
    for run_id in run_ids:
        if plan.trials[0][0].arm in run_id:
            progress.start_run(run_id)
            progress.record_row(run_id, make_row(50, seconds_total=100.0))
    assert progress.estimate_study_time_left() == 100.0 + 200.0
    progress.end_run(plan.trials[0][1].run_id, "early_stopped", "a rule")
    assert progress.estimate_study_time_left() == 100.0 + 200.0


def test_a_terminal_shows_the_table_with_times_and_keeps_it() -> None:
    progress, screen, (first, _) = make_progress(make_study_plan(), is_terminal=True)
    with progress.show_live():
        progress.start_run(first)
        progress.record_row(first, make_row(10, val_success=0.5, seconds_total=20.0))
        assert str(progress.make_table().title) == "kl (laptop)  elapsed 0:00  left 6:20"
    text = screen.getvalue()
    assert "kl (laptop)  elapsed 0:00" in text
    assert "10/100" in text
    assert first not in text


def test_without_a_terminal_lines_name_arm_and_seed() -> None:
    progress, screen, (first, _) = make_progress(make_study_plan())
    with progress.show_live():
        progress.start_run(first)
        for step in range(1, 13):
            progress.record_row(
                first, make_row(step, val_success=0.5 if step % 6 == 0 else None, seconds_total=2.0 * step)
            )
        progress.print_note(first, "failed, retrying: ValueError: no")
        progress.end_run(first, "completed", "trained 12 of 12 steps")
    name = "arm 0 seed 0"
    numbers = "reward_std=2.0000 groups_kept=8"
    assert screen.getvalue().splitlines() == [
        f"{name} started",
        f"{name} step 6/100 {numbers} val_success=0.500 tokens_per_second=900 time_left=3:08",
        f"{name} step 10/100 {numbers} tokens_per_second=900 time_left=3:00",
        f"{name} step 12/100 {numbers} val_success=0.500 tokens_per_second=900 time_left=2:56",
        f"{name} failed, retrying: ValueError: no",
        f"{name} completed: trained 12 of 12 steps",
    ]


def test_a_line_leaves_out_what_was_not_measured() -> None:
    line = format_step(PPO, {"step": 3, "kl_loss": math.nan, "pg_loss": None, "entropy": 1.5, "stop_rule": ""}, 10)
    assert line == "step 3/10 entropy=1.500"


@pytest.mark.parametrize(("seconds", "text"), [(math.inf, "-"), (0.4, "0:00"), (61, "1:01"), (3661, "1:01:01")])
def test_clock(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_runs_that_cannot_learn_say_so_at_step_1_in_one_line() -> None:
    plan = make_study_plan(("0", "0.1", "0.3"))
    in_vain = {"train_invalid_turns": 1.0, "seconds_total": 2.0}
    progress, screen, run_ids = make_progress(plan)
    for run_id in run_ids:
        progress.start_run(run_id)
    for run_id in run_ids[:2]:
        progress.record_row(run_id, make_row(1, **in_vain))
    progress.record_row(run_ids[2], make_row(1, seconds_total=2.0))
    lines = [line for line in screen.getvalue().splitlines() if not line.endswith(" started")]
    assert lines == ["arm 0 seed 0 at step 1, no reply had a valid action: `transcripts` shows them"]
    caption = "In {}, no reply had a valid action: `transcripts` shows them."
    assert str(progress.make_table().caption) == caption.format("2 of 3 runs (arms 0, 0.1)")
    progress.record_row(run_ids[1], make_row(2, seconds_total=4.0))  # it has found one
    progress.record_row(run_ids[2], make_row(2, **in_vain))  # an empty step of a normal run
    assert str(progress.make_table().caption) == caption.format("1 of 3 runs (arm 0)")
    progress.record_row(run_ids[0], make_row(2, seconds_total=4.0))
    assert progress.make_table().caption is None


def make_long_step(folder: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> tuple[Progress, io.StringIO]:
    """The progress of a study whose first run is in a long step, and which looks again whenever it is asked."""
    plan = plan_study(folder)
    progress, screen, (first, _) = make_progress(plan, is_terminal)
    progress.start_run(first)
    progress.record_row(first, make_row(1))
    plan.get_run_dir(first).mkdir(parents=True)
    write_phase(plan.get_run_dir(first), 2, "rollout, turn 3 of 5")
    monkeypatch.setattr("tune_study.tune.progress.QUIET_SECONDS", 0.0)
    return progress, screen


def test_the_table_says_what_a_long_step_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress, _ = make_long_step(tmp_path, monkeypatch, is_terminal=True)
    cells = read_cells(progress)
    progress.look_at_phases()
    assert str(progress.make_table().caption) == "arm 0 seed 0 step 2/60: rollout, turn 3 of 5"
    assert read_cells(progress) == cells  # no column gets wider
    progress.record_row(next(iter(progress.views)), make_row(2))
    assert progress.make_table().caption is None
    progress.look_at_phases()  # the file is of step 2, which has ended
    assert progress.make_table().caption is None


def test_lines_on_a_long_step_do_not_follow_each_other_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress, screen = make_long_step(tmp_path, monkeypatch, is_terminal=False)
    for _ in range(5):
        progress.look_at_phases()
    assert screen.getvalue().count("step 2/60: rollout, turn 3 of 5") == 1
    monkeypatch.setattr("tune_study.tune.progress.SECONDS_PER_PHASE_LINE", 0.0)
    progress._next_phase_lines.update(dict.fromkeys(progress.views, 0.0))
    progress.look_at_phases()
    progress.look_at_phases()
    assert screen.getvalue().count("step 2/60: rollout, turn 3 of 5") == 3
