"""Join an existing Ray cluster, without starting or stopping it, and count the runs that fit on its nodes."""

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from trainable.backend.gpus import make_bundles
from trainable.config.setting_types import format_value
from tune_study.host.machine_checks import Gpu
from tune_study.placement import resources
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan
from tune_study.tune.local_ray import prepare_environment

_CONNECT_TIMEOUT_S = 10.0
"""Seconds to wait for a connection to --address."""


class Node(NamedTuple):
    """A node that is alive. cpus, gpus: in total, free or in use."""

    id: str
    name: str
    """A name for messages, unique in the cluster."""
    cpus: float
    gpus: float
    gpu_type: str
    """Ray's name of its GPU type, such as H100; empty if it has no GPU or Ray does not know the type."""


@contextmanager
def join_cluster(address: str) -> Iterator[tuple[Node, ...]]:
    """Join the cluster at `address` during the body, and yield its nodes.

    address: host:port or auto, as for `ray.init`. Raises PlanError if the cluster cannot be joined.
    """
    if address != "auto":  # which Ray looks up on this machine
        host, _, port = address.rpartition(":")
        try:  # Ray would try again for minutes
            # An IPv6 address is typed as [::1]:6379, but connected to without its brackets.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PlanError(
                f"Nothing answers at --address {format_value(address)} ({reason}): type host:port, as `ray start` "
                f"printed it, or auto on a machine of the cluster, and check that this machine can reach it."
            ) from None
    prepare_environment(gpus=(), joins_cluster=True)
    import ray  # reads the environment prepared above

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise PlanError(
            f"--address {format_value(address)}: the Ray cluster cannot be joined: {reason} Type --address auto on a "
            f"machine of the cluster, since a driver needs a node of Ray on its own machine, or submit the command "
            f"there with `ray job submit`."
        ) from None
    try:
        yield parse_nodes(ray.nodes())
    finally:
        ray.shutdown()  # only disconnects: the cluster keeps running


def parse_nodes(entries: Sequence[dict[str, Any]]) -> tuple[Node, ...]:
    """List the nodes that are alive. entries: the result of `ray.nodes()`, which keeps dead nodes."""
    return tuple(
        Node(
            entry["NodeID"],
            # The beginning of the id tells apart several nodes on one host.
            f"{entry.get('NodeName') or entry['NodeManagerAddress']} ({entry['NodeID'][:6]})",
            # Ray leaves out resources that a node does not have.
            entry["Resources"].get("CPU", 0.0),
            entry["Resources"].get("GPU", 0.0),
            # The GPU type is a resource `accelerator_type:<type>`.
            next((name.partition(":")[2] for name in entry["Resources"] if name.startswith("accelerator_type:")), ""),
        )
        for entry in entries
        if entry.get("Alive")
    )


def count_fitting_runs(node: Node, bundles: Sequence[Mapping[str, float]]) -> int:
    """Count the runs with these bundles that fit on a node at the same time; a run does not span nodes."""
    by_cpus = int(node.cpus // sum(bundle["CPU"] for bundle in bundles))
    n_gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
    if n_gpus == 0:
        return by_cpus
    # A run on a fraction of a GPU cannot use parts of two GPUs, so each GPU is divided separately.
    return min(by_cpus, int(node.gpus // max(n_gpus, 1)) * resources.count_runs_per_gpu(n_gpus))


def find_usable_nodes(nodes: Sequence[Node], bundles: Sequence[Mapping[str, float]]) -> tuple[Node, ...]:
    """Find the nodes on which a run with these bundles fits."""
    return tuple(node for node in nodes if count_fitting_runs(node, bundles))


def allocate_cluster(
    plan: StudyPlan,
    address: str,
    nodes: Sequence[Node],
    gpus_option: str | None,
    max_concurrent: int | None,
    waits_for_nodes: bool = False,
) -> ResourcePlan:
    """Allocate the resources that the study gets from the cluster, of which it has the nodes that are there now.

    waits_for_nodes: start without a node that can hold a run. Raises PlanError if --gpus or --max-concurrent
    contradicts the cluster, or if there is no such node and the study does not wait for one.
    """
    trainer, n_gpus = plan.base_config.trainer, plan.base_config.trainer.n_gpus_per_node
    bundles = make_bundles(n_gpus, trainer.cpu_threads, has_ranks=trainer.has_ranks)
    if gpus_option is not None:
        raise PlanError(
            f"--gpus {format_value(gpus_option)} names GPUs of this machine, but on a cluster Ray places the runs: "
            f"leave --gpus out."
        )
    resources.check_options(plan, gpus_option, max_concurrent)
    node_texts = [f"{node.name} has {node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes]
    node_summary = "; ".join(node_texts) or "it has no nodes"
    notes = [f"Ray cluster {address}: {node_summary}"]
    # Resources that other users hold now count as well, since Ray starts a run when they are free.
    run_counts = {node: count_fitting_runs(node, bundles) for node in find_usable_nodes(nodes, bundles)}
    if not run_counts:
        obstacle = (
            f"A run reserves {sum(bundle['CPU'] for bundle in bundles):g} CPU and {n_gpus:g} GPU on one node, because "
            f"nothing places its ranks on several, but no node of the cluster at {address} has that many "
            f"({node_summary})"
        )
        if not waits_for_nodes:
            raise PlanError(
                f"{obstacle}: type a smaller --gpus-per-exp, add larger nodes, or type --wait-for-nodes if they join "
                f"later."
            )
        notes.append(f"{obstacle}. The study waits for one.")
    # Without a node, one run per node is planned, and all runs at once.
    capacity = sum(run_counts.values()) or len(plan.trials)
    max_runs = min(max_concurrent or capacity, len(plan.trials))
    # The plan shows the slots of a node; Ray assigns the actual GPUs when a run starts.
    slots = [f"{node.name}:{number}" for node, count in run_counts.items() for number in range(count)] if n_gpus else []
    if n_gpus and not slots:
        slots = ["a node that joins"]
    gpus = tuple(Gpu("", "", node.gpu_type or "GPU") for node in run_counts)
    return ResourcePlan(
        bundles=bundles,
        cpus=int(sum(node.cpus for node in run_counts)),
        gpus=(),
        gpu_slots=tuple(slots),
        max_concurrent=min(capacity, max_runs),
        gpu_label=resources.format_gpu_label(n_gpus, gpus),
        notes=tuple(notes),
        cluster_address=address,
        runs_per_node=min(max(run_counts.values(), default=1), max_runs),
        is_elastic=max_concurrent is None,
        waits_for_nodes=waits_for_nodes,
    )
