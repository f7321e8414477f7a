"""Restore a run from a checkpoint in this process, to query or analyze its model. Nothing is trained."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from trainable.config.command_lines import format_command
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.config.setting_types import flatten_settings
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS, analyze_gradients
from trainable.files.json_lines import read_lines, write_lines
from trainable.files.paths import atomic_write, check_path
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import read_checkpoint
from trainable.runs.failures import CheckpointError
from trainable.runs.run_files import PROBES_FILE
from tune_study.folder import outputs
from tune_study.folder.run_checkpoints import RunCheckpoint, find_run_checkpoint
from tune_study.folder.study_file import plan_from_folder
from tune_study.host.console import make_console, print_line, print_table, show_phases
from tune_study.placement.model_files import check_model
from tune_study.placement.resources import check_sampler
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import load_typed_code

ProbeSettings = Mapping[str, object]
ALLOWED_PREFIXES = (
    "env.",
    "filter.",
    "rollout.",
    "trainer.",
    "actor.use_kl_loss",
    "actor.kl_loss",
    "actor.entropy_coeff",
    "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
)
"""Prefixes of settings that a probe may change. Changing others would make the trainer differ from the checkpoint."""

PUBLISHED_COEFFICIENT = 0.001
"""Coefficient with which the published code measures an entropy bonus or a KL loss that the run does not have."""


def restore(
    run: Path | str,
    trial: str | None = None,
    step: int | None = None,
    *,
    path: Path | str | None = None,
    settings: ProbeSettings = MappingProxyType({}),
    study: str | None = None,
    code: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> PPOTrainer:
    """Restore the trainer of a run from a checkpoint.

    `trainer.roll_out` and `trainer.evaluate` roll out episodes. `trainer.step()` continues the training in this process
    and writes nothing. `trainer.close()` frees the memory of the sampling engine. Raises PlanError (a ValueError) that
    lists the alternatives if a name, a step or a folder cannot be used.

    Args:
        run: the study's folder, results/<run>.
        trial: run_id, or an arm to choose its smallest seed; None if the study has only one run.
        step: step of the checkpoint; None for the newest.
        path: folder of the checkpoint, instead of `step`.
        settings: dotted settings to change, such as {"trainer.device": "cpu"}.
        study: the file that declares the study, such as "lr.py"; None for a study of this package.
        code: the plug-in files that the study uses, such as ["my_loss.py"].
        allow: entries of somebody else's folder that name something outside it and may be used, as the error prints
            them.

    Example:
        >>> trainer = restore("out/results/kl_sweep_sokoban-tiny", trial="0.1")  # doctest: +SKIP
        >>> trainer.evaluate("val", "greedy").success  # doctest: +SKIP
    """
    plan = plan_from_folder(Path(run), own_study=load_typed_code(study, code), allowed=frozenset(allow))
    return _restore_trainer(find_run_checkpoint(plan, trial, step, path), settings)


def _restore_trainer(target: RunCheckpoint, settings: ProbeSettings) -> PPOTrainer:
    """Restore a trainer. Raises PlanError if the checkpoint is damaged or was written by another run."""
    # The checkpoint has only the trained weights; the model provides tokenizer and frozen networks.
    for path in target.spec.ppo_config.model_paths:
        check_model(path, os.environ)
    config = apply_overrides(target.spec.ppo_config, settings)
    check_sampler(config, os.environ)
    if disallowed_names := [name for name in settings if not name.startswith(ALLOWED_PREFIXES)]:
        raise PlanError(
            f"`{disallowed_names[0]}` cannot be set for a probe: the trainer would not match the checkpoint. "
            f"Allowed settings: env, filter, rollout, trainer, the actor's KL loss and entropy_coeff."
        )
    try:
        tensors, values = read_checkpoint(target.path)
        if not RunConfig.model_validate(values.get("settings")).is_same_run(target.spec.ppo_config):
            raise CheckpointError(f"{target.path} was written by another run than {target.spec.run_id}.")
        # The checkpoint was checked against the run's settings, but the trainer gets the probe's.
        trainer = PPOTrainer(config, diagnostics=DIAGNOSTICS)
        trainer.load_state(tensors, values)
    except (CheckpointError, ConfigError, ValueError, ArithmeticError, AssertionError, RuntimeError) as error:
        # torch raises AssertionError or RuntimeError for a device that does not exist.
        raise PlanError(f"The checkpoint cannot be used: {error}") from None
    return trainer


def make_probe_settings(config: RunConfig, settings: ProbeSettings) -> dict[str, object]:
    """Make the settings of a probe, which switch on the analysis, a KL loss and an entropy bonus.

    The analyzed batch has the published 128 x 16 episodes, unless the run sets another size. The gradient of a term is
    proportional to its coefficient. settings: the typed settings, which take precedence. Raises PlanError if the size
    of the batch is set to null: in training this means the batch of the step, which a probe does not have.
    """
    trainer = config.trainer
    default_settings: dict[str, object] = {
        "trainer.gradient_analysis_mode": True,
        "trainer.gradient_analysis_log_prefilter": True,
        "trainer.gradient_analysis_env_groups": trainer.gradient_analysis_env_groups or 128,
        "trainer.gradient_analysis_group_size": trainer.gradient_analysis_group_size or 16,
        "actor.entropy_coeff": config.actor.entropy_coeff or PUBLISHED_COEFFICIENT,
        # A probe plays its own batch.
        "filter.max_num_gen_batches": 1,
    }
    # A run with a KL loss keeps the estimator and coefficient with which its policy was trained.
    if not config.actor.use_kl_loss:
        default_settings |= {
            "actor.use_kl_loss": True,
            "actor.kl_loss_type": "low_var_kl",
            "actor.kl_loss_coef": PUBLISHED_COEFFICIENT,
        }
    for name in ("trainer.gradient_analysis_env_groups", "trainer.gradient_analysis_group_size"):
        if name in settings and str(settings[name]).strip().lower() in ("null", "none"):
            raise PlanError(
                f"{name}=null is not possible for a probe, which plays a separate batch: leave it out for "
                f"{default_settings[name]}, or type a number."
            )
    return {**default_settings, **settings}


def format_changes(run_config: RunConfig, config: RunConfig, settings: ProbeSettings) -> str | None:
    """Format the `settings` that differ from the run's as `name=value, ...`; None if none does."""
    before, after = (flatten_settings(version.model_dump(mode="json")) for version in (run_config, config))
    changed_names = [name for name in settings if before.get(name) != after.get(name)]
    return ", ".join(f"{name}={json.dumps(after[name])}" for name in changed_names) or None


