"""Make the remarks of a plan: settings that are allowed, but with which a run has nothing to learn or cannot learn."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

from search_spaces.catalog import get_declaration
from trainable.config.base_config import BaseRunConfig
from trainable.config.choices import FILTER_METRICS
from trainable.config.setting_types import flatten_settings
from trainable.families import Remark
from tune_study.plan.study_plan import StudyPlan, make_base_config


def has_bfloat16(cpu_info: str) -> bool:
    """Check whether processors multiply matrices in bfloat16, from the text of /proc/cpuinfo; True if it is not x86."""
    return "avx2" not in cpu_info or "avx512_bf16" in cpu_info or "amx_bf16" in cpu_info


def _read_cpu_info() -> str:
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""


PPO_REMARKS: tuple[Remark, ...] = (
    Remark(
        lambda c: c.env.max_turn * c.rollout.response_length >= (c.rollout.max_model_len or math.inf),
        "rollout.max_model_len={c.rollout.max_model_len} has no room for the env.max_turn={c.env.max_turn} replies of "
        "rollout.response_length={c.rollout.response_length} tokens: an episode may end as `out of context`",
    ),
    Remark(
        lambda c: c.algorithm.estimator.compares_group and c.env.group_size == 1,
        "env.group_size=1 leaves algorithm.adv_estimator={c.algorithm.adv_estimator} nothing to compare: all "
        "advantages are 0",
    ),
    Remark(
        lambda c: (
            c.env.group_size == 1
            and FILTER_METRICS[c.filter.rollout_filter_metric].is_spread
            and not c.filter.rollout_filter_include_zero
        ),
        "env.group_size=1 makes filter.rollout_filter_metric={c.filter.rollout_filter_metric} 0 in every group, and "
        "filter.rollout_filter_include_zero=False drops such groups: no step has a batch",
    ),
    Remark(
        lambda c: c.trainer.critic_warmup > c.trainer.total_training_steps,
        "trainer.critic_warmup={c.trainer.critic_warmup} is the first step that updates the policy, and the run ends "
        "at step {c.trainer.total_training_steps}: the policy is never updated",
    ),
    Remark(
        lambda c: c.copies_per_step > 0,
        "actor.ppo_mini_batch_size={c.actor.ppo_mini_batch_size} does not divide the {c.episodes_per_step} episodes of "
        "a step: {c.copies_per_step} random copies fill them up, as published, so that some count several times",
    ),
    Remark(
        lambda c: c.trainer.n_gpus_per_node == 0 and c.model.dtype == "bfloat16" and not has_bfloat16(_read_cpu_info()),
        "model.dtype=bfloat16 is emulated by this processor, which was 45 times slower than float32 where it was "
        "measured: type --set model.dtype=float32, unless the results are to be compared with others",
    ),
)


def find_remarks(plan: StudyPlan) -> list[str]:
    """Find the remarks that hold in some arm, with the settings of the first of these arms."""
    return [f"Remark: {sentence}" for sentence in _find_sentences(plan)]


def _find_sentences(plan: StudyPlan) -> Iterator[str]:
    configs = {spec.arm: spec.config for spec in plan.runs}  # seeds share their settings
    if plan.baseline is None and not plan.study.axis.value_groups and plan.confirms is None:
        # With another base configuration, the baseline may not be an arm of the study.
        is_arm = plan.baseline_name in plan.study.get_grid(plan.preset)
        advice = f": type {plan.study.axis.option} {','.join((plan.baseline_name, *plan.values))}" if is_arm else ""
        yield f"the baseline {plan.baseline_name} is not among the arms, so no arm is compared with it{advice}."
    for remark in resolve_name(plan.study.family.remarks) if plan.study.family.remarks else ():
        if arms := [arm for arm, config in configs.items() if remark.applies(config)]:
            where = "" if len(arms) == len(configs) else f" (in {len(arms)} of {len(configs)} arms, such as {arms[0]})"
            yield f"{remark.sentence.format(c=configs[arms[0]])}{where}."
    if plan.earlier_steps:  # rows of a study that was started with this length do not have these
        steps, test_freq, exception = plan.earlier_steps[-1], plan.base_config.trainer.test_freq, ""
        if test_freq > 0 and steps % test_freq:
            exception = f"; step {steps} has a validation, although trainer.test_freq={test_freq}, which counts for "
            exception += "means of the last validations and for rules that count validations"
        yield (
            f"the runs are trained from step {steps} on{exception}. A run without a state of its last step "
            "(trainer.keep_last=false, or after `clean`) goes back to its newest one, or begins again."
        )
    yield from _describe_unread_settings(plan, list(configs.values()))
    if plan.baseline is not None and len(configs) > 1:
        yield from _describe_equal_arms(plan.baseline, configs.pop(plan.baseline), configs)


def _describe_unread_settings(plan: StudyPlan, configs: Sequence[BaseRunConfig]) -> Iterator[str]:
    """Yield a sentence per setting that no arm reads, unless its value is from a preset, a shipped study or a game."""
    study = plan.study
    declared = get_declaration(study.name) or replace(study, fixed_settings={}, presets={})
    declared_settings = flatten_settings(make_base_config(declared, plan.preset).model_dump())
    of_games = [study.family.make_game_settings(game, plan.preset) for game in study.family.games]
    typed_settings = {
        name: value
        for name, value in flatten_settings(plan.base_config.model_dump()).items()
        if value != declared_settings[name] and all(value != settings.get(name) for settings in of_games)
    }
    unread_settings = [config.find_unread_settings() for config in configs] if typed_settings else []
    for name, value in typed_settings.items():
        if all(name in advice_by_name for advice_by_name in unread_settings):
            text = f"{value:g}" if isinstance(value, float) else value
            yield f"{name}={text} has no effect: {unread_settings[0][name]}."


def _describe_equal_arms(name: str, baseline: BaseRunConfig, configs: Mapping[str, BaseRunConfig]) -> Iterator[str]:
    """Yield a sentence for arms that equal the baseline, or differ from it only in settings that neither reads."""
    baseline_settings, unread_settings = flatten_settings(baseline.model_dump()), baseline.find_unread_settings()
    arms_by_changes: dict[tuple[str, ...], list[str]] = {}
    for arm, config in configs.items():
        settings = flatten_settings(config.model_dump())
        # Runs differ in their seeds.
        changes = tuple(key for key in settings if key != "seed" and settings[key] != baseline_settings[key])
        if {*changes} <= {*unread_settings} & {*config.find_unread_settings()}:
            arms_by_changes.setdefault(changes, []).append(arm)
    for changes, arms in arms_by_changes.items():
        subject = f"arm {arms[0]} differs" if len(arms) == 1 else f"the arms {', '.join(arms)} differ"
        settings_text = f"{' and '.join(changes)} alone" if changes else "no setting"
        reasons = "".join(f" {key} has no effect: {unread_settings[key]}." for key in changes)
        yield f"{subject} from the baseline {name} in {settings_text}, so the rows will equal the baseline's.{reasons}"
