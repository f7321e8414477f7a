"""The command `fork` with real Ray: it continues kept states as before, bit for bit, and with a remedy."""

import subprocess
import sys
from pathlib import Path

from tests.fakes.command_line import Answer, get_output, type_words
from tests.fakes.plans import SMALL_SETTINGS, plan_study, train_without_ray
from tests.fakes.trials import drop_times
from trainable.runs.run_files import read_rows
from trainable.runs.study_record import StatusRecord, read_record
from tune_study.folder.study_file import plan_from_folder

NAMES = ("study", "arm", "run_id")


def list_rows(path: Path) -> list[dict[str, object]]:
    """List the rows of a run without its names and times."""
    return [{name: value for name, value in drop_times(row).items() if name not in NAMES} for row in read_rows(path)]


def test_a_fork_runs_repeats_and_reports(tmp_path: Path) -> None:
    settings = {**SMALL_SETTINGS, "trainer.total_training_steps": 4, "trainer.test_freq": 1, "trainer.save_freq": 1}
    parent = train_without_ray(plan_study(tmp_path, ("0", "0.1"), 2, **settings), 4)
    words = ["fork", str(parent.folder), "--arm", "0", "--from-step", "2,3", "--remedy", "slow: actor.lr=1e-8"]
    command = [sys.executable, "-m", "tune_study", *words, "--max-concurrent", "2"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    output = get_output(Answer(process.returncode, process.stdout, process.stderr))
    assert "arm as-before-from-2 seed 0 training continues after step 2" in output
    assert "as-before-from-3: every row equals the baseline's" in output
    assert "Remedy slow is not shown to be in time from any step: open from steps 2 and 3." in output
    fork = plan_from_folder(parent.folder.with_name(f"{parent.folder.name}-fork-0"))
    parents = {spec.seed: spec for spec in parent.runs if spec.arm == "0"}
    for spec in fork.runs:
        assert read_record(StatusRecord, fork.get_run_dir(spec.run_id)).status == "completed"
        rows, parent_rows = (
            list_rows(folder / "metrics.jsonl")
            for folder in (fork.get_run_dir(spec.run_id), parent.get_run_dir(parents[spec.seed].run_id))
        )
        step = int(spec.arm.rpartition("-")[2])
        assert rows[:step] == parent_rows[:step]
        assert (rows == parent_rows) == spec.arm.startswith("as-before")
    # The same command again trains nothing.
    assert "0 of 8 runs remain" in get_output(type_words(*words))
