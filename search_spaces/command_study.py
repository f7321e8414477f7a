"""Studies whose trials are a command of yours, such as a script of TRL or verl, and their family."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from search_spaces.declaration.study import Axis, Contrasts, Study, make_arms_axis, make_grid_axis
from search_spaces.language_model.family import IMPORTED
from trainable.command.config import CONSOLE, SETTINGS_SECTION, CommandConfig, Value, make_config_class
from trainable.families import DisplayColumn, Preset, Remark

_PRESETS = ("laptop", "paper")
"""Both are equal: the command has its scale."""
_ROW_BYTES = 21_000
"""Bytes of a row with all that is made from it: Tune's files, logs, tables and report."""
_STATE_BYTES = 10_000

REMARKS = (
    Remark(
        lambda c: "{seed" not in " ".join((c.command.run, *c.command.environment)),
        "the command has no {{seed}}, so that runs of an arm differ by chance alone, or not at all",
    ),
)
COMMAND = replace(
    IMPORTED,
    name="command",
    config_class=CommandConfig,
    trainable="trainable.command.trial:Command",
    presets=MappingProxyType(dict.fromkeys(_PRESETS, Preset(MappingProxyType({}), n_seeds=3))),
    make_template_values=lambda config: {},
    name_suffix="",
    games=MappingProxyType({}),
    search_space=(),
    remarks="search_spaces.command_study:REMARKS",
    get_model_path=lambda config: None,
    get_environment=lambda settings: "",
    estimate_bytes=lambda config, parameters: (_STATE_BYTES, _ROW_BYTES),
    estimate_step_seconds=lambda config: None,
    describe=lambda config: config.describe(),
    format_command=lambda config: config.format_command(),
    explain_obstacle=lambda config: config.explain_obstacle(),
    progress_columns=(
        DisplayColumn("val_success", "success", ".3f", fallback_column="base_val_success"),
        DisplayColumn("train_reward", "reward", ".3f"),
        DisplayColumn("entropy", "entropy", ".3f"),
    ),
    log_columns=tuple(
        DisplayColumn(column, column, ".4f")
        for column in ("val_success", "train_reward", "reward_std", "entropy", "kl_loss", "pg_loss", "grad_norm")
    ),
)
"""Runs that a command trains. Their rows have the columns of its logs beside ours, as those of imported runs."""


def make_command_study(
    name: str,
    question: str,
    command: str,
    settings: Mapping[str, Value],
    *,
    vary: Mapping[str, Sequence[object]] = MappingProxyType({}),
    arms: Mapping[str, Mapping[str, Value]] = MappingProxyType({}),
    baseline: str = "",
    steps: int = 100,
    logs: str = CONSOLE,
    columns: Mapping[str, str] = MappingProxyType({}),
    checkpoints: str = "",
    resume: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    folder: str | Path = ".",
    cpus: int = 1,
    gpus: float = 0,
    retry: str = "",
    stop_seconds: float = 30,
    n_seeds: int = 3,
    margin: float = 0.05,
    contrasts: Contrasts = MappingProxyType({}),
    stop_rules: tuple[str, ...] = (),
) -> Study:
    """Make a study whose trials are a command.

    command, logs, checkpoints, resume and environment are templates with fields such as {seed} and {output}, see
    `trainable.command.config.CommandConfig.fill_words`; for the others, see `CommandSection`.

    settings: your settings, by the names that the templates use, with the values of all arms. vary: values of some of
    them, whose combinations are the arms, or arms: the settings of each arm, by its name. baseline: the arm with which
    the others are compared; by default the first. steps: training steps, as the log counts them. columns: names of
    measurements in the log, by our names. Arms are compared by `val_success`; a number that is better if it is lower is
    written `- NAME`, and a share of errors `1 - NAME`. folder: where the command runs; relative to the current folder.
    margin: the difference within which two arms count as equal. stop_rules: of `trainable.runs.stop_rules.RULES`.

    Raises ValueError if the arms have a setting that `settings` has not, or if there are none.

    Example::

        STUDY = make_command_study(
            name="trl-beta",
            question="Does the coefficient of the KL change the reward?",
            command="python train.py --beta {beta} --seed {seed} --max_steps {steps} --output_dir {output}",
            settings={"beta": 0.0},
            vary={"beta": (0, 0.04)},
            logs="{output}/checkpoint-*/trainer_state.json",
            columns={"val_success": "rewards/exact_match/mean"},
        )
    """
    factors = {key: tuple(map(str, values)) for key, values in vary.items()}
    unknown = [key for key in (*vary, *(key for arm in arms.values() for key in arm)) if key not in settings]
    if unknown:
        raise ValueError(f"settings lacks {unknown[0]}, in which the arms differ: add it, with a value for other arms.")
    if bool(vary) == bool(arms):
        raise ValueError("A study has arms: type either vary={setting: values}, or arms={name: settings}.")
    prefix = f"{SETTINGS_SECTION}."
    if arms:
        named = {arm: {prefix + key: value for key, value in changed.items()} for arm, changed in arms.items()}
        axis = make_arms_axis("arm", named)
        typed = {key: tuple(str(arm[key]) for arm in arms.values() if key in arm) for key in settings}
    else:
        axis = make_grid_axis({prefix + key: values for key, values in factors.items()})
        if len(factors) == 1:
            ((key, values),) = factors.items()
            axis = Axis(prefix + key, dict.fromkeys(_PRESETS, values))
        typed = factors
    section: dict[str, object] = {
        "run": command,
        "resume": resume,
        "checkpoints": checkpoints,
        "logs": logs,
        "columns": tuple(f"{ours}={theirs}" for ours, theirs in columns.items()),
        "environment": tuple(f"{variable}={value}" for variable, value in environment.items()),
        "folder": str(Path(folder).absolute()),
        "retry": retry,
        "stop_seconds": stop_seconds,
    }
    trainer = {"total_training_steps": steps, "n_gpus_per_node": gpus, "num_cpus": cpus}
    return Study(
        name=name,
        family=replace(COMMAND, config_class=make_config_class(settings, typed)),
        question=question.split("\n\n")[0],
        axis=axis,
        fixed_settings={
            **{f"command.{key}": value for key, value in section.items()},
            **{f"trainer.{key}": value for key, value in trainer.items()},
        },
        baseline=baseline or axis.grids[_PRESETS[0]][0],
        stop_rules=stop_rules,
        n_seeds=n_seeds,
        margins={outcome.column: margin for outcome in COMMAND.outcomes},
        contrasts=contrasts,
    )
