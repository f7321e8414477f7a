"""A run restored from its checkpoint in this process, to be questioned or analysed. Nothing is trained."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from trainable.config.run_config import ConfigError, RunConfig, apply_overrides
from trainable.config.setting_types import format_value
from trainable.diagnostics.gradient_analysis import analyse_gradients
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import VALUES_FILE, CheckpointError, iter_checkpoints, read_checkpoint
from trainable.runs.run_files import PROBES_FILE, STATE_FOLDER, read_json_lines
from tune_study.folder import outputs
from tune_study.folder.study_file import plan_from_folder
from tune_study.host.console import print_line
from tune_study.placement.models import check_model
from tune_study.placement.resources import check_sampler
from tune_study.plan.study_plan import PlanError, RunSpec, StudyPlan, flatten_settings, make_template_values

ProbeSettings = Mapping[str, object]
NO_SETTINGS: ProbeSettings = MappingProxyType({})
ALLOWED_PREFIXES = (
    "env.", "filter.", "rollout.", "trainer.", "actor.use_kl_loss", "actor.kl_loss", "actor.entropy_coeff",
    "actor.ppo_micro_batch_size_per_gpu",
)  # fmt: skip
"""What a probe may set otherwise than the run did: all else would make another trainer of the checkpoint."""


@dataclass(frozen=True)
class ProbeTarget:
    """What is probed: a run of a study, and one of its checkpoints."""

    plan: StudyPlan
    spec: RunSpec
    step: int
    path: Path


def restore(
    run: Path | str, trial: str | None = None, step: int | None = None, *, path: Path | str | None = None,
    settings: ProbeSettings = NO_SETTINGS,
) -> PPOTrainer:  # fmt: skip
    """A run's trainer as its checkpoint left it.

    `trainer.roll_out` and `trainer.evaluate` play, `trainable.diagnostics.questions` reads transcripts, log-probs,
    entropies and values; a `trainer.step()` would train on, in this process alone, and write nothing.
    `trainer.release()` gives back what its sampling engine holds.

    Args:
        run: the study's folder, results/<run>.
        trial: run_id or arm; may be left out where there is one run.
        step: of the checkpoint; the newest if it is left out.
        path: the very folder of the checkpoint, instead of `step`.
        settings: dotted fields to set otherwise than in the run, such as {"trainer.device": "cpu"}.

    Raises PlanError (a ValueError) that says what there is, for a name, a step or a folder that cannot be used.
    """
    return _restore_trainer(find_target(run, trial, step, path), settings)


def find_checkpoint_path(root: Path | None, step: int | None, path: Path | None) -> Path | None:
    """The checkpoint's folder: `path`, or that of `step` (or the newest) below `root`; None for the run's own."""
    if path is not None or root is None:
        return path
    root = Path(os.path.abspath(os.path.expanduser(root)))
    steps = [number for number, _ in iter_checkpoints(root)]
    if not steps:
        raise PlanError(
            f"{format_value(str(root), 1000)} holds no folder global_step_<N>: type --checkpoint-root of a run."
        )
    return root / f"global_step_{max(steps) if step is None else step}"


def find_target(
    run: Path | str, trial: str | None, step: int | None, path: Path | str | None, algo: str | None = None
) -> ProbeTarget:
    """The run and the checkpoint that are meant; PlanError that lists what there is. algo: the arm, of its study."""
    plan = plan_from_folder(Path(run))
    if plan.model is None:
        raise PlanError(
            f"Study {plan.study.name} fine-tunes no language model, and the gradients of its runs are measured while "
            f"they train (--set diagnostics=True): type the folder of another study."
        )
    if algo is not None and (trial is not None or plan.study.axis.option != "--algo"):
        reason = "--trial names the run already" if trial else f"it does not belong to study {plan.study.name}"
        raise PlanError(f"--algo cannot be used here ({reason}): type --trial and the name of a run.")
    name = algo if trial is None else trial
    if path is not None:
        checkpoint_step, checkpoint_dir = _parse_checkpoint_path(path)
        return ProbeTarget(
            plan,
            _find_checkpoint_run(plan, checkpoint_dir) if name is None else _find_run(plan, name),
            checkpoint_step,
            checkpoint_dir,
        )
    spec = _find_run(plan, name)
    local_checkpoints = {
        **dict(iter_checkpoints(plan.get_run_dir(spec.run_id) / STATE_FOLDER)),
        **dict(iter_checkpoints(plan.output / spec.checkpoint_dir)),
    }
    stored_checkpoints = {} if plan.storage is None else _list_stored_checkpoints(plan, spec)
    steps = sorted({*local_checkpoints, *stored_checkpoints})
    if step is None and steps:
        step = steps[-1]
    if step not in steps:
        available_steps = ", ".join(map(str, steps)) or "none: run the study with --save-freq N"
        step_phrase = "" if step is None else f" of step {step}"
        raise PlanError(f"Run {spec.run_id} has no checkpoint{step_phrase}. There are: {available_steps}.")
    return ProbeTarget(
        plan,
        spec,
        step,
        local_checkpoints[step]
        if step in local_checkpoints
        else _fetch_checkpoint(plan, spec, stored_checkpoints[step]),
    )


def _list_stored_checkpoints(plan: StudyPlan, spec: RunSpec) -> dict[int, str]:
    """The run's checkpoints in the study's storage: step -> path there."""
    from tune_study.folder import storage

    return storage.list_checkpoints(plan.study_uri or "", spec.run_id)


def _fetch_checkpoint(plan: StudyPlan, spec: RunSpec, name: str) -> Path:
    """The folder to which a checkpoint of the study's storage is copied now; PlanError."""
    from tune_study.folder import storage

    kind, _, folder_name = name.partition("/")
    folder = (
        plan.get_run_dir(spec.run_id) / STATE_FOLDER if kind == STATE_FOLDER else plan.output / spec.checkpoint_dir
    ) / folder_name
    storage.fetch_checkpoint(plan.study_uri or "", spec.run_id, name, folder)
    return folder


