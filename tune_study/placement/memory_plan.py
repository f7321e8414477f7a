"""Plan the memory of a study's runs: how it is placed on their GPUs, whether it fits, and what makes it fit."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

from search_spaces.declaration.study import Study
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.rollout.kv_cache_size import compute_max_tokens
from trainable.runs.orphans import find_orphans
from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.placement import memory
from tune_study.placement.memory import GIB, PHASES, Allocation
from tune_study.placement.model_size import ModelShape, count_trained_parameters, read_model_shape
from tune_study.plan.errors import MisfitError, PlanError
from tune_study.plan.study_plan import ResourcePlan, RunSpec, StudyPlan

ASSUMED_GIB, _ASSUMED_GPUS = 80.0, 8
"""Memory, as of an H100, and number of GPUs that the plan assumes for an unknown machine."""
_MAX_REMEDIES = 4
"""Maximum number of remedies in a message, which is one paragraph."""
_PLACEMENTS: tuple[Mapping[str, object], ...] = (
    {"trainer.swap_to_host": False},
    {"trainer.swap_to_host": True},
    {"trainer.swap_to_host": False, "trainer.zero_stage": 3},
    {"trainer.swap_to_host": True, "trainer.zero_stage": 3},
)
"""Ways to place the memory of a run, which change no result, fastest first."""
_CHANGES: tuple[Mapping[str, Any], ...] = (
    {"model.enable_gradient_checkpointing": True},
    {"actor.entropy_from_logits_with_chunking": True},
    {"rollout.name": "vllm"},
    {"rollout.free_cache_engine": True},
    {"rollout.gpu_memory_utilization": None},
    {"rollout.kv_cache_gib": None},
    {"trainer.swap_to_host": None},
    {"rollout.enforce_eager": True},
    *({"trainer.n_gpus_per_node": count} for count in (1, 2, 4, 8)),
    {"model.lora_rank": 64},
    {"critic.shared_trunk": True},
    {"algorithm.adv_estimator": "grpo"},
    {"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True},
)
"""Possible remedies, in order of preference: first what changes no result, then what changes how networks are trained,
and last optimizer steps on the CPU, which take minutes per training step."""


class GpuCapacity(NamedTuple):
    """The memory of one GPU in bytes, where the number comes from, and whether it is known.

    No run may be refused because of a size that is assumed.
    """

    size: int
    source: str
    is_known: bool


class RunModel(NamedTuple):
    """A run with the shapes of its model and of the reference of its KL terms."""

    spec: RunSpec
    shape: ModelShape
    reference_shape: ModelShape


class MemoryPlan(NamedTuple):
    """The memory of the run of a study that needs most of it."""

    model: RunModel
    config: RunConfig
    """The settings of the run, including those by which the plan places its memory."""
    capacity: GpuCapacity
    runs_per_node: int
    """Concurrent runs on the machine or a node."""
    max_gpus: int
    """Maximum number of GPUs per run that a remedy may suggest."""
    budget: int
    """Bytes of a GPU, or of the fraction of one that a run gets."""
    allocations: tuple[Allocation, ...]
    host_bytes: int
    """Host memory of all ranks of a run."""
    cache_bytes: int
    """KV cache of vLLM, for all runs the smallest of the study's runs; 0 for other samplers."""
    fastest_peak: int = 0
    """Peak if the run were placed in the fastest way; 0 if it is."""

    @property
    def peak(self) -> int:
        """Bytes on each GPU in the phase that needs most."""
        return max(memory.sum_by_phase(self.allocations))

    @property
    def max_conversations(self) -> int:
        """Number of concurrent conversations of full length that fit in vLLM's KV cache."""
        return self.cache_bytes // memory.compute_conversation_bytes(self.model.shape, self.config)

    @property
    def fits(self) -> bool:
        """Whether every phase fits the run's budget, and vLLM has memory for at least one conversation."""
        return self.peak <= self.budget and (not self.config.rollout.uses_vllm or self.max_conversations > 0)

    @property
    def is_tight(self) -> bool:
        """Whether the run needs so much of its budget that fragmentation, which is not counted, may break it."""
        return self.peak > memory.TIGHT_FRACTION * self.budget

    @property
    def placement_settings(self) -> Mapping[str, object]:
        """Settings that the plan has chosen so that the trials fit; they change no result. None for unknown GPUs."""
        trainer, rollout = self.config.trainer, self.config.rollout
        if not self.capacity.is_known:
            return {}
        settings = {"trainer.swap_to_host": trainer.swap_to_host, "trainer.zero_stage": trainer.zero_stage}
        sizes_cache = rollout.uses_vllm and rollout.gpu_memory_utilization is None
        return settings | ({"rollout.kv_cache_gib": self.cache_bytes / GIB} if sizes_cache else {})


