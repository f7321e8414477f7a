"""The command `fork` with real Ray: it continues kept states as before, bit for bit, and with a remedy."""

from pathlib import Path

import pytest

from tests.fakes.command_line import get_output, type_words
from tests.fakes.plans import SMALL_SETTINGS, plan_study, train_without_ray
from tests.fakes.trials import drop_times
from trainable.runs.run_files import read_rows
from trainable.runs.study_record import StatusRecord, read_record
from tune_study.folder.study_file import plan_from_folder


@pytest.mark.usefixtures("ray_session")
def test_a_fork_runs_repeats_and_reports(tmp_path: Path) -> None:
    settings = {**SMALL_SETTINGS, "trainer.total_training_steps": 4, "trainer.test_freq": 1, "trainer.save_freq": 1}
    parent = train_without_ray(plan_study(tmp_path, ("0",), 1, **settings), 4)
    words = ["fork", parent.folder, "--arm", "0", "--from-step", "2,3", "--remedy", "slow: actor.lr=1e-8"]
    output = get_output(type_words(*words, "--max-concurrent", "2"))
    assert "arm as-before-from-2 seed 0 training continues after step 2" in output
    assert "as-before-from-3: every row equals the baseline's" in output
    assert "Remedy slow is not shown to be in time from any step" in output
    fork = plan_from_folder(parent.folder.with_name(f"{parent.folder.name}-fork-0"))
    rows = {
        spec.arm: [
            drop_times({**row, "arm": "", "run_id": ""})
            for row in read_rows(plan.get_run_dir(spec.run_id) / "metrics.jsonl")
        ]
        for plan in (parent, fork)
        for spec in plan.runs
    }
    for arm in fork.values:
        step = int(arm.rpartition("-")[2])
        assert rows[arm][:step] == rows["0"][:step]
        assert (rows[arm] == rows["0"]) == arm.startswith("as-before")
    statuses = {read_record(StatusRecord, fork.get_run_dir(spec.run_id)).status for spec in fork.runs}
    assert statuses == {"completed"}
    # The same command again trains nothing.
    assert "0 of 4 runs remain" in get_output(type_words(*words))