def _parse_checkpoint_path(path: Path | str) -> tuple[int, Path]:
    """Step and folder of the checkpoint at `path`; PlanError where it is none."""
    checkpoint_dir = Path(os.path.abspath(os.path.expanduser(path)))
    matches = [(number, place) for number, place in iter_checkpoints(checkpoint_dir.parent) if place == checkpoint_dir]
    if not matches or not checkpoint_dir.is_dir():
        raise PlanError(f"{format_value(str(path), 1000)} is no checkpoint: type a folder global_step_<N> that exists.")
    return matches[0]


def _find_checkpoint_run(plan: StudyPlan, checkpoint_dir: Path) -> RunSpec:
    """The run whose settings the checkpoint at `place` holds; PlanError where the study has none with these."""
    try:
        config = RunConfig.model_validate(
            json.loads((checkpoint_dir / VALUES_FILE).read_text(encoding="utf-8")).get("settings")
        )
    except (OSError, ValueError, AttributeError) as error:
        raise PlanError(f"{checkpoint_dir} does not say of which run it is ({error}): type --trial as well.") from None
    run_identity = (config.compute_hash(), config.seed)
    for spec in plan.runs:
        if (spec.config.compute_hash(), spec.config.seed) == run_identity:
            return spec
    raise PlanError(f"{checkpoint_dir} was written by no run of {plan.folder}: type the folder of its own study.")


def _find_run(plan: StudyPlan, trial: str | None) -> RunSpec:
    matches = [spec for spec in plan.runs if trial in (None, spec.run_id)] or [
        spec for spec in plan.runs if spec.arm == trial
    ]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(spec.run_id for spec in plan.runs)
    problem = "There are several runs" if trial is None or matches else f"There is no run `{format_value(trial)}`"
    raise PlanError(f"{problem} in {plan.folder}: type --trial and one of {names}.")


def _restore_trainer(target: ProbeTarget, settings: ProbeSettings) -> PPOTrainer:
    """The restored trainer; PlanError for a checkpoint of another run, or one that is damaged."""
    check_model(target.spec.ppo_config.model.path, os.environ)
    config = apply_overrides(target.spec.ppo_config, settings)
    check_sampler(config)
    disallowed_names = [name for name in settings if not name.startswith(ALLOWED_PREFIXES)]
    if disallowed_names:
        raise PlanError(
            f"`{disallowed_names[0]}` cannot be set for a probe: another trainer would be made of the checkpoint. "
            f"What can be set: env, filter, rollout, trainer, the actor's KL loss and entropy_coeff."
        )
    try:
        tensors, values = read_checkpoint(target.path)
        saved_config = RunConfig.model_validate(values.get("settings"))
        if (saved_config.compute_hash(), saved_config.seed) != (
            target.spec.ppo_config.compute_hash(),
            target.spec.ppo_config.seed,
        ):
            raise CheckpointError(f"{target.path} was written by another run than {target.spec.run_id}.")
        trainer = PPOTrainer(config, diagnostics=DIAGNOSTICS)
        trainer.load_state(tensors, values)
    except (CheckpointError, ConfigError, ValueError, ArithmeticError, AssertionError, RuntimeError) as error:
        # torch raises the last two for a device that is not there.
        raise PlanError(f"The checkpoint cannot be used: {error}") from None
    return trainer