def find_gpu_capacity(requested_gib: float | None, gpus: Sequence[Gpu]) -> GpuCapacity:
    """Find the GPU memory to plan for: --gpu-memory-gib, else the smallest of `gpus`, else ASSUMED_GIB.

    Raises PlanError if requested_gib is not in (0, 4096].
    """
    if requested_gib is not None:
        # No GPU has more than 4096 GiB, so a larger number was probably meant in MiB.
        if not 0 < requested_gib <= 4096:
            reason = "is not the memory of a GPU: type it in GiB, like --gpu-memory-gib 80"
            raise PlanError(f"--gpu-memory-gib {requested_gib:g} {reason}.")
        return GpuCapacity(int(requested_gib * GIB), "set by --gpu-memory-gib", is_known=True)
    uuids = {gpu.uuid for gpu in gpus if gpu.uuid}
    entries = machine_checks.query_gpu_memory() if uuids else ()
    sizes = [entry.total_mib for entry in entries if entry.uuid in uuids and entry.total_mib is not None]
    # All GPUs must be reported, since one that is not (such as a MIG device) may be the smallest.
    if sizes and len(sizes) == len(gpus):
        return GpuCapacity(min(sizes) * 2**20, "from nvidia-smi", is_known=True)
    reason = "no GPU is visible" if not gpus else "nvidia-smi does not report it"
    source = f"assumed, because {reason}; type --gpu-memory-gib N to plan for another"
    return GpuCapacity(int(ASSUMED_GIB * GIB), source, is_known=False)


def plan_memory(
    plan: StudyPlan, resource_plan: ResourcePlan, capacity: GpuCapacity, environ: Mapping[str, str]
) -> MemoryPlan | None:
    """Plan the memory of the run that needs most; None without GPUs, or if no model's shape is known."""
    if not resource_plan.gpu_slots:
        return None
    # On a cluster, where the resource plan has no GPU ids, their number is unknown, as it is if they are assumed.
    max_gpus = (capacity.is_known and len(resource_plan.gpus)) or _ASSUMED_GPUS
    # Only a cluster has runs_per_node; without one, all runs are on this machine.
    runs_per_node = min(resource_plan.runs_per_node or resource_plan.max_concurrent, resource_plan.max_concurrent)
    models: list[RunModel] = []
    # The memory of a run does not depend on its seed, so one run per arm is enough.
    for spec in {spec.arm: spec for spec in plan.runs}.values():
        shape = read_model_shape(spec.ppo_config.model.path, environ)
        if shape is not None:
            # A separate reference that is not downloaded is planned with the policy's size.
            reference_shape = read_model_shape(spec.ppo_config.model_paths[-1], environ) or shape
            models.append(RunModel(spec, shape, reference_shape))
    return plan_runs_memory(models, capacity, runs_per_node, max_gpus) if models else None


def plan_runs_memory(
    models: Sequence[RunModel], capacity: GpuCapacity, runs_per_node: int, max_gpus: int
) -> MemoryPlan:
    """Plan the memory of the run that needs most, with all runs (at least one) placed in the same way.

    Of _PLACEMENTS, this takes the first in which all fit without being tight, else the one that needs least.
    """
    candidates: list[MemoryPlan] = []
    for placement in _PLACEMENTS:
        try:
            plans = [_place_run(model, placement, capacity, runs_per_node, max_gpus) for model in models]
        except ConfigError:
            continue
        # A run with a lower peak may not fit, because vLLM's cache is too small. Runs of equal peaks may differ in
        # their host memory, which is on the GPU if a remedy does not swap.
        largest_plan = max(
            plans,
            key=lambda plan: (not plan.fits, plan.peak, sum(memory.sum_by_phase(plan.allocations)) + plan.host_bytes),
        )
        cache_sizes = [plan.cache_bytes for plan in plans if plan.config.rollout.uses_vllm]
        candidates.append(largest_plan._replace(cache_bytes=min(cache_sizes, default=0)))
    least_plan = min(candidates, key=lambda plan: (not plan.fits, plan.peak))
    chosen_plan = next((plan for plan in candidates if plan.fits and not plan.is_tight), least_plan)
    return chosen_plan if chosen_plan is candidates[0] else chosen_plan._replace(fastest_peak=candidates[0].peak)


