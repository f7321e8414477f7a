"""Check whether a study's runs fit their GPUs: the memory plan of `--dry-run`, remedies, and refusals."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from search_spaces.declaration.study import Study
from trainable.config.run_config import ConfigError, apply_overrides
from trainable.runs.orphans import find_orphans
from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.placement import memory
from tune_study.placement.memory import GIB, PHASES, Allocation
from tune_study.placement.model_size import ModelShape, read_model_shape
from tune_study.plan.errors import PlanError
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.study_plan import RunSpec, StudyPlan

ASSUMED_GIB = 80.0
"""GiB of a GPU's memory that the plan assumes if it is not known: that of an H100."""
_TIGHT_FRACTION = 0.95
"""Fraction of the budget above which the plan calls a fit tight: the allocator's fragmentation is not counted."""
_MAX_REMEDIES = 4
"""Maximum number of remedies in a message, which is one paragraph."""
_MAX_GPUS = 8
"""Assumed number of GPUs of a machine if the machine is unknown."""


class GpuCapacity(NamedTuple):
    """The memory of one GPU.

    size: in bytes. source: where the number comes from, for messages. is_known: False if the number is assumed, so that
    no run may be refused because of it.
    """

    size: int
    source: str
    is_known: bool


class MemoryPlan(NamedTuple):
    """Memory of the run of a study that needs most of it.

    Attributes:
        spec: the run.
        shape: shape of the run's model.
        reference_shape: shape of the reference of its KL terms, which may be another model.
        capacity: memory of each GPU.
        gpu_fraction: fraction of a GPU that a run gets, in (0, 1].
        budget: bytes of that fraction.
        allocations: items of the run's memory, see `memory.list_allocations`.
        host_bytes: host memory of all ranks of a run.
        runs_per_gpu, runs_per_node: concurrent runs on a GPU, and on the machine or a node.
        max_gpus: maximum number of GPUs per run that a remedy may suggest.
    """

    spec: RunSpec
    shape: ModelShape
    reference_shape: ModelShape
    capacity: GpuCapacity
    gpu_fraction: float
    budget: int
    allocations: tuple[Allocation, ...]
    host_bytes: int
    runs_per_gpu: int
    runs_per_node: int
    max_gpus: int

    @property
    def peak(self) -> int:
        """Bytes on each GPU in the phase that needs most."""
        return max(memory.sum_by_phase(self.allocations))

    @property
    def cache_shortfall(self) -> int:
        """Bytes that vLLM lacks for one conversation of full length; 0 if it lacks none, or for another sampler."""
        config = self.spec.ppo_config
        if config.rollout.name != "vllm":
            return 0
        # vLLM's memory must hold its weights, its work space and, as the smallest useful KV cache, one conversation.
        weight_bytes = sum(
            allocation.gpu_bytes[memory.ROLLOUT]
            for allocation in self.allocations
            if allocation.name.startswith("vLLM weights")
        )
        needed_bytes = weight_bytes + memory.compute_vllm_work_bytes(self.shape, config) + self._conversation_bytes
        return max(needed_bytes - int(config.rollout.gpu_memory_utilization * self.budget), 0)

    @property
    def max_conversations(self) -> int:
        """Concurrent conversations of full length for which vLLM's KV cache has memory."""
        cache_bytes = sum(
            allocation.gpu_bytes[memory.ROLLOUT]
            for allocation in self.allocations
            if allocation.name == "vLLM KV cache"
        )
        return cache_bytes // self._conversation_bytes

    @property
    def _conversation_bytes(self) -> int:
        config = self.spec.ppo_config
        return memory.compute_max_tokens(config) * memory.compute_token_kv_bytes(
            self.shape, memory.get_dtype_bytes(config)
        )

    @property
    def fits(self) -> bool:
        """Whether every phase fits the run's budget, and vLLM has memory for at least one conversation."""
        return self.peak <= self.budget and not self.cache_shortfall


