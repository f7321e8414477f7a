"""The published sweeps with the published trainer: RAGEN on verl, of which a run is a command.

The words of the command are those of run_kl_sweep.sh and run_top_p_sweep.sh, whose values are the settings of our
studies under the preset `paper`. Checked against RAGEN 20daedc, with verl 0.6.1, by composing its configuration.
"""

from dataclasses import fields as dataclass_fields
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

from search_spaces.command_study import make_command_study
from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.family import make_template_values
from trainable.command.config import SETTINGS_SECTION, Value
from trainable.config.run_config import RunConfig, apply_overrides, resolve_key
from trainable.families import Settings

TRAINER = "ragen"
KEYS = (
    *("model_path", "trainer.save_freq", "trainer.val_before_train", "ray_kwargs.ray_init.num_cpus"),
    "algorithm.adv_estimator",
    *(
        f"actor_rollout_ref.actor.{name}"
        for name in (
            *("use_kl_loss", "kl_loss_coef", "entropy_coeff", "entropy_from_logits_with_chunking"),
            *("filter_loss_scaling", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"),
        )
    ),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    *("critic.ppo_mini_batch_size", "critic.ppo_micro_batch_size_per_gpu", "ppo_mini_batch_size"),
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in (
            *("log_prob_micro_batch_size_per_gpu", "rollout_filter_strategy", "rollout_filter_top_p_prob_mode"),
            *("rollout_filter_value", "rollout_filter_include_zero", "rollout_filter_type", "rollout_filter_metric"),
            "gpu_memory_utilization",
        )
    ),
    *(
        f"es_manager.{split}.{name}"
        for split in ("train", "val")
        for name in ("env_groups", "group_size", "env_configs.n_groups")
    ),
)
"""RAGEN's keys, in the order of the scripts. `resolve_key` finds our settings, whose values they get."""
_GPU_MEMORY_UTILIZATION = 0.5
"""That of the scripts; ours follows from the memory of the GPU."""
_COMMAND = (
    "{python} train.py --config-name _2_sokoban trainer.project_name=PROJECT trainer.experiment_name='{run}' "
    "trainer.total_training_steps={steps} trainer.default_local_dir='{output}/checkpoints' "
    "trainer.logger=['console','wandb'] trainer.n_gpus_per_node={gpus} system.CUDA_VISIBLE_DEVICES='{gpu_ids}' "
    "seed.train={seed*1000000+10000} {overrides} trainer.resume_mode=disable hydra.run.dir='{output}/hydra'"
)
_RESUME = "trainer.resume_mode=resume_path trainer.resume_from_path='{checkpoint}' trainer.val_before_train=False"


def _quote(template: str) -> str:
    """Protect the quotes of Hydra from the shell's."""
    return template.replace("'", '"\'"')


def _make_values(config: RunConfig) -> dict[str, Value]:
    """Make the values of RAGEN's keys from our settings."""
    values = {key: cast(Value, attrgetter(resolve_key(key))(config)) for key in KEYS}
    values["actor_rollout_ref.rollout.gpu_memory_utilization"] = _GPU_MEMORY_UTILIZATION
    return {key: f"[{value}]" if key.endswith(".n_groups") else value for key, value in values.items()}


def make_ragen_study(study: Study) -> Study:
    """Make the study that trains the arms of a published sweep with RAGEN. `--set command.folder` names its folder."""
    base = apply_overrides(RunConfig(), study.make_preset_settings("paper"))
    grid, prefix = study.get_grid("paper"), f"{SETTINGS_SECTION}."
    keys = {resolve_key(key): prefix + key for key in KEYS}
    arms = {arm: _make_values(apply_overrides(base, study.axis.make_settings(arm, base))) for arm in grid}
    first = arms[grid[0]]
    differing = [key for key in first if len({str(values[key]) for values in arms.values()}) > 1]
    named = {arm: {prefix + key: values[key] for key in differing} for arm, values in arms.items()}
    extra = {keys[setting]: value for setting, value in study.axis.extra_settings.items()}
    setting = keys[study.axis.setting]
    # Arms that are more than their value: 0 has no KL loss, and `nofilter` is a name.
    special = {arm: values for arm, values in named.items() if {**extra, setting: values[setting]} != values}
    fields = make_template_values(base)
    published = study.name_templates
    templates: dict[str, Any] = {
        field.name: _fill(getattr(published, field.name), fields)
        for field in dataclass_fields(published)
        if isinstance(getattr(published, field.name), str)
    }
    templates["run"] += f"_{TRAINER}"
    declared = make_command_study(
        name=f"{study.name}-{TRAINER}",
        question=study.question,
        command=_quote(_COMMAND.replace("PROJECT", templates["wandb_project"])),
        settings={**first, "python": "python"},
        arms={arm: {} for arm in grid},
        baseline=_fill(study.baseline, fields),
        steps=base.trainer.total_training_steps,
        checkpoints="{output}/checkpoints/global_step_{step}",
        resume=_quote(_RESUME),
        gpus=base.trainer.n_gpus_per_node,
        retry="ActorDiedError|RayActorError|NCCL|EngineDeadError|Connection re(set|fused)",
        stop_seconds=60,
        n_seeds=study.n_seeds or study.family.presets["paper"].n_seeds,
    )
    axis = Axis(setting, dict.fromkeys(declared.axis.grids, grid), study.axis.option, extra, special)
    return replace(declared, axis=axis, published_templates=replace(published, **templates))


def _fill(template: str, values: Settings) -> str:
    """Fill in the fields of a template that follow from the settings of the study."""
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template
