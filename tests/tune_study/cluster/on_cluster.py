"""Studies of small Trainables on a joined cluster, for tests of where runs are placed and how they end.

Run as python -m tests.tune_study.cluster.on_cluster ADDRESS OUTPUT STORAGE, which prints JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.fakes.sessions import run_placed
from tests.fakes.trainer import CRASHES_ONCE, make_fake_rows, make_study
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord, find_record
from tune_study.folder.storage import StoredFolder
from tune_study.plan.storage_uri import join_uri
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.tune.cluster import Node, allocate_cluster, join_cluster
from tune_study.tune.run import execute_study
from tune_study.tune.trials import make_trial_config

STEPS = 4


def make_study_plan(output: Path, family: str, gpus: float, values: tuple[str, ...], storage: str) -> StudyPlan:
    settings = {"trainer.total_training_steps": STEPS, "trainer.n_gpus_per_node": gpus, "trainer.device": "auto"}
    study = make_study(family)
    return replace(make_plan(study, "laptop", "a test", settings, values, 1, output), storage=storage)


def run_crashing(plan: StudyPlan, address: str, nodes: tuple[Node, ...]) -> dict[str, Any]:
    """Run a study in which one run loses its process; return the statuses, the rows and the expected rows."""
    code = execute_study(plan, allocate_cluster(plan, address, nodes, None, None), Console(quiet=True))
    files = StoredFolder(plan.study_uri or "").list_files()
    return {
        "code": code,
        "statuses": [
            getattr(find_record(StatusRecord, plan.get_run_dir(run.run_id)), "status", None) for run in plan.runs
        ],
        "rows": [read_rows(plan.get_run_dir(run.run_id) / METRICS_FILE) for run in plan.runs],
        "wanted": [make_fake_rows(make_trial_config(plan, [run]), run.config, STEPS) for run in plan.runs],
        "sizes": [
            [(plan.folder / name).stat().st_size, info.size]
            for name, info in files.items()
            if name.startswith("runs/") and METRICS_FILE in name
        ],
    }


def main(address: str, output: str, storage: str) -> None:
    """Run a study of two runs with two GPUs each, one of four runs with one GPU each, and one with a crash."""
    folder, results = Path(output), {}
    with join_cluster(address) as nodes:
        pair_plan = make_study_plan(folder / "pairs", "Placed", 2, ("0", "0.1"), join_uri(storage, "pairs"))
        results["pairs"] = run_placed(pair_plan, allocate_cluster(pair_plan, address, nodes, None, None), 2)
        single_plan = make_study_plan(
            folder / "single", "Placed", 1, ("0", "0.1", "0.2", "0.3"), join_uri(storage, "single")
        )
        results["single"] = run_placed(single_plan, allocate_cluster(single_plan, address, nodes, None, None), 4)
        crash_plan = make_study_plan(folder / "crash", "Fake", 0, (CRASHES_ONCE, "0.1"), join_uri(storage, "crash"))
        results["crash"] = run_crashing(crash_plan, address, nodes)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
