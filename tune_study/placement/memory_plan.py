"""Whether a study's runs fit their GPUs: the memory plan of `--dry-run`, what would make it fit, and refusals."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from search_spaces.declaration.study import Study
from trainable.config.run_config import ConfigError, with_overrides
from trainable.runs.orphans import leftovers
from tune_study.host import machine
from tune_study.host.gpus import Gpu
from tune_study.placement import memory
from tune_study.placement.memory import GIB, PHASES, Part
from tune_study.placement.model_size import ModelShape, shape_of
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import PlanError, RunSpec, StudyPlan

ASSUMED_GIB = 80.0
"""The card of a plan where no GPU's memory is known."""
_TIGHT = 0.95
_MOST_WAYS = 4
_MOST_GPUS = 8
"""Of one machine, where it is not known."""


class Card(NamedTuple):
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
    card: Card
    share: float
    budget: int
    parts: tuple[Part, ...]
    host: int
    a_gpu: int
    a_node: int
    most: int

    @property
    def peak(self) -> int:
        """Bytes on each GPU at the moment that takes most."""
        return max(memory.totals(self.parts))

    @property
    def cache_shortfall(self) -> int:
        """Bytes that vLLM lacks to hold one conversation of full length; 0 where it does, and for another sampler."""
        config = self.spec.ppo
        if config.rollout.name != "vllm":
            return 0
        held = sum(part.gpu[memory.ROLLOUT] for part in self.parts if part.name.startswith("vLLM weights"))
        needed = held + memory.vllm_work_bytes(self.shape, config) + self._conversation
        return max(needed - int(config.rollout.gpu_memory_utilization * self.budget), 0)

    @property
    def conversations(self) -> int:
        """Conversations of full length that vLLM's cache holds at once."""
        cache = sum(part.gpu[memory.ROLLOUT] for part in self.parts if part.name == "vLLM KV cache")
        return cache // self._conversation

    @property
    def _conversation(self) -> int:
        config = self.spec.ppo
        return memory.longest(config) * memory.cache_bytes(self.shape, memory.compute_bytes(config))

    @property
    def fits(self) -> bool:
        """Whether every moment fits the run's share, and vLLM holds at least one conversation."""
        return self.peak <= self.budget and not self.cache_shortfall


def find_card(asked: float | None, gpus: Sequence[Gpu]) -> Card:
    """The card to plan for: --gpu-memory-gib, else the smallest of `gpus`, else ASSUMED_GIB. asked: in GiB."""
    if asked is not None:
        if not 0 < asked <= 4096:
            raise PlanError(f"--gpu-memory-gib {asked:g} is no card: type its memory in GiB, like --gpu-memory-gib 80.")
        return Card(int(asked * GIB), "asked for by --gpu-memory-gib", True)
    uuids = {gpu.uuid for gpu in gpus if gpu.uuid}
    found = [entry.total for entry in machine.gpu_memory() if entry.uuid in uuids] if uuids else []
    sizes = [total for total in found if total is not None]
    if sizes and len(sizes) == len(gpus):
        return Card(min(sizes) * 2**20, "as nvidia-smi says", True)
    why = "no GPU is visible" if not gpus else "nvidia-smi does not say"
    return Card(int(ASSUMED_GIB * GIB), f"assumed, since {why}; --gpu-memory-gib N plans for another", False)


def plan_memory(plan: StudyPlan, allotment: Allotment, card: Card, environ: Mapping[str, str]) -> MemoryPlan | None:
    """The memory plan of the run that takes most; None for runs without GPUs and for a model of unknown shape."""
    if not allotment.slots:
        return None
    found = []
    for arm in {spec.arm: spec for spec in plan.runs}.values():
        shape = shape_of(arm.ppo.model.path, environ)
        if shape is not None:
            most = (card.is_known and len(allotment.gpus)) or _MOST_GPUS
            at_once = min(allotment.a_node or allotment.max_concurrent, allotment.max_concurrent)
            found.append(plan_run(arm, shape, card, at_once, most))
    return max(found, key=lambda each: (not each.fits, each.peak), default=None)


def plan_run(spec: RunSpec, shape: ModelShape, card: Card, at_once: int, most: int) -> MemoryPlan:
    """The memory plan of one run. at_once: runs that the study has on the machine at a time. most: see MemoryPlan."""
    n_gpus = spec.ppo.trainer.n_gpus_per_node
    share = min(n_gpus, 1.0)
    budget = int(share * card.size)
    found = memory.parts(shape, spec.ppo, budget)
    a_gpu = min(int(1 / share + 1e-9), at_once)
    host = memory.host_bytes(found, spec.ppo)
    return MemoryPlan(spec, shape, card, share, budget, found, host, a_gpu, at_once, most)


