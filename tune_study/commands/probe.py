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

from trainable.config.run_config import ConfigError, RunConfig, with_overrides
from trainable.config.setting_types import shown
from trainable.diagnostics.gradient_analysis import analyse
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import VALUES, CheckpointError, numbered, read_checkpoint
from trainable.runs.run_files import PROBES, STATE, read_lines
from tune_study.folder import outputs
from tune_study.folder.study_file import plan_from_folder
from tune_study.host.console import say
from tune_study.placement.models import check_model
from tune_study.placement.resources import check_sampler
from tune_study.plan.study_plan import PlanError, RunSpec, StudyPlan, flat_settings, template_words

ProbeSettings = Mapping[str, object]
NOTHING: ProbeSettings = MappingProxyType({})
SAME_TRAINER = (
    "env.", "filter.", "rollout.", "trainer.", "actor.use_kl_loss", "actor.kl_loss", "actor.entropy_coeff",
    "actor.ppo_micro_batch_size_per_gpu",
)  # fmt: skip
"""What a probe may set otherwise than the run did: all else would make another trainer of the checkpoint."""


@dataclass(frozen=True)
class Target:
    """What is probed: a run of a study, and one of its checkpoints."""

    plan: StudyPlan
    spec: RunSpec
    step: int
    path: Path


