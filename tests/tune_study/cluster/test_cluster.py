"""Studies on a fake cluster of two nodes with two declared GPUs each; rows and checkpoints are in a local S3 server."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest
import ray
import torch
import yaml
from typer.testing import CliRunner

from tests.fakes.plans import plan_study, train_without_ray
from tests.fakes.trials import drop_times
from tests.tune_study.cluster.faked_cluster import can_hide_folder, start_faked_cluster
from trainable import versions
from trainable.backend.gpus import make_bundles
from trainable.config.run_config import apply_overrides
from trainable.files.json_lines import read_lines
from trainable.files.json_values import read_object
from trainable.runs.checkpoint import read_checkpoint
from trainable.runs.failures import NodeError
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord, read_record
from tune_study.commands.cli import app
from tune_study.commands.node_checks import NodeReport, check_capacity, find_smallest_gpu, inspect_node
from tune_study.folder import run_checkpoints
from tune_study.folder.storage import StoredFolder, fetch_checkpoint, fetch_study, list_checkpoints
from tune_study.folder.study_file import plan_from_folder
from tune_study.placement.resources import TORCH_SETTINGS
from tune_study.plan.errors import PlanError
from tune_study.plan.storage_uri import join_uri
from tune_study.plan.study_plan import ResourcePlan, StudyPlan
from tune_study.tune.cluster import Node, allocate_cluster, count_fitting_runs, join_cluster, parse_nodes

ROOT = Path(__file__).parents[3]
SMALL_SETTINGS = {
    "env.env_groups": "2",
    "env.group_size": "2",
    "env.val_env_groups": "4",
    "env.test_env_groups": "0",
    "actor.ppo_mini_batch_size": "4",
    "critic.ppo_mini_batch_size": "4",
    "trainer.total_training_steps": "2",
    "trainer.save_freq": "2",
    "trainer.resume_every": "1",
    "trainer.n_gpus_per_node": "1",
    "trainer.device": "auto",
}
CPU_SETTINGS = {
    **SMALL_SETTINGS,
    "trainer.n_gpus_per_node": "0",
    **{name: str(value) for name, value in TORCH_SETTINGS.items()},
}
"""Of studies that really run: GPUs are declared, and torch sees none. A cluster has no compiled code."""
SMALL_OPTIONS = ["--seeds=1", *(f"--set={name}={value}" for name, value in CPU_SETTINGS.items())]


RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


class FakeCluster(NamedTuple):
    """A fake cluster: its address, the environment of its processes, and a folder that its second node does not see."""

    address: str
    environment: dict[str, str]
    hidden: Path
    storage: str


@pytest.fixture(scope="module")
def fake_cluster(tmp_path_factory: pytest.TempPathFactory, s3: str) -> Iterator[FakeCluster]:
    hidden = tmp_path_factory.mktemp("hidden")
    environment = {**os.environ, **RAY_ENVIRONMENT}
    with start_faked_cluster(environment, hidden) as address:
        yield FakeCluster(address, environment, hidden, f"s3://shelf/cluster?{s3}")


def type_in(fake_cluster: FakeCluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tune_study", *words, "--address", fake_cluster.address]
    return subprocess.run(command, cwd=folder, env=fake_cluster.environment, capture_output=True, text=True)


def make_cpu_plan(folder: Path) -> StudyPlan:
    return plan_study(folder, **CPU_SETTINGS)


def make_plan_in(folder: Path, **overrides: object) -> StudyPlan:
    return plan_study(
        folder, **{**SMALL_SETTINGS, **{name.replace("__", "."): text for name, text in overrides.items()}}
    )


@pytest.fixture(scope="module")
def local_plan(tmp_path_factory: pytest.TempPathFactory) -> StudyPlan:
    """The same study, run on this machine without Ray."""
    return train_without_ray(make_cpu_plan(tmp_path_factory.mktemp("local")), 2)


def check_same_results(plan: StudyPlan, local_plan: StudyPlan, storage: str, folder: Path) -> None:
    """Check that rows, evaluations and final weights of the study in storage are those of the local study."""
    assert len(plan.runs) == 2
    for spec in plan.runs:
        uri = join_uri(storage, plan.run)
        fetch_study(uri, folder / plan.run)
        run_dirs = folder / plan.run / "runs" / spec.run_id, local_plan.get_run_dir(spec.run_id)
        rows, local_rows = (read_rows(run_dir / METRICS_FILE) for run_dir in run_dirs)
        assert [drop_times(row) for row in rows] == [drop_times(row) for row in local_rows]
        assert read_rows(plan.get_run_dir(spec.run_id) / METRICS_FILE) == rows
        # A run that was killed before its first checkpoint evaluates the same steps again.
        levels = [
            {(line["step"], line["split"], line["mode"]): line for line in read_lines(run_dir / "levels.jsonl").records}
            for run_dir in run_dirs
        ]
        assert levels[0] == levels[1]
        fetch_checkpoint(uri, list_checkpoints(uri, spec, spec.run_id)[2], folder / f"{spec.run_id}-state")
        states = folder / f"{spec.run_id}-state", run_dirs[1] / "state" / "step_2"
        tensors = [read_checkpoint(path)[0] for path in states]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.slow
def test_a_study_on_the_cluster_has_the_rows_and_weights_of_a_local_one(
    fake_cluster: FakeCluster, local_plan: StudyPlan, tmp_path: Path
) -> None:
    folder = fake_cluster.hidden / "first"
    words = ("run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", "--storage", fake_cluster.storage)
    process = type_in(fake_cluster, folder, *words, *SMALL_OPTIONS)
    assert process.returncode == 0, process.stderr
    plan = make_cpu_plan(folder)
    check_same_results(plan, local_plan, fake_cluster.storage, tmp_path)
    files = StoredFolder(join_uri(fake_cluster.storage, plan.run)).list_files()
    assert {"study.json", "trials.parquet", "steps.parquet", "levels.parquet", "report.html"} <= files.keys()
    assert {f"logs/{plan.run}.log", *(spec.log_path.as_posix() for spec in plan.runs)} <= files.keys()
    for spec in plan.runs:
        folders = [PurePosixPath(name).parent.name for name in files if spec.run_id in name and "checksums" in name]
        assert sorted(folders) == ["global_step_2", "step_1", "step_2"]
        status = read_record(StatusRecord, plan.get_run_dir(spec.run_id))
        assert status.status == "completed"
        assert not (plan.get_run_dir(spec.run_id) / "state").exists()
    assert not (folder / "model_saving").exists()
    assert read_object(plan.folder / "study.json")["storage"] == fake_cluster.storage
    typed_plan = plan_from_folder(plan.folder, allowed=frozenset({f"storage={fake_cluster.storage}"}))
    target = run_checkpoints.find_run_checkpoint(typed_plan, "0.1", None, None)
    assert (target.step, target.path) == (2, folder / plan.runs[1].checkpoint_dir / "global_step_2")
    assert read_checkpoint(target.path)[1]["step"] == 2
    with pytest.raises(PlanError, match=r"has no checkpoint of step 3\. Available steps: 1, 2\."):
        run_checkpoints.find_run_checkpoint(typed_plan, "0.1", 3, None)


@pytest.fixture(scope="module")
def cluster_results(fake_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of tests/tune_study/cluster/on_cluster.py."""
    words = (fake_cluster.address, str(fake_cluster.hidden / "small"), fake_cluster.storage)
    command = [sys.executable, "-m", "tests.tune_study.cluster.on_cluster", *words]
    process = subprocess.run(command, cwd=ROOT, env=fake_cluster.environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_a_run_of_two_gpus_is_on_one_node_and_two_such_runs_are_on_both(cluster_results: dict[str, Any]) -> None:
    pairs = cluster_results["pairs"]
    assert [(placement["bundles"], placement["strategy"]) for placement in pairs] == [(2, "STRICT_PACK")] * 2
    assert [placement["node"] == placement["others_node"] for placement in pairs] == [True, True]
    assert [sorted((placement["visible"], placement["other"])) for placement in pairs] == [["0", "1"], ["0", "1"]]
    assert len({placement["node"] for placement in pairs}) == 2


@pytest.mark.slow
def test_four_runs_of_one_gpu_have_one_each(cluster_results: dict[str, Any]) -> None:
    placement_counts = Counter((placement["node"], placement["visible"]) for placement in cluster_results["single"])
    assert sorted(placement_counts.values()) == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_node_that_does_not_share_the_folder_gets_no_run(fake_cluster: FakeCluster, local_plan: StudyPlan) -> None:
    if not can_hide_folder(fake_cluster.hidden):
        pytest.skip("this user may not give a process another view of the file system")
    folder = fake_cluster.hidden / "not-shared"
    process = type_in(fake_cluster, folder, "run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", *SMALL_OPTIONS)
    assert process.returncode == 0, process.stderr
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("No run is placed on the node ")]
    assert f": it cannot use file://{folder}, where every run writes (" in line
    assert "): type --output with a folder that all nodes share, or --storage" in line
    plan = make_cpu_plan(folder)
    for spec in plan.runs:
        rows, local_rows = (read_rows(each.get_run_dir(spec.run_id) / METRICS_FILE) for each in (plan, local_plan))
        assert [drop_times(row) for row in rows] == [drop_times(row) for row in local_rows]


