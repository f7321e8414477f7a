"""Floating-point operations of a step's phases, and the share of this machine's own rate that each of them reaches."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from trainable.config.run_config import RunConfig
from trainable.models.interface import Shape
from trainable.rollout.batch import Batch
from trainable.rollout.episode import Episode

BACKWARD = 2.0
"""A backward pass does two products for each of the forward pass, one where weights are frozen beside adapters; blocks
that are made again, and products with adapters, are not counted."""


def forward_flops(shape: Shape, lengths: Sequence[int], finished: int, outputs: int, read: int = 0) -> float:
    """Operations of a forward pass over sequences, each after `read` tokens whose keys are kept.

        2 · products + 4 · blocks · channels of all heads · pairs of tokens that attend to each other

    finished: tokens at which the last block is finished and the head, of `outputs` entries, is applied.
    """
    before, after = shape.block_weights
    blocks, tokens = shape.num_hidden_layers, sum(lengths)
    products = tokens * (blocks * before + (blocks - 1) * after) + finished * (after + outputs * shape.hidden_size)
    pairs = sum(length * (length + 1) / 2 + read * length for length in lengths)
    return 2.0 * products + 4.0 * blocks * shape.attention_size * pairs


def rollout_flops(shape: Shape, episodes: Sequence[Episode]) -> float:
    """Operations of sampling the episodes with a cache that keeps every turn, each group's opening read once."""
    openings = {episode.group: int(episode.mask.argmax()) for episode in episodes}
    total = sum(forward_flops(shape, [length], 0, 0) for length in openings.values())
    for episode in episodes:
        read = openings[episode.group]
        total += forward_flops(shape, [len(episode.tokens) - read], episode.response_tokens, shape.vocab_size, read)
    return total


def training_flops(shape: Shape, config: RunConfig, batch: Batch) -> dict[str, float]:
    """Operations of each phase of training on `batch`, by the end of its column's name; what is off is left out."""
    lengths, trained = batch.read_lengths().tolist(), int(batch.mask.sum())
    value, policy = (forward_flops(shape, lengths, trained, outputs) for outputs in (1, shape.vocab_size))
    learning = 1 + (BACKWARD / 2 if config.model.lora_rank else BACKWARD)
    reading = config.actor.loss.reads_before_each_step  # without gradients
    found = {"update_actor": (learning + reading) * config.actor.ppo_epochs * policy}
    if config.algorithm.estimator.needs_critic:
        found["values"] = value
        if not config.critic.shared_trunk:
            found["update_critic"] = learning * config.critic.ppo_epochs * value
    if config.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        found["reference"] = policy
    return found


def utilisation(flops: Mapping[str, float], seconds: Mapping[str, float], rate: float) -> dict[str, float]:
    """Phase -> its operations over its seconds, as a share of `rate` operations per second."""
    return {phase: count / seconds[phase] / rate for phase, count in flops.items() if seconds.get(phase)}


@cache
def matrix_rate(kind: str, dtype: torch.dtype) -> float:
    """Operations a second of large matrix products on the device `kind` (cpu, cuda), the best of several."""
    size = 8192 if kind == "cuda" else 512
    left, right = (torch.randn(size, size, device=kind).to(dtype) for _ in range(2))
    torch.mm(left, right)
    return 2 * size**3 / min(clocked(lambda: torch.mm(left, right), kind) for _ in range(10))


def clocked(work: Callable[[], object], kind: str) -> float:
    """Seconds of `work`, with all that it left the device to do."""
    if kind == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
