"""Which files are of one run, and the table that names runs."""

import json
from pathlib import Path

import pytest

from analysis.sources.importing import read_runs_file
from tests.trainable.sources.logs import read_log, write_chart, write_json_lines
from trainable.sources.log_files import list_runs
from trainable.sources.logs import ROLES_BY_NAME, LogError


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def test_the_files_of_a_run_of_wandb_share_a_name_and_links_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "wandb"
    first, second, other = (
        folder / f"offline-run-{name}" / f"run-{name[2:]}.wandb" for name in ("1-abc", "2-abc", "3-def")
    )
    touch(first, second, other)
    (folder / "latest-run").symlink_to(other.parent)
    assert list_runs([tmp_path]) == list_runs([folder]) == [(first, second), (other,)]
    typed = sorted(folder.glob("*/run-*.wandb"))
    assert len(typed) == 4
    assert sorted(map(len, list_runs(typed))) == [1, 2]
    assert list_runs([first.parent]) == [(first,)]


def test_event_files_of_a_folder_are_a_run_with_its_hyper_parameters(tmp_path: Path) -> None:
    names = ("a/events.out.tfevents.1.vm", "a/events.out.tfevents.2.vm", "b/events.out.tfevents.1.vm")
    hparams = tmp_path / "a" / "1795989953.01" / "events.out.tfevents.3.vm"
    first, second, other = (tmp_path / name for name in names)
    touch(first, second, other, hparams)
    assert [set(run) for run in list_runs([tmp_path])] == [{first, second, hparams}, {other}]


def test_of_the_checkpoints_of_trl_the_last_one_counts(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for step in (2, 10):
            path = tmp_path / run / f"checkpoint-{step}" / "trainer_state.json"
            touch(path)
            path.write_text(json.dumps({"global_step": step, "log_history": [{"step": step, "reward": 0.5}]}))
    touch(tmp_path / "a" / "runs" / "now" / "events.out.tfevents.1.vm")
    last = [(tmp_path / run / "checkpoint-10" / "trainer_state.json",) for run in ("a", "b")]
    assert list_runs([tmp_path]) == last
    assert list_runs([tmp_path / "a", tmp_path / "b"]) == last
    assert list_runs(sorted(tmp_path.glob("a/*/trainer_state.json"))) == last[:1]


def test_the_components_of_prime_rl_are_a_run_and_runs_of_tinker_are_several(tmp_path: Path) -> None:
    trainer = write_folder(tmp_path / "p" / "trainer", [{"step": step, "entropy/all/mean": 1.5} for step in (1, 2)])
    rewards = [{"step": step, "train/agg/all/x/reward/mean": step / 8} for step in (1, 2, 3)]
    orchestrator = write_folder(tmp_path / "p" / "orchestrator" / "monitors" / "file", rewards)
    (files,) = list_runs([tmp_path / "p"])
    assert set(files) == {trainer, orchestrator}
    log = read_log(*files)
    assert [(row.step, len(row.values)) for row in log.rows] == [(1, 2), (2, 2), (3, 1)]
    assert not log.notes
    runs = [write_folder(tmp_path / "t" / name, [{"step": 1, "reward": 1}]) for name in ("a", "b")]
    assert list_runs([tmp_path / "t"]) == [(path,) for path in runs]


def write_folder(folder: Path, rows: list[dict[str, float]]) -> Path:
    folder.mkdir(parents=True)
    return write_json_lines(folder / "metrics.jsonl", rows)


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="has no log that is looked for in folders"):
        list_runs([tmp_path])


ROWS = [{"step": 1, "reward": 0.5}]


def test_a_table_names_arm_and_seed_of_each_log(tmp_path: Path) -> None:
    first, second = write_json_lines(tmp_path / "a.log", ROWS), write_folder(tmp_path / "b", ROWS)
    table = tmp_path / "runs.csv"
    table.write_text("\ufefflog, arm, seed, remark\na.log, grpo, 1, \nb, ppo, 1, late\n")
    logs, names = read_runs_file(table, (), ROLES_BY_NAME)
    assert [log.path for log in logs] == [first, second]
    assert names.pairs == [("grpo", 1), ("ppo", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has the columns of an empty file, and 0 rows: it needs the columns log, arm and seed, and a row per run"),
        ("log,arm,seed\n", "has the columns log, arm, seed, and 0 rows"),
        ("log,seed\na.csv,1\n", "has the columns log, seed, and 1 rows"),
        ("log,arm,seed\na.csv,,1\n", "line 2: log, arm, and a seed that is a whole number from 0 are needed"),
        ("log,arm,seed\na.csv,x\n", "line 2: log, arm, and a seed"),
        ("log,arm,seed\na.csv,x,-1\n", "line 2: log, arm, and a seed"),
        ("log,arm,seed\na.csv,x,1\n./a.csv,x,2\n", "line 3: ./a.csv occurs twice, and each run has one row"),
        ("log,arm,seed\na.csv,x,1\nb.csv,x,1\n", "line 3: arm x with seed 1 occurs twice"),
        ("log,arm,seed\nc,x,1\n", "line 2: c has 2 runs. Give a row to each"),
        (
            "log,arm,seed\nchart.csv,x,1\n",
            "chart.csv is a chart of a, b: type it beside --runs, and give a row to each",
        ),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(tmp_path: Path, text: str, message: str) -> None:
    for name in ("a.csv", "b.csv", "c/1/metrics.jsonl", "c/2/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_json_lines(tmp_path / name, ROWS)
    write_chart(tmp_path / "chart.csv", {"a": [0.5], "b": [0.5]}, "eval/reward")
    table = tmp_path / "runs.csv"
    table.write_text(text)
    with pytest.raises(LogError, match=message) as refusal:
        read_runs_file(table, (), ROLES_BY_NAME)
    assert "\n" not in str(refusal.value)


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"none\.csv cannot be read"):
        read_runs_file(tmp_path / "none.csv", (), ROLES_BY_NAME)
