"""Define a fork: a study whose arms continue the runs of another one, with the same settings and with remedies."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from search_spaces.declaration.study import Axis, Study, make_value_label, name_grid_point
from trainable.config.command_lines import split_words
from trainable.config.run_config import RunConfig, apply_overrides, resolve_key
from trainable.config.setting_types import flatten_settings, format_value
from trainable.families import Settings
from trainable.runs.study_record import AS_BEFORE, ForkedStudy, name_fork_arm
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import pin_typed_values

EXAMPLE = '--remedy "kl: actor.use_kl_loss=True actor.kl_loss_coef=0.1"'
_REMEDIES = re.compile(
    r"(actor|algorithm|critic|filter|early_stop)\.(?!shared_trunk).*|rollout\.(temperature|recompute_logprobs)|"
    r"env\.group_size|trainer\.(critic_warmup|ref_model_.*|nonfinite_patience|own_stop_rules)"
)
"""Matches the settings that a remedy may change. All others change what a state holds, or how runs are measured."""


def make_fork_study(study: Study, forks: ForkedStudy, points: Mapping[str, Settings]) -> Study:
    """Make the study of a fork, whose arms have the settings `points`. It equals the forked `study` otherwise.

    Each remedy is compared with the runs that continue as before from the same step.
    """
    name = f"{study.name}-fork-{make_value_label(forks.arm)}"
    templates = replace(study, name=name, published_templates=None).name_templates
    remedies = {arm: forks.get_remedy(arm) for arm in forks.steps}
    return replace(
        study,
        question=f"Do runs of arm {forks.arm} recover, and until which step is a remedy in time?",
        axis=Axis("fork", dict.fromkeys(study.family.presets, tuple(points)), "--remedy", named_settings=points),
        baseline=name_fork_arm(AS_BEFORE, min(forks.steps.values(), default=0)),
        baseline_seeds=1,
        published_templates=replace(templates, title=f"Fork of {study.name}", summary="fork={arm}"),
        contrasts={
            f"{remedy} from step {forks.steps[arm]}": ((arm, name_fork_arm(AS_BEFORE, forks.steps[arm])),)
            for arm, remedy in sorted(remedies.items(), key=lambda item: (item[1], forks.steps[item[0]]))
            if remedy != AS_BEFORE
        },
        interactions={},
        variants={},
    )


def parse_remedies(texts: Sequence[str], config: RunConfig) -> dict[str, Settings]:
    """Parse each --remedy, `KEY=VALUE ...` or `NAME: KEY=VALUE ...`, into the settings of a remedy, by its name.

    config: the settings of the runs that are continued. Raises PlanError or ConfigError for another form, a name or a
    key that is given twice, and settings with which the runs cannot be continued.
    """
    remedies: dict[str, Settings] = {}
    for text in texts:
        option = f"--remedy {format_value(text)}"
        try:
            words = split_words(text)
        except ValueError:
            raise PlanError(f"{option} has a quote without an end: type {EXAMPLE}.") from None
        name = words.pop(0)[:-1] if words and words[0].endswith(":") else ""
        typed: dict[str, str] = {}
        for word in words:
            key, sign, value = word.partition("=")
            setting = resolve_key(key, RunConfig)
            if not (sign and value):
                raise PlanError(f"{option}: {format_value(word)} is not KEY=VALUE: type {EXAMPLE}.")
            if setting in typed:
                raise PlanError(f"{option} gives `{setting}` twice: give it once.")
            typed[setting] = value
        settings = pin_typed_values(typed)
        if problem := _find_problem(config, settings):
            raise PlanError(f"{option}: {problem}")
        name = name or name_grid_point(typed)
        if name in (*remedies, AS_BEFORE):
            raise PlanError(f"{option}: another arm is called {format_value(name)}: type a name, like {EXAMPLE}.")
        remedies[name] = settings
    return remedies


def _find_problem(config: RunConfig, settings: Settings) -> str:
    """Explain why runs of `config` cannot be continued with these settings as a remedy; empty if they can.

    Raises ConfigError for values that the settings do not take.
    """
    for name in settings:
        if not _REMEDIES.fullmatch(name):
            return (
                f"`{name}` cannot change in the middle of a run, since its state or its evaluations would be others. A "
                "remedy may change settings of actor, critic, algorithm, filter and early_stop, rollout.temperature, "
                "env.group_size, trainer.critic_warmup and trainer.ref_model_*: leave it out, or start a study of it "
                "with `run`."
            )
    changed = apply_overrides(config, settings)
    if flatten_settings(changed.model_dump()) == flatten_settings(config.model_dump()):
        return f"it changes nothing, since the arm has these settings: type other values, like {EXAMPLE}."
    had_critic, has_critic = (version.algorithm.estimator.needs_critic for version in (config, changed))
    if has_critic > had_critic or (had_critic > has_critic and config.critic.shared_trunk):
        return (
            f"algorithm.adv_estimator={changed.algorithm.adv_estimator} needs other networks than the runs have, whose "
            f"adv_estimator is {config.algorithm.adv_estimator}: leave it out, or start a study of it with `run`."
        )
    if config.syncs_reference and not changed.syncs_reference:
        return (
            "the reference of the runs has moved, and without trainer.ref_model_sync_steps or ref_model_reset_kl, and "
            "a KL term, it would be the initial policy again: leave these settings as they are."
        )
    return ""
