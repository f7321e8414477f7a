"""The console of verl: the rules that its logs have taught."""

from pathlib import Path

import pytest

from tests.trainable.sources.logs import (
    WORKER,
    format_verl_step,
    make_settings,
    read_log,
    write_verl_console,
    write_verl_run,
)
from trainable.sources.logs import RunLog
from trainable.sources.names import translate_rows

SUCCESS = "val-core/gsm8k/reward/mean@1"


def read_lines(tmp_path: Path, *lines: str) -> RunLog:
    return read_log(write_verl_console(tmp_path / "run.log", make_settings(), lines))


def test_settings_are_read_from_what_the_log_prints_and_not_from_its_name(tmp_path: Path) -> None:
    log = read_log(write_verl_run(tmp_path / "lr1e-3-seed7.log", [0.5], seed=3))
    assert log.settings["actor_rollout_ref.actor.optim.lr"] == 1e-6
    assert log.settings["actor_rollout_ref.model.lora_rank"] == 32
    assert log.settings["data.seed"] == 3
    assert "another" not in log.settings
    assert log.format == "verl console"


def test_colors_nul_bytes_and_progress_bars_are_no_text(tmp_path: Path) -> None:
    line = "Loading: 10%\rstep:1 - critic/score/mean:\x1b[1m0.25\x1b[0m\0 - actor/entropy:1e-05"
    log = read_lines(tmp_path, line)
    assert [(row.step, row.values) for row in log.rows] == [(1, {"critic/score/mean": 0.25, "actor/entropy": 1e-5})]


def test_two_processes_may_write_into_one_line(tmp_path: Path) -> None:
    path = write_verl_run(tmp_path / "run.log", [0.5])
    text = path.read_text()
    cut = text.index(f"\n{WORKER}", text.index("lora_rank"))
    path.write_text(f"{text[:cut]}(pid=99) a warning{text[cut:]}")
    assert read_log(path).settings == {**read_log(path).settings, "data.seed": 1}


def test_wrapped_dictionaries_are_joined(tmp_path: Path) -> None:
    log = read_lines(
        tmp_path,
        format_verl_step(1, {"critic/score/mean": 0.5}),
        f"(\"Final validation metrics: {{'{SUCCESS}': \"",
        " \"np.float64(0.57), 'val-aux/gsm8k/std': 0.1}\")",
    )
    assert log.rows[-1].values == {"critic/score/mean": 0.5, SUCCESS: 0.57, "val-aux/gsm8k/std": 0.1}
    assert (log.rows[-1].step, log.rows[-1].line) == (1, log.rows[0].line)


def test_a_validation_on_its_own_line_belongs_to_the_step_before_it(tmp_path: Path) -> None:
    log = read_lines(
        tmp_path,
        format_verl_step(0, {SUCCESS: 0.1}),
        format_verl_step(1, {"critic/score/mean": 0.5}),
        format_verl_step(2, {"critic/score/mean": 0.6}),
        format_verl_step(2, {SUCCESS: 0.3}),
    )
    assert [(row.step, row.values) for row in log.rows] == [
        (0, {SUCCESS: 0.1}),
        (1, {"critic/score/mean": 0.5}),
        (2, {"critic/score/mean": 0.6, SUCCESS: 0.3}),
    ]
    rows = translate_rows(log)
    assert [(row["step"], row.get("base_val_success"), row.get("val_success")) for row in rows] == [
        (1, 0.1, None),
        (2, None, 0.3),
    ]


def test_logs_of_2024_count_from_0_scale_their_rates_and_round_to_three_digits(tmp_path: Path) -> None:
    old_values = {"critic/score/mean": 0.0, "actor/lr(1e-4)": 0.01, "actor/ppo_kl": 0.0, "critic/kl": -0.002}
    log = read_lines(
        tmp_path,
        "\"Initial validation metrics: {'test_score/openai/gsm8k': 0.0007}\"",
        format_verl_step(0, old_values, 3),
        format_verl_step(1, {**old_values, "val/test_score/openai/gsm8k": 0.013}, 3),
    )
    first, second = translate_rows(log)
    assert (first["step"], second["step"]) == (1, 2)
    assert first["scheduled_actor_lr"] == pytest.approx(1e-6)
    assert (first["base_val_success"], second["val_success"]) == (0.0007, 0.013)
    assert "ppo_kl" not in first  # below 0.0005, not 0
    assert first["train_reward"] == 0  # a share, which is 0 up to rounding
    assert first["kl_k1"] == -0.002
    assert log.notes == ["The log counts steps from 0, and these rows from 1."]


def test_a_full_zero_is_a_zero(tmp_path: Path) -> None:
    (row,) = translate_rows(read_lines(tmp_path, format_verl_step(1, {"critic/score/mean": 0.5, "actor/ppo_kl": 0.0})))
    assert row["ppo_kl"] == 0


def test_a_resumed_run_keeps_its_later_rows_and_says_so(tmp_path: Path) -> None:
    lines = [
        format_verl_step(step, {"critic/score/mean": score}) for step, score in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9))
    ]
    log = read_lines(tmp_path, *lines)
    assert [(row.step, row.values["critic/score/mean"]) for row in log.rows] == [(1, 0.1), (2, 0.9)]
    assert len(log.notes) == 1
    assert "goes back from 3 to 2" in log.notes[0]


def test_lost_steps_are_named(tmp_path: Path) -> None:
    lines = [format_verl_step(step, {"critic/score/mean": 0.1}) for step in (5, 6, 7, 9, 10)]
    assert read_lines(tmp_path, *lines).notes == [
        "The log begins at step 5: earlier rows are lost.",
        "Rows are missing from step 7 to 9.",
    ]


def test_their_names_stand_beside_ours_with_file_and_line(tmp_path: Path) -> None:
    log = read_lines(tmp_path, format_verl_step(1, {"critic/score/mean": 0.5, "perf/mfu/actor": 0.2}))
    (row,) = translate_rows(log)
    assert row["train_reward"] == row["critic/score/mean"] == 0.5
    assert row["perf/mfu/actor"] == 0.2
    assert (row["source"], row["file"]) == ("verl console", str(tmp_path / "run.log"))
    assert log.path.read_bytes().decode().split("\n")[row["line"] - 1].endswith("perf/mfu/actor:0.2")
