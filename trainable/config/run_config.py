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
from trainable.config.choices import FILTER_STRATEGIES, POLICY_LOSSES, idle_knobs
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
from trainable.config.setting_types import shown
from trainable.config.study_config import StudyConfig

C = TypeVar("C", bound=StudyConfig)


class ConfigError(ValueError):
    """A setting that cannot be used; the message says what was given, what is allowed and what to type."""


class RunConfig(StudyConfig):
    """One configuration; with its seed, one run."""

    aliases: ClassVar[Mapping[str, str]] = ALIASES
    without_result: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
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
    def _the_tiny_model_reads_compact_prompts(self) -> "RunConfig":
        if self.model.path == "sokoban-tiny" and self.model.prompt_style == "full":
            raise ValueError(
                "sokoban-tiny knows the compact prompt only: use the laptop preset, or model.prompt_style=compact"
            )
        return self

    @model_validator(mode="after")
    def _warmup_needs_a_critic_of_its_own(self) -> "RunConfig":
        if self.critic.shared_trunk and self.trainer.critic_warmup > 1:
            raise ValueError("critic.shared_trunk has one update for policy and critic: set trainer.critic_warmup=0")
        return self

    @model_validator(mode="after")
    def _adapters_share_a_base_that_is_whole(self) -> "RunConfig":
        if self.model.lora_rank and self.trainer.zero_stage == 3:
            raise ValueError(
                "model.lora_rank trains adapters over one frozen base, which is not dealt out: set trainer.zero_stage=2"
            )
        return self

    @model_validator(mode="after")
    def _target_policy_has_what_it_needs(self) -> "RunConfig":
        if self.actor.loss.keeps_groups:
            for refused, why in _refused_with_target_policy(self):
                if refused:
                    raise ValueError(f"actor.policy_loss=tpo {why}")
        return self

    def hashed(self) -> dict[str, Any]:
        """Every setting that can change a result, the seed and the knobs of choices that were not chosen left out."""
        data = super().hashed()
        if not self.model.lora_rank:
            for setting in ("lora_rank", "lora_alpha", "lora_target_modules"):
                del data["model"][setting]
        for setting in idle_knobs(POLICY_LOSSES, self.actor.policy_loss):
            del data["actor"][setting]
        for setting in idle_knobs(FILTER_STRATEGIES, self.filter.rollout_filter_strategy):
            del data["filter"][setting]
        if not self.collapse_detection.all_quantities:
            del data["collapse_detection"]["all_quantities"]
        return data


def _refused_with_target_policy(config: RunConfig) -> list[tuple[bool, str]]:
    """Whether each setting that actor.policy_loss=tpo cannot have is there, and what is said of it."""
    actor, algorithm, trainer, size = config.actor, config.algorithm, config.trainer, config.env.group_size
    whole, mini = math.lcm(size, actor.ppo_micro_batch_size_per_gpu), actor.ppo_mini_batch_size
    wrong_size = (
        f"is a loss of whole groups, and actor.ppo_mini_batch_size {mini} is no multiple of env.group_size {size}"
    )
    estimator = "aims at the skill of each rollout in its group: set algorithm.adv_estimator=group_skill"
    scaling = "aims at skills, which are no factors of a loss: set actor.filter_loss_scaling=none"
    no_task = "without skills is an anchor at the old policy, not nothing: set algorithm.zero_task_advantage=false"
    truncated = "weighs sequences, and truncated importance weights are of tokens: set actor.tis_imp_ratio_cap=null"
    dealt = "reads the policy before each optimizer step, on every rank by itself: set trainer.zero_stage=2"
    analysed = (
        "couples the rollouts of a group, and a gradient analysis adds up those of single rollouts: set "
        "trainer.gradient_analysis_mode=false"
    )
    return [
        (size < 2, "compares the rollouts of a group: set env.group_size=2 or more"),
        (not algorithm.estimator.is_skill, estimator),
        (mini % size != 0, f"{wrong_size}: set actor.ppo_mini_batch_size={whole}, or a multiple of that"),
        (actor.filter_loss_scaling != "none", scaling),
        (algorithm.zero_task_advantage, no_task),
        (actor.tis_imp_ratio_cap is not None, truncated),
        (trainer.zero_stage == 3, dealt),
        (trainer.gradient_analysis_mode, analysed),
    ]


def field_names(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """All dotted keys that `with_overrides` takes, in order of declaration."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += field_names(kind, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def canonical_key(key: str, kind: type[StudyConfig] = RunConfig) -> str:
    """The dotted field of a configuration of this kind that `key` names, or ConfigError with the nearest ones.

    `key` is a field (`actor.kl_loss_coef`), a key of the published documents (`actor_rollout_ref.actor.kl_loss_coef`),
    or a field's last part where only one section has it (`kl_loss_coef`).
    """
    fields, aliases = field_names(kind), kind.aliases
    if key in fields:
        return key
    if key in aliases:
        return aliases[key]
    bare = [name for name in fields if name.rsplit(".", 1)[-1] == key]
    if len(bare) == 1:
        return bare[0]
    if bare:
        raise ConfigError(f"`{shown(key)}` is a setting of several sections: type one of {', '.join(bare)}.")
    tails = {name.rsplit(".", 1)[-1]: name for name in fields}
    nearest = difflib.get_close_matches(key, [*fields, *aliases], n=3, cutoff=0.5)
    nearest += [tails[tail] for tail in difflib.get_close_matches(key.rsplit(".", 1)[-1], tails, n=3, cutoff=0.6)]
    section = key.split(".")[0]
    listed = [name for name in fields if name.startswith(section + ".")] if section in kind.model_fields else []
    hint = f" Nearest: {', '.join(dict.fromkeys(nearest))}." if nearest else ""
    hint += f" The section has: {', '.join(listed)}." if listed else ""
    raise ConfigError(
        f"There is no setting `{shown(key)}`.{hint} `python -m tune_study {kind.listed} --all` lists all with their "
        "meaning."
    )


def _parse(value: object) -> object:
    """Text from a command line as the list it spells, else unchanged: pydantic converts numbers and booleans."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            return json.loads(value.replace("'", '"'))
        except (ValueError, RecursionError):
            return [word.strip() for word in value.strip().strip("[]").split(",")]
    return value


def with_overrides(config: C, overrides: Mapping[str, object]) -> C:
    """`config` with dotted keys replaced, checked as a whole; the one override path of command line, spaces and Python.

    Raises ConfigError naming each bad key or value (the first ten of them) and its bounds.
    """
    data = config.model_dump()
    for key, value in overrides.items():
        *sections, name = canonical_key(key, type(config)).split(".")
        target = data
        for section in sections:
            target = target[section]
        target[name] = _parse(value)
    try:
        return type(config).model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def explain(error: ValidationError, most: int = 10) -> str:
    """One sentence for each bad value, of the first `most`."""
    sentences = []
    for item in error.errors()[:most]:
        where = shown(".".join(str(part) for part in item["loc"]))
        what = item["msg"].removeprefix("Value error, ")
        value = item["input"] if not isinstance(item["input"], Mapping) else None
        given = f"`{where}={shown(value)}`" if value is not None else f"`{where}`" if where else "This combination"
        sentences.append(f"{given} cannot be used: {what[0].lower()}{what[1:]}.")
    return " ".join(sentences)
