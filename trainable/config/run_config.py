"""The configuration of a PPO run, and the only code that overrides its settings.

`sections.py` declares the settings, with the names of the published sweeps; `aliases.py` maps the keys of those
documents to them. Defaults are the published values (paper scale). For other scales, see
`search_spaces/declaration/presets.py`.
"""

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from trainable.config.aliases import ALIASES, MISSING_FEATURES, SYNONYMS, VERL_PREFIX
from trainable.config.base_config import EXECUTION_SETTINGS, BaseRunConfig, ReadCondition
from trainable.config.choices import FILTER_METRICS, FILTER_STRATEGIES, POLICY_LOSSES
from trainable.config.command_lines import format_command
from trainable.config.conditions import PPO_CONDITIONS, find_unused_settings, keeps_all_groups
from trainable.config.constants import SHIPPED_MODELS, TEACHERS
from trainable.config.games import GAMES
from trainable.config.schedules import SCHEDULABLE_SETTINGS, is_schedule
from trainable.config.sections import (
    GAME_REWARD,
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
from trainable.config.setting_types import (
    MAX_EPISODES,
    MAX_LEVELS,
    Outside,
    OutsideKind,
    format_value,
    parse_alarm_rule,
)

C = TypeVar("C", bound=BaseRunConfig)


REFILL_SEED_OFFSET = MAX_LEVELS // 4
"""Distance from the first seed of a run's training levels to the first seed of the levels of further batches.

The first half of a run's seeds is for training, and the second half for gradient analyses."""


class ConfigError(ValueError):
    """Raised for an invalid setting. The message says what was given, what is allowed and what to type."""


class RunConfig(BaseRunConfig):
    """The settings of a PPO run, including its seed."""

    aliases: ClassVar[Mapping[str, str]] = ALIASES
    conditions: ClassVar[tuple[ReadCondition, ...]] = PPO_CONDITIONS
    schedulable_settings: ClassVar[tuple[str, ...]] = SCHEDULABLE_SETTINGS
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            # Logging, checkpoints and placement: a study can continue with other values.
            "trainer": (
                *EXECUTION_SETTINGS,
                "keep_best",
                "keep_last",
                "async_checkpoints",
                "log_val_generations",
                "log_train_generations",
                "n_gpus_per_node",
                "strategy",
                "zero_stage",
                "offload_optimizer",
                "offload_parameters",
                "swap_to_host",
                "num_threads",
            ),
            "rollout": ("gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "free_cache_engine"),
        }
    )

    # The bound keeps the seeds of training levels (env.seed_train + 1,000,000 seed + ..., with env.seed_train <= 200
    # million) below 700 million, where the levels of the demonstrations begin (`envs/level_sets.py`).
    seed: int = Field(0, ge=0, le=400, description="0: the published random streams; k: the k-th paired repetition")
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
    def _disable_zero_kl_loss(self) -> "RunConfig":
        if self.actor.kl_loss_coef == 0 and "actor.kl_loss_coef" not in self.schedules:
            # Written past the frozen pydantic model, before anyone else has the instance. Without a KL loss, the run
            # skips the reference pass, with the same results.
            self.__dict__["actor"] = self.actor.model_copy(update={"use_kl_loss": False})
        return self

    @model_validator(mode="after")
    def _check_combination(self) -> "RunConfig":
        for prefix, conflicts in (
            ("", _list_shipped_model_conflicts(self)),
            ("", _list_model_conflicts(self)),
            # tpo is the only loss over whole groups, so the messages name it.
            ("actor.policy_loss=tpo ", _list_target_policy_conflicts(self)),
            (f"env.name={self.env.name} ", _list_tree_conflicts(self)),
            ("", _list_batch_conflicts(self)),
            ("", _list_branching_conflicts(self)),
            ("filter.max_num_gen_batches samples further groups ", _list_refill_conflicts(self)),
            ("early_stop.alarm watches ", _list_alarm_conflicts(self)),
        ):
            for message in (message for message, applies in conflicts.items() if applies):
                raise ValueError(prefix + message)
        return self

    @property
    def trains_with_reference(self) -> bool:
        """Whether training steps need log-probs of the reference, for a KL term in the loss or the reward."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def measures_val_kl(self) -> bool:
        """Whether validations measure the KL to the reference, which is possible only if they sample tokens."""
        return self.trainer.measure_val_kl and self.rollout.val_temperature > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs the reference at all, in training steps or in validations."""
        return self.trains_with_reference or self.measures_val_kl

    @property
    def syncs_reference(self) -> bool:
        """Whether the reference becomes a later policy, so that it is a network of its own and saved in checkpoints."""
        is_reset = self.trains_with_reference and self.trainer.ref_model_reset_kl is not None
        return is_reset or (self.needs_reference and self.trainer.ref_model_sync_steps is not None)

    @property
    def model_paths(self) -> tuple[str, ...]:
        """The models that the run loads: the one that it fine-tunes, and a different reference if it needs one."""
        if self.model.reference_path is None or not self.needs_reference:
            return (self.model.path,)
        return (self.model.path, self.model.reference_path)

    @property
    def training_level_seeds(self) -> range:
        """The seeds from which `trainable.envs.level_sets` makes the levels that the run trains on."""
        first = self.env.seed_train + MAX_LEVELS * self.seed
        return range(first, first + self.env.env_groups * self.trainer.total_training_steps)

    @property
    def further_batches(self) -> int:
        """Maximum number of batches of levels that a step samples for groups that the filter drops."""
        drops_groups = not (keeps_all_groups(self) and self.filter.rollout_filter_include_zero)
        return self.filter.max_num_gen_batches - 1 if drops_groups else 0

    @property
    def refill_level_seeds(self) -> range:
        """The seeds of the levels that steps sample in further batches, in the order of steps and batches."""
        first = self.training_level_seeds.start + REFILL_SEED_OFFSET
        return range(first, first + len(self.training_level_seeds) * self.further_batches)

    @property
    def validation_level_seeds(self) -> range:
        """The seeds of the levels on which the run is validated."""
        return range(self.env.seed_val, self.env.seed_val + self.env.val_env_groups)

    @property
    def max_batch_size(self) -> int:
        """Maximum number of sequences in a step's batch, including copies that fill the last mini-batch."""
        multiple = self.compute_batch_multiple(self.env.env_groups)
        return -(-self.episodes_per_step // multiple) * multiple  # rounded up

    @property
    def episodes_per_step(self) -> int:
        """Maximum number of sequences in a step's batch, without copies."""
        return self.env.env_groups * self.env.group_size * self.env.max_conversations_per_rollout

    @property
    def copies_per_step(self) -> int:
        """Number of copies in a step's batch if the filter keeps every group."""
        return self.max_batch_size - self.episodes_per_step

    def compute_batch_multiple(self, num_groups: int) -> int:
        """Compute the number to a multiple of which copies fill up the batch of a step with `num_groups` groups.

        As published, this is the least common multiple of the mini-batch size and `num_groups`. It is 1, for no copies,
        if the loss is over whole groups, since a copy would change its group, and for trees, which are one mini-batch.
        """
        if self.env.kind.has_trees or self.actor.loss.needs_whole_groups:
            return 1
        return math.lcm(num_groups, self.actor.ppo_mini_batch_size)

    def dump_for_hash(self) -> dict[str, Any]:
        """Dump every setting that can change a result, except the seed and settings that this run does not read."""
        settings = super().dump_for_hash()
        model, rollout, actor = self.model, self.rollout, self.actor
        unread_settings: list[tuple[str, Iterable[str]]] = [
            ("actor", find_unused_settings(POLICY_LOSSES, actor.policy_loss)),
            ("filter", find_unused_settings(FILTER_STRATEGIES, self.filter.rollout_filter_strategy)),
            # Games other than Sokoban were added later, so only runs that play them hash their settings.
            ("env", [name for name, game in GAMES.items() if game.section is not None and name != self.env.name]),
        ]
        # Settings added after the first release. Only runs that use them hash them, so that other runs keep their hash.
        later_settings = [
            (bool(model.lora_rank), "model", ("lora_rank", "lora_alpha", "lora_target_modules")),
            (model.load_in_4bit, "model", ("load_in_4bit",)),
            (len(self.model_paths) > 1, "model", ("reference_path",)),
            (self.env.kind.has_trees, "algorithm", ("tree_weighting", "train_children")),
            (self.env.name != EnvConfig.model_fields["name"].default, "env", ("name",)),
            (self.env.reward != GAME_REWARD, "env", ("reward",)),
            (bool(self.trainer.own_stop_rules), "trainer", ("own_stop_rules",)),
            (self.collapse_detection.all_quantities, "collapse_detection", ("all_quantities",)),
            (self.trainer.measure_val_kl, "trainer", ("measure_val_kl",)),
            (self.syncs_reference, "trainer", ("ref_model_sync_steps", "ref_model_mixup_alpha")),
            (self.syncs_reference and bool(self.trainer.ref_model_reset_kl), "trainer", ("ref_model_reset_kl",)),
            (
                self.syncs_reference and self.trainer.ref_model_reset_optimizer,
                "trainer",
                ("ref_model_reset_optimizer",),
            ),
            (bool(self.early_stop.alarm), "early_stop", ("alarm",)),
            (bool(rollout.weight_noise), "rollout", ("weight_noise",)),
            (bool(rollout.ts_n), "rollout", ("ts_n", "ts_l")),
            (rollout.trains_from_engine_logprobs, "rollout", ("recompute_logprobs",)),
            (
                actor.tis_imp_ratio_cap is not None and actor.tis_mode != "token_truncate",
                "actor",
                ("tis_mode", "tis_imp_ratio_floor"),
            ),
            (actor.stapo_tau_p is not None, "actor", ("stapo_tau_p", "stapo_entropy_quantile")),
            (model.compiled_passes, "model", ("compiled_passes",)),
            (model.dtype == "float16", "model", ("loss_scale",)),
            (model.head_dtype != "model" and model.dtype != "float32", "model", ("head_dtype",)),
            (bool(self.env.overlong_buffer_len), "env", ("overlong_buffer_len", "overlong_penalty_factor")),
            (self.filter.mask_void_turns, "filter", ("mask_void_turns",)),
            (self.filter.mask_void_turns and self.filter.mask_only_void_turns, "filter", ("mask_only_void_turns",)),
            (self.filter.mask_truncated_completions, "filter", ("mask_truncated_completions",)),
            (bool(self.further_batches), "filter", ("max_num_gen_batches",)),
            (self.algorithm.critic_lam is not None, "algorithm", ("critic_lam",)),
            # `none` is norm_adv_by_std_in_grpo=False, which is hashed.
            (self.algorithm.scale_rewards == "batch", "algorithm", ("scale_rewards",)),
        ]
        unread_settings += [(section, names) for is_read, section, names in later_settings if not is_read]
        for section, names in unread_settings:
            for name in names:
                del settings[section][name]
        return settings


def _list_shipped_model_conflicts(config: RunConfig) -> dict[str, bool]:
    """List the conflicts with the words that the tokenizer of a shipped policy knows, those of its game's prompts."""
    policy, env = SHIPPED_MODELS.get(config.model.path), config.env
    if policy is None:
        return {}
    # A game for which no model ships, such as a plug-in, may use the words of another game.
    names = [name for name, model in SHIPPED_MODELS.items() if model.game == env.name]
    has_model = bool(names) or any("model.path" in settings for settings in env.kind.presets.values())
    advice = f"set model.path={names[0]}" if names else "set model.path to a model of the hub"
    teachers = [f"set model.reference_path={name}" for name, taught in TEACHERS.items() if taught == config.model.path]
    # For models of the hub, tokens are compared when the models are loaded.
    references = {path: SHIPPED_MODELS.get(TEACHERS.get(path, path)) for path in config.model_paths[1:]}
    return {
        f"model.path={config.model.path} knows the compact prompt only: use the laptop preset, or set "
        "model.prompt_style=compact": config.model.prompt_style != "compact",
        f"model.path={config.model.path} knows the words of {policy.game} only, and env.name is {env.name}: {advice}, "
        f"or type --env {env.name}, which chooses a model": policy.game != env.name and has_model,
        **{
            f"model.reference_path={path} knows the words of {reference.game} only, and model.path={config.model.path} "
            f"those of {policy.game}: {(*teachers, 'it has no teacher, so choose another game')[0]}": (
                reference is not policy
            )
            for path, reference in references.items()
            if reference is not None
        },
    }


def _list_alarm_conflicts(config: RunConfig) -> dict[str, bool]:
    """List the ends of messages for columns that an alarm watches and the run does not measure."""
    if not config.early_stop.alarm:
        return {}
    column = parse_alarm_rule(config.early_stop.alarm).column
    unmeasured_columns = {
        f"has no critic with algorithm.adv_estimator={config.algorithm.adv_estimator}": (
            not config.algorithm.estimator.needs_critic and column in ("critic_grad_norm", "explained_variance")
        ),
        "has none, because vLLM reports none: set rollout.recompute_logprobs=true": (
            not config.rollout.has_entropies and column == "entropy"
        ),
        "does not measure it: set trainer.measure_val_kl=true and sample validations": (
            not config.measures_val_kl and column == "val_kl_to_reference"
        ),
        "does not measure it: set collapse_detection.multi_turn_enabled=true": (
            not config.collapse_detection.multi_turn_enabled
            and column in ("collapse_trajectory_retrieval_accuracy", "collapse_trajectory_mi_estimate")
        ),
    }
    return {
        f"{column}, and the run {reason}, or choose another column": applies
        for reason, applies in unmeasured_columns.items()
    }


def _list_model_conflicts(config: RunConfig) -> dict[str, bool]:
    """List a message for each conflict between the model and its training, and whether it applies."""
    model, trainer = config.model, config.trainer
    moving_setting = "sync_steps" if trainer.ref_model_sync_steps is not None else "reset_kl"
    is_mixture = trainer.ref_model_mixup_alpha < 1 and trainer.ref_model_reset_kl is None
    return {
        # For critic_warmup, 0 and 1 both mean: no warmup.
        "critic.shared_trunk=True has one update for policy and critic, so the critic cannot start first: set "
        "trainer.critic_warmup=0": config.critic.shared_trunk and trainer.critic_warmup > 1,
        "model.lora_rank trains adapters over a frozen base, which is not sharded: set trainer.zero_stage=2": (
            bool(model.lora_rank) and trainer.zero_stage == 3
        ),
        "model.load_in_4bit stores frozen weights, and a run without adapters has none: set model.lora_rank=64": (
            model.load_in_4bit and not model.lora_rank
        ),
        f"trainer.ref_model_{moving_setting} moves the reference from the initial policy to later ones, and "
        f"model.reference_path={model.reference_path} names another: set one of them to null": (
            config.syncs_reference and model.reference_path is not None
        ),
        f"trainer.ref_model_mixup_alpha={trainer.ref_model_mixup_alpha} mixes weights, and mixed adapters do not "
        "add the mixture of what they add: set trainer.ref_model_mixup_alpha=1, or model.lora_rank=0": (
            config.syncs_reference and trainer.ref_model_mixup_alpha < 1 and bool(model.lora_rank)
        ),
        "trainer.ref_model_reset_optimizer=True resets the optimizer when the reference becomes a copy of the "
        f"policy, and trainer.ref_model_mixup_alpha={trainer.ref_model_mixup_alpha} mixes them: set "
        "trainer.ref_model_mixup_alpha=1, or a trainer.ref_model_reset_kl": (
            config.syncs_reference and trainer.ref_model_reset_optimizer and is_mixture
        ),
        "algorithm.kl_ctrl.type=adaptive adjusts algorithm.kl_ctrl.kl_coef in each step, so it has no schedule: "
        "set algorithm.kl_ctrl.type=fixed, or one number": (
            "algorithm.kl_ctrl.kl_coef" in config.schedules and config.algorithm.kl_ctrl.type == "adaptive"
        ),
        "model.load_in_4bit works with updates in torch alone: set trainer.strategy=torch and "
        "trainer.n_gpus_per_node=1": model.load_in_4bit and trainer.uses_deepspeed,
    }


def _list_batch_conflicts(config: RunConfig) -> dict[str, bool]:
    """List a message for each conflict of batch sizes and numerics, and whether it applies."""
    kl_ctrl, batch_size, groups = config.algorithm.kl_ctrl, config.max_batch_size, config.env.env_groups
    steps, metric = config.trainer.total_training_steps, config.filter.rollout_filter_metric
    controller = config.controllers.get("actor.kl_loss_coef")
    entropy_readers = {
        f"filter.rollout_filter_metric={metric} is made of them: set another metric": (
            FILTER_METRICS[metric].reads_entropies
        ),
        "actor.stapo_tau_p reads them: set actor.stapo_tau_p=null": config.actor.stapo_tau_p is not None,
        "target_entropy reads them: set actor.entropy_coeff to a number": "actor.entropy_coeff" in config.controllers,
    }
    has_adaptive_kl = config.algorithm.use_kl_in_reward and kl_ctrl.type == "adaptive"
    return {
        # Each run has a block of this many seeds for its training levels (`envs/level_sets.py`).
        f"env.env_groups={groups} takes {groups * steps} training levels in {steps} steps, and a run has "
        f"{MAX_LEVELS}: set env.env_groups={max(1, MAX_LEVELS // steps)} or fewer, or fewer "
        "trainer.total_training_steps": groups * steps > MAX_LEVELS,
        f"actor.ppo_mini_batch_size={config.actor.ppo_mini_batch_size}: the batch of a step is filled up with "
        f"copies to a common multiple of mini-batch and env.env_groups={groups}, which would be {batch_size} "
        f"sequences, and {MAX_EPISODES} are the maximum: set actor.ppo_mini_batch_size={groups}, or a multiple of "
        "that": batch_size > MAX_EPISODES,
        f"env.overlong_buffer_len={config.env.overlong_buffer_len}: must be at most "
        f"rollout.response_length={config.rollout.response_length}, the tokens of a reply: set "
        f"env.overlong_buffer_len={max(1, config.rollout.response_length // 4)}": (
            config.env.overlong_buffer_len > config.rollout.response_length
        ),
        "rollout.recompute_logprobs=False trains from the log-probs of the engine, so importance weights have "
        "nothing to correct: set actor.tis_imp_ratio_cap=null, or rollout.recompute_logprobs=true": (
            config.rollout.trains_from_engine_logprobs and config.actor.tis_imp_ratio_cap is not None
        ),
        **{
            "rollout.recompute_logprobs=False leaves the run without entropies, because vLLM reports none, and "
            f"{message}, or rollout.recompute_logprobs=true": reads_entropies and not config.rollout.has_entropies
            for message, reads_entropies in entropy_readers.items()
        },
        f"actor.kl_loss_coef={controller.text if controller else ''}: the horizon must be above 0.2 times the "
        f"{batch_size} sequences of a step, or the coefficient could become 0 or negative: set it to "
        f"{10 * batch_size}": (
            controller is not None and config.actor.use_kl_loss and controller.numbers["horizon"] <= 0.2 * batch_size
        ),
        # A step multiplies the coefficient by 1 + error * batch size / horizon, with an error of at least -0.2.
        # Below this bound the product could be 0 or negative, and a negative coefficient would reward the KL.
        f"algorithm.kl_ctrl.horizon={kl_ctrl.horizon}: must be above 0.2 times the {batch_size} sequences of a "
        "step, or the adaptive coefficient could become 0 or negative: set "
        f"algorithm.kl_ctrl.horizon={10 * batch_size}, or another value above {0.2 * batch_size:g}": (
            has_adaptive_kl and kl_ctrl.horizon <= 0.2 * batch_size
        ),
        "model.dtype=float16: its losses are scaled only where torch updates, on one GPU per run: set "
        "trainer.n_gpus_per_node=1 and trainer.strategy=torch, or model.dtype=bfloat16": (
            config.model.dtype == "float16" and config.trainer.uses_deepspeed
        ),
    }


def _list_refill_conflicts(config: RunConfig) -> dict[str, bool]:
    """List the end of a message for each conflict with further batches in a step, and whether it applies."""
    if not config.further_batches:
        return {}
    return {
        f"from {REFILL_SEED_OFFSET} levels, and {config.filter.max_num_gen_batches} batches of "
        f"env.env_groups={config.env.env_groups} in {config.trainer.total_training_steps} steps need more: set a "
        "smaller filter.max_num_gen_batches, or a smaller env.env_groups": (
            max(len(config.training_level_seeds), len(config.refill_level_seeds)) > REFILL_SEED_OFFSET
        ),
        "for those that the filter drops, so the loss needs no scale: set actor.filter_loss_scaling=none": (
            config.actor.filter_loss_scaling != "none"
        ),
        "in a training step, and gradients are analyzed over a single batch: set "
        "trainer.gradient_analysis_mode=false": config.trainer.gradient_analysis_mode,
    }


def _list_branching_conflicts(config: RunConfig) -> dict[str, bool]:
    """List a message for each conflict with episodes that branch, and whether it applies."""
    rollout, trainer, size = config.rollout, config.trainer, config.rollout.episodes_per_tree
    sizes = {"env.group_size": config.env.group_size}
    if trainer.gradient_analysis_mode and trainer.gradient_analysis_group_size is not None:
        sizes["trainer.gradient_analysis_group_size"] = trainer.gradient_analysis_group_size
    return {
        f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the episodes of a prefix tree, and no "
        "episode branches with rollout.ts_n=0: set rollout.ts_n=1 or more, or algorithm.adv_estimator=grpo": (
            config.algorithm.estimator.compares_prefix_trees and not rollout.ts_n
        ),
        f"rollout.ts_n={rollout.ts_n} branches the episodes of a game of turns, and env.name={config.env.name} is "
        "none: set rollout.ts_n=0": rollout.ts_n > 0 and bool(config.env.kind.player),
        **{
            f"{name}={group_size}: must be a multiple of {size}, the 1 + rollout.ts_l * rollout.ts_n episodes of a "
            f"prefix tree: set {name}={-(-group_size // size) * size}": group_size % size != 0
            for name, group_size in sizes.items()
        },
    }


def _list_target_policy_conflicts(config: RunConfig) -> dict[str, bool]:
    """List the end of a message for each conflict with actor.policy_loss=tpo, and whether it applies."""
    if not config.actor.loss.needs_whole_groups:
        return {}
    actor, algorithm, trainer, group_size = config.actor, config.algorithm, config.trainer, config.env.group_size
    mini_batch_size = actor.ppo_mini_batch_size
    # The mini-batch size that the message suggests: a multiple of the group and of the micro-batch.
    valid_multiple = math.lcm(group_size, actor.ppo_micro_batch_size_per_gpu)
    return {
        "compares the rollouts of a group: set env.group_size=2 or more": group_size < 2,
        "fits the skill of each rollout in its group: set algorithm.adv_estimator=group_skill": (
            not algorithm.estimator.is_skill
        ),
        f"is a loss of whole groups, and actor.ppo_mini_batch_size={mini_batch_size} is not a multiple of "
        f"env.group_size={group_size}: set actor.ppo_mini_batch_size={valid_multiple}, or a multiple of that": (
            mini_batch_size % group_size != 0
        ),
        "compares all rollouts of a group in its loss: set filter.mask_void_turns=false and "
        "filter.mask_truncated_completions=false": config.filter.masks_episodes,
        "fits skills, which do not scale the loss: set actor.filter_loss_scaling=none": (
            actor.filter_loss_scaling != "none"
        ),
        "still pulls towards the old policy when all skills are 0: set algorithm.zero_task_advantage=false": (
            algorithm.zero_task_advantage
        ),
        "weights sequences, while truncated importance weights are per token: set actor.tis_imp_ratio_cap=null": (
            actor.tis_imp_ratio_cap is not None
        ),
        "weights sequences, of which no token can be left out: set actor.stapo_tau_p=null": (
            actor.stapo_tau_p is not None
        ),
        "sums log-probs over whole rollouts, and with them the mismatch of the engine: set "
        "rollout.recompute_logprobs=true": config.rollout.trains_from_engine_logprobs,
        "runs the policy on each rank alone before each optimizer step: set trainer.zero_stage=2": (
            trainer.zero_stage == 3
        ),
        "couples the rollouts of a group, while gradient analysis sums the gradients of single rollouts: set "
        "trainer.gradient_analysis_mode=false": trainer.gradient_analysis_mode,
    }


def _list_tree_conflicts(config: RunConfig) -> dict[str, bool]:
    """List the end of a message for each conflict with trees of rollouts, and whether it applies."""
    if not config.env.kind.has_trees:
        return {}
    algorithm, detection = config.algorithm, config.collapse_detection
    return {
        "compares the trees of a question: set env.group_size=2 or more": config.env.group_size < 2,
        "credits a tree by the score of its root in its group: set algorithm.adv_estimator=grpo": (
            not algorithm.estimator.credits_trees
        ),
        "weights the loss of single tokens: set actor.policy_loss=ppo_clip": config.actor.loss.needs_whole_groups,
        "has one reward for all rollouts of a tree: set algorithm.use_kl_in_reward=false": algorithm.use_kl_in_reward,
        "trains all rollouts of a tree together: set filter.mask_void_turns=false, "
        "filter.mask_truncated_completions=false and filter.max_num_gen_batches=1": (
            config.filter.masks_episodes or config.further_batches > 0
        ),
        "weights tokens itself: set actor.tis_imp_ratio_cap=null": config.actor.tis_imp_ratio_cap is not None,
        "weights tokens itself: set actor.stapo_tau_p=null": config.actor.stapo_tau_p is not None,
        "trains trees, of which there is no gradient analysis: set trainer.gradient_analysis_mode=false (their "
        "runs cannot be probed, either)": config.trainer.gradient_analysis_mode,
        "has no thoughts in tags, which the collapse diagnosis reads: set "
        "collapse_detection.first_turn_enabled=false and collapse_detection.multi_turn_enabled=false": (
            detection.first_turn_enabled or detection.multi_turn_enabled
        ),
        "has a reward of its own: set env.reward=game": config.env.reward != GAME_REWARD,
        "executes code in the process of its run: set trainer.n_gpus_per_node=1 or less": (
            config.trainer.n_gpus_per_node > 1
        ),
    }


def iter_fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Iterate over the settings of a section in the order of declaration: pairs of dotted name and field."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from iter_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


@cache
def list_field_names(section: type[BaseModel] = RunConfig) -> tuple[str, ...]:
    """List the dotted names of all settings of a section, in the order of declaration."""
    return tuple(name for name, _ in iter_fields(section))


@cache
def _list_text_settings(section: type[BaseModel]) -> frozenset[str]:
    """List the settings that are texts, which may begin with a bracket."""
    return frozenset(name for name, field in iter_fields(section) if field.annotation in (str, str | None))


@cache
def list_outside_settings(section: type[BaseModel], *kinds: OutsideKind) -> tuple[str, ...]:
    """List the dotted settings that name something outside of a study's folder, of these kinds (of all, if none)."""
    return tuple(
        name
        for name, field in iter_fields(section)
        if any(isinstance(mark, Outside) and (not kinds or mark.kind in kinds) for mark in field.metadata)
    )


def resolve_key(key: str, config_type: type[BaseRunConfig] = RunConfig) -> str:
    """Find the dotted field of `config_type` that `key` names, or raise ConfigError with the nearest names.

    `key` is a field (`actor.kl_loss_coef`), a key of the published documents (`actor_rollout_ref.actor.kl_loss_coef`),
    or the last part of a field, if it is unambiguous (`kl_loss_coef`), also after the outermost section
    (`env.success_rate` for `env.frozenlake.success_rate`).
    """
    fields, aliases = list_field_names(config_type), config_type.aliases
    short_key = key.removeprefix(VERL_PREFIX)
    if short_key in fields:
        return short_key
    if key in aliases:
        return aliases[key]
    outermost_section, _, last_part = short_key.rpartition(".")
    matching_fields = [
        name
        for name in fields
        if name.rsplit(".", 1)[-1] == last_part and (not outermost_section or name.split(".")[0] == outermost_section)
    ]
    if len(matching_fields) == 1:
        return matching_fields[0]
    feature = MISSING_FEATURES.get(key, MISSING_FEATURES.get(last_part))
    if feature is not None:
        raise ConfigError(f"There is no setting `{format_value(key)}`. {feature}")
    if matching_fields:
        raise ConfigError(
            f"`{format_value(key)}` is a setting of several sections: type one of {', '.join(matching_fields)}."
        )
    nearest = _find_nearest_keys(short_key, fields, aliases)
    section = short_key.split(".")[0]
    section_fields = [name for name in fields if name.startswith(section + ".")]
    hint = f" Nearest: {', '.join(nearest)}." if nearest else ""
    hint += f" The section has: {', '.join(section_fields)}." if section_fields else ""
    raise ConfigError(
        f"There is no setting `{format_value(key)}`.{hint} "
        f"`{format_command(*config_type.list_command.split(), '--all')}` lists all with their meaning."
    )


def _find_nearest_keys(key: str, fields: Sequence[str], aliases: Iterable[str]) -> list[str]:
    """Find the keys that someone who typed `key` may have meant, the likeliest first.

    If `key` is a name from other trainers, these are the fields that it stands for, in the section of `key` if it has
    any. Otherwise, they are the keys with the most similar spelling.
    """
    outermost_section, last_part = key.partition(".")[0], key.rpartition(".")[2]
    synonyms = [name for name in fields if name.rsplit(".", 1)[-1] == SYNONYMS.get(last_part)]
    synonyms_in_section = [name for name in synonyms if name.split(".")[0] == outermost_section]
    if synonyms:
        return synonyms_in_section or synonyms
    # Search by the whole key, for a wrong section, and by its last part, for a misspelled setting in any section. Last
    # parts are short and more often similar by chance, hence the higher cutoff.
    field_by_suffix = {name.rsplit(".", 1)[-1]: name for name in fields}
    nearest = difflib.get_close_matches(key, [*fields, *aliases], n=3, cutoff=0.5)
    nearest += [
        field_by_suffix[tail] for tail in difflib.get_close_matches(last_part, field_by_suffix, n=3, cutoff=0.6)
    ]
    return list(dict.fromkeys(nearest))


def _parse_list(value: object) -> object:
    """Parse text such as `[a, b]` as a list. Return other values unchanged, since pydantic converts text to numbers."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            return json.loads(value.replace("'", '"'))
        except (ValueError, RecursionError):  # words without quotes, such as [console,wandb], or too many brackets
            return [word.strip() for word in value.strip().strip("[]").split(",")]
    return value


def apply_overrides(config: C, overrides: Mapping[str, object]) -> C:
    """Replace some settings of `config` and validate the result as a whole.

    overrides: values by key, where a key is as in `resolve_key` and a value may be text. Raises ConfigError for unknown
    keys and for invalid values, of which the message names the first ten with their bounds.

    >>> apply_overrides(RunConfig(), {"kl_loss_coef": "0.01"}).actor.kl_loss_coef
    0.01
    """
    # Replace all values before checking any, since two settings may be valid only together.
    settings, text_names = config.model_dump(), _list_text_settings(type(config))
    for key, value in overrides.items():
        setting = resolve_key(key, type(config))
        *sections, name = setting.split(".")
        if is_schedule(value) and setting not in text_names and setting not in config.schedulable_settings:
            names = ", ".join(config.schedulable_settings)
            advice = f"These can have a schedule: {names}" if names else "No setting of this study can have one"
            raise ConfigError(f"{setting}={format_value(value)}: is one value for all steps. {advice}.")
        section_settings = settings
        for section in sections:
            section_settings = section_settings[section]
        section_settings[name] = value if setting in text_names else _parse_list(value)
    try:
        return type(config).model_validate(settings)
    except ValidationError as error:
        raise ConfigError(format_validation_error(error)) from None


def format_validation_error(error: ValidationError) -> str:
    """Format the first ten invalid values, each in a sentence `setting=value: what is allowed.`."""
    return " ".join(_format_error_item(item) for item in error.errors()[:10])


def _format_error_item(item: Mapping[str, Any]) -> str:
    """Format one of pydantic's errors in our form, `section.setting=value: must be ...`."""
    location = format_value(".".join(str(key) for key in item["loc"]))
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    message = message.replace("must be a valid boolean, unable to interpret input", "must be True or False")
    message = message[0].lower() + message[1:]
    if not location:  # a validator of the whole configuration, whose message names its settings
        return f"{message}."
    if not isinstance(item["input"], Mapping):
        return f"{location}={format_value(item['input'])}: {message}."
    # Validators of sections raise `name=value: ...`, without the section. Other errors, such as for unknown keys, name
    # no setting.
    names_setting = "=" in message.split(" ", 1)[0]
    return f"{location}.{message}." if names_setting else f"{location}: {message}."