def find_gpu_capacity(requested_gib: float | None, gpus: Sequence[Gpu]) -> GpuCapacity:
    """The GPU memory to plan for: --gpu-memory-gib, else the smallest of `gpus`, else ASSUMED_GIB.

    requested_gib: value of --gpu-memory-gib, None without the option; PlanError if it is not in (0, 4096]. gpus: the
    GPUs that the study uses.
    """
    if requested_gib is not None:
        # No GPU has more than 4096 GiB: a larger number was probably typed in MiB.
        if not 0 < requested_gib <= 4096:
            raise PlanError(
                f"--gpu-memory-gib {requested_gib:g} is not the memory of a GPU: type it in GiB, like "
                f"--gpu-memory-gib 80."
            )
        return GpuCapacity(int(requested_gib * GIB), "set by --gpu-memory-gib", is_known=True)
    uuids = {gpu.uuid for gpu in gpus if gpu.uuid}
    reported_totals = (
        [entry.total_mib for entry in machine_checks.query_gpu_memory() if entry.uuid in uuids] if uuids else []
    )
    sizes = [total for total in reported_totals if total is not None]
    # Every GPU must be reported: one that is not (a MIG device, for example) may be the smallest.
    if sizes and len(sizes) == len(gpus):
        return GpuCapacity(min(sizes) * 2**20, "from nvidia-smi", is_known=True)
    reason = "no GPU is visible" if not gpus else "nvidia-smi does not report it"
    source = f"assumed, because {reason}; type --gpu-memory-gib N to plan for another"
    return GpuCapacity(int(ASSUMED_GIB * GIB), source, is_known=False)


def plan_memory(
    plan: StudyPlan, resource_plan: ResourcePlan, capacity: GpuCapacity, environ: Mapping[str, str]
) -> MemoryPlan | None:
    """The memory plan of the run that needs most; None for runs without GPUs, or if no model has a known shape."""
    if not resource_plan.gpu_slots:
        return None
    memory_plans = []
    # The memory of a run does not depend on its seed: one run per arm is enough.
    for arm_spec in {spec.arm: spec for spec in plan.runs}.values():
        shape = read_model_shape(arm_spec.ppo_config.model.path, environ)
        # A reference of its own that is not downloaded is planned with the policy's size.
        reference_shape = read_model_shape(arm_spec.ppo_config.model_paths[-1], environ) or shape
        if shape is not None and reference_shape is not None:
            # A remedy may use all GPUs of this machine. Their number is unknown if the GPU is assumed, and on a
            # cluster, whose resource plan has no ids of GPUs.
            max_gpus = (capacity.is_known and len(resource_plan.gpus)) or _MAX_GPUS
            # Only a cluster has runs_per_node; without one, all runs are on this machine.
            runs_per_node = min(
                resource_plan.runs_per_node or resource_plan.max_concurrent, resource_plan.max_concurrent
            )
            memory_plans.append(plan_run_memory(arm_spec, shape, reference_shape, capacity, runs_per_node, max_gpus))
    # A run may have the lower peak and still not fit, because vLLM's cache is too small.
    return max(memory_plans, key=lambda memory_plan: (not memory_plan.fits, memory_plan.peak), default=None)


def plan_run_memory(
    spec: RunSpec,
    shape: ModelShape,
    reference_shape: ModelShape,
    capacity: GpuCapacity,
    runs_per_node: int,
    max_gpus: int,
) -> MemoryPlan:
    """The memory plan of one run. The arguments are the fields of the same names in `MemoryPlan`."""
    n_gpus = spec.ppo_config.trainer.n_gpus_per_node
    gpu_fraction = min(n_gpus, 1.0)
    budget = int(gpu_fraction * capacity.size)
    allocations = memory.list_allocations(shape, spec.ppo_config, budget, reference_shape)
    # 1e-9: a rounding error in 1 / fraction must not cost a run.
    runs_per_gpu = min(int(1 / gpu_fraction + 1e-9), runs_per_node)
    host_bytes = memory.compute_host_bytes(allocations, spec.ppo_config)
    return MemoryPlan(
        spec,
        shape,
        reference_shape,
        capacity,
        gpu_fraction,
        budget,
        allocations,
        host_bytes,
        runs_per_gpu,
        runs_per_node,
        max_gpus,
    )