@pytest.mark.slow
def test_a_killed_driver_is_followed_by_one_elsewhere(
    fake_cluster: FakeCluster, local_plan: StudyPlan, tmp_path: Path
) -> None:
    storage = fake_cluster.storage.replace("cluster?", "killed?")
    plan = make_cpu_plan(tmp_path / "second")
    words = ["run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", "--storage", storage, *SMALL_OPTIONS]
    (tmp_path / "one").mkdir()
    command = [sys.executable, "-m", "tune_study", *words, "--address", fake_cluster.address]
    with subprocess.Popen(
        command, cwd=tmp_path / "one", env=fake_cluster.environment, stdout=subprocess.DEVNULL
    ) as driver:
        stored_folder = StoredFolder(join_uri(storage, plan.run))
        while not any("state/step_1/checksums.json" in name for name in stored_folder.list_files()):
            assert driver.poll() is None
        driver.kill()
    study_uri = storage.replace("killed?", f"killed/{plan.run}?")
    process = type_in(fake_cluster, tmp_path / "second", "resume", study_uri)
    assert process.returncode == 0, process.stderr
    check_same_results(plan, local_plan, storage, tmp_path / "look")


@pytest.mark.slow
def test_a_shared_folder_needs_no_storage(fake_cluster: FakeCluster, local_plan: StudyPlan, tmp_path: Path) -> None:
    process = type_in(
        fake_cluster, tmp_path / "out", "run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", *SMALL_OPTIONS
    )
    assert process.returncode == 0, process.stderr
    plan = make_cpu_plan(tmp_path / "out")
    for spec in plan.runs:
        rows, local_rows = (
            read_rows(study_plan.get_run_dir(spec.run_id) / METRICS_FILE) for study_plan in (plan, local_plan)
        )
        assert [drop_times(row) for row in rows] == [drop_times(row) for row in local_rows]


