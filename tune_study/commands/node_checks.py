"""Check every node of a cluster before a study starts, by a small Ray task on each node."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from rich.filesize import decimal

import trainable
from trainable.config.run_config import RunConfig
from tune_study.folder.outputs import read_versions
from tune_study.folder.storage import StoredFolder, format_error
from tune_study.host.machine_checks import measure_available_memory, measure_scratch_space, query_gpu_memory
from tune_study.placement.disk import check_scratch
from tune_study.placement.memory_plan import GpuCapacity
from tune_study.placement.model_files import check_model
from tune_study.placement.resources import check_engines
from tune_study.plan.errors import PlanError, Problem
from tune_study.plan.storage_uri import join_uri, split_uri
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.cluster import Node, count_fitting_runs

_TIMEOUT_S = 180.0
"""Seconds to wait for a node's answer: a worker has to start there and import our packages first."""
_PACKAGES = ("tune_study", "trainable", "search_spaces", "sandboxes", "analysis")
"""The packages whose sources `compute_code_hash` reads."""
_DRIVER_PACKAGES = ("python", "ray", "tune_study", "code")
"""Packages whose versions must be equal on the driver and on the nodes.

Pickled objects need the same Python and Ray. Torch may differ on the driver, which computes nothing.
"""


class NodeReport(NamedTuple):
    """What a node has, in bytes that are free for runs; on the disk, where runs with a storage write."""

    versions: dict[str, str]
    """Of packages, and `code`, a hash of our sources."""
    problems: tuple[Problem, ...]
    """Why it cannot read and write where runs write, or load the models or engines."""
    disk_bytes: int
    memory_bytes: int
    gpu_memory_mib: tuple[int, ...]
    """Memory of each GPU, as nvidia-smi reports it."""


def compute_code_hash() -> str:
    """Compute twelve hex digits that identify our sources, from the relative path and content of every module.

    A commit has the same digits on every machine, whether it was installed or checked out.
    """
    digest = hashlib.sha256()
    root = Path(trainable.__file__).parent.parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def read_all_versions() -> dict[str, str]:
    """Read the versions that machines are compared by: of packages, and the hash of our sources."""
    return {**read_versions(), "code": compute_code_hash()}


def inspect_node(marker: str, configs: Sequence[Mapping[str, Any]]) -> NodeReport:
    """Report what the machine of this process has. Runs on a node, as a Ray task.

    marker: URI of a file that the driver has written. configs: the settings of each arm with a language model.
    """
    # Problems are reported instead of raised: the driver first compares versions, whose difference may be the cause.
    problems = []
    uri, name = split_uri(marker)
    try:
        folder = StoredFolder(uri)
        folder.read(name)
        folder.put(answer := f"{name}-{uuid4().hex}", b"")  # since runs write there, too
        folder.remove(answer)
    except (OSError, PlanError) as error:
        remedy = (
            "type --output with a folder that all nodes share, or --storage with a bucket or a shared folder, for "
            "which this node has the network and, where `ray start` is typed, the credentials"
        )
        text = f"{uri}, where every run writes, cannot be read and written ({format_error(error)})"
        problems.append(Problem("refusal", text, remedy))
    try:
        for settings in configs:
            config = RunConfig.model_validate(settings)
            for model in config.model_paths:
                check_model(model, os.environ, config.model.chat_format)
            check_engines(config, os.environ)
    except PlanError as error:
        problems.append(error.problem)
    return NodeReport(
        read_all_versions(),
        tuple(problems),
        measure_scratch_space(),
        measure_available_memory(),
        tuple(entry.total_mib for entry in query_gpu_memory() if entry.total_mib is not None),
    )


@contextmanager
def _put_marker(plan: StudyPlan) -> Iterator[str]:
    """Yield the URI of a new file where the runs will write, and remove it afterwards."""
    # The study's folder must not be created before all checks have passed.
    existing = next(parent for parent in (plan.folder, *plan.folder.parents) if parent.is_dir())
    folder, name = StoredFolder(plan.storage or existing.as_uri()), f"tune_study-{uuid4().hex}"
    folder.put(name, b"")  # `check_storage` or `check_writable` has tried this
    try:
        yield join_uri(folder.uri, name)
    finally:
        with suppress(OSError):  # a leftover empty file does no harm
            folder.remove(name)