def table(found: MemoryPlan) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and rows of the plan, in GiB; moments that the run has not are left out."""
    has_critic = "critic" in memory.trained_parameters(found.shape, found.spec.ppo)
    moments = [number for number, name in enumerate(PHASES) if has_critic or not name.startswith("critic")]
    if not memory.deals_weights(found.spec.ppo):
        moments.remove(memory.START)
    rows = [[part.name, *(_cell(part.gpu[moment]) for moment in moments), _cell(part.host)] for part in found.parts]
    sums = memory.totals(found.parts)
    rows.append(["sum", *(_gib(sums[moment]) for moment in moments), _cell(sum(part.host for part in found.parts))])
    over = ["" if sums[moment] <= found.budget else f"{_gib(sums[moment] - found.budget)} over" for moment in moments]
    rows.append([f"of {_gib(found.budget)}", *over, ""])
    return ("GiB on each GPU", *(PHASES[moment] for moment in moments), "host"), rows


def lines(found: MemoryPlan, study: Study) -> list[str]:
    """The plan in sentences: the share, what vLLM is given, and whether it fits."""
    config = found.spec.ppo
    said = [f"memory: a card of {_gib(found.card.size)} GiB ({found.card.source}); {_share_words(found)}"]
    if config.rollout.name == "vllm":
        said.append(_vllm_words(found))
    if found.shape.is_counted:
        said.append(
            "weights are counted over the model of its config.json; what its passes hold is estimated as that of a "
            "Qwen2 of its widths, and its attention may hold more"
        )
    if found.host:
        needed = f"{_gib(found.host)} GiB a run, {_gib(found.host * found.a_node)} for {found.a_node} at once"
        said.append(f"host memory beside the usual: {needed}")
    saving = _gib(memory.saving_bytes(found.shape, config))
    said.append(f"host memory while a run saves its state: {saving} GiB more; loading one takes a tensor at a time")
    return [*said, verdict(found, study)]


def _share_words(found: MemoryPlan) -> str:
    ranks = memory.ranks(found.spec.ppo)
    whose = f"the run that takes most is {found.spec.run_id}"
    if found.share < 1:
        return f"a run has {found.share:g} of it, {_gib(found.budget)} GiB; {whose}"
    return f"a run has {ranks} whole card{'s' * (ranks > 1)}; {whose}"


def _vllm_words(found: MemoryPlan) -> str:
    rollout = found.spec.ppo.rollout
    given = rollout.gpu_memory_utilization * found.budget
    of = "the run's share" if found.share < 1 else "the card"
    text = f"vLLM: gpu_memory_utilization {rollout.gpu_memory_utilization:g} of {of}, {_gib(given)} GiB"
    if found.cache_shortfall:
        return f"{text}: {_gib(found.cache_shortfall)} GiB too little for one conversation"
    at_once = f"{found.conversations} conversations of {memory.longest(found.spec.ppo)} tokens at once"
    leaves = "; it leaves the GPU during the update" if rollout.free_cache_engine else ""
    return f"{text}: {at_once}{leaves}"


def verdict(found: MemoryPlan, study: Study) -> str:
    """One sentence: it fits and by how much, or what is too much and what to type."""
    moment = _worst(found)
    if found.fits:
        share = found.peak / found.budget
        tight = (
            "; that is tight, since what the allocator loses between blocks is not counted" if share > _TIGHT else ""
        )
        return f"fits: {_gib(found.peak)} of {_gib(found.budget)} GiB at its highest ({moment}){tight}"
    return f"DOES NOT FIT: {_too_much(found)}. {_advice(found, study)}"


def _worst(found: MemoryPlan) -> str:
    sums = memory.totals(found.parts)
    return PHASES[sums.index(max(sums))]


def _too_much(found: MemoryPlan) -> str:
    """What takes most at the worst moment, or that vLLM has too little."""
    if found.peak <= found.budget:
        return f"vLLM lacks {_gib(found.cache_shortfall)} GiB for one conversation"
    moment = PHASES.index(_worst(found))
    largest = sorted(found.parts, key=lambda part: part.gpu[moment], reverse=True)[:5]
    named = ", ".join(f"{part.name} {_gib(part.gpu[moment])}" for part in largest if part.gpu[moment])
    return f"{PHASES[moment]} takes {_gib(found.peak)} GiB of {_gib(found.budget)} ({named}, ...)"


def why_not(found: MemoryPlan, study: Study) -> tuple[str, list[str]]:
    """What is too much for the cards that the runs are planned for, and options to type any of which makes it fit.

    The options are most useful first and none where nothing helps. An empty text where the runs fit, or where the
    memory of the cards is not known.
    """
    if found.fits or not found.card.is_known:
        return "", []
    return _too_much(found), _remedies(found, study)


def _remedies(found: MemoryPlan, study: Study) -> list[str]:
    return list(itertools.islice(_ways(found, study), _MOST_WAYS))


def _advice(found: MemoryPlan, study: Study) -> str:
    ways = _remedies(found, study)
    if not ways:
        return "No setting makes it fit: choose a smaller model with --model, or larger cards."
    return f"Any of these makes it fit: {'; '.join(ways)}."


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


def _ways(found: MemoryPlan, study: Study) -> Iterator[str]:
    """Changes that make it fit, the fewest at once first, without those that change all that one before them does."""
    usable = [change for change in _CHANGES if not study.axis.swept & change[1].keys() and _is_less(found, change[1])]
    sufficient: list[set[str]] = []
    for count in (1, 2, 3):
        for chosen in itertools.combinations(usable, count):
            change = {name: value for _, settings in chosen for name, value in settings.items()}
            is_twice = len(change) < sum(len(settings) for _, settings in chosen)
            if is_twice or any(way <= change.keys() for way in sufficient) or not _would_fit(found, change):
                continue
            sufficient.append(set(change))
            yield " ".join(text for text, _ in chosen)


def _is_less(found: MemoryPlan, change: Mapping[str, object]) -> bool:
    """Whether `change` changes something, and gives a run no fewer GPUs than it has, nor more than there are.

    Adapters are not made larger than they are.
    """
    config = found.spec.ppo
    try:
        changed = with_overrides(config, change)
    except ConfigError:
        return False
    gpus = changed.trainer.n_gpus_per_node
    if config.model.lora_rank and "model.lora_rank" in change:
        return False
    return changed != config and config.trainer.n_gpus_per_node <= gpus <= max(found.most, 1)


def _would_fit(found: MemoryPlan, change: Mapping[str, object]) -> bool:
    try:
        config = with_overrides(found.spec.ppo, change)
    except ConfigError:
        return False
    return plan_run(replace(found.spec, config=config), found.shape, found.card, found.a_node, found.most).fits


def check(found: MemoryPlan, plan: StudyPlan, gpus: Sequence[Gpu]) -> None:
    """PlanError where the runs do not fit their cards, the host, or what others leave free of `gpus`."""
    check_fits(found, plan.study)
    available = machine.available_memory()
    if found.host * found.a_node > available:
        raise PlanError(
            f"{found.a_node} runs at once keep {_gib(found.host * found.a_node)} GiB in the host's memory, and "
            f"{_gib(available)} are available: type --max-concurrent with a smaller number, or free memory."
        )
    ending = {process.pid for process in leftovers(plan.folder)}
    check_free(found.peak * found.a_gpu, gpus, ending)


def check_fits(found: MemoryPlan, study: Study) -> None:
    """PlanError where the runs do not fit the cards that they are planned for, whose memory is known."""
    if found.card.is_known and not found.fits:
        raise PlanError(
            f"The runs do not fit: {_too_much(found)}. {_advice(found, study)} --dry-run shows the whole plan; "
            f"--gpu-memory-gib N plans for a card of another size."
        )


def check_free(needed: int, gpus: Sequence[Gpu], ending: AbstractSet[int]) -> None:
    """PlanError where one of `gpus` has fewer bytes free than `needed`, naming the processes that hold its memory.

    ending: ids of processes that are ended before the runs start, whose memory counts as free.
    """
    free = {entry.uuid: entry.free for entry in machine.gpu_memory()}
    everyone = machine.gpu_processes()
    for gpu in gpus:
        holders = [holder for holder in everyone if holder.uuid == gpu.uuid]
        left = free.get(gpu.uuid)
        if left is None:
            continue
        left += sum(holder.used or 0 for holder in holders if holder.pid in ending)
        if left * 2**20 >= needed:
            continue
        held = machine.holder_words([holder for holder in holders if holder.pid not in ending])
        raise PlanError(
            f"GPU {gpu.id} has {left / 1024:.1f} GiB free and the runs on it take {_gib(needed)} GiB; its memory is "
            f"{held}. End them if they are leftovers, wait until they end, or choose other GPUs with --gpus."
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _cell(size: int) -> str:
    return _gib(size) if size else "-"
