"""Studies of small Trainables on a joined cluster, for tests of where runs are placed and how they end.

Run as python -m tests.tune_study.cluster.on_cluster ADDRESS OUTPUT STORAGE, which prints JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from tests.fakes.trainer import CRASHES_ONCE, Barrier, make_fake_rows, make_study
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord, find_record
from tune_study.folder.statuses import StudyStatuses
from tune_study.folder.storage import StoredFolder
from tune_study.host.interrupt import Interrupt
from tune_study.plan.storage_uri import join_uri
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.tune import cluster
from tune_study.tune.callbacks import Recorder
from tune_study.tune.local_ray import LocalRay
from tune_study.tune.progress import Progress
from tune_study.tune.run import execute_study, make_study_tuner
from tune_study.tune.session import StudySession, SuiteContext
from tune_study.tune.trials import make_trial_config

STEPS = 4


def make_study_plan(output: Path, family: str, gpus: float, values: tuple[str, ...], storage: str) -> StudyPlan:
    settings = {"trainer.total_training_steps": STEPS, "trainer.n_gpus_per_node": gpus, "trainer.device": "auto"}
    study = make_study(family)
    return replace(make_plan(study, "laptop", "a test", settings, values, 1, output), storage=storage)


def run_placed(plan: StudyPlan, address: str, nodes: tuple[cluster.Node, ...]) -> list[dict[str, Any]]:
    """Run all runs of the plan at once and return where each of them was, as the runs report it."""
    resource_plan = cluster.allocate_cluster(plan, address, nodes, None, None)
    progress = Progress(plan, len(plan.runs), Console(quiet=True))
    plan.folder.mkdir(parents=True)
    barrier = Barrier.options(name="meeting").remote(len(plan.runs))
    interrupt = Interrupt(plan.folder / ".interrupt")
    suite = SuiteContext(LocalRay([], Console(quiet=True), is_local=False), interrupt)
    session = StudySession(plan, resource_plan, Console(quiet=True), suite, {}, progress)
    grid = make_study_tuner(session, Recorder(session, StudyStatuses(plan, ()))).fit()
    ray.kill(barrier)
    assert not grid.errors
    return [json.loads(result.metrics["place"]) for result in grid]


def run_crashing(plan: StudyPlan, address: str, nodes: tuple[cluster.Node, ...]) -> dict[str, Any]:
    """Run a study in which one run loses its process; return the statuses, the rows and the expected rows."""
    code = execute_study(plan, cluster.allocate_cluster(plan, address, nodes, None, None), Console(quiet=True))
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
    with cluster.join_cluster(address) as nodes:
        pair_plan = make_study_plan(folder / "pairs", "Placed", 2, ("0", "0.1"), join_uri(storage, "pairs"))
        results["pairs"] = run_placed(pair_plan, address, nodes)
        single_plan = make_study_plan(
            folder / "single", "Placed", 1, ("0", "0.1", "0.2", "0.3"), join_uri(storage, "single")
        )
        results["single"] = run_placed(single_plan, address, nodes)
        crash_plan = make_study_plan(folder / "crash", "Fake", 0, (CRASHES_ONCE, "0.1"), join_uri(storage, "crash"))
        results["crash"] = run_crashing(crash_plan, address, nodes)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
