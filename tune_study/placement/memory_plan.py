"""Plan the memory of a study's runs: how it is placed on their GPUs, and whether it fits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.rollout.kv_cache_size import compute_conversation_kv_bytes, compute_max_tokens
from tune_study.host import machine_checks
from tune_study.host.gpus import Gpu
from tune_study.placement import memory
from tune_study.placement.memory import GIB, PHASES, Allocation
from tune_study.placement.model_size import ModelShape, read_model_shape
from tune_study.plan.errors import PlanError
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.run_spec import RunSpec
from tune_study.plan.study_plan import StudyPlan

ASSUMED_GIB = 80.0
"""GiB of memory, as of an H100, that the plan assumes for a GPU of unknown memory."""
_MAX_GPUS = 8
"""Assumed number of GPUs of an unknown machine."""


class GpuCapacity(NamedTuple):
    """The memory of one GPU.

    size: in bytes. source: where the number comes from, for messages. is_known: False if the number is assumed; then no
    run may be refused because of it.
    """

    size: int
    source: str
    is_known: bool


class MemoryPlan(NamedTuple):
    """The memory of the run of a study that needs most of it."""

    spec: RunSpec
    shape: ModelShape
    reference_shape: ModelShape
    """Shape of the reference of the run's KL terms, which may be another model."""
    config: RunConfig
    """The settings of the run, including those by which the plan places its memory."""
    capacity: GpuCapacity
    gpu_fraction: float
    """Fraction of a GPU that a run gets, in (0, 1]."""
    budget: int
    """Bytes of memory of that fraction."""
    allocations: tuple[Allocation, ...]
    """Items of the run's memory; see `memory.list_allocations`."""
    host_bytes: int
    """Host memory of all ranks of a run."""
    runs_per_gpu: int
    runs_per_node: int
    """Concurrent runs on the machine or a node."""
    max_gpus: int
    """Maximum number of GPUs per run that a remedy may suggest."""
    placement_reason: str = ""
    """Why the run is not placed in the fastest way, if it is not."""
    shared_cache_bytes: int = 0
    """The smallest KV cache of the study's runs, used for all of them."""

    @property
    def peak(self) -> int:
        """Bytes on each GPU in the phase that needs most."""
        return max(memory.sum_by_phase(self.allocations))

    @property
    def cache_bytes(self) -> int:
        """Bytes of vLLM's KV cache; 0 for other samplers."""
        rollout_sizes = {allocation.name: allocation.gpu_bytes[memory.ROLLOUT] for allocation in self.allocations}
        return rollout_sizes.get(memory.KV_CACHE_NAME, 0)

    @property
    def cache_shortfall(self) -> int:
        """Bytes that vLLM's cache lacks for one conversation of full length; 0 if none, and for other samplers."""
        if not self.config.rollout.uses_vllm:
            return 0
        return max(self._conversation_bytes - self.cache_bytes, 0)

    @property
    def max_conversations(self) -> int:
        """Number of concurrent conversations of full length that fit in vLLM's KV cache."""
        return self.cache_bytes // self._conversation_bytes

    @property
    def _conversation_bytes(self) -> int:
        config = self.config
        return compute_conversation_kv_bytes(self.shape, memory.get_dtype_bytes(config), compute_max_tokens(config))

    @property
    def is_tight(self) -> bool:
        """Whether the run needs so much of its budget that fragmentation, which is not counted, may break it."""
        return self.peak > memory.TIGHT_FRACTION * self.budget

    @property
    def placement_settings(self) -> Mapping[str, object]:
        """Settings that the plan has chosen so that the trials fit; they change no result.

        There are none if the size of the GPUs is unknown, and every run then takes what it needs.
        """
        if not self.capacity.is_known:
            return {}
        config = self.config
        settings: dict[str, object] = {
            "trainer.swap_to_host": config.trainer.swap_to_host,
            "trainer.zero_stage": config.trainer.zero_stage,
        }
        if config.rollout.uses_vllm and config.rollout.gpu_memory_utilization is None:
            settings["rollout.kv_cache_gib"] = self.shared_cache_bytes / GIB
        return settings

    @property
    def fits(self) -> bool:
        """Whether every phase fits the run's budget, and vLLM has memory for at least one conversation."""
        return self.peak <= self.budget and not self.cache_shortfall


