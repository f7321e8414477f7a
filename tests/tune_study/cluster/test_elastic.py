"""Studies on a cluster whose nodes join, lack something, are drained and die. The storage is a folder."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.plans import train_without_ray
from tests.fakes.trials import drop_times
from tests.tune_study.cluster.faked_cluster import start_head, start_node
from tests.tune_study.cluster.test_cluster import CPU_SETTINGS, RAY_ENVIRONMENT, ROOT, plan_study
from trainable.runs.run_files import METRICS_FILE, read_rows
from tune_study.plan.study_plan import StudyPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {**CPU_SETTINGS, "trainer.total_training_steps": "30", "trainer.resume_every": "1000"}
ENVIRONMENT = {**os.environ, **RAY_ENVIRONMENT}
PACKAGES = ("tune_study", "trainable", "search_spaces", "analysis", "sandboxes")


class TypedStudy:
    """A study of two arms on a cluster, by its command, in a folder of its own."""

    def __init__(self, folder: Path, address: str, *options: str) -> None:
        (folder / "storage").mkdir()
        words = ["run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", "--seeds", "1", "--address", address]
        words += ["--storage", str(folder / "storage"), *options]
        words += [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
        self.log = folder / "output"
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "tune_study", *words]
            # Not in the project's folder: Ray would let the nodes import its modules from there.
            self.process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        """Wait until a condition is true of the output so far."""
        while not condition(self.log.read_text()):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def end(self) -> str:
        """Wait for the command to succeed; return its output."""
        assert self.process.wait() == 0, self.log.read_text()
        return self.log.read_text()


@contextmanager
def start_study(folder: Path, address: str, *options: str) -> Iterator[TypedStudy]:
    study = TypedStudy(folder, address, *options)
    try:
        yield study
    finally:
        study.process.kill()
        study.process.wait()


@pytest.fixture(scope="module")
def local_plan(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    """The same study, run on this machine without Ray."""
    return train_without_ray(plan_study(tmp_path_factory.mktemp("local"), **SETTINGS), 30)


def check_rows(folder: Path, local_plan: StudyPlan) -> None:
    plan = plan_study(folder, **SETTINGS)
    for spec in plan.runs:
        rows, local_rows = (read_rows(each.get_run_dir(spec.run_id) / METRICS_FILE) for each in (plan, local_plan))
        assert [drop_times(row) for row in rows] == [drop_times(row) for row in local_rows]


def test_a_study_starts_without_nodes_avoids_an_unfit_one_and_uses_those_that_join(
    local_plan: StudyPlan, tmp_path: Path
) -> None:
    other_sources = tmp_path / "sources"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, other_sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    (other_sources / "trainable" / "other.py").touch()
    broken = tmp_path / "broken" / "trainable"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('as if a package were missing')")
    with ExitStack() as stack:
        address = stack.enter_context(start_head(ENVIRONMENT, 0, 0))
        study = stack.enter_context(start_study(tmp_path, address, "--wait-for-nodes"))
        study.wait_for(lambda text: "The study waits for one." in text)
        unfit = {**ENVIRONMENT, "PYTHONPATH": str(other_sources)}
        unfit_id, _ = stack.enter_context(start_node(unfit, address, 1))
        study.wait_for(lambda text: text.count("failed, retrying: node: ") == 2)
        stack.enter_context(start_node({**ENVIRONMENT, "PYTHONPATH": str(broken.parent)}, address, 1))
        study.wait_for(lambda text: text.count("failed, retrying: node: ") == 4)
        for _ in range(2):
            stack.enter_context(start_node(ENVIRONMENT, address, 1))
        text = study.end()
    assert text.count(f"({unfit_id[:6]}) again: it has code ") == 2  # each run has been there once
    assert text.count("again, because the trial could not begin: ") == 2
    # Both runs were under way at the same time, on the two nodes that joined.
    assert text.rindex(" started") < text.index(" completed")
    check_rows(tmp_path, local_plan)


def test_a_run_whose_node_is_drained_and_dies_loses_no_step_before_the_notice(
    local_plan: StudyPlan, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(start_head(ENVIRONMENT, 0, 0))
        node_id, node = stack.enter_context(start_node(ENVIRONMENT, address, 1))
        stack.enter_context(start_node(ENVIRONMENT, address, 1))
        study = stack.enter_context(start_study(tmp_path, address))
        study.wait_for(lambda text: "seed 0 step " in text)
        drain = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", address, "--node-id", node_id]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        subprocess.run([*drain, "--deadline-remaining-seconds", "60"], env=ENVIRONMENT, check=True, capture_output=True)
        study.wait_for(lambda text: "the node is drained" in text)
        for process in psutil.Process(node.pid).children(recursive=True):
            process.kill()
        text = study.end()
    assert "training continues after step " in text
    assert text.count("training starts from the beginning") == 0
    check_rows(tmp_path, local_plan)
