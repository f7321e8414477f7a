"""Estimate the duration of a run from the FLOP and bytes of its steps.

On GPUs an upper bound at their published speed, since every conversation is assumed to have maximum length. No estimate
has been compared with a GPU. On a CPU, for cores like the one on which the rates below were measured.
"""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from trainable.config.constants import VLLM_MAX_SEQS
from trainable.config.run_config import RunConfig
from trainable.families import Family
from trainable.models.qwen2_shape import estimate_forward_flops
from trainable.rollout.kv_cache_size import compute_max_tokens, compute_token_kv_bytes, count_ranks, get_dtype_bytes
from tune_study.placement.disk import count_validations
from tune_study.placement.memory import FLOAT32, ModelShape, count_trained_parameters
from tune_study.placement.memory_plan import MemoryPlan
from tune_study.placement.model_files import read_model_shape
from tune_study.plan.study_plan import ResourcePlan, RunSpec, StudyPlan

ASSUMED_MFU, ASSUMED_BANDWIDTH_FRACTION = 0.4, 0.5
"""Fractions of a GPU's published rates that passes (FLOP/s) and sampling (bytes/s) are assumed to reach."""
PASS_RATES, SAMPLING_RATES = {True: 48e9, False: 40e9}, {True: 35e9, False: 11e9}
"""FLOP/s that one core reaches with and without compiled code, with the laptop preset (docs/performance.md)."""
LARGE_MODEL, LARGE_MODEL_RATE, HALF_PRECISION_GAIN = 10_000_000, 70e9, 2.0
"""Parameters from which passes and sampling reach another rate, that rate in FLOP/s per core, and the gain of numbers
of 16 bits on cores that have such instructions, as measured with SmolLM2-135M."""
TYPICAL_FILL, RUN_START_SECONDS = 0.5, 4.0
"""Typical tokens of an episode relative to the maximum, as measured (105 of 200 in the laptop preset), and seconds
before the first step of a run on a CPU, for imports, levels and the model."""


class GpuRates(NamedTuple):
    """Published rates of one GPU: dense bfloat16 FLOP/s, and bytes per second read from its memory."""

    peak_flops_per_s: float
    memory_bandwidth: float


_GPU_RATES = {
    "H100 PCIe": GpuRates(756e12, 2.0e12),
    "H100 NVL": GpuRates(835e12, 3.9e12),
    "H100": GpuRates(989e12, 3.35e12),
    "H200": GpuRates(989e12, 4.8e12),
    "B200": GpuRates(2250e12, 8.0e12),
    "A100-SXM4-80GB": GpuRates(312e12, 2.039e12),
    "A100 80GB": GpuRates(312e12, 1.935e12),
    "A100": GpuRates(312e12, 1.555e12),
    "L40S": GpuRates(362e12, 0.864e12),
    "L4": GpuRates(121e12, 0.3e12),
    "A10": GpuRates(125e12, 0.6e12),
    "RTX 4090": GpuRates(165e12, 1.008e12),
}
"""Rates by a part of the name that nvidia-smi prints; the first match counts. Source: NVIDIA's data sheets."""


def estimate_update_flops(shape: ModelShape, config: RunConfig) -> float:
    """Estimate the FLOP of one training step without sampling: passes of the reference, for values, and updates.

    A pass with gradients counts as three, since a backward pass computes gradients of activations and of weights, which
    are frozen with LoRA. Gradient checkpointing repeats the forward pass.
    """
    actor, tokens = config.actor, compute_max_tokens(config)
    policy_flops, critic_flops = (
        config.episodes_per_step * estimate_forward_flops(shape, [tokens], tokens, outputs)
        for outputs in (shape.vocab_size, 0)
    )
    train_passes = 3 - (config.model.lora_rank > 0) + config.model.enable_gradient_checkpointing
    policy_passes = actor.ppo_epochs * (train_passes + actor.loss.needs_pass_before_step) + config.trains_with_reference
    # An engine with its own weights needs one more pass, for the log-probs of the policy, unless that is off.
    if config.rollout.has_own_weights and config.rollout.recompute_logprobs:
        policy_passes += config.filter.max_num_gen_batches
    critic_passes = float(config.algorithm.estimator.needs_critic)  # values of the rollouts
    if "critic" in count_trained_parameters(shape, config):  # else a head on the policy's trunk, if any
        critic_passes += config.critic.ppo_epochs * train_passes
    return policy_passes * policy_flops + critic_passes * critic_flops