def find_gpu_capacity(requested_gib: float | None, gpus: Sequence[Gpu]) -> GpuCapacity:
    """Find the GPU memory to plan for: --gpu-memory-gib, else the smallest of `gpus`, else ASSUMED_GIB.

    requested_gib: value of --gpu-memory-gib, if typed. gpus: the GPUs that the study uses. Raises PlanError if
    requested_gib is not in (0, 4096].
    """
    if requested_gib is not None:
        # No GPU has more than 4096 GiB, so a larger number was probably meant in MiB.
        if not 0 < requested_gib <= 4096:
            raise PlanError(
                f"--gpu-memory-gib {requested_gib:g} is not the memory of a GPU: type it in GiB, like "
                f"--gpu-memory-gib 80."
            )
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
    # A remedy may use all GPUs of this machine. Their number is unknown if the GPU is assumed, and on a cluster, where
    # the resource plan has no GPU ids.
    max_gpus = (capacity.is_known and len(resource_plan.gpus)) or _MAX_GPUS
    # Only a cluster has runs_per_node; without one, all runs are on this machine.
    runs_per_node = min(resource_plan.runs_per_node or resource_plan.max_concurrent, resource_plan.max_concurrent)
    models: list[RunModel] = []
    # The memory of a run does not depend on its seed, so one run per arm is enough.
    for arm_spec in {spec.arm: spec for spec in plan.runs}.values():
        shape = read_model_shape(arm_spec.ppo_config.model.path, environ)
        # A separate reference that is not downloaded is planned with the policy's size.
        reference_shape = read_model_shape(arm_spec.ppo_config.model_paths[-1], environ) or shape
        if shape is not None and reference_shape is not None:
            models.append(RunModel(arm_spec, shape, reference_shape))
    return plan_runs_memory(models, capacity, runs_per_node, max_gpus) if models else None


class RunModel(NamedTuple):
    """A run with the shapes of its model and of the reference of its KL terms."""

    spec: RunSpec
    shape: ModelShape
    reference_shape: ModelShape


def plan_runs_memory(
    models: Sequence[RunModel], capacity: GpuCapacity, runs_per_node: int, max_gpus: int
) -> MemoryPlan:
    """Plan the memory of the run that needs most, with all runs placed in the same way.

    models: the runs, at least one. The other arguments are the fields of the same names in `MemoryPlan`. Of the ways to
    place the runs, which change no result, this takes the first in which all fit without being tight, or if there is
    none, the one that needs least.
    """
    memory_plans: list[MemoryPlan] = []
    for placement in _PLACEMENTS:
        plans = [_plan_placed_run(model, placement, capacity, runs_per_node, max_gpus) for model in models]
        placed_plans = [memory_plan for memory_plan in plans if memory_plan is not None]
        if len(placed_plans) == len(models):
            # A run with a lower peak may not fit, because vLLM's cache is too small. Runs of equal peaks may differ in
            # their host memory, which is on the GPU if a remedy does not swap.
            largest_plan = max(
                placed_plans,
                key=lambda plan: (
                    not plan.fits,
                    plan.peak,
                    sum(memory.sum_by_phase(plan.allocations)) + plan.host_bytes,
                ),
            )
            smallest_cache = min(memory_plan.cache_bytes for memory_plan in placed_plans)
            memory_plans.append(largest_plan._replace(shared_cache_bytes=smallest_cache))
    chosen_plan = next(
        (memory_plan for memory_plan in memory_plans if memory_plan.fits and not memory_plan.is_tight),
        min(memory_plans, key=lambda memory_plan: (not memory_plan.fits, memory_plan.peak)),
    )
    fastest_plan = memory_plans[0]
    if chosen_plan is fastest_plan:
        return chosen_plan
    return chosen_plan._replace(
        placement_reason=f"{format_gib(fastest_plan.peak)} of {format_gib(fastest_plan.budget)} GiB"
    )


_PLACEMENTS: tuple[Mapping[str, object], ...] = (
    {"trainer.swap_to_host": False},
    {"trainer.swap_to_host": True},
    {"trainer.swap_to_host": False, "trainer.zero_stage": 3},
    {"trainer.swap_to_host": True, "trainer.zero_stage": 3},
)
"""Ways to place the memory of a run, fastest first."""


