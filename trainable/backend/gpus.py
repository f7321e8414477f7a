"""Which GPUs a run reserves on a node, and which of them its process sees."""

from collections.abc import MutableMapping, Sequence

from trainable.config.run_config import ConfigError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variable of torch's memory allocator, and its earlier name."""
ALLOCATOR_SETTINGS = "expandable_segments:True,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
"""Every pass of a run has a different size, which would fragment torch's usual blocks of GPU memory. Buffers in pinned
host memory are not rounded up to a power of two."""


def take_gpus(ids: Sequence[int | str], environ: MutableMapping[str, str]) -> None:
    """Make only the GPUs assigned by Ray visible and set up torch's allocator, before torch reads either variable.

    Ray usually does this itself, but not if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, as other trainers often
    require: then all runs of a node would train on its first GPU.
    """
    if not ids:
        return
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ids))
    if not any(name in environ for name in ALLOCATOR_VARIABLES):
        environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS


_MIN_GPU_FRACTION = 0.0001
"""Smallest fraction of a resource in Ray (its MIN_RESOURCE_GRANULARITY)."""


def make_bundles(n_gpus: float, n_cpus: int = 1, *, has_ranks: bool = True) -> tuple[dict[str, float], ...]:
    """Make the Ray bundles of a run: its CPUs, and with several GPUs, one CPU and a GPU per rank.

    A run without ranks starts the processes of its GPUs itself, so that these are in one bundle with all of its CPUs.

    Raises ConfigError for a number of GPUs that Ray cannot place.

    Example:
        >>> make_bundles(0.5)
        ({'CPU': 1.0, 'GPU': 0.5},)
        >>> make_bundles(2)
        ({'CPU': 1.0, 'GPU': 1.0}, {'CPU': 1.0, 'GPU': 1.0})
    """
    if n_gpus == 0:
        return ({"CPU": float(n_cpus)},)
    if n_gpus < _MIN_GPU_FRACTION:
        raise ConfigError(
            f"--gpus-per-exp {n_gpus:g} cannot be placed: the smallest fraction of a GPU in Ray is "
            f"{_MIN_GPU_FRACTION:g}. Type a fraction such as 0.5, or 1, 2, 4."
        )
    if n_gpus < 1:
        return ({"CPU": float(n_cpus), "GPU": n_gpus},)
    # Ray places a fraction on a single GPU, so 1.5 GPUs cannot be one bundle.
    if n_gpus != int(n_gpus):
        raise ConfigError(
            f"--gpus-per-exp {n_gpus:g} cannot be placed: above 1, a run takes whole GPUs. "
            f"Type a fraction such as 0.5, or 1, 2, 4."
        )
    return ({"CPU": 1.0, "GPU": 1.0},) * int(n_gpus) if has_ranks else ({"CPU": float(n_cpus), "GPU": n_gpus},)
