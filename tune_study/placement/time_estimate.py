"""Estimate the duration of a study from the FLOPs and bytes of a step.

On GPUs the estimate is an upper bound at their published speed. It assumes that passes over whole sequences are limited
by arithmetic, and sampling by reading weights and KV cache. It also assumes that every conversation has maximum length,
so a run with shorter replies is faster. Swapping to host memory, a few seconds per step, is not counted. No estimate
has been compared with a measurement on a GPU.

On a CPU the estimate is for cores like the one on which the rates below were measured.
"""

import math
import os
from typing import NamedTuple

from trainable.config.run_config import RunConfig
from trainable.rollout.kv_cache_size import compute_max_tokens, compute_token_kv_bytes
from tune_study.placement import memory
from tune_study.placement.disk import count_occurrences
from tune_study.placement.memory_plan import MemoryPlan
from tune_study.placement.model_size import ModelShape, count_policy_parameters, read_model_shape
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.run_spec import RunSpec
from tune_study.plan.study_plan import StudyPlan

ASSUMED_MFU, ASSUMED_BANDWIDTH_FRACTION = 0.4, 0.5
"""Fractions of a GPU's published rates that passes (FLOP/s) and sampling (bytes/s) are assumed to reach. No run on a
GPU has been measured."""
FLOAT32_SLOWDOWN = 15
"""Duration of float32 passes relative to bfloat16, as on an H100: 67 against 989 TFLOP/s (NVIDIA's data sheet)."""
OFFLOADED_SECONDS_PER_PARAMETER = 6.8e-9
"""Seconds per parameter of an offloaded AdamW step on one CPU thread, as measured with torch 2.13."""


class CpuRates(NamedTuple):
    """FLOP/s that one core reaches, as measured with the laptop preset (docs/performance.md).

    passes: in updates and passes without gradients. sampling: in rollouts.
    """

    passes: float
    sampling: float


COMPILED_RATES, TORCH_RATES = CpuRates(passes=48e9, sampling=35e9), CpuRates(passes=40e9, sampling=11e9)
TYPICAL_FILL = 0.5
"""Typical tokens of an episode relative to the maximum, as measured: 105 of 200 in the laptop preset."""
RUN_START_SECONDS = 4.0
"""Seconds before the first step of a run on a CPU: for imports, levels and the model."""


class GpuRates(NamedTuple):
    """Published rates of one GPU.

    peak_flops_per_s: dense bfloat16 FLOP/s. memory_bandwidth: bytes per second read from the GPU's memory.
    """

    peak_flops_per_s: float
    memory_bandwidth: float


_GPU_RATES: tuple[tuple[str, GpuRates], ...] = (
    ("H100 PCIe", GpuRates(756e12, 2.0e12)),
    ("H100 NVL", GpuRates(835e12, 3.9e12)),
    ("H100", GpuRates(989e12, 3.35e12)),
    ("H200", GpuRates(989e12, 4.8e12)),
    ("B200", GpuRates(2250e12, 8.0e12)),
    ("A100-SXM4-80GB", GpuRates(312e12, 2.039e12)),
    ("A100 80GB", GpuRates(312e12, 1.935e12)),
    ("A100", GpuRates(312e12, 1.555e12)),
    ("L40S", GpuRates(362e12, 0.864e12)),
    ("L4", GpuRates(121e12, 0.3e12)),
    ("A10", GpuRates(125e12, 0.6e12)),
    ("RTX 4090", GpuRates(165e12, 1.008e12)),
)
"""(part of a GPU's name as nvidia-smi prints it, rates). Source: NVIDIA's data sheets.

The first match counts, so longer names come before shorter ones that they contain.
"""


def find_rates(name: str) -> GpuRates | None:
    """Find the rates of the GPU called `name`; None if unknown."""
    return next((rates for name_part, rates in _GPU_RATES if name_part in name), None)


