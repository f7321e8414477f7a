"""An existing Ray cluster: joined, never started or ended here; what its nodes have, and how many runs they hold."""

import logging
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from trainable.config.setting_types import format_value
from tune_study.host.gpus import Gpu
from tune_study.placement import resources
from tune_study.plan.allotment import ResourcePlan
from tune_study.plan.study_plan import PlanError, StudyPlan

_CONNECT_TIMEOUT_S = 10.0
_ACCELERATOR_PREFIX = "accelerator_type:"


class Node(NamedTuple):
    """A node that is alive. kind: of its GPUs, as Ray names it, like H100; empty where there are none or Ray is unsure.

    cpus, gpus: what Ray may give there, whoever has it now.
    """

    id: str
    name: str
    cpus: float
    gpus: float
    gpu_type: str


@contextmanager
def join_cluster(address: str | None) -> Iterator[tuple[Node, ...] | None]:
    """Joined to the cluster at `address` during the body: its nodes. None where there is no address. PlanError."""
    if address is None:
        yield None
        return
    _check_address(address)
    from tune_study.tune.run import prepare_environment

    prepare_environment((), joins_cluster=True)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise PlanError(
            f"No Ray cluster can be joined at --address {format_value(address)}: {reason} Type the address that `ray start` "
            f"or `ray up` printed, or --address auto on a machine of the cluster."
        ) from None
    try:
        yield parse_nodes(ray.nodes())
    finally:
        ray.shutdown()  # leaves the cluster, which goes on


def _check_address(address: str) -> None:
    """PlanError for what is no address, and where nothing answers: Ray itself would wait for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal() or int(port) > 65535:
        raise PlanError(
            f"--address {format_value(address)} is no address of a cluster: type host:port, as `ray start` printed it, or "
            f"auto on a machine of the cluster (a ray:// address is a client's: run the command on the cluster)."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise PlanError(
            f"Nothing answers at --address {format_value(address)} ({error.strerror or error}): type the address that "
            f"`ray start` printed, and check that this machine reaches it."
        ) from None


def parse_nodes(entries: Sequence[dict[str, Any]]) -> tuple[Node, ...]:
    """The nodes that are alive, as `ray.nodes()` lists them."""
    alive_entries = [entry for entry in entries if entry.get("Alive")]
    return tuple(
        Node(
            entry["NodeID"],
            f"{entry.get('NodeName') or entry['NodeManagerAddress']} ({entry['NodeID'][:6]})",
            entry["Resources"].get("CPU", 0.0),
            entry["Resources"].get("GPU", 0.0),
            next(
                (
                    name.removeprefix(_ACCELERATOR_PREFIX)
                    for name in entry["Resources"]
                    if name.startswith(_ACCELERATOR_PREFIX)
                ),
                "",
            ),
        )
        for entry in alive_entries
    )


def count_fitting_runs(node: Node, n_gpus: float) -> int:
    """How many runs of `n_gpus` a node holds at once: all that a run reserves is on one node."""
    cpus_per_run = len(resources.make_bundles(n_gpus))
    by_cpus = int(node.cpus // cpus_per_run)
    if n_gpus == 0:
        return by_cpus
    by_gpus = int(node.gpus) * math.floor(1 / n_gpus + 1e-9) if n_gpus < 1 else int(node.gpus // n_gpus)
    return min(by_cpus, by_gpus)


def find_usable_nodes(nodes: Sequence[Node], n_gpus: float) -> tuple[Node, ...]:
    """The nodes on which a run of `n_gpus` could be."""
    return tuple(node for node in nodes if count_fitting_runs(node, n_gpus))


def allocate_cluster(
    plan: StudyPlan, address: str, nodes: Sequence[Node], gpus_option: str | None, max_concurrent: int | None
) -> ResourcePlan:
    """What the study gets of the cluster, or PlanError. asked: the text of --gpus. limit: --max-concurrent."""
    n_gpus = plan.base_config.trainer.n_gpus_per_node
    bundles = resources.make_bundles(n_gpus)
    if gpus_option is not None:
        raise PlanError(
            f"--gpus {format_value(gpus_option)} names GPUs of this machine, and Ray places runs on a cluster: leave it out."
        )
    resources.check_device(plan.base_config.trainer.device, n_gpus, gpus_option)
    resources.check_max_concurrent(max_concurrent)
    usable_nodes = find_usable_nodes(nodes, n_gpus)
    node_summary = (
        "; ".join(f"{node.name} has {node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes) or "it has no node"
    )
    if not usable_nodes:
        raise PlanError(
            f"A run reserves {len(bundles)} CPU and {n_gpus:g} GPU on one node, and no node of the cluster at "
            f"{address} has as much ({node_summary}): type another --gpus-per-exp, or add nodes."
        )
    capacity = sum(count_fitting_runs(node, n_gpus) for node in usable_nodes)
    return ResourcePlan(
        bundles,
        int(sum(node.cpus for node in usable_nodes)),
        (),
        tuple(slot for node in usable_nodes for slot in _make_slots(node, n_gpus)),
        min(capacity, max_concurrent or capacity, len(plan.trials)),
        resources.format_gpu_label(n_gpus, tuple(Gpu("", "", node.gpu_type or "GPU") for node in usable_nodes)),
        (f"Ray cluster {address}: {node_summary}",),
        address,
        min(
            max(count_fitting_runs(node, n_gpus) for node in usable_nodes), max_concurrent or capacity, len(plan.trials)
        ),
    )


def _make_slots(node: Node, n_gpus: float) -> tuple[str, ...]:
    """The slots of a node, as the plan shows them: Ray gives the ids of GPUs when a run starts."""
    if n_gpus == 0:
        return ()
    return tuple(f"{node.name}:{number}" for number in range(count_fitting_runs(node, n_gpus)))