def probe(target: RunCheckpoint, settings: ProbeSettings, with_val: bool, console: Console) -> None:
    """Analyze the gradients of one checkpoint, add the rows to the study's tables, and print them.

    with_val: roll out the validation levels first.
    """
    run_config = target.spec.ppo_config
    effective_settings = make_probe_settings(run_config.at_step(target.step), settings)
    config = apply_overrides(run_config, effective_settings)
    run_dir, template = target.plan.get_run_dir(target.spec.run_id), target.plan.study.name_templates.probe_log
    # The log has its published name, which ends in the measured terms besides the task. The template ends in
    # kl_and_entropy. Only the last occurrence is replaced, since the run's name may contain it.
    name = target.plan.fill_run_template(
        template, target.spec, experiment=target.spec.run_id, step=target.step, val="withval" if with_val else "noval"
    )
    active_terms = {"kl": config.actor.use_kl_loss, "entropy": config.actor.entropy_coeff != 0}
    term_label = "_and_".join(term for term, is_on in active_terms.items() if is_on) or "task_alone"
    log_path = target.plan.output / "logs" / term_label.join(name.rsplit("kl_and_entropy", 1))
    check_path(target.plan.output, log_path)
    # Checked first, since an analysis takes minutes.
    for folder in (run_dir, log_path.parent):
        outputs.check_writable(folder, "RUN", "a probe adds rows and a log to the study, so copy it, and type the copy")
    trainer = _restore_trainer(target, effective_settings)
    print_line(
        console, f"{target.spec.run_id} restored from {target.path}, after step {target.step}; nothing is trained"
    )
    texts = [f"probe of {target.spec.run_id}, step {target.step}"]
    changes = format_changes(run_config, config, settings)
    if changes is not None:
        texts.append(f"settings changed from the run: {changes}")
    try:
        if with_val:
            print_line(console, f"Playing {len(trainer.val_levels)} validation levels, sampled and greedy ...")
            with show_phases(console, "validation levels"):
                evaluations = {mode: trainer.evaluate("val", mode) for mode in ("sampled", "greedy")}
            texts += [
                f"validation, {mode}: success {evaluation.success:.3f}, mean score {evaluation.score:.3f}"
                for mode, evaluation in evaluations.items()
            ]
        sizes = config.trainer.gradient_analysis_env_groups, config.trainer.gradient_analysis_group_size
        print_line(console, f"Playing {sizes[0]} x {sizes[1]} episodes and measuring their gradients ...")
        with show_phases(console, "gradients"):
            lines = analyze_gradients(trainer, episodes=[], source="probe", overrides=changes)
    finally:
        trainer.close()  # also after an error, to free the memory of the sampling engine
    # A new probe of a step replaces all lines of an earlier probe of that step.
    other_lines = [line for line in read_lines(run_dir / PROBES_FILE).records if line.get("step") != target.step]
    write_lines(run_dir / PROBES_FILE, [*other_lines, *lines])
    outputs.write_tables(target.plan.folder)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(log_path) as temp_path, temp_path.open("w", encoding="utf-8") as file:
        for place in (console, make_console(file=file)):
            for text in texts:
                print_line(place, text)
            for line in lines:
                _print_analysis(place, line)
    print_line(console, f"Rows: {target.plan.folder}/gradients.parquet (source probe). Log: {log_path}")
    print_line(console, f"Figures: {format_command('plot-gradients', target.plan.folder, '--source', 'probe')}")
    print_line(console, f"To add them to the report: {format_command('report', target.plan.folder)}")


def _print_analysis(console: Console, line: Mapping[str, Any]) -> None:
    """Print the table of one analyzed batch: per bucket, the task's gradient, and the norms of the regularizers'."""
    if not line["groups"]:
        text = "the filter kept none of the {source_env_groups} groups of {source_group_size} episodes"
        print_line(console, text.format(**line["rows"][0]))
        return
    print_line(console, f"gradients {'before the filter' if line['prefilter'] else 'of what the filter kept'}")
    rows = {(row["bucket"], row["component"]): row for row in line["rows"]}
    cells = []
    for bucket in dict.fromkeys(row["bucket"] for row in line["rows"]):  # in the order of the analysis
        task = rows[bucket, "task"]
        task_cells = [_format_number(task[column]) for column in ("reward_std_mean", "norm", "mean_norm", "snr")]
        interval = f"{_format_number(task['snr_low'])} to {_format_number(task['snr_high'])}"
        norms = [_format_number(rows.get((bucket, name), {}).get("mean_norm")) for name in ("entropy", "kl")]
        cells.append([bucket, *task_cells, interval, *norms])
    headings = ("bucket", "reward std", "task norm", "of mean", "signal/noise", "95 %", "entropy", "kl")
    print_table(console, headings, cells)


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
