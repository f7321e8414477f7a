"""CSV, JSON lines and trainer_state.json: what becomes a step, a value and a setting."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.sources.importing import name_runs
from tests.trainable.sources.logs import read_log, write_chart, write_json_lines
from tests.trainable.sources.trackers import write_wandb
from trainable.runs.history import describe_end
from trainable.sources.logs import ROLES_BY_NAME, LogError, Roles, RunLog
from trainable.sources.names import find_trainer, parse_name, translate_rows
from trainable.sources.reading import read_logs, read_runs

HISTORY: list[dict[str, Any]] = [
    {"step": 1, "reward": 0.25, "entropy": 1.5, "loss": float("nan")},
    {"step": 1, "eval_reward": 0.125},
    {"step": 2, "reward": 0.5, "entropy": 1.0},
]


def list_rows(log: RunLog) -> list[tuple[int, Mapping[str, float]]]:
    return [(row.step, row.values) for row in log.rows]


@pytest.mark.parametrize("form", ["csv", "tsv", "semicolons", "lines", "list", "state"])
def test_all_tables_of_pandas_and_trl_are_the_same_log(tmp_path: Path, form: str) -> None:
    """Empty cells and nulls are missing values (rule 6), and rows of one step are merged (rule 5)."""
    frame, path = pd.DataFrame(HISTORY), tmp_path / "log"
    if form == "lines":
        frame.to_json(path, orient="records", lines=True)
    elif form == "list":
        frame.to_json(path, orient="records", indent=1)
    elif form == "state":
        path.write_text(json.dumps({"global_step": 2, "log_history": HISTORY}, indent=1))
    else:
        frame.to_csv(path, index=False, sep={"csv": ",", "tsv": "\t", "semicolons": ";"}[form])
    expected = [(1, {"reward": 0.25, "entropy": 1.5, "eval_reward": 0.125}), (2, {"reward": 0.5, "entropy": 1.0})]
    assert list_rows(read_log(path)) == expected


def test_constant_text_and_the_seed_of_a_table_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('\ufeffStep,"reward, mean",algorithm,seed,done\n1,.5,grpo,3,False\n2,,grpo,3,True\n\n')
    log = read_log(path)
    assert list_rows(log) == [(1, {"reward, mean": 0.5, "seed": 3, "done": 0}), (2, {"seed": 3, "done": 1})]
    assert log.settings == {"algorithm": "grpo", "seed": 3}
    (name,) = [parse_name("val_success", "reward, mean")]
    assert [row.get("val_success") for row in translate_rows(log, [name])] == [0.5, None]


def test_a_table_of_several_runs_is_split_by_its_seed_and_by_typed_columns(tmp_path: Path) -> None:
    runs = [(method, rate, seed) for method, rate in (("grpo", 0.1), ("ppo", 0.1), ("ppo", 1.0)) for seed in (1, 2)]
    rows = [
        {"step": step, "method": method, "rate": rate, "seed": seed, "reward": seed * step * rate}
        for step in (1, 2)
        for method, rate, seed in runs
    ]
    table = tmp_path / "log.csv"
    table.write_text("".join(",".join(map(str, row)) + "\n" for row in [rows[0], *(row.values() for row in rows)]))
    for path in (table, write_json_lines(tmp_path / "log.jsonl", rows)):
        logs = read_logs([path], Roles(["method", "rate"]))
        assert [tuple(log.settings.values()) for log in logs] == runs
        assert [[(row.step, row.values["reward"]) for row in log.rows] for log in logs] == [
            [(step, seed * step * rate) for step in (1, 2)] for _, rate, seed in runs
        ]
        assert name_runs(logs, ["method", "rate"]).pairs == [(f"{name},{rate:g}", seed) for name, rate, seed in runs]
        assert [log.settings["seed"] for log in read_logs([path])] == [1, 2]
    by_run = sorted(rows, key=lambda row: row["method"])[2:]
    with pytest.raises(LogError, match="has the rows of several runs, whose column method differs: type --arm method"):
        read_logs([write_json_lines(tmp_path / "by_run.jsonl", by_run)])
    for path in (table, tmp_path / "log.jsonl"):
        assert all("2 steps, such as 1, have several values of rate" in log.notes[0] for log in read_logs([path]))


def test_a_table_without_a_step_is_told_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("epoch,reward\n1,.5\n")
    with pytest.raises(LogError, match=r"no column of the training step: type --column step=NAME.* are epoch, reward"):
        read_log(path)
    (log,) = read_logs([path], Roles(step="epoch"))
    assert list_rows(log) == [(1, {"reward": 0.5})]


def test_a_chart_of_wandb_has_a_run_per_group_of_columns(tmp_path: Path) -> None:
    chart = write_chart(tmp_path / "chart.csv", {"a": [0.5, 0.25, None], "lr - b": [None, 1.0, 0.0]}, "train/reward")
    logs = read_runs([chart], ROLES_BY_NAME)
    assert [(log.run, list_rows(log)) for log in logs] == [
        ("a", [(1, {"train/reward": 0.5}), (2, {"train/reward": 0.25})]),
        ("lr - b", [(2, {"train/reward": 1.0}), (3, {"train/reward": 0.0})]),
    ]
    assert all(not log.settings and not log.notes for log in logs)


def test_charts_of_the_same_run_are_one_log(tmp_path: Path) -> None:
    rewards = write_chart(tmp_path / "1.csv", {"a": [0.5] * 6, "b": [0.25] * 6}, "train/reward")
    validated: dict[str, list[float | None]] = {"b": [None, 0.75, None, 1, None, 0.5], "a": [None, 0, None, 1, None, 1]}
    first, second = read_runs([rewards, write_chart(tmp_path / "2.csv", validated, "eval/reward")], ROLES_BY_NAME)
    for log, name, reward in ((first, "a", 0.5), (second, "b", 0.25)):
        rows = translate_rows(log)
        assert log.run == name
        assert [row.get("val_success") for row in rows] == validated[name]
        assert [row["train_reward"] for row in rows] == [reward] * 6
        assert not log.notes, "the gaps of a chart are filled by the other one"


def test_means_in_a_chart_are_named(tmp_path: Path) -> None:
    chart = write_chart(tmp_path / "chart.csv", {"a": [0.5, None, 0.75]}, "train/reward", spread=0.1)
    assert read_log(chart).notes[-1].startswith("2 numbers of a are means of W&B, over steps, or over runs")


def test_the_axis_of_a_chart_is_a_step_or_has_one_beside_it(tmp_path: Path) -> None:
    over_steps = write_chart(tmp_path / "1.csv", {"a": [0.5, 1.0]}, "train/reward", axis="train/global_step")
    assert list_rows(read_log(over_steps)) == [(1, {"train/reward": 0.5}), (2, {"train/reward": 1.0})]
    over_time = write_chart(tmp_path / "2.csv", {"a": [0.5, 1.0]}, "train/reward", axis="Relative Time (Process)")
    with pytest.raises(LogError, match=r"over Relative Time \(Process\), which has no training step of the run a"):
        read_log(over_time)
    frame = pd.read_csv(over_time)
    frame[["a - _step", "a - _step__MIN", "a - _step__MAX"]] = [[10] * 3, [20] * 3]
    frame.loc[2] = {"Relative Time (Process)": 3.0}  # the time of another run
    frame.to_csv(over_time, index=False)
    assert list_rows(read_log(over_time)) == [
        (10 * time, {"train/reward": time / 2, "Relative Time (Process)": time}) for time in (1, 2)
    ]


@pytest.mark.parametrize(
    "name", ["log.csv", "events.out.tfevents.1", "run-a.wandb", "metrics.jsonl", "trainer_state.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        bytes(range(256)) * 64,
        b":W&B\xe1\xbe\x00",
        b"\x18" + bytes(11) + b"\x09" + bytes(8) + b"\x1a\x0dbrain.Event:2" + b"\xff" * 40,
        b"step\n1\n",
        b'{"step": 1}\n',
        b'[{"step": 1}, 2]',
        b'{"log_history": [1, {"step": 2}]}',
        b'{"step": 1, "reward": ' + b"9" * 400 + b"}\n",
        b"\x80\x04\x95pickle",
    ],
)
def test_what_is_no_log_is_refused_in_one_paragraph(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(LogError, match=str(path)) as refusal:
        read_log(path)
    assert "\n" not in str(refusal.value)


def test_an_export_of_wandb_has_the_step_of_the_trainer_and_not_the_count_of_calls(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"_step": 0, "_timestamp": 1.0, "eval/reward": 0.1, "train/global_step": 0},
        {"_step": 1, "_timestamp": 2.0, "train/reward": 0.5, "train/kl": 0.01, "train/global_step": 10},
        {"_step": 2, "_timestamp": 3.0, "eval/reward": 0.3, "train/reward": None, "train/global_step": 10},
    ]
    first, *_ = translated = translate_rows(read_log(write_json_lines(tmp_path / "history.jsonl", rows)))
    assert len(translated) == 1
    shown = {column: first[column] for column in ("step", "train_reward", "val_success", "base_val_success", "line")}
    assert shown == {"step": 10, "train_reward": 0.5, "val_success": 0.3, "base_val_success": 0.1, "line": 2}
    assert first["kl_to_reference"] == 0.01
    without_global_step = [{name: value for name, value in row.items() if name != "train/global_step"} for row in rows]
    log = read_log(write_json_lines(tmp_path / "own.jsonl", without_global_step))
    assert [row.step for row in log.rows] == [0, 1, 2]


def test_rule_5_components_of_prime_rl_write_rows_of_a_step_and_rows_by_time(tmp_path: Path) -> None:
    path = write_json_lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": 1, "time": 1.0, "train/agg/all/solver/reward/mean": 0.25, "solved_some": 0.75},
            {"step": 2, "time": 2.0, "train/agg/all/solver/reward/mean": 0.5, "solved_some": 0.5},
            {"step": 1, "time": 3.0, "entropy/all/mean": 1.5, "optim/grad_norm": 0.1},
            {"step": None, "time": 3.5, "inference/load": 9.0},
            {"step": 2, "time": 4.0, "entropy/all/mean": 1.0, "optim/grad_norm": 0.2},
        ],
    )
    log = read_log(path)
    columns = ("step", "train_reward", "entropy", "actor_grad_norm", "zero_std_fraction")
    rows = [[row[column] for column in columns] for row in translate_rows(log)]
    assert rows == [[1, 0.25, 1.5, 0.1, 0.25], [2, 0.5, 1.0, 0.2, 0.5]]
    assert not log.notes


def test_a_run_that_never_trained_is_refused(tmp_path: Path) -> None:
    log = read_log(write_json_lines(tmp_path / "log.jsonl", [{"step": 0, "eval_reward": 0.5}]))
    with pytest.raises(LogError, match="has no step of the training"):
        translate_rows(log)
    with pytest.raises(LogError, match="has no training step in any format"):
        read_log(write_wandb(tmp_path / "run-a.wandb", [{"_step": 1, "text": "a"}]))


def test_tinker_counts_from_0_and_validates_before_the_update_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"seed": 3, "model": {"name": "m"}}))
    rows = [
        {"step": step, "env/all/reward/total": step / 8, "optim/entropy": 1.0, "progress/batch": step}
        | ({"test/env/all/reward/total": step / 4, "test/env/hard/reward/total": 9} if step % 2 == 0 else {})
        for step in range(4)
    ]
    log = read_log(
        write_json_lines(tmp_path / "metrics.jsonl", [*rows, {"progress/batch": 4, "test/env/all/reward/total": 0.75}])
    )
    translated = translate_rows(log)
    assert [(row["step"], row["train_reward"], row.get("val_success")) for row in translated] == [
        (1, 0.0, None),
        (2, 0.125, 0.5),
        (3, 0.25, None),
        (4, 0.375, 0.75),
    ]
    assert translated[0]["base_val_success"] == 0
    assert log.settings == {"seed": 3, "model.name": "m"}
    assert log.notes == ["The log counts steps from 0, and these rows from 1."]


def test_rule_6_what_was_not_measured_is_missing_and_not_0(tmp_path: Path) -> None:
    rows = translate_rows(read_log(write_json_lines(tmp_path / "log.jsonl", [{**HISTORY[0], "kl": None}, HISTORY[2]])))
    assert all("kl_to_reference" not in row and "loss" not in row for row in rows)


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ({"reward": 0.5, "entropy": 1.5}, {"entropy": 1.5}),
        ({"env/all/reward/total": 0.5, "optim/entropy": 1.5}, {"entropy_sampled": 1.5}),
        ({"train/reward": 0.5, "train/approx_entropy": 1.5}, {"entropy_sampled": 1.5}),
        ({"rollout/raw_reward": 0.5, "train/entropy_loss": -1.5}, {"entropy_loss": -1.5}),
    ],
)
def test_rule_7_three_kinds_of_entropy_are_three_columns(
    tmp_path: Path, values: dict[str, float], columns: dict[str, float]
) -> None:
    (row,) = translate_rows(read_log(write_json_lines(tmp_path / "log.jsonl", [{"step": 1, **values}])))
    assert {name: row[name] for name in ("entropy", "entropy_sampled", "entropy_loss") if name in row} == columns


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ({"reward": 0.5, "kl": 0.25}, {"kl_to_reference": 0.25}),
        ({"critic/score/mean": 0.5, "critic/kl": -0.25}, {"kl_k1": -0.25}),
        ({"critic/score/mean": 0.5, "actor/kl_loss": 0.25}, {"kl_loss": 0.25}),
        ({"train/reward": 0.5, "train/return": 0.5, "train/vllm_kl": 0.1, "train/kl": 0.25}, {"kl_estimate": 0.25}),
        ({"scores": 0.5, "objective/kl0_avg": -0.25, "objective/kl2_avg": 9}, {"kl_k1": -0.25}),
    ],
)
def test_rule_8_a_kl_has_the_column_of_its_estimator(
    tmp_path: Path, values: dict[str, float], columns: dict[str, float]
) -> None:
    (row,) = translate_rows(read_log(write_json_lines(tmp_path / "log.jsonl", [{"step": 1, **values}])))
    names = ("kl_to_reference", "kl_loss", "kl_k1", "kl_estimate")
    assert {name: row[name] for name in names if name in row} == columns


def test_rule_10_rows_of_a_window_say_so(tmp_path: Path) -> None:
    state = {"log_history": [{"step": step, "reward": 0.5} for step in range(10, 60, 10)], "max_steps": 50}
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state))
    log = read_log(path)
    assert log.notes == ["Rows are 10 steps apart: each may be a mean over them."]
    assert log.settings == {"max_steps": 50}


@pytest.mark.parametrize(
    ("values", "fraction"),
    [
        ({"reward": 0.5, "frac_reward_zero_std": 0.75}, 0.75),
        ({"train/reward": 0.5, "train/dynamic_filtering_pass_rate": 0.25, "train/actor_grad_norm": 1.0}, 0.75),
        (
            {"env/all/reward/total": 1, "env/all/by_group/frac_all_good": 0.5, "env/all/by_group/frac_all_bad": 0.25},
            0.75,
        ),
        ({"train/reward": 1, "train/baseline_reward/pct_0": 0.5, "train/baseline_reward/pct_1": 0.25}, 0.75),
        ({"scores": 0.5, "real_batch_size_ratio": 0.25}, 0.75),
        ({"reward/mean": 0.5, "batch/solve_none": 0.5, "batch/solve_all": 0.25}, 0.75),
        ({"reward/avg_raw_reward": 0.5, "reward/num_zero_variance_filtered": 48}, None),
        ({"rollout/raw_reward": 0.5, "rollout/zero_std/count_0": 48}, None),
    ],
)
def test_rule_11_groups_without_spread_are_a_fraction_and_a_count_is_none(
    tmp_path: Path, values: dict[str, float], fraction: float | None
) -> None:
    (row,) = translate_rows(read_log(write_json_lines(tmp_path / "log.jsonl", [{"step": 1, **values}])))
    assert row.get("zero_std_fraction") == fraction


@pytest.mark.parametrize(
    ("trainer", "values"),
    [
        ("verl", {"val-core/math/acc/mean@4": 0.5, "critic/score/mean": 1}),
        ("verl", {"val/math/pass@1": 0.5, "reward/solver/mean": 1, "actor/entropy": 1}),
        ("trl", {"eval/reward": 0.5, "train/reward": 1, "train/kl": 1, "train/frac_reward_zero_std": 0}),
        ("openrlhf", {"eval/eval_math_pass1": 0.5, "eval/eval_math_pass8": 9, "train/reward": 1}),
        ("prime-rl", {"eval/math/all/solver/avg@4": 0.5, "eval/math/effective/solver/avg@4": 9, "entropy/all/mean": 1}),
        ("skyrl", {"eval/all/avg_score": 0.5, "eval/math/avg_score": 9, "reward/avg_raw_reward": 1}),
        ("slime", {"eval/math": 0.5, "eval/math/response_len/mean": 9, "eval/math-pass@2": 9, "rollout/raw_reward": 1}),
        ("areal", {"eval-rollout/reward": 0.5, "ppo_actor/task_reward/avg": 1}),
        ("tinker", {"test/env/all/reward/total": 0.5, "env/all/reward/total": 1}),
        ("nemo-rl", {"validation/accuracy": 0.5, "train/reward": 1, "train/gen_kl_error": 1}),
        ("open-instruct", {"eval/scores": 0.5, "scores": 1, "val/stop_rate": 1}),
        ("roll", {"val/score/mean": 0.5, "critic/score/mean": 1, "actor/pg_loss@sum": 1}),
        ("art", {"val/reward": 0.5, "train/reward": 1}),
    ],
)
def test_every_trainer_has_a_success(tmp_path: Path, trainer: str, values: dict[str, float]) -> None:
    log = read_log(write_json_lines(tmp_path / "log.jsonl", [{"step": 1, **values}]))
    assert find_trainer(log.keys) == trainer
    (row,) = translate_rows(log)
    assert row["val_success"] == 0.5
    assert any("AReaL" in note for note in log.notes) == (trainer == "areal")


def test_names_that_mean_something_else_here_are_those_of_the_trainer(tmp_path: Path) -> None:
    """The reward_std of TRL is over a batch, and ours is within groups."""
    rows = [{"step": 1, "reward": 0.5, "reward_std": 0.4, "frac_reward_zero_std": 0.25}]
    (row,) = translate_rows(read_log(write_json_lines(tmp_path / "log.jsonl", rows)))
    assert (row["trl/reward_std"], row["zero_std_fraction"]) == (0.4, 0.25)
    assert "reward_std" not in row


def test_a_number_that_is_better_if_it_is_lower_changes_its_sign(tmp_path: Path) -> None:
    log = read_log(write_json_lines(tmp_path / "log.jsonl", [{"step": 1, "reward": 0.5, "error": 0.25}]))
    for key, expected in {"- error": -0.25, "1 - error": 0.75, "error": 0.25, "- error + reward": -0.75}.items():
        (row,) = translate_rows(log, [parse_name("val_success", key)])
        assert row["val_success"] == expected


def test_the_rule_by_which_ragen_has_stopped_a_run(tmp_path: Path) -> None:
    names = {"critic/score/mean": 0.5, "actor/entropy": 1.0, "val-env/CoordSokoban/success": 0.25}
    rows: list[dict[str, Any]] = [{"step": step, **names} for step in (1, 2)]
    rows[1]["early_stopped/low_validation_success"] = 1.0
    first, last = translate_rows(read_log(write_json_lines(tmp_path / "log.jsonl", rows)))
    assert "stop_rule" not in first
    assert (last["stop_rule"], last["stop_step"], last["val_success"]) == ("low_validation_success", 2, 0.25)
    assert describe_end([first, last], 400) == ("early_stopped", "low_validation_success at step 2")
