"""Studies of small Trainables on a joined cluster, for tests of where runs are placed.

Run as python -m tests.tune_study.cluster.on_cluster ADDRESS OUTPUT STORAGE, which prints JSON.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from tests.fakes.plans import plan_study
from tests.fakes.sessions import run_placed
from tests.fakes.trainer import make_study
from tune_study.folder.storage import StoredFolder
from tune_study.plan.storage_uri import join_uri
from tune_study.tune.cluster import allocate_cluster, join_cluster


def main(address: str, output: str, storage: str) -> None:
    """Run a study of two runs with two GPUs each, and one of four runs with one GPU each."""
    results = {}
    with join_cluster(address) as nodes:
        for name, gpus, values in (("pairs", 2, ("0", "0.1")), ("single", 1, ("0", "0.1", "0.2", "0.3"))):
            settings = {"trainer.total_training_steps": 4, "trainer.n_gpus_per_node": gpus, "trainer.device": "auto"}
            plan = plan_study(Path(output, name), values, study=make_study("Placed"), **settings)
            plan = replace(plan, storage=join_uri(storage, name))
            StoredFolder(plan.study_uri or "").put("study.json", b"{}")  # without which a node does not see the study
            results[name] = run_placed(plan, allocate_cluster(plan, address, nodes, None, None), len(values))
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