def make_memory_table(memory_plan: MemoryPlan) -> tuple[tuple[str, ...], list[list[str]]]:
    """Column names and rows of the plan's table, in GiB. Phases that the run does not have are left out.

    The last two rows are the sum of each column, and how much of it is over the budget.
    """
    has_critic = "critic" in memory.count_trained_parameters(memory_plan.shape, memory_plan.spec.ppo_config)
    phases = [number for number, name in enumerate(PHASES) if has_critic or not name.startswith("critic")]
    # Without sharding, the start needs no more memory than the phases after it.
    if not memory.shards_weights(memory_plan.spec.ppo_config):
        phases.remove(memory.START)
    rows = [
        [
            allocation.name,
            *(_format_cell(allocation.gpu_bytes[phase]) for phase in phases),
            _format_cell(allocation.host_bytes),
        ]
        for allocation in memory_plan.allocations
    ]
    phase_totals = memory.sum_by_phase(memory_plan.allocations)
    rows.append(
        [
            "sum",
            *(_format_gib(phase_totals[phase]) for phase in phases),
            _format_cell(sum(allocation.host_bytes for allocation in memory_plan.allocations)),
        ]
    )
    excess_cells = [
        ""
        if phase_totals[phase] <= memory_plan.budget
        else f"{_format_gib(phase_totals[phase] - memory_plan.budget)} over"
        for phase in phases
    ]
    rows.append([f"of {_format_gib(memory_plan.budget)}", *excess_cells, ""])
    return ("GiB on each GPU", *(PHASES[phase] for phase in phases), "host"), rows


def format_memory_plan(memory_plan: MemoryPlan, study: Study) -> list[str]:
    """The plan in sentences: the run's budget, the memory of vLLM, host memory, and at the end the verdict.

    study: the study of the run; its axis is not changed by a remedy.
    """
    config = memory_plan.spec.ppo_config
    gpu_text = f"GPU with {_format_gib(memory_plan.capacity.size)} GiB ({memory_plan.capacity.source})"
    sentences = [f"Memory: {gpu_text}; {_format_gpu_fraction(memory_plan)}"]
    if config.rollout.name == "vllm":
        sentences.append(_format_vllm_memory(memory_plan))
    if memory_plan.shape.is_counted:
        sentences.append(
            "The weights are counted on a model that is built from its config.json. The memory of its passes is "
            "estimated as for a Qwen2 of the same widths; its attention may need more."
        )
    if memory_plan.host_bytes:  # only of a sleeping vLLM and of offloading
        all_runs_text = _format_gib(memory_plan.host_bytes * memory_plan.runs_per_node)
        sentences.append(
            f"Extra CPU memory: {_format_gib(memory_plan.host_bytes)} GiB for each run, {all_runs_text} GiB for "
            f"{memory_plan.runs_per_node} at once."
        )
    saving_text = _format_gib(memory.compute_saving_bytes(memory_plan.shape, config))
    sentences.append(
        f"CPU memory while a run saves a checkpoint: {saving_text} GiB more. Loading reads one tensor at a time."
    )
    return [*sentences, format_verdict(memory_plan, study)]


def _format_gpu_fraction(memory_plan: MemoryPlan) -> str:
    ranks = memory.count_ranks(memory_plan.spec.ppo_config)
    largest_run = f"the run that needs most is {memory_plan.spec.run_id}"
    if memory_plan.gpu_fraction < 1:
        return f"each run gets {memory_plan.gpu_fraction:g} of it, {_format_gib(memory_plan.budget)} GiB; {largest_run}"
    return f"each run gets {ranks} whole GPU{'s' * (ranks > 1)}; {largest_run}"


