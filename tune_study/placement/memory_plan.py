"""Whether a study's runs fit their GPUs: the memory plan of `--dry-run`, what would make it fit, and refusals."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from search_spaces.declaration.study import Study
from trainable.config.run_config import ConfigError, apply_overrides
from trainable.runs.orphans import find_orphans
from tune_study.host import machine
from tune_study.host.gpus import Gpu
from tune_study.placement import memory
from tune_study.placement.memory import GIB, PHASES, Allocation
from tune_study.placement.model_size import ModelShape, read_model_shape
from tune_study.plan.allotment import ResourcePlan
from tune_study.plan.study_plan import PlanError, RunSpec, StudyPlan

ASSUMED_GIB = 80.0
"""The card of a plan where no GPU's memory is known."""
_TIGHT_FRACTION = 0.95
_MAX_REMEDIES = 4
_MAX_GPUS = 8
"""Of one machine, where it is not known."""


class GpuCapacity(NamedTuple):
    """One GPU's memory in bytes, and where the number is from. is_known: False where it is assumed."""

    size: int
    source: str
    is_known: bool


class MemoryPlan(NamedTuple):
    """The run of a study that takes most memory, on its GPUs.

    spec: that run. shape: of its model. card: of each GPU. share: of a card that a run has, in (0, 1]. budget: bytes
    of that share. parts: see `memory.parts`. host: bytes of all ranks of a run in the host's memory. a_gpu, a_node:
    runs at once on a GPU, and on the machine. most: GPUs that a run may be advised to take.
    """

    spec: RunSpec
    shape: ModelShape
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
        """Bytes on each GPU at the moment that takes most."""
        return max(memory.sum_by_phase(self.allocations))

    @property
    def cache_shortfall(self) -> int:
        """Bytes that vLLM lacks to hold one conversation of full length; 0 where it does, and for another sampler."""
        config = self.spec.ppo_config
        if config.rollout.name != "vllm":
            return 0
        weight_bytes = sum(
            allocation.gpu_bytes[memory.ROLLOUT]
            for allocation in self.allocations
            if allocation.name.startswith("vLLM weights")
        )
        needed_bytes = weight_bytes + memory.compute_vllm_work_bytes(self.shape, config) + self._conversation_bytes
        return max(needed_bytes - int(config.rollout.gpu_memory_utilization * self.budget), 0)

    @property
    def max_conversations(self) -> int:
        """Conversations of full length that vLLM's cache holds at once."""
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
        """Whether every moment fits the run's share, and vLLM holds at least one conversation."""
        return self.peak <= self.budget and not self.cache_shortfall


def find_gpu_capacity(requested_gib: float | None, gpus: Sequence[Gpu]) -> GpuCapacity:
    """The card to plan for: --gpu-memory-gib, else the smallest of `gpus`, else ASSUMED_GIB. asked: in GiB."""
    if requested_gib is not None:
        if not 0 < requested_gib <= 4096:
            raise PlanError(
                f"--gpu-memory-gib {requested_gib:g} is no card: type its memory in GiB, like --gpu-memory-gib 80."
            )
        return GpuCapacity(int(requested_gib * GIB), "asked for by --gpu-memory-gib", True)
    uuids = {gpu.uuid for gpu in gpus if gpu.uuid}
    reported_totals = [entry.total_mib for entry in machine.query_gpu_memory() if entry.uuid in uuids] if uuids else []
    sizes = [total for total in reported_totals if total is not None]
    if sizes and len(sizes) == len(gpus):
        return GpuCapacity(min(sizes) * 2**20, "as nvidia-smi says", True)
    reason = "no GPU is visible" if not gpus else "nvidia-smi does not say"
    return GpuCapacity(int(ASSUMED_GIB * GIB), f"assumed, since {reason}; --gpu-memory-gib N plans for another", False)


