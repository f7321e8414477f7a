"""Make the remarks of a plan: settings that are allowed, but with which a run has nothing to learn or cannot learn."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pkgutil import resolve_name

from search_spaces.catalog import STUDIES
from trainable.config.aliases import flatten_settings
from trainable.families import Remark
from tune_study.plan.study_plan import StudyPlan, make_base_config

UNIFORM_TEMPERATURE = 100.0
"""At this temperature, logits that differ by 100, more than in a trained model, give log-probs that differ by 1 nat."""
GREEDY_TEMPERATURE = 0.01
"""At this temperature, a token with a logit 0.1 below the largest is e^10 times less likely."""
DOMINANT_COEFFICIENT = 1_000.0
"""A term with this coefficient outweighs advantages at least a hundredfold: they have a standard deviation of about 1,
or are differences of scores of at most about 11."""
ADAM_EPS = 1e-8
"""Added to the root of AdamW's second moment. Below this value, steps shrink with the gradient."""
SMALLEST_STEP = 1e-12
"""A step of this size is lost to float32 rounding in every weight above 2^24 times as much, about 2e-5."""
LARGEST_SMALL_ETA = 1e12
"""Skills divided by this temperature give gradients of about 1e-12, and AdamW's epsilon then makes steps of lr x
1e-4."""
COARSE_PENALTY = 2.0**27
"""From here on, float32 numbers are at least 16 apart, and a solved level is worth 10.9."""
SHORTEST_REPLY = 3
"""Tokens of the shortest valid reply: the tags before the answer, an action, and the tag after the answer."""
VANISHING_DISCOUNT = 0.01
"""With this discount per token, a reward counts a millionth three tokens earlier."""
VANISHING_EXPONENT = 104.0
"""exp(-x) of this x is below the smallest float32 number, so it is 0."""