def _format_vllm_memory(memory_plan: MemoryPlan) -> str:
    rollout = memory_plan.spec.ppo_config.rollout
    vllm_bytes = rollout.gpu_memory_utilization * memory_plan.budget
    budget_name = "the run's memory" if memory_plan.gpu_fraction < 1 else "the GPU"
    fraction_text = f"gpu_memory_utilization {rollout.gpu_memory_utilization:g} of {budget_name}"
    text = f"vLLM: {fraction_text}, {_format_gib(vllm_bytes)} GiB"
    if memory_plan.cache_shortfall:
        return f"{text}: {_format_gib(memory_plan.cache_shortfall)} GiB too little for one conversation"
    max_tokens = memory.compute_max_tokens(memory_plan.spec.ppo_config)
    capacity_text = f"{memory_plan.max_conversations} conversations of {max_tokens} tokens at once"
    sleep_text = "; it frees the GPU during the update" if rollout.free_cache_engine else ""
    return f"{text}: {capacity_text}{sleep_text}"


def format_verdict(memory_plan: MemoryPlan, study: Study) -> str:
    """The verdict: that the run fits and how tightly, or by how much it exceeds the budget and what to type."""
    worst_phase = _find_worst_phase(memory_plan)
    if memory_plan.fits:
        used_fraction = memory_plan.peak / memory_plan.budget
        tight_note = (
            "; this is tight, because fragmentation in the allocator is not counted"
            if used_fraction > _TIGHT_FRACTION
            else ""
        )
        used_text = f"{_format_gib(memory_plan.peak)} of {_format_gib(memory_plan.budget)} GiB"
        return f"Fits: {used_text} at its peak ({worst_phase}){tight_note}"
    return f"DOES NOT FIT: {_format_excess(memory_plan)}. {_format_advice(memory_plan, study)}"


def _find_worst_phase(memory_plan: MemoryPlan) -> str:
    phase_totals = memory.sum_by_phase(memory_plan.allocations)
    return PHASES[phase_totals.index(max(phase_totals))]


def _format_excess(memory_plan: MemoryPlan) -> str:
    """Why the run does not fit: the largest items of the worst phase, or that vLLM has too little memory."""
    # Every phase fits its budget, so only vLLM's cache can be too small.
    if memory_plan.peak <= memory_plan.budget:
        return f"vLLM lacks {_format_gib(memory_plan.cache_shortfall)} GiB for one conversation"
    phase = PHASES.index(_find_worst_phase(memory_plan))
    largest_allocations = sorted(
        memory_plan.allocations, key=lambda allocation: allocation.gpu_bytes[phase], reverse=True
    )[:5]  # the table that --dry-run prints has all of them
    allocation_text = ", ".join(
        f"{allocation.name} {_format_gib(allocation.gpu_bytes[phase])}"
        for allocation in largest_allocations
        if allocation.gpu_bytes[phase]
    )
    used_text = f"{_format_gib(memory_plan.peak)} GiB of {_format_gib(memory_plan.budget)}"
    return f"{PHASES[phase]} takes {used_text} ({allocation_text}, ...)"


def explain_excess(memory_plan: MemoryPlan, study: Study) -> tuple[str, list[str]]:
    """(reason, remedies): why the runs do not fit their GPUs, and options each of which makes them fit.

    The options that change results least come first. The list is empty if no option helps. The reason is empty, and so
    is the list, if the runs fit or if the memory of the GPUs is unknown.
    """
    if memory_plan.fits or not memory_plan.capacity.is_known:
        return "", []
    return _format_excess(memory_plan), _find_remedies(memory_plan, study)


def _find_remedies(memory_plan: MemoryPlan, study: Study) -> list[str]:
    return list(itertools.islice(_iterate_remedies(memory_plan, study), _MAX_REMEDIES))


def _format_advice(memory_plan: MemoryPlan, study: Study) -> str:
    remedies = _find_remedies(memory_plan, study)
    if not remedies:
        return "No setting makes it fit: choose a smaller model with --model, or larger GPUs."
    return f"Any of these makes it fit: {'; '.join(remedies)}."


