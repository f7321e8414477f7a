"""What each node of a cluster must have before a study starts there, looked at by a small task on the node itself."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from rich.filesize import decimal

import trainable
from trainable.config.run_config import RunConfig
from trainable.runs.failures import StorageError
from trainable.storage.uris import join_uri
from tune_study.folder.outputs import read_versions
from tune_study.host.machine import measure_available_memory, query_gpu_memory
from tune_study.placement.memory_plan import GpuCapacity
from tune_study.placement.models import check_model
from tune_study.placement.resources import check_engines
from tune_study.plan.study_plan import PlanError, StudyPlan
from tune_study.tune.cluster import Node, count_fitting_runs

_TIMEOUT_S = 180.0
_PACKAGES = ("tune_study", "trainable", "search_spaces", "analysis")
_DRIVER_PACKAGES = ("python", "ray", "tune_study", "code")
"""What the driver must have as its nodes do: it needs no torch, and may have another build."""


class NodeQuery(NamedTuple):
    """What a node is asked.

    marker: a file that it should see, by its path or by its URI in a storage. stored: the URI of the study there; None
    without a storage. models: that runs load. settings: of a run, as JSON.
    """

    marker: str
    study_uri: str | None
    models: tuple[str, ...]
    settings: dict[str, Any] | None


class NodeReport(NamedTuple):
    """What a node has.

    versions: of packages, and `code`, a sum over our sources. sees: empty, or why it does not see the marker. lacks:
    empty, or what is wrong with its models and engines. free: bytes for scratch folders. memory: bytes that new
    processes can take. gpus: MiB of each GPU, as far as known.
    """

    versions: dict[str, str]
    marker_error: str
    setup_error: str
    free_disk_bytes: int
    free_memory_bytes: int
    gpu_memory_mib: tuple[int, ...]


def compute_code_hash() -> str:
    """Twelve hex digits over our own sources: of one commit the same everywhere, however it was installed."""
    digest = hashlib.sha256()
    root = Path(trainable.__file__).parent.parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def inspect_node(query: NodeQuery) -> NodeReport:
    """What the machine of this process has; run on a node."""
    try:
        if query.settings is not None:
            config = RunConfig.model_validate(query.settings)
            for model in query.models:
                check_model(model, os.environ, config.model.chat_format)
            check_engines(config)
        setup_error = ""
    except PlanError as error:
        setup_error = str(error)
    free_disk_bytes = 0 if query.study_uri is None else _measure_free_scratch(query.study_uri)
    gpu_memory_mib = [entry.total_mib for entry in query_gpu_memory() if entry.total_mib is not None]
    return NodeReport(
        {**read_versions(), "code": compute_code_hash()},
        _find_marker_error(query),
        setup_error,
        free_disk_bytes,
        measure_available_memory(),
        tuple(gpu_memory_mib),
    )


def _find_marker_error(query: NodeQuery) -> str:
    if query.study_uri is None:
        return "" if os.path.exists(query.marker) else "it is not there"
    from trainable.storage.remote import format_error, get_bytes, open_storage

    try:
        get_bytes(open_storage(query.marker))
    except (OSError, StorageError) as error:
        return format_error(error)
    return ""


def _measure_free_scratch(uri: str) -> int:
    """Bytes free in the scratch folder of a study's runs on this machine."""
    from trainable.storage.mirror import make_scratch_path

    folder = make_scratch_path(uri, os.environ)
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free


