"""What a Ray user does with the Trainable: schedulers, searchers, restore, probes, placement, stoppers. Real Ray."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tune_study.tune.run_examples import EXAMPLES
from trainable.runs.records import TIME_COLUMNS
from trainable.runs.run_files import ENDS_KEY, METRICS_FILE, read_rows

pytestmark = pytest.mark.processes

NAMES = sorted(path.stem for path in EXAMPLES.glob("ray_*.py"))
MAX_LINES = 30


class Examples:
    """The results of examples by name, of which each test waits for its own alone."""

    def __init__(self, output: Path, *names: str) -> None:
        """Start the examples, which share one Ray."""
        self.errors = output / "errors.txt"
        self.results: dict[str, Any] = {}
        command = [sys.executable, "-m", "tests.tune_study.tune.run_examples", str(output), *names]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=EXAMPLES.parent, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __getitem__(self, name: str) -> dict[str, Any]:
        while name not in self.results:
            assert self.process.stdout
            line = self.process.stdout.readline()
            assert line, self.errors.read_text()[-3000:]
            if line.startswith('{"name"'):
                result = json.loads(line)
                self.results[result["name"]] = result
        result = self.results[name]
        assert all(trial["error"] is None and not trial["rows"][-1].get("failure") for trial in result["trials"])
        return result


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examples]:
    """The results of all examples."""
    examples = Examples(tmp_path_factory.mktemp("examples"), *NAMES)
    yield examples
    with examples.process:
        examples.process.terminate()


def list_steps(trial: Mapping[str, Any]) -> list[int]:
    return [row["step"] for row in trial["rows"]]


def drop_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a run without its times and the name of its trial."""
    return {name: value for name, value in row.items() if name not in (*TIME_COLUMNS, "run_id", ENDS_KEY)}


def test_the_examples_are_short() -> None:
    assert len(NAMES) == 8
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MAX_LINES, name


def test_a_grid_has_its_axis_and_seeds_in_the_configuration(examples: Examples) -> None:
    trials = examples["ray_grid"]["trials"]
    settings = [(trial["config"]["actor.kl_loss_coef"], trial["config"]["seed"]) for trial in trials]
    assert sorted(settings) == [(0.0, 0), (0.0, 1), (0.1, 0), (0.1, 1)]
    assert all(list_steps(trial) == [1, 2, 3, 4, 5, 6] for trial in trials)
    assert all(trial["checkpoint"] for trial in trials)
    assert "config/actor.kl_loss_coef" in examples["ray_grid"]["text"]
    assert examples["ray_grid"]["text"].rpartition("test_success")[2].count("completed") == 4  # of `analysis.load`


def test_halving_ends_trials_that_are_behind(examples: Examples) -> None:
    trials = examples["ray_asha"]["trials"]
    last_rows = {trial["config"]["actor.entropy_coeff"]: trial["rows"][-1] for trial in trials}
    assert len(last_rows) == 6
    assert {row["step"] for row in last_rows.values()} <= {2, 4, 6}
    assert any(row["step"] < 6 for row in last_rows.values())
    assert all(row["done"] and row["finished"] == (row["step"] == 6) for row in last_rows.values())


def test_a_population_exploits_its_best(examples: Examples) -> None:
    trials = examples["ray_pbt"]["trials"]
    assert all(trial["rows"][-1]["step"] == 6 for trial in trials)
    rates = {trial["config"]["actor.lr"] for trial in trials}
    first_rates = {trial["rows"][0]["config"]["actor.lr"] for trial in trials}
    assert len(trials) == 4
    assert rates != first_rates  # at least one trial continues from a copy of another, with another rate


def test_optuna_is_told_the_mean_of_two_seeds(examples: Examples) -> None:
    text = examples["ray_optuna"]["text"]
    assert "config/actor.lr" in text
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert [row[2] for row in rows] == ["0", "1", "0", "1"]
    assert rows[0][1] == rows[1][1] != rows[2][1] == rows[3][1]


def test_the_best_checkpoint_is_probed(examples: Examples) -> None:
    text = examples["ray_probe"]["text"]
    assert "after step 4 greedy success on test levels: 0." in text
    assert float(text.rsplit(":", 1)[1]) > 0


def test_a_placement_group_takes_the_place_of_ours(examples: Examples) -> None:
    assert len(examples["ray_placement"]["text"].splitlines()) > 2


def test_a_foreign_trainable_is_stopped_by_our_rules(examples: Examples) -> None:
    assert "22  reward_variance_collapse" in examples["ray_stoppers"]["text"]


def test_a_killed_experiment_continues_to_the_same_rows(examples: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "ray_restore.py"), str(tmp_path)]
    environment = {**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "1"}  # how often Tune writes its experiment state
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as driver:
        # Tune writes checkpoints into its state as hexadecimal digits of a pickle.
        name = b"checkpoint_0".hex()
        while not any(name in path.read_text() for path in tmp_path.glob("kl-restored/experiment_state*")):
            assert driver.poll() is None
        os.killpg(driver.pid, signal.SIGKILL)
    rerun = Examples(tmp_path, "ray_restore")
    with rerun.process:
        (restored,) = rerun["ray_restore"]["trials"]
    assert rerun.process.returncode == 0
    (straight,) = examples["ray_restore"]["trials"]
    assert restored["rows"][-1]["iterations_since_restore"] < 12  # it did not begin again
    # Tune's own file may lack the rows before the kill; the checkpoint has them.
    rows, expected_rows = (read_rows(Path(trial["checkpoint"], "0", METRICS_FILE)) for trial in (restored, straight))
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert len(drop_times(rows[0])) > 40
    assert [drop_times(row) for row in rows] == [drop_times(row) for row in expected_rows]


@pytest.mark.slow
def test_the_study_of_populations_reads_every_member_and_continues(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "population_study.py"), str(tmp_path), "--seeds", "2"]
    command += ["--steps", "5", "--levels", "8"]
    outputs = []
    for _ in range(2):  # the second time, nothing is trained
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-2000:]
        lines = process.stdout.splitlines()
        outputs.append([line for line in lines if line.startswith(("seed ", "best ", "population minus"))])
    assert outputs[0] == outputs[1]
    assert [line.split(":")[0] for line in outputs[0]] == [
        *(f"seed {seed} {name}" for seed in (0, 1) for name in ("constant", "population")),
        "best constant arm",
        "population minus best constant member of its seed",
        "population minus best constant arm",
    ]
