"""Arms and seeds of logs, and the study that they become."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.data.load import load
from analysis.sources.importing import import_logs, name_runs
from tests.trainable.sources.logs import (
    format_verl_step,
    make_settings,
    read_log,
    write_json_lines,
    write_verl_console,
    write_verl_run,
)
from tests.trainable.sources.trackers import write_events, write_wandb
from trainable.runs.records import IMPORTED_COLUMNS, STEP_COLUMNS
from trainable.sources.log_files import list_runs
from trainable.sources.logs import LogError, LogRow, Roles, RunLog
from trainable.sources.names import parse_name, read_names, translate_rows
from trainable.sources.reading import read_logs

COEFFICIENT = "actor_rollout_ref.actor.kl_loss_coef"


def make_log(name: str, **settings: object) -> RunLog:
    return RunLog(Path(name), "JSON lines", [LogRow(1, {"reward": 0.5}, 1)], settings)


def test_the_only_setting_that_differs_is_the_axis_and_seeds_are_known_by_name() -> None:
    logs = [
        make_log("a", **{"actor.kl": 0.1, "data.seed": 1, "trainer.experiment_name": "x", "output_dir": "u"}),
        make_log("b", **{"actor.kl": 0.1, "data.seed": 2, "trainer.experiment_name": "y", "output_dir": "v"}),
        make_log("c", **{"actor.kl": 0.0, "data.seed": 1, "trainer.experiment_name": "z", "output_dir": "w"}),
    ]
    names = name_runs(logs)
    assert names.setting == "actor.kl"
    assert names.pairs == [("0.1", 1), ("0.1", 2), ("0", 1)]
    assert names.notes == []


def test_settings_that_change_together_are_one_axis() -> None:
    logs = [make_log(size, **{"actor.model.path": size, "critic.model.path": size}) for size in ("0.5B", "3B")]
    names = name_runs(logs)
    assert names.pairs == [("0.5B", 0), ("3B", 1)]
    assert names.notes[0] == "The arms differ in actor.model.path, critic.model.path together."
    assert names.notes[1].startswith("The logs name no seed, so runs are numbered")


def test_what_the_settings_leave_open_is_asked_for_with_their_values() -> None:
    logs = [make_log(f"{lr}-{kl}", lr=lr, kl=kl) for lr in (1e-6, 1e-5) for kl in (0.0, 0.1)]
    with pytest.raises(LogError, match=r"type --arm with .*: lr \(1e-06, 1e-05\); kl \(0, 0.1\)"):
        name_runs(logs)
    assert name_runs(logs, ["lr", "kl"]).pairs[0] == ("1e-06,0", 0)
    with pytest.raises(LogError, match=r"No log has the setting lrr: those that differ .* are lr, kl"):
        name_runs(logs, ["lrr"])


def test_two_logs_of_one_run_are_refused() -> None:
    logs = [
        make_log("a", lr=1.0, seed=1, note="x"),
        make_log("b", lr=1.0, seed=1, note="y"),
        make_log("c", lr=2.0, seed=2),
    ]
    with pytest.raises(LogError, match="a and b are both of arm 1 and seed 1"):
        name_runs(logs, ["lr"])


def test_two_kinds_of_seeds_are_asked_for() -> None:
    logs = [
        make_log("a", **{"data.seed": 1, "env.seed": 1}),
        make_log("b", **{"data.seed": 1, "env.seed": 2}),
        make_log("c", **{"data.seed": 2, "env.seed": 2}),
    ]
    with pytest.raises(LogError, match=r"type --seed with one of data.seed, env.seed"):
        name_runs(logs)


def test_logs_without_settings_have_no_arms() -> None:
    with pytest.raises(LogError, match="b prints none: type --runs FILE"):
        name_runs([make_log("a", lr=1.0), make_log("b")])


def test_every_name_of_the_table_is_a_column_of_imported_runs() -> None:
    columns = {column.name for column in (*STEP_COLUMNS, *IMPORTED_COLUMNS)} | {"step"}
    assert {name.column for names in read_names().values() for name in names} <= columns


def test_a_success_is_the_mean_over_data_sets() -> None:
    prime = {"train/agg/all/m/reward/mean": 0.5, "eval/a/avg@4": 0.2, "eval/b/avg@4": 0.4}
    (row,) = translate_rows(RunLog(Path("p"), "JSON lines", [LogRow(1, prime, 1)]))
    assert row["val_success"] == pytest.approx(0.3)


def test_typed_names_take_precedence_and_missing_stays_missing() -> None:
    log = RunLog(Path("t"), "trl", [LogRow(1, {"reward": 0.5, "rewards/solved/mean": 0.25, "entropy": 1.0}, 1)])
    (row,) = translate_rows(log, [parse_name("val_success", "rewards/solved/mean")])
    assert (row["val_success"], row["train_reward"]) == (0.25, 0.5)
    assert "kl_to_reference" not in row  # TRL measures none with beta=0


SOURCES: Mapping[str, tuple[str, str, str]] = {
    "verl, console": ("training/global_step", "critic/score/mean", "val-core/gsm8k/reward/mean@1"),
    "verl, JSON lines": ("step", "critic/score/mean", "val-core/gsm8k/reward/mean@1"),
    "TRL": ("step", "reward", "eval_reward"),
    "prime-rl": ("step", "reward/mean", "eval/gsm8k/avg@8"),
    "slime": ("rollout/step", "rollout/raw_reward", "eval/gsm8k"),
    "SkyRL, W&B": ("trainer/global_step", "reward/avg_raw_reward", "eval/all/avg_score"),
    "OpenRLHF, TensorBoard": ("train/global_step", "train/reward", "eval/eval_gsm8k_pass1"),
    "a table": ("step", "train_reward", "val_success"),
}
"""Names of the step, of the reward, and of the success of a validation."""


def write_run(source: str, folder: Path, settings: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> None:
    """Write a log as the source does, with the settings in it or beside it."""
    folder.mkdir()
    match source:
        case "verl, console":
            lines = [format_verl_step(int(row["training/global_step"]), row) for row in rows]
            write_verl_console(folder / "run.log", {"data": {}, **settings}, lines)
        case "SkyRL, W&B":
            (folder / "wandb/run").mkdir(parents=True)
            write_wandb(folder / "wandb/run/run-a.wandb", rows, settings)
        case "OpenRLHF, TensorBoard":
            write_events(folder, [(int(row["train/global_step"]), row) for row in rows], hparams=settings)
        case "TRL":
            (folder / "training_args.json").write_text(json.dumps(settings))
            (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows, "max_steps": 4}))
        case "a table":
            pd.DataFrame(rows).assign(**settings, method="x").to_csv(folder / "log.csv", index=False)
        case _:
            (folder / "config.json").write_text(json.dumps(settings))
            in_data = source == "verl, JSON lines"
            objects = [{"step": row["step"], "data": row} if in_data else row for row in rows]
            write_json_lines(folder / "metrics.jsonl", objects)


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_runs_are_the_same_study_whatever_wrote_their_logs(tmp_path: Path, source: str) -> None:
    successes = {("0", 1): (0.4, 0.5), ("0", 2): (0.4, 0.6), ("0.1", 1): (0.5, 0.7), ("0.1", 2): (0.5, 0.9)}
    step_name, reward, success = SOURCES[source]
    for (arm, seed), values in successes.items():
        rows = [
            {step_name: step, reward: step / 8, **({success: values[step // 2 - 1]} if step % 2 == 0 else {})}
            for step in (1, 2, 3, 4)
        ]
        write_run(source, tmp_path / f"{arm}-{seed}", {"kl_coef": float(arm), "seed": seed}, rows)
    paths = [tmp_path] if source != "verl, console" and source != "a table" else sorted(tmp_path.glob("*/*"))
    logs = [log for files in list_runs(paths) for log in read_logs(files, Roles(["kl_coef"]))]
    import_logs(logs, name_runs(logs), tmp_path / "out/results/kl", ())
    frames = load(tmp_path / "out/results/kl")
    trials = frames.trials.set_index(["arm", "seed"])
    assert trials["status"].unique().tolist() == ["completed"]
    assert trials["late_val_success"].to_dict() == pytest.approx({run: np.mean(v) for run, v in successes.items()})
    assert frames.steps.groupby("step")["train_reward"].mean().tolist() == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8])


def test_the_frames_of_imported_logs_have_our_columns_and_theirs(tmp_path: Path) -> None:
    paths = [
        write_verl_run(tmp_path / f"{number}.log", successes, seed, kl_loss_coef=coefficient)
        for number, (coefficient, seed, successes) in enumerate(
            [(0.0, 1, [0.4, 0.5]), (0.0, 2, [0.4, 0.6]), (0.1, 1, [0.5, 0.7]), (0.1, 2, [0.5])]
        )
    ]
    logs = [read_log(path) for path in paths]
    folder = tmp_path / "out/results/kl"
    import_logs(logs, name_runs(logs), folder, ())
    frames = load(folder)
    trials = frames.trials.set_index(["arm", "seed"])
    assert trials["late_val_success"].round(6).to_dict() == {
        ("0", 1): 0.45,
        ("0", 2): 0.5,
        ("0.1", 1): 0.6,
        ("0.1", 2): 0.5,
    }
    assert trials["status"].to_dict() == {
        ("0", 1): "completed",
        ("0", 2): "completed",
        ("0.1", 1): "completed",
        ("0.1", 2): "interrupted",
    }
    assert frames.studies[0].baseline == "0"
    assert trials[f"config/{COEFFICIENT}"].tolist() == [0.0, 0.0, 0.1, 0.1]
    steps = frames.steps[frames.steps["run_id"] == "0-s1"]
    assert steps["val_success"].dropna().tolist() == [0.4, 0.5]
    assert steps["base_val_success"].dropna().tolist() == [0.25]
    assert steps["actor/kl_loss"].tolist() == steps["kl_loss"].tolist() == [0.0] * 4
    assert steps["file"].unique().tolist() == [str(paths[0])]


def test_a_log_without_a_success_is_asked_for_one(tmp_path: Path) -> None:
    path = write_verl_console(
        tmp_path / "a.log", make_settings(), [format_verl_step(1, {"critic/score/mean": 0.5, "actor/entropy": 1.0})]
    )
    log = read_log(path)
    with pytest.raises(LogError, match=r"--column val_success=NAME .* of critic/score/mean, actor/entropy"):
        import_logs([log], name_runs([log]), tmp_path / "out", ())
    assert not (tmp_path / "out").exists()
    import_logs([log], name_runs([log]), tmp_path / "out", [parse_name("val_success", "critic/score/mean")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no training step in any format"),
        (b"\x89PNG\r\n\x1a\n\0\0", "has no training step in any format"),
        (b"hello\nstep 3 of 4\n", "has no training step in any format"),
        (b"step:1 - train/loss:0.046 - val/loss:0.1\n", "none of the rewards or successes that RL trainers write"),
    ],
)
def test_files_that_are_no_rl_run_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.log").write_bytes(content)
    with pytest.raises(LogError, match=message):
        translate_rows(read_log(tmp_path / "a.log"))


def test_json_lines_are_merged_by_step_and_a_cut_line_is_skipped(tmp_path: Path) -> None:
    path = write_json_lines(
        tmp_path / "metrics.jsonl",
        [{"step": 1, "reward": 0.5}, {"step": 1, "optim": {"grad_norm": 2.0}}, {"step": 2, "data": {"reward": 0.75}}],
    )
    path.write_text(path.read_text() + '{"step": 3, "rew')
    (tmp_path / "config.json").write_text('{"optim": {"lr": 1e-5}, "seed": 4}')
    log = read_log(path)
    assert [(row.step, row.values) for row in log.rows] == [
        (1, {"reward": 0.5, "optim.grad_norm": 2.0}),
        (2, {"reward": 0.75}),
    ]
    assert log.settings == {"optim.lr": 1e-5, "seed": 4}
    assert "1 lines are damaged" in log.notes[0]
