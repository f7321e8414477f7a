"""Check every node of a cluster before a study starts, by a small Ray task on each node."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from rich.filesize import decimal

import trainable
from trainable.config.run_config import RunConfig
from tune_study.folder.outputs import read_versions
from tune_study.host.machine_checks import (
    find_nearest_existing,
    find_ray_folder,
    measure_available_memory,
    query_gpu_memory,
)
from tune_study.placement.memory_plan import GpuCapacity
from tune_study.placement.model_files import check_model
from tune_study.placement.resources import check_engines
from tune_study.plan.errors import PlanError
from tune_study.plan.storage_uri import join_uri, split_uri
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.cluster import Node, count_fitting_runs

_TIMEOUT_S = 180.0
"""Seconds to wait for a node's answer: a worker has to start there and import our packages first."""
_PACKAGES = ("tune_study", "trainable", "search_spaces", "analysis")
"""The packages whose sources `compute_code_hash` reads."""
_DRIVER_PACKAGES = ("python", "ray", "tune_study", "code")
"""Packages whose versions must be equal on the driver and on the nodes.

Pickled objects need the same Python and Ray. Torch may differ on the driver, which computes nothing.
"""


class NodeQuery(NamedTuple):
    """What a node is asked."""

    marker: str
    """Path or URI of a file that the driver has written, to test whether the node sees it."""
    study_uri: str | None
    """URI of the study in its storage, if it has one."""
    models: tuple[str, ...]
    """Paths or hub ids of the models that the runs load."""
    settings: dict[str, Any] | None
    """A run's settings, as JSON; None for runs without a language model."""


class NodeReport(NamedTuple):
    """A node's answer. Ray sends it as a tuple, so the order of the fields must not change."""

    versions: dict[str, str]
    """Versions of packages, and `code`, a hash of our sources."""
    marker_error: str
    """Why the node does not see the marker; empty if it does."""
    setup_error: str
    """Message of the first error in loading models or engines; empty without an error."""
    free_disk_bytes: int
    """Free bytes for the files of trials; 0 without a storage, since it is not measured then."""
    free_memory_bytes: int
    """Bytes of CPU memory available to new processes."""
    gpu_memory_mib: tuple[int, ...]
    """Memory of each GPU in MiB, as nvidia-smi reports it."""


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


def inspect_node(query: NodeQuery) -> NodeReport:
    """Answer `query` for the machine of this process. Run on a node, as a Ray task."""
    # An error of models or engines is reported instead of raised: the driver first compares versions, whose difference
    # may be the cause.
    setup_error = ""
    try:
        if query.settings is not None:
            config = RunConfig.model_validate(query.settings)
            for model in query.models:
                check_model(model, os.environ, config.model.chat_format)
            check_engines(config, os.environ)
    except PlanError as error:
        setup_error = str(error)
    return NodeReport(
        read_all_versions(),
        _find_marker_error(query),
        setup_error,
        0 if query.study_uri is None else _measure_free_space(),
        measure_available_memory(),
        tuple(entry.total_mib for entry in query_gpu_memory() if entry.total_mib is not None),
    )


def read_all_versions() -> dict[str, str]:
    """Read the versions that machines are compared by: of packages, and the hash of our sources."""
    return {**read_versions(), "code": compute_code_hash()}


def _find_marker_error(query: NodeQuery) -> str:
    """Find out why this machine does not see the marker; return an empty text if it does."""
    if query.study_uri is None:
        return "" if os.path.exists(query.marker) else "it does not exist there"
    from tune_study.folder.storage import StoredFolder, format_error

    folder, name = split_uri(query.marker)
    try:
        stored_folder = StoredFolder(folder)
        stored_folder.read(name)
        stored_folder.put(answer := f"{name}-{uuid4().hex}", b"")  # since runs write there, too
        stored_folder.remove(answer)
    except (OSError, PlanError) as error:
        return format_error(error)
    return ""


def _measure_free_space() -> int:
    """Measure the free bytes where trials of a study with a storage write: in Ray's and the temporary folder."""
    folders = find_ray_folder(os.environ), Path(tempfile.gettempdir())
    return min(shutil.disk_usage(find_nearest_existing(folder)).free for folder in folders)


