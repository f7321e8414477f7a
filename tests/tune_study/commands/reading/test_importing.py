"""Tests of the command `import`, and of commands that read what it wrote."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from tests.fakes.command_line import get_output, type_in
from tests.trainable.sources.logs import write_chart, write_completions, write_verl_run

SUCCESSES = {("0.0", 1): 0.50, ("0.0", 2): 0.55, ("0.0", 3): 0.60, ("0.1", 1): 0.75, ("0.1", 2): 0.90, ("0.1", 3): 0.84}


class Imported(NamedTuple):
    """A study in results/imported, and the output of the command that made it."""

    folder: Path
    text: str


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """Two arms of three seeds."""
    output = tmp_path_factory.mktemp("theirs")
    paths = [
        write_verl_run(output / f"{arm}-{seed}.log", [success] * 4, seed, kl_loss_coef=float(arm))
        for (arm, seed), success in SUCCESSES.items()
    ]
    text = get_output(shlex.join(["import", *map(str, paths), "--output", str(output)]))
    return Imported(output / "results" / "imported", text)


def test_the_verdict_is_that_of_a_computation_by_hand(study: Imported) -> None:
    first, second = (
        np.array([value for (arm, _), value in SUCCESSES.items() if arm == name]) for name in ("0.0", "0.1")
    )
    difference, p_value = float((second - first).mean()), stats.ttest_rel(second, first).pvalue
    (line,) = [line for line in study.text.splitlines() if line.startswith("0.1 ") and "completed" in line]
    assert f"+{difference:.3f}" in line
    assert p_value < 0.05
    assert "better" in line
    assert f"Report: {study.folder / 'report.html'}" in study.text
    assert study.text.splitlines()[:2] == [
        "Read 6 runs of 2 arms: actor_rollout_ref.actor.kl_loss_coef 0 (3 runs), 0.1 (3 runs).",
        "Success (val_success), by which arms are compared, is val-core/gsm8k/reward/mean@1.",
    ]
    assert "3 completed" in line


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("status", "8/8"),
        ("explain", "No run collapsed"),
        ("alarms", "6 runs with rows: 0 collapsed"),
        ("replay-stoppers", "low_validation_success"),
    ],
)
def test_commands_that_read_studies_read_imported_ones(study: Imported, command: str, text: str) -> None:
    assert text in get_output(f"{command} {study.folder}")


def test_compare_reads_imported_studies_and_resume_refuses_them(study: Imported, work_dir: Path) -> None:
    assert "no effect in 0, 0.1" in get_output(f"compare {study.folder} {study.folder}")
    answer = type_in(f"resume {study.folder} --dry-run")
    assert (answer.code, "are of another trainer, so they cannot" in answer.err) == (2, True)


def test_transcripts_prints_the_completions_of_trl(tmp_path: Path) -> None:
    history = [{"step": step, "reward": 0.5, "rewards/is_right/mean": 0.5} for step in (1, 2)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    write_completions(tmp_path, 2)
    out = get_output(f"import {tmp_path} --output {tmp_path} --column val_success=rewards/is_right/mean")
    assert "1 steps have completions of the training, of which 4 of 4 are for `transcripts --trained`" in out
    lines = get_output(f"transcripts {tmp_path / 'results/imported'} --trained --failed --step 2").splitlines()
    assert [line.strip() for line in lines[4:8]] == [
        "Level 0, rollout 1, trained in step 2: failure, score 0",
        "| 2+2=",
        "> 5",
        "is_right 0, reward 0, advantage -0.7",
    ]


def test_a_study_is_not_written_over_and_a_refused_log_leaves_nothing(
    study: Imported, tmp_path: Path, work_dir: Path
) -> None:
    log = write_verl_run(tmp_path / "a.log", [0.5])
    answer = type_in(f"import {log} --output {study.folder.parent.parent}")
    assert (answer.code, "exists: type another --study or --output" in answer.err) == (2, True)
    answer = type_in(f"import {log} {tmp_path / 'missing.log'} --output other")
    assert (answer.code, "missing.log cannot be read: No such file" in answer.err) == (2, True)
    assert not (work_dir / "other").exists()
    answer = type_in(f"import {log} --output other --column val_success")
    assert (answer.code, "type OURS=THEIRS" in answer.err) == (2, True)


def test_a_file_of_columns_names_what_the_table_does_not(tmp_path: Path, work_dir: Path) -> None:
    log = write_verl_run(tmp_path / "a.log", [0.5])
    (work_dir / "names.txt").write_text("# ours = theirs\nval_success = critic/score/mean\n")
    out = get_output(f"import {log} --output theirs --columns names.txt")
    (line,) = [line for line in out.splitlines() if line.startswith("Success (val_success)")]
    assert line.endswith(", critic/score/mean.")  # a row of the validation before training has no such value
    assert "0.300" in out
    assert "2 completed" not in out


def test_a_table_names_the_runs_of_logs_that_print_no_settings(tmp_path: Path, work_dir: Path) -> None:
    rows = ["log,arm,seed"]
    for (arm, seed), success in SUCCESSES.items():
        lines = [f"{step},{success / 2},{success if step % 2 == 0 else ''}" for step in range(1, 9)]
        (tmp_path / f"{arm}-{seed}.csv").write_text("\n".join(["step,reward,eval_reward", *lines]))
        rows.append(f"{arm}-{seed}.csv,kl {arm},{seed}")
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    out = get_output(f"import --runs {tmp_path / 'runs.csv'} --output theirs")
    (line,) = [line for line in out.splitlines() if line.startswith("kl 0.1 ") and "3 completed" in line]
    assert "+0.280" in line
    assert "better" in line
    record = (work_dir / "theirs" / "results" / "imported" / "study.json").read_text()
    assert f"import --runs {tmp_path / 'runs.csv'} --output theirs" in record
    for arguments, text in (
        (f"--runs {tmp_path / 'runs.csv'} --arm lr", "type neither --arm nor --seed with it"),
        (f"--runs {tmp_path / 'runs.csv'} {tmp_path / '0.0-1.csv'}", "type no LOGS with it, except charts of W&B"),
        ("", "There is nothing to import: type the logs, or --runs FILE"),
        (
            f"{tmp_path / '0.0-1.csv'} {tmp_path / '0.1-1.csv'}",
            "type --runs FILE, a CSV file with the columns log, arm",
        ),
    ):
        answer = type_in(f"import {arguments} --output other")
        assert (answer.code, text in answer.err) == (2, True)


def test_a_table_names_the_runs_of_charts(tmp_path: Path, work_dir: Path) -> None:
    names = {f"run-{number}": pair for number, pair in enumerate(SUCCESSES)}
    rewards = write_chart(tmp_path / "rewards.csv", {name: [0.5] * 4 for name in names}, "train/reward")
    successes = {name: [SUCCESSES[pair]] * 4 for name, pair in reversed(names.items())}
    charts = f"{rewards} {write_chart(tmp_path / 'successes.csv', successes, 'eval/reward')}"
    rows = ["log,arm,seed", *(f"{name},kl {arm},{seed}" for name, (arm, seed) in names.items())]
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    out = get_output(f"import {charts} --runs {tmp_path / 'runs.csv'} --output theirs")
    (line,) = [line for line in out.splitlines() if line.startswith("kl 0.1 ") and "3 completed" in line]
    assert "+0.280" in line
    record = (work_dir / "theirs" / "results" / "imported" / "study.json").read_text()
    assert f"import {charts} --runs {tmp_path / 'runs.csv'} --output theirs" in record
    (tmp_path / "other.csv").write_text("log,arm,seed\nrun-7,x,1\n")
    for arguments, text in (
        ("", "columns log, arm and seed, beside the charts, with a row per run: run-0, run-1, run-2, run-3"),
        (f"--runs {tmp_path / 'other.csv'}", "line 2: run-7 is no run of the charts: their runs are run-0, run-1"),
    ):
        answer = type_in(f"import {charts} {arguments} --output other")
        assert (answer.code, text in answer.err) == (2, True)
    assert not (work_dir / "other").exists()
    assert "3 runs" in get_output(
        f"noise-floor {write_chart(tmp_path / 'same.csv', dict(list(successes.items())[:3]), 'eval/reward')}"
    )