_CHANGES: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("--gpus-per-exp 1", {"trainer.n_gpus_per_node": 1}),
    ("--set model.enable_gradient_checkpointing=True", {"model.enable_gradient_checkpointing": True}),
    ("--set actor.entropy_from_logits_with_chunking=True", {"actor.entropy_from_logits_with_chunking": True}),
    ("--set rollout.name=vllm", {"rollout.name": "vllm"}),
    ("--set rollout.free_cache_engine=True", {"rollout.free_cache_engine": True}),
    ("--gpu-memory-utilization 0.3", {"rollout.gpu_memory_utilization": 0.3}),
    ("--gpu-memory-utilization 0.15", {"rollout.gpu_memory_utilization": 0.15}),
    ("--gpu-memory-utilization 0.8", {"rollout.gpu_memory_utilization": 0.8}),
    ("--gpus-per-exp 2", {"trainer.n_gpus_per_node": 2}),
    ("--gpus-per-exp 4", {"trainer.n_gpus_per_node": 4}),
    ("--gpus-per-exp 8", {"trainer.n_gpus_per_node": 8}),
    ("--set trainer.zero_stage=2", {"trainer.zero_stage": 2}),
    ("--set trainer.zero_stage=3", {"trainer.zero_stage": 3}),
    (
        "--set trainer.strategy=deepspeed --set trainer.offload_optimizer=True",
        {"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True},
    ),
    ("--set model.lora_rank=64", {"model.lora_rank": 64}),
    (
        "--set trainer.zero_stage=3 --set trainer.strategy=deepspeed --set trainer.offload_optimizer=True "
        "--set trainer.offload_parameters=True",
        {
            "trainer.zero_stage": 3,
            "trainer.strategy": "deepspeed",
            "trainer.offload_optimizer": True,
            "trainer.offload_parameters": True,
        },
    ),
    ("--set critic.shared_trunk=True", {"critic.shared_trunk": True}),
    ("--set algorithm.adv_estimator=grpo", {"algorithm.adv_estimator": "grpo"}),
)
"""(option as it is typed, settings that it changes) for every remedy that may be suggested, in the order of preference.

First come options that change no result, and among these the ones that need no further GPU. Options that change how the
networks are trained come last. gpu_memory_utilization occurs in both directions: a lower value reduces the peak of the
rollout, and a higher one makes room for vLLM's KV cache.
"""


def _iterate_remedies(memory_plan: MemoryPlan, study: Study) -> Iterator[str]:
    """Yield the options that make the run fit: single changes first, then pairs and triples.

    A combination that contains an earlier one is left out. This is a generator because callers need only the first few,
    and every one of the thousand combinations is a memory plan.
    """
    # The arms of a study differ in its axis, so a remedy must not give all of them the same value.
    usable_changes = [
        change
        for change in _CHANGES
        if not study.axis.swept_fields & change[1].keys() and _is_applicable(memory_plan, change[1])
    ]
    sufficient_changes: list[set[str]] = []
    for count in (1, 2, 3):
        for combination in itertools.combinations(usable_changes, count):
            change = {name: value for _, settings in combination for name, value in settings.items()}
            # Two changes that set the same setting contradict each other.
            has_overlap = len(change) < sum(len(settings) for _, settings in combination)
            if (
                has_overlap
                or any(sufficient_names <= change.keys() for sufficient_names in sufficient_changes)
                or not _would_fit(memory_plan, change)
            ):
                continue
            sufficient_changes.append(set(change))
            yield " ".join(text for text, _ in combination)


def _is_applicable(memory_plan: MemoryPlan, change: Mapping[str, object]) -> bool:
    """Whether `change` is a possible remedy for the run.

    The change must be valid and have an effect. The run must keep at least its GPUs and get no more than there are. If
    the run has adapters, their rank stays as the user chose it.
    """
    config = memory_plan.spec.ppo_config
    try:
        changed_config = apply_overrides(config, change)
    except ConfigError:
        return False
    n_gpus = changed_config.trainer.n_gpus_per_node
    if config.model.lora_rank and "model.lora_rank" in change:
        return False
    # Without a visible GPU, the plan is made for one.
    return changed_config != config and config.trainer.n_gpus_per_node <= n_gpus <= max(memory_plan.max_gpus, 1)