def make_probe_settings(config: RunConfig, settings: ProbeSettings) -> dict[str, object]:
    """What a probe sets beside the run's own settings: KL and entropy on, 128 x 16 episodes unless the run has its own.

    The coefficients are the published 0.001 where the run had none: a gradient of a term scales with its coefficient.
    PlanError where the size of its batch is set to null: a probe has no batch of a training step to fall back on.
    """
    trainer = config.trainer
    default_settings: dict[str, object] = {
        "trainer.gradient_analysis_mode": True,
        "trainer.gradient_analysis_log_prefilter": True,
        "trainer.gradient_analysis_env_groups": trainer.gradient_analysis_env_groups or 128,
        "trainer.gradient_analysis_group_size": trainer.gradient_analysis_group_size or 16,
        "actor.entropy_coeff": config.actor.entropy_coeff or 0.001,
    }
    if not config.actor.use_kl_loss:
        default_settings |= {"actor.use_kl_loss": True, "actor.kl_loss_type": "low_var_kl", "actor.kl_loss_coef": 0.001}
    for name in ("trainer.gradient_analysis_env_groups", "trainer.gradient_analysis_group_size"):
        if name in settings and str(settings[name]).strip().lower() in ("null", "none"):
            raise PlanError(
                f"{name}=null has no meaning for a probe, which plays a batch of its own: leave it out for "
                f"{default_settings[name]}, or type a number."
            )
    return {**default_settings, **settings}


def format_changes(run_config: RunConfig, config: RunConfig, settings: ProbeSettings) -> str | None:
    """What `settings` make different from the run's own settings, as `name=value, ...`; None where nothing."""
    before, after = (flatten_settings(each.model_dump(mode="json")) for each in (run_config, config))
    changed_names = [name for name in settings if before.get(name) != after.get(name)]
    return ", ".join(f"{name}={json.dumps(after[name])}" for name in changed_names) or None


def probe(target: ProbeTarget, settings: ProbeSettings, with_val: bool, console: Console) -> None:
    """Analyse the gradients of one checkpoint, add the rows to the study's tables, and print them.

    PlanError, and nothing is written, where the filter keeps nothing and the batch before it is not analysed.
    """
    run_config, effective_settings = target.spec.ppo_config, make_probe_settings(target.spec.ppo_config, settings)
    config = apply_overrides(run_config, effective_settings)
    run_dir, log_path = target.plan.get_run_dir(target.spec.run_id), _make_log_path(target, with_val, config)
    _check_writable(run_dir, log_path)
    trainer = _restore_trainer(target, effective_settings)
    print_line(
        console, f"{target.spec.run_id} restored from {target.path}, after step {target.step}; nothing is trained"
    )
    renderables: list[Any] = [f"probe of {target.spec.run_id}, step {target.step}"]
    changes = format_changes(run_config, config, settings)
    if changes is not None:
        renderables.append(f"set otherwise than in the run: {changes}")
    try:
        if with_val:
            renderables += _validate(trainer, console)
        lines = _analyse(trainer, changes, console)
    finally:
        trainer.close()
    # The last probe of a step counts, whole: what an earlier one said of the step goes.
    other_lines = [line for line in read_json_lines(run_dir / PROBES_FILE) if line.get("step") != target.step]
    outputs.write_text(run_dir / PROBES_FILE, "".join(json.dumps(line) + "\n" for line in [*other_lines, *lines]))
    outputs.write_tables(target.plan.folder)
    renderables += [
        _make_table(line) if line["groups"] else f"the filter kept none of {_describe_groups(line)}" for line in lines
    ]
    Console(file=console.file, width=max(console.width, 100)).print(Group(*renderables))
    _write_log(log_path, renderables)
    print_line(console, f"Rows: {target.plan.folder}/gradients.parquet (source probe). Log: {log_path}")
    print_line(console, f"Pictures: python -m tune_study plot-gradients {target.plan.folder} --source probe")
    print_line(console, f"The report has them after: python -m tune_study report {target.plan.folder}")