def override_if_valid(config: RunConfig, settings: Mapping[str, object]) -> RunConfig | None:
    """Change some settings of `config`; return None if they contradict each other or the others."""
    try:
        return apply_overrides(config, settings)
    except ConfigError:
        return None


def _plan_placed_run(
    model: RunModel, placement: Mapping[str, object], capacity: GpuCapacity, runs_per_node: int, max_gpus: int
) -> MemoryPlan | None:
    """Plan the memory of a run with one of _PLACEMENTS (see `plan_runs_memory`).

    None if the placement is impossible, or differs from what the user has chosen.
    """
    spec, shape, reference_shape = model
    trainer = spec.ppo_config.trainer
    if trainer.swap_to_host not in (None, placement["trainer.swap_to_host"]):
        return None
    if "trainer.zero_stage" in placement and not trainer.uses_deepspeed:
        return None
    config = override_if_valid(spec.ppo_config, placement)
    if config is None:  # for example for swapping in stage 2, or sharding with adapters
        return None
    gpu_fraction = min(trainer.n_gpus_per_node, 1.0)
    budget = int(gpu_fraction * capacity.size)
    allocations = memory.list_allocations(shape, config, budget, reference_shape)
    host_bytes = memory.compute_host_bytes(allocations, shape, config)
    # 1e-9, so that a rounding error in 1 / fraction does not cost a run.
    runs_per_gpu = min(int(1 / gpu_fraction + 1e-9), runs_per_node)
    return MemoryPlan(
        *model, config, capacity, gpu_fraction, budget, allocations, host_bytes, runs_per_gpu, runs_per_node, max_gpus
    )


def make_memory_table(memory_plan: MemoryPlan) -> tuple[tuple[str, ...], list[list[str]]]:
    """Make the column names and rows of the plan's table, in GiB, without phases that the run does not have.

    The last two rows are the sum of each column, and its excess over the budget.
    """
    has_critic = "critic" in memory.count_trained_parameters(memory_plan.shape, memory_plan.config)
    phases = [number for number, name in enumerate(PHASES) if has_critic or not name.startswith("critic")]
    rows = [
        [name, *(_format_cell(gpu_bytes[phase]) for phase in phases), _format_cell(host_bytes)]
        for name, gpu_bytes, host_bytes in memory_plan.allocations
    ]
    phase_totals = memory.sum_by_phase(memory_plan.allocations)
    host_total = sum(allocation.host_bytes for allocation in memory_plan.allocations)
    rows.append(["sum", *(format_gib(phase_totals[phase]) for phase in phases), _format_cell(host_total)])
    excesses = [phase_totals[phase] - memory_plan.budget for phase in phases]
    excess_cells = [f"{format_gib(excess)} over" if excess > 0 else "" for excess in excesses]
    rows.append([f"of {format_gib(memory_plan.budget)}", *excess_cells, ""])
    return ("GiB on each GPU", *(PHASES[phase] for phase in phases), "host"), rows