def estimate_forward_flops(shape: ModelShape, rows: int, tokens: int, with_head: bool) -> float:
    """Estimate the FLOP of one forward pass over `rows` sequences of `tokens` tokens.

    with_head: whether the pass ends with the product of hidden states and the language-model head.

    The blocks take 2 FLOP per weight and token. The attention of a block has two products, queries with keys and
    probabilities with values, each with 2 h FLOP for each of the T (T + 1) / 2 pairs of tokens. The head takes 2 h V
    FLOP per token. Source: definition (a multiplication and an addition count as two).
    """
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    # Not counted here: the embedding, which is read without a product, and the head, which is the embedding if tied.
    embedding_parameters = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    block_flops = 2.0 * (count_policy_parameters(shape) - embedding_parameters) * tokens
    attention_flops = 2.0 * layers * hidden * tokens * (tokens + 1)
    return rows * (block_flops + attention_flops + with_head * 2.0 * hidden * shape.vocab_size * tokens)


def estimate_update_flops(shape: ModelShape, config: RunConfig) -> float:
    """Estimate the FLOP of one training step without sampling: passes of the reference, for values, and updates.

    This is an upper bound, since every conversation is assumed to have maximum length. Log-probs of the sampling policy
    need a separate pass if the engine has its own weights, unless it is off (rollout.recompute_logprobs).

    A pass with gradients counts as three forward passes, since the backward pass computes the gradients of activations
    and of weights. With LoRA it counts as two, because frozen weights have no gradients. Gradient checkpointing adds
    one, because it repeats the forward pass. Matrix products with adapters are not counted.
    """
    env, tokens = config.env, compute_max_tokens(config)
    rows = env.env_groups * env.group_size * env.max_conversations_per_rollout
    train_factor = 3 - (config.model.lora_rank > 0) + config.model.enable_gradient_checkpointing
    policy_flops, critic_flops = (estimate_forward_flops(shape, rows, tokens, with_head) for with_head in (True, False))
    recompute_factor = config.actor.loss.needs_pass_before_step  # 1 if the loss needs a pass without gradients
    total_flops = (
        config.actor.ppo_epochs * (train_factor + recompute_factor) * policy_flops
        + config.trains_with_reference * policy_flops
        + (config.rollout.has_own_weights and config.rollout.recompute_logprobs) * policy_flops
    )
    if config.algorithm.estimator.needs_critic:  # values of the rollouts, one pass without gradients
        total_flops += critic_flops
    # A value head on the policy's trunk (critic.shared_trunk) is trained in the policy's passes.
    if "critic" in memory.count_trained_parameters(shape, config):
        total_flops += config.critic.ppo_epochs * train_factor * critic_flops
    return total_flops


def estimate_sampling_seconds(shape: ModelShape, config: RunConfig, rows: int, rates: GpuRates) -> float:
    """Estimate the seconds that one rank needs to roll out `rows` conversations.

    That is one forward pass over all tokens, and one read of weights and KV cache per sampled token.
    """
    dtype_bytes = memory.get_dtype_bytes(config)
    # vLLM decodes at most VLLM_MAX_SEQS conversations at once and reads its weights for each such wave. The torch
    # sampler decodes all rows together.
    waves = math.ceil(rows / memory.VLLM_MAX_SEQS) if config.rollout.uses_vllm else 1
    tokens = compute_max_tokens(config)
    # A conversation grows from nothing to its full length, so its cache is half full on average.
    cache_bytes = rows * tokens / 2 * compute_token_kv_bytes(shape, dtype_bytes)
    # Weights are in `model.dtype` in vLLM and in a base that is frozen under LoRA. Otherwise, the torch sampler reads
    # the policy's float32 weights and casts them for every token.
    weight_dtype_bytes = dtype_bytes if config.rollout.uses_vllm or config.model.lora_rank else memory.FLOAT32
    read_bytes = waves * weight_dtype_bytes * count_policy_parameters(shape) + cache_bytes
    new_tokens = config.env.max_turn * config.rollout.response_length
    decode_seconds = new_tokens * read_bytes / (ASSUMED_BANDWIDTH_FRACTION * rates.memory_bandwidth)
    prefill_flops = estimate_forward_flops(shape, rows, tokens, with_head=True)
    return decode_seconds + prefill_flops / (ASSUMED_MFU * rates.peak_flops_per_s)


