"""The resources that a study gets on a machine or on a cluster."""

from typing import NamedTuple


class ResourcePlan(NamedTuple):
    """The resources of a study.

    Attributes:
        bundles: resources that one run reserves, one dict per bundle.
        cpus: number of CPUs that Ray may use.
        gpus: ids of the GPUs that Ray may use; empty on a cluster, where a run's GPUs are known only when it starts.
        gpu_slots: the GPUs of each concurrent run, one entry per slot.
        max_concurrent: maximum number of concurrent runs.
        gpu_label: published label of one run's GPUs.
        notes: remarks for the reader of the plan.
        cluster_address: address of the Ray cluster; empty for this machine, where Ray is started.
        runs_per_node: maximum number of concurrent runs per node of the cluster.
    """

    bundles: tuple[dict[str, float], ...]
    cpus: int
    gpus: tuple[str, ...]
    gpu_slots: tuple[str, ...]
    max_concurrent: int
    gpu_label: str
    notes: tuple[str, ...] = ()
    cluster_address: str = ""
    runs_per_node: int = 0
