"""Studies whose trials are a command: killed and resumed, searched, with population-based training, and TRL itself."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import analysis
from tests.fakes import command_trainer
from tests.fakes.command_line import Answer, assert_refused, get_output, type_words
from tests.fakes.command_trainer import compute_reward
from trainable.files.json_values import read_object, write_object
from trainable.runs.run_files import read_rows as read_rows_of_run

ROOT = Path(__file__).parents[3]
SCRIPT = shlex.join([sys.executable, command_trainer.__file__])
FILE = f'''"""Does beta change the reward?"""

from search_spaces.command_study import make_command_study

STUDY = make_command_study(
    name="my-beta",
    question=__doc__,
    command="{SCRIPT} --beta {{beta}} --seed {{seed}} --steps {{steps}} --output {{output}}",
    settings={{"beta": 0.0}},
    vary={{"beta": (0, 0.2)}},
    steps=12,
    logs="{{output}}/metrics.jsonl",
    columns={{"val_success": "accuracy", "train_reward": "reward"}},
    checkpoints="{{output}}/checkpoint-{{step}}",
    resume="--resume {{checkpoint}}",
)
'''


def type_command(folder: Path, *words: str, **variables: str) -> Answer:
    """Type a command that starts Ray."""
    command = [sys.executable, "-m", "tune_study", *words]
    environment = {**os.environ, **variables}
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, env=environment)
    return Answer(process.returncode, process.stdout, process.stderr)


def read_rows(folder: Path, arm: str, seed: int = 0) -> list[Mapping[str, Any]]:
    steps = analysis.load(folder).steps
    rows: list[Mapping[str, Any]] = steps[(steps["arm"] == arm) & (steps["seed"] == seed)].to_dict("records")
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was killed and has ended after `resume`."""
    path: Path = tmp_path_factory.mktemp("command")
    (path / "my_beta.py").write_text(FILE)
    command = [sys.executable, "-m", "tune_study", "run", "my_beta.py", "--seeds", "1"]
    driver = subprocess.Popen(command, cwd=path, start_new_session=True, env={**os.environ, "SLEEP": "0.3"})
    deadline = time.monotonic() + 120
    rows = path / "results" / "my_beta" / "runs" / "my_beta_02" / "metrics.jsonl"
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    answer = type_command(path, "resume", "results/my_beta", "--study", "my_beta.py")
    assert "training continues after step" in get_output(answer)
    return path


def test_a_killed_study_continues_to_the_rows_of_an_undisturbed_one(folder: Path) -> None:
    for arm, beta in (("0", 0.0), ("0.2", 0.2)):
        rewards = [compute_reward(0, step, beta) for step in range(1, 13)]
        rows = read_rows(folder, arm)
        assert [row["step"] for row in rows] == list(range(1, 13))
        assert [row["train_reward"] for row in rows] == rewards
        assert [row["val_success"] for row in rows if row["step"] % 2 == 0] == [reward / 2 for reward in rewards[1::2]]
    consoles = sorted((folder / "model_saving" / "my_beta" / "02" / "my_beta_02").glob("console_*.log"))
    first, last = (path.read_text() for path in consoles)
    assert first.startswith("beta 0.2 from step 0,")
    assert not last.startswith("beta 0.2 from step 0,")


def test_reading_commands(folder: Path) -> None:
    run = folder / "results" / "my_beta"
    assert "completed" in get_output(type_words("status", run))
    assert (run / "report.html").stat().st_size > 10_000
    assert get_output(type_words("explain", run)).startswith("No run collapsed")
    assert get_output(type_words("alarms", run)).startswith("1 study, 2 runs with rows: 0 collapsed.")
    assert "0 of 2" in get_output(type_words("replay-stoppers", run))


def test_a_folder_does_not_choose_the_command(folder: Path) -> None:
    """Neither without the file of the study, nor with another command in study.json."""
    run = folder / "results" / "my_beta"
    assert_refused(type_words("resume", run), "no file that a folder names is executed")
    record = read_object(run / "study.json")
    record["settings"]["command"]["run"] = "touch /tmp/other{beta}"
    (folder / "copy" / "results" / "my_beta").mkdir(parents=True)
    write_object(folder / "copy" / "results" / "my_beta" / "study.json", record)
    words = ("resume", folder / "copy" / "results" / "my_beta", "--study", folder / "my_beta.py", "--dry-run")
    assert_refused(type_words(*words), "command.run=touch /tmp/other{beta}", "You did not start this study")