def _wait_for_report(node: Node, reference: Any) -> NodeReport:
    """Wait for a node's report. reference: Ray's reference to the task's result. Raises PlanError if none comes."""
    import ray

    try:
        report_fields = ray.get(reference, timeout=_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        reason = f"it did not answer within {_TIMEOUT_S:g} s"
    except ray.exceptions.RayError as error:
        # The last line is the exception, after the traceback of the task.
        reason = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
    else:
        return NodeReport(*report_fields)
    raise PlanError(
        f"The node {node.name} cannot run a study: {reason}. Install the same tune_study there as here, as in "
        f"docs/cluster.md."
    )


def check_nodes(plan: StudyPlan, nodes: Sequence[Node]) -> dict[Node, NodeReport]:
    """Return reports of the nodes where runs may be placed. Raises PlanError, naming the node, if a run would fail."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    settings = None if plan.model is None else plan.ppo_config.model_dump(mode="json")
    with _make_marker(plan) as marker:
        query = NodeQuery(marker, plan.study_uri, () if plan.model is None else plan.model_paths, settings)
        # All tasks are started before the first answer is awaited. They reserve no CPU, so busy nodes answer, too.
        references = {}
        for node in nodes:
            # soft=False: otherwise Ray might run the task on another node, and its answer would count for `node`.
            strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
            references[node] = ray.remote(inspect_node).options(**options).remote(query)
        reports = {node: _wait_for_report(node, reference) for node, reference in references.items()}
    # Versions first: differing sources or packages are the likely cause of a node's other errors.
    check_versions(read_all_versions(), {node.name: report.versions for node, report in reports.items()})
    for node, report in reports.items():
        if report.marker_error:
            raise PlanError(_explain_unseen_marker(plan, node, report.marker_error))
        if report.setup_error:
            raise PlanError(f"On the node {node.name}: {report.setup_error}")
    return reports


def _explain_unseen_marker(plan: StudyPlan, node: Node, reason: str) -> str:
    """Explain that a node does not see the study's folder or storage. reason: the node's `marker_error`."""
    if plan.study_uri is not None:
        return (
            f"The node {node.name} cannot read --storage {plan.storage}: {reason}. Give the node the same access as "
            f"this machine: the network, and credentials in the environment in which `ray start` is typed."
        )
    return (
        f"The node {node.name} does not see the folder {plan.output} of this machine, where every run writes: type "
        f"--output with a folder that all nodes share, or --storage with a bucket or a shared folder."
    )


@contextmanager
def _make_marker(plan: StudyPlan) -> Iterator[str]:
    """Yield the path or URI of a new file where the runs will write, and remove it afterwards."""
    name = f".tune_study-{uuid4().hex}"
    if plan.storage is None:
        # The study's folder must not be created before all checks have passed.
        folder = next(parent for parent in (plan.folder, *plan.folder.parents) if parent.is_dir())
        path = folder / name
        try:
            path.touch()
        except OSError as error:
            raise PlanError(f"{folder} cannot be written ({error.strerror}): type another --output.") from None
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
        return
    from tune_study.folder.storage import StoredFolder

    stored_folder = StoredFolder(plan.storage)
    stored_folder.put(name, b"")
    try:
        yield join_uri(plan.storage, name)
    finally:
        with contextlib.suppress(OSError):  # a leftover empty file does no harm
            stored_folder.remove(name)


def check_versions(driver_versions: Mapping[str, str], node_versions: Mapping[str, Mapping[str, str]]) -> None:
    """Raise PlanError if nodes differ in a package, or differ from the driver in a package of _DRIVER_PACKAGES.

    driver_versions: versions by package. node_versions: the same for at least one node, by the node's name.
    """
    # If every node equals the first one, all are equal.
    first_node, first_versions = next(iter(node_versions.items()))
    for node, installed_versions in node_versions.items():
        for package in sorted(first_versions.keys() | installed_versions.keys()):
            references = [("this machine", driver_versions)] if package in _DRIVER_PACKAGES else []
            for reference_name, reference_versions in [*references, (first_node, first_versions)]:
                node_version, version = installed_versions.get(package, "not"), reference_versions.get(package, "not")
                if node_version != version:
                    raise PlanError(
                        f"The node {node} has {package} {node_version} and {reference_name} {version}: "
                        f"results would depend on the node of a run. Install the same versions on all nodes, as in "
                        f"docs/cluster.md."
                    )


def check_scratch(n_runs: int, run_bytes: int | None) -> None:
    """Raise PlanError if this machine lacks disk space for the checkpoints of concurrent runs.

    n_runs: maximum number of concurrent runs. run_bytes: bytes per run; None if unknown.
    """
    free_bytes = _measure_free_space()
    if run_bytes is not None and free_bytes < n_runs * run_bytes:
        raise PlanError(
            f"This machine has {decimal(free_bytes)} free for the checkpoints of up to {n_runs} runs until they are "
            f"copied to the storage, which take {decimal(n_runs * run_bytes)}: set RAY_TMPDIR to a folder on a "
            f"larger disk, or type --max-concurrent with a smaller number."
        )


def check_capacity(
    reports: Mapping[Node, NodeReport], n_gpus: float, runs_per_node: int, scratch_bytes: int | None, host_bytes: int
) -> None:
    """Raise PlanError if a node has too little disk space or memory for its runs.

    n_gpus: GPUs per run. runs_per_node: maximum number of concurrent runs per node. scratch_bytes: disk space per run;
    None if unknown or without a storage. host_bytes: CPU memory per run.
    """
    for node, report in reports.items():
        # Ray may fill a node with runs, up to the number that run at once.
        n_runs = min(count_fitting_runs(node, n_gpus), runs_per_node)
        if scratch_bytes is not None and report.free_disk_bytes < n_runs * scratch_bytes:
            raise PlanError(
                f"The node {node.name} has {decimal(report.free_disk_bytes)} free for the checkpoints of up to "
                f"{n_runs} runs, which take {decimal(n_runs * scratch_bytes)}: type `ray start` there with "
                f"--temp-dir and a folder on a larger disk, or type --max-concurrent with a smaller number."
            )
        if host_bytes * n_runs > report.free_memory_bytes:
            raise PlanError(
                f"{n_runs} runs at once need {decimal(host_bytes * n_runs)} of CPU memory on the node {node.name}, "
                f"which has {decimal(report.free_memory_bytes)} available: type --max-concurrent with a smaller "
                f"number."
            )


def find_smallest_gpu(reports: Mapping[Node, NodeReport]) -> GpuCapacity | None:
    """Find the smallest GPU of all nodes, since a run may get any; None if a node reports no GPU."""
    sizes = [report.gpu_memory_mib for report in reports.values()]
    if not sizes or not all(sizes):
        return None
    return GpuCapacity(min(map(min, sizes)) * 2**20, "the smallest of the nodes, from nvidia-smi", is_known=True)