def _place_run(
    model: RunModel, placement: Mapping[str, object], capacity: GpuCapacity, runs_per_node: int, max_gpus: int
) -> MemoryPlan:
    """Plan the memory of a run with one of _PLACEMENTS. Raises ConfigError if that is impossible or not the user's."""
    trainer = model.spec.ppo_config.trainer
    is_other = trainer.swap_to_host not in (None, placement["trainer.swap_to_host"])
    if is_other or ("trainer.zero_stage" in placement and not trainer.uses_deepspeed):
        raise ConfigError("another placement was chosen")
    config = apply_overrides(model.spec.ppo_config, placement)
    budget = int(min(trainer.n_gpus_per_node, 1.0) * capacity.size)
    allocations = memory.list_allocations(model.shape, config, budget, model.reference_shape)
    host_bytes = memory.compute_host_bytes(allocations, model.shape, config)
    cache = sum(item.gpu_bytes[memory.ROLLOUT] for item in allocations if item.name == memory.KV_CACHE_NAME)
    return MemoryPlan(model, config, capacity, runs_per_node, max_gpus, budget, allocations, host_bytes, cache)


def make_memory_table(plan: MemoryPlan) -> tuple[tuple[str, ...], list[list[str]]]:
    """Make the column names and rows of the plan's table, in GiB, without phases that the run does not have.

    The last two rows are the sum of each column, and its excess over the budget.
    """
    has_critic = "critic" in count_trained_parameters(plan.model.shape, plan.config)
    phases = [number for number, name in enumerate(PHASES) if has_critic or not name.startswith("critic")]
    totals = memory.sum_by_phase(plan.allocations)
    total_item = Allocation("sum", totals, sum(item.host_bytes for item in plan.allocations))
    rows = []
    for item in (*plan.allocations, total_item):
        sizes = [*(item.gpu_bytes[phase] for phase in phases), item.host_bytes]
        rows.append([item.name, *(format_gib(size) if size else "-" for size in sizes)])
    excesses = [totals[phase] - plan.budget for phase in phases]
    excess_cells = [f"{format_gib(excess)} over" if excess > 0 else "" for excess in excesses]
    rows.append([f"of {format_gib(plan.budget)}", *excess_cells, ""])
    return ("GiB on each GPU", *(PHASES[phase] for phase in phases), "host"), rows


def format_memory_plan(plan: MemoryPlan) -> list[str]:
    """Format the plan in sentences: the run's budget, vLLM's memory, host memory, and that the run fits if it does."""
    config, n_gpus, budget = plan.config, plan.config.trainer.n_gpus_per_node, format_gib(plan.budget)
    share = f"{n_gpus:g} whole GPU{'s' * (n_gpus > 1)}" if n_gpus >= 1 else f"{n_gpus:g} of it, {budget} GiB"
    sentences = [
        f"Memory: GPU with {format_gib(plan.capacity.size)} GiB ({plan.capacity.source}); each run gets {share}; the "
        f"run that needs most is {plan.model.spec.run_id}"
    ]
    if config.rollout.uses_vllm:
        conversations = f"{plan.max_conversations} conversations of {compute_max_tokens(config)} tokens at once"
        sleep_text = "; it frees the GPU during the update" if config.rollout.free_cache_engine else ""
        sentences.append(f"vLLM: KV cache of {format_gib(plan.cache_bytes)} GiB: {conversations}{sleep_text}")
    if plan.fastest_peak and plan.fits:
        changes = []  # by the plan, so that the run fits
        if memory.shards_weights(config):
            changes.append("weights are sharded over the GPUs (trainer.zero_stage=3)")
        if config.trainer.swap_to_host:
            changes.append("what is trained is in host memory while nothing reads it (trainer.swap_to_host=True)")
        peak = format_gib(plan.fastest_peak)
        sentences.append(f"Placement: {' and '.join(changes)}; otherwise the run would take {peak} of {budget} GiB")
    if plan.model.shape.trunk:
        sentences.append(
            "The weights are counted on a model that is built from its config.json; its passes are estimated as those "
            "of a Qwen2 of the same widths, and its attention may need more"
        )
    saving_bytes = memory.compute_saving_bytes(plan.model.shape, config)
    sentences.append(
        f"CPU memory: {format_gib(plan.host_bytes)} GiB per run, {format_gib(plan.host_bytes * plan.runs_per_node)} "
        f"GiB for {plan.runs_per_node} at once; {format_gib(saving_bytes)} GiB more while a run saves a checkpoint"
    )
    if plan.fits:
        tight_note = "; this is tight, because fragmentation in the allocator is not counted" if plan.is_tight else ""
        peak_text = f"{format_gib(plan.peak)} of {budget} GiB at its peak ({_find_worst_phase(plan)})"
        sentences.append(f"Fits: {peak_text}{tight_note}")
    return sentences


def format_gib(size: float) -> str:
    """Format bytes as a number of GiB with one decimal."""
    return f"{size / GIB:.1f}"


def _find_worst_phase(plan: MemoryPlan) -> str:
    return PHASES[memory.sum_by_phase(plan.allocations).index(plan.peak)]


