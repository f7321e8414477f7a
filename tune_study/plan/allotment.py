"""What a study is given of a machine or of a cluster."""

from typing import NamedTuple


class ResourcePlan(NamedTuple):
    """What a study is given.

    bundles: what one run reserves, one dict a bundle. cpus, gpus: what Ray may use. slots: the GPUs that runs share,
    one entry a slot. max_concurrent: runs at once. gpu_label: the published label of one run's GPUs. notes: what a
    reader of the plan should know. cluster: the address of the Ray cluster whose it is, empty for this machine, where
    Ray is started; its GPUs have no ids before a run has them. a_node: runs at once on one node of it.
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