def _would_fit(memory_plan: MemoryPlan, change: Mapping[str, object]) -> bool:
    """Whether the run fits with a change, according to the same memory plan."""
    try:
        config = apply_overrides(memory_plan.spec.ppo_config, change)
    except ConfigError:  # changes that are valid one by one may exclude each other
        return False
    return plan_run_memory(
        replace(memory_plan.spec, config=config),
        memory_plan.shape,
        memory_plan.reference_shape,
        memory_plan.capacity,
        memory_plan.runs_per_node,
        memory_plan.max_gpus,
    ).fits


def check_memory(memory_plan: MemoryPlan, plan: StudyPlan, gpus: Sequence[Gpu]) -> None:
    """Raise PlanError if the runs do not fit their GPUs, the host memory, or the free memory of `gpus`."""
    check_fits(memory_plan, plan.study)
    available_bytes = machine_checks.measure_available_memory()
    if memory_plan.host_bytes * memory_plan.runs_per_node > available_bytes:
        needed_text = _format_gib(memory_plan.host_bytes * memory_plan.runs_per_node)
        raise PlanError(
            f"{memory_plan.runs_per_node} runs at once need {needed_text} GiB of CPU memory, and "
            f"{_format_gib(available_bytes)} GiB are available: type --max-concurrent with a smaller number, or free "
            f"memory."
        )
    # Orphans of an earlier start of this study are terminated before its runs start, so their memory counts as free.
    ending_pids = {process.pid for process in find_orphans(plan.folder)}
    check_free_memory(memory_plan.peak * memory_plan.runs_per_gpu, gpus, ending_pids)


def check_fits(memory_plan: MemoryPlan, study: Study) -> None:
    """Raise PlanError if the runs do not fit their GPUs. GPUs of unknown memory are not judged."""
    if memory_plan.capacity.is_known and not memory_plan.fits:
        raise PlanError(
            f"The runs do not fit: {_format_excess(memory_plan)}. {_format_advice(memory_plan, study)} "
            f"--dry-run shows the whole plan; --gpu-memory-gib N plans for a GPU of another size."
        )


def check_free_memory(needed_bytes: int, gpus: Sequence[Gpu], ending_pids: AbstractSet[int]) -> None:
    """Raise PlanError if one of `gpus` has less than `needed_bytes` free; the message names the processes on it.

    ending_pids: ids of processes that are terminated before the runs start. Their memory counts as free.
    """
    free_by_uuid = {entry.uuid: entry.free_mib for entry in machine_checks.query_gpu_memory()}
    processes = machine_checks.query_gpu_processes()
    for gpu in gpus:
        holders = [holder for holder in processes if holder.uuid == gpu.uuid]
        available_mib = free_by_uuid.get(gpu.uuid)
        if available_mib is None:
            continue  # nvidia-smi does not report this GPU, so nothing can be checked
        # nvidia-smi may not know how much a process uses (containers, MIG); then nothing is added for it.
        available_mib += sum(holder.used_mib or 0 for holder in holders if holder.pid in ending_pids)
        if available_mib * 2**20 >= needed_bytes:
            continue
        holder_text = machine_checks.format_processes([holder for holder in holders if holder.pid not in ending_pids])
        raise PlanError(
            f"GPU {gpu.id} has {available_mib / 1024:.1f} GiB free and the runs on it need {_format_gib(needed_bytes)} "
            f"GiB; its memory is {holder_text}. End these processes if they are orphans, wait until they end, or "
            f"choose other GPUs with --gpus."
        )


def _format_gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _format_cell(size: int) -> str:
    return _format_gib(size) if size else "-"
