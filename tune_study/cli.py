"""The command line. What needs Ray is imported where it is used, so that every other command starts at once."""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from search_spaces import STUDIES, smoke
from search_spaces.study import Study
from trainable.config import ConfigError
from trainable.setting_types import shown
from tune_study import continuing, describe, outputs, places, resources
from tune_study import options as opt
from tune_study.models import absolute_model
from tune_study.plan import PlanError, collect_overrides, expand, find_study, make_plan, parse_bool, parse_values
from tune_study.run import write_results
from tune_study.starting import Asked, start
from tune_study.summary import DEFAULT_SKIPPED, parse_skipped
from tune_study.terminal import protect_output

app = typer.Typer(
    name="tune_study",
    help="Run a study of RL fine-tuning: train every arm, stop what collapses, report what was found.",
    epilog="\b\nExample: python -m tune_study run kl --preset laptop",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

REPLAY_EXAMPLE = (
    "Example: python -m tune_study replay-stoppers results/kl_sweep_sokoban-tiny --set early_stop.variance_ratio=0.2"
)
PROBE_EXAMPLE = "Example: python -m tune_study probe results/gradient_analysis_sokoban_sokoban-tiny --with-val"
PICTURES_EXAMPLE = (
    "Example: python -m tune_study plot-gradients results/gradient_analysis_sokoban_sokoban-tiny --step 1,51,101"
)
RUN_EXAMPLE = "Example: python -m tune_study run kl --kl-values 0,0.01,0.1 --steps 60 --seeds 3 --output out"


def main() -> None:
    """Entry point of `python -m tune_study` and of the command `tune-study`."""
    protect_output()
    app(prog_name="python -m tune_study" if Path(sys.argv[0]).name == "__main__.py" else None)


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Bad input becomes one paragraph on stderr and exit code 2."""

    @functools.wraps(command)
    def checked(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ConfigError, PlanError) as error:
            typer.echo(f"tune_study: {error}", err=True)
            raise typer.Exit(2) from None

    return checked


@app.command("list", epilog="\b\nExample: python -m tune_study list")
def list_studies() -> None:
    """List the studies: question, axis, and grid of each preset."""
    describe.print_studies(Console(), list(STUDIES.values()))


@app.command("settings", epilog="\b\nExample: python -m tune_study settings | grep kl_")
def settings() -> None:
    """List every setting that --set takes: default, allowed values, meaning."""
    describe.print_settings(Console())


@app.command("run", epilog=f"\b\n{RUN_EXAMPLE}")
@plain_errors
def run(
    study: opt.StudyName,
    preset: opt.Preset = None,
    model: opt.Model = None,
    steps: opt.Steps = None,
    kl_values: opt.KLValues = None,
    entropy_values: opt.EntropyValues = None,
    rollout_filter_value: opt.FilterValues = None,
    rollout_filter_include_zero: opt.IncludeZero = None,
    algo: opt.Algo = None,
    arms: opt.Arms = None,
    groups: opt.Groups = None,
    kl_type: opt.KLType = None,
    rollout_filter_strategy: opt.FilterStrategy = None,
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None,
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None,
    gpus: opt.Gpus = None,
    gpus_per_exp: opt.GpusPerExp = None,
    ray_num_cpus: opt.RayNumCpus = None,
    gpu_memory_utilization: opt.GpuMemory = None,
    gpu_memory_gib: opt.GpuMemoryGib = None,
    save_freq: opt.SaveFreq = None,
    seeds: opt.Seeds = None,
    assignments: opt.Assignments = None,
    output: opt.Output = Path(),
    extend: opt.Extend = False,
    max_concurrent: opt.MaxConcurrent = None,
    skip_statuses: opt.SkipStatuses = DEFAULT_SKIPPED,
    dry_run: opt.DryRun = False,
    wandb: opt.Wandb = None,
    address: opt.Address = None,
    storage: opt.Storage = None,
) -> None:
    """Run a study, or go on with it where the output folder holds it already."""
    chosen = find_study(study, kl_type)
    typed = {
        "trainer.total_training_steps": steps,
        "model.path": model,
        "trainer.n_gpus_per_node": gpus_per_exp,
        "trainer.ray_num_cpus": ray_num_cpus,
        "rollout.gpu_memory_utilization": gpu_memory_utilization,
        "trainer.save_freq": save_freq,
        "actor.ppo_micro_batch_size_per_gpu": ppo_micro_batch_size_per_gpu,
        "critic.ppo_micro_batch_size_per_gpu": ppo_micro_batch_size_per_gpu,
        "rollout.log_prob_micro_batch_size_per_gpu": log_prob_micro_batch_size_per_gpu,
        "rollout.ref_log_prob_micro_batch_size_per_gpu": log_prob_micro_batch_size_per_gpu,
        "filter.rollout_filter_include_zero": _include_zero(chosen, rollout_filter_include_zero),
        "filter.rollout_filter_strategy": _strategy(chosen, rollout_filter_strategy),
    }
    axes = {
        "--kl-values": kl_values,
        "--entropy-values": entropy_values,
        "--rollout_filter_value": rollout_filter_value,
        "--algo": algo,
        "--arms": arms,
        "--groups": groups,
    }
    values = _axis_values(chosen, axes)
    given = {name: value for name, value in typed.items() if value is not None}
    overrides = collect_overrides(chosen, given, assignments or [])
    if "model.path" in overrides:
        overrides["model.path"] = absolute_model(str(overrides["model.path"]))
    visible = resources.detect_gpus(os.environ)
    preset, reason = resources.choose_preset(preset, visible)
    plan = make_plan(chosen, preset, reason, overrides, values, seeds, _absolute(output))
    plan = replace(plan, storage=None if storage is None else places.storage_uri(storage))
    plan = places.joined(plan, extend, real=not dry_run)
    asked = Asked(gpus, gpu_memory_gib, max_concurrent, wandb, address, parse_skipped(skip_statuses))
    raise typer.Exit(start(plan, asked, visible, dry_run, Console()))


@app.command("resume", epilog="\b\nExample: python -m tune_study resume results/kl_sweep_sokoban-tiny")
@plain_errors
def resume(
    run: opt.RunPlace,
    gpus: opt.Gpus = None,
    gpus_per_exp: opt.GpusPerExp = None,
    gpu_memory_gib: opt.GpuMemoryGib = None,
    max_concurrent: opt.MaxConcurrent = None,
    skip_statuses: opt.SkipStatuses = DEFAULT_SKIPPED,
    dry_run: opt.DryRun = False,
    wandb: opt.Wandb = None,
    address: opt.Address = None,
) -> None:
    """Go on with the study in RUN: finished runs stay as they are, all others continue."""
    placed = {} if gpus_per_exp is None else {"trainer.n_gpus_per_node": gpus_per_exp}
    plan = places.resumed(run, placed, real=not dry_run)
    asked = Asked(gpus, gpu_memory_gib, max_concurrent, wandb, address, parse_skipped(skip_statuses))
    raise typer.Exit(start(plan, asked, resources.detect_gpus(os.environ), dry_run, Console()))


@app.command("status", epilog="\b\nExample: python -m tune_study status results/kl_sweep_sokoban-tiny")
@plain_errors
def status(run: opt.RunPlace) -> None:
    """Show how far each run in RUN is, and why those that ended did."""
    with places.looked_at(run) as (folder, is_running):
        describe.print_status(Console(), folder, continuing.read_study(folder), is_running)


@app.command("report", epilog="\b\nExample: python -m tune_study report results/kl_sweep_sokoban-tiny")
@plain_errors
def report(run: opt.RunPlace) -> None:
    """Write the tables and the report of RUN again from its rows."""
    folder = _absolute(places.copied(run))
    outputs.check_writable(folder)
    problem = " ".join(filter(None, (write_results(folder, Console()), places.copied_back(folder))))
    if problem:
        typer.echo(problem, err=True)
        raise typer.Exit(1)


@app.command("replay-stoppers", epilog=f"\b\n{REPLAY_EXAMPLE}")
@plain_errors
def replay_stoppers(run: opt.RunPlace, assignments: opt.Thresholds = None) -> None:
    """Apply the stop rules again to the rows of RUN: when each would have fired, and whether it was right to."""
    from tune_study import replay

    with places.looked_at(run) as (folder, _):
        replay.print_replay(Console(), replay.replay_folder(folder, assignments or []))


@app.command("probe", epilog=f"\b\n{PROBE_EXAMPLE}")
@plain_errors
def probe(
    run: opt.RunPlace,
    trial: opt.Trial = None,
    algo: opt.ProbeAlgo = None,
    checkpoint_step: opt.CheckpointStep = None,
    checkpoint_root: opt.CheckpointRoot = None,
    resume_from_path: opt.ResumeFromPath = None,
    with_val: opt.WithVal = False,
    ppo_micro_batch_size_per_gpu: opt.UpdateMicroBatch = None,
    log_prob_micro_batch_size_per_gpu: opt.LogProbMicroBatch = None,
    gpus: opt.Gpus = None,
    gpu_memory_utilization: opt.GpuMemory = None,
    ray_num_cpus: opt.RayNumCpus = None,
    assignments: opt.Assignments = None,
) -> None:
    """Measure the gradients of one checkpoint of a run, in this process; nothing is trained."""
    typed = {
        "actor.ppo_micro_batch_size_per_gpu": ppo_micro_batch_size_per_gpu,
        "rollout.log_prob_micro_batch_size_per_gpu": log_prob_micro_batch_size_per_gpu,
        "rollout.ref_log_prob_micro_batch_size_per_gpu": log_prob_micro_batch_size_per_gpu,
        "rollout.gpu_memory_utilization": gpu_memory_utilization,
        "trainer.ray_num_cpus": ray_num_cpus,
    }
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(resources.parse_gpus(gpus))  # before torch looks
    from tune_study import probe as probing

    path = probing.checkpoint_path(checkpoint_root, checkpoint_step, resume_from_path)
    folder = places.copied(run)
    target = probing.find(folder, trial, checkpoint_step, path, algo)
    given = {name: value for name, value in typed.items() if value is not None}
    settings = collect_overrides(target.plan.study, given, assignments or [], axis_is_free=True)
    probing.probe(target, settings, with_val, Console())
    if problem := places.copied_back(folder):
        typer.echo(problem, err=True)
        raise typer.Exit(1)


@app.command("plot-gradients", epilog=f"\b\n{PICTURES_EXAMPLE}")
@plain_errors
def plot_gradients(
    run: opt.RunPlace,
    list_steps: opt.ListSteps = False,
    steps: opt.AnalysedSteps = None,
    output_dir: opt.Pictures = None,
    trial: opt.Trial = None,
    source: opt.Source = None,
) -> None:
    """Draw the gradients that were measured in RUN: pictures and numbers of each analysed step."""
    folder = places.copied(run)
    from tune_study import gradients

    frames = gradients.read_analyses(folder)
    chosen = gradients.choose(frames, trial, source, gradients.parse_steps(steps or []))
    if list_steps:
        gradients.print_steps(Console(), frames, chosen)
    else:
        gradients.write_pictures(Console(), folder, frames, chosen, output_dir)


@app.command("doctor", epilog="\b\nExample: python -m tune_study doctor --output out")
@plain_errors
def doctor(output: opt.Output = Path(), preset: opt.Preset = None) -> None:
    """Try out what a run needs of this machine, and say what to do about each problem."""
    from tune_study.doctor import diagnose

    raise typer.Exit(diagnose(Console(), _absolute(output), preset, os.environ))


def _axis_values(study: Study, options: dict[str, str | None]) -> tuple[str, ...] | None:
    """The values of the study's own axis option; PlanError for the option of another study."""
    for option, text in options.items():
        if text is not None and option != study.axis.option:
            raise PlanError(
                f"{option} does not belong to study {study.name}, whose axis is {study.axis.setting}: "
                f"type {study.axis.option}."
            )
    own = options[study.axis.option]
    return None if own is None else expand(study, parse_values(own, study.axis.option))


def _include_zero(study: Study, text: str | None) -> bool | None:
    """The truth value of --rollout_filter_include_zero; PlanError in a study whose axis sets it."""
    option = "--rollout_filter_include_zero"
    if text is None:
        return None
    if not study.include_zero_option:
        raise PlanError(
            f"{option} does not belong to study {study.name}, whose axis sets it: type {study.axis.option} "
            f"(the value nofilter is the arm with include_zero True)."
        )
    return parse_bool(text, option)


def _strategy(study: Study, text: str | None) -> str | None:
    """The filter strategy that --rollout_filter_strategy means; PlanError in a study whose documents have none."""
    option = "--rollout_filter_strategy"
    if text is None:
        return None
    if "{strategy}" not in study.run:
        raise PlanError(
            f"{option} does not belong to study {study.name}: type --set filter.rollout_filter_strategy=NAME."
        )
    if text not in smoke.STRATEGIES:
        raise PlanError(f"{option} {shown(text)} is no strategy: type one of {', '.join(smoke.STRATEGIES)}.")
    return smoke.STRATEGIES[text]


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
