"""Settings of update rules that are allowed, but with which a run cannot learn anything."""

from trainable.families import Remark
from tune_study.plan.remarks import DOMINANT_COEFFICIENT, LARGEST_SMALL_ETA, SMALLEST_STEP, VANISHING_EXPONENT

REMARKS: tuple[Remark, ...] = (
    Remark(
        lambda c: c.lr <= SMALLEST_STEP,
        f"lr={{c.lr:g}} makes optimizer steps of at most about {SMALLEST_STEP:g}, which float32 rounds away in every "
        "weight above 2e-5",
    ),
    Remark(
        lambda c: c.lr >= 1,
        "lr={c.lr:g} changes each weight by about as much in the first optimizer step: the weights, most of which are "
        "far below 1, are overwritten",
    ),
    Remark(
        lambda c: c.rule.temperature == "target" and c.tpo_eta >= LARGEST_SMALL_ETA,
        "tpo_eta={c.tpo_eta:g} divides rewards until their gradients are far below Adam's epsilon of 1e-8: steps are "
        "at most about a ten-thousandth of lr",
    ),
    Remark(
        lambda c: c.reward_noise_mode == "random_reward" and c.reward_noise == 1,
        "reward_noise=1 with reward_noise_mode=random_reward replaces every reward by a random number: no reward "
        "depends on the answer",
    ),
    Remark(
        lambda c: c.reward_noise_mode == "label_flip" and c.reward_noise == 0.5,
        "reward_noise=0.5 with reward_noise_mode=label_flip gives every answer the same mean reward, 0.5",
    ),
    Remark(
        lambda c: c.rule.discounts_age and c.replay_age_decay * c.delay >= VANISHING_EXPONENT,
        "replay_age_decay={c.replay_age_decay:g} with delay={c.delay} weights batches by exp(-{c.replay_age_decay:g} x "
        "age), which is 0 in float32: only the first batches, of age 0, are learned from",
    ),
    Remark(
        lambda c: c.task == "lm_bandit" and c.kl_weight >= DOMINANT_COEFFICIENT,
        "kl_weight={c.kl_weight:g} outweighs the rewards (0 or 1) for a thousandth of a nat of KL: the KL alone "
        "decides what is learned",
    ),
)
