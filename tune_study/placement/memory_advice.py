"""Advise on a study that does not fit: say why, suggest options that make it fit, and refuse it."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain, combinations

from search_spaces.declaration.study import Study
from trainable.runs.orphans import find_orphans
from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.placement.memory_plan import (
    MemoryPlan,
    RunModel,
    describe_excess,
    format_gib,
    override_if_valid,
    plan_runs_memory,
)
from tune_study.plan.errors import MisfitError
from tune_study.plan.study_plan import StudyPlan

_MAX_REMEDIES = 4
"""Maximum number of remedies in a message, which is one paragraph."""


def format_misfit(memory_plan: MemoryPlan, study: Study) -> str:
    """Say that the run does not fit, by how much, and what to type.

    study: the study of the run; remedies do not change its axis.
    """
    return f"DOES NOT FIT: {describe_excess(memory_plan)}. {_format_advice(memory_plan, study)}"


def explain_excess(memory_plan: MemoryPlan, study: Study) -> tuple[str, list[str]]:
    """Return (reason, remedies): why the runs do not fit their GPUs, and options each of which makes them fit.

    Options that change results least come first; the list is empty if no option helps. Both are empty if the runs fit
    or if the memory of the GPUs is unknown.
    """
    if memory_plan.fits or not memory_plan.capacity.is_known:
        return "", []
    return describe_excess(memory_plan), _find_remedies(memory_plan, study)


def _format_advice(memory_plan: MemoryPlan, study: Study) -> str:
    remedies = _find_remedies(memory_plan, study)
    if not remedies:
        return "No setting makes it fit: choose a smaller model with --model, or larger GPUs."
    return f"Any of these makes it fit: {'; '.join(remedies)}."


_CHANGES: tuple[Mapping[str, object], ...] = (
    {"model.enable_gradient_checkpointing": True},
    {"actor.entropy_from_logits_with_chunking": True},
    {"rollout.name": "vllm"},
    {"rollout.free_cache_engine": True},
    {"rollout.gpu_memory_utilization": None},
    {"rollout.kv_cache_gib": None},
    {"trainer.swap_to_host": None},
    {"rollout.enforce_eager": True},
    {"trainer.n_gpus_per_node": 1},
    {"trainer.n_gpus_per_node": 2},
    {"trainer.n_gpus_per_node": 4},
    {"trainer.n_gpus_per_node": 8},
    {"model.lora_rank": 64},
    {"critic.shared_trunk": True},
    {"algorithm.adv_estimator": "grpo"},
    {"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True},
    {
        "trainer.zero_stage": 3,
        "trainer.strategy": "deepspeed",
        "trainer.offload_optimizer": True,
        "trainer.offload_parameters": True,
    },
)
"""The settings of all possible remedies, in order of preference.

