"""What the process of a run sees of the GPUs of its node."""

from collections.abc import MutableMapping, Sequence

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