def _validate(trainer: PPOTrainer, console: Console) -> list[str]:
    """Play the validation levels, and say how that went."""
    print_line(console, f"Playing {len(trainer.val_levels)} validation levels, sampled and greedy ...")
    evaluations = {mode: trainer.evaluate("val", mode) for mode in ("sampled", "greedy")}
    return [
        f"validation, {mode}: success {each.success:.3f}, mean score {each.score:.3f}"
        for mode, each in evaluations.items()
    ]


def _analyse(trainer: PPOTrainer, changes: str | None, console: Console) -> list[dict[str, Any]]:
    """The lines of the analysis; PlanError where no batch has a group."""
    settings = trainer.config.trainer
    n_groups, group_size = settings.gradient_analysis_env_groups, settings.gradient_analysis_group_size
    print_line(console, f"Playing {n_groups} x {group_size} episodes and measuring their gradients ...")
    lines = analyse_gradients(trainer, [], source="probe", overrides=changes)
    if not any(line["groups"] for line in lines):
        raise PlanError(
            f"The filter kept none of {_describe_groups(lines[-1])}, so that nothing could be measured and nothing is written: "
            "leave --set trainer.gradient_analysis_log_prefilter=False out, which measures the batch before the "
            "filter, or type more groups, like --set trainer.gradient_analysis_env_groups=256."
        )
    return lines


def _describe_groups(line: Mapping[str, Any]) -> str:
    """The batch of a line, in words."""
    row = line["rows"][0]
    return f"the {row['source_env_groups']} groups of {row['source_group_size']} episodes"


def _check_writable(run_dir: Path, log_path: Path) -> None:
    """PlanError unless a probe's rows and its log can be written: measuring takes minutes."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"{log_path.parent} cannot be made ({error.strerror}): make room for the probe's log there."
        ) from None
    for folder in (run_dir, log_path.parent):
        if not os.access(folder, os.W_OK):
            raise PlanError(f"{folder} cannot be written: a probe adds its rows and its log to the study.")


def _make_log_path(target: ProbeTarget, with_val: bool, config: RunConfig) -> Path:
    """The log's published name, which ends in what is measured beside the task."""
    template_values = make_template_values(
        target.plan.study, target.plan.run, target.spec.arm, target.spec.ppo_config, target.spec.seed
    )
    name = target.plan.study.name_templates.probe_log.format(
        **template_values, experiment=target.spec.run_id, step=target.step, val="withval" if with_val else "noval"
    )
    active_terms = {"kl": config.actor.use_kl_loss, "entropy": config.actor.entropy_coeff != 0}
    term_label = "_and_".join(term for term, is_on in active_terms.items() if is_on) or "task_alone"
    return target.plan.output / "logs" / term_label.join(name.rsplit("kl_and_entropy", 1))


def _write_log(path: Path, renderables: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        Console(file=file, width=140).print(Group(*renderables))


def _make_table(line: Mapping[str, Any]) -> Table:
    """One analysed batch, a row a bucket: the task's gradient, and what the regularisers' are beside it."""
    batch_label = "before the filter" if line["prefilter"] else "of what the filter kept"
    table = Table(title=f"gradients {batch_label}", box=None, title_justify="left", padding=(0, 1, 0, 0))
    for header in ("bucket", "reward std", "task norm", "of mean", "signal/noise", "95 %", "entropy", "kl"):
        table.add_column(header, justify="left" if header == "bucket" else "right", no_wrap=True)
    rows = {(row["bucket"], row["component"]): row for row in line["rows"]}
    for bucket in dict.fromkeys(row["bucket"] for row in line["rows"]):
        task = rows[bucket, "task"]
        interval = f"{_format_number(task['snr_low'])} to {_format_number(task['snr_high'])}"
        regulariser_norms = [
            _format_number(rows.get((bucket, name), {}).get("mean_norm")) for name in ("entropy", "kl")
        ]
        table.add_row(
            bucket, _format_number(task["reward_std_mean"]), _format_number(task["norm"]), _format_number(task["mean_norm"]),
            _format_number(task["snr"]), interval, *regulariser_norms,
        )  # fmt: skip
    return table


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
