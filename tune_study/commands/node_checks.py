"""Check every node of a cluster before a study starts, by a small Ray task on each node."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from uuid import uuid4

from rich.filesize import decimal

from trainable.config.run_config import RunConfig
from trainable.runs.failures import NodeError
from trainable.versions import check_versions, read_driver_versions
from tune_study.folder.storage import StoredFolder, format_error
from tune_study.host.machine_checks import measure_available_memory, measure_scratch_space, query_gpu_memory
from tune_study.placement.disk import check_scratch
from tune_study.placement.memory_plan import GpuCapacity
from tune_study.placement.model_files import check_model
from tune_study.placement.resources import check_engines
from tune_study.plan.errors import PlanError
from tune_study.plan.storage_uri import join_uri, split_uri
from tune_study.plan.study_plan import ResourcePlan, StudyPlan
from tune_study.tune.cluster import Node, count_fitting_runs

_TIMEOUT_S = 180.0
"""Seconds to wait for a node's answer: a worker has to start there and import our packages first."""


class NodeReport(NamedTuple):
    """What a node has, in bytes that are free for runs; on the disk, where runs with a storage write."""

    problem: str
    """What the node lacks, and what to do, if no run can be placed there; else empty."""
    disk_bytes: int
    memory_bytes: int
    gpu_memory_mib: tuple[int, ...]
    """Memory of each GPU, as nvidia-smi reports it."""


def inspect_node(marker: str, configs: Sequence[Mapping[str, Any]], versions: Mapping[str, str]) -> NodeReport:
    """Report what the machine of this process has. Runs on a node, as a Ray task.

    marker: URI of a file that the driver has written. configs: the settings of each arm with a language model.
    versions: the driver's, as `check_versions` takes them.
    """
    return NodeReport(
        _find_problem(marker, configs, versions),
        measure_scratch_space(),
        measure_available_memory(),
        tuple(entry.total_mib for entry in query_gpu_memory().values()),
    )


def _find_problem(marker: str, configs: Sequence[Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    try:
        check_versions(versions)  # first, since another version may be the cause of all else
    except NodeError as error:
        return str(error)
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
        return f"it cannot use {uri}, where every run writes ({format_error(error)}): {remedy}."
    try:
        for settings in configs:
            config = RunConfig.model_validate(settings)
            for model in config.model_paths:
                check_model(model, os.environ, config.model.chat_format)
            check_engines(config, os.environ)
    except PlanError as error:
        return str(error)
    return ""


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


def inspect_nodes(plan: StudyPlan, nodes: Sequence[Node]) -> dict[Node, NodeReport]:
    """Return a report of each node. Raises PlanError if the driver cannot write where runs write."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    configs = [config.model_dump(mode="json") for config in plan.ppo_configs]
    versions = read_driver_versions()
    references, reports = {}, {}
    with _put_marker(plan) as marker:
        # All tasks are started before the first answer is awaited. They reserve no CPU, so busy nodes answer, too.
        for node in nodes:
            # soft=False: otherwise Ray might run the task on another node, and its answer would count for `node`.
            strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
            references[node] = ray.remote(inspect_node).options(**options).remote(marker, configs, versions)
        for node, reference in references.items():
            try:
                reports[node] = ray.get(reference, timeout=_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                # The last line is the exception, after the traceback of the task.
                reason = str(error).strip().splitlines()[-1].strip(" .")
                remedy = "install the same tune_study there as here, as in docs/cluster.md"
                reports[node] = NodeReport(f"{reason}: {remedy}.", 0, 0, ())
    return reports


def check_capacity(
    reports: Mapping[Node, NodeReport], resource_plan: ResourcePlan, scratch_bytes: int, host_bytes: int
) -> None:
    """Raise PlanError if a node has too little disk space or memory for its runs.

    scratch_bytes: disk space per run; 0 if unknown or without a storage. host_bytes: CPU memory per run.
    """
    for node, report in reports.items():
        # Ray may fill a node with runs, up to the number that run at once.
        n_runs = min(count_fitting_runs(node, resource_plan.bundles), resource_plan.runs_per_node)
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
