"""An existing Ray cluster: joined, never started or ended here; what its nodes have, and how many runs they hold."""

import logging
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from trainable.config.setting_types import shown
from tune_study.host.gpus import Gpu
from tune_study.placement import resources
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import PlanError, StudyPlan

_ANSWER_S = 10.0
_KIND = "accelerator_type:"


class Node(NamedTuple):
    """A node that is alive. kind: of its GPUs, as Ray names it, like H100; empty where there are none or Ray is unsure.

    cpus, gpus: what Ray may give there, whoever has it now.
    """

    id: str
    name: str
    cpus: float
    gpus: float
    kind: str


@contextmanager
def joined(address: str | None) -> Iterator[tuple[Node, ...] | None]:
    """Joined to the cluster at `address` during the body: its nodes. None where there is no address. PlanError."""
    if address is None:
        yield None
        return
    _check_answer(address)
    from tune_study.tune.run import prepare_environment

    prepare_environment((), joins=True)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise PlanError(
            f"No Ray cluster can be joined at --address {shown(address)}: {reason} Type the address that `ray start` "
            f"or `ray up` printed, or --address auto on a machine of the cluster."
        ) from None
    try:
        yield read_nodes(ray.nodes())
    finally:
        ray.shutdown()  # leaves the cluster, which goes on


def _check_answer(address: str) -> None:
    """PlanError for what is no address, and where nothing answers: Ray itself would wait for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal() or int(port) > 65535:
        raise PlanError(
            f"--address {shown(address)} is no address of a cluster: type host:port, as `ray start` printed it, or "
            f"auto on a machine of the cluster (a ray:// address is a client's: run the command on the cluster)."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise PlanError(
            f"Nothing answers at --address {shown(address)} ({error.strerror or error}): type the address that "
            f"`ray start` printed, and check that this machine reaches it."
        ) from None


def read_nodes(entries: Sequence[dict[str, Any]]) -> tuple[Node, ...]:
    """The nodes that are alive, as `ray.nodes()` lists them."""
    alive = [entry for entry in entries if entry.get("Alive")]
    return tuple(
        Node(
            entry["NodeID"],
            f"{entry.get('NodeName') or entry['NodeManagerAddress']} ({entry['NodeID'][:6]})",
            entry["Resources"].get("CPU", 0.0),
            entry["Resources"].get("GPU", 0.0),
            next((name.removeprefix(_KIND) for name in entry["Resources"] if name.startswith(_KIND)), ""),
        )
        for entry in alive
    )


def fit(node: Node, n_gpus: float) -> int:
    """How many runs of `n_gpus` a node holds at once: all that a run reserves is on one node."""
    reserved = len(resources.bundles(n_gpus))
    by_cpus = int(node.cpus // reserved)
    if n_gpus == 0:
        return by_cpus
    by_gpus = int(node.gpus) * math.floor(1 / n_gpus + 1e-9) if n_gpus < 1 else int(node.gpus // n_gpus)
    return min(by_cpus, by_gpus)


def usable(nodes: Sequence[Node], n_gpus: float) -> tuple[Node, ...]:
    """The nodes on which a run of `n_gpus` could be."""
    return tuple(node for node in nodes if fit(node, n_gpus))


def allot(plan: StudyPlan, address: str, nodes: Sequence[Node], asked: str | None, limit: int | None) -> Allotment:
    """What the study gets of the cluster, or PlanError. asked: the text of --gpus. limit: --max-concurrent."""
    n_gpus = plan.base.trainer.n_gpus_per_node
    reserved = resources.bundles(n_gpus)
    if asked is not None:
        raise PlanError(
            f"--gpus {shown(asked)} names GPUs of this machine, and Ray places runs on a cluster: leave it out."
        )
    resources.check_device(plan.base.trainer.device, n_gpus, asked)
    resources.check_limit(limit)
    places = usable(nodes, n_gpus)
    there = "; ".join(f"{node.name} has {node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes) or "it has no node"
    if not places:
        raise PlanError(
            f"A run reserves {len(reserved)} CPU and {n_gpus:g} GPU on one node, and no node of the cluster at "
            f"{address} has as much ({there}): type another --gpus-per-exp, or add nodes."
        )
    room = sum(fit(node, n_gpus) for node in places)
    return Allotment(
        reserved,
        int(sum(node.cpus for node in places)),
        (),
        tuple(slot for node in places for slot in _slots(node, n_gpus)),
        min(room, limit or room, len(plan.trials)),
        resources.gpu_label(n_gpus, tuple(Gpu("", "", node.kind or "GPU") for node in places)),
        (f"Ray cluster {address}: {there}",),
        address,
        min(max(fit(node, n_gpus) for node in places), limit or room, len(plan.trials)),
    )


def _slots(node: Node, n_gpus: float) -> tuple[str, ...]:
    """The slots of a node, as the plan shows them: Ray gives the ids of GPUs when a run starts."""
    if n_gpus == 0:
        return ()
    return tuple(f"{node.name}:{number}" for number in range(fit(node, n_gpus)))