def plan_memory(
    plan: StudyPlan, resource_plan: ResourcePlan, capacity: GpuCapacity, environ: Mapping[str, str]
) -> MemoryPlan | None:
    """The memory plan of the run that takes most; None for runs without GPUs and for a model of unknown shape."""
    if not resource_plan.gpu_slots:
        return None
    memory_plans = []
    for arm_spec in {spec.arm: spec for spec in plan.runs}.values():
        shape = read_model_shape(arm_spec.ppo_config.model.path, environ)
        if shape is not None:
            max_gpus = (capacity.is_known and len(resource_plan.gpus)) or _MAX_GPUS
            runs_per_node = min(
                resource_plan.runs_per_node or resource_plan.max_concurrent, resource_plan.max_concurrent
            )
            memory_plans.append(plan_run_memory(arm_spec, shape, capacity, runs_per_node, max_gpus))
    return max(memory_plans, key=lambda each: (not each.fits, each.peak), default=None)


def plan_run_memory(
    spec: RunSpec, shape: ModelShape, capacity: GpuCapacity, runs_per_node: int, max_gpus: int
) -> MemoryPlan:
    """The memory plan of one run. at_once: runs that the study has on the machine at a time. most: see MemoryPlan."""
    n_gpus = spec.ppo_config.trainer.n_gpus_per_node
    gpu_fraction = min(n_gpus, 1.0)
    budget = int(gpu_fraction * capacity.size)
    allocations = memory.list_allocations(shape, spec.ppo_config, budget)
    runs_per_gpu = min(int(1 / gpu_fraction + 1e-9), runs_per_node)
    host_bytes = memory.compute_host_bytes(allocations, spec.ppo_config)
    return MemoryPlan(
        spec, shape, capacity, gpu_fraction, budget, allocations, host_bytes, runs_per_gpu, runs_per_node, max_gpus
    )