def estimate_sampling_seconds(shape: ModelShape, config: RunConfig, rows: int, rates: GpuRates) -> float:
    """Estimate the seconds in which all ranks roll out `rows` conversations.

    That is one forward pass over all tokens, and one read of weights and KV cache per sampled token.
    """
    rollout, tokens, rank_rows = config.rollout, compute_max_tokens(config), -(-rows // count_ranks(config))
    # vLLM decodes at most VLLM_MAX_SEQS conversations at once. The torch sampler decodes all of them, and without LoRA
    # reads the policy's float32 weights.
    waves = math.ceil(rank_rows / VLLM_MAX_SEQS) if rollout.uses_vllm else 1
    weight_bytes = get_dtype_bytes(config) if rollout.uses_vllm or config.model.lora_rank else FLOAT32
    # A conversation grows from nothing to its full length, so its cache is half full on average.
    cache_bytes = rank_rows * tokens / 2 * compute_token_kv_bytes(shape, config)
    read_bytes = waves * weight_bytes * shape.parameters + cache_bytes
    decode_seconds = config.env.max_turn * rollout.response_length * read_bytes / rates.memory_bandwidth
    prefill_flops = rank_rows * estimate_forward_flops(shape, [tokens], tokens, shape.vocab_size)
    return decode_seconds / ASSUMED_BANDWIDTH_FRACTION + prefill_flops / rates.peak_flops_per_s / ASSUMED_MFU


def estimate_run_seconds(shape: ModelShape, config: RunConfig, rates: GpuRates) -> float:
    """Estimate the maximum seconds of a run: steps, validations, and both passes over the test levels.

    The ranks of a run divide the work. A run on a fraction of a GPU shares its time with other runs.
    """
    env, steps = config.env, config.trainer.total_training_steps
    seconds = steps * estimate_update_flops(shape, config) / count_ranks(config) / rates.peak_flops_per_s / ASSUMED_MFU
    val_rows = env.val_env_groups * env.val_group_size
    batches, branching = steps * config.filter.max_num_gen_batches, config.rollout
    # Each round of branching is a conversation of its own, after that of the first episodes of all prefix trees. Its
    # episodes are assumed to share no turn.
    trees = config.episodes_per_step // branching.episodes_per_tree
    rollouts = [(batches, trees), (batches * branching.ts_l, trees * branching.ts_n)]
    rollouts += [(count_validations(config), val_rows), (2, env.test_env_groups)]
    seconds += sum(count * estimate_sampling_seconds(shape, config, rows, rates) for count, rows in rollouts if rows)
    return seconds / min(config.trainer.n_gpus_per_node, 1.0)


def estimate_cpu_run_seconds(spec: RunSpec, family: Family) -> float:
    """Estimate the seconds of a run on its cores, with episodes of typical length; infinite if unknown."""
    if family.estimate_step_seconds is not None:
        return spec.steps * (family.estimate_step_seconds(spec.config) or math.inf)
    config = spec.ppo_config
    shape = read_model_shape(config.model.path, os.environ)
    if shape is None:
        return math.inf
    env, tokens = config.env, round(TYPICAL_FILL * compute_max_tokens(config))
    episodes = spec.steps * (1 + config.further_batches) * env.env_groups * env.group_size + 2 * env.test_env_groups
    episodes += count_validations(config) * env.val_env_groups * env.val_group_size
    # Tokens that a branch shares are read again, which costs as much as sampling them.
    sampling_flops = episodes * estimate_forward_flops(shape, [tokens], tokens, shape.vocab_size)
    # A typical tree asks no child.
    update_flops = spec.steps * TYPICAL_FILL * estimate_update_flops(shape, config) / env.max_conversations_per_rollout
    pass_rate, sampling_rate = LARGE_MODEL_RATE, LARGE_MODEL_RATE
    if shape.parameters < LARGE_MODEL:
        pass_rate = PASS_RATES[config.model.compiled_passes]
        sampling_rate = SAMPLING_RATES[config.rollout.uses_compiled_sampler]
    seconds = update_flops / pass_rate + sampling_flops / sampling_rate
    gain = 1.0 if config.model.dtype == "float32" else HALF_PRECISION_GAIN
    return RUN_START_SECONDS + seconds / gain / config.trainer.cpu_threads


def format_time_line(
    plan: StudyPlan, resource_plan: ResourcePlan, memory_plan: MemoryPlan | None, gpu_names: Sequence[str]
) -> str:
    """Format the estimated time of a study, on GPUs with these names; empty if it is unknown."""
    num_runs, num_slots = len(plan.runs), max(resource_plan.max_concurrent, 1)
    if not resource_plan.gpu_slots:
        # A trial uses the same cores, whether or not it trains its runs together.
        trials = [sum(estimate_cpu_run_seconds(spec, plan.study.family) for spec in specs) for specs in plan.trials]
        seconds = max(*trials, sum(trials) / num_slots)
        basis = "estimated from measurements on one machine; others take half as long or twice as long"
        line = f"Time: about {format_estimate(seconds)} for these {num_runs} runs, {basis}"
        return line if math.isfinite(seconds) else ""
    all_rates = [next((rates for part, rates in _GPU_RATES.items() if part in name), None) for name in gpu_names]
    if memory_plan is None or not all_rates or None in all_rates:
        return ""
    # The rates are for passes in 16 bits, and for optimizer steps on the GPU.
    config = memory_plan.config
    if config.model.dtype == "float32" or config.trainer.offload_optimizer:
        return ""
    # A run may get any of the GPUs, so the slowest arithmetic and the slowest memory count.
    rates = GpuRates(*map(min, zip(*filter(None, all_rates), strict=True)))
    # The run that needs most memory stands for all runs.
    seconds = estimate_run_seconds(memory_plan.shape, config, rates) * math.ceil(num_runs / num_slots)
    study = f"these {num_runs} runs, with conversations of full length"
    return f"Time: at most about {format_estimate(seconds)} for {study}"


def format_estimate(seconds: float) -> str:
    """Format seconds with two digits in the largest unit that they reach, such as `2.5 min`."""
    units = {"d": 86_400, "h": 3600, "min": 60, "s": 0}
    unit, size = next(entry for entry in units.items() if seconds >= entry[1])
    number = seconds / (size or 1)
    return f"{number:.2g} {unit}" if number < 100 else f"{number:.0f} {unit}"
