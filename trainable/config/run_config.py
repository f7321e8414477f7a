"""One configuration of a run, and the one path by which its settings are overridden; `sections.py` has the settings.

Names are those that users of the published sweeps know; `aliases.py` maps each key as those documents write it to the
field here. Defaults are the published ones (paper scale); what another scale changes stands in
`search_spaces/declaration/presets.py`.
"""

import difflib
import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from trainable.config.aliases import ALIASES
from trainable.config.choices import FILTER_STRATEGIES, POLICY_LOSSES, find_unused_settings
from trainable.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    CollapseDetectionConfig,
    CriticConfig,
    EarlyStopConfig,
    EnvConfig,
    FilterConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
)
from trainable.config.setting_types import format_value
from trainable.config.study_config import BaseRunConfig

C = TypeVar("C", bound=BaseRunConfig)


class ConfigError(ValueError):
    """A setting that cannot be used; the message says what was given, what is allowed and what to type."""


class RunConfig(BaseRunConfig):
    """One configuration; with its seed, one run."""

    aliases: ClassVar[Mapping[str, str]] = ALIASES
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            # What is logged and kept of a run, and where it is placed.
            "trainer": (
                "logger", "ray_num_cpus", "resume_every", "save_freq", "disk_patience",
                "device", "n_gpus_per_node", "strategy", "zero_stage", "offload_optimizer", "offload_parameters",
            ),
            "rollout": ("gpu_memory_utilization", "enforce_eager", "free_cache_engine"),
        }
    )  # fmt: skip

    seed: int = Field(0, ge=0, le=400, description="0: the published streams; k: the k-th paired repetition")
    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    filter: FilterConfig = FilterConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    collapse_detection: CollapseDetectionConfig = CollapseDetectionConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()

    @model_validator(mode="after")
    def _check_tiny_model_prompt(self) -> "RunConfig":
        if self.model.path == "sokoban-tiny" and self.model.prompt_style == "full":
            raise ValueError(
                "sokoban-tiny knows the compact prompt only: use the laptop preset, or model.prompt_style=compact"
            )
        return self

    @model_validator(mode="after")
    def _check_critic_warmup(self) -> "RunConfig":
        if self.critic.shared_trunk and self.trainer.critic_warmup > 1:
            raise ValueError("critic.shared_trunk has one update for policy and critic: set trainer.critic_warmup=0")
        return self

    @model_validator(mode="after")
    def _check_lora_zero_stage(self) -> "RunConfig":
        if self.model.lora_rank and self.trainer.zero_stage == 3:
            raise ValueError(
                "model.lora_rank trains adapters over one frozen base, which is not dealt out: set trainer.zero_stage=2"
            )
        return self

    @model_validator(mode="after")
    def _check_target_policy(self) -> "RunConfig":
        if self.actor.loss.needs_whole_groups:
            for is_conflict, reason in _find_target_policy_conflicts(self):
                if is_conflict:
                    raise ValueError(f"actor.policy_loss=tpo {reason}")
        return self

    def dump_for_hash(self) -> dict[str, Any]:
        """Every setting that can change a result, the seed and the knobs of choices that were not chosen left out."""
        settings = super().dump_for_hash()
        if not self.model.lora_rank:
            for setting in ("lora_rank", "lora_alpha", "lora_target_modules"):
                del settings["model"][setting]
        for setting in find_unused_settings(POLICY_LOSSES, self.actor.policy_loss):
            del settings["actor"][setting]
        for setting in find_unused_settings(FILTER_STRATEGIES, self.filter.rollout_filter_strategy):
            del settings["filter"][setting]
        if not self.collapse_detection.all_quantities:
            del settings["collapse_detection"]["all_quantities"]
        return settings