# The capacity of a cluster.


def make_resources(n_gpus: float, runs_per_node: int) -> ResourcePlan:
    return ResourcePlan(make_bundles(n_gpus), 8, (), (), 1, "", runs_per_node=runs_per_node)


NODES = (Node("a", "one", 8.0, 4.0, "H100"), Node("b", "two", 2.0, 4.0, "H100"), Node("c", "head", 0.0, 0.0, ""))


@pytest.mark.parametrize(
    ("gpus", "expected_counts"),
    [(1, (4, 2, 0)), (2, (2, 1, 0)), (4, (1, 0, 0)), (0.5, (8, 2, 0)), (0, (8, 2, 0)), (8, (0, 0, 0))],
)
def test_a_node_holds_what_its_cpus_and_gpus_allow(gpus: float, expected_counts: tuple[int, ...]) -> None:
    assert tuple(count_fitting_runs(node, make_bundles(gpus)) for node in NODES) == expected_counts
    assert [count_fitting_runs(NODES[0], make_bundles(0, n_threads)) for n_threads in (1, 3, 9)] == [8, 2, 0]


def test_the_allotment_of_a_cluster(tmp_path: Path) -> None:
    resource_plan = allocate_cluster(
        make_plan_in(tmp_path, trainer__n_gpus_per_node="2"), "10.0.0.1:6379", NODES, None, None
    )
    assert (resource_plan.max_concurrent, resource_plan.cpus, resource_plan.runs_per_node) == (2, 10, 2)
    assert resource_plan.gpu_slots == ("one:0", "one:1", "two:0")
    assert (resource_plan.gpu_label, resource_plan.gpus) == ("2xH100", ())
    assert resource_plan.cluster_address == "10.0.0.1:6379"
    nodes = "one has 8 CPU and 4 GPU; two has 2 CPU and 4 GPU; head has 0 CPU and 0 GPU"
    assert resource_plan.notes == (f"Ray cluster 10.0.0.1:6379: {nodes}",)
    assert resource_plan.is_elastic
    limited = allocate_cluster(make_plan_in(tmp_path), "a:1", NODES, None, 1)
    assert (limited.max_concurrent, limited.is_elastic) == (1, False)
    influence = plan_study(tmp_path, None, 3, study="influence")
    assert allocate_cluster(influence, "a:1", NODES, None, None).max_concurrent == 3  # a trial has all seeds of an arm


