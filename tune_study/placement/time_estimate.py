"""How long a study takes at most: a model of one step on cards whose rates are published. An estimate, not measured.

Passes over whole sequences are limited by arithmetic, sampling by reading weights and cache. Every conversation is
taken to be as long as it can be, so that a run whose replies end early is faster.
"""

import math
from typing import NamedTuple

from trainable.config.run_config import RunConfig
from tune_study.placement import memory
from tune_study.placement.disk import times
from tune_study.placement.memory_plan import MemoryPlan
from tune_study.placement.model_size import ModelShape, policy_parameters
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import StudyPlan

ARITHMETIC_SHARE, BANDWIDTH_SHARE = 0.4, 0.5
"""Of a card's published rates, what passes and sampling are taken to reach."""
FLOAT32_SLOWDOWN = 2
"""Of float32 passes against bfloat16 ones: TF32 runs at half its rate."""


class Rates(NamedTuple):
    """Of one card: dense bfloat16 operations a second, and bytes read of its memory a second."""

    operations: float
    bandwidth: float


_CARDS: tuple[tuple[str, Rates], ...] = (
    ("H100 PCIe", Rates(756e12, 2.0e12)),
    ("H100 NVL", Rates(835e12, 3.9e12)),
    ("H100", Rates(989e12, 3.35e12)),
    ("H200", Rates(989e12, 4.8e12)),
    ("B200", Rates(2250e12, 8.0e12)),
    ("A100-SXM4-80GB", Rates(312e12, 2.039e12)),
    ("A100 80GB", Rates(312e12, 1.935e12)),
    ("A100", Rates(312e12, 1.555e12)),
    ("L40S", Rates(362e12, 0.864e12)),
)
"""Part of a card's name, as nvidia-smi prints it -> rates; the first that fits counts. Source: NVIDIA's data sheets."""


def rates_of(name: str) -> Rates | None:
    """The rates of the card of that name; None where they are not known."""
    return next((rates for part, rates in _CARDS if part in name), None)


def forward_operations(shape: ModelShape, rows: int, tokens: int, with_head: bool) -> float:
    """Operations of one forward pass over `rows` sequences of `tokens` tokens.

    2 a weight of the blocks and a token; attention: 2 products of T (T + 1) / 2 pairs, 2 h each; with a head 2 h V a
    token. Source: definition (a multiplication and an addition count as two).
    """
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    outside = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    blocks = 2.0 * (policy_parameters(shape) - outside) * tokens
    attention = 2.0 * layers * hidden * tokens * (tokens + 1)
    return rows * (blocks + attention + with_head * 2.0 * hidden * shape.vocab_size * tokens)


def update_operations(shape: ModelShape, config: RunConfig) -> float:
    """Operations of one training step without sampling: reference, values, critic and policy.

    A pass with gradients counts as three, and as two with LoRA, whose frozen weights have none; with gradient
    checkpointing as one more. Products with adapters are not counted.
    """
    rows, tokens = config.env.env_groups * config.env.group_size, memory.longest(config)
    learning = 3 - (config.model.lora_rank > 0) + config.model.enable_gradient_checkpointing
    policy, critic = (forward_operations(shape, rows, tokens, with_head) for with_head in (True, False))
    needs_reference = config.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    reading = config.actor.loss.reads_before_each_step  # without gradients
    total = config.actor.ppo_epochs * (learning + reading) * policy + needs_reference * policy
    if config.algorithm.estimator.needs_critic:
        total += critic
    if "critic" in memory.trained_parameters(shape, config):
        total += config.critic.ppo_epochs * learning * critic
    return total


def sampling_seconds(shape: ModelShape, config: RunConfig, rows: int, rates: Rates) -> float:
    """Seconds to play `rows` conversations on one rank: one pass over all tokens, and a read of weights and cache for
    each new one. The torch sampler casts its float32 weights each time; with LoRA they are not float32."""
    number = memory.compute_bytes(config)
    waves = math.ceil(rows / memory.VLLM_ROWS) if config.rollout.name == "vllm" else 1
    tokens = memory.longest(config)
    # A conversation's cache is half full on average.
    cache = rows * tokens / 2 * memory.cache_bytes(shape, number)
    weight = number if config.rollout.name == "vllm" or config.model.lora_rank else memory.FLOAT32
    read = waves * weight * policy_parameters(shape) + cache
    decode = config.env.max_turn * config.rollout.response_length * read / (BANDWIDTH_SHARE * rates.bandwidth)
    return decode + forward_operations(shape, rows, tokens, True) / (ARITHMETIC_SHARE * rates.operations)


def step_seconds(shape: ModelShape, config: RunConfig, rates: Rates) -> float:
    """Seconds of one training step at most, validation left out; ranks share its work, and fractions a card."""
    speed = ARITHMETIC_SHARE * rates.operations / (1 if config.model.dtype == "bfloat16" else FLOAT32_SLOWDOWN)
    rows = -(-config.env.env_groups * config.env.group_size // memory.ranks(config))
    update = update_operations(shape, config) / memory.ranks(config) / speed
    return (update + sampling_seconds(shape, config, rows, rates)) / min(config.trainer.n_gpus_per_node, 1.0)


def run_seconds(shape: ModelShape, config: RunConfig, rates: Rates) -> float:
    """Seconds of a whole run: its steps, and every validation and test."""
    env, trainer = config.env, config.trainer
    validations = 2 * trainer.val_before_train + times(trainer.total_training_steps, trainer.test_freq) + 1
    share = min(trainer.n_gpus_per_node, 1.0)
    played = [
        (validations, env.val_env_groups * env.val_group_size),
        (2 * (env.test_env_groups > 0), env.test_env_groups),
    ]
    looks = sum(
        count * sampling_seconds(shape, config, -(-rows // memory.ranks(config)), rates) for count, rows in played
    )
    return trainer.total_training_steps * step_seconds(shape, config, rates) + looks / share


def line(found: MemoryPlan, plan: StudyPlan, allotment: Allotment, names: tuple[str, ...]) -> str | None:
    """The estimate as a line of the plan; None where a card's rates are not known. names: of the cards in use."""
    known = [rates_of(name) for name in names]
    if not known or None in known:
        return None
    rates = min(each for each in known if each is not None)
    config = found.spec.ppo
    run = run_seconds(found.shape, config, rates)
    study = run * math.ceil(len(plan.runs) / max(allotment.max_concurrent, 1))
    return (
        f"time: at most about {_words(step_seconds(found.shape, config, rates))} a step, {_words(run)} a run, "
        f"{_words(study)} the study; an estimate for conversations of {memory.longest(config)} tokens, at "
        f"{ARITHMETIC_SHARE:.0%} of {rates.operations / 1e12:g} TFLOP/s and {BANDWIDTH_SHARE:.0%} of "
        f"{rates.bandwidth / 1e12:g} TB/s"
    )


def _words(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
