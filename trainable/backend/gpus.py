"""What a run reserves of the GPUs of a node, and what its process sees of them."""

from collections.abc import MutableMapping, Sequence

from trainable.config.run_config import ConfigError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable with the settings of torch's memory allocator, and its earlier name."""
ALLOCATOR_SETTINGS = "expandable_segments:True,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
"""Every pass of a run has another size, which splits torch's usual blocks of GPU memory into holes that no later pass
fits. Buffers in pinned host memory are as large as tensors, and not rounded up to a power of two."""


def take_gpus(ids: Sequence[int | str], environ: MutableMapping[str, str]) -> None:
    """Show a process the GPUs that Ray gave it, and set up torch's allocator, before torch looks at either.

    ids: from `ray.get_gpu_ids`. Ray shows a process its GPUs itself, but not where the variable
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, as it often is for other trainers: there all runs of a node
    would train on its first GPU.
    """
    if not ids:
        return
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ids))
    if not any(name in environ for name in ALLOCATOR_VARIABLES):
        environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS


_MIN_GPU_FRACTION = 0.0001
"""Ray's resolution of fractions (its MIN_RESOURCE_GRANULARITY)."""


def make_bundles(n_gpus: float) -> tuple[dict[str, float], ...]:
    """Ray bundles that one run reserves: a CPU with no GPU or a fraction of one, or one such bundle per whole GPU.

    A run on several GPUs has one rank, and therefore one CPU, per GPU. Raises ConfigError for a number of GPUs that Ray
    cannot place.

    Example:
        >>> make_bundles(0.5)
        ({'CPU': 1.0, 'GPU': 0.5},)
        >>> make_bundles(2)
        ({'CPU': 1.0, 'GPU': 1.0}, {'CPU': 1.0, 'GPU': 1.0})
    """
    if n_gpus == 0:
        return ({"CPU": 1.0},)
    if n_gpus < _MIN_GPU_FRACTION:
        raise ConfigError(
            f"--gpus-per-exp {n_gpus:g} cannot be placed: the smallest fraction of a GPU in Ray is "
            f"{_MIN_GPU_FRACTION:g}. Type a fraction such as 0.5, or 1, 2, 4."
        )
    if n_gpus < 1:
        return ({"CPU": 1.0, "GPU": n_gpus},)
    # Ray reserves a fraction on a single GPU, so 1.5 GPUs cannot be one bundle.
    if n_gpus != int(n_gpus):
        raise ConfigError(
            f"--gpus-per-exp {n_gpus:g} cannot be placed: above 1, a run takes whole GPUs. "
            f"Type a fraction such as 0.5, or 1, 2, 4."
        )
    return ({"CPU": 1.0, "GPU": 1.0},) * int(n_gpus)