PPO_REMARKS: tuple[Remark, ...] = (
    Remark(
        lambda c: c.rollout.temperature >= UNIFORM_TEMPERATURE,
        "rollout.temperature={c.rollout.temperature:g} makes all tokens almost equally likely (logits are divided by "
        "it), so replies are noise, and rewards say nothing about the policy",
    ),
    Remark(
        lambda c: c.rollout.temperature <= GREEDY_TEMPERATURE,
        "rollout.temperature={c.rollout.temperature:g} samples almost greedily (logits are divided by it): rollouts of "
        "a group repeat each other, and their rewards do not differ",
    ),
    Remark(
        lambda c: c.rollout.response_length < SHORTEST_REPLY,
        "rollout.response_length={c.rollout.response_length} is too short for a valid reply, which has at least "
        f"{SHORTEST_REPLY}"
        " tokens: every turn is invalid, so all scores are equal",
    ),
    Remark(
        lambda c: c.env.max_turn * c.rollout.response_length >= (c.rollout.max_model_len or math.inf),
        "rollout.max_model_len={c.rollout.max_model_len} has no room for the env.max_turn={c.env.max_turn} replies of "
        "rollout.response_length={c.rollout.response_length} tokens that an episode may have: one whose next reply may "
        "not fit ends as `out of context`",
    ),
    Remark(
        lambda c: c.algorithm.estimator.compares_group and c.env.group_size == 1,
        "env.group_size=1 leaves algorithm.adv_estimator={c.algorithm.adv_estimator} nothing to compare: all "
        "advantages are 0",
    ),
    Remark(
        lambda c: c.env.group_size == 1 and c.filter.has_spread_metric and not c.filter.rollout_filter_include_zero,
        "env.group_size=1 makes filter.rollout_filter_metric={c.filter.rollout_filter_metric} 0 in every group, and "
        "filter.rollout_filter_include_zero=False drops such groups: no step has a batch",
    ),
    Remark(
        lambda c: abs(c.env.format_penalty) >= COARSE_PENALTY,
        "env.format_penalty={c.env.format_penalty:g} hides the other rewards: float32 numbers of this size are at "
        "least 16 apart, and a solved level is worth 10.9",
    ),
    Remark(
        lambda c: abs(c.actor.entropy_coeff) >= DOMINANT_COEFFICIENT,
        "actor.entropy_coeff={c.actor.entropy_coeff:g} outweighs the advantages (about 1, at most about 11) at least a "
        "hundredfold: the entropy alone decides what is learned",
    ),
    Remark(
        lambda c: c.actor.use_kl_loss and c.actor.kl_loss_coef >= DOMINANT_COEFFICIENT,
        "actor.kl_loss_coef={c.actor.kl_loss_coef:g} outweighs the advantages (about 1, at most about 11) at least a "
        "hundredfold: the KL loss alone decides what is learned",
    ),
    Remark(
        lambda c: c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.kl_coef >= DOMINANT_COEFFICIENT,
        "algorithm.kl_ctrl.kl_coef={c.algorithm.kl_ctrl.kl_coef:g} outweighs the scores (at most about 11) at least a "
        "hundredfold for each nat of KL: the KL alone decides what is learned",
    ),
    Remark(
        lambda c: (
            c.algorithm.zero_task_advantage
            and not c.actor.entropy_coeff
            and not c.actor.use_kl_loss
            and not (c.critic.shared_trunk and c.algorithm.estimator.needs_critic)
        ),
        "algorithm.zero_task_advantage=True without KL loss and entropy bonus leaves no term that moves the policy",
    ),
    Remark(
        lambda c: "tpo_eta" in c.actor.loss.settings and c.actor.tpo_eta >= LARGEST_SMALL_ETA,
        "actor.tpo_eta={c.actor.tpo_eta:g} divides skills until their gradients are far below AdamW's epsilon of 1e-8: "
        "steps are at most about a ten-thousandth of actor.lr",
    ),
    Remark(
        lambda c: c.actor.lr * min(1.0, c.actor.grad_clip / ADAM_EPS) <= SMALLEST_STEP,
        "actor.lr={c.actor.lr:g} with actor.grad_clip={c.actor.grad_clip:g} makes optimizer steps of at most about "
        f"{SMALLEST_STEP:g}"
        ", which float32 rounds away in every weight above 2e-5",
    ),
    Remark(
        lambda c: c.copies_per_step > 0,
        "actor.ppo_mini_batch_size={c.actor.ppo_mini_batch_size} does not divide the {c.episodes_per_step} episodes of "
        "a step: they are filled up with {c.copies_per_step} random copies, as published, so that some count several "
        "times",
    ),
    Remark(
        lambda c: c.actor.lr >= 1,
        "actor.lr={c.actor.lr:g} changes each weight by about as much in the first optimizer step: the weights, "
        "most of which are far below 1, are overwritten",
    ),
    Remark(
        lambda c: c.actor.lr * c.actor.weight_decay >= 1,
        "actor.lr={c.actor.lr:g} and actor.weight_decay={c.actor.weight_decay:g}: each optimizer step multiplies all "
        "weights by 1 - lr x weight_decay, which is not above 0",
    ),
    Remark(
        lambda c: c.model.lora_rank > 0 and c.model.lora_alpha / c.model.lora_rank <= 1e-9,
        "model.lora_alpha={c.model.lora_alpha:g} with model.lora_rank={c.model.lora_rank} scales the adapters by less "
        "than float32 resolves next to the frozen weights: the policy does not change",
    ),
    Remark(
        lambda c: c.trainer.critic_warmup > c.trainer.total_training_steps,
        "trainer.critic_warmup={c.trainer.critic_warmup} is the first step that updates the policy, and the run ends "
        "at step {c.trainer.total_training_steps}: the policy is never updated",
    ),
    Remark(
        lambda c: c.rollout.val_temperature >= UNIFORM_TEMPERATURE,
        "rollout.val_temperature={c.rollout.val_temperature:g} makes all tokens almost equally likely (logits are "
        "divided by it): validation and test measure noise",
    ),
    Remark(
        lambda c: "gamma" in c.algorithm.estimator.settings and c.algorithm.gamma <= VANISHING_DISCOUNT,
        "algorithm.gamma={c.algorithm.gamma:g} discounts a reward by so much per token that only the last "
        "tokens before it are credited",
    ),
    Remark(
        lambda c: c.actor.entropy_coeff < 0,
        "actor.entropy_coeff={c.actor.entropy_coeff:g} is negative, so entropy is penalized and not rewarded",
    ),
    Remark(
        lambda c: c.env.max_actions_per_turn > c.env.max_actions_per_traj,
        "env.max_actions_per_turn={c.env.max_actions_per_turn} is more than "
        "env.max_actions_per_traj={c.env.max_actions_per_traj}: prompts promise actions that no episode has",
    ),
    Remark(
        lambda c: c.early_stop.variance_ratio >= 1,
        "early_stop.variance_ratio={c.early_stop.variance_ratio:g} stops every run whose rewards do not spread more "
        "than in its first steps: the ratio is a fraction of that spread",
    ),
    Remark(
        lambda c: c.trainer.test_freq <= 0 and not c.trainer.val_before_train,
        "trainer.val_before_train=False and trainer.test_freq={c.trainer.test_freq} leave one validation, after the "
        "last step: nothing shows what training has changed",
    ),
)