def format_memory_plan(memory_plan: MemoryPlan) -> list[str]:
    """Format the plan in sentences: the run's budget, vLLM's memory, host memory, and that the run fits if it does."""
    config, budget_text = memory_plan.config, format_gib(memory_plan.budget)
    gpu_text = f"GPU with {format_gib(memory_plan.capacity.size)} GiB ({memory_plan.capacity.source})"
    ranks = memory.count_ranks(config)
    share_text = f"{ranks} whole GPU{'s' * (ranks > 1)}"
    if memory_plan.gpu_fraction < 1:
        share_text = f"{memory_plan.gpu_fraction:g} of it, {budget_text} GiB"
    largest_run = memory_plan.spec.run_id
    sentences = [f"Memory: {gpu_text}; each run gets {share_text}; the run that needs most is {largest_run}"]
    if config.rollout.uses_vllm:
        sentences.append(_format_vllm_memory(memory_plan))
    if memory_plan.placement_reason and memory_plan.fits:
        changes = []  # by the plan, so that the run fits
        if memory.shards_weights(config):
            changes.append("weights are sharded over the GPUs (trainer.zero_stage=3)")
        if config.trainer.swap_to_host:
            changes.append("what is trained is in host memory while nothing reads it (trainer.swap_to_host=True)")
        text = " and ".join(changes)
        sentences.append(f"{text[0].upper()}{text[1:]}; otherwise the run would take {memory_plan.placement_reason}.")
    if memory_plan.shape.is_counted:
        sentences.append(
            "The weights are counted on a model that is built from its config.json. The memory of its passes is "
            "estimated as for a Qwen2 of the same widths; its attention may need more."
        )
    if memory_plan.host_bytes:  # with swapping or offloading
        all_runs_text = format_gib(memory_plan.host_bytes * memory_plan.runs_per_node)
        sentences.append(
            f"Extra CPU memory: {format_gib(memory_plan.host_bytes)} GiB for each run, {all_runs_text} GiB for "
            f"{memory_plan.runs_per_node} at once."
        )
    saving_bytes = memory.compute_saving_bytes(memory_plan.shape, config)
    saving_text = f"{format_gib(saving_bytes)} GiB more" if saving_bytes else "no more"
    sentences.append(f"CPU memory while a run saves a checkpoint: {saving_text}. Loading reads one tensor at a time.")
    if memory_plan.fits:
        tight_note = "; this is tight, because fragmentation in the allocator is not counted"
        sentences.append(
            f"Fits: {format_gib(memory_plan.peak)} of {budget_text} GiB at its peak ({_find_worst_phase(memory_plan)})"
            f"{tight_note if memory_plan.is_tight else ''}"
        )
    return sentences


def _format_vllm_memory(memory_plan: MemoryPlan) -> str:
    rollout = memory_plan.config.rollout
    if rollout.gpu_memory_utilization is None:
        text = f"vLLM: KV cache of {format_gib(memory_plan.cache_bytes)} GiB"
    else:
        vllm_bytes = rollout.gpu_memory_utilization * memory_plan.budget
        budget_name = "the run's memory" if memory_plan.gpu_fraction < 1 else "the GPU"
        text = (
            f"vLLM: gpu_memory_utilization {rollout.gpu_memory_utilization:g} of {budget_name}, "
            f"{format_gib(vllm_bytes)} GiB"
        )
    if memory_plan.cache_shortfall:
        return f"{text}: {format_gib(memory_plan.cache_shortfall)} GiB too little for one conversation"
    max_tokens = compute_max_tokens(memory_plan.config)
    capacity_text = f"{memory_plan.max_conversations} conversations of {max_tokens} tokens at once"
    sleep_text = "; it frees the GPU during the update" if rollout.free_cache_engine else ""
    return f"{text}: {capacity_text}{sleep_text}"


def _find_worst_phase(memory_plan: MemoryPlan) -> str:
    phase_totals = memory.sum_by_phase(memory_plan.allocations)
    return PHASES[phase_totals.index(max(phase_totals))]


def describe_excess(memory_plan: MemoryPlan) -> str:
    """Say why the run does not fit: the largest items of the worst phase, or that vLLM has too little memory."""
    # If every phase fits the budget, vLLM's cache is too small.
    if memory_plan.peak <= memory_plan.budget:
        return f"vLLM lacks {format_gib(memory_plan.cache_shortfall)} GiB for one conversation"
    phase = PHASES.index(_find_worst_phase(memory_plan))
    largest_allocations = sorted(memory_plan.allocations, key=lambda allocation: -allocation.gpu_bytes[phase])
    allocation_text = ", ".join(
        f"{allocation.name} {format_gib(allocation.gpu_bytes[phase])}"
        for allocation in largest_allocations[:5]  # the table that --dry-run prints has all of them
        if allocation.gpu_bytes[phase]
    )
    used_text = f"{format_gib(memory_plan.peak)} GiB of {format_gib(memory_plan.budget)}"
    return f"{PHASES[phase]} takes {used_text} ({allocation_text}, ...)"


def format_gib(size: float) -> str:
    """Format bytes as a number of GiB with one decimal."""
    return f"{size / GIB:.1f}"


def _format_cell(size: int) -> str:
    return format_gib(size) if size else "-"