@pytest.mark.parametrize(
    ("gpus", "limit", "overrides", "message"),
    [
        ("0,1", None, {}, "--gpus 0,1 names GPUs of this machine"),
        (None, 0, {}, "--max-concurrent 0 leaves nothing to run"),
        (
            None,
            None,
            {"trainer__n_gpus_per_node": "8"},
            "no node of the cluster at a:1 has that many (one has 8 CPU and",
        ),
        (None, None, {"trainer__device": "cpu"}, "trainer.device is cpu"),
    ],
)
def test_what_a_cluster_cannot_run_is_refused(
    gpus: str | None, limit: int | None, overrides: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as error_info:
        allocate_cluster(make_plan_in(tmp_path, **overrides), "a:1", NODES, gpus, limit)
    assert message in str(error_info.value)


def test_a_study_may_wait_for_its_first_node(tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path, trainer__n_gpus_per_node="8")
    with pytest.raises(PlanError, match="or type --wait-for-nodes if they join later"):
        allocate_cluster(plan, "a:1", NODES, None, None)
    resource_plan = allocate_cluster(plan, "a:1", NODES, None, None, waits_for_nodes=True)
    assert (resource_plan.max_concurrent, resource_plan.runs_per_node, resource_plan.gpu_slots) == (
        2,
        1,
        ("a node that joins",),
    )
    assert resource_plan.notes[-1].endswith("The study waits for one.")


def test_dead_nodes_do_not_count() -> None:
    entry = {"NodeID": "0123456789", "NodeManagerAddress": "10.0.0.1", "Alive": True}
    resources = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0, "node:10.0.0.1": 1.0}
    nodes = parse_nodes([{**entry, "Resources": resources}, {**entry, "Alive": False, "Resources": {}}])
    assert nodes == (Node("0123456789", "10.0.0.1 (012345)", 8.0, 4.0, "H100"),)


@pytest.mark.parametrize("address", ["local", "10.0.0.1", "ray://127.0.0.1:1", "host:port", "127.0.0.1:1", "h:99999"])
def test_where_nothing_answers_the_study_does_not_wait(address: str) -> None:
    with pytest.raises(PlanError, match=f"Nothing answers at --address {address} .*: type host:port"):
        join_cluster(address).__enter__()


# The requirements on its nodes.


def test_another_version_than_the_drivers_is_named() -> None:
    own = versions.read_driver_versions()
    versions.check_versions(own)
    versions.check_versions({**own, "torch": f"{own['torch'].partition('+')[0]}+cu999"})
    versions.check_versions({name: own[name] for name in ("python", "ray")})  # the driver may lack what a node has
    for name in ("python", "ray", "torch", "code"):
        message = f"it has {name} {re.escape(own[name])}, and the driver 0.1: install the same versions on all nodes"
        with pytest.raises(NodeError, match=message):
            versions.check_versions({**own, name: "0.1"})
    with pytest.raises(NodeError, match=r"it has sglang none, and the driver 1\.0"):
        versions.check_versions({**own, "sglang": "1.0"})