def find_remarks(plan: StudyPlan) -> tuple[str, ...]:
    """Make a line for each remark that holds in some arm, with the settings of the first of these arms."""
    configs = {spec.arm: spec.config for spec in plan.runs}
    lines: list[str] = []
    if plan.baseline is None and not plan.study.axis.value_groups and plan.confirms is None:
        # With another base configuration, the baseline may not be an arm of the study.
        is_arm = plan.baseline_name in plan.study.get_grid(plan.preset)
        advice = f": type {plan.study.axis.option} {','.join((plan.baseline_name, *plan.values))}" if is_arm else ""
        lines.append(
            f"Remark: the baseline {plan.baseline_name} is not among the arms, so no arm is compared with it{advice}."
        )
    for remark in resolve_name(plan.study.family.remarks) if plan.study.family.remarks else ():
        arms = [arm for arm, config in configs.items() if remark.applies(config)]
        if arms:
            where = "" if len(arms) == len(configs) else f" (in {len(arms)} of {len(configs)} arms, such as {arms[0]})"
            lines.append(f"Remark: {remark.sentence.format(c=configs[arms[0]])}{where}.")
    return (*lines, *_describe_longer_runs(plan), *_describe_unread_settings(plan), *_describe_equal_arms(plan))


def _describe_longer_runs(plan: StudyPlan) -> Iterator[str]:
    """Describe how the rows of a lengthened study differ from rows of a study that was started with this length."""
    if not plan.earlier_steps:
        return
    steps, trainer = plan.earlier_steps[-1], plan.base_config.trainer
    clauses = []
    if trainer.test_freq > 0 and steps % trainer.test_freq:
        clauses.append(
            f"step {steps} has a validation, although trainer.test_freq={trainer.test_freq}, which counts for means of "
            "the last validations and for rules that count validations"
        )
    if plan.study.family.is_fine_tuning:
        clauses.append(f"step {steps} has the greedy validation and the test levels that end a run")
        clauses.append(
            "val_success_unseen and base_val_success_unseen leave out the training levels of the steps that were "
            "planned then"
        )
    exceptions = f", with these exceptions: {'; '.join(clauses)}" if clauses else ""
    yield (
        f"Remark: the runs are trained from step {steps} on. Their rows are those of runs that were planned with "
        f"{trainer.total_training_steps} steps{exceptions}. A run without a state of its last step "
        "(trainer.keep_last=false, or after `clean`) goes back to its newest one, or begins again."
    )


def _describe_unread_settings(plan: StudyPlan) -> Iterator[str]:
    """Yield a line per setting that no arm reads, unless its value is from a preset, a shipped study or a game."""
    study, configs = plan.study, {spec.arm: spec.config for spec in plan.runs}  # seeds share their settings
    unread_settings = [config.find_unread_settings() for config in configs.values()]
    declared = STUDIES.get(study.name, replace(study, fixed_settings={}, presets={}))
    declared_settings = flatten_settings(make_base_config(declared, plan.preset).model_dump())
    of_games = [study.family.make_game_settings(game, plan.preset) for game in study.family.games]
    for name, value in flatten_settings(plan.base_config.model_dump()).items():
        if value == declared_settings[name] or any(value == settings.get(name) for settings in of_games):
            continue
        if all(name in advice_by_name for advice_by_name in unread_settings):
            text = f"{value:g}" if isinstance(value, float) else value
            yield f"Remark: {name}={text} has no effect: {unread_settings[0][name]}."


def _describe_equal_arms(plan: StudyPlan) -> Iterator[str]:
    """Yield a line for arms that equal the baseline, or differ from it only in settings that neither reads."""
    configs = {spec.arm: spec.config for spec in plan.runs}
    if plan.baseline is None:
        return
    baseline = configs.pop(plan.baseline)
    baseline_settings, unread_settings = flatten_settings(baseline.model_dump()), baseline.find_unread_settings()
    arms_by_changes: dict[tuple[str, ...], list[str]] = {}
    for arm, config in configs.items():
        settings = flatten_settings(config.model_dump())
        # Runs differ in their seeds.
        changes = tuple(name for name in settings if name != "seed" and settings[name] != baseline_settings[name])
        if {*changes} <= {*unread_settings} & {*config.find_unread_settings()}:
            arms_by_changes.setdefault(changes, []).append(arm)
    for changes, arms in arms_by_changes.items():
        subject = f"arm {arms[0]} differs" if len(arms) == 1 else f"the arms {', '.join(arms)} differ"
        reasons = "".join(f" {name} has no effect: {unread_settings[name]}." for name in changes)
        yield (
            f"Remark: {subject} from the baseline {plan.baseline} in "
            f"{' and '.join(changes) + ' alone' if changes else 'no setting'}, so the rows will equal the baseline's."
            f"{reasons}"
        )
