"""The phases of a training step: decide at its start which are due, and measure how long they take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

from trainable.config.run_config import RunConfig
from trainable.files.step_phase import STEP_PHASE

Phase = Literal[
    "rollout", "values", "reference", "sync_weights", "update_critic", "update_actor", "gradient_analysis", "validation"
]


class StepPlan(NamedTuple):
    """The parts of a step that are due. Values and updates also need a batch, that is, a group that the filter kept.

    values: whether the batch has values of a critic. critic, policy: whether these networks are updated. analysis:
    whether gradients are analyzed, even in a step without a batch. kl_control: whether to adapt the coefficient of the
    KL in the reward. validation: whether the policy is validated after the step.
    """

    values: bool
    critic: bool
    analysis: bool
    policy: bool
    kl_control: bool
    validation: bool


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
    is_last = step == trainer.total_training_steps
    return StepPlan(
        values=needs_critic,
        critic=updates_critic,
        analysis=is_analysis_step,
        policy=trainer.critic_warmup <= step and not skips_policy,  # as published, from step critic_warmup on
        kl_control=config.algorithm.use_kl_in_reward and not is_analysis_only,
        # Always at the last step, so that every run ends with a validation of its final policy.
        validation=trainer.test_freq > 0 and (is_last or step % trainer.test_freq == 0),
    )


class Clock:
    """Measures wall time and CPU time (of all threads of this process) since its creation."""

    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Return the seconds of wall time and of CPU time so far."""
        return time.perf_counter() - self._start, time.process_time() - self._cpu_start


class PhaseTimer:
    """Measures the phases of one step on `device`. If a phase occurs twice, its times are added.

    seconds: time of each phase so far, by name. CUDA calls return before their work is done, so the timer synchronizes
    at both ends of a phase. Otherwise, the time would count for whichever phase first waits for the result.

    Example::

        timer = PhaseTimer(torch.device("cuda"))
        with timer.measure("rollout"):
            episodes = roll_out()
        timer.seconds["rollout"]
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

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
