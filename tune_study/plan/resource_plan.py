"""The resources that a study gets on a machine or on a cluster."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class ResourcePlan(NamedTuple):
    """The resources of a study.

    Attributes:
        bundles: resources that one run reserves, one dict per bundle.
        cpus: number of CPUs that Ray may use.
        gpus: ids of the GPUs that Ray may use; empty on a cluster, where Ray chooses a run's GPUs when it starts.
        gpu_slots: the GPUs of each concurrent run, one entry per slot; empty for runs without a GPU.
        max_concurrent: maximum number of concurrent trials.
        gpu_label: label of one run's GPUs in the published form, such as 1xH100.
        notes: remarks that the plan prints, such as settings without an effect.
        cluster_address: address of the Ray cluster; empty for this machine, on which the study starts Ray itself.
        runs_per_node: maximum number of concurrent runs per node of the cluster; 0 without a cluster.
        placement_settings: settings of the trials that follow from the memory of the GPUs and change no result.
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
    placement_settings: Mapping[str, object] = MappingProxyType({})