def estimate_offload_seconds(shape: ModelShape, config: RunConfig) -> float:
    """Estimate the seconds per training step of optimizer steps on the CPU (trainer.offload_optimizer)."""
    if not (config.trainer.uses_deepspeed and config.trainer.offload_optimizer):
        return 0.0
    seconds = 0.0
    for name, parameters in memory.count_trained_parameters(shape, config).items():
        optim = config.actor if name == "policy" else config.critic
        steps = optim.ppo_epochs * math.ceil(config.max_batch_size / optim.ppo_mini_batch_size)
        seconds += steps * parameters / memory.count_ranks(config) * OFFLOADED_SECONDS_PER_PARAMETER
    return seconds


def estimate_step_seconds(shape: ModelShape, config: RunConfig, rates: GpuRates) -> float:
    """Estimate the maximum seconds of one training step without validation.

    The ranks of a run divide the work. A run on a fraction of a GPU shares its time with other runs.
    """
    flops_per_s = ASSUMED_MFU * rates.peak_flops_per_s / (FLOAT32_SLOWDOWN if config.model.dtype == "float32" else 1)
    env = config.env
    rows = -(-env.env_groups * env.group_size * env.max_conversations_per_rollout // memory.count_ranks(config))
    update_seconds = estimate_update_flops(shape, config) / memory.count_ranks(config) / flops_per_s
    gpu_seconds = update_seconds + estimate_sampling_seconds(shape, config, rows, rates)
    return gpu_seconds / min(config.trainer.n_gpus_per_node, 1.0) + estimate_offload_seconds(shape, config)


def estimate_run_seconds(shape: ModelShape, config: RunConfig, rates: GpuRates) -> float:
    """Estimate the seconds of a whole run: its steps, validations and tests."""
    env, trainer = config.env, config.trainer
    gpu_fraction = min(trainer.n_gpus_per_node, 1.0)
    # The test levels are rolled out at the end, sampled and greedy.
    evaluations = [
        (_count_validations(config), env.val_env_groups * env.val_group_size),
        (2 * (env.test_env_groups > 0), env.test_env_groups),
    ]
    evaluation_seconds = sum(
        count * estimate_sampling_seconds(shape, config, -(-rows // memory.count_ranks(config)), rates)
        for count, rows in evaluations
    )
    return (
        trainer.total_training_steps * estimate_step_seconds(shape, config, rates) + evaluation_seconds / gpu_fraction
    )


def estimate_cpu_run_seconds(shape: ModelShape, config: RunConfig) -> float:
    """Estimate the seconds of a run on one core, with episodes of typical length. A typical tree asks no child."""
    passes_rate = (COMPILED_RATES if config.model.compiled_passes else TORCH_RATES).passes
    sampling_rate = (COMPILED_RATES if config.rollout.uses_compiled_sampler else TORCH_RATES).sampling
    env, trainer, tokens = config.env, config.trainer, round(TYPICAL_FILL * compute_max_tokens(config))
    episodes = (
        trainer.total_training_steps * env.env_groups * env.group_size
        + _count_validations(config) * env.val_env_groups * env.val_group_size
        + 2 * env.test_env_groups
    )
    step_flops = estimate_update_flops(shape, config) / env.max_conversations_per_rollout
    update_flops = TYPICAL_FILL * trainer.total_training_steps * step_flops
    sampling_flops = estimate_forward_flops(shape, episodes, tokens, with_head=True)
    return RUN_START_SECONDS + update_flops / passes_rate + sampling_flops / sampling_rate


def _estimate_cpu_seconds(plan: StudyPlan, spec: RunSpec) -> float | None:
    """Estimate the seconds of a run on one core; None if unknown."""
    if (estimate_step := plan.study.family.estimate_step_seconds) is not None:
        step_seconds = estimate_step(spec.config)
        return None if step_seconds is None else step_seconds * spec.steps
    shape = read_model_shape(spec.ppo_config.model.path, os.environ)
    return None if shape is None else estimate_cpu_run_seconds(shape, spec.ppo_config)


def format_cpu_time_line(plan: StudyPlan, resource_plan: ResourcePlan) -> str | None:
    """Format the estimate for a study that trains on CPUs; None on GPUs, and if the time of a run is unknown."""
    if resource_plan.gpu_slots:
        return None
    run_seconds = {spec.run_id: _estimate_cpu_seconds(plan, spec) for spec in plan.runs}
    known_seconds = {run_id: seconds for run_id, seconds in run_seconds.items() if seconds is not None}
    if len(known_seconds) < len(run_seconds):
        return None
    # A trial uses one core, whether or not it trains its runs together.
    trial_seconds = [sum(known_seconds[spec.run_id] for spec in specs) for specs in plan.trials]
    types = {config.model.dtype for config in plan.ppo_configs} - {"float32"}
    types_text = f"; measured in float32, and a CPU is slower in {' and '.join(sorted(types))}" if types else ""
    study_seconds = max(*trial_seconds, sum(trial_seconds) / max(resource_plan.max_concurrent, 1))
    return (
        f"Time: about {format_estimate(max(known_seconds.values()), digits=2)} per run, "
        f"{format_estimate(study_seconds, digits=2)} for these {len(plan.runs)} runs, and half a minute to "
        f"start and to report; an estimate from measurements on one machine, others take half as long or twice as long"
        f"{types_text}"
    )


def _count_validations(config: RunConfig) -> int:
    """Count a run's validations: sampled and greedy before step 1, sampled every `test_freq` steps, greedy last."""
    trainer = config.trainer
    return 2 * trainer.val_before_train + count_occurrences(trainer.total_training_steps, trainer.test_freq) + 1


def format_time_line(
    memory_plan: MemoryPlan, plan: StudyPlan, resource_plan: ResourcePlan, gpu_names: tuple[str, ...]
) -> str | None:
    """Format the estimate as a line of the plan; None if the rates of a GPU are unknown.

    gpu_names: names of the GPUs in use, as nvidia-smi prints them.
    """
    known_rates = [gpu_rates for name in gpu_names if (gpu_rates := find_rates(name)) is not None]
    if not known_rates or len(known_rates) < len(gpu_names):
        return None
    # A run may get any of the GPUs, so the slowest arithmetic and the slowest memory count.
    rates = GpuRates(
        min(gpu_rates.peak_flops_per_s for gpu_rates in known_rates),
        min(gpu_rates.memory_bandwidth for gpu_rates in known_rates),
    )
    # The run that needs most memory stands for all runs.
    config = memory_plan.config
    seconds_per_run = estimate_run_seconds(memory_plan.shape, config, rates)
    seconds_per_study = seconds_per_run * math.ceil(len(plan.runs) / max(resource_plan.max_concurrent, 1))
    step_text = format_estimate(estimate_step_seconds(memory_plan.shape, config, rates))
    return (
        f"Time: at most about {step_text} per step, {format_estimate(seconds_per_run)} per run, "
        f"{format_estimate(seconds_per_study)} for the study; an estimate for conversations of "
        f"{compute_max_tokens(config)} tokens, at {ASSUMED_MFU:.0%} of {rates.peak_flops_per_s / 1e12:g} "
        f"TFLOP/s and {ASSUMED_BANDWIDTH_FRACTION:.0%} of {rates.memory_bandwidth / 1e12:g} TB/s"
    )


def format_estimate(seconds: float, digits: int = 3) -> str:
    """Format seconds in the largest unit that they reach, such as `2.5 min`. digits: significant digits."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.{digits}g} {unit}"
    return f"{seconds:.{digits}g} s"