First come options that change no result, beginning with those that need no further GPU. Options that change how the
networks are trained follow. The last ones make the optimizer steps on the CPU, which takes minutes per training step.
"""


def _format_options(change: Mapping[str, object]) -> str:
    """Format settings as the options to type for them."""
    return " ".join(
        f"--gpus-per-exp {value}"
        if name == "trainer.n_gpus_per_node"
        else f"--set {name}={'null' if value is None else value}"
        for name, value in change.items()
    )


def _find_remedies(memory_plan: MemoryPlan, study: Study) -> list[str]:
    """Find up to _MAX_REMEDIES options that make the run fit: single changes first, then pairs and triples.

    A combination that contains an earlier remedy is left out. The search ends as soon as there are enough, because each
    of about a thousand combinations takes a memory plan.
    """
    # The arms differ in the axis, so a remedy must not set it to one value.
    usable_changes = [
        change
        for change in _CHANGES
        if not study.axis.swept_fields & change.keys() and _is_applicable(memory_plan, change)
    ]
    remedies: list[Mapping[str, object]] = []
    for combination in chain.from_iterable(combinations(usable_changes, count) for count in (1, 2, 3)):
        change = {name: value for settings in combination for name, value in settings.items()}
        # Changes of the same setting contradict each other.
        has_overlap = len(change) < sum(map(len, combination))
        if has_overlap or any(remedy.keys() <= change.keys() for remedy in remedies):
            continue
        config = override_if_valid(memory_plan.spec.ppo_config, change)
        if config is None:  # valid changes may exclude each other
            continue
        model = RunModel(replace(memory_plan.spec, config=config), memory_plan.shape, memory_plan.reference_shape)
        if plan_runs_memory([model], memory_plan.capacity, memory_plan.runs_per_node, memory_plan.max_gpus).fits:
            remedies.append(change)
        if len(remedies) == _MAX_REMEDIES:
            break
    return [_format_options(remedy) for remedy in remedies]


def _is_applicable(memory_plan: MemoryPlan, change: Mapping[str, object]) -> bool:
    """Check whether `change` is a possible remedy for the run.

    The change must be valid and have an effect. The run must keep at least its GPUs and get no more than there are. If
    it has adapters, their rank stays as the user chose it.
    """
    config = memory_plan.spec.ppo_config
    changed_config = override_if_valid(config, change)
    if changed_config is None or changed_config == config or (config.model.lora_rank and "model.lora_rank" in change):
        return False
    # Without a visible GPU, plan for one.
    max_gpus = max(memory_plan.max_gpus, 1)
    return config.trainer.n_gpus_per_node <= changed_config.trainer.n_gpus_per_node <= max_gpus


def check_memory(memory_plan: MemoryPlan, plan: StudyPlan, gpus: Sequence[Gpu]) -> None:
    """Raise MisfitError if the runs do not fit their GPUs, the host memory, or the free memory of `gpus`."""
    check_fits(memory_plan, plan.study)
    available_bytes = machine_checks.measure_available_memory()
    if memory_plan.host_bytes * memory_plan.runs_per_node > available_bytes:
        needed_text = format_gib(memory_plan.host_bytes * memory_plan.runs_per_node)
        raise MisfitError(
            f"{memory_plan.runs_per_node} runs at once need {needed_text} GiB of CPU memory, and "
            f"{format_gib(available_bytes)} GiB are available: type --max-concurrent with a smaller number, or free "
            f"memory."
        )
    # Orphans of an earlier start are terminated before the runs start, so their memory counts as free.
    ending_pids = {process.pid for process in find_orphans(plan.folder)}
    check_free_memory(memory_plan.peak * memory_plan.runs_per_gpu, gpus, ending_pids)


def check_fits(memory_plan: MemoryPlan, study: Study) -> None:
    """Raise MisfitError if the runs do not fit their GPUs. GPUs of unknown memory are not checked."""
    if memory_plan.capacity.is_known and not memory_plan.fits:
        raise MisfitError(
            f"The runs do not fit: {describe_excess(memory_plan)}. {_format_advice(memory_plan, study)} "
            f"--dry-run shows the whole plan; --gpu-memory-gib N plans for a GPU of another size."
        )


def check_free_memory(needed_bytes: int, gpus: Sequence[Gpu], ending_pids: AbstractSet[int]) -> None:
    """Raise MisfitError, naming the processes on it, if one of `gpus` has less than `needed_bytes` free.

    ending_pids: ids of processes that are terminated before the runs start. Their memory counts as free.
    """
    free_by_uuid = {entry.uuid: entry.free_mib for entry in machine_checks.query_gpu_memory()}
    processes = machine_checks.query_gpu_processes()
    for gpu in gpus:
        holders = [holder for holder in processes if holder.uuid == gpu.uuid]
        available_mib = free_by_uuid.get(gpu.uuid)
        if available_mib is None:
            continue  # nvidia-smi does not report this GPU, so nothing can be checked
        # nvidia-smi may not know how much a process uses (containers, MIG), and then nothing is added for it.
        available_mib += sum(holder.used_mib or 0 for holder in holders if holder.pid in ending_pids)
        if available_mib * 2**20 >= needed_bytes:
            continue
        holder_text = machine_checks.format_processes([holder for holder in holders if holder.pid not in ending_pids])
        raise MisfitError(
            f"GPU {gpu.id} has {available_mib / 1024:.1f} GiB free and the runs on it need {format_gib(needed_bytes)} "
            f"GiB; its memory is {holder_text}. End these processes if they are orphans, wait until they end, or "
            f"choose other GPUs with --gpus."
        )