def describe_excess(plan: MemoryPlan) -> str:
    """Say why the run does not fit: the largest items of the worst phase, or that vLLM has too little memory."""
    if plan.peak <= plan.budget:
        shortfall = memory.compute_conversation_bytes(plan.model.shape, plan.config) - plan.cache_bytes
        return f"vLLM lacks {format_gib(shortfall)} GiB for one conversation"
    phase = PHASES.index(_find_worst_phase(plan))
    largest_items = sorted(plan.allocations, key=lambda item: -item.gpu_bytes[phase])[:5]
    items_text = ", ".join(f"{item.name} {format_gib(item.gpu_bytes[phase])}" for item in largest_items)
    return f"{PHASES[phase]} takes {format_gib(plan.peak)} GiB of {format_gib(plan.budget)} ({items_text}, ...)"


def find_remedies(plan: MemoryPlan, study: Study) -> list[str]:
    """Find options each of which makes the run fit, or else the first changes that do together.

    study: the study of the run, whose axis no remedy sets. A rank of adapters stays as it was chosen, and a run gets at
    least its GPUs.
    """
    base = plan.model.spec.ppo_config
    chosen_fields = study.axis.swept_fields | ({"model.lora_rank"} if base.model.lora_rank else set())
    remedies: list[Mapping[str, object]] = []
    together: dict[str, object] = {}
    for change in _CHANGES:
        num_gpus = change.get("trainer.n_gpus_per_node", base.trainer.n_gpus_per_node)
        is_possible = base.trainer.n_gpus_per_node <= num_gpus <= max(plan.max_gpus, 1)
        is_covered = any(remedy.keys() <= change.keys() for remedy in remedies)
        has_effect = _change_settings(base, change) not in (None, base)
        if is_covered or not is_possible or not has_effect or chosen_fields & change.keys():
            continue
        together |= change
        if _fits_with(plan, change):
            remedies.append(change)
        elif not remedies and _fits_with(plan, together):
            remedies.append(dict(together))
    return [_format_options(remedy) for remedy in remedies[:_MAX_REMEDIES]]


def _fits_with(plan: MemoryPlan, change: Mapping[str, object]) -> bool:
    """Check whether the run fits if some settings are changed, which may contradict each other."""
    config = _change_settings(plan.model.spec.ppo_config, change)
    if config is None:
        return False
    model = plan.model._replace(spec=replace(plan.model.spec, config=config))
    return plan_runs_memory([model], plan.capacity, plan.runs_per_node, plan.max_gpus).fits


def _change_settings(config: RunConfig, change: Mapping[str, object]) -> RunConfig | None:
    """Change settings of a configuration; None if it would be refused."""
    try:
        return apply_overrides(config, change)
    except ConfigError:
        return None


def _format_options(change: Mapping[str, object]) -> str:
    """Format settings as the options to type for them."""
    options = [f"--set {name}={'null' if value is None else value}" for name, value in change.items()]
    return " ".join(options).replace("--set trainer.n_gpus_per_node=", "--gpus-per-exp ")


def format_misfit(plan: MemoryPlan, study: Study) -> str:
    """Say that the run does not fit, by how much, and what to type."""
    remedies = find_remedies(plan, study)
    advice = f"Any of these makes it fit: {'; '.join(remedies)}"
    if not remedies:
        advice = "No setting makes it fit: choose a smaller model with --model, or larger GPUs"
    return f"DOES NOT FIT: {describe_excess(plan)}. {advice}."


def check_fits(plan: MemoryPlan, study: Study) -> None:
    """Raise MisfitError if the runs do not fit their GPUs. GPUs of unknown memory are not checked."""
    if plan.capacity.is_known and not plan.fits:
        advice = "--dry-run shows the whole plan; --gpu-memory-gib N plans for a GPU of another size."
        raise MisfitError(f"{format_misfit(plan, study)} {advice}")


def check_memory(plan: MemoryPlan, study_plan: StudyPlan, gpus: Sequence[Gpu]) -> None:
    """Raise MisfitError if the runs do not fit their GPUs, the host memory, or the free memory of `gpus`."""
    check_fits(plan, study_plan.study)
    available_bytes = machine_checks.measure_available_memory()
    if plan.host_bytes * plan.runs_per_node > available_bytes:
        raise MisfitError(
            f"{plan.runs_per_node} runs at once need {format_gib(plan.host_bytes * plan.runs_per_node)} GiB of CPU "
            f"memory, and {format_gib(available_bytes)} GiB are available: type --max-concurrent with a smaller "
            f"number, or free memory."
        )
    # Orphans of an earlier start are terminated before the runs start, so their memory counts as free.
    ending_pids = {process.pid for process in find_orphans(study_plan.folder)}
    # 1e-9, so that a rounding error in 1 / fraction does not cost a run.
    runs_per_gpu = min(int(1 / min(plan.config.trainer.n_gpus_per_node, 1.0) + 1e-9), plan.runs_per_node)
    check_free_memory(plan.peak * runs_per_gpu, gpus, ending_pids)


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
