"""Plan the memory of a study's runs: how it is placed on their GPUs, whether it fits, and what makes it fit."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from search_spaces.declaration.study import Study
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.rollout.kv_cache_size import compute_conversation_kv_bytes, compute_max_tokens
from tune_study.placement import memory
from tune_study.placement.memory import GIB, PHASES, Allocation, ModelShape
from tune_study.placement.model_files import read_model_shape
from tune_study.plan.errors import MisfitError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan

_ASSUMED_GPUS = 8
"""Number of GPUs that advice assumes for an unknown machine."""
_CHANGES = (
    "model.enable_gradient_checkpointing=True",
    "actor.entropy_from_logits_with_chunking=True",
    "rollout.name=vllm",
    "rollout.free_cache_engine=True",
    "rollout.gpu_memory_utilization=null",
    "rollout.kv_cache_gib=null",
    "trainer.swap_to_host=null",
    "rollout.enforce_eager=True",
    *(f"trainer.n_gpus_per_node={count}" for count in (1, 2, 4, 8)),
    "model.lora_rank=64",
    "critic.shared_trunk=True",
    "algorithm.adv_estimator=grpo",
    "trainer.strategy=deepspeed trainer.offload_optimizer=True",
)
"""Possible remedies, in order of preference: first what changes no result, then what changes how networks are trained,
and last optimizer steps on the CPU, which take minutes per training step."""


class GpuCapacity(NamedTuple):
    """The memory of one GPU in bytes, where the number comes from, and whether it is known; otherwise it is assumed."""

    size: int
    source: str
    is_known: bool


class MemoryPlan(NamedTuple):
    """The memory of a run: of a study, of the run that needs most of it."""

    run_id: str
    base: RunConfig
    """The settings of the run, without those by which the plan places its memory."""
    shape: ModelShape
    reference_shape: ModelShape
    """Shape of the reference of the KL terms, which may be another model."""
    capacity: GpuCapacity
    resource_plan: ResourcePlan
    config: RunConfig
    """The settings of the run, including those by which the plan places its memory."""
    allocations: Sequence[Allocation] = ()
    host_bytes: int = 0
    """Host memory of all ranks of a run."""
    cache_bytes: int = 0
    """KV cache of vLLM, for all runs the smallest of the study's runs; 0 for other samplers."""

    @property
    def budget(self) -> int:
        """Bytes of a GPU, or of the fraction of one that a run gets."""
        return int(min(self.base.trainer.n_gpus_per_node, 1.0) * self.capacity.size)

    @property
    def peak(self) -> int:
        """Bytes on each GPU in the phase that needs most."""
        return max(memory.sum_by_phase(self.allocations))

    @property
    def max_conversations(self) -> int:
        """Number of concurrent conversations of full length that fit in vLLM's KV cache."""
        return self.cache_bytes // compute_conversation_kv_bytes(self.shape, self.config)

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


def plan_memory(
    plan: StudyPlan, resource_plan: ResourcePlan, capacity: GpuCapacity, environ: Mapping[str, str]
) -> MemoryPlan | None:
    """Plan the memory of the run of a study on GPUs that needs most; None if no model's shape is known."""
    runs: list[MemoryPlan] = []
    # The memory of a run does not depend on its seed, so one run per arm is enough.
    for spec in {spec.arm: spec for spec in plan.runs}.values():
        config = spec.ppo_config
        if shape := read_model_shape(config.model.path, environ):
            # A separate reference that is not downloaded is planned with the policy's size.
            reference_shape = read_model_shape(config.model_paths[-1], environ) or shape
            runs.append(MemoryPlan(spec.run_id, config, shape, reference_shape, capacity, resource_plan, config))
    return place_runs(runs) if runs else None


def place_runs(runs: Sequence[MemoryPlan]) -> MemoryPlan:
    """Plan the memory of the run that needs most, with all runs (at least one) placed in the same way.

    Of the ways to place memory that no user has ruled out, fastest first and equal in their results, this takes the
    first in which all runs fit without being tight, else the one that needs least.
    """
    trainers = [run.base.trainer for run in runs]
    swaps = [swap for swap in (False, True) if all(trainer.swap_to_host in (None, swap) for trainer in trainers)]
    stages = ({}, {"trainer.zero_stage": 3}) if all(trainer.uses_deepspeed for trainer in trainers) else ({},)
    candidates: list[MemoryPlan] = []
    for stage, swap in itertools.product(stages, swaps):
        with suppress(ConfigError):  # a run cannot be placed in this way
            plans: list[MemoryPlan] = []
            for run in runs:
                config = apply_overrides(run.base, {"trainer.swap_to_host": swap, **stage})
                items = memory.list_allocations(run.shape, config, run.budget, run.reference_shape)
                host_bytes = memory.compute_host_bytes(items, run.shape, config)
                cache_bytes = sum(item.rollout for item in items if item.name == memory.KV_CACHE_NAME)
                plans.append(
                    run._replace(config=config, allocations=items, host_bytes=host_bytes, cache_bytes=cache_bytes)
                )
            # A run with a lower peak may not fit, because vLLM's cache is too small. Runs of equal peaks may differ in
            # their host memory, which is on the GPU if a remedy does not swap.
            largest_plan = max(plans, key=lambda plan: (not plan.fits, plan.peak, plan.host_bytes))
            cache_sizes = [plan.cache_bytes for plan in plans if plan.config.rollout.uses_vllm]
            candidates.append(largest_plan._replace(cache_bytes=min(cache_sizes, default=0)))
    least_plan = min(candidates, key=lambda plan: (not plan.fits, plan.peak))
    return next((plan for plan in candidates if plan.fits and not plan.is_tight), least_plan)


