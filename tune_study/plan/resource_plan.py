"""The resources that a study gets on a machine or on a cluster."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class ResourcePlan(NamedTuple):
    """The resources of a study."""

    bundles: tuple[dict[str, float], ...]
    """Resources that one run reserves, one dict per bundle."""
    cpus: int
    """Number of CPUs that Ray may use."""
    gpus: tuple[str, ...]
    """Ids of the GPUs that Ray may use; empty on a cluster, where Ray chooses a run's GPUs as it starts."""
    gpu_slots: tuple[str, ...]
    """The GPUs of each concurrent run, one entry per slot; empty for runs without a GPU."""
    max_concurrent: int
    """Maximum number of concurrent trials."""
    gpu_label: str
    """Label of one run's GPUs in the published form, such as 1xH100."""
    notes: tuple[str, ...] = ()
    """Remarks that the plan prints, such as settings without an effect."""
    cluster_address: str = ""
    """Address of the Ray cluster; empty for this machine, where the study starts Ray itself."""
    runs_per_node: int = 0
    """Maximum number of concurrent runs per node of the cluster; 0 without a cluster."""
    placement_settings: Mapping[str, object] = MappingProxyType({})
    """Settings of the trials that follow from the GPUs' memory and change no result."""
