"""The phases of a training step: which are due, how long they take, and their FLOP and MFU.

MFU is relative to the matmul throughput measured on this machine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple

import torch

from trainable.config.run_config import RunConfig
from trainable.files.step_phase import STEP_PHASE
from trainable.models.interface import Shape
from trainable.models.qwen2_shape import estimate_forward_flops
from trainable.rollout.episode import Batch, Episode

Phase = Literal[
    "rollout", "values", "reference", "sync_weights", "update_critic", "update_actor", "gradient_analysis", "validation"
]


class StepPlan(NamedTuple):
    """The parts of a step that are due. Values and updates also need a batch, that is, a group that the filter kept.

    values: whether the batch has values of a critic. critic, policy: whether these networks are updated. analysis:
    whether gradients are analyzed, even in a step without a batch. kl_control: whether to adapt the coefficient of the
    KL in the reward. validation: whether the policy is validated after the step. reference: whether
    trainer.ref_model_sync_steps then moves the reference.
    """

    values: bool
    critic: bool
    analysis: bool
    policy: bool
    kl_control: bool
    validation: bool
    reference: bool


def plan_step(step: int, config: RunConfig) -> StepPlan:
    """Decide what is due in training step `step`, counted from 1."""
    trainer, needs_critic = config.trainer, config.algorithm.estimator.needs_critic
    # gradient_analysis_only needs gradient_analysis_mode, or the run would neither train nor analyze.
    is_analysis_only = trainer.gradient_analysis_mode and trainer.gradient_analysis_only
    is_analysis_step = trainer.is_gradient_analysis_step(step)
    # As published, a run that exits after its analysis exits before the policy update.
    skips_policy = is_analysis_only or (is_analysis_step and trainer.exit_after_gradient_analysis)
    # On a shared trunk, the policy update trains the value head.
    updates_critic = needs_critic and not config.critic.shared_trunk and not is_analysis_only
    is_last, sync_steps = step == trainer.total_training_steps, trainer.ref_model_sync_steps
    return StepPlan(
        values=needs_critic,
        critic=updates_critic,
        analysis=is_analysis_step,
        policy=trainer.critic_warmup <= step and not skips_policy,  # as published, from step critic_warmup on
        kl_control=config.algorithm.use_kl_in_reward and not is_analysis_only,
        # Always at the last step, so that every run ends with a validation of its final policy.
        validation=trainer.test_freq > 0 and (is_last or step % trainer.test_freq == 0),
        reference=config.syncs_reference and sync_steps is not None and step % sync_steps == 0,
    )


class PhaseTimer:
    """Measures the phases of one step on `device`. If a phase occurs twice, its times are added.

    seconds: time of each phase so far, by name. CUDA calls return before their work is done, so the timer synchronizes
    at both ends of a phase. Otherwise, the time would count for whichever phase first waits for the result.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Return the seconds of wall time, and of CPU time of all threads of this process, since the creation."""
        return time.perf_counter() - self._start, time.process_time() - self._cpu_start

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the time of the `with` body to `phase`, even if the body raises. Meanwhile, `STEP_PHASE` shows it."""
        STEP_PHASE.enter(phase.replace("_", " "))
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


BACKWARD_FACTOR = 2.0
"""FLOP of a backward pass, relative to its forward pass. Each product of the forward pass needs two in the backward
pass, for the gradients of its input and of its weight. Recomputed blocks and products of LoRA adapters do not count."""


def estimate_rollout_flops(shape: Shape, episodes: Sequence[Episode]) -> float:
    """Estimate the FLOP of sampling the episodes, with a KV cache across turns and one prefill per group's prompt."""
    # The prompt ends at the first token that was sampled for the episode. The episodes of a group share it, or those
    # that branch from one node; the children of a tree do not.
    prompt_lengths = [int(episode.suffix_mask.argmax()) for episode in episodes]
    distinct_prompts = {
        (episode.group, episode.tokens[:length].tobytes()): length
        for episode, length in zip(episodes, prompt_lengths, strict=True)
    }
    prefill_flops = sum(
        estimate_forward_flops(shape, [length], output_tokens=0, output_size=0) for length in distinct_prompts.values()
    )
    reply_flops = (
        estimate_forward_flops(
            shape,
            [len(episode.tokens) - length],
            int(episode.suffix_mask.sum()),
            shape.vocab_size,
            cached_tokens=length,
        )
        for episode, length in zip(episodes, prompt_lengths, strict=True)
    )
    return sum(reply_flops, start=prefill_flops)


def estimate_training_flops(shape: Shape, config: RunConfig, batch: Batch) -> dict[str, float]:
    """Estimate the FLOP of each phase of training on `batch`, by its name. Phases that are off are left out."""
    # A value head has one output, and its trunk costs as much as the policy's.
    lengths, trained_tokens = batch.count_needed_tokens().tolist(), int(batch.mask.sum())
    value_flops, policy_flops = (
        estimate_forward_flops(shape, lengths, trained_tokens, outputs) for outputs in (1, shape.vocab_size)
    )
    # 1 is the forward pass. With adapters, the weights are frozen, so the backward pass needs no gradients of weights,
    # which are half of its products.
    update_factor = 1 + (BACKWARD_FACTOR / 2 if config.model.lora_rank else BACKWARD_FACTOR)
    extra_forwards = config.actor.loss.needs_pass_before_step  # a bool: one forward pass of tpo, without gradients
    phase_flops = {"update_actor": (update_factor + extra_forwards) * config.actor.ppo_epochs * policy_flops}
    if config.algorithm.estimator.needs_critic:
        phase_flops["values"] = value_flops
        # On a shared trunk, the policy update also trains the value head, at next to no FLOP.
        if not config.critic.shared_trunk:
            phase_flops["update_critic"] = update_factor * config.critic.ppo_epochs * value_flops
    if config.trains_with_reference:
        phase_flops["reference"] = policy_flops
    return phase_flops


@cache
def measure_peak_flops(device_type: str, dtype: torch.dtype) -> float:
    """Measure the peak FLOP/s of matrix products on a device type (cpu, cuda): the best of ten, once per process."""
    # Large enough to use the device fully, but quick: one product takes 1.1 TFLOP (cuda) or 0.3 GFLOP (cpu).
    size = 8192 if device_type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device_type).to(dtype) for _ in range(2))
    torch.mm(left, right)  # warm-up: the first call also pays for initialization
    # The best instead of the mean, because other processes on the machine can only slow a product down.
    return 2 * size**3 / min(time_call(lambda: torch.mm(left, right), device_type) for _ in range(10))


def time_call(call: Callable[[], object], device_type: str) -> float:
    """Measure the seconds that `call` takes, including the work that it queues on the device."""
    # CUDA calls return before their work is done: wait for earlier work first, then for the work of `call`.
    if device_type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
