"""The schedule of a training step: which updates and measurements are due, decided once at its start."""

from typing import NamedTuple

from trainable.config.run_config import RunConfig


class StepPlan(NamedTuple):
    """The parts of a step that are due. Values and updates also need a batch: the filter must keep a group.

    values: whether the batch has values of a critic. critic, policy: whether these networks are updated. analysis:
    whether gradients are analyzed, even in a step without a batch. kl_control: whether the coefficient of the KL in the
    reward is adapted. validation: whether the policy is validated after the step.
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
    # Without gradient_analysis_mode, gradient_analysis_only has no effect: the run would neither train nor analyze.
    is_analysis_only = trainer.gradient_analysis_mode and trainer.gradient_analysis_only
    is_analysis_step = trainer.is_gradient_analysis_step(step)
    # As published, a run that exits after its analysis does so before the update of the policy.
    skips_policy = is_analysis_only or (is_analysis_step and trainer.exit_after_gradient_analysis)
    # The value head on a shared trunk is trained by the update of the policy.
    updates_critic = needs_critic and not config.critic.shared_trunk and not is_analysis_only
    is_last = step == trainer.total_training_steps
    return StepPlan(
        values=needs_critic,
        critic=updates_critic,
        analysis=is_analysis_step,
        policy=trainer.critic_warmup <= step and not skips_policy,  # as published, from step critic_warmup on
        kl_control=config.algorithm.use_kl_in_reward and not is_analysis_only,
        # The last step in any case, so that every run ends with a validation of its final policy.
        validation=trainer.test_freq > 0 and (is_last or step % trainer.test_freq == 0),
    )