def test_a_node_needs_room_for_the_runs_that_it_could_hold(tmp_path: Path) -> None:
    reports = {NODES[0]: NodeReport("", 400, 1000, ()), NODES[1]: NodeReport("", 100, 1000, ())}
    check_capacity(reports, make_resources(4, 8), 100, 0)  # one run fits on the first node and none on the second
    with pytest.raises(PlanError, match="The node one has 400 bytes free for the checkpoints of up to 4 runs"):
        check_capacity(reports, make_resources(1, 8), 101, 0)
    check_capacity(reports, make_resources(1, 1), 100, 0)


def test_nodes_with_too_little_space_are_refused() -> None:
    reports = {
        NODES[0]: NodeReport("", 100, 50, (81_559, 81_559)),
        NODES[1]: NodeReport("", 90, 60, (46_068,)),
    }
    check_capacity(reports, make_resources(1, 2), 45, 25)
    check_capacity(reports, make_resources(1, 2), 0, 25)
    with pytest.raises(PlanError, match="The node two has 90 bytes free for the checkpoints of up to 2 runs"):
        check_capacity(reports, make_resources(1, 2), 46, 25)
    with pytest.raises(PlanError, match="52 bytes of CPU memory on the node one"):
        check_capacity(reports, make_resources(1, 2), 45, 26)
    smallest_gpu = find_smallest_gpu(reports)
    assert (smallest_gpu.size, smallest_gpu.is_known) == (46_068 * 2**20, True)
    assert find_smallest_gpu({**reports, NODES[2]: NodeReport("", 0, 0, ())}) is None


def test_what_a_node_lacks_is_in_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = apply_overrides(make_plan_in(tmp_path).base_config, TORCH_SETTINGS)
    marker, settings = (tmp_path / "marker").as_uri(), config.model_dump(mode="json")
    own_versions = versions.read_driver_versions()
    assert f"it cannot use {tmp_path.as_uri()}" in inspect_node(marker, [settings], own_versions).problem
    (tmp_path / "marker").touch()
    report = inspect_node(marker, [settings], own_versions)
    assert report.problem == ""
    assert "it has ray " in inspect_node(marker, [settings], {**own_versions, "ray": "1.0"}).problem
    assert min(report.memory_bytes, report.disk_bytes) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["marker"]
    missing_settings = apply_overrides(config, {"model.path": "Qwen/Qwen2.5-3B"}).model_dump(mode="json")
    report = inspect_node(marker, [settings, missing_settings], own_versions)
    assert "Download it with `hf download Qwen/Qwen2.5-3B`" in report.problem


def test_the_sum_over_the_code_tells_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainable").mkdir()
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "trainable" / "versions.py"))
    hashes = []
    for text in ("", "", "x = 1\n"):
        (tmp_path / "trainable" / "b.py").write_text(text)
        hashes.append(versions.compute_code_hash.__wrapped__())
    assert hashes[0] == hashes[1] != hashes[2]


EXAMPLES = ROOT / "examples" / "cluster"


def test_the_cluster_file_is_one_that_ray_takes() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import validate_config

    config = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text(encoding="utf-8"))
    config["cluster_synced_files"] = []  # Ray adds this field before it validates the configuration
    validate_config(config)
    with pytest.raises(ValidationError, match="head_node_typ"):
        validate_config({**config, "head_node_typ": "head"})


def test_the_job_of_kubernetes_types_a_command_that_exists_and_grows_from_no_node(tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text(encoding="utf-8"))["spec"]
    cluster_spec = job["rayClusterSpec"]
    (group,) = cluster_spec["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], cluster_spec["enableInTreeAutoscaling"]) == (0, 0, True)
    assert cluster_spec["rayVersion"] == ray.__version__
    words = job["entrypoint"].split()
    assert words[:3] == ["python", "-m", "tune_study"]
    assert {"--wait-for-nodes", "--storage"} <= set(words)
    # The same command without a cluster is planned.
    words = [word for word in words[3:] if word not in ("--address", "auto", "--wait-for-nodes")]
    words = [str(tmp_path) if word.startswith("s3://") else word for word in words]
    text = CliRunner().invoke(app, [*words, "--gpus", "0,1,2,3", "--dry-run", "--output", str(tmp_path)]).output
    assert "sokoban_kl_sweep_nofilter_01-Qwen2.5-3B-seed2" in text


def test_the_image_has_the_wheel_of_this_version() -> None:
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    assert text.count(f"tune_study-{metadata.version('tune_study')}-py3-none-any.whl") == 2