def make_memory_table(memory_plan: MemoryPlan) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and rows of the plan, in GiB; moments that the run has not are left out."""
    has_critic = "critic" in memory.count_trained_parameters(memory_plan.shape, memory_plan.spec.ppo_config)
    phases = [number for number, name in enumerate(PHASES) if has_critic or not name.startswith("critic")]
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
            *(_format_gib(phase_totals[moment]) for moment in phases),
            _format_cell(sum(part.host_bytes for part in memory_plan.allocations)),
        ]
    )
    excess_cells = [
        ""
        if phase_totals[moment] <= memory_plan.budget
        else f"{_format_gib(phase_totals[moment] - memory_plan.budget)} over"
        for moment in phases
    ]
    rows.append([f"of {_format_gib(memory_plan.budget)}", *excess_cells, ""])
    return ("GiB on each GPU", *(PHASES[moment] for moment in phases), "host"), rows


def format_memory_plan(memory_plan: MemoryPlan, study: Study) -> list[str]:
    """The plan in sentences: the share, what vLLM is given, and whether it fits."""
    config = memory_plan.spec.ppo_config
    sentences = [
        f"memory: a card of {_format_gib(memory_plan.capacity.size)} GiB ({memory_plan.capacity.source}); {_format_gpu_fraction(memory_plan)}"
    ]
    if config.rollout.name == "vllm":
        sentences.append(_format_vllm_memory(memory_plan))
    if memory_plan.shape.is_counted:
        sentences.append(
            "weights are counted over the model of its config.json; what its passes hold is estimated as that of a "
            "Qwen2 of its widths, and its attention may hold more"
        )
    if memory_plan.host_bytes:
        needed_text = f"{_format_gib(memory_plan.host_bytes)} GiB a run, {_format_gib(memory_plan.host_bytes * memory_plan.runs_per_node)} for {memory_plan.runs_per_node} at once"
        sentences.append(f"host memory beside the usual: {needed_text}")
    saving_text = _format_gib(memory.compute_saving_bytes(memory_plan.shape, config))
    sentences.append(
        f"host memory while a run saves its state: {saving_text} GiB more; loading one takes a tensor at a time"
    )
    return [*sentences, format_verdict(memory_plan, study)]


def _format_gpu_fraction(memory_plan: MemoryPlan) -> str:
    ranks = memory.count_ranks(memory_plan.spec.ppo_config)
    largest_run = f"the run that takes most is {memory_plan.spec.run_id}"
    if memory_plan.gpu_fraction < 1:
        return f"a run has {memory_plan.gpu_fraction:g} of it, {_format_gib(memory_plan.budget)} GiB; {largest_run}"
    return f"a run has {ranks} whole card{'s' * (ranks > 1)}; {largest_run}"


def _format_vllm_memory(memory_plan: MemoryPlan) -> str:
    rollout = memory_plan.spec.ppo_config.rollout
    vllm_bytes = rollout.gpu_memory_utilization * memory_plan.budget
    budget_name = "the run's share" if memory_plan.gpu_fraction < 1 else "the card"
    text = f"vLLM: gpu_memory_utilization {rollout.gpu_memory_utilization:g} of {budget_name}, {_format_gib(vllm_bytes)} GiB"
    if memory_plan.cache_shortfall:
        return f"{text}: {_format_gib(memory_plan.cache_shortfall)} GiB too little for one conversation"
    capacity_text = f"{memory_plan.max_conversations} conversations of {memory.compute_max_tokens(memory_plan.spec.ppo_config)} tokens at once"
    sleep_text = "; it leaves the GPU during the update" if rollout.free_cache_engine else ""
    return f"{text}: {capacity_text}{sleep_text}"


def format_verdict(memory_plan: MemoryPlan, study: Study) -> str:
    """One sentence: it fits and by how much, or what is too much and what to type."""
    worst_phase = _find_worst_phase(memory_plan)
    if memory_plan.fits:
        used_fraction = memory_plan.peak / memory_plan.budget
        tight_note = (
            "; that is tight, since what the allocator loses between blocks is not counted"
            if used_fraction > _TIGHT_FRACTION
            else ""
        )
        return f"fits: {_format_gib(memory_plan.peak)} of {_format_gib(memory_plan.budget)} GiB at its highest ({worst_phase}){tight_note}"
    return f"DOES NOT FIT: {_format_excess(memory_plan)}. {_format_advice(memory_plan, study)}"


def _find_worst_phase(memory_plan: MemoryPlan) -> str:
    phase_totals = memory.sum_by_phase(memory_plan.allocations)
    return PHASES[phase_totals.index(max(phase_totals))]


def _format_excess(memory_plan: MemoryPlan) -> str:
    """What takes most at the worst moment, or that vLLM has too little."""
    if memory_plan.peak <= memory_plan.budget:
        return f"vLLM lacks {_format_gib(memory_plan.cache_shortfall)} GiB for one conversation"
    phase = PHASES.index(_find_worst_phase(memory_plan))
    largest_allocations = sorted(
        memory_plan.allocations, key=lambda allocation: allocation.gpu_bytes[phase], reverse=True
    )[:5]
    allocation_text = ", ".join(
        f"{part.name} {_format_gib(part.gpu_bytes[phase])}" for part in largest_allocations if part.gpu_bytes[phase]
    )
    return f"{PHASES[phase]} takes {_format_gib(memory_plan.peak)} GiB of {_format_gib(memory_plan.budget)} ({allocation_text}, ...)"


def explain_excess(memory_plan: MemoryPlan, study: Study) -> tuple[str, list[str]]:
    """What is too much for the cards that the runs are planned for, and options to type any of which makes it fit.

    The options are most useful first and none where nothing helps. An empty text where the runs fit, or where the
    memory of the cards is not known.
    """
    if memory_plan.fits or not memory_plan.capacity.is_known:
        return "", []
    return _format_excess(memory_plan), _find_remedies(memory_plan, study)


def _find_remedies(memory_plan: MemoryPlan, study: Study) -> list[str]:
    return list(itertools.islice(_iterate_remedies(memory_plan, study), _MAX_REMEDIES))


def _format_advice(memory_plan: MemoryPlan, study: Study) -> str:
    remedies = _find_remedies(memory_plan, study)
    if not remedies:
        return "No setting makes it fit: choose a smaller model with --model, or larger cards."
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
"""What can be typed to take less of each GPU, and the settings that it changes; those that change no result first."""


def _iterate_remedies(memory_plan: MemoryPlan, study: Study) -> Iterator[str]:
    """Changes that make it fit, the fewest at once first, without those that change all that one before them does."""
    usable_changes = [
        change
        for change in _CHANGES
        if not study.axis.swept_fields & change[1].keys() and _is_applicable(memory_plan, change[1])
    ]
    sufficient_changes: list[set[str]] = []
    for count in (1, 2, 3):
        for combination in itertools.combinations(usable_changes, count):
            change = {name: value for _, settings in combination for name, value in settings.items()}
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
    """Whether `change` changes something, and gives a run no fewer GPUs than it has, nor more than there are.

    Adapters are not made larger than they are.
    """
    config = memory_plan.spec.ppo_config
    try:
        changed_config = apply_overrides(config, change)
    except ConfigError:
        return False
    n_gpus = changed_config.trainer.n_gpus_per_node
    if config.model.lora_rank and "model.lora_rank" in change:
        return False
    return changed_config != config and config.trainer.n_gpus_per_node <= n_gpus <= max(memory_plan.max_gpus, 1)


def _would_fit(memory_plan: MemoryPlan, change: Mapping[str, object]) -> bool:
    try:
        config = apply_overrides(memory_plan.spec.ppo_config, change)
    except ConfigError:
        return False
    return plan_run_memory(
        replace(memory_plan.spec, config=config),
        memory_plan.shape,
        memory_plan.capacity,
        memory_plan.runs_per_node,
        memory_plan.max_gpus,
    ).fits


def check_memory(memory_plan: MemoryPlan, plan: StudyPlan, gpus: Sequence[Gpu]) -> None:
    """PlanError where the runs do not fit their cards, the host, or what others leave free of `gpus`."""
    check_fits(memory_plan, plan.study)
    available_bytes = machine.measure_available_memory()
    if memory_plan.host_bytes * memory_plan.runs_per_node > available_bytes:
        raise PlanError(
            f"{memory_plan.runs_per_node} runs at once keep {_format_gib(memory_plan.host_bytes * memory_plan.runs_per_node)} GiB in the host's memory, and "
            f"{_format_gib(available_bytes)} are available: type --max-concurrent with a smaller number, or free memory."
        )
    ending_pids = {process.pid for process in find_orphans(plan.folder)}
    check_free_memory(memory_plan.peak * memory_plan.runs_per_gpu, gpus, ending_pids)


def check_fits(memory_plan: MemoryPlan, study: Study) -> None:
    """PlanError where the runs do not fit the cards that they are planned for, whose memory is known."""
    if memory_plan.capacity.is_known and not memory_plan.fits:
        raise PlanError(
            f"The runs do not fit: {_format_excess(memory_plan)}. {_format_advice(memory_plan, study)} --dry-run shows the whole plan; "
            f"--gpu-memory-gib N plans for a card of another size."
        )


def check_free_memory(needed_bytes: int, gpus: Sequence[Gpu], ending_pids: AbstractSet[int]) -> None:
    """PlanError where one of `gpus` has fewer bytes free than `needed`, naming the processes that hold its memory.

    ending: ids of processes that are ended before the runs start, whose memory counts as free.
    """
    free_by_uuid = {entry.uuid: entry.free_mib for entry in machine.query_gpu_memory()}
    processes = machine.query_gpu_processes()
    for gpu in gpus:
        holders = [holder for holder in processes if holder.uuid == gpu.uuid]
        available_mib = free_by_uuid.get(gpu.uuid)
        if available_mib is None:
            continue
        available_mib += sum(holder.used_mib or 0 for holder in holders if holder.pid in ending_pids)
        if available_mib * 2**20 >= needed_bytes:
            continue
        holder_text = machine.format_processes([holder for holder in holders if holder.pid not in ending_pids])
        raise PlanError(
            f"GPU {gpu.id} has {available_mib / 1024:.1f} GiB free and the runs on it take {_format_gib(needed_bytes)} GiB; its memory is "
            f"{holder_text}. End them if they are leftovers, wait until they end, or choose other GPUs with --gpus."
        )


def _format_gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _format_cell(size: int) -> str:
    return _format_gib(size) if size else "-"