def format_gib(size: float) -> str:
    """Format bytes as a number of GiB with one decimal."""
    return f"{size / GIB:.1f}"


def format_memory_plan(plan: MemoryPlan) -> list[str]:
    """Format the plan in sentences: the run's budget, vLLM's memory, host memory, and that the run fits if it does."""
    config, n_gpus = plan.config, plan.config.trainer.n_gpus_per_node
    lines = [
        f"Memory: GPU with {format_gib(plan.capacity.size)} GiB ({plan.capacity.source}); each run gets "
        f"{format_gib(plan.budget)} GiB of {n_gpus:g} GPU{'s' * (n_gpus > 1)}; the run that needs most is {plan.run_id}"
    ]
    if config.rollout.uses_vllm:
        conversations = f"{plan.max_conversations} conversations of {compute_max_tokens(config)} tokens at once"
        lines.append(f"vLLM: KV cache of {format_gib(plan.cache_bytes)} GiB: {conversations}")
    if memory.shards_weights(config):
        lines.append("Placement: weights are sharded over the GPUs (trainer.zero_stage=3)")
    if config.trainer.swap_to_host:
        lines.append("Placement: what is trained is in host memory while nothing reads it (trainer.swap_to_host=True)")
    # On a cluster, other runs are on other nodes.
    n_runs = plan.resource_plan.runs_per_node or plan.resource_plan.max_concurrent
    all_gib = format_gib(plan.host_bytes * n_runs)
    lines.append(f"CPU memory: {format_gib(plan.host_bytes)} GiB per run, {all_gib} GiB for {n_runs} at once")
    if plan.fits:
        tight_note = "; this is tight, because fragmentation in the allocator is not counted" if plan.is_tight else ""
        lines.append(f"Fits: {describe_peak(plan)}{tight_note}")
    return lines


def describe_peak(plan: MemoryPlan) -> str:
    """Describe the phase that needs most with its largest items, or that vLLM has too little memory."""
    if plan.peak <= plan.budget and not plan.fits:
        shortfall = compute_conversation_kv_bytes(plan.shape, plan.config) - plan.cache_bytes
        return f"vLLM lacks {format_gib(shortfall)} GiB for one conversation"
    phase = memory.sum_by_phase(plan.allocations).index(plan.peak)
    largest_items = sorted(plan.allocations, key=lambda item: -item.gpu_bytes[phase])[:5]
    items_text = ", ".join(f"{item.name} {format_gib(item.gpu_bytes[phase])}" for item in largest_items)
    return f"{PHASES[phase]} takes {format_gib(plan.peak)} GiB of {format_gib(plan.budget)} ({items_text}, ...)"


def find_remedies(plan: MemoryPlan, study: Study) -> list[str]:
    """Find options each of which makes the run fit.

    study: the study of the run, whose axis no remedy sets. A rank of adapters stays as it was chosen, and a run gets at
    least its GPUs.
    """
    base = plan.base
    fixed_settings = study.axis.swept_fields | ({"model.lora_rank"} if base.model.lora_rank else set())
    # On a cluster, where the resource plan has no GPU ids, their number is unknown, as it is if they are assumed.
    max_gpus = (plan.capacity.is_known and len(plan.resource_plan.gpus)) or _ASSUMED_GPUS
    remedies: dict[tuple[str, ...], str] = {}
    for text in _CHANGES:
        change = dict(assignment.split("=") for assignment in text.split())
        if fixed_settings & change.keys() or tuple(change) in remedies:
            continue
        with suppress(ConfigError):
            config = apply_overrides(base, change)
            is_possible = base.trainer.n_gpus_per_node <= config.trainer.n_gpus_per_node <= max_gpus
            if is_possible and place_runs([plan._replace(base=config)]).fits:
                option = f"--set {text.replace(' ', ' --set ')}"
                remedies[tuple(change)] = option.replace("--set trainer.n_gpus_per_node=", "--gpus-per-exp ")
    return list(remedies.values())[:4]  # the message is one paragraph


def format_misfit(plan: MemoryPlan, study: Study) -> str:
    """Say that the run does not fit, by how much, and what to type."""
    advice = "No single setting makes it fit: choose a smaller model with --model, or larger GPUs"
    if remedies := find_remedies(plan, study):
        advice = f"Any of these makes it fit: {'; '.join(remedies)}"
    return f"DOES NOT FIT: {describe_peak(plan)}. {advice}."


def check_fits(plan: MemoryPlan, study: Study) -> None:
    """Raise MisfitError if the runs do not fit their GPUs. GPUs of unknown memory are not checked."""
    if plan.capacity.is_known and not plan.fits:
        advice = "--dry-run shows the whole plan; --gpu-memory-gib N plans for a GPU of another size."
        raise MisfitError(f"{format_misfit(plan, study)} {advice}")
