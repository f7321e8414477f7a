"""Floating-point operations of a step's phases, and the share of this machine's own rate that each of them reaches."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from trainable.config.run_config import RunConfig
from trainable.models.interface import Shape
from trainable.rollout.batch import Batch
from trainable.rollout.episode import Episode

BACKWARD_FACTOR = 2.0
"""A backward pass does two products for each of the forward pass, one where weights are frozen beside adapters; blocks
that are made again, and products with adapters, are not counted."""


def estimate_forward_flops(
    shape: Shape, lengths: Sequence[int], output_tokens: int, output_size: int, cached_tokens: int = 0
) -> float:
    """Operations of a forward pass over sequences, each after `read` tokens whose keys are kept.

        2 · products + 4 · blocks · channels of all heads · pairs of tokens that attend to each other

    finished: tokens at which the last block is finished and the head, of `outputs` entries, is applied.
    """
    weights_before, weights_after = shape.block_weights
    blocks, tokens = shape.num_hidden_layers, sum(lengths)
    products = tokens * (blocks * weights_before + (blocks - 1) * weights_after) + output_tokens * (
        weights_after + output_size * shape.hidden_size
    )
    pairs = sum(length * (length + 1) / 2 + cached_tokens * length for length in lengths)
    return 2.0 * products + 4.0 * blocks * shape.attention_size * pairs


def estimate_rollout_flops(shape: Shape, episodes: Sequence[Episode]) -> float:
    """Operations of sampling the episodes with a cache that keeps every turn, each group's opening read once."""
    prompt_lengths = {episode.group: int(episode.mask.argmax()) for episode in episodes}
    total = sum(estimate_forward_flops(shape, [length], 0, 0) for length in prompt_lengths.values())
    for episode in episodes:
        prompt_length = prompt_lengths[episode.group]
        total += estimate_forward_flops(
            shape, [len(episode.tokens) - prompt_length], episode.response_tokens, shape.vocab_size, prompt_length
        )
    return total


def estimate_training_flops(shape: Shape, config: RunConfig, batch: Batch) -> dict[str, float]:
    """Operations of each phase of training on `batch`, by the end of its column's name; what is off is left out."""
    lengths, trained_tokens = batch.count_needed_tokens().tolist(), int(batch.mask.sum())
    value_flops, policy_flops = (
        estimate_forward_flops(shape, lengths, trained_tokens, outputs) for outputs in (1, shape.vocab_size)
    )
    update_factor = 1 + (BACKWARD_FACTOR / 2 if config.model.lora_rank else BACKWARD_FACTOR)
    extra_forwards = config.actor.loss.needs_pass_before_step  # without gradients
    phase_flops = {"update_actor": (update_factor + extra_forwards) * config.actor.ppo_epochs * policy_flops}
    if config.algorithm.estimator.needs_critic:
        phase_flops["values"] = value_flops
        if not config.critic.shared_trunk:
            phase_flops["update_critic"] = update_factor * config.critic.ppo_epochs * value_flops
    if config.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        phase_flops["reference"] = policy_flops
    return phase_flops


def compute_mfu(flops: Mapping[str, float], seconds: Mapping[str, float], peak_flops_per_s: float) -> dict[str, float]:
    """Phase -> its operations over its seconds, as a share of `rate` operations per second."""
    return {
        phase: flop_count / seconds[phase] / peak_flops_per_s
        for phase, flop_count in flops.items()
        if seconds.get(phase)
    }


@cache
def measure_peak_flops(device_type: str, dtype: torch.dtype) -> float:
    """Operations a second of large matrix products on the device `kind` (cpu, cuda), the best of several."""
    size = 8192 if device_type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device_type).to(dtype) for _ in range(2))
    torch.mm(left, right)
    return 2 * size**3 / min(time_call(lambda: torch.mm(left, right), device_type) for _ in range(10))


def time_call(call: Callable[[], object], device_type: str) -> float:
    """Seconds of `work`, with all that it left the device to do."""
    if device_type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