def test_refusals(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    for old, new, words in [
        (sys.executable, "no-such-program", ("begins with no-such-program, which is no program of this machine",)),
        ('{"beta": (0, 0.2)}', '{"gamma": (0, 1)}', ("settings lacks gamma", "other.py")),
        ("--beta {beta}", "--beta {betta}", ("command.run has the field {betta}",)),
    ]:
        path.write_text(FILE.replace(old, new))
        assert_refused(type_words("run", path, "--output", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_search_over_a_setting_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "my_beta.py").write_text(FILE)
    options = ("--trials", "4", "--seeds", "1", "--steps", "4", "--confirm-seeds", "0", "--vary", "beta=0:0.4")
    assert type_command(tmp_path, "search", "my_beta.py", *options).code == 0
    trials = analysis.load(tmp_path).trials
    assert sorted(trials["arm"]) == ["default", "point-1", "point-2", "point-3"]
    for arm, beta in zip(trials["arm"], trials["config/args.beta"], strict=True):
        assert [row["train_reward"] for row in read_rows(tmp_path, arm)] == [
            compute_reward(0, step, beta) for step in range(1, 5)
        ]


PBT = """
import sys
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from trainable.command.trial import Command

tuner = tune.Tuner(
    Command,
    param_space={
        "command.run": sys.argv[2],
        "command.logs": "{output}/metrics.jsonl",
        "command.columns": ["val_success=accuracy", "train_reward=reward"],
        "command.checkpoints": "{output}/checkpoint-{step}",
        "command.resume": "--resume {checkpoint}",
        "trainer.total_training_steps": 8,
        "args.beta": tune.grid_search([0.0, 0.4]),
    },
    tune_config=tune.TuneConfig(
        metric="train_reward",
        mode="max",
        scheduler=PopulationBasedTraining(
            time_attr="step",
            perturbation_interval=4,
            quantile_fraction=0.5,
            resample_probability=0,
            synch=True,
            hyperparam_mutations={"args.beta": [0.0, 0.4, 0.5]},
        ),
    ),
    run_config=tune.RunConfig(name="pbt", storage_path=sys.argv[1], verbose=0),
)
tuner.fit()
"""


@pytest.mark.slow
def test_population_based_training_continues_from_the_donors_checkpoint(tmp_path: Path) -> None:
    run = f"{SCRIPT} --beta {{beta}} --seed {{seed}} --steps {{steps}} --output {{output}}"
    command = [sys.executable, "-c", PBT, str(tmp_path / "ray"), run]
    environment = {**os.environ, "SLEEP": "0.2", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    folders = [path.parent for path in (tmp_path / "ray" / "pbt").glob("*/result.json")]
    assert len(folders) == 2
    for folder in folders:
        results = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
        beta = results[-1]["config"]["args.beta"]
        checkpoint = sorted(folder.glob("checkpoint_*"))[-1]
        rows = {row["step"]: row for row in read_rows_of_run(checkpoint / "0" / "metrics.jsonl")}
        # The loser has the rows of the winner, and goes on from its checkpoint with a neighbor of its beta.
        betas = [0.4] * 4 + [beta] * 4
        assert [rows[step]["train_reward"] for step in range(1, 9)] == [
            compute_reward(0, step, value) for step, value in enumerate(betas, 1)
        ]
        # The log of each start begins with the step after its checkpoint.
        assert [rows[step]["line"] for step in range(5, 9)] == [1, 2, 3, 4]


def test_a_study_of_trl(tmp_path: Path) -> None:
    """GRPO of TRL itself, from the file that `new` writes from an example of its command and its log."""
    script = ROOT / "examples" / "trl_frozenlake.py"
    words = [sys.executable, str(script), "--beta", "0.0", "--seed", "0", "--max_steps", "2", "--eval_steps", "1"]
    words += ["--output_dir", str(tmp_path / "example")]
    checkpoint = tmp_path / "example" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    history = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}, {"step": 2, "eval_reward": 0.5}]
    write_object(checkpoint / "trainer_state.json", {"global_step": 2, "log_history": history})
    answer = type_words(
        "new", "trl", "--command", shlex.join(words), "--vary", "beta=0,0.3", "--to", tmp_path / "trl.py"
    )
    assert f"run {tmp_path / 'trl.py'}" in get_output(answer)
    text = (tmp_path / "trl.py").read_text()
    assert len(text.splitlines()) <= 25
    assert type_command(tmp_path, "run", "trl.py", "--values", "0.3", "--seeds", "1", "--steps", "2").code == 0
    assert list(analysis.load(tmp_path).trials["status"]) == ["completed"]
    rows = read_rows(tmp_path, "0.3")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["val_success"] == row["eval_reward"] for row in rows)
    assert all(row["kl_to_reference"] >= 0 for row in rows)