def _find_target_policy_conflicts(config: RunConfig) -> list[tuple[bool, str]]:
    """Whether each setting that actor.policy_loss=tpo cannot have is there, and what is said of it."""
    actor, algorithm, trainer, group_size = config.actor, config.algorithm, config.trainer, config.env.group_size
    common_multiple, mini_batch_size = (
        math.lcm(group_size, actor.ppo_micro_batch_size_per_gpu),
        actor.ppo_mini_batch_size,
    )
    wrong_size = f"is a loss of whole groups, and actor.ppo_mini_batch_size {mini_batch_size} is no multiple of env.group_size {group_size}"
    estimator = "aims at the skill of each rollout in its group: set algorithm.adv_estimator=group_skill"
    scaling = "aims at skills, which are no factors of a loss: set actor.filter_loss_scaling=none"
    zero_advantage = (
        "without skills is an anchor at the old policy, not nothing: set algorithm.zero_task_advantage=false"
    )
    importance_weights = (
        "weighs sequences, and truncated importance weights are of tokens: set actor.tis_imp_ratio_cap=null"
    )
    sharded_weights = "reads the policy before each optimizer step, on every rank by itself: set trainer.zero_stage=2"
    gradient_analysis = (
        "couples the rollouts of a group, and a gradient analysis adds up those of single rollouts: set "
        "trainer.gradient_analysis_mode=false"
    )
    return [
        (group_size < 2, "compares the rollouts of a group: set env.group_size=2 or more"),
        (not algorithm.estimator.is_skill, estimator),
        (
            mini_batch_size % group_size != 0,
            f"{wrong_size}: set actor.ppo_mini_batch_size={common_multiple}, or a multiple of that",
        ),
        (actor.filter_loss_scaling != "none", scaling),
        (algorithm.zero_task_advantage, zero_advantage),
        (actor.tis_imp_ratio_cap is not None, importance_weights),
        (trainer.zero_stage == 3, sharded_weights),
        (trainer.gradient_analysis_mode, gradient_analysis),
    ]


def list_field_names(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """All dotted keys that `with_overrides` takes, in order of declaration."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        field_type = field.annotation
        if isinstance(field_type, type) and issubclass(field_type, BaseModel):
            names += list_field_names(field_type, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def resolve_key(key: str, config_type: type[BaseRunConfig] = RunConfig) -> str:
    """The dotted field of a configuration of this kind that `key` names, or ConfigError with the nearest ones.

    `key` is a field (`actor.kl_loss_coef`), a key of the published documents (`actor_rollout_ref.actor.kl_loss_coef`),
    or a field's last part where only one section has it (`kl_loss_coef`).
    """
    fields, aliases = list_field_names(config_type), config_type.aliases
    if key in fields:
        return key
    if key in aliases:
        return aliases[key]
    matching_fields = [name for name in fields if name.rsplit(".", 1)[-1] == key]
    if len(matching_fields) == 1:
        return matching_fields[0]
    if matching_fields:
        raise ConfigError(
            f"`{format_value(key)}` is a setting of several sections: type one of {', '.join(matching_fields)}."
        )
    field_by_suffix = {name.rsplit(".", 1)[-1]: name for name in fields}
    nearest = difflib.get_close_matches(key, [*fields, *aliases], n=3, cutoff=0.5)
    nearest += [
        field_by_suffix[tail]
        for tail in difflib.get_close_matches(key.rsplit(".", 1)[-1], field_by_suffix, n=3, cutoff=0.6)
    ]
    section = key.split(".")[0]
    section_fields = (
        [name for name in fields if name.startswith(section + ".")] if section in config_type.model_fields else []
    )
    hint = f" Nearest: {', '.join(dict.fromkeys(nearest))}." if nearest else ""
    hint += f" The section has: {', '.join(section_fields)}." if section_fields else ""
    raise ConfigError(
        f"There is no setting `{format_value(key)}`.{hint} `python -m tune_study {config_type.list_command} --all` lists all with their "
        "meaning."
    )


def _parse_list(value: object) -> object:
    """Text from a command line as the list it spells, else unchanged: pydantic converts numbers and booleans."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            return json.loads(value.replace("'", '"'))
        except (ValueError, RecursionError):
            return [word.strip() for word in value.strip().strip("[]").split(",")]
    return value


def apply_overrides(config: C, overrides: Mapping[str, object]) -> C:
    """`config` with dotted keys replaced, checked as a whole; the one override path of command line, spaces and Python.

    Raises ConfigError naming each bad key or value (the first ten of them) and its bounds.
    """
    settings = config.model_dump()
    for key, value in overrides.items():
        *sections, name = resolve_key(key, type(config)).split(".")
        section_settings = settings
        for section in sections:
            section_settings = section_settings[section]
        section_settings[name] = _parse_list(value)
    try:
        return type(config).model_validate(settings)
    except ValidationError as error:
        raise ConfigError(format_validation_error(error)) from None


def format_validation_error(error: ValidationError, max_errors: int = 10) -> str:
    """One sentence for each bad value, of the first `most`."""
    sentences = []
    for item in error.errors()[:max_errors]:
        location = format_value(".".join(str(part) for part in item["loc"]))
        message = item["msg"].removeprefix("Value error, ")
        value = item["input"] if not isinstance(item["input"], Mapping) else None
        setting = (
            f"`{location}={format_value(value)}`"
            if value is not None
            else f"`{location}`"
            if location
            else "This combination"
        )
        sentences.append(f"{setting} cannot be used: {message[0].lower()}{message[1:]}.")
    return " ".join(sentences)