def query_nodes(nodes: Sequence[Node], query: NodeQuery) -> dict[Node, NodeReport]:
    """The answer of each node, or PlanError naming one that gives none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    references = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
        references[node] = ray.remote(inspect_node).options(**options).remote(query)
    return {node: _wait_for_report(node, reference) for node, reference in references.items()}


def _wait_for_report(node: Node, reference: Any) -> NodeReport:
    import ray

    try:
        report_fields = ray.get(reference, timeout=_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        reason = f"it did not answer within {_TIMEOUT_S:g} s"
    except ray.exceptions.RayError as error:
        reason = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
    else:
        return NodeReport(*report_fields)
    raise PlanError(
        f"The node {node.name} cannot run a study: {reason}. Install the same tune_study there as here, as in "
        f"docs/cluster.md."
    )


def check_nodes(plan: StudyPlan, nodes: Sequence[Node]) -> dict[Node, NodeReport]:
    """What the nodes that could hold a run have; PlanError, naming the node, for what would make a run fail there."""
    models, settings = tuple[str, ...](), None
    if plan.model is not None:
        models, settings = (
            tuple(dict.fromkeys(spec.ppo_config.model.path for spec in plan.runs)),
            plan.ppo_config.model_dump(mode="json"),
        )
    with _make_marker(plan) as marker:
        query = NodeQuery(marker, plan.study_uri, models, settings)
        reports = query_nodes(nodes, query)
    check_versions(
        {**read_versions(), "code": compute_code_hash()}, {node.name: found.versions for node, found in reports.items()}
    )
    for node, report in reports.items():
        if report.marker_error:
            raise PlanError(_explain_unseen_marker(plan, node, report.marker_error))
        if report.setup_error:
            raise PlanError(f"On the node {node.name}: {report.setup_error}")
    return reports


def _explain_unseen_marker(plan: StudyPlan, node: Node, reason: str) -> str:
    if plan.study_uri is not None:
        return (
            f"The node {node.name} cannot read --storage {plan.storage}: {reason}. Give the node the same access as "
            f"this machine has: its network, and credentials in the environment that `ray start` is typed in."
        )
    storage_hint = "" if plan.study.family.has_batched_seeds else ", or --storage with a bucket or a shared folder"
    return (
        f"The node {node.name} does not see the folder {plan.output} of this machine, where every run writes: type "
        f"--output with a folder that all nodes share{storage_hint}."
    )


@contextmanager
def _make_marker(plan: StudyPlan) -> Iterator[str]:
    """A new file where the runs are to write, for as long as nodes look for it: its path or URI."""
    name = f".tune_study-{uuid4().hex}"
    if plan.storage is None:
        folder = next(place for place in (plan.folder, *plan.folder.parents) if place.is_dir())
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
    from trainable.storage.remote import put_bytes, remove_file
    from tune_study.folder.storage import open_uri

    uri = join_uri(plan.storage, name)
    put_bytes(open_uri(uri), b"")
    try:
        yield uri
    finally:
        with contextlib.suppress(OSError):
            remove_file(open_uri(uri))


def check_versions(driver_versions: Mapping[str, str], node_versions: Mapping[str, Mapping[str, str]]) -> None:
    """PlanError where nodes have different packages, or others than the driver in what both run.

    here: name -> version of the driver. nodes: name of the node -> its versions.
    """
    first_node = next(iter(node_versions))
    for node, installed_versions in node_versions.items():
        for package in sorted(node_versions[first_node].keys() | installed_versions.keys()):
            references = [("this machine", driver_versions)] if package in _DRIVER_PACKAGES else []
            for reference_name, reference_versions in [*references, (first_node, node_versions[first_node])]:
                if reference_versions.get(package) != installed_versions.get(package):
                    raise PlanError(
                        f"The node {node} has {package} {installed_versions.get(package, 'not')} and {reference_name} "
                        f"{reference_versions.get(package, 'not')}: rows would depend on where a run is. Install the same on all "
                        f"nodes, as in docs/cluster.md."
                    )


def check_scratch(uri: str, n_runs: int, run_bytes: int | None) -> None:
    """PlanError where this machine has too little disk for the states of `runs` at once, of `size` bytes a run."""
    free_bytes = _measure_free_scratch(uri)
    if run_bytes is not None and free_bytes < n_runs * run_bytes:
        raise PlanError(
            f"This machine has {decimal(free_bytes)} free for the states of up to {n_runs} runs until they are in the storage, "
            f"which take {decimal(n_runs * run_bytes)}: set TUNE_STUDY_SCRATCH to a folder on a larger disk, or type "
            f"--max-concurrent with a smaller number."
        )


def check_capacity(
    reports: Mapping[Node, NodeReport], n_gpus: float, runs_per_node: int, scratch_bytes: int | None, host_bytes: int
) -> None:
    """PlanError where a node has too little disk for what its runs keep there, or too little memory.

    n_gpus: of a run. most: runs at once on a node. scratch, host: bytes of disk (None: not known) and of memory a run.
    """
    for node, report in reports.items():
        n_runs = min(count_fitting_runs(node, n_gpus), runs_per_node)
        if scratch_bytes is not None and report.free_disk_bytes < n_runs * scratch_bytes:
            raise PlanError(
                f"The node {node.name} has {decimal(report.free_disk_bytes)} free for the states of up to {n_runs} runs, which "
                f"take {decimal(n_runs * scratch_bytes)}: set TUNE_STUDY_SCRATCH there to a folder on a larger disk, or type "
                f"--max-concurrent with a smaller number."
            )
        if host_bytes * n_runs > report.free_memory_bytes:
            raise PlanError(
                f"{n_runs} runs at once keep {decimal(host_bytes * n_runs)} in the memory of the node {node.name}, which has "
                f"{decimal(report.free_memory_bytes)} available: type --max-concurrent with a smaller number."
            )


def find_smallest_gpu(reports: Mapping[Node, NodeReport]) -> GpuCapacity | None:
    """The smallest GPU of the nodes, or None where one does not say."""
    gpu_sizes = [found.gpu_memory_mib for found in reports.values()]
    if not gpu_sizes or not all(gpu_sizes):
        return None
    return GpuCapacity(
        min(min(sizes) for sizes in gpu_sizes) * 2**20, "the smallest of the nodes, as nvidia-smi says", True
    )