def check_nodes(plan: StudyPlan, nodes: Sequence[Node]) -> dict[Node, NodeReport]:
    """Return reports of the nodes where runs may be placed. Raises PlanError, naming the node, if a run would fail."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    configs = [config.model_dump(mode="json") for config in plan.ppo_configs]
    references, reports = {}, {}
    with _put_marker(plan) as marker:
        # All tasks are started before the first answer is awaited. They reserve no CPU, so busy nodes answer, too.
        for node in nodes:
            # soft=False: otherwise Ray might run the task on another node, and its answer would count for `node`.
            strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
            references[node] = ray.remote(inspect_node).options(**options).remote(marker, configs)
        for node, reference in references.items():
            try:
                reports[node] = ray.get(reference, timeout=_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                # The last line is the exception, after the traceback of the task.
                reason = str(error).strip().splitlines()[-1].strip(" .")
                remedy = "install the same tune_study there as here, as in docs/cluster.md"
                raise PlanError(f"The node {node.name} cannot run a study ({reason})", remedy) from None
    # Versions first: differing sources or packages are the likely cause of a node's other problems.
    check_versions(read_all_versions(), {node.name: report.versions for node, report in reports.items()})
    for node, report in reports.items():
        for problem in report.problems:
            raise PlanError(f"On the node {node.name}: {problem}")
    return reports


def check_versions(driver_versions: Mapping[str, str], node_versions: Mapping[str, Mapping[str, str]]) -> None:
    """Raise PlanError if nodes differ in a package, or differ from the driver in a package of _DRIVER_PACKAGES.

    driver_versions: versions by package. node_versions: the same by the node's name.
    """
    packages = sorted({package for versions in node_versions.values() for package in versions})
    expected = {package: ("this machine", driver_versions.get(package, "not")) for package in _DRIVER_PACKAGES}
    for node, versions in node_versions.items():
        for package in packages:
            version = versions.get(package, "not")
            name, expected_version = expected.setdefault(package, (node, version))
            if version != expected_version:
                raise PlanError(
                    f"The node {node} has {package} {version} and {name} {expected_version}, so that results would "
                    "depend on the node of a run",
                    "install the same versions on all nodes, as in docs/cluster.md",
                )


def check_capacity(
    reports: Mapping[Node, NodeReport], n_gpus: float, runs_per_node: int, scratch_bytes: int, host_bytes: int
) -> None:
    """Raise PlanError if a node has too little disk space or memory for its runs.

    n_gpus: GPUs per run. runs_per_node: maximum number of concurrent runs per node. scratch_bytes: disk space per run;
    0 if unknown or without a storage. host_bytes: CPU memory per run.
    """
    for node, report in reports.items():
        # Ray may fill a node with runs, up to the number that run at once.
        n_runs = min(count_fitting_runs(node, n_gpus), runs_per_node)
        remedy = "type `ray start` there with --temp-dir and a folder on a larger disk"
        check_scratch(f"The node {node.name}", report.disk_bytes, n_runs, scratch_bytes, remedy)
        if host_bytes * n_runs > report.memory_bytes:
            raise PlanError(
                f"{n_runs} runs at once need {decimal(host_bytes * n_runs)} of CPU memory on the node {node.name}, "
                f"which has {decimal(report.memory_bytes)} available",
                "type --max-concurrent with a smaller number",
            )


def find_smallest_gpu(reports: Mapping[Node, NodeReport]) -> GpuCapacity | None:
    """Find the smallest GPU of all nodes, since a run may get any; None if a node reports no GPU."""
    sizes = [report.gpu_memory_mib for report in reports.values()]
    if not sizes or not all(sizes):
        return None
    return GpuCapacity(min(map(min, sizes)) * 2**20, "the smallest of the nodes, from nvidia-smi", is_known=True)