def restore(
    run: Path | str, trial: str | None = None, step: int | None = None, *, path: Path | str | None = None,
    settings: ProbeSettings = NOTHING,
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
    return _trainer(find(run, trial, step, path), settings)


def checkpoint_path(root: Path | None, step: int | None, path: Path | None) -> Path | None:
    """The checkpoint's folder: `path`, or that of `step` (or the newest) below `root`; None for the run's own."""
    if path is not None or root is None:
        return path
    root = Path(os.path.abspath(os.path.expanduser(root)))
    steps = [number for number, _ in numbered(root)]
    if not steps:
        raise PlanError(f"{shown(str(root), 1000)} holds no folder global_step_<N>: type --checkpoint-root of a run.")
    return root / f"global_step_{max(steps) if step is None else step}"


def find(
    run: Path | str, trial: str | None, step: int | None, path: Path | str | None, algo: str | None = None
) -> Target:
    """The run and the checkpoint that are meant; PlanError that lists what there is. algo: the arm, of its study."""
    plan = plan_from_folder(Path(run))
    if plan.model is None:
        raise PlanError(
            f"Study {plan.study.name} fine-tunes no language model, and the gradients of its runs are measured while "
            f"they train (--set diagnostics=True): type the folder of another study."
        )
    if algo is not None and (trial is not None or plan.study.axis.option != "--algo"):
        why = "--trial names the run already" if trial else f"it does not belong to study {plan.study.name}"
        raise PlanError(f"--algo cannot be used here ({why}): type --trial and the name of a run.")
    name = algo if trial is None else trial
    if path is not None:
        found, place = _checkpoint_at(path)
        return Target(plan, _run_of(plan, place) if name is None else _find_run(plan, name), found, place)
    spec = _find_run(plan, name)
    kept = {**dict(numbered(plan.run_dir(spec.run_id) / STATE)), **dict(numbered(plan.output / spec.checkpoints))}
    stored = {} if plan.storage is None else _stored(plan, spec)
    steps = sorted({*kept, *stored})
    if step is None and steps:
        step = steps[-1]
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none: run the study with --save-freq N"
        asked = "" if step is None else f" of step {step}"
        raise PlanError(f"Run {spec.run_id} has no checkpoint{asked}. There are: {there}.")
    return Target(plan, spec, step, kept[step] if step in kept else _fetched(plan, spec, stored[step]))


def _stored(plan: StudyPlan, spec: RunSpec) -> dict[int, str]:
    """The run's checkpoints in the study's storage: step -> path there."""
    from tune_study.folder import storage

    return storage.checkpoints(plan.stored or "", spec.run_id)


def _fetched(plan: StudyPlan, spec: RunSpec, name: str) -> Path:
    """The folder to which a checkpoint of the study's storage is copied now; PlanError."""
    from tune_study.folder import storage

    kind, _, last = name.partition("/")
    folder = (plan.run_dir(spec.run_id) / STATE if kind == STATE else plan.output / spec.checkpoints) / last
    storage.fetch_checkpoint(plan.stored or "", spec.run_id, name, folder)
    return folder


def _checkpoint_at(path: Path | str) -> tuple[int, Path]:
    """Step and folder of the checkpoint at `path`; PlanError where it is none."""
    wanted = Path(os.path.abspath(os.path.expanduser(path)))
    found = [(number, place) for number, place in numbered(wanted.parent) if place == wanted]
    if not found or not wanted.is_dir():
        raise PlanError(f"{shown(str(path), 1000)} is no checkpoint: type a folder global_step_<N> that exists.")
    return found[0]


def _run_of(plan: StudyPlan, place: Path) -> RunSpec:
    """The run whose settings the checkpoint at `place` holds; PlanError where the study has none with these."""
    try:
        config = RunConfig.model_validate(json.loads((place / VALUES).read_text(encoding="utf-8")).get("settings"))
    except (OSError, ValueError, AttributeError) as error:
        raise PlanError(f"{place} does not say of which run it is ({error}): type --trial as well.") from None
    named = (config.config_hash(), config.seed)
    for spec in plan.runs:
        if (spec.config.config_hash(), spec.config.seed) == named:
            return spec
    raise PlanError(f"{place} was written by no run of {plan.folder}: type the folder of its own study.")


def _find_run(plan: StudyPlan, trial: str | None) -> RunSpec:
    found = [spec for spec in plan.runs if trial in (None, spec.run_id)] or [
        spec for spec in plan.runs if spec.arm == trial
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(spec.run_id for spec in plan.runs)
    what = "There are several runs" if trial is None or found else f"There is no run `{shown(trial)}`"
    raise PlanError(f"{what} in {plan.folder}: type --trial and one of {names}.")


def _trainer(target: Target, settings: ProbeSettings) -> PPOTrainer:
    """The restored trainer; PlanError for a checkpoint of another run, or one that is damaged."""
    check_model(target.spec.ppo.model.path, os.environ)
    config = with_overrides(target.spec.ppo, settings)
    check_sampler(config)
    odd = [name for name in settings if not name.startswith(SAME_TRAINER)]
    if odd:
        raise PlanError(
            f"`{odd[0]}` cannot be set for a probe: another trainer would be made of the checkpoint. "
            f"What can be set: env, filter, rollout, trainer, the actor's KL loss and entropy_coeff."
        )
    try:
        tensors, values = read_checkpoint(target.path)
        theirs = RunConfig.model_validate(values.get("settings"))
        if (theirs.config_hash(), theirs.seed) != (target.spec.ppo.config_hash(), target.spec.ppo.seed):
            raise CheckpointError(f"{target.path} was written by another run than {target.spec.run_id}.")
        trainer = PPOTrainer(config, diagnostics=DIAGNOSTICS)
        trainer.load_state(tensors, values)
    except (CheckpointError, ConfigError, ValueError, ArithmeticError, AssertionError, RuntimeError) as error:
        # torch raises the last two for a device that is not there.
        raise PlanError(f"The checkpoint cannot be used: {error}") from None
    return trainer


def probe_settings(config: RunConfig, settings: ProbeSettings) -> dict[str, object]:
    """What a probe sets beside the run's own settings: KL and entropy on, 128 x 16 episodes unless the run has its own.

    The coefficients are the published 0.001 where the run had none: a gradient of a term scales with its coefficient.
    PlanError where the size of its batch is set to null: a probe has no batch of a training step to fall back on.
    """
    trainer = config.trainer
    found: dict[str, object] = {
        "trainer.gradient_analysis_mode": True,
        "trainer.gradient_analysis_log_prefilter": True,
        "trainer.gradient_analysis_env_groups": trainer.gradient_analysis_env_groups or 128,
        "trainer.gradient_analysis_group_size": trainer.gradient_analysis_group_size or 16,
        "actor.entropy_coeff": config.actor.entropy_coeff or 0.001,
    }
    if not config.actor.use_kl_loss:
        found |= {"actor.use_kl_loss": True, "actor.kl_loss_type": "low_var_kl", "actor.kl_loss_coef": 0.001}
    for name in ("trainer.gradient_analysis_env_groups", "trainer.gradient_analysis_group_size"):
        if name in settings and str(settings[name]).strip().lower() in ("null", "none"):
            raise PlanError(
                f"{name}=null has no meaning for a probe, which plays a batch of its own: leave it out for "
                f"{found[name]}, or type a number."
            )
    return {**found, **settings}


def set_otherwise(own: RunConfig, config: RunConfig, settings: ProbeSettings) -> str | None:
    """What `settings` make different from the run's own settings, as `name=value, ...`; None where nothing."""
    before, after = (flat_settings(each.model_dump(mode="json")) for each in (own, config))
    changed = [name for name in settings if before.get(name) != after.get(name)]
    return ", ".join(f"{name}={json.dumps(after[name])}" for name in changed) or None


def probe(target: Target, settings: ProbeSettings, with_val: bool, console: Console) -> None:
    """Analyse the gradients of one checkpoint, add the rows to the study's tables, and print them.

    PlanError, and nothing is written, where the filter keeps nothing and the batch before it is not analysed.
    """
    own, wanted = target.spec.ppo, probe_settings(target.spec.ppo, settings)
    config = with_overrides(own, wanted)
    run_dir, log = target.plan.run_dir(target.spec.run_id), _log(target, with_val, config)
    _check_places(run_dir, log)
    trainer = _trainer(target, wanted)
    say(console, f"{target.spec.run_id} restored from {target.path}, after step {target.step}; nothing is trained")
    parts: list[Any] = [f"probe of {target.spec.run_id}, step {target.step}"]
    overrides = set_otherwise(own, config, settings)
    if overrides is not None:
        parts.append(f"set otherwise than in the run: {overrides}")
    try:
        if with_val:
            parts += _validate(trainer, console)
        lines = _analyse(trainer, overrides, console)
    finally:
        trainer.release()
    # The last probe of a step counts, whole: what an earlier one said of the step goes.
    others = [line for line in read_lines(run_dir / PROBES) if line.get("step") != target.step]
    outputs.write_text(run_dir / PROBES, "".join(json.dumps(line) + "\n" for line in [*others, *lines]))
    outputs.write_tables(target.plan.folder)
    parts += [_table(line) if line["groups"] else f"the filter kept none of {_groups(line)}" for line in lines]
    Console(file=console.file, width=max(console.width, 100)).print(Group(*parts))
    _write_log(log, parts)
    say(console, f"Rows: {target.plan.folder}/gradients.parquet (source probe). Log: {log}")
    say(console, f"Pictures: python -m tune_study plot-gradients {target.plan.folder} --source probe")
    say(console, f"The report has them after: python -m tune_study report {target.plan.folder}")


def _validate(trainer: PPOTrainer, console: Console) -> list[str]:
    """Play the validation levels, and say how that went."""
    say(console, f"Playing {len(trainer.val_levels)} validation levels, sampled and greedy ...")
    found = {mode: trainer.evaluate("val", mode) for mode in ("sampled", "greedy")}
    return [
        f"validation, {mode}: success {each.success:.3f}, mean score {each.score:.3f}" for mode, each in found.items()
    ]


def _analyse(trainer: PPOTrainer, overrides: str | None, console: Console) -> list[dict[str, Any]]:
    """The lines of the analysis; PlanError where no batch has a group."""
    settings = trainer.config.trainer
    groups, size = settings.gradient_analysis_env_groups, settings.gradient_analysis_group_size
    say(console, f"Playing {groups} x {size} episodes and measuring their gradients ...")
    lines = analyse(trainer, [], source="probe", overrides=overrides)
    if not any(line["groups"] for line in lines):
        raise PlanError(
            f"The filter kept none of {_groups(lines[-1])}, so that nothing could be measured and nothing is written: "
            "leave --set trainer.gradient_analysis_log_prefilter=False out, which measures the batch before the "
            "filter, or type more groups, like --set trainer.gradient_analysis_env_groups=256."
        )
    return lines


def _groups(line: Mapping[str, Any]) -> str:
    """The batch of a line, in words."""
    row = line["rows"][0]
    return f"the {row['source_env_groups']} groups of {row['source_group_size']} episodes"


def _check_places(run_dir: Path, log: Path) -> None:
    """PlanError unless a probe's rows and its log can be written: measuring takes minutes."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"{log.parent} cannot be made ({error.strerror}): make room for the probe's log there."
        ) from None
    for folder in (run_dir, log.parent):
        if not os.access(folder, os.W_OK):
            raise PlanError(f"{folder} cannot be written: a probe adds its rows and its log to the study.")


def _log(target: Target, with_val: bool, config: RunConfig) -> Path:
    """The log's published name, which ends in what is measured beside the task."""
    words = template_words(target.plan.study, target.plan.run, target.spec.arm, target.spec.ppo, target.spec.seed)
    name = target.plan.study.names.probe_log.format(
        **words, experiment=target.spec.run_id, step=target.step, val="withval" if with_val else "noval"
    )
    on = {"kl": config.actor.use_kl_loss, "entropy": config.actor.entropy_coeff != 0}
    terms = "_and_".join(term for term, is_on in on.items() if is_on) or "task_alone"
    return target.plan.output / "logs" / terms.join(name.rsplit("kl_and_entropy", 1))


def _write_log(path: Path, parts: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        Console(file=file, width=140).print(Group(*parts))


def _table(line: Mapping[str, Any]) -> Table:
    """One analysed batch, a row a bucket: the task's gradient, and what the regularisers' are beside it."""
    which = "before the filter" if line["prefilter"] else "of what the filter kept"
    table = Table(title=f"gradients {which}", box=None, title_justify="left", padding=(0, 1, 0, 0))
    for head in ("bucket", "reward std", "task norm", "of mean", "signal/noise", "95 %", "entropy", "kl"):
        table.add_column(head, justify="left" if head == "bucket" else "right", no_wrap=True)
    rows = {(row["bucket"], row["component"]): row for row in line["rows"]}
    for bucket in dict.fromkeys(row["bucket"] for row in line["rows"]):
        task = rows[bucket, "task"]
        interval = f"{_short(task['snr_low'])} to {_short(task['snr_high'])}"
        others = [_short(rows.get((bucket, name), {}).get("mean_norm")) for name in ("entropy", "kl")]
        table.add_row(
            bucket, _short(task["reward_std_mean"]), _short(task["norm"]), _short(task["mean_norm"]),
            _short(task["snr"]), interval, *others,
        )  # fmt: skip
    return table


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
